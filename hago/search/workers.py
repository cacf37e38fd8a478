"""Evaluation of points in other processes: executors by name, what a worker is sent, and the sending of points.

`search.session` opens an executor for the time of a search, with `open_executor`: processes or threads of this machine,
a Dask cluster, or any other `concurrent.futures.Executor` that the user passes (e.g. Ray's, MPI's).

A `WorkerSpec` has everything that a worker needs, in values that can be sent to another process: the model, the
hardware as a document, the data and the thresholds. A worker builds a `PointScorer` of it, such as the process that
searches has: a Resolver and an Evaluator with their caches.

`Workers`, which `remote_scoring` makes, sends points to the executor; each becomes a `PendingEvaluation`.
The first points, as many as there are workers, are sent with the WorkerSpec; a worker builds its PointScorer from it
and keeps it. A worker that gets a point without either answers None, and the point is sent again with the spec. A
worker with other versions of the software refuses. If a worker dies, the points that it had are evaluated again.

A worker may also stop without ending, e.g. by a signal, or because its machine left the network. A timeout cannot
distinguish that from a slow machine, so no point is given up for time alone. When the executor has been silent for many
times its longest silence so far, this process, which would otherwise only wait, scores the point itself and gets the
same score. If there is still no answer then, and the silence is many times what the point took in this process, the
executor is considered dead and is replaced.
"""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
import re
import signal
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import (
    BrokenExecutor,
    CancelledError,
    Executor,
    Future,
    ProcessPoolExecutor,
    ThreadPoolExecutor,
    wait,
)
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import torch

from hago.caching import LRU
from hago.calibration import Calibration, Estimator
from hago.data import Batches
from hago.errors import HagoError, warn
from hago.graph import Graph
from hago.hardware import Hardware, hardware_from_document, hardware_to_document
from hago.ops import OPS, OpRule
from hago.plan import Bits, Plan, Resolver, Space, Topology, estimated_resolver
from hago.runtime.native import keep_freed_memory
from hago.search.evaluate import Evaluator
from hago.search.objective import OBJECTIVES, Objective
from hago.search.preparation import Prepared
from hago.search.racing import RaceOptions, make_evaluator
from hago.search.scoring import GoalScorer
from hago.study import Notice, PendingScore, Score, Submit, versions

#: The forms of a text that names an executor, for messages.
EXECUTOR_SYNTAX: Final = "'processes:8', 'threads:4' or 'dask://host:port'"
#: What a script needs that starts processes, for messages.
GUARD: Final = "put the search of a script under `if __name__ == '__main__':`"
#: Seconds to wait for a Dask scheduler.
SCHEDULER_SECONDS: Final = 15

#: Number of times that a point is sent to a worker, each of which dies, before the search ends with an error.
WORKER_ATTEMPTS: Final = 3
#: Seconds without an answer after which it is checked whether the executor still accepts calls.
POLL_SECONDS: Final = 10.0
#: The search waits for the next answer this many times as long as the executor's longest silence so far.
SILENCE_FACTOR: Final = 10.0
#: The least number of seconds that the search waits for an answer.
LEAST_SILENCE_SECONDS: Final = 60.0
#: Seconds that the search waits for the first answer, before which the workers have to start.
FIRST_ANSWER_SECONDS: Final = 600.0
#: Number of searches whose PointScorer a worker keeps.
KEPT_SCORERS: Final = 2
#: Names of the errors that executors of other packages raise if a worker died.
_WORKER_DEATHS: Final = ("KilledWorker", "WorkerCrashedError", "CommClosedError", "WorkerLostError")

_LOCAL: Final = re.compile(r"(processes|threads):([1-9]\d{0,3})", re.ASCII)
_DASK: Final = re.compile(r"dask://([^\s/:]+|\[[^\s\]]+\]):(\d{1,5})/?", re.ASCII)


# ---------------------------------------------------------------- executors
@dataclass(frozen=True, slots=True)
class WorkerPool:
    """An executor with its number of workers; made by `open_executor` for the time of a search.

    Args:
        executor: runs the calls.
        count: number of its workers; 1 if that is not known.
        renew: makes a new executor in place of a broken one; None if the user passed the executor.
    """

    executor: Executor
    count: int = 1
    renew: Callable[[], Executor] | None = None


