"""Pareto search: the front between a cost and the loss, coarse first, every point evaluated.

Round 1 follows the front that the surrogate expects (`_sweep`); later rounds fill gaps of the front that was measured
(`_refine`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from hago.errors import HagoError
from hago.plan import Bits
from hago.searchers.evaluation_history import EvaluationHistory
from hago.searchers.knapsack import Knapsack, Solution
from hago.searchers.repair import first_point_that_runs
from hago.searchers.surrogate import MeasuredPoint, Surrogate, fit_factors, front_neighbours
from hago.study import GeneratorSearcher, Score, Searcher, Steps, point_key

#: The solver cannot distinguish costs whose ratio is smaller than this.
_DISTINCT: Final = 1.00001


@dataclass(frozen=True, slots=True)
class ParetoOptions:
    """Options of Pareto search.

    Args:
        cost: the cost that the front is over; empty for the first that the goal names, else weight_bytes.
        points: the largest number of points of the first round, both ends included and `start` not.
        rounds: the largest number of rounds. Each after the first evaluates up to half of `points`, alternating between
            solutions of the corrected program in gaps of the measured front and neighbours of its points.
        gain: a round that adds less than this part to the area under the front is the last; 0 for all rounds.
        batch: points that are asked at once, for parallel evaluation.
        least_loss: losses below it count as it where gaps are compared: a point without any loss is no better than one
            whose loss nobody notices, and does not draw all points to it. In the surrogate's unit, that of squared
            errors relative to the power of the outputs, or of divergences in nats. By default what float16 loses.
    """

    cost: str = ""
    points: int = 24
    rounds: int = 7
    gain: float = 0.01
    batch: int = 4
    least_loss: float = 2.0**-22

    def __post_init__(self) -> None:
        if not 0.0 <= self.gain < 1.0:
            raise HagoError(f"pareto search while a round adds {self.gain} of the area; expected a part, 0 <= gain < 1")
        if min(self.points, self.rounds, self.batch) < 1:
            raise HagoError(
                f"pareto search of {self.points} points in {self.rounds} rounds, {self.batch} at once; "
                "expected 1 or more"
            )
        if self.least_loss < 0.0:
            raise HagoError(f"pareto search with least_loss {self.least_loss}; expected a loss, 0 or more")


def pareto_search(history: EvaluationHistory, start: Bits, seed: int, options: ParetoOptions) -> Searcher:
    """A searcher that asks `start`, with fewer bits until it runs, then both ends of the expected front, then points
    between them: each is the solution of the integer program with a limit in the middle of the widest gap so far. At
    whatever time the search is stopped, its points are spread along the front.

    References:
        The epsilon-constraint method: Y. Haimes et al., IEEE Trans. SMC 1, 1971.
    """
    return GeneratorSearcher("pareto", options, _steps(history, start, options))


def _steps(history: EvaluationHistory, start: Bits, options: ParetoOptions) -> Steps[None]:
    history.scored.append((yield from first_point_that_runs(history.space, start, history.feeds, history.known_scores)))
    if all(len(g.choices) == 1 for g in history.space.groups.values()):
        return
    yield from _sweep(history, history.program(), options, "round 1")
    for number in range(2, options.rounds + 1):
        count_before, front = len(history.scored), _measured_front(history, options.least_loss)
        yield from _refine(history, options, f"round {number}")
        added = area_added(front, _measured_front(history, options.least_loss))
        if len(history.scored) == count_before or added < options.gain:
            return


@dataclass(frozen=True, slots=True)
class _Gap:
    """The gap between two neighbouring points of the expected front."""

    low: Solution
    high: Solution

    def size(self, least_loss: float) -> float:
        """The size of the gap: the logarithm of the ratio of costs times that of the ratio of losses, where losses are
        at least `least_loss`."""
        loss = max(self.high.loss, least_loss)
        return max(_ratio(self.low.cost, self.high.cost), 0.0) * max(_ratio(loss, self.low.loss), 0.0)

    @property
    def middle(self) -> float:
        """The cost half way between the ends."""
        return (self.low.cost + self.high.cost) / 2


def _sweep(history: EvaluationHistory, program: Knapsack, options: ParetoOptions, why: str) -> Steps[None]:
    """Ask for points of the expected front, the widest gap first."""
    ends = program.range
    if ends is None:
        return
    least = ends[0]
    low, high = program.solve(least * (1 + 1e-9)), program.solve(None)
    if low is None or high is None:
        return
    yield from history.evaluate_all([low.bits, high.bits], f"{why}: the ends of the front")
    gaps, left = [_Gap(low, high)], options.points - 2
    while gaps and left > 0:
        batch: list[Solution] = []
        while gaps and len(batch) < min(left, options.batch):
            gaps.sort(key=lambda g: g.size(options.least_loss))
            gap = gaps.pop()
            picked, parts = _split(program, gap)
            batch += picked
            gaps += parts
        new = [p.bits for p in batch if point_key(p.bits) not in history.known_scores]
        left -= len(batch)
        yield from history.evaluate_all(new, f"{why}: the front between {least:.4g} and {high.cost:.4g}")


def _split(program: Knapsack, gap: _Gap) -> tuple[list[Solution], list[_Gap]]:
    """A point of the front inside a gap and the gaps on both sides of it; two empty lists if no point is inside."""
    picked = program.solve(gap.middle)
    if picked is not None and picked.cost > gap.low.cost * _DISTINCT:
        return [picked], [_Gap(gap.low, picked), _Gap(picked, gap.high)]
    # the lower half has no point: take the point just below the upper end, which is in the upper half, if there is one
    picked = program.solve(gap.high.cost / _DISTINCT)
    if picked is None or picked.cost <= gap.low.cost * _DISTINCT:
        return [], []
    return [picked], [_Gap(gap.low, picked)]


# ---------------------------------------------------------------- the measured front
def _refine(history: EvaluationHistory, options: ParetoOptions, why: str) -> Steps[None]:
    """Ask for points that are expected to improve the measured front."""
    left, empty_gaps = -(-options.points // 2), set[tuple[str, str]]()
    while left > 0:
        points = _proposals(history, options, min(left, options.batch), empty_gaps)
        if not points:
            return
        left -= len(points)
        yield from history.evaluate_all(points, f"{why}: in the gaps of the measured front")


def _proposals(
    history: EvaluationHistory, options: ParetoOptions, count: int, empty_gaps: set[tuple[str, str]]
) -> list[Bits]:
    """New points: alternately a solution of the program in a gap of the measured front and a neighbour of its points.

    Args:
        empty_gaps: see `_in_gaps`.
    """
    front = _measured_front(history, options.least_loss)
    surrogate = history.surrogate.corrected(fit_factors(history.surrogate, history.scored))
    sources = [_in_gaps(history.program(), front, empty_gaps)]
    if surrogate.loss_of_score is not None:
        sources.append(front_neighbours(history.space, surrogate, front, history.accumulator_limits))
    new: dict[str, Bits] = {}
    while sources and len(new) < count:
        source = sources.pop(0)
        for bits in source:
            key = point_key(bits)
            if key not in history.known_scores and key not in new:
                new[key] = bits
                sources.append(source)
                break
    return list(new.values())


def _in_gaps(program: Knapsack, front: Sequence[MeasuredPoint], empty_gaps: set[tuple[str, str]]) -> Iterator[Bits]:
    """Yield up to two points inside each gap of a front, the widest gap first.

    Args:
        empty_gaps: the ends of gaps in which the program has no solution, which are skipped; new ones are added.
    """
    for low, high in sorted(itertools.pairwise(front), key=_gap_size, reverse=True):
        ends, has_solution = (point_key(low.bits), point_key(high.bits)), False
        if ends in empty_gaps:
            continue
        for limit in ((low.cost + high.cost) / 2, high.cost / _DISTINCT):
            picked = program.solve(limit)
            if picked is not None and picked.cost > low.cost * _DISTINCT:
                has_solution = True
                yield picked.bits
        if not has_solution:
            empty_gaps.add(ends)


def _gap_size(gap: tuple[MeasuredPoint, MeasuredPoint]) -> float:
    """The size of a gap of the measured front: the logarithm of the ratio of costs times the difference of merits."""
    low, high = gap
    return _ratio(low.cost, high.cost) * (high.merit - low.merit)


def area_added(before: Sequence[MeasuredPoint], after: Sequence[MeasuredPoint]) -> float:
    """The part of the area under the front `after` (merits over logarithms of costs) that the front `before` lacks."""
    if not before or not after:
        return float(len(after) > len(before))
    least, most = min(before[0].merit, after[0].merit), max(before[-1].cost, after[-1].cost)

    def area(front: Sequence[MeasuredPoint]) -> float:
        ends = [*(p.cost for p in front), most][1:]
        return math.fsum((p.merit - least) * _ratio(p.cost, end) for p, end in zip(front, ends, strict=True))

    total = area(after)
    return (total - area(before)) / total if total > 0.0 else 0.0


def _ratio(low: float, high: float) -> float:
    """The logarithm of high / low."""
    return math.log(max(high, 1e-300) / max(low, 1e-300))


def _measured_front(history: EvaluationHistory, least_loss: float) -> list[MeasuredPoint]:
    """The accepted points that no other beats in both cost and merit, by rising cost."""
    surrogate = history.surrogate
    points = [
        MeasuredPoint(surrogate.cost_of(bits, score), _merit(surrogate, score, least_loss), bits)
        for bits, score in history.scored
        if score.accepted
    ]
    front: list[MeasuredPoint] = []
    for point in sorted(points, key=lambda p: (p.cost, -p.merit)):
        if not math.isnan(point.merit) and (not front or point.merit > front[-1].merit):
            front.append(point)
    return front


def _merit(surrogate: Surrogate, score: Score, least_loss: float) -> float:
    """The merit of a score, see MeasuredPoint, with a loss of at least `least_loss`."""
    if surrogate.loss_of_score is None:
        return score.value
    return -math.log(max(surrogate.loss_of_score(score), least_loss, 1e-300))
