"""Workers: points scored in other processes, by way of any executor.

A worker is sent the Work of a search once, with the first point that it is given, and keeps the Bench
that it builds from it; later points travel alone. A worker of other versions refuses. A worker that
dies loses nothing but the points it had, which are tried again.

A worker may also stop without an end (a signal, a machine that left the network). No time tells that from a slow
machine, so nothing is given up for time alone: where an executor is silent for many times its longest silence so far,
the point is scored in this process, which can only wait otherwise and gives the same score. If the worker is not back
by then, and was silent for many times what the point took here, too, the executor is taken for dead and replaced.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import BrokenExecutor, CancelledError, Executor, Future, wait
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch

from hago.errors import HagoError
from hago.lru import LRU
from hago.search.header import versions
from hago.search.log import Notice
from hago.search.searcher import Score
from hago.space import Bits
from hago.trials.bench import Bench, Work
from hago.trials.executors import Hands, end_executor

#: How often a point is tried whose worker dies.
TRIES: Final = 3
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
        self.kept: LRU[str, Bench] = LRU(BENCHES)


#: Filled by the searches that this process works for, and by nothing else.
_BENCHES: Final = _Benches()


def score_remotely(ticket: Ticket, bits: Bits, work: Work | None, rival: Bits | None = None) -> Score | None:
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

    def __init__(self, hands: Hands, work: Work, local: Callable[[Bits, Bits | None], Score], notice: Notice) -> None:
        self._hands, self._work, self._local, self._notice = hands, work, local, notice
        self._executor: Executor | None = hands.executor
        self._unserved = hands.count
        made_by = versions(torch.get_num_threads())
        self._ticket = Ticket(uuid.uuid4().hex, made_by)
        self._heard: float | None = None
        self._longest, self._warned = 0.0, False
        self._hearing = threading.Lock()

    def __call__(self, bits: Bits, rival: Bits | None = None) -> Pending:
        """Start to score a point."""
        return Pending(self, bits, rival)

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


class Pending:
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
                if deaths == TRIES:
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
        f"a point ended its worker {TRIES} times ({_said(error)}); the machine may lack memory for so many workers, "
        "or a script that starts processes lacks `if __name__ == '__main__':`. The log holds every trial before it"
    )


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
