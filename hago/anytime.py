"""Anytime: what a search leaves on disk and shows after every trial."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hago.debug.cost_report import amount
from hago.known import figure_of
from hago.scoring import Scoring
from hago.search.front import Front
from hago.search.trial import Trial

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
    """

    def __init__(
        self, scoring: Scoring, path: Path | None, made_by: Mapping[str, Any], here: bool, costs: Sequence[str] = ()
    ) -> None:
        self.front = Front(figure_of(scoring.goal.objective.name), costs[0] if costs else FRONT_COST)
        self._scoring, self._path, self._made_by, self._here = scoring, path, made_by, here
        self._evaluated = 0
        self._written = False

    def __call__(self, trial: Trial, best: Trial | None, replayed: bool) -> Mapping[str, str]:
        """Take a trial; what it says of it goes into the bar."""
        changed = self.front.take(trial)
        if self._path is not None and not replayed and (changed or not self._written):
            self.front.save(self._path, self._made_by)
            self._written = True
        self._evaluated += trial.same_as is None and not replayed
        return self._figures(best)

    def finish(self) -> None:
        """Write the file where no trial did: all of them were in the log."""
        if self._path is not None and not self._written:
            self.front.save(self._path, self._made_by)

    def _figures(self, best: Trial | None) -> dict[str, str]:
        shown = {}
        cost = None if best is None else best.score.costs.get(self.front.cost)
        if cost is not None:
            shown[self.front.cost] = amount(self.front.cost, cost)
        shown["front"] = str(len(self.front))
        evaluator = self._scoring.bench.evaluator
        if self._here and self._evaluated:
            shown["cached"] = f"{100 * evaluator.reuse.spent.share:.0f} %"
            # A run without memory pays a forward for every point that it evaluates, at the least.
            shown["forwards"] = f"{evaluator.forwards:.1f} of {self._evaluated}"
        return shown
