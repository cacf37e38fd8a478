"""Groups of a space that costs, gates or accumulators join, merged into one whose choices are what is left of their
combinations when those that another beats are dropped.

`Knapsack` merges before it makes its integer program. Where all groups merge, the program is a multiple-choice
knapsack, whose relaxation is tight: at most one choice for each limit is fractional. Without it, the losses of nodes
that may be float are constrained one by one, and the relaxation of ResNet-20's programs is a third of their optimum.

References:
    Dominated choices, and the relaxation: P. Sinha, A. A. Zoltners, "The multiple-choice knapsack problem", Operations
    Research 27, 1979.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from hago.plan import FLOAT, Bits
from hago.searchers.surrogate import CostConstraint, Surrogate, Term

#: Groups with more combinations of choices are not merged.
_MOST_COMBINATIONS: Final = 1024

#: By key, the bits to choose from.
Choices: TypeAlias = Mapping[str, Sequence[int]]


@dataclass(frozen=True, slots=True)
class AccumulatorLimit:
    """A constraint: groups that feed one accumulator have at most `bits` bits together."""

    keys: tuple[str, ...]
    bits: int


@dataclass(frozen=True, slots=True)
class MergedGroups:
    """The groups of a space, merged as far as they have few combinations.

    Args:
        choices: of a merged group, the indices into its `combinations`.
        surrogate: losses and costs of these choices; its gates are those of groups that are not merged.
        accumulator_limits: those on groups that are not merged.
        combinations: by merged group, the bits that its choices stand for; none that is not less in loss or in a cost
            than another. Of combinations with equal losses and costs, the first in the order of choices is left.
        order: the groups of the space.
    """

    choices: Choices
    surrogate: Surrogate
    accumulator_limits: Sequence[AccumulatorLimit]
    combinations: Mapping[str, Sequence[Bits]]
    order: Sequence[str]

    def bits(self, merged: Bits) -> dict[str, int]:
        """The point of the space that a choice for every merged group stands for, in the order of the space."""
        found = dict[str, int]()
        for key, choice in merged.items():
            found |= self.combinations[key][choice] if key in self.combinations else {key: choice}
        return {key: found[key] for key in self.order}


def merge_groups(
    choices: Choices, surrogate: Surrogate, accumulator_limits: Sequence[AccumulatorLimit]
) -> MergedGroups:
    """Merge the groups that gates, terms of costs, or limits of accumulators join; none where the surrogate says so."""
    if not surrogate.merges:
        return MergedGroups(choices, surrogate, accumulator_limits, {}, tuple(choices))
    costs = [surrogate.terms, *(c.terms for c in surrogate.constraints)]
    joined: list[Sequence[str]] = [(gate, *keys) for gate, keys in surrogate.gates.items()]
    joined += [term.keys for terms in costs for term in terms]
    joined += [limit.keys for limit in accumulator_limits]
    merged: dict[str, Sequence[int]] = {}
    combinations: dict[str, Sequence[Bits]] = {}
    losses = dict(surrogate.losses)
    summed: list[list[Term]] = [[] for _ in costs]
    alone = set[str]()
    for keys in _connected(choices, joined):
        if math.prod(len(choices[key]) for key in keys) > _MOST_COMBINATIONS:
            merged |= {key: choices[key] for key in keys}
            alone |= set(keys)
            continue
        part = _Part({key: choices[key] for key in keys}, surrogate, costs, accumulator_limits)
        kept, name = part.undominated(), keys[0]
        merged[name] = range(len(kept))
        combinations[name] = [part.points[row] for row in kept]
        for key in keys:
            losses.pop(key, None)
        losses[name] = {i: float(part.losses[row]) for i, row in enumerate(kept)}
        for terms, of_part in zip(summed, part.costs, strict=True):
            if of_part.any():
                terms.append(Term((name,), {(i,): float(of_part[row]) for i, row in enumerate(kept)}))
    own, *others = [[*(t for t in terms if t.keys[0] in alone), *new] for terms, new in zip(costs, summed, strict=True)]
    constraints: list[CostConstraint] = [
        replace(c, terms=terms) for c, terms in zip(surrogate.constraints, others, strict=True)
    ]
    gates = {gate: keys for gate, keys in surrogate.gates.items() if gate in alone}
    return MergedGroups(
        merged,
        replace(surrogate, losses=losses, terms=own, constraints=constraints, gates=gates),
        [limit for limit in accumulator_limits if limit.keys[0] in alone],
        combinations,
        tuple(choices),
    )


def _connected(choices: Choices, joined: Sequence[Sequence[str]]) -> list[list[str]]:
    """The connected components of the groups, in the order of the space."""
    from scipy.sparse import coo_matrix
    from scipy.sparse.csgraph import connected_components

    index = {key: i for i, key in enumerate(choices)}
    pairs = [pair for keys in joined for pair in itertools.pairwise(index[key] for key in keys if key in index)]
    ends = ([a for a, _ in pairs], [b for _, b in pairs])
    adjacency = coo_matrix((np.ones(len(pairs)), ends), shape=(len(index), len(index)))
    components: dict[int, list[str]] = {}
    for key, component in zip(choices, connected_components(adjacency, directed=False)[1], strict=True):
        components.setdefault(int(component), []).append(key)
    return list(components.values())


class _Part:
    """The combinations of the choices of a few groups, with their losses and costs.

    Attributes:
        points: the combinations that fit the terms of all costs and the limits of accumulators.
        losses: (points,) of each.
        costs: for every cost, (points,).
    """

    def __init__(
        self,
        choices: Choices,
        surrogate: Surrogate,
        costs: Sequence[Sequence[Term]],
        accumulator_limits: Sequence[AccumulatorLimit],
    ) -> None:
        within = [[term for term in terms if term.keys[0] in choices] for terms in costs]
        limits = [limit for limit in accumulator_limits if limit.keys[0] in choices]
        gates = {key: gate for gate, keys in surrogate.gates.items() for key in keys}
        losses = {key: surrogate.losses[key] for key in choices if key in surrogate.losses}
        self.points: list[dict[str, int]] = []
        rows: list[list[float]] = []
        for combination in itertools.product(*choices.values()):
            point = dict(zip(choices, combination, strict=True))
            found = [math.fsum(term(point) for term in terms) for terms in within]
            if math.inf in found or any(sum(point[k] for k in limit.keys) > limit.bits for limit in limits):
                continue
            lost = (by[point[key]] for key, by in losses.items() if point.get(gates.get(key, "")) != FLOAT)
            self.points.append(point)
            rows.append([math.fsum(lost), *found])
        columns: NDArray[np.float64] = np.array(rows).reshape(len(rows), 1 + len(costs)).T
        self.losses, self.costs = columns[0], columns[1:]

    def undominated(self) -> list[int]:
        """The indices of points that no other equals or beats in the loss and all costs, in their order; of equal
        points the first."""
        figures = np.stack([self.losses, *self.costs], 1)
        kept = list[int]()
        for row in np.lexsort((np.arange(len(figures)), *figures.T[::-1])):
            if not (figures[kept] <= figures[row]).all(1).any():
                kept.append(int(row))
        return sorted(kept)
