"""The QOperator form: ONNX operators on integers.

A node whose requantization is that of a QLinear operator is written as one. Any other is written as an exact sum and
the requantization of the Plan after it. The sum is in int32 where both factors have at most 8 bits (ConvInteger,
MatMulInteger), in int64 for means, sums and averages, and else on centered integers in float32, where
`refusals.check_plan` refuses sums from 2**24 on. A lookup table is a Gather. The file thus computes every integer of
the Plan, whatever the hardware.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Final

import torch

from hago.arithmetic.numerics import Requantize, ratio, ratio_of_float32
from hago.arithmetic.types import Edge, QParams
from hago.export.onnx.builder import ModelBuilder
from hago.export.onnx.integers import (
    IntegerNodeWriter,
    has_8bit_data,
    keeps_integers,
    select_data_movement,
    write_integer_sum,
)
from hago.export.onnx.operators import convolution_window, unflattened_shape, write_float_node
from hago.export.onnx.values import Value, numpy_dtype
from hago.export.onnx.writer import MICROSOFT
from hago.graph import Node
from hago.ops import pool_window
from hago.plan import NodePlan


def write_qoperator_node(builder: ModelBuilder, node: Node, node_plan: NodePlan) -> Value:
    """Write an integer node, and return its output. `make_onnx` calls it for every integer node in QOperator form."""
    if keeps_integers(builder, node, node_plan):
        return replace(builder.values[node.inputs[0]], qparams=node_plan.out, label=f"{node.name}:q")
    operands = _operands(builder, node, node_plan)
    if node_plan.table is not None:
        return _write_lookup(builder, node, node_plan, operands[0])
    write = _select_operator(builder, node, node_plan, operands)
    if write is not None:
        return _write_clipped(builder, node, node_plan, lambda out: write(builder, node, node_plan, operands, out))
    if node_plan.desc.form == "dequantize" or (node.op in REAL_ARITHMETIC and has_8bit_data(operands, node_plan)):
        real = [_real_operand(builder, node, node_plan, e) for e in node.edges]
        write_float_node(builder.writer, node, real, f"{node.name}:real")
        return builder.quantize_output(f"{node.name}:real", node_plan.out, node)
    return write_integer_sum(builder, node, node_plan, operands)


def _operands(builder: ModelBuilder, node: Node, node_plan: NodePlan) -> list[Value]:
    operands = []
    for edge in node.edges:
        if node_plan.operands[edge.slot] is None:
            operands.append(Value(builder.real_value(builder.graph.source(edge)), "real"))
        elif edge.slot in node_plan.consts:
            operands.append(builder.constant_operand(edge))
        else:
            operands.append(builder.operand(edge))
    return operands


def _real_operand(builder: ModelBuilder, node: Node, node_plan: NodePlan, edge: Edge) -> str:
    """The operand on an edge, dequantized."""
    if edge.slot not in node_plan.consts:
        return builder.dequantized_operand(edge)
    value = builder.constant_operand(edge)
    return builder.quantization.dequantize(value, builder.rank(node.inputs[edge.slot]), f"{value.name}:real")


#: Ops for which ONNX has no operator on integers: operands are dequantized, and the result is quantized.
REAL_ARITHMETIC: Final = ("sub", "stack", "neg")


def _select_operator(
    builder: ModelBuilder, node: Node, node_plan: NodePlan, operands: list[Value]
) -> IntegerNodeWriter | None:
    """The function that writes a node as one operator on stored integers; None if no operator computes the same."""
    if not has_8bit_data(operands, node_plan):
        return None
    if node_plan.desc.form in ("qlinear", "dequantize"):
        return QLINEAR.get((node.op, node_plan.desc.form))
    if node_plan.out_simq is not None:
        fused = _requantizes_as_qlinear(node_plan, builder.plan.hardware.requantize)
        return FUSED.get(node.op) if fused else None
    return select_data_movement(builder, node, node_plan, operands)


def _requantizes_as_qlinear(node_plan: NodePlan, requantize: Requantize) -> bool:
    """Whether a QLinear operator, which multiplies by a float32 and rounds half to even, requantizes as the Plan."""
    simq = node_plan.out_simq
    if simq is None or simq.source is None or simq.target is None or requantize.rounding != "half_even":
        return False
    multiplier, exact = ratio_of_float32(simq.source, simq.target), ratio(simq.source, simq.target)
    return requantize.form == "onnxruntime" or (
        requantize.form == "float32" and multiplier.equal(exact.to(torch.float32))
    )


def _write_clipped(builder: ModelBuilder, node: Node, node_plan: NodePlan, write: Callable[[str], None]) -> Value:
    """Write an operator, followed by a Clip if the range of the output is narrower than that of its dtype."""
    out, q = f"{node.name}:q", node_plan.out
    kind = numpy_dtype(q.dtype)
    full_range = (q.qmin, q.qmax) == (torch.iinfo(q.dtype.torch).min, torch.iinfo(q.dtype.torch).max)
    if full_range or node_plan.keeps_input_dtype:
        write(out)
        return Value(out, "stored", q)
    unclipped = builder.writer.fresh(f"{out}:whole")
    write(unclipped)
    builder.writer.op("Clip", [unclipped, *(builder.writer.number(v, out, str(kind)) for v in (q.qmin, q.qmax))], out)
    return Value(out, "stored", q)


def _write_lookup(builder: ModelBuilder, node: Node, node_plan: NodePlan, x: Value) -> Value:
    """Write a lookup table as a Gather."""
    w, out, source = builder.writer, f"{node.name}:q", node_plan.operands[0]
    assert node_plan.table is not None and source is not None
    stored = (node_plan.table + node_plan.out.zero_point).numpy().astype(numpy_dtype(node_plan.out.dtype))
    index = w.step("Cast", [x.name], out, to=w.element_type("int32"))
    if source.qmin:
        index = w.step("Sub", [index, w.number(source.qmin, out, "int32")], out)
    return Value(w.op("Gather", [w.constant(f"{node.name}:table", stored), index], out), "stored", node_plan.out)


# ---------------------------------------------------------------- QLinear operators
def _with_qparams(builder: ModelBuilder, value: Value) -> list[str]:
    """The names of a tensor, its scale and its zero point."""
    assert value.qparams is not None
    return [value.name, *builder.quantization.parameters(value.label or value.name, value.qparams)]


def _output_qparams(builder: ModelBuilder, node: Node, q: QParams) -> list[str]:
    """The names of the output's scale and zero point."""
    return builder.quantization.parameters(f"{node.name}:q", q)


