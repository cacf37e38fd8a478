"""Scoring: points to Scores under a goal, in this process or by workers."""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass, replace
from types import MappingProxyType

from hago.costing import plan_cost
from hago.errors import HagoError, warn
from hago.prepare import Prepared
from hago.search.log import Notice
from hago.search.scorer import Pending, Submit
from hago.search.searcher import Score
from hago.space import Bits
from hago.trials.bench import make_bench, work_of
from hago.trials.executors import Hands
from hago.trials.goal import Goal
from hago.trials.known import Known
from hago.trials.racing import Race
from hago.trials.workers import Workers


class Scoring:
    """Scores the points of one search; a worker measures, the goal is applied here.

    Args:
        cache_bytes: see Evaluator; of each process.
        race, seed: see make_bench.
        known: what earlier searches measured, by the key of the Plan; it is not measured again.

    Raises:
        HagoError: a race without losses by sample, or for a cost.
    """

    def __init__(
        self,
        goal: Goal,
        prepared: Prepared,
        cache_bytes: int | None = None,
        race: Race | None = None,
        seed: int = 0,
        known: Known = MappingProxyType({}),
    ) -> None:
        if race is not None and goal.minimize is not None:
            raise HagoError("a race compares the objective sample by sample; it cannot be raced for minimize=...")
        self.goal, self.prepared, self.race, self.known = goal, prepared, race, known
        self._more = (cache_bytes, race, seed)
        self.bench = make_bench(prepared.resolver, prepared.batches, goal.objective, goal.measures, *self._more)

    def of(self, prepared: Prepared) -> Scoring:
        """The same with other thresholds; what is kept of simulations is shared."""
        other = copy(self)
        other.prepared, other.bench = prepared, replace(self.bench, resolver=prepared.resolver)
        return other

    def __call__(self, bits: Bits, rival: Bits | None = None) -> Score:
        """The score of a point, from this process."""
        found = self._known(bits)
        return self.judged(bits, self.bench.score(bits, rival) if found is None else found)

    def first(self, bits: Bits) -> Score:
        """The score of a point that is measured before the search, which then does not measure it again."""
        score = self._known(bits)
        if score is None:
            score = self.bench.score(bits)
            self.known = {**self.known, score.plan_key: score}
        return self.judged(bits, score)

    def _known(self, bits: Bits) -> Score | None:
        """What an earlier search measured of an equal Plan."""
        found = self.known.get(self.prepared.resolver(bits).key) if self.known else None
        return None if found is None else replace(found, total_bits=sum(bits.values()))

    def judged(self, bits: Bits, score: Score) -> Score:
        """A measured score as the goal has it."""
        return self.goal.judged(score, plan_cost(self.prepared.resolver(bits)).figures)

    def submit(self, hands: Hands | None, notice: Notice = warn) -> Submit | None:
        """What scores points on an executor; None without one."""
        if hands is None:
            return None
        work = work_of(self.prepared, self.goal.objective, self.goal.measures, *self._more)
        workers = Workers(hands, work, self.bench.score, notice)

        def start(bits: Bits, rival: Bits | None = None) -> _Judged:
            found = self._known(bits)
            return _Judged(self, bits, workers(bits, rival) if found is None else _There(found))

        return start


@dataclass(frozen=True, slots=True)
class _There:
    """A score that nobody needs to wait for."""

    score: Score

    def result(self) -> Score:
        return self.score

    def cancel(self) -> object:
        return None


@dataclass(frozen=True, slots=True)
class _Judged:
    scoring: Scoring
    bits: Bits
    pending: Pending

    def result(self) -> Score:
        return self.scoring.judged(self.bits, self.pending.result())

    def cancel(self) -> object:
        return self.pending.cancel()
