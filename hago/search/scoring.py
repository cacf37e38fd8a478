"""Scores of points under a goal, measured in this process or by workers, or taken from the logs of earlier searches.

A point becomes a score in three steps, each an object that calls the next:

- `GoalScorer`, one per search: looks up known scores and costs, and applies the goal to what was measured;
- `PointScorer`, one per process and thread: resolves bits to a Plan, and measures less of it in a race;
- `Evaluator`, one per PointScorer: simulates the Plan over the data.

A Plan that `first` scored, or that a log of an earlier search holds, is not measured again. Equal Plans within a search
are found by `study.TrialCache`.
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass, replace
from types import MappingProxyType

from hago.cost import plan_cost
from hago.errors import HagoError, warn
from hago.plan import Bits
from hago.search.earlier_logs import ScoreCache
from hago.search.evaluate import Evaluator
from hago.search.goal import Goal
from hago.search.point_scorer import make_point_scorer
from hago.search.preparation import Prepared
from hago.search.racing import RaceOptions
from hago.search.workers import WorkerPool, Workers, worker_spec_of
from hago.study import Notice, PendingScore, Score, Submit


class GoalScorer:
    """The scorer of one search's points. `search.session` makes one, and the study calls it for every point; its
    PointScorer, or one of a worker, measures, and the goal is applied here.

    Args:
        cache_bytes: of each process; see Evaluator.
        race, seed: see `make_point_scorer`.
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
        self._cache_bytes, self._seed = cache_bytes, seed
        self._point_scorer = make_point_scorer(
            prepared.resolver,
            prepared.batches,
            goal.objective,
            also=goal.measures,
            cache_bytes=cache_bytes,
            race=race,
            seed=seed,
        )

    @property
    def evaluator(self) -> Evaluator:
        """The evaluator of this process, which measures Plans and counts what that took."""
        return self._point_scorer.evaluator

    def with_prepared(self, prepared: Prepared) -> GoalScorer:
        """A scorer with other thresholds, which shares the cache of simulated values."""
        other = copy(self)
        other.prepared, other._point_scorer = prepared, replace(self._point_scorer, resolver=prepared.resolver)
        return other

    def __call__(self, bits: Bits, rival: Bits | None = None) -> Score:
        """The score of a point, from this process."""
        known = self._known(bits)
        return self.under_goal(bits, self._point_scorer.score(bits, rival) if known is None else known)

    def first(self, bits: Bits) -> Score:
        """The score of a point before the first trial; the search then does not measure it again."""
        score = self._known(bits)
        if score is None:
            score = self._point_scorer.score(bits)
            self.known = {**self.known, score.plan_key: score}
        return self.under_goal(bits, score)

    def _known(self, bits: Bits) -> Score | None:
        """The score that an earlier search measured for an equal Plan."""
        known = self.known.get(self.prepared.resolver(bits).key) if self.known else None
        return None if known is None else replace(known, total_bits=sum(bits.values()))

    def under_goal(self, bits: Bits, score: Score) -> Score:
        """A measured score with the value and the shortfall that the goal gives it."""
        return self.goal.applied(score, plan_cost(self.prepared.resolver(bits)).figures)

    def remote_scoring(self, pool: WorkerPool | None, notice: Notice = warn) -> Submit | None:
        """The function that scores points on an executor; None without one."""
        if pool is None:
            return None
        spec = worker_spec_of(
            self.prepared,
            self.goal.objective,
            also=self.goal.measures,
            cache_bytes=self._cache_bytes,
            race=self.race,
            seed=self._seed,
        )
        workers = Workers(pool, spec, self._point_scorer.score, notice)

        def start(bits: Bits, rival: Bits | None = None) -> _UnderGoal:
            known = self._known(bits)
            return _UnderGoal(self, bits, workers(bits, rival) if known is None else _Ready(known))

        return start


@dataclass(frozen=True, slots=True)
class _Ready:
    """A pending score that is there already."""

    score: Score

    def result(self) -> Score:
        return self.score

    def cancel(self) -> object:
        return None


@dataclass(frozen=True, slots=True)
class _UnderGoal:
    """A pending score to which the goal is applied when it comes."""

    scorer: GoalScorer
    bits: Bits
    pending: PendingScore

    def result(self) -> Score:
        return self.scorer.under_goal(self.bits, self.pending.result())

    def cancel(self) -> object:
        return self.pending.cancel()
