"""Groups of a space that costs, gates or accumulators join, merged into one whose choices are those of their
combinations that no other one equals or beats in the loss and all costs.

`Knapsack` merges before it makes its integer program. Where all groups merge and one cost is limited, the program is a
multiple-choice knapsack, whose relaxation is tight: at most one group has fractional choices. Without it, the losses of
nodes that may be float are constrained one by one, and the relaxation of ResNet-20's programs is a third of their
optimum.

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
_MOST_COMBINATIONS: Final = 512

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
        combinations: by merged group, the bits that its choices stand for. Each has a smaller loss, or some smaller
            cost, than any other; of those with equal losses and costs, the first in the order of choices is left.
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
    apart = set[str]()
    for keys in _connected(choices, joined):
        if math.prod(len(choices[key]) for key in keys) > _MOST_COMBINATIONS:
            merged |= {key: choices[key] for key in keys}
            apart |= set(keys)
            continue
        points, figures = _undominated({key: choices[key] for key in keys}, surrogate, costs, accumulator_limits)
        name = keys[0]
        merged[name], combinations[name] = range(len(points)), points
        for key in keys:
            losses.pop(key, None)
        losses[name], *of_costs = (dict(enumerate(column)) for column in figures.T.tolist())
        for terms, values in zip(summed, of_costs, strict=True):
            terms.append(Term((name,), {(choice,): value for choice, value in values.items()}))
    own, *others = [[*(t for t in terms if t.keys[0] in apart), *new] for terms, new in zip(costs, summed, strict=True)]
    constraints: list[CostConstraint] = [
        replace(c, terms=terms) for c, terms in zip(surrogate.constraints, others, strict=True)
    ]
    gates = {gate: keys for gate, keys in surrogate.gates.items() if gate in apart}
    return MergedGroups(
        merged,
        replace(surrogate, losses=losses, terms=own, constraints=constraints, gates=gates),
        [limit for limit in accumulator_limits if not apart.isdisjoint(limit.keys)],
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


def _undominated(
    choices: Choices,
    surrogate: Surrogate,
    costs: Sequence[Sequence[Term]],
    accumulator_limits: Sequence[AccumulatorLimit],
) -> tuple[list[Bits], NDArray[np.float64]]:
    """The combinations of a few groups' choices that no other equals or beats, in their order, with their losses and
    all costs (combinations, 1 + costs).

    Args:
        choices: of the groups, which nothing joins to others.
    """
    shape = tuple(len(of_key) for of_key in choices.values())

    def along(keys: Sequence[str]) -> tuple[list[Bits], list[int]]:
        """The combinations of a few groups alone, and the shape in which what depends on them has their axes."""
        own = [key for key in choices if key in keys]
        points = [dict(zip(own, row, strict=True)) for row in itertools.product(*(choices[key] for key in own))]
        return list(points), [len(choices[key]) if key in own else 1 for key in choices]

    gates = {key: gate for gate, keys in surrogate.gates.items() for key in keys}
    figures = np.zeros((1 + len(costs), *shape))
    for key in choices:
        if key in surrogate.losses:
            gate, by_bits = gates.get(key, ""), surrogate.losses[key]
            some, axes = along((key, gate))
            lost = [0.0 if point.get(gate) == FLOAT else by_bits[point[key]] for point in some]
            figures[0] += np.reshape(lost, axes)
    for column, terms in zip(figures[1:], costs, strict=True):
        for term in terms:
            if term.keys[0] in choices:
                some, axes = along(term.keys)
                column += np.reshape([term(point) for point in some], axes)
    for limit in accumulator_limits:
        if not choices.keys().isdisjoint(limit.keys):
            some, axes = along(limit.keys)
            figures += np.reshape([0.0 if sum(point.values()) <= limit.bits else math.inf for point in some], axes)
    rows = figures.reshape(len(figures), -1).T
    kept = list[int]()
    for row in np.lexsort((np.arange(len(rows)), *rows.T[::-1])):
        if np.isfinite(rows[row, 1:]).all() and not (rows[kept] <= rows[row]).all(1).any():
            kept.append(int(row))
    kept.sort()
    chosen = zip(*np.unravel_index(np.array(kept, dtype=np.int64), shape), strict=True)
    points: list[Bits] = [{key: choices[key][i] for key, i in zip(choices, index, strict=True)} for index in chosen]
    return points, rows[kept]
