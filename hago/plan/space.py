"""The search space: the choices of bits that can change a Plan.

Built by `search.prepare`, by a Resolver for every set of nodes that a point turns float, and where a model is explained
or a policy places fake quantization.

A group is a set of edges that share one choice of bits. With `requantize_at: edge` every edge is a group of its own,
keyed by the edge ("layer1.0.add:1"); with `requantize_at: output` all out-edges of a node form one group, keyed
"node:out". The space has no groups for derived biases, operands that are not quantized, and edges on which
requantization is the identity (e.g. a relu after a convolution): in the one published log of HAGO, the prototype of the
RFC, 221 of 551 trials went to these.
"""

from __future__ import annotations

import glob
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Integral
from typing import Any, Final

import torch
from torch import Tensor

from hago.arithmetic.types import DType, Edge
from hago.errors import HagoError, InfeasibleBits, warn
from hago.graph import CONST, INPUT, OUTPUT, Graph, Node
from hago.hardware import Hardware, OpDesc
from hago.ops import OPS, IntegerForm, Ops
from hago.plan.topology import (
    KEPT_FLOAT,
    Topology,
    accepts_scale,
    check_patterns,
    fitting_descs,
    joins_operands,
    matches,
    range_chain,
    weight_only_descs,
)
from hago.serialization.summary import names_text

Bits = Mapping[str, int]

#: The two choices of a node that may run either way, as "bits" of its group `node:kind`. Choices are listed from the
#: largest, so integers come first.
INTEGER: Final = 2
FLOAT: Final = 1
_KIND: Final = "kind"


def kind_key(node: str) -> str:
    """The key of the group whose choice is whether a node is integer or float."""
    return f"{node}:{_KIND}"


@dataclass(frozen=True, slots=True)
class Group:
    """Edges that share one choice of bits.

    Args:
        key: the group's name in strategies and logs.
        source: the node whose range the threshold covers: the one whose value is quantized, or the last of the relus,
            poolings and concatenations after it (`topology.range_chain`).
        edges: the edges on which the quantized value is read.
        choices: the bits to choose from, widest first.
    """

    key: str
    source: str
    edges: tuple[Edge, ...]
    choices: tuple[int, ...]

    @property
    def is_kind(self) -> bool:
        """Whether the group is a kind, `node:kind`: its choice is whether the node is INTEGER or FLOAT, and not of
        bits."""
        return self.key.endswith(f":{_KIND}")

    @property
    def names(self) -> tuple[str, ...]:
        """What patterns of `fix_bits` are compared with: the key, its node, the source, and the nodes that read it."""
        return (self.key, self.key.rpartition(":")[0], self.source, *(e.dst for e in self.edges))


@dataclass(frozen=True, slots=True)
class Space:
    """All groups of a model on a piece of hardware, by key and in node order. Immutable."""

    groups: Mapping[str, Group]

    @property
    def size(self) -> int:
        """The number of choices, summed over groups."""
        return sum(len(g.choices) for g in self.groups.values())

    def widest(self) -> dict[str, int]:
        """The point at which every group has its most bits."""
        return {key: g.choices[0] for key, g in self.groups.items()}

    def narrowest(self) -> dict[str, int]:
        """The point at which every group has its fewest bits, and all nodes are integer."""
        return {key: g.choices[0 if g.is_kind else -1] for key, g in self.groups.items()}

    def floats(self, bits: Bits) -> frozenset[str]:
        """The nodes that a point turns float."""
        return frozenset(g.source for key, g in self.groups.items() if g.is_kind and bits[key] == FLOAT)

    def check(self, bits: Bits) -> None:
        """Check that bits are a point of this space.

        Raises:
            InfeasibleBits: they are not; names the edge, the bits and the choices.
        """
        for key in bits:
            if key not in self.groups:
                raise InfeasibleBits(f"edge {key!r} has no bits to choose in this space")
        for key, group in self.groups.items():
            if key not in bits:
                raise InfeasibleBits(f"no bits for edge {key!r}; expected one of {list(group.choices)}")
            if bits[key] not in group.choices:
                raise InfeasibleBits(
                    f"{bits[key]} bits for edge {key!r} fit no signature; expected one of {list(group.choices)}"
                )


