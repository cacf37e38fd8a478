"""How ONNX says each op on real values: one small function per op, in tables by name.

A function takes the Writer, the node, the names of its real inputs and the name that its result must have.
What needs more than one line of ONNX stands in `onnx_composed`; what ATen calls without a rule of hago mean,
in `onnx_opaque`.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np

from hago.errors import UnsupportedOp
from hago.export.onnx_composed import COMPOSED
from hago.export.onnx_opaque import emit_opaque
from hago.export.onnx_writer import Writer
from hago.graph import Node
from hago.ops import _opaque

Inputs = Sequence[str]
Emit = Callable[[Writer, Node, Inputs, str], None]


def same(kind: str, opset: int = 0, **attrs: Any) -> Emit:
    """An op that ONNX has, with these attributes."""

    def emit(w: Writer, node: Node, x: Inputs, out: str) -> None:
        w.need(opset)
        w.op(kind, x, out, **attrs)

    return emit


def renamed(kind: str, opset: int = 0, **names: str) -> Emit:
    """An op whose attributes only have other names."""

    def emit(w: Writer, node: Node, x: Inputs, out: str) -> None:
        w.need(opset)
        w.op(kind, x, out, **{theirs: node.attrs[ours] for theirs, ours in names.items()})

    return emit


def pads(attrs: Mapping[str, Any], kernel: Sequence[int]) -> list[int]:
    """torch's padding, a list or a word, as ONNX writes it: starts, then ends; what is so already stays."""
    given = attrs["padding"]
    if given == "valid":
        return [0] * (2 * len(kernel))
    if given == "same":
        total = [d * (k - 1) for d, k in zip(attrs["dilation"], kernel, strict=True)]
        return [t // 2 for t in total] + [t - t // 2 for t in total]
    return list(given) if len(given) == 2 * len(kernel) else list(given) * 2


def _conv(w: Writer, node: Node, x: Inputs, out: str) -> None:
    kernel = (w.graph[node.inputs[1]].shape or ())[2:]
    attrs = node.attrs
    window = {"kernel_shape": list(kernel), "strides": attrs["stride"], "pads": pads(attrs, kernel)}
    w.op("Conv", x, out, group=attrs["groups"], dilations=attrs["dilation"], **window)


def _conv_transpose(w: Writer, node: Node, x: Inputs, out: str) -> None:
    a = node.attrs
    kernel = (w.graph[node.inputs[1]].shape or ())[2:]
    window = {"kernel_shape": list(kernel), "strides": a["stride"], "pads": list(a["padding"]) * 2}
    more = {"output_padding": a["output_padding"], "dilations": a["dilation"]}
    w.op("ConvTranspose", x, out, group=a["groups"], **window, **more)


def _linear(w: Writer, node: Node, x: Inputs, out: str) -> None:
    if len(w.graph[node.inputs[0]].shape or ()) == 2:
        w.op("Gemm", x, out, transB=1)
        return
    turned = w.step("Transpose", x[1:2], out, perm=[1, 0])
    if len(x) == 2:
        w.op("MatMul", [x[0], turned], out)
    else:
        w.op("Add", [w.step("MatMul", [x[0], turned], out), x[2]], out)


def _matmul(w: Writer, node: Node, x: Inputs, out: str) -> None:
    w.op("MatMul" if len(x) == 2 else "Gemm", x, out)


def _div(w: Writer, node: Node, x: Inputs, out: str) -> None:
    w.op("Div", x if len(x) == 2 else [x[0], w.number(node.attrs["divisor"], out)], out)


def _clamp(w: Writer, node: Node, x: Inputs, out: str) -> None:
    limits = ["" if node.attrs[k] is None else w.number(node.attrs[k], out) for k in ("min", "max")]
    w.op("Clip", [x[0], *(limits if limits[1] else limits[:1])], out)


def rows_back(w: Writer, x: str, shape: Sequence[int], out: str) -> str:
    """The shape to lay rows of a matrix product out as.

    Args:
        x: what the rows came from; its axes but the last are kept.
        shape: of the result at batch 1.
    """
    if shape[0] == 1 and 1 not in shape[1:-1]:
        return w.integers([-1, *shape[1:]], out)
    # the batch may be on any axis
    kept = w.step("Shape", [x], out, start=0, end=-1)
    return w.step("Concat", [kept, w.integers(shape[-1:], out)], out, axis=0)


def window(attrs: Mapping[str, Any]) -> dict[str, Any]:
    """A pooling's attributes in ONNX."""
    return {
        "kernel_shape": attrs["kernel_size"],
        "strides": attrs["stride"],
        "pads": list(attrs["padding"]) * 2,
        "ceil_mode": int(attrs["ceil_mode"]),
    }


def _max_pool(w: Writer, node: Node, x: Inputs, out: str) -> None:
    w.op("MaxPool", x, out, dilations=node.attrs["dilation"], **window(node.attrs))


def _avg_pool(w: Writer, node: Node, x: Inputs, out: str) -> None:
    attrs, divisor = node.attrs, node.attrs.get("divisor_override")
    if divisor and attrs["ceil_mode"]:
        raise UnsupportedOp(f"node {node.name!r}: ONNX has no average with a divisor of its own and ceil_mode")
    if not divisor:
        w.op("AveragePool", x, out, count_include_pad=int(attrs["count_include_pad"]), **window(attrs))
        return
    average = w.step("AveragePool", x, out, count_include_pad=1, **window(attrs))
    w.op("Mul", [average, w.number(math.prod(attrs["kernel_size"]) / divisor, out)], out)


def _reduce(kind: str, opset: int) -> Emit:
    def emit(w: Writer, node: Node, x: Inputs, out: str) -> None:
        w.need(opset)
        w.op(kind, [x[0], w.integers(node.attrs["axes"], out)], out, keepdims=int(node.attrs["keepdim"]))

    return emit


def _along(kind: str, ours: str) -> Emit:
    """An op that takes a list of integers from attribute `ours` as its second input."""

    def emit(w: Writer, node: Node, x: Inputs, out: str) -> None:
        value = node.attrs[ours]
        w.op(kind, [x[0], w.integers(value if isinstance(value, list) else [value], out)], out)

    return emit


def _reshape(w: Writer, node: Node, x: Inputs, out: str) -> None:
    w.op("Reshape", [_channels_last(w, node, x[0], out), w.integers(node.attrs["shape"], out)], out)


def _squeeze(w: Writer, node: Node, x: Inputs, out: str) -> None:
    axes = node.attrs["axes"]
    if axes == list(range(2, len(w.graph[node.inputs[0]].shape or ()))):
        squeeze_pooled(w, x[0], len(axes) + 2, out)
    else:
        w.op("Squeeze", [x[0], w.integers(axes, out)], out)


def squeeze_pooled(w: Writer, x: str, rank: int, out: str) -> None:
    """A value whose axes from the second on have size 1, without them."""
    w.op("Squeeze", [_turned(w, x, rank, out), w.integers(range(1, rank - 1), out)], out)


def _channels_last(w: Writer, node: Node, x: str, out: str) -> str:
    """What is about to be reshaped, its channels last where no other axis but the batch has a size."""
    shape = w.graph[node.inputs[0]].shape or ()
    return _turned(w, x, len(shape), out) if len(shape) > 2 and set(shape[2:]) == {1} else x


def _turned(w: Writer, x: str, rank: int, out: str) -> str:
    """Changes nothing in memory, and lets ONNX Runtime keep channels last up to here: its layout does not pass a
    Clip that no transposition follows, and a global pooling of channels first takes twelve times as long."""
    return w.step("Transpose", [x], out, perm=[0, *range(2, rank), 1])


def _expand(w: Writer, node: Node, x: Inputs, out: str) -> None:
    w.op("Expand", [x[0], w.integers([max(s, 1) for s in node.attrs["size"]], out)], out)  # 1 keeps a size


def _slice(w: Writer, node: Node, x: Inputs, out: str) -> None:
    a = node.attrs
    stop = sys.maxsize if a["stop"] is None else a["stop"]
    w.op("Slice", [x[0], *(w.integers([v], out) for v in (a["start"], stop, a["axis"], a["step"]))], out)


def _select(w: Writer, node: Node, x: Inputs, out: str) -> None:
    index = w.number(node.attrs["index"], out, "int64")
    w.op("Gather", [x[0], index], out, axis=node.attrs["axis"])


_PAD_MODES: Final = {"constant": "constant", "reflect": "reflect", "replicate": "edge", "circular": "wrap"}


def pad_sizes(node: Node, rank: int) -> list[int]:
    """torch's pairs from the last axis on, as ONNX's starts and ends from the first."""
    pairs = list(zip(node.attrs["pad"][::2], node.attrs["pad"][1::2], strict=True))[::-1]
    pairs = [(0, 0)] * (rank - len(pairs)) + pairs
    return [low for low, _ in pairs] + [high for _, high in pairs]


def _pad(w: Writer, node: Node, x: Inputs, out: str) -> None:
    mode = _PAD_MODES[node.attrs["mode"]]
    w.need(19 if mode == "wrap" else 0)
    sizes = w.integers(pad_sizes(node, len(w.graph[node.inputs[0]].shape or ())), out)
    value = [w.number(node.attrs["value"], out)] if mode == "constant" else []
    w.op("Pad", [x[0], sizes, *value], out, mode=mode)


def _resize(mode: str) -> Emit:
    def emit(w: Writer, node: Node, x: Inputs, out: str) -> None:
        size, factors = node.attrs["size"], node.attrs["factors"]
        how = "asymmetric" if mode == "nearest" else "align_corners" if node.attrs["align_corners"] else "half_pixel"
        attrs = {"mode": mode, "coordinate_transformation_mode": how}
        attrs |= {"nearest_mode": "floor"} if mode == "nearest" else {}
        if size is None:
            scales = np.asarray([1.0, 1.0, *factors], dtype=np.float32)
            w.op("Resize", [x[0], "", w.constant(w.fresh(f"{out}:factors"), scales)], out, **attrs)
        else:
            # with `axes` ONNX Runtime 1.31 refuses the node where it lays channels last
            kept = w.step("Shape", x[:1], out, start=0, end=2)
            sizes = w.step("Concat", [kept, w.integers(size, out)], out, axis=0)
            w.op("Resize", [x[0], "", "", sizes], out, **attrs)

    return emit


def _pixel_shuffle(w: Writer, node: Node, x: Inputs, out: str) -> None:
    w.op("DepthToSpace", x, out, blocksize=node.attrs["factor"], mode="CRD")


def _embedding(w: Writer, node: Node, x: Inputs, out: str) -> None:
    w.op("Gather", x, out)


def _to(w: Writer, node: Node, x: Inputs, out: str) -> None:
    w.op("Cast", x, out, to=w.kind_of(node.attrs["dtype"]))


def _batch_norm(w: Writer, node: Node, x: Inputs, out: str) -> None:
    w.op("BatchNormalization", x, out, epsilon=node.attrs["eps"])


def _softmax(w: Writer, node: Node, x: Inputs, out: str) -> None:
    """With a maximum of 0 that changes nothing but keeps a softmax between quantized tensors in one piece:
    ONNX Runtime's QLinearSoftmax multiplies by floor(1 / scale), which errs where that is no integer."""
    if "scale" in node.attrs:
        x = [w.step("Mul", [x[0], w.number(node.attrs["scale"], out)], out)]
    w.op("Max", [w.step("Softmax", x, out, axis=node.attrs["axis"]), w.number(0.0, out)], out)


REAL: Final[Mapping[str, Emit]] = {
    **{f"conv{d}d": _conv for d in (1, 2, 3)},
    **{f"conv_transpose{d}d": _conv_transpose for d in (1, 2)},
    **{f"max_pool{d}d": _max_pool for d in (1, 2)},
    **{f"avg_pool{d}d": _avg_pool for d in (1, 2)},
    **{op: same(op.capitalize()) for op in ("add", "sub", "mul", "neg", "relu", "sigmoid", "tanh")},
    "linear": _linear,
    "matmul": _matmul,
    "div": _div,
    "clamp": _clamp,
    "mean": _reduce("ReduceMean", 18),
    "sum": _reduce("ReduceSum", 13),
    "concat": renamed("Concat", axis="axis"),
    "softmax": _softmax,
    "permute": renamed("Transpose", perm="axes"),
    "reshape": _reshape,
    "squeeze": _squeeze,
    "unsqueeze": _along("Unsqueeze", "axis"),
    "expand": _expand,
    "slice": _slice,
    "select": _select,
    "index": renamed("Gather", axis="axis"),
    "pad": _pad,
    "pixel_shuffle": _pixel_shuffle,
    "upsample_nearest2d": _resize("nearest"),
    "upsample_bilinear2d": _resize("linear"),
    "embedding": _embedding,
    "to": _to,
    "batch_norm": _batch_norm,
    "gelu": renamed("Gelu", 20, approximate="approximate"),
    "elu": renamed("Elu", alpha="alpha"),
    "leaky_relu": renamed("LeakyRelu", alpha="negative_slope"),
    "hardsigmoid": same("HardSigmoid", alpha=1 / 6, beta=0.5),
    "hardswish": same("HardSwish"),
    **COMPOSED,
}


#: Ops whose operands may be of different dtypes.
_OF_TWO: Final = frozenset({"add", "sub", "mul", "div"})


def emit_real(w: Writer, node: Node, inputs: Inputs, out: str) -> None:
    """A node on real values.

    Raises:
        UnsupportedOp: ONNX, or this table, has no such op.
    """
    if node.op == _opaque.NAME:
        emit_opaque(w, node, inputs, out)
    elif node.op in REAL:
        if node.op in _OF_TWO:
            inputs = [_as_real(w, s, x, out) for s, x in zip(node.inputs, inputs, strict=True)]
        REAL[node.op](w, node, inputs, out)
    else:
        raise UnsupportedOp(f"node {node.name!r}: ONNX export knows no op {node.op!r}")


def _as_real(w: Writer, source: str, x: str, out: str) -> str:
    """What may be whole numbers, or conditions, beside real numbers."""
    return x if w.dtypes[source].is_floating_point else w.step("Cast", [x], out, to=w.kind_of("float32"))


def check_real(node: Node) -> str | None:
    """Why a node cannot be said in ONNX, or None."""
    return None if node.op in REAL or node.op == _opaque.NAME else f"ONNX export knows no op {node.op!r}"
