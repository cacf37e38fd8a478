"""Scores of points under a goal, measured in this process or by workers, or taken from the logs of earlier searches.

A `GoalScorer`, one per search, makes a point a score in four steps: it resolves the bits to a Plan, looks up what an
earlier search measured, lets its `Evaluator` measure the Plan over the data (in a race, over less of it), and applies
the goal. With workers, the third step is theirs: see `search.workers.remote_scoring`.

A Plan that `first` scored, or that a log of an earlier search holds, is not measured again. Equal Plans within a search
are found by `study.TrialCache`.
"""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from types import MappingProxyType

from hago.cost import plan_cost
from hago.errors import HagoError
from hago.plan import Bits, Plan
from hago.search.earlier_logs import ScoreCache
from hago.search.goal import Goal
from hago.search.preparation import Prepared
from hago.search.racing import RaceOptions, make_evaluator
from hago.study import Score


class GoalScorer:
    """The scorer of one search's points. `search.session` makes one, and the study calls it for every point.

    Args:
        cache_bytes: of each process; see Evaluator.
        race, seed: see `make_evaluator`.
        known: the scores of earlier searches, by the key of the Plan, which are not measured again.

    Raises:
        HagoError: a race without losses by sample, or for a cost.
    """

    def __init__(
        self,
        goal: Goal,
        prepared: Prepared,
        *,
        cache_bytes: int | None = None,
        race: RaceOptions | None = None,
        seed: int = 0,
        known: ScoreCache = MappingProxyType({}),
    ) -> None:
        if race is not None and goal.minimize is not None:
            raise HagoError("a race compares the objective sample by sample; it cannot be raced for minimize=...")
        self.goal, self.prepared, self.race, self.known = goal, prepared, race, known
        self.cache_bytes, self.seed = cache_bytes, seed
        self.evaluator = make_evaluator(
            prepared.graph,
            prepared.batches,
            goal.objective,
            prepared.resolver.ops,
            race=race,
            seed=seed,
            also=goal.measures,
            cache_bytes=cache_bytes,
        )

    def with_prepared(self, prepared: Prepared) -> GoalScorer:
        """A scorer with other thresholds, which shares the cache of simulated values."""
        other = copy(self)
        other.prepared = prepared
        return other

    def with_goal(self, goal: Goal) -> GoalScorer:
        """A scorer with other numbers in its limits, which shares the cache of simulated values."""
        other = copy(self)
        other.goal = goal
        return other

    def unobserved(self) -> GoalScorer:
        """A scorer whose batches call nothing, which shares the cache of simulated values."""
        other = copy(self)
        other.prepared = self.prepared.unobserved()
        other.evaluator = copy(self.evaluator)
        other.evaluator.batches = self.evaluator.batches.observed(None)
        return other

    def __call__(self, bits: Bits, rival: Bits | None = None) -> Score:
        """The score of a point, from this process.

        Args:
            rival: in a race, the best point so far.

        Raises:
            InfeasibleBits: no signature holds the bits.
        """
        plan = self.prepared.resolver(bits)
        score = self.known_score(plan, bits)
        if score is None:
            score = self.evaluator.score(plan, bits, None if rival is None else self.prepared.resolver(rival))
        return self.under_goal(plan, score)

    def first(self, bits: Bits) -> Score:
        """The score of a point before the first trial; the search then does not measure it again."""
        plan = self.prepared.resolver(bits)
        score = self.known_score(plan, bits)
        if score is None:
            score = self.evaluator.score(plan, bits)
            self.known = {**self.known, score.plan_key: score}
        return self.under_goal(plan, score)

    def known_score(self, plan: Plan, bits: Bits) -> Score | None:
        """The score that an earlier search measured for an equal Plan."""
        known = self.known.get(plan.key) if self.known else None
        return None if known is None else replace(known, total_bits=sum(bits.values()))

    def under_goal(self, plan: Plan, score: Score) -> Score:
        """A measured score with the value and the shortfall that the goal gives it."""
        return self.goal.applied(score, plan_cost(plan).figures)
