"""Parsers, scale rules, bounds and splits that several rules use."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hago.ops._rule import Attrs, Call, Operand, Parsed, Ref, Weight


# ---------------------------------------------------------------- parsing
def arguments(tensors: Sequence[str], attrs: Sequence[str] = (), **fixed: Any) -> Callable[[Call], Parsed | None]:
    """A `parse` that reads these tensor arguments and attributes.

    Optional tensors at the end may be absent. If one is absent before another that is given (a bias without a
    weight), the call is not read.

    Args:
        fixed: attributes with a value that no argument gives.
    """

    return functools.partial(_read, tuple(tensors), tuple(attrs), fixed)  # rules are sent to workers


def _read(tensors: Sequence[str], attrs: Sequence[str], fixed: dict[str, Any], call: Call) -> Parsed | None:
    given = [call.arguments.get(t) for t in tensors]
    inputs = tuple(g for g in given if g is not None)
    if not all(isinstance(i, Ref) for i in given[: len(inputs)]):
        return None
    found = {a: plain(call[a]) for a in attrs}
    return None if any(has_ref(v) for v in found.values()) else Parsed(inputs, found | fixed)


def plain(value: Any) -> Any:
    """Attributes as JSON writes them: tuples become lists."""
    return [plain(v) for v in value] if isinstance(value, (list, tuple)) else value


def has_ref(value: Any) -> bool:
    """Whether a (nested) argument depends on a node, e.g. a size computed at run time."""
    if isinstance(value, (list, tuple)):
        return any(has_ref(v) for v in value)
    return isinstance(value, Ref)


def binary(call: Call) -> Parsed | None:
    """Two operands, either of which may be a number; `alpha` must be 1."""
    if call.arguments.get("alpha", 1) != 1:
        return None
    sides = [call["self"], call["other"]]
    made = tuple(s if isinstance(s, Ref) else torch.tensor(float(s)) for s in sides)
    return Parsed(made) if any(isinstance(s, Ref) for s in sides) else None


def joined(call: Call) -> Parsed | None:
    """Any number of tensors, and the axis along which they are joined."""
    tensors = call["tensors"]
    if not all(isinstance(t, Ref) for t in tensors):
        return None
    return Parsed(tuple(tensors), {"axis": call["dim"]})


def axis_of(call: Call, argument: str = "dim") -> int:
    """The axis of `self` that an argument names, counted from the front."""
    return int(call[argument]) % len(call.shape_of("self"))


def axes_of(call: Call) -> list[int]:
    """The axes of `self` that `dim` (a number, a list, or None for all) names, counted from the front."""
    rank, given = len(call.shape_of("self")), call["dim"]
    named = [given] if isinstance(given, int) else given or range(rank)
    return sorted(int(a) % rank for a in named)


def unread(call: Call) -> Parsed | None:
    """The `parse` of an op that stands for no torch call."""
    return None


# ---------------------------------------------------------------- carriers
def as_index(index: Tensor) -> Tensor:
    """Indices as int64; shape inference passes meta tensors of float32."""
    return index.long() if index.is_floating_point() else index


# ---------------------------------------------------------------- scales
def product_scale(attrs: Attrs, scales: Sequence[Tensor]) -> Tensor:
    """The scale of a product: `s0 * s1`."""
    return scales[0] * scales[1]


# ---------------------------------------------------------------- bounds
def magnitude_bound(attrs: Attrs, operands: Sequence[Operand]) -> Tensor:
    """The largest |c| of the first operand, for ops that may leave the hull of their inputs."""
    return operands[0].magnitude


def sum_bound(attrs: Attrs, operands: Sequence[Operand]) -> Tensor:
    """|a + b| <= |a| + |b|."""
    return torch.stack([o.magnitude.max() for o in operands]).sum()


def product_bound(attrs: Attrs, operands: Sequence[Operand]) -> Tensor:
    """|a * b| <= |a| * |b|."""
    return operands[0].magnitude.max() * operands[1].magnitude.max()


def bias_bound(bias: Operand) -> Tensor:
    """The largest |c| of a bias, entry by entry where it is constant."""
    return bias.magnitude.max() if bias.values is None else bias.values.to(torch.float64).abs()


def mac_bound(operands: Sequence[Operand], weight: Weight, depth: int) -> Tensor:
    """Per output channel: sum over K of |w| times the largest |x|, plus |bias|  (N7).

    Args:
        operands: x, w and, where there is one, the bias.
        weight: where the output channels of w lie.
        depth: K, the number of products in a sum; used where w is not constant.

    Returns:
        float64 of shape (channels,) for a constant weight, else a scalar.
    """
    x, w = operands[0], operands[1]
    if w.values is None:
        bound = depth * x.magnitude.max() * w.magnitude.max()
    else:
        rows = _magnitudes(w.values).movedim(weight.axis, 0)
        sums = rows.reshape(rows.shape[0], -1).sum(1, dtype=torch.int64).to(torch.float64)
        bound = sums * x.magnitude.max()
    if len(operands) > 2:
        bound = bound + bias_bound(operands[2]).flatten()
    return bound


def _magnitudes(values: Tensor) -> Tensor:
    """|c| of integers, in a small type: that of a byte's least value does not fit a byte."""
    wider = {torch.int8: torch.int16, torch.int16: torch.int32}.get(values.dtype, torch.int64)
    return values.to(wider).abs_() if values.dtype != wider else values.abs()


# ---------------------------------------------------------------- sums
def split_k(x_axis: int, w_axis: int) -> Callable[[Attrs, Sequence[Tensor], int], list[tuple[Tensor, ...]]]:
    """The `split` of an op that sums over these axes of x and w; the bias goes with the first part."""

    def split(attrs: Attrs, inputs: Sequence[Tensor], parts: int) -> list[tuple[Tensor, ...]]:
        if attrs.get("groups", 1) != 1 or inputs[1].shape[w_axis] < parts:
            return [tuple(inputs)]
        chunks = list(zip(inputs[0].chunk(parts, x_axis), inputs[1].chunk(parts, w_axis), strict=True))
        return [(*chunks[0], *inputs[2:]), *chunks[1:]]

    return split
