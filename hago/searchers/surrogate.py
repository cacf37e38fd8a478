"""A surrogate model of the search: expected losses and costs of points that were not evaluated.

`search.guidance` makes one `Surrogate` per search, from sensitivities and the costs of Plans. Searchers choose with it
which points to evaluate; the results of the evaluations alone decide which point is best.

The expected loss of a point is the sum of one loss per group. Its cost is a sum of terms, each a table over the bits of
one group or, e.g. for the bit operations of a convolution, two. Bits that a table lacks fit no signature; their cost is
unbounded (`math.inf`).

In order: the model; estimates for the neighbours of one point, in time that does not depend on the size of the space
(`NeighbourEstimates`); correction factors for losses, fitted to evaluations (`fit_factors`); and the neighbours of a
measured Pareto front, ranked by what they are expected to add to it (`front_neighbours`).
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np

from hago.plan import FLOAT, Bits, Space
from hago.study import Score

# Factors correct expected losses, see `fit_factors`. The common factor is the median ratio of measured to expected
# losses.
#: Standard deviation of a measured loss from what factors can explain, relative to the loss.
_LOSS_NOISE: Final = 0.2
#: Prior standard deviations, relative to the common factor: of a group's factor around it, and of a choice's factor
#: around its group's.
_GROUP_DEVIATION: Final = 0.5
_CHOICE_DEVIATION: Final = 0.5
#: Evaluations whose expected loss is below this fraction of the measured one, or above its inverse, are not fitted.
_FITTED_RATIO: Final = 1e-3
#: Factors, relative to the common factor, are clamped to 1 / _LARGEST_FACTOR and _LARGEST_FACTOR.
_LARGEST_FACTOR: Final = 8.0
#: The smallest loss that is expected of a front point's neighbour, as a fraction of the point's loss.
_LEAST_LOSS_RATIO: Final = 0.5


@dataclass(frozen=True, slots=True)
class Term:
    """One term of an additive cost.

    Args:
        keys: the groups that it depends on.
        table: costs by the bits of these groups, in that order; finite. Bits that it lacks fit no signature together.
    """

    keys: tuple[str, ...]
    table: Mapping[tuple[int, ...], float]

    def __call__(self, bits: Bits) -> float:
        """The term's cost at a point; `math.inf` where no signature holds its bits."""
        return self.table.get(tuple(bits[k] for k in self.keys), math.inf)

    def cost_with_changes(self, bits: Bits, changed: Bits) -> float:
        """The term's cost at the point `bits` with the bits of a few groups changed."""
        return self.table.get(tuple(changed.get(k, bits[k]) for k in self.keys), math.inf)


class AdditiveCost:
    """An additive cost model: the cost of a point is a constant plus the sum of its terms. Base of `CostConstraint` and
    `Surrogate`.

    Attributes:
        metric: the name of the cost in `Score.costs`.
        terms, constant: the summands.
    """

    __slots__ = ()
    metric: str
    terms: Sequence[Term]
    constant: float

    def cost(self, bits: Bits) -> float:
        """The expected cost of a point."""
        return self.constant + math.fsum(term(bits) for term in self.terms)

    def cost_of(self, bits: Bits, score: Score) -> float:
        """The cost in a point's score, or the expected cost where the score has none, as that of an infeasible
        point."""
        measured = score.costs.get(self.metric)
        return self.cost(bits) if measured is None else measured


@dataclass(frozen=True, slots=True)
class CostConstraint(AdditiveCost):
    """A limit on a cost other than the surrogate's own.

    Args:
        metric: the name of the cost in `Score.costs`.
        terms, constant: the summands of the cost.
        most: the limit.
    """

    metric: str
    terms: Sequence[Term]
    constant: float
    most: float

    def slack(self, bits: Bits, score: Score) -> float:
        """The limit less the cost of a scored point; negative where the point violates it."""
        return self.most - self.cost_of(bits, score)


