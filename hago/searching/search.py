"""Searching: a whole search, from a model and a data set to the best strategy and all trials."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from os import PathLike
from pathlib import Path
from typing import Any, Final

from hago.calibrate.seed import ModesLike, ThresholdsLike
from hago.calibrate.statistics import Estimator
from hago.errors import InfeasibleBits
from hago.frontend.torch_export import ModelLike
from hago.json_text import check_distinct
from hago.objective import ObjectiveLike
from hago.prepare import HardwareLike, Prepared, held_out_batches, make_strategy, planned, prepare
from hago.search.driver import SearchResult, search
from hago.search.log import read_header
from hago.search.progress import Preliminaries
from hago.search.searcher import Searcher
from hago.search.searchers import AUTO, DEFAULTS, check_racing, check_seed, parse_searcher
from hago.search.trial import Trial
from hago.searching.anytime import Anytime
from hago.searching.beginning import Begun, begin, costs_in_use
from hago.searching.confirmation import losses_of
from hago.searching.descriptions import confirmed, description, header_of
from hago.searching.fronts import ParetoFront
from hago.searching.reachable import nearest
from hago.searching.waste import tidied
from hago.strategy import Strategy
from hago.trials.executors import open_executor
from hago.trials.goal import make_goal
from hago.trials.known import LogPath, hashes_of, known_scores
from hago.trials.racing import Race, as_race
from hago.trials.scoring import Scoring

#: Costs that know what it takes to compute in float.
FLOATS_COST: Final = frozenset({"bops", "cycles", "latency", "energy"})


@dataclass(frozen=True, slots=True)
class SearchOptions:
    """What a user may choose of a search; see `hago.search_quantize_strategy`."""

    searcher: str | Searcher | Any = AUTO
    estimator: str | Estimator | None = None
    objective: ObjectiveLike = "sqnr"
    budget: str | int | None = None
    seed: int = 0
    log: str | PathLike[str] | None = None
    resume: bool = True
    progress: bool = True
    keep_float: str | Sequence[str] = ()
    fix_bits: Mapping[str, int] = field(default_factory=dict)
    held_out: Iterable[Any] | None = None
    save: str | PathLike[str] | None = None
    allow_overflow: bool = False
    maximize: ObjectiveLike | None = None
    minimize: str | None = None
    keep: str | Sequence[str] | None = None
    budget_cost: str | Sequence[str] | None = None
    executor: Executor | str | None = None
    cache_bytes: int | None = None
    front: str | PathLike[str] | None = None
    race: bool | float | Race = False
    reuse: LogPath | Sequence[LogPath] | None = None
    thresholds: ThresholdsLike | None = None
    modes: ModesLike | None = None
    search_topology: bool | None = None


@dataclass(frozen=True, slots=True)
class Found:
    """What a search ends with.

    Args:
        strategy: the best.
        score: its accuracy on the data where that has labels, else the objective's value.
        result: every trial, the best of them, and why the search stopped.
        front: what no other point beats in both the objective and a cost.
        forwards: what it took by the algorithm, in passes of the float model over the data: simulations in this
            process by the steps that ran, and passes for gradients. Calibration is not in it.
        before: seconds before the first trial: import, calibration, gradients, refinement.
    """

    strategy: Strategy
    score: float
    result: SearchResult
    front: ParetoFront
    forwards: float = 0.0
    before: float = 0.0


class Result(float):
    """The score of the best strategy, a number like any other, that also knows the `front` of its search."""

    front: ParetoFront

    @staticmethod
    def of(found: Found) -> Result:
        """The score of a search."""
        result = Result(found.score)
        result.front = found.front
        return result


def find(model: ModelLike, hardware: HardwareLike, dataset: Iterable[Any], options: SearchOptions) -> Found:
    """Search; see `hago.search_quantize_strategy`."""
    begun = time.monotonic()
    check_seed(options.seed)
    check_distinct({"log": options.log, "save": options.save, "front": options.front})
    race = as_race(options.race)
    if race is not None and isinstance(options.searcher, str):
        check_racing(parse_searcher(options.searcher)[0])
    logged = read_header(Path(options.log)) if options.log is not None and options.resume else None
    if logged is not None and options.searcher == AUTO and logged.searcher["name"] in DEFAULTS:
        # a log is continued as it was begun, by whatever was the default then
        options = replace(options, searcher=str(logged.searcher["name"]))
    goal = make_goal(options.objective, options.maximize, options.minimize, options.keep, options.budget_cost)
    costs = costs_in_use(options.searcher, goal)
    kinds = bool(FLOATS_COST & {*costs}) if options.search_topology is None else options.search_topology
    with Preliminaries(options.progress) as doing:
        doing("importing the model and calibrating")
        made_for = [*hashes_of(options.reuse), *([] if logged is None else [logged.model_hash])]
        prepared = _prepared(model, hardware, dataset, kinds, made_for, options)
        needed = goal.objective.needs_labels
        given = options.held_out
        held_out = None if given is None else held_out_batches(model, prepared, given, needed)
        whole, prepared = prepared.space.size, tidied(prepared, costs)
        known = known_scores(options.reuse, prepared, goal)
        scored = Scoring(goal, prepared, options.cache_bytes, race, options.seed, known)
        doing("finding thresholds and what every choice may lose")
        chosen = options.estimator is not None or prepared.calibration.given.gives_ranges
        # logs of version 1 kept no samples aside
        keeps_aside = logged is None or logged.settings.get("refined") is not True
        ready = begin(scored, options.searcher, costs, whole, options.seed, chosen, keeps_aside)
    if race is not None:
        check_racing(ready.searcher.name)
    how = description(ready.scored.prepared, ready.scored, ready.searcher, options.seed, kinds)
    before = time.monotonic() - begun
    session = _Session(ready, costs, how, replace(options, held_out=held_out), before)
    found = session.found(*session.run())
    return replace(found, forwards=ready.gradients + ready.scored.bench.evaluator.reuse.spent.passes, before=before)


def _prepared(
    model: ModelLike,
    hardware: HardwareLike,
    dataset: Iterable[Any],
    kinds: bool,
    made_for: Collection[str],
    options: SearchOptions,
) -> Prepared:
    return prepare(
        model,
        hardware,
        dataset,
        estimator=options.estimator,
        keep_float=options.keep_float,
        fix_bits=options.fix_bits,
        thresholds=options.thresholds,
        modes=options.modes,
        kinds=kinds,
        made_for=made_for,
    )


@dataclass(frozen=True, slots=True)
class _Session:
    """A search that is ready to run.

    Args:
        ready: what it begins with.
        costs: those in use.
        how: see `description`.
        before: seconds that it took until here.
    """

    ready: Begun
    costs: Sequence[str]
    how: Mapping[str, Any]
    options: SearchOptions
    before: float

    @property
    def scored(self) -> Scoring:
        return self.ready.scored

    @property
    def prepared(self) -> Prepared:
        return self.ready.scored.prepared

    def run(self) -> tuple[SearchResult, ParetoFront]:
        """Search, with the best strategy and the front on disk after every trial."""
        options, ready, resolver = self.options, self.ready, self.prepared.resolver
        with open_executor(options.executor) as hands:
            front = None if options.front is None else Path(options.front)
            anytime = Anytime(self.scored, front, self.how, hands is None, self.costs, self.strategy_of)
            try:
                result = search(
                    self.prepared.space,
                    ready.searcher,
                    ready.scored,
                    log=options.log if options.log is None else Path(options.log),
                    header=header_of(self.prepared, ready.searcher, self.how),
                    budget=options.budget,
                    resume=options.resume,
                    progress=options.progress,
                    on_best=lambda trial: self.keep(self.strategy_of(trial)),
                    on_trial=anytime,
                    plan_key=lambda bits: resolver(bits).key,
                    allow_overflow=options.allow_overflow,
                    submit=self.scored.submit(hands),
                    race=self.scored.race is not None,
                    before=(self.before, ready.gradients + ready.simulated),
                )
            except BaseException:
                anytime.stop()
                raise
        anytime.finish()
        return result, anytime.front

    def found(self, result: SearchResult, front: ParetoFront) -> Found:
        """What the search ends with, confirmed on held-out data where there is any.

        Raises:
            InfeasibleBits: no point keeps the limits.
        """
        goal = self.scored.goal
        result = self.with_sure_best(result)
        results = result.score.results
        if result.score.shortfall:
            raise InfeasibleBits(nearest(goal, result))
        strategy = self.strategy_of(result.best)
        self.keep(strategy)
        if self.options.held_out is not None:
            plan, batches = planned(self.prepared.graph, self.prepared.hardware, strategy, self.options.held_out)
            held_out = confirmed(plan, batches, goal.objective)
            strategy = replace(strategy, made_by={**strategy.made_by, "held_out": held_out})
            self.keep(strategy)
        score = results.get("sim_acc", results.get(goal.objective.name, result.score.value))
        return Found(strategy, float(score), result, front)

    def with_sure_best(self, result: SearchResult) -> SearchResult:
        """With the first trial as the best, where that is its start, keeps every limit, and no other is surely better
        on samples that were kept aside. Where costs are limited, or made least, it is not the start that is wanted.
        """
        confirmation, first = self.ready.confirmation, result.trials[0]
        if confirmation is None or self.costs or result.best.bits == first.bits or not first.score.accepted:
            return result
        objective, measure = self.scored.goal.objective, self.scored.bench.evaluator.measure
        measured = [measure(self.prepared.resolver(trial.bits)) for trial in (first, result.best)]
        before, after = ([losses_of(objective, m)] * len(confirmation.turns) for m in measured)
        if confirmation.gain(before, after).is_sure():
            return result
        return replace(result, best=first)

    def strategy_of(self, trial: Trial) -> Strategy:
        """A trial's strategy."""
        said = {**self.how, "results": dict(trial.score.results), "costs": dict(trial.score.costs)}
        return make_strategy(self.prepared, self.prepared.resolver(trial.bits), trial.bits, said)

    def keep(self, strategy: Strategy) -> None:
        """Put the best strategy where the user wants it."""
        if self.options.save is not None:
            strategy.save(Path(self.options.save))
