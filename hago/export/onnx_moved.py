"""Values that are only moved, on stored integers in either form: nothing to write, a Clip, a Pad, or the op itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

import torch

from hago.export.onnx_file import Walk
from hago.export.onnx_real import emit_real, pad_sizes
from hago.export.onnx_values import Value, numpy_dtype, quantizes_to
from hago.graph import Node
from hago.numerics import apply_simq, dequantize, quantize
from hago.plan import NodePlan
from hago.types import Edge

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
