"""The progress of a search: one line on a terminal, nothing elsewhere. The least important texts come last, since a
narrow terminal cuts the line off.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import TracebackType
from typing import Any

from tqdm import tqdm

from hago.study.budget import Budget
from hago.study.log import Trial


class Preliminaries:
    """Shows the step that a search is in before its first trial; a context manager. Made by `search.session` for the
    time of the preparation.

    Args:
        shown: whether to show it; even then only where standard error is a terminal.
    """

    def __init__(self, shown: bool) -> None:
        self._bar: Any = tqdm(bar_format="search: {desc}", disable=None if shown else True, leave=False)

    def __enter__(self) -> Preliminaries:
        return self

    def __call__(self, step: str) -> None:
        """Show the name of the step that begins."""
        self._bar.set_description_str(step)

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._bar.close()


class Progress:
    """Shows the number of trials, the best value, the time left, and the number of repeats; a context manager. Made by
    `run_study`, which calls `show` with every trial.

    Args:
        budget: budget of the search.
        done: number of trials that the log holds already.
        shown: whether to show it; even then only where standard error is a terminal.
    """

    def __init__(self, budget: Budget, done: int, shown: bool) -> None:
        self._budget = budget
        self._repeats = 0
        self._seconds_before = 0.0
        # None lets tqdm look whether the stream is a terminal.
        hidden = None if shown else True
        # no bar, but figures, the least important of which come last
        count = "{n_fmt}" if budget.trials is None else "{n_fmt}/{total_fmt}"
        self._bar: Any = tqdm(
            total=budget.trials,
            initial=done,
            disable=hidden,
            unit="trial",
            dynamic_ncols=True,
            bar_format=count + " trials{postfix}",
        )

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._bar.close()

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
        parts = ["none runs yet" if best is None else f"best {best.score.value:.6g}", *texts]
        left = self._seconds_left(trial.index + 1, seconds, forwards)
        if left is not None:
            parts.append(f"{_duration(left)} left")
        if self._repeats:
            parts.append(f"{self._repeats} repeats")
        self._bar.set_postfix_str(", ".join(parts), refresh=False)
        if not replayed:
            self._bar.update(1)

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


def _duration(seconds: float) -> str:
    rounded = round(seconds)
    hours, minutes = rounded // 3600, rounded // 60 % 60
    return f"{hours}h{minutes:02}m" if hours else f"{minutes}m{rounded % 60:02}s" if minutes else f"{rounded}s"