def check_executor(given: Executor | str | None) -> None:
    """Refuse what names no executor, before anything is prepared for it.

    Raises:
        HagoError: a text of another form than EXECUTOR_SYNTAX, or another object; or processes, in a worker that only
            imports the script that started it.
    """
    if isinstance(given, str):
        if not (_LOCAL.fullmatch(given) or _DASK.fullmatch(given)):
            raise HagoError(f"executor {given!r}; expected {EXECUTOR_SYNTAX}")
    elif given is not None and not isinstance(given, Executor):
        raise HagoError(
            f"executor is a {type(given).__name__}; expected a concurrent.futures.Executor, or {EXECUTOR_SYNTAX}"
        )
    processes = given.startswith("processes:") if isinstance(given, str) else isinstance(given, ProcessPoolExecutor)
    # Python refuses to start processes then, too
    if processes and getattr(multiprocessing.current_process(), "_inheriting", False):
        raise HagoError(f"a worker process imports the script that started it, and would search, too; {GUARD}")


@contextlib.contextmanager
def open_executor(given: Executor | str | None) -> Iterator[WorkerPool | None]:
    """A context manager that opens the executor of a search.

    An executor that is made here is shut down at the end, without waiting for calls that still run. One that the user
    passed is left running.

    Args:
        given: an executor, or a text of the EXECUTOR_SYNTAX; None for no executor.

    Raises:
        HagoError: of check_executor; the scheduler cannot be reached, or a package is missing.
    """
    check_executor(given)
    if given is None:
        yield None
    elif isinstance(given, str):
        with _named_executor(given) as pool:
            yield pool
    else:
        yield WorkerPool(given, _worker_count(given))


@contextlib.contextmanager
def _named_executor(text: str) -> Iterator[WorkerPool]:
    local, dask = _LOCAL.fullmatch(text), _DASK.fullmatch(text)
    if dask:
        with _dask(f"tcp://{dask[1]}:{dask[2]}", text) as pool:
            yield pool
        return
    assert local is not None  # see check_executor
    count = int(local[2])
    make = _processes if local[1] == "processes" else ThreadPoolExecutor
    executors: list[Executor] = []

    def renew() -> Executor:
        executors.append(make(count))
        return executors[-1]

    try:
        yield WorkerPool(renew(), count, renew)
    finally:
        for executor in executors:
            end_executor(executor)


def end_executor(executor: Executor) -> None:
    """Shut down an executor that was made here without waiting, and kill its processes.

    A process that is stopped would never end by itself, and Python waits for all of them when it exits.
    """
    processes = list((getattr(executor, "_processes", None) or {}).values())
    executor.shutdown(wait=False, cancel_futures=True)
    for process in processes:
        process.kill()


def _processes(count: int) -> Executor:
    # not fork: the child of a process in which torch runs threads may wait for threads that it does not have
    return ProcessPoolExecutor(count, multiprocessing.get_context("spawn"), initialize_worker)


