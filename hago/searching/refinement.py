"""Refinement: thresholds for the error at the outputs, from a few passes, before any bits are searched.

Activations: an estimator of the least squared error is shown every value with the weight of its squared gradient, so
that it makes the error at the outputs small, not that of the tensor. Weights: see `weight_scales`; every round of
changes is kept only if the outputs, simulated on all samples, are better for it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
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


def refined(prepared: Prepared, goal: Goal, metric: str, evaluator: Evaluator, most: float, seed: int = 0) -> Refined:
    """The same with other thresholds.

    Args:
        metric: which cost the guide is about; see `make_guide`.
        evaluator: of the search, over its data.
        most: what may be spent, in forwards; the first pass is spent in any case.
    """
    found = _Refinement(prepared, goal.objective, evaluator, seed)
    sensitivity = measure_sensitivity(
        found.prepared, goal.objective, seed, CHUNK, found.probes.see, found.settle, batches=[found.batch]
    )
    start = safe_start(found.prepared.resolver, prepared.calibration.peaks)
    guide = make_guide(found.prepared, goal, start, seed, metric, sensitivity)
    picked = picked_within(found.prepared, goal, guide, start)
    found.improve(picked, most)
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

    def __init__(self, prepared: Prepared, objective: Objective, evaluator: Evaluator, seed: int) -> None:
        self.objective, self.evaluator, self.seed = objective, evaluator, seed
        self.prepared = with_statistics(prepared, prepared.calibration)
        bits = safe_start(self.prepared.resolver, prepared.calibration.peaks)
        self.scales = WeightScales.of(self.prepared, self.prepared.resolver(bits), bits)
        self.probes = WeightGradients.of_probes(prepared)
        self.forwards, self.differentiated = 0.0, 0.0
        self.step = -(-evaluator.batches.samples // SAMPLES)
        self.batch = self._thinned()
        self._outputs: list[Sequence[Tensor]] = []
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
        labels = [[b.labels] for b in batches if b.labels is not None] if labelled else []
        inputs = thinned((b.inputs for b in batches), self.step)
        return Batch(inputs, thinned(labels, self.step)[0] if labelled else None)

    @property
    def price(self) -> float:
        """What differentiating them once takes, in forwards."""
        return PASS * self.batch.size / self.evaluator.batches.samples

    def _passed(self) -> None:
        self.forwards += self.price
        self.differentiated += self.price

    def improve(self, bits: Bits, most: float) -> None:
        """Rounds at a point while they pay, for so many forwards at most."""
        pull = PULLS.get(PROBES[self.objective.name][1] if self.objective.name in PROBES else SQUARED)
        self.scales.keep(bits)
        now, share, failed = self.scales.as_estimated, SHARE, 0
        if pull is None or not self.scales.weights or self.forwards + 2 + self.price > most:
            return
        best, outputs, known, loss = self._measured(self.prepared, bits), self._outputs, False, 0.0
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
            if value is not None and value > best:
                best, outputs, now, known, failed = value, self._outputs, dict(there), False, 0
                self.prepared = tried
            elif value is None:
                self.scales.bar(self._full, now)
                failed += 1
            else:
                share, failed = share / 2, failed + 1
            there = None

    def _measured(self, prepared: Prepared, bits: Bits) -> float | None:
        """The objective, or None where an accumulator overflowed; its outputs are kept."""
        self._outputs = []
        measured = self.evaluator.measure(prepared.resolver(bits), see=self._outputs.append)
        self.forwards += 1
        self._full = {name for name, count in measured.peaks.overflows.items() if count}
        if self._full:
            return None
        return self.objective.finish(measured.contributions[self.objective.name].mean(0))

    def _slopes(self, pull: Pull, outputs: Sequence[Sequence[Tensor]]) -> float:
        """What the weights' changes would do to the error of outputs, to first order; returns the loss."""
        whole = thinned(outputs, self.step)
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
