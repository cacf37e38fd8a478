"""Executors by name: processes and threads of this machine, or a Dask cluster.

Any other `concurrent.futures.Executor` (Ray's, MPI's, a pool of the user's) is taken as it is.
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
from hago.plan.thresholds import estimated_resolver
from hago.plan.topology import Topology
from hago.search.evaluate import Evaluator
from hago.search.objective import OBJECTIVES, Objective
from hago.search.prepare import Prepared
from hago.search.racing import Pruner, RaceOptions, shuffled
from hago.study.log import Notice, versions
from hago.study.searcher import Score

EXECUTOR_FORMS: Final = "'processes:8', 'threads:4' or 'dask://host:port'"
#: Seconds to wait for a scheduler.
SCHEDULER_PATIENCE: Final = 15

_LOCAL: Final = re.compile(r"(processes|threads):([1-9]\d{0,3})", re.ASCII)
_DASK: Final = re.compile(r"dask://([^\s/:]+|\[[^\s\]]+\]):(\d{1,5})/?", re.ASCII)


@dataclass(frozen=True, slots=True)
class WorkerPool:
    """An executor, and what is known of it.

    Args:
        executor: runs calls.
        count: of its workers; 1 where that is not known.
        renew: makes another executor after this one broke; None where only its owner can.
    """

    executor: Executor
    count: int = 1
    renew: Callable[[], Executor] | None = None


@contextlib.contextmanager
def open_executor(given: Executor | str | None) -> Iterator[WorkerPool | None]:
    """What `given` means, for as long as the context lasts. An executor that was made here is shut
    down at the end, without waiting for what still runs; one that was given is left as it is.

    Args:
        given: an executor, or one of FORMS; None for none.

    Raises:
        HagoError: another text, a scheduler that cannot be reached, or a package that is missing.
    """
    if given is None:
        yield None
    elif isinstance(given, str):
        with _opened(given) as hands:
            yield hands
    elif isinstance(given, Executor):
        yield WorkerPool(given, _count(given))
    else:
        raise HagoError(
            f"executor is a {type(given).__name__}; expected a concurrent.futures.Executor, or {EXECUTOR_FORMS}"
        )


@contextlib.contextmanager
def _opened(text: str) -> Iterator[WorkerPool]:
    local, dask = _LOCAL.fullmatch(text), _DASK.fullmatch(text)
    if dask:
        with _dask(f"tcp://{dask[1]}:{dask[2]}", text) as hands:
            yield hands
        return
    if not local:
        raise HagoError(f"executor {text!r}; expected {EXECUTOR_FORMS}")
    count = int(local[2])
    make = _processes if local[1] == "processes" else ThreadPoolExecutor
    made: list[Executor] = []

    def renew() -> Executor:
        made.append(make(count))
        return made[-1]

    try:
        yield WorkerPool(renew(), count, renew)
    finally:
        for executor in made:
            end_executor(executor)


def end_executor(executor: Executor) -> None:
    """Shut an executor that was made here down without waiting, and end its processes: one that is stopped would
    never end by itself, and Python waits for all of them when it exits."""
    processes = list((getattr(executor, "_processes", None) or {}).values())
    executor.shutdown(wait=False, cancel_futures=True)
    for process in processes:
        process.kill()


def _processes(count: int) -> Executor:
    # Not fork: a child of a process in which torch runs threads may wait for threads that it has not.
    return ProcessPoolExecutor(count, multiprocessing.get_context("spawn"), begin_worker)


def begin_worker() -> None:
    """Make a worker process leave Ctrl-C to the process that started it, and end with that one, even
    where that one is killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_leave_after, args=(parent,), daemon=True).start()


def _leave_after(parent: Any) -> None:
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


def _count(executor: Executor) -> int:
    known = getattr(executor, "_max_workers", None)
    return known if isinstance(known, int) and known > 0 else 1


