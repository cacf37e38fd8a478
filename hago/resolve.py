"""resolve: bits and thresholds to a Plan, node by node in order.

A Resolver lives for one search. It remembers node plans by what they depend on (the bits of their
groups and the qparams of their producers), so a point that differs in one edge costs only the
nodes that feel it. Its memory is bounded: `MEMORY` node plans and `CONST_BYTES` of integers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from hago.bounds import largest_centered
from hago.graph import OUTPUT, Graph, Node
from hago.hardware import Hardware
from hago.lru import LRU
from hago.node_builder import NodeBuilder
from hago.numerics import quantize
from hago.operands import ThresholdSource
from hago.ops import OPS, Ops
from hago.plan import NodePlan, Plan
from hago.space import Bits, Space
from hago.topology import Topology
from hago.types import Edge, QParams, SimQ

MEMORY: Final = 1 << 16
CONST_BYTES: Final = 1 << 30


@dataclass(frozen=True, slots=True)
class _Value:
    """What is known of a node's value: its qparams (None: real) and largest |c|."""

    qparams: QParams | None
    magnitude: float


class Resolver:
    """Makes Plans for one graph on one piece of hardware.

    Args:
        thresholds: where thresholds come from.
    """

    def __init__(
        self,
        graph: Graph,
        hardware: Hardware,
        topology: Topology,
        space: Space,
        thresholds: ThresholdSource,
        ops: Ops = OPS,
    ) -> None:
        self.graph, self.hardware, self.topology = graph, hardware, topology
        self.space, self.thresholds, self.ops = space, thresholds, hardware.computes(ops)
        self.group_of = {e: g.key for g in space.groups.values() for e in g.edges}
        self._plans: LRU[tuple[Any, ...], tuple[NodePlan, _Value]] = LRU(MEMORY)
        self._consts: LRU[tuple[Any, ...], Tensor] = LRU(CONST_BYTES, lambda t: t.numel() * t.element_size())
        self._interned: dict[tuple[object, ...], QParams] = {}
        self._values: dict[tuple[int, float], _Value] = {}
        self._real = _Value(None, 0.0)

    def __call__(self, bits: Bits) -> Plan:
        """The Plan of a point.

        Raises:
            InfeasibleBits: no signature of a node holds the bits of its operands.
        """
        self.space.check(bits)
        values: dict[str, _Value] = {}
        nodes: dict[str, NodePlan] = {}
        edges: dict[Edge, SimQ | None] = {}
        for node in self.graph:
            if not self.topology.nodes[node.name]:
                values[node.name] = self._real
                for edge in node.edges:
                    edges[edge] = self._to_real(values[self.graph.source(edge)])
                continue
            plan, values[node.name] = self._node(node, bits, [values[s] for s in node.inputs])
            nodes[node.name] = plan
            edges.update(zip(node.edges, plan.simqs, strict=True))
        for slot, name in enumerate(self.graph.outputs):
            edges[Edge(OUTPUT, slot)] = self._to_real(values[name])
        return Plan(self.graph, self.hardware, self.ops, nodes, edges)

    @staticmethod
    def _to_real(value: _Value) -> SimQ | None:
        return None if value.qparams is None else SimQ(value.qparams, None)

    # ------------------------------------------------------------ one node, remembered
    def _node(self, node: Node, bits: Bits, sources: list[_Value]) -> tuple[NodePlan, _Value]:
        chosen = [self._bits(e, bits) for e in node.edges]
        out_bits = bits.get(f"{node.name}:out")
        key = (node.name, *chosen, out_bits, *map(id, sources))
        found = self._plans.get(key)
        if found is None:
            qparams = [s.qparams for s in sources]
            magnitudes = [s.magnitude for s in sources]
            plan = NodeBuilder(self, node, chosen, out_bits, qparams, magnitudes).build()
            found = (plan, self._value(plan))
            self._plans.put(key, found)
        return found

    def _bits(self, edge: Edge, bits: Bits) -> int | None:
        key = self.group_of.get(edge)
        return None if key is None else bits[key]

    def _value(self, plan: NodePlan) -> _Value:
        clip = largest_centered(plan.out)
        emits = plan.out_simq is None and plan.table is None
        magnitude = min(clip, plan.bound) if emits and plan.proved else clip
        key = (id(plan.out), magnitude)
        return self._values.setdefault(key, _Value(plan.out, magnitude))

    def intern(self, qparams: QParams) -> QParams:
        """The one object for equal qparams, so that identity means equality."""
        return self._interned.setdefault(qparams.key, qparams)

    def const(self, name: str, target: QParams) -> Tensor:
        """A constant's centered integers, in the smallest torch integer type that holds them."""
        key = (name, id(target))
        found = self._consts.get(key)
        if found is None:
            exact = quantize(self.graph.consts[name].to(torch.float64), target, self.hardware.requantize.rounding)
            small = float(exact.abs().max()) if exact.numel() else 0.0
            storage = torch.int8 if small < 128 else torch.int16 if small < 32768 else torch.int64
            found = exact.to(storage)
            self._consts.put(key, found)
        return found
