"""Which corrections a model gets before it is quantized.

A correction is found, measured in one shot on the calibration data beside one shot without it, and kept if the outputs
are closer to the float model's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from typing import Final

import torch
from torch import Tensor

from hago.calibration import dorefa_of
from hago.correction import Corrections, Splits, name_apart
from hago.errors import HagoError, InfeasibleBits, as_strings, check_choice
from hago.graph import takes_any_batch
from hago.plan import Bits, Plan
from hago.search.block_reconstruction import STEPS, most_samples_of_blocks, reconstruct_blocks
from hago.search.confirmation import Confirmation, Fold, losses_of
from hago.search.equalize import find_equalization
from hago.search.evaluate import Evaluator, Measurement
from hago.search.layer_correction import correct_layers, most_samples
from hago.search.objective import OBJECTIVES
from hago.search.output_thresholds import may_choose_thresholds, samples_of_gradients, threshold_proposals
from hago.search.preparation import Prepared
from hago.search.safe_bits import first_safe_bits, safe_bits
from hago.search.split import find_splits
from hago.search.squared_gradients import SquaredGradients
from hago.study import Header

#: Where operands have fewer bits, weights are also rounded without moving biases, which may then lose by that.
FEW_BITS: Final = 7
#: The objective by which corrections are kept.
SQNR: Final = "sqnr"
#: The names of corrections.
CORRECTIONS: Final = ("splitting", "equalization", "thresholds", "rounding", "bias", "reconstruction")
#: Those that are made where none are named: all that take seconds.
DEFAULT_CORRECTIONS: Final = CORRECTIONS[:-1]

#: Those whose strategies can be trained: the weights of a model's own modules can hold what they change.
TRAINABLE: Final = tuple(name for name in DEFAULT_CORRECTIONS if name != "splitting")


def wanted_corrections(given: str | Sequence[str] | None) -> tuple[str, ...]:
    """The names of the corrections that are asked for, reconstruction with its options: DEFAULT_CORRECTIONS by default.

    Raises:
        HagoError: there is no such correction, or it has no such option.
    """
    if given is None:
        return DEFAULT_CORRECTIONS
    names = {text.partition(":")[0]: text for text in as_strings(given, "corrections")}
    for name, text in names.items():
        check_choice("a correction", name, ("none", *CORRECTIONS))
        if name == "reconstruction":
            _steps_of(text)
        elif text != name:
            raise HagoError(f"correction {text!r}: {name} takes no options; pass {name!r}")
    return tuple(names[n] for n in CORRECTIONS if n in names)


def _steps_of(text: str) -> int:
    """The steps of training of every block: "reconstruction" or "reconstruction:STEPS".

    Raises:
        HagoError: STEPS is no whole number above 0.
    """
    _, colon, steps = text.partition(":")
    if colon and not (steps.isascii() and steps.isdigit() and int(steps)):
        raise HagoError(
            f"correction {text!r}: got {steps!r} steps of training of every block, expected a whole number above 0, "
            f"as in 'reconstruction:{STEPS}'"
        )
    return int(steps) if colon else STEPS


def logged_corrections(header: Header) -> tuple[tuple[str, ...], Corrections]:
    """The names of the corrections of the search that a log is of, and those that it began with."""
    stored = dict(header.settings.get("corrections", {}))
    return tuple(stored.pop("names", ())), Corrections.from_json(stored)


def correct(
    prepared: Prepared,
    given: str | Sequence[str] | None = None,
    found: Corrections | None = None,
    evaluator: Evaluator | None = None,
) -> Prepared:
    """The model with the splits and the equalization that help it, calibrated anew; as it is if none do.

    Models with ranges of the user's, or with weights on DoReFa-Net's levels, are left as they are: both hold for the
    values as they are. So are programs that fix the size of a batch.

    Args:
        given: the names of the corrections that may be made, now and once bits are chosen; see `wanted_corrections`.
        found: what was found before, which is applied.
        evaluator: of the model, which measures; by default one of its own.

    Raises:
        HagoError: there is no such correction.
        LogError: what was found before does not fit the model.
    """
    prepared = replace(prepared, correction_names=wanted_corrections(given))
    if found is not None:
        return prepared.corrected(replace(found, offsets={})) if found.of_graph else prepared
    if not _is_free(prepared):
        return replace(prepared, correction_names=())
    candidates = _of_graph(prepared)
    if not candidates:
        return prepared
    measuring = (evaluator or sqnr_evaluator(prepared)).judging_by(OBJECTIVES[SQNR])

    def value(of: Prepared) -> float:
        try:
            return first_safe_bits(measuring, of.resolver, of.calibration.peaks)[1].value
        except InfeasibleBits:
            return -math.inf

    return max((prepared, *candidates), key=value)


def _of_graph(prepared: Prepared) -> list[Prepared]:
    """The model with the corrections of its graph that are worth measuring."""
    names, candidates = prepared.correction_names, list[Prepared]()
    plan, measured = _measured(prepared)
    splits = Splits()
    if "splitting" in names:
        splits = find_splits(prepared.graph, plan, measured, norms="equalization" in names)
    split = prepared
    if splits:
        split = prepared.corrected(Corrections(splits=splits))
        plan, measured = _measured(split)
    if splits.channels:
        candidates.append(split)
    if "equalization" in names:
        found = find_equalization(split, plan, measured)
        # of norms whose factors stay, a second one would be in vain
        norms = tuple(n for n in splits.norms if name_apart(n) in found.equalization)
        if found:
            found = replace(found, splits=replace(splits, norms=norms))
            candidates.append(prepared.corrected(found))
    return candidates


def _measured(prepared: Prepared) -> tuple[Plan, Callable[[], SquaredGradients]]:
    """The Plan with the most safe bits, and what the model's outputs say of it, which is measured once if asked for."""
    plan = prepared.resolver(safe_bits(prepared))
    return plan, cache(lambda: SquaredGradients.measure(prepared, plan))


