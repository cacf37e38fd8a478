"""Ops that ONNX says in several nodes: pooling to a size, norms over groups, attention, gated activations."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch

from hago.errors import UnsupportedOp
from hago.export.onnx_writer import Writer
from hago.graph import Node

Inputs = Sequence[str]


def _shape(w: Writer, node: Node, slot: int = 0) -> tuple[int, ...]:
    return w.graph[node.inputs[slot]].shape or ()


def _whole(node: Node, sizes: Sequence[int]) -> dict[str, Any] | None:
    """The window of an adaptive pooling whose windows are alike; None where they are not."""
    output = [n if o is None else o for o, n in zip(node.attrs["output_size"], sizes, strict=True)]
    if any(n % o for n, o in zip(sizes, output, strict=True)):
        return None
    windows = [n // o for n, o in zip(sizes, output, strict=True)]
    return {"kernel_shape": windows, "strides": windows}


def _adaptive_avg_pool(w: Writer, node: Node, x: Inputs, out: str) -> None:
    sizes = _shape(w, node)[2:]
    window = _whole(node, sizes)
    if set(node.attrs["output_size"]) == {1}:
        w.op("GlobalAveragePool", x, out)
    elif window is not None:
        w.op("AveragePool", x, out, **window)
    else:
        _average_matrices(w, node, x, out, sizes)


def _average_matrices(w: Writer, node: Node, x: Inputs, out: str, sizes: Sequence[int]) -> None:
    """Windows of different sizes: products with matrices of their means, one per axis."""
    value = x[0]
    for axis, (n, o) in enumerate(zip(sizes, node.attrs["output_size"], strict=True)):
        o = n if o is None else o
        means = np.zeros((n, o), dtype=np.float32)
        for i in range(o):
            low, high = i * n // o, -((-(i + 1) * n) // o)
            means[low:high, i] = 1.0 / (high - low)
        last = axis == len(sizes) - 1
        name = out if last else w.fresh(f"{out}:rows")
        if last:
            w.op("MatMul", [value, w.constant(w.fresh(f"{out}:means"), means)], name)
        else:
            w.op("MatMul", [w.constant(w.fresh(f"{out}:means"), means.T.copy()), value], name)
        value = name


def _adaptive_max_pool(w: Writer, node: Node, x: Inputs, out: str) -> None:
    window = _whole(node, _shape(w, node)[2:])
    if window is None:
        raise UnsupportedOp(f"node {node.name!r}: ONNX has no maximum over windows of different sizes")
    w.op("MaxPool", x, out, **window)


def _affine(w: Writer, node: Node, x: Inputs, out: str) -> None:
    shape = w.integers([-1, *[1] * (len(_shape(w, node)) - 2)], out)
    scale, bias = (w.step("Reshape", [v, shape], out) for v in x[1:])
    w.op("Add", [w.step("Mul", [x[0], scale], out), bias], out)


def _stack(w: Writer, node: Node, x: Inputs, out: str) -> None:
    axis = node.attrs["axis"]
    w.op("Concat", [w.step("Unsqueeze", [v, w.integers([axis], out)], out) for v in x], out, axis=axis)


def _silu(w: Writer, node: Node, x: Inputs, out: str) -> None:
    w.op("Mul", [x[0], w.step("Sigmoid", x, out)], out)


def _prelu(w: Writer, node: Node, x: Inputs, out: str) -> None:
    shape = w.integers([-1, *[1] * (len(_shape(w, node)) - 2)], out)
    w.op("PRelu", [x[0], w.step("Reshape", [x[1], shape], out)], out)


# ---------------------------------------------------------------- norms
def _filled(w: Writer, out: str, shape: Sequence[int], value: float) -> str:
    return w.constant(w.fresh(f"{out}:filled"), np.full(shape, value, dtype=np.float32))


def _layer_norm(w: Writer, node: Node, x: Inputs, out: str) -> None:
    normalized = node.attrs["normalized_shape"]
    scale = x[1] if len(x) > 1 else _filled(w, out, normalized, 1.0)
    w.op("LayerNormalization", [x[0], scale, *x[2:]], out, axis=-len(normalized), epsilon=node.attrs["eps"])


def _instance_norm(w: Writer, node: Node, x: Inputs, out: str) -> None:
    channels = _shape(w, node)[1]
    scale = x[1] if len(x) > 1 else _filled(w, out, [channels], 1.0)
    bias = x[2] if len(x) > 2 else _filled(w, out, [channels], 0.0)
    w.op("InstanceNormalization", [x[0], scale, bias], out, epsilon=node.attrs["eps"])


def _group_norm(w: Writer, node: Node, x: Inputs, out: str) -> None:
    """Groups as channels of an instance norm, then the weight and bias of every channel."""
    groups, shape = node.attrs["num_groups"], _shape(w, node)
    ones, zeros = _filled(w, out, [groups], 1.0), _filled(w, out, [groups], 0.0)
    split = w.step("Reshape", [x[0], w.integers([0, groups, -1], out)], out)
    normed = w.step("InstanceNormalization", [split, ones, zeros], out, epsilon=node.attrs["eps"])
    restored = w.integers([-1, *shape[1:]], out)
    along = w.integers([-1, *[1] * (len(shape) - 2)], out)
    value = w.op("Reshape", [normed, restored], out if len(x) == 1 else w.fresh(f"{out}:normed"))
    for kind, operand, last in zip(("Mul", "Add"), x[1:], (len(x) == 2, True), strict=False):
        value = w.op(kind, [value, w.step("Reshape", [operand, along], out)], out if last else w.fresh(f"{out}:scaled"))


# ---------------------------------------------------------------- attention
def _attention(w: Writer, node: Node, x: Inputs, out: str) -> None:
    query, key = _shape(w, node), _shape(w, node, 1)
    rank = len(key)
    scale = node.attrs["scale"]
    scale = 1.0 / math.sqrt(query[-1]) if scale is None else scale
    keys, values = x[1], x[2]
    if node.attrs["enable_gqa"] and query[-3] != key[-3]:
        keys, values = (_repeated(w, node, v, slot, out) for slot, v in ((1, keys), (2, values)))
    turned = w.step("Transpose", [keys], out, perm=[*range(rank - 2), rank - 1, rank - 2])
    scores = w.step("Mul", [w.step("MatMul", [x[0], turned], out), w.number(scale, out)], out)
    shares = w.fresh(f"{out}:softmax")
    _shares(w, node, scores, (query[-2], key[-2]), x[3:], shares)
    w.op("MatMul", [shares, values], out)


def _masked_softmax(w: Writer, node: Node, x: Inputs, out: str) -> None:
    scores = w.step("Mul", [x[0], w.number(node.attrs["scale"], out)], out)
    rows, columns = _shape(w, node)[-2:]
    _shares(w, node, scores, (rows, columns), x[1:], out)


def _shares(w: Writer, node: Node, scores: str, size: tuple[int, int], masks: Inputs, out: str) -> None:
    """The softmax of scores under masks; 0 in rows of which nothing is let through, where ONNX's is NaN.

    Args:
        size: of the matrix of scores.
        masks: the mask, where there is one; the node's last input.
    """
    never = w.number(-math.inf, out)
    if node.attrs["is_causal"]:
        through = w.constant(w.fresh(f"{out}:causal"), torch.ones(size, dtype=torch.bool).tril())
        scores = w.step("Where", [through, scores, never], out)
    if not masks:
        w.op("Softmax", [scores], out, axis=-1)
        return
    boolean = w.dtypes[node.inputs[-1]] == torch.bool
    masked = [masks[0], scores, never] if boolean else [scores, masks[0]]
    scores = w.step("Where" if boolean else "Add", masked, out)
    w.need(18)
    largest = w.step("ReduceMax", [scores, w.integers([-1], out)], out, keepdims=1)
    nothing = w.step("Equal", [largest, never], out)
    w.op("Where", [nothing, w.number(0.0, out), w.step("Softmax", [scores], out, axis=-1)], out)


def _repeated(w: Writer, node: Node, value: str, slot: int, out: str) -> str:
    """Heads of keys or values, each as often as queries share it."""
    query, shape = _shape(w, node), _shape(w, node, slot)
    times = query[-3] // shape[-3]
    apart = w.step("Unsqueeze", [value, w.integers([-3], out)], out)
    sizes = [1] * (len(shape) - 2) + [times, 1, 1]
    spread = w.step("Expand", [apart, w.integers(sizes, out)], out)
    return w.step("Reshape", [spread, w.integers([-1, *shape[1:-3], query[-3], *shape[-2:]], out)], out)


COMPOSED: Final[Mapping[str, Callable[[Writer, Node, Inputs, str], None]]] = {
    **{f"adaptive_avg_pool{d}d": _adaptive_avg_pool for d in (1, 2)},
    "adaptive_max_pool2d": _adaptive_max_pool,
    "affine": _affine,
    "stack": _stack,
    "silu": _silu,
    "prelu": _prelu,
    "layer_norm": _layer_norm,
    "instance_norm": _instance_norm,
    "group_norm": _group_norm,
    "scaled_dot_product_attention": _attention,
    "masked_softmax": _masked_softmax,
}
