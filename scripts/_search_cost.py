"""What the default search pays and finds against the RFC's greedy: every choice of every edge in turn, the whole data
set each time, nothing kept.

The RFC's greedy is searched with all that makes hago fast, so that what it finds is known; what it pays is worked
out: one naive trial, timed in the same run, for every choice of every group, which is exactly what it asks. The
default search is then held to the costs that the RFC's point has, so it may be better at equal or lower cost alone.
Its forwards by the algorithm are the steps that it ran, caches and racing counted, in passes over all images; a
pass for gradients counts as three. Its seconds are all that a user waits for: import, calibration, search; the RFC's
greedy is given the import and the calibration of the same run, too. What it took to reach the RFC's objective is
counted up to the first trial, simulated on all images, that has it and keeps the costs.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from _fronts import Row
from _search_subjects import Subject, asset, naive_and_float, subjects, wanted
from _timing import seconds_of

from hago import Graph, HagoError
from hago.search import SearchOptions, prepare, run_search
from hago.study import StudyResult

ASSETS = (
    "mlperf_kws",
    "mlperf_resnet8",
    "cifar_resnet20",
    "cifar_resnet32",
    "mobilenetv2_cifar96",
    "squeezenet1_1",
    "minilm",
)
#: The costs that the RFC's point has, and that the other search must keep.
COSTS = ("weight_bytes", "activation_bytes")


@dataclass(frozen=True)
class Searched:
    """A search, its time with import and calibration, and the passes that its steps come to.

    Args:
        wall: its seconds by the clock of its trials.
    """

    result: StudyResult
    seconds: float
    forwards: float
    wall: float

    def reached(self, value: float) -> tuple[float, float]:
        """Seconds and forwards until a trial first had the objective within the limits; infinite where none has."""
        trials = self.result.trials
        at = next((t for t in trials if t.score.accepted and t.score.results["sqnr"] >= value), None)
        if at is None:
            return math.inf, math.inf
        after = sum(t.score.forwards for t in trials[at.index + 1 :] if t.same_as is None)
        left = (trials[-1].elapsed - at.elapsed) / self.wall
        return self.seconds * (1.0 - left), self.forwards - min(after, self.forwards)


def search_cost(options: Any) -> list[Row]:
    """A search against the RFC's greedy, network by network and hardware by hardware."""
    return [r for s in _subjects(options) for hardware in options.hardware for r in _both(s, hardware, options)]


def default_cost(options: Any) -> list[Row]:
    """What a whole search takes, import and calibration included, in passes of the network as it is given over the same
    samples, which are timed before and after it."""
    print(f"{'network':20} {'hardware':18} {'seconds':>8} {'a forward':>10} {'forwards':>9} {'trials':>7} {'SQNR':>7}")
    rows: list[Row] = []
    for subject in _subjects(options):
        for hardware in options.hardware:
            how = SearchOptions.of(searcher=options.searcher, progress=False, seed=options.seed)
            before = _given_forward(subject, options)
            begun = options.clock()
            found = run_search(subject.network, hardware, subject.batches, how)
            seconds = options.clock() - begun
            forward = (before + _given_forward(subject, options)) / 2
            row = {"network": subject.name, "hardware": hardware, "seconds": seconds, "forward_seconds": forward}
            row |= {"forwards": seconds / forward, "trials": len(found.result.trials)}
            rows.append(row | {"sqnr": float(found.result.score.results["sqnr"])})
            print(
                f"{subject.name:20} {hardware:18} {seconds:8.1f} {forward:10.3f} {seconds / forward:9.0f} "
                f"{len(found.result.trials):7} {rows[-1]['sqnr']:7.2f}",
                flush=True,
            )
    return rows


def _given_forward(subject: Subject, options: Any) -> float:
    """Seconds of a pass of the network as it is given over all samples; the median of five."""
    network = subject.network
    if isinstance(network, Graph):
        raise HagoError("a graph has no forward of its own; give networks (--assets)")

    def forward() -> None:
        with torch.no_grad():
            for batch in subject.batches:
                network(*batch)

    return statistics.median(seconds_of(forward, options.clock) for _ in range(5))


