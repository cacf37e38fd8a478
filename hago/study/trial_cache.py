"""Scorer: evaluates points, equal Plans once, in this process or elsewhere."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol, TypeAlias

from hago.errors import InfeasibleBits
from hago.plan.space import Bits
from hago.study.log import Trial
from hago.study.searcher import Score, point_key

#: Of a point; in a race, of a point and its rival, which is None where there is none.
Evaluate: TypeAlias = Callable[..., Score]


class PendingScore(Protocol):
    """A point that is being scored elsewhere."""

    def result(self) -> Score:
        """The score, when it is there."""
        ...

    def cancel(self) -> object:
        """Give it up, where it has not begun."""
        ...


#: Starts to score a point elsewhere; takes what Evaluate takes.
Submit: TypeAlias = Callable[..., PendingScore]


class TrialCache:
    """Scores points, and remembers which trial first had each Plan. A context manager: on leaving,
    what still waits elsewhere is cancelled.

    Args:
        evaluate: scores a point; may raise InfeasibleBits.
        plan_key: equal for equal Plans; without it, points are told apart by their bits.
        submit: scores points that are prefetched, elsewhere.
        race: whether points are scored against a rival.

    Attributes:
        rival: of the points that are asked now.
    """

    def __init__(
        self,
        evaluate: Evaluate,
        plan_key: Callable[[Bits], str] | None,
        submit: Submit | None,
        race: bool = False,
    ) -> None:
        self.rival: Bits | None = None
        self._race = race
        self._evaluate = evaluate
        self._plan_key = plan_key
        self._submit = submit
        self._first: dict[str, Trial] = {}
        self._running: dict[str, PendingScore] = {}

    def __enter__(self) -> TrialCache:
        return self

    def __exit__(self, *_: object) -> None:
        for pending in self._running.values():
            pending.cancel()

    def prefetch(self, points: Sequence[Bits]) -> None:
        """Start to evaluate those of `points` that are new, where that can be done elsewhere."""
        if self._submit is None:
            return
        for bits in points:
            key, refusal = self._key(bits)
            if not refusal and key not in self._first and key not in self._running:
                self._running[key] = self._submit(*self._asked(bits))

    def score(self, bits: Bits) -> tuple[Score, int | None]:
        """The score of `bits`, and the index of the trial that had the same Plan, if one did."""
        key, refusal = self._key(bits)
        if key in self._first:
            earlier = self._first[key]
            return earlier.score, earlier.index
        try:
            if refusal:
                raise InfeasibleBits(refusal)
            running = self._running.pop(key, None)
            score = self._evaluate(*self._asked(bits)) if running is None else running.result()
        except InfeasibleBits as error:
            score = Score(-math.inf, infeasible=str(error) or "no signature holds these bits", forwards=0.0)
        return _tidy(score, key if self._plan_key else score.plan_key or key), None

    def remember(self, bits: Bits, trial: Trial) -> int | None:
        """Take note of a scored trial.

        Returns:
            The index of the trial that had the same Plan before, if one did.
        """
        key = trial.score.plan_key if self._plan_key else point_key(bits)
        first = self._first.setdefault(key, trial)
        return None if first is trial else first.index

    def _asked(self, bits: Bits) -> tuple[Bits | None, ...]:
        return (bits, self.rival) if self._race else (bits,)

    def _key(self, bits: Bits) -> tuple[str, str]:
        """What tells Plans apart, and why there is no Plan where there is none."""
        if self._plan_key is None:
            return point_key(bits), ""
        try:
            return self._plan_key(bits), ""
        except InfeasibleBits as error:
            return point_key(bits), str(error) or "no signature holds these bits"


def _tidy(score: Score, key: str) -> Score:
    """The score with its key, without nodes that overflowed zero times, and with a value that can be
    compared."""
    return replace(
        score,
        value=-math.inf if math.isnan(score.value) else score.value,
        overflows={node: count for node, count in score.overflows.items() if count},
        excess_bits={node: excess for node, excess in score.excess_bits.items() if excess > 0},
        plan_key=key,
    )
