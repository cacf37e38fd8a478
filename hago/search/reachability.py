"""Limits that no point can keep: refused before a search where that is known, and reported after it otherwise; and the
warning about a cost that is minimized without any limit on the loss."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

from hago.cost import METRICS, plan_cost, prices_float
from hago.errors import HagoError, InfeasibleBits, warn
from hago.plan import Bits
from hago.plan.feasibility import nearest_feasible
from hago.search.goal import Goal
from hago.search.intervals import wilson_interval
from hago.search.objective import Objective
from hago.search.preparation import Prepared
from hago.search.safe_bits import safe_bits
from hago.search.scoring import GoalScorer
from hago.searchers import parse_searcher
from hago.serialization.text_table import counted
from hago.study import Score, Trial

#: The part of the squared error, or of another loss, that a point of fewer bits keeps. Seen: down to 1/35 of KL
#: divergence over 16 samples.
_CANCELLED: Final = 1e-3
#: The searchers whose result is a front.
FRONT_SEARCHERS: Final = ("pareto", "nsga2")


def warn_of_unlimited_loss(goal: Goal, searcher: Any) -> None:
    """Warn where a cost is minimized and no measure is limited, so that the cheapest point is the answer whatever it
    loses; not where the search is for a front, which has all trades."""
    name = parse_searcher(searcher)[0] if isinstance(searcher, str) else ""
    if goal.minimize is None or name in FRONT_SEARCHERS or any(not limit.is_cost for limit in goal.limits):
        return
    warn(
        f"{goal.minimize} is minimized and nothing limits the loss, so the cheapest strategy is the answer, however "
        "inaccurate; add a limit, keep='agreement >= 99 %' or with labels keep='accuracy >= float - 1 %' (--keep), or "
        "take searcher='pareto' for the front of all trades"
    )


def check_costs_reachable(goal: Goal, prepared: Prepared) -> None:
    """Refuse limits on costs that no point can keep, before anything is simulated.

    A cost is least at the fewest bits or at the most bits that accumulators hold. There are two exceptions, where only
    a search finds how little it can be: a roofline where nodes may be float, and fewest bits that are infeasible
    together.

    Raises:
        InfeasibleBits: which limit, and the nearest value that can be reached.
        HagoError: the hardware gives no figures for a cost.
    """
    if not goal.costs:
        return
    for name in goal.costs:
        if _may_be_float(prepared) and not prices_float(name, prepared.hardware):
            figures = " or ".join(sorted(METRICS[name].float_figures))
            raise HagoError(
                f"hardware {prepared.hardware.name!r} has no {figures} for float, so that nodes in float would add "
                f"nothing to {name!r}; add it to its float signatures, or search without search_topology "
                "(--no-search-topology)"
            )
    least = prepared.space.narrowest()
    fewest = nearest_feasible(prepared.resolver, least)
    ends = [plan_cost(plan) for plan in (*([fewest.plan] if fewest else []), prepared.resolver(safe_bits(prepared)))]
    goal.check(ends[0])
    for limit in (x for x in goal.limits if x.is_cost):
        nearest = min(cost[limit.figure] for cost in ends)
        least_total = METRICS[limit.figure].least
        if _may_be_float(prepared) and least_total is not None:
            # float nodes may be cheaper than any bits: a search finds how much
            floor = least_total(ends[0], prepared.hardware)
            if limit.shortfall(floor):
                raise InfeasibleBits(
                    f"{limit.quoted} cannot be met: the multiply-accumulates alone take {limit.amount(floor)} on the "
                    f"best signatures of {prepared.hardware.name}; the nearest known is {limit.amount(nearest)}, at "
                    "the fewest bits"
                    f"{limit.maybe_meant}"
                )
        elif fewest and fewest.bits == least and limit.shortfall(nearest):
            raise InfeasibleBits(
                f"{limit.quoted} cannot be met: at the fewest bits {limit.figure} is {limit.amount(nearest)}, the "
                f"nearest that can be reached on {prepared.hardware.name}; allow more, or fewer bits (min_bits in the "
                "hardware file)"
                f"{limit.maybe_meant}"
            )


def check_measures_reachable(goal: Goal, prepared: Prepared, start: Bits, scorer: GoalScorer) -> None:
    """Refuse limits on measures that the most bits miss by more than other points may gain by chance.

    Where the most bits overflow, or nodes may be float, only a search finds how much a measure can be.

    Args:
        start: the most bits that accumulators hold.
        scorer: measures the start; the search then does not measure it again.

    Raises:
        InfeasibleBits: which limit, and the nearest value that is known.
    """
    limits = [x for x in goal.limits if not x.is_cost]
    if not limits or _may_be_float(prepared) or dict(start) != prepared.space.widest():
        return
    first = scorer.first(start)
    if not first.runs:
        return
    for limit in limits:
        reached = float(first.results[limit.figure])
        by_chance = _by_chance(goal.measure_of(limit.figure), reached, int(first.results["samples"]))
        if goal.missed(limit, by_chance):
            raise InfeasibleBits(
                f"{limit.quoted} cannot be met: at the most bits {limit.figure} is {limit.amount(reached)}, the "
                "nearest known; ask for less, keep sensitive nodes float (keep_float), or try another estimator"
            )


def _may_be_float(prepared: Prepared) -> bool:
    return any(group.is_kind for group in prepared.space.groups.values())


def _by_chance(measure: Objective, reached: float, samples: int) -> float:
    """The most that a measure may be at a point of fewer bits than the one that reached this value: errors may cancel,
    though not to a thousandth of their square, and a share of classes may be at the end of its 95 % interval. Nothing
    is known of a plain number."""
    if measure.counts_classes:
        return wilson_interval(reached * samples, samples)[1]
    if measure.is_loss:
        return reached * _CANCELLED
    if measure.unit == "dB":
        return reached + 10.0 * math.log10(1.0 / _CANCELLED)
    return 1.0 - (1.0 - reached) * _CANCELLED if measure.unit == "share" else math.inf


def explain_missed_limits(goal: Goal, trials: Sequence[Trial], nearest: Trial, score: Score) -> str:
    """Why a search failed whose trials all miss a limit.

    Args:
        nearest: the trial that comes nearest.
        score: its score, with its layers corrected where they are.
    """
    figures = {**score.results, **score.costs}
    limits = [limit for limit in goal.limits if goal.missed(limit, float(figures[limit.figure]))]
    missed = "; ".join(f"{limit.quoted} is missed with {limit.amount(figures[limit.figure])}" for limit in limits)
    return (
        f"of {counted(len(trials), 'point')} tried, none keeps every limit; nearest is trial {nearest.index}: "
        f"{missed}. Ask for less, or give the search more trials"
    )
