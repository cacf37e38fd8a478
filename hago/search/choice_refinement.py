"""Refinement of the thresholds of weights at every number of bits, from one pass over the samples.

A search under limits on costs (`limited`) or over a front (`pareto`) calls `refine_every_choice` before its first
trial, and a replay of its log calls it again. Each channel takes the threshold with the least expected loss of that
channel alone (`WeightScales.best_factors_alone`). These thresholds do not depend on those of other weights, so they
hold in the whole space, and are better there than thresholds that were improved together at one point
(`hago.search.point_refinement`). They are taken only where they are significantly better on validation samples: see
`hago.search.confirmation`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hago.arithmetic.types import Edge
from hago.calibration import Calibration
from hago.errors import InfeasibleBits
from hago.plan import Bits
from hago.plan.feasibility import ChoicePoints, nearest_feasible, plan_or_refusal
from hago.search.confirmation import Confirmation, Gain, ProposalTest, clipped_share, figures_of, losses_of
from hago.search.folds import Fold
from hago.search.gradients import CHUNK_SAMPLES, GRADIENT_CHUNK, GRADIENT_FORWARDS, Spectrum
from hago.search.guidance import make_surrogate
from hago.search.preparation import Prepared
from hago.search.proposed_thresholds import (
    RefinementTask,
    gradient_weighted,
    with_estimates,
    with_least_squares,
    with_refined,
)
from hago.search.safe_bits import safe_bits
from hago.search.sensitivity import gradients_of_choices, sensitivity_from
from hago.search.starting_point import StartingPoint, bits_within_limits
from hago.search.weight_scales import WeightGradients, WeightScales, WeightThresholds, of_constants, own_ends
from hago.searchers import Knapsack, Surrogate


def refine_every_choice(
    task: RefinementTask, *, start_within_limits: bool = False, confirmation: Confirmation | None = None
) -> StartingPoint:
    """Refine the thresholds of weights at every number of bits, and those of activations.

    Args:
        start_within_limits: start at the best expected point that keeps the limits on costs (`limited`), instead of at
            the most bits that accumulators hold (`pareto`).
        confirmation: the validation samples. None for logs of version 1: `limited` then took what was best on all
            samples, and `pareto` the refined thresholds.
    """
    if confirmation is None:
        return _unconfirmed(task, start_within_limits)
    chunk = confirmation.most_chunk
    folds = [_Proposals.of(task, fold, most_chunk=chunk) for fold in confirmation.folds]
    # the confirmed proposal of several folds is made again from all samples
    final = folds[0] if len(folds) == 1 else _Proposals.of(task, most_chunk=chunk)
    how = confirmation.record if chunk == CHUNK_SAMPLES else {**confirmation.record, "chunk": chunk}
    bits = final.first_bits(task, start_within_limits)
    if not folds:  # a single sample: none can be kept aside
        prepared = replace(task.estimated, refinement_record=how)
        return StartingPoint(prepared, final.surrogate, bits, GRADIENT_FORWARDS)
    # proposals are compared where they will be used: at the start if costs are limited; otherwise (a front, or a
    # minimized cost) halfway along the range of costs, since results have fewer bits than the start
    is_limited = start_within_limits and any(limit.is_cost for limit in task.goal.limits)
    point = bits if is_limited else final.middle_of_front()
    chosen = _choose(task, confirmation, folds, point)
    shares = [_clipped_share(task, final.thresholds[name], point) for name in (chosen.name, "estimated")]
    record = {**how, "thresholds": chosen.name, **figures_of(chosen.gain, *shares)}
    passes = len(folds) + (final is not folds[0])
    return StartingPoint(
        replace(final.thresholds[chosen.name], refinement_record=record),
        final.surrogate,
        bits,
        GRADIENT_FORWARDS * passes + chosen.test_forwards,
        chosen.simulations,
    )


def _unconfirmed(task: RefinementTask, start_within_limits: bool) -> StartingPoint:
    """The starting point of searches whose logs are of version 1."""
    proposals = _Proposals.of(task, most_chunk=CHUNK_SAMPLES)
    bits = proposals.first_bits(task, start_within_limits)
    if not start_within_limits:
        return StartingPoint(proposals.thresholds["refined"], proposals.surrogate, bits, GRADIENT_FORWARDS)
    values = {name: _measure(task, prepared, bits)[0] for name, prepared in proposals.thresholds.items()}
    best = max(values, key=lambda name: values[name])
    return StartingPoint(proposals.thresholds[best], proposals.surrogate, bits, GRADIENT_FORWARDS, float(len(values)))


# ---------------------------------------------------------------- what is proposed
@dataclass(frozen=True, slots=True)
class _Proposals:
    """The thresholds that one pass over samples proposes.

    Args:
        thresholds: by name: `refined`, `mse` (of the least squared error) and `estimated` (those without refinement).
            The refined threshold of each channel is the best for that channel alone, by a few random vectors; together
            they may be worse than others.
        surrogate: the expected loss of every choice, with refined thresholds.
        start: the safe bits with refined thresholds.
        spectra, of_weights: the gradients of activations and the thresholds of weights that `refined` is made from.
    """

    thresholds: Mapping[str, Prepared]
    surrogate: Surrogate
    start: Bits
    spectra: Mapping[Edge, Spectrum]
    of_weights: WeightThresholds

    @staticmethod
    def of(task: RefinementTask, fold: Fold | None = None, *, most_chunk: int = GRADIENT_CHUNK) -> _Proposals:
        """Make the proposals from the tuning samples of a fold, or from all samples.

        Args:
            most_chunk: the most samples that are differentiated at once and share a random vector.
        """
        least_squares, data, objective = task.least_squares, task.estimated.batches, task.goal.objective
        probes, scaled = WeightGradients.of_probes(least_squares), _weights_with_own_thresholds(least_squares)
        samples = data.samples - (0 if fold is None else fold.size)
        chunk = max(1, min(most_chunk, samples // probes.count))
        batches = None if fold is None else fold.tuning_batches(data)
        gradients = gradients_of_choices(
            least_squares, objective, task.seed, chunk, batches, known=scaled, on_constant=probes.add
        )
        of_weights, losses = _best_alone(least_squares, probes, scaled)
        weighted = with_least_squares(least_squares, gradient_weighted(least_squares, gradients.spectra))
        refined = with_refined(weighted, of_weights)
        gradients = replace(gradients, weights={**gradients.weights, **losses})
        sensitivity = sensitivity_from(gradients, refined, objective)
        start = safe_bits(refined)
        surrogate = make_surrogate(refined, task.goal, start, task.seed, task.metric, sensitivity)
        thresholds = {"refined": refined, "mse": least_squares, "estimated": task.estimated}
        return _Proposals(thresholds, replace(surrogate, most=start), start, gradients.spectra, of_weights)

    def proposal_with(self, name: str, calibration: Calibration) -> Prepared:
        """The proposal of a name, with thresholds of activations made from other statistics. ProposalTest calls it.

        Args:
            calibration: with statistics that were collected without the validation samples.
        """
        if name == "estimated":
            return with_estimates(self.thresholds[name], calibration)
        least_squares = with_least_squares(self.thresholds["mse"], calibration)
        if name == "mse":
            return least_squares
        weighted = with_least_squares(least_squares, gradient_weighted(least_squares, self.spectra))
        return with_refined(weighted, self.of_weights)

    def first_bits(self, task: RefinementTask, start_within_limits: bool) -> Bits:
        """The best expected point that keeps the limits on costs, or the most bits."""
        if not start_within_limits:
            return self.start
        return bits_within_limits(self.thresholds["refined"], task.goal, self.surrogate, self.start)

    def middle_of_front(self) -> Bits:
        """A point halfway along the front, if the surrogate finds one, else the most bits."""
        prepared = self.thresholds["refined"]
        program = Knapsack(prepared.space, self.surrogate)
        ends = program.range
        solved = None if ends is None else program.solve(sum(ends) / 2)
        point = None if solved is None else nearest_feasible(prepared.resolver, solved.bits, fewer=True)
        return self.start if point is None else point.bits


def _best_alone(
    prepared: Prepared, probes: WeightGradients, scaled: Collection[Edge]
) -> tuple[WeightThresholds, dict[Edge, list[float]]]:
    """The thresholds of weights at every number of bits, and by edge the expected loss of each of its group's choices.

    Args:
        scaled: the weights with thresholds of their own; the gradient pass computes the losses of the others.
    """
    thresholds: WeightThresholds = {}
    losses: dict[Edge, list[float]] = {}
    levels = ChoicePoints(prepared.resolver)
    for point in itertools.chain.from_iterable(map(levels.of, range(levels.count))):
        scales = WeightScales.of(prepared, point.plan, point.bits)
        scales.weights = {e: w for e, w in scales.weights.items() if e in scaled and w.key in point.keys}
        scales.set_sketches_from_gradients(probes)
        alone = scales.best_factors_alone(point.plan)
        thresholds |= scales.thresholds(alone)
        for edge, loss in scales.losses(alone).items():
            losses.setdefault(edge, []).append(loss)
    return thresholds, losses


def _weights_with_own_thresholds(prepared: Prepared) -> set[Edge]:
    """The weights that have thresholds of their own (`own_ends`) at every choice of their bits."""
    groups = of_constants(prepared)
    scaled, levels = {g.edges[0] for g in groups}, ChoicePoints(prepared.resolver)
    for point in itertools.chain.from_iterable(map(levels.of, range(levels.count))):
        scaled -= {g.edges[0] for g in groups if g.key in point.keys and own_ends(point.plan, g) is None}
    return scaled


# ---------------------------------------------------------------- what is chosen
@dataclass(frozen=True, slots=True)
class _Chosen:
    """The thresholds that `_choose` takes.

    Args:
        name: of the proposal; `estimated` where none is significantly better.
        gain: theirs over the estimated ones, on validation samples.
        test_forwards: the cost of testing them with statistics of the tuning samples.
        simulations: number of Plans that were simulated.
    """

    name: str
    gain: Gain
    test_forwards: float
    simulations: float


def _choose(task: RefinementTask, confirmation: Confirmation, folds: Sequence[_Proposals], bits: Bits) -> _Chosen:
    """Take the first proposal that is significantly better at a point, or any that runs where the estimated thresholds
    do not.

    Args:
        folds: the proposals of the folds.
        bits: the point.
    """
    test = ProposalTest(task.estimated, task.goal.objective, confirmation, folds, [bits] * len(folds))
    value, losses = _measure(task, task.estimated, bits)
    runs, before, simulations = value > -math.inf, [losses] * len(folds), 1.0
    for name in ("refined", "mse"):
        # the proposal `mse` is the same in every fold, and measured once
        differing = folds[:1] if name == "mse" else folds
        measured = [_measure(task, fold.thresholds[name], bits) for fold in differing]
        simulations += len(measured)
        after = [losses for _, losses in measured] * (len(folds) // len(measured))
        if all(value > -math.inf for value, _ in measured) and (not runs or test.accepts(name, before, after)):
            return _Chosen(name, confirmation.gain(before, after), test.forwards, simulations)
    return _Chosen("estimated", confirmation.gain(before, before), test.forwards, simulations)


def _clipped_share(task: RefinementTask, prepared: Prepared, bits: Bits) -> float:
    """The fraction of values that thresholds clip at a point."""
    plan = plan_or_refusal(prepared.resolver, bits)
    thresholds = {} if isinstance(plan, InfeasibleBits) else plan.thresholds
    return clipped_share(task.estimated.calibration, task.estimated.space, thresholds)


def _measure(task: RefinementTask, prepared: Prepared, bits: Bits) -> tuple[float, Tensor]:
    """The objective at a point, -inf if it is infeasible or overflows, and the losses of all samples."""
    plan, objective = plan_or_refusal(prepared.resolver, bits), task.goal.objective
    if isinstance(plan, InfeasibleBits):
        return -math.inf, torch.full((task.evaluator.batches.samples,), math.inf, dtype=torch.float64)
    measured = task.evaluator.measure(plan)
    losses = losses_of(objective, measured)
    if any(measured.extremes.overflows.values()):
        return -math.inf, losses
    value = float(objective.finish(measured.contributions[objective.name].mean(0)))
    return -math.inf if math.isnan(value) else value, losses
