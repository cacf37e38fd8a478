"""The points that a search led by a surrogate has evaluated, and what follows from them for its integer program."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from hago.plan.space import Bits, Space
from hago.searchers.knapsack import Knapsack, Room
from hago.searchers.surrogate import Surrogate, factors
from hago.study.searcher import Ask, Feeds, Score, ScoresByPoint, Steps, measure, point_key


@dataclass(slots=True)
class EvaluationHistory:
    """The points that a search has scored. `registry.make_searcher` makes an empty one for each searcher that is led by
    a surrogate, which fills it as it runs.

    Args:
        feeds: by node, the groups whose bits decide how large its accumulator gets.
        seen: all scores, by point key.
        scored: points and scores in the order of evaluation, without those on the way of a repair.
    """

    space: Space
    surrogate: Surrogate
    feeds: Feeds
    seen: ScoresByPoint = field(default_factory=dict)
    scored: list[tuple[Bits, Score]] = field(default_factory=list)

    def look(self, bits: Bits, why: str) -> Steps[Score]:
        """The score of a point, asked for where it is not known."""
        is_new = point_key(bits) not in self.seen
        score = yield from measure(bits, why, self.seen)
        if is_new:
            self.scored.append((dict(bits), score))
        return score

    def look_at_all(self, points: Sequence[Bits], why: str) -> Steps[None]:
        """Ask for the scores of several points at once, those aside that are known."""
        new = {k: dict(p) for p in points if (k := point_key(p)) not in self.seen}
        if new:
            scores = yield Ask(tuple(new.values()), why)
            self.seen.update(zip(new, scores, strict=True))
            self.scored += zip(new.values(), scores, strict=True)

    @property
    def best(self) -> tuple[Bits, Score]:
        """The point of the highest rank, the first of equals, and its score."""
        return max(self.scored, key=lambda pair: pair[1].rank)

    def program(self) -> Knapsack:
        """The integer program over the corrected losses, with no more bits at any accumulator than it was observed to
        hold."""
        rooms = [Room(keys, bits) for keys, bits in self.rooms.items()]
        return Knapsack(self.space, self.surrogate.corrected(factors(self.surrogate, self.scored)), rooms)

    @property
    def known_feeds(self) -> dict[str, tuple[str, ...]]:
        """`feeds` without the groups that the space does not have."""
        return {node: tuple(k for k in keys if k in self.space.groups) for node, keys in self.feeds.items()}

    @property
    def rooms(self) -> dict[tuple[str, ...], int]:
        """The most bits that the groups that feed an accumulator may have together.

        They are those of `Surrogate.most`, or of the first point that ran, where these are not the most bits anyway;
        and fewer where a point with as many overflowed.
        """
        runs = self.surrogate.most or next((bits for bits, score in self.scored if score.runs), None)
        most = self.surrogate.widest or self.space.widest()
        rooms: dict[tuple[str, ...], int] = {}
        if runs is not None:
            for keys in self.known_feeds.values():
                if any(runs[k] < most[k] for k in keys):
                    rooms[keys] = sum(runs[k] for k in keys)
            fed = {k for keys in self.known_feeds.values() for k in keys}
            rooms |= {(k,): runs[k] for k in most if k not in fed and runs[k] < most[k]}
        for bits, score in self.scored:
            for node in score.overflows:
                keys = self.known_feeds.get(node, ())
                if keys:
                    used = sum(bits[k] for k in keys) - score.excess_bits.get(node, 1)
                    least = sum(self.space.groups[k].choices[-1] for k in keys)
                    rooms[keys] = max(min(rooms.get(keys, used), used), least)
        return rooms
