"""Feasibility: a point is feasible if every node has a signature that takes its bits.

A chip may multiply 16 bits by 4 and 8 by 8, but not 16 by 8; a signature that reads 4 bits may write 4 only. A choice
for one group then excludes choices for others. Whether a point is feasible is decided by the Resolver alone, which
returns a Plan or raises InfeasibleBits. This module has, in order:

- the groups whose bits a node's signatures limit (`groups_at`, `most_bits`, `descs_at`);
- whether any point of a space can be infeasible (`may_have_infeasible_points`);
- the search for the feasible point nearest to a given one (`nearest_feasible`, `widest_feasible`);
- feasible points that cover every feasible choice of every group (`ChoicePoints`). `search.prepare` prunes the space by
  them (`prune_infeasible_choices`); `search.guidance`, `search.sensitivity` and `search.choice_refinement` tabulate
  costs, losses and thresholds with them.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from hago.arithmetic.numerics import EXACT_FLOAT64
from hago.arithmetic.types import DType, Edge
from hago.errors import InfeasibleBits
from hago.graph import CONST, OUTPUT, Node
from hago.hardware import OpDesc
from hago.ops import IntegerForm
from hago.plan.plan import Plan
from hago.plan.resolve import Resolver
from hago.plan.space import Bits, Group, Space
from hago.plan.topology import weight_only_descs

#: Largest number of combinations of operand dtypes of one node that are checked; with more,
#: `may_have_infeasible_points` is true.
_COMBINATIONS: Final = 256
#: Largest number of points that `nearest_feasible` tries, per group of the space.
FEASIBILITY_ATTEMPTS: Final = 16
#: Sums of more than 2 to this power terms are not expected where `may_have_infeasible_points` decides.
_TERM_BITS: Final = 20
#: Distance per bit above the start: next to nothing. Fewer bits count by the squared error that they are expected to
#: add.
_EXTRA_BIT_DISTANCE: Final = 1e-12


# ---------------------------------------------------------------- the groups and signatures of a node


def group_feeding(resolver: Resolver, edge: Edge) -> str | None:
    """The group that determines the bits on an edge, traced back past nodes that pass integers through; None if no
    group does."""
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


def groups_behind(resolver: Resolver, point: FeasiblePoint, name: str) -> tuple[str, ...]:
    """The groups that determine how large the accumulator of an integer node gets: those of its operands, and where an
    operand has no bits of its own, those of the nodes that it comes from, traced back until there are some. Of operands
    behind it that are on one scale, it is the one with the coarsest scale at the point.
    """
    found: dict[str, None] = {}
    edges = list(resolver.graph[name].edges)
    while edges:
        edge = edges.pop(0)
        source = resolver.graph[resolver.graph.source(edge)]
        key = resolver.group_of.get(edge, f"{source.name}:out")
        if key in resolver.space.groups:
            found[key] = None
        elif source.name in point.plan.nodes:
            edges += _deciding_edges(resolver, point, source)
    return tuple(found)


def _deciding_edges(resolver: Resolver, point: FeasiblePoint, node: Node) -> Sequence[Edge]:
    """The in-edges of an integer node whose bits determine the scale of its accumulator."""
    form = resolver.ops[node.op].integer
    if form is None or "common" not in form.slots:
        return node.edges

    def scale(edge: Edge) -> float:
        key = resolver.group_of.get(edge)
        if key is None:
            source = point.plan.nodes.get(resolver.graph.source(edge))
            return 0.0 if source is None else float(source.out.scale.max())
        ends = point.plan.nodes[node.name].thresholds[str(edge)]
        return max(float(end.abs().max()) for end in ends) / 2.0 ** (point.bits[key] - 1)

    return [max(node.edges, key=scale)]


def groups_at(resolver: Resolver, name: str) -> list[str]:
    """The groups that determine the dtypes that a node reads and writes; for a float node, the group of its weight."""
    if name == OUTPUT:
        return []
    node, topology = resolver.graph[name], resolver.topology
    if not topology.nodes[name]:
        return [str(e) for e in node.edges if topology.edges[e]]
    out_key = f"{name}:out"
    keys = [group_feeding(resolver, e) for e in node.edges]
    return list(dict.fromkeys([*(k for k in keys if k), *([out_key] if out_key in resolver.space.groups else [])]))


def most_bits(resolver: Resolver, name: str, desc: OpDesc) -> dict[str, int]:
    """By group at an integer node, the most bits that a signature takes."""
    node, most = resolver.graph[name], dict[str, int]()
    form = resolver.ops[node.op].integer
    for edge in node.edges:
        key = group_feeding(resolver, edge)
        # a common operand without bits of its own is rectified in the node, so it does not limit its producer's bits; a
        # bias or plain operand has none
        if key is not None and (key == str(edge) or form is None or form.slot(edge.slot) in ("own", "follow")):
            limit = desc.bits_of(desc.in_dtype(edge.slot))[-1]
            most[key] = min(most.get(key, limit), limit)
    out_key = f"{name}:out"
    if out_key in resolver.space.groups and desc.fixed_out is None:
        limit = desc.bits_of(desc.out_dtype)[-1]
        most[out_key] = min(most.get(out_key, limit), limit)
    return most


def descs_at(resolver: Resolver, name: str) -> tuple[OpDesc, ...]:
    """The signatures that a node may have in this topology: integer ones, or float ones with an integer weight."""
    node = resolver.graph[name]
    if resolver.topology.nodes[name]:
        return resolver.signatures(node)
    return weight_only_descs(resolver.graph, node, resolver.hardware, resolver.ops)


def choices_by_dtype(resolver: Resolver, group: Group) -> list[tuple[int, ...]]:
    """A group's choices, most bits first, split where the signatures that take them change."""
    taken: set[range] = set()
    for edge in (e for e in group.edges if e.dst != OUTPUT):
        for desc in descs_at(resolver, edge.dst):
            bits_of = desc.bits_of(desc.in_dtype(edge.slot))
            taken.add(bits_of if str(edge) == group.key else range(bits_of[-1] + 1))
    node, _, slot = group.key.rpartition(":")
    if slot == "out":
        taken |= {d.bits_of(d.out_dtype) for d in descs_at(resolver, node)}
    runs = itertools.groupby(group.choices, lambda bits: {t for t in taken if bits in t})
    return [tuple(run) for _, run in runs]


