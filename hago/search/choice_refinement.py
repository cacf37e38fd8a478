"""Refinement of the thresholds of weights at every number of bits, from one pass.

Each channel takes the threshold with the least expected loss of that channel alone
(`WeightScales.best_factors_alone`). These thresholds do not depend on those of other weights, so they hold in the whole
space. Under limits on costs and over a front they are better than thresholds that were improved together
(`hago.search.refinement`), which hold at their own point only.

Like those, they are confirmed on samples that did not shape them: see `hago.search.confirmation`.
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
from hago.search.confirmation import Confirmation, KeptAside, UnseenSamples, clipped_share, figures_of, losses_of
from hago.search.gradients import CHUNK_SAMPLES, GRADIENT_FORWARDS, Spectrum
from hago.search.guidance import make_surrogate
from hago.search.preparation import Prepared
from hago.search.proposed_thresholds import RefinementTask, weighted, with_estimates, with_refined, with_statistics
from hago.search.safe_bits import safe_bits
from hago.search.sensitivity import gradients_of_choices, sensitivity_from
from hago.search.starting_point import StartingPoint, bits_within_limits
from hago.search.weight_scales import ThresholdPair, WeightGradients, WeightScales, of_constants, own_ends
from hago.searchers import Knapsack, Surrogate


def refine_every_choice(
    task: RefinementTask, *, within: bool = False, confirmation: Confirmation | None = None
) -> StartingPoint:
    """Refine the thresholds of weights at every number of bits, and those of activations.

    Args:
        within: begin with the best expected point that keeps the limits on costs, instead of the most bits.
        confirmation: the samples that are kept aside, to take only thresholds that are surely better there; None, as in
            logs of version 1, to take those that are better on all samples within limits, and the refined ones over a
            front.
    """
    if confirmation is None:
        return _unconfirmed(task, within)
    turns = [_Proposals.of(task, aside) for aside in confirmation.turns]
    # the confirmed proposal of several turns is made again from all samples
    proposals = turns[0] if len(turns) == 1 else _Proposals.of(task)
    bits = proposals.first_bits(task, within)
    if not turns:
        return StartingPoint(
            replace(task.estimated, refined=confirmation.record), proposals.surrogate, bits, GRADIENT_FORWARDS
        )
    # a front is searched from the most bits on, and used at fewer, as a point is whose cost is minimized
    is_limited = within and any(limit.is_cost for limit in task.goal.limits)
    choice = _Choice(task, confirmation, turns, bits if is_limited else proposals.middle())
    choice.choose()
    shares = [choice.clipped_share(proposals.thresholds[name]) for name in (choice.name, "estimated")]
    record = {**confirmation.record, "thresholds": choice.name, **figures_of(choice.gain, *shares)}
    passes = len(turns) + (proposals is not turns[0])
    return StartingPoint(
        replace(proposals.thresholds[choice.name], refined=record),
        proposals.surrogate,
        bits,
        GRADIENT_FORWARDS * passes + choice.unseen_forwards,
        choice.simulations,
    )


def _unconfirmed(task: RefinementTask, within: bool) -> StartingPoint:
    """The starting point of searches whose logs are of version 1."""
    proposals = _Proposals.of(task)
    bits = proposals.first_bits(task, within)
    if not within:
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
        start: the most bits that accumulators hold.
        spectra, of_weights: the gradients of activations and the thresholds of weights that `refined` is made from.
    """

    thresholds: Mapping[str, Prepared]
    surrogate: Surrogate
    start: Bits
    spectra: Mapping[Edge, Spectrum]
    of_weights: ThresholdPair

    @staticmethod
    def of(task: RefinementTask, aside: KeptAside | None = None) -> _Proposals:
        """Make the proposals from the samples that are not kept aside."""
        plain, data, objective = task.least_squares, task.estimated.batches, task.goal.objective
        probes, known = WeightGradients.of_probes(plain), _always_scaled(plain)
        samples = data.samples - (0 if aside is None else aside.last - aside.first)
        chunk = max(1, min(CHUNK_SAMPLES, samples // probes.count))
        batches = None if aside is None else aside.shaping_rows(data)
        measured = gradients_of_choices(
            plain, objective, task.seed, chunk, batches, known=known, on_constant=probes.add
        )
        of_weights, losses = _best_alone(plain, probes, known)
        refined = with_refined(with_statistics(plain, weighted(plain, measured.spectra)), of_weights)
        measured = replace(measured, weights={**measured.weights, **losses})
        sensitivity = sensitivity_from(measured, refined, objective)
        start = safe_bits(refined)
        surrogate = make_surrogate(refined, task.goal, start, task.seed, task.metric, sensitivity)
        thresholds = {"refined": refined, "mse": plain, "estimated": task.estimated}
        return _Proposals(thresholds, replace(surrogate, most=start), start, measured.spectra, of_weights)

    def unseen(self, name: str, calibration: Calibration) -> Prepared:
        """The proposal of a name, with thresholds of activations made from other statistics.

        Args:
            calibration: with statistics that were collected without the samples that are kept aside.
        """
        if name == "estimated":
            return with_estimates(self.thresholds[name], calibration)
        plain = with_statistics(self.thresholds["mse"], calibration)
        if name == "mse":
            return plain
        return with_refined(with_statistics(plain, weighted(plain, self.spectra)), self.of_weights)

    def first_bits(self, task: RefinementTask, within: bool) -> Bits:
        """The best expected point that keeps the limits on costs, or the most bits."""
        return (
            bits_within_limits(self.thresholds["refined"], task.goal, self.surrogate, self.start)
            if within
            else self.start
        )

    def middle(self) -> Bits:
        """A point halfway along the front, if the surrogate finds one, else the most bits."""
        prepared = self.thresholds["refined"]
        program = Knapsack(prepared.space, self.surrogate)
        solved = None if program.range is None else program.solve(sum(program.range) / 2)
        point = None if solved is None else nearest_feasible(prepared.resolver, solved.bits, fewer=True)
        return self.start if point is None else point.bits


def _best_alone(
    prepared: Prepared, probes: WeightGradients, known: Collection[Edge]
) -> tuple[ThresholdPair, dict[Edge, list[float]]]:
    """The thresholds of weights at every number of bits, and by edge the expected loss of each, most bits first.

    Args:
        known: the weights that have thresholds at every choice; the pass itself measures the losses of the others.
    """
    thresholds: ThresholdPair = {}
    losses: dict[Edge, list[float]] = {}
    levels = ChoicePoints(prepared.resolver)
    for point in itertools.chain.from_iterable(map(levels.of, range(levels.count))):
        scales = WeightScales.of(prepared, point.plan, point.bits)
        scales.weights = {e: w for e, w in scales.weights.items() if e in known and w.key in point.keys}
        scales.set_sketches_from_gradients(probes)
        alone = scales.best_factors_alone(point.plan)
        thresholds |= scales.thresholds(alone)
        for edge, loss in scales.losses(alone).items():
            losses.setdefault(edge, []).append(loss)
    return thresholds, losses


def _always_scaled(prepared: Prepared) -> set[Edge]:
    """The weights that have thresholds of their own at every number of their bits."""
    groups = of_constants(prepared)
    scaled, levels = {g.edges[0] for g in groups}, ChoicePoints(prepared.resolver)
    for point in itertools.chain.from_iterable(map(levels.of, range(levels.count))):
        scaled -= {g.edges[0] for g in groups if g.key in point.keys and own_ends(point.plan, g) is None}
    return scaled


# ---------------------------------------------------------------- what is chosen
class _Choice:
    """The choice of the proposal that is surely better at one point. `refine_every_choice` makes one, calls `choose`,
    and reads the attributes.

    Args:
        turns: the proposals of the turns.
        bits: the point.

    Attributes:
        name: of the chosen thresholds; `estimated` where no proposal is surely better.
        gain: theirs over the estimated ones.
        simulations: number of Plans that were simulated.
    """

    def __init__(
        self, task: RefinementTask, confirmation: Confirmation, turns: Sequence[_Proposals], bits: Bits
    ) -> None:
        self.task, self.confirmation, self.turns, self.bits = task, confirmation, turns, bits
        self.name, self.simulations = "estimated", 1.0
        value, losses = _measure(task, task.estimated, bits)
        self._runs, self._before = value > -math.inf, [losses] * len(turns)
        self.gain = confirmation.gain(self._before, self._before)
        self._unseen: UnseenSamples | None = None
        self._before_unseen: list[Tensor] | None = None

    def choose(self) -> None:
        """Take the first proposal that is surely better, or any that runs where the estimated thresholds do not."""
        for name in ("refined", "mse"):
            # the least squared error of values is the same in every turn
            proposals = [turn.thresholds[name] for turn in (self.turns if name == "refined" else self.turns[:1])]
            measured = [_measure(self.task, prepared, self.bits) for prepared in proposals]
            self.simulations += len(measured)
            measured *= len(self.turns) // len(measured)
            gain = self.confirmation.gain(self._before, [losses for _, losses in measured])
            runs = all(value > -math.inf for value, _ in measured)
            if runs and (not self._runs or (gain.is_sure() and self._is_confirmed_unseen(name))):
                self.name, self.gain = name, gain
                return

    def _is_confirmed_unseen(self, name: str) -> bool:
        """Whether a proposal is surely better too with thresholds of activations that are made from statistics that
        were collected without the samples that are kept aside."""
        if not self.confirmation.is_blind:
            return True
        if self._unseen is None:
            self._unseen = UnseenSamples(self.task.estimated, self.task.goal.objective, self.confirmation)
            self._before_unseen = self._losses_unseen("estimated", self._unseen)
        return self._unseen.gain(self._before_unseen, self._losses_unseen(name, self._unseen)).is_sure()

    def _losses_unseen(self, name: str, unseen: UnseenSamples) -> list[Tensor] | None:
        proposals = [turn.unseen(name, each) for turn, each in zip(self.turns, unseen.calibrations, strict=True)]
        return unseen.losses(proposals, [self.bits] * len(self.turns))

    @property
    def unseen_forwards(self) -> float:
        """The cost of collecting statistics without the samples that are kept aside, and of measuring with them."""
        return 0.0 if self._unseen is None else self._unseen.forwards

    def clipped_share(self, prepared: Prepared) -> float:
        """The fraction of values that thresholds clip at the point."""
        plan = plan_or_refusal(prepared.resolver, self.bits)
        thresholds = {} if isinstance(plan, InfeasibleBits) else plan.thresholds
        return clipped_share(self.task.estimated.calibration, self.task.estimated.space, thresholds)


def _measure(task: RefinementTask, prepared: Prepared, bits: Bits) -> tuple[float, Tensor]:
    """The objective at a point, -inf if it is infeasible or overflows, and the losses of all samples."""
    plan, objective = plan_or_refusal(prepared.resolver, bits), task.goal.objective
    if isinstance(plan, InfeasibleBits):
        return -math.inf, torch.full((task.evaluator.batches.samples,), math.inf, dtype=torch.float64)
    measured = task.evaluator.measure(plan)
    losses = losses_of(objective, measured)
    if any(measured.peaks.overflows.values()):
        return -math.inf, losses
    value = float(objective.finish(measured.contributions[objective.name].mean(0)))
    return -math.inf if math.isnan(value) else value, losses
