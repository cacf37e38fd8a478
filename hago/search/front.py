"""Front: the points that no other beats in both a measure and a cost, kept on disk as a search goes."""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from hago.json_text import canonical, json_values, replace_file
from hago.search.trial import Trial

VERSION: Final = 1


class Front:
    """The trials that run, keep every limit, and are beaten by none in both figures; the first of
    equals stays.

    Args:
        measure: a name in `results`, of which more is better.
        cost: a name in `score.costs`, of which less is better.
    """

    def __init__(self, measure: str, cost: str) -> None:
        self.measure, self.cost = measure, cost
        #: By rising cost, and so by rising value.
        self.trials: list[Trial] = []

    def __len__(self) -> int:
        return len(self.trials)

    def take(self, trial: Trial) -> bool:
        """Whether the front changed with a trial."""
        value, cost = self.value_of(trial), self.cost_of(trial)
        if not trial.score.accepted or trial.same_as is not None or math.isnan(value) or math.isnan(cost):
            return False
        place = bisect.bisect_right(self.trials, cost, key=self.cost_of)
        if place and self.value_of(self.trials[place - 1]) >= value:
            return False
        first = bisect.bisect_left(self.trials, cost, key=self.cost_of)
        last = bisect.bisect_right(self.trials, value, key=self.value_of)
        self.trials[first : max(first, last)] = [trial]
        return True

    def value_of(self, trial: Trial) -> float:
        """A trial's measure."""
        return float(trial.results.get(self.measure, math.nan))

    def cost_of(self, trial: Trial) -> float:
        """A trial's cost."""
        return float(trial.score.costs.get(self.cost, math.nan))

    def to_json(self, made_by: Mapping[str, Any]) -> dict[str, Any]:
        """What the file holds: every point with its bits, the cheapest first."""
        points = [
            {
                "trial": t.index,
                "value": self.value_of(t),
                "cost": self.cost_of(t),
                "bits": dict(t.bits),
                "results": dict(t.results),
                "costs": dict(t.score.costs),
            }
            for t in self.trials
        ]
        said = {"version": VERSION, "measure": self.measure, "cost": self.cost, "points": points, "made_by": made_by}
        return json_values(said, "front")  # type: ignore[no-any-return]

    def save(self, path: Path, made_by: Mapping[str, Any]) -> None:
        """Write the file beside its place, and rename it.

        Raises:
            LogError: it could not be written; what stood there is untouched.
        """
        replace_file(path, canonical(self.to_json(made_by)) + "\n")
