"""What a search begins with: its searcher, the thresholds that its points are scored with, and what that took."""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from os import PathLike
from pathlib import Path
from typing import Any, Final

from hago.calibration.given_ranges import ModesLike, ThresholdsLike
from hago.calibration.statistics import Estimator
from hago.cost.cost import plan_cost
from hago.errors import HagoError, InfeasibleBits, warn
from hago.graph.frontend import ModelLike
from hago.plan.space import Bits, Space
from hago.plan.strategy import Strategy
from hago.search.confirmation import Confirmation, losses_of
from hago.search.description import confirmed, description, header_of
from hago.search.evaluate import widest_safe_bits
from hago.search.fronts import FrontWriter, ParetoFront
from hago.search.goal import Goal, make_goal
from hago.search.guidance import DEFAULT_COST, make_surrogate
from hago.search.limits import check_reachable, nearest
from hago.search.objective import ObjectiveLike
from hago.search.prepare import HardwareLike, Prepared, held_out_batches, make_strategy, plan_and_batches, prepare
from hago.search.racing import RaceOptions, as_race
from hago.search.redundancy import prune_redundant_choices
from hago.search.refinement import PASS, Refinement, refined, refined_choices
from hago.search.scoring import LogPath, PlanScorer, hashes_of, known_scores
from hago.search.workers import open_executor
from hago.searchers.registry import (
    AUTO,
    DEFAULTS,
    SEARCHERS,
    Refines,
    check_racing,
    check_seed,
    make_searcher,
    parse_searcher,
    searcher_for,
)
from hago.searchers.surrogate import Surrogate
from hago.serialization.json_text import check_distinct
from hago.study.log import Trial, read_header
from hago.study.progress import Preliminaries
from hago.study.searcher import Searcher
from hago.study.study import StudyResult, run_study

#: Refined thresholds may take one forward for so many choices that the space has, and so many in any case.
CHOICES_A_FORWARD: Final = 14
LEAST_GAIN_OF_CHOICES: Final = 6.0


@dataclass(frozen=True, slots=True)
class SearchSetup:
    """A search before its first trial.

    Args:
        searcher: knows the space, and where to start.
        scored: scores its points, with the thresholds that were found.
        gradients, simulated: what it took, in forwards: passes for gradients, and simulations.
        confirmation: on which samples what it proposes is to be confirmed; None where nothing is proposed but bits.
    """

    searcher: Searcher
    scored: PlanScorer
    gradients: float = 0.0
    simulated: float = 0.0
    confirmation: Confirmation | None = None


def set_up_search(
    scored: PlanScorer,
    named: str | Searcher | Any,
    costs: Sequence[str],
    whole: int,
    seed: int,
    chosen: bool,
    keeps_aside: bool = True,
) -> SearchSetup:
    """What a search begins with.

    Args:
        named: the searcher, as a user gives it.
        costs: those in use.
        whole: how many choices there are.
        chosen: whether the user chose the thresholds, or how to estimate them.
        keeps_aside: whether refined thresholds are confirmed on samples that are kept aside.

    Raises:
        InfeasibleBits: no point keeps the limits.
        HagoError: no such searcher, or options that it does not take.
    """
    prepared, goal, metric = scored.prepared, scored.goal, next(iter(costs), "")
    start: Bits = widest_safe_bits(prepared.resolver, prepared.calibration.peaks)
    if named == AUTO:
        named = searcher_for(_limited(prepared, goal, start))
    entry = SEARCHERS.get(parse_searcher(named)[0]) if isinstance(named, str) else None
    if entry is not None and entry.guided and goal.objective.curvature is None:
        warn(
            f"nothing is known of how objective {goal.objective.name!r} depends on single outputs, so the search is "
            "guided by the squared error of the outputs instead; its values choose among what is evaluated. Searchers "
            "without a guide (greedy, annealing, random) go by it alone"
        )
    if entry is None or not entry.refined or chosen:
        check_reachable(goal, prepared, start, scored.first)
        guided = entry is not None and entry.guided
        guide = make_surrogate(prepared, goal, start, seed, metric) if guided else None
        return SearchSetup(_searcher(named, prepared.space, start, seed, guide), scored, PASS if guided else 0.0)
    check_reachable(goal.of_costs, prepared, start, scored.first)
    confirmation = Confirmation.of([b.size for b in scored.bench.evaluator.batches]) if keeps_aside else None
    found = refined_as(entry.refined, scored, metric, whole, seed, confirmation)
    scored, prepared = scored.of(found.prepared), found.prepared
    check_reachable(goal, prepared, found.guide.most or start, scored.first)
    searcher = _searcher(named, prepared.space, found.start, seed, found.guide)
    return SearchSetup(searcher, scored, found.forwards, found.simulated, confirmation)


def _limited(prepared: Prepared, goal: Goal, start: Bits) -> bool:
    """Whether a goal asks for fewer bits than the most: it makes a cost least, or limits one below theirs."""
    if goal.minimize is not None:
        return True
    limits = [x for x in goal.limits if x.is_cost]
    if not limits:
        return False
    figures = plan_cost(prepared.resolver(start)).figures
    return any(x.shortfall(float(figures.get(x.figure, math.inf))) > 0.0 for x in limits)


