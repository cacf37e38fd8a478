"""The causes of an error: the difference of a node's simulated value from its float value, split into five parts.

`hago.analysis.inspect` makes a NodeSplitter of every integer node and calls it once per batch.

Notation: node `n` computes `f` on real values, `f_q` on centered integers with accumulator scale `s`. `F` is its value
in the float model, `x` are the simulated values of its producers, dequantized but not yet requantized by its in-edges.
The error is split along these successive values:

    v0 = F                                              the float model
    v1 = f(x, w)                                        inherited    = v1 - v0
    v2 = f(Q(x), w)                                     rounding     = v2 - v1
    v3 = f_q(Q(x), Q(w)) * s                            constants    = v3 - v2
    v4 = f_q(C(Q(x)), C(Q(w))) * s                      saturation   = v4 - v3
    v5 = register(v4)                                   overflow     = v5 - v4
    v6 = the output requantized without limits          rounding    += v6 - v5
    v7 = S, the simulated value                         saturation  += v7 - v6

The differences telescope: the five causes sum to `S - F`, element by element. `Q` quantizes as the in-edge's SimQ says
but without its limits, `C` applies the limits, `w` are constants (weights and biases), and `register` wraps or
saturates. A node that does not requantize its output ends at v5 = S; one without constants has v2 = v3; a table
computes `f` where others compute `f_q`.

A float node computes `f(x, w)`, so that all its error is inherited; if its weight alone is quantized, it adds
constants = S - f(x, w).

If the range of a requantized output covers only the values that a relu, clamp or pooling after it passes on, all values
are taken after those nodes, because clipping a value that they would clip anyway is no error.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Literal, get_args

import torch
from torch import Tensor

from hago.arithmetic.numerics import Lost, apply_simq, clip_range, dequantize, overflowed, quantize
from hago.arithmetic.types import QParams, SimQ
from hago.graph import Node, compute_real
from hago.plan import Plan, Topology
from hago.plan.topology import range_chain

Cause = Literal["inherited", "rounding", "constants", "saturation", "overflow"]
CAUSES: Final[tuple[Cause, ...]] = get_args(Cause)
SplitStep = tuple[Cause, Tensor]

#: A limit that no integer reaches, and that float64 and int64 represent exactly.
_NO_LIMIT: Final = 1 << 52
#: The key of a requantized output among the in-edges of a node, whose keys are slots.
OUT: Final = -1


@dataclass(frozen=True, slots=True)
class EdgeSample:
    """The error that one edge adds to its value, in one batch or, as a sum of samples, in several.

    Args:
        saturated, values: number of clipped values, and of all values.
        signal: sum of squares of the real value before the edge.
        rounded, clipped: sums of squares of the changes by rounding, and then by clipping.
    """

    saturated: int
    values: int
    signal: float
    rounded: float
    clipped: float

    def __add__(self, other: EdgeSample) -> EdgeSample:
        return EdgeSample(
            self.saturated + other.saturated,
            self.values + other.values,
            self.signal + other.signal,
            self.rounded + other.rounded,
            self.clipped + other.clipped,
        )


@dataclass(frozen=True, slots=True)
class Split:
    """The error of a node in one batch, split by cause; made by a NodeSplitter.

    Args:
        reference: v0, real.
        steps: the successive values after v0, each with the cause that led to it; the last is S.
        edges: by slot, of edges that carry data; OUT is the requantized output.
        overflows: number of accumulators outside their register.
        accumulators: number of all accumulators.
    """

    reference: Tensor
    steps: tuple[SplitStep, ...]
    edges: Mapping[int, EdgeSample] = field(default_factory=dict)
    overflows: int = 0
    accumulators: int = 0


def unlimited(qparams: QParams) -> QParams:
    """The same scale and zero point, without limits."""
    return replace(qparams, qmin=-_NO_LIMIT, qmax=_NO_LIMIT)


def edge_sample(before: Tensor, free: Tensor, limited: Tensor) -> EdgeSample:
    """The error of an edge from real values: before it, and after it without and with its limits."""
    real, rounded, clipped = (t.to(torch.float64) for t in (before, free, limited))
    return EdgeSample(
        saturated=int((rounded != clipped).sum()),
        values=real.numel(),
        signal=float(real.square().sum()),
        rounded=float((rounded - real).square().sum()),
        clipped=float((clipped - rounded).square().sum()),
    )


def chain_after(plan: Plan, name: str) -> tuple[Node, ...]:
    """The nodes (relu, clamp, pooling ...) on whose output the range of a requantized output was calibrated."""
    node_plan, graph = plan.nodes[name], plan.graph
    if node_plan.out_simq is None and node_plan.table is None:
        return ()
    topology = Topology({n.name: n.name in plan.nodes for n in graph}, {}, {})
    chain = (graph[n] for n in range_chain(graph, plan.hardware, topology, plan.ops, name))
    return tuple(itertools.takewhile(lambda n: len(n.inputs) == 1, chain))  # a concatenation has other operands too


class NodeSplitter:
    """Splits the error of one integer node by cause. Lockstep makes one per node and calls it once per batch.

    Attributes:
        consts: by slot, the centered integers of constants without limits, float32.
        const_edges: by slot, the error of quantizing the constants, which is the same in every batch.
        chain: the nodes after which values are taken; see the docstring of the module.
    """

    def __init__(self, plan: Plan, node: Node) -> None:
        self.plan, self.node, self.node_plan = plan, node, plan.nodes[node.name]
        self.requantize = plan.hardware.requantize
        self.chain = chain_after(plan, node.name)
        self.consts = {slot: self._const(slot) for slot in self.node_plan.consts}
        self.const_edges = {slot: self._const_edge(slot, q) for slot, q in self.consts.items()}
        exact = self.node_plan.carrier == torch.float64 and self.node_plan.parts == 1
        self._carrier = torch.float64 if exact else torch.float32
        self._table, self._free_table = self._tables()

    def __call__(
        self,
        reference: Tensor,
        sources: Sequence[Tensor],
        carriers: Sequence[Tensor],
        accumulator: Tensor | None,
        final: Tensor,
        *,
        exact_sources: bool,
        lost: Lost | None,
    ) -> Split:
        """Split one batch.

        Args:
            reference: the value of the node in the float model.
            sources: the simulated values of its producers, real; constants in float.
            carriers: the same values as they are in the simulator: centered integers if quantized.
            accumulator: centered, before overflow; None for a table.
            final: the simulated value, real.
            exact_sources: whether the producers have no error.
            lost: the change by overflow inside the sums; None if it is impossible.
        """
        free, edges = self._unlimited_operands(sources, carriers)
        clipped = any(e.saturated for e in (*edges.values(), *self.const_edges.values()))
        inherited = reference if exact_sources else compute_real(self.node, sources, self.plan.ops)
        if accumulator is None:
            computed = self._table_steps(free, clipped)
        else:
            computed = self._accumulator_steps(free, clipped, accumulator, lost)
        steps: list[SplitStep] = [("inherited", inherited)]
        if self.consts:
            steps.append(("rounding", self._rounded_data(sources, free, inherited)))
        steps += [("constants" if self.consts else "rounding", computed[0][1]), *computed[1:]]
        if self.node_plan.out_simq is not None or self._table is not None:
            edges[OUT] = edge_sample(steps[-2][1], steps[-1][1], final)
            steps.append(("saturation", final))
        overflows = 0 if accumulator is None else self._overflows(accumulator, lost)
        accumulators = 0 if accumulator is None else accumulator.numel()
        passed = tuple((cause, self._through_chain(value)) for cause, value in steps)
        return Split(self._through_chain(reference), passed, edges, overflows, accumulators)

    # ------------------------------------------------------------ operands
    def _unlimited_operands(
        self, sources: Sequence[Tensor], carriers: Sequence[Tensor]
    ) -> tuple[list[Tensor], dict[int, EdgeSample]]:
        """The operands as integers without limits, and the errors of their edges."""
        free, edges = list(carriers), {}
        for slot, simq in enumerate(self.node_plan.simqs):
            target = self.node_plan.operands[slot]
            if slot in self.consts:
                free[slot] = self.consts[slot]
            elif simq is not None and target is not None:
                free[slot] = apply_simq(carriers[slot], SimQ(simq.source, unlimited(target)), self.requantize)
                edges[slot] = quantized_sample(sources[slot], free[slot], target)
        return free, edges

    def _const(self, slot: int) -> Tensor:
        target = self.node_plan.operands[slot]
        assert target is not None
        nearest = free_integers(self.plan, self.node.inputs[slot], target)
        # corrected integers need not be the nearest
        integers = self.node_plan.consts[slot].to(torch.float32)
        return torch.where(limit(nearest, target) == integers, nearest, integers)

    def _const_edge(self, slot: int, free: Tensor) -> EdgeSample:
        target = self.node_plan.operands[slot]
        assert target is not None
        return quantized_sample(self.plan.graph.consts[self.node.inputs[slot]], free, target)

    def _rounded_data(self, sources: Sequence[Tensor], free: Sequence[Tensor], inherited: Tensor) -> Tensor:
        """v2: the value with data rounded and constants in float."""
        real, changed = list(sources), False
        for slot, simq in enumerate(self.node_plan.simqs):
            target = self.node_plan.operands[slot]
            if simq is not None and target is not None and slot not in self.consts:
                real[slot], changed = dequantize(free[slot], target), True
        return compute_real(self.node, real, self.plan.ops) if changed else inherited

    # ------------------------------------------------------------ v3 to v6
    def _accumulator_steps(
        self, free: Sequence[Tensor], clipped: bool, accumulator: Tensor, lost: Lost | None
    ) -> list[SplitStep]:
        """v3 to v6 of a node with an accumulator."""
        plan = self.node_plan
        limited = dequantize(accumulator, plan.register)
        unclipped = limited
        if clipped:
            operands = [c if t is None else c.to(self._carrier) for c, t in zip(free, plan.operands, strict=True)]
            unclipped = dequantize(self.plan.ops[self.node.op].compute_int(plan.attrs, *operands), plan.register)
        after_overflow = plan.apply_register(accumulator, lost)
        overflown = limited if after_overflow is accumulator else dequantize(after_overflow, plan.register)
        steps: list[SplitStep] = [("constants", unclipped), ("saturation", limited), ("overflow", overflown)]
        if plan.out_simq is not None:
            requantized = apply_simq(after_overflow, SimQ(plan.out_simq.source, unlimited(plan.out)), self.requantize)
            steps.append(("rounding", dequantize(requantized, plan.out)))
        return steps

    def _table_steps(self, free: Sequence[Tensor], clipped: bool) -> list[SplitStep]:
        """v3 to v6 of a node that looks its values up in a table."""
        source = self.node_plan.operands[0]
        assert source is not None and self._table is not None and self._free_table is not None
        index = (limit(free[0], source) + (source.zero_point - source.qmin)).to(torch.int64)
        limited = self._table[index]
        unclipped = limited
        if clipped:
            unclipped = compute_real(self.node, [dequantize(free[0], source)], self.plan.ops)
        return [("rounding", unclipped), ("saturation", limited), ("rounding", self._free_table[index])]

    def _tables(self) -> tuple[Tensor | None, Tensor | None]:
        """The real value of every input integer, and the same rounded to the output's grid."""
        source = self.node_plan.operands[0]
        if self.node_plan.table is None or source is None:
            return None, None
        q = torch.arange(source.qmin, source.qmax + 1, dtype=torch.float64) - source.zero_point
        real: Tensor = compute_real(self.node, [dequantize(q, source)], self.plan.ops)
        rounded = apply_simq(real, SimQ(None, unlimited(self.node_plan.out)), self.requantize)
        return real, dequantize(rounded, self.node_plan.out)

    def _overflows(self, accumulator: Tensor, lost: Lost | None) -> int:
        if self.node_plan.proved:
            return 0
        if lost is not None:
            return int(lost.cut.sum())
        raw = accumulator + self.node_plan.register.zero_point
        return int(overflowed(raw, self.node_plan.desc.register.dtype))

    def _through_chain(self, value: Tensor) -> Tensor:
        """The value after the nodes of `chain`."""
        for node in self.chain:
            value = compute_real(node, [value], self.plan.ops)
        return value


def limit(c: Tensor, target: QParams) -> Tensor:
    """Centered integers clipped to the range of `target`."""
    low, high = (torch.as_tensor(v, dtype=c.dtype) for v in clip_range(target.spread_over(c.shape)))
    return torch.minimum(torch.maximum(c, low), high)


def free_integers(plan: Plan, const: str, target: QParams) -> Tensor:
    """The centered integers of a constant without limits, float32."""
    real = plan.graph.consts[const].to(torch.float64)
    return quantize(real, unlimited(target), plan.hardware.requantize.rounding).to(torch.float32)


def quantized_sample(before: Tensor, free: Tensor, target: QParams) -> EdgeSample:
    """The error of an edge, from the real value before it and its integers without limits."""
    return edge_sample(before, dequantize(free, target), dequantize(limit(free, target), target))
