"""Refinement of thresholds at the point where a search starts, in two steps.

A search calls `refine_at_point` before its first trial, and a replay of its log calls it again. Step 1 chooses the
thresholds of activations: weighted by gradients, else those of least squared error, else the estimated ones. Step 2
changes the scales of the channels of weights in rounds (`hago.search.weight_scales`); a round is accepted if the
simulated outputs of the tuning samples improve. The result of each step is taken only if it is significantly better on
validation samples (`hago.search.confirmation`).

Searches under limits on costs, and over a front, refine thresholds in another way: `hago.search.choice_refinement`.
"""

from __future__ import annotations

import collections
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
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
    ProposalTest,
    clipped_share,
    figures_of,
    losses_of,
)
from hago.search.folds import Fold
from hago.search.gradients import (
    CHUNK_SAMPLES,
    GRADIENT_CHUNK,
    GRADIENT_FORWARDS,
    Gradients,
    Spectrum,
    gradients,
    thinned,
)
from hago.search.guidance import make_surrogate
from hago.search.objective import Pull
from hago.search.preparation import Prepared
from hago.search.proposed_thresholds import (
    RefinementTask,
    gradient_weighted,
    with_estimates,
    with_least_squares,
    with_refined,
)
from hago.search.safe_bits import safe_bits
from hago.search.sensitivity import curvature_of, gradients_by_part, gradients_of_choices, sensitivity_from
from hago.search.starting_point import StartingPoint, bits_within_limits
from hago.search.weight_scales import KEPT_ERROR_BYTES, FactorIndices, Products, WeightGradients, WeightScales
from hago.searchers import Surrogate

#: Largest number of samples that are differentiated; rounds are measured on all tuning samples.
MAX_GRADIENT_SAMPLES: Final = 128
#: Number of samples in a chunk of a slope pass; more than CHUNK_SAMPLES, since no random vector is drawn per chunk.
SLOPE_CHUNK: Final = 16
#: Share of the loss that a round tries to remove; halved after a round that does not improve the outputs.
ROUND_SHARE: Final = 0.5
#: A factor of a channel is barred if the sum of its squared quantization errors exceeds this multiple of that at the
#: estimated threshold. It is not applied to scales that are powers of two, whose neighbours are too far apart for it.
MAX_ERROR_RATIO: Final = 1.3
#: Number of rejected rounds in a row after which refinement ends.
MAX_FAILED_ROUNDS: Final = 3
#: Number of choices of each group, from the most bits down, whose losses are computed where no cost is in use and the
#: start has the most bits; `sensitivity_from` extrapolates the others.
COMPUTED_CHOICES: Final = 1


def refine_at_point(
    task: RefinementTask, max_forwards: float, confirmation: Confirmation | None = None
) -> StartingPoint:
    """Refine the thresholds of activations, then those of weights, at one point.

    Args:
        max_forwards: the largest cost of one fold, in forwards. The first gradient pass is made even if it exceeds it.
        confirmation: the validation samples. None for logs of version 1, which took what was better on all samples.
    """
    if confirmation is None:
        refinement = _Refinement.for_first_version(task)
        refinement.run_rounds(max_forwards)
        return refinement.starting_point()
    folds, final = _make_refinements(task, confirmation)
    steps = _ConfirmedSteps(task, confirmation, folds)
    steps.choose_activations()
    steps.choose_weights(max_forwards)
    if folds and final is folds[0]:
        return final.starting_point(steps.test_forwards, record=steps.record())
    # the confirmed proposals of several folds are made again from all samples
    final.use_activations(steps.activations)
    if steps.rounds:
        final.run_rounds(max_forwards, steps.rounds)
    return final.starting_point(*steps.forwards, record=steps.record())


