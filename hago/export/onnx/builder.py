"""Building the ONNX model of a Plan, node by node.

Float nodes are written with the operators of `operators.py`, between DequantizeLinear and QuantizeLinear. Integer nodes
are written by a function of the form, `qdq.write_qdq_node` or `qoperator.write_qoperator_node`, which the ModelBuilder
is given. Zero padding that only convolutions read is merged into their `pads`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from torch import Tensor

from hago.arithmetic.types import Edge, QParams, SimQ
from hago.export.onnx.operators import onnx_padding, pad_sizes, write_float_node
from hago.export.onnx.values import QuantizationWriter, Value, multiplies_groups, quantizes_to
from hago.export.onnx.writer import GraphWriter
from hago.graph import CONST, INPUT, OUTPUT, Node
from hago.plan import NodePlan, Plan
from hago.serialization.summary import Summarized, Summary, counts_text

_CONVOLUTIONS: Final = ("conv1d", "conv2d", "conv3d")


# ---------------------------------------------------------------- zero padding
def merge_padding(plan: Plan) -> tuple[frozenset[str], Mapping[str, Node]]:
    """Merge pads with zeros into the convolutions that read them.

    A real 0 is a centered 0 at every scale, so a convolution that pads by itself reads the same values. Engines have no
    integer kernel for a pad alone, and would compute it on real values.

    Returns:
        The names of the pads that need not be written, and by name the convolutions that replace those of the graph;
        their `padding` is that of ONNX, all starts and then all ends.
    """
    graph, convolutions = plan.graph, dict[str, Node]()
    merged: set[str] = set()
    for node in graph:
        readers = graph.out_edges.get(node.name, ())
        if readers and _is_zero_padding(plan, node) and all(_can_pad(plan, node, e.dst, e.slot) for e in readers):
            merged.add(node.name)
            convolutions |= {e.dst: _padded_convolution(plan, node, graph[e.dst]) for e in readers}
    return frozenset(merged), convolutions


def remove_padding(value: Tensor, pad: Node) -> Tensor:
    """The part of a padded value that is inside the padding."""
    sizes = pad_sizes(pad, value.ndim)
    starts, ends = sizes[: value.ndim], sizes[value.ndim :]
    within = [slice(low, size - high) for low, size, high in zip(starts, value.shape, ends, strict=True)]
    return value[tuple(within)]


def _is_zero_padding(plan: Plan, node: Node) -> bool:
    """Whether a node pads spatial axes with 0, and its output has the qparams of its input."""
    if node.op != "pad" or node.attrs["mode"] != "constant" or node.attrs["value"] or min(node.attrs["pad"]) < 0:
        return False
    node_plan = plan.nodes.get(node.name)
    q = None if node_plan is None else node_plan.operands[0]
    same_grid = node_plan is None or (q is not None and node_plan.out_simq is None and q.key == node_plan.out.key)
    return same_grid and len(node.attrs["pad"]) <= 2 * (len(node.shape or ()) - 2)


def _can_pad(plan: Plan, pad: Node, reader: str, slot: int) -> bool:
    """Whether a reader is a convolution whose data is the padded value; a float one cannot take over an integer pad."""
    if reader == OUTPUT or slot != 0 or plan.graph[reader].op not in _CONVOLUTIONS:
        return False
    return reader in plan.nodes or pad.name not in plan.nodes


def _padded_convolution(plan: Plan, pad: Node, conv: Node) -> Node:
    """The convolution, with the zeros of the pad before it added to its own."""
    kernel = (plan.graph[conv.inputs[1]].shape or ())[2:]
    around = pad_sizes(pad, len(kernel))
    own = onnx_padding(conv.attrs, kernel)
    return replace(conv, attrs={**conv.attrs, "padding": [a + b for a, b in zip(around, own, strict=True)]})


# ---------------------------------------------------------------- models
@dataclass(frozen=True, slots=True, repr=False)
class OnnxFile(Summarized):
    """An ONNX model, and the tensors that stand for the values of its Plan. Made by `make_onnx`.

    Args:
        model: an onnx.ModelProto.
        values: the tensor of each node's output, by node name.
        operands: the tensor that an integer node reads on each edge, without constants.
        form: qdq or qoperator.
        unpadded: the names of pads that are merged into convolutions. They have no tensor; the convolutions read their
            input.
    """

    model: Any
    values: Mapping[str, Value]
    operands: Mapping[Edge, Value]
    form: str
    unpadded: Collection[str] = ()

    def summary(self) -> Summary:
        """The form, the operators and the opsets."""
        nodes = self.model.graph.node
        opsets = ", ".join(f"{o.domain or 'ai.onnx'} {o.version}" for o in self.model.opset_import)
        return Summary(
            f"OnnxFile of {len(nodes)} operators in the form {self.form}",
            {"operators": counts_text(n.op_type for n in nodes), "opsets": opsets},
        )


class ModelBuilder:
    """Builds the ONNX model of a Plan: writes each node, and the nodes that move values from one scale to another.

    Made by `make_onnx` for one export. The function of the form calls its methods to get the operands of a node.

    Args:
        plan: the Plan.
        write_integer_node: writes an integer node in the form, and returns the tensor of its output.
    """

    def __init__(self, plan: Plan, write_integer_node: Callable[[ModelBuilder, Node, NodePlan], Value]) -> None:
        self.plan, self.graph = plan, plan.graph
        self.writer = GraphWriter(plan.graph, plan.ops)
        self.quantization = QuantizationWriter(self.writer, plan.hardware.requantize)
        self.values: dict[str, Value] = {}
        self.operands: dict[Edge, Value] = {}
        self._write_integer_node = write_integer_node
        self._merged_pads, self._padded_convolutions = merge_padding(plan)
        self._real_tensors: dict[str, str] = {}
        self._requantized: dict[tuple[str, tuple[object, ...]], Value] = {}

    def build(self, form: str, metadata: Mapping[str, str]) -> OnnxFile:
        """Write all nodes and return the model.

        Args:
            metadata: the model's `metadata_props`.
        """
        for node in self.graph:
            self._write_node(self._padded_convolutions.get(node.name, node))
        outputs = self._outputs()
        inputs = {n: (self._element_type(self.graph[n]), self._shape(self.graph[n])) for n in self.graph.inputs}
        values = {name: value for name, value in self.values.items() if name not in self._merged_pads}
        return OnnxFile(self.writer.finish(inputs, outputs, metadata), values, self.operands, form, self._merged_pads)

    def _write_node(self, node: Node) -> None:
        if node.op == CONST:
            return
        if node.op == INPUT:
            self.values[node.name] = Value(node.name, "real")
        elif node.name in self._merged_pads:
            # the convolutions that read it pad by themselves
            real = node.name not in self.plan.nodes
            self.values[node.name] = (
                Value(self.real_value(node.inputs[0]), "real") if real else self.operand(node.edges[0])
            )
        elif node.name in self.plan.nodes:
            self.values[node.name] = self._write_integer_node(self, node, self.plan.nodes[node.name])
        else:
            if not self._write_product_by_groups(node):
                write_float_node(self.writer, node, [self._float_operand(e) for e in node.edges], node.name)
            self.values[node.name] = Value(node.name, "real")

    def _write_product_by_groups(self, node: Node) -> bool:
        """Write a float linear layer as one product, if its weight is stored in groups that ONNX Runtime has a product
        for; returns whether it is written."""
        weight = self.plan.weights.get(node.edges[1]) if node.op == "linear" else None
        if weight is None or not multiplies_groups(weight.qparams):
            return False
        bias = node.edges[2:]
        product = self.writer.fresh(f"{node.name}:product") if bias else node.name
        x, name = self._float_operand(node.edges[0]), str(node.edges[1])
        self.quantization.matmul_by_groups(x, name, weight.integers, weight.qparams, product)
        if bias:
            self.writer.op("Add", [product, self._float_operand(bias[0])], node.name)
        return True

    # ------------------------------------------------------------ operands
    def rank(self, name: str) -> int:
        """The number of axes of a node's output."""
        return len(self.graph[name].shape or ())

    def real_value(self, name: str) -> str:
        """The tensor of a node's output as real numbers; dequantized once, for all readers."""
        if self.graph[name].op == CONST:
            return self.writer.constant(name, self.graph.consts[name])
        value = self.values[name]
        if value.representation == "real":
            return value.name
        if name not in self._real_tensors:
            self._real_tensors[name] = self.quantization.dequantize(value, self.rank(name), name)
        return self._real_tensors[name]

    def _float_operand(self, edge: Edge) -> str:
        """The tensor that a float node reads on an edge."""
        source, weight = self.graph.source(edge), self.plan.weights.get(edge)
        if weight is None:
            return self.real_value(source)
        if weight.qparams.group is not None:
            return self.quantization.dequantize_groups(str(edge), weight.integers, weight.qparams, f"{edge}:real")
        value = self.quantization.constant(str(edge), weight.integers, weight.qparams, packed=True)
        return self.quantization.dequantize(value, self.rank(source), f"{value.name}:real")

    def constant_operand(self, edge: Edge, shape: tuple[int, ...] | None = None, packed: bool = False) -> Value:
        """The constant that an integer node reads on an edge; arguments as in `QuantizationWriter.constant`."""
        node_plan = self.plan.nodes[edge.dst]
        q, integers = node_plan.operands[edge.slot], node_plan.consts[edge.slot]
        assert q is not None
        return self.quantization.constant(str(edge), integers, q, shape, packed)

    def operand(self, edge: Edge) -> Value:
        """The tensor that an integer node reads on an edge that is no constant, after the edge's quantization or
        requantization, which is written once for all edges of the same source and qparams."""
        self.operands[edge] = self._arriving(edge)
        return self.operands[edge]

    def _arriving(self, edge: Edge) -> Value:
        source, simq = self.graph.source(edge), self.plan.edges[edge]
        if simq is None or simq.target is None:
            return self.values[source]
        key = (source, simq.target.key)
        if key not in self._requantized:
            self._requantized[key] = self._rescale(source, simq, str(edge))
        return self._requantized[key]

    def _rescale(self, source: str, simq: SimQ, out: str) -> Value:
        assert simq.target is not None
        value = self.values[source]
        if simq.source is None or value.representation == "real":
            return self.quantization.quantize(self.real_value(source), simq.target, self.rank(source), out)
        return self.quantization.requantize(value, simq, out, centered=not quantizes_to(simq.target.dtype))

    def dequantized_operand(self, edge: Edge) -> str:
        """The operand on an edge of an integer node, as real numbers."""
        value = self.operand(edge)
        if value.representation == "real":
            return value.name
        source = self.graph.source(edge)
        if value is self.values[source]:
            return self.real_value(source)
        real = f"{value.name}:real"
        if real not in self._real_tensors:
            self._real_tensors[real] = self.quantization.dequantize(value, self.rank(source), real)
        return real

    def quantize_output(self, real: str, q: QParams, node: Node) -> Value:
        """Quantize the output of a node, given as real numbers."""
        return self.quantization.quantize(real, q, len(node.shape or ()), f"{node.name}:q")

    # ------------------------------------------------------------ inputs and outputs of the model
    def _outputs(self) -> dict[str, tuple[int, Sequence[int | str] | None]]:
        """Write what outputs need to be tensors of their own; return the type and the shape of each by its name."""
        outputs: dict[str, tuple[int, Sequence[int | str] | None]] = {}
        for slot, name in enumerate(self.graph.outputs):
            real = self.real_value(name)
            if real != name or real in outputs or real in self.graph.inputs or self.graph[name].op == CONST:
                real = self.writer.op("Identity", [real], f"{name}:{OUTPUT}{slot}")
            outputs[real] = (self._element_type(self.graph[name]), self._shape(self.graph[name]))
        return outputs

    def _element_type(self, node: Node) -> int:
        return self.writer.element_type(self.writer.dtype(node.name))

    def _shape(self, node: Node) -> list[int | str]:
        assert node.shape is not None, "check_plan refuses outputs that are no tensors"
        if node.op == CONST:
            return list(node.shape)
        if node.shape[:1] in ((), (1,)) or node.op == INPUT:
            return ["batch" if d == 0 and s == 1 else s for d, s in enumerate(node.shape)]
        # the batch may be on another axis, or a factor of one, so every size is left open: engines trust given sizes
        return [f"{node.name}:{d}" for d in range(len(node.shape))]
