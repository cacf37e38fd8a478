"""Limits that are relative to the widest bits or to the float model, as plain numbers."""

from __future__ import annotations

from dataclasses import replace

from hago.cost import plan_cost
from hago.plan.feasibility import widest_feasible
from hago.search.evaluate import Evaluator
from hago.search.goal import Goal
from hago.search.preparation import Prepared


def resolve_limits(goal: Goal, prepared: Prepared, evaluator: Evaluator) -> Goal:
    """The goal with plain numbers in place of limits that are relative.

    Args:
        prepared: with every choice of bits, whose widest feasible ones give the costs that limits are a part of.
        evaluator: of the search's data, on which the float model is measured; it reports the goal's measures.

    Raises:
        HagoError: the hardware gives no figures for a cost.
    """
    relative = [limit for limit in goal.limits if limit.relative is not None]
    bases: dict[str, float] = {}
    if any(limit.is_cost for limit in relative):
        widest = plan_cost(widest_feasible(prepared.resolver).plan)
        bases |= {limit.figure: float(widest[limit.figure]) for limit in relative if limit.is_cost}
    if not all(limit.is_cost for limit in relative):
        figures = evaluator.summary(evaluator.float_contributions())
        bases |= {limit.figure: float(figures[limit.figure]) for limit in relative if not limit.is_cost}
    return replace(goal, limits=tuple(x.resolved(bases.get(x.figure, 0.0)) for x in goal.limits))
