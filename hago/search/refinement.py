"""Refinement of thresholds at one point: all thresholds together are changed so that the simulated outputs err less.

First the thresholds of activations are chosen among those of `hago.search.proposed_thresholds`. Then rounds change the
scales of weights (`hago.search.weight_scales`); a round is accepted only if it makes the simulated outputs better on
the samples that may shape it. Proposals are confirmed on samples that did not shape them: see
`hago.search.confirmation`. Where a proposal is not surely better there than the thresholds that it would replace, these
stay.

A search that goes along many numbers of bits refines thresholds in another way: `hago.search.choice_refinement`.
"""

from __future__ import annotations

import collections
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor

from hago.arithmetic.types import Edge
from hago.calibration import Calibration, Mse
from hago.data import Batch
from hago.errors import InfeasibleBits
from hago.plan import Bits
from hago.plan.feasibility import plan_or_refusal, widest_feasible
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
from hago.search.evaluate import Measurement
from hago.search.gradients import CHUNK_SAMPLES, GRADIENT_FORWARDS, Gradients, Spectrum, gradients, thinned
from hago.search.guidance import make_surrogate
from hago.search.objective import Pull
from hago.search.preparation import Prepared
from hago.search.proposed_thresholds import RefinementTask, weighted, with_estimates, with_refined, with_statistics
from hago.search.safe_bits import safe_bits
from hago.search.sensitivity import curvature_of, gradients_by_part, gradients_of_choices, sensitivity_from
from hago.search.starting_point import StartingPoint, bits_within_limits
from hago.search.weight_scales import KEPT_ERROR_BYTES, Chosen, WeightGradients, WeightScales
from hago.searchers import Surrogate

#: Largest number of samples that one pass differentiates; rounds are measured on all samples that may shape them.
SAMPLES: Final = 128
#: Number of samples that are differentiated at once where nothing is random.
SLOPES: Final = 16
#: Part of the loss that a round tries to gain; halved after each round that gains nothing.
ROUND_SHARE: Final = 0.5
#: How much more the values of a channel of a weight may err than with the estimated threshold, by the sum of squares.
#: Powers of two have no bound: a step from one to the next changes this sum by more, whichever is better.
MORE_ERRORS: Final = 1.3
#: Rounds without a gain before the last ends it.
REFINEMENT_ROUNDS: Final = 3
#: Choices of each group whose losses are worked out where nothing asks for fewer bits: moves begin at the most.
NEAR: Final = 1


def refine_thresholds(task: RefinementTask, most: float, confirmation: Confirmation | None = None) -> StartingPoint:
    """Refine the thresholds of activations, then those of weights, at one point.

    Args:
        most: the cost that one turn may have, in forwards; the first pass is made in any case.
        confirmation: the samples that are kept aside, to take only proposals that are surely better there; None, as in
            logs of version 1, to take those that are better on all samples.
    """
    if confirmation is None:
        refinement = _Refinement.for_first_version(task)
        refinement.run_rounds(most)
        return refinement.starting_point()
    *turns, of_all_samples = _start_together(task, confirmation)
    for turn in turns:
        turn.shared = of_all_samples.shared
    steps = _ConfirmedSteps(task, confirmation, turns)
    steps.choose_activations()
    steps.choose_weights(most)
    if len(turns) == 1:
        return turns[0].starting_point(steps.unseen_forwards, record=steps.record())
    # the confirmed proposal is made again from all samples
    of_all_samples.use_activations(steps.activations)
    if steps.rounds:
        of_all_samples.run_rounds(most, steps.rounds)
    return of_all_samples.starting_point(*steps.forwards, record=steps.record())