# ---------------------------------------------------------------- whether any point can be infeasible
def may_have_infeasible_points(resolver: Resolver) -> bool:
    """Whether some point of the resolver's space may be infeasible. No point is resolved: the signatures of every node
    are compared with those of its producers. Conservative: False means that every point is feasible."""
    return any(not _accepts_everything(resolver, node) for node in resolver.graph if resolver.topology.nodes[node.name])


def _accepts_everything(resolver: Resolver, node: Node) -> bool:
    """Whether an integer node has a signature for all dtypes that its producers may emit and all bits that it may
    have."""
    form = resolver.ops[node.op].integer
    assert form is not None
    if any(_sums_may_be_too_large(form, desc) for desc in descs_at(resolver, node.name)):
        return False
    wide_descs = [d for d in descs_at(resolver, node.name) if _accepts_all_bits(resolver, node, d)]
    emitted = _emitted_dtypes(resolver, node, form)
    single_operands = [{slot: dtype} for slot, dtypes in emitted.items() for dtype in dtypes]
    if any(all(_accepts(d, form, operand) for operand in single_operands) for d in wide_descs):
        return True  # one signature takes every dtype at every slot, so it takes all combinations
    if math.prod(map(len, emitted.values())) > _COMBINATIONS:
        return False
    combinations = (dict(zip(emitted, dtypes, strict=True)) for dtypes in itertools.product(*emitted.values()))
    return all(any(_accepts(d, form, combination) for d in wide_descs) for combination in combinations)


def _sums_may_be_too_large(form: IntegerForm, desc: OpDesc) -> bool:
    """Whether sums of a signature's operands may be larger than float64 holds exactly."""
    bits = [desc.bits_of(desc.in_dtype(slot))[-1] for slot in range(2)]
    products = [form.slot(slot) for slot in range(2)] == ["own", "own"]
    return (sum(bits) if products else max(bits)) + _TERM_BITS > math.log2(EXACT_FLOAT64)


