"""Evaluation: from a Plan to a Score, by simulating it over batches.

An Evaluator caches the float model's outputs, constants as carriers and simulated values between evaluations, so that a
point costs only the nodes that its changed edges can reach.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, Literal

import torch
from torch import Tensor

from hago.caching import LRU
from hago.cost import node_macs
from hago.data import Batch, Batches
from hago.errors import DataError, HagoError
from hago.graph import Graph, run_real
from hago.ops import OPS, Ops
from hago.plan import Bits, Plan
from hago.runtime.native import Executor, KernelConstantCache, exact_kernels
from hago.search.intervals import jackknife_interval, quick_interval, wilson_interval
from hago.search.objective import (
    OBJECTIVES,
    Objective,
    check_numbers,
    check_rows,
    unfit_labels,
    warn_of_labels,
    warn_of_numbering,
    why_not_finite,
)
from hago.simulation import AccumulatorExtremes, AccumulatorWatch, Carriers, Reuse, Simulator, ValueCache
from hago.study import Score

#: The most bytes of measurements that one `Evaluator` keeps.
MEASUREMENT_BYTES: Final = 1 << 26
#: About the size of a small tensor or dict beside its values, and of an entry of a dict of numbers.
OBJECT_BYTES: Final = 512
ENTRY_BYTES: Final = 128


@dataclass(frozen=True, slots=True)
class Measurement:
    """The result of simulating one Plan: contributions of every sample to every objective, and accumulators seen."""

    contributions: Mapping[str, Tensor]
    extremes: AccumulatorExtremes

    @property
    def bytes(self) -> int:
        """About its size in memory."""
        extremes = len(self.extremes.overflows) + len(self.extremes.peaks) + len(self.extremes.accumulators)
        tensors = sum(t.numel() * t.element_size() + OBJECT_BYTES for t in self.contributions.values())
        return OBJECT_BYTES + tensors + ENTRY_BYTES * extremes


EvaluationEngine = Literal["auto", "integer", "float"]
#: (contributions so far, accumulators seen) -> whether the measurement can stop.
Enough = Callable[[Mapping[str, Tensor], AccumulatorExtremes], bool]
#: Called with a batch and its outputs.
See = Callable[[Batch, Sequence[Any]], None]


#: What `KernelRow.kernel` says of nodes that run on no native kernel.
_NO_KERNELS: Final = frozenset({"torch in floats", "reference"})


class Evaluator:
    """Scores Plans on one data set, for one thread at a time. A search or a worker makes one and calls it per trial.

    Args:
        graph: the float model; Plans are compared with it as it was before corrections.
        batches: the data.
        objective: gives the value of the score; the label-free measures and, with labels, accuracy are reported too.
        also: further measures to report.
        engine: `integer` runs Plans whose accumulators are all proved safe on the kernels of the integer model, and
            the others on float carriers, which show overflow; `float` runs every Plan on float carriers; `auto`
            is `integer` where this machine's kernels are faster than the carriers, and run most multiply-accumulates
            of the Plan. All give the same outputs.
        cache_bytes: the size of the cache of simulated values, 0 for none; None for a quarter of the free memory. The
            cache changes no score.
        measurement_bytes: the size of the cache of measurements, 0 for none. A point that is measured once more, such
            as a trial before its layers are corrected, is found there.
        quiet: do not warn of labels that are no classes, since the caller does.

    Raises:
        HagoError: the objective needs labels and the data has none.
    """

    def __init__(
        self,
        graph: Graph,
        batches: Batches,
        objective: Objective,
        ops: Ops = OPS,
        also: Sequence[Objective] = (),
        cache_bytes: int | None = None,
        engine: EvaluationEngine = "auto",
        quiet: bool = False,
        measurement_bytes: int = MEASUREMENT_BYTES,
    ) -> None:
        self.graph, self.batches, self.objective = graph, batches, objective
        for measure in (objective, *also):
            if measure.needs_labels and not batches.classed:
                got = "some that are not whole numbers" if batches.labelled else "none"
                if measure is not objective and measure.name != objective.name:
                    raise DataError(
                        f"a limit on {measure.name!r} (keep, or --keep) needs labels that are classes, got {got} in "
                        "the data (--data); pass (inputs, labels) batches, or limit 'agreement', which needs none"
                    )
                raise DataError(
                    f"{batches.title}: objective {measure.name!r} needs labels that are classes, got {got}; "
                    "pass (inputs, labels) batches"
                )
        self.carriers, self.constant_cache, self.engine = Carriers(), KernelConstantCache(), engine
        self.reuse = Reuse(ValueCache(cache_bytes))
        self._measured: LRU[tuple[str, str], Measurement] = LRU(measurement_bytes, lambda of: of.bytes)
        self._best: Score | None = None
        begun = time.perf_counter()
        self._reference = [run_real(graph.uncorrected, b.inputs, ops=ops) for b in batches]
        self._float_seconds = time.perf_counter() - begun
        self._seconds = 0.0
        for batch, outputs in zip(batches, self._reference, strict=True):
            check_rows(outputs, batch.size)
        check_numbers(batches, self._reference)
        why_not = unfit_labels(batches, [out[0] for out in self._reference])
        measures = (objective, *also)
        if why_not and any(m.needs_labels for m in measures):
            raise DataError(why_not)
        if not quiet and all(OBJECTIVES.get(m.name) is m and not m.needs_labels for m in measures):
            warn_of_labels(why_not, f"the score is {objective.name}{' in dB' if objective.unit == 'dB' else ''}")
        classed = batches.labelled and not why_not
        if classed and not quiet:
            warn_of_numbering(batches, self._reference[0][0])
        names = ["sqnr", "agreement", *(["accuracy"] if classed else [])]
        self._measures: dict[str, Objective] = {n: OBJECTIVES[n] for n in names}
        self._measures |= {o.name: o for o in (objective, *also)}

    def judging_by(self, objective: Objective) -> Evaluator:
        """This evaluator if it judges by an objective, or else one of this objective alone, with the same outputs of
        the float model and cache of values."""
        if objective is self.objective:
            return self
        other = copy(self)
        other.objective, other._measures, other._best = objective, {objective.name: objective}, None
        other._measured = LRU(self._measured.capacity, lambda of: of.bytes)
        return other

    def measure(self, plan: Plan, enough: Enough | None = None, see: See | None = None) -> Measurement:
        """Simulate a Plan over all batches, or until it is enough; or find the measurement if it was made before.

        Args:
            enough: called after every batch with the contributions so far; True ends the measurement.
            see: called with every batch and its outputs.
        """
        if enough is not None or see is not None or not self._measured.capacity:
            return self._simulate(plan, enough, see)
        return self._measured.get_or_make(_measured_key(plan), lambda: self._simulate(plan))

    def keep(self, plan: Plan, measured: Measurement) -> None:
        """Keep a measurement on all batches for when the Plan is measured once more."""
        if self._measured.capacity:
            self._measured.put(_measured_key(plan), measured)

    def _simulate(self, plan: Plan, enough: Enough | None = None, see: See | None = None) -> Measurement:
        begun = time.perf_counter()
        watch = AccumulatorWatch(plan)
        model, extremes = self._model(plan, watch), watch.extremes
        plans = self.reuse.plan(model.steps(), model.ends, len(self._reference))
        contributions: dict[str, Tensor] = {}
        for batch, reference, left in zip(self.batches, self._reference, plans, strict=True):
            outputs = model.end(self.reuse.run(left, partial(model.begin, batch.inputs), watch))
            if see is not None:
                see(batch, outputs)
            added = self._per_sample(batch, reference, outputs)
            contributions = {n: torch.cat([contributions[n], t]) if contributions else t for n, t in added.items()}
            if enough is not None and enough(contributions, extremes):
                break
        extremes.overflows = {n: extremes.overflows[n] for n in plan.nodes if n in extremes.overflows}
        self._seconds += time.perf_counter() - begun
        return Measurement(contributions, extremes)

    def _model(self, plan: Plan, watch: AccumulatorWatch) -> Simulator | Executor:
        fast = self.engine == "integer" or (self.engine == "auto" and exact_kernels().outrun_floats)
        if fast and all(node.proved for node in plan.nodes.values()):
            executor = Executor(plan, self.constant_cache)
            if self.engine == "integer" or _runs_on_kernels(executor):
                return executor
        return Simulator(plan, self.carriers, watch=watch)

    def contributions(self, outputs: Iterable[Sequence[Any]]) -> dict[str, Tensor]:
        """Per-sample contributions of a model's outputs, given batch by batch."""
        each = zip(self.batches, self._reference, outputs, strict=True)
        parts = [self._per_sample(batch, reference, out) for batch, reference, out in each]
        return {n: torch.cat([part[n] for part in parts]) for n in self._measures}

    def contributions_of(self, number: int, batch: Batch, outputs: Sequence[Any]) -> dict[str, Tensor]:
        """Per-sample contributions of a model's outputs for one batch, for callers that keep no outputs.

        Args:
            number: of the batch, from 0.
        """
        return self._per_sample(batch, self._reference[number], outputs)

    def _per_sample(self, batch: Batch, reference: Sequence[Any], outputs: Sequence[Any]) -> dict[str, Tensor]:
        return {n: measure.per_sample(reference, outputs, batch.labels) for n, measure in self._measures.items()}

    def float_contributions(self) -> dict[str, Tensor]:
        """The float model's own contributions: its accuracy, above all."""
        return self.contributions(self._reference)

    def summary(self, contributions: Mapping[str, Tensor]) -> dict[str, Any]:
        """The measures as JSON values, by their figures; shares of correct classes with their 95 % interval.

        Raises:
            HagoError: a measure of the user's own is no finite number.
        """
        samples = len(contributions[self.objective.name])
        results: dict[str, Any] = {"samples": samples}
        for name, measure in self._measures.items():
            value = measure.finish(contributions[name].mean(0))
            if not math.isfinite(value) and OBJECTIVES.get(name) is not measure:
                raise HagoError(why_not_finite(name, value, contributions[name]))
            results[measure.figure] = value
            if measure.needs_labels and measure.counts_classes:
                results[f"{measure.figure}_interval"] = list(wilson_interval(value * samples, samples))
        return results

    def summary_of_last(self, measured: Measurement) -> dict[str, Any]:
        """The measures on the last quarter of the samples, from which no corrections of layers are found; on all where
        there are fewer than four, and of functions that give one number for a batch."""
        samples = self.batches.samples
        last = samples // 4 or samples
        parts = {n: c[-last:] if len(c) == samples else c for n, c in measured.contributions.items()}
        return self.summary(parts)

    @property
    def forward_seconds(self) -> float:
        """The time of one pass of the float model over the data."""
        return self._float_seconds

    @property
    def forwards(self) -> float:
        """The time of all measurements, in passes of the float model over the data."""
        return self._seconds / max(self._float_seconds, 1e-9)

    def score(self, plan: Plan, bits: Bits, rival: Plan | None = None) -> Score:
        """The Score of a Plan.

        Args:
            rival: in a race, the best Plan so far; see `RacingEvaluator`.
        """
        return self.concluded(plan, bits, self.measure(plan))

    def concluded(self, plan: Plan, bits: Bits, measured: Measurement) -> Score:
        """The Score of a Plan that was measured on all batches."""
        value = self.objective.finish(measured.contributions[self.objective.name].mean(0))
        summary = self.summary(measured.contributions)
        score = self.described(plan, bits, measured, value, summary)
        score = replace(score, interval=self._interval(measured.contributions[self.objective.name], summary))
        if self._best is None or score.rank > self._best.rank:
            # Searches look around the best point, so its values are worth more than others.
            self._best = score
            self.reuse.prefer_latest()
        return score

    def _interval(self, contributions: Tensor, summary: Mapping[str, Any]) -> tuple[float, ...]:
        if (interval := summary.get(f"{self.objective.figure}_interval")) is not None:
            return tuple(interval)
        # a user's own function gives one number per batch, which allows no interval
        return () if self.objective.loss is None else quick_interval(contributions, self.objective.finish)

    @staticmethod
    def described(plan: Plan, bits: Bits, measured: Measurement, value: float, results: Mapping[str, Any]) -> Score:
        """Make a Score of a Plan's value and results, with the facts of its accumulators and thresholds."""
        return Score(
            value=value,
            results=results,
            overflows=measured.extremes.overflows,
            excess_bits=measured.extremes.excess_bits,
            unproved=sum(not n.proved for n in plan.nodes.values()),
            total_bits=sum(bits.values()),
            plan_key=plan.key,
            thresholds_sha256=thresholds_sha256(plan),
        )


