"""Causes: the error of one integer node split into what was inherited and what the node itself added.

Notation: node `n` computes `f` on real values, `f_q` on centered integers with accumulator scale `s`.
`F` is its value in the float model, `x` the simulated values of its producers, dequantized but not yet
moved by its in-edges. The successive values

    v0 = F                                              the float model
    v1 = f(x, w)                                        inherited    = v1 - v0
    v2 = f(Q(x), w)                                     rounding     = v2 - v1
    v3 = f_q(Q(x), Q(w)) * s                            constants    = v3 - v2
    v4 = f_q(C(Q(x)), C(Q(w))) * s                      saturation   = v4 - v3
    v5 = register(v4)                                   overflow     = v5 - v4
    v6 = the output requantized without limits          rounding    += v6 - v5
    v7 = S, the simulated value                         saturation  += v7 - v6

telescope: the five causes sum to `S - F`, element by element. `Q` quantizes as the in-edge's SimQ says
but without its limits, `C` applies the limits, `w` are constants (weights and biases), `register` wraps
or saturates. A node that does not requantize its output ends at v5 = S; one without constants has
v2 = v3; a table computes `f` where others compute `f_q`.

A float node computes on `x` alone, so all its error is inherited; one whose weight alone is quantized adds
constants = S - f(x, w).

Where a requantized output covers only what a relu, clamp or pooling behind it lets through, every value
here is taken past those: what they cut off anyway is no error.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Literal, get_args

import torch
from torch import Tensor

from hago.crossing import range_chain
from hago.execute import compute_real
from hago.graph import Node
from hago.numerics import Lost, apply_simq, clip_range, dequantize, overflowed, quantize
from hago.plan import Plan
from hago.topology import Topology
from hago.types import QParams, SimQ

Cause = Literal["inherited", "rounding", "constants", "saturation", "overflow"]
CAUSES: Final[tuple[Cause, ...]] = get_args(Cause)
Step = tuple[Cause, Tensor]

#: Limits that no integer here reaches; float64 and int64 hold them.
_FAR: Final = 1 << 52
#: The key of a requantized output among the edges of a node.
OUT: Final = -1


@dataclass(frozen=True, slots=True)
class EdgeSample:
    """What an edge did to its value in one batch.

    Args:
        saturated, values: how many were clipped, of how many.
        signal: sum of squares of the real value before the edge.
        rounded, clipped: sums of squares of what rounding changed, and then clipping.
    """

    saturated: int
    values: int
    signal: float
    rounded: float
    clipped: float


@dataclass(frozen=True, slots=True)
class Split:
    """The error of a node in one batch.

    Args:
        reference: v0, real.
        steps: each successive value after v0, with the cause that led to it; the last is S.
        edges: by slot, data only; OUT is the requantized output.
        overflows: accumulators outside their register.
        accumulators: how many there are.
    """

    reference: Tensor
    steps: tuple[Step, ...]
    edges: Mapping[int, EdgeSample] = field(default_factory=dict)
    overflows: int = 0
    accumulators: int = 0


def unlimited(qparams: QParams) -> QParams:
    """The same grid without limits."""
    return replace(qparams, qmin=-_FAR, qmax=_FAR)


def edge_sample(before: Tensor, free: Tensor, limited: Tensor) -> EdgeSample:
    """What an edge did, from the real value before it, and after it without and with its limits."""
    first, second, third = (t.to(torch.float64) for t in (before, free, limited))
    return EdgeSample(
        saturated=int((second != third).sum()),
        values=first.numel(),
        signal=float(first.square().sum()),
        rounded=float((second - first).square().sum()),
        clipped=float((third - second).square().sum()),
    )


def chain_behind(plan: Plan, name: str) -> tuple[Node, ...]:
    """The nodes (relu, clamp, pooling ...) behind which a requantized output's range was taken."""
    node_plan, graph = plan.nodes[name], plan.graph
    if node_plan.out_simq is None and node_plan.table is None:
        return ()
    topology = Topology({n.name: n.name in plan.nodes for n in graph}, {}, {})
    chain = (graph[n] for n in range_chain(graph, plan.hardware, topology, plan.ops, name))
    return tuple(itertools.takewhile(lambda n: len(n.inputs) == 1, chain))  # a concatenation has other operands too


