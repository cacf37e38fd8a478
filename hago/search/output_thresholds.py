"""Thresholds chosen for the outputs, in one shot: `choose_thresholds` of `hago.search.correcting` takes the best of
`OutputThresholds`.

One pass of gradients over some samples tells what an error on every edge does to the outputs (`hago.search.gradients`).
Activations get the threshold with the least squared error where every value counts by its squared gradient; every
channel of a weight gets the one with the least expected error of the outputs, by itself, among a few around that of the
least squared error, powers of two where the chip needs them. Searches whose layers are not corrected refine thresholds
by the same figures, more slowly: see `hago.search.point_refinement`.

Thresholds that the chip's estimator gives, those of the least squared error, and the chosen ones are measured on all
samples; those that did not give the gradients say which are taken. Of few samples, each part is kept aside in turn.

References:
    J. Choi et al., "Towards the limit of network quantization", ICLR 2017, weigh errors by second derivatives (here by
    the Gauss-Newton matrix).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from hago.calibration import named_estimator
from hago.data import Batch
from hago.search.confirmation import FEW, Fold, folds_of
from hago.search.gradients import CHUNK_SAMPLES, GRADIENT_CHUNK, Gradients
from hago.search.objective import Objective
from hago.search.preparation import Prepared, default_estimator
from hago.search.proposed_thresholds import gradient_weighted, with_least_squares, with_refined
from hago.search.safe_bits import safe_bits
from hago.search.sensitivity import gradients_by_part
from hago.search.weight_scales import Products, WeightGradients, WeightScales

#: The most samples that are differentiated.
GRADIENT_SAMPLES: Final = 128


def may_choose_thresholds(prepared: Prepared) -> bool:
    """Whether the user left the thresholds to hago: named no other estimator than the chip's, and gave no ranges."""
    default = named_estimator(default_estimator(prepared.hardware))
    return prepared.estimator == default and not prepared.calibration.given.gives_ranges


def threshold_folds(sizes: Sequence[int]) -> tuple[Fold, ...]:
    """The splits by which thresholds are judged on samples that gave no gradients; none for a single sample.

    Of many samples the first three quarters, at most GRADIENT_SAMPLES, give the gradients, and the others judge. Of
    few, each part judges in turn.

    Args:
        sizes: of the batches.
    """
    total = sum(sizes)
    if total < FEW:
        return folds_of(sizes)
    return (Fold(min(GRADIENT_SAMPLES, total - total // 4), total),)


@dataclass(frozen=True, slots=True)
class OutputThresholds:
    """What proposes other thresholds for a model; made by `measure`.

    Args:
        prepared: the model with the thresholds of the least squared error.
        changes_estimator: whether the chip has others.
        by_part: the gradients of each part of the samples.
        scales: of the weights, without gradients; None where thresholds of weights are not chosen.
        probes, products: the random vectors on the outputs, and their products with the errors of weights.
        is_in_turn: whether each part is kept aside in turn; else there is one, and all folds go by it.
    """

    prepared: Prepared
    changes_estimator: bool
    by_part: Sequence[Gradients]
    scales: WeightScales | None
    probes: WeightGradients
    products: Products
    is_in_turn: bool

    @staticmethod
    def measure(
        prepared: Prepared,
        objective: Objective,
        folds: Sequence[Fold],
        *,
        of_weights: bool,
        losses: int | None = 0,
        seed: int = 0,
    ) -> OutputThresholds:
        """Differentiate the samples that give the gradients, in one pass.

        Args:
            objective: whose curvature says what an error at the outputs costs.
            folds: of `threshold_folds`.
            of_weights: whether thresholds of weights are chosen, too.
            losses: number of choices of each weight, from the most bits down, whose losses are measured; None for all.
            seed: of the random vectors on the outputs.
        """
        least_squares = with_least_squares(prepared, prepared.calibration)
        in_turn = len(folds) > 1
        ends = [(fold.first, fold.last) for fold in folds] if in_turn else [(0, folds[0].first)]
        samples = joined(prepared.batches.first(ends[-1][1]))
        parts = [samples.rows(first, last) for first, last in ends]
        scales, chunk, probes = None, GRADIENT_CHUNK, WeightGradients(len(parts), (), len(parts))
        if of_weights:
            bits = safe_bits(least_squares)
            scales = WeightScales.of(least_squares, least_squares.resolver(bits), bits)
            chunks = max(-(-part.size // CHUNK_SAMPLES) for part in parts)
            probes = WeightGradients.of_probes(least_squares, chunks, len(parts))
            chunk = max(1, min(CHUNK_SAMPLES, min(part.size for part in parts) // probes.share))
        by_part = gradients_by_part(least_squares, objective, seed, parts, chunk, probes, losses)
        products = {} if scales is None else scales.products(probes)
        probes.sums.clear()
        differs = prepared.estimator != least_squares.estimator
        return OutputThresholds(least_squares, differs, by_part, scales, probes, products, in_turn)

    def gradients(self, without: int | None = None) -> Gradients:
        """The gradients of all parts, or of all but the one that a fold keeps aside."""
        return Gradients.added([self.by_part[i] for i in self._parts(without)])

    def proposal(self, without: int | None = None) -> Prepared:
        """The thresholds that suit the outputs best.

        Args:
            without: the number of the fold that is kept aside; None for none.
        """
        chosen = with_least_squares(self.prepared, gradient_weighted(self.prepared, self.gradients(without).spectra))
        if self.scales is None:
            return chosen
        scales = self.scales.copy()
        scales.set_sketches(self.products, self.probes.columns(self._parts(without)))
        plan = self.prepared.resolver(safe_bits(self.prepared))
        return with_refined(chosen, scales.thresholds(scales.best_factors_alone(plan)))

    def _parts(self, without: int | None) -> list[int]:
        aside = without if self.is_in_turn else None
        return [i for i in range(len(self.by_part)) if i != aside]


def joined(batches: Iterable[Batch]) -> Batch:
    """Batches as one."""
    parts = list(batches)
    inputs = tuple(torch.cat(tensors) for tensors in zip(*(part.inputs for part in parts), strict=True))
    labels = [part.labels for part in parts if part.labels is not None]
    return Batch(inputs, torch.cat(labels) if labels else None)
