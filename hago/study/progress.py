"""The progress of a search's trials: on a terminal, a line with what was found so far and a line with the trial that is
being scored; elsewhere, a plain line now and then. The least important texts come last, since a narrow terminal cuts a
line off.
"""

from __future__ import annotations

import contextlib
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType

from hago.data import StatusLine, duration
from hago.study.budget import Budget
from hago.study.log import Trial


def value_in_words(trial: Trial) -> str:
    """The number that a trial is ranked by."""
    return f"{trial.score.value:.6g}"


class Progress:
    """Shows the number of trials, the best value, the time left, and the number of repeats, and what is scored now; a
    context manager. Made by `run_study`, which calls `begin` before every new trial and `show` after every trial.

    Args:
        budget: budget of the search.
        shown: whether to show it.
        value_text: the value of the best trial in words.
        clock: seconds, for the time between two lines.
        now: the time of day in words.
    """

    def __init__(
        self,
        budget: Budget,
        shown: bool,
        value_text: Callable[[Trial], str] = value_in_words,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], str] = lambda: time.strftime("%H:%M:%S"),
    ) -> None:
        self._budget, self._value_text = budget, value_text
        self._repeats = 0
        self._seconds_before = 0.0
        self._line = StatusLine(shown, clock)
        # elsewhere, it would stand between the lines of what was found
        on_terminal = shown and sys.stderr.isatty()
        self._now_line, self._now = StatusLine(True, clock, row=1) if on_terminal else None, now

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        if self._now_line is not None:
            self._now_line.close()
        self._line.close()

    @contextlib.contextmanager
    def cleared(self) -> Iterator[None]:
        """Take the lines off the terminal while the context is open, so that other code can print."""
        with self._line.cleared(), contextlib.nullcontext() if self._now_line is None else self._now_line.cleared():
            yield

    def begin(self, index: int, why: str) -> None:
        """Show the trial that is scored next.

        Args:
            why: the searcher's reason for its point; may be empty.
        """
        if self._now_line is not None:
            self._now_line.show(f"now: trial {index} since {self._now()}{': ' if why else ''}{why}")

    def show(
        self,
        trial: Trial,
        best: Trial | None,
        seconds: float,
        forwards: float,
        replayed: bool,
        texts: Sequence[str] = (),
    ) -> None:
        """Add a trial.

        Args:
            best: the best trial so far that may be returned.
            seconds, forwards: spent so far.
            replayed: whether it was read from the log.
            texts: further texts to show.
        """
        if trial.index == 0:
            self._seconds_before = trial.elapsed - trial.seconds
        self._repeats += trial.same_as is not None
        count, most = trial.index + 1, self._budget.trials
        # a log may hold more trials than this run allows
        total = f" of {most}" if most is not None and count <= most else ""
        parts = [f"{count}{total} trials", "none runs yet" if best is None else f"best {self._value_text(best)}"]
        left = self._seconds_left(count, seconds, forwards)
        parts += [f"{duration(seconds)} so far" if left is None else f"{duration(left)} left", *texts]
        if self._repeats:
            parts.append(f"{self._repeats} repeats")
        doing = "reading the log" if replayed else "search"
        self._line.show(f"{doing}: {', '.join(parts)}", force=count == most)

    def _seconds_left(self, trials: int, seconds: float, forwards: float) -> float | None:
        """The time until the first limit is reached at the present rate; None where none is reached in finite time.

        The rate of trials is measured from the start of the first.
        """
        limit, searching = self._budget, seconds - self._seconds_before
        spent = (
            (limit.seconds, seconds, seconds),
            (limit.trials, float(trials), searching),
            (limit.forwards, forwards, seconds),
        )
        estimates = [
            max(0.0, maximum - used) * duration / used
            for maximum, used, duration in spent
            if maximum is not None and used > 0
        ]
        return min((left for left in estimates if left < math.inf), default=None)