# ---------------------------------------------------------------- bench
# Bench: what scores points in one process, made from what can be sent to another.
# A Work is all that a worker needs, once: model, hardware as a document, data, thresholds. A Bench is what it builds
# from that: a Resolver and an Evaluator with their memories.

#: An objective by its name, where hago knows it, or itself.
Named = str | Objective


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """All that makes a Bench, in values that another process can be sent.

    Nothing may change it: an executor reads it in a thread of its own when it sends it.

    Args:
        hardware: its document.
        added: rules of ops that hago does not have.
        data: what makes the same Batches again.
        objective, also, cache_bytes: see Evaluator.
        race, seed: see make_bench.
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

    def bench(self) -> WorkerState:
        """A new Bench.

        Raises:
            HagoError: the model or the data is not what it was.
        """
        graph = replace(self.graph)  # without what the other remembers, which several threads would write
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
        how = (self.calibration, self.estimator)
        resolver = estimated_resolver(graph, hardware, self.topology, self.space, *how, ops)
        also = [_objective(o) for o in self.also]
        objective = _objective(self.objective)
        return make_worker_state(resolver, batches, objective, also, self.cache_bytes, self.race, self.seed, quiet=True)


@dataclass(frozen=True, slots=True)
class WorkerState:
    """Scores points; for one thread at a time."""

    resolver: Resolver
    evaluator: Evaluator
    racer: Pruner | None = None

    def score(self, bits: Bits, rival: Bits | None = None) -> Score:
        """The Score of a point.

        Args:
            rival: in a race, the best point so far.

        Raises:
            InfeasibleBits: no signature holds the bits.
        """
        plan = self.resolver(bits)
        if self.racer is None:
            return self.evaluator.score(plan, bits)
        return self.racer.score(plan, bits, None if rival is None else self.resolver(rival))


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
    """A new Bench; see Evaluator.

    Args:
        race: how points are raced, or None.
        seed: of the order of samples in a race.
        quiet: see Evaluator; the process that searches has warned.
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
    """The Work of a search."""
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


# ---------------------------------------------------------------- workers
# Workers: points scored in other processes, by way of any executor.
# A worker is sent the Work of a search once, with the first point that it is given, and keeps the Bench that it
# builds from it; later points travel alone. A worker of other versions refuses. A worker that dies loses nothing but
# the points it had, which are tried again.
# A worker may also stop without an end (a signal, a machine that left the network). No time tells that from a slow
# machine, so nothing is given up for time alone: where an executor is silent for many times its longest silence so
# far, the point is scored in this process, which can only wait otherwise and gives the same score. If the worker is
# not back by then, and was silent for many times what the point took here, too, the executor is taken for dead and
# replaced.

#: How often a point is tried whose worker dies.
WORKER_ATTEMPTS: Final = 3
#: Seconds after which an executor that has not answered is asked whether it is there.
WAIT: Final = 10.0
#: So many times the longest silence of an executor, and at least so many seconds, are waited for it.
SILENCES: Final = 10.0
LEAST_SILENCE: Final = 60.0
#: Seconds that are waited for an executor's first answer, for which its workers have to start.
FIRST_SILENCE: Final = 600.0
#: Of how many searches a worker keeps the Bench.
BENCHES: Final = 2
#: What executors of other packages raise where a worker died.
_DEATHS: Final = ("KilledWorker", "WorkerCrashedError", "CommClosedError", "WorkerLostError")


@dataclass(frozen=True, slots=True)
class Ticket:
    """What a worker checks before it works.

    Args:
        search: names one search.
        made_by: versions of what computes, and threads.
    """

    search: str
    made_by: Mapping[str, Any]


class _Benches(threading.local):
    """The benches of one thread of a worker: an Evaluator serves one thread at a time."""

    def __init__(self) -> None:
        self.kept: LRU[str, WorkerState] = LRU(BENCHES)


#: Filled by the searches that this process works for, and by nothing else.
_BENCHES: Final = _Benches()


