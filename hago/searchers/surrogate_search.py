"""Searches led by a surrogate model: sensitivity search, gradient search, and search under limits.

All three run the same loop, `search_steps`: repair a start that overflows; solve the integer program over expected
losses (`Knapsack`), evaluate its point, correct the losses by the evaluation, and repeat; then evaluate moves of one or
two groups around the best point. They differ in the number of rounds and moves, and in the thresholds that they start
from. An `EvaluationHistory` keeps the evaluated points; Pareto search and Optuna's samplers have one, too.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from hago.errors import HagoError
from hago.plan import Bits, Space
from hago.searchers.evaluation_history import EvaluationHistory
from hago.searchers.knapsack import Knapsack, Solution
from hago.searchers.repair import bit_trades, first_point_that_runs
from hago.searchers.surrogate import Change, NeighbourEstimates, Surrogate, fit_factors
from hago.study import GeneratorSearcher, Score, Searcher, Steps, point_key, shifted

#: The assumed error of an expected change of loss, relative to its churn: moves are ordered by their optimistic gain.
_RELATIVE_DOUBT: Final = 0.7
#: The most raises of bits, and the most lowerings, that are combined in pairs.
_PAIRED_MOVES: Final = 24
#: Where a cost is minimized, gradient search without a number of moves makes one for every COST_GROUPS_A_MOVE groups,
#: and COST_FACTOR times as many moves may fail in a row.
COST_GROUPS_A_MOVE: Final = 2
COST_FACTOR: Final = 4
#: Moves that gradient and limited search ask at once.
BATCH: Final = 2
#: Moves in a row that may fail to improve before gradient search ends; COST_FACTOR times as many where a cost is
#: minimized, and twice as many in limited search.
PATIENCE: Final = 4


@dataclass(frozen=True, slots=True)
class SensitivityOptions:
    """Options of sensitivity search.

    Args:
        rounds: the most rounds of solving the program and correcting the losses.
        points: evaluations per round to find the least cost that keeps the limits, where a cost is minimized.
        moves: the most evaluations of moves around the best point.
        batch: moves that are asked at once, for parallel evaluation.
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


def sensitivity_search(history: EvaluationHistory, start: Bits, seed: int, options: SensitivityOptions) -> Searcher:
    """A searcher that asks `start`, then the solutions of an integer program over expected losses under the limit on
    the cost (where a cost is minimized: along the front, to the least cost that keeps the limits), and then single
    steps and swaps around the best point.

    References:
        Z. Yao et al., "HAWQ-V3", ICML 2021, for the program. The correction by evaluations is hago's own.
    """
    return GeneratorSearcher("sensitivity", options, search_steps(history, start, options))


# ---------------------------------------------------------------- the common loop
def search_steps(
    history: EvaluationHistory, start: Bits, options: SensitivityOptions, patience: float = math.inf
) -> Steps[None]:
    """The loop of all three searches: repair, rounds of the integer program, moves.

    Args:
        patience: moves in a row that may fail to improve before the search ends.
    """
    space, surrogate = history.space, history.surrogate
    history.scored.append((yield from first_point_that_runs(space, start, history.feeds, history.known_scores)))
    if all(len(g.choices) == 1 for g in space.groups.values()):
        return
    for number in range(1, options.rounds + 1):
        count_before = len(history.scored)
        program = history.program()
        if surrogate.minimize:
            yield from _ask_cheapest(history, program, options.points, f"round {number}")
        else:
            yield from _ask_best_within(history, program, surrogate.limit, f"round {number}")
        if len(history.scored) == count_before:
            break
    yield from _ask_moves(history, options, patience)


def _ask_best_within(history: EvaluationHistory, program: Knapsack, limit: float | None, why: str) -> Steps[None]:
    """Ask for the point of least expected loss under the limits. Expected costs may be a little off: where the
    evaluated point violates a limit, the program is solved again with that limit lowered by the excess, up to twice."""
    allowed, allowed_others = limit, {c.metric: c.most for c in history.surrogate.constraints}
    for _ in range(3):
        picked = program.solve(allowed, allowed_others)
        if picked is None:
            return
        score = yield from history.evaluate(picked.bits, f"{why}: {_expectation(picked)}")
        excess = 0.0 if limit is None else max(0.0, history.surrogate.cost_of(picked.bits, score) - limit)
        excesses = {c.metric: max(0.0, -c.slack(picked.bits, score)) for c in history.surrogate.constraints}
        if not excess and not any(excesses.values()):
            return
        allowed = None if allowed is None else allowed - excess
        allowed_others = {metric: most - excesses[metric] for metric, most in allowed_others.items()}


