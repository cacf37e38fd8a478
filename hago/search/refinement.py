"""Refinement: thresholds that minimize the error at the outputs, from a few passes, before any bits are searched.

Activations: the estimator of least squared error sees every value weighted by its squared gradient, so it minimizes the
error at the outputs instead of that of the tensor. Weights: see `hago.search.weight_scales`. Every round of changes is
kept only if it makes the simulated outputs better on the samples that may shape it.

Proposals are confirmed on samples that did not shape them (`hago.search.confirmation`). Where a proposal is not surely
better there than the thresholds that it would replace, these stay.

There are two ways, and a search takes one of them before its first trial. The first improves all thresholds together at
one point. The second, at the end of this module, finds thresholds for every weight at every number of bits from one
pass: each channel takes the threshold with the least expected loss of that channel alone (`WeightScales.alone`). These
do not depend on the other weights, so they hold in the whole space. Under limits on costs and over a front they are
better than thresholds that were improved together, which hold at their own point only.
"""

from __future__ import annotations

import collections
import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from hago.arithmetic.schemes import Grid
from hago.arithmetic.types import Edge
from hago.calibration.collect import Calibration
from hago.calibration.estimators import Mse
from hago.calibration.statistics import TensorStatistics
from hago.cost.cost import plan_cost
from hago.data.batches import Batch
from hago.errors import InfeasibleBits
from hago.plan.feasibility import ChoicePoints, nearest_feasible, plan_or_refusal, widest_feasible
from hago.plan.space import Bits, Space
from hago.plan.threshold_sources import EstimatedThresholds, estimated_resolver
from hago.search.confirmation import (
    MARGIN,
    Confirmation,
    Gain,
    KeptAside,
    UnseenSamples,
    clipped_share,
    figures_of,
    losses_of,
)
from hago.search.evaluate import Evaluator, Measurement, widest_safe_bits
from hago.search.goal import Goal
from hago.search.gradients import (
    Gradients,
    Spectrum,
    gradients,
    thinned,
)
from hago.search.guidance import make_surrogate
from hago.search.objective import Objective, Pull
from hago.search.prepare import Prepared
from hago.search.sensitivity import curvature_of, gradients_by_part, gradients_of_choices, sensitivity_from
from hago.search.weight_scales import (
    KEPT_ERROR_BYTES,
    Chosen,
    ThresholdPair,
    WeightGradients,
    WeightScales,
    of_constants,
    own_ends,
)
from hago.searchers.knapsack import Knapsack
from hago.searchers.surrogate import Surrogate

#: Largest number of samples that one pass differentiates; rounds are measured on all samples that may shape them.
SAMPLES: Final = 128
#: Cost of a forward and a backward pass, in forward passes.
PASS: Final = 3.0
#: Number of samples that share one random vector.
CHUNK_SAMPLES: Final = 4
#: Number of samples that are differentiated at once where nothing is random.
SLOPES: Final = 16
#: Part of the weight of a value that does not depend on its gradient.
PLAIN: Final = 0.002
#: Part of the loss that a round tries to gain; halved after each round that gains nothing.
ROUND_SHARE: Final = 0.5
#: How much more the values of a channel of a weight may err than with the estimated threshold, by the sum of squares.
#: Powers of two have no bound: a step from one to the next changes this sum by more, whichever is better.
MORE_ERRORS: Final = 1.3
#: Rounds without a gain before the last ends it.
REFINEMENT_ROUNDS: Final = 3
#: Choices of each group whose losses are worked out where nothing asks for fewer bits: moves begin at the most.
NEAR: Final = 1


@dataclass(frozen=True, slots=True)
class StartingPoint:
    """Where the trials of a search begin. The steps before the first trial make it.

    Args:
        prepared: with the thresholds that points are scored with.
        guide: the expected losses and costs; None where the searcher has no guide.
        bits: the first point; with a guide, the best expected one that keeps the limits on costs.
        forwards: the cost of gradients, in passes of the float model over the data.
        simulated: how often a Plan was simulated.
    """

    prepared: Prepared
    guide: Surrogate | None
    bits: Bits
    forwards: float = 0.0
    simulated: float = 0.0

    @property
    def most(self) -> Bits:
        """The most bits that accumulators are known to hold."""
        return (self.guide and self.guide.most) or self.bits


