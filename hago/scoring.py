"""Scoring: points to Scores under a goal, in this process or by workers."""

from __future__ import annotations

from dataclasses import dataclass

from hago.bench import Bench, work_of
from hago.costing import plan_cost
from hago.evaluate import Evaluator
from hago.executors import Hands
from hago.goal import Goal
from hago.prepare import Prepared
from hago.search.log import Notice, log_notice
from hago.search.scorer import Pending, Submit
from hago.search.searcher import Score
from hago.space import Bits
from hago.workers import Workers


class Scoring:
    """Scores the points of one search; a worker measures, the goal is applied here.

    Args:
        cache_bytes: see Evaluator; of each process.
    """

    def __init__(self, goal: Goal, prepared: Prepared, cache_bytes: int | None = None) -> None:
        self.goal, self.prepared, self.cache_bytes = goal, prepared, cache_bytes
        ops = prepared.hardware.known_ops
        evaluator = Evaluator(prepared.graph, prepared.batches, goal.objective, ops, goal.measures, cache_bytes)
        self.bench = Bench(prepared.resolver, evaluator)

    def __call__(self, bits: Bits) -> Score:
        """The score of a point, from this process."""
        return self.judged(bits, self.bench.score(bits))

    def judged(self, bits: Bits, score: Score) -> Score:
        """A measured score as the goal has it."""
        return self.goal.judged(score, plan_cost(self.prepared.resolver(bits)).figures)

    def submit(self, hands: Hands | None, notice: Notice = log_notice) -> Submit | None:
        """What scores points on an executor; None without one."""
        if hands is None:
            return None
        work = work_of(self.prepared, self.goal.objective, self.goal.measures, self.cache_bytes)
        workers = Workers(hands, work, self.bench.score, notice)
        return lambda bits: _Judged(self, bits, workers(bits))


@dataclass(frozen=True, slots=True)
class _Judged:
    scoring: Scoring
    bits: Bits
    pending: Pending

    def result(self) -> Score:
        return self.scoring.judged(self.bits, self.pending.result())

    def cancel(self) -> object:
        return self.pending.cancel()