def _make_refinements(task: RefinementTask, confirmation: Confirmation) -> tuple[list[_Refinement], _Refinement]:
    """Make the refinement of each fold, and the final one, whose thresholds the search begins with.

    The final refinement uses all samples. With a single fold it is that fold's; without folds, of a single sample,
    there is no other. One gradient pass serves all: each fold takes the gradients of its tuning samples.
    """
    folds = confirmation.folds
    samples = _TuningSamples.of(task, folds[0] if len(folds) == 1 else None)
    over = partial(_SharedPass.over, task, refines_weights=confirmation.refines_weights)
    if len(folds) < 2:
        final = over([samples.batch]).refinement(samples, [0])
        final.count_gradients(final.gradient_pass_forwards)
        return [final] * len(folds), final
    # there are several folds only of few samples, all of which are differentiated, so that rows are samples
    assert samples.step == 1
    parts = [samples.batch.rows(fold.first, fold.last) for fold in folds]
    shared = over(parts)
    refinements = []
    for index, fold in enumerate(folds):
        others = [i for i in range(len(parts)) if i != index]
        refinement = shared.refinement(_TuningSamples.of(task, fold), others, needs_surrogate=False)
        # each part is differentiated once, and counted with the fold that does not use it
        refinement.count_gradients(GRADIENT_FORWARDS * parts[index].size / task.evaluator.batches.samples)
        refinements.append(refinement)
    return refinements, shared.refinement(samples, range(len(parts)))