@dataclass(frozen=True, slots=True)
class Surrogate(AdditiveCost):
    """Expected losses and costs of every point. Immutable; made once per search by `search.guidance`.

    Args:
        metric: the name of the cost in `Score.costs`; empty for the total of bits.
        losses: expected loss by group and bits, not less for fewer bits; the loss of a point is their sum.
        terms: the terms of the cost.
        constant: the cost of every point beside the terms.
        limit: the most that the cost may be.
        constraints: limits on other costs.
        minimize: whether the search minimizes the cost, and not the loss.
        loss_of_score: reads the measured loss from a score, in the unit of `losses`; None where scores do not have it.
        gates: by the group that may turn a node float, the groups that lose nothing when it does.
        most: a point without overflow, whose bits limit those at each accumulator; None for the first evaluated point
            that runs.
        widest: the widest feasible point; None where it has the most bits of every group.
        merges: whether integer programs merge groups (`merge_groups`) and remember solutions (`Knapsack.solve`).
    """

    metric: str
    losses: Mapping[str, Mapping[int, float]]
    terms: Sequence[Term]
    constant: float = 0.0
    limit: float | None = None
    constraints: Sequence[CostConstraint] = ()
    minimize: bool = False
    loss_of_score: Callable[[Score], float] | None = None
    gates: Mapping[str, Sequence[str]] = field(default_factory=dict)
    most: Bits | None = None
    widest: Bits | None = None
    merges: bool = True

    def parts(self, bits: Bits) -> dict[str, float]:
        """The expected loss of a point, by group."""
        lossless = {k for gate, keys in self.gates.items() if bits[gate] == FLOAT for k in keys}
        return {k: 0.0 if k in lossless else by_bits[bits[k]] for k, by_bits in self.losses.items()}

    def loss(self, bits: Bits) -> float:
        """The expected loss of a point."""
        return math.fsum(self.parts(bits).values())

    def corrected(self, factors: Mapping[str, Mapping[int, float]]) -> Surrogate:
        """The model with each loss multiplied by the factor of its group and bits (see `fit_factors`), 1 where there is
        none. Fewer bits may then be expected to lose less."""
        none: Mapping[int, float] = {}
        losses = {
            key: {bits: loss * factors.get(key, none).get(bits, 1.0) for bits, loss in by_bits.items()}
            for key, by_bits in self.losses.items()
        }
        return replace(self, losses=losses)


def plain_surrogate(space: Space) -> Surrogate:
    """The model for a space without measurements: one bit fewer multiplies the squared error by four, and each bit
    costs 1."""
    losses = {key: {b: 4.0 ** -min(b, 64) for b in g.choices} for key, g in space.groups.items()}
    terms = [Term((key,), {(b,): float(b) for b in g.choices}) for key, g in space.groups.items()]
    return Surrogate("", losses, terms)


# ---------------------------------------------------------------- the neighbours of one point
@dataclass(frozen=True, slots=True)
class Change:
    """Changed bits of a few groups, and the expected change of loss and cost.

    Args:
        bits: the bits that differ from the point's.
        loss: expected loss with the change, less that without.
        cost: expected cost with the change, less that without; `inf` where the changed bits fit no signature, `-inf`
            where they do and the point's bits do not.
        churn: the sum of the magnitudes of the groups' changes of loss. Where some groups gain bits and others lose
            them, `loss` is a small difference of large figures, and its error is in proportion to `churn`.
    """

    bits: Mapping[str, int]
    loss: float
    cost: float
    churn: float