def costs_in_use(searcher: Any, goal: Goal) -> tuple[str, ...]:
    """The costs that matter, the one that a front would be over first."""
    if not isinstance(searcher, str):
        return goal.costs
    name, given = parse_searcher(searcher)
    default = DEFAULT_COST if name == "pareto" and not goal.costs else ""
    named = str(given.get("cost", default))
    return tuple(dict.fromkeys([*([named] if named else []), *goal.costs]))


def refined_as(
    which: Refines, scored: PlanScorer, metric: str, whole: int, seed: int, confirmation: Confirmation | None
) -> Refinement:
    """What a search whose thresholds are refined begins with.

    Args:
        which: see SearcherEntry.
        metric: the first of the costs in use, if any.
        whole: how many choices there are.
        confirmation: what is kept aside; None for what logs of version 1 did.
    """
    evaluator = scored.bench.evaluator
    if which in ("choices", "within"):
        within = which == "within"
        how = (scored.prepared, scored.goal, metric, seed)
        return refined_choices(*how, evaluator=evaluator, within=within, confirmation=confirmation)
    most = max(LEAST_GAIN_OF_CHOICES, whole / CHOICES_A_FORWARD)
    return refined(scored.prepared, scored.goal, metric, evaluator, most, seed, confirmation)


def _searcher(searcher: Any, space: Space, start: Bits, seed: int, guide: Surrogate | None) -> Searcher:
    if isinstance(searcher, str):
        name, given = parse_searcher(searcher)
        return make_searcher(name, space, start, seed, options=given, guide=guide)
    if hasattr(searcher, "ask") and hasattr(searcher, "tell") and not isinstance(searcher, type):
        return searcher  # type: ignore[no-any-return]
    if callable(searcher):
        return searcher(space, start, seed)  # type: ignore[no-any-return]
    raise HagoError(
        f"searcher is a {type(searcher).__name__}; expected a name, an object with ask and tell, or a function"
    )


# ---------------------------------------------------------------- search
# Searching: a whole search, from a model and a data set to the best strategy and all trials.

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
    race: bool | float | RaceOptions = False
    reuse: LogPath | Sequence[LogPath] | None = None
    thresholds: ThresholdsLike | None = None
    modes: ModesLike | None = None
    search_topology: bool | None = None


@dataclass(frozen=True, slots=True)
class SearchOutcome:
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
    result: StudyResult
    front: ParetoFront
    forwards: float = 0.0
    before: float = 0.0


class SearchScore(float):
    """The score of the best strategy, a number like any other, that also knows the `front` of its search."""

    front: ParetoFront

    @staticmethod
    def of(found: SearchOutcome) -> SearchScore:
        """The score of a search."""
        result = SearchScore(found.score)
        result.front = found.front
        return result


def run_search(
    model: ModelLike, hardware: HardwareLike, dataset: Iterable[Any], options: SearchOptions
) -> SearchOutcome:
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
        whole, prepared = prepared.space.size, prune_redundant_choices(prepared, costs)
        known = known_scores(options.reuse, prepared, goal)
        scored = PlanScorer(goal, prepared, options.cache_bytes, race, options.seed, known)
        doing("finding thresholds and what every choice may lose")
        chosen = options.estimator is not None or prepared.calibration.given.gives_ranges
        # logs of version 1 kept no samples aside
        keeps_aside = logged is None or logged.settings.get("refined") is not True
        ready = set_up_search(scored, options.searcher, costs, whole, options.seed, chosen, keeps_aside)
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

    ready: SearchSetup
    costs: Sequence[str]
    how: Mapping[str, Any]
    options: SearchOptions
    before: float

    @property
    def scored(self) -> PlanScorer:
        return self.ready.scored

    @property
    def prepared(self) -> Prepared:
        return self.ready.scored.prepared

    def run(self) -> tuple[StudyResult, ParetoFront]:
        """Search, with the best strategy and the front on disk after every trial."""
        options, ready, resolver = self.options, self.ready, self.prepared.resolver
        with open_executor(options.executor) as hands:
            front = None if options.front is None else Path(options.front)
            anytime = FrontWriter(self.scored, front, self.how, hands is None, self.costs, self.strategy_of)
            try:
                result = run_study(
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

    def found(self, result: StudyResult, front: ParetoFront) -> SearchOutcome:
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
            plan, batches = plan_and_batches(
                self.prepared.graph, self.prepared.hardware, strategy, self.options.held_out
            )
            held_out = confirmed(plan, batches, goal.objective)
            strategy = replace(strategy, made_by={**strategy.made_by, "held_out": held_out})
            self.keep(strategy)
        score = results.get("sim_acc", results.get(goal.objective.name, result.score.value))
        return SearchOutcome(strategy, float(score), result, front)

    def with_sure_best(self, result: StudyResult) -> StudyResult:
        """With the first trial as the best, where that is its start, keeps every limit, and no other is surely better
        on samples that were kept aside. Where costs are limited, or made least, it is not the start that is wanted.
        """
        confirmation, first = self.ready.confirmation, result.trials[0]
        if confirmation is None or self.costs or result.best.bits == first.bits or not first.score.accepted:
            return result
        objective, measure = self.scored.goal.objective, self.scored.bench.evaluator.measure
        measured = [measure(self.prepared.resolver(trial.bits)) for trial in (first, result.best)]
        before, after = ([losses_of(objective, m)] * len(confirmation.turns) for m in measured)
        others = sum(trial.same_as is None for trial in result.trials[1:])
        if confirmation.gain(before, after).is_sure(candidates=max(1, others)):
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
