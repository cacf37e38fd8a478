"""Handling of Ctrl-C that loses no interrupt.

Python raises KeyboardInterrupt in whatever code is running, and drops it in finalizers and in callbacks of weak
references, of which torch has many. So `run_study`, training and the steps of other jobs also record interrupts, and
check for one between steps.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

from hago.data import JobProgress


class Interrupts:
    """A context manager in which Ctrl-C is recorded as well as raised. It has no effect outside of the main thread, or
    if another handler of the signal is installed.

    Args:
        defer: whether the first interrupt is only recorded, for work that must not stop half way; `check` then raises
            it. A second one is raised at once.
    """

    def __init__(self, defer: bool = False) -> None:
        self._defer = defer
        self._interrupted = self._installed = False

    def __enter__(self) -> Interrupts:
        is_main = threading.current_thread() is threading.main_thread()
        self._installed = is_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if self._installed:
            signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        if self._installed:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        first, self._interrupted = not self._interrupted, True
        if not (first and self._defer):
            signal.default_int_handler(number, frame)

    def check(self) -> None:
        """Raise an interrupt that was recorded and not raised.

        Raises:
            KeyboardInterrupt: there was one.
        """
        if self._interrupted:
            raise KeyboardInterrupt


@contextlib.contextmanager
def interruptible_job(job: str, shown: bool = True) -> Iterator[JobProgress]:
    """The progress of a job, which at every step and after every batch raises an interrupt that was dropped before.

    Args:
        job, shown: of JobProgress.

    Raises:
        KeyboardInterrupt: there was one.
    """
    with Interrupts() as interrupts, JobProgress(job, shown, interrupts.check) as steps:
        yield steps
        interrupts.check()
