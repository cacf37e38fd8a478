"""Searching: a whole search, from a model and a data set to the best strategy and all trials."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from os import PathLike
from pathlib import Path
from typing import Any

import torch

from hago.calibrate.statistics import Estimator
from hago.errors import HagoError
from hago.evaluate import Evaluator, safe_start
from hago.hardware_document import hardware_hash
from hago.objective import ObjectiveLike
from hago.objective import objective as named_objective
from hago.prepare import HardwareLike, ModelLike, Prepared, make_strategy, planned, prepare
from hago.search.driver import SearchResult, search
from hago.search.header import Header, make_header
from hago.search.searcher import Searcher
from hago.search.searchers import make_searcher
from hago.search.trial import Trial
from hago.space import Bits, Space
from hago.strategy import HardwareId, Strategy


@dataclass(frozen=True, slots=True)
class SearchOptions:
    """What a user may choose of a search; see `hago.search_quantize_strategy`."""

    searcher: str | Searcher | Any = "greedy"
    estimator: str | Estimator | None = None
    objective: ObjectiveLike = "sqnr"
    budget: str | int | None = None
    seed: int = 0
    log: str | PathLike[str] | None = None
    resume: bool = True
    progress: bool = True
    keep_float: Sequence[str] = ()
    fix_bits: Mapping[str, int] = field(default_factory=dict)
    held_out: Iterable[Any] | None = None
    save: str | PathLike[str] | None = None
    allow_overflow: bool = False


@dataclass(frozen=True, slots=True)
class Found:
    """What a search ends with.

    Args:
        strategy: the best.
        score: its accuracy on the data where that has labels, else the objective's value.
        result: every trial, the best of them, and why the search stopped.
    """

    strategy: Strategy
    score: float
    result: SearchResult


def find(model: ModelLike, hardware: HardwareLike, dataset: Iterable[Any], options: SearchOptions) -> Found:
    """Search; see `hago.search_quantize_strategy`."""
    prepared = prepare(
        model,
        hardware,
        dataset,
        estimator=options.estimator,
        keep_float=options.keep_float,
        fix_bits=options.fix_bits,
    )
    objective = named_objective(options.objective)
    evaluator = Evaluator(prepared.graph, prepared.batches, objective, prepared.hardware.known_ops)
    start = safe_start(prepared.resolver, prepared.calibration.peaks)
    searcher = _searcher(options.searcher, prepared.space, start, options.seed)
    how = made_by(prepared, objective.name, options.seed, options.keep_float, options.fix_bits)
    how["searcher"] = {"name": searcher.name, "options": dict(searcher.options)}

    def strategy_of(trial: Trial) -> Strategy:
        said = how | {"results": dict(trial.score.results)}
        return make_strategy(prepared, prepared.resolver(trial.bits), trial.bits, said)

    def keep(trial: Trial) -> None:
        if options.save is not None:
            strategy_of(trial).save(Path(options.save))

    result = search(
        prepared.space,
        searcher,
        lambda bits: evaluator.score(prepared.resolver(bits), bits),
        log=options.log if options.log is None else Path(options.log),
        header=_header(prepared, searcher, how),
        budget=options.budget,
        resume=options.resume,
        progress=options.progress,
        on_best=keep,
        plan_key=lambda bits: prepared.resolver(bits).key,
        allow_overflow=options.allow_overflow,
    )
    strategy = strategy_of(result.best)
    if options.held_out is not None:
        plan, batches = planned(prepared.graph, prepared.hardware, strategy, options.held_out)
        judged = Evaluator(plan.graph, batches, objective, plan.ops).score(plan, strategy.bits)
        strategy = replace(strategy, made_by={**strategy.made_by, "held_out": dict(judged.results)})
        if options.save is not None:
            strategy.save(Path(options.save))
    return Found(strategy, float(result.score.results.get("sim_acc", result.score.value)), result)


def _searcher(searcher: Any, space: Space, start: Bits, seed: int) -> Searcher:
    if isinstance(searcher, str):
        return make_searcher(searcher, space, start, seed)
    if hasattr(searcher, "ask") and hasattr(searcher, "tell") and not isinstance(searcher, type):
        return searcher  # type: ignore[no-any-return]
    if callable(searcher):
        return searcher(space, start, seed)  # type: ignore[no-any-return]
    raise HagoError(
        f"searcher is a {type(searcher).__name__}; expected a name, an object with ask and tell, or a function"
    )


def made_by(
    prepared: Prepared, objective: str, seed: int, keep_float: Sequence[str], fix_bits: Mapping[str, int] | None
) -> dict[str, Any]:
    """What a strategy says of how it was found."""
    return {
        "estimator": prepared.estimator.name,
        "objective": objective,
        "seed": seed,
        "keep_float": list(keep_float),
        "fix_bits": dict(fix_bits or {}),
        "data_hash": prepared.batches.sha256,
    }


def _header(prepared: Prepared, searcher: Searcher, how: Mapping[str, Any]) -> Header:
    said = {k: v for k, v in how.items() if k != "searcher"}
    hardware = HardwareId(prepared.hardware.name, hardware_hash(prepared.hardware))
    return make_header(
        prepared.space,
        searcher,
        model_hash=prepared.graph.model_hash,
        hardware=hardware,
        threads=torch.get_num_threads(),
        **said,
    )
