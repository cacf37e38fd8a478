"""Front: the trials that no other beats in both a measure and a cost, as a search goes."""

from __future__ import annotations

import bisect
import math

from hago.study.log import Trial


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