def _ask_cheapest(history: EvaluationHistory, program: Knapsack, points: int, why: str) -> Steps[None]:
    """Bisect the expected front for the least cost at which the evaluated point keeps the limits."""
    ends = program.range
    if ends is None:
        return
    low, high = ends
    for number in range(points):
        middle = low if number == 0 else (low + high) / 2
        picked = program.solve(middle * (1 + 1e-9))
        if picked is None:
            return
        score = yield from history.evaluate(picked.bits, f"{why}: {_expectation(picked)}")
        if not score.accepted:
            low = middle
        elif number == 0:
            return
        else:
            high = min(middle, picked.cost)
        if high - low <= 1e-6 * abs(high):
            return


def _expectation(picked: Solution) -> str:
    return f"expected loss {picked.loss:.4g} at cost {picked.cost:.6g}"


def _ask_moves(history: EvaluationHistory, options: SensitivityOptions, patience: float) -> Steps[None]:
    """Ask for neighbours of the best point, batch by batch, the most promising first."""
    left, failed, previous_best = options.moves, 0, history.best[0]
    while left > 0:
        bits, score = history.best
        if bits != previous_best:
            failed, previous_best = 0, bits
        if failed >= patience:
            return
        surrogate = history.surrogate.corrected(fit_factors(history.surrogate, history.scored))
        candidates = _neighbours(history, surrogate, bits, score)
        new = (p for p in candidates if point_key(p) not in history.known_scores)
        points = list(itertools.islice(new, min(left, options.batch)))
        if not points:
            return
        left, failed = left - len(points), failed + len(points)
        yield from history.evaluate_all(points, "a move around the best")


def _optimistic_loss(move: Change) -> float:
    """The change of loss if the expectation is wrong in the move's favour."""
    return move.loss - _RELATIVE_DOUBT * move.churn


def _neighbours(history: EvaluationHistory, surrogate: Surrogate, bits: Bits, score: Score) -> Iterator[dict[str, int]]:
    """Yield single steps and swaps that may improve a point, the most promising first."""
    space, estimates = history.space, NeighbourEstimates(surrogate, bits)
    downs, ups = (_with_effect(estimates, _single_steps(space, bits, step)) for step in (1, -1))
    downs.sort(key=_optimistic_loss)
    ups.sort(key=_optimistic_loss)
    pairs = itertools.product(ups[:_PAIRED_MOVES], downs[:_PAIRED_MOVES])
    swaps = [_combine(up, down) for up, down in pairs if up.bits.keys() != down.bits.keys()]
    trades = _with_effect(estimates, bit_trades(space, history.feeds_in_space, bits))
    moves = [*downs, *ups, *swaps, *trades]
    # expected costs may be a little off, so only their differences are used
    slack = math.inf if surrogate.limit is None else surrogate.limit - surrogate.cost_of(bits, score)
    limits: dict[str, list[tuple[Sequence[str], int]]] = {}
    for keys, most in history.accumulator_limits.items():
        for key in keys:
            limits.setdefault(key, []).append((keys, most))
    allowed_moves = [m for m in moves if m.cost <= slack and _keeps_accumulator_limits(limits, bits, m)]
    if surrogate.minimize:
        # expected costs lack the saving where two neighbours are both float, so every flip is tried, last
        flips = [
            m for m in allowed_moves if m.cost >= 0 and len(m.bits) == 1 and surrogate.gates.keys() & m.bits.keys()
        ]
        allowed_moves = [
            *sorted((m for m in allowed_moves if m.cost < 0), key=lambda m: _optimistic_loss(m) / -m.cost),
            *flips,
        ]
    else:
        allowed_moves.sort(key=_optimistic_loss)
    for move in allowed_moves:
        point = {**bits, **move.bits}
        # each of two changes may fit a signature while both together fit none
        fits = estimates.change(move.bits).cost < math.inf
        if fits and all(c.cost(point) - c.cost(bits) <= max(0.0, c.slack(bits, score)) for c in surrogate.constraints):
            yield point


def _single_steps(space: Space, bits: Bits, step: int) -> Iterator[dict[str, int]]:
    """Yield the changed bits of one group, for every group that `shifted` moves by that step."""
    for key in space.groups:
        change = shifted(space, {key: bits[key]}, key, step)
        if change[key] != bits[key]:
            yield change


def _with_effect(estimates: NeighbourEstimates, changes: Iterable[Bits]) -> list[Change]:
    """The expected changes of loss and cost, without those that change neither, such as of bits of float nodes."""
    return [c for c in map(estimates.change, changes) if c.churn or c.cost]


