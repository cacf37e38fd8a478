"""Guide: what is expected of points before any is evaluated: a loss and a cost for every choice.

A cost is a sum of terms, each a table over the bits of a few groups; most have one, the bit operations
of a convolution have two. Bits that a table leaves out fit no signature, and cost without end. The guide
proposes; evaluations decide.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np

from hago.plan.space import FLOAT, Bits, Space
from hago.study.searcher import Score


@dataclass(frozen=True, slots=True)
class Term:
    """A part of the cost.

    Args:
        keys: the groups that it depends on.
        table: by their bits, in that order; finite, without bits that no signature holds together.
    """

    keys: tuple[str, ...]
    table: Mapping[tuple[int, ...], float]

    def __call__(self, bits: Bits) -> float:
        return self.table.get(tuple(bits[k] for k in self.keys), math.inf)

    def beside(self, bits: Bits, there: Bits) -> float:
        """The cost where these groups have other bits."""
        return self.table.get(tuple(there.get(k, bits[k]) for k in self.keys), math.inf)


class AdditiveCost:
    """What knows the parts of a cost.

    Attributes:
        metric: the cost's name in `Score.costs`.
        terms, constant: they add up to it.
    """

    __slots__ = ()
    metric: str
    terms: Sequence[Term]
    constant: float

    def cost(self, bits: Bits) -> float:
        """The expected cost of a point."""
        return self.constant + math.fsum(term(bits) for term in self.terms)

    def cost_of(self, bits: Bits, score: Score) -> float:
        """The true cost of a scored point; what is expected where nobody counted, as of bits that fit no signature."""
        found = score.costs.get(self.metric)
        return self.cost(bits) if found is None else found


@dataclass(frozen=True, slots=True)
class CostConstraint(AdditiveCost):
    """A cost beside the guide's own that has a limit: its name in `Score.costs`, its parts, and what it may be."""

    metric: str
    terms: Sequence[Term]
    constant: float
    most: float

    def spare(self, bits: Bits, score: Score) -> float:
        """How much more a scored point may cost; negative where it misses the limit."""
        return self.most - self.cost_of(bits, score)


@dataclass(frozen=True, slots=True)
class Surrogate(AdditiveCost):
    """Expected losses and costs.

    Args:
        metric: the cost's name in `Score.costs`; empty for the total of bits.
        losses: by group, by bits, never less for fewer bits; they add up.
        terms: of the cost, a constant aside.
        constant: what every point costs beside the terms.
        limit: what the cost may be at most.
        held: other costs that have limits.
        minimize: whether the cost is what the search makes least.
        measured: the loss that a score tells of, in the unit of `losses`; None where it tells none.
        gates: by the group that may turn a node float, the groups whose losses are then gone.
        most: a point with as many bits as accumulators are known to hold; None for the first that runs.
        widest: a point with the most bits that signatures take together; None where they take the most of each.
    """

    metric: str
    losses: Mapping[str, Mapping[int, float]]
    terms: Sequence[Term]
    constant: float = 0.0
    limit: float | None = None
    held: Sequence[CostConstraint] = ()
    minimize: bool = False
    measured: Callable[[Score], float] | None = None
    gates: Mapping[str, Sequence[str]] = field(default_factory=dict)
    most: Bits | None = None
    widest: Bits | None = None

    def parts(self, bits: Bits) -> dict[str, float]:
        """The expected loss of a point by group."""
        gone = {k for gate, keys in self.gates.items() if bits[gate] == FLOAT for k in keys}
        return {k: 0.0 if k in gone else by[bits[k]] for k, by in self.losses.items()}

    def loss(self, bits: Bits) -> float:
        """The expected loss of a point."""
        return math.fsum(self.parts(bits).values())

    def corrected(self, factors: Mapping[str, Mapping[int, float]]) -> Surrogate:
        """With every loss times the factor of its group and bits, where there is one; so fewer bits may be expected to
        lose less."""
        none: Mapping[int, float] = {}
        losses = {k: {b: x * factors.get(k, none).get(b, 1.0) for b, x in by.items()} for k, by in self.losses.items()}
        return replace(self, losses=losses)


def plain_surrogate(space: Space) -> Surrogate:
    """What is known of any space: a bit less makes the squared error four times as large, and every bit
    costs one."""
    losses = {key: {b: 4.0 ** -min(b, 64) for b in g.choices} for key, g in space.groups.items()}
    terms = [Term((key,), {(b,): float(b) for b in g.choices}) for key, g in space.groups.items()]
    return Surrogate("", losses, terms)