def initialize_worker() -> None:
    """Make a worker process ignore Ctrl-C, keep the memory that it frees, and end when the process that started it
    ends, even if that is killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    keep_freed_memory(unless_set=True)
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_exit_after, args=(parent,), daemon=True).start()


def _exit_after(parent: Any) -> None:
    parent.join()
    os._exit(1)


@contextlib.contextmanager
def _dask(address: str, text: str) -> Iterator[WorkerPool]:
    try:
        distributed: Any = importlib.import_module("distributed")
    except ImportError:
        raise HagoError(f"executor {text!r} needs the package distributed: pip install 'hago[dask]'") from None
    try:
        client = distributed.Client(address, timeout=SCHEDULER_SECONDS, set_as_default=False)
    except (OSError, TimeoutError, ValueError) as error:
        raise HagoError(f"executor {text!r}: no scheduler answers at {address}: {error}") from None
    try:
        workers = client.scheduler_info()["workers"]
        yield WorkerPool(client.get_executor(), max(1, sum(int(w["nthreads"]) for w in workers.values())))
    finally:
        client.close()


def _worker_count(executor: Executor) -> int:
    count = getattr(executor, "_max_workers", None)
    return count if isinstance(count, int) and count > 0 else 1


# ---------------------------------------------------------------- what a worker does
@dataclass(frozen=True, slots=True)
class PointScorer:
    """Scores points without their goal, for one thread at a time: what a worker keeps of a search."""

    resolver: Resolver
    evaluator: Evaluator

    def score(self, bits: Bits, rival: Bits | None = None) -> Score:
        """The Score of a point.

        Raises:
            InfeasibleBits: no signature holds the bits.
        """
        return self.evaluator.score(self.resolver(bits), bits, None if rival is None else self.resolver(rival))


# ---------------------------------------------------------------- what a worker is sent
#: The name of one of hago's objectives, or an objective of the user's own.
ObjectiveOrName = str | Objective


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """Everything from which a PointScorer is built, in values that can be sent to another process.

    `worker_spec_of` makes one per search. It must not be changed, since an executor may serialize it in another thread.

    Args:
        hardware: the document of the hardware.
        added: rules of ops that hago does not have, by name.
        data: the source of the calibration Batches.
        objective, also, cache_bytes: see Evaluator.
        race, seed: see `make_evaluator`.
    """

    graph: Graph
    model_hash: str
    hardware: Mapping[str, Any]
    added: Mapping[str, OpRule]
    data: Iterable[Any]
    data_hash: str
    topology: Topology
    space: Space
    calibration: Calibration
    estimator: Estimator
    objective: ObjectiveOrName
    race: RaceOptions | None
    also: tuple[ObjectiveOrName, ...]
    cache_bytes: int | None
    seed: int

    def build(self) -> PointScorer:
        """Build a new PointScorer.

        Raises:
            HagoError: the model or the data is not that of the search.
        """
        graph = replace(self.graph)  # a copy without cached properties, which several threads would write
        if graph.model_hash != self.model_hash:
            raise HagoError(
                f"the model of this search has hash {self.model_hash[:12]}, the one that this worker received has "
                f"{graph.model_hash[:12]}; start the workers again"
            )
        ops = {**OPS, **self.added}
        hardware = hardware_from_document(self.hardware, "the hardware of this search", ops)
        batches = Batches(self.data, graph.inputs)
        if batches.sha256 != self.data_hash:
            raise HagoError(
                f"the data of this search has hash {self.data_hash[:12]}, the data of this worker has "
                f"{batches.sha256[:12]}; a data set must give the same values in every process"
            )
        resolver = estimated_resolver(graph, hardware, self.topology, self.space, self.calibration, self.estimator, ops)
        also = [_objective_of(o) for o in self.also]
        objective = _objective_of(self.objective)
        evaluator = make_evaluator(
            graph,
            batches,
            objective,
            resolver.ops,
            race=self.race,
            seed=self.seed,
            also=also,
            cache_bytes=self.cache_bytes,
            quiet=True,
        )
        return PointScorer(resolver, evaluator)


def worker_spec_of(
    prepared: Prepared,
    objective: Objective,
    *,
    also: Iterable[Objective] = (),
    cache_bytes: int | None = None,
    race: RaceOptions | None = None,
    seed: int = 0,
) -> WorkerSpec:
    """Make the WorkerSpec of a search."""
    hardware: Hardware = prepared.hardware
    return WorkerSpec(
        graph=replace(prepared.graph),
        model_hash=prepared.graph.model_hash,
        hardware=hardware_to_document(hardware),
        added={name: rule for name, rule in hardware.known_ops.items() if OPS.get(name) is not rule},
        data=prepared.batches.source,
        data_hash=prepared.batches.read_sha256,
        topology=prepared.topology,
        space=prepared.space,
        calibration=prepared.calibration,
        estimator=prepared.estimator,
        objective=_name_if_builtin(objective),
        also=tuple(_name_if_builtin(o) for o in also),
        cache_bytes=cache_bytes,
        race=race,
        seed=seed,
    )


def _name_if_builtin(objective: Objective) -> ObjectiveOrName:
    return objective.name if OBJECTIVES.get(objective.name) is objective else objective


def _objective_of(named: ObjectiveOrName) -> Objective:
    return OBJECTIVES[named] if isinstance(named, str) else named


# ---------------------------------------------------------------- in a worker
@dataclass(frozen=True, slots=True)
class SearchId:
    """The identity of a search, sent with every point. `Workers` makes one; a worker finds its PointScorer by it, and
    checks the versions before it builds one.

    Args:
        search: a unique name of the search.
        made_by: versions of the software that computes, and the number of threads.
    """

    search: str
    made_by: Mapping[str, Any]


class _ThreadScorers(threading.local):
    """The PointScorers of one thread of a worker, by search: an Evaluator serves one thread at a time."""

    def __init__(self) -> None:
        self.by_search: LRU[str, PointScorer] = LRU(KEPT_SCORERS)


#: The scorers of the searches that this process works for; `score_remotely` adds to it.
_SCORERS: Final = _ThreadScorers()


def score_remotely(search_id: SearchId, bits: Bits, spec: WorkerSpec | None, rival: Bits | None = None) -> Score | None:
    """Score a point; runs in a worker. Returns None if the worker has no scorer for the search and was sent no spec.

    Args:
        rival: in a race (`hago.search.racing`), the best point so far, against which evaluation may stop early.

    Raises:
        HagoError: this worker has other versions, or received another model or data set.
        InfeasibleBits: no signature holds the bits.
    """
    scorer = _SCORERS.by_search.get(search_id.search)
    if scorer is None:
        # the number of threads is set below, so it is no difference
        check_versions(search_id, versions(search_id.made_by["threads"]))
        if spec is None:
            return None
        if torch.get_num_threads() != search_id.made_by["threads"]:
            torch.set_num_threads(search_id.made_by["threads"])
        scorer = spec.build()
        _SCORERS.by_search.put(search_id.search, scorer)
    return scorer.score(bits, rival)


def check_versions(search_id: SearchId, own_versions: Mapping[str, Any]) -> None:
    """Check that a worker has the versions of the search.

    Raises:
        HagoError: it does not; names every difference.
    """
    expected = search_id.made_by
    differing = [
        f"{k} {own_versions.get(k)} (the search has {v})" for k, v in expected.items() if own_versions.get(k) != v
    ]
    if differing:
        raise HagoError(
            f"a worker has {', '.join(differing)}: scores could differ, so it may not work on this search; "
            "start it with the same versions on the same kind of machine"
        )


# ---------------------------------------------------------------- in the process that searches
class Workers:
    """Sends points to the workers of an executor. `remote_scoring` makes one per search, and the function that it
    returns to the study calls it once per point.

    Args:
        pool: the executor.
        spec: of the search.
        score_locally: scores a point in this process, for when there is no executor left.
        notice: called with a message when workers die or fall silent.
    """

    def __init__(
        self, pool: WorkerPool, spec: WorkerSpec, score_locally: Callable[[Bits, Bits | None], Score], notice: Notice
    ) -> None:
        self._pool, self._spec, self.score_locally, self._notice = pool, spec, score_locally, notice
        self._executor: Executor | None = pool.executor
        self._workers_without_spec = pool.count  # how many more points are sent with the spec
        made_by = versions(torch.get_num_threads())
        self._search_id = SearchId(uuid.uuid4().hex, made_by)
        self._last_answer: float | None = None
        self.has_answered = False  # whether a worker has answered
        self._longest_silence, self._warned = 0.0, False
        self._answers_lock = threading.Lock()

    def __call__(self, bits: Bits, rival: Bits | None = None) -> PendingEvaluation:
        """Start the evaluation of a point; `rival` is the best point so far, in a race."""
        return PendingEvaluation(self, bits, rival)

    def submit(
        self, bits: Bits, rival: Bits | None, with_spec: bool = False
    ) -> tuple[Executor | None, Future[Score | None] | None]:
        """Submit a point; (None, None) if no executor is left.

        Raises:
            HagoError: WORKER_ATTEMPTS executors accept no call.
        """
        # the spec is sent with as many points as there are workers; a worker that received none returns None
        send_spec = with_spec or self._workers_without_spec > 0
        if self._workers_without_spec:
            self._workers_without_spec -= 1
        refusals = 0
        while self._executor is not None:
            executor = self._executor
            try:
                spec = self._spec if send_spec else None
                future = executor.submit(score_remotely, self._search_id, dict(bits), spec, rival)
                future.add_done_callback(partial(self._note_answer, time.monotonic()))
                return executor, future
            except RuntimeError as error:  # it broke or was shut down
                refusals += 1
                if refusals == WORKER_ATTEMPTS:
                    raise _no_start_error(error) from error
                self.replace_broken(executor, error)
        return None, None

    def is_lost(self, executor: Executor | None) -> bool:
        """Whether an executor will never answer, since it was replaced or accepts no calls.

        Pools of Python 3.11 and earlier drop a call that is submitted at the moment at which a worker dies.
        """
        if executor is None or executor is not self._executor:
            return True
        try:
            executor.submit(int).cancel()  # a call that does nothing
        except RuntimeError:  # it broke or was shut down
            return True
        return False

    def _note_answer(self, start: float, future: Future[Score | None]) -> None:
        """Record the time of an answer, and the length of the silence before it."""
        if future.cancelled():
            return
        with self._answers_lock:
            now = time.monotonic()
            self._longest_silence = max(self._longest_silence, self._silence_at(now, start))
            self._last_answer = now

    def silence(self, start: float) -> float:
        """Seconds since the last answer, or since `start`, whichever is later."""
        with self._answers_lock:
            return self._silence_at(time.monotonic(), start)

    def _silence_at(self, now: float, start: float) -> float:
        """Seconds until `now` since the last answer, or since `start`; the caller holds the lock."""
        return now - (start if self._last_answer is None else max(start, self._last_answer))

    @property
    def patience(self) -> float:
        """Seconds of silence after which a point is scored in this process."""
        with self._answers_lock:
            return (
                FIRST_ANSWER_SECONDS
                if self._last_answer is None
                else max(LEAST_SILENCE_SECONDS, SILENCE_FACTOR * self._longest_silence)
            )

    def replace_silent(self, executor: Executor | None, silence: float, local_seconds: float) -> None:
        """Replace an executor that has not answered, if the silence is many times what the point took in this process.

        Args:
            silence: seconds without an answer.
            local_seconds: seconds that the point took in this process.
        """
        with self._answers_lock:
            is_unusual = silence >= SILENCE_FACTOR * max(local_seconds, self._longest_silence)
        if executor is None or executor is not self._executor or not is_unusual:
            return
        message = f"no worker answered for {silence:.0f} s; the point was scored in this process"
        if self._pool.renew is None:
            if self._warned:
                return
            self._warned = True
            self._notice(f"{message}. Look after the workers of the executor: one is stopped, or gone")
            return
        end_executor(executor)
        self._executor, self._workers_without_spec, self._last_answer = self._pool.renew(), self._pool.count, None
        self._notice(f"{message}, and the workers are started again: one is stopped, or gone")

    def replace_broken(self, executor: Executor | None, error: BaseException) -> None:
        """Replace a broken executor; without effect if it was replaced already."""
        if executor is None or executor is not self._executor:
            return
        executor.shutdown(wait=False, cancel_futures=True)
        self._workers_without_spec = self._pool.count
        if self._pool.renew is not None:
            self._executor = self._pool.renew()
            self._notice(
                f"a worker died ({_describe(error)}); the workers are started again and its point is tried again"
            )
        else:
            self._executor = None
            self._notice(f"the executor broke ({_describe(error)}); the search goes on in this process")


class PendingEvaluation:
    """A point that is being evaluated. `Workers` makes one per point; the study's TrialCache waits for its result."""

    def __init__(self, workers: Workers, bits: Bits, rival: Bits | None) -> None:
        self._workers, self._point = workers, (bits, rival)
        self._executor, self._future = workers.submit(bits, rival)

    def result(self) -> Score:
        """Wait for the score.

        Raises:
            HagoError: the worker refused, or WORKER_ATTEMPTS workers died at their start, or while they evaluated the
                point.
        """
        deaths = 0
        started = time.monotonic()
        while True:
            if self._future is None:
                return self._workers.score_locally(*self._point)
            try:
                score = self._wait_for_answer(self._future, started)
                if score is not None:
                    return score
            except Exception as error:
                if not _is_death(error):
                    self._workers.has_answered = True
                    raise _with_advice(error) from error
                deaths += 1
                if isinstance(error, BrokenExecutor):
                    self._workers.replace_broken(self._executor, error)
                if deaths == WORKER_ATTEMPTS:
                    unanswered = isinstance(error, BrokenExecutor) and not self._workers.has_answered
                    raise (_no_start_error if unanswered else _worker_killer_error)(error) from error
            self._executor, self._future = self._workers.submit(*self._point, with_spec=True)
            started = time.monotonic()

    def _wait_for_answer(self, future: Future[Score | None], started: float) -> Score | None:
        """The score from the worker, or from this process after a long silence; None if the worker lacks the spec."""
        while not wait([future], POLL_SECONDS).done:
            if self._workers.is_lost(self._executor):
                raise BrokenExecutor("the executor dropped a call that was submitted while it broke")
            silence = self._workers.silence(started)
            if silence > self._workers.patience:
                start = time.monotonic()
                score = self._workers.score_locally(*self._point)
                if not future.done():
                    local_seconds = time.monotonic() - start
                    self._workers.replace_silent(self._executor, self._workers.silence(started), local_seconds)
                return score
        answer = future.result()
        self._workers.has_answered = True
        return answer

    def cancel(self) -> None:
        """Cancel the evaluation if it has not started."""
        if self._future is not None:
            self._future.cancel()


