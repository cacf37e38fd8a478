"""The searcher of a search, and the point where it starts.

A searcher is chosen by the options and the goal (`choose_searcher`). What it needs before its first trial, e.g. refined
thresholds or a Surrogate, is made by `find_starting_point`, and `build_searcher` makes the object that the study asks.
`search.session` calls these in this order; `search.replay` makes a log's starting point again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

from hago.cost import plan_cost
from hago.errors import HagoError, warn
from hago.graph import takes_any_batch
from hago.plan.feasibility import widest_feasible
from hago.search.choice_refinement import refine_every_choice
from hago.search.confirmation import Confirmation
from hago.search.effort import Effort
from hago.search.goal import FRONT_COST, Goal
from hago.search.gradients import GRADIENT_FORWARDS
from hago.search.guidance import make_surrogate
from hago.search.measured_point import first_point_if_any
from hago.search.output_thresholds import choose_thresholds
from hago.search.point_refinement import COMPUTED_CHOICES, refine_at_point
from hago.search.preparation import Prepared, QuantizationOptions
from hago.search.proposed_thresholds import RefinementTask
from hago.search.safe_bits import feeds_behind, safe_bits
from hago.search.scoring import GoalScorer
from hago.search.sensitivity import sensitivity_from
from hago.search.starting_point import StartingPoint
from hago.searchers import (
    AUTO,
    SEARCHERS,
    Refines,
    SearcherEntry,
    feeds_of,
    make_searcher,
    parse_searcher,
)
from hago.study import Searcher

#: Refining thresholds may cost one forward for every so many choices in the space ...
CHOICES_A_FORWARD: Final = 14
#: ... but at least so many forwards, and at most `MAX_FORWARDS` of `hago.search.confirmation`.
LEAST_REFINING_FORWARDS: Final = 6.0


def costs_in_use(searcher: Any, goal: Goal) -> tuple[str, ...]:
    """The costs that matter to a search; a front is over the first of them."""
    if not isinstance(searcher, str):
        return goal.costs
    name, given = parse_searcher(searcher)
    default = FRONT_COST if name == "pareto" and not goal.costs else ""
    named = str(given.get("cost", default))
    return tuple(dict.fromkeys([*([named] if named else []), *goal.costs]))


def choose_searcher(
    searcher: str | Searcher | Any, scorer: GoalScorer, quantization: QuantizationOptions, effort: Effort
) -> tuple[Any, Refines]:
    """The searcher, `auto` being decided by the effort and the goal, and which thresholds are refined before it begins:
    none where the user chose them, or chose how they are estimated, or the program fixes the size of a batch, or the
    effort does without.

    Raises:
        HagoError: no searcher has this name.
    """
    prepared = scorer.prepared
    if searcher == AUTO:
        searcher = effort.searcher_for(_asks_for_fewer_bits(prepared, scorer.goal))
    entry, objective = _entry_of(searcher), scorer.goal.objective
    if entry is None:
        return searcher, ""
    if entry.guided and objective.curvature is None:
        warn(
            f"nothing is known of how objective {objective.name!r} depends on single outputs, so the search is "
            "guided by the squared error of the outputs instead; its values choose among what is evaluated. Searchers "
            "without a guide, such as greedy, go by it alone"
        )
    chosen = quantization.estimator is not None or prepared.calibration.given.gives_ranges
    # refinement cuts and joins batches; what may be corrected takes any
    refines = (
        effort.refines
        and not chosen
        and (prepared.correction_names or takes_any_batch(prepared.graph, prepared.hardware.known_ops))
    )
    return searcher, entry.refines if refines else ""


def _entry_of(searcher: Any) -> SearcherEntry | None:
    """The entry of a searcher of hago's own, given by name."""
    return SEARCHERS.get(parse_searcher(searcher)[0]) if isinstance(searcher, str) else None


def _asks_for_fewer_bits(prepared: Prepared, goal: Goal) -> bool:
    """Whether a goal asks for fewer bits than the most: it minimizes a cost, or limits one below theirs."""
    if goal.minimize is not None:
        return True
    limits = [x for x in goal.limits if x.is_cost]
    if not limits:
        return False
    figures = plan_cost(prepared.resolver(safe_bits(prepared))).figures
    return any(x.shortfall(float(figures.get(x.figure, math.inf))) > 0.0 for x in limits)