class NeighbourEstimates:
    """Expected changes of loss and cost around one point. A search makes one for the best point so far, and orders the
    point's neighbours by it.

    An estimate takes time proportional to the number of groups that change, whatever the size of the space. It equals
    the difference of the surrogate's own figures bit for bit, since every sum is rounded once.
    """

    def __init__(self, surrogate: Surrogate, bits: Bits) -> None:
        self.surrogate, self.bits = surrogate, bits
        self._losses = surrogate.parts(bits)
        self._terms: dict[str, list[Term]] = {}
        for term in surrogate.terms:
            for key in dict.fromkeys(term.keys):
                self._terms.setdefault(key, []).append(term)
        self._gates: dict[str, list[str]] = {}
        for gate, keys in surrogate.gates.items():
            for key in keys:
                self._gates.setdefault(key, []).append(gate)
        self._sum = exact_sum([x for term in surrogate.terms if math.isfinite(x := term(bits))])
        self._cost = surrogate.constant + math.fsum(self._sum)

    def change(self, bits: Bits) -> Change:
        """The expected change where these groups have these bits, and all others those of the point."""
        changed = {k: b for k, b in bits.items() if b != self.bits[k]}
        affected = dict.fromkeys(k for key in changed for k in (key, *self.surrogate.gates.get(key, ())))
        losses = [self._loss(k, changed) - self._losses[k] for k in affected if k in self._losses]
        terms = {id(t): t for key in changed for t in self._terms.get(key, ())}.values()
        cost = self._cost_change(
            [t.cost_with_changes(self.bits, changed) for t in terms], [t(self.bits) for t in terms]
        )
        return Change(changed, math.fsum(losses), cost, math.fsum(map(abs, losses)))

    def _cost_change(self, after: Sequence[float], before: Sequence[float]) -> float:
        """The change of the whole cost where terms change from `before` to `after`."""
        if math.inf in after or math.inf in before:
            return math.inf if math.inf in after else -math.inf
        return self.surrogate.constant + math.fsum([*self._sum, *after, *(-x for x in before)]) - self._cost

    def _loss(self, key: str, changed: Bits) -> float:
        if any(self._bits(gate, changed) == FLOAT for gate in self._gates.get(key, ())):
            return 0.0
        return self.surrogate.losses[key][self._bits(key, changed)]

    def _bits(self, key: str, changed: Bits) -> int:
        return changed.get(key, self.bits[key])


def exact_sum(values: Sequence[float]) -> list[float]:
    """A few numbers with the same exact sum as `values`, so that a sum of these and others is rounded once.

    References:
        J. R. Shewchuk, "Adaptive Precision Floating-Point Arithmetic", 1997, which `math.fsum` follows.
    """
    parts: list[float] = []
    while remainder := math.fsum([*values, *(-p for p in parts)]):
        parts.append(remainder)
    return parts


# ---------------------------------------------------------------- correction of losses by evaluations
def fit_factors(surrogate: Surrogate, scored: Sequence[tuple[Bits, Score]]) -> dict[str, dict[int, float]]:
    """Fit factors f, by group and bits, such that the sum of f * loss over the groups of each scored point is close to
    its measured loss, relative to it. For `Surrogate.corrected`; empty where no score has a loss to fit.

    The posterior mean of a Gaussian process with one deviation for every group and one for every choice, both around
    the median ratio of measured to expected losses: choices that no evaluation distinguishes stay near their group's
    factor, and groups near the common one. Measured losses contain the interactions between groups, so that the factors
    account for these near the points that were evaluated.

    References:
        C. E. Rasmussen and C. K. I. Williams, "Gaussian Processes for Machine Learning", 2006, section 2.1.
    """
    groups = {key: i for i, key in enumerate(surrogate.losses)}
    choices = {(key, b): i for i, (key, b) in enumerate((k, b) for k, by in surrogate.losses.items() for b in by)}
    rows, choices_of_rows = [], []
    for bits, score in scored:
        loss = math.nan if surrogate.loss_of_score is None or not score.runs else surrogate.loss_of_score(score)
        expected = surrogate.parts(bits)
        total = math.fsum(expected.values())
        # a point with a negligible measured or expected loss says nothing about ratios
        if math.isfinite(loss) and loss > 0.0 and _FITTED_RATIO < total / loss < 1 / _FITTED_RATIO:
            rows.append([expected[k] / loss for k in groups])
            choices_of_rows.append([choices[k, bits[k]] for k in groups])
    if not rows or not groups:
        return {}
    matrix, columns = np.array(rows), np.array(choices_of_rows)
    common = float(np.median(1.0 / np.maximum(matrix.sum(1), 1e-300)))
    matrix *= common
    spread = np.zeros((len(matrix), len(choices)))
    np.put_along_axis(spread, columns, matrix, 1)
    kernel = _GROUP_DEVIATION**2 * matrix @ matrix.T + _CHOICE_DEVIATION**2 * spread @ spread.T
    weights = np.linalg.solve(kernel + _LOSS_NOISE**2 * np.eye(len(matrix)), 1.0 - matrix.sum(1))
    of_group, of_choice = _GROUP_DEVIATION**2 * matrix.T @ weights, _CHOICE_DEVIATION**2 * spread.T @ weights
    return {
        key: {
            b: common
            * float(min(max(1.0 + of_group[i] + of_choice[choices[key, b]], 1 / _LARGEST_FACTOR), _LARGEST_FACTOR))
            for b in surrogate.losses[key]
        }
        for key, i in groups.items()
    }


