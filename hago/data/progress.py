"""The progress of a job: the step that it is in and how far that is, on one line of a terminal, or now and then as a
plain line where standard error is no terminal.

A job makes a `JobProgress`, announces each step, and passes `JobProgress.on_batch` to its `Batches`, which call it
after every batch of every pass. What is quicker than PLAIN_SECONDS leaves no plain line.
"""

from __future__ import annotations

import contextlib
import math
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, Final

from tqdm import tqdm

from hago.serialization.text_table import counted

#: The least number of seconds between two plain lines, and before the first.
PLAIN_SECONDS: Final = 30.0
#: The least number of seconds between two texts on a terminal.
TERMINAL_SECONDS: Final = 0.1
#: The columns of a terminal that does not tell.
COLUMNS: Final = 120


class StatusLine:
    """One line with the state of a job; a context manager. `JobProgress` and the progress of trials make one.

    Args:
        shown: whether to show it.
        clock: seconds.
        row: its place among the lines of a terminal that are shown together, from the top.
    """

    def __init__(self, shown: bool, clock: Callable[[], float] = time.monotonic, row: int = 0) -> None:
        self._shown, self._clock, self._row = shown, clock, row
        self._terminal = shown and sys.stderr.isatty()
        self._bar: Any = None
        self._last = -math.inf if self._terminal else clock()

    def __enter__(self) -> StatusLine:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Clear the line; texts that follow are not shown."""
        self._shown = False
        if self._bar is not None:
            self._bar.close()

    @contextlib.contextmanager
    def cleared(self) -> Iterator[None]:
        """Take the line off the terminal while the context is open, so that other code can print."""
        if self._bar is None:
            yield
            return
        self._bar.clear()
        try:
            yield
        finally:
            self._bar.refresh()

    def is_due(self, now: float, force: bool = False) -> bool:
        """Whether a text would be shown now; arguments as for `show`."""
        due = now - self._last >= (TERMINAL_SECONDS if self._terminal else PLAIN_SECONDS)
        return self._shown and (due or (force and self._terminal))

    def show(self, text: str, force: bool = False) -> None:
        """Show a text instead of the last one, unless that is too recent.

        Args:
            force: on a terminal, show it in any case.
        """
        now = self._clock()
        if not self.is_due(now, force):
            return
        self._last = now
        if not self._terminal:
            tqdm.write(f"hago: {text}", file=sys.stderr)
            return
        if self._bar is None:
            self._bar = tqdm(bar_format="{desc}", leave=False, position=self._row)
        # a longer line would wrap, and could not be replaced
        self._bar.set_description_str(text[: shutil.get_terminal_size((COLUMNS, 24)).columns - 1])


class JobProgress:
    """Shows the step that a job is in, and how far the pass over the data is that it makes; a context manager.

    Args:
        job: the name of the job.
        shown: whether to show it.
        check: called at every step and after every batch, e.g. to raise an interrupt that other code has dropped.
        clock: seconds.
    """

    def __init__(
        self,
        job: str,
        shown: bool = True,
        check: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._job, self._check, self._clock = job, check, clock
        self._line = StatusLine(shown, clock)
        self._started = clock()
        self._begin("")

    def __enter__(self) -> JobProgress:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._line.close()

    def __call__(self, step: str) -> None:
        """Show the name of the step that begins."""
        self._check()
        self._begin(step)
        self._line.show(f"{self._job}: {step}", force=True)

    def _begin(self, step: str) -> None:
        self._step, self._passes, self._done = step, 1, 0
        self._timed_from = (0, self._clock())  # number of samples of this pass that were done at a time

    def on_batch(self, done: int, samples: int | None) -> None:
        """Show how far a pass over the data is.

        Args:
            done: number of samples of this pass so far.
            samples: number of all samples; None where it is not known yet.
        """
        self._check()
        now = self._clock()
        if done <= self._done:
            # when the pass began is not known, only when its first batch ended
            self._passes, self._timed_from = self._passes + 1, (done, now)
        self._done = done
        if not self._line.is_due(now):
            return
        nth = f", pass {self._passes}" if self._passes > 1 else ""
        count = counted(done, "sample") if samples is None else f"{done} of {counted(samples, 'sample')}"
        left = "" if samples is None else self._left(samples - done, now)
        self._line.show(f"{self._job}: {self._step}{nth}: {count}{left}, {duration(now - self._started)} so far")

    def _left(self, samples: int, now: float) -> str:
        """The time until the pass ends at its present rate, in words; nothing if that is short or not known."""
        done, since = self._timed_from
        if self._done == done:
            return ""
        seconds = (now - since) * samples / (self._done - done)
        return f", {duration(seconds)} left in this pass" if seconds >= 1.0 else ""


def duration(seconds: float) -> str:
    """A time in words: 59s, 1m30s, 2h05m."""
    rounded = round(seconds)
    hours, minutes = rounded // 3600, rounded // 60 % 60
    return f"{hours}h{minutes:02}m" if hours else f"{minutes}m{rounded % 60:02}s" if minutes else f"{rounded}s"
