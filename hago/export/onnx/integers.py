"""Values that are only moved, on stored integers in either form: nothing to write, a Clip, a Pad, or the op itself."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch

from hago.arithmetic.numerics import apply_simq, dequantize, quantize
from hago.arithmetic.types import Edge
from hago.errors import UnsupportedOp
from hago.export.onnx.file import Walk
from hago.export.onnx.operators import emit_real, pad_sizes, pads
from hago.export.onnx.values import Value, numpy_dtype, quantizes_to
from hago.export.onnx.writer import Writer
from hago.graph.graph import Graph, Node
from hago.ops._rule import Attrs
from hago.plan.plan import NodePlan

#: Writes an integer node whose operands and output are stored in 8 bits; the last argument names the output.
Emit = Callable[[Walk, Node, NodePlan, list[Value], str], None]


def passes_through(walk: Walk, node: Node, made: NodePlan) -> bool:
    """Whether the stored integers that come are those that go: a division of the scale, or a clamp that cuts
    off nothing that its input can hold."""
    form = walk.plan.ops[node.op].integer
    if made.simqs[0] is not None or made.out_simq is not None or form is None or walk.plan.edges[node.edges[0]]:
        return False
    if node.op == "div":
        return True
    q = made.operands[0]
    if form.limits is None or q is None or not quantizes_to(q.dtype):
        return False
    low, high = form.limits(made.attrs)
    zero = q.zero_point
    return (low is None or bool((q.qmin - zero >= low).all())) and (high is None or bool((q.qmax - zero <= high).all()))


def all_bytes(operands: Sequence[Value], made: NodePlan) -> bool:
    """Whether data lie in 8 bits; a bias may be wider."""
    data = operands[:2] if len(operands) == 3 else operands
    return numpy_dtype(made.out.dtype).itemsize == 1 and all(
        v.held == "real" or (v.held == "stored" and numpy_dtype(v.dtype).itemsize == 1) for v in data
    )


def mover(walk: Walk, node: Node, made: NodePlan, operands: list[Value]) -> Emit | None:
    """What moves stored bytes as the node does, if it does no more than that."""
    form = walk.plan.ops[node.op].integer
    moves = form is not None and made.within_hull and made.out_simq is None and operands[0].held == "stored"
    same = moves and made.out.dtype == operands[0].dtype and all_bytes(operands, made)
    return MOVED.get(node.op, _moved) if same else None


def same_through_reals(walk: Walk, edge: Edge) -> bool:
    """Whether bytes requantized on an edge are, each of them, what dequantizing and quantizing again gives, which
    engines do inside a concatenation."""
    simq, value = walk.plan.edges[edge], walk.values.get(walk.graph.source(edge))
    if simq is None or simq.source is None or simq.target is None or value is None or value.held != "stored":
        return False
    source, target, how = simq.source, simq.target, walk.plan.hardware.requantize
    if source.dtype.bits > 8 or source.dtype != target.dtype or source.per_channel or target.per_channel:
        return False
    centered = torch.arange(source.qmin, source.qmax + 1) - source.zero_point
    whole = (target.qmin, target.qmax) == (target.dtype.min, target.dtype.max)
    again = quantize(dequantize(centered, source), target, how.rounding)
    return whole and again.to(torch.int64).equal(apply_simq(centered, simq, how).to(torch.int64))


# ---------------------------------------------------------------- on stored bytes
def _clip(walk: Walk, node: Node, made: NodePlan, x: list[Value], out: str) -> None:
    form = walk.plan.ops[node.op].integer
    assert form is not None and form.limits is not None
    q, kind = made.out, numpy_dtype(made.out.dtype)
    zero = int(q.zero_point)
    ends = zip(form.limits(made.attrs), (q.qmin, q.qmax), strict=True)
    limits = [own if end is None else min(max(int(end) + zero, q.qmin), q.qmax) for end, own in ends]
    walk.w.op("Clip", [x[0].name, *(walk.w.number(v, out, str(kind)) for v in limits)], out)


def _moved(walk: Walk, node: Node, made: NodePlan, x: list[Value], out: str) -> None:
    emit_real(walk.w, node, [v.name for v in x], out)


def _pad(walk: Walk, node: Node, made: NodePlan, x: list[Value], out: str) -> None:
    if node.attrs["mode"] != "constant":
        _moved(walk, node, made, x, out)
        return
    w, q = walk.w, made.out
    sizes = w.integers(pad_sizes(node, walk.rank(node.inputs[0])), out)
    w.op("Pad", [x[0].name, sizes, w.number(int(q.zero_point), out, str(numpy_dtype(q.dtype)))], out)


MOVED: Final[Mapping[str, Emit]] = {"relu": _clip, "clamp": _clip, "pad": _pad}


# ---------------------------------------------------------------- onnx carried
# Integer nodes written out: exact sums, on int32 or carried in float32, and the plan's requantization after them.


def emit_carried(walk: Walk, node: Node, made: NodePlan, operands: list[Value]) -> Value:
    """The node's sum, then what its signature does with it."""
    sums = f"{node.name}:sums"
    if node.op in IN_INT32 and _bytes(operands[0]) and _bytes(operands[1]):
        _in_int32(walk, node, made, operands, sums)
    else:
        centered = [_centered(walk, made, slot, v, sums) for slot, v in enumerate(operands)]
        _in_float32(walk, node, made, centered, sums)
    register = Value(sums, "carried", made.register)
    if made.out_simq is not None:
        return walk.scales.requantize(register, made.out_simq, f"{node.name}:q")
    return walk.scales.store(register, f"{node.name}:q") if quantizes_to(made.out.dtype) else register


