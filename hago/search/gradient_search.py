"""Gradient search: few evaluations of what gradients expect to be better, from a start whose thresholds are refined;
or, under limits on costs, with thresholds that were refined for every choice."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from hago.errors import HagoError
from hago.search.searcher import Searcher
from hago.search.sensitivity_search import Explored, SensitivityOptions, steps
from hago.search.walk import Steps, Walk
from hago.space import Bits

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


def gradient(explored: Explored, start: Bits, seed: int, options: GradientOptions) -> Searcher:
    """A searcher that asks `start`, what an integer program over expected losses picks, and a few moves around the
    best of them; and more of both where none of these keeps every limit.

    Before it, and not its own work, the thresholds of the start were made better by gradients (`refinement`): there
    most is won, and most forwards are spent. Where a cost is minimised, the program is solved along the front.
    """
    each = MANY if explored.guide.minimize else 1
    moves = max(2, each * len(explored.space.groups) // GROUPS_A_MOVE) if options.moves < 0 else options.moves
    rounds = 4 if explored.guide.minimize else 1
    chosen = SensitivityOptions(rounds=rounds, moves=moves, batch=BATCH)
    return Walk("gradient", options, _steps(explored, start, chosen, PATIENCE * each, options.moves < 0))


def _steps(explored: Explored, start: Bits, chosen: SensitivityOptions, patience: int, more: bool) -> Steps[None]:
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


def limited(explored: Explored, start: Bits, seed: int, options: LimitedOptions) -> Searcher:
    """A searcher for what is best under limits on costs, or costs least: it asks `start`, what an integer program over
    expected losses picks, the program again as evaluations correct it, and moves around the best.

    Before it, thresholds of all choices were refined (`refined_choices`), which hold wherever the program goes; those
    that are refined at one point lose 2 to 5 dB elsewhere.
    """
    chosen = SensitivityOptions(options.rounds, options.points, options.moves, BATCH)
    return Walk("limited", options, _within(explored, start, chosen))


def _within(explored: Explored, start: Bits, chosen: SensitivityOptions) -> Steps[None]:
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
