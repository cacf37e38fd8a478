"""Scores in the logs of earlier searches, which a search can reuse (the option `reuse`)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Final, TypeAlias

from hago.errors import HASH_DIGITS, OTHER_DATA, OTHER_MODEL, LogError, StrategyMismatch
from hago.hardware import hardware_hash
from hago.search.goal import Goal
from hago.search.objective import OBJECTIVES
from hago.search.preparation import Prepared
from hago.study import Score, read_header, read_log

#: Scores as measured, by the key of their Plan.
ScoreCache: TypeAlias = Mapping[str, Score]
LogPath: TypeAlias = str | PathLike[str]

#: By what has another hash, the cause.
_CAUSES: Final = {"model": OTHER_MODEL, "data": OTHER_DATA}


def known_scores(logs: LogPath | Iterable[LogPath] | None, prepared: Prepared, goal: Goal) -> dict[str, Score]:
    """The scores in logs of other searches, by any searcher and for any goal, that this one can reuse: those of points
    that were measured on all samples, with every figure that the goal needs.

    A log's plan key covers thresholds, signatures and bits, so a log by another estimator is of use where
    Plans are equal.

    Raises:
        LogError: unreadable or damaged, or of an objective that is a function of the user's own.
        StrategyMismatch: of another model, hardware or data.
    """
    scores: dict[str, Score] = {}
    for path in _paths(logs):
        for score in _scores(path, prepared, goal):
            scores.setdefault(score.plan_key, score)
    return scores


def hashes_of(logs: LogPath | Iterable[LogPath] | None) -> list[str]:
    """The hashes of the models that logs are of.

    Raises:
        LogError: unreadable or damaged.
    """
    headers = [read_header(path) for path in _paths(logs)]
    return [header.model_hash for header in headers if header is not None]


def _paths(logs: LogPath | Iterable[LogPath] | None) -> list[Path]:
    given = [] if logs is None else [logs] if isinstance(logs, (str, PathLike)) else logs
    return [Path(path) for path in given]


def _scores(path: Path, prepared: Prepared, goal: Goal) -> Iterable[Score]:
    log = read_log(path)
    if log.header is None:
        return
    header, chip = log.header, prepared.hardware
    if header.hardware.hash != (now := hardware_hash(chip)):
        raise StrategyMismatch(f"log {path} is of {header.hardware.unlike(chip.name, now)}; nothing can be reused")
    mine = {"model": prepared.graph.model_hash, "data": prepared.batches.sha256}
    its = {"model": header.model_hash, "data": header.data_hash}
    for what, hashed in mine.items():
        if its[what] != hashed:
            raise StrategyMismatch(
                f"log {path} is of {what} {its[what][:HASH_DIGITS]}, this search has {hashed[:HASH_DIGITS]}, which is "
                f"{_CAUSES[what]}; nothing can be reused"
            )
    if goal.objective.name not in OBJECTIVES:
        raise LogError(f"log {path} cannot be reused: {goal.objective.name!r} is a function, which a log does not hold")
    needed = {o.figure for o in (goal.objective, *goal.measures)}
    for trial in log.trials:
        score = trial.score
        samples = prepared.batches.samples
        is_whole = not score.dropped and score.results.get("samples", samples) == samples
        if trial.same_as is None and not score.infeasible and is_whole and needed <= score.results.keys():
            value = float(score.results[goal.objective.figure])
            yield replace(score, value=value, forwards=0.0, shortfall=0.0, tie=0.0, costs={})