def _binary(kind: str) -> IntegerNodeWriter:
    """The writer of a QLinear operator on two tensors."""

    def write(builder: ModelBuilder, node: Node, node_plan: NodePlan, x: list[Value], out: str) -> None:
        builder.writer.op(
            kind,
            [
                *_with_qparams(builder, x[0]),
                *_with_qparams(builder, x[1]),
                *_output_qparams(builder, node, node_plan.out),
            ],
            out,
            MICROSOFT,
        )

    return write


def _write_concat(builder: ModelBuilder, node: Node, node_plan: NodePlan, x: list[Value], out: str) -> None:
    inputs = [*_output_qparams(builder, node, node_plan.out), *(name for v in x for name in _with_qparams(builder, v))]
    builder.writer.op("QLinearConcat", inputs, out, MICROSOFT, axis=node.attrs["axis"])


def _write_average(builder: ModelBuilder, node: Node, node_plan: NodePlan, x: list[Value], out: str) -> None:
    inputs = [*_with_qparams(builder, x[0]), *_output_qparams(builder, node, node_plan.out)]
    if set(node.attrs.get("output_size", ())) == {1}:
        builder.writer.op("QLinearGlobalAveragePool", inputs, out, MICROSOFT)
        return
    attrs = pool_window(node.attrs)
    window = {"kernel_shape": attrs["kernel_size"], "strides": attrs["stride"], "pads": list(attrs["padding"]) * 2}
    counts = {"count_include_pad": int(attrs.get("count_include_pad", True)), "ceil_mode": int(attrs["ceil_mode"])}
    builder.writer.op("QLinearAveragePool", inputs, out, MICROSOFT, **window, **counts)