# ---------------------------------------------------------------- nearby
# Nearby: what a guide expects of points that differ from one point in a few groups.
# A comparison takes as long as what the points differ in, whatever the size of the space; its figures are those of
# the whole guide to the last bit, since sums are rounded once.


@dataclass(frozen=True, slots=True)
class Change:
    """Other bits for a few groups, and what is expected of them.

    Args:
        loss, cost: the change; the cost is infinite where a term leaves out these bits, and negatively so where it
            leaves out only the bits here.
        churn: the sum of the sizes of all changes of loss.
    """

    bits: Mapping[str, int]
    loss: float
    cost: float
    churn: float


class NeighbourEstimates:
    """The surroundings of one point."""

    def __init__(self, guide: Surrogate, bits: Bits) -> None:
        self.guide, self.bits = guide, bits
        self._losses = guide.parts(bits)
        self._terms: dict[str, list[Term]] = {}
        for term in guide.terms:
            for key in dict.fromkeys(term.keys):
                self._terms.setdefault(key, []).append(term)
        self._gates: dict[str, list[str]] = {}
        for gate, keys in guide.gates.items():
            for key in keys:
                self._gates.setdefault(key, []).append(gate)
        self._sum = exact_sum([x for term in guide.terms if math.isfinite(x := term(bits))])
        self._cost = guide.constant + math.fsum(self._sum)

    def change(self, bits: Bits) -> Change:
        """What is expected where these groups have these bits and all others what they have here."""
        there = {k: b for k, b in bits.items() if b != self.bits[k]}
        felt = dict.fromkeys(k for key in there for k in (key, *self.guide.gates.get(key, ())))
        changes = [self._loss(k, there) - self._losses[k] for k in felt if k in self._losses]
        terms = {id(t): t for key in there for t in self._terms.get(key, ())}.values()
        cost = self._costs_more([t.beside(self.bits, there) for t in terms], [t(self.bits) for t in terms])
        return Change(there, math.fsum(changes), cost, math.fsum(map(abs, changes)))

    def _costs_more(self, there: Sequence[float], here: Sequence[float]) -> float:
        if math.inf in there or math.inf in here:
            return math.inf if math.inf in there else -math.inf
        return self.guide.constant + math.fsum([*self._sum, *there, *(-x for x in here)]) - self._cost

    def _loss(self, key: str, there: Bits) -> float:
        if any(self._at(gate, there) == FLOAT for gate in self._gates.get(key, ())):
            return 0.0
        return self.guide.losses[key][self._at(key, there)]

    def _at(self, key: str, there: Bits) -> int:
        return there.get(key, self.bits[key])


def exact_sum(values: Sequence[float]) -> list[float]:
    """A few numbers whose exact sum is that of all values, so that a sum with others is rounded once.

    References:
        J. R. Shewchuk, "Adaptive Precision Floating-Point Arithmetic", 1997, which `math.fsum` follows.
    """
    parts: list[float] = []
    while left := math.fsum([*values, *(-p for p in parts)]):
        parts.append(left)
    return parts


# ---------------------------------------------------------------- correction
# Correction: what evaluations say of expected losses, as a factor for every choice of every group.

#: How far a measured loss may be off what factors can explain, as a part of it.
_NOISE: Final = 0.2
#: How far factors are expected to be off 1: of a group, and of one choice beside its group's.
_GROUP: Final = 0.5
_CHOICE: Final = 0.5
#: Expected losses that are further off than this from what was measured teach nothing.
_LEAST: Final = 1e-3
#: Factors stay within this many times up or down.
_MOST: Final = 8.0


