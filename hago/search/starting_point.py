"""The point where the trials of a search begin, and the integer program that finds it under limits on costs."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from hago.cost import plan_cost
from hago.errors import InfeasibleBits
from hago.plan import Bits, Space
from hago.plan.feasibility import nearest_feasible, plan_or_refusal
from hago.search.goal import Goal
from hago.search.preparation import Prepared
from hago.searchers import Knapsack, Surrogate


@dataclass(frozen=True, slots=True)
class StartingPoint:
    """Where the trials of a search begin. The steps before the first trial make it.

    Args:
        prepared: with the thresholds that points are scored with.
        surrogate: the expected losses and costs; None where the searcher does without.
        bits: the first point; with a surrogate, the best expected one that keeps the limits on costs.
        gradient_forwards: the cost of gradients, in passes of the float model over the data.
        simulations: number of Plans that were simulated.
    """

    prepared: Prepared
    surrogate: Surrogate | None
    bits: Bits
    gradient_forwards: float = 0.0
    simulations: float = 0.0

    @property
    def most_bits(self) -> Bits:
        """The most bits that accumulators are known to hold."""
        return (self.surrogate and self.surrogate.most) or self.bits


def bits_within_limits(prepared: Prepared, goal: Goal, surrogate: Surrogate, start: Bits) -> dict[str, int]:
    """The best expected point that keeps the limits on costs, no group having more bits than at the start: the solution
    of an integer program over the surrogate's tables, and from there the steps that lose least by what they save."""
    point = dict(start)
    limits = [limit for limit in goal.limits if limit.is_cost]
    if not limits:
        return point
    groups = prepared.space.groups.items()
    space = Space({k: replace(g, choices=tuple(b for b in g.choices if b <= start[k])) for k, g in groups})
    if surrogate.limit is not None:
        solved = Knapsack(space, surrogate).solve(surrogate.limit)
        feasible = None if solved is None else nearest_feasible(prepared.resolver, solved.bits, fewer=True)
        point = point if feasible is None else feasible.bits

    def shortfall(bits: Bits) -> float:
        plan = plan_or_refusal(prepared.resolver, bits)
        if isinstance(plan, InfeasibleBits):
            return math.inf
        figures = plan_cost(plan).figures
        return sum(limit.shortfall(float(figures[limit.figure])) for limit in limits)

    left = shortfall(point)
    while left > 0.0:
        loss, steps = surrogate.loss(point), []
        for key, group in space.groups.items():
            fewer = [b for b in group.choices if b < point[key]]
            if fewer and not group.is_kind:  # a kind chooses between integers and float, not bits
                lowered = {**point, key: max(fewer)}
                saved = left - shortfall(lowered)
                if saved > 0.0:
                    steps.append(((surrogate.loss(lowered) - loss) / saved, key, lowered))
        if not steps:
            break
        point = min(steps, key=lambda step: step[:2])[2]
        left = shortfall(point)
    return point
