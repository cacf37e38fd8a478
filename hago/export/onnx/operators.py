"""Ops that ONNX says in several nodes: pooling to a size, norms over groups, attention, gated activations."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch

from hago.errors import UnsupportedOp
from hago.export.onnx.writer import Writer
from hago.graph.graph import Node
from hago.ops import _opaque

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


# ---------------------------------------------------------------- onnx opaque
# ATen calls without a rule of hago that ONNX can say: sizes, indices, conditions, functions of one tensor.
# The arguments of such a node are JSON; `{"$": i}` is its i-th input (see `hago.ops._opaque`).


@dataclass(frozen=True, slots=True)
class _Said:
    """A call to be written.

    Args:
        x: names of the inputs.
        dtypes: of the inputs.
        made: dtype of the result.
    """

    w: Writer
    args: Sequence[Any]
    x: Inputs
    dtypes: Sequence[torch.dtype]
    made: torch.dtype
    out: str

    def argument(self, slot: int, default: Any) -> Any:
        return self.args[slot] if len(self.args) > slot else default

    def operand(self, value: Any, dtype: torch.dtype) -> str:
        """An input or a number, as this dtype."""
        if not _is_input(value):
            return self.w.number(value, self.out, str(dtype).removeprefix("torch."))
        name, found = self.x[value["$"]], self.dtypes[value["$"]]
        return name if found == dtype else self.cast(name, dtype)

    def cast(self, name: str, dtype: torch.dtype) -> str:
        return self.w.step("Cast", [name], self.out, to=self.w.kind_of(dtype))

    def size(self, value: Any) -> str:
        return self.x[value["$"]] if _is_input(value) else self.w.number(value, self.out, "int64")

    def sizes(self, values: Sequence[Any], keep: int = -1) -> str:
        """A list of sizes as one tensor; -1 becomes `keep`."""
        w, out = self.w, self.out
        if not any(map(_is_input, values)):
            return w.integers([keep if v == -1 else v for v in values], out)
        zero = w.integers([0], out)
        parts = [
            w.step("Unsqueeze", [self.x[v["$"]], zero], out)
            if _is_input(v)
            else w.integers([keep if v == -1 else v], out)
            for v in values
        ]
        return w.step("Concat", parts, out, axis=0)

    def refuse(self, what: str) -> UnsupportedOp:
        return UnsupportedOp(f"{self.out!r}: {what} has no op in ONNX")


_Emit = Callable[[_Said], None]


def _is_input(value: Any) -> bool:
    return isinstance(value, dict) and "$" in value


# ---------------------------------------------------------------- sizes
def _size(s: _Said) -> None:
    axis = s.args[1]
    part = s.w.step("Shape", s.x[:1], s.out, start=axis, end=None if axis == -1 else axis + 1)
    s.w.op("Squeeze", [part, s.w.integers([0], s.out)], s.out)


def _of_sizes(kind: str) -> _Emit:
    def emit(s: _Said) -> None:
        s.w.op(kind, [s.size(a) for a in s.args], s.out)

    return emit


def _expand_call(s: _Said) -> None:
    s.w.op("Expand", [s.x[0], s.sizes(s.args[1], 1)], s.out)


def _view(s: _Said) -> None:
    s.w.op("Reshape", [s.x[0], s.sizes(s.args[1])], s.out)


def _repeat(s: _Said) -> None:
    added = len(s.args[1]) - len(s.w.graph[s.w.graph[s.out].inputs[0]].shape or ())
    whole = s.w.step("Unsqueeze", [s.x[0], s.w.integers(range(added), s.out)], s.out) if added else s.x[0]
    s.w.op("Tile", [whole, s.sizes(s.args[1])], s.out)


def _filled_call(value: float | None) -> _Emit:
    """A tensor of one number; the call's own where None."""

    def emit(s: _Said) -> None:
        sizes = next(a for a in s.args if isinstance(a, list))
        number = s.operand(s.args[-1] if value is None else value, s.made)
        s.w.op("Expand", [number, s.sizes(sizes)], s.out)

    return emit


