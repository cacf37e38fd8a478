"""Thresholds chosen for the outputs, in one shot: `hago.quantize` calls `threshold_proposals`.

One pass of gradients over some samples tells what an error on every edge does to the outputs (`hago.search.gradients`).
Activations get the threshold with the least squared error where every value counts by its squared gradient; every
channel of a weight gets the one with the least expected error of the outputs, by itself, among a few around that of the
least squared error, powers of two where the chip needs them. Searches refine thresholds by the same figures, more
slowly: see `hago.search.point_refinement`.

Thresholds that the chip's estimator gives, those of the least squared error, and the chosen ones are measured on all
samples; those that did not give the gradients say which are taken.

References:
    J. Choi et al., "Towards the limit of network quantization", ICLR 2017, weigh errors by second derivatives (here by
    the Gauss-Newton matrix).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from hago.calibration import named_estimator
from hago.search.gradients import CHUNK_SAMPLES, gradients
from hago.search.objective import SQUARED_ERROR
from hago.search.preparation import Prepared, default_estimator
from hago.search.proposed_thresholds import gradient_weighted, with_least_squares, with_refined
from hago.search.safe_bits import safe_bits
from hago.search.weight_scales import WeightGradients, WeightScales

#: The most samples that are differentiated.
GRADIENT_SAMPLES: Final = 128


def may_choose_thresholds(prepared: Prepared) -> bool:
    """Whether the user left the thresholds to hago: named no other estimator than the chip's, and gave no ranges."""
    default = named_estimator(default_estimator(prepared.hardware))
    return prepared.estimator == default and not prepared.calibration.given.gives_ranges


def samples_of_gradients(samples: int) -> int:
    """How many of the first samples give the gradients: a quarter at least is kept aside, of which there are several.

    >>> samples_of_gradients(64), samples_of_gradients(512), samples_of_gradients(1)
    (48, 128, 1)
    """
    return max(1, min(GRADIENT_SAMPLES, samples - samples // 4))


def threshold_proposals(prepared: Prepared, seed: int = 0) -> Iterator[Prepared]:
    """Copies with other thresholds: the chosen ones, and those of the least squared error where the chip has others.

    Args:
        seed: of the random vectors on the outputs.
    """
    least_squares = with_least_squares(prepared, prepared.calibration)
    bits = safe_bits(least_squares)
    plan = least_squares.resolver(bits)
    samples = samples_of_gradients(prepared.batches.samples)
    probes = WeightGradients.of_probes(least_squares, -(-samples // CHUNK_SAMPLES))
    found = gradients(
        prepared.graph,
        prepared.batches.first(samples),
        prepared.calibration.ranges,
        SQUARED_ERROR.probe,
        lambda edge: (),
        prepared.hardware.known_ops,
        seed,
        chunk=max(1, min(CHUNK_SAMPLES, samples // probes.count)),
        on_constant=probes.add,
    )
    weighted = with_least_squares(least_squares, gradient_weighted(least_squares, found.spectra))
    scales = WeightScales.of(least_squares, plan, bits)
    scales.set_sketches_from_gradients(probes)
    yield with_refined(weighted, scales.thresholds(scales.best_factors_alone(plan)))
    if prepared.estimator != least_squares.estimator:
        yield least_squares