def _accepts(desc: OpDesc, form: IntegerForm, dtypes: Mapping[int, DType]) -> bool:
    """Whether a signature takes operands in these dtypes, by slot, as `Operands.takes_bits` decides."""
    for slot, dtype in dtypes.items():
        taken = desc.in_dtype(slot)
        if form.slot(slot) == "common":
            if desc.requantize_at == "edge" and taken.bits != dtype.bits:
                return False
        elif not (taken.min <= dtype.min and dtype.max <= taken.max):
            return False
    return True


def _accepts_all_bits(resolver: Resolver, node: Node, desc: OpDesc) -> bool:
    """Whether a signature takes all bits of every group of the node."""
    groups = resolver.space.groups
    dtypes = [(groups[str(e)], desc.in_dtype(e.slot)) for e in node.edges if str(e) in groups]
    if desc.fixed_out is None and f"{node.name}:out" in groups:
        dtypes.append((groups[f"{node.name}:out"], desc.out_dtype))
    feeding = (groups[key].choices[0] for e in node.edges if (key := group_feeding(resolver, e)) not in (None, str(e)))
    own = all({group.choices[0], group.choices[-1]} <= set(desc.bits_of(dtype)) for group, dtype in dtypes)
    return own and all(bits <= desc.max_bits for bits in feeding)


def _emitted_dtypes(resolver: Resolver, node: Node, form: IntegerForm) -> dict[int, set[DType]]:
    """By slot, the dtypes that the producer may emit, for the operands that have no choice of bits of their own."""
    emitted = {}
    for edge in node.edges:
        source = resolver.graph.source(edge)
        has_no_bits = str(edge) not in resolver.space.groups and form.slot(edge.slot) not in ("bias", "plain")
        if has_no_bits and resolver.topology.nodes.get(source):
            emitted[edge.slot] = {d.out_dtype for d in descs_at(resolver, source)}
    return emitted


# ---------------------------------------------------------------- the nearest feasible point
class FeasiblePoint(NamedTuple):
    """A feasible point and its Plan."""

    bits: dict[str, int]
    plan: Plan


def nearest_feasible(
    resolver: Resolver, bits: Bits, fixed: Collection[str] = (), *, fewer: bool = False
) -> FeasiblePoint | None:
    """Search for the feasible point nearest to `bits`, best first and with a bounded number of attempts.

    The distance of a point is the squared error that its fewer bits are expected to add; more bits add next to nothing.

    Args:
        fixed: groups that keep their bits.
        fewer: whether groups may only have fewer bits than in `bits`.

    Returns:
        The point and its Plan; None where none is found.
    """
    outcome = plan_or_refusal(resolver, bits)
    if isinstance(outcome, Plan):
        return FeasiblePoint(dict(bits), outcome)
    return _FeasibleSearch(resolver, bits, fixed, fewer).run(outcome)


