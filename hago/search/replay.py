"""Replay: do again what a log or a strategy says was done, and compare bit for bit."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hago.arithmetic.equality import equal
from hago.calibration.given_ranges import GivenRanges
from hago.errors import LogError, StrategyMismatch, shortened
from hago.graph.frontend import ModelLike
from hago.hardware.file import hardware_hash
from hago.search.confirmation import Confirmation
from hago.search.evaluate import Evaluator
from hago.search.goal import Goal, parse_limits
from hago.search.objective import Objective, ObjectiveLike
from hago.search.objective import objective as named_objective
from hago.search.prepare import HardwareLike, Prepared, StrategyLike, as_strategy, plan_and_batches, prepare
from hago.search.racing import RaceOptions
from hago.search.redundancy import prune_redundant_choices
from hago.search.scoring import PlanScorer
from hago.search.session import costs_in_use, refined_as
from hago.searchers.registry import SEARCHERS
from hago.study.log import Header, Trial, read_log


@dataclass(frozen=True, slots=True)
class Difference:
    """A figure that came out otherwise: which trial, which figure, logged and now."""

    trial: int
    figure: str
    logged: Any
    replayed: Any

    def __str__(self) -> str:
        return f"trial {self.trial}: {self.figure} was {self.logged!r}, is {self.replayed!r}"


@dataclass(frozen=True, slots=True)
class Replay:
    """What a replay found.

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

    def __str__(self) -> str:
        if self.same:
            return f"{self.trials} trials replayed, every figure equal to the last bit"
        head = f"{self.trials} trials replayed, {len(self.differences)} figures differ"
        return "\n".join([head, *map(str, self.differences)])


def replay_strategy(
    model: ModelLike,
    hardware: HardwareLike,
    strategy: StrategyLike,
    dataset: Iterable[Any],
    objective: ObjectiveLike | None,
) -> Replay:
    """Evaluate a stored strategy again on the data it was found on.

    Raises:
        StrategyMismatch: it was made for another model, hardware or data.
    """
    chosen = as_strategy(strategy)
    plan, batches = plan_and_batches(model, hardware, chosen, dataset)
    _same_data(str(chosen.made_by.get("data_hash")), batches.sha256)
    measure = named_objective(objective or str(chosen.made_by.get("objective", "sqnr")))
    score = Evaluator(plan.graph, batches, measure, plan.ops).score(plan, chosen.bits)
    return Replay(1, tuple(_compare(0, chosen.made_by.get("results", {}), score.results)))


def replay_log(
    model: ModelLike,
    hardware: HardwareLike,
    log: str | Path,
    dataset: Iterable[Any],
    objective: ObjectiveLike | None,
    *,
    best_only: bool,
) -> Replay:
    """Evaluate the trials of a log again; thresholds are estimated, and refined, anew from the data.

    Raises:
        StrategyMismatch: the log is of another model, hardware or data.
        LogError: the log is damaged.
    """
    record = read_log(log)
    header, trials = record.header, record.trials
    if header is None:
        raise LogError(f"log {log} has no header; there is nothing to replay")
    with _reading(log):
        fixed = {k: _integer(v) for k, v in header.fix_bits.items()}
        said = header.settings.get("thresholds")
        thresholds = None if said is None else GivenRanges.from_json(said)
    prepared = prepare(
        model,
        hardware,
        dataset,
        estimator=None if header.settings.get("refined") else str(header.estimator),
        keep_float=list(header.keep_float),
        fix_bits=fixed,
        thresholds=thresholds,
        kinds=header.settings.get("topology") == "searched",
        made_for=[header.model_hash],
    )
    if prepared.graph.model_hash != header.model_hash:
        raise StrategyMismatch(f"the log is of model {header.model_hash}, this one is {prepared.graph.model_hash}")
    if hardware_hash(prepared.hardware) != header.hardware.hash:
        raise StrategyMismatch(
            f"the log is of hardware {header.hardware.name!r} ({header.hardware.hash}), this is "
            f"{prepared.hardware.name!r} ({hardware_hash(prepared.hardware)})"
        )
    _same_data(header.data_hash, prepared.batches.sha256)
    measure = named_objective(objective or str(header.objective))
    if header.settings.get("refined"):
        prepared = _refined(prepared, header, measure, log)
    evaluator = Evaluator(prepared.graph, prepared.batches, measure, prepared.hardware.known_ops)
    chosen = [_best(trials)] if best_only and trials else [t for t in trials if t.same_as is None]
    found: list[Difference] = []
    for trial in chosen:
        score = evaluator.score(prepared.resolver(trial.bits), trial.bits)
        logged = {**trial.results, "plan_key": trial.score.plan_key, "thresholds_sha256": trial.thresholds_sha256}
        now = {**score.results, "plan_key": score.plan_key, "thresholds_sha256": score.thresholds_sha256}
        found += _compare(trial.index, logged, now)
    return Replay(len(chosen), tuple(found))


@contextlib.contextmanager
def _reading(log: str | Path) -> Iterator[None]:
    """While this lasts, values of a header that are of another type than hago writes become one error."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise LogError(f"log {log}: its header cannot be read ({error!r}); it was edited") from None


def _integer(value: Any) -> int:
    """An integer of a file.

    Raises:
        TypeError: it is another number, or none.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value != int(value):
        raise TypeError(f"{shortened(value)} is no integer")
    return int(value)


def _refined(prepared: Prepared, header: Header, measure: Objective, log: str | Path) -> Prepared:
    """With the thresholds that the search began with."""
    said = header.settings
    with _reading(log):
        race = None if said.get("race") is None else RaceOptions(**said["race"])
        goal = Goal(measure, said.get("minimize"), parse_limits(said.get("limits")))
    name, how = str(header.searcher["name"]), header.searcher["options"]
    if name not in SEARCHERS:
        raise LogError(f"log {log}: its searcher is {name!r}; expected one of {', '.join(SEARCHERS)}: it was edited")
    costs = costs_in_use(f"{name}:cost={how['cost']}" if how.get("cost") else name, goal)
    scored = PlanScorer(goal, prune_redundant_choices(prepared, costs), None, race, header.seed)
    metric, which = next(iter(costs), ""), SEARCHERS[name].refined
    # logs of version 1 kept nothing aside
    sizes = [b.size for b in scored.bench.evaluator.batches]
    confirmation = None if said.get("refined") is True else Confirmation.of(sizes)
    return refined_as(which, scored, metric, prepared.space.size, header.seed, confirmation).prepared


def _best(trials: Iterable[Trial]) -> Trial:
    return max(trials, key=lambda t: (t.score.rank, -t.index))


def _same_data(logged: str, now: str) -> None:
    if logged != now:
        raise StrategyMismatch(
            f"made on data with hash {logged}, this data has {now}; pass the same samples in the same batches"
        )


def _compare(trial: int, logged: Mapping[str, Any], now: Mapping[str, Any]) -> list[Difference]:
    return [
        Difference(trial, name, logged.get(name), now.get(name))
        for name in sorted({*logged, *now})
        if not equal(logged.get(name), now.get(name))
    ]