def _subjects(options: Any) -> Iterator[Subject]:
    """The pretrained networks; those with made-up weights where there are none, or where they are named."""
    if options.assets:
        yield from (asset(options, n) for n in ASSETS if wanted(options, n))
    if options.nets or not options.assets:
        yield from (s for s in subjects(options) if s.name not in ASSETS)


def _both(subject: Subject, hardware: str, options: Any) -> Iterable[Row]:
    begun = options.clock()
    prepared = prepare(subject.network, hardware, subject.batches)
    before = options.clock() - begun
    pairs = naive_and_float(prepared, subject, options)
    naive, forward = (statistics.median(x) for x in zip(*pairs, strict=True))
    asked = sum(len(g.choices) for g in prepared.space.groups.values())
    theirs = searched(subject, hardware, "rfc_greedy", {}, options)
    mine = searched(subject, hardware, options.searcher, theirs.result.score.costs, options)
    rfc_sqnr, rfc_seconds = theirs.result.score.results["sqnr"], before + asked * naive
    reach_seconds, reach_forwards = mine.reached(rfc_sqnr)
    row = {
        "network": subject.name,
        "hardware": hardware,
        "groups": len(prepared.space.groups),
        "forward_seconds": forward,
        "naive_trial": naive / forward,
        "searcher": options.searcher,
        "trials": sum(t.same_as is None for t in mine.result.trials),
        "rfc_trials": asked,
        "forwards": mine.forwards,
        "seconds": mine.seconds,
        "rfc_seconds": rfc_seconds,
        "prepare_seconds": before,
        "reach_seconds": reach_seconds,
        "reach_forwards": reach_forwards,
        "sqnr": mine.result.score.results["sqnr"],
        "rfc_sqnr": rfc_sqnr,
        **{name: mine.result.score.costs[name] for name in COSTS},
        **{f"rfc_{name}": theirs.result.score.costs[name] for name in COSTS},
        "fewer_forwards": asked / mine.forwards,
        "less_time": rfc_seconds / mine.seconds,
        "fewer_forwards_to_reach": asked / reach_forwards,
        "less_time_to_reach": rfc_seconds / reach_seconds,
    }
    print(_said(row), flush=True)
    yield row


def _said(row: Mapping[str, Any]) -> str:
    lines = (
        "{network} on {hardware}: {groups} groups, a float forward {forward_seconds:.3f} s, a naive trial "
        "{naive_trial:.1f}, import and calibration {prepare_seconds:.1f} s",
        "  {searcher}: {sqnr:.3f} dB (the RFC's greedy {rfc_sqnr:.3f}), weights {weight_bytes:.0f} B "
        "({rfc_weight_bytes:.0f}), activations {activation_bytes:.0f} B ({rfc_activation_bytes:.0f})",
        "  {trials} trials ({rfc_trials}), {forwards:.1f} forwards: {fewer_forwards:.1f} times fewer; {seconds:.2f} s "
        "({rfc_seconds:.1f}): {less_time:.1f} times less",
        "  as good after {reach_forwards:.1f} forwards: {fewer_forwards_to_reach:.1f} times fewer; "
        "{reach_seconds:.2f} s: {less_time_to_reach:.1f} times less",
    )
    return "\n".join(lines).format(**row)


def searched(subject: Subject, hardware: str, searcher: str, most: Mapping[str, float], options: Any) -> Searched:
    """A search that keeps costs.

    Args:
        most: by cost, what it may be; nothing for a search without limits.
    """
    limits = [f"{name} <= {most[name]!r}" for name in COSTS if name in most]
    begun, started = options.clock(), time.monotonic()
    how = SearchOptions.of(searcher=searcher, progress=False, budget=options.trials, budget_cost=limits or None)
    found = run_search(subject.network, hardware, subject.batches, how)
    seconds, wall = options.clock() - begun, time.monotonic() - started
    return Searched(found.result, seconds, found.forwards, wall)