@dataclass(frozen=True, slots=True)
class _SharedPass:
    """A gradient pass over parts of the samples, from which `_make_refinements` makes every refinement.

    Args:
        scales: of the weights at the safe bits, without gradients; of none where weights are not refined.
        probes: random vectors, of which only the layout of columns is used.
        products: of the errors of weights with the gradients.
        by_part: the gradients of each part.
        choices: see `sensitivity_from`.
        measurements: that the refinements share, by the key of their Plan.
    """

    task: RefinementTask
    scales: WeightScales
    probes: WeightGradients
    products: Products
    by_part: Sequence[Gradients]
    choices: int | None
    measurements: dict[str, _Measured]

    @staticmethod
    def over(task: RefinementTask, parts: Sequence[Batch], *, refines_weights: bool) -> _SharedPass:
        """Differentiate the parts."""
        least_squares = task.least_squares
        bits = safe_bits(least_squares)
        if refines_weights:
            scales = WeightScales.of(least_squares, least_squares.resolver(bits), bits, KEPT_ERROR_BYTES)
        else:
            scales = WeightScales.of_none(least_squares)
        if not least_squares.hardware.requantize.power_of_two:
            scales.bar_large_errors(MAX_ERROR_RATIO)
        chunk = CHUNK_SAMPLES if refines_weights else GRADIENT_CHUNK
        chunks = max(-(-part.size // chunk) for part in parts)
        probes = WeightGradients.of_probes(least_squares, chunks, len(parts))
        has_most_bits = bits == widest_feasible(least_squares.resolver).bits
        choices = COMPUTED_CHOICES if not task.metric and has_most_bits else None
        by_part = gradients_by_part(least_squares, task.goal.objective, task.seed, parts, chunk, probes, choices)
        products = scales.products(probes)
        probes.sums.clear()
        return _SharedPass(task, scales, probes, products, by_part, choices, {})

    def refinement(self, samples: _TuningSamples, parts: Sequence[int], *, needs_surrogate: bool = True) -> _Refinement:
        """Make the refinement by some samples.

        Args:
            parts: the indices of the parts that the samples are in.
            needs_surrogate: see `_Refinement`.
        """
        scales = self.scales.copy()
        scales.set_sketches(self.products, self.probes, parts)
        return _Refinement(
            self.task,
            samples,
            scales,
            Gradients.added([self.by_part[i] for i in parts]),
            self.measurements,
            needs_surrogate=needs_surrogate,
            choices=self.choices,
        )


# ---------------------------------------------------------------- one refinement
@dataclass(frozen=True, slots=True)
class _TuningSamples:
    """The samples that may shape the thresholds of one refinement.

    Args:
        fold: the fold that they are of; None where all samples are tuning samples.
        step: every so many samples are differentiated.
        batch: those that are, evenly spread over the data.
    """

    fold: Fold | None
    step: int
    batch: Batch

    @staticmethod
    def of(task: RefinementTask, fold: Fold | None) -> _TuningSamples:
        """The tuning samples of a fold, or all samples."""
        batches = task.evaluator.batches
        step = -(-(batches.samples - (0 if fold is None else fold.size)) // MAX_GRADIENT_SAMPLES)
        inputs = thinned(_tuning(fold, (b.inputs for b in batches)), step)
        if not batches.labelled:
            return _TuningSamples(fold, step, Batch(inputs, None))
        labels = _tuning(fold, ([b.labels] for b in batches if b.labels is not None))
        return _TuningSamples(fold, step, Batch(inputs, thinned(labels, step)[0]))

    def of_outputs(self, outputs: Iterable[Sequence[Tensor]]) -> Sequence[Tensor]:
        """The outputs of the samples that are differentiated, from those of all batches."""
        return thinned(_tuning(self.fold, outputs), self.step)

    def among(self, values: Tensor) -> Tensor:
        """The values of the tuning samples among those of all samples."""
        return values if self.fold is None else self.fold.tuning(values)


def _tuning(fold: Fold | None, batches: Iterable[Sequence[Tensor]]) -> Iterable[Sequence[Tensor]]:
    return batches if fold is None else fold.tuning_tensors(batches)


@dataclass(frozen=True, slots=True)
class _Measured:
    """The measurement of thresholds at the point of a refinement.

    Args:
        contributions: of all samples to the objective; None if the point is infeasible or an accumulator overflows.
        losses: of all samples.
        outputs: by batch; empty if the point is infeasible.
        overflowing: the nodes whose accumulators overflow.
    """

    contributions: Tensor | None
    losses: Tensor
    outputs: Sequence[Sequence[Tensor]]
    overflowing: frozenset[str]


class _Refinement:
    """The refinement of thresholds at one point, by one set of tuning samples. `_make_refinements` makes one per fold,
    and one for the thresholds that the search begins with.

    Args:
        scales: of the weights at the safe bits, with their sketches.
        gradients: of the tuning samples.
        measurements: measurements that several refinements share, by the key of their Plan.
        needs_surrogate: whether a surrogate is made where no limit on a cost needs one to find the point.
        choices: see `sensitivity_from`.
        is_first_version: whether to refine as searches whose logs are of version 1 did.

    Attributes:
        prepared: with the present thresholds.
        bits: the point.
        surrogate: the expected loss of every choice.
        proposals: the thresholds of activations that can be used, by name.
        accepted: the thresholds and the losses of all samples after each round that was accepted.
        forwards, gradient_forwards: the cost so far, and the part of it for gradients.
    """

    surrogate: Surrogate

    def __init__(
        self,
        task: RefinementTask,
        samples: _TuningSamples,
        scales: WeightScales,
        gradients: Gradients,
        measurements: dict[str, _Measured],
        *,
        needs_surrogate: bool = True,
        choices: int | None = None,
        is_first_version: bool = False,
    ) -> None:
        self.task, self.samples, self.scales = task, samples, scales
        self.objective, self.measurements, self.is_first_version = task.goal.objective, measurements, is_first_version
        self.forwards, self.gradient_forwards = 0.0, 0.0
        self.accepted: list[tuple[Prepared, Tensor]] = []
        self._spectra: Mapping[Edge, Spectrum] = gradients.spectra
        self.prepared = with_least_squares(task.least_squares, gradient_weighted(task.least_squares, self._spectra))
        self.proposals = {"weighted": self.prepared, "mse": task.least_squares}
        self.bits: Bits = safe_bits(self.prepared)
        if needs_surrogate or any(limit.is_cost for limit in task.goal.limits):
            sensitivity = sensitivity_from(gradients, self.prepared, self.objective, choices)
            surrogate = make_surrogate(self.prepared, task.goal, self.bits, task.seed, task.metric, sensitivity)
            self.surrogate = replace(surrogate, most=self.bits)
            self.bits = bits_within_limits(self.prepared, task.goal, surrogate, self.bits)

    @staticmethod
    def for_first_version(task: RefinementTask) -> _Refinement:
        """Make a refinement by all samples, as searches whose logs are of version 1 did."""
        samples, least_squares = _TuningSamples.of(task, None), task.least_squares
        bits = safe_bits(least_squares)
        scales = WeightScales.of(least_squares, least_squares.resolver(bits), bits, KEPT_ERROR_BYTES)
        probes = WeightGradients.of_probes(least_squares)
        of_choices = gradients_of_choices(
            least_squares, task.goal.objective, task.seed, CHUNK_SAMPLES, [samples.batch], on_constant=probes.add
        )
        scales.set_sketches_from_gradients(probes)
        refinement = _Refinement(task, samples, scales, of_choices, {}, is_first_version=True)
        refinement.count_gradients(refinement.gradient_pass_forwards)
        return refinement

    def starting_point(
        self, gradient_forwards: float = 0.0, simulations: float = 0.0, record: Mapping[str, Any] | None = None
    ) -> StartingPoint:
        """The point that the trials begin with, and its thresholds.

        Args:
            gradient_forwards, simulations: the cost of other refinements, in forwards.
            record: the entries of the log's header on refinement.
        """
        prepared = self.prepared if record is None else replace(self.prepared, refinement_record=record)
        gradient_forwards += self.gradient_forwards
        simulations += self.forwards - self.gradient_forwards
        return StartingPoint(prepared, self.surrogate, self.bits, gradient_forwards, simulations)

    # ------------------------------------------------------------ activations
    def use_activations(self, name: str) -> None:
        """Use one of the thresholds of activations from now on: `estimated` (those without refinement), `mse` (of least
        squared error), or `weighted` (by gradients)."""
        self.prepared = self.proposals.get(name, self.task.estimated)

    def proposal_with(self, name: str, calibration: Calibration) -> Prepared:
        """The same thresholds as `use_activations` uses, made from other statistics. ProposalTest calls it.

        Args:
            calibration: with statistics that were collected without the validation samples.
        """
        if name not in self.proposals:
            return with_estimates(self.task.estimated, calibration)
        mse = with_least_squares(self.proposals["mse"], calibration)
        return mse if name == "mse" else with_least_squares(mse, gradient_weighted(mse, self._spectra))

    # ------------------------------------------------------------ cost
    @property
    def gradient_pass_forwards(self) -> float:
        """The cost of differentiating the samples once, in forwards."""
        return GRADIENT_FORWARDS * self.samples.batch.size / self.task.evaluator.batches.samples

    def count_gradients(self, forwards: float) -> None:
        """Add to the cost of gradients."""
        self.forwards += forwards
        self.gradient_forwards += forwards

    # ------------------------------------------------------------ simulation
    def simulate(self, prepared: Prepared, *, keep: bool = False) -> _Measured:
        """Simulate thresholds at the point.

        Args:
            keep: whether to keep the measurement for other refinements, too.
        """
        plan = plan_or_refusal(prepared.resolver, self.bits)
        if isinstance(plan, InfeasibleBits):
            infinite = torch.full((self.task.evaluator.batches.samples,), math.inf, dtype=torch.float64)
            return _Measured(None, infinite, (), frozenset())
        if plan.key in self.measurements:
            return self.measurements[plan.key]
        outputs: list[Sequence[Tensor]] = []
        measurement = self.task.evaluator.measure(plan, see=lambda _, made: outputs.append(made))
        self.forwards += 1
        overflowing = frozenset(name for name, count in measurement.extremes.overflows.items() if count)
        contributions = None if overflowing else measurement.contributions[self.objective.name]
        measured = _Measured(contributions, losses_of(self.objective, measurement), outputs, overflowing)
        if keep:
            self.measurements[plan.key] = measured
        return measured

    def value_of(self, measured: _Measured) -> float | None:
        """The objective over the tuning samples; None if the point does not run."""
        if measured.contributions is None:
            return None
        return self.objective.finish(self.samples.among(measured.contributions).mean(0))

    # ------------------------------------------------------------ weights
    def run_rounds(self, max_forwards: float, max_rounds: float = math.inf) -> None:
        """Run rounds at the point while they gain.

        Args:
            max_forwards: largest cost in forwards, including the cost so far.
            max_rounds: largest number of rounds that are accepted.
        """
        for accepted in self.rounds(max_forwards):
            if accepted >= max_rounds:
                return

    def rounds(self, max_forwards: float) -> Iterator[int]:
        """Run rounds at the point while they gain; yield the number of accepted rounds after each of them.

        Args:
            max_forwards: largest cost in forwards, including the cost so far.
        """
        self.scales.keep_unchanged_bits(self.bits)
        factors, target_share, failed = self.scales.estimated_factors, ROUND_SHARE, 0
        if self.is_first_version and self.objective.name == "accuracy":
            return  # searches of that version did not refine weights for accuracy
        # one measurement before the first round, one after it, and its gradients
        if not self.scales.weights or self.forwards + 2 + self.gradient_pass_forwards > max_forwards:
            return
        best = self.simulate(self.prepared)
        has_slopes, loss = False, 0.0
        best_alone = self.scales.best_factors_alone(self.prepared.resolver(self.bits))
        proposed: FactorIndices | None = None if _same(best_alone, factors) else best_alone
        while (
            best.contributions is not None
            and failed < MAX_FAILED_ROUNDS
            and self.forwards + 1 + (0 if has_slopes or proposed else self.gradient_pass_forwards) <= max_forwards
        ):
            if proposed is None:
                if not has_slopes:
                    loss, has_slopes = self._set_slopes(curvature_of(self.objective).pull, best.outputs), True
                proposed = self.scales.improve_factors(factors, loss, target_share)
                if _same(proposed, factors):
                    return
            refined = with_refined(self.prepared, self.scales.thresholds(proposed))
            measured = self.simulate(refined)
            if self._is_better(measured, best):
                best, factors, has_slopes, failed = measured, dict(proposed), False, 0
                self.prepared = refined
                self.accepted.append((refined, measured.losses))
                yield len(self.accepted)
            elif measured.contributions is None:
                self.scales.bar_smaller_thresholds(set(measured.overflowing), factors)
                failed += 1
            else:
                target_share, failed = target_share / 2, failed + 1
            proposed = None

    def _is_better(self, measured: _Measured, best: _Measured) -> bool:
        """Whether thresholds are better than the best so far: by a higher objective. If the objective counts classes,
        which few samples estimate poorly, by an objective that is not lower and a smaller mean squared error."""
        new, old = self.value_of(measured), self.value_of(best)
        if new is None or old is None:
            return False
        if self.is_first_version or not self.objective.counts_classes:
            return new > old
        losses = [float(self.samples.among(m.losses).mean()) for m in (measured, best)]
        return new >= old and losses[0] < losses[1]

    def _set_slopes(self, pull: Pull, outputs: Sequence[Sequence[Tensor]]) -> float:
        """Set the slopes of all changes of weights, and return the loss of the outputs.

        The vector that is propagated back is H e, the curvature times the present error of the outputs, in place of a
        random vector.
        """
        simulated = self.samples.of_outputs(outputs)
        starts = range(0, self.samples.batch.size, SLOPE_CHUNK)
        chunks = ([o[start : start + SLOPE_CHUNK] for o in simulated] for start in starts)
        losses: list[float] = []

        def error_vectors(
            float_outputs: Sequence[Any], labels: Tensor | None, generator: torch.Generator
        ) -> list[Tensor | None]:
            exact = [o.detach() for o in float_outputs]
            errors = [
                q.to(o.dtype) - o if o.is_floating_point() else None for q, o in zip(next(chunks), exact, strict=True)
            ]
            vectors = pull(exact, errors)
            pairs = zip(errors, vectors, strict=True)
            losses.append(sum(float((e * v).sum()) / 2 for e, v in pairs if e is not None and v is not None))
            return vectors

        graph, ops = self.prepared.graph, self.prepared.hardware.known_ops
        slopes = WeightGradients(1, self.scales.weights.keys())
        gradients(
            graph,
            [self.samples.batch],
            ranges={},
            probe=error_vectors,
            errors=lambda edge: (),
            ops=ops,
            seed=self.task.seed,
            chunk=SLOPE_CHUNK,
            on_constant=slopes.add,
        )
        self.scales.set_slopes(slopes)
        self.count_gradients(self.gradient_pass_forwards)
        return sum(losses)


def _same(one: FactorIndices, other: FactorIndices) -> bool:
    return all(torch.equal(one[edge], other[edge]) for edge in other)


# ---------------------------------------------------------------- what is confirmed
class _ConfirmedSteps:
    """The steps of refinement, the result of each taken only where it is significantly better on validation samples.
    `refine_at_point` calls `choose_activations`, then `choose_weights`.

    Args:
        folds: the refinements of the folds.

    Attributes:
        activations: the thresholds of activations that were chosen: `estimated`, `mse` or `weighted`.
        rounds: number of rounds for weights that were confirmed; inf for all of them.
        before, after: the losses of all samples with the estimated thresholds and with the chosen ones, by fold.
        clipped_before, clipped: the shares of values that these thresholds clip.
    """

    def __init__(self, task: RefinementTask, confirmation: Confirmation, folds: Sequence[_Refinement]) -> None:
        self.task, self.confirmation, self.folds = task, confirmation, folds
        self.activations, self.rounds = "estimated", 0.0
        self.clipped = self.clipped_before = self._clipped("estimated")
        self.before: list[Tensor] = []
        self.after: list[Tensor] = []
        points = [refinement.bits for refinement in folds]
        self.test = ProposalTest(task.estimated, task.goal.objective, confirmation, folds, points)

    def choose_activations(self) -> None:
        """Choose the thresholds of activations, the same for all folds: `weighted` if it is better in every fold and
        significantly better on the validation samples, else `mse` if that is, else the estimated ones. Where these
        overflow or are infeasible in some fold, a proposal need not be significantly better."""
        # the first Plans that a search simulates
        estimated = [refinement.simulate(self.task.estimated, keep=True) for refinement in self.folds]
        self.before = self.after = [measured.losses for measured in estimated]
        runs = all(measured.contributions is not None for measured in estimated)
        for name in ("weighted", "mse"):
            if name == "mse" and self.task.estimated.estimator == Mse():
                continue  # these are the estimated ones
            proposed = [refinement.simulate(refinement.proposals[name], keep=True) for refinement in self.folds]
            losses, clipped = [measured.losses for measured in proposed], self._clipped(name)
            # thresholds that clip more also clip values that no sample has: they must win by a margin
            margin = MARGIN if clipped > self.clipped else 0.0
            both = zip(self.folds, proposed, estimated, strict=True)
            if all(self._is_better(refinement, new, old) for refinement, new, old in both) and (
                not runs or self.test.accepts(name, self.before, losses, margin)
            ):
                self.activations, self.after, self.clipped = name, losses, clipped
                break
        for refinement in self.folds:
            refinement.use_activations(self.activations)
        self._forget_measurements()

    def _forget_measurements(self) -> None:
        """Keep only the measurements that rounds need, since outputs may be large."""
        plans = [plan_or_refusal(refinement.prepared.resolver, refinement.bits) for refinement in self.folds]
        needed = {plan.key for plan in plans if not isinstance(plan, InfeasibleBits)}
        for refinement in self.folds:
            for key in refinement.measurements.keys() - needed:
                del refinement.measurements[key]

    def choose_weights(self, max_forwards: float) -> None:
        """Accept all rounds for weights, else only the first, else none.

        Every fold first runs to two accepted rounds. They go on only if the first or the latest of these lowers the
        losses of the validation samples.
        """
        unrefined = [refinement.prepared for refinement in self.folds]
        running = [refinement.rounds(max_forwards) for refinement in self.folds]
        for rounds in running:
            _advance(rounds, 2)
        in_every_fold = all(refinement.accepted for refinement in self.folds) and bool(self.folds)
        if in_every_fold and any(self.confirmation.gain(self.after, self._losses(i)).part > 0.0 for i in (0, -1)):
            for rounds in running:
                _advance(rounds)
        for count, index in ((math.inf, -1), (1.0, 0)) if in_every_fold else ():
            losses = self._losses(index)
            if self.confirmation.gain(self.after, losses).is_significant():
                for refinement in self.folds:
                    refinement.prepared = refinement.accepted[index][0]
                self.rounds, self.after = count, losses
                return
        for refinement, prepared in zip(self.folds, unrefined, strict=True):
            refinement.prepared = prepared

    def _losses(self, accepted: int) -> list[Tensor]:
        """By fold, the losses of all samples after an accepted round."""
        return [refinement.accepted[accepted][1] for refinement in self.folds]

    @property
    def forwards(self) -> tuple[float, float]:
        """The cost of all folds in forwards: for gradients and statistics, and for simulations."""
        gradient_forwards = sum(refinement.gradient_forwards for refinement in self.folds)
        simulations = sum(refinement.forwards for refinement in self.folds) - gradient_forwards
        return gradient_forwards + self.test_forwards, simulations

    @property
    def test_forwards(self) -> float:
        """The cost of testing thresholds of activations with statistics of the tuning samples."""
        return self.test.forwards

    def record(self) -> dict[str, Any]:
        """The entries of the log's header on refinement, as JSON values."""
        gain = self.confirmation.gain(self.before, self.after)
        most = self.confirmation.max_forwards
        limit = {"forwards": most} if self.folds and most < math.inf else {}
        weights = "estimated" if not self.rounds else "refined" if self.rounds == math.inf else "refined once"
        return {
            **self.confirmation.record,
            **limit,
            "activations": self.activations,
            "weights": weights,
            **figures_of(gain, self.clipped, self.clipped_before),
        }

    def _is_better(self, refinement: _Refinement, measured: _Measured, estimated: _Measured) -> bool:
        """Whether a proposal is better than the estimated thresholds in one fold; an objective that few samples
        estimate poorly need only not be lower."""
        new, old = refinement.value_of(measured), refinement.value_of(estimated)
        if new is None or old is None:
            return new is not None
        objective = self.task.goal.objective
        return new >= old if objective.loss is None or objective.counts_classes else new > old

    def _clipped(self, name: str) -> float:
        """The fraction of values that these thresholds of activations clip, on average over folds."""
        calibration, space = self.task.estimated.calibration, self.task.estimated.space
        proposals = [refinement.proposals.get(name, self.task.estimated) for refinement in self.folds]
        plans = [plan_or_refusal(p.resolver, r.bits) for p, r in zip(proposals, self.folds, strict=True)]
        feasible = [plan for plan in plans if not isinstance(plan, InfeasibleBits)]
        shares = [clipped_share(calibration, space, plan.thresholds) for plan in feasible]
        return sum(shares) / len(shares) if shares else 0.0


def _advance(rounds: Iterator[int], count: int | None = None) -> None:
    """Run an iterator of rounds for so many accepted rounds, or to its end."""
    collections.deque(itertools.islice(rounds, count), maxlen=0)