class _FeasibleSearch:
    """A best-first search for the feasible point nearest to one point; lives for one call of `nearest_feasible`.

    From a point that a node refuses, the search goes on to points at which the groups at that node have no more bits
    than one of its signatures takes, and to points at which one of these groups needs the next wider or narrower dtype.

    Args:
        bits: the point to start from.
        fixed, fewer: see `nearest_feasible`.
    """

    def __init__(self, resolver: Resolver, bits: Bits, fixed: Collection[str], fewer: bool) -> None:
        self.resolver, self.bits, self.fixed, self.fewer = resolver, bits, fixed, fewer
        self._choices_by_dtype: dict[str, list[tuple[int, ...]]] = {}

    def run(self, error: InfeasibleBits) -> FeasiblePoint | None:
        """Search until a point is feasible; None where none is found.

        Args:
            error: why the point to start from is infeasible.
        """
        position = {node.name: i for i, node in enumerate(self.resolver.graph)}
        insertion, point, visited = itertools.count(), dict(self.bits), {tuple(self.bits.values())}
        queue: list[tuple[int, float, int, dict[str, int]]] = []
        for _ in range(FEASIBILITY_ATTEMPTS * (1 + len(self.bits))):
            for candidate in itertools.chain(self._candidates(point, error.node), self._smaller(point, error)):
                if (key := tuple(candidate.values())) not in visited:
                    visited.add(key)
                    # points that are feasible up to a later node come first
                    heapq.heappush(
                        queue, (-position[error.node], self._distance(candidate), next(insertion), candidate)
                    )
            if not queue:
                return None
            point = heapq.heappop(queue)[-1]
            outcome = plan_or_refusal(self.resolver, point)
            if isinstance(outcome, Plan):
                return FeasiblePoint(point, outcome)
            error = outcome
        return None

    def _candidates(self, point: dict[str, int], node: str) -> Iterator[dict[str, int]]:
        """Yield points at which a node that refused `point` may have a signature."""
        some_take_fixed_bits = False
        for desc in descs_at(self.resolver, node):
            most = most_bits(self.resolver, node, desc)
            excessive = [k for k, limit in most.items() if point[k] > limit]
            if not any(k in self.fixed for k in excessive):
                some_take_fixed_bits = True
                lowered = {k: b for k in excessive if (b := self._at_most(k, most[k])) is not None}
                if lowered and len(lowered) == len(excessive):
                    yield {**point, **lowered}
        if some_take_fixed_bits:
            yield from self._other_dtypes(point, node)

    def _smaller(self, point: dict[str, int], error: InfeasibleBits) -> Iterator[dict[str, int]]:
        """Yield points at which one group at a node, or at its producers, has as many fewer bits as its sums exceed."""
        for key in self._groups_upstream(error.node) if error.excess else ():
            choices = self.resolver.space.groups[key].choices
            fewer = self._at_most(key, point[key] - error.excess) or choices[-1]
            if fewer < point[key]:
                yield {**point, key: fewer}

    def _at_most(self, key: str, limit: int) -> int | None:
        """The most bits of a group's choices that are at most `limit`; None where all choices are more."""
        return next((b for b in self.resolver.space.groups[key].choices if b <= limit), None)

    def _other_dtypes(self, point: dict[str, int], node: str) -> Iterator[dict[str, int]]:
        """Yield points at which one group at the node, or at its producers, needs the next wider or narrower dtype."""
        for key in self._groups_upstream(node):
            runs = self._choices_by_dtype_of(key)
            index = next(i for i, c in enumerate(runs) if point[key] in c)
            for step in (1, -1):
                if 0 <= index + step < len(runs):
                    bits = self._nearest(key, runs[index + step])
                    if not (self.fewer and bits > self.bits[key]):
                        yield {**point, key: bits}

    def _groups_upstream(self, node: str) -> list[str]:
        """The groups at a node and at the producers that requantize its operands, without those that keep their
        bits."""
        keys = dict.fromkeys(groups_at(self.resolver, node))
        for key in list(keys):
            name, _, slot = key.rpartition(":")
            if slot == "out" and name != node:
                keys |= dict.fromkeys(groups_at(self.resolver, name))
        return [k for k in keys if k not in self.fixed]

    def _choices_by_dtype_of(self, key: str) -> list[tuple[int, ...]]:
        if key not in self._choices_by_dtype:
            self._choices_by_dtype[key] = choices_by_dtype(self.resolver, self.resolver.space.groups[key])
        return self._choices_by_dtype[key]

    def _nearest(self, key: str, run: tuple[int, ...]) -> int:
        """The choice in a run of choices that is nearest to the group's bits at the start."""
        return min(max(self.bits[key], run[-1]), run[0])

    def _distance(self, point: Bits) -> float:
        """How far a point is from the start: the squared error that fewer bits add, and next to nothing for more."""
        pairs = [(bits, self.bits[key]) for key, bits in point.items()]
        return sum(4.0**-b - 4.0**-a if b < a else _EXTRA_BIT_DISTANCE * (b - a) for b, a in pairs)


def plan_or_refusal(resolver: Resolver, bits: Bits) -> Plan | InfeasibleBits:
    """The Plan of a point, or the error of the first node that has no signature for the point's bits.

    Raises:
        InfeasibleBits: the bits are no point of the resolver's space.
    """
    try:
        return resolver(bits)
    except InfeasibleBits as error:
        if not error.node:
            raise
        return error


def widest_feasible(resolver: Resolver) -> FeasiblePoint:
    """The feasible point nearest to the most bits everywhere.

    Raises:
        InfeasibleBits: no feasible point was found.
    """
    widest = resolver.space.widest()
    point = nearest_feasible(resolver, widest, fewer=True)
    if point is None:
        raise InfeasibleBits(
            f"no bits were found that fit every node of the network on {resolver.hardware.name}; at the most, "
            f"{plan_or_refusal(resolver, widest)}. Fix fewer bits (fix_bits), keep nodes float (keep_float), or list "
            "signatures whose dtypes neighbours share"
        )
    return point