def _range(s: _Said) -> None:
    bounds = [0, *s.args] if len(s.args) == 1 else list(s.args)
    bounds += [1] * (3 - len(bounds))
    s.w.op("Range", [s.operand(b, s.made) for b in bounds], s.out)


# ---------------------------------------------------------------- arithmetic
def _arithmetic(kind: str) -> _Emit:
    def emit(s: _Said) -> None:
        if s.made == torch.bool:
            raise s.refuse("arithmetic on conditions")
        s.w.op(kind, [s.operand(a, s.made) for a in s.args[:2]], s.out)

    return emit


def _compare(kind: str, turned: bool = False) -> _Emit:
    def emit(s: _Said) -> None:
        common = s.dtypes[0]
        for value in s.args[:2]:
            other = s.dtypes[value["$"]] if _is_input(value) else type(value)
            common = torch.float32 if other is float and not common.is_floating_point else common
            common = torch.int64 if other is int and common == torch.bool else common
            common = torch.promote_types(common, other) if isinstance(other, torch.dtype) else common
        common = torch.int64 if common == torch.bool else common
        found = [s.operand(a, common) for a in s.args[:2]]
        if turned:
            s.w.op("Not", [s.w.step(kind, found, s.out)], s.out)
        else:
            s.w.op(kind, found, s.out)

    return emit


def _condition(kind: str) -> _Emit:
    def emit(s: _Said) -> None:
        if any(d != torch.bool for d in s.dtypes):
            raise s.refuse("this arithmetic on bits")
        s.w.op(kind, list(s.x), s.out)

    return emit


def _function(*kinds: str) -> _Emit:
    """A function of one tensor, or one after the other."""

    def emit(s: _Said) -> None:
        value = s.x[0]
        for kind in kinds[:-1]:
            value = s.w.step(kind, [value], s.out)
        s.w.op(kinds[-1], [value], s.out)

    return emit


def _as_type(s: _Said) -> None:
    s.w.op("Cast", s.x[:1], s.out, to=s.w.kind_of(s.made))


def _power(s: _Said) -> None:
    if _is_input(s.args[1]) or not math.isfinite(s.args[1]):
        raise s.refuse("this power")
    s.w.op("Pow", [s.x[0], s.w.number(s.args[1], s.out)], s.out)


def _add_product(s: _Said) -> None:
    """`x + a * b`."""
    s.w.op("Add", [s.x[0], s.w.step("Mul", [s.x[1], s.x[2]], s.out)], s.out)


def _softplus(s: _Said) -> None:
    if list(s.args[1:]) not in ([], [1, 20]):
        raise s.refuse("this softplus")
    s.w.op("Softplus", s.x[:1], s.out)


def _mish(s: _Said) -> None:
    s.w.need(18)
    s.w.op("Mish", s.x[:1], s.out)


# ---------------------------------------------------------------- along axes
def _vector_norm(s: _Said) -> None:
    order, axes, keep = s.argument(1, 2.0), s.argument(2, None), bool(s.argument(3, False))
    if order not in (1.0, 2.0) or not axes:
        raise s.refuse(f"a vector norm of order {order} over axes {axes}")
    s.w.need(18)
    kind = "ReduceL2" if order == 2.0 else "ReduceL1"
    s.w.op(kind, [s.x[0], s.w.integers(axes, s.out)], s.out, keepdims=int(keep))


def _cumulative(s: _Said) -> None:
    s.w.op("CumSum", [s.operand(s.args[0], s.made), s.w.number(s.args[1], s.out, "int64")], s.out)