def build_space(
    graph: Graph,
    hardware: Hardware,
    topology: Topology,
    fix_bits: Mapping[str, int] | None = None,
    ops: Ops = OPS,
) -> Space:
    """Build the space of a graph on a piece of hardware.

    The choices of an operand go from the widest integer that its slot takes, but no more bits than its producer emits
    (constants and real values impose no limit), down to the signature's `min_bits`.

    Args:
        fix_bits: bits by shell pattern over group keys or node names; the groups that match have this one choice. Of
            several patterns that match, the most specific counts: a name, or else the longest.

    Raises:
        HagoError: a pattern matches nothing.
        InfeasibleBits: no signature has the fixed bits.
    """
    if fix_bits is not None and not isinstance(fix_bits, Mapping):
        raise HagoError(f"fix_bits is a {type(fix_bits).__name__}; expected bits by pattern, e.g. {{'layer1.*': 8}}")
    return _Builder(graph, hardware, topology, dict(fix_bits or {}), ops).build()


def with_kinds(space: Space, hardware: Hardware, topology: Topology, graph: Graph) -> Space:
    """The space with a choice between integer and float added for every integer node that the hardware also takes in
    float and that has a group of its own. Other nodes are integer where their producers are. Called by `search.prepare`
    if `search_topology` is set."""
    groups = dict(space.groups)
    for node in graph:
        keys = [*(str(e) for e in node.edges), f"{node.name}:out"]
        if topology.nodes[node.name] and hardware.float_descs(node.op) and any(k in space.groups for k in keys):
            key = kind_key(node.name)
            groups[key] = Group(key, node.name, (), (INTEGER, FLOAT))
    return Space(groups)


