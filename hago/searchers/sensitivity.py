"""Sensitivity search: solve for the best expected point, evaluate it, correct what was expected, and
repeat; then moves of one or two groups around the best point seen.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from hago.errors import HagoError
from hago.plan.space import Bits, Space
from hago.searchers.knapsack import Knapsack, Picked, Room
from hago.searchers.repair import repair, swapped
from hago.searchers.surrogate import Change, NeighbourEstimates, Surrogate, factors
from hago.study.searcher import (
    Ask,
    Feeds,
    GeneratorSearcher,
    Score,
    ScoresByPoint,
    Searcher,
    Steps,
    measure,
    point_key,
    shifted,
)


@dataclass(frozen=True, slots=True)
class SensitivityOptions:
    """Options of sensitivity search.

    Args:
        rounds: how often the program is solved and corrected at most.
        points: evaluations that find where a limit on a measure lies, when a cost is minimised.
        moves: evaluations of moves around the best point, at most.
        batch: moves that are asked at once, for evaluation side by side.
    """

    rounds: int = 4
    points: int = 8
    moves: int = 48
    batch: int = 4

    def __post_init__(self) -> None:
        if self.rounds < 1 or self.points < 1 or self.moves < 0 or self.batch < 1:
            raise HagoError(
                f"sensitivity search of {self.rounds} rounds, {self.points} points, {self.moves} moves, {self.batch} "
                "at once; expected 1 or more, and 0 or more moves"
            )


def sensitivity_search(explored: EvaluationHistory, start: Bits, seed: int, options: SensitivityOptions) -> Searcher:
    """A searcher that asks `start`, then what an integer program over expected losses picks under the
    limit on the cost (or, where a cost is minimised, along the front until the limits are just kept), and
    then single steps and swaps around the best.

    References:
        Z. Yao et al., "HAWQ-V3", ICML 2021, for the program; the correction by evaluations is our own.
    """
    return GeneratorSearcher("sensitivity", options, steps(explored, start, options))


@dataclass(slots=True)
class EvaluationHistory:
    """All points that were scored, and the best of them."""

    space: Space
    guide: Surrogate
    feeds: Feeds
    seen: ScoresByPoint = field(default_factory=dict)
    scored: list[tuple[Bits, Score]] = field(default_factory=list)

    def look(self, bits: Bits, why: str) -> Steps[Score]:
        """The score of a point."""
        new = point_key(bits) not in self.seen
        score = yield from measure(bits, why, self.seen)
        if new:
            self.scored.append((dict(bits), score))
        return score

    def look_at_all(self, points: Sequence[Bits], why: str) -> Steps[None]:
        """Score several points at once; those known already are left out."""
        new = {k: dict(p) for p in points if (k := point_key(p)) not in self.seen}
        if new:
            scores = yield Ask(tuple(new.values()), why)
            self.seen.update(zip(new, scores, strict=True))
            self.scored += zip(new.values(), scores, strict=True)

    @property
    def best(self) -> tuple[Bits, Score]:
        """The first of the highest rank."""
        return max(self.scored, key=lambda pair: pair[1].rank)

    def program(self) -> Knapsack:
        """The integer program with losses as evaluations have corrected them, and no more bits around
        an accumulator than it was seen to hold."""
        rooms = [Room(keys, bits) for keys, bits in self.rooms.items()]
        return Knapsack(self.space, self.guide.corrected(factors(self.guide, self.scored)), rooms)

    @property
    def known_feeds(self) -> dict[str, tuple[str, ...]]:
        """The feeds, less groups that the space does not have."""
        return {node: tuple(k for k in keys if k in self.space.groups) for node, keys in self.feeds.items()}

    @property
    def rooms(self) -> dict[tuple[str, ...], int]:
        """By the groups that feed an accumulator, the bits that fit it together: those of the point with as many as are
        known to fit, or of the first that ran, where it has less than the most, and fewer where a point with so many
        overflowed."""
        runs = self.guide.most or next((bits for bits, score in self.scored if score.runs), None)
        most = self.guide.widest or self.space.widest()
        found: dict[tuple[str, ...], int] = {}
        if runs is not None:
            for keys in self.known_feeds.values():
                if any(runs[k] < most[k] for k in keys):
                    found[keys] = sum(runs[k] for k in keys)
            fed = {k for keys in self.known_feeds.values() for k in keys}
            found |= {(k,): runs[k] for k in most if k not in fed and runs[k] < most[k]}
        for bits, score in self.scored:
            for node in score.overflows:
                keys = self.known_feeds.get(node, ())
                if keys:
                    used = sum(bits[k] for k in keys) - score.excess_bits.get(node, 1)
                    least = sum(self.space.groups[k].choices[-1] for k in keys)
                    found[keys] = max(min(found.get(keys, used), used), least)
        return found


def steps(
    explored: EvaluationHistory, start: Bits, options: SensitivityOptions, patience: float = math.inf
) -> Steps[None]:
    """The search itself.

    Args:
        patience: moves in a row that may be no better before they end.
    """
    space, guide = explored.space, explored.guide
    explored.scored.append((yield from repair(space, start, explored.feeds, explored.seen)))
    if all(len(g.choices) == 1 for g in space.groups.values()):
        return
    for number in range(1, options.rounds + 1):
        before = len(explored.scored)
        program = explored.program()
        if guide.minimize:
            yield from _cheapest(explored, program, options.points, f"round {number}")
        else:
            yield from _within(explored, program, guide.limit, f"round {number}")
        if len(explored.scored) == before:
            break
    yield from _moves(explored, options, patience)


def _within(explored: EvaluationHistory, program: Knapsack, limit: float | None, why: str) -> Steps[None]:
    """The best expected point whose true cost keeps the limit; the program's costs may be a little off."""
    allowed, held = limit, {h.metric: h.most for h in explored.guide.held}
    for _ in range(3):
        picked = program.solve(allowed, held)
        if picked is None:
            return
        score = yield from explored.look(picked.bits, f"{why}: {_says(picked)}")
        over = 0.0 if limit is None else max(0.0, explored.guide.cost_of(picked.bits, score) - limit)
        beyond = {h.metric: max(0.0, -h.spare(picked.bits, score)) for h in explored.guide.held}
        if not over and not any(beyond.values()):
            return
        allowed = None if allowed is None else allowed - over
        held = {metric: most - beyond[metric] for metric, most in held.items()}