def refine_thresholds(
    prepared: Prepared,
    goal: Goal,
    metric: str,
    evaluator: Evaluator,
    most: float,
    seed: int = 0,
    confirmation: Confirmation | None = None,
) -> StartingPoint:
    """Refine the thresholds of activations, then those of weights, at one point.

    Args:
        metric: which cost the guide is about; see `make_surrogate`.
        evaluator: of the search, over its data.
        most: what may be spent on one turn, in forwards; the first pass is spent in any case.
        confirmation: what is kept aside, to take only what is surely better there; None, as in logs of version 1, to
            take what is better on all samples.
    """
    start_of = (prepared, with_statistics(prepared, prepared.calibration), goal, metric, evaluator, seed)
    if confirmation is None:
        whole = _Refinement.for_first_version(*start_of)
        whole.improve(most)
        return whole.result()
    *turns, whole = _start_together(*start_of, confirmation)
    for turn in turns:
        turn.known = whole.known
    steps = _Confirmed(prepared, confirmation, turns)
    steps.choose_activations()
    steps.choose_weights(most)
    if len(turns) == 1:
        return turns[0].result((steps.unseen_forwards, 0.0), steps.said())
    # the confirmed proposal is made again from all samples
    whole.take(steps.activations)
    if steps.rounds:
        whole.improve(most, steps.rounds)
    return whole.result(steps.spent, steps.said())


