"""Resolve bits and thresholds to a Plan, node by node in the order of the graph.

A `Resolver` has a graph, hardware, a space and a source of thresholds. Called with the bits of a point, it returns a
`Plan` or raises InfeasibleBits. `search.prepare` makes one per search; every worker, replay and change of thresholds
gets another.

For every integer node the Resolver makes a `NodeBuilder`, which selects the signature, gives every operand its qparams
(`plan.operands`), bounds the accumulator (`plan.accumulators`) and requantizes the output where the signature says so.
For a node that computes in float and stores its weight as integers (weight only) it calls `stored_weight`. Such a node
cannot overflow, and nothing is requantized: it reads `float32(c) * float32(scale)`, in the simulator, the integer model
and an ONNX file alike.

Node plans are cached by what they depend on: the bits of the node's groups and the qparams of its producers. So for a
point that differs from an earlier one in one edge, only the nodes that the edge reaches are built.
"""

from __future__ import annotations

import glob
import hashlib
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor

from hago.arithmetic.numerics import EXACT_FLOAT64, apply_simq, dequantize, largest_requantized, quantize
from hago.arithmetic.types import Edge, QParams, SimQ
from hago.caching import LRU
from hago.correction import OffsetConstants
from hago.errors import InfeasibleBits
from hago.graph import OUTPUT, Graph, Node
from hago.hardware import Hardware, OpDesc
from hago.ops import OPS, Ops, Site
from hago.plan.accumulators import Bounds, additions_of, largest_centered, pairs_of
from hago.plan.operands import Operands, ThresholdSource
from hago.plan.plan import NodePlan, Plan, StoredWeight
from hago.plan.space import Bits, Group, Space, build_space
from hago.plan.topology import Topology, analyze, fitting_descs, weight_only_descs
from hago.plan.weight_groups import GroupSums, WeightGroups, group_sums, largest_partial_sum, smallest_integers

#: The most node plans, and the most bytes of integer constants, that the Resolvers of one graph cache.
CACHED_NODE_PLANS: Final = 1 << 16
CACHED_CONST_BYTES: Final = 1 << 30
#: The most topologies whose Resolver is cached, in a space where nodes may turn float.
CACHED_TOPOLOGIES: Final = 256

#: (name, qparams) -> the centered integers of a constant; None for one that is rounded to the nearest integers.
Constants = Callable[[str, QParams], Tensor | None]


