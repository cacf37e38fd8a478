"""Which corrections a model gets before it is quantized.

A correction is found, measured in one shot on the calibration data beside one shot without it, and kept if the outputs
are closer to the float model's. What every pass gained is recorded in `Prepared.passes`, and in strategies.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Final

from torch import Tensor

from hago.calibration import dorefa_of
from hago.correction import CorrectionPass, Corrections, Splits, name_apart, passes_from_json
from hago.data import Batches
from hago.errors import HagoError, as_strings, check_choice
from hago.graph import takes_any_batch
from hago.plan import Bits, Plan
from hago.search.absorb import find_absorption
from hago.search.affine import affine_corrections
from hago.search.block_reconstruction import STEPS, most_samples_of_blocks, reconstruct_blocks, reconstructed
from hago.search.confirmation import Confirmation, losses_of
from hago.search.equalize import find_equalization
from hago.search.evaluate import Evaluator, Measurement
from hago.search.float_layers import FloatLayers
from hago.search.folds import Fold, last_samples, other_samples, spread_samples
from hago.search.layer_correction import correct_layers, most_samples
from hago.search.measured_point import (
    SQNR,
    MeasuredPoint,
    decibels_on,
    first_point_if_any,
    pass_record,
    sqnr_evaluator,
    value_on,
)
from hago.search.objective import OBJECTIVES
from hago.search.preparation import Prepared
from hago.search.rotate import find_rotations
from hago.search.safe_bits import safe_bits
from hago.search.split import find_splits
from hago.search.squared_gradients import SquaredGradients, gradient_samples
from hago.study import Header

#: How many times as many samples and windows a further turn sees.
MORE_A_TURN: Final = 4
#: SQNR in dB from which on the graph is left as it is: it has nothing to gain, and the room that unseen values need to
#: lose, which equalized channels use up.
CLOSE_DECIBELS: Final = 60.0
#: The names of corrections.
CORRECTIONS: Final = (
    *("rotation", "splitting", "equalization", "absorption"),
    *("thresholds", "rounding", "bias", "affine"),
    "reconstruction",
)
#: Those that are made where none are named: what gains most in seconds.
DEFAULT_CORRECTIONS: Final = ("splitting", "equalization", "thresholds", "rounding", "bias")

#: Those that change the graph, before bits are chosen.
OF_GRAPH: Final = ("rotation", "splitting", "equalization", "absorption")
#: Those that change integers of layers, once bits are chosen, and take seconds.
OF_LAYERS: Final = ("rounding", "bias")
#: Those whose strategies can be trained: the weights of a model's own modules can hold what they change.
TRAINABLE: Final = tuple(name for name in CORRECTIONS if name not in ("rotation", "splitting", "reconstruction"))


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


def of_seconds(names: Sequence[str]) -> tuple[str, ...]:
    """Those of these corrections that take seconds, as one shot makes them where a search is compared with it."""
    return tuple(name for name in names if name.partition(":")[0] != "reconstruction")


def logged_corrections(header: Header) -> tuple[tuple[str, ...], Corrections]:
    """The names of the corrections of the search that a log is of, and those that it began with."""
    stored = header.settings.get("corrections", {})
    return tuple(stored.get("names", ())), Corrections.from_json(stored)


def logged_passes(header: Header) -> tuple[CorrectionPass, ...]:
    """What the passes of corrections gained that the search of a log made before its first trial."""
    return passes_from_json(header.settings.get("corrections", {}).get("passes", ()), "the log's header")


def correct(
    prepared: Prepared,
    given: str | Sequence[str] | None = None,
    found: Corrections | None = None,
    evaluator: Evaluator | None = None,
    *,
    keeps_bits: bool = False,
) -> Prepared:
    """The model with the corrections of its graph that help it, calibrated anew; as it is if none do.

    Models with ranges of the user's, or with weights on DoReFa-Net's levels, are left as they are: both hold for the
    values as they are. So are programs that fix the size of a batch, and models whose outputs are within
    CLOSE_DECIBELS of the float model's where the bits stay.

    Args:
        given: the names of the corrections that may be made, now and once bits are chosen; see `wanted_corrections`.
        found: what was found before, which is applied.
        evaluator: of the model, which measures; by default one of its own.
        keeps_bits: whether the widest bits that do not overflow are taken, rather than fewer bits for the sake of a
            cost.

    Raises:
        HagoError: there is no such correction.
        LogError: what was found before does not fit the model.
    """
    prepared = replace(prepared, correction_names=wanted_corrections(given))
    if found is not None:
        return prepared.corrected(replace(found, offsets={})) if found.of_graph else prepared
    if not _is_free(prepared):
        return replace(prepared, correction_names=())
    batches = prepared.batches if evaluator is None else evaluator.batches
    candidates = _of_graph(prepared, batches)
    rotated = _rotated(prepared, batches) if "rotation" in prepared.correction_names else []
    best, passes = prepared, list[CorrectionPass]()
    if candidates or rotated:
        measuring = (evaluator or sqnr_evaluator(prepared)).judging_by(OBJECTIVES[SQNR])
        best, passes = _best_of_graph(prepared, candidates, measuring, keeps_bits)
        best, more = _best_of_graph(best, rotated, measuring, keeps_bits)
        if best.corrections.rotations:
            passes = [replace(p, why_not="another gains more") if p.kept else p for p in passes]
        passes += more
    tried = {name for made in passes for name in made.names}
    passes += [
        CorrectionPass((name,), why_not="nothing to change")
        for name in OF_GRAPH
        if name in prepared.correction_names and name not in tried
    ]
    return replace(best, passes=tuple(passes))


def _best_of_graph(
    prepared: Prepared, candidates: Sequence[tuple[tuple[str, ...], Prepared]], evaluator: Evaluator, keeps_bits: bool
) -> tuple[Prepared, list[CorrectionPass]]:
    """The best of the candidates that are surely better than the model as it is, or that model; and what each gained
    beside the one before it. Where there are enough samples, those that gave the gradients do not judge.

    Args:
        keeps_bits: of `correct`; a model that is close enough then stays as it is.
    """
    _, judging = gradient_samples(evaluator.batches.samples)
    tried = [prepared, *(candidate for _, candidate in candidates)]
    points = [first_point_if_any(of, evaluator) for of in tried]
    measured = [None if point is None else point.measured for point in points]
    values = [-math.inf if m is None else decibels_on(m, judging) for m in measured]

    def is_sure(index: int) -> bool:
        plain, new = measured[0], measured[index]
        return new is not None and (plain is None or _is_surely_better(new, plain, evaluator, judging, len(candidates)))

    is_close = keeps_bits and values[0] >= CLOSE_DECIBELS
    sure = [index for index in range(1, len(tried)) if not is_close and is_sure(index)]
    best = max((0, *sure), key=lambda index: values[index])
    passes = [
        pass_record(
            names,
            values[index - 1],
            values[index],
            len(judging),
            kept=index <= best,
            if_better="close already" if is_close else "another gains more" if index in sure else "not sure",
        )
        for index, (names, _) in enumerate(candidates, 1)
    ]
    return tried[best], passes


def _of_graph(prepared: Prepared, batches: Batches) -> list[tuple[tuple[str, ...], Prepared]]:
    """The model with the corrections of its graph that are worth measuring, each with those before it, and the names of
    what it adds to these.

    Args:
        batches: the samples in the order in which candidates are measured.
    """
    names, candidates = prepared.correction_names, list[tuple[tuple[str, ...], Prepared]]()
    plan, measured = _measured(prepared, batches)
    splits = Splits()
    if "splitting" in names:
        splits = find_splits(prepared.graph, plan, measured, norms="equalization" in names)
    split = prepared
    if splits:
        split = prepared.corrected(replace(prepared.corrections, splits=splits))
        plan, measured = _measured(split, batches)
    if splits.channels:
        candidates.append((("splitting",), split))
    if "equalization" in names:
        found = find_equalization(split, plan, measured)
        # of norms whose factors stay, a second one would be in vain
        norms = tuple(n for n in splits.norms if name_apart(n) in found.equalization)
        if found:
            of_splits = replace(prepared.corrections, splits=replace(splits, norms=norms))
            changed = replace(of_splits, equalization=found.equalization, clamps=found.clamps)
            together = ("splitting", "equalization") if norms and not splits.channels else ("equalization",)
            candidates.append((together, prepared.corrected(changed)))
    if "absorption" in names:
        latest = candidates[-1][1] if candidates else prepared
        shifts = find_absorption(latest, latest.resolver(safe_bits(latest)))
        if shifts:
            candidates.append((("absorption",), latest.corrected(replace(latest.corrections, absorption=shifts))))
    return candidates


def _rotated(prepared: Prepared, batches: Batches) -> list[tuple[tuple[str, ...], Prepared]]:
    """The model with the rotations that are worth measuring, and with what `_of_graph` finds for it then; see there."""
    rotations = find_rotations(prepared, lambda of: _measured(of, batches))
    if not rotations:
        return []
    rotated = prepared.corrected(Corrections(rotations=rotations))
    return [(("rotation",), rotated), *_of_graph(rotated, batches)]


def _measured(prepared: Prepared, batches: Batches) -> tuple[Plan, Callable[[], SquaredGradients]]:
    """The Plan with the most safe bits, and what the model's outputs say of it, which is measured once if asked for."""
    plan = prepared.resolver(safe_bits(prepared))
    return plan, cache(lambda: SquaredGradients.measure(prepared, plan, batches))


