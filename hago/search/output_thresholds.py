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

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final

import torch

from hago.calibration import named_estimator
from hago.data import Batch, Batches
from hago.search.confirmation import (
    MARGIN,
    Confirmation,
    Gain,
    clipped_share,
    figures_of,
    losses_of,
)
from hago.search.evaluate import Evaluator
from hago.search.folds import FEW, Fold, folds_of
from hago.search.gradients import CHUNK_SAMPLES, GRADIENT_CHUNK, Gradients
from hago.search.measured_point import (
    SQNR,
    MeasuredPoint,
    first_point_if_any,
    pass_record,
)
from hago.search.objective import OBJECTIVES, Objective
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
        batches: Batches,
        folds: Sequence[Fold],
        *,
        of_weights: bool,
        losses: int | None = 0,
        seed: int = 0,
    ) -> OutputThresholds:
        """Differentiate the samples that give the gradients, in one pass.

        Args:
            objective: whose curvature says what an error at the outputs costs.
            batches: the samples in the order of the folds; in a race they have another order than in `prepared`.
            folds: of `threshold_folds`.
            of_weights: whether thresholds of weights are chosen, too.
            losses: number of choices of each weight, from the most bits down, whose losses are measured; None for all.
            seed: of the random vectors on the outputs.
        """
        least_squares = with_least_squares(prepared, prepared.calibration)
        in_turn = len(folds) > 1
        ends = [(fold.first, fold.last) for fold in folds] if in_turn else [(0, folds[0].first)]
        samples = Batch.joined(batches.first(ends[-1][1]))
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
        scales.set_sketches(self.products, self.probes, self._parts(without))
        plan = self.prepared.resolver(safe_bits(self.prepared))
        return with_refined(chosen, scales.thresholds(scales.best_factors_alone(plan)))

    def _parts(self, without: int | None) -> list[int]:
        aside = without if self.is_in_turn else None
        return [i for i in range(len(self.by_part)) if i != aside]


# ---------------------------------------------------------------- the choice
@dataclass(frozen=True, slots=True)
class ChosenThresholds:
    """The point that thresholds were chosen for; made by `choose_thresholds`.

    Args:
        point: with the chosen thresholds, or as it was.
        gradients: of the samples that shaped them; None where none were differentiated.
        confirmed: what they gain on the other samples, and the shares of values that they clip, as JSON values.
        simulated: number of proposals that were measured.
    """

    point: MeasuredPoint
    gradients: Gradients | None = None
    confirmed: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    simulated: int = 0


def chooses_thresholds(prepared: Prepared) -> bool:
    """Whether thresholds are among the corrections that may be made, and are left to hago."""
    return "thresholds" in prepared.correction_names and may_choose_thresholds(prepared)


def choose_thresholds(
    point: MeasuredPoint, evaluator: Evaluator, *, losses: int | None = 0, seed: int = 0
) -> ChosenThresholds:
    """The point with the thresholds that serve the outputs best, if they surely do so on samples that did not give the
    gradients. Weights that are rounded with error feedback later, at FEW_BITS or more, keep theirs, since they gain
    nothing more.

    Args:
        evaluator: what measured the point.
        losses, seed: of `OutputThresholds.measure`.
    """
    sizes, objective = [batch.size for batch in evaluator.batches], evaluator.objective
    folds = threshold_folds(sizes)
    if not folds or not chooses_thresholds(point.prepared):
        return ChosenThresholds(point)
    of_weights = "rounding" not in point.prepared.correction_names or point.has_few_bits
    made = OutputThresholds.measure(
        point.prepared, objective, evaluator.batches, folds, of_weights=of_weights, losses=losses, seed=seed
    )

    before, judging = [point] * len(folds), Confirmation(tuple(sizes), folds)
    simulated = len(folds) + made.changes_estimator
    tried = _measured_proposals(made, evaluator, len(folds))
    if not tried:
        record = pass_record(("thresholds",), _decibels_aside(before, folds), -math.inf, judging.count, kept=False)
        return ChosenThresholds(point.with_passes(record), made.gradients(), simulated=simulated)

    def gain_of(by_fold: Sequence[MeasuredPoint]) -> Gain:
        old, new = ([losses_of(objective, p.measured) for p in points] for points in (before, by_fold))
        return judging.gain(old, new)

    clipped_before = _clipped_share(point)

    def is_sure(by_fold: Sequence[MeasuredPoint], candidates: int) -> bool:
        # thresholds that clip more also clip values that no sample has: they must win by a margin
        margin = MARGIN if _clipped_share(by_fold[0]) > clipped_before else 0.0
        return gain_of(by_fold).is_significant(margin, candidates)

    # the chosen ones come first, so they need not be surer because others are tested, too
    sure = [by_fold for candidates, by_fold in enumerate(tried, 1) if is_sure(by_fold, candidates)]
    best = max(sure or tried, key=lambda by_fold: gain_of(by_fold).part)
    # of several folds, the thresholds are chosen once more from all samples
    is_final = len(folds) == 1 or best[0].prepared is made.prepared
    final = best[0] if is_final else first_point_if_any(made.proposal(), evaluator)
    record = pass_record(
        ("thresholds",),
        _decibels_aside(before, folds),
        _decibels_aside(best, folds),
        judging.count,
        kept=bool(sure) and final is not None,
        if_better="not sure",
    )
    if final is None or not sure:
        return ChosenThresholds(point.with_passes(record), made.gradients(), simulated=simulated)
    figures = figures_of(gain_of(best), _clipped_share(final), clipped_before)
    confirmed = {"samples": judging.count, **figures}
    return ChosenThresholds(final.with_passes(record), made.gradients(), confirmed, simulated)


def _measured_proposals(made: OutputThresholds, evaluator: Evaluator, folds: int) -> list[list[MeasuredPoint]]:
    """The proposals that do not overflow, the chosen thresholds first: of each, the points of all folds."""
    found = [[first_point_if_any(made.proposal(index), evaluator) for index in range(folds)]]
    if made.changes_estimator:
        found.append([first_point_if_any(made.prepared, evaluator)] * folds)
    return [[p for p in by_fold if p is not None] for by_fold in found if None not in by_fold]


def _clipped_share(point: MeasuredPoint) -> float:
    """The fraction of the values of calibration that the thresholds of a point clip."""
    return clipped_share(point.prepared.calibration, point.prepared.space, point.plan.thresholds)


def _decibels_aside(by_fold: Sequence[MeasuredPoint], folds: Sequence[Fold]) -> float:
    """The SQNR on the validation samples of all folds, each by the point of its own."""
    objective = OBJECTIVES[SQNR]
    contributions = [p.measured.contributions[SQNR][f.first : f.last] for p, f in zip(by_fold, folds, strict=True)]
    return objective.finish(torch.cat(contributions).mean(0))
