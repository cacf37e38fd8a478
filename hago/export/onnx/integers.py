"""Integer nodes written with plain ONNX operators, for both forms: data movement on stored integers, and exact sums.

A node that moves data is written as a Clip, a Pad or the op itself on integers, or not at all if it changes no integer.
A sum is computed in int32, in int64 or in float32, and then requantized as in the Plan.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import torch

from hago.arithmetic.numerics import apply_simq, dequantize, quantize
from hago.arithmetic.types import Edge, QParams
from hago.errors import UnsupportedOp
from hago.export.onnx.builder import ModelBuilder
from hago.export.onnx.operators import convolution_window, pad_sizes, write_float_node
from hago.export.onnx.values import Value, numpy_dtype, quantizes_to
from hago.export.onnx.writer import GraphWriter
from hago.graph import Graph, Node
from hago.ops import Attrs, pool_window
from hago.plan import NodePlan

#: Writes an integer node whose operands and output are stored in 8 bits; the last argument is the name of the output.
IntegerNodeWriter = Callable[[ModelBuilder, Node, NodePlan, list[Value], str], None]


def keeps_integers(builder: ModelBuilder, node: Node, node_plan: NodePlan) -> bool:
    """Whether a node does not change the stored integers: a division, which only changes the scale, or a clamp whose
    limits no input can exceed."""
    form = builder.plan.ops[node.op].integer
    if (
        node_plan.simqs[0] is not None
        or node_plan.out_simq is not None
        or form is None
        or builder.plan.edges[node.edges[0]]
    ):
        return False
    if node.op == "div":
        return True
    q = node_plan.operands[0]
    if form.limits is None or q is None or not quantizes_to(q.dtype):
        return False
    low, high = form.limits(node_plan.attrs)
    zero = q.zero_point
    return (low is None or bool((q.qmin - zero >= low).all())) and (high is None or bool((q.qmax - zero <= high).all()))


def has_8bit_data(operands: Sequence[Value], node_plan: NodePlan) -> bool:
    """Whether all operands but the bias, and the output, are stored in 8 bits."""
    data = operands[:2] if len(operands) == 3 else operands
    return numpy_dtype(node_plan.out.dtype).itemsize == 1 and all(
        v.representation == "real" or (v.representation == "stored" and numpy_dtype(v.dtype).itemsize == 1)
        for v in data
    )


def select_data_movement(
    builder: ModelBuilder, node: Node, node_plan: NodePlan, operands: list[Value]
) -> IntegerNodeWriter | None:
    """The function that writes a node which only moves 8-bit integers; None for any other node."""
    form = builder.plan.ops[node.op].integer
    moves = (
        form is not None
        and node_plan.keeps_input_dtype
        and node_plan.out_simq is None
        and operands[0].representation == "stored"
    )
    same = moves and node_plan.out.dtype == operands[0].dtype and has_8bit_data(operands, node_plan)
    return DATA_MOVEMENT.get(node.op, _write_unchanged_op) if same else None


def requantizes_as_reals(builder: ModelBuilder, edge: Edge) -> bool:
    """Whether requantization on an edge equals, for every 8-bit integer, dequantizing and quantizing again.

    Engines do the latter inside a concatenation.
    """
    simq, value = builder.plan.edges[edge], builder.values.get(builder.graph.source(edge))
    if simq is None or simq.source is None or simq.target is None or value is None or value.representation != "stored":
        return False
    source, target, requantize = simq.source, simq.target, builder.plan.hardware.requantize
    if source.dtype.bits > 8 or source.dtype != target.dtype or source.per_channel or target.per_channel:
        return False
    centered = torch.arange(source.qmin, source.qmax + 1) - source.zero_point
    full_range = (target.qmin, target.qmax) == (target.dtype.min, target.dtype.max)
    again = quantize(dequantize(centered, source), target, requantize.rounding)
    return full_range and again.to(torch.int64).equal(apply_simq(centered, simq, requantize).to(torch.int64))


# ---------------------------------------------------------------- data movement
def _write_clip(builder: ModelBuilder, node: Node, node_plan: NodePlan, x: list[Value], out: str) -> None:
    form = builder.plan.ops[node.op].integer
    assert form is not None and form.limits is not None
    q, kind = node_plan.out, numpy_dtype(node_plan.out.dtype)
    zero = int(q.zero_point)
    ends = zip(form.limits(node_plan.attrs), (q.qmin, q.qmax), strict=True)
    limits = [default if end is None else min(max(int(end) + zero, q.qmin), q.qmax) for end, default in ends]
    builder.writer.op("Clip", [x[0].name, *(builder.writer.number(v, out, str(kind)) for v in limits)], out)


def _write_channel_clip(builder: ModelBuilder, node: Node, node_plan: NodePlan, x: list[Value], out: str) -> None:
    w, q, kind = builder.writer, node_plan.out, numpy_dtype(node_plan.out.dtype)
    zero = int(q.zero_point)
    limits = (torch.as_tensor(node_plan.attrs["limits"]) + zero).clamp(q.qmin, q.qmax).numpy().astype(kind)
    above = w.step("Max", [x[0].name, w.number(zero, out, str(kind))], out)
    w.op("Min", [above, w.constant(w.fresh(f"{out}:limits"), limits)], out)


def _write_unchanged_op(builder: ModelBuilder, node: Node, node_plan: NodePlan, x: list[Value], out: str) -> None:
    """The float op itself, which moves integers as it moves real values."""
    write_float_node(builder.writer, node, [v.name for v in x], out)


def _write_pad(builder: ModelBuilder, node: Node, node_plan: NodePlan, x: list[Value], out: str) -> None:
    if node.attrs["mode"] != "constant":
        _write_unchanged_op(builder, node, node_plan, x, out)
        return
    w, q = builder.writer, node_plan.out
    sizes = w.integers(pad_sizes(node, builder.rank(node.inputs[0])), out)
    w.op("Pad", [x[0].name, sizes, w.number(int(q.zero_point), out, str(numpy_dtype(q.dtype)))], out)


#: Ops that move integers with another operator than real values; all others use the same.
DATA_MOVEMENT: Final[Mapping[str, IntegerNodeWriter]] = {
    "relu": _write_clip,
    "clamp": _write_clip,
    "channel_clamp": _write_channel_clip,
    "pad": _write_pad,
}


# ---------------------------------------------------------------- sums
def write_integer_sum(builder: ModelBuilder, node: Node, node_plan: NodePlan, operands: list[Value]) -> Value:
    """Write the exact sum of a node, and the requantization of its output after it."""
    sums = f"{node.name}:sums"
    if sums_in_int32(node.op, node_plan.operands):
        _write_sum_in_int32(builder, node, node_plan, operands, sums)
    else:
        centered = [_centered_operand(builder, node_plan, slot, v, sums) for slot, v in enumerate(operands)]
        _write_sum_in_float32(builder, node, node_plan, centered, sums)
    register = Value(sums, "centered", node_plan.register)
    if node_plan.out_simq is not None:
        return builder.quantization.requantize(register, node_plan.out_simq, f"{node.name}:q")
    return builder.quantization.store(register, f"{node.name}:q") if quantizes_to(node_plan.out.dtype) else register


def sums_in_int32(op: str, operands: Sequence[QParams | None]) -> bool:
    """Whether the file adds the products of an op in int32: ONNX has such operators for factors of at most 8 bits."""
    return op in INT32_SUMS and all(q is not None and q.dtype.bits <= 8 for q in operands[:2])


def sums_in_int64(op: str) -> bool:
    """Whether the file adds the entries of an op's operand in int64, to which it casts them from float32."""
    return op in ("mean", "sum") or "avg_pool" in op