def _is_free(prepared: Prepared) -> bool:
    """Whether anything may be corrected."""
    if prepared.calibration.given.gives_ranges or dorefa_of(prepared.estimator) is not None:
        return False
    return takes_any_batch(prepared.graph, prepared.hardware.known_ops)


# ---------------------------------------------------------------- once the bits are chosen
def _is_better(point: MeasuredPoint, other: MeasuredPoint, evaluator: Evaluator) -> bool:
    """Whether a point is better than another on the last quarter of the samples, from which no correction is found."""
    judging = last_samples(evaluator.batches.samples)
    return _value(point.measured, evaluator, judging) > _value(other.measured, evaluator, judging)


def _value(measured: Measurement, evaluator: Evaluator, samples: Sequence[int]) -> float:
    """The objective on the samples of these numbers."""
    return value_on(evaluator.objective, measured, samples)


def correct_in_turns(
    point: MeasuredPoint,
    evaluator: Evaluator,
    turns: int,
    report: Callable[[str], None] = lambda step: None,
    journal: Path | None = None,
    real: FloatLayers | None = None,
) -> MeasuredPoint:
    """Correct the layers of a point; then again on MORE_A_TURN times as many samples and windows of layers, as long as
    that is better on the last quarter of the samples, which give no correction of layers; then its blocks.

    Args:
        evaluator: what measured the point.
        turns: the most turns.
        report: called with a text at every step of what takes minutes.
        journal: of `reconstruct_blocks`.
        real: of `correct_point`, for the first turn.
    """
    best = correct_point(point, evaluator, real)
    made = best.prepared.passes[len(point.prepared.passes) :]
    names = tuple(n for n in CORRECTIONS if any(each.kept and n in each.names for each in made))
    aside = last_samples(evaluator.batches.samples)
    for turn in range(1, turns if names else 1):
        other = correct_point(point, evaluator, float_layers(point.prepared, evaluator, MORE_A_TURN**turn))
        kept = _is_better(other, best, evaluator)
        before, after = (decibels_on(of.measured, aside) for of in (best, other))
        passes = (*best.prepared.passes, pass_record(names, before, after, len(aside), kept=kept))
        best = other if kept else best
        best = replace(best, prepared=replace(best.prepared, passes=passes))
        if not kept:
            break
    return reconstruct_point(best, evaluator, report, journal)


