"""The QDQ form: float operators between DequantizeLinear and QuantizeLinear, which engines fuse into integer operators.

A sum that the Plan leaves in its accumulator, to requantize it on each edge that reads it, is a real value in the file:
ONNX Runtime fuses the nodes between a convolution and the QuantizeLinear after it.
"""

from __future__ import annotations

from dataclasses import replace

from hago.arithmetic.types import Edge, QParams
from hago.export.onnx.builder import ModelBuilder
from hago.export.onnx.integers import (
    DATA_MOVEMENT,
    IntegerNodeWriter,
    keeps_integers,
    requantizes_as_reals,
    select_data_movement,
    write_clip_per_channel,
)
from hago.export.onnx.operators import squeeze_pooled, unflattened_shape, write_float_node
from hago.export.onnx.values import Value, quantizes_to
from hago.export.onnx.writer import MICROSOFT, GraphWriter
from hago.graph import Node
from hago.plan import NodePlan


def write_qdq_node(builder: ModelBuilder, node: Node, node_plan: NodePlan) -> Value:
    """Write an integer node, and return its output. `make_onnx` calls it for every integer node in QDQ form."""
    if keeps_integers(builder, node, node_plan):
        source = builder.values[node.inputs[0]]
        if source.representation == "stored":
            return replace(source, qparams=node_plan.out, label=f"{node.name}:q")
    if (
        node.op == "linear"
        and builder.rank(node.inputs[0]) > 2
        and builder.operand(node.edges[0]).representation == "stored"
    ):
        return _write_linear_on_rows(builder, node, node_plan)
    if (write := _select_movement(builder, node, node_plan)) is not None:
        write(builder, node, node_plan, [builder.operand(e) for e in node.edges], f"{node.name}:q")
        return Value(f"{node.name}:q", "stored", node_plan.out)
    name = node.name if keeps_accumulator(node_plan) else f"{node.name}:real"
    real = [_real_operand(builder, node, node_plan, e) for e in node.edges]
    _write_fusible_op(builder, node, node_plan, real, name)
    return Value(name, "real") if keeps_accumulator(node_plan) else builder.quantize_output(name, node_plan.out, node)


def keeps_accumulator(node_plan: NodePlan) -> bool:
    """Whether the output of the node is its accumulator, which is too wide for QuantizeLinear."""
    return node_plan.out_simq is None and not quantizes_to(node_plan.out.dtype)


def _select_movement(builder: ModelBuilder, node: Node, node_plan: NodePlan) -> IntegerNodeWriter | None:
    """The function that writes a clamp or a pad on stored integers; engines fuse neither with the nodes around it."""
    return (
        select_data_movement(builder, node, node_plan, [builder.operand(node.edges[0])])
        if node.op in DATA_MOVEMENT
        else None
    )


def _real_operand(builder: ModelBuilder, node: Node, node_plan: NodePlan, edge: Edge) -> str:
    """The name of the operand on an edge as real values."""
    q = node_plan.operands[edge.slot]
    if q is None:
        return builder.real_value(node.inputs[edge.slot])
    if edge.slot in node_plan.consts:
        return _dequantize_constant(builder, node, edge, q)
    if node.op == "concat" and requantizes_as_reals(builder, edge):
        return builder.real_value(node.inputs[edge.slot])
    return builder.dequantized_operand(edge)


def _dequantize_constant(builder: ModelBuilder, node: Node, edge: Edge, q: QParams) -> str:
    rank = builder.rank(node.inputs[edge.slot])
    if node.op == "matmul" and edge.slot == 1 and rank > 2 and q.per_channel:
        return _dequantize_matrices(builder, node, edge, q)
    value = builder.constant_operand(edge, _shape_of_weight(builder, node, edge.slot), packed=True)
    return builder.quantization.dequantize(value, rank, f"{value.name}:real")


