"""Refinement: thresholds for the error at the outputs, from a few passes, before any bits are searched.

Activations: an estimator of the least squared error is shown every value with the weight of its squared gradient, so
that it makes the error at the outputs small, not that of the tensor. Weights: see `weight_scales`; every round of
changes is kept only if the outputs, simulated on all samples, are better for it.

What gradients propose is confirmed on batches that they have not seen (`KeptAside`): where it is not surely better
there than the thresholds that it would replace, these stay. Thresholds that are tuned to few samples lose more on
others than plain ones, above all where they clip values that the samples did not reach.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from hago.calibrate.collect import Calibration
from hago.calibrate.mse import Mse
from hago.calibrate.statistics import TensorStatistics
from hago.costing import plan_cost
from hago.errors import InfeasibleBits
from hago.fitting import fitting, planned
from hago.frontend.data import Batch
from hago.gradients import Gradients, Pull, Spectrum, divergence_pull, gradients, squared_error_pull, thinned
from hago.objective import Objective
from hago.prepare import Prepared
from hago.schemes import Grid
from hago.search.guide import Guide
from hago.search.knapsack import Knapsack
from hago.searching.guidance import make_guide
from hago.searching.sensitivity import PROBES, measure_sensitivity
from hago.searching.weight_scales import Chosen, WeightGradients, WeightScales
from hago.space import Bits, Space
from hago.threshold_sources import Estimated, estimated_resolver
from hago.trials.evaluate import Evaluator, safe_start
from hago.trials.goal import Goal
from hago.types import Edge

#: Samples that are differentiated, at most; what is found is confirmed on all.
SAMPLES: Final = 128
#: A pass forward and a pass back, in passes forward.
PASS: Final = 3.0
#: Samples that share one random vector, and those that are differentiated at once where nothing is random.
CHUNK: Final = 4
SLOPES: Final = 16
#: Of the weight of a value, the part that does not depend on its gradient.
PLAIN: Final = 0.002
#: Of the loss, what one round is to gain at most.
SHARE: Final = 0.5
SQUARED: Final = "squared error"
#: How the errors of outputs matter, by what sensitivities measure.
PULLS: Final[Mapping[str, Pull]] = {SQUARED: squared_error_pull, "divergence": divergence_pull}
#: Rounds without a gain before the last ends it.
TRIES: Final = 3


#: Of the samples, the part that is kept aside, about.
ASIDE: Final = 0.25
#: Blocks of samples that are compared as one each, since neighbours are alike, where batches are fewer.
BLOCKS: Final = 4
#: Standard errors by which what is proposed must be better on what was kept aside.
SURE: Final = 2.0
#: By how much of the loss thresholds of activations must be better: they decide what happens to values that nobody saw.
MARGIN: Final = 0.05


@dataclass(frozen=True, slots=True)
class KeptAside:
    """The samples on which refined thresholds are confirmed: the last batches, whole, since samples of one batch are
    alike; of a single batch, its last samples.

    Args:
        rows: how many samples of each batch gradients see.
        blocks: numbers of the samples kept aside, in blocks that are compared as one each.
    """

    rows: tuple[int, ...]
    blocks: tuple[tuple[int, ...], ...]

    @staticmethod
    def of(sizes: Sequence[int]) -> KeptAside | None:
        """About a quarter of the samples; None where there are fewer than four.

        Args:
            sizes: of the batches.
        """
        total = sum(sizes)
        if total < 4:
            return None
        if len(sizes) == 1:
            rows, cuts = [total - max(2, round(total * ASIDE))], []
        else:
            kept = len(sizes) - 1
            while kept > 1 and total - sum(sizes[: kept - 1]) <= total * ASIDE:
                kept -= 1
            rows, cuts = [*sizes[:kept], *[0] * (len(sizes) - kept)], list(itertools.accumulate(sizes))[kept - 1 : -1]
        first = sum(rows)
        if len(cuts) < BLOCKS:
            count = min(BLOCKS, total - first)
            cuts = [first + i * (total - first) // count for i in range(count)]
        ends = [*cuts[1:], total]
        return KeptAside(tuple(rows), tuple(tuple(range(a, b)) for a, b in zip(cuts, ends, strict=True)))

    def shaping(self, batches: Iterable[Sequence[Tensor]]) -> list[list[Tensor]]:
        """What of each batch gradients may see."""
        pairs = zip(batches, self.rows, strict=True)
        return [[t[:count] for t in tensors] for tensors, count in pairs if count]

    def gain(self, before: Tensor, after: Tensor) -> tuple[float, float]:
        """By which part of the loss the one is better than the other on these samples, and how many standard errors
        that is.

        Args:
            before, after: losses of all samples.
        """
        blocks = [torch.tensor(block) for block in self.blocks]
        gains = torch.stack([(before[b] - after[b]).to(torch.float64).mean() for b in blocks])
        mean, whole = float(gains.mean()), float(before[torch.cat(blocks)].to(torch.float64).mean())
        error = float(gains.std()) / math.sqrt(len(gains)) if len(gains) > 1 else math.inf
        part = mean / whole if whole > 0.0 else 0.0
        return part, mean / error if error > 0.0 else math.copysign(math.inf, mean) if mean else 0.0


@dataclass(frozen=True, slots=True)
class Refined:
    """What a search goes on with.

    Args:
        start: the best expected point that keeps the limits on costs.
        forwards: what gradients took, in passes of the float model over the data.
        simulated: how often a Plan was simulated; what that took is counted elsewhere.
    """

    prepared: Prepared
    guide: Guide
    start: Bits
    forwards: float
    simulated: float = 0.0


def refined(
    prepared: Prepared,
    goal: Goal,
    metric: str,
    evaluator: Evaluator,
    most: float,
    seed: int = 0,
    *,
    confirm: bool = True,
) -> Refined:
    """The same with other thresholds.

    Args:
        confirm: keep samples aside, and what is surely better there; logs of version 1 did not.
        metric: which cost the guide is about; see `make_guide`.
        evaluator: of the search, over its data.
        most: what may be spent, in forwards; the first pass is spent in any case.
    """
    aside = KeptAside.of([b.size for b in evaluator.batches]) if confirm and goal.objective.loss is not None else None
    found = _Refinement(prepared, goal.objective, evaluator, seed, aside)
    sensitivity = measure_sensitivity(
        found.prepared, goal.objective, seed, CHUNK, found.probes.see, found.settle, batches=[found.batch]
    )
    start = safe_start(found.prepared.resolver, prepared.calibration.peaks)
    guide = make_guide(found.prepared, goal, start, seed, metric, sensitivity)
    picked = picked_within(found.prepared, goal, guide, start)
    if aside is None:
        found.improve(picked, most)
    else:
        found.improve_surely(picked, most, aside)
    simulated = found.forwards - found.differentiated
    return Refined(found.prepared, replace(guide, most=start), picked, found.differentiated, simulated)


# ---------------------------------------------------------------- where the search begins
def picked_within(prepared: Prepared, goal: Goal, guide: Guide, start: Bits) -> dict[str, int]:
    """The best expected point that keeps the limits on costs, no group having more bits than at the start."""
    picked = dict(start)
    limits = [x for x in goal.limits if x.is_cost]
    if not limits:
        return picked
    groups = prepared.space.groups.items()
    space = Space({k: replace(g, choices=tuple(b for b in g.choices if b <= start[k])) for k, g in groups})
    if guide.limit is not None:
        solved = Knapsack(space, guide).solve(guide.limit)
        fits = None if solved is None else fitting(prepared.resolver, solved.bits, fewer=True)
        picked = picked if fits is None else fits.bits

    def missed(bits: Bits) -> float:
        plan = planned(prepared.resolver, bits)
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
    """The thresholds as they get better."""

    def __init__(
        self, prepared: Prepared, objective: Objective, evaluator: Evaluator, seed: int, aside: KeptAside | None = None
    ) -> None:
        self.objective, self.evaluator, self.seed, self.aside = objective, evaluator, seed, aside
        self.given = prepared
        self.prepared = with_statistics(prepared, prepared.calibration)
        bits = safe_start(self.prepared.resolver, prepared.calibration.peaks)
        self.scales = WeightScales.of(self.prepared, self.prepared.resolver(bits), bits)
        self.probes = WeightGradients.of_probes(prepared)
        self.forwards, self.differentiated = 0.0, 0.0
        seen = evaluator.batches.samples if aside is None else sum(aside.rows)
        self.step = -(-seen // SAMPLES)
        self.batch = self._thinned()
        self._outputs: list[Sequence[Tensor]] = []
        self._losses = self._best_losses = self._given_losses = torch.zeros(0)
        self._full: set[str] = set()

    def settle(self, seen: Gradients) -> tuple[Prepared, Gradients]:
        """With what is known of activations."""
        self._passed()
        self.scales.take_probes(self.probes)
        self.prepared = with_statistics(self.prepared, weighted(self.prepared, seen.spectra))
        return self.prepared, seen

    def _thinned(self) -> Batch:
        """The samples that are differentiated, as many from everywhere in the data."""
        batches, labelled = self.evaluator.batches, self.evaluator.batches.labelled
        labels = self._seen([[b.labels] for b in batches if b.labels is not None]) if labelled else []
        inputs = thinned(self._seen([b.inputs for b in batches]), self.step)
        return Batch(inputs, thinned(labels, self.step)[0] if labelled else None)

    def _seen(self, batches: Sequence[Sequence[Tensor]]) -> Sequence[Sequence[Tensor]]:
        """What gradients may see."""
        return batches if self.aside is None else self.aside.shaping(batches)

    @property
    def price(self) -> float:
        """What differentiating them once takes, in forwards."""
        return PASS * self.batch.size / self.evaluator.batches.samples

    def _passed(self) -> None:
        self.forwards += self.price
        self.differentiated += self.price

    def improve(
        self, bits: Bits, most: float, begun: tuple[float, Tensor, list[Sequence[Tensor]]] | None = None
    ) -> None:
        """Rounds at a point while they pay, for so many forwards at most.

        Args:
            begun: the objective, losses and outputs there, where they are known.
        """
        pull = PULLS.get(PROBES[self.objective.name][1] if self.objective.name in PROBES else SQUARED)
        self.scales.keep(bits)
        now, share, failed = self.scales.as_estimated, SHARE, 0
        if pull is None or not self.scales.weights or self.forwards + 2 + self.price > most:
            return
        best = self._measured(self.prepared, bits) if begun is None else begun[0]
        outputs, known, loss = self._outputs if begun is None else begun[2], False, 0.0
        alone = self.scales.alone(self.prepared.resolver(bits))
        there: Chosen | None = None if _same(alone, now) else alone
        while best is not None and failed < TRIES and self.forwards + 1 + (0 if known or there else self.price) <= most:
            if there is None:
                if not known:
                    loss, known = self._slopes(pull, outputs), True
                there = self.scales.improved(now, loss, share)
                if _same(there, now):
                    return
            tried = with_refined(self.prepared, self.scales.thresholds(there))
            value = self._measured(tried, bits)
            gained = self.aside is None or self.aside.gain(self._best_losses, self._losses)[0] > 0.0
            if value is not None and value > best and gained:
                best, outputs, now, known, failed = value, self._outputs, dict(there), False, 0
                self.prepared, self._best_losses = tried, self._losses
            elif value is None:
                self.scales.bar(self._full, now)
                failed += 1
            else:
                share, failed = share / 2, failed + 1
            there = None

    def improve_surely(self, bits: Bits, most: float, aside: KeptAside) -> None:
        """The same, where samples were kept aside: each step is kept only if it is surely better there than what it
        would replace."""
        proposed, plain = self.prepared, with_statistics(self.given, self.given.calibration)
        best, value = self.given, self._measured(self.given, bits)
        losses, outputs = self._losses, self._outputs
        self._given_losses = losses
        said: dict[str, Any] = {"kept_aside": sum(map(len, aside.blocks)), "activations": "estimated"}
        for name, tried in (("weighted", proposed), ("mse", plain)):
            if name == "mse" and self.given.estimator == Mse():
                continue  # which is what was given
            other = self._measured(tried, bits)
            if other is not None and (value is None or self._surely(aside, losses, other > value, MARGIN)):
                best, value, losses, outputs, said["activations"] = tried, other, self._losses, self._outputs, name
                break
        self.prepared = best
        confirmed, before = best, losses
        self._best_losses = losses
        if value is not None:
            self.improve(bits, most, (value, losses, outputs))
        said["weights"] = self.prepared is not confirmed
        if said["weights"] and not self._surely(aside, before, True, 0.0, self._best_losses):
            self.prepared, said["weights"] = confirmed, False
        last = self._best_losses if said["weights"] else before
        part, errors = aside.gain(self._given_losses, last)
        said |= {"gain": round(part, 4), "standard_errors": round(min(max(errors, -99.0), 99.0), 2)}
        self.prepared = replace(self.prepared, refined=said)

    def _surely(
        self, aside: KeptAside, before: Tensor, better: bool, margin: float, after: Tensor | None = None
    ) -> bool:
        """Whether what was measured last is better on all samples, and surely on those kept aside."""
        part, errors = aside.gain(before, self._losses if after is None else after)
        return better and part > margin and errors > SURE

    def _measured(self, prepared: Prepared, bits: Bits) -> float | None:
        """The objective, or None where an accumulator overflowed; its outputs are kept."""
        self._outputs = []
        measured = self.evaluator.measure(prepared.resolver(bits), see=self._outputs.append)
        self.forwards += 1
        if self.objective.loss is not None:
            self._losses = self.objective.loss(measured.contributions[self.objective.name])
        self._full = {name for name, count in measured.peaks.overflows.items() if count}
        if self._full:
            return None
        return self.objective.finish(measured.contributions[self.objective.name].mean(0))

    def _slopes(self, pull: Pull, outputs: Sequence[Sequence[Tensor]]) -> float:
        """What the weights' changes would do to the error of outputs, to first order; returns the loss."""
        whole = thinned(self._seen(outputs), self.step)
        chunks = ([o[start : start + SLOPES] for o in whole] for start in range(0, self.batch.size, SLOPES))
        losses: list[float] = []

        def probe(wanted: Sequence[Any], labels: Tensor | None, generator: torch.Generator) -> list[Tensor | None]:
            there = [o.detach() for o in wanted]
            pairs = zip(next(chunks), there, strict=True)
            errors = [q.to(o.dtype) - o if o.is_floating_point() else None for q, o in pairs]
            pulls = pull(there, errors)
            both = zip(errors, pulls, strict=True)
            losses.append(sum(float((e * v).sum()) / 2 for e, v in both if e is not None and v is not None))
            return pulls

        p, ops, seen = self.prepared, self.prepared.hardware.known_ops, WeightGradients(1, self.scales.weights.keys())
        gradients(p.graph, [self.batch], {}, probe, lambda edge: (), ops, self.seed, SLOPES, seen.see)
        self.scales.take_slopes(seen)
        self._passed()
        return sum(losses)


def _same(one: Chosen, other: Chosen) -> bool:
    return all(torch.equal(one[edge], other[edge]) for edge in other)


def with_statistics(prepared: Prepared, calibration: Calibration) -> Prepared:
    """The same with thresholds of least error on what was seen; what was found of constants is kept."""
    p, mse, source = prepared, Mse(), prepared.resolver.thresholds
    if p.estimator == mse and isinstance(source, Estimated):
        resolver = p.resolver.with_thresholds(source.with_statistics(calibration.statistics))
    else:
        ops = p.hardware.known_ops
        resolver = estimated_resolver(p.graph, p.hardware, p.topology, p.space, calibration, mse, ops)
    return replace(p, calibration=calibration, estimator=mse, resolver=resolver, refined=True)


def with_refined(prepared: Prepared, refined: Mapping[tuple[str, Grid], tuple[Tensor, Tensor]]) -> Prepared:
    """The same with these thresholds; the others are not estimated again."""
    source = prepared.resolver.thresholds
    assert isinstance(source, Estimated)
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
