"""Signatures at a node: which groups of bits decide what it reads and writes, and what its signatures take of them."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from hago.arithmetic.types import DType, Edge
from hago.errors import InfeasibleBits
from hago.graph.graph import CONST, OUTPUT, Node
from hago.hardware.hardware import OpDesc
from hago.ops._rule import IntegerForm
from hago.plan.plan import Plan
from hago.plan.resolve import Resolver
from hago.plan.space import Bits, Group, Space
from hago.plan.topology import fitting_descs, weight_only_descs

#: Mixtures of dtypes that a node may be given, of which each is looked at.
_MIXED: Final = 256


def feeding(resolver: Resolver, edge: Edge) -> str | None:
    """The group whose bits arrive on an edge, past nodes that hand values on; None where there is none."""
    graph = resolver.graph
    while True:
        key = resolver.group_of.get(edge)
        if key is not None:
            return key
        source = graph[graph.source(edge)]
        if f"{source.name}:out" in resolver.space.groups:
            return f"{source.name}:out"
        if source.op == CONST or not source.inputs or not resolver.topology.nodes[source.name]:
            return None
        edge = source.edges[0]


def groups_at(resolver: Resolver, name: str) -> list[str]:
    """The groups that decide in which dtypes a node reads and writes."""
    if name == OUTPUT:
        return []
    node, topology = resolver.graph[name], resolver.topology
    if not topology.nodes[name]:
        return [str(e) for e in node.edges if topology.edges[e]]
    own = f"{name}:out"
    keys = [feeding(resolver, e) for e in node.edges]
    return list(dict.fromkeys([*(k for k in keys if k), *([own] if own in resolver.space.groups else [])]))


def most_bits(resolver: Resolver, name: str, desc: OpDesc) -> dict[str, int]:
    """How many bits a signature of an integer node can take at most, for each of the groups at it."""
    node, most = resolver.graph[name], dict[str, int]()
    form = resolver.ops[node.op].integer
    for edge in node.edges:
        key = feeding(resolver, edge)
        if key is not None and (key == str(edge) or form is None or form.slot(edge.slot) in ("own", "follow")):
            most[key] = min(most.get(key, desc.in_dtype(edge.slot).bits), desc.in_dtype(edge.slot).bits)
    own = f"{name}:out"
    if own in resolver.space.groups and desc.fixed_out is None:
        most[own] = min(most.get(own, desc.out_dtype.bits), desc.out_dtype.bits)
    return most


def descs_at(resolver: Resolver, name: str) -> tuple[OpDesc, ...]:
    """The signatures that a node may take as it is: in integers, or in float with its weight as integers."""
    descs = fitting_descs if resolver.topology.nodes[name] else weight_only_descs
    return descs(resolver.graph, resolver.graph[name], resolver.hardware, resolver.ops)


def classes(resolver: Resolver, group: Group) -> list[tuple[int, ...]]:
    """A group's choices, cut where they need another dtype."""
    widths: set[int] = set()
    for edge in group.edges:
        if edge.dst != OUTPUT:
            widths |= {d.in_dtype(edge.slot).bits for d in descs_at(resolver, edge.dst)}
    node, _, slot = group.key.rpartition(":")
    if slot == "out":
        widths |= {d.out_dtype.bits for d in descs_at(resolver, node)}
    found: dict[int, list[int]] = {}
    for bits in group.choices:
        found.setdefault(sum(w >= bits for w in widths), []).append(bits)
    return [tuple(c) for c in found.values()]


# ---------------------------------------------------------------- whether anything can be refused
def may_refuse(resolver: Resolver) -> bool:
    """Whether some point may fit no signature. It is judged by signatures alone, so there may be none where it says so;
    where it says no there is none."""
    return any(not _takes_all(resolver, node) for node in resolver.graph if resolver.topology.nodes[node.name])


def _takes_all(resolver: Resolver, node: Node) -> bool:
    """Whether whatever an integer node may be given is held by some signature that takes all bits."""
    form = resolver.ops[node.op].integer
    assert form is not None
    wide = [d for d in descs_at(resolver, node.name) if _takes_all_bits(resolver, node, d)]
    given = _given(resolver, node, form)
    every = [{slot: dtype} for slot, dtypes in given.items() for dtype in dtypes]
    if any(all(_takes(d, form, one) for one in every) for d in wide):
        return True  # however many operands there are: slots are looked at one by one
    if math.prod(map(len, given.values())) > _MIXED:
        return False
    mixtures = (dict(zip(given, dtypes, strict=True)) for dtypes in itertools.product(*given.values()))
    return all(any(_takes(d, form, mixture) for d in wide) for mixture in mixtures)


def _takes(desc: OpDesc, form: IntegerForm, given: Mapping[int, DType]) -> bool:
    """Whether a signature takes operands in these dtypes, by slot; see `Operands.holds`."""
    for slot, dtype in given.items():
        own = desc.in_dtype(slot)
        if form.slot(slot) == "common":
            if desc.requantize_at == "edge" and own.bits != dtype.bits:
                return False
        elif not (own.min <= dtype.min and dtype.max <= own.max):
            return False
    return True