def _bytes(value: Value) -> bool:
    return value.held == "stored" and numpy_dtype(value.dtype).itemsize == 1


# ---------------------------------------------------------------- in int32
def _in_int32(walk: Walk, node: Node, made: NodePlan, x: list[Value], out: str) -> None:
    w = walk.w
    total = IN_INT32[node.op](walk, node, made, x, out)
    if len(x) > 2:
        bias = made.consts.get(2)
        if bias is None:
            raise UnsupportedOp(f"node {node.name!r}: ONNX export takes constant biases only")
        dims = len(walk.graph[node.inputs[1]].shape or ()) - 2 if node.op.startswith("conv") else 0
        laid = bias.to(torch.int32).reshape(-1, *[1] * dims)
        total = w.step("Add", [total, w.constant(f"{node.name}:bias", laid)], out)
    w.op("Cast", [total], out, to=w.kind_of("float32"))


def _zeros(walk: Walk, made: NodePlan, x: list[Value]) -> list[str]:
    """Zero points of data and weight, the latter per channel or one."""
    found = []
    for value in x[:2]:
        q = value.qparams
        assert q is not None
        zero = torch.unique(q.zero_point)
        if zero.numel() > 1:
            raise UnsupportedOp(f"{value.name!r}: ONNX has one zero point for the weight of a sum in int32")
        found.append(walk.w.constant(f"{value.name}:zero0", zero.reshape(()).numpy().astype(numpy_dtype(q.dtype))))
    return found


def _conv(walk: Walk, node: Node, made: NodePlan, x: list[Value], out: str) -> str:
    a = node.attrs
    kernel = list((walk.graph[node.inputs[1]].shape or ())[2:])
    sizes = {"kernel_shape": kernel, "strides": a["stride"], "pads": pads(a, kernel), "dilations": a["dilation"]}
    inputs = [x[0].name, x[1].name, *_zeros(walk, made, x)]
    return walk.w.step("ConvInteger", inputs, out, group=a["groups"], **sizes)


def _linear(walk: Walk, node: Node, made: NodePlan, x: list[Value], out: str) -> str:
    turned = walk.w.step("Transpose", [x[1].name], out, perm=[1, 0])
    return walk.w.step("MatMulInteger", [x[0].name, turned, *_zeros(walk, made, x)], out)


def _matmul(walk: Walk, node: Node, made: NodePlan, x: list[Value], out: str) -> str:
    return walk.w.step("MatMulInteger", [x[0].name, x[1].name, *_zeros(walk, made, x)], out)


IN_INT32: Final[Mapping[str, Callable[[Walk, Node, NodePlan, list[Value], str], str]]] = {
    **{f"conv{d}d": _conv for d in (1, 2, 3)},
    "linear": _linear,
    "matmul": _matmul,
}


