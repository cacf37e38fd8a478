"""Weight only: the weight of a node that computes in float, as integers at its bits.

Nothing of it can overflow, and nothing is requantized: `float32(c) * float32(scale)` is what the node reads, in the
simulator, the integer model and an ONNX file alike.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from hago.arithmetic.numerics import apply_simq, dequantize, quantize
from hago.arithmetic.types import Edge, QParams, SimQ
from hago.caching import LRU
from hago.errors import InfeasibleBits
from hago.graph.graph import CONST, INPUT, OUTPUT, Graph, Node
from hago.hardware.hardware import Hardware, OpDesc
from hago.ops import OPS, Ops
from hago.ops._rule import Site
from hago.plan.accumulators import CUTS, Bounds, Pairs, additions_of, largest_centered, pairs_of
from hago.plan.operands import OperandContext, Operands, ThresholdSource
from hago.plan.plan import NodePlan, Plan, StoredWeight
from hago.plan.space import Bits, Group, Space, build_space
from hago.plan.topology import Topology, analyze, escape, fitting_descs, weight_only_descs


def stored_weight(owner: OperandContext, node: Node, edge: Edge, bits: int) -> StoredWeight:
    """A weight at its bits, in the first signature that holds them; of those that differ in the sign only, the
    first that holds its values.

    Args:
        edge: on which the node reads it.

    Raises:
        InfeasibleBits: no signature holds the bits.
    """
    descs = weight_only_descs(owner.graph, node, owner.hardware, owner.ops)
    holding = [d for d in descs if bits <= d.in_dtype(edge.slot).bits]
    if not holding:
        raise InfeasibleBits(
            f"no signature of {owner.hardware.name} holds {bits} bits for edge {str(edge)!r}; it has "
            f"{'; '.join(map(str, descs))}",
            node.name,
        )
    form, source = owner.ops[node.op].integer, node.inputs[edge.slot]
    assert form is not None
    twins = [d for d in holding if d.widths == holding[0].widths]
    signed = owner.thresholds.signed(str(edge), source)
    desc = next((d for d in twins if d.in_dtype(edge.slot).signed or not signed), holding[0])
    real = [None] * len(node.inputs)
    operands = Operands(owner, node, form, real, real)
    qparams = operands.quantized(edge.slot, bits, desc.in_dtype(edge.slot))
    return StoredWeight(desc, qparams, owner.const(source, qparams), operands.thresholds[str(edge)])


# ---------------------------------------------------------------- node builder
# NodeBuilder: the plan of one integer node, from the bits of its operands and their producers.
# In order: choose the signature, give every operand its qparams (`operands`), derive the accumulator, bound it
# (`bounds`), and requantize at the output where the signature says so.


class NodeBuilder:
    """Builds the plan of one node; lives for one call of `build`.

    Args:
        bits: of each in-edge; None where it has none to choose.
        out_bits: of the output, where the node may requantize it.
        sources: qparams of each producer; None where it is real.
        magnitudes: the largest |c| of each producer.
    """

    def __init__(
        self,
        owner: OperandContext,
        node: Node,
        bits: Sequence[int | None],
        out_bits: int | None,
        sources: Sequence[QParams | None],
        magnitudes: Sequence[float],
    ) -> None:
        form = owner.ops[node.op].integer
        assert form is not None
        self.owner, self.node, self.form = owner, node, form
        self.bits, self.out_bits = bits, out_bits
        self.sources, self.magnitudes = sources, magnitudes
        self.operands = Operands(owner, node, form, bits, sources)
        self.desc = self._select()

    def build(self) -> NodePlan:
        """The node's plan.

        Raises:
            InfeasibleBits: no signature holds the bits of operands and output.
        """
        targets = self.operands.targets(self.desc)
        simqs = tuple(self._simq(slot, t) for slot, t in enumerate(targets))
        made = self._requantized()
        site = Site(tuple(targets), made, self.owner.hardware.requantize)
        consts = {
            s: self.owner.const(self.node.inputs[s], t)
            for s, t in enumerate(targets)
            if t and self.operands.is_const(s)
        }
        register = self.operands.register(site, self.desc)
        attrs = self.form.integer_attrs(self.node.attrs, site)
        bounds = Bounds(self.owner.graph, self.node, self.form, attrs, targets, consts, self._limits(targets))
        bound = bounds.centered()
        out = register if made is None else made
        table = self._table(targets[0], out) if self.form.table else None
        out_simq = None if made is None or table is not None else SimQ(register, out)
        return NodePlan(
            desc=self.desc,
            attrs=attrs,
            operands=tuple(targets),
            simqs=simqs,
            consts=consts,
            register=register,
            out_simq=out_simq,
            out=out,
            bound=bound,
            raw_bound=bounds.raw(),
            within_hull=self.form.within_hull and register.dtype == self.desc.in_dtype(0),
            parts=bounds.parts(),
            table=table,
            thresholds=self.operands.thresholds,
            saturated_biases=self._saturated(targets),
            digest=self._digest(simqs, out_simq, out),
            pairs=self._pairs(targets, consts),
            additions=additions_of(self.owner.ops[self.node.op], attrs, self.desc.register, bound),
            raised=self.operands.raised,
        )

    # ------------------------------------------------------------ signature
    def _select(self) -> OpDesc:
        descs = fitting_descs(self.owner.graph, self.node, self.owner.hardware, self.owner.ops)
        holding = [d for d in descs if self._holds(d)]
        # values move on in the dtype that they have, where a signature takes that
        holding = [d for d in holding if self.operands.reads_as_stored(d)] or holding
        if holding:
            # of signatures that differ in signs only, the first whose unsigned sides meet no negative value
            twins = [d for d in holding if d.widths == holding[0].widths]
            return next((d for d in twins if self.operands.signs_fit(d)), holding[0])
        operands = zip(self.node.inputs, self.bits, self.sources, strict=True)
        given = {name: q.dtype.name if b is None and q is not None else b for name, b, q in operands}
        asked = {name: what for name, what in given.items() if what is not None}
        out = "" if self.out_bits is None else f" and {self.out_bits} of its output"
        raise InfeasibleBits(
            f"no signature of {self.owner.hardware.name} for node {self.node.name!r} ({self.node.op}) holds bits "
            f"{asked}{out}; it has {'; '.join(map(str, descs))}",
            self.node.name,
        )

    def _holds(self, desc: OpDesc) -> bool:
        """Whether a signature can take every operand with its bits, and give the output with its."""
        chosen = desc.requantize_at == "output" and desc.fixed_out is None
        if chosen and self.out_bits is not None and self.out_bits > desc.out_dtype.bits:
            return False
        return all(self.operands.holds(desc, slot) for slot in range(len(self.node.inputs)))

    def _simq(self, slot: int, target: QParams | None) -> SimQ | None:
        source = self.sources[slot]
        return None if source is target else SimQ(source, target)

    # ------------------------------------------------------------ output
    def _requantized(self) -> QParams | None:
        """The output's own qparams; None where the node emits its accumulator."""
        fixed = self.operands.fixed(self.desc)
        if fixed is not None:
            return fixed
        if self.desc.requantize_at == "edge" or (self.out_bits is None and not self.form.table):
            return None
        assert self.out_bits is not None
        return self.operands.output(self.out_bits, self.desc)

    def _table(self, source: QParams | None, target: QParams) -> Tensor:
        """The centered output of every input integer q from qmin to qmax."""
        assert source is not None
        q = torch.arange(source.qmin, source.qmax + 1, dtype=torch.float64) - source.zero_point
        others = [self.owner.graph.consts[name] for name in self.node.inputs[1:]]
        real = self.owner.ops[self.node.op].compute(self.node.attrs, dequantize(q, source), *others)
        return apply_simq(real, SimQ(None, target), self.owner.hardware.requantize).to(torch.int64)

    def _limits(self, targets: Sequence[QParams | None]) -> list[float]:
        """The largest |c| that each operand can hold: what its clipping, or its producer, lets through."""
        limits = []
        for target, source, magnitude in zip(targets, self.sources, self.magnitudes, strict=True):
            clip = 0.0 if target is None else largest_centered(target)
            limits.append(min(clip, magnitude) if source is target else clip)
        return limits

    def _pairs(self, targets: Sequence[QParams | None], consts: Mapping[int, Tensor]) -> Pairs | None:
        product, overflow = self.form.product, self.desc.register.overflow
        if product is None or overflow not in CUTS:
            return None
        shapes = [self.owner.graph[s].shape or () for s in self.node.inputs]
        return pairs_of(product, self.node.attrs, targets, consts.get(1), shapes, overflow)

    def _saturated(self, targets: Sequence[QParams | None]) -> int:
        """Bias entries beyond their slot."""
        count = 0
        for slot, target in enumerate(targets):
            if target is not None and self.form.slot(slot) == "bias" and self.operands.is_const(slot):
                q = self.owner.graph.consts[self.node.inputs[slot]].to(torch.float64) / target.scale
                count += int(((q > target.qmax + 0.5) | (q < target.qmin - 0.5)).sum())
        return count

    def _digest(self, simqs: Sequence[SimQ | None], out_simq: SimQ | None, out: QParams) -> bytes:
        parts = [simq.key if simq else None for simq in simqs]
        said = (str(self.desc), self.desc.form, parts, out_simq.key if out_simq else None, out.key)
        return hashlib.sha256(repr(said).encode()).digest()


# ---------------------------------------------------------------- resolve
# resolve: bits and thresholds to a Plan, node by node in order.
# A Resolver lives for one search. It remembers node plans by what they depend on (the bits of their groups and the
# qparams of their producers), so a point that differs in one edge costs only the nodes that feel it. Its memory is
# bounded: `MEMORY` node plans and `CONST_BYTES` of integers.

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
