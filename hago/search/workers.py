"""Points scored in other processes: executors by name, the state that a worker builds, and the sending of points.

`open_executor` makes a WorkerPool of processes or threads of this machine, or of a Dask cluster. Any other
`concurrent.futures.Executor` (Ray's, MPI's, a pool of the user's) is used as it is.

A WorkerSpec is everything that a worker needs, in values that can be sent to another process: the model, the hardware
as a document, the data and the thresholds. A WorkerState is what a worker builds of it: a Resolver and an Evaluator
with their caches. A search that runs in this process alone makes a WorkerState directly.

`Workers` sends points to the executor. A worker gets the WorkerSpec of a search once, with its first point, and keeps
the WorkerState; later points travel without it. A worker with other versions refuses. If a worker dies, only the points
that it had are lost, and those are tried again.

A worker may also stop without ending (a signal, a machine that left the network). No timeout tells that from a slow
machine, so nothing is given up for time alone. When the executor is silent for many times its longest silence so far,
this process, which could only wait otherwise, scores the point itself and gets the same score. If the worker is not
back by then, and was silent for many times what the point took here too, the executor is taken for dead and replaced.
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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
from hago.calibration.collect import Calibration
from hago.calibration.statistics import Estimator
from hago.data.batches import Batches
from hago.errors import HagoError
from hago.graph.graph import Graph
from hago.hardware.file import hardware_from_document, hardware_to_document
from hago.hardware.hardware import Hardware
from hago.ops import OPS
from hago.ops._rule import OpRule
from hago.plan.resolve import Resolver
from hago.plan.space import Bits, Space
from hago.plan.threshold_sources import estimated_resolver
from hago.plan.topology import Topology
from hago.search.evaluate import Evaluator
from hago.search.objective import OBJECTIVES, Objective
from hago.search.prepare import Prepared
from hago.search.racing import Pruner, RaceOptions, shuffled
from hago.study.log import Notice, versions
from hago.study.searcher import Score

#: The texts that name an executor.
EXECUTOR_SYNTAX: Final = "'processes:8', 'threads:4' or 'dask://host:port'"
#: Seconds to wait for a Dask scheduler.
SCHEDULER_PATIENCE: Final = 15

#: Number of times that a point is tried whose worker dies.
WORKER_ATTEMPTS: Final = 3
#: Seconds without an answer after which an executor is asked whether it still takes calls.
WAIT: Final = 10.0
#: Multiple of an executor's longest silence so far that is waited for its next answer.
SILENCES: Final = 10.0
#: Seconds that are waited for an answer in any case.
LEAST_SILENCE: Final = 60.0
#: Seconds that are waited for the first answer, for which the workers have to start.
FIRST_SILENCE: Final = 600.0
#: Number of searches whose WorkerState a worker keeps.
KEPT_STATES: Final = 2
#: Names of the errors that executors of other packages raise where a worker died.
_DEATHS: Final = ("KilledWorker", "WorkerCrashedError", "CommClosedError", "WorkerLostError")

_LOCAL: Final = re.compile(r"(processes|threads):([1-9]\d{0,3})", re.ASCII)
_DASK: Final = re.compile(r"dask://([^\s/:]+|\[[^\s\]]+\]):(\d{1,5})/?", re.ASCII)


# ---------------------------------------------------------------- executors
@dataclass(frozen=True, slots=True)
class WorkerPool:
    """An executor with its number of workers; made by `open_executor` for the time of a search.

    Args:
        executor: runs the calls.
        count: number of its workers; 1 if that is not known.
        renew: makes another executor after this one broke; None where only its owner can.
    """

    executor: Executor
    count: int = 1
    renew: Callable[[], Executor] | None = None


@contextlib.contextmanager
def open_executor(given: Executor | str | None) -> Iterator[WorkerPool | None]:
    """A context in which the executor that `given` means can be used.

    An executor that is made here is shut down at the end, without waiting for calls that still run. One that was given
    is left as it is.

    Args:
        given: an executor, or a text of the EXECUTOR_SYNTAX; None for no executor.

    Raises:
        HagoError: the text is of another form, the scheduler cannot be reached, or a package is missing.
    """
    if given is None:
        yield None
    elif isinstance(given, str):
        with _named_executor(given) as pool:
            yield pool
    elif isinstance(given, Executor):
        yield WorkerPool(given, _worker_count(given))
    else:
        raise HagoError(
            f"executor is a {type(given).__name__}; expected a concurrent.futures.Executor, or {EXECUTOR_SYNTAX}"
        )


@contextlib.contextmanager
def _named_executor(text: str) -> Iterator[WorkerPool]:
    local, dask = _LOCAL.fullmatch(text), _DASK.fullmatch(text)
    if dask:
        with _dask(f"tcp://{dask[1]}:{dask[2]}", text) as pool:
            yield pool
        return
    if not local:
        raise HagoError(f"executor {text!r}; expected {EXECUTOR_SYNTAX}")
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
    # Not fork: a child of a process in which torch runs threads may wait for threads that it does not have.
    return ProcessPoolExecutor(count, multiprocessing.get_context("spawn"), begin_worker)


def begin_worker() -> None:
    """Make a worker process ignore Ctrl-C, and end when the process that started it ends, even if that is killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_exit_with, args=(parent,), daemon=True).start()