def _is_death(error: BaseException) -> bool:
    return isinstance(error, (BrokenExecutor, CancelledError)) or type(error).__name__ in _WORKER_DEATHS


def _with_advice(error: Exception) -> Exception:
    """A HagoError with advice for an object that cannot be pickled; any other error as it is."""
    if "pickle" in f"{type(error).__name__} {error}".lower():
        return HagoError(
            f"the search cannot be sent to another process ({error}): an objective, op or data set of your own must be "
            "defined at the top of a module that workers can import; or take executor='threads:N'"
        )
    return error


def _worker_killer_error(error: Exception) -> HagoError:
    return HagoError(
        f"a point ended its worker {WORKER_ATTEMPTS} times ({_describe(error)}); the machine may lack memory for "
        "so many workers. The log holds every trial before it"
    )


def _no_start_error(error: Exception) -> HagoError:
    return HagoError(
        f"workers ended {WORKER_ATTEMPTS} times before their first answer ({_describe(error)}); {GUARD}, since every "
        "worker imports the script, or take fewer workers if the machine lacks memory for them"
    )


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


# ---------------------------------------------------------------- scores under a goal
def remote_scoring(scorer: GoalScorer, pool: WorkerPool | None, notice: Notice = warn) -> Submit | None:
    """The function that scores points on an executor; None without one."""
    if pool is None:
        return None
    prepared, goal = scorer.prepared, scorer.goal
    spec = worker_spec_of(
        prepared,
        goal.objective,
        also=goal.measures,
        cache_bytes=scorer.cache_bytes,
        race=scorer.race,
        seed=scorer.seed,
    )
    workers = Workers(pool, spec, PointScorer(prepared.resolver, scorer.evaluator).score, notice)

    def start(bits: Bits, rival: Bits | None = None) -> _UnderGoal:
        plan = prepared.resolver(bits)
        known = scorer.known_score(plan, bits)
        return _UnderGoal(scorer, plan, workers(bits, rival) if known is None else _Ready(known))

    return start


@dataclass(frozen=True, slots=True)
class _Ready:
    """A pending score that is there already."""

    score: Score

    def result(self) -> Score:
        return self.score

    def cancel(self) -> object:
        return None


@dataclass(frozen=True, slots=True)
class _UnderGoal:
    """A pending score to which the goal is applied when it comes."""

    scorer: GoalScorer
    plan: Plan
    pending: PendingScore

    def result(self) -> Score:
        return self.scorer.under_goal(self.plan, self.pending.result())

    def cancel(self) -> object:
        return self.pending.cancel()
