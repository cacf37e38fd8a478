"""Compare the cost and the result of the default search with those of the RFC's greedy search, which tries every choice
of every edge in turn, on the whole data set each time, and caches nothing.

The result of the RFC's greedy search is found with hago's fast evaluation. Its cost is computed: one naive trial, timed
in the same run, for every choice of every group, which is the number of trials that it makes. The default search is
then limited to the costs of the point that the RFC's search found, so that it can only be better at equal or lower
cost. Its forwards are the steps that it ran, in passes over all images, with the savings of caches and racing; a pass
for gradients counts as three. Its seconds are all that a user waits for: import, calibration and search. The import and
the calibration of the same run are added to the RFC's seconds, too. The cost of reaching the RFC's objective is counted
up to the first trial on all images that reaches it within the limits.
"""

from __future__ import annotations

import math
import resource
import statistics
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from _command_shares import OTHER, Parts, sampled
from _fronts import Row
from _search_subjects import Subject, asset, naive_and_float, subjects, wanted
from _timing import seconds_of

from hago import Graph, HagoError
from hago.search import SearchOptions, prepare, run_search
from hago.search.running import RunningSearch
from hago.study import StudyResult, Trial

ASSETS = (
    "mlperf_kws",
    "mlperf_resnet8",
    "cifar_resnet20",
    "cifar_resnet32",
    "mobilenetv2_cifar96",
    "squeezenet1_1",
    "minilm",
)
#: Modules of hago/search that compute on data or weights.
ON_DATA = ("absorb", "affine", "block_reconstruction", "equalize", "evaluate", "float_layers", "gradients")
ON_DATA += ("layer_correction", "measured_point", "output_thresholds", "rotate", "squared_gradients", "weight_scales")
#: The parts of a search. What is not of the passes over data is its own overhead, beside the import of the network.
PARTS: Parts = {
    "import": tuple((f"hago/{name}", "") for name in ("graph/frontend/", "graph/passes/", "importing.py")),
    "kernels": tuple((f"hago/runtime/native/{name}.py", "") for name in ("lowering", "kernels", "weights", "library")),
    "passes": (
        *((f"hago/search/{name}.py", "") for name in ON_DATA),
        *((f"hago/{name}/", "") for name in ("arithmetic", "calibration", "correction", "data", "graph", "ops")),
        *((f"hago/{name}/", "") for name in ("runtime", "simulation")),
    ),
    "plans": (("hago/plan/", ""), ("hago/cost/", ""), ("hago/hardware/", "")),
    "algorithm": (("hago/", ""),),
    OTHER: (),
}
#: The costs that the default search may not exceed; their limits are those of the point that the RFC's search found.
COSTS = ("weight_bytes", "activation_bytes")


@dataclass(frozen=True)
class Searched:
    """A search, its time with import and calibration, and its forwards.

    Args:
        wall: its seconds by the clock by which its trials are timed.
    """

    result: StudyResult
    seconds: float
    forwards: float
    wall: float

    def reached(self, value: float) -> tuple[float, float]:
        """The seconds and forwards until a trial first had the objective within the limits; infinite if none had."""
        trials = self.result.trials
        at = next((t for t in trials if t.score.accepted and t.score.results["sqnr"] >= value), None)
        if at is None:
            return math.inf, math.inf
        after = sum(t.score.forwards for t in trials[at.index + 1 :] if t.same_as is None)
        left = (trials[-1].elapsed - at.elapsed) / self.wall
        return self.seconds * (1.0 - left), self.forwards - min(after, self.forwards)


def search_cost(options: Any) -> list[Row]:
    """Compare a search with the RFC's greedy search on every network and hardware."""
    return [r for s in _subjects(options) for hardware in options.hardware for r in _both(s, hardware, options)]


def default_cost(options: Any) -> list[Row]:
    """Time whole searches, import and calibration included, in passes of the given network over the same samples.

    These passes are timed before and after the search. The largest memory of the process is read after the first and
    after the last trial. A timer counts the shares of the parts of a search.
    """
    print(
        f"{'network':20} {'hardware':18} {'seconds':>8} {'a forward':>10} {'forwards':>9} {'trials':>7} {'SQNR':>7} "
        "MiB after the first and the last trial; shares"
    )
    rows: list[Row] = []
    for subject in _subjects(options):
        for hardware in options.hardware:
            memory: list[int] = []

            def look(search: RunningSearch, trial: Trial, memory: list[int] = memory) -> None:
                memory.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)

            how = SearchOptions.of(
                searcher=options.searcher,
                progress=False,
                seed=options.seed,
                cache_bytes=options.cache_bytes,
                callbacks=[look],
            )
            before = _given_forward(subject, options)
            begun, parts = options.clock(), dict.fromkeys(PARTS, 0.0)
            with sampled(parts, PARTS, options.clock):
                found = run_search(subject.network, hardware, subject.batches, how)
            seconds = options.clock() - begun
            forward = (before + _given_forward(subject, options)) / 2
            row = {"network": subject.name, "hardware": hardware, "seconds": seconds, "forward_seconds": forward}
            row |= {"forwards": seconds / forward, "trials": len(found.result.trials)}
            row |= {"first_mib": memory[0], "last_mib": memory[-1], "part_seconds": parts}
            rows.append(row | {"sqnr": float(found.result.score.results["sqnr"])})
            print(
                f"{subject.name:20} {hardware:18} {seconds:8.1f} {forward:10.3f} {seconds / forward:9.0f} "
                f"{len(found.result.trials):7} {rows[-1]['sqnr']:7.2f} {memory[0]}, {memory[-1]}; "
                + ", ".join(f"{part} {taken / seconds:.0%}" for part, taken in parts.items()),
                flush=True,
            )
    return rows


def _given_forward(subject: Subject, options: Any) -> float:
    """The seconds of a pass of the given network over all samples; the median of five."""
    network = subject.network
    if isinstance(network, Graph):
        raise HagoError("a graph has no forward of its own; give networks (--assets)")

    def forward() -> None:
        with torch.no_grad():
            for batch in subject.batches:
                network(*batch)

    return statistics.median(seconds_of(forward, options.clock) for _ in range(5))


def _subjects(options: Any) -> Iterator[Subject]:
    """The pretrained networks, and those with random weights if there are no pretrained ones or if they are named."""
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
    """Run a search with limits on costs.

    Args:
        most: the limits by cost; empty for a search without limits.
    """
    limits = [f"{name} <= {most[name]!r}" for name in COSTS if name in most]
    begun, started = options.clock(), time.monotonic()
    how = SearchOptions.of(searcher=searcher, progress=False, budget=options.trials, budget_cost=limits or None)
    found = run_search(subject.network, hardware, subject.batches, how)
    seconds, wall = options.clock() - begun, time.monotonic() - started
    return Searched(found.result, seconds, found.forwards, wall)