# ---------------------------------------------------------------- the neighbours of a measured front
@dataclass(frozen=True, slots=True)
class MeasuredPoint:
    """An evaluated point of a Pareto front.

    Args:
        merit: minus the logarithm of its loss, or its value where scores have no loss; larger is better.
    """

    cost: float
    merit: float
    bits: Bits


def front_neighbours(
    space: Space, surrogate: Surrogate, front: Sequence[MeasuredPoint], limits: Mapping[tuple[str, ...], int]
) -> Iterator[dict[str, int]]:
    """Yield points that differ from a point of a front in one group, in the order of the area that they are expected to
    add under the front.

    The loss expected of a neighbour is the measured loss of its point plus the change that the surrogate expects, so
    that interactions between groups at that point are in it.

    Args:
        surrogate: corrected by evaluations. Its losses are in the unit of exp(-merit).
        front: the front, by rising cost and merit.
        limits: by groups that feed one accumulator, the most bits that they may have together.
    """
    terms: dict[str, list[Term]] = {}
    for term in surrogate.terms:
        for key in term.keys:
            terms.setdefault(key, []).append(term)
    costs = [p.cost for p in front]
    candidates: list[tuple[float, int, str, int]] = []
    for number, point in enumerate(front):
        # the bits of a float node have no effect
        idle = {k for gate, keys in surrogate.gates.items() if point.bits[gate] == FLOAT for k in keys}
        for key, key_terms in terms.items():
            if key not in surrogate.losses or key in idle:
                continue
            for bits in space.groups[key].choices:
                if bits == point.bits[key] or not _keeps_accumulator_limits(limits, point.bits, key, bits):
                    continue
                cost = point.cost + math.fsum(_cost_change(term, point.bits, key, bits) for term in key_terms)
                loss = math.exp(-point.merit)
                change = surrogate.losses[key][bits] - surrogate.losses[key][point.bits[key]]
                gain = _area_gain(front, costs, cost, -math.log(max(loss + change, _LEAST_LOSS_RATIO * loss)))
                if gain > 0.0:
                    candidates.append((gain, number, key, bits))
    for _, number, key, bits in sorted(candidates, key=lambda candidate: -candidate[0]):
        yield {**front[number].bits, key: bits}


def _cost_change(term: Term, point: Bits, key: str, bits: int) -> float:
    """The change of a term where one of its groups has other bits; unbounded where either bits fit no signature."""
    change = term.cost_with_changes(point, {key: bits}) - term(point)
    return change if math.isfinite(change) else math.inf


def _area_gain(front: Sequence[MeasuredPoint], costs: Sequence[float], cost: float, merit: float) -> float:
    """The area that a point adds under a front, over the logarithm of costs."""
    place = bisect.bisect_right(costs, cost)
    if place == 0:
        return 0.0
    area, start = 0.0, cost
    for lower, upper in zip(front[place - 1 :], front[place:], strict=False):
        if merit <= lower.merit:
            return area
        area += (merit - lower.merit) * math.log(upper.cost / max(start, 1e-300))
        start = upper.cost
    return area


def _keeps_accumulator_limits(limits: Mapping[tuple[str, ...], int], point: Bits, key: str, bits: int) -> bool:
    """Whether a point with these bits of one group keeps the limits of the accumulators that the group feeds."""
    return all(
        sum(bits if k == key else point[k] for k in keys) <= most for keys, most in limits.items() if key in keys
    )
