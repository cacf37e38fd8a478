"""ATen calls without a rule of hago that ONNX can say: sizes, indices, conditions, functions of one tensor.

The arguments of such a node are JSON; `{"$": i}` is its i-th input (see `hago.ops._opaque`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from hago.errors import UnsupportedOp
from hago.export.onnx_writer import Writer
from hago.graph import Node

Inputs = Sequence[str]


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


def _expand(s: _Said) -> None:
    s.w.op("Expand", [s.x[0], s.sizes(s.args[1], 1)], s.out)


def _view(s: _Said) -> None:
    s.w.op("Reshape", [s.x[0], s.sizes(s.args[1])], s.out)


def _repeat(s: _Said) -> None:
    added = len(s.args[1]) - len(s.w.graph[s.w.graph[s.out].inputs[0]].shape or ())
    whole = s.w.step("Unsqueeze", [s.x[0], s.w.integers(range(added), s.out)], s.out) if added else s.x[0]
    s.w.op("Tile", [whole, s.sizes(s.args[1])], s.out)


def _filled(value: float | None) -> _Emit:
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
    "aten.expand.default": _expand,
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
    "aten.zeros.default": _filled(0),
    "aten.ones.default": _filled(1),
    "aten.new_zeros.default": _filled(0),
    "aten.new_ones.default": _filled(1),
    "aten.full.default": _filled(None),
    "aten.new_full.default": _filled(None),
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