def float_layers(prepared: Prepared, evaluator: Evaluator, multiple: int = 1) -> FloatLayers:
    """The float model on some samples of an evaluator, on which the layers of its points are corrected.

    Args:
        multiple: how many times as many samples, and windows of layers, are seen as by default.
    """
    used, inputs = _spread_inputs(evaluator, most_samples(prepared.graph, multiple))
    return FloatLayers(prepared.graph, prepared.hardware.known_ops, inputs, multiple, used)


def correct_point(
    point: MeasuredPoint,
    evaluator: Evaluator,
    real: FloatLayers | None = None,
    together: Sequence[str] | None = None,
) -> MeasuredPoint:
    """Correct the layers of a point: a few samples give the corrections, the others tell whether they help.

    Args:
        evaluator: what measured the point.
        real: what `float_layers` gives, which several points of one model share; by default one for this point.
        together: which of rounding and biases are corrected, together, of those that may be; by default, which go
            together is tried.
    """
    real = float_layers(point.prepared, evaluator) if real is None else real
    return _correct_affinely(_round_and_move(point, evaluator, together, real), evaluator)


def _round_and_move(
    point: MeasuredPoint, evaluator: Evaluator, together: Sequence[str] | None, real: FloatLayers
) -> MeasuredPoint:
    """Round the weights of a point with error feedback, and move its biases; see `correct_point`."""
    names = point.prepared.correction_names
    wanted = [n for n in names if n != "bias" or point.plan.nodes]  # biases of float layers are floats
    attempts = _attempts(wanted) if together is None else _attempts([n for n in wanted if n in together])[:1]
    if not attempts:
        return point
    best, judging = point, other_samples(evaluator.batches.samples, real.numbers)
    passes, kept = list[CorrectionPass](), -1
    few_bits = point.has_few_bits
    for rounding, bias in attempts:
        if best is not point and not few_bits:
            break
        made = tuple(name for name, wanted in (("rounding", rounding), ("bias", bias)) if wanted)
        found = correct_layers(point.plan, real, rounding=rounding, bias=bias)
        if not found:
            passes.append(CorrectionPass(made, why_not="nothing to change"))
            continue
        other, after = _moved(point, found, evaluator, judging)
        passes.append(pass_record(made, decibels_on(point.measured, judging), after, len(judging), kept=False))
        if after > -math.inf and _value(other.measured, evaluator, judging) > _value(best.measured, evaluator, judging):
            best, kept = other, len(passes) - 1
    return best.with_passes(*(replace(p, why_not="") if i == kept else p for i, p in enumerate(passes)))


