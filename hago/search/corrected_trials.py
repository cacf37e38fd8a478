"""What trials become once their layers are corrected: the best one within the limits, and the front.

Correcting the layers of a point takes some forwards, so trials are measured without it, and it is made for the points
that are returned. By then they gain some dB, so a search within limits on measures may go below them by as much:
`expected_gains` measures that at one point before the first trial, and `CorrectedTrials` looks for the trial at which
the limits hold in fact.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from hago.errors import InfeasibleBits, LogError, shortened
from hago.plan import Bits
from hago.plan.feasibility import nearest_feasible, plan_or_refusal
from hago.search.correcting import OF_LAYERS, correct_point
from hago.search.goal import Limit
from hago.search.measured_point import MeasuredPoint
from hago.search.objective import OBJECTIVES
from hago.search.preparation import Prepared
from hago.search.scoring import GoalScorer
from hago.search.starting_point import StartingPoint
from hago.searchers import Knapsack, Surrogate
from hago.study import Score, Trial

#: Steps of the cost between the ends of the expected front, among which the point at the limits is found.
SOLUTIONS: Final = 16
#: The most points of a front whose layers are corrected, unless all are.
FRONT_POINTS: Final = 16


# ---------------------------------------------------------------- before the first trial
def start_at_limits(start: StartingPoint, scorer: GoalScorer) -> StartingPoint:
    """Where a cost is minimized by a guided search, the cheapest expected point that keeps the limits on measures is
    the first one, so that the search returns nothing worse; elsewhere the start as it is.

    Args:
        scorer: with the thresholds of the start, and limits as the user gave them.
    """
    if start.surrogate is None or not start.surrogate.minimize or not corrects_within_limits(scorer):
        return start
    bits = _last_that_keeps(scorer, _solutions(start.prepared, start.surrogate))
    surrogate = replace(start.surrogate, most=start.most_bits)
    return start if bits is None else replace(start, bits=bits, surrogate=surrogate)


def expected_gains(start: StartingPoint, scorer: GoalScorer) -> dict[str, float]:
    """By figure of a limit on a measure, how much correcting the layers gains at a point near the limits; empty where
    no layers are corrected.

    The point is the start where that is made for the limits, and else the fewest bits, the same everywhere, that keep
    the limits, or the most bits. Points of fewer bits gain more, so trials that keep the lowered limits mostly keep the
    limits once they are corrected.

    Args:
        start: of `start_at_limits`.
        scorer: as of `start_at_limits`.
    """
    if not corrects_within_limits(scorer):
        return {}
    prepared, goal, evaluator = start.prepared, scorer.goal, scorer.evaluator
    bits = start.bits
    if start.surrogate is None and goal.minimize is not None:
        bits = _last_that_keeps(scorer, list(_uniform_points(prepared, start.most_bits))) or bits
    point = MeasuredPoint(prepared, bits, evaluator.measure(prepared.resolver(bits)))
    before, after = (
        evaluator.summary(each.measured.contributions) for each in (point, correct_point(point, evaluator))
    )
    figures = sorted({limit.figure for limit in goal.limits if not limit.is_cost})
    return {name: max(0.0, float(after[name]) - float(before[name])) for name in figures}


def corrects_within_limits(scorer: GoalScorer) -> bool:
    """Whether there are limits on measures, and corrections of layers by which trials may gain."""
    corrects = not set(OF_LAYERS).isdisjoint(scorer.prepared.correction_names)
    return corrects and any(not limit.is_cost for limit in scorer.goal.limits)


def _last_that_keeps(scorer: GoalScorer, points: Sequence[Bits]) -> Bits | None:
    """The last of these points, each cheaper than the one before it, that keeps the limits; None if the first does not.
    Bisection, since cheaper points lose more."""
    kept = bisect.bisect_left(points, True, key=lambda bits: not scorer.first(bits).accepted)
    return points[kept - 1] if kept else None


def _solutions(prepared: Prepared, surrogate: Surrogate) -> list[Bits]:
    """Solutions of the integer program over expected losses, by falling cost."""
    program = Knapsack(prepared.space, surrogate)
    ends = program.range
    if ends is None:
        return []
    solutions, before = list[Bits](), math.inf
    for number in range(SOLUTIONS + 1):
        solved = program.solve(ends[1] + (ends[0] - ends[1]) * number / SOLUTIONS + 1e-9 * abs(ends[0]))
        if solved is None or solved.cost >= before:
            continue
        if not isinstance(plan_or_refusal(prepared.resolver, solved.bits), InfeasibleBits):
            solutions.append(dict(solved.bits))
            before = solved.cost
    return solutions


def _uniform_points(prepared: Prepared, most: Bits) -> Iterator[Bits]:
    """Points with the same bits everywhere as far as the space has them, from the most bits down."""
    groups, before = prepared.space.groups, dict[str, int]()
    for bits in sorted({b for group in groups.values() if not group.is_kind for b in group.choices}, reverse=True):
        wanted = {
            key: most[key]
            if group.is_kind
            else max((b for b in group.choices if b <= min(bits, most[key])), default=min(group.choices))
            for key, group in groups.items()
        }
        feasible = nearest_feasible(prepared.resolver, wanted, fewer=True)
        if feasible is not None and feasible.bits != before:
            before = dict(feasible.bits)
            yield before


def logged_gains(settings: Mapping[str, Any]) -> dict[str, float]:
    """The expected gains that the header of a log records; none of earlier logs.

    Raises:
        LogError: the header was edited.
    """
    gains = settings.get("expected_gains", {})
    if not isinstance(gains, Mapping) or not all(
        isinstance(g, (int, float)) and not isinstance(g, bool) and g >= 0.0 for g in gains.values()
    ):
        raise LogError(f"expected_gains is {shortened(gains)} in the header of the log; it was edited")
    return {str(name): float(gain) for name, gain in gains.items()}


# ---------------------------------------------------------------- after the last
@dataclass(frozen=True, slots=True)
class CorrectedTrial:
    """A trial with the corrections of its layers that improve it.

    Args:
        trial: as it was searched.
        prepared: with the corrections, and the records of all that were tried.
        score: with the corrections, under the limits as the user gave them.
    """

    trial: Trial
    prepared: Prepared
    score: Score


#: Corrects the layers of a point.
Correct = Callable[[MeasuredPoint], MeasuredPoint]


class CorrectedTrials:
    """Corrects the layers of trials. `search.session` makes one when the trials are over. It keeps what `of` gave.

    Which corrections go together is tried at the first trial with few bits, and kept for all others with few.

    Args:
        scorer: of the search.
        report: called with a text at every trial.
    """

    def __init__(self, scorer: GoalScorer, report: Callable[[str], None]) -> None:
        self._goal, self._report = scorer.goal, report
        self._scorer = scorer.with_goal(scorer.goal.asked)
        self._known: dict[int, CorrectedTrial] = {}
        self._together: tuple[str, ...] | None = None

    def of(self, trial: Trial) -> CorrectedTrial:
        """A trial with its layers corrected."""
        if trial.index not in self._known:
            self._known[trial.index] = self.by(self._correct, trial)
        return self._known[trial.index]

    def by(self, correct: Correct, trial: Trial) -> CorrectedTrial:
        """A trial as a function corrects its layers, or as it was where that does not improve it, by the goal."""
        scorer = self._scorer
        prepared, evaluator = scorer.prepared, scorer.evaluator
        if not prepared.correction_names:
            return CorrectedTrial(trial, prepared, trial.score)
        point = MeasuredPoint(prepared, trial.bits, evaluator.measure(prepared.resolver(trial.bits)))
        corrected = correct(point)
        before, after = (self._score(each) for each in (point, corrected))
        if after.rank > before.rank:
            return CorrectedTrial(trial, corrected.prepared, after)
        return CorrectedTrial(trial, replace(prepared, passes=corrected.prepared.passes), before)

    def _score(self, point: MeasuredPoint) -> Score:
        """The score of a point. It misses a limit also where only the last quarter of the samples does, which gives no
        corrections; not by shares of classes, which few samples determine roughly."""
        scorer, plan, contributions = self._scorer, point.plan, point.measured.contributions
        evaluator = scorer.evaluator
        score = scorer.under_goal(plan, evaluator.concluded(plan, point.bits, point.measured))
        samples = evaluator.batches.samples
        losses = replace(scorer.goal, limits=tuple(x for x in scorer.goal.limits if self._is_of_losses(x)))
        if samples < 4 or not losses.limits:
            return score
        aside = {n: each[-(samples // 4) :] if len(each) == samples else each for n, each in contributions.items()}
        return replace(score, shortfall=max(score.shortfall, losses.shortfall(evaluator.summary(aside))))

    def _is_of_losses(self, limit: Limit) -> bool:
        """Whether a limit is on a measure of every sample that counts no classes."""
        measure = None if limit.is_cost else self._goal.measure_of(limit.figure)
        return measure is not None and measure.name in OBJECTIVES and not measure.counts_classes

    def _correct(self, point: MeasuredPoint) -> MeasuredPoint:
        together = self._together if point.has_few_bits else None
        corrected = correct_point(point, self._scorer.evaluator, together=together)
        if point.has_few_bits and together is None:
            passes = corrected.prepared.passes[len(point.prepared.passes) :]
            self._together = next((made.names for made in passes if made.kept), None)
        return corrected

    def best_within_limits(self, best: Trial, trials: Sequence[Trial]) -> Trial:
        """The best trial; where limits on measures were lowered by what corrections are expected to gain, the best with
        which the limits hold once it is corrected, or the one that comes nearest.

        Args:
            best: of the search.
        """
        candidates = self._candidates(trials) if any(self._goal.expected_gains.values()) else []
        if not candidates:
            return best
        low, high = 0, len(candidates)
        probe = next((i for i, trial in enumerate(candidates) if trial.score.accepted), high // 2)
        while low < high:
            self._report(f"correcting the layers of trial {candidates[probe].index}")
            if self.of(candidates[probe]).score.shortfall:
                low = probe + 1
            else:
                high = probe
            probe = (low + high) // 2
        return candidates[min(low, len(candidates) - 1)]

    def _candidates(self, trials: Sequence[Trial]) -> list[Trial]:
        """The trials that may be the best one once they are corrected, the best by the goal first; each next one is
        closer to the limits, and the last keeps them without corrections, if any does."""
        candidates, left = list[Trial](), float("inf")
        usable = [t for t in trials if t.score.runs and not t.score.dropped and t.same_as is None]
        for trial in sorted(usable, key=lambda t: (-t.score.value, -t.score.tie, t.index)):
            values = {**trial.results, **trial.score.costs}
            shortfall = self._goal.asked.shortfall(values)
            if not self._goal.of_costs.shortfall(values) and shortfall < left:
                candidates.append(trial)
                left = shortfall
        return candidates

    def spread(self, trials: Sequence[Trial], most: int | None) -> Iterator[CorrectedTrial]:
        """Correct trials of a front.

        Args:
            trials: by rising cost.
            most: how many are corrected, spread evenly over the front; all where it is None.
        """
        last = len(trials) - 1
        count = len(trials) if most is None else min(most, len(trials))
        chosen = sorted({round(i * last / max(1, count - 1)) for i in range(count)})
        for number, index in enumerate(chosen, 1):
            self._report(f"correcting the layers of point {number} of {len(chosen)} of the front")
            yield self._known.get(trials[index].index) or self.by(self._correct, trials[index])