def find_starting_point(
    searcher: str | Searcher | Any,
    refines: Refines,
    scorer: GoalScorer,
    *,
    costs: Sequence[str],
    choices: int,
    seed: int,
    confirmation: Confirmation | None,
) -> StartingPoint:
    """The thresholds, the surrogate and the bits that the trials begin with.

    Args:
        searcher, refines: of `choose_searcher`.
        choices: how many the space has, redundant ones included.
        confirmation: the samples that are kept aside; None for logs of version 1.
    """
    prepared, goal, metric = scorer.prepared, scorer.goal, next(iter(costs), "")
    if not refines:
        entry, bits = _entry_of(searcher), safe_bits(prepared)
        if entry is None or not entry.guided:
            return StartingPoint(prepared, None, bits)
        surrogate = make_surrogate(prepared, goal, bits, seed, metric)
        return StartingPoint(prepared, surrogate, bits, GRADIENT_FORWARDS)
    if confirmation is not None and confirmation.takes_one_shot:
        start = _start_of_one_shot(scorer, seed, confirmation)
        if start is not None:
            return start
        confirmation = replace(confirmation, takes_one_shot=False)
    task = RefinementTask.of(prepared, goal, metric, scorer.evaluator, seed)
    if refines == "at_point":
        max_forwards = max(LEAST_REFINING_FORWARDS, choices / CHOICES_A_FORWARD)
        if confirmation is not None:
            max_forwards = min(max_forwards, confirmation.max_forwards)
        return refine_at_point(task, max_forwards, confirmation)
    within_limits = refines == "every_choice_within_limits"
    return refine_every_choice(task, start_within_limits=within_limits, confirmation=confirmation)


def _start_of_one_shot(scorer: GoalScorer, seed: int, confirmation: Confirmation) -> StartingPoint | None:
    """The thresholds and bits of one shot, before its layers are corrected, with a surrogate made from the same
    gradients; None where accumulators overflow at every width."""
    prepared, goal, evaluator = scorer.prepared, scorer.goal, scorer.evaluator
    most = widest_feasible(prepared.resolver).bits
    first = first_point_if_any(prepared, evaluator)
    if first is None:
        return None
    computed = COMPUTED_CHOICES if first.bits == most else None
    chosen = choose_thresholds(first, evaluator, losses=computed, seed=seed)
    point, bits = chosen.point.prepared, chosen.point.bits
    if chosen.gradients is None:
        surrogate, forwards = make_surrogate(point, goal, bits, seed), GRADIENT_FORWARDS
    else:
        sensitivity = sensitivity_from(chosen.gradients, point, goal.objective, computed)
        surrogate = make_surrogate(point, goal, bits, seed, sensitivity=sensitivity)
        forwards = GRADIENT_FORWARDS * chosen.gradients.samples / evaluator.batches.samples
    record = {**confirmation.record, **chosen.confirmed}
    return StartingPoint(
        replace(point, refinement_record=record),
        replace(surrogate, most=bits),
        bits,
        forwards,
        simulations=1.0 + chosen.simulated,
    )


def build_searcher(searcher: str | Searcher | Any, start: StartingPoint, seed: int) -> Searcher:
    """The searcher that a name, a function of (space, start, seed), or itself stands for.

    Raises:
        HagoError: it is something else, or takes other options.
    """
    space = start.prepared.space
    if isinstance(searcher, str):
        name, given = parse_searcher(searcher)
        feeds = {**feeds_of(space), **feeds_behind(start.prepared)}
        return make_searcher(name, space, start.bits, seed, options=given, surrogate=start.surrogate, feeds=feeds)
    if hasattr(searcher, "ask") and hasattr(searcher, "tell") and not isinstance(searcher, type):
        return searcher
    if callable(searcher):
        made: Any = searcher(space, start.bits, seed)
        if hasattr(made, "ask") and hasattr(made, "tell"):
            return made  # type: ignore[no-any-return]
        raise HagoError(f"the function given as searcher returned {made!r}; expected an object with ask and tell")
    raise HagoError(
        f"searcher is a {type(searcher).__name__}; expected a name, an object with ask and tell, or a function"
    )