def sqnr_evaluator(prepared: Prepared) -> Evaluator:
    """An evaluator of the calibration data, for one-shot quantization and the corrections before it."""
    return Evaluator(prepared.graph, prepared.batches, OBJECTIVES[SQNR], prepared.hardware.known_ops)


def _is_free(prepared: Prepared) -> bool:
    """Whether anything may be corrected."""
    if prepared.calibration.given.gives_ranges or dorefa_of(prepared.estimator) is not None:
        return False
    return takes_any_batch(prepared.graph, prepared.hardware.known_ops)


# ---------------------------------------------------------------- once the bits are chosen
@dataclass(frozen=True, slots=True)
class MeasuredPoint:
    """A point of the space, and what was measured of it on all samples."""

    prepared: Prepared
    bits: Bits
    measured: Measurement

    @property
    def plan(self) -> Plan:
        return self.prepared.resolver(self.bits)


def first_point(prepared: Prepared, evaluator: Evaluator) -> MeasuredPoint:
    """The widest bits that do not overflow on the data.

    Raises:
        InfeasibleBits: accumulators overflow at every width.
    """
    bits, _, measured = first_safe_bits(evaluator, prepared.resolver, prepared.calibration.peaks)
    return MeasuredPoint(prepared, bits, measured)


def choose_thresholds(point: MeasuredPoint, evaluator: Evaluator) -> MeasuredPoint:
    """The point with the thresholds that serve the outputs best, see `hago.search.output_thresholds`, if they surely do
    so on samples that did not give the gradients.

    Args:
        evaluator: what measured the point.
    """
    samples, seen = evaluator.batches.samples, samples_of_gradients(evaluator.batches.samples)
    wanted = "thresholds" in point.prepared.correction_names and may_choose_thresholds(point.prepared)
    if not wanted or samples == seen:
        return point
    tried = []
    for proposal in threshold_proposals(point.prepared):
        with suppress(InfeasibleBits):
            tried.append(first_point(proposal, evaluator))
    best = max(tried, key=lambda other: _value(other.measured, evaluator, seen), default=point)
    confirmation = Confirmation(tuple(batch.size for batch in evaluator.batches), (Fold(seen, samples),))
    before, after = ([losses_of(evaluator.objective, of.measured)] for of in (point, best))
    return best if confirmation.gain(before, after).is_significant(candidates=max(1, len(tried))) else point


def _value(measured: Measurement, evaluator: Evaluator, seen: int) -> float:
    """The objective on the samples after the first, which were seen; on all where there are no others."""
    contributions = measured.contributions[evaluator.objective.name]
    return evaluator.objective.finish((contributions[seen:] if len(contributions) > seen else contributions).mean(0))


def correct_point(
    point: MeasuredPoint, evaluator: Evaluator, report: Callable[[str], None] = lambda step: None
) -> MeasuredPoint:
    """Correct the layers of a point, and then its blocks: its first samples give the corrections, the others tell
    whether they help.

    Args:
        evaluator: what measured the point.
        report: called with a text at every step of what takes minutes.
    """
    names, best, offsets = point.prepared.correction_names, point, dict[str, Tensor]()
    attempts = _attempts([n for n in names if n != "bias" or point.plan.nodes])  # biases of float layers are floats
    few_bits = any(b < FEW_BITS for b in point.bits.values())
    for rounding, bias in attempts:
        if best is not point and not few_bits:
            break
        inputs = _first_inputs(evaluator, most_samples(point.prepared.graph))
        found = correct_layers(point.plan, inputs, rounding=rounding, bias=bias)
        better = _with_offsets(best, found, evaluator, len(inputs[0]))
        if better is not best:
            best, offsets = better, found
    for text in (n for n in names if n.startswith("reconstruction")):
        inputs = _first_inputs(evaluator, most_samples_of_blocks(best.plan))
        moved = reconstruct_blocks(best.plan, inputs, steps=_steps_of(text), report=report)
        both = {**offsets, **{name: offset + offsets.get(name, 0) for name, offset in moved.items()}}
        best = _with_offsets(best, both if moved else {}, evaluator, len(inputs[0]))
    return best


def _first_inputs(evaluator: Evaluator, most: int) -> list[Tensor]:
    """The inputs that corrections are found on: at most `most` samples, and a quarter at least is left."""
    samples = evaluator.batches.samples
    # in a race, samples have another order than in `Prepared`
    first = [batch.inputs for batch in evaluator.batches.first(max(1, min(most, samples - samples // 4)))]
    return [torch.cat(parts) for parts in zip(*first, strict=True)]


def _with_offsets(best: MeasuredPoint, offsets: Mapping[str, Tensor], evaluator: Evaluator, used: int) -> MeasuredPoint:
    """The point with the integers of constants moved, if that is better on the samples after those that were used."""
    if not offsets:
        return best
    corrected = best.prepared.with_offsets(offsets)
    measured = evaluator.measure(corrected.resolver(best.bits))
    if measured.extremes.overflows or _value(measured, evaluator, used) <= _value(best.measured, evaluator, used):
        return best
    return MeasuredPoint(corrected, best.bits, measured)


def _attempts(wanted: Sequence[str]) -> list[tuple[bool, bool]]:
    """Which of rounding and biases are corrected together."""
    together = ("rounding" in wanted, "bias" in wanted)
    return [together, (True, False)] if all(together) else [together] if any(together) else []