def _difference(s: _Said) -> None:
    """Of neighbours along an axis, with what stands before the first."""
    axis, before = s.argument(2, -1), s.argument(3, None)
    if s.argument(1, 1) != 1 or s.argument(4, None) is not None or s.made == torch.bool:
        raise s.refuse("this difference")
    w, at = s.w, s.w.integers([axis], s.out)
    x = s.operand(s.args[0], s.made)
    x = x if before is None else w.step("Concat", [s.operand(before, s.made), x], s.out, axis=axis)
    last = w.integers([2**63 - 1], s.out)
    later = w.step("Slice", [x, w.integers([1], s.out), last, at], s.out)
    earlier = w.step("Slice", [x, w.integers([0], s.out), w.integers([-1], s.out), at], s.out)
    w.op("Sub", [later, earlier], s.out)


def _roll(s: _Said) -> None:
    """The end of every axis goes before its start."""
    w, value, axes = s.w, s.x[0], s.argument(2, [])
    if len(axes) != len(s.args[1]) or any(map(_is_input, s.args[1])):
        raise s.refuse("a roll of the flattened tensor")
    for place, (shift, axis) in enumerate(zip(s.args[1], axes, strict=True)):
        cut, at = w.integers([-shift], s.out), w.integers([axis], s.out)
        end = w.step("Slice", [value, cut, w.integers([2**63 - 1], s.out), at], s.out)
        start = w.step("Slice", [value, w.integers([0], s.out), cut, at], s.out)
        if not shift:
            end, start = value, w.step("Slice", [value, cut, cut, at], s.out)
        name = s.out if place == len(axes) - 1 else w.fresh(f"{s.out}:roll")
        value = w.op("Concat", [end, start], name, axis=axis)


def _gather(s: _Said) -> None:
    s.w.op("GatherElements", [s.x[0], s.operand(s.args[2], torch.int64)], s.out, axis=s.args[1])


def _index(s: _Said) -> None:
    """Entries by one index for each of the first axes, broadcast against each other."""
    w, indices = s.w, s.args[1]
    if not all(map(_is_input, indices)) or any(s.dtypes[i["$"]] == torch.bool for i in indices):
        raise s.refuse("this indexing")
    names = [s.operand(i, torch.int64) for i in indices]
    total = names[0]
    for other in names[1:]:
        total = w.step("Add", [total, other], s.out)
    shape, last = w.step("Shape", [total], s.out), w.integers([-1], s.out)
    spread = [w.step("Unsqueeze", [w.step("Expand", [n, shape], s.out), last], s.out) for n in names]
    w.op("GatherND", [s.x[0], w.step("Concat", spread, s.out, axis=-1)], s.out)


def _log_softmax(s: _Said) -> None:
    if s.made != s.dtypes[0]:
        raise s.refuse("a softmax in another dtype")
    s.w.op("LogSoftmax", s.x[:1], s.out, axis=s.args[1])


def _where(s: _Said) -> None:
    condition = s.operand(s.args[0], torch.bool)
    s.w.op("Where", [condition, *(s.operand(a, s.made) for a in s.args[1:3])], s.out)


def _masked_fill(s: _Said) -> None:
    condition = s.operand(s.args[1], torch.bool)
    s.w.op("Where", [condition, s.operand(s.args[2], s.made), s.x[0]], s.out)


