"""Greedy search: coordinate descent over the groups, in node order; and, as a baseline, the greedy search of the first
implementation of the HAGO RFC.

Neither draws random numbers, so `seed` has no effect. All searchers take it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from hago.errors import HagoError
from hago.plan import Bits, Space
from hago.searchers.repair import bit_trades, feeds_of, first_point_that_runs
from hago.study import (
    Ask,
    Feeds,
    GeneratorSearcher,
    Score,
    ScoresByPoint,
    Searcher,
    Steps,
    ask_score,
    point_key,
    shifted,
)


@dataclass(frozen=True, slots=True)
class GreedyOptions:
    """Options of greedy search.

    Args:
        tolerance: in the unit of the objective; values that are at most so much below the highest value so far count as
            equal to it, and fewer bits win.
        max_passes: the most passes over all groups.
    """

    tolerance: float = 0.0
    max_passes: int = 8

    def __post_init__(self) -> None:
        if not 0 <= self.tolerance < math.inf:
            raise HagoError(f"greedy tolerance {self.tolerance}; expected a finite number, 0 or more")
        if self.max_passes < 1:
            raise HagoError(f"greedy max_passes {self.max_passes}; expected 1 or more")


def greedy_search(space: Space, start: Bits, seed: int, options: GreedyOptions, feeds: Feeds | None = None) -> Searcher:
    """A searcher that goes from `start` to a point that no single step and no trade improves.

    First it repairs a start that overflows. Then it visits the groups in order: it lowers a group's bits, choice by
    choice, as long as the point does not get worse, and, if the first such step is refused, raises them as long as the
    point gets better. When a pass changes nothing, operands of one node trade bits where that makes the point better.
    The search ends when that changes nothing either.

    Args:
        feeds: by node, the groups that decide how large its accumulator gets; by default those of its in-edges.

    References:
        The HAGO RFC, section on search: its text describes one pass of this descent from the widest bits. The RFC's
        first implementation does something else, see `rfc_greedy_search`.
    """
    return GeneratorSearcher(
        "greedy", options, _steps(space, start, options, feeds_of(space) if feeds is None else feeds)
    )


@dataclass(slots=True)
class _Incumbent:
    """The present point of the search, its score, and the highest value of an accepted point so far."""

    bits: dict[str, int]
    score: Score
    tolerance: float
    top: float = -math.inf

    def offer(self, bits: dict[str, int], score: Score, fewer_bits: bool) -> bool:
        """Move to a neighbour if it is better. An equal one must have fewer bits, so that the search cannot cycle.

        Returns:
            Whether the neighbour is now the incumbent.
        """
        for candidate in (self.score, score):
            if candidate.accepted:
                self.top = max(self.top, candidate.value)
        # while no point is accepted, values are compared without the tolerance
        floor = self.top - self.tolerance if self.top > -math.inf else math.inf
        incumbent, neighbour = self.score.standing(floor), score.standing(floor)
        moves = neighbour >= incumbent if fewer_bits else neighbour > incumbent
        if moves:
            self.bits, self.score = bits, score
        return moves


def _steps(space: Space, start: Bits, options: GreedyOptions, feeds: Feeds) -> Steps[None]:
    known_scores: ScoresByPoint = {}
    bits, score = yield from first_point_that_runs(space, start, feeds, known_scores)
    incumbent = _Incumbent(bits, score, options.tolerance)
    for number in range(1, options.max_passes + 1):
        before = incumbent.bits
        for key in space.groups:
            if not (yield from _move_group(space, incumbent, key, 1, f"pass {number}", known_scores)):
                yield from _move_group(space, incumbent, key, -1, f"pass {number}", known_scores)
        if incumbent.bits == before:
            # where no operand of an accumulator can have more bits, one may if another has fewer
            yield from _swap(space, incumbent, feeds, f"pass {number}", known_scores)
        if incumbent.bits == before:
            return


def _swap(space: Space, incumbent: _Incumbent, feeds: Feeds, why: str, known_scores: ScoresByPoint) -> Steps[None]:
    """Trade bits between operands that share an accumulator, at most once a node, where the result is better."""
    for node, keys in feeds.items():
        for bits in bit_trades(space, {node: keys}, incumbent.bits):
            score = yield from ask_score(bits, f"{why}: swap at {node}", known_scores)
            if incumbent.offer(bits, score, fewer_bits=False):
                break


def _move_group(
    space: Space, incumbent: _Incumbent, key: str, step: int, why: str, known_scores: ScoresByPoint
) -> Steps[bool]:
    """Move one group choice by choice while the incumbent moves along; returns whether the group moved.

    Args:
        step: 1 for fewer bits, -1 for more.
    """
    moved = False
    while (bits := shifted(space, incumbent.bits, key, step)) != incumbent.bits:
        old, new = incumbent.bits[key], bits[key]
        score = yield from ask_score(bits, f"{why}: {key} {old} to {new} bits", known_scores)
        if not incumbent.offer(bits, score, fewer_bits=step > 0):
            break
        moved = True
    return moved


# ---------------------------------------------------------------- the greedy search of the RFC's first implementation
@dataclass(frozen=True, slots=True)
class RfcGreedyOptions:
    """Options of the RFC's greedy search, which has none."""


def rfc_greedy_search(
    space: Space, start: Bits, seed: int, options: RfcGreedyOptions, feeds: Feeds | None = None
) -> Searcher:
    """A searcher that makes one pass over the groups: for each group it asks all choices, with the groups before it at
    their best choices and the groups after it as in `start`, and keeps the best.

    References:
        BatchedGreedySearchTuner, the first implementation of the HAGO RFC; but no point is asked twice.
    """
    return GeneratorSearcher("rfc_greedy", options, _rfc_steps(space, start))


def _rfc_steps(space: Space, start: Bits) -> Steps[None]:
    known_scores: ScoresByPoint = {}
    decided = dict(start)
    yield from _ask_new([decided], "start", known_scores)
    for key, group in space.groups.items():
        points = [{**decided, key: bits} for bits in group.choices]
        yield from _ask_new(points, f"every choice at {key}", known_scores)
        decided = max(points, key=lambda point: known_scores[point_key(point)].rank)


def _ask_new(points: list[dict[str, int]], why: str, known_scores: ScoresByPoint) -> Steps[None]:
    """Ask for the scores of the points that are not in `known_scores`."""
    new = tuple(p for p in points if point_key(p) not in known_scores)
    if new:
        scores: list[Score] = list((yield Ask(new, why)))
        known_scores.update({point_key(p): s for p, s in zip(new, scores, strict=True)})
