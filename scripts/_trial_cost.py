"""The cost of a trial: the evaluation time of a search per distinct Plan, relative to a float forward.

The search starts with cold caches and runs until it ends, or for --trials. Points that a race gives up count as trials,
and their time counts, too. The float forward over the same images is timed repeatedly between trials. The work before
the trials of a guided search, mainly its pass for sensitivities, has a row of its own.

Paths: `integer`: the fastest kernels that are exact. `float carriers`: every fourth point of the greedy search again,
in the same order and from cold caches, by the simulator alone, over --carrier-images of the images, relative to a float
forward over these; less is reused, because successive points differ more. `naive`: the RFC's seven passes on every edge
without any cache, over the same few images, in pairs.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from _fronts import Row
from _search_subjects import Subject, naive_and_float, subjects
from _timing import float_forward, seconds_of

from hago.data import Batches
from hago.plan import Bits
from hago.search import Evaluator, GoalOptions, Prepared, QuantizationOptions, RaceOptions, prepare
from hago.search.goal import make_goal
from hago.search.guidance import make_surrogate
from hago.search.objective import named_objective
from hago.search.racing import make_evaluator
from hago.search.safe_bits import widest_safe_bits
from hago.search.workers import PointScorer
from hago.searchers import SEARCHERS, make_searcher
from hago.study import Score, run_study

SCALES = {"powers of two": "power2_range", "float scales": "mse"}
#: The searcher of each row; a race has the default error level.
SEARCHES = {"greedy": "greedy", "greedy, raced": "greedy", "sensitivity": "sensitivity"}
#: One in so many points of the greedy search is evaluated on float carriers.
STRIDE = 4
#: Evaluations between two float forwards.
BETWEEN = 96


@dataclass
class Timed:
    """A point scorer whose evaluation time is counted, and a float forward that is timed between evaluations."""

    scorer: PointScorer
    forward: Callable[[], Any]
    clock: Callable[[], float]
    pairs: int
    seconds: float = 0.0
    before: float = 0.0
    points: list[Bits] = field(default_factory=list)
    floats: list[float] = field(default_factory=list)

    def __call__(self, bits: Bits, rival: Bits | None = None) -> Score:
        if len(self.floats) < self.pairs or len(self.points) % BETWEEN == 0:
            self.floats.append(seconds_of(self.forward, self.clock))
        begun = self.clock()
        score = self.scorer.score(bits, rival)
        self.seconds += self.clock() - begun
        self.points.append(bits)
        return score

    @property
    def trial(self) -> float:
        """The time of a trial relative to a float forward."""
        return self.seconds / len(self.points) / statistics.median(self.floats)

    @property
    def reused(self) -> float:
        """The fraction of all steps of all trials that did not have to run."""
        return self.scorer.evaluator.reuse.spent.share


def trial_cost(options: Any) -> list[Row]:
    """The table, network by network and scales by scales."""
    print(f"{'network':14} {'scales':14} {'path':15} {'search':14} {'trials':>6} {'a trial':>9} {'reused':>7}")
    rows = []
    for subject in subjects(options):
        for scales, estimator in SCALES.items():
            prepared = prepare(
                subject.network, options.hardware[0], subject.batches, QuantizationOptions(estimator=estimator)
            )
            for row in _rows(prepared, subject, options):
                row = {"network": subject.name, "scales": scales, **row}
                reused = "" if row["reused"] is None else f"{100 * row['reused']:5.0f} %"
                print(
                    f"{row['network']:14} {scales:14} {row['path']:15} {row['search']:14} {row['trials']:6} "
                    f"{row['trial']:9.3f} {reused:>7}",
                    flush=True,
                )
                rows.append(row)
    return rows


def _rows(prepared: Prepared, subject: Subject, options: Any) -> Iterable[Row]:
    points: Sequence[Bits] = ()
    for name in options.searches.split(";"):
        timed = _searched(prepared, subject, name, options)
        points = timed.points if name == "greedy" else points
        yield _row("integer", name, timed)
        if timed.before:
            forwards = timed.before / statistics.median(timed.floats)
            yield {"path": "guidance", "search": name, "trials": 1, "trial": forwards, "reused": None}
    few = Subject(subject.name, subject.network, _first(subject, options.carrier_images))
    if points:
        yield _row("float carriers", "greedy", _again(prepared, few, points[::STRIDE], options))
    ratios = [naive / forward for naive, forward in naive_and_float(prepared, few, options)]
    yield {"path": "naive", "search": "any", "trials": len(ratios), "trial": statistics.median(ratios), "reused": None}


def _row(path: str, name: str, timed: Timed) -> Row:
    return {"path": path, "search": name, "trials": len(timed.points), "trial": timed.trial, "reused": timed.reused}


def _searched(prepared: Prepared, subject: Subject, name: str, options: Any) -> Timed:
    """A whole search, on the fastest kernels that are exact."""
    race = RaceOptions() if name.endswith("raced") else None
    goal = make_goal(GoalOptions("sqnr"))
    evaluator = make_evaluator(prepared.graph, prepared.batches, goal.objective, prepared.resolver.ops, race=race)
    scorer = PointScorer(prepared.resolver, evaluator)
    timed = Timed(scorer, float_forward(prepared.graph, subject.batches), options.clock, options.pairs)
    timed.forward()
    start, found = widest_safe_bits(prepared.resolver, prepared.calibration.peaks), SEARCHES[name]
    begun = options.clock()
    surrogate = make_surrogate(prepared, goal, start) if SEARCHERS[found].guided else None
    timed.before = options.clock() - begun if surrogate is not None else 0.0
    searcher = make_searcher(found, prepared.space, start, surrogate=surrogate)
    run_study(
        prepared.space,
        searcher,
        timed,
        budget=options.trials,
        plan_key=lambda bits: prepared.resolver(bits).key,
        race=race is not None,
    )
    return timed


def _again(prepared: Prepared, subject: Subject, points: Sequence[Bits], options: Any) -> Timed:
    """Evaluate points of a search again, on float carriers alone."""
    batches = Batches(subject.batches, prepared.graph.inputs)
    evaluator = Evaluator(prepared.graph, batches, named_objective("sqnr"), prepared.hardware.known_ops, engine="float")
    forward = float_forward(prepared.graph, subject.batches)
    forward()
    timed = Timed(PointScorer(prepared.resolver, evaluator), forward, options.clock, options.pairs)
    for bits in points:
        timed(bits)
    return timed


def _first(subject: Subject, images: int) -> list[tuple[Any, ...]]:
    """The first `images` images, or all of them if there are fewer."""
    batches, left = [], images
    for batch in subject.batches:
        if left > 0:
            batches.append(tuple(x[:left] for x in batch))
            left -= len(batch[0])
    return batches