def _measured_key(plan: Plan) -> tuple[str, str]:
    """Equal for Plans that measure the same. The key of a Plan does not cover constants: training gives other weights,
    whose scales may be equal."""
    return plan.key, plan.graph.correction_hash or plan.graph.model_hash


def held_out_figures(
    plan: Plan, batches: Batches, objective: Objective, reference: Graph | None = None
) -> dict[str, Any]:
    """The figures of a Plan on held-out data, on which it was not searched, with the objective's 95 % interval.

    Args:
        reference: the float model to compare with; by default the Plan's own graph.
    """
    evaluator = Evaluator(reference or plan.graph, batches, objective, plan.ops, cache_bytes=0)
    contributions = evaluator.measure(plan).contributions
    own = contributions[objective.name]
    if objective.counts_classes:
        interval = wilson_interval(objective.finish(own.mean(0)) * len(own), len(own))
    else:
        interval = jackknife_interval(own, objective.finish)
    return {**evaluator.summary(contributions), f"{objective.name}_interval": list(interval)}


def _runs_on_kernels(executor: Executor) -> bool:
    """Whether native kernels run at least half of a Plan's multiply-accumulates.

    Others, such as three-dimensional and transposed convolutions, run on the simulator's carriers in the executor too,
    with conversions from and to stored integers around each: a pass of R3D-18 takes twice as long as a simulation.
    """
    plan, macs = executor.plan, {True: 0, False: 0}
    for row in executor.explain().rows:
        if row.node in plan.nodes:
            macs[row.kernel not in _NO_KERNELS] += node_macs(plan.graph, plan.graph[row.node], plan.ops)
    return macs[True] >= macs[False]


def thresholds_sha256(plan: Plan) -> str:
    """The sha256 of all thresholds of a Plan, in the order of their keys."""
    digest = hashlib.sha256()
    for key, (lo, hi) in sorted(plan.thresholds.items()):
        digest.update(key.encode() + lo.numpy().tobytes() + hi.numpy().tobytes())
    return digest.hexdigest()