def _write_conv(builder: ModelBuilder, node: Node, node_plan: NodePlan, x: list[Value], out: str) -> None:
    window = convolution_window(node.attrs, (builder.graph[node.inputs[1]].shape or ())[2:])
    inputs = [
        *_with_qparams(builder, x[0]),
        *_with_qparams(builder, x[1]),
        *_output_qparams(builder, node, node_plan.out),
        *(v.name for v in x[2:]),
    ]
    builder.writer.op("QLinearConv", inputs, out, group=node.attrs["groups"], **window)


def _write_gemm(builder: ModelBuilder, node: Node, node_plan: NodePlan, x: list[Value], out: str) -> None:
    """Write a QGemm, which adds the bias to the integer sum; data of more than two axes is flattened to rows."""
    w, shape = builder.writer, builder.graph[node.inputs[0]].shape or ()
    first = _with_qparams(builder, x[0])
    if len(shape) > 2:
        first[0] = w.step("Reshape", [x[0].name, w.integers([-1, shape[-1]], out)], out)
    inputs = [
        *first,
        *_with_qparams(builder, x[1]),
        x[2].name if len(x) > 2 else "",
        *_output_qparams(builder, node, node_plan.out),
    ]
    flat = out if len(shape) == 2 else w.fresh(f"{out}:flat")
    w.op("QGemm", inputs, flat, MICROSOFT, transB=int(node.op == "linear"))
    if flat != out:
        w.op("Reshape", [flat, unflattened_shape(w, x[0].name, node.shape or (), out)], out)


def _write_matmul(builder: ModelBuilder, node: Node, node_plan: NodePlan, x: list[Value], out: str) -> None:
    if len(x) == 3:
        _write_gemm(builder, node, node_plan, x, out)
    else:
        matrices = _with_qparams_per_column(builder, x[1], builder.graph[node.inputs[1]].shape or ())
        builder.writer.op(
            "QLinearMatMul",
            [*_with_qparams(builder, x[0]), *matrices, *_output_qparams(builder, node, node_plan.out)],
            out,
        )


def _with_qparams_per_column(builder: ModelBuilder, value: Value, shape: tuple[int, ...]) -> list[str]:
    """`_with_qparams` of the second operand of a QLinearMatMul, whose scales per column must have all its axes."""
    q = value.qparams
    if q is None or len(shape) == 2 or not q.per_channel:
        return _with_qparams(builder, value)
    each = (*shape[:-2], 1, shape[-1])
    zero = q.zero_point.expand(each).numpy().astype(numpy_dtype(q.dtype))
    scale = builder.writer.constant(f"{value.name}:scales", q.scale.to(torch.float32).expand(each))
    return [value.name, scale, builder.writer.constant(f"{value.name}:zeros", zero)]


#: The QLinear operators of ops whose sum is requantized at the output.
FUSED: Final[Mapping[str, IntegerNodeWriter]] = {
    **{f"conv{d}d": _write_conv for d in (1, 2, 3)},
    "linear": _write_gemm,
    "matmul": _write_matmul,
}
#: The operators of ops that a chip computes in one of ONNX Runtime's forms, by op and form.
QLINEAR: Final[Mapping[tuple[str, str], IntegerNodeWriter]] = {
    ("add", "qlinear"): _binary("QLinearAdd"),
    ("mul", "qlinear"): _binary("QLinearMul"),
    ("concat", "dequantize"): _write_concat,
    **{(f"{kind}_pool{d}d", "qlinear"): _write_average for kind in ("avg", "adaptive_avg") for d in (1, 2)},
}