def _cheapest(explored: EvaluationHistory, program: Knapsack, points: int, why: str) -> Steps[None]:
    """Along the front, by bisection: the least cost at which the limits are kept."""
    ends = program.range
    if ends is None:
        return
    low, high = ends
    for number in range(points):
        middle = low if number == 0 else (low + high) / 2
        picked = program.solve(middle * (1 + 1e-9))
        if picked is None:
            return
        score = yield from explored.look(picked.bits, f"{why}: {_says(picked)}")
        if not score.accepted:
            low = middle
        elif number == 0:
            return
        else:
            high = min(middle, picked.cost)
        if high - low <= 1e-6 * abs(high):
            return


def _says(picked: Picked) -> str:
    return f"expected loss {picked.loss:.4g} at cost {picked.cost:.6g}"


def _moves(explored: EvaluationHistory, options: SensitivityOptions, patience: float) -> Steps[None]:
    left, failed, before = options.moves, 0, explored.best[0]
    while left > 0:
        bits, score = explored.best
        failed, before = failed if bits == before else 0, bits
        if failed >= patience:
            return
        guide = explored.guide.corrected(factors(explored.guide, explored.scored))
        near = _neighbours(explored, guide, bits, score)
        new = (p for p in near if point_key(p) not in explored.seen)
        points = list(itertools.islice(new, min(left, options.batch)))
        if not points:
            return
        left, failed = left - len(points), failed + len(points)
        yield from explored.look_at_all(points, "a move around the best")


#: How far an expected change may be off, as a part of it: moves are tried by what they gain at best.
_DOUBT: Final = 0.7
#: How many raises are paired with how many lowerings.
_PAIRED: Final = 24


def _at_best(move: Change) -> float:
    """The change of loss if expectations are off in its favour."""
    return move.loss - _DOUBT * move.churn


def _neighbours(explored: EvaluationHistory, guide: Surrogate, bits: Bits, score: Score) -> Iterator[dict[str, int]]:
    """Single steps and swaps that may improve a point, the most promising first."""
    space, near = explored.space, NeighbourEstimates(guide, bits)
    steps = [[(k, shifted(space, {k: bits[k]}, k, s)[k]) for k in space.groups] for s in (1, -1)]
    downs, ups = ([near.change({k: b}) for k, b in there if b != bits[k]] for there in steps)
    # bits of a node that is float say nothing
    downs, ups = (sorted((m for m in ms if m.churn or m.cost), key=_at_best) for ms in (downs, ups))
    pairs = itertools.product(ups[:_PAIRED], downs[:_PAIRED])
    swaps = [_both(up, down) for up, down in pairs if up.bits.keys() != down.bits.keys()]
    traded = (near.change(p) for p in swapped(space, explored.known_feeds, bits))
    found = [*downs, *ups, *swaps, *(m for m in traded if m.churn or m.cost)]
    # expected costs may be a little off: they are trusted in differences
    spare = math.inf if guide.limit is None else guide.limit - guide.cost_of(bits, score)
    rooms: dict[str, list[tuple[Sequence[str], int]]] = {}
    for keys, most in explored.rooms.items():
        for key in keys:
            rooms.setdefault(key, []).append((keys, most))
    kept = [m for m in found if m.cost <= spare and _fits(rooms, bits, m)]
    if guide.minimize:
        # what neighbours save by both being float is not in the expected costs, so every flip is tried, last
        flips = [m for m in kept if m.cost >= 0 and len(m.bits) == 1 and guide.gates.keys() & m.bits.keys()]
        kept = [*sorted((m for m in kept if m.cost < 0), key=lambda m: _at_best(m) / -m.cost), *flips]
    else:
        kept.sort(key=_at_best)
    for chosen in kept:
        point = {**bits, **chosen.bits}
        # two changes may fit a signature each, and not together
        fits = near.change(chosen.bits).cost < math.inf
        if fits and all(h.cost(point) - h.cost(bits) <= max(0.0, h.spare(bits, score)) for h in guide.held):
            yield point


