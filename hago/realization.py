"""The integer model: the Plan on true integers, the reference engine.

Every value rests in its storage dtype (int8, uint8, int16, int32 ...) as q, zero point included;
arithmetic is int64. Nothing here is shared with the simulator but the Plan, the op rules and
`numerics.apply_simq`; that the two agree bit for bit is tested, not assumed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from typing import Any

import torch
from torch import Tensor, nn

from hago.execute import compute_real, flatten_inputs, last_readers, nest_outputs, run
from hago.graph import OUTPUT, Node
from hago.numerics import apply_simq, dequantize
from hago.ops import OPS
from hago.ops._rule import OpRule
from hago.plan import NodePlan, Plan
from hago.stored import Provenance, StoredSize, from_file_bytes, save_plan, to_file_bytes
from hago.types import Edge, QParams, SimQ


class IntegerModel(nn.Module):
    """A realized Plan: real values in and out, integers inside.

    Weights are buffers in their storage dtypes, named `node:slot` with dots and colons replaced. It can
    be copied and sent to another process as it is: what travels is the stored form.

    Args:
        plan: what to compute.
        provenance: where the Plan comes from; stored with it.
    """

    def __init__(self, plan: Plan, provenance: Provenance | None = None) -> None:
        super().__init__()
        self.plan, self.provenance = plan, provenance
        self._done = last_readers(plan.graph)
        for name, node in plan.nodes.items():
            for slot, values in node.consts.items():
                qparams = node.operands[slot]
                assert qparams is not None
                self.register_buffer(_buffer(Edge(name, slot)), store(values, qparams))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The integer model's outputs, nested as the model's."""
        graph = self.plan.graph
        return nest_outputs(graph, self.run(flatten_inputs(graph, args, kwargs)))

    def run(
        self,
        inputs: Sequence[Tensor],
        on_value: Callable[[Node, Any], None] | None = None,
        on_edge: Callable[[Edge, Any], None] | None = None,
    ) -> list[Any]:
        """The outputs of flat inputs; `on_value` sees every node's stored integers, `on_edge` the
        centered integers that arrive at integer nodes."""

        def step(node: Node, values: Sequence[Any]) -> Any:
            plan = self.plan.nodes.get(node.name)
            if plan is not None:
                return self._integer(node, plan, values, on_edge)
            real = [_to_real(self.plan.edges[e], v) for e, v in zip(node.edges, values, strict=True)]
            return compute_real(node, real, self.plan.ops)

        with torch.no_grad():
            outputs = run(self.plan.graph, inputs, step, on_value=on_value, done=self._done)
            return [_to_real(self.plan.edges[Edge(OUTPUT, i)], v) for i, v in enumerate(outputs)]

    def save(self, path: str | PathLike[str]) -> StoredSize:
        """Write the model as one file; `hago.load_integer_model` gives a model with equal outputs.

        Returns:
            How large the file is, beside the float model's weights.

        Raises:
            GraphError: a node that cannot be stored, by name; nothing is written.
            ModelFileError: the file could not be written; what stood there is untouched.
        """
        return save_plan(path, self.plan, self.provenance)

    def __reduce__(self) -> tuple[Any, ...]:
        own = {name: rule for name, rule in self.plan.ops.items() if rule is not OPS.get(name)}
        return _restored, (type(self), to_file_bytes(self.plan, self.provenance), own)

    def _integer(
        self, node: Node, plan: NodePlan, values: Sequence[Any], on_edge: Callable[[Edge, Any], None] | None
    ) -> Tensor:
        operands = [self._operand(node, plan, slot, v) for slot, v in enumerate(values)]
        if on_edge is not None:
            for edge, operand in zip(node.edges, operands, strict=True):
                on_edge(edge, operand)
        if plan.table is not None:
            return store(plan.look_up(operands[0]), plan.out)
        c = self.plan.ops[node.op].compute_int(plan.attrs, *operands)
        held = apply_simq(plan.held(c, plan.lost(operands)), plan.out_simq, self.plan.hardware.requantize)
        return store(held, plan.out)

    def _operand(self, node: Node, plan: NodePlan, slot: int, value: Any) -> Any:
        """Centered int64 integers, after a trip through the operand's storage dtype."""
        qparams, simq = plan.operands[slot], plan.simqs[slot]
        if slot in plan.consts:
            assert qparams is not None
            return center(self.get_buffer(_buffer(Edge(node.name, slot))), qparams)
        if simq is None:
            return value if qparams is None else center(value, qparams)
        if simq.source is not None:
            value = center(value, simq.source)
        moved = apply_simq(value, simq, self.plan.hardware.requantize)
        return moved if simq.target is None else center(store(moved, simq.target), simq.target)


def _restored(kind: type[IntegerModel], data: bytes, own: Mapping[str, OpRule]) -> IntegerModel:
    return kind(*from_file_bytes(data, "an integer model", {**OPS, **own}))


def store(c: Tensor, qparams: QParams) -> Tensor:
    """Centered integers as q in the storage dtype."""
    return (c.to(torch.int64) + qparams.zero_point).to(qparams.dtype.torch)


def center(q: Tensor, qparams: QParams) -> Tensor:
    """Stored q as centered int64."""
    return q.to(torch.int64) - qparams.zero_point


def _to_real(simq: SimQ | None, value: Any) -> Any:
    if simq is not None and simq.source is not None:
        value = dequantize(center(value, simq.source), simq.source)
    return value.contiguous() if isinstance(value, Tensor) else value


def _buffer(edge: Edge) -> str:
    return str(edge).replace(".", "/")
