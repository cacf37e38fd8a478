"""resolve: bits and thresholds to a Plan, node by node in order.

A Resolver lives for one search. It remembers node plans by what they depend on (the bits of their
groups and the qparams of their producers), so a point that differs in one edge costs only the
nodes that feel it. Its memory is bounded: `MEMORY` node plans and `CONST_BYTES` of integers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from hago.bounds import largest_centered
from hago.graph import CONST, INPUT, OUTPUT, Graph, Node
from hago.hardware import Hardware
from hago.lru import LRU
from hago.node_builder import NodeBuilder
from hago.numerics import quantize
from hago.operands import ThresholdSource
from hago.ops import OPS, Ops
from hago.plan import NodePlan, Plan, StoredWeight
from hago.space import Bits, Group, Space, build_space
from hago.topology import Topology, analyze, escape
from hago.types import Edge, QParams, SimQ
from hago.weight_only import stored_weight

MEMORY: Final = 1 << 16
CONST_BYTES: Final = 1 << 30


#: The centered integers of a constant, where they are not the nearest; None where they are.
Constants = Callable[[str, QParams], Tensor | None]

#: Topologies whose space is kept.
TOPOLOGIES: Final = 256


@dataclass(frozen=True, slots=True)
class _Value:
    """What is known of a node's value: its qparams (None: real) and largest |c|."""

    qparams: QParams | None
    magnitude: float


class _Memory:
    """What Resolvers of one graph remember together, bounded."""

    def __init__(self) -> None:
        self.plans: LRU[tuple[Any, ...], tuple[NodePlan, _Value]] = LRU(MEMORY)
        self.consts: LRU[tuple[Any, ...], Tensor] = LRU(CONST_BYTES, lambda t: t.numel() * t.element_size())
        self.interned: dict[tuple[object, ...], QParams] = {}
        self.values: dict[tuple[int, float], _Value] = {}
        self.real = _Value(None, 0.0)