def _correct_affinely(point: MeasuredPoint, evaluator: Evaluator) -> MeasuredPoint:
    """Make the affine correction of a point on a few samples, with offsets or with factors alone, if one of both helps
    on the others."""
    if "affine" not in point.prepared.correction_names:
        return point
    used, inputs = _spread_inputs(evaluator, most_samples(point.prepared.graph))
    judging = other_samples(evaluator.batches.samples, used)
    made = affine_corrections(point, inputs)
    if not made:
        return point.with_passes(CorrectionPass(("affine",), why_not="nothing to change"))
    tried = [_measured_at(prepared, point.bits, evaluator, judging) for prepared in made]
    best, after = max(tried, key=lambda pair: pair[1])
    kept = after > -math.inf and _value(best.measured, evaluator, judging) > _value(point.measured, evaluator, judging)
    record = pass_record(("affine",), decibels_on(point.measured, judging), after, len(judging), kept=kept)
    return (best if kept else point).with_passes(record)


def reconstruct_point(
    point: MeasuredPoint, evaluator: Evaluator, report: Callable[[str], None], journal: Path | None = None
) -> MeasuredPoint:
    """Train the blocks of a point on some samples, if it helps on the others.

    Args:
        evaluator, report, journal: of `correct_in_turns`.
    """
    wanted = next((text for text in point.prepared.correction_names if text.startswith("reconstruction")), None)
    if wanted is None:
        return point
    used, inputs = _spread_inputs(evaluator, most_samples_of_blocks(point.plan))
    judging = other_samples(evaluator.batches.samples, used)
    steps = _steps_of(wanted)
    found = reconstruct_blocks(point.plan, inputs, steps=steps, report=report, journal=journal)
    if not found:
        return point.with_passes(CorrectionPass(("reconstruction",), why_not="nothing to change"))
    other, after = _measured_at(reconstructed(point.prepared, point.bits, found), point.bits, evaluator, judging)
    # few samples are left to judge what was trained on many, so a better mean is enough
    kept = after > -math.inf and _value(other.measured, evaluator, judging) > _value(point.measured, evaluator, judging)
    made = pass_record(("reconstruction",), decibels_on(point.measured, judging), after, len(judging), kept=kept)
    return (other if kept else point).with_passes(made)


