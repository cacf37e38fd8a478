"""What a search begins with: its searcher, the thresholds that its points are scored with, and what that took."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from hago.costing import plan_cost
from hago.errors import HagoError, warn
from hago.objective import OBJECTIVES
from hago.prepare import Prepared
from hago.search.guide import Guide
from hago.search.searcher import Searcher
from hago.search.searchers import AUTO, SEARCHERS, Refines, make_searcher, parse_searcher, searcher_for
from hago.searching.confirmation import Confirmation
from hago.searching.guidance import DEFAULT_COST, make_guide
from hago.searching.reachable import check_reachable
from hago.searching.refined_choices import refined_choices
from hago.searching.refinement import PASS, Refined, refined
from hago.space import Bits, Space
from hago.trials.evaluate import safe_start
from hago.trials.goal import Goal
from hago.trials.scoring import Scoring

#: Refined thresholds may take one forward for so many choices that the space has, and so many in any case.
CHOICES_A_FORWARD: Final = 14
LEAST: Final = 6.0


@dataclass(frozen=True, slots=True)
class Begun:
    """A search before its first trial.

    Args:
        searcher: knows the space, and where to start.
        scored: scores its points, with the thresholds that were found.
        gradients, simulated: what it took, in forwards: passes for gradients, and simulations.
        confirmation: on which samples what it proposes is to be confirmed; None where nothing is proposed but bits.
    """

    searcher: Searcher
    scored: Scoring
    gradients: float = 0.0
    simulated: float = 0.0
    confirmation: Confirmation | None = None


def begin(
    scored: Scoring,
    named: str | Searcher | Any,
    costs: Sequence[str],
    whole: int,
    seed: int,
    chosen: bool,
    keeps_aside: bool = True,
) -> Begun:
    """What a search begins with.

    Args:
        named: the searcher, as a user gives it.
        costs: those in use.
        whole: how many choices there are.
        chosen: whether the user chose the thresholds, or how to estimate them.
        keeps_aside: whether refined thresholds are confirmed on samples that are kept aside.

    Raises:
        InfeasibleBits: no point keeps the limits.
        HagoError: no such searcher, or options that it does not take.
    """
    prepared, goal, metric = scored.prepared, scored.goal, next(iter(costs), "")
    start: Bits = safe_start(prepared.resolver, prepared.calibration.peaks)
    if named == AUTO:
        named = searcher_for(_limited(prepared, goal, start))
    entry = SEARCHERS.get(parse_searcher(named)[0]) if isinstance(named, str) else None
    if entry is not None and entry.guided and OBJECTIVES.get(goal.objective.name) is not goal.objective:
        warn(
            f"nothing is known of how objective {goal.objective.name!r} depends on single outputs, so the search is "
            "guided by the squared error of the outputs instead; its values choose among what is evaluated. Searchers "
            "without a guide (greedy, annealing, random) go by it alone"
        )
    if entry is None or not entry.refined or chosen:
        check_reachable(goal, prepared, start, scored.first)
        guided = entry is not None and entry.guided
        guide = make_guide(prepared, goal, start, seed, metric) if guided else None
        return Begun(_searcher(named, prepared.space, start, seed, guide), scored, PASS if guided else 0.0)
    check_reachable(goal.of_costs, prepared, start, scored.first)
    confirmation = Confirmation.of([b.size for b in scored.bench.evaluator.batches]) if keeps_aside else None
    found = refined_as(entry.refined, scored, metric, whole, seed, confirmation)
    scored, prepared = scored.of(found.prepared), found.prepared
    check_reachable(goal, prepared, found.guide.most or start, scored.first)
    searcher = _searcher(named, prepared.space, found.start, seed, found.guide)
    return Begun(searcher, scored, found.forwards, found.simulated, confirmation)


def _limited(prepared: Prepared, goal: Goal, start: Bits) -> bool:
    """Whether a goal asks for fewer bits than the most: it makes a cost least, or limits one below theirs."""
    if goal.minimize is not None:
        return True
    limits = [x for x in goal.limits if x.is_cost]
    if not limits:
        return False
    figures = plan_cost(prepared.resolver(start)).figures
    return any(x.shortfall(float(figures.get(x.figure, math.inf))) > 0.0 for x in limits)


def costs_in_use(searcher: Any, goal: Goal) -> tuple[str, ...]:
    """The costs that matter, the one that a front would be over first."""
    if not isinstance(searcher, str):
        return goal.costs
    name, given = parse_searcher(searcher)
    default = DEFAULT_COST if name == "pareto" and not goal.costs else ""
    named = str(given.get("cost", default))
    return tuple(dict.fromkeys([*([named] if named else []), *goal.costs]))


def refined_as(
    which: Refines, scored: Scoring, metric: str, whole: int, seed: int, confirmation: Confirmation | None
) -> Refined:
    """What a search whose thresholds are refined begins with.

    Args:
        which: see SearcherEntry.
        metric: the first of the costs in use, if any.
        whole: how many choices there are.
        confirmation: what is kept aside; None for what logs of version 1 did.
    """
    evaluator = scored.bench.evaluator
    if which in ("choices", "within"):
        within = which == "within"
        how = (scored.prepared, scored.goal, metric, seed)
        return refined_choices(*how, evaluator=evaluator, within=within, confirmation=confirmation)
    most = max(LEAST, whole / CHOICES_A_FORWARD)
    return refined(scored.prepared, scored.goal, metric, evaluator, most, seed, confirmation)


def _searcher(searcher: Any, space: Space, start: Bits, seed: int, guide: Guide | None) -> Searcher:
    if isinstance(searcher, str):
        name, given = parse_searcher(searcher)
        return make_searcher(name, space, start, seed, options=given, guide=guide)
    if hasattr(searcher, "ask") and hasattr(searcher, "tell") and not isinstance(searcher, type):
        return searcher  # type: ignore[no-any-return]
    if callable(searcher):
        return searcher(space, start, seed)  # type: ignore[no-any-return]
    raise HagoError(
        f"searcher is a {type(searcher).__name__}; expected a name, an object with ask and tell, or a function"
    )
