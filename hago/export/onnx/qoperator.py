"""QOperator form: operators on integers, QLinear ones where the plan requantizes as they do.

What has no such operator is written out: sums in int32 (ConvInteger, MatMulInteger), everything else on centered
integers carried in float32, which `onnx_limits` holds below 2**24, and the requantization of the plan after it.
A table is a Gather. So every integer of the plan comes out as it is, whatever the hardware.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Final

import torch

from hago.arithmetic.numerics import Requantize, ratio, ratio_of_float32
from hago.arithmetic.types import Edge, QParams
from hago.export.onnx.file import Walk
from hago.export.onnx.integers import Emit, all_bytes, emit_carried, mover, passes_through
from hago.export.onnx.operators import emit_real, pads, rows_back
from hago.export.onnx.values import Value, numpy_dtype
from hago.export.onnx.writer import MICROSOFT
from hago.graph.graph import Node
from hago.plan.plan import NodePlan


def emit_qoperator(walk: Walk, node: Node, made: NodePlan) -> Value:
    """One integer node."""
    if passes_through(walk, node, made):
        return replace(walk.values[node.inputs[0]], qparams=made.out, label=f"{node.name}:q")
    operands = _operands(walk, node, made)
    if made.table is not None:
        return _look_up(walk, node, made, operands[0])
    emit = _operator(walk, node, made, operands)
    if emit is not None:
        return _narrowed(walk, node, made, lambda out: emit(walk, node, made, operands, out))
    if made.desc.form == "dequantize" or (node.op in JOINED and all_bytes(operands, made)):
        real = [walk.dequantized(e) if e.slot not in made.consts else _real(walk, node, e) for e in node.edges]
        emit_real(walk.w, node, real, f"{node.name}:real")
        return walk.stored(f"{node.name}:real", made.out, node)
    return emit_carried(walk, node, made, operands)


def _operands(walk: Walk, node: Node, made: NodePlan) -> list[Value]:
    found = []
    for edge in node.edges:
        if made.operands[edge.slot] is None:
            found.append(Value(walk.real(walk.graph.source(edge)), "real"))
        elif edge.slot in made.consts:
            found.append(walk.constant(edge))
        else:
            found.append(walk.operand(edge))
    return found


def _real(walk: Walk, node: Node, edge: Edge) -> str:
    value = walk.constant(edge)
    return walk.scales.dequantize(value, walk.rank(node.inputs[edge.slot]), f"{value.name}:real")


#: What engines compute on real values, in whatever form.
JOINED: Final = ("sub", "stack", "neg")


def _operator(walk: Walk, node: Node, made: NodePlan, operands: list[Value]) -> Emit | None:
    """The operator on stored integers that computes just what the plan says, if there is one."""
    if not all_bytes(operands, made):
        return None
    if made.desc.form in ("qlinear", "dequantize"):
        return QLINEAR.get((node.op, made.desc.form))
    if made.out_simq is not None:
        fused = _multiplies_alike(made, walk.plan.hardware.requantize)
        return FUSED.get(node.op) if fused else None
    return mover(walk, node, made, operands)


def _multiplies_alike(made: NodePlan, how: Requantize) -> bool:
    """Whether QLinear operators' float32 multiplier, rounded half to even, is the plan's."""
    simq = made.out_simq
    if simq is None or simq.source is None or simq.target is None or how.rounding != "half_even":
        return False
    theirs, exact = ratio_of_float32(simq.source, simq.target), ratio(simq.source, simq.target)
    return how.form == "onnxruntime" or (how.form == "float32" and theirs.equal(exact.to(torch.float32)))


def _narrowed(walk: Walk, node: Node, made: NodePlan, emit: Callable[[str], None]) -> Value:
    """The operator's output, clipped where the plan allows fewer integers than the dtype has."""
    out, q = f"{node.name}:q", made.out
    kind = numpy_dtype(q.dtype)
    whole = (q.qmin, q.qmax) == (torch.iinfo(q.dtype.torch).min, torch.iinfo(q.dtype.torch).max)
    if whole or made.within_hull:
        emit(out)
        return Value(out, "stored", q)
    wide = walk.w.fresh(f"{out}:whole")
    emit(wide)
    walk.w.op("Clip", [wide, *(walk.w.number(v, out, str(kind)) for v in (q.qmin, q.qmax))], out)
    return Value(out, "stored", q)


def _look_up(walk: Walk, node: Node, made: NodePlan, x: Value) -> Value:
    w, out, source = walk.w, f"{node.name}:q", made.operands[0]
    assert made.table is not None and source is not None
    stored = (made.table + made.out.zero_point).numpy().astype(numpy_dtype(made.out.dtype))
    index = w.step("Cast", [x.name], out, to=w.kind_of("int32"))
    if source.qmin:
        index = w.step("Sub", [index, w.number(source.qmin, out, "int32")], out)
    return Value(w.op("Gather", [w.constant(f"{node.name}:table", stored), index], out), "stored", made.out)


