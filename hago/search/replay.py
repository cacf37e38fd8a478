"""The replay of a log or a strategy: every figure in it is computed again and compared bit for bit."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from hago.arithmetic.equality import equal
from hago.calibration import Estimator, GivenRanges, named_estimator
from hago.cost import plan_cost
from hago.errors import (
    HASH_DIGITS,
    OTHER_DATA,
    OTHER_MODEL,
    HagoError,
    InfeasibleBits,
    LogError,
    StrategyMismatch,
    shortened,
)
from hago.graph import ModelLike
from hago.hardware import hardware_hash
from hago.importing import HardwareLike, StrategyLike, as_strategy
from hago.search.confirmation import Confirmation
from hago.search.continuation import logged_channel_bins, logged_gains, logged_softmax_span, merges_groups, traces_feeds
from hago.search.correcting import correct, logged_corrections
from hago.search.effort import samples_of
from hago.search.goal import FRONT_COST, Goal, limits_on_costs, parse_limits
from hago.search.objective import OBJECTIVES, Objective, ObjectiveLike, named_objective
from hago.search.preparation import Prepared, QuantizationOptions, prepare
from hago.search.racing import RaceOptions, make_evaluator
from hago.search.redundancy import prune_redundant_choices
from hago.search.scoring import GoalScorer
from hago.search.searcher_choice import costs_in_use, find_starting_point
from hago.search.stored_strategy import plan_and_batches
from hago.searchers import SEARCHERS
from hago.serialization.summary import Summarized, Summary
from hago.serialization.text_table import counted
from hago.study import Header, Log, Score, Trial, infeasible_score, normalized, read_log


@dataclass(frozen=True, slots=True)
class Difference:
    """A figure that the replay computed differently: the trial, the figure, its logged and its replayed value."""

    trial: int
    figure: str
    logged: Any
    replayed: Any

    def __str__(self) -> str:
        return f"trial {self.trial}: {self.figure} was {self.logged!r}, is {self.replayed!r}"


@dataclass(frozen=True, slots=True, repr=False)
class Replay(Summarized):
    """The result of a replay. `hago.replay` returns it.

    Args:
        trials: how many were evaluated again.
        differences: every figure that is not equal to the last bit.
    """

    trials: int
    differences: tuple[Difference, ...]

    @property
    def same(self) -> bool:
        return not self.differences

    def to_json(self) -> dict[str, Any]:
        """JSON values."""
        rows = [asdict(d) for d in self.differences]
        return {"trials": self.trials, "same": self.same, "differences": rows}

    def summary(self) -> Summary:
        """Whether all figures are equal, and the first that is not."""
        differing = "; ".join(map(str, self.differences[:1]))
        result = self._differ if self.differences else "every figure is equal to the last bit"
        return Summary(f"Replay of {self._trials}: {result}", {"first": differing})

    @property
    def _trials(self) -> str:
        return counted(self.trials, "trial")

    @property
    def _differ(self) -> str:
        figures = counted(len(self.differences), "figure")
        return f"{figures} {'differs' if len(self.differences) == 1 else 'differ'}"

    def __str__(self) -> str:
        if self.same:
            return f"{self._trials} replayed, every figure equal to the last bit"
        head = f"{self._trials} replayed, {self._differ}"
        return "\n".join([head, *map(str, self.differences)])


def replay_strategy(
    model: ModelLike,
    hardware: HardwareLike,
    strategy: StrategyLike,
    dataset: Iterable[Any],
    objective: ObjectiveLike | None = None,
) -> Replay:
    """Evaluate a stored strategy again on the data that it was found on.

    Args:
        objective: required if the search had an objective of the user's own.

    Raises:
        StrategyMismatch: it was made for another model, hardware or data.
        LogError: it names an objective that is none of hago's own, and none is given; or `hago.from_qat` made it, which
            measures nothing.
    """
    chosen = as_strategy(strategy)
    plan, batches = plan_and_batches(model, hardware, chosen, dataset)
    _check_same_data(str(chosen.made_by.get("data_hash")), batches.sha256)
    made_by = chosen.made_by
    if "trained" in made_by and "results" not in made_by:
        raise LogError(
            "the strategy is of a trained model, and no measures were recorded to compare with; measure it with "
            "hago.evaluate_strategy"
        )
    measure = _objective_of("the strategy", str(made_by.get("objective", "sqnr")), objective)
    with _reading("the strategy: its made_by"):
        # training measured all samples in their order, without the measures that the search had limits on
        of_search = {} if "finetuned" in made_by else {**made_by.get("goal", {}), "race": made_by.get("race")}
        goal, race = _goal_and_race(of_search, measure)
        samples = None if "finetuned" in made_by else samples_of(made_by.get("effort"))
        seed, batches = _integer(made_by.get("seed", 0)), batches.thinned(samples)
        costs = dict(made_by.get("costs", {}))
    evaluator = make_evaluator(plan.graph, batches, measure, plan.ops, race=race, seed=seed, also=goal.measures)
    score, figures = evaluator.score(plan, chosen.bits), plan_cost(plan).figures
    logged = {**made_by.get("results", {}), **_named("costs", costs)}
    now = {**score.results, **_named("costs", {name: figures.get(name) for name in costs})}
    return Replay(1, tuple(_compare(0, logged, now)))


def replay_log(
    model: ModelLike,
    hardware: HardwareLike,
    log: str | Path,
    dataset: Iterable[Any],
    objective: ObjectiveLike | None = None,
    estimator: str | Estimator | None = None,
    *,
    best_only: bool,
) -> Replay:
    """Evaluate the trials of a log again. Thresholds are estimated from the data again, and refined if they were.

    Args:
        objective, estimator: required if the search had one of the user's own.
        best_only: whether only the best trial is evaluated.

    Raises:
        StrategyMismatch: the log is of another model, hardware or data.
        LogError: the log is damaged, or names an objective or an estimator that is none of hago's own, and none is
            given.
    """
    record = read_log(log)
    trials = record.trials
    scorer = logged_scorer(model, hardware, record, dataset, objective, estimator, where=f"log {log}")
    if not trials:
        raise LogError(f"log {log} has no trials; there is nothing to replay")
    chosen = [_best_trial(trials)] if best_only else [t for t in trials if t.same_as is None]
    differences: list[Difference] = []
    for trial in chosen:
        rival = _rival_of(trial, trials, scorer.goal.objective.figure)
        try:
            score = scorer(trial.bits, None if rival is None else rival.bits)
            score = normalized(score, score.plan_key)
        except InfeasibleBits as error:
            score = infeasible_score(error, trial.score.plan_key)
        differences += _compare(trial.index, _figures(trial.score, trial.score), _figures(score, trial.score))
    return Replay(len(chosen), tuple(differences))


def _figures(score: Score, logged: Score) -> dict[str, Any]:
    """What a replay compares of a score: all but what its evaluation took, and costs and an interval only where they
    were logged, as those of the first logs are not. Why a point is infeasible is said in words that may change."""
    found = {**score.results, "plan_key": score.plan_key, "thresholds_sha256": score.thresholds_sha256}
    found |= {
        "score.value": score.value,
        "score.overflows": score.overflows,
        "score.excess_bits": score.excess_bits,
        "score.unproved": score.unproved,
        "score.total_bits": score.total_bits,
        "score.shortfall": score.shortfall,
        "score.tie": score.tie,
        "score.dropped": score.dropped,
    }
    found |= _named("score.costs", {name: score.costs.get(name) for name in logged.costs})
    interval = list(score.interval) if logged.interval else []
    return found | {"score.interval": interval, "score.infeasible": bool(score.infeasible)}


def _named(part: str, figures: Mapping[str, Any]) -> dict[str, Any]:
    return {f"{part}.{name}": figure for name, figure in figures.items()}


def logged_scorer(
    model: ModelLike,
    hardware: HardwareLike,
    record: Log,
    dataset: Iterable[Any],
    objective: ObjectiveLike | None = None,
    estimator: str | Estimator | None = None,
    *,
    where: str,
) -> GoalScorer:
    """What scores the points of a log as its search did: thresholds are estimated from the data again, and refined if
    they were. Arguments and errors as of `replay_log`.

    Args:
        where: the log in words, for errors.
    """
    header = record.header
    if header is None:
        raise LogError(f"{where} has no header; there is nothing to replay")
    measure = _objective_of(where, str(header.objective), objective)
    with _reading(f"{where}: its header"):
        quantization, samples = quantization_of(header), samples_of(header.settings.get("effort"))
        goal, race = _goal_and_race(header.settings, measure)
    if isinstance(quantization.estimator, str):
        recorded = quantization.estimator
        quantization = replace(quantization, estimator=_estimator_of(where, recorded, estimator))
    prepared = prepare(model, hardware, dataset, quantization, made_for=[header.model_hash], samples=samples)
    prepared = replace(prepared, traces_feeds=traces_feeds(header))
    if prepared.graph.model_hash != header.model_hash:
        raise StrategyMismatch(
            f"the log is of the model with hash {header.model_hash[:HASH_DIGITS]}, this one has "
            f"{prepared.graph.model_hash[:HASH_DIGITS]}, so it is {OTHER_MODEL}"
        )
    now = hardware_hash(prepared.hardware)
    if now != header.hardware.hash:
        raise StrategyMismatch(
            f"the log is of {header.hardware.unlike(prepared.hardware.name, now)}; "
            "use that description, or search again"
        )
    _check_same_data(header.data_hash, prepared.batches.sha256)
    prepared = correct(prepared, *logged_corrections(header))
    scorer = GoalScorer(goal, prepared, race=race, seed=header.seed)
    if header.settings.get("refined"):
        return scorer.with_prepared(_with_refined_thresholds(scorer, header, where))
    return scorer


def logged_front_cost(header: Header) -> str:
    """The cost of the front of the search of a log.

    Raises:
        HagoError: a limit cannot be read. TypeError, ValueError, LookupError and their like: a value is of another type
            than hago writes.
    """
    # which costs matter does not depend on the measure
    limits = limits_on_costs(header.settings.get("limits"))
    costs = _costs_in_use(header, Goal(OBJECTIVES["sqnr"], header.settings.get("minimize"), limits))
    return costs[0] if costs else FRONT_COST


def _costs_in_use(header: Header, goal: Goal) -> tuple[str, ...]:
    """The costs that matter to the search of a log."""
    name, how = str(header.searcher["name"]), header.searcher["options"]
    searcher = f"{name}:cost={how['cost']}" if how.get("cost") else name
    return costs_in_use(searcher if name in SEARCHERS else None, goal)


def _goal_and_race(settings: Mapping[str, Any], measure: Objective) -> tuple[Goal, RaceOptions | None]:
    """The goal and the race that the header of a log, or a strategy, records.

    Raises:
        TypeError: a value is of another type than hago writes; so do ValueError, LookupError and their like.
    """
    race = settings.get("race")
    limits, gains = parse_limits(settings.get("limits"), measure), logged_gains(settings)
    goal = Goal(measure, settings.get("minimize"), limits, gains)
    return goal, None if race is None else RaceOptions(**race)


def _rival_of(trial: Trial, trials: Iterable[Trial], figure: str) -> Trial | None:
    """The best trial at the time when a trial was dropped in a race, by its figure, which the log holds; None for a
    trial that was measured on all samples."""
    if not trial.score.dropped:
        return None
    best = float(trial.score.dropped["rival"])
    earlier = (t for t in trials if t.index < trial.index and t.score.accepted)
    return next((t for t in earlier if float(t.results[figure]) == best), None)


def _objective_of(record: str, name: str, given: ObjectiveLike | None) -> Objective:
    """The objective that a record names, or the one that the user gave in its place."""
    if given is None and name not in OBJECTIVES:
        raise LogError(
            f"{record} is of objective {name!r}, which is none of hago's own; pass it as objective=..., or on the "
            "command line with --objective package.module:name"
        )
    return named_objective(name if given is None else given)


def _estimator_of(record: str, name: str, given: str | Estimator | None) -> Estimator:
    """The estimator that a record names, or the one that the user gave, which must have that name."""
    if given is None:
        try:
            return named_estimator(name)
        except HagoError as error:
            raise LogError(
                f"{record}: {str(error).rstrip('.')}. If it is one of your own, pass it as estimator=..., or on the "
                "command line with --estimator package.module:name"
            ) from None
    chosen = named_estimator(given)
    if chosen.name != name:
        raise LogError(f"{record} is of estimator {name!r}; the one that was given is {chosen.name!r}")
    return chosen


def quantization_of(header: Header) -> QuantizationOptions:
    """The options that the header of a log records.

    Raises:
        TypeError: a value is of another type than hago writes; so do ValueError, LookupError and their like.
    """
    ranges = header.settings.get("thresholds")
    return QuantizationOptions(
        estimator=None if header.settings.get("refined") else str(header.estimator),
        keep_float=list(header.keep_float),
        fix_bits={k: _integer(v) for k, v in header.fix_bits.items()},
        thresholds=None if ranges is None else GivenRanges.from_json(ranges),
        search_topology=header.settings.get("topology") == "searched",
        channel_bins=logged_channel_bins(header),
        softmax_span=logged_softmax_span(header),
    )


@contextlib.contextmanager
def _reading(record: str) -> Iterator[None]:
    """A context manager that turns errors about values of a record into a LogError, for values of a wrong type."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise LogError(f"{record} cannot be read ({error!r}); it was edited") from None