def factors(guide: Surrogate, scored: Sequence[tuple[Bits, Score]]) -> dict[str, dict[int, float]]:
    """Factors f, by group and bits, that bring sum f_gb * loss_gb(bits) closest to what was measured, relative to it;
    those of choices that no evaluation tells apart stay near their group's, and those of groups near the common one.

    Interactions between groups are in what is measured, so the factors carry them where the search is.
    The mean of a Gaussian process: one deviation for every group and one for every choice, both around the median of
    measured over expected losses.

    References:
        C. E. Rasmussen and C. K. I. Williams, "Gaussian Processes for Machine Learning", 2006, section 2.1.
    """
    groups = {key: i for i, key in enumerate(guide.losses)}
    choices = {(key, b): i for i, (key, b) in enumerate((k, b) for k, by in guide.losses.items() for b in by)}
    parts, choice = [], []
    for bits, score in scored:
        loss = math.nan if guide.measured is None or not score.runs else guide.measured(score)
        expected = guide.parts(bits)
        total = math.fsum(expected.values())
        # where nothing is lost, or next to nothing, there is nothing to learn
        if math.isfinite(loss) and loss > 0.0 and _LEAST < total / loss < 1 / _LEAST:
            parts.append([expected[k] / loss for k in groups])
            choice.append([choices[k, bits[k]] for k in groups])
    if not parts or not groups:
        return {}
    matrix, columns = np.array(parts), np.array(choice)
    common = float(np.median(1.0 / np.maximum(matrix.sum(1), 1e-300)))
    matrix *= common
    spread = np.zeros((len(matrix), len(choices)))
    np.put_along_axis(spread, columns, matrix, 1)
    kernel = _GROUP**2 * matrix @ matrix.T + _CHOICE**2 * spread @ spread.T
    weights = np.linalg.solve(kernel + _NOISE**2 * np.eye(len(matrix)), 1.0 - matrix.sum(1))
    of_group, of_choice = _GROUP**2 * matrix.T @ weights, _CHOICE**2 * spread.T @ weights
    return {
        key: {
            b: common * float(min(max(1.0 + of_group[i] + of_choice[choices[key, b]], 1 / _MOST), _MOST))
            for b in guide.losses[key]
        }
        for key, i in groups.items()
    }


# ---------------------------------------------------------------- climb
# Climb: other bits for one group of a point that was measured, ranked by what they should add to a front.
# A neighbour is expected to lose what its point was measured to lose, and the difference that the guide expects of
# the one change; so what groups do to each other at that point is in the expectation.

#: A neighbour is never expected to lose less than this part of what its point loses.
_LEAST_CHANGE: Final = 0.5


@dataclass(frozen=True, slots=True)
class MeasuredPoint:
    """A point of a front: its cost, and how good it is, in logarithms of its loss; larger is better."""

    cost: float
    merit: float
    bits: Bits


def neighbours(
    space: Space, guide: Surrogate, line: Sequence[MeasuredPoint], rooms: Mapping[tuple[str, ...], int]
) -> Iterator[dict[str, int]]:
    """Points that differ from one of a front in one group, those first that should add the most to its area.

    Args:
        guide: corrected by what was measured; its losses are those that merits are the logarithms of.
        line: by rising cost and merit.
        rooms: how many bits groups may have together.
    """
    terms: dict[str, list[Term]] = {}
    for term in guide.terms:
        for key in term.keys:
            terms.setdefault(key, []).append(term)
    costs = [p.cost for p in line]
    found: list[tuple[float, int, str, int]] = []
    for number, point in enumerate(line):
        # bits of a node that is float say nothing
        idle = {k for gate, keys in guide.gates.items() if point.bits[gate] == FLOAT for k in keys}
        for key, listed in terms.items():
            if key not in guide.losses or key in idle:
                continue
            for bits in space.groups[key].choices:
                if bits == point.bits[key] or not _fits(rooms, point.bits, key, bits):
                    continue
                cost = point.cost + math.fsum(_change(term, point.bits, key, bits) for term in listed)
                loss = math.exp(-point.merit)
                change = guide.losses[key][bits] - guide.losses[key][point.bits[key]]
                gain = _gain(line, costs, cost, -math.log(max(loss + change, _LEAST_CHANGE * loss)))
                if gain > 0.0:
                    found.append((gain, number, key, bits))
    for _, number, key, bits in sorted(found, key=lambda f: -f[0]):
        yield {**line[number].bits, key: bits}


def _change(term: Term, here: Bits, key: str, bits: int) -> float:
    """What a term costs more with other bits for one of its groups; without end where it leaves out either."""
    change = term.beside(here, {key: bits}) - term(here)
    return change if math.isfinite(change) else math.inf


def _gain(line: Sequence[MeasuredPoint], costs: Sequence[float], cost: float, merit: float) -> float:
    """What a point adds to the area under a front, costs in logarithms."""
    place = bisect.bisect_right(costs, cost)
    if place == 0:
        return 0.0
    added, left = 0.0, cost
    for lower, upper in zip(line[place - 1 :], line[place:], strict=False):
        if merit <= lower.merit:
            return added
        added += (merit - lower.merit) * math.log(upper.cost / max(left, 1e-300))
        left = upper.cost
    return added


def _fits(rooms: Mapping[tuple[str, ...], int], here: Bits, key: str, bits: int) -> bool:
    """Whether accumulators that the group feeds are known to hold as many bits."""
    return all(sum(bits if k == key else here[k] for k in keys) <= most for keys, most in rooms.items() if key in keys)
