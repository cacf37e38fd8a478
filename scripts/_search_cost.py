"""What the default search pays and finds against the RFC's greedy: every choice of every edge in turn, the whole data
set each time, nothing kept.

The RFC's greedy is searched with all that makes hago fast, so that what it finds is known; what it pays is worked
out: one naive trial, timed in the same run, for every choice of every group, which is exactly what it asks. The
default search is then held to the costs that the RFC's point has, so it may be better at equal or lower cost alone.
Its forwards by the algorithm are the steps that it ran, caches and racing counted, in passes over all images; a
pass for gradients counts as three. Its seconds are all that a user waits for: import, calibration, search.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from _fronts import Row
from _search_subjects import Subject, asset, naive_and_float, subjects, wanted

from hago.prepare import prepare
from hago.search.driver import SearchResult
from hago.searching.search import SearchOptions, find

ASSETS = ("mlperf_kws", "mlperf_resnet8", "cifar_resnet20", "cifar_resnet32", "mobilenetv2_cifar96", "squeezenet1_1")
#: The costs that the RFC's point has, and that the other search must keep.
COSTS = ("weight_bytes", "activation_bytes")


@dataclass(frozen=True)
class Searched:
    """A search, its time with import and calibration, and the passes that its steps come to."""

    result: SearchResult
    seconds: float
    forwards: float


def search_cost(options: Any) -> list[Row]:
    """A search against the RFC's greedy, network by network and hardware by hardware."""
    nets = (asset(options, n) for n in ASSETS if wanted(options, n)) if options.assets else subjects(options)
    return [row for subject in nets for hardware in options.hardware for row in _both(subject, hardware, options)]


def _both(subject: Subject, hardware: str, options: Any) -> Iterable[Row]:
    prepared = prepare(subject.network, hardware, subject.batches)
    pairs = naive_and_float(prepared, subject, options)
    naive, forward = (statistics.median(x) for x in zip(*pairs, strict=True))
    asked = sum(len(g.choices) for g in prepared.space.groups.values())
    theirs = searched(subject, hardware, "rfc_greedy", {}, options)
    mine = searched(subject, hardware, options.searcher, theirs.result.score.costs, options)
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
        "rfc_seconds": asked * naive,
        "sqnr": mine.result.score.results["sqnr"],
        "rfc_sqnr": theirs.result.score.results["sqnr"],
        **{name: mine.result.score.costs[name] for name in COSTS},
        **{f"rfc_{name}": theirs.result.score.costs[name] for name in COSTS},
        "fewer_forwards": asked / mine.forwards,
        "less_time": asked * naive / mine.seconds,
    }
    print(
        f"{subject.name} on {hardware}: {row['groups']} groups, a float forward {forward:.3f} s, a naive trial "
        f"{naive / forward:.1f}\n"
        f"  {options.searcher}: {row['sqnr']:.3f} dB (the RFC's greedy {row['rfc_sqnr']:.3f}), weights "
        f"{row['weight_bytes']:.0f} B ({row['rfc_weight_bytes']:.0f}), activations {row['activation_bytes']:.0f} B "
        f"({row['rfc_activation_bytes']:.0f})\n"
        f"  {row['trials']} trials ({asked}), {mine.forwards:.1f} forwards: {row['fewer_forwards']:.1f} times fewer; "
        f"{mine.seconds:.2f} s ({row['rfc_seconds']:.1f}): {row['less_time']:.1f} times less",
        flush=True,
    )
    yield row


def searched(subject: Subject, hardware: str, searcher: str, most: Mapping[str, float], options: Any) -> Searched:
    """A search that keeps costs.

    Args:
        most: by cost, what it may be; nothing for a search without limits.
    """
    limits = [f"{name} <= {most[name]!r}" for name in COSTS if name in most]
    begun = options.clock()
    how = SearchOptions(searcher=searcher, progress=False, budget=options.trials, budget_cost=limits or None)
    found = find(subject.network, hardware, subject.batches, how)
    seconds = options.clock() - begun
    return Searched(found.result, seconds, found.forwards)