# ---------------------------------------------------------------- in int32
def _write_sum_in_int32(builder: ModelBuilder, node: Node, node_plan: NodePlan, x: list[Value], out: str) -> None:
    w = builder.writer
    total = INT32_SUMS[node.op](builder, node, node_plan, x, out)
    if len(x) > 2:
        bias = node_plan.consts.get(2)
        if bias is None:
            raise UnsupportedOp(f"node {node.name!r}: ONNX export takes constant biases only")
        dims = len(builder.graph[node.inputs[1]].shape or ()) - 2 if node.op.startswith("conv") else 0
        shaped = bias.to(torch.int32).reshape(-1, *[1] * dims)
        total = w.step("Add", [total, w.constant(f"{node.name}:bias", shaped)], out)
    w.op("Cast", [total], out, to=w.element_type("float32"))


def _zero_points(builder: ModelBuilder, x: list[Value]) -> list[str]:
    """The names of the zero points of the data and of the weight, a scalar each."""
    names = []
    for value in x[:2]:
        q = value.qparams
        assert q is not None
        zero = torch.unique(q.zero_point)
        if zero.numel() > 1:
            raise UnsupportedOp(f"{value.name!r}: ONNX has one zero point for the weight of a sum in int32")
        names.append(
            builder.writer.constant(f"{value.name}:zero0", zero.reshape(()).numpy().astype(numpy_dtype(q.dtype)))
        )
    return names


def _write_conv_integer(builder: ModelBuilder, node: Node, node_plan: NodePlan, x: list[Value], out: str) -> str:
    window = convolution_window(node.attrs, (builder.graph[node.inputs[1]].shape or ())[2:])
    inputs = [x[0].name, x[1].name, *_zero_points(builder, x)]
    return builder.writer.step("ConvInteger", inputs, out, group=node.attrs["groups"], **window)


def _write_linear_integer(builder: ModelBuilder, node: Node, node_plan: NodePlan, x: list[Value], out: str) -> str:
    transposed = builder.writer.step("Transpose", [x[1].name], out, perm=[1, 0])
    return builder.writer.step("MatMulInteger", [x[0].name, transposed, *_zero_points(builder, x)], out)


def _write_matmul_integer(builder: ModelBuilder, node: Node, node_plan: NodePlan, x: list[Value], out: str) -> str:
    return builder.writer.step("MatMulInteger", [x[0].name, x[1].name, *_zero_points(builder, x)], out)


