"""The simulator: the Plan on float carriers, real values in and out, at nearly the float model's speed.

Values are centered integers in float32, or float64 where a sum may pass 2**24; a convolution or
matrix product with such sums runs as exact partial sums instead. Edges of one producer that ask for
the same integers share one SimQ. Float nodes run as they are, on contiguous values, so that the
integer model's float nodes are the same calls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn

from hago.execute import compute_real, flatten_inputs, last_readers, nest_outputs, run
from hago.fusion import fuse_clamps
from hago.graph import OUTPUT, Node
from hago.lru import LRU
from hago.numerics import apply_simq, dequantize
from hago.plan import NodePlan, Plan
from hago.types import Edge, SimQ

#: Bytes of constants in carrier form that one Carriers keeps.
CARRIER_BYTES: Final = 1 << 30

#: Sees the accumulators of an integer node before its register cuts them.
Watch = Callable[[Node, Tensor], None]
OnValue = Callable[[Node, Any], None]
#: Sees what arrives on an edge of an integer node: centered integers, or real values.
OnEdge = Callable[[Edge, Any], None]
#: The integers of a node at one target: (source node, identity of the target qparams).
Shared = tuple[str, int]


class Carriers:
    """Constants as floats, kept between simulators of one search and bounded by CARRIER_BYTES."""

    def __init__(self) -> None:
        self._kept: LRU[tuple[int, torch.dtype], tuple[Tensor, Tensor]] = LRU(
            CARRIER_BYTES, lambda pair: pair[1].numel() * pair[1].element_size()
        )

    def __call__(self, integers: Tensor, dtype: torch.dtype) -> Tensor:
        found = self._kept.get((id(integers), dtype))
        if found is None:
            value = channels_last(integers.to(dtype))
            found = (integers, value)  # holding the key's object keeps its id unique
            self._kept.put((id(integers), dtype), found)
        return found[1]


def channels_last(x: Tensor) -> Tensor:
    """The layout that convolutions are fastest in; only 4-dimensional tensors have it."""
    return x.contiguous(memory_format=torch.channels_last) if x.ndim == 4 else x


class Simulator(nn.Module):
    """A Plan as a module: real values in, real values out.

    Args:
        plan: what to simulate.
        carriers: shared between simulators of one search.
        watch: sees every integer node's accumulators before overflow.
    """

    def __init__(self, plan: Plan, carriers: Carriers | None = None, watch: Watch | None = None) -> None:
        super().__init__()
        self.plan, self.watch = plan, watch
        self.carriers = carriers or Carriers()
        self.fused = fuse_clamps(plan)
        self._done = last_readers(plan.graph)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The simulated outputs, nested as the model's."""
        graph = self.plan.graph
        return nest_outputs(graph, self.run(flatten_inputs(graph, args, kwargs)))

    def run(
        self, inputs: Sequence[Tensor], on_value: OnValue | None = None, on_edge: OnEdge | None = None
    ) -> list[Any]:
        """The simulated outputs of flat inputs; `on_value` sees every node's carrier, `on_edge` what
        arrives at integer nodes. Clamps are fused where nobody looks: the outputs are the same."""
        graph, edges = self.plan.graph, self.plan.edges
        step = _Pass(self, fuse=on_value is None and on_edge is None, on_edge=on_edge)
        with torch.no_grad():
            laid = [channels_last(x) for x in inputs]
            outputs = run(graph, laid, step, on_value=on_value, done=self._done)
            return [to_real(edges[Edge(OUTPUT, i)], v) for i, v in enumerate(outputs)]


class _Pass:
    """One forward pass: computes nodes, and keeps integers that several edges ask for until the last
    of them has come."""

    def __init__(self, owner: Simulator, *, fuse: bool, on_edge: OnEdge | None) -> None:
        self.plan, self.carriers, self.watch = owner.plan, owner.carriers, owner.watch
        self.on_edge = on_edge
        self.skipped = owner.fused.skipped if fuse else frozenset()
        self.simqs = {**owner.plan.edges, **(owner.fused.simqs if fuse else {})}
        self.left: dict[Shared, int] = {}
        for edge, simq in self.simqs.items():
            if simq is not None:
                key = (self.plan.graph.source(edge), id(simq.target))
                self.left[key] = self.left.get(key, 0) + 1
        self.kept: dict[Shared, Tensor] = {}

    def __call__(self, node: Node, values: Sequence[Any]) -> Any:
        plan = self.plan.nodes.get(node.name)
        if plan is None:
            real = [to_real(self.simqs[e], v) for e, v in zip(node.edges, values, strict=True)]
            return compute_real(node, real, self.plan.ops)
        if node.name in self.skipped:
            return values[0]
        operands = [self._operand(node, plan, slot, v) for slot, v in enumerate(values)]
        if self.on_edge is not None:
            for edge, operand in zip(node.edges, operands, strict=True):
                self.on_edge(edge, operand)
        if plan.table is not None:
            return plan.look_up(operands[0])
        c = self._compute(node, plan, operands)
        if self.watch is not None:
            self.watch(node, c)
        return apply_simq(plan.held(c), plan.out_simq, self.plan.hardware.requantize)

    def _operand(self, node: Node, plan: NodePlan, slot: int, value: Any) -> Any:
        carrier = torch.float32 if plan.parts > 1 else plan.carrier
        if slot in plan.consts:
            return self.carriers(plan.consts[slot], carrier)
        if plan.operands[slot] is None:
            return to_real(self.simqs[node.edges[slot]], value)
        simq = self.simqs[node.edges[slot]]
        return (value if simq is None else self._moved(node.inputs[slot], simq, value)).to(carrier)

    def _moved(self, source: str, simq: SimQ, value: Tensor) -> Tensor:
        """The integers of one edge, made once for all edges that ask for the same."""
        key = (source, id(simq.target))
        found = self.kept.pop(key, None)
        if found is None:
            found = apply_simq(value, simq, self.plan.hardware.requantize)
        self.left[key] -= 1
        if self.left[key]:
            self.kept[key] = found
        return found

    def _compute(self, node: Node, plan: NodePlan, operands: list[Any]) -> Tensor:
        rule = self.plan.ops[node.op]
        if plan.parts == 1:
            return rule.compute_int(plan.attrs, *operands)
        assert rule.integer is not None and rule.integer.split is not None
        chunks = rule.integer.split(plan.attrs, operands, plan.parts)
        total = rule.compute_int(plan.attrs, *chunks[0]).to(torch.float64)
        for chunk in chunks[1:]:
            total += rule.compute_int(plan.attrs, *chunk)
        return total


def to_real(simq: SimQ | None, value: Any) -> Any:
    """A value as a float node reads it: dequantized where it was integer, and contiguous."""
    if simq is not None and simq.source is not None:
        value = dequantize(value, simq.source)
    return value.contiguous() if isinstance(value, Tensor) else value