def _combine(up: Change, down: Change) -> Change:
    """A move that makes two others at once; their expected changes are added."""
    return Change({**up.bits, **down.bits}, up.loss + down.loss, up.cost + down.cost, up.churn + down.churn)


def _keeps_accumulator_limits(
    limits: Mapping[str, Sequence[tuple[Sequence[str], int]]], bits: Bits, move: Change
) -> bool:
    """Whether a move keeps the limits of the accumulators that the changed groups feed.

    Args:
        limits: by group, the groups that share an accumulator with it, and the most bits that they may have together.
    """
    shared = (limit for key in move.bits for limit in limits.get(key, ()))
    return all(sum(move.bits.get(k, bits[k]) for k in keys) <= most for keys, most in shared)


# ---------------------------------------------------------------- gradient search
@dataclass(frozen=True, slots=True)
class GradientOptions:
    """Options of gradient search.

    Args:
        moves: the most evaluations of moves around the best point; -1, the default, for a number that grows with the
            space.
        groups_a_move: without a number of moves, there is one for every so many groups, and at least two. Few moves
            are better than the solution of the program beyond doubt. Not used where a cost is minimized.
    """

    moves: int = -1
    groups_a_move: int = 16

    def __post_init__(self) -> None:
        if self.moves < -1 or self.groups_a_move < 1:
            raise HagoError(
                f"gradient search of {self.moves} moves, one for every {self.groups_a_move} groups; expected 0 or more "
                "moves, or -1 for as many as pay, and 1 or more groups"
            )


def gradient_search(history: EvaluationHistory, start: Bits, seed: int, options: GradientOptions) -> Searcher:
    """A searcher that asks `start`, a solution of the integer program over expected losses, and a few moves around the
    better of them; and, unless the number of moves is given, more of both where none of these points keeps every limit.

    Before the search, the thresholds at `start` are refined by gradients, which makes most of the gain and takes most
    of the forward passes. Where a cost is minimized, the program is solved along the front.
    """
    factor, rounds, groups_a_move = 1, 1, options.groups_a_move
    if history.surrogate.minimize:
        factor, rounds, groups_a_move = COST_FACTOR, 4, COST_GROUPS_A_MOVE
    moves = max(2, len(history.space.groups) // groups_a_move) if options.moves < 0 else options.moves
    common_options = SensitivityOptions(rounds=rounds, moves=moves, batch=BATCH)
    return GeneratorSearcher(
        "gradient", options, _gradient_steps(history, start, common_options, PATIENCE * factor, options.moves < 0)
    )


def _gradient_steps(
    history: EvaluationHistory, start: Bits, options: SensitivityOptions, patience: int, extend: bool
) -> Steps[None]:
    """The steps of gradient search; with `extend`, sensitivity search follows where no point keeps every limit."""
    yield from search_steps(history, start, options, patience)
    bits, score = history.best
    if extend and not score.accepted:
        yield from search_steps(history, bits, SensitivityOptions(batch=BATCH))


# ---------------------------------------------------------------- search under limits
@dataclass(frozen=True, slots=True)
class LimitedOptions:
    """Options of search under limits: those of SensitivityOptions, with other defaults.

    Args:
        rounds: the most rounds of solving the program and correcting the losses.
        points: evaluations per round to find the least cost that keeps the limits, where a cost is minimized.
        moves: the most evaluations of moves around the best point.
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


def limited_search(history: EvaluationHistory, start: Bits, seed: int, options: LimitedOptions) -> Searcher:
    """A searcher for the best point under limits on costs, or for the least cost: it asks `start`, the solutions of the
    integer program as evaluations correct it, and moves around the best point.

    Before the search, the thresholds of every choice are refined, so that they suit any point of the program;
    thresholds that are refined at one point lose 2 to 5 dB elsewhere.
    """
    common_options = SensitivityOptions(options.rounds, options.points, options.moves, BATCH)
    return GeneratorSearcher("limited", options, _limited_steps(history, start, common_options))


def _limited_steps(history: EvaluationHistory, start: Bits, options: SensitivityOptions) -> Steps[None]:
    yield from search_steps(history, start, options, 2 * PATIENCE)
    if history.best[1].accepted:
        return
    # no point keeps every limit yet: ask for the ends of the expected front, then for moves around the best so far
    program = history.program()
    ends = program.range
    for limit in (None,) if ends is None else (ends[0] * (1 + 1e-9), None):
        picked = program.solve(limit)
        if picked is not None:
            yield from history.evaluate(picked.bits, "an end of the front that is expected")
    if not history.best[1].accepted:
        yield from search_steps(history, history.best[0], SensitivityOptions(batch=BATCH))
