"""Callbacks of searches: they see every new trial in order, change nothing, and may end the search."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from building import residual_block, seeded
from toys import timeless

from hago import load_front, search_quantize_strategy
from hago.errors import HagoError
from hago.importing import as_strategy
from hago.plan import Bits, Space
from hago.search import RunningSearch, SearchOptions, run_search
from hago.study import Score, Trial, read_log

DATA = [(seeded(4, 3, 8, 8, seed=s), torch.arange(4) % 5) for s in range(2)]
FILES = {"log": "log", "save": "best.json", "front": "front.json"}
SEARCHERS = ("random:trials=6,batch=3", "greedy", "nsga2", "limited", "gradient")


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def search(folder: Path, callbacks: Any = (), **options: Any) -> Any:
    paths = {name: folder / file for name, file in FILES.items()}
    given = {"searcher": SEARCHERS[0], "estimator": "max_range", "budget": 8, "progress": False, **paths, **options}
    return search_quantize_strategy(residual_block(), "int16_accumulator", DATA, callbacks=callbacks, **given)


def contents(folder: Path) -> tuple[list[str], bytes, bytes]:
    return (timeless((folder / "log").read_bytes()), *((folder / f).read_bytes() for f in ("best.json", "front.json")))


class Looking:
    """A callback that uses all that it is given, and draws random numbers."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.trials = folder, list[Trial]()

    def __call__(self, running: RunningSearch, trial: Trial) -> None:
        logged = read_log(self.folder / "log").trials
        assert running.trials == logged and logged[-1] == trial, "the trial is in the log"
        if running.best is not None:
            assert as_strategy(self.folder / "best.json").bits == running.best.bits
            assert running.strategy_of(running.best).bits == running.best.bits
        stored, front = load_front(self.folder / "front.json"), running.front
        assert [(p.trial, p.score, p.strategy) for p in stored] == [(p.trial, p.score, p.strategy) for p in front]
        assert all(isinstance(value, float) for value in running.figures(trial).values())
        self.trials.append(trial)
        random.random(), torch.rand(3), torch.manual_seed(7)


@pytest.mark.parametrize("searcher", SEARCHERS)
def test_a_search_is_the_same_with_callbacks(searcher: str, tmp_path: Path) -> None:
    without, looked = tmp_path / "without", tmp_path / "with"
    without.mkdir(), looked.mkdir()
    options = {"searcher": searcher, "estimator": None if searcher in ("limited", "gradient") else "max_range"}
    expected, score = search(without, **options)
    looking = Looking(looked)
    found, same_score = search(looked, [looking], **options)
    assert (found, score) == (expected, same_score) and contents(looked) == contents(without)
    assert tuple(looking.trials) == read_log(looked / "log").trials


@pytest.mark.parametrize("executor", ["threads:2", "processes:2"])
def test_workers_call_no_callback_and_the_order_is_that_of_trials(executor: str, tmp_path: Path) -> None:
    without, looked = tmp_path / "without", tmp_path / "with"
    without.mkdir(), looked.mkdir()
    search(without)
    looking = Looking(looked)
    search(looked, [looking], executor=executor)
    assert [t.index for t in looking.trials] == list(range(len(looking.trials))) and looking.trials
    assert contents(looked)[0] == contents(without)[0]


def test_only_new_trials_are_passed(tmp_path: Path) -> None:
    search(tmp_path, budget=3)
    seen: list[tuple[int, int]] = []
    search(tmp_path, [lambda running, trial: seen.append((trial.index, len(running.trials)))], budget=5)
    assert seen == [(3, 4), (4, 5)]


def test_stop_ends_the_search_after_the_trial(tmp_path: Path) -> None:
    options = SearchOptions.of(SEARCHERS[0], estimator="max_range", progress=False)
    stopping = [lambda running, trial: running.stop() if trial.index == 1 else None, lambda *_: seen.append(1)]
    seen: list[int] = []
    outcome = run_search(residual_block(), "int16_accumulator", DATA, options.changed(callbacks=stopping))
    assert (len(outcome.result.trials), outcome.result.stopped_because) == (2, "callback")
    assert len(seen) == 2, "the other callbacks see the last trial, too"
    assert "a callback stopped it" in str(outcome.result)


def test_a_stopped_search_is_continued_to_the_same_end(tmp_path: Path) -> None:
    stopped, once = tmp_path / "stopped", tmp_path / "once"
    stopped.mkdir(), once.mkdir()
    search(stopped, [lambda running, trial: running.stop()])
    assert len(read_log(stopped / "log").trials) == 1
    search(stopped)
    search(once)
    assert contents(stopped) == contents(once)


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt, HagoError])
def test_an_exception_ends_the_search_and_all_that_it_found_is_on_disk(
    error: type[BaseException], tmp_path: Path
) -> None:
    def fail(running: RunningSearch, trial: Trial) -> None:
        if trial.index == 3:
            raise error("of the callback")

    broken, once = tmp_path / "broken", tmp_path / "once"
    broken.mkdir(), once.mkdir()
    with pytest.raises(error, match="of the callback"):
        search(broken, [fail])
    log = read_log(broken / "log").trials
    assert len(log) == 4
    assert {p.trial for p in load_front(broken / "front.json")} <= set(range(4))
    assert as_strategy(broken / "best.json").bits in [t.bits for t in log]
    search(broken)
    search(once)
    assert contents(broken) == contents(once)


@pytest.mark.parametrize(
    "callbacks, said", [(print, "expected a list"), ([3], r"callbacks\[0\] is 3"), ("ab", "expected a list")]
)
def test_what_is_no_callback_is_refused_before_the_search(callbacks: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises(HagoError, match=said):
        search(tmp_path, callbacks)
    assert not list(tmp_path.iterdir())


class Unseeded:
    """A searcher that breaks the rule: it draws from the global generator, which a callback may use, too."""

    name, options = "unseeded", dict[str, Any]()

    def __init__(self, space: Space) -> None:
        self.space, self.asked = space, 0

    def ask(self) -> list[dict[str, int]]:
        self.asked += 1
        point = {key: random.choice(group.choices) for key, group in self.space.groups.items()}
        return [point] if self.asked <= 6 else []

    def tell(self, bits: Bits, score: Score) -> None:
        pass


def test_the_law_notices_a_search_that_depends_on_its_callbacks(tmp_path: Path) -> None:
    logs = []
    for name, callbacks in (("without", []), ("with", [lambda *_: random.random()])):
        (tmp_path / name).mkdir()
        random.seed(0)
        search(tmp_path / name, callbacks, searcher=lambda space, start, seed: Unseeded(space))
        logs.append(contents(tmp_path / name)[0])
    assert len(logs[0]) == len(logs[1]) == 7 and logs[0] != logs[1]