# ---------------------------------------------------------------- one integer node
class NodeBuilder:
    """Builds the plan of one integer node. A Resolver makes one for every node plan that is not in its cache, and calls
    `build` once.

    Args:
        resolver: has the graph, the hardware, the thresholds and the integers of constants.
        bits: bits of each in-edge; None where the edge has no choice of bits.
        out_bits: bits of the output, where the node requantizes it.
        sources: qparams of each producer; None where its value is real.
        magnitudes: the largest |c| of each producer, c being its centered integers.
    """

    def __init__(
        self,
        resolver: Resolver,
        node: Node,
        bits: Sequence[int | None],
        out_bits: int | None,
        sources: Sequence[QParams | None],
        magnitudes: Sequence[float],
    ) -> None:
        form = resolver.ops[node.op].integer
        assert form is not None
        self.resolver, self.node, self.form = resolver, node, form
        self.bits, self.out_bits = bits, out_bits
        self.sources, self.magnitudes = sources, magnitudes
        self.operands = Operands(resolver, node, form, bits, sources)
        self.desc = self._select_signature()

    def build(self) -> NodePlan:
        """Build the node's plan.

        Raises:
            InfeasibleBits: no signature holds the bits of operands and output.
        """
        targets = self.operands.targets(self.desc)
        simqs = tuple(self._simq(slot, t) for slot, t in enumerate(targets))
        output = self._output_qparams()
        site = Site(tuple(targets), output, self.resolver.hardware.requantize)
        groups, slots = self._groups(targets), enumerate(targets)
        consts = {
            s: groups.joined() if groups and groups.slot == s else self.resolver.const(self.node.inputs[s], t)
            for s, t in slots
            if t and self.operands.is_const(s)
        }
        register = self.operands.register(site, self.desc)
        attrs = self.form.integer_attrs(self.node.attrs, site)
        shapes = [self.resolver.graph[s].shape or () for s in self.node.inputs]
        bounds = Bounds(self.form, attrs, targets, consts, self._limits(targets), shapes)
        self._check_simulated(bounds.centered)
        out = register if output is None else output
        table = self._table(targets[0], out) if self.form.table else None
        out_simq = None if output is None or table is not None else SimQ(register, out)
        return NodePlan(
            desc=self.desc,
            attrs=attrs,
            operands=tuple(targets),
            simqs=simqs,
            consts=consts,
            register=register,
            out_simq=out_simq,
            out=out,
            bound=bounds.centered,
            raw_bound=bounds.raw(),
            keeps_input_dtype=self.form.outputs_fit_input_dtype and register.dtype == self.desc.in_dtype(0),
            parts=bounds.parts(),
            table=table,
            thresholds=self.operands.thresholds,
            saturated_biases=self._saturated_biases(targets),
            digest=self._digest(simqs, out_simq, out, consts, groups),
            pairs=pairs_of(self.form, self.node.attrs, targets, consts.get(1), shapes, self.desc.register.overflow),
            additions=additions_of(self.resolver.ops[self.node.op], attrs, self.desc.register, bounds.centered),
            raised=self.operands.raised,
            groups=groups and replace(groups, sums=self._group_sums(groups, attrs, targets)),
        )

    def _check_simulated(self, bound: float) -> None:
        """Refuse sums that float64, in which they are simulated, does not hold exactly, and what a register holds of
        them if it cannot be requantized exactly.

        Raises:
            InfeasibleBits: a sum of this magnitude is too large.
        """
        register = self.desc.register.dtype
        requantized = largest_requantized(register, self.resolver.hardware.requantize)
        most = EXACT_FLOAT64 if register.max <= requantized else min(requantized, EXACT_FLOAT64)
        if bound <= most:
            return
        power = math.ceil(math.log2(bound)) if bound < math.inf else sys.float_info.max_exp
        most_bits = most.bit_length() - 1
        excess = power - most_bits
        raise InfeasibleBits(
            f"sums of node {self.node.name!r} ({self.node.op}) may reach 2**{power}, and hago simulates up to "
            f"2**{most_bits}; give its operands {excess} fewer bits together (fix_bits, or max_bits in the hardware "
            "file), or keep it float (keep_float)",
            self.node.name,
            excess,
        )

    # ------------------------------------------------------------ groups of the weight
    def _groups(self, targets: Sequence[QParams | None]) -> WeightGroups | None:
        """The groups of the weight, if they have multipliers; without their partial sums."""
        multipliers, of_op, weight = self.operands.multipliers, self.desc.groups, self.form.weight
        if multipliers is None or of_op is None or weight is None:
            return None
        joined, bits = targets[weight.slot], self.bits[weight.slot]
        assert joined is not None and bits is not None
        per_row = joined.scale.reshape(-1, 1)
        # the range of the integers is that of the joined ones over the largest multiplier
        top = of_op.largest_multiplier(power_of_two=self.resolver.hardware.requantize.power_of_two)
        dtype = self.desc.in_dtype(weight.slot)
        zero = torch.zeros_like(multipliers)
        stored = self.resolver.intern(
            QParams(per_row * multipliers, zero, joined.qmin // top, joined.qmax // top, dtype, of_op.size)
        )
        integers = self.resolver.const(self.node.inputs[weight.slot], stored)
        return WeightGroups(weight.slot, stored, integers, multipliers, None)

    def _group_sums(
        self, groups: WeightGroups, attrs: Mapping[str, Any], targets: Sequence[QParams | None]
    ) -> GroupSums | None:
        rule, of_op = self.resolver.ops[self.node.op], self.desc.groups
        assert of_op is not None
        register, integers = self.desc.register, groups.integers
        largest = largest_partial_sum(of_op, integers, register, self._limits(targets)[0])
        if largest is None:
            return None
        return group_sums(rule, attrs, of_op, integers, groups.multipliers, register, largest)

    # ------------------------------------------------------------ signature
    def _select_signature(self) -> OpDesc:
        descs = self.resolver.signatures(self.node)
        feasible = [d for d in descs if self._takes_bits(d)]
        # prefer signatures that read values in the dtype in which they are stored
        feasible = [d for d in feasible if self.operands.reads_as_stored(d)] or feasible
        if feasible:
            # of signatures that differ in signs only, take the first whose unsigned operands are never negative
            same_widths = [d for d in feasible if d.widths == feasible[0].widths]
            return next((d for d in same_widths if self.operands.signs_fit(d)), feasible[0])
        operands = zip(self.node.inputs, self.bits, self.sources, strict=True)
        bits_or_dtypes = {name: q.dtype.name if b is None and q is not None else b for name, b, q in operands}
        requested = {name: bits_or_dtype for name, bits_or_dtype in bits_or_dtypes.items() if bits_or_dtype is not None}
        out = "" if self.out_bits is None else f" and {self.out_bits} of its output"
        raise InfeasibleBits(
            f"no signature of {self.resolver.hardware.name} for node {self.node.name!r} ({self.node.op}) holds bits "
            f"{requested}{out}; it has {'; '.join(map(str, descs))}",
            self.node.name,
        )

    def _takes_bits(self, desc: OpDesc) -> bool:
        """Whether a signature holds the bits of every operand and of the output."""
        output_has_bits = desc.requantize_at == "output" and desc.fixed_out is None
        if output_has_bits and self.out_bits is not None and self.out_bits not in desc.bits_of(desc.out_dtype):
            return False
        group_of = self.resolver.group_of
        return all(self.operands.takes_bits(e.slot, desc, own=group_of.get(e) == str(e)) for e in self.node.edges)

    def _simq(self, slot: int, target: QParams | None) -> SimQ | None:
        source = self.sources[slot]
        return None if source is target else SimQ(source, target)

    # ------------------------------------------------------------ output
    def _output_qparams(self) -> QParams | None:
        """The qparams that the output is requantized to; None where the node emits its accumulator."""
        fixed = self.operands.fixed_output(self.desc)
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
        others = [self.resolver.graph.consts[name] for name in self.node.inputs[1:]]
        real = self.resolver.ops[self.node.op].compute(self.node.attrs, dequantize(q, source), *others)
        return apply_simq(real, SimQ(None, target), self.resolver.hardware.requantize).to(torch.int64)

    def _limits(self, targets: Sequence[QParams | None]) -> list[float]:
        """The largest |c| of each operand: bounded by its clipping, and by its producer where nothing is clipped."""
        limits = []
        for target, source, magnitude in zip(targets, self.sources, self.magnitudes, strict=True):
            clip = 0.0 if target is None else largest_centered(target)
            limits.append(min(clip, magnitude) if source is target else clip)
        return limits

    def _saturated_biases(self, targets: Sequence[QParams | None]) -> int:
        """The number of entries of constant biases that exceed the integers of their slot."""
        count = 0
        for slot, target in enumerate(targets):
            if target is not None and self.form.slot(slot) == "bias" and self.operands.is_const(slot):
                q = self.resolver.graph.consts[self.node.inputs[slot]].to(torch.float64) / target.scale
                count += int(((q > target.qmax + 0.5) | (q < target.qmin - 0.5)).sum())
        return count

    def _digest(
        self,
        simqs: Sequence[SimQ | None],
        out_simq: SimQ | None,
        out: QParams,
        consts: Mapping[int, Tensor],
        groups: WeightGroups | None,
    ) -> bytes:
        parts = [simq.key if simq else None for simq in simqs]
        identity: tuple[Any, ...] = (str(self.desc), self.desc.form, parts, out_simq and out_simq.key, out.key)
        if self.resolver.graph.correction_hash:
            identity += (self.resolver.graph.correction_hash,)
        if isinstance(self.resolver.constants, OffsetConstants):
            identity += tuple(hashlib.sha256(c.numpy().tobytes()).digest() for c in consts.values())
        if groups is not None:
            identity += (hashlib.sha256(groups.multipliers.numpy().tobytes()).digest(),)
        return hashlib.sha256(repr(identity).encode()).digest()


# ---------------------------------------------------------------- the weight of a float node
def stored_weight(resolver: Resolver, node: Node, edge: Edge, bits: int) -> StoredWeight:
    """The weight of a float node as integers: in the first signature that holds its bits, and of signatures that
    differ in the sign only, in the first that holds its values.

    Args:
        edge: the edge on which the node reads the weight.

    Raises:
        InfeasibleBits: no signature holds the bits.
    """
    descs = weight_only_descs(resolver.graph, node, resolver.hardware, resolver.ops)
    feasible = [d for d in descs if bits in d.bits_of(d.in_dtype(edge.slot))]
    if not feasible:
        raise InfeasibleBits(
            f"no signature of {resolver.hardware.name} holds {bits} bits for edge {str(edge)!r}; it has "
            f"{'; '.join(map(str, descs))}",
            node.name,
        )
    form, source = resolver.ops[node.op].integer, node.inputs[edge.slot]
    assert form is not None
    same_widths = [d for d in feasible if d.widths == feasible[0].widths]
    signed = resolver.thresholds.signed(str(edge), source)
    desc = next((d for d in same_widths if d.in_dtype(edge.slot).signed or not signed), feasible[0])
    all_real = [None] * len(node.inputs)
    operands = Operands(resolver, node, form, all_real, all_real)
    group = None if desc.groups is None else desc.groups.size
    qparams = operands.quantized(edge.slot, bits, desc.in_dtype(edge.slot), group)
    integers, is_nearest = resolver.const(source, qparams), not isinstance(resolver.constants, OffsetConstants)
    digest = b"" if is_nearest else hashlib.sha256(integers.numpy().tobytes()).digest()
    return StoredWeight(desc, qparams, integers, operands.thresholds[str(edge)], digest)


# ---------------------------------------------------------------- all nodes
@dataclass(frozen=True, slots=True)
class _Value:
    """The value of a node while a Plan is resolved: its qparams (None for a real value) and the largest |c|."""

    qparams: QParams | None
    magnitude: float


class _Cache:
    """Node plans and integer constants, shared by the Resolvers of one graph on one piece of hardware.

    Equal qparams are one object, and so are equal values, so that they are compared by identity, and `id` serves in
    keys.
    """

    def __init__(self) -> None:
        self.plans: LRU[tuple[Any, ...], tuple[NodePlan, _Value]] = LRU(CACHED_NODE_PLANS)
        self.consts: LRU[tuple[Any, ...], Tensor] = LRU(CACHED_CONST_BYTES, lambda t: t.numel() * t.element_size())
        self.signatures: dict[str, tuple[OpDesc, ...]] = {}
        self.interned: dict[tuple[object, ...], QParams] = {}
        self.values: dict[tuple[int, float], _Value] = {}
        self.real = _Value(None, 0.0)


class Resolver:
    """Makes the Plans of one graph on one piece of hardware. It is called with the bits of a point several times per
    trial (for the key, the score, the cost and the strategy), and caches the plans of nodes.

    Args:
        topology: of the points that turn no node float.
        space: of the points that it is called with.
        thresholds: the source of thresholds.
        share_cache_of: a Resolver of the same graph, hardware, thresholds and constants, to share its cache.
        constants: gives the integers of constants that are not rounded to the nearest, e.g. DoReFa's weights.
    """

    def __init__(
        self,
        graph: Graph,
        hardware: Hardware,
        topology: Topology,
        space: Space,
        thresholds: ThresholdSource,
        ops: Ops = OPS,
        share_cache_of: Resolver | None = None,
        constants: Constants | None = None,
    ) -> None:
        self.graph, self.hardware, self.topology = graph, hardware, topology
        self.space, self.thresholds, self.ops = space, thresholds, hardware.rules(ops)
        self.constants = constants
        self.group_of = {e: g.key for g in space.groups.values() for e in g.edges}
        self._variants: LRU[frozenset[str], Resolver] = LRU(CACHED_TOPOLOGIES)
        self._cache: _Cache = _Cache() if share_cache_of is None else share_cache_of._cache

    def variant_at(self, bits: Bits) -> tuple[Resolver, dict[str, int]]:
        """The Resolver for the nodes that a point turns float, and the point's bits in that Resolver's space.

        A group that only that topology has takes its most bits.
        """
        if not any(group.is_kind for group in self.space.groups.values()):
            return self, dict(bits)
        floats = self.space.floats(bits)
        variant = self._variants.get_or_make(floats, lambda: self._variant(floats))
        return variant, {key: _nearest_choice(g, bits.get(key)) for key, g in variant.space.groups.items()}

    def _variant(self, floats: frozenset[str]) -> Resolver:
        """The Resolver of the topology in which these nodes are float, too."""
        base, graph, ops = self.topology, self.graph, self.ops
        float_nodes = [n for n in graph.computed if not base.nodes[n.name]]
        kept_float = [name for node in float_nodes for name in _names_kept_float(node, base)]
        patterns = [glob.escape(name) for name in (*kept_float, *sorted(floats))]
        topology = analyze(graph, self.hardware, patterns, ops, floats) if floats else base
        space = build_space(graph, self.hardware, topology, None, ops)
        return Resolver(graph, self.hardware, topology, space, self.thresholds, ops, self, self.constants)

    def __call__(self, bits: Bits) -> Plan:
        """Resolve a point to its Plan.

        Raises:
            InfeasibleBits: the bits are no point of the space, or no signature of a node holds those of its operands.
        """
        self.space.check(bits)
        variant, own_bits = self.variant_at(bits)
        if variant is not self:
            return variant(own_bits)
        values: dict[str, _Value] = {}
        nodes: dict[str, NodePlan] = {}
        edges: dict[Edge, SimQ | None] = {}
        weights: dict[Edge, StoredWeight] = {}
        for node in self.graph:
            if not self.topology.nodes[node.name]:
                values[node.name] = self._cache.real
                for edge in node.edges:
                    edges[edge] = self._dequantized(values[self.graph.source(edge)])
                    if self.topology.edges[edge]:
                        weights[edge] = stored_weight(self, node, edge, bits[self.group_of[edge]])
                        edges[edge] = SimQ(weights[edge].qparams, None)
                continue
            plan, values[node.name] = self._node(node, bits, [values[s] for s in node.inputs])
            nodes[node.name] = plan
            edges.update(zip(node.edges, plan.simqs, strict=True))
        for slot, name in enumerate(self.graph.outputs):
            edges[Edge(OUTPUT, slot)] = self._dequantized(values[name])
        return Plan(self.graph, self.hardware, self.ops, nodes, edges, weights)

    @staticmethod
    def _dequantized(value: _Value) -> SimQ | None:
        return None if value.qparams is None else SimQ(value.qparams, None)

    # ------------------------------------------------------------ one node
    def _node(self, node: Node, bits: Bits, sources: list[_Value]) -> tuple[NodePlan, _Value]:
        operand_bits = [self._bits(e, bits) for e in node.edges]
        out_bits = bits.get(f"{node.name}:out")
        # the range that an output's threshold covers depends on which of its readers are integer
        out_group = self.space.groups.get(f"{node.name}:out")
        key = (node.name, *operand_bits, out_bits, out_group and out_group.source, *map(id, sources))
        cached = self._cache.plans.get(key)
        if cached is None:
            qparams = [s.qparams for s in sources]
            magnitudes = [s.magnitude for s in sources]
            plan = NodeBuilder(self, node, operand_bits, out_bits, qparams, magnitudes).build()
            cached = (plan, self._value(plan))
            self._cache.plans.put(key, cached)
        return cached

    def _bits(self, edge: Edge, bits: Bits) -> int | None:
        """The bits of an edge; None where it has no choice of bits, or reads its producer's integers as they are."""
        key = self.group_of.get(edge)
        form = self.ops[self.graph[edge.dst].op].integer
        follows = form is not None and form.slot(edge.slot) == "follow" and key != str(edge)
        return None if key is None or follows else bits[key]

    def _value(self, plan: NodePlan) -> _Value:
        """The value that a node emits; equal values are one object."""
        clip = largest_centered(plan.out)
        emits_accumulator = plan.out_simq is None and plan.table is None
        magnitude = min(clip, plan.bound) if emits_accumulator and plan.proved else clip
        if emits_accumulator and magnitude > EXACT_FLOAT64:
            # partial sums that overflow are no larger than without, and pairs change the sum by no more than themselves
            magnitude = plan.bound + (plan.raw_bound if plan.pairs is not None else 0.0)
        key = (id(plan.out), magnitude)
        return self._cache.values.setdefault(key, _Value(plan.out, magnitude))

    def signatures(self, node: Node) -> tuple[OpDesc, ...]:
        """See `fitting_descs`."""
        known = self._cache.signatures
        if node.name not in known:
            known[node.name] = fitting_descs(self.graph, node, self.hardware, self.ops)
        return known[node.name]

    def intern(self, qparams: QParams) -> QParams:
        """The one object for equal qparams, so that equal qparams can be told by identity."""
        return self._cache.interned.setdefault(qparams.key, qparams)

    def const(self, name: str, target: QParams) -> Tensor:
        """A constant's centered integers, in the smallest torch integer type that holds them."""
        key = (name, id(target))
        integers = self._cache.consts.get(key)
        if integers is None:
            integers = smallest_integers(self._quantized_constant(name, target))
            self._cache.consts.put(key, integers)
        return integers

    def _quantized_constant(self, name: str, target: QParams) -> Tensor:
        integers = None if self.constants is None else self.constants(name, target)
        if integers is not None:
            return integers
        return quantize(self.graph.consts[name].to(torch.float64), target, self.hardware.requantize.rounding)

    def with_constants(self, constants: Constants | None) -> Resolver:
        """A Resolver like this one with other integers of constants, with a cache of its own."""
        graph, topology = self.graph, self.topology
        return Resolver(graph, self.hardware, topology, self.space, self.thresholds, self.ops, constants=constants)

    def with_space(self, space: Space) -> Resolver:
        """A Resolver like this one for another space, with a cache of its own."""
        graph, topology = self.graph, self.topology
        return Resolver(graph, self.hardware, topology, space, self.thresholds, self.ops, constants=self.constants)

    def with_thresholds(self, thresholds: ThresholdSource) -> Resolver:
        """A Resolver like this one with other thresholds; the two share the cached integers of constants."""
        graph, hardware, topology = self.graph, self.hardware, self.topology
        other = Resolver(graph, hardware, topology, self.space, thresholds, self.ops, constants=self.constants)
        other._cache.consts, other._cache.interned = self._cache.consts, self._cache.interned
        return other


def _names_kept_float(node: Node, topology: Topology) -> list[str]:
    """The `keep_float` names that keep a float node float: its own name, or, where its weight is quantized, the names
    of its other edges."""
    float_edges = [str(e) for e in node.edges if not topology.edges[e]]
    return [node.name] if len(float_edges) == len(node.edges) else float_edges


def _nearest_choice(group: Group, bits: int | None) -> int:
    """The widest choice of a group that is no wider than `bits`, or else its narrowest; its widest for None."""
    fitting = [b for b in group.choices if bits is not None and b <= bits]
    return max(fitting, default=group.choices[0] if bits is None else group.choices[-1])
