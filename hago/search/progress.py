"""Progress: a bar on a terminal, and nothing anywhere else."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Any

from tqdm import tqdm

from hago.search.budget import Budget
from hago.search.trial import Trial


class Progress:
    """Shows trials, the best value, how many trials repeats saved, and what is left of the budget.

    Args:
        budget: of the search.
        done: trials that a log holds already.
        shown: whether to show anything; even then only where standard error is a terminal.
    """

    def __init__(self, budget: Budget, done: int, shown: bool) -> None:
        self._budget = budget
        self._saved = 0
        # None lets tqdm look whether the stream is a terminal.
        hidden = None if shown else True
        self._bar: Any = tqdm(total=budget.trials, initial=done, disable=hidden, unit="trial", desc="search")

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
        also: Mapping[str, str] | None = None,
    ) -> None:
        """Add a trial.

        Args:
            best: the best trial so far that may be returned.
            seconds, forwards: spent so far.
            replayed: it was read from the log.
            also: what else to show.
        """
        self._saved += trial.same_as is not None
        shown = {"best": "none runs yet" if best is None else f"{best.score.value:.6g}", "saved": self._saved}
        shown.update(also or {})
        if self._budget.seconds is not None:
            shown["left"] = f"{max(0.0, self._budget.seconds - seconds):.0f}s"
        if self._budget.forwards is not None:
            shown["forwards left"] = f"{max(0.0, self._budget.forwards - forwards):.0f}"
        self._bar.set_postfix(shown, refresh=False)
        if not replayed:
            self._bar.update(1)