def _start_together(
    prepared: Prepared,
    plain: Prepared,
    goal: Goal,
    metric: str,
    evaluator: Evaluator,
    seed: int,
    confirmation: Confirmation,
) -> list[_Refinement]:
    """Start the refinements of all turns, and after them that of all samples.

    One pass serves them all: each turn takes the gradients of the parts that it does not keep aside. With one turn, the
    last refinement is that of the turn too.
    """
    given, asides = (prepared, plain, goal.objective, evaluator, seed), confirmation.turns
    whole = _Refinement(*given, asides[0] if len(asides) == 1 else None)
    if not plain.hardware.requantize.power_of_two:
        whole.scales.bar_errors(MORE_ERRORS)
    turns = [_Refinement(*given, aside, whole.scales.copied()) for aside in asides] if len(asides) > 1 else []
    parts = [whole.batch.rows(a.first, a.last) for a in asides] if turns else [whole.batch]
    probes = WeightGradients.of_probes(plain, max(-(-part.size // CHUNK_SAMPLES) for part in parts), len(parts))
    start = widest_safe_bits(plain.resolver, prepared.calibration.peaks)
    choices = NEAR if not metric and start == widest_feasible(plain.resolver).bits else None
    seen = gradients_by_part(plain, goal.objective, seed, parts, CHUNK_SAMPLES, probes, choices)
    products = whole.scales.products(probes)
    probes.sums.clear()
    for number, turn in enumerate([*turns, whole]):
        own = [i for i in range(len(parts)) if not turns or i != number]
        turn.scales.take_products(products, probes.columns(own))
        turn.begin(goal, metric, Gradients.sum([seen[i] for i in own]), guided=turn is whole, choices=choices)
        if turn is not whole or not turns:
            turn.count_gradients(PASS * parts[number].size / evaluator.batches.samples)
    return [whole, whole] if len(asides) == 1 else [*turns, whole]


# ---------------------------------------------------------------- where the search begins
def solve_within_limits(prepared: Prepared, goal: Goal, guide: Surrogate, start: Bits) -> dict[str, int]:
    """The best expected point that keeps the limits on costs, no group having more bits than at the start: the solution
    of an integer program over the guide's tables, and from there the steps that lose least by what they save."""
    picked = dict(start)
    limits = [x for x in goal.limits if x.is_cost]
    if not limits:
        return picked
    groups = prepared.space.groups.items()
    space = Space({k: replace(g, choices=tuple(b for b in g.choices if b <= start[k])) for k, g in groups})
    if guide.limit is not None:
        solved = Knapsack(space, guide).solve(guide.limit)
        fits = None if solved is None else nearest_feasible(prepared.resolver, solved.bits, fewer=True)
        picked = picked if fits is None else fits.bits

    def missed(bits: Bits) -> float:
        plan = plan_or_refusal(prepared.resolver, bits)
        if isinstance(plan, InfeasibleBits):
            return math.inf
        figures = plan_cost(plan).figures
        return sum(x.shortfall(float(figures[x.figure])) for x in limits)

    left = missed(picked)
    while left > 0.0:
        steps = []
        for key, group in space.groups.items():
            lower = [b for b in group.choices if b < picked[key]]
            if lower and not group.is_kind:
                point = {**picked, key: lower[0]}
                saved = left - missed(point)
                steps.append(((guide.loss(point) - guide.loss(picked)) / saved, key, point) if saved > 0 else None)
        able = [s for s in steps if s is not None]
        if not able:
            break
        picked = min(able, key=lambda s: s[:2])[2]
        left = missed(picked)
    return picked


# ---------------------------------------------------------------- the passes
class _Refinement:
    """The refinement of thresholds at one point, by the samples of one turn.

    Attributes:
        prepared: with the present thresholds.
        picked: the point.
        guide: the expected loss of every choice.
        losses: of all samples, as measured last at the point.
        ways: the thresholds of activations that can be taken, by name.
        kept: the thresholds and the losses after each round that was kept.
        known: measurements of thresholds that turns share, by the key of their Plan.
        spectra: the gradients that the thresholds `weighted` are made from.
        forwards, differentiated: the cost so far, and the part of it for gradients.
        is_first_version: whether to refine as searches whose logs are of version 1 did.
    """

    guide: Surrogate
    picked: Bits
    ways: Mapping[str, Prepared]
    is_first_version = False

    def __init__(
        self,
        prepared: Prepared,
        plain: Prepared,
        objective: Objective,
        evaluator: Evaluator,
        seed: int,
        aside: KeptAside | None = None,
        scales: WeightScales | None = None,
    ) -> None:
        self.given, self.objective, self.evaluator, self.seed, self.aside = prepared, objective, evaluator, seed, aside
        self.prepared = plain
        if scales is None:
            bits = widest_safe_bits(self.prepared.resolver, prepared.calibration.peaks)
            scales = WeightScales.of(self.prepared, self.prepared.resolver(bits), bits, KEPT_ERROR_BYTES)
        self.scales = scales
        self.forwards, self.differentiated = 0.0, 0.0
        seen = evaluator.batches.samples - (0 if aside is None else aside.last - aside.first)
        self.step = -(-seen // SAMPLES)
        self.batch = self._thinned()
        self.losses = torch.zeros(0)
        self.kept: list[tuple[Prepared, Tensor]] = []
        self.known: dict[str, tuple[Measurement, list[Sequence[Tensor]]]] = {}
        self.spectra: Mapping[Edge, Spectrum] = {}
        self._outputs: list[Sequence[Tensor]] = []
        self._full: set[str] = set()

    @staticmethod
    def for_first_version(
        prepared: Prepared, plain: Prepared, goal: Goal, metric: str, evaluator: Evaluator, seed: int
    ) -> _Refinement:
        """Start with a pass over all samples, as searches whose logs are of version 1 did.

        Args:
            plain: with thresholds of the least squared error.
        """
        whole = _Refinement(prepared, plain, goal.objective, evaluator, seed)
        whole.is_first_version = True
        probes = WeightGradients.of_probes(plain)
        measured = gradients_of_choices(plain, goal.objective, seed, CHUNK_SAMPLES, [whole.batch], see=probes.see)
        whole.scales.take_probes(probes)
        whole.begin(goal, metric, measured)
        whole.count_gradients(whole.price)
        return whole

    def begin(
        self,
        goal: Goal,
        metric: str,
        gradients: Gradients,
        *,
        guided: bool = True,
        choices: int | None = None,
    ) -> None:
        """Make the thresholds of activations that are weighted by gradients, the guide, and the point.

        Args:
            gradients: of the samples that may shape thresholds; the scales of weights have theirs already.
            guided: whether a guide is wanted where there are no limits on costs, which it has to find the point for.
            choices: see `sensitivity_from`.
        """
        plain, self.spectra = self.prepared, gradients.spectra
        self.prepared = with_statistics(plain, weighted(plain, gradients.spectra))
        self.ways = {"weighted": self.prepared, "mse": plain}
        start = widest_safe_bits(self.prepared.resolver, self.given.calibration.peaks)
        if not guided and not any(x.is_cost for x in goal.limits):
            self.picked = start
            return
        sensitivity = sensitivity_from(gradients, self.prepared, self.objective, choices)
        guide = make_surrogate(self.prepared, goal, start, self.seed, metric, sensitivity)
        self.guide, self.picked = replace(guide, most=start), solve_within_limits(self.prepared, goal, guide, start)

    def result(self, spent: tuple[float, float] = (0.0, 0.0), said: Mapping[str, Any] | None = None) -> StartingPoint:
        """What a search goes on with.

        Args:
            spent: in forwards by others, on gradients and on simulations.
            said: of what was confirmed.
        """
        prepared = self.prepared if said is None else replace(self.prepared, refined=said)
        simulated = self.forwards - self.differentiated
        return StartingPoint(prepared, self.guide, self.picked, self.differentiated + spent[0], simulated + spent[1])

    def take(self, activations: str) -> None:
        """Take one of the thresholds of activations: `estimated` (those without refinement), `mse`, or `weighted`."""
        self.prepared = self.ways.get(activations, self.given)

    def unseen(self, activations: str, calibration: Calibration) -> Prepared:
        """The thresholds that `take` takes, made from other statistics.

        Args:
            calibration: with statistics that were collected without the samples that are kept aside.
        """
        if activations not in self.ways:
            return with_estimates(self.given, calibration)
        plain = with_statistics(self.ways["mse"], calibration)
        return plain if activations == "mse" else with_statistics(plain, weighted(plain, self.spectra))

    def _thinned(self) -> Batch:
        """The samples that are differentiated, evenly spread over the data."""
        batches, labelled = self.evaluator.batches, self.evaluator.batches.labelled
        labels = self._seen([b.labels] for b in batches if b.labels is not None) if labelled else []
        inputs = thinned(self._seen(b.inputs for b in batches), self.step)
        return Batch(inputs, thinned(labels, self.step)[0] if labelled else None)

    def _seen(self, batches: Iterable[Sequence[Tensor]]) -> Iterable[Sequence[Tensor]]:
        """The parts of batches that may shape thresholds."""
        return batches if self.aside is None else self.aside.shaping(batches)

    @property
    def price(self) -> float:
        """The cost of differentiating the samples once, in passes of the float model over the data."""
        return PASS * self.batch.size / self.evaluator.batches.samples

    def count_gradients(self, forwards: float) -> None:
        """Add to the cost of gradients."""
        self.forwards += forwards
        self.differentiated += forwards

    def improve(self, most: float, rounds: float = math.inf) -> None:
        """Run rounds at the point while they gain.

        Args:
            most: largest cost in forwards, including the cost so far.
            rounds: largest number of rounds that are kept.
        """
        for kept in self.rounds(most):
            if kept >= rounds:
                return

    def rounds(self, most: float) -> Iterator[int]:
        """Run rounds at the point while they gain; yield the number of kept rounds after each that is kept.

        Args:
            most: forwards in all, those before included.
        """
        pull = curvature_of(self.objective).pull
        self.scales.keep(self.picked)
        now, share, failed = self.scales.as_estimated, ROUND_SHARE, 0
        if self.is_first_version and self.objective.name == "accuracy":
            return
        if not self.scales.weights or self.forwards + 2 + self.price > most:
            return
        best, outputs, before = self.measured(self.prepared), self._outputs, self.losses
        known, loss = False, 0.0
        alone = self.scales.alone(self.prepared.resolver(self.picked))
        proposed: Chosen | None = None if _same(alone, now) else alone
        while (
            best is not None
            and failed < REFINEMENT_ROUNDS
            and self.forwards + 1 + (0 if known or proposed else self.price) <= most
        ):
            if proposed is None:
                if not known:
                    loss, known = self._slopes(pull, outputs), True
                proposed = self.scales.improved(now, loss, share)
                if _same(proposed, now):
                    return
            tried = with_refined(self.prepared, self.scales.thresholds(proposed))
            value = self.measured(tried)
            if value is not None and self._is_better(value, best, before):
                best, outputs, now, known, failed = value, self._outputs, dict(proposed), False, 0
                before = self.losses
                self.prepared = tried
                self.kept.append((tried, self.losses))
                yield len(self.kept)
            elif value is None:
                self.scales.bar(self._full, now)
                failed += 1
            else:
                share, failed = share / 2, failed + 1
            proposed = None

    def _is_better(self, value: float, best: float, before: Tensor) -> bool:
        """Whether what was measured last is better. Of objectives that few samples say little of, it is what errs less
        and does not lower them.

        Args:
            before: the losses with which the objective was `best`.
        """
        if self.is_first_version or not self.objective.counts_classes:
            return value > best
        new, old = (x if self.aside is None else self.aside.without(x) for x in (self.losses, before))
        return value >= best and float(new.mean()) < float(old.mean())

    def measured(self, prepared: Prepared, shared: bool = False) -> float | None:
        """The objective at the point, over the samples that may shape thresholds; None if an accumulator overflowed.

        The outputs, and the losses of all samples, are kept in attributes.

        Args:
            shared: whether to keep the measurement for other turns too.
        """
        plan = plan_or_refusal(prepared.resolver, self.picked)
        if isinstance(plan, InfeasibleBits):
            self.losses = torch.full((self.evaluator.batches.samples,), math.inf, dtype=torch.float64)
            return None
        if plan.key in self.known:
            measured, self._outputs = self.known[plan.key]
        else:
            self._outputs = []
            measured = self.evaluator.measure(plan, see=self._outputs.append)
            self.forwards += 1
            if shared:
                self.known[plan.key] = measured, self._outputs
        self.losses = losses_of(self.objective, measured)
        self._full = {name for name, count in measured.peaks.overflows.items() if count}
        if self._full:
            return None
        contributions = measured.contributions[self.objective.name]
        shaping = contributions if self.aside is None else self.aside.without(contributions)
        return self.objective.finish(shaping.mean(0))

    def _slopes(self, pull: Pull, outputs: Sequence[Sequence[Tensor]]) -> float:
        """Compute the slopes of all changes of weights, and return the loss of the outputs."""
        whole = thinned(self._seen(outputs), self.step)
        chunks = ([o[start : start + SLOPES] for o in whole] for start in range(0, self.batch.size, SLOPES))
        losses: list[float] = []

        def probe(wanted: Sequence[Any], labels: Tensor | None, generator: torch.Generator) -> list[Tensor | None]:
            exact = [o.detach() for o in wanted]
            pairs = zip(next(chunks), exact, strict=True)
            errors = [q.to(o.dtype) - o if o.is_floating_point() else None for q, o in pairs]
            pulls = pull(exact, errors)
            both = zip(errors, pulls, strict=True)
            losses.append(sum(float((e * v).sum()) / 2 for e, v in both if e is not None and v is not None))
            return pulls

        p, ops, seen = self.prepared, self.prepared.hardware.known_ops, WeightGradients(1, self.scales.weights.keys())
        gradients(p.graph, [self.batch], {}, probe, lambda edge: (), ops, self.seed, SLOPES, seen.see)
        self.scales.take_slopes(seen)
        self.count_gradients(self.price)
        return sum(losses)


class _Confirmed:
    """The steps of refinement, each taken only where it is surely better on samples that did not shape it.

    `choose_activations` comes first, then `choose_weights`.

    Args:
        given: with the thresholds that stay where no proposal is better.
        turns: the refinements, each of which keeps other samples aside.

    Attributes:
        activations: the thresholds of activations that were chosen; see `_Refinement.take`.
        rounds: number of rounds for weights that were confirmed; inf for all of them.
    """

    def __init__(self, given: Prepared, confirmation: Confirmation, turns: Sequence[_Refinement]) -> None:
        self.given, self.confirmation, self.turns = given, confirmation, turns
        self._unseen: UnseenSamples | None = None
        self._before_unseen: list[Tensor] | None = None
        self.activations, self.rounds = "estimated", 0.0
        self.clipped = self.clipped_before = 0.0
        self.before: list[Tensor] = []
        self.after: list[Tensor] = []

    def choose_activations(self) -> None:
        """Choose the same thresholds of activations for all turns; those that overflow are replaced in any case."""
        values = []
        for turn in self.turns:
            values.append(turn.measured(self.given, shared=True))
            self.before.append(turn.losses)
        self.after = self.before
        self.clipped = self.clipped_before = self._clipped("")
        chosen = ""
        for way in ("weighted", "mse"):
            if way == "mse" and self.given.estimator == Mse():
                continue  # these are the given ones
            tried = [turn.measured(turn.ways[way], shared=True) for turn in self.turns]
            losses, clipped = [turn.losses for turn in self.turns], self._clipped(way)
            margin = MARGIN if clipped > self.clipped else 0.0
            better = all(
                new is not None and (old is None or self._is_better(new, old))
                for old, new in zip(values, tried, strict=True)
            )
            sure = None in values or (
                self.confirmation.gain(self.before, losses).is_sure(margin)
                and (not self.confirmation.is_blind or self._unseen_gain(way).is_sure(margin))
            )
            if better and sure:
                chosen, self.after, self.clipped = way, losses, clipped
                break
        self.activations = chosen or self.activations
        for turn in self.turns:
            turn.take(self.activations)
        # outputs may be large, and rounds need only these
        plans = [plan_or_refusal(turn.prepared.resolver, turn.picked) for turn in self.turns]
        taken = {plan.key for plan in plans if not isinstance(plan, InfeasibleBits)}
        for turn in self.turns:
            turn.known = {key: value for key, value in turn.known.items() if key in taken}

    def _unseen_gain(self, way: str) -> Gain:
        """The gain of thresholds of activations over the given ones, both made from statistics that were collected
        without the samples that are kept aside."""
        points = [turn.picked for turn in self.turns]
        if self._unseen is None:
            unseen = self._unseen = UnseenSamples(self.given, self.turns[0].objective, self.confirmation)
            self._before_unseen = unseen.losses(self._proposals("estimated", unseen), points)
        after = self._unseen.losses(self._proposals(way, self._unseen), points)
        return self._unseen.gain(self._before_unseen, after)

    def _proposals(self, way: str, unseen: UnseenSamples) -> list[Prepared]:
        return [turn.unseen(way, each) for turn, each in zip(self.turns, unseen.calibrations, strict=True)]

    def choose_weights(self, most: float) -> None:
        """Choose all rounds for weights, or only the first, or none; stop after two rounds that gain nothing."""
        plain = [turn.prepared for turn in self.turns]
        running = [turn.rounds(most) for turn in self.turns]
        for rounds in running:
            collections.deque(itertools.islice(rounds, 2), maxlen=0)
        every = all(turn.kept for turn in self.turns) and bool(self.turns)
        first_and_last = [[turn.kept[index][1] for turn in self.turns] for index in (0, -1)] if every else []
        if any(self.confirmation.gain(self.after, losses).part > 0.0 for losses in first_and_last):
            for rounds in running:
                collections.deque(rounds, maxlen=0)
        for taken, index in ((math.inf, -1), (1.0, 0)) if every else ():
            losses = [turn.kept[index][1] for turn in self.turns]
            if self.confirmation.gain(self.after, losses).is_sure():
                for turn in self.turns:
                    turn.prepared = turn.kept[index][0]
                self.rounds, self.after = taken, losses
                return
        for turn, prepared in zip(self.turns, plain, strict=True):
            turn.prepared = prepared

    @property
    def spent(self) -> tuple[float, float]:
        """The cost of all turns in forwards: for gradients, and for simulations."""
        differentiated = sum(t.differentiated for t in self.turns)
        return differentiated + self.unseen_forwards, sum(t.forwards for t in self.turns) - differentiated

    @property
    def unseen_forwards(self) -> float:
        """The cost of confirming thresholds of activations without statistics of the samples that are kept aside."""
        return 0.0 if self._unseen is None else self._unseen.forwards

    def said(self) -> dict[str, Any]:
        """The entries of the log's header on refinement, as JSON values."""
        gain = self.confirmation.gain(self.before, self.after)
        weights = "estimated" if not self.rounds else "refined" if self.rounds == math.inf else "refined once"
        return {
            **self.confirmation.said,
            "activations": self.activations,
            "weights": weights,
            **figures_of(gain, self.clipped, self.clipped_before),
        }

    def _is_better(self, new: float, old: float) -> bool:
        coarse = self.turns[0].objective.loss is None or self.turns[0].objective.counts_classes
        return new >= old if coarse else new > old

    def _clipped(self, way: str) -> float:
        """The fraction of values that these thresholds of activations clip, on average over turns."""
        calibration, space = self.given.calibration, self.given.space
        plans = [plan_or_refusal(turn.ways.get(way, self.given).resolver, turn.picked) for turn in self.turns]
        feasible = [plan for plan in plans if not isinstance(plan, InfeasibleBits)]
        shares = [clipped_share(calibration, space, plan.thresholds) for plan in feasible]
        return sum(shares) / len(shares) if shares else 0.0


def _same(one: Chosen, other: Chosen) -> bool:
    return all(torch.equal(one[edge], other[edge]) for edge in other)


def with_estimates(prepared: Prepared, calibration: Calibration) -> Prepared:
    """A copy with thresholds of activations that the same estimator gives on these statistics."""
    source = prepared.resolver.thresholds
    assert isinstance(source, EstimatedThresholds)
    resolver = prepared.resolver.with_thresholds(source.with_statistics(calibration.statistics))
    return replace(prepared, calibration=calibration, resolver=resolver)


def with_statistics(prepared: Prepared, calibration: Calibration) -> Prepared:
    """A copy with thresholds of least squared error on these statistics; those of constants are kept."""
    p, mse, source = prepared, Mse(), prepared.resolver.thresholds
    if p.estimator == mse and isinstance(source, EstimatedThresholds):
        resolver = p.resolver.with_thresholds(source.with_statistics(calibration.statistics))
    else:
        ops = p.hardware.known_ops
        resolver = estimated_resolver(p.graph, p.hardware, p.topology, p.space, calibration, mse, ops)
    return replace(p, calibration=calibration, estimator=mse, resolver=resolver, refined=True)


def with_refined(prepared: Prepared, refined: Mapping[tuple[str, Grid], tuple[Tensor, Tensor]]) -> Prepared:
    """A copy with these thresholds; the others are not estimated again."""
    source = prepared.resolver.thresholds
    assert isinstance(source, EstimatedThresholds)
    resolver = prepared.resolver.with_thresholds(source.with_refined(refined))
    return replace(prepared, calibration=replace(prepared.calibration, refined=refined), resolver=resolver)


def weighted(prepared: Prepared, spectra: Mapping[Edge, Spectrum]) -> Calibration:
    """The statistics of activations with every value counted by its squared gradient."""
    masses: dict[str, dict[Edge, Spectrum]] = {}
    for key, group in prepared.space.groups.items():
        node, _, slot = key.rpartition(":")
        edges = prepared.graph.out_edges[node] if slot == "out" else group.edges
        masses.setdefault(group.source, {}).update({e: spectra[e] for e in edges if e in spectra})
    statistics = dict(prepared.calibration.statistics)
    for source, seen in masses.items():
        if source in statistics and statistics[source].channels == 1:
            statistics[source] = _weighted(statistics[source], list(seen.values()))
    return replace(prepared.calibration, statistics=statistics)


def _weighted(plain: TensorStatistics, spectra: Sequence[Spectrum]) -> TensorStatistics:
    bins = plain.histogram.shape[1]
    edges = np.linspace(-1.0, 1.0, bins + 1) * float(plain.limit)
    mass = np.zeros(bins)
    for spectrum in spectra:
        below = np.concatenate([[0.0], np.cumsum(spectrum.mass.numpy())])
        at = spectrum.low + spectrum.width * np.arange(len(below))
        mass += np.diff(np.interp(edges, at, below))
    if not mass.sum() > 0.0:
        return plain
    rest = plain.histogram / plain.histogram.sum()
    return replace(plain, histogram=torch.from_numpy(mass / mass.sum()).unsqueeze(0) * (1.0 - PLAIN) + rest * PLAIN)


# ---------------------------------------------------------------- every choice of bits
def refine_every_choice(
    prepared: Prepared,
    goal: Goal,
    metric: str,
    seed: int = 0,
    *,
    evaluator: Evaluator | None = None,
    within: bool = False,
    confirmation: Confirmation | None = None,
) -> StartingPoint:
    """Refine the thresholds of weights at every number of bits, and those of activations.

    Args:
        metric: which cost the guide is about; see `make_surrogate`.
        evaluator: of the search's data; needed for what follows.
        within: begin with the best expected point that keeps the limits on costs instead, with the thresholds that are
            the best there, refined or not.
        confirmation: what is kept aside, to take only thresholds that are surely better there; None, as in logs of
            version 1, to take what is better on all samples within limits, and refined ones over a front.
    """
    start_of = (prepared, with_statistics(prepared, prepared.calibration), goal, metric, seed)
    if confirmation is None:
        return _unconfirmed(_Proposed.of(*start_of), goal, evaluator if within else None)
    if evaluator is None or not confirmation.turns:
        whole = _Proposed.of(*start_of)
        picked = solve_within_limits(whole.ways["refined"], goal, whole.guide, whole.start) if within else whole.start
        return StartingPoint(replace(prepared, refined=confirmation.said), whole.guide, picked, PASS)
    turns = [_Proposed.of(*start_of, aside) for aside in confirmation.turns]
    # what several turns confirm is made again from all samples
    whole = turns[0] if len(turns) == 1 else _Proposed.of(*start_of)
    settled = whole.ways["refined"]
    picked = solve_within_limits(settled, goal, whole.guide, whole.start) if within else whole.start
    # a front is searched from the most bits on, and used at fewer, as a point is whose cost is made least
    tight = within and any(limit.is_cost for limit in goal.limits)
    point = picked if tight else _middle(settled, whole.guide, whole.start)
    value, losses = _measured(prepared, point, goal, evaluator)
    before = [losses] * len(turns)
    found, spent, gain = "estimated", 1.0, confirmation.gain(before, before)
    unseen: UnseenSamples | None = None
    points = [point] * len(turns)
    for way in ("refined", "mse"):
        ways = [turn.ways[way] for turn in (turns if way == "refined" else turns[:1])]
        tried = [_measured(each, point, goal, evaluator) for each in ways]
        spent += len(tried)
        tried *= len(turns) // len(tried)  # the least squared error of values is the same in every turn
        gained = confirmation.gain(before, [after for _, after in tried])
        runs = all(other > -math.inf for other, _ in tried)
        sure = value == -math.inf or gained.is_sure()
        if runs and sure and value > -math.inf and confirmation.is_blind:
            if unseen is None:
                unseen = UnseenSamples(prepared, goal.objective, confirmation)
                before_unseen = unseen.losses(_unseen(turns, "estimated", unseen), points)
            sure = unseen.gain(before_unseen, unseen.losses(_unseen(turns, way, unseen), points)).is_sure()
        if runs and sure:
            found, gain = way, gained
            break
    plans = [plan_or_refusal(whole.ways[each].resolver, point) for each in (found, "estimated")]
    held = [{} if isinstance(plan, InfeasibleBits) else plan.thresholds for plan in plans]
    shares = [clipped_share(prepared.calibration, prepared.space, thresholds) for thresholds in held]
    said = {**confirmation.said, "thresholds": found, **figures_of(gain, *shares)}
    passes = PASS * len({id(p) for p in (*turns, whole)}) + (0.0 if unseen is None else unseen.forwards)
    return StartingPoint(replace(whole.ways[found], refined=said), whole.guide, picked, passes, spent)


def _unconfirmed(whole: _Proposed, goal: Goal, evaluator: Evaluator | None) -> StartingPoint:
    """What searches whose logs are of version 1 begin with.

    Args:
        evaluator: of the search's data where it goes by limits; None for a front.
    """
    if evaluator is None:
        return StartingPoint(whole.ways["refined"], whole.guide, whole.start, PASS)
    picked = solve_within_limits(whole.ways["refined"], goal, whole.guide, whole.start)
    values = {name: _measured(way, picked, goal, evaluator)[0] for name, way in whole.ways.items()}
    best = max(values, key=lambda name: values[name])
    return StartingPoint(whole.ways[best], whole.guide, picked, PASS, float(len(values)))


@dataclass(frozen=True, slots=True)
class _Proposed:
    """The proposals of one pass over samples.

    Args:
        ways: the thresholds that can be taken, by name: `refined`, `mse` (of the least squared error) and `estimated`
            (those without refinement). The refined threshold of each channel is the best for that channel alone, by a
            few random vectors; together they may be worse than others.
        start: the most bits that accumulators hold.
        spectra, thresholds: the gradients of activations and the thresholds of weights that `refined` is made from.
    """

    ways: Mapping[str, Prepared]
    guide: Surrogate
    start: Bits
    spectra: Mapping[Edge, Spectrum]
    thresholds: ThresholdPair

    @staticmethod
    def of(
        prepared: Prepared, plain: Prepared, goal: Goal, metric: str, seed: int, aside: KeptAside | None = None
    ) -> _Proposed:
        """Make the proposals from the samples that are not kept aside.

        Args:
            plain: with thresholds of the least squared error.
        """
        probes, known = WeightGradients.of_probes(plain), _always_scaled(plain)
        samples = prepared.batches.samples - (0 if aside is None else aside.last - aside.first)
        chunk = max(1, min(CHUNK_SAMPLES, samples // probes.count))
        batches = None if aside is None else aside.shaping_rows(prepared.batches)
        measured = gradients_of_choices(plain, goal.objective, seed, chunk, batches, known=known, see=probes.see)
        thresholds, losses = _chosen(plain, probes, known)
        refined = with_refined(with_statistics(plain, weighted(plain, measured.spectra)), thresholds)
        sensitivity = sensitivity_from(
            replace(measured, weights={**measured.weights, **losses}), refined, goal.objective
        )
        start = widest_safe_bits(refined.resolver, prepared.calibration.peaks)
        guide = make_surrogate(refined, goal, start, seed, metric, sensitivity)
        ways = {"refined": refined, "mse": plain, "estimated": prepared}
        return _Proposed(ways, replace(guide, most=start), start, measured.spectra, thresholds)

    def unseen(self, way: str, calibration: Calibration) -> Prepared:
        """The thresholds of a way with those of activations made from other statistics.

        Args:
            calibration: with statistics that were collected without the samples that are kept aside.
        """
        if way == "estimated":
            return with_estimates(self.ways[way], calibration)
        plain = with_statistics(self.ways["mse"], calibration)
        if way == "mse":
            return plain
        return with_refined(with_statistics(plain, weighted(plain, self.spectra)), self.thresholds)


def _unseen(turns: Sequence[_Proposed], way: str, unseen: UnseenSamples) -> list[Prepared]:
    """The thresholds of a way, turn by turn, made without statistics of the samples that the turn keeps aside."""
    return [turn.unseen(way, each) for turn, each in zip(turns, unseen.calibrations, strict=True)]


def _middle(prepared: Prepared, guide: Surrogate, start: Bits) -> Bits:
    """A point halfway along the front, if the guide finds one, else the start."""
    program = Knapsack(prepared.space, guide)
    solved = None if program.range is None else program.solve(sum(program.range) / 2)
    fits = None if solved is None else nearest_feasible(prepared.resolver, solved.bits, fewer=True)
    return start if fits is None else fits.bits


def _measured(prepared: Prepared, bits: Bits, goal: Goal, evaluator: Evaluator) -> tuple[float, Tensor]:
    """The objective at a point, -inf if it is infeasible or overflows, and the losses of all samples."""
    plan = plan_or_refusal(prepared.resolver, bits)
    if isinstance(plan, InfeasibleBits):
        return -math.inf, torch.full((evaluator.batches.samples,), math.inf, dtype=torch.float64)
    measured = evaluator.measure(plan)
    losses = losses_of(goal.objective, measured)
    if any(measured.peaks.overflows.values()):
        return -math.inf, losses
    value = float(goal.objective.finish(measured.contributions[goal.objective.name].mean(0)))
    return -math.inf if math.isnan(value) else value, losses


def _chosen(
    prepared: Prepared, probes: WeightGradients, known: Collection[Edge]
) -> tuple[ThresholdPair, dict[Edge, list[float]]]:
    """The thresholds of weights at every number of bits, and by edge the expected loss of each, most bits first.

    Args:
        known: the weights that have thresholds at every choice; the pass itself measures the losses of the others.
    """
    thresholds: ThresholdPair = {}
    losses: dict[Edge, list[float]] = {}
    levels = ChoicePoints(prepared.resolver)
    for shown in itertools.chain.from_iterable(map(levels.of, range(levels.count))):
        scales = WeightScales.of(prepared, shown.plan, shown.bits)
        scales.weights = {e: w for e, w in scales.weights.items() if e in known and w.key in shown.keys}
        scales.take_probes(probes)
        alone = scales.alone(shown.plan)
        thresholds |= scales.thresholds(alone)
        for edge, loss in scales.losses(alone).items():
            losses.setdefault(edge, []).append(loss)
    return thresholds, losses


def _always_scaled(prepared: Prepared) -> set[Edge]:
    """The weights that have thresholds of their own at every number of their bits."""
    groups = of_constants(prepared)
    scaled, levels = {g.edges[0] for g in groups}, ChoicePoints(prepared.resolver)
    for shown in itertools.chain.from_iterable(map(levels.of, range(levels.count))):
        scaled -= {g.edges[0] for g in groups if g.key in shown.keys and own_ends(shown.plan, g) is None}
    return scaled