def _takes_all_bits(resolver: Resolver, node: Node, desc: OpDesc) -> bool:
    groups = resolver.space.groups
    own = [(groups[str(e)], desc.in_dtype(e.slot)) for e in node.edges if str(e) in groups]
    if desc.fixed_out is None and f"{node.name}:out" in groups:
        own.append((groups[f"{node.name}:out"], desc.out_dtype))
    return all(group.choices[0] <= dtype.bits for group, dtype in own)


def _given(resolver: Resolver, node: Node, form: IntegerForm) -> dict[int, set[DType]]:
    """By slot, the dtypes in which integers without bits of their own may come."""
    found = {}
    for edge in node.edges:
        source = resolver.graph.source(edge)
        alone = str(edge) not in resolver.space.groups and form.slot(edge.slot) not in ("bias", "plain")
        if alone and resolver.topology.nodes.get(source):
            found[edge.slot] = {d.out_dtype for d in descs_at(resolver, source)}
    return found


# ---------------------------------------------------------------- fitting
# Fitting: points that fit the hardware, where not all bits go together.
# A chip may take 16 bits by 4 and 8 by 8, and not 16 by 8; one that reads 4 bits may give 4 only. Each choice of a
# group then needs some of another's. What does fit is asked of the Resolver, which alone decides.

#: Points that are tried for one that fits, for every group.
FEASIBILITY_ATTEMPTS: Final = 16
#: What a bit more than asked weighs beside the loss that bits fewer are expected to cause.
_MORE: Final = 1e-12


class FeasiblePoint(NamedTuple):
    """A point that fits, and its Plan."""

    bits: dict[str, int]
    plan: Plan


def nearest_feasible(
    resolver: Resolver, bits: Bits, held: Collection[str] = (), *, fewer: bool = False
) -> FeasiblePoint | None:
    """The nearest point that fits: where bits must be fewer, those that lose the least; None where none is found.

    Args:
        held: groups that keep their bits.
        fewer: whether no group may have more bits than it has here.
    """
    made = plan_or_refusal(resolver, bits)
    return (
        FeasiblePoint(dict(bits), made) if isinstance(made, Plan) else _Fitting(resolver, bits, held, fewer).found(made)
    )


class _Fitting:
    """A search from one point, along the graph: what a node refuses gets the bits that one of its signatures takes, or,
    where it has such bits, another dtype at the node or behind it."""

    def __init__(self, resolver: Resolver, bits: Bits, held: Collection[str], fewer: bool) -> None:
        self.resolver, self.bits, self.held, self.fewer = resolver, bits, held, fewer
        self._classes: dict[str, list[tuple[int, ...]]] = {}

    def found(self, error: InfeasibleBits) -> FeasiblePoint | None:
        """The nearest point that fits.

        Args:
            error: why the first one does not.
        """
        place = {node.name: i for i, node in enumerate(self.resolver.graph)}
        order, point, seen = itertools.count(), dict(self.bits), {tuple(self.bits.values())}
        waiting: list[tuple[int, float, int, dict[str, int]]] = []
        for _ in range(FEASIBILITY_ATTEMPTS * (1 + len(self.bits))):
            for other in self._others(point, error.node):
                if (key := tuple(other.values())) not in seen:
                    seen.add(key)
                    # those first that came furthest through the graph
                    heapq.heappush(waiting, (-place[error.node], self._distance(other), next(order), other))
            if not waiting:
                return None
            point = heapq.heappop(waiting)[-1]
            made = plan_or_refusal(self.resolver, point)
            if isinstance(made, Plan):
                return FeasiblePoint(point, made)
            error = made
        return None

    def _others(self, point: dict[str, int], node: str) -> Iterator[dict[str, int]]:
        """Points at which the node may run."""
        able = False
        for desc in descs_at(self.resolver, node):
            most = most_bits(self.resolver, node, desc)
            over = [k for k, limit in most.items() if point[k] > limit]
            if not any(k in self.held for k in over):
                able = True
                fewer = {k: self._at_most(k, most[k]) for k in over}
                if fewer and None not in fewer.values():
                    yield {**point, **{k: b for k, b in fewer.items() if b is not None}}
        if able:
            yield from self._steps(point, node)

    def _at_most(self, key: str, limit: int) -> int | None:
        return next((b for b in self.resolver.space.groups[key].choices if b <= limit), None)

    def _steps(self, point: dict[str, int], node: str) -> Iterator[dict[str, int]]:
        for key in self._groups_behind(node):
            listed = self._classes_of(key)
            at = next(i for i, c in enumerate(listed) if point[key] in c)
            for step in (1, -1):
                if 0 <= at + step < len(listed):
                    bits = self._nearest(key, listed[at + step])
                    if not (self.fewer and bits > self.bits[key]):
                        yield {**point, key: bits}

    def _groups_behind(self, node: str) -> list[str]:
        """The groups at a node, and those at the nodes that give it what it reads."""
        found = dict.fromkeys(groups_at(self.resolver, node))
        for key in list(found):
            name, _, slot = key.rpartition(":")
            if slot == "out" and name != node:
                found |= dict.fromkeys(groups_at(self.resolver, name))
        groups = self.resolver.space.groups
        return [k for k in found if k in groups and k not in self.held and not groups[k].is_kind]

    def _classes_of(self, key: str) -> list[tuple[int, ...]]:
        if key not in self._classes:
            self._classes[key] = classes(self.resolver, self.resolver.space.groups[key])
        return self._classes[key]

    def _nearest(self, key: str, alike: tuple[int, ...]) -> int:
        return min(max(self.bits[key], alike[-1]), alike[0])

    def _distance(self, point: Bits) -> float:
        pairs = [(bits, self.bits[key]) for key, bits in point.items()]
        return sum(4.0**-b - 4.0**-a if b < a else _MORE * (b - a) for b, a in pairs)


