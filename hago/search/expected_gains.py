"""Where a search within limits on measures begins, and how far its trials may miss them.

Trials are measured before their layers are corrected, by which they gain some dB. So a search may go below its limits
by as much: `start_within_limits` finds a point at the limits, and measures the gain there.
`hago.search.corrected_trials` then looks for the trial at which the limits hold in fact.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Final

from hago.plan import Bits
from hago.plan.feasibility import nearest_feasible
from hago.search.correcting import OF_LAYERS, correct_point
from hago.search.measured_point import MeasuredPoint
from hago.search.preparation import Prepared
from hago.search.scoring import GoalScorer
from hago.search.starting_point import StartingPoint
from hago.searchers import Knapsack, Surrogate

#: Steps of the cost between the ends of the expected front, among which the point at the limits is found.
SOLUTIONS: Final = 16
#: What budgets count for correcting the layers of a point, in simulations.
SIMULATIONS: Final = 2.0


def corrects_within_limits(scorer: GoalScorer) -> bool:
    """Whether there are limits on measures, and corrections of layers by which trials may gain."""
    corrects = not set(OF_LAYERS).isdisjoint(scorer.prepared.correction_names)
    return corrects and any(not limit.is_cost for limit in scorer.goal.limits)


def start_within_limits(
    start: StartingPoint, scorer: GoalScorer, gains: Mapping[str, float] | None = None
) -> tuple[StartingPoint, Mapping[str, float]]:
    """Where a search begins whose trials gain by corrections later, and by figure of a limit on a measure, how much
    correcting the layers gains there.

    Where a cost is minimized, the point is the cheapest that keeps the limits: of a guided search, among solutions of
    the integer program over expected losses, and it is the first trial, so that the search returns nothing worse; else
    among points with the same bits everywhere. Points of fewer bits gain more, so trials that keep the lowered limits
    mostly keep the limits once they are corrected.

    Args:
        scorer: with the thresholds of the start, and limits as the user gave them.
        gains: of the log that is continued; measured where there is none.
    """
    bits, tried, surrogate = start.bits, 0, start.surrogate
    if scorer.goal.minimize is not None:
        points = _uniform_points(start) if surrogate is None else _solutions(start.prepared, surrogate)
        found, tried = _last_that_keeps(scorer, points)
        bits = bits if found is None else found
    if gains is None:
        measured = scorer.evaluator.measure(start.prepared.resolver(bits))
        gains = _gains(MeasuredPoint(start.prepared, bits, measured), scorer)
    if surrogate is not None and bits is not start.bits:
        start = replace(start, bits=bits, surrogate=replace(surrogate, most=start.most_bits))
    return replace(start, simulations=start.simulations + tried + SIMULATIONS), gains


def _gains(point: MeasuredPoint, scorer: GoalScorer) -> dict[str, float]:
    """What correcting the layers of a point gains in every limited measure, on all samples or, where that is less, on
    the last quarter, which gives no corrections."""
    evaluator = scorer.evaluator
    measured = (point.measured, correct_point(point, evaluator).measured)
    sets = [
        [evaluator.summary(each.contributions) for each in measured],
        [evaluator.summary_of_last(each) for each in measured],
    ]
    figures = sorted({limit.figure for limit in scorer.goal.limits if not limit.is_cost})
    return {name: max(0.0, min(float(after[name]) - float(before[name]) for before, after in sets)) for name in figures}


#: Makes a point of a number, from 0, each cheaper than the one before it; None where none is feasible.
Points = Sequence[Callable[[], Bits | None]]


def _last_that_keeps(scorer: GoalScorer, points: Points) -> tuple[Bits | None, int]:
    """The last of these points that keeps the limits, None if the first does not, and how many were measured.
    Bisection, since cheaper points lose more."""
    kept, tried = None, 0
    low, high = 0, len(points)
    while low < high:
        middle = (low + high) // 2
        bits = points[middle]()
        tried += bits is not None
        if bits is not None and scorer.first(bits).accepted:
            kept, low = bits, middle + 1
        else:
            high = middle
    return kept, tried


def _solutions(prepared: Prepared, surrogate: Surrogate) -> Points:
    """Solutions of the integer program over expected losses, by falling cost."""
    program = Knapsack(prepared.space, surrogate)
    ends = program.range

    def solution(limit: float) -> Bits | None:
        solved = program.solve(limit)
        feasible = None if solved is None else nearest_feasible(prepared.resolver, solved.bits, fewer=True)
        return None if feasible is None else feasible.bits

    if ends is None:
        return []
    least, most = ends
    costs = [most + (least - most) * number / SOLUTIONS for number in range(SOLUTIONS + 1)]
    return [partial(solution, cost + 1e-9 * abs(least)) for cost in costs]


def _uniform_points(start: StartingPoint) -> Points:
    """Points with the same bits everywhere as far as the space has them, from the most bits down."""
    groups, most = start.prepared.space.groups, start.most_bits

    def point(bits: int) -> Bits | None:
        wanted = {
            key: most[key]
            if group.is_kind
            else max((b for b in group.choices if b <= min(bits, most[key])), default=min(group.choices))
            for key, group in groups.items()
        }
        feasible = nearest_feasible(start.prepared.resolver, wanted, fewer=True)
        return None if feasible is None else feasible.bits

    known = {b for group in groups.values() if not group.is_kind for b in group.choices}
    return [partial(point, bits) for bits in sorted(known, reverse=True)]
