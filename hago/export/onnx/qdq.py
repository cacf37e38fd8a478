"""QDQ form: real operators between DequantizeLinear and QuantizeLinear, which engines fuse into integer ones.

Sums that the plan keeps wide, to requantize them on each edge, stay real here: ONNX Runtime fuses what lies
between a convolution and the one QuantizeLinear behind it.
"""

from __future__ import annotations

from dataclasses import replace

from hago.arithmetic.types import Edge, QParams
from hago.export.onnx.file import Walk
from hago.export.onnx.integers import MOVED, Emit, clip_per_channel, mover, passes_through, same_through_reals
from hago.export.onnx.operators import emit_real, rows_back, squeeze_pooled
from hago.export.onnx.values import Value, quantizes_to
from hago.export.onnx.writer import MICROSOFT, Writer
from hago.graph.graph import Node
from hago.plan.plan import NodePlan


def emit_qdq(walk: Walk, node: Node, made: NodePlan) -> Value:
    """One integer node."""
    if passes_through(walk, node, made):
        source = walk.values[node.inputs[0]]
        if source.held == "stored":
            return replace(source, qparams=made.out, label=f"{node.name}:q")
    if node.op == "linear" and walk.rank(node.inputs[0]) > 2 and walk.operand(node.edges[0]).held == "stored":
        return _rows(walk, node, made)
    if (emit := _on_bytes(walk, node, made)) is not None:
        emit(walk, node, made, [walk.operand(e) for e in node.edges], f"{node.name}:q")
        return Value(f"{node.name}:q", "stored", made.out)
    name = node.name if is_wide(made) else f"{node.name}:real"
    real = [_real_operand(walk, node, made, e) for e in node.edges]
    _emit(walk, node, made, real, name)
    return Value(name, "real") if is_wide(made) else walk.stored(name, made.out, node)


def is_wide(made: NodePlan) -> bool:
    """Whether the node emits a sum that no QuantizeLinear writes."""
    return made.out_simq is None and not quantizes_to(made.out.dtype)


def _on_bytes(walk: Walk, node: Node, made: NodePlan) -> Emit | None:
    """How a clamp or padding is written without leaving stored bytes: engines fuse none with what is around it."""
    return mover(walk, node, made, [walk.operand(node.edges[0])]) if node.op in MOVED else None


def _real_operand(walk: Walk, node: Node, made: NodePlan, edge: Edge) -> str:
    q = made.operands[edge.slot]
    if q is None:
        return walk.real(node.inputs[edge.slot])
    if edge.slot in made.consts:
        return _constant(walk, node, edge, q)
    if node.op == "concat" and same_through_reals(walk, edge):
        return walk.real(node.inputs[edge.slot])
    return walk.dequantized(edge)


def _constant(walk: Walk, node: Node, edge: Edge, q: QParams) -> str:
    rank = walk.rank(node.inputs[edge.slot])
    if node.op == "matmul" and edge.slot == 1 and rank > 2 and q.per_channel:
        return _matrices(walk, node, edge, q)
    value = walk.constant(edge, _shape_of_weight(walk, node, edge.slot), packed=True)
    return walk.scales.dequantize(value, rank, f"{value.name}:real")


def _matrices(walk: Walk, node: Node, edge: Edge, q: QParams) -> str:
    """Matrices with a scale for each of their columns, dequantized as rows of one: ONNX Runtime loads a MatMul right
    behind a DequantizeLinear of more than two axes as QLinearMatMul, which then refuses to run on a vector of scales.
    """
    shape = walk.graph[node.inputs[edge.slot]].shape or ()
    value = walk.constant(edge, (-1, shape[-1]), packed=True)
    flat = replace(q, scale=q.scale.reshape(1, -1), zero_point=q.zero_point.reshape(1, -1))
    rows = walk.scales.dequantize(replace(value, qparams=flat), 2, f"{value.name}:rows")
    return walk.w.step("Reshape", [rows, walk.w.integers(shape, value.name)], value.name)


def _shape_of_weight(walk: Walk, node: Node, slot: int) -> tuple[int, ...] | None:
    """The weight of an `affine` becomes that of a 1x1 depthwise convolution."""
    rank = walk.rank(node.inputs[0])
    return (-1, 1, *[1] * (rank - 2)) if node.op == "affine" and slot == 1 and rank > 2 else None


def _emit(walk: Walk, node: Node, made: NodePlan, real: list[str], out: str) -> None:
    """The op on real values, in the spelling that ONNX Runtime fuses."""
    w, rank = walk.w, walk.rank(node.inputs[0])
    if node.op == "affine" and rank > 2:
        w.op("Conv", real, out, group=(walk.graph[node.inputs[1]].shape or ())[0])
    elif node.op == "mean" and rank == 4 and node.attrs["axes"] == [2, 3]:
        pooled = w.op("GlobalAveragePool", real[:1], out if node.attrs["keepdim"] else w.fresh(f"{out}:pool"))
        if not node.attrs["keepdim"]:
            squeeze_pooled(w, pooled, rank, out)
    elif node.op == "clamp" and is_wide(made):
        _clip(w, node, made, real[0], out)
    elif node.op == "silu" and walk.plan.hardware.requantize.form == "onnxruntime":
        # as two operators it is read through two DequantizeLinear and not put together again
        w.op("QuickGelu", real, out, MICROSOFT, alpha=1.0)
    else:
        emit_real(w, node, real, out)


def _clip(w: Writer, node: Node, made: NodePlan, x: str, out: str) -> None:
    """A clamp of sums, which cuts off at integers: no QuantizeLinear behind it brings its limits there."""
    scale = made.out.scale
    ends = {k: None if made.attrs[k] is None else made.attrs[k] * scale for k in ("min", "max")}
    if scale.numel() > 1:
        clip_per_channel(w, ends, x, out)
    else:
        limits = {k: None if end is None else float(end) for k, end in ends.items()}
        emit_real(w, replace(node, attrs={**node.attrs, **limits}), [x], out)


def _rows(walk: Walk, node: Node, made: NodePlan) -> Value:
    """A linear layer on more than two axes: stored integers as rows, Gemm, and back, so that the bias is added
    to the integer sum."""
    w, shape = walk.w, node.shape or ()
    name = f"{node.name}:q"
    value = walk.operand(node.edges[0])
    assert value.qparams is not None
    rows = w.step("Reshape", [value.name, w.integers([-1, (walk.graph[node.inputs[0]].shape or ())[-1]], name)], name)
    x = walk.scales.dequantize(Value(rows, "stored", value.qparams), 2, w.fresh(f"{name}:rows"))
    rest = [_real_operand(walk, node, made, e) for e in node.edges[1:]]
    product = w.step("Gemm", [x, *rest], name, transB=1)
    back = rows_back(w, value.name, shape, name)
    if is_wide(made):
        return Value(w.op("Reshape", [product, back], node.name), "real")
    flat = walk.scales.quantize(product, made.out, 2, w.fresh(f"{name}:flat"))
    return Value(w.op("Reshape", [flat.name, back], name), "stored", made.out)