def _exit_with(parent: Any) -> None:
    parent.join()
    os._exit(1)


@contextlib.contextmanager
def _dask(address: str, text: str) -> Iterator[WorkerPool]:
    try:
        distributed: Any = importlib.import_module("distributed")
    except ImportError:
        raise HagoError(f"executor {text!r} needs the package distributed: pip install 'hago[dask]'") from None
    try:
        client = distributed.Client(address, timeout=SCHEDULER_PATIENCE, set_as_default=False)
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


# ---------------------------------------------------------------- the state of a worker
#: The name of an objective that hago has, or an objective of the user's own.
Named = str | Objective


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """Everything that a WorkerState is built of, in values that can be sent to another process.

    `worker_spec_of` makes it once per search. It must not be changed: an executor reads it in a thread of its own when
    it sends it.

    Args:
        hardware: the document of the hardware.
        added: rules of ops that hago does not have, by name.
        data: the source of the same Batches.
        objective, also, cache_bytes: see Evaluator.
        race, seed: see `make_worker_state`.
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
    objective: Named
    race: RaceOptions | None
    also: tuple[Named, ...]
    cache_bytes: int | None
    seed: int

    def build(self) -> WorkerState:
        """Build a new WorkerState.

        Raises:
            HagoError: the model or the data is not that of the search.
        """
        graph = replace(self.graph)  # without the cached properties, which several threads would write
        if graph.model_hash != self.model_hash:
            raise HagoError(
                f"the model of this search has hash {self.model_hash[:12]}, what arrived here has "
                f"{graph.model_hash[:12]}; start the workers anew"
            )
        ops = {**OPS, **self.added}
        hardware = hardware_from_document(self.hardware, "the hardware of this search", ops)
        batches = Batches(self.data, graph.inputs)
        if batches.sha256 != self.data_hash:
            raise HagoError(
                f"the data of this search has hash {self.data_hash[:12]}, here it is {batches.sha256[:12]}; "
                "a data set that is read again must give the same values everywhere"
            )
        resolver = estimated_resolver(graph, hardware, self.topology, self.space, self.calibration, self.estimator, ops)
        also = [_objective(o) for o in self.also]
        objective = _objective(self.objective)
        return make_worker_state(resolver, batches, objective, also, self.cache_bytes, self.race, self.seed, quiet=True)


@dataclass(frozen=True, slots=True)
class WorkerState:
    """Scores points in one process, for one thread at a time.

    Args:
        pruner: in a race, scores points against the best so far; else None.
    """

    resolver: Resolver
    evaluator: Evaluator
    pruner: Pruner | None = None

    def score(self, bits: Bits, rival: Bits | None = None) -> Score:
        """The Score of a point.

        Args:
            rival: in a race, the best point so far.

        Raises:
            InfeasibleBits: no signature holds the bits.
        """
        plan = self.resolver(bits)
        if self.pruner is None:
            return self.evaluator.score(plan, bits)
        return self.pruner.score(plan, bits, None if rival is None else self.resolver(rival))


def make_worker_state(
    resolver: Resolver,
    batches: Batches,
    objective: Objective,
    also: Sequence[Objective] = (),
    cache_bytes: int | None = None,
    race: RaceOptions | None = None,
    seed: int = 0,
    quiet: bool = False,
) -> WorkerState:
    """Make the WorkerState of a search; for the other arguments see Evaluator.

    Args:
        race: options of the race; None for none.
        seed: of the order of samples in a race.
        quiet: see Evaluator; in a worker, since the process that searches has warned.
    """
    graph = resolver.graph
    if race is not None:
        batches = shuffled(batches, seed, race.first, graph.inputs)
    evaluator = Evaluator(graph, batches, objective, resolver.ops, also, cache_bytes, quiet=quiet)
    return WorkerState(resolver, evaluator, None if race is None else Pruner(evaluator, race))


def worker_spec_of(
    prepared: Prepared,
    objective: Objective,
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
        data_hash=prepared.batches.sha256,
        topology=prepared.topology,
        space=prepared.space,
        calibration=prepared.calibration,
        estimator=prepared.estimator,
        objective=_named(objective),
        also=tuple(_named(o) for o in also),
        cache_bytes=cache_bytes,
        race=race,
        seed=seed,
    )


def _named(objective: Objective) -> Named:
    return objective.name if OBJECTIVES.get(objective.name) is objective else objective


def _objective(named: Named) -> Objective:
    return OBJECTIVES[named] if isinstance(named, str) else named


# ---------------------------------------------------------------- in a worker
@dataclass(frozen=True, slots=True)
class Ticket:
    """The identity of a search, which a worker checks before it works for it. `Workers` makes it.

    Args:
        search: a unique name of the search.
        made_by: versions of the software that computes, and the number of threads.
    """

    search: str
    made_by: Mapping[str, Any]


class _ThreadStates(threading.local):
    """The WorkerStates of one thread of a worker, by search: an Evaluator serves one thread at a time."""

    def __init__(self) -> None:
        self.by_search: LRU[str, WorkerState] = LRU(KEPT_STATES)


#: Filled by the searches that this process works for, and by nothing else.
_STATES: Final = _ThreadStates()


def score_remotely(ticket: Ticket, bits: Bits, spec: WorkerSpec | None, rival: Bits | None = None) -> Score | None:
    """Score a point in a worker; None if the WorkerSpec is needed and was not sent.

    Raises:
        HagoError: this worker has other versions, or was sent another model.
        InfeasibleBits: no signature holds the bits.
    """
    state = _STATES.by_search.get(ticket.search)
    if state is None:
        check_same(ticket, versions(ticket.made_by["threads"]))
        if spec is None:
            return None
        if torch.get_num_threads() != ticket.made_by["threads"]:
            torch.set_num_threads(ticket.made_by["threads"])
        state = spec.build()
        _STATES.by_search.put(ticket.search, state)
    return state.score(bits, rival)


def check_same(ticket: Ticket, mine: Mapping[str, Any]) -> None:
    """Refuse to work for a search of other versions.

    Raises:
        HagoError: the versions differ; the message names every difference.
    """
    theirs = ticket.made_by
    differing = [f"{k} {mine.get(k)} (the search has {v})" for k, v in theirs.items() if mine.get(k) != v]
    if differing:
        raise HagoError(
            f"a worker has {', '.join(differing)}: scores could differ, so it may not work on this search; "
            "start it with the same versions on the same kind of machine"
        )


# ---------------------------------------------------------------- in the process that searches
class Workers:
    """Sends points to the workers of an executor. A search makes one, and calls it once per point.

    Args:
        pool: the executor.
        spec: of the search.
        score_locally: scores a point in this process, for when there is no executor left.
        notice: called with a message when workers die or fall silent.
    """

    def __init__(
        self, pool: WorkerPool, spec: WorkerSpec, score_locally: Callable[[Bits, Bits | None], Score], notice: Notice
    ) -> None:
        self._pool, self._spec, self._score_locally, self._notice = pool, spec, score_locally, notice
        self._executor: Executor | None = pool.executor
        self._without_spec = pool.count  # workers that the spec was not sent to yet
        made_by = versions(torch.get_num_threads())
        self._ticket = Ticket(uuid.uuid4().hex, made_by)
        self._last_answer: float | None = None
        self._longest_silence, self._warned = 0.0, False
        self._answers_lock = threading.Lock()

    def __call__(self, bits: Bits, rival: Bits | None = None) -> PendingTicket:
        """Start to score a point; `rival` is the best point so far, in a race."""
        return PendingTicket(self, bits, rival)

    def submit(
        self, bits: Bits, rival: Bits | None, with_spec: bool = False
    ) -> tuple[Executor | None, Future[Score | None] | None]:
        """Submit a point; (None, None) if no executor is left."""
        # The spec goes with as many points as there are workers; a worker that got none answers None.
        send_spec = with_spec or self._without_spec > 0
        self._without_spec -= self._without_spec > 0
        while self._executor is not None:
            executor = self._executor
            try:
                spec = self._spec if send_spec else None
                future = executor.submit(score_remotely, self._ticket, dict(bits), spec, rival)
                future.add_done_callback(partial(self._note_answer, time.monotonic()))
                return executor, future
            except (BrokenExecutor, RuntimeError) as error:  # RuntimeError: it was shut down
                self.replace_broken(executor, error)
        return None, None

    def is_lost(self, executor: Executor | None) -> bool:
        """Whether an executor will never answer: it was replaced, or it takes no calls.

        Pools of Python 3.11 and before drop a call that is submitted at the moment at which a worker dies.
        """
        if executor is None or executor is not self._executor:
            return True
        try:
            executor.submit(int).cancel()
        except (BrokenExecutor, RuntimeError):
            return True
        return False

    def _note_answer(self, start: float, future: Future[Score | None]) -> None:
        """Record the time of an answer, and of the silence before it."""
        if future.cancelled():
            return
        with self._answers_lock:
            now = time.monotonic()
            self._longest_silence = max(
                self._longest_silence, now - (start if self._last_answer is None else max(start, self._last_answer))
            )
            self._last_answer = now

    def silence(self, start: float) -> float:
        """Seconds since the last answer, or since `start` where that is later."""
        with self._answers_lock:
            return time.monotonic() - (start if self._last_answer is None else max(start, self._last_answer))

    @property
    def patience(self) -> float:
        """Seconds of silence after which a point is scored in this process."""
        with self._answers_lock:
            return FIRST_SILENCE if self._last_answer is None else max(LEAST_SILENCE, SILENCES * self._longest_silence)

    def replace_silent(self, executor: Executor | None, silence: float, took: float) -> None:
        """Replace an executor that did not answer, if a point takes a small part of that silence in this process.

        Args:
            silence: seconds without an answer.
            took: seconds that one point took in this process.
        """
        with self._answers_lock:
            is_unusual = silence >= SILENCES * max(took, self._longest_silence)
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
        self._executor, self._without_spec, self._last_answer = self._pool.renew(), self._pool.count, None
        self._notice(f"{message}, and the workers are started again: one is stopped, or gone")

    def replace_broken(self, executor: Executor | None, error: BaseException) -> None:
        """Replace an executor that broke; without effect if that was done already."""
        if executor is None or executor is not self._executor:
            return
        executor.shutdown(wait=False, cancel_futures=True)
        self._without_spec = self._pool.count
        if self._pool.renew is not None:
            self._executor = self._pool.renew()
            self._notice(f"a worker died ({_words(error)}); the workers are started again and its point is tried again")
        else:
            self._executor = None
            self._notice(f"the executor broke ({_words(error)}); the search goes on in this process")

    def score_here(self, bits: Bits, rival: Bits | None) -> Score:
        """Score a point in this process."""
        return self._score_locally(bits, rival)


class PendingTicket:
    """A point that is being scored; made by Workers, read by the study that asked for it."""

    def __init__(self, workers: Workers, bits: Bits, rival: Bits | None) -> None:
        self._workers, self._point = workers, (bits, rival)
        self._executor, self._future = workers.submit(bits, rival)

    def result(self) -> Score:
        """Wait for the score.

        Raises:
            HagoError: the worker refused, or WORKER_ATTEMPTS workers died with the point.
        """
        deaths = 0
        self._started = time.monotonic()
        while True:
            if self._future is None:
                return self._workers.score_here(*self._point)
            try:
                score = self._answer(self._future)
                if score is not None:
                    return score
            except Exception as error:
                if not _is_death(error):
                    raise _explained(error) from error
                deaths += 1
                if isinstance(error, BrokenExecutor):
                    self._workers.replace_broken(self._executor, error)
                if deaths == WORKER_ATTEMPTS:
                    raise _fatal(error) from error
            self._executor, self._future = self._workers.submit(*self._point, with_spec=True)
            self._started = time.monotonic()

    def _answer(self, future: Future[Score | None]) -> Score | None:
        while not wait([future], WAIT).done:
            if self._workers.is_lost(self._executor):
                raise BrokenExecutor("what was submitted while it broke was dropped")
            silence = self._workers.silence(self._started)
            if silence > self._workers.patience:
                start = time.monotonic()
                score = self._workers.score_here(*self._point)
                if not future.done():
                    took = time.monotonic() - start
                    self._workers.replace_silent(self._executor, self._workers.silence(self._started), took)
                return score
        return future.result()

    def cancel(self) -> None:
        """Cancel the point if it has not been started."""
        if self._future is not None:
            self._future.cancel()


def _is_death(error: BaseException) -> bool:
    return isinstance(error, (BrokenExecutor, CancelledError)) or type(error).__name__ in _DEATHS


def _explained(error: Exception) -> Exception:
    """A HagoError with advice for an object that cannot be pickled; any other error as it is."""
    if "pickle" in f"{type(error).__name__} {error}".lower():
        return HagoError(
            f"the search cannot be sent to another process ({error}): an objective, op or data set of your own must be "
            "defined at the top of a module that workers can import; or take executor='threads:N'"
        )
    return error


def _fatal(error: Exception) -> HagoError:
    return HagoError(
        f"a point ended its worker {WORKER_ATTEMPTS} times ({_words(error)}); the machine may lack memory for so many "
        "workers, or a script that starts processes lacks `if __name__ == '__main__':`. The log holds every trial "
        "before it"
    )


def _words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