# ---------------------------------------------------------------- in float32
def _centered(walk: Walk, made: NodePlan, slot: int, value: Value, out: str) -> str:
    """An operand as centered integers in float32."""
    if value.held == "real":
        return value.name
    if slot in made.consts:
        integers = made.consts[slot]
        return walk.w.constant(walk.w.fresh(f"{out}:centered"), integers.to(torch.float32))
    return walk.scales.centered(value, out)


def _in_float32(walk: Walk, node: Node, made: NodePlan, x: list[str], out: str) -> None:
    """The op as on real values, its attributes in integer units."""
    attrs: dict[str, Any] = {**node.attrs, **(made.attrs if node.op == "clamp" else {})}
    if (axes := summed_axes(walk.graph, node)) is not None:
        _sum_in_int64(walk, x[0], axes, bool(node.attrs.get("keepdim", True)), out)
    elif "avg_pool" in node.op:
        _window_sums(walk, node, made, x[0], out)
    elif node.op == "clamp" and isinstance(attrs["min"], torch.Tensor) | isinstance(attrs["max"], torch.Tensor):
        clip_per_channel(walk.w, made.attrs, x[0], out)
    else:
        emit_real(walk.w, Node(node.name, node.op, node.inputs, attrs, node.shape), x, out)


def summed_axes(graph: Graph, node: Node) -> list[int] | None:
    """The axes that a node sums over whole, if that is what it does."""
    if node.op in ("mean", "sum"):
        return list(node.attrs["axes"])
    sizes = list((graph[node.inputs[0]].shape or ())[2:])
    pooled = node.attrs.get("kernel_size") if "avg_pool" in node.op else None
    whole = pooled == sizes and not any(node.attrs["padding"])
    whole |= node.op.startswith("adaptive_avg_pool") and set(node.attrs["output_size"]) == {1}
    return list(range(2, 2 + len(sizes))) if whole else None


def _sum_in_int64(walk: Walk, x: str, axes: list[int], keep: bool, out: str) -> None:
    w = walk.w
    whole = w.step("Cast", [x], out, to=w.kind_of("int64"))
    total = w.step("ReduceSum", [whole, w.integers(axes, out)], out, keepdims=int(keep))
    w.op("Cast", [total], out, to=w.kind_of("float32"))


def clip_per_channel(w: Writer, attrs: Attrs, x: str, out: str) -> None:
    """A clamp whose limits are one for each channel, in the units of `x`."""
    ends = {"Max": attrs["min"], "Min": attrs["max"]}
    for kind, limit in ((k, v) for k, v in ends.items() if v is not None):
        x = w.step(kind, [x, w.constant(w.fresh(f"{out}:limit"), torch.as_tensor(limit).to(torch.float32))], out)
    w.op("Identity", [x], out)


def _window_sums(walk: Walk, node: Node, made: NodePlan, x: str, out: str) -> None:
    """One strided slice per place in the window, added up in int64."""
    w, a, sizes = walk.w, node.attrs, (node.shape or ())[2:]
    if "output_size" in a:
        kernel = [i // o for i, o in zip(a["input_size"], a["output_size"], strict=True)]
        stride, padding = kernel, [0] * len(kernel)
    else:
        kernel, stride, padding = a["kernel_size"], a["stride"], a["padding"]
    x = w.step("Cast", [x], out, to=w.kind_of("int64"))
    if any(padding):
        ends = [0, 0, *padding]
        x = w.step("Pad", [x, w.integers(ends * 2, out), w.number(0, out, "int64")], out)
    axes = w.integers(range(2, 2 + len(kernel)), out)
    steps = w.integers(stride, out)
    total = ""
    for offset in itertools.product(*map(range, kernel)):
        stops = [o + s * (n - 1) + 1 for o, s, n in zip(offset, stride, sizes, strict=True)]
        part = w.step("Slice", [x, w.integers(offset, out), w.integers(stops, out), axes, steps], out)
        total = w.step("Add", [total, part], out) if total else part
    w.op("Cast", [total], out, to=w.kind_of("float32"))