def score_remotely(ticket: Ticket, bits: Bits, work: WorkerSpec | None, rival: Bits | None = None) -> Score | None:
    """In a worker: the score of a point, or None where `work` is needed and was not sent.

    Raises:
        HagoError: this worker has other versions, or was sent another model.
        InfeasibleBits: no signature holds the bits.
    """
    bench = _BENCHES.kept.get(ticket.search)
    if bench is None:
        check_same(ticket, versions(ticket.made_by["threads"]))
        if work is None:
            return None
        if torch.get_num_threads() != ticket.made_by["threads"]:
            torch.set_num_threads(ticket.made_by["threads"])
        bench = work.bench()
        _BENCHES.kept.put(ticket.search, bench)
    return bench.score(bits, rival)


def check_same(ticket: Ticket, mine: Mapping[str, Any]) -> None:
    """Refuse to work with other versions than the search has.

    Raises:
        HagoError: every difference.
    """
    theirs = ticket.made_by
    differing = [f"{k} {mine.get(k)} (the search has {v})" for k, v in theirs.items() if mine.get(k) != v]
    if differing:
        raise HagoError(
            f"a worker has {', '.join(differing)}: scores could differ, so it may not work on this search; "
            "start it with the same versions on the same kind of machine"
        )


class Workers:
    """Sends points to the workers of an executor.

    Args:
        hands: the executor.
        work: of the search.
        local: scores a point in this process, for when there is no executor left.
        notice: is told of workers that died.
    """

    def __init__(
        self, hands: WorkerPool, work: WorkerSpec, local: Callable[[Bits, Bits | None], Score], notice: Notice
    ) -> None:
        self._hands, self._work, self._local, self._notice = hands, work, local, notice
        self._executor: Executor | None = hands.executor
        self._unserved = hands.count
        made_by = versions(torch.get_num_threads())
        self._ticket = Ticket(uuid.uuid4().hex, made_by)
        self._heard: float | None = None
        self._longest, self._warned = 0.0, False
        self._hearing = threading.Lock()

    def __call__(self, bits: Bits, rival: Bits | None = None) -> PendingTicket:
        """Start to score a point."""
        return PendingTicket(self, bits, rival)

    def submit(
        self, bits: Bits, rival: Bits | None, with_work: bool = False
    ) -> tuple[Executor | None, Future[Score | None] | None]:
        """Hand a point on; (None, None) where no executor is left."""
        # As many points as there are workers bring the work along; a worker that gets none asks.
        carries = with_work or self._unserved > 0
        self._unserved -= self._unserved > 0
        while self._executor is not None:
            executor = self._executor
            try:
                work = self._work if carries else None
                future = executor.submit(score_remotely, self._ticket, dict(bits), work, rival)
                future.add_done_callback(partial(self._hear, time.monotonic()))
                return executor, future
            except (BrokenExecutor, RuntimeError) as error:  # RuntimeError: it was shut down
                self.broke(executor, error)
        return None, None

    def lost(self, executor: Executor | None) -> bool:
        """Whether an executor will not answer: it was replaced, or it takes no calls.

        Pools of Python 3.11 and before drop a call that is submitted at the moment at which a worker dies.
        """
        if executor is None or executor is not self._executor:
            return True
        try:
            executor.submit(int).cancel()
        except (BrokenExecutor, RuntimeError):
            return True
        return False

    def _hear(self, begun: float, future: Future[Score | None]) -> None:
        """Take note of an answer, and of how long there was none before."""
        if future.cancelled():
            return
        with self._hearing:
            now = time.monotonic()
            self._longest = max(self._longest, now - (begun if self._heard is None else max(begun, self._heard)))
            self._heard = now

    def silence(self, begun: float) -> float:
        """Seconds since an answer came, or since `begun` where that is later."""
        with self._hearing:
            return time.monotonic() - (begun if self._heard is None else max(begun, self._heard))

    @property
    def patience(self) -> float:
        """Seconds of silence after which a point is scored here."""
        with self._hearing:
            return FIRST_SILENCE if self._heard is None else max(LEAST_SILENCE, SILENCES * self._longest)

    def silent(self, executor: Executor | None, silence: float, took: float) -> None:
        """Give an executor up that did not answer, if a point takes a small part of that silence in this process.

        Args:
            silence: seconds without an answer.
            took: seconds that one point took here.
        """
        with self._hearing:
            unlike_others = silence >= SILENCES * max(took, self._longest)
        if executor is None or executor is not self._executor or not unlike_others:
            return
        said = f"no worker answered for {silence:.0f} s; the point was scored in this process"
        if self._hands.renew is None:
            if self._warned:
                return
            self._warned = True
            self._notice(f"{said}. Look after the workers of the executor: one is stopped, or gone")
            return
        end_executor(executor)
        self._executor, self._unserved, self._heard = self._hands.renew(), self._hands.count, None
        self._notice(f"{said}, and the workers are started again: one is stopped, or gone")

    def broke(self, executor: Executor | None, error: BaseException) -> None:
        """Replace an executor that cannot go on, once."""
        if executor is None or executor is not self._executor:
            return
        executor.shutdown(wait=False, cancel_futures=True)
        self._unserved = self._hands.count
        if self._hands.renew is not None:
            self._executor = self._hands.renew()
            self._notice(f"a worker died ({_said(error)}); the workers are started again and its point is tried again")
        else:
            self._executor = None
            self._notice(f"the executor broke ({_said(error)}); the search goes on in this process")

    def score_here(self, bits: Bits, rival: Bits | None) -> Score:
        """The score of a point, without a worker."""
        return self._local(bits, rival)