def _dequantize_matrices(builder: ModelBuilder, node: Node, edge: Edge, q: QParams) -> str:
    """Dequantize matrices with a scale per column as one matrix: ONNX Runtime fuses a MatMul after a DequantizeLinear
    of more than two axes into a QLinearMatMul, which then refuses to run on a vector of scales.
    """
    shape = builder.graph[node.inputs[edge.slot]].shape or ()
    value = builder.constant_operand(edge, (-1, shape[-1]), packed=True)
    flat = replace(q, scale=q.scale.reshape(1, -1), zero_point=q.zero_point.reshape(1, -1))
    rows = builder.quantization.dequantize(replace(value, qparams=flat), 2, f"{value.name}:rows")
    return builder.writer.step("Reshape", [rows, builder.writer.integers(shape, value.name)], value.name)


def _shape_of_weight(builder: ModelBuilder, node: Node, slot: int) -> tuple[int, ...] | None:
    """The shape of an `affine`'s weight as that of a 1x1 depthwise convolution; None for any other constant."""
    rank = builder.rank(node.inputs[0])
    return (-1, 1, *[1] * (rank - 2)) if node.op == "affine" and slot == 1 and rank > 2 else None


def _write_fusible_op(builder: ModelBuilder, node: Node, node_plan: NodePlan, real: list[str], out: str) -> None:
    """Write the op on real values with the operators that ONNX Runtime fuses."""
    w, rank = builder.writer, builder.rank(node.inputs[0])
    if node.op == "affine" and rank > 2:
        w.op("Conv", real, out, group=(builder.graph[node.inputs[1]].shape or ())[0])
    elif node.op == "mean" and rank == 4 and node.attrs["axes"] == [2, 3]:
        pooled = w.op("GlobalAveragePool", real[:1], out if node.attrs["keepdim"] else w.fresh(f"{out}:pool"))
        if not node.attrs["keepdim"]:
            squeeze_pooled(w, pooled, rank, out)
    elif node.op == "clamp" and keeps_accumulator(node_plan):
        _write_clip(w, node, node_plan, real[0], out)
    elif node.op == "channel_clamp" and keeps_accumulator(node_plan):
        write_clip_per_channel(w, {"min": 0, "max": node_plan.attrs["limits"] * node_plan.out.scale}, real[0], out)
    elif node.op == "silu" and builder.plan.hardware.requantize.form == "onnxruntime":
        # ONNX Runtime does not fuse Sigmoid and Mul once each of them reads a DequantizeLinear of its own
        w.op("QuickGelu", real, out, MICROSOFT, alpha=1.0)
    else:
        write_float_node(w, node, real, out)


def _write_clip(w: GraphWriter, node: Node, node_plan: NodePlan, x: str, out: str) -> None:
    """Write a clamp of sums with its limits in whole quanta, because no QuantizeLinear after it rounds them."""
    scale = node_plan.out.scale
    ends = {k: None if node_plan.attrs[k] is None else node_plan.attrs[k] * scale for k in ("min", "max")}
    if scale.numel() > 1:
        write_clip_per_channel(w, ends, x, out)
    else:
        limits = {k: None if end is None else float(end) for k, end in ends.items()}
        write_float_node(w, replace(node, attrs={**node.attrs, **limits}), [x], out)


def _write_linear_on_rows(builder: ModelBuilder, node: Node, node_plan: NodePlan) -> Value:
    """Write a linear layer on more than two axes as a Gemm of its rows, which adds the bias to the integer sum."""
    w, shape = builder.writer, node.shape or ()
    name = f"{node.name}:q"
    value = builder.operand(node.edges[0])
    assert value.qparams is not None
    rows = w.step(
        "Reshape", [value.name, w.integers([-1, (builder.graph[node.inputs[0]].shape or ())[-1]], name)], name
    )
    x = builder.quantization.dequantize(Value(rows, "stored", value.qparams), 2, w.fresh(f"{name}:rows"))
    constants = [_real_operand(builder, node, node_plan, e) for e in node.edges[1:]]
    product = w.step("Gemm", [x, *constants], name, transB=1)
    restored_shape = unflattened_shape(w, value.name, shape, name)
    if keeps_accumulator(node_plan):
        return Value(w.op("Reshape", [product, restored_shape], node.name), "real")
    flat = builder.quantization.quantize(product, node_plan.out, 2, w.fresh(f"{name}:flat"))
    return Value(w.op("Reshape", [flat.name, restored_shape], name), "stored", node_plan.out)