# ---------------------------------------------------------------- feasible points for every choice
def point_at_choice(space: Space, index: int) -> dict[str, int]:
    """The point at which every group has `choices[index]`, or its last choice where it has fewer, and all nodes are
    integer.

    Args:
        index: the position in `Group.choices`, 0 for the most bits.
    """
    return {key: g.choices[0 if g.is_kind else min(index, len(g.choices) - 1)] for key, g in space.groups.items()}


@dataclass(frozen=True, slots=True)
class ChoicePoint:
    """A feasible point, and the groups whose choice it represents. Made by `ChoicePoints.of`.

    Args:
        keys: the groups that have `choices[index]` at this point, `index` being the position that it was made for.
    """

    bits: Bits
    plan: Plan
    keys: frozenset[str]


class ChoicePoints:
    """Feasible points that together have every feasible choice of every group.

    Code that tabulates losses, costs or thresholds choice by choice makes one, and reads the figures of each group off
    the Plan of the point that represents the choice. For a position in `Group.choices` (0 for the most bits) there is
    one point if the choices of all groups at this position are feasible together, and several points if they are not.
    Kinds (whether a node is integer or float) are no choices of bits: all nodes stay integer. Points are computed on
    first use.
    """

    def __init__(self, resolver: Resolver) -> None:
        self.resolver = resolver
        self._points_by_index: list[list[ChoicePoint]] = []

    @property
    def count(self) -> int:
        """The largest number of choices that any group has."""
        return max((len(g.choices) for g in self.resolver.space.groups.values()), default=0)

    def of(self, index: int) -> list[ChoicePoint]:
        """The points for position `index` in `Group.choices`. A group for whose choice no feasible point is found is in
        the keys of none of them."""
        while len(self._points_by_index) <= index:
            self._points_by_index.append(self._points(len(self._points_by_index)))
        return self._points_by_index[index]

    def plan(self, index: int, key: str) -> Plan:
        """The Plan that represents the choice of a group at position `index`.

        Raises:
            InfeasibleBits: no feasible point has that choice.
        """
        for choice_point in self.of(index):
            if key in choice_point.keys:
                return choice_point.plan
        bits = point_at_choice(self.resolver.space, index)[key]
        raise InfeasibleBits(f"{bits} bits for edge {key!r} fit no signature, whatever bits the other groups have")

    def _points(self, index: int) -> list[ChoicePoint]:
        groups, choices = self.resolver.space.groups, point_at_choice(self.resolver.space, index)
        points: list[ChoicePoint] = []
        missing = [k for k, g in groups.items() if index < len(g.choices) and not g.is_kind]

        def add_point(fixed: Collection[str]) -> None:
            """Add the feasible point nearest to the choices at which the groups in `fixed` keep theirs."""
            nonlocal missing
            point = nearest_feasible(self.resolver, choices, fixed)
            if point is not None:
                keys = frozenset(k for k in missing if point.bits[k] == choices[k])
                points.append(ChoicePoint(*point, keys))
                missing = [k for k in missing if k not in keys]

        add_point(())  # the nearest feasible point has most of the choices, if not all
        if missing:
            add_point(missing)  # the other choices may be feasible together
        while missing:  # else each by itself
            key = missing[0]
            add_point([key])
            missing = [k for k in missing if k != key]
        return points


def prune_infeasible_choices(resolver: Resolver) -> Space:
    """The space without the choices for which no feasible point was found. Called by `search.prepare` once per search.

    Raises:
        InfeasibleBits: no feasible point was found.
    """
    space = resolver.space
    if not may_have_infeasible_points(resolver):
        return space
    widest_feasible(resolver)
    points = ChoicePoints(resolver)
    kept: dict[str, dict[int, None]] = {key: {} for key in space.groups}  # by group, an ordered set of choices
    for index in range(points.count):
        for choice_point in points.of(index):
            for key in choice_point.keys:
                kept[key][choice_point.bits[key]] = None
    groups = {k: g if g.is_kind else replace(g, choices=tuple(kept[k])) for k, g in space.groups.items()}
    return space if groups == space.groups else Space(groups)