class PendingTicket:
    """A point that is being scored."""

    def __init__(self, workers: Workers, bits: Bits, rival: Bits | None) -> None:
        self._workers, self._point = workers, (bits, rival)
        self._executor, self._future = workers.submit(bits, rival)

    def result(self) -> Score:
        """The score, when it is there.

        Raises:
            HagoError: the worker refused, or the point ended its worker TRIES times.
        """
        deaths = 0
        self._begun = time.monotonic()
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
                    self._workers.broke(self._executor, error)
                if deaths == WORKER_ATTEMPTS:
                    raise _fatal(error) from error
            self._executor, self._future = self._workers.submit(*self._point, with_work=True)
            self._begun = time.monotonic()

    def _answer(self, future: Future[Score | None]) -> Score | None:
        while not wait([future], WAIT).done:
            if self._workers.lost(self._executor):
                raise BrokenExecutor("what was submitted while it broke was dropped")
            silence = self._workers.silence(self._begun)
            if silence > self._workers.patience:
                begun = time.monotonic()
                score = self._workers.score_here(*self._point)
                if not future.done():
                    took = time.monotonic() - begun
                    self._workers.silent(self._executor, self._workers.silence(self._begun), took)
                return score
        return future.result()

    def cancel(self) -> None:
        """Give the point up, where it has not begun."""
        if self._future is not None:
            self._future.cancel()


def _is_death(error: BaseException) -> bool:
    return isinstance(error, (BrokenExecutor, CancelledError)) or type(error).__name__ in _DEATHS


def _explained(error: Exception) -> Exception:
    """What cannot be pickled, in words; any other error as it is."""
    if "pickle" in f"{type(error).__name__} {error}".lower():
        return HagoError(
            f"the search cannot be sent to another process ({error}): an objective, op or data set of your own must be "
            "defined at the top of a module that workers can import; or take executor='threads:N'"
        )
    return error


def _fatal(error: Exception) -> HagoError:
    return HagoError(
        f"a point ended its worker {WORKER_ATTEMPTS} times ({_said(error)}); the machine may lack memory for so many "
        "workers, or a script that starts processes lacks `if __name__ == '__main__':`. The log holds every trial "
        "before it"
    )


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
