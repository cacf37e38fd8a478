"""The points that a search led by a surrogate has evaluated, and the integer program over the losses that they
correct."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from hago.plan import Bits, Space
from hago.searchers.knapsack import Knapsack
from hago.searchers.merged_groups import AccumulatorLimit
from hago.searchers.surrogate import Surrogate, fit_factors
from hago.study import Ask, Feeds, Score, ScoresByPoint, Steps, ask_score, point_key


@dataclass(slots=True)
class EvaluationHistory:
    """The points that a search has scored, with its space and surrogate. `registry.make_searcher` makes an empty one
    for each searcher that is led by a surrogate. The searcher's generator adds points with `evaluate` and
    `evaluate_all`.

    Args:
        feeds: by node, the groups whose bits determine how large its accumulator gets.
        known_scores: all scores, by point key.
        scored: points and scores in the order of evaluation, without the intermediate points of a repair.
    """

    space: Space
    surrogate: Surrogate
    feeds: Feeds
    known_scores: ScoresByPoint = field(default_factory=dict)
    scored: list[tuple[Bits, Score]] = field(default_factory=list)

    def evaluate(self, bits: Bits, why: str) -> Steps[Score]:
        """The score of a point, which is asked for if it is new."""
        is_new = point_key(bits) not in self.known_scores
        score = yield from ask_score(bits, why, self.known_scores)
        if is_new:
            self.scored.append((dict(bits), score))
        return score

    def evaluate_all(self, points: Sequence[Bits], why: str) -> Steps[None]:
        """Ask for the scores of several points at once, except for those that have one."""
        new = {k: dict(p) for p in points if (k := point_key(p)) not in self.known_scores}
        if new:
            scores = yield Ask(tuple(new.values()), why)
            self.known_scores.update(zip(new, scores, strict=True))
            self.scored += zip(new.values(), scores, strict=True)

    @property
    def best(self) -> tuple[Bits, Score]:
        """The point of the highest rank, the first of equals, and its score."""
        return max(self.scored, key=lambda pair: pair[1].rank)

    def program(self) -> Knapsack:
        """The integer program over the losses as corrected by the evaluations, under `accumulator_limits`."""
        limits = [AccumulatorLimit(keys, bits) for keys, bits in self.accumulator_limits.items()]
        return Knapsack(self.space, self.surrogate.corrected(fit_factors(self.surrogate, self.scored)), limits)

    @property
    def feeds_in_space(self) -> dict[str, tuple[str, ...]]:
        """`feeds` without the groups that the space does not have."""
        return {node: tuple(k for k in keys if k in self.space.groups) for node, keys in self.feeds.items()}

    @property
    def accumulator_limits(self) -> dict[tuple[str, ...], int]:
        """By groups that feed one accumulator, the most bits that these may have together.

        They may have as many as at `Surrogate.most`, or, without it, as at the first point that ran; and fewer where a
        point with so many overflowed. Groups that have their most bits at that point are not limited.
        """
        running = self.surrogate.most or next((bits for bits, score in self.scored if score.runs), None)
        most = self.surrogate.widest or self.space.widest()
        limits: dict[tuple[str, ...], int] = {}
        if running is not None:
            for keys in self.feeds_in_space.values():
                if any(running[k] < most[k] for k in keys):
                    limits[keys] = sum(running[k] for k in keys)
            feeding = {k for keys in self.feeds_in_space.values() for k in keys}
            limits |= {(k,): running[k] for k in most if k not in feeding and running[k] < most[k]}
        for bits, score in self.scored:
            for node in score.overflows:
                keys = self.feeds_in_space.get(node, ())
                if keys:
                    used = sum(bits[k] for k in keys) - score.excess_bits.get(node, 1)
                    fewest = sum(self.space.groups[k].choices[-1] for k in keys)
                    limits[keys] = max(min(limits.get(keys, used), used), fewest)
        return limits