def _integer(value: Any) -> int:
    """Convert a number of a file to an integer.

    Raises:
        TypeError: it is no whole number.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value != int(value):
        raise TypeError(f"{shortened(value)} is no integer")
    return int(value)


def _with_refined_thresholds(scorer: GoalScorer, header: Header, where: str) -> Prepared:
    """The Prepared with the refined thresholds with which the search began.

    Args:
        scorer: of the search, with estimated thresholds.
    """
    prepared = scorer.prepared
    name = str(header.searcher["name"])
    if name not in SEARCHERS:
        raise LogError(f"{where}: its searcher is {name!r}; expected one of {', '.join(SEARCHERS)}: it was edited")
    costs = _costs_in_use(header, scorer.goal)
    confirmation = Confirmation.of(scorer.evaluator.batches, header)
    pruned = replace(prune_redundant_choices(prepared, costs, header), merges_groups=merges_groups(header))
    start = find_starting_point(
        name,
        SEARCHERS[name].refines or "at_point",
        scorer.with_prepared(pruned),
        costs=costs,
        choices=prepared.space.size,
        seed=header.seed,
        confirmation=confirmation,
    )
    return start.prepared


def _best_trial(trials: Iterable[Trial]) -> Trial:
    return max(trials, key=lambda t: (t.score.rank, -t.index))


def _check_same_data(logged: str, now: str) -> None:
    if logged != now:
        raise StrategyMismatch(
            f"made on data with hash {logged[:HASH_DIGITS]}, this data has {now[:HASH_DIGITS]}, so it is {OTHER_DATA}; "
            "pass the same samples in the same batches"
        )


def _compare(trial: int, logged: Mapping[str, Any], now: Mapping[str, Any]) -> list[Difference]:
    return [
        Difference(trial, name, logged.get(name), now.get(name))
        for name in sorted({*logged, *now})
        if not equal(logged.get(name), now.get(name))
    ]