def _spread_inputs(evaluator: Evaluator, most: int) -> tuple[list[int], list[Tensor]]:
    """The numbers of the samples that corrections are found on, at most `most`, and their inputs."""
    # in a race, samples have another order than in `Prepared`
    used = spread_samples(evaluator.batches.samples, most)
    return used, list(evaluator.batches.at(used).inputs)


def _moved(
    point: MeasuredPoint, offsets: Mapping[str, Tensor], evaluator: Evaluator, judging: Sequence[int]
) -> tuple[MeasuredPoint, float]:
    """The point with the integers of constants moved, and its SQNR on the samples that judge; -inf where an accumulator
    overflows."""
    return _measured_at(point.prepared.with_offsets(offsets), point.bits, evaluator, judging)


def _measured_at(
    prepared: Prepared, bits: Bits, evaluator: Evaluator, judging: Sequence[int]
) -> tuple[MeasuredPoint, float]:
    """A point, and its SQNR on the samples that judge; -inf where an accumulator overflows."""
    measured = evaluator.measure(prepared.resolver(bits))
    after = -math.inf if measured.extremes.overflows else decibels_on(measured, judging)
    return MeasuredPoint(prepared, bits, measured), after


def _is_surely_better(
    measured: Measurement, than: Measurement, evaluator: Evaluator, judging: Sequence[int], candidates: int = 1
) -> bool:
    """Whether a measurement is significantly better than another on the samples that judge. A single one judges by its
    value.

    Args:
        candidates: number of measurements of which this is the best.
    """
    if len(judging) < 2:
        return _value(measured, evaluator, judging) > _value(than, evaluator, judging)
    confirmation = Confirmation(_sizes_among(judging, evaluator.batches.sizes), (Fold(0, len(judging)),))
    before, after = ([losses_of(evaluator.objective, of)[list(judging)]] for of in (than, measured))
    return confirmation.gain(before, after).is_significant(candidates=candidates)


def _sizes_among(samples: Sequence[int], sizes: Sequence[int]) -> tuple[int, ...]:
    """How many of the samples of these numbers each batch has; none of batches without."""
    ends = list(itertools.accumulate(sizes))
    return tuple(len([*of]) for _, of in itertools.groupby(samples, lambda number: bisect.bisect_right(ends, number)))


def _attempts(wanted: Sequence[str]) -> list[tuple[bool, bool]]:
    """Which of rounding and biases are corrected together."""
    together = ("rounding" in wanted, "bias" in wanted)
    return [together, (True, False), (False, True)] if all(together) else [together] if any(together) else []
