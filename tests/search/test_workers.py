"""Executors: the same log whoever computes, workers that die, refuse, or are somewhere else."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from concurrent.futures import BrokenExecutor, Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch
from building import Builder, residual_block, seeded
from toys import timeless
from worker_payloads import Dying, negative_error

import hago
from hago import search_quantize_strategy
from hago.errors import HagoError, HagoWarning
from hago.search.objective import named_objective
from hago.search.preparation import prepare
from hago.search.workers import SearchId, WorkerPool, Workers, open_executor, score_remotely, worker_spec_of
from hago.searchers.registry import make_searcher
from hago.study.log import versions

DATA = [(seeded(4, 3, 8, 8, seed=s), torch.arange(4) % 5) for s in range(2)]
SEARCHER = "random:trials=9,batch=4"


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def pool() -> Iterator[Executor]:
    """Processes for all tests of this file: to start one takes longer than most tests."""
    with ProcessPoolExecutor(2, get_context("spawn")) as executor:
        yield executor


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The log of a search in one process."""
    return log_of(tmp_path_factory.mktemp("alone") / "log", None)


def log_of(path: Path, executor: Any, **options: Any) -> list[str]:
    given = {"searcher": SEARCHER, "estimator": "max_range", "log": path, "progress": False, **options}
    search_quantize_strategy(residual_block(), "int16_accumulator", DATA, executor=executor, **given)
    return timeless(path.read_bytes())


# ---------------------------------------------------------------- the same log
def test_processes_change_nothing_in_the_log(pool: Executor, alone: list[str], tmp_path: Path) -> None:
    assert log_of(tmp_path / "log", pool) == alone


def test_threads_change_nothing_in_the_log(alone: list[str], tmp_path: Path) -> None:
    assert log_of(tmp_path / "log", "threads:3") == alone


def test_a_cluster_changes_nothing_in_the_log(alone: list[str], tmp_path: Path) -> None:
    distributed = pytest.importorskip("distributed")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cluster = distributed.LocalCluster(
            n_workers=2, threads_per_worker=1, processes=False, dashboard_address=None, protocol="tcp"
        )
        with cluster:
            where = cluster.scheduler_address.replace("tcp://", "dask://")
            assert log_of(tmp_path / "log", where) == alone


def test_goals_and_own_objectives_go_along(pool: Executor, tmp_path: Path) -> None:
    options = {"objective": negative_error, "keep": "agreement >= 0.01", "searcher": "random:trials=5,batch=4"}
    assert log_of(tmp_path / "a", pool, **options) == log_of(tmp_path / "b", None, **options)


def test_a_search_that_asks_one_point_at_a_time_goes_on_workers_too(pool: Executor, tmp_path: Path) -> None:
    options = {"searcher": "greedy", "budget": "6 trials"}
    assert log_of(tmp_path / "a", pool, **options) == log_of(tmp_path / "b", None, **options)


# ---------------------------------------------------------------- workers that die
def test_a_worker_that_dies_loses_nothing(alone: list[str], tmp_path: Path) -> None:
    with pytest.warns(HagoWarning, match="a worker died"):
        found = log_of(tmp_path / "log", "processes:1", estimator=Dying(tmp_path / "died"))
    assert (tmp_path / "died").read_text() == "x"
    assert found[1:] == alone[1:]