class Resolver:
    """Makes Plans for one graph on one piece of hardware.

    Args:
        thresholds: where thresholds come from.
        elder: a Resolver of another topology of the same, whose memory is shared.
        constants: integers of constants that are not the nearest to their values.
    """

    def __init__(
        self,
        graph: Graph,
        hardware: Hardware,
        topology: Topology,
        space: Space,
        thresholds: ThresholdSource,
        ops: Ops = OPS,
        elder: Resolver | None = None,
        constants: Constants | None = None,
    ) -> None:
        self.graph, self.hardware, self.topology = graph, hardware, topology
        self.space, self.thresholds, self.ops = space, thresholds, hardware.computes(ops)
        self.constants = constants
        self.group_of = {e: g.key for g in space.groups.values() for e in g.edges}
        self._variants: LRU[frozenset[str], Resolver] = LRU(TOPOLOGIES)
        self._memory: _Memory = _Memory() if elder is None else elder._memory

    def settled(self, bits: Bits) -> tuple[Resolver, dict[str, int]]:
        """The Resolver of the topology that a point chooses, and the point's bits in its space.

        An edge that is quantized there only takes its most bits.
        """
        kinds = {key for key, g in self.space.groups.items() if g.is_kind}
        if not kinds:
            return self, dict(bits)
        floats = self.space.floats(bits)
        found = self._variants.made(floats, lambda: self._variant(floats))
        return found, {key: _nearest(g, bits.get(key)) for key, g in found.space.groups.items()}

    def _variant(self, floats: frozenset[str]) -> Resolver:
        base, graph, ops = self.topology, self.graph, self.ops
        kept = [k for n in graph if n.op not in (INPUT, CONST) and not base.nodes[n.name] for k in _kept(n, base)]
        topology = analyze(graph, self.hardware, [escape(n) for n in (*kept, *sorted(floats))], ops) if floats else base
        space = build_space(graph, self.hardware, topology, None, ops)
        return Resolver(graph, self.hardware, topology, space, self.thresholds, ops, self, self.constants)

    def __call__(self, bits: Bits) -> Plan:
        """The Plan of a point.

        Raises:
            InfeasibleBits: no signature of a node holds the bits of its operands.
        """
        self.space.check(bits)
        chosen, own = self.settled(bits)
        if chosen is not self:
            return chosen(own)
        values: dict[str, _Value] = {}
        nodes: dict[str, NodePlan] = {}
        edges: dict[Edge, SimQ | None] = {}
        weights: dict[Edge, StoredWeight] = {}
        for node in self.graph:
            if not self.topology.nodes[node.name]:
                values[node.name] = self._memory.real
                for edge in node.edges:
                    edges[edge] = self._to_real(values[self.graph.source(edge)])
                    if self.topology.edges[edge]:
                        weights[edge] = stored_weight(self, node, edge, bits[self.group_of[edge]])
                        edges[edge] = SimQ(weights[edge].qparams, None)
                continue
            plan, values[node.name] = self._node(node, bits, [values[s] for s in node.inputs])
            nodes[node.name] = plan
            edges.update(zip(node.edges, plan.simqs, strict=True))
        for slot, name in enumerate(self.graph.outputs):
            edges[Edge(OUTPUT, slot)] = self._to_real(values[name])
        return Plan(self.graph, self.hardware, self.ops, nodes, edges, weights)

    @staticmethod
    def _to_real(value: _Value) -> SimQ | None:
        return None if value.qparams is None else SimQ(value.qparams, None)

    # ------------------------------------------------------------ one node, remembered
    def _node(self, node: Node, bits: Bits, sources: list[_Value]) -> tuple[NodePlan, _Value]:
        chosen = [self._bits(e, bits) for e in node.edges]
        out_bits = bits.get(f"{node.name}:out")
        # what an output's threshold covers depends on which of its readers are integer
        out = self.space.groups.get(f"{node.name}:out")
        key = (node.name, *chosen, out_bits, out and out.source, *map(id, sources))
        found = self._memory.plans.get(key)
        if found is None:
            qparams = [s.qparams for s in sources]
            magnitudes = [s.magnitude for s in sources]
            plan = NodeBuilder(self, node, chosen, out_bits, qparams, magnitudes).build()
            found = (plan, self._value(plan))
            self._memory.plans.put(key, found)
        return found

    def _bits(self, edge: Edge, bits: Bits) -> int | None:
        """Of an edge; None where it has none to choose, or takes what its producer was given."""
        key = self.group_of.get(edge)
        form = self.ops[self.graph[edge.dst].op].integer
        follows = form is not None and form.slot(edge.slot) == "follow" and key != str(edge)
        return None if key is None or follows else bits[key]

    def _value(self, plan: NodePlan) -> _Value:
        clip = largest_centered(plan.out)
        emits = plan.out_simq is None and plan.table is None
        magnitude = min(clip, plan.bound) if emits and plan.proved else clip
        key = (id(plan.out), magnitude)
        return self._memory.values.setdefault(key, _Value(plan.out, magnitude))

    def intern(self, qparams: QParams) -> QParams:
        """The one object for equal qparams, so that identity means equality."""
        return self._memory.interned.setdefault(qparams.key, qparams)

    def const(self, name: str, target: QParams) -> Tensor:
        """A constant's centered integers, in the smallest torch integer type that holds them."""
        key = (name, id(target))
        found = self._memory.consts.get(key)
        if found is None:
            exact = self._integers(name, target)
            small = float(exact.abs().max()) if exact.numel() else 0.0
            storage = torch.int8 if small < 128 else torch.int16 if small < 32768 else torch.int64
            found = exact.to(storage)
            self._memory.consts.put(key, found)
        return found

    def _integers(self, name: str, target: QParams) -> Tensor:
        found = None if self.constants is None else self.constants(name, target)
        if found is None:
            found = quantize(self.graph.consts[name].to(torch.float64), target, self.hardware.requantize.rounding)
        return found

    def within(self, space: Space) -> Resolver:
        """A Resolver like this one of another space."""
        graph, topology = self.graph, self.topology
        return Resolver(graph, self.hardware, topology, space, self.thresholds, self.ops, constants=self.constants)

    def with_thresholds(self, thresholds: ThresholdSource) -> Resolver:
        """A Resolver like this one with other thresholds, which shares the integers of constants."""
        graph, hardware, topology = self.graph, self.hardware, self.topology
        other = Resolver(graph, hardware, topology, self.space, thresholds, self.ops, constants=self.constants)
        other._memory.consts, other._memory.interned = self._memory.consts, self._memory.interned
        return other


def _kept(node: Node, topology: Topology) -> list[str]:
    """What of a float node is float: all of it, or the edges other than its weight's."""
    real = [str(e) for e in node.edges if not topology.edges[e]]
    return [node.name] if len(real) == len(node.edges) else real


def _nearest(group: Group, bits: int | None) -> int:
    """The choice that bits from a wider space mean; the most where they say nothing."""
    fitting = [b for b in group.choices if bits is not None and b <= bits]
    return max(fitting, default=group.choices[0] if bits is None else group.choices[-1])
