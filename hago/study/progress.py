"""The progress of a search: one line on a terminal, and nothing elsewhere. The least important texts come last, since a
narrow terminal cuts them off.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any

from tqdm import tqdm

from hago.study.budget import Budget
from hago.study.log import Trial


class Preliminaries:
    """Shows the step of preparation that a search is in, before its first trial; a context manager.

    Args:
        shown: whether to show it; even then only where standard error is a terminal.
    """

    def __init__(self, shown: bool) -> None:
        self._bar: Any = tqdm(bar_format="search: {desc}", disable=None if shown else True, leave=False)

    def __enter__(self) -> Preliminaries:
        return self

    def __call__(self, what: str) -> None:
        """Show the name of a step that begins."""
        self._bar.set_description_str(what)

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
        self._saved = 0
        self._before = 0.0
        # None lets tqdm look whether the stream is a terminal.
        hidden = None if shown else True
        # figures, and no bar: what a narrow terminal cuts off stands last
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
        also: Sequence[str] = (),
    ) -> None:
        """Add a trial.

        Args:
            best: the best trial so far that may be returned.
            seconds, forwards: spent so far.
            replayed: it was read from the log.
            also: what else to show.
        """
        if trial.index == 0:
            self._before = trial.elapsed - trial.seconds
        self._saved += trial.same_as is not None
        shown = ["none runs yet" if best is None else f"best {best.score.value:.6g}", *also]
        left = self._seconds_left(trial.index + 1, seconds, forwards)
        if left is not None:
            shown.append(f"{_duration(left)} left")
        if self._saved:
            shown.append(f"{self._saved} repeats")
        self._bar.set_postfix_str(", ".join(shown), refresh=False)
        if not replayed:
            self._bar.update(1)

    def _seconds_left(self, trials: int, seconds: float, forwards: float) -> float | None:
        """Until the first limit is reached, at the pace so far, which for trials is that since the first of them began;
        None where there is none."""
        limit, searching = self._budget, seconds - self._before
        spent = (
            (limit.seconds, seconds, seconds),
            (limit.trials, float(trials), searching),
            (limit.forwards, forwards, seconds),
        )
        each = [max(0.0, most - now) * took / now for most, now, took in spent if most is not None and now > 0]
        return min(each, default=None)


def _duration(seconds: float) -> str:
    whole = round(seconds)
    hours, minutes = whole // 3600, whole // 60 % 60
    return f"{hours}h{minutes:02}m" if hours else f"{minutes}m{whole % 60:02}s" if minutes else f"{whole}s"
