"""ATen calls without a rule of hago that ONNX can say: sizes, arithmetic on sizes, norms of vectors.

The arguments of such a node are JSON; `{"$": i}` is its i-th input (see `hago.ops._opaque`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from hago.errors import UnsupportedOp
from hago.export.onnx_writer import Writer
from hago.graph import Node

Inputs = Sequence[str]


def _is_input(value: Any) -> bool:
    return isinstance(value, dict) and "$" in value


def _scalar(w: Writer, value: Any, x: Inputs, out: str) -> str:
    """A size: an input, or a constant."""
    return x[value["$"]] if _is_input(value) else w.number(value, out, "int64")


def _size(w: Writer, args: Sequence[Any], x: Inputs, out: str) -> None:
    axis = args[1]
    part = w.step("Shape", x[:1], out, start=axis, end=None if axis == -1 else axis + 1)
    w.op("Squeeze", [part, w.integers([0], out)], out)


def _sizes(w: Writer, values: Sequence[Any], x: Inputs, out: str, keep: int) -> str:
    """A list of sizes as one tensor; -1 becomes `keep`."""
    if not any(map(_is_input, values)):
        return w.integers([keep if v == -1 else v for v in values], out)
    zero = w.integers([0], out)
    parts = [
        w.step("Unsqueeze", [x[v["$"]], zero], out) if _is_input(v) else w.integers([keep if v == -1 else v], out)
        for v in values
    ]
    return w.step("Concat", parts, out, axis=0)


def _expand(w: Writer, args: Sequence[Any], x: Inputs, out: str) -> None:
    w.op("Expand", [x[0], _sizes(w, args[1], x, out, 1)], out)


def _view(w: Writer, args: Sequence[Any], x: Inputs, out: str) -> None:
    w.op("Reshape", [x[0], _sizes(w, args[1], x, out, -1)], out)


def _vector_norm(w: Writer, args: Sequence[Any], x: Inputs, out: str) -> None:
    order, axes = args[1] if len(args) > 1 else 2.0, args[2] if len(args) > 2 else None
    keep = bool(args[3]) if len(args) > 3 else False
    if order not in (1.0, 2.0) or not axes:
        raise UnsupportedOp(f"{out!r}: a vector norm of order {order} over axes {axes} has no op in ONNX")
    w.need(18)
    w.op("ReduceL2" if order == 2.0 else "ReduceL1", [x[0], w.integers(axes, out)], out, keepdims=int(keep))


def _arithmetic(kind: str) -> Callable[[Writer, Sequence[Any], Inputs, str], None]:
    def emit(w: Writer, args: Sequence[Any], x: Inputs, out: str) -> None:
        w.op(kind, [_scalar(w, a, x, out) for a in args], out)

    return emit


def _elementwise(kind: str) -> Callable[[Writer, Sequence[Any], Inputs, str], None]:
    """A function of one tensor."""

    def emit(w: Writer, args: Sequence[Any], x: Inputs, out: str) -> None:
        w.op(kind, x[:1], out)

    return emit


def _power(w: Writer, args: Sequence[Any], x: Inputs, out: str) -> None:
    if _is_input(args[1]) or not math.isfinite(args[1]):
        raise UnsupportedOp(f"{out!r}: this power has no op in ONNX")
    w.op("Pow", [x[0], w.number(args[1], out)], out)


def _cumulative(w: Writer, args: Sequence[Any], x: Inputs, out: str) -> None:
    w.op("CumSum", [x[0], w.number(args[1], out, "int64")], out)


def _contiguous(w: Writer, args: Sequence[Any], x: Inputs, out: str) -> None:
    w.op("Identity", x[:1], out)


_TARGETS: Final[Mapping[str, Callable[[Writer, Sequence[Any], Inputs, str], None]]] = {
    "aten.sym_size.int": _size,
    "aten.expand.default": _expand,
    "aten.view.default": _view,
    "aten.reshape.default": _view,
    "aten._unsafe_view.default": _view,
    "aten.linalg_vector_norm.default": _vector_norm,
    "aten.pow.Tensor_Scalar": _power,
    "aten.cumsum.default": _cumulative,
    "aten.clone.default": _contiguous,
    "aten.alias.default": _contiguous,
    **{f"aten.{n}.default": _elementwise(n.capitalize()) for n in ("exp", "log", "sqrt", "abs", "erf", "sin", "cos")},
    "aten.softplus.default": _elementwise("Softplus"),
    "aten.mish.default": _elementwise("Mish"),
    "operator.add": _arithmetic("Add"),
    "operator.sub": _arithmetic("Sub"),
    "operator.mul": _arithmetic("Mul"),
    "operator.floordiv": _arithmetic("Div"),
}


def emit_opaque(w: Writer, node: Node, inputs: Inputs, out: str) -> None:
    """An opaque node on real values.

    Raises:
        UnsupportedOp: ONNX export does not know the call.
    """
    target, args, kwargs = node.attrs["target"], node.attrs["args"], node.attrs["kwargs"]
    plain = {k: v for k, v in kwargs.items() if v is not None and k != "memory_format"}
    if target not in _TARGETS or plain or (target == "aten.softplus.default" and args[1:] not in ([], [1, 20])):
        raise UnsupportedOp(
            f"node {node.name!r}: ONNX export does not know the call {target} with {node.attrs['args']} and {kwargs}"
        )
    w.need(18 if target == "aten.mish.default" else 0)
    _TARGETS[target](w, args, inputs, out)