_SPELLED: Final = {"eq": "Equal", "lt": "Less", "le": "LessOrEqual", "gt": "Greater", "ge": "GreaterOrEqual"}
_FUNCTIONS: Final = ("exp", "log", "sqrt", "abs", "erf", "sin", "cos", "floor", "ceil", "round", "sign", "reciprocal")
_TARGETS: Final[Mapping[str, _Emit]] = {
    "aten.sym_size.int": _size,
    "aten.expand.default": _expand_call,
    "aten.view.default": _view,
    "aten.reshape.default": _view,
    "aten._unsafe_view.default": _view,
    "aten.repeat.default": _repeat,
    "aten.linalg_vector_norm.default": _vector_norm,
    "aten.pow.Tensor_Scalar": _power,
    "aten.cumsum.default": _cumulative,
    "aten.clone.default": _function("Identity"),
    "aten.alias.default": _function("Identity"),
    **{f"aten.{n}.default": _function(n.capitalize()) for n in _FUNCTIONS},
    "aten.rsqrt.default": _function("Sqrt", "Reciprocal"),
    "aten.softplus.default": _softplus,
    "aten.mish.default": _mish,
    "aten.log_softmax.int": _log_softmax,
    "aten.addcmul.default": _add_product,
    "aten.maximum.default": _arithmetic("Max"),
    "aten.minimum.default": _arithmetic("Min"),
    **{f"aten.{n}.{o}": _arithmetic(n.capitalize()) for n in ("add", "sub", "mul") for o in ("Tensor", "Scalar")},
    **{f"aten.{n}.{o}": _compare(kind) for n, kind in _SPELLED.items() for o in ("Tensor", "Scalar")},
    **{f"aten.ne.{o}": _compare("Equal", turned=True) for o in ("Tensor", "Scalar")},
    **dict.fromkeys(("aten.__and__.Tensor", "aten.bitwise_and.Tensor", "aten.logical_and.default"), _condition("And")),
    **dict.fromkeys(("aten.__or__.Tensor", "aten.bitwise_or.Tensor", "aten.logical_or.default"), _condition("Or")),
    **dict.fromkeys(("aten.bitwise_not.default", "aten.logical_not.default"), _condition("Not")),
    **{f"aten.where.{n}": _where for n in ("self", "Scalar", "ScalarSelf", "ScalarOther")},
    "aten.masked_fill.Scalar": _masked_fill,
    "aten.gather.default": _gather,
    "aten.index.Tensor": _index,
    "aten.roll.default": _roll,
    "aten.diff.default": _difference,
    "aten.type_as.default": _as_type,
    "aten.arange.default": _range,
    "aten.arange.start": _range,
    "aten.arange.start_step": _range,
    "aten.zeros.default": _filled_call(0),
    "aten.ones.default": _filled_call(1),
    "aten.new_zeros.default": _filled_call(0),
    "aten.new_ones.default": _filled_call(1),
    "aten.full.default": _filled_call(None),
    "aten.new_full.default": _filled_call(None),
    "operator.add": _of_sizes("Add"),
    "operator.sub": _of_sizes("Sub"),
    "operator.mul": _of_sizes("Mul"),
    "operator.floordiv": _of_sizes("Div"),
}
#: Arguments that say where and how a tensor lies in memory, not what is in it.
_LAYOUT: Final = frozenset({"memory_format", "device", "pin_memory", "layout"})


def emit_opaque(w: Writer, node: Node, inputs: Inputs, out: str) -> None:
    """An opaque node on real values, indices or conditions.

    Raises:
        UnsupportedOp: ONNX export does not know the call.
    """
    target, args, kwargs = node.attrs["target"], node.attrs["args"], node.attrs["kwargs"]
    plain = {k for k, v in kwargs.items() if v is not None} - _LAYOUT - {"dtype"}
    if target not in _TARGETS or plain:
        raise UnsupportedOp(
            f"node {node.name!r}: ONNX export does not know the call {target} with {node.attrs['args']} and {kwargs}"
        )
    said = _Said(w, args, inputs, [w.dtypes[n] for n in node.inputs], w.dtypes[node.name], out)
    _TARGETS[target](said)


# ---------------------------------------------------------------- onnx real
# How ONNX says each op on real values: one small function per op, in tables by name.
# A function takes the Writer, the node, the names of its real inputs and the name that its result must have. What
# needs more than one line of ONNX stands in `onnx_composed`; what ATen calls without a rule of hago mean, in
# `onnx_opaque`.

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
    divisor = w.number(node.attrs["divisor"], out) if len(x) == 1 else x[1]
    if "plus" in node.attrs:
        divisor = w.step("Add", [divisor, w.number(node.attrs["plus"], out)], out)
    w.op("Div", [x[0], divisor], out)


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
