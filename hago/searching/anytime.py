"""Anytime: what a search leaves on disk and shows after every trial."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hago.debug.cost_report import amount
from hago.search.front import Front
from hago.search.trial import Trial
from hago.searching.fronts import FrontPoint, ParetoFront
from hago.strategy import Strategy
from hago.trials.known import figure_of
from hago.trials.scoring import Scoring

#: The cost of the front where the goal names none.
FRONT_COST = "weight_bytes"


class Anytime:
    """Called with every trial: keeps the front, and its file, and says what a progress bar shows.

    Args:
        scoring: of the search.
        path: of the front's file, or None.
        made_by: what the file says of how it was found.
        here: whether points are scored in this process, so that it knows what they cost.
        costs: those in use; the front is over the first.
        strategy_of: a trial's strategy.
    """

    def __init__(
        self,
        scoring: Scoring,
        path: Path | None,
        made_by: Mapping[str, Any],
        here: bool,
        costs: Sequence[str],
        strategy_of: Callable[[Trial], Strategy],
    ) -> None:
        self._front = Front(figure_of(scoring.goal.objective.name), costs[0] if costs else FRONT_COST)
        self._scoring, self._path, self._made_by, self._here = scoring, path, made_by, here
        self._strategy_of = strategy_of
        self._points: dict[int, FrontPoint] = {}
        self._asked = 0
        # what came before the first trial is not of the trials
        self._earlier = scoring.bench.evaluator.forwards if here else 0.0
        self._current = False

    def __call__(self, trial: Trial, best: Trial | None, replayed: bool) -> Sequence[str]:
        """Take a trial; what it says of it goes into the bar."""
        self._asked += not replayed
        if self._front.take(trial):
            self._current = False
        if not replayed and not self._current:
            self._write()
        return self._figures(best)

    def finish(self) -> None:
        """Write the file where no trial did: all of them were in the log."""
        if not self._current:
            self._write()

    def stop(self) -> None:
        """Write what an interrupt kept from being written. A front of a part of the log alone is not."""
        if self._asked:
            self.finish()

    @property
    def front(self) -> ParetoFront:
        """Of the trials so far."""
        kept, front = self._points, self._front
        # of the trials that are left, so that no more strategies are held than the front has
        self._points = {t.index: kept.get(t.index) or self._point(t) for t in front.trials}
        return ParetoFront(front.measure, front.cost, tuple(self._points.values()), self._made_by)

    def _write(self) -> None:
        if self._path is not None:
            self.front.save(self._path)
            self._current = True

    def _point(self, trial: Trial) -> FrontPoint:
        score = trial.score
        ends = (score.interval[0], score.interval[1]) if score.interval else None
        value = self._front.value_of(trial)
        return FrontPoint(trial.index, self._strategy_of(trial), value, ends, score.costs, score.results)

    def _figures(self, best: Trial | None) -> list[str]:
        shown = []
        cost = None if best is None else best.score.costs.get(self._front.cost)
        if cost is not None:
            shown.append(amount(self._front.cost, cost))
        evaluator = self._scoring.bench.evaluator
        if self._here and self._asked:
            # A run without memory pays a forward for every point that it is asked, repeats and all, at the least.
            shown.append(f"{evaluator.forwards - self._earlier:.0f}/{self._asked} forwards")
            shown.append(f"{100 * evaluator.reuse.spent.share:.0f} % cached")
        return [*shown, f"front {len(self._front)}"]
