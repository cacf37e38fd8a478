"""Where a search within limits on measures begins, and how far its trials may miss them.

Trials are measured before their layers are corrected, by which they gain some dB. So a search may go below its limits
by as much: `start_at_limits` finds the first point, and `expected_gains` measures the gain there.
`hago.search.corrected_trials` then looks for the trial at which the limits hold in fact.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Final

from hago.errors import InfeasibleBits
from hago.plan import Bits
from hago.plan.feasibility import nearest_feasible, plan_or_refusal
from hago.search.correcting import OF_LAYERS, correct_point
from hago.search.evaluate import Measurement
from hago.search.measured_point import MeasuredPoint
from hago.search.preparation import Prepared
from hago.search.scoring import GoalScorer
from hago.search.starting_point import StartingPoint
from hago.searchers import Knapsack, Surrogate

#: Steps of the cost between the ends of the expected front, among which the point at the limits is found.
SOLUTIONS: Final = 16
#: What budgets count for correcting the layers of a point, in simulations.
SIMULATIONS: Final = 2.0


def start_at_limits(start: StartingPoint, scorer: GoalScorer) -> StartingPoint:
    """Where a cost is minimized by a guided search, the cheapest expected point that keeps the limits on measures is
    the first one, so that the search returns nothing worse; elsewhere the start as it is.

    Args:
        scorer: with the thresholds of the start, and limits as the user gave them.
    """
    if start.surrogate is None or not start.surrogate.minimize or not corrects_within_limits(scorer):
        return start
    tried = list[Bits]()
    bits = _last_that_keeps(scorer, _solutions(start.prepared, start.surrogate), tried.append)
    simulations = start.simulations + len(tried) + SIMULATIONS
    if bits is None:
        return replace(start, simulations=simulations)
    surrogate = replace(start.surrogate, most=start.most_bits)
    return replace(start, bits=bits, surrogate=surrogate, simulations=simulations)


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
    corrected, samples = correct_point(point, evaluator), evaluator.batches.samples

    def gain(figure: str, last: int) -> float:
        """On the last samples."""

        def value(measured: Measurement) -> float:
            parts = {n: c[-last:] if len(c) == samples else c for n, c in measured.contributions.items()}
            return float(evaluator.summary(parts)[figure])

        return value(corrected.measured) - value(point.measured)

    figures = sorted({limit.figure for limit in goal.limits if not limit.is_cost})
    # the last quarter gave no corrections
    return {name: max(0.0, min(gain(name, samples), gain(name, max(1, samples // 4)))) for name in figures}


def corrects_within_limits(scorer: GoalScorer) -> bool:
    """Whether there are limits on measures, and corrections of layers by which trials may gain."""
    corrects = not set(OF_LAYERS).isdisjoint(scorer.prepared.correction_names)
    return corrects and any(not limit.is_cost for limit in scorer.goal.limits)


def _last_that_keeps(
    scorer: GoalScorer, points: Sequence[Bits], on_try: Callable[[Bits], None] = lambda bits: None
) -> Bits | None:
    """The last of these points, each cheaper than the one before it, that keeps the limits; None if the first does not.
    Bisection, since cheaper points lose more.

    Args:
        on_try: called with every point that is measured.
    """

    def misses(bits: Bits) -> bool:
        on_try(bits)
        return not scorer.first(bits).accepted

    kept = bisect.bisect_left(points, True, key=misses)
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