class NodeSplitter:
    """Splits the error of one integer node, batch by batch; lives for one inspection.

    Attributes:
        consts: centered integers of each constant slot without limits, float32.
        past: the nodes that values are taken past.
    """

    def __init__(self, plan: Plan, node: Node) -> None:
        self.plan, self.node, self.node_plan = plan, node, plan.nodes[node.name]
        self.how = plan.hardware.requantize
        self.past = chain_behind(plan, node.name)
        self.consts = {slot: self._const(slot) for slot in self.node_plan.consts}
        self._const_edges = {slot: self._const_edge(slot, q) for slot, q in self.consts.items()}
        exact = self.node_plan.carrier == torch.float64 and self.node_plan.parts == 1
        self._carrier = torch.float64 if exact else torch.float32
        self._table, self._free_table = self._tables()

    @property
    def const_edges(self) -> Mapping[int, EdgeSample]:
        """What quantization does to the constants, the same in every batch."""
        return self._const_edges

    def __call__(
        self,
        reference: Tensor,
        sources: Sequence[Tensor],
        carriers: Sequence[Tensor],
        accumulator: Tensor | None,
        final: Tensor,
        *,
        exact_sources: bool,
        lost: Lost | None = None,
    ) -> Split:
        """Split one batch.

        Args:
            reference: the node's value in the float model.
            sources: the simulated values of its producers, real; constants as they are.
            carriers: the same as the simulator holds them: centered integers where integer.
            accumulator: centered, before overflow; None for a table.
            final: the simulated value, real.
            exact_sources: whether the producers have no error.
            lost: what the accumulators lost before their sums were complete; None where they cannot.
        """
        free, edges = self._move(sources, carriers)
        clipped = any(e.saturated for e in (*edges.values(), *self._const_edges.values()))
        inherited = reference if exact_sources else compute_real(self.node, sources, self.plan.ops)
        if accumulator is None:
            body = self._looked_up(free, clipped)
        else:
            body = self._accumulated(free, clipped, accumulator, lost)
        steps: list[Step] = [("inherited", inherited)]
        if self.consts:
            steps.append(("rounding", self._rounded(sources, free, inherited)))
        steps += [("constants" if self.consts else "rounding", body[0][1]), *body[1:]]
        if self.node_plan.out_simq is not None or self._table is not None:
            edges[OUT] = edge_sample(steps[-2][1], steps[-1][1], final)
            steps.append(("saturation", final))
        overflows = 0 if accumulator is None else self._overflows(accumulator, lost)
        seen = 0 if accumulator is None else accumulator.numel()
        made = tuple((cause, self._through(value)) for cause, value in steps)
        return Split(self._through(reference), made, edges, overflows, seen)

    # ------------------------------------------------------------ operands
    def _move(
        self, sources: Sequence[Tensor], carriers: Sequence[Tensor]
    ) -> tuple[list[Tensor], dict[int, EdgeSample]]:
        """Every operand in integers without limits, and what its edge does."""
        free, edges = list(carriers), {}
        for slot, simq in enumerate(self.node_plan.simqs):
            target = self.node_plan.operands[slot]
            if slot in self.consts:
                free[slot] = self.consts[slot]
            elif simq is not None and target is not None:
                free[slot] = apply_simq(carriers[slot], SimQ(simq.source, unlimited(target)), self.how)
                edges[slot] = moved_sample(sources[slot], free[slot], target)
        return free, edges

    def _const(self, slot: int) -> Tensor:
        target = self.node_plan.operands[slot]
        assert target is not None
        return free_integers(self.plan, self.node.inputs[slot], target)

    def _const_edge(self, slot: int, free: Tensor) -> EdgeSample:
        target = self.node_plan.operands[slot]
        assert target is not None
        return moved_sample(self.plan.graph.consts[self.node.inputs[slot]], free, target)

    def _rounded(self, sources: Sequence[Tensor], free: Sequence[Tensor], inherited: Tensor) -> Tensor:
        """v2: data rounded, constants real."""
        real, changed = list(sources), False
        for slot, simq in enumerate(self.node_plan.simqs):
            target = self.node_plan.operands[slot]
            if simq is not None and target is not None and slot not in self.consts:
                real[slot], changed = dequantize(free[slot], target), True
        return compute_real(self.node, real, self.plan.ops) if changed else inherited

    # ------------------------------------------------------------ v3 to v6
    def _accumulated(self, free: Sequence[Tensor], clipped: bool, accumulator: Tensor, lost: Lost | None) -> list[Step]:
        plan = self.node_plan
        limited = dequantize(accumulator, plan.register)
        unclipped = limited
        if clipped:
            operands = [c if t is None else c.to(self._carrier) for c, t in zip(free, plan.operands, strict=True)]
            unclipped = dequantize(self.plan.ops[self.node.op].compute_int(plan.attrs, *operands), plan.register)
        held = plan.held(accumulator, lost)
        cut = limited if held is accumulator else dequantize(held, plan.register)
        steps: list[Step] = [("constants", unclipped), ("saturation", limited), ("overflow", cut)]
        if plan.out_simq is not None:
            moved = apply_simq(held, SimQ(plan.out_simq.source, unlimited(plan.out)), self.how)
            steps.append(("rounding", dequantize(moved, plan.out)))
        return steps

    def _looked_up(self, free: Sequence[Tensor], clipped: bool) -> list[Step]:
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
        moved = apply_simq(real, SimQ(None, unlimited(self.node_plan.out)), self.how)
        return real, dequantize(moved, self.node_plan.out)

    def _overflows(self, accumulator: Tensor, lost: Lost | None) -> int:
        if self.node_plan.proved:
            return 0
        if lost is not None:
            return int(lost.cut.sum())
        raw = accumulator + self.node_plan.register.zero_point
        return int(overflowed(raw, self.node_plan.desc.register.dtype))

    def _through(self, value: Tensor) -> Tensor:
        for node in self.past:
            value = compute_real(node, [value], self.plan.ops)
        return value


def limit(c: Tensor, target: QParams) -> Tensor:
    """Centered integers inside the range of `target`."""
    low, high = (torch.as_tensor(v, dtype=c.dtype) for v in clip_range(target))
    return torch.minimum(torch.maximum(c, low), high)


def free_integers(plan: Plan, const: str, target: QParams) -> Tensor:
    """The centered integers of a constant without limits, float32."""
    real = plan.graph.consts[const].to(torch.float64)
    return quantize(real, unlimited(target), plan.hardware.requantize.rounding).to(torch.float32)


def moved_sample(before: Tensor, free: Tensor, target: QParams) -> EdgeSample:
    """What an edge did, from the real value before it and its integers without limits."""
    return edge_sample(before, dequantize(free, target), dequantize(limit(free, target), target))
