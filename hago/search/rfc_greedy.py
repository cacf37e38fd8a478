"""The RFC's greedy search: every choice of every group in turn, one pass; a baseline to compare with."""

from __future__ import annotations

from dataclasses import dataclass

from hago.search.searcher import Score, Searcher, point_key
from hago.search.walk import Ask, Feeds, Seen, Steps, Walk
from hago.space import Bits, Space


@dataclass(frozen=True, slots=True)
class RfcGreedyOptions:
    """There is nothing to choose."""


def rfc_greedy(space: Space, start: Bits, seed: int, options: RfcGreedyOptions, feeds: Feeds | None = None) -> Searcher:
    """A searcher that asks, for each group in order, all its choices with the groups before as decided and those
    after as in `start`, and decides for the best.

    References:
        The HAGO RFC and its first implementation, BatchedGreedySearchTuner; points that were asked before
        are not asked again.
    """
    return Walk("rfc_greedy", options, _steps(space, start))


def _steps(space: Space, start: Bits) -> Steps[None]:
    seen: Seen = {}
    decided = dict(start)
    yield from _scores([decided], "start", seen)
    for key, group in space.groups.items():
        points = [{**decided, key: bits} for bits in group.choices]
        yield from _scores(points, f"every choice at {key}", seen)
        decided = max(points, key=lambda point: seen[point_key(point)].rank)


def _scores(points: list[dict[str, int]], why: str, seen: Seen) -> Steps[None]:
    new = tuple(p for p in points if point_key(p) not in seen)
    if new:
        scores: list[Score] = list((yield Ask(new, why)))
        seen.update({point_key(p): s for p, s in zip(new, scores, strict=True)})