def _both(up: Change, down: Change) -> Change:
    """Two moves at once; their costs are taken to add up."""
    return Change({**up.bits, **down.bits}, up.loss + down.loss, up.cost + down.cost, up.churn + down.churn)


def _fits(rooms: Mapping[str, Sequence[tuple[Sequence[str], int]]], bits: Bits, move: Change) -> bool:
    """Whether the accumulators that it feeds are known to hold as many bits.

    Args:
        rooms: by group, the groups that share room with it, and how much.
    """
    felt = (room for key in move.bits for room in rooms.get(key, ()))
    return all(sum(move.bits.get(k, bits[k]) for k in keys) <= most for keys, most in felt)


# ---------------------------------------------------------------- gradient search
# Gradient search: few evaluations of what gradients expect to be better, from a start whose thresholds are refined;
# or, under limits on costs, with thresholds that were refined for every choice.

#: Where the number of moves is not given, one for so many groups; several where a cost is minimised.
GROUPS_A_MOVE: Final = 8
MANY: Final = 4
#: Points that are asked at once.
BATCH: Final = 2
#: Moves in a row that may be no better before they end, and so many times as many where a cost is minimised.
PATIENCE: Final = 4


@dataclass(frozen=True, slots=True)
class GradientOptions:
    """Options of gradient search.

    Args:
        moves: evaluations of moves around the best point, at most; by default as many as the space is large, -1.
    """

    moves: int = -1

    def __post_init__(self) -> None:
        if self.moves < -1:
            raise HagoError(f"gradient search of {self.moves} moves; expected 0 or more, or -1 for as many as pay")


def gradient_search(explored: EvaluationHistory, start: Bits, seed: int, options: GradientOptions) -> Searcher:
    """A searcher that asks `start`, what an integer program over expected losses picks, and a few moves around the
    best of them; and more of both where none of these keeps every limit.

    Before it, and not its own work, the thresholds of the start were made better by gradients (`refinement`): there
    most is won, and most forwards are spent. Where a cost is minimised, the program is solved along the front.
    """
    each = MANY if explored.guide.minimize else 1
    moves = max(2, each * len(explored.space.groups) // GROUPS_A_MOVE) if options.moves < 0 else options.moves
    rounds = 4 if explored.guide.minimize else 1
    chosen = SensitivityOptions(rounds=rounds, moves=moves, batch=BATCH)
    return GeneratorSearcher("gradient", options, _steps(explored, start, chosen, PATIENCE * each, options.moves < 0))


def _steps(
    explored: EvaluationHistory, start: Bits, chosen: SensitivityOptions, patience: int, more: bool
) -> Steps[None]:
    yield from steps(explored, start, chosen, patience)
    bits, score = explored.best
    if more and not score.accepted:
        # no limit is given up for the sake of few evaluations
        yield from steps(explored, bits, SensitivityOptions(batch=BATCH))


@dataclass(frozen=True, slots=True)
class LimitedOptions:
    """Options of search under limits.

    Args:
        rounds: how often the program is solved and corrected at most.
        points: evaluations that find where a limit on a measure lies, when a cost is minimised.
        moves: evaluations of moves around the best point, at most.
    """

    rounds: int = 4
    points: int = 6
    moves: int = 16

    def __post_init__(self) -> None:
        if self.rounds < 1 or self.points < 1 or self.moves < 0:
            raise HagoError(
                f"limited search of {self.rounds} rounds, {self.points} points, {self.moves} moves; "
                "expected 1 or more, and 0 or more moves"
            )


def limited_search(explored: EvaluationHistory, start: Bits, seed: int, options: LimitedOptions) -> Searcher:
    """A searcher for what is best under limits on costs, or costs least: it asks `start`, what an integer program over
    expected losses picks, the program again as evaluations correct it, and moves around the best.

    Before it, thresholds of all choices were refined (`refine_every_choice`), which hold wherever the program goes;
    those that are refined at one point lose 2 to 5 dB elsewhere.
    """
    chosen = SensitivityOptions(options.rounds, options.points, options.moves, BATCH)
    return GeneratorSearcher("limited", options, _within_limits(explored, start, chosen))


def _within_limits(explored: EvaluationHistory, start: Bits, chosen: SensitivityOptions) -> Steps[None]:
    yield from steps(explored, start, chosen, 2 * PATIENCE)
    if explored.best[1].accepted:
        return
    # no limit is given up: the ends of what is expected, then as many moves from the nearest point as it takes
    program = explored.program()
    ends = program.range
    for limit in (None,) if ends is None else (ends[0] * (1 + 1e-9), None):
        picked = program.solve(limit)
        if picked is not None:
            yield from explored.look(picked.bits, "an end of the front that is expected")
    if not explored.best[1].accepted:
        yield from steps(explored, explored.best[0], SensitivityOptions(batch=BATCH))
