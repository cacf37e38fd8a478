"""The cache of scores by Plan: every Plan of a search is scored once, in this process or in a worker."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol, TypeAlias

from hago.errors import InfeasibleBits
from hago.plan import Bits
from hago.study.log import Trial
from hago.study.score import Score
from hago.study.searcher import point_key

#: Scores a point. In a race it is called with the point and its rival, the best point so far (or None).
ScorePoint: TypeAlias = Callable[..., Score]


class PendingScore(Protocol):
    """A score that a worker computes; a `concurrent.futures.Future` is one."""

    def result(self) -> Score:
        """Wait for the score."""
        ...

    def cancel(self) -> object:
        """Cancel the scoring where it has not started."""
        ...


#: Starts the scoring of a point in a worker; called with the arguments of ScorePoint.
Submit: TypeAlias = Callable[..., PendingScore]


class TrialCache:
    """Scores points, and remembers the trial that first had each Plan. `run_study` makes one per search. It is a
    context manager, which cancels pending scores on leaving.

    Args:
        score_point: scores a point; may raise InfeasibleBits.
        plan_key: gives equal keys for equal Plans; without it, points are told apart by their bits.
        submit: starts the scoring of prefetched points in a worker; None to score in this process.
        race: whether `score_point` and `submit` are also passed the rival.

    Attributes:
        rival: the bits of the best trial so far; set by `run_study` before the points of an `ask` are scored.
    """

    def __init__(
        self,
        score_point: ScorePoint,
        plan_key: Callable[[Bits], str] | None,
        submit: Submit | None,
        race: bool = False,
    ) -> None:
        self.rival: Bits | None = None
        self._race = race
        self._score_point = score_point
        self._plan_key = plan_key
        self._submit = submit
        self._first_trials: dict[str, Trial] = {}
        self._pending: dict[str, PendingScore] = {}

    def __enter__(self) -> TrialCache:
        return self

    def __exit__(self, *_: object) -> None:
        for pending in self._pending.values():
            pending.cancel()

    def prefetch(self, points: Sequence[Bits]) -> None:
        """Start the scoring of the points whose Plans are new; no effect without workers."""
        if self._submit is None:
            return
        for bits in points:
            key, refusal = self._key(bits)
            if not refusal and key not in self._first_trials and key not in self._pending:
                self._pending[key] = self._submit(*self._arguments(bits))

    def score_once(self, bits: Bits) -> tuple[Score, int | None]:
        """The score of a point, and the index of the earlier trial with the same Plan, or None where there is none and
        the point was scored."""
        key, refusal = self._key(bits)
        if key in self._first_trials:
            earlier = self._first_trials[key]
            return earlier.score, earlier.index
        try:
            if refusal:
                raise InfeasibleBits(refusal)
            pending = self._pending.pop(key, None)
            score = self._score_point(*self._arguments(bits)) if pending is None else pending.result()
        except InfeasibleBits as error:
            score = infeasible_score(error)
        return normalized(score, key if self._plan_key else score.plan_key or key), None

    def remember(self, bits: Bits, trial: Trial) -> int | None:
        """Remember a trial, new or read from the log.

        Returns:
            The index of the earlier trial with the same Plan; None where there is none.
        """
        key = trial.score.plan_key if self._plan_key else point_key(bits)
        first = self._first_trials.setdefault(key, trial)
        return None if first is trial else first.index

    def _arguments(self, bits: Bits) -> tuple[Bits | None, ...]:
        return (bits, self.rival) if self._race else (bits,)

    def _key(self, bits: Bits) -> tuple[str, str]:
        """The key of a point's Plan, and the reason why it is infeasible, empty where it is feasible."""
        if self._plan_key is None:
            return point_key(bits), ""
        try:
            return self._plan_key(bits), ""
        except InfeasibleBits as error:
            return point_key(bits), infeasible_score(error).infeasible


def infeasible_score(error: InfeasibleBits, key: str = "") -> Score:
    """The score of a point that a node refuses, with the key of its Plan."""
    why = str(error) or "no signature holds these bits"
    return Score(-math.inf, infeasible=why, forwards=0.0, plan_key=key)


def normalized(score: Score, key: str) -> Score:
    """The score with its Plan's key, without counts of 0, and with -inf in place of a value of NaN."""
    return replace(
        score,
        value=-math.inf if math.isnan(score.value) else score.value,
        overflows={node: count for node, count in score.overflows.items() if count},
        excess_bits={node: excess for node, excess in score.excess_bits.items() if excess > 0},
        plan_key=key,
    )
