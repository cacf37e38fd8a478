"""Zeros around what only convolutions read are a part of their windows, since 0 is the zero point on every grid:
of integers, and of reals that are quantized behind the padding.

Engines have no integer kernel for padding by itself and would go through real values for it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from torch import Tensor

from hago.arithmetic.types import Edge, QParams, SimQ
from hago.errors import UnsupportedOp
from hago.export.onnx.operators import emit_real, pad_sizes, pads
from hago.export.onnx.values import Scales, Value, quantizes_to
from hago.export.onnx.writer import Writer
from hago.graph.graph import CONST, INPUT, OUTPUT, Node
from hago.plan.plan import NodePlan, Plan

_CONVS: Final = ("conv1d", "conv2d", "conv3d")


def padded_convolutions(plan: Plan) -> tuple[frozenset[str], Mapping[str, Node]]:
    """Which pads need not be written, and the convolutions that take them over: their `padding` is starts, then
    ends, as ONNX has it."""
    graph, convolutions = plan.graph, dict[str, Node]()
    merged: set[str] = set()
    for node in graph:
        readers = graph.out_edges.get(node.name, ())
        if readers and _adds_zeros(plan, node) and all(_pads_itself(plan, node, e.dst, e.slot) for e in readers):
            merged.add(node.name)
            convolutions |= {e.dst: _with(plan, node, graph[e.dst]) for e in readers}
    return frozenset(merged), convolutions


def inside(value: Tensor, pad: Node) -> Tensor:
    """A padded value without its padding."""
    sizes = pad_sizes(pad, value.ndim)
    starts, ends = sizes[: value.ndim], sizes[value.ndim :]
    within = [slice(low, size - high) for low, size, high in zip(starts, value.shape, ends, strict=True)]
    return value[tuple(within)]


def _adds_zeros(plan: Plan, node: Node) -> bool:
    """Whether a node pads spatial axes with 0, on the grid that its input is on."""
    if node.op != "pad" or node.attrs["mode"] != "constant" or node.attrs["value"] or min(node.attrs["pad"]) < 0:
        return False
    made = plan.nodes.get(node.name)
    q = None if made is None else made.operands[0]
    same_grid = made is None or (q is not None and made.out_simq is None and q.key == made.out.key)
    return same_grid and len(node.attrs["pad"]) <= 2 * (len(node.shape or ()) - 2)


def _pads_itself(plan: Plan, pad: Node, reader: str, slot: int) -> bool:
    """Whether a reader is a convolution of what is padded; one in float does not read integers."""
    if reader == OUTPUT or slot != 0 or plan.graph[reader].op not in _CONVS:
        return False
    return reader in plan.nodes or pad.name not in plan.nodes


def _with(plan: Plan, pad: Node, conv: Node) -> Node:
    """The convolution with the zeros of a pad before it."""
    kernel = (plan.graph[conv.inputs[1]].shape or ())[2:]
    around = pad_sizes(pad, len(kernel))
    own = pads(conv.attrs, kernel)
    return replace(conv, attrs={**conv.attrs, "padding": [a + b for a, b in zip(around, own, strict=True)]})


# ---------------------------------------------------------------- onnx file
# A plan as an ONNX model: the walk over the graph that both forms share.
# Float nodes are written as ONNX says them, between DequantizeLinear and QuantizeLinear; how an integer node is
# written is the business of a form (`onnx_qdq`, `onnx_qoperator`), which the walk is handed.


@dataclass(frozen=True, slots=True)
class OnnxFile:
    """A model, and which of its tensors stands for which value of the plan.

    Args:
        model: an onnx.ModelProto.
        values: by node name.
        operands: what each integer node reads, by edge; constants left out.
        form: qdq or qoperator.
        unpadded: pads that are left to the convolutions behind them, which read what stands inside the padding.
    """

    model: Any
    values: Mapping[str, Value]
    operands: Mapping[Edge, Value]
    form: str
    unpadded: Collection[str] = ()


class Walk:
    """Writes a plan node by node; lives for one export.

    Args:
        integer: writes an integer node and returns its value.
    """

    def __init__(self, plan: Plan, integer: Callable[[Walk, Node, NodePlan], Value]) -> None:
        self.plan, self.graph = plan, plan.graph
        self.w = Writer(plan.graph)
        self.scales = Scales(self.w, plan.hardware.requantize)
        self.values: dict[str, Value] = {}
        self.operands: dict[Edge, Value] = {}
        self._integer = integer
        self._merged, self._padded = padded_convolutions(plan)
        self._real: dict[str, str] = {}
        self._arrived: dict[tuple[str, tuple[object, ...]], Value] = {}

    def file(self, form: str, metadata: Mapping[str, str]) -> OnnxFile:
        """The whole model."""
        for node in self.graph:
            self._visit(self._padded.get(node.name, node))
        outputs = self._outputs()
        inputs = {n: (self._kind(self.graph[n]), self._shape(self.graph[n])) for n in self.graph.inputs}
        values = {name: value for name, value in self.values.items() if name not in self._merged}
        return OnnxFile(self.w.finish(inputs, outputs, metadata), values, self.operands, form, self._merged)

    def _visit(self, node: Node) -> None:
        if node.op == CONST:
            return
        if node.op == INPUT:
            self.values[node.name] = Value(node.name, "real")
        elif node.name in self._merged:
            # a convolution pads what comes
            real = node.name not in self.plan.nodes
            self.values[node.name] = Value(self.real(node.inputs[0]), "real") if real else self.operand(node.edges[0])
        elif node.name in self.plan.nodes:
            self.values[node.name] = self._integer(self, node, self.plan.nodes[node.name])
        else:
            emit_real(self.w, node, [self._read(e) for e in node.edges], node.name)
            self.values[node.name] = Value(node.name, "real")

    # ------------------------------------------------------------ what nodes read
    def rank(self, name: str) -> int:
        """How many axes a value has."""
        return len(self.graph[name].shape or ())

    def real(self, name: str) -> str:
        """The tensor that holds a node's real value, made once."""
        if self.graph[name].op == CONST:
            return self.w.constant(name, self.graph.consts[name])
        value = self.values[name]
        if value.held == "real":
            return value.name
        if name not in self._real:
            self._real[name] = self.scales.dequantize(value, self.rank(name), name)
        return self._real[name]

    def _read(self, edge: Edge) -> str:
        """The real value that a float node reads on an edge."""
        source, weight = self.graph.source(edge), self.plan.weights.get(edge)
        if weight is None:
            return self.real(source)
        value = self.scales.constant(str(edge), weight.integers, weight.qparams, packed=True)
        return self.scales.dequantize(value, self.rank(source), f"{value.name}:real")

    def constant(self, edge: Edge, shape: tuple[int, ...] | None = None, packed: bool = False) -> Value:
        """A constant operand of an integer node, in its own shape or another."""
        made = self.plan.nodes[edge.dst]
        q, integers = made.operands[edge.slot], made.consts[edge.slot]
        assert q is not None
        return self.scales.constant(str(edge), integers, q, shape, packed)

    def operand(self, edge: Edge) -> Value:
        """What an integer node reads on an edge that is no constant: after its SimQ, made once for all edges
        that ask for the same."""
        self.operands[edge] = self._operand(edge)
        return self.operands[edge]

    def _operand(self, edge: Edge) -> Value:
        source, simq = self.graph.source(edge), self.plan.edges[edge]
        if simq is None or simq.target is None:
            return self.values[source]
        key = (source, simq.target.key)
        if key not in self._arrived:
            self._arrived[key] = self._moved(source, simq, str(edge))
        return self._arrived[key]

    def _moved(self, source: str, simq: SimQ, out: str) -> Value:
        assert simq.target is not None
        value = self.values[source]
        if simq.source is None or value.held == "real":
            return self.scales.quantize(self.real(source), simq.target, self.rank(source), out)
        return self.scales.requantize(value, simq, out, carried=not quantizes_to(simq.target.dtype))

    def dequantized(self, edge: Edge) -> str:
        """The real value of what arrives on an edge of an integer node."""
        value = self.operand(edge)
        if value.held == "real":
            return value.name
        source = self.graph.source(edge)
        if value is self.values[source]:
            return self.real(source)
        real = f"{value.name}:real"
        if real not in self._real:
            self._real[real] = self.scales.dequantize(value, self.rank(source), real)
        return real

    def stored(self, real: str, q: QParams, node: Node) -> Value:
        """A node's value, quantized."""
        return self.scales.quantize(real, q, len(node.shape or ()), f"{node.name}:q")

    # ------------------------------------------------------------ ends
    def _outputs(self) -> dict[str, tuple[int, Sequence[int | str] | None]]:
        found: dict[str, tuple[int, Sequence[int | str] | None]] = {}
        for slot, name in enumerate(self.graph.outputs):
            real = self.real(name)
            if real != name or real in found or real in self.graph.inputs or self.graph[name].op == CONST:
                real = self.w.op("Identity", [real], f"{name}:{OUTPUT}{slot}")
            found[real] = (self._kind(self.graph[name]), self._shape(self.graph[name]))
        return found

    def _kind(self, node: Node) -> int:
        return self.w.kind_of(self.w.dtypes[node.name])

    def _shape(self, node: Node) -> list[int | str]:
        if node.shape is None:
            raise UnsupportedOp(f"output {node.name!r} is not a tensor; ONNX returns tensors only")
        if node.op == CONST:
            return list(node.shape)
        if node.shape[:1] in ((), (1,)) or node.op == INPUT:
            return ["batch" if d == 0 and s == 1 else s for d, s in enumerate(node.shape)]
        # the batch is part of an axis, or another one; a size that is wrong misleads engines
        return [f"{node.name}:{d}" for d in range(len(node.shape))]