def test_a_worker_that_is_stopped_is_not_waited_for_without_end(
    alone: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, seconds in (("POLL_SECONDS", 0.05), ("SILENCE_FACTOR", 0.2), ("LEAST_SILENCE_SECONDS", 2.0)):
        monkeypatch.setattr(f"hago.search.workers.{name}", seconds)
    others = {process.pid for process in multiprocessing.active_children()}
    stopped: list[multiprocessing.process.BaseProcess] = []

    def stop(trial: Any, *_: Any) -> None:
        if not stopped:
            stopped.extend(p for p in multiprocessing.active_children() if p.pid not in others)
            for process in stopped:
                assert process.pid is not None
                os.kill(process.pid, signal.SIGSTOP)

    monkeypatch.setattr("hago.search.pareto_front.FrontWriter.__call__", lambda self, trial, *_: stop(trial) or [])
    with pytest.warns(HagoWarning, match="the workers are started again: one is stopped, or gone"):
        assert log_of(tmp_path / "log", "processes:1") == alone
    for process in stopped:
        process.join(30)
        assert process.exitcode is not None


def test_a_slow_worker_is_no_stopped_one(alone: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine on which everything takes long: the point is scored here too, and nobody is given up (a warning would
    be an error)."""
    for name, seconds in (
        ("POLL_SECONDS", 0.01),
        ("SILENCE_FACTOR", 1e9),
        ("LEAST_SILENCE_SECONDS", 0.0),
        ("FIRST_ANSWER_SECONDS", 0.01),
    ):
        monkeypatch.setattr(f"hago.search.workers.{name}", seconds)
    assert log_of(tmp_path / "log", "threads:2") == alone


def test_workers_that_are_killed_from_outside_lose_nothing(alone: list[str], tmp_path: Path) -> None:
    killed: list[int] = []
    others = {process.pid for process in multiprocessing.active_children()}  # those of the pool of this file

    class Killing:
        """A searcher that kills every worker once their first points are scored."""

        def __init__(self, space: Any, start: Any, seed: int) -> None:
            self.inner = make_searcher("random", space, start, seed, options={"trials": 9, "batch": 4})
            self.name, self.options, self.told = self.inner.name, self.inner.options, 0

        def ask(self) -> Any:
            points = self.inner.ask()
            if self.told == 5 and not killed:
                killed.extend(p.pid for p in multiprocessing.active_children() if p.pid not in others)
                for pid in killed:
                    os.kill(pid, signal.SIGKILL)
            return points

        def tell(self, bits: Any, score: Any) -> None:
            self.told += 1
            self.inner.tell(bits, score)

    with pytest.warns(HagoWarning, match="a worker died"):
        found = log_of(tmp_path / "log", "processes:1", searcher=Killing)
    assert killed
    assert [without_why(line) for line in found[1:]] == [without_why(line) for line in alone[1:]]


def without_why(line: str) -> dict[str, Any]:
    return {k: v for k, v in json.loads(line).items() if k != "why"}


def test_a_worker_of_a_cluster_that_is_killed_loses_nothing(alone: list[str], tmp_path: Path) -> None:
    distributed = pytest.importorskip("distributed")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cluster = distributed.LocalCluster(n_workers=1, threads_per_worker=1, processes=True, dashboard_address=None)
        with cluster:
            where = cluster.scheduler_address.replace("tcp://", "dask://")
            found = log_of(tmp_path / "log", where, estimator=Dying(tmp_path / "died"))
    assert (tmp_path / "died").read_text() == "x"
    assert found[1:] == alone[1:]


def test_without_an_executor_the_search_goes_on_here(alone: list[str], tmp_path: Path) -> None:
    class Broken(Executor):
        def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
            raise RuntimeError("cannot schedule new futures after shutdown")

    with pytest.warns(HagoWarning, match="goes on in this process") as seen:
        assert log_of(tmp_path / "log", Broken()) == alone
    assert seen[0].filename == __file__


class Dropping(Executor):
    """Takes one call and forgets it, as a pool that breaks at that moment; then takes none, or answers nothing."""

    def __init__(self, breaks: bool) -> None:
        self.breaks, self.calls = breaks, 0

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        self.calls += 1
        if self.calls > 1 and self.breaks:
            raise BrokenExecutor("a worker died")
        return Future()


def test_a_point_that_a_broken_pool_forgot_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hago.search.workers.POLL_SECONDS", 0.02)
    ticket, work = ticket_of(search="forgotten")
    bits, notices = work.space.widest(), []
    expected = score_remotely(ticket, bits, work)
    with ThreadPoolExecutor(1) as other:
        workers = Workers(WorkerPool(Dropping(True), 1, lambda: other), work, lambda *_: expected, notices.append)
        points = [workers(bits), workers(bits)]
        assert [p.result() for p in points] == [expected, expected]
    assert len(notices) == 1 and "a worker died" in notices[0]


def test_a_pool_that_takes_its_time_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hago.search.workers.POLL_SECONDS", 0.02)
    _, work = ticket_of(search="slow")
    bits, executor = work.space.widest(), Dropping(False)
    workers = Workers(WorkerPool(executor, 1), work, lambda *_: pytest.fail("is not asked"), print)
    point = workers(bits)
    score = score_remotely(SearchId("slow", versions(1)), bits, work)
    threading.Timer(0.2, lambda: point._future.set_result(score)).start()
    assert point.result() == score
    assert executor.calls > 3


class Failing(Executor):
    """Every call ends as `error` says."""

    def __init__(self, error: Exception) -> None:
        self.error, self.calls = error, 0

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        self.calls += 1
        future: Future[Any] = Future()
        future.set_exception(self.error)
        return future


class KilledWorker(Exception):
    """Stands for that of a cluster."""


def test_a_point_that_ends_its_workers_is_given_up(tmp_path: Path) -> None:
    executor = Failing(KilledWorker("out of memory"))
    with pytest.raises(HagoError, match=r"ended its worker 3 times \(KilledWorker: out of memory\).*memory"):
        log_of(tmp_path / "log", executor, searcher="default")
    assert executor.calls == 3 and len((tmp_path / "log").read_bytes().splitlines()) == 1


UNGUARDED = """
import hago, torch
data = [torch.randn(8, 4, generator=torch.Generator().manual_seed(0))]
how = {"searcher": "greedy", "budget": 3, "corrections": "none", "progress": False, "executor": "processes:1"}
GUARD
    _, score = hago.search_quantize_strategy(torch.nn.Linear(4, 2).eval(), "vta", data, **how)
    print("trials:", len(score.result.trials))
"""


@pytest.mark.parametrize(
    ("guard", "says"),
    [("if True:", "times before their first answer .*; put the search .* under `if __name__ == '__main__':`"),
     ("if __name__ == '__main__':", "trials: 3")],
)  # fmt: skip
def test_a_script_that_searches_in_its_workers_too_is_told_what_it_lacks(guard: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(UNGUARDED.replace("GUARD", guard), "utf-8")
    env = {**os.environ, "PYTHONPATH": str(Path(hago.__file__).parents[1])}
    ended = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300
    )
    assert re.search(says, ended.stdout or ended.stderr)


def test_executors_that_accept_no_call_are_given_up() -> None:
    class Closed(Executor):
        def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
            raise RuntimeError("can't start new thread")

    _, work = ticket_of(search="closed")
    workers = Workers(WorkerPool(Closed(), 1, Closed), work, lambda *_: pytest.fail("is not asked"), print)
    with pytest.raises(HagoError, match=r"ended 3 times before .* \(RuntimeError: can't start new thread\)"):
        workers(work.space.widest())


def test_an_error_of_the_evaluation_is_not_tried_again(tmp_path: Path) -> None:
    executor = Failing(ZeroDivisionError())
    with pytest.raises(ZeroDivisionError):
        log_of(tmp_path / "log", executor, searcher="default")
    assert executor.calls == 1


# ---------------------------------------------------------------- workers that refuse
def ticket_of(**changes: Any) -> tuple[SearchId, Any]:
    prepared = prepare(residual_block(), "x86_vnni", DATA)
    work = worker_spec_of(prepared, named_objective("sqnr"))
    ticket = SearchId(f"test {changes}", versions(1))
    return replace(ticket, **changes), work


def test_a_worker_of_another_version_refuses() -> None:
    ticket, work = ticket_of(made_by={**versions(1), "hago": "0.0.1", "torch": "1.0"})
    with pytest.raises(HagoError, match=r"a worker has hago .*the search has 0\.0\.1.*torch .*1\.0.*same versions"):
        score_remotely(ticket, work.space.widest(), work)


def test_a_worker_that_is_sent_another_model_refuses() -> None:
    ticket, work = ticket_of()
    b = Builder()
    b.conv2d(b.input(3, 8, 8), seeded(4, 3, 3, 3))
    other = replace(work, graph=b.graph())
    with pytest.raises(HagoError, match="the model of this search has hash .*the one that this worker received has"):
        score_remotely(ticket, work.space.widest(), other)


def test_a_worker_that_reads_other_data_refuses() -> None:
    ticket, work = ticket_of(search="other data")
    with pytest.raises(HagoError, match="the data of this search has hash"):
        score_remotely(ticket, work.space.widest(), replace(work, data=[DATA[0]]))


def test_work_is_sent_once() -> None:
    ticket, work = ticket_of(search="once")
    bits = work.space.widest()
    assert score_remotely(ticket, bits, None) is None
    first = score_remotely(ticket, bits, work)
    assert first is not None and score_remotely(ticket, bits, None) == first

    sent = []

    class Watching(ThreadPoolExecutor):
        def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
            sent.append(args[2] is not None)
            return super().submit(fn, *args, **kwargs)

    with Watching(2) as executor:
        workers = Workers(WorkerPool(executor, 2), work, lambda bits: first, print)
        points = [workers(bits) for _ in range(6)]
        assert all(p.result() == first for p in points)
    assert sent[:6] == [True, True, False, False, False, False] and all(sent[6:])


def test_what_cannot_be_sent_is_refused_in_words(pool: Executor, tmp_path: Path) -> None:
    def mine(reference: Any, outputs: Any, labels: Any) -> float:
        return 1.0

    with pytest.raises(HagoError, match="cannot be sent to another process.*top of a module"):
        log_of(tmp_path / "log", pool, objective=mine)


# ---------------------------------------------------------------- which executor
@pytest.mark.parametrize("text", ["processes", "processes:0", "threads:x", "dask://host", "ray:3", "", "processes:-1"])
def test_unknown_executors_are_refused(text: str) -> None:
    wanted = r"expected 'processes:8', 'threads:4' or 'dask://host:port'"
    with pytest.raises(HagoError, match=wanted), open_executor(text):
        pass
    with pytest.raises(HagoError, match="executor is a int"), open_executor(8):  # type: ignore[arg-type]
        pass


def test_a_scheduler_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("distributed")
    monkeypatch.setattr("hago.search.workers.SCHEDULER_SECONDS", 1)
    with warnings.catch_warnings(), pytest.raises(HagoError, match=r"no scheduler answers at tcp://127\.0\.0\.1:9"):
        warnings.simplefilter("ignore")
        with open_executor("dask://127.0.0.1:9"):
            pass


def test_dask_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "distributed", None)
    with pytest.raises(HagoError, match=r"pip install 'hago\[dask\]'"), open_executor("dask://127.0.0.1:9"):
        pass


def test_an_executor_that_was_given_is_left_open() -> None:
    with ThreadPoolExecutor(3) as executor:
        with open_executor(executor) as hands:
            assert hands is not None and hands.executor is executor and hands.count == 3 and hands.renew is None
        assert executor.submit(int).result() == 0
    with open_executor("threads:2") as hands:
        assert hands is not None and hands.count == 2
    with pytest.raises(RuntimeError):
        hands.executor.submit(int)