# ---------------------------------------------------------------- QLinear operators
def _of(walk: Walk, value: Value) -> list[str]:
    """A tensor with its scale and zero point."""
    assert value.qparams is not None
    return [value.name, *walk.scales.parameters(value.label or value.name, value.qparams)]


def _to(walk: Walk, node: Node, q: QParams) -> list[str]:
    """The scale and zero point of the output."""
    return walk.scales.parameters(f"{node.name}:q", q)


def _pair(kind: str) -> Emit:
    def emit(walk: Walk, node: Node, made: NodePlan, x: list[Value], out: str) -> None:
        walk.w.op(kind, [*_of(walk, x[0]), *_of(walk, x[1]), *_to(walk, node, made.out)], out, MICROSOFT)

    return emit


def _concat(walk: Walk, node: Node, made: NodePlan, x: list[Value], out: str) -> None:
    inputs = [*_to(walk, node, made.out), *(name for v in x for name in _of(walk, v))]
    walk.w.op("QLinearConcat", inputs, out, MICROSOFT, axis=node.attrs["axis"])


def _average(walk: Walk, node: Node, made: NodePlan, x: list[Value], out: str) -> None:
    inputs = [*_of(walk, x[0]), *_to(walk, node, made.out)]
    attrs = node.attrs
    if set(attrs.get("output_size", ())) == {1}:
        walk.w.op("QLinearGlobalAveragePool", inputs, out, MICROSOFT)
        return
    if "output_size" in attrs:
        size = [i // o for i, o in zip(attrs["input_size"], attrs["output_size"], strict=True)]
        attrs = {"kernel_size": size, "stride": size, "padding": [0] * len(size), "ceil_mode": False}
    window = {"kernel_shape": attrs["kernel_size"], "strides": attrs["stride"], "pads": list(attrs["padding"]) * 2}
    counts = {"count_include_pad": int(attrs.get("count_include_pad", True)), "ceil_mode": int(attrs["ceil_mode"])}
    walk.w.op("QLinearAveragePool", inputs, out, MICROSOFT, **window, **counts)


def _conv(walk: Walk, node: Node, made: NodePlan, x: list[Value], out: str) -> None:
    a = node.attrs
    kernel = list((walk.graph[node.inputs[1]].shape or ())[2:])
    inputs = [*_of(walk, x[0]), *_of(walk, x[1]), *_to(walk, node, made.out), *(v.name for v in x[2:])]
    window = {"kernel_shape": kernel, "strides": a["stride"], "pads": pads(a, kernel), "dilations": a["dilation"]}
    walk.w.op("QLinearConv", inputs, out, group=a["groups"], **window)


def _gemm(walk: Walk, node: Node, made: NodePlan, x: list[Value], out: str) -> None:
    """Rows times a matrix, the bias added to the integer sum; more axes are laid out as rows and back."""
    w, shape = walk.w, walk.graph[node.inputs[0]].shape or ()
    first = _of(walk, x[0])
    if len(shape) > 2:
        first[0] = w.step("Reshape", [x[0].name, w.integers([-1, shape[-1]], out)], out)
    inputs = [*first, *_of(walk, x[1]), x[2].name if len(x) > 2 else "", *_to(walk, node, made.out)]
    flat = out if len(shape) == 2 else w.fresh(f"{out}:flat")
    w.op("QGemm", inputs, flat, MICROSOFT, transB=int(node.op == "linear"))
    if flat != out:
        w.op("Reshape", [flat, rows_back(w, x[0].name, node.shape or (), out)], out)


def _matmul(walk: Walk, node: Node, made: NodePlan, x: list[Value], out: str) -> None:
    if len(x) == 3:
        _gemm(walk, node, made, x, out)
    else:
        matrices = _matrices(walk, x[1], walk.graph[node.inputs[1]].shape or ())
        walk.w.op("QLinearMatMul", [*_of(walk, x[0]), *matrices, *_to(walk, node, made.out)], out)


def _matrices(walk: Walk, value: Value, shape: tuple[int, ...]) -> list[str]:
    """A tensor with its scale and zero point, which have as many axes as it where every column has its own."""
    q = value.qparams
    if q is None or len(shape) == 2 or not q.per_channel:
        return _of(walk, value)
    each = (*shape[:-2], 1, shape[-1])
    zero = q.zero_point.expand(each).numpy().astype(numpy_dtype(q.dtype))
    scale = walk.w.constant(f"{value.name}:scales", q.scale.to(torch.float32).expand(each))
    return [value.name, scale, walk.w.constant(f"{value.name}:zeros", zero)]


FUSED: Final[Mapping[str, Emit]] = {
    **{f"conv{d}d": _conv for d in (1, 2, 3)},
    "linear": _gemm,
    "matmul": _matmul,
}
QLINEAR: Final[Mapping[tuple[str, str], Emit]] = {
    ("add", "qlinear"): _pair("QLinearAdd"),
    ("mul", "qlinear"): _pair("QLinearMul"),
    ("concat", "dequantize"): _concat,
    **{(f"{kind}_pool{d}d", "qlinear"): _average for kind in ("avg", "adaptive_avg") for d in (1, 2)},
}
