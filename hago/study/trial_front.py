"""The Pareto front of a search, as its trials: the accepted ones that no other beats in both a measure and a cost.

`search.pareto_front` makes of it what users get: a value with strategies, and a file.
"""

from __future__ import annotations

import bisect
import math

from hago.study.log import Trial


class TrialFront:
    """The accepted trials that no other beats in both figures; of equal trials the first.
    `search.pareto_front.FrontWriter` makes one per search and calls `add` with every trial.

    Args:
        measure: a name in `Trial.results`; more is better.
        cost: a name in `Score.costs`; less is better.

    Attributes:
        trials: the front, by rising cost and therefore by rising measure.
    """

    def __init__(self, measure: str, cost: str) -> None:
        self.measure, self.cost = measure, cost
        self.trials: list[Trial] = []

    def __len__(self) -> int:
        return len(self.trials)

    def add(self, trial: Trial) -> bool:
        """Add a trial if it belongs to the front, and remove those that it beats; returns whether it was added."""
        value, cost = self.value_of(trial), self.cost_of(trial)
        if not trial.score.accepted or trial.same_as is not None or math.isnan(value) or math.isnan(cost):
            return False
        cheaper = bisect.bisect_right(self.trials, cost, key=self.cost_of)
        if cheaper and self.value_of(self.trials[cheaper - 1]) >= value:
            return False
        first = bisect.bisect_left(self.trials, cost, key=self.cost_of)
        last = bisect.bisect_right(self.trials, value, key=self.value_of)
        self.trials[first : max(first, last)] = [trial]
        return True

    def value_of(self, trial: Trial) -> float:
        """A trial's measure; NaN where it has none."""
        return float(trial.results.get(self.measure, math.nan))

    def cost_of(self, trial: Trial) -> float:
        """A trial's cost; NaN where it has none."""
        return float(trial.score.costs.get(self.cost, math.nan))
