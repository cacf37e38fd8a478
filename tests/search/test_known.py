"""Taking over what logs of other searches measured."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from building import residual_block, seeded

from hago.errors import LogError, StrategyMismatch
from hago.hardware import load_hardware
from hago.search.session import SearchOptions, run_search
from hago.study.log import Trial, read_log

DATA = [(seeded(8, 3, 8, 8, seed=s), torch.arange(8) % 5) for s in range(2)]


def trials(searcher: str, log: Path | None = None, **options: Any) -> tuple[Trial, ...]:
    given = {"budget": 25, "progress": False, "log": log, **options}
    return run_search(residual_block(), "x86_vnni", DATA, SearchOptions.of(searcher, **given)).result.trials


def figures(trial: Trial) -> tuple[Any, ...]:
    return trial.bits, trial.score.value, trial.score.results, trial.score.overflows, trial.score.rank


@pytest.fixture(scope="module")
def greedy_log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("known") / "greedy.jsonl"
    trials("greedy", path)
    return path


def test_nothing_equal_is_measured_twice(greedy_log: Path, tmp_path: Path) -> None:
    again = trials("greedy:max_passes=1", tmp_path / "again.jsonl", reuse=greedy_log)
    assert all(t.score.forwards == 0.0 for t in again)
    assert [figures(t) for t in again] == [figures(t) for t in trials("greedy:max_passes=1")]


def test_another_searcher_and_another_goal(greedy_log: Path) -> None:
    goal = {"minimize": "weight_bytes", "keep": "sqnr >= 10"}
    seeded_, fresh = (trials("random:trials=4", reuse=reuse, **goal) for reuse in (greedy_log, None))
    assert [figures(t) for t in seeded_] == [figures(t) for t in fresh]
    keys = {t.score.plan_key for t in read_log(greedy_log).trials}
    for trial in seeded_:
        assert (trial.score.forwards == 0.0) == (trial.score.plan_key in keys)
    assert seeded_[0].score.forwards == 0.0  # the start is common to both


def test_figures_that_a_log_lacks_are_measured(greedy_log: Path) -> None:
    found = trials("default", reuse=[greedy_log], keep="cosine >= 0.1")
    assert found[0].score.forwards > 0.0 and "cosine" in found[0].score.results


def test_workers_take_over_too(greedy_log: Path) -> None:
    alone, threads = (
        trials("random:trials=5,batch=4", reuse=greedy_log, executor=executor) for executor in (None, "threads:2")
    )
    assert [figures(t) for t in alone] == [figures(t) for t in threads]
    assert threads[0].score.forwards == 0.0


def test_logs_of_something_else_are_refused(greedy_log: Path, tmp_path: Path) -> None:
    other = [(seeded(8, 3, 8, 8, seed=9), torch.arange(8) % 5)]
    options = {"progress": False, "reuse": greedy_log}
    edited = replace(load_hardware("x86_vnni"), cost={"clock_hz": 1e9})
    cases = (other, "x86_vnni", "samples"), (DATA, "vta", ""), (DATA, edited, "so it is an edited hardware file")
    for data, chip, cause in cases:
        with pytest.raises(StrategyMismatch, match=rf"[0-9a-f]{{12}}\b.*{cause}.*nothing can be reused"):
            run_search(residual_block(), chip, data, SearchOptions.of("default", **options))
    with pytest.raises(LogError, match="cannot read log"):
        trials("default", reuse=tmp_path / "none.jsonl")
    with pytest.raises(LogError, match="is a function"):
        trials("default", reuse=greedy_log, objective=lambda reference, outputs, labels: 1.0)