def plan_or_refusal(resolver: Resolver, bits: Bits) -> Plan | InfeasibleBits:
    """The Plan of a point, or the error of the first node that has no signature for its bits."""
    try:
        return resolver(bits)
    except InfeasibleBits as error:
        if not error.node:
            raise
        return error


def widest_feasible(resolver: Resolver) -> FeasiblePoint:
    """The most bits that fit.

    Raises:
        InfeasibleBits: no bits were found to fit.
    """
    widest = resolver.space.widest()
    found = nearest_feasible(resolver, widest, fewer=True)
    if found is None:
        raise InfeasibleBits(
            f"no bits were found that fit every node of the network on {resolver.hardware.name}; at the most, "
            f"{plan_or_refusal(resolver, widest)}. Fix fewer bits (fix_bits), keep nodes float (keep_float), or list "
            "signatures whose dtypes neighbours share"
        )
    return found


# ---------------------------------------------------------------- levels
# Levels: points in which every group has each of its choices, for whatever is read off Plans choice by choice.


def choice_level(space: Space, rung: int) -> dict[str, int]:
    """Every group at its `rung`-th choice, or at its last where it has fewer; all nodes integer."""
    return {key: g.choices[0 if g.is_kind else min(rung, len(g.choices) - 1)] for key, g in space.groups.items()}


@dataclass(frozen=True, slots=True)
class ChoicePoint:
    """A point that fits.

    Args:
        keys: the groups that are to be looked at in it: each has one of its choices in some point.
    """

    bits: Bits
    plan: Plan
    keys: frozenset[str]


class ChoicePoints:
    """Points that have every group at its `rung`-th choice: one for each rung, and more where these bits do not go
    together."""

    def __init__(self, resolver: Resolver) -> None:
        self.resolver = resolver
        self._found: list[list[ChoicePoint]] = []

    @property
    def count(self) -> int:
        """Rungs of the group with the most choices."""
        return max((len(g.choices) for g in self.resolver.space.groups.values()), default=0)

    def of(self, rung: int) -> list[ChoicePoint]:
        """The points of a rung. A group is in none of them where no point fits that has its choice."""
        while len(self._found) <= rung:
            self._found.append(self._points(len(self._found)))
        return self._found[rung]

    def plan(self, rung: int, key: str) -> Plan:
        """The Plan to look at a group in.

        Raises:
            InfeasibleBits: no point that fits has its choice.
        """
        for shown in self.of(rung):
            if key in shown.keys:
                return shown.plan
        bits = choice_level(self.resolver.space, rung)[key]
        raise InfeasibleBits(f"{bits} bits for edge {key!r} fit no signature, whatever the others have")

    def _points(self, rung: int) -> list[ChoicePoint]:
        groups, wanted, found = self.resolver.space.groups, choice_level(self.resolver.space, rung), list[ChoicePoint]()
        left = [k for k, g in groups.items() if rung < len(g.choices) and not g.is_kind]

        def look(held: Collection[str]) -> None:
            nonlocal left
            point = nearest_feasible(self.resolver, wanted, held)
            if point is not None:
                keys = frozenset(k for k in left if point.bits[k] == wanted[k])
                found.append(ChoicePoint(*point, keys))
                left = [k for k in left if k not in keys]

        look(())
        if left:
            look(left)
        while left:
            key = left[0]
            look([key])
            left = [k for k in left if k != key]
        return found


def prune_infeasible_choices(resolver: Resolver) -> Space:
    """The space without choices that no point has that fits.

    Raises:
        InfeasibleBits: no point fits.
    """
    space = resolver.space
    if not may_refuse(resolver):
        return space
    widest_feasible(resolver)
    levels = ChoicePoints(resolver)
    kept: dict[str, dict[int, None]] = {key: {} for key in space.groups}
    for rung in range(levels.count):
        for shown in levels.of(rung):
            for key in shown.keys:
                kept[key][shown.bits[key]] = None
    groups = {k: g if g.is_kind else replace(g, choices=tuple(kept[k])) for k, g in space.groups.items()}
    return space if groups == space.groups else Space(groups)