#: Ops whose sums ONNX computes in int32; each writes the sum without the bias and returns its name.
INT32_SUMS: Final[Mapping[str, Callable[[ModelBuilder, Node, NodePlan, list[Value], str], str]]] = {
    **{f"conv{d}d": _write_conv_integer for d in (1, 2, 3)},
    "linear": _write_linear_integer,
    "matmul": _write_matmul_integer,
}


# ---------------------------------------------------------------- in float32
def _centered_operand(builder: ModelBuilder, node_plan: NodePlan, slot: int, value: Value, out: str) -> str:
    """The tensor that holds an operand as centered integers in float32, on the common scale in the form `rescaled`."""
    if value.representation == "real":
        return value.name
    rescaling = node_plan.rescaling(slot)
    if slot in node_plan.consts:
        integers = apply_simq(node_plan.consts[slot].to(torch.int64), rescaling, builder.plan.hardware.requantize)
        return builder.writer.constant(builder.writer.fresh(f"{out}:centered"), integers.to(torch.float32))
    if rescaling is not None:
        name = builder.writer.fresh(f"{out}:rescaled")
        return builder.quantization.requantize(value, rescaling, name, centered=True).name
    return builder.quantization.centered(value, out)


def _write_sum_in_float32(builder: ModelBuilder, node: Node, node_plan: NodePlan, x: list[str], out: str) -> None:
    """Write the float op on centered integers, with its attributes in quanta."""
    attrs: dict[str, Any] = {**node.attrs, **(node_plan.attrs if node.op == "clamp" else {})}
    if (axes := summed_axes(builder.graph, node)) is not None:
        _write_sum_in_int64(builder, x[0], axes, bool(node.attrs.get("keepdim", True)), out)
    elif sums_in_int64(node.op):
        _write_window_sums(builder, node, node_plan, x[0], out)
    elif node.op == "clamp" and isinstance(attrs["min"], torch.Tensor) | isinstance(attrs["max"], torch.Tensor):
        write_clip_per_channel(builder.writer, node_plan.attrs, x[0], out)
    elif node.op == "channel_clamp":
        write_clip_per_channel(builder.writer, {"min": 0, "max": node_plan.attrs["limits"]}, x[0], out)
    else:
        write_float_node(builder.writer, replace(node, attrs=attrs), x, out)


def summed_axes(graph: Graph, node: Node) -> list[int] | None:
    """The axes that a node sums over, if it is a mean, a sum or a pooling to one value; None otherwise."""
    if node.op in ("mean", "sum"):
        return list(node.attrs["axes"])
    sizes = list((graph[node.inputs[0]].shape or ())[2:])
    pooled = node.attrs.get("kernel_size") if "avg_pool" in node.op else None
    to_one = pooled == sizes and not any(node.attrs["padding"])
    to_one |= node.op.startswith("adaptive_avg_pool") and set(node.attrs["output_size"]) == {1}
    return list(range(2, 2 + len(sizes))) if to_one else None


def _write_sum_in_int64(builder: ModelBuilder, x: str, axes: list[int], keep: bool, out: str) -> None:
    w = builder.writer
    integers = w.step("Cast", [x], out, to=w.element_type("int64"))
    total = w.step("ReduceSum", [integers, w.integers(axes, out)], out, keepdims=int(keep))
    w.op("Cast", [total], out, to=w.element_type("float32"))


def write_clip_per_channel(w: GraphWriter, attrs: Attrs, x: str, out: str) -> None:
    """Write a clamp with a limit per channel, in the units of `x`."""
    ends = {"Max": attrs["min"], "Min": attrs["max"]}
    for kind, limit in ((k, v) for k, v in ends.items() if v is not None):
        x = w.step(kind, [x, w.constant(w.fresh(f"{out}:limit"), torch.as_tensor(limit).to(torch.float32))], out)
    w.op("Identity", [x], out)


def _write_window_sums(builder: ModelBuilder, node: Node, node_plan: NodePlan, x: str, out: str) -> None:
    """Write the sums of a pooling's windows in int64, as the sum of one strided slice per element of the window."""
    w, a, sizes = builder.writer, pool_window(node.attrs), (node.shape or ())[2:]
    kernel, stride, padding = a["kernel_size"], a["stride"], a["padding"]
    x = w.step("Cast", [x], out, to=w.element_type("int64"))
    if any(padding):
        ends = [0, 0, *padding]
        x = w.step("Pad", [x, w.integers(ends * 2, out), w.number(0, out, "int64")], out)
    axes = w.integers(range(2, 2 + len(kernel)), out)
    steps = w.integers(stride, out)
    total = ""
    for offset in itertools.product(*map(range, kernel)):
        stops = [o + s * (n - 1) + 1 for o, s, n in zip(offset, stride, sizes, strict=True)]
        element = w.step("Slice", [x, w.integers(offset, out), w.integers(stops, out), axes, steps], out)
        total = w.step("Add", [total, element], out) if total else element
    w.op("Cast", [total], out, to=w.element_type("float32"))