class _Builder:
    """Builds a Space in one pass over the graph; lives for one call of `build_space`."""

    def __init__(self, graph: Graph, hardware: Hardware, topology: Topology, fixed: dict[str, int], ops: Ops) -> None:
        self.graph, self.hardware, self.topology = graph, hardware, topology
        self.fixed, self.ops = fixed, hardware.rules(ops)
        self.emits: dict[str, frozenset[DType]] = {}  # by node, the dtypes that it may emit; empty for real values
        self.scales: dict[str, Tensor] = {}  # by node, ones of the shape that its scale will have
        self.requantized: set[str] = set()  # nodes whose value has the bits of an output group
        self.passed_nodes: dict[str, frozenset[str]] = {}  # by such a node, the nodes after it whose range it takes
        self.groups: dict[str, Group] = {}

    def build(self) -> Space:
        for node in self.graph:
            if self.topology.nodes[node.name]:
                self._visit(node)
            else:
                self.emits[node.name] = frozenset()
                self._visit_float(node)
        self._merge_outputs()
        check_patterns(list(self.fixed), [*self.groups, *self.topology.nodes], "fix_bits")
        self._check_integers()
        return Space({key: self._with_fixed_bits(group) for key, group in self.groups.items()})

    def _check_integers(self) -> None:
        """Refuse patterns that give bits to nothing but nodes that the user keeps float, and warn of those that give
        them to nothing else."""
        for pattern in self.fixed:
            if any(matches(name, (pattern,)) for group in self.groups.values() for name in group.names):
                continue
            found = [node.name for node in self.graph if matches(node.name, (pattern,))]
            readers = [reader for name in found for reader in self._computed_with(name)]
            if not readers:
                continue
            if all(self.topology.reasons[name] == KEPT_FLOAT for name in readers):
                raise HagoError(
                    f"fix_bits {pattern!r} gives bits to {names_text(found)}, which keep_float keeps float; leave out "
                    "one of them"
                )
            why = f"{found[0]} has no bits of its own"
            if not self.topology.nodes[readers[0]]:
                why = f"{readers[0]} stays float: {self.topology.reasons[readers[0]]}"
            warn(f"fix_bits {pattern!r} has no effect, since {why}; leave it out, or name another node")

    def _computed_with(self, name: str) -> list[str]:
        """The node itself; of a constant or an input, the nodes that read it."""
        is_computed = self.graph[name].op not in (CONST, INPUT)
        return [name] if is_computed else [edge.dst for edge in self.graph.out_edges[name] if edge.dst != OUTPUT]

    def _visit_float(self, node: Node) -> None:
        """Add the group of a float node's weight, where it is stored as integers."""
        for edge in node.edges:
            if self.topology.edges[edge]:
                self._add(edge, weight_only_descs(self.graph, node, self.hardware, self.ops))

    def _visit(self, node: Node) -> None:
        form = self.ops[node.op].integer
        assert form is not None
        descs = fitting_descs(self.graph, node, self.hardware, self.ops)
        for edge in node.edges:
            if form.slot(edge.slot) in ("own", "common", "follow") and self._can_change_plan(edge, form, descs):
                self._add(edge, descs)
        self.scales[node.name] = form.scale(node.attrs, [self._scale(e, form) for e in node.edges])
        # the same in all integer signatures of an op, see hardware.validation
        at_output = descs[0].requantize_at == "output"
        has_choice = any(str(e) in self.groups for e in node.edges)
        follows = form.slots == ("follow",) and not at_output and not has_choice
        if follows:  # the dtype passes through
            source = self.emits[node.inputs[0]]
            emitted = {d.out_dtype for d in descs if d.in_dtype(0) in source}
        else:
            emitted = {d.out_dtype for d in descs}
        self.emits[node.name] = frozenset(emitted)
        if at_output:
            self.requantized.add(node.name)
            if any(d.fixed_out is None for d in descs):
                self._add_output(node, descs)
        elif (
            not has_choice
            and node.inputs[0] in self.requantized
            and (follows or joins_operands(form, self.hardware, node.op))
        ):
            self.requantized.add(node.name)
            self.passed_nodes[node.name] = self.passed_nodes.get(node.inputs[0], frozenset())

    def _scale(self, edge: Edge, form: IntegerForm) -> Tensor:
        """Ones of the shape that the scale of an operand will have."""
        source = self.graph[self.graph.source(edge)]
        ndim, weight = len(source.shape or ()), form.weight
        per_channel = self.hardware.weight.granularity == "per_channel"
        if source.op == CONST and weight is not None and weight.slot == edge.slot and per_channel:
            axis = weight.axis % ndim
            return torch.ones([s if d == axis else 1 for d, s in enumerate(source.shape or ())], dtype=torch.float64)
        follows = form.slot(edge.slot) == "follow" and str(edge) not in self.groups
        if follows and source.name in self.scales:
            return self.scales[source.name]
        return torch.ones((), dtype=torch.float64)

    def _can_change_plan(self, edge: Edge, form: IntegerForm, descs: Sequence[OpDesc]) -> bool:
        """Whether the bits of this edge can change a Plan."""
        source = self.graph.source(edge)
        emitted = self.emits[source]
        if not emitted:
            return True
        accepted = {d.in_dtype(edge.slot) for d in descs}
        kind = form.slot(edge.slot)
        requantized = source in self.requantized
        if kind == "common" and requantized and descs[0].requantize_at == "output":
            return False  # it is brought to one scale inside the node
        if self._passes_to_concatenation(source, edge):
            return not emitted <= accepted  # it already has the common scale
        if kind == "common" or (kind == "own" and not requantized):
            return True
        ndim = len(self.graph[source].shape or ())
        return not (emitted <= accepted and (requantized or accepts_scale(form, self.scales[source], ndim)))

    def _add(self, edge: Edge, descs: Sequence[OpDesc]) -> None:
        source = self.graph.source(edge)
        limit = max(d.bits_of(d.in_dtype(edge.slot))[-1] for d in descs)
        form = self.ops[self.graph[edge.dst].op].integer
        assert form is not None
        # operands that share a scale may need more bits than their producer has: that scale may be finer than its own
        if self.emits[source] and form.slot(edge.slot) != "common":
            limit = min(limit, max(d.bits for d in self.emits[source]))
        lowest = min(limit, min(d.min_bits for d in descs))
        key = str(edge)
        self.groups[key] = Group(key, source, (edge,), tuple(range(limit, lowest - 1, -1)))

    def _add_output(self, node: Node, descs: Sequence[OpDesc]) -> None:
        limit = max(d.bits_of(d.out_dtype)[-1] for d in descs)
        lowest = min(limit, min(d.min_bits for d in descs))
        key = f"{node.name}:out"
        chain = range_chain(self.graph, self.hardware, self.topology, self.ops, node.name)
        self.passed_nodes[node.name] = frozenset(chain)
        observed = (node.name, *chain)[-1]
        self.groups[key] = Group(key, observed, (), tuple(range(limit, lowest - 1, -1)))

    def _merge_outputs(self) -> None:
        """Add the out-edges of each requantized node to its group."""
        for key, group in self.groups.items():
            name, _, out = key.rpartition(":")
            if out == "out":
                out_edges = self.graph.out_edges[name]
                edges = tuple(
                    e for e in out_edges if str(e) not in self.groups and not self._passes_to_concatenation(name, e)
                )
                self.groups[key] = replace(group, edges=edges)

    def _passes_to_concatenation(self, name: str, edge: Edge) -> bool:
        """Whether a node's integers already have the common scale of the concatenation that reads this edge."""
        if edge.dst not in self.passed_nodes.get(name, ()):
            return False
        form = self.ops[self.graph[edge.dst].op].integer
        return form is not None and form.slot(edge.slot) == "common"

    def _with_fixed_bits(self, group: Group) -> Group:
        """The group with the bits of the most specific pattern that matches it, if one does. The order of the patterns
        does not matter, since files sort them."""
        ranked = [(rank, p) for p in self.fixed if (rank := _specificity(p, group.names)) is not None]
        if not ranked:
            return group
        first, pattern = max(ranked)
        bits: Any = self.fixed[pattern]  # what the user gave
        for rank, other in ranked:
            if rank == first and self.fixed[other] != bits:
                raise HagoError(
                    f"fix_bits {other!r} and {pattern!r} give edge {group.key!r} {self.fixed[other]} and {bits} bits, "
                    f"and neither is more specific; fix the bits of {group.key!r} itself"
                )
        if isinstance(bits, bool) or not isinstance(bits, Integral):
            raise HagoError(
                f"fix_bits {pattern!r} is {bits!r}, of type {type(bits).__name__}; expected a whole number, one of "
                f"{list(group.choices)}"
            )
        if bits not in group.choices:
            raise InfeasibleBits(
                f"fix_bits {pattern!r}: {bits} bits for edge {group.key!r} fit no signature of "
                f"{self.hardware.name}; expected one of {list(group.choices)}"
            )
        return replace(group, choices=(int(bits),))


def _specificity(pattern: str, names: Sequence[str]) -> tuple[bool, int, int] | None:
    """How specific a shell pattern is for a group with these names, the most specific of which comes first; None where
    it matches none. A name is more specific than a pattern with wildcards, and of two such patterns the one with more
    other characters."""
    index = next((i for i, name in enumerate(names) if matches(name, (pattern,))), None)
    if index is None:
        return None
    if pattern in (names[index], glob.escape(names[index])):
        return True, -index, 0
    return False, sum(character not in "*?[]" for character in pattern), -index
