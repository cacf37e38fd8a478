"""Interrupts by Ctrl-C that are not lost.

Python raises KeyboardInterrupt wherever it happens to be, and drops it in a finalizer or the callback of a weak
reference, of which torch has many. So `run_study` and training also record that it came, and check that between steps.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType


class Interrupts:
    """A context manager in which Ctrl-C is recorded as well as raised; only in the main thread, and only if no other
    handler of the signal is installed.

    Args:
        defer: only record the first interrupt, which `check` then raises, for work that must not stop half way. A
            second one is raised where it comes.
    """

    def __init__(self, defer: bool = False) -> None:
        self._defer = defer
        self._came = self._mine = False

    def __enter__(self) -> Interrupts:
        is_main = threading.current_thread() is threading.main_thread()
        self._mine = is_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if self._mine:
            signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        if self._mine:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        first, self._came = not self._came, True
        if not (first and self._defer):
            signal.default_int_handler(number, frame)

    def check(self) -> None:
        """Raise an interrupt that was recorded and not raised.

        Raises:
            KeyboardInterrupt: there was one.
        """
        if self._came:
            raise KeyboardInterrupt