def _start_together(task: RefinementTask, confirmation: Confirmation) -> list[_Refinement]:
    """Start the refinements of all turns, and after them that of all samples.

    One pass serves them all: each turn takes the gradients of the parts that it does not keep aside. With one turn, the
    last refinement is that of the turn too.
    """
    asides, resolver = confirmation.turns, task.least_squares.resolver
    last = _Refinement(task, asides[0] if len(asides) == 1 else None)
    if not task.estimated.hardware.requantize.power_of_two:
        last.scales.bar_large_errors(MORE_ERRORS)
    turns = [_Refinement(task, aside, last.scales.copy_without_slopes()) for aside in asides] if len(asides) > 1 else []
    parts = [last.batch.rows(aside.first, aside.last) for aside in asides] if turns else [last.batch]
    chunks = max(-(-part.size // CHUNK_SAMPLES) for part in parts)
    probes = WeightGradients.of_probes(task.least_squares, chunks, len(parts))
    start = safe_bits(task.least_squares)
    choices = NEAR if not task.metric and start == widest_feasible(resolver).bits else None
    by_part = gradients_by_part(
        task.least_squares, task.goal.objective, task.seed, parts, CHUNK_SAMPLES, probes, choices
    )
    products = last.scales.products(probes)
    probes.sums.clear()
    for number, refinement in enumerate([*turns, last]):
        shaping = [i for i in range(len(parts)) if not turns or i != number]
        refinement.scales.set_sketches(products, probes.columns(shaping))
        is_last = refinement is last
        refinement.begin(Gradients.sum([by_part[i] for i in shaping]), needs_surrogate=is_last, choices=choices)
        if not is_last or not turns:
            share = parts[number].size / task.evaluator.batches.samples
            refinement.count_gradients(GRADIENT_FORWARDS * share)
    return [last, last] if len(asides) == 1 else [*turns, last]


# ---------------------------------------------------------------- the passes
class _Refinement:
    """The refinement of thresholds at one point, by the samples of one turn. `_start_together` makes one per turn.

    Args:
        aside: the samples that must not shape thresholds; None where all may.
        scales: of the weights at the point; made here by default.

    Attributes:
        prepared: with the present thresholds.
        bits: the point.
        surrogate: the expected loss of every choice.
        proposals: the thresholds of activations that can be taken, by name.
        losses: of all samples, as measured last at the point.
        accepted: the thresholds and the losses after each round that was accepted.
        shared: measurements of thresholds that turns share, by the key of their Plan.
        spectra: the gradients that the thresholds `weighted` are made from.
        forwards, gradient_forwards: the cost so far, and the part of it for gradients.
        is_first_version: whether to refine as searches whose logs are of version 1 did.
    """

    surrogate: Surrogate
    bits: Bits
    proposals: Mapping[str, Prepared]
    spectra: Mapping[Edge, Spectrum]
    is_first_version = False

    def __init__(
        self, task: RefinementTask, aside: KeptAside | None = None, scales: WeightScales | None = None
    ) -> None:
        self.task, self.aside = task, aside
        self.objective, self.evaluator = task.goal.objective, task.evaluator
        self.prepared = task.least_squares
        if scales is None:
            bits = safe_bits(self.prepared)
            scales = WeightScales.of(self.prepared, self.prepared.resolver(bits), bits, KEPT_ERROR_BYTES)
        self.scales = scales
        self.forwards, self.gradient_forwards = 0.0, 0.0
        shaping = self.evaluator.batches.samples - (0 if aside is None else aside.last - aside.first)
        self.step = -(-shaping // SAMPLES)
        self.batch = self._samples_to_differentiate()
        self.losses = torch.zeros(0)
        self.accepted: list[tuple[Prepared, Tensor]] = []
        self.shared: dict[str, tuple[Measurement, list[Sequence[Tensor]]]] = {}
        self._outputs: list[Sequence[Tensor]] = []
        self._overflowing: set[str] = set()

    @staticmethod
    def for_first_version(task: RefinementTask) -> _Refinement:
        """Start with a pass over all samples, as searches whose logs are of version 1 did."""
        refinement = _Refinement(task)
        refinement.is_first_version = True
        plain, objective = task.least_squares, task.goal.objective
        probes = WeightGradients.of_probes(plain)
        measured = gradients_of_choices(
            plain, objective, task.seed, CHUNK_SAMPLES, [refinement.batch], on_constant=probes.add
        )
        refinement.scales.set_sketches_from_gradients(probes)
        refinement.begin(measured)
        refinement.count_gradients(refinement.gradient_pass_forwards)
        return refinement

    def begin(self, gradients: Gradients, *, needs_surrogate: bool = True, choices: int | None = None) -> None:
        """Make the thresholds of activations that are weighted by gradients, the surrogate, and the point.

        Args:
            gradients: of the samples that may shape thresholds; the scales of weights have theirs already.
            needs_surrogate: whether a surrogate is made where no limit on a cost needs one to find the point.
            choices: see `sensitivity_from`.
        """
        task, self.spectra = self.task, gradients.spectra
        self.prepared = with_statistics(task.least_squares, weighted(task.least_squares, gradients.spectra))
        self.proposals = {"weighted": self.prepared, "mse": task.least_squares}
        start = safe_bits(self.prepared)
        if not needs_surrogate and not any(limit.is_cost for limit in task.goal.limits):
            self.bits = start
            return
        sensitivity = sensitivity_from(gradients, self.prepared, self.objective, choices)
        surrogate = make_surrogate(self.prepared, task.goal, start, task.seed, task.metric, sensitivity)
        self.bits = bits_within_limits(self.prepared, task.goal, surrogate, start)
        self.surrogate = replace(surrogate, most=start)

    def starting_point(
        self, gradient_forwards: float = 0.0, simulations: float = 0.0, record: Mapping[str, Any] | None = None
    ) -> StartingPoint:
        """The point that the trials begin with, and its thresholds.

        Args:
            gradient_forwards, simulations: the cost of others, in forwards.
            record: the entries of the log's header on refinement.
        """
        prepared = self.prepared if record is None else replace(self.prepared, refined=record)
        gradient_forwards += self.gradient_forwards
        simulations += self.forwards - self.gradient_forwards
        return StartingPoint(prepared, self.surrogate, self.bits, gradient_forwards, simulations)

    def use_activations(self, activations: str) -> None:
        """Use one of the thresholds of activations from now on: `estimated` (those without refinement), `mse` (of least
        squared error), or `weighted` (by gradients)."""
        self.prepared = self.proposals.get(activations, self.task.estimated)

    def unseen(self, activations: str, calibration: Calibration) -> Prepared:
        """The same thresholds as `use_activations` uses, made from other statistics.

        Args:
            calibration: with statistics that were collected without the samples that are kept aside.
        """
        if activations not in self.proposals:
            return with_estimates(self.task.estimated, calibration)
        plain = with_statistics(self.proposals["mse"], calibration)
        return plain if activations == "mse" else with_statistics(plain, weighted(plain, self.spectra))

    def _samples_to_differentiate(self) -> Batch:
        """The samples that are differentiated, evenly spread over the data."""
        batches, labelled = self.evaluator.batches, self.evaluator.batches.labelled
        labels = self._shaping([b.labels] for b in batches if b.labels is not None) if labelled else []
        inputs = thinned(self._shaping(b.inputs for b in batches), self.step)
        return Batch(inputs, thinned(labels, self.step)[0] if labelled else None)

    def _shaping(self, batches: Iterable[Sequence[Tensor]]) -> Iterable[Sequence[Tensor]]:
        """The parts of batches that may shape thresholds."""
        return batches if self.aside is None else self.aside.shaping(batches)

    @property
    def gradient_pass_forwards(self) -> float:
        """The cost of differentiating the samples once, in passes of the float model over the data."""
        return GRADIENT_FORWARDS * self.batch.size / self.evaluator.batches.samples

    def count_gradients(self, forwards: float) -> None:
        """Add to the cost of gradients."""
        self.forwards += forwards
        self.gradient_forwards += forwards

    def run_rounds(self, most: float, rounds: float = math.inf) -> None:
        """Run rounds at the point while they gain.

        Args:
            most: largest cost in forwards, including the cost so far.
            rounds: largest number of rounds that are accepted.
        """
        for accepted in self.rounds(most):
            if accepted >= rounds:
                return

    def rounds(self, most: float) -> Iterator[int]:
        """Run rounds at the point while they gain; yield the number of accepted rounds after each of them.

        Args:
            most: largest cost in forwards, including the cost so far.
        """
        pull = curvature_of(self.objective).pull
        self.scales.keep_unchanged_bits(self.bits)
        now, share, failed = self.scales.estimated_factors, ROUND_SHARE, 0
        if self.is_first_version and self.objective.name == "accuracy":
            return
        if not self.scales.weights or self.forwards + 2 + self.gradient_pass_forwards > most:
            return
        best, outputs, before = self.measured(self.prepared), self._outputs, self.losses
        known, loss = False, 0.0
        alone = self.scales.best_factors_alone(self.prepared.resolver(self.bits))
        proposed: Chosen | None = None if _same(alone, now) else alone
        while (
            best is not None
            and failed < REFINEMENT_ROUNDS
            and self.forwards + 1 + (0 if known or proposed else self.gradient_pass_forwards) <= most
        ):
            if proposed is None:
                if not known:
                    loss, known = self._slopes(pull, outputs), True
                proposed = self.scales.improve_factors(now, loss, share)
                if _same(proposed, now):
                    return
            tried = with_refined(self.prepared, self.scales.thresholds(proposed))
            value = self.measured(tried)
            if value is not None and self._is_better(value, best, before):
                best, outputs, now, known, failed = value, self._outputs, dict(proposed), False, 0
                before = self.losses
                self.prepared = tried
                self.accepted.append((tried, self.losses))
                yield len(self.accepted)
            elif value is None:
                self.scales.bar_smaller_thresholds(self._overflowing, now)
                failed += 1
            else:
                share, failed = share / 2, failed + 1
            proposed = None

    def _is_better(self, value: float, best: float, before: Tensor) -> bool:
        """Whether the thresholds that were measured last are better: by the objective or, where it counts classes, of
        which few samples say little, by the squared error, if the objective is not lower.

        Args:
            before: the losses with which the objective was `best`.
        """
        if self.is_first_version or not self.objective.counts_classes:
            return value > best
        new, old = (x if self.aside is None else self.aside.without(x) for x in (self.losses, before))
        return value >= best and float(new.mean()) < float(old.mean())

    def measured(self, prepared: Prepared, shared: bool = False) -> float | None:
        """Measure the objective at the point, over the samples that may shape thresholds; None if the point is
        infeasible or an accumulator overflows. The losses of all samples are in `losses` afterwards.

        Args:
            shared: whether to keep the measurement for other turns too.
        """
        plan = plan_or_refusal(prepared.resolver, self.bits)
        if isinstance(plan, InfeasibleBits):
            self.losses = torch.full((self.evaluator.batches.samples,), math.inf, dtype=torch.float64)
            return None
        if plan.key in self.shared:
            measured, self._outputs = self.shared[plan.key]
        else:
            self._outputs = []
            measured = self.evaluator.measure(plan, see=self._outputs.append)
            self.forwards += 1
            if shared:
                self.shared[plan.key] = measured, self._outputs
        self.losses = losses_of(self.objective, measured)
        self._overflowing = {name for name, count in measured.peaks.overflows.items() if count}
        if self._overflowing:
            return None
        contributions = measured.contributions[self.objective.name]
        shaping = contributions if self.aside is None else self.aside.without(contributions)
        return self.objective.finish(shaping.mean(0))

    def _slopes(self, pull: Pull, outputs: Sequence[Sequence[Tensor]]) -> float:
        """Compute the slopes of all changes of weights, and return the loss of the outputs."""
        whole = thinned(self._shaping(outputs), self.step)
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

        graph, ops = self.prepared.graph, self.prepared.hardware.known_ops
        slopes = WeightGradients(1, self.scales.weights.keys())
        gradients(graph, [self.batch], {}, probe, lambda edge: (), ops, self.task.seed, SLOPES, slopes.add)
        self.scales.set_slopes(slopes)
        self.count_gradients(self.gradient_pass_forwards)
        return sum(losses)


class _ConfirmedSteps:
    """The steps of refinement, each taken only where it is surely better on samples that did not shape it.
    `refine_thresholds` calls `choose_activations`, then `choose_weights`.

    Args:
        turns: the refinements, each of which keeps other samples aside.

    Attributes:
        activations: the thresholds of activations that were chosen; see `_Refinement.use_activations`.
        rounds: number of rounds for weights that were confirmed; inf for all of them.
        before, after: the losses of all samples with the estimated thresholds and with the chosen ones, by turn.
        clipped_before, clipped: the shares of values that these thresholds clip.
    """

    def __init__(self, task: RefinementTask, confirmation: Confirmation, turns: Sequence[_Refinement]) -> None:
        self.task, self.confirmation, self.turns = task, confirmation, turns
        self.activations, self.rounds = "estimated", 0.0
        self.clipped = self.clipped_before = 0.0
        self.before: list[Tensor] = []
        self.after: list[Tensor] = []
        self._unseen: UnseenSamples | None = None
        self._before_unseen: list[Tensor] | None = None

    def choose_activations(self) -> None:
        """Choose the same thresholds of activations for all turns; those that overflow are replaced in any case."""
        values = []
        for turn in self.turns:
            values.append(turn.measured(self.task.estimated, shared=True))
            self.before.append(turn.losses)
        self.after = self.before
        self.clipped = self.clipped_before = self._clipped("")
        for activations in ("weighted", "mse"):
            if activations == "mse" and self.task.estimated.estimator == Mse():
                continue  # these are the estimated ones
            tried = [turn.measured(turn.proposals[activations], shared=True) for turn in self.turns]
            losses, clipped = [turn.losses for turn in self.turns], self._clipped(activations)
            margin = MARGIN if clipped > self.clipped else 0.0
            better = all(
                new is not None and (old is None or self._is_better(new, old))
                for old, new in zip(values, tried, strict=True)
            )
            sure = None in values or (
                self.confirmation.gain(self.before, losses).is_sure(margin)
                and (not self.confirmation.is_blind or self._unseen_gain(activations).is_sure(margin))
            )
            if better and sure:
                self.activations, self.after, self.clipped = activations, losses, clipped
                break
        for turn in self.turns:
            turn.use_activations(self.activations)
        # outputs may be large, and rounds need only these
        plans = [plan_or_refusal(turn.prepared.resolver, turn.bits) for turn in self.turns]
        used = {plan.key for plan in plans if not isinstance(plan, InfeasibleBits)}
        for turn in self.turns:
            turn.shared = {key: value for key, value in turn.shared.items() if key in used}

    def _unseen_gain(self, activations: str) -> Gain:
        """The gain of thresholds of activations over the estimated ones, both made from statistics that were collected
        without the samples that are kept aside."""
        points = [turn.bits for turn in self.turns]
        if self._unseen is None:
            unseen = self._unseen = UnseenSamples(self.task.estimated, self.task.goal.objective, self.confirmation)
            self._before_unseen = unseen.losses(self._proposals("estimated", unseen), points)
        after = self._unseen.losses(self._proposals(activations, self._unseen), points)
        return self._unseen.gain(self._before_unseen, after)

    def _proposals(self, activations: str, unseen: UnseenSamples) -> list[Prepared]:
        return [turn.unseen(activations, each) for turn, each in zip(self.turns, unseen.calibrations, strict=True)]

    def choose_weights(self, most: float) -> None:
        """Choose all rounds for weights, or only the first, or none; stop after two rounds that gain nothing."""
        plain = [turn.prepared for turn in self.turns]
        running = [turn.rounds(most) for turn in self.turns]
        for rounds in running:
            collections.deque(itertools.islice(rounds, 2), maxlen=0)
        every = all(turn.accepted for turn in self.turns) and bool(self.turns)
        first_and_last = [[turn.accepted[index][1] for turn in self.turns] for index in (0, -1)] if every else []
        if any(self.confirmation.gain(self.after, losses).part > 0.0 for losses in first_and_last):
            for rounds in running:
                collections.deque(rounds, maxlen=0)
        for count, index in ((math.inf, -1), (1.0, 0)) if every else ():
            losses = [turn.accepted[index][1] for turn in self.turns]
            if self.confirmation.gain(self.after, losses).is_sure():
                for turn in self.turns:
                    turn.prepared = turn.accepted[index][0]
                self.rounds, self.after = count, losses
                return
        for turn, prepared in zip(self.turns, plain, strict=True):
            turn.prepared = prepared

    @property
    def forwards(self) -> tuple[float, float]:
        """The cost of all turns in forwards: for gradients and statistics, and for simulations."""
        gradient_forwards = sum(turn.gradient_forwards for turn in self.turns)
        simulations = sum(turn.forwards for turn in self.turns) - gradient_forwards
        return gradient_forwards + self.unseen_forwards, simulations

    @property
    def unseen_forwards(self) -> float:
        """The cost of confirming thresholds of activations without statistics of the samples that are kept aside."""
        return 0.0 if self._unseen is None else self._unseen.forwards

    def record(self) -> dict[str, Any]:
        """The entries of the log's header on refinement, as JSON values."""
        gain = self.confirmation.gain(self.before, self.after)
        weights = "estimated" if not self.rounds else "refined" if self.rounds == math.inf else "refined once"
        return {
            **self.confirmation.record,
            "activations": self.activations,
            "weights": weights,
            **figures_of(gain, self.clipped, self.clipped_before),
        }

    def _is_better(self, new: float, old: float) -> bool:
        objective = self.task.goal.objective
        coarse = objective.loss is None or objective.counts_classes
        return new >= old if coarse else new > old

    def _clipped(self, activations: str) -> float:
        """The fraction of values that these thresholds of activations clip, on average over turns."""
        calibration, space = self.task.estimated.calibration, self.task.estimated.space
        by_turn = [turn.proposals.get(activations, self.task.estimated) for turn in self.turns]
        plans = [plan_or_refusal(p.resolver, turn.bits) for p, turn in zip(by_turn, self.turns, strict=True)]
        feasible = [plan for plan in plans if not isinstance(plan, InfeasibleBits)]
        shares = [clipped_share(calibration, space, plan.thresholds) for plan in feasible]
        return sum(shares) / len(shares) if shares else 0.0


def _same(one: Chosen, other: Chosen) -> bool:
    return all(torch.equal(one[edge], other[edge]) for edge in other)
