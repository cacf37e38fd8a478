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
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final

from hago.errors import HagoError

FORMS: Final = "'processes:8', 'threads:4' or 'dask://host:port'"
#: Seconds to wait for a scheduler.
PATIENCE: Final = 15

_LOCAL: Final = re.compile(r"(processes|threads):([1-9]\d{0,3})", re.ASCII)
_DASK: Final = re.compile(r"dask://([^\s/:]+|\[[^\s\]]+\]):(\d{1,5})/?", re.ASCII)


@dataclass(frozen=True, slots=True)
class Hands:
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
def open_executor(given: Executor | str | None) -> Iterator[Hands | None]:
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
        yield Hands(given, _count(given))
    else:
        raise HagoError(f"executor is a {type(given).__name__}; expected a concurrent.futures.Executor, or {FORMS}")


@contextlib.contextmanager
def _opened(text: str) -> Iterator[Hands]:
    local, dask = _LOCAL.fullmatch(text), _DASK.fullmatch(text)
    if dask:
        with _dask(f"tcp://{dask[1]}:{dask[2]}", text) as hands:
            yield hands
        return
    if not local:
        raise HagoError(f"executor {text!r}; expected {FORMS}")
    count = int(local[2])
    make = _processes if local[1] == "processes" else ThreadPoolExecutor
    made: list[Executor] = []

    def renew() -> Executor:
        made.append(make(count))
        return made[-1]

    try:
        yield Hands(renew(), count, renew)
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
def _dask(address: str, text: str) -> Iterator[Hands]:
    try:
        distributed: Any = importlib.import_module("distributed")
    except ImportError:
        raise HagoError(f"executor {text!r} needs the package distributed: pip install 'hago[dask]'") from None
    try:
        client = distributed.Client(address, timeout=PATIENCE, set_as_default=False)
    except (OSError, TimeoutError, ValueError) as error:
        raise HagoError(f"executor {text!r}: no scheduler answers at {address}: {error}") from None
    try:
        workers = client.scheduler_info()["workers"]
        yield Hands(client.get_executor(), max(1, sum(int(w["nthreads"]) for w in workers.values())))
    finally:
        client.close()


def _count(executor: Executor) -> int:
    known = getattr(executor, "_max_workers", None)
    return known if isinstance(known, int) and known > 0 else 1
