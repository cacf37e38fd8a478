"""Calls that are short for several: what they stand for, in calls that rules read.

Kept whole they would be opaque, and so float on every chip, where other engines run them in integers: ONNX has no
`baddbmm` and no `roll`, so PyTorch's exporter writes a product and a sum, and two slices and a concatenation, and
TensorFlow Lite's converter makes matrix products of `einsum`.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import Node as FxNode
from torch.fx.node import map_arg

Decompositions = Mapping[Any, Callable[..., Any]]


def any_short(program: ExportedProgram) -> bool:
    """Whether a call of a program is short for several as it stands there."""
    return any(_is_short(fx) for fx in program.graph.nodes)


def decompositions(used: set[str]) -> Decompositions:
    """What `run_decompositions` is to be given.

    Args:
        used: the targets of calls that were decomposed are added to it. Some, such as `slice_scatter`, stand for
            assignments, and appear only when these are traced.
    """
    return {target: functools.partial(_decomposed, used, str(target), c) for target, c in _COMPOSITES.items()}


def _decomposed(used: set[str], target: str, composite: _Composite, *args: Any, **kwargs: Any) -> Any:
    """A decomposition as torch calls it."""
    if not composite.applies(*args, **kwargs):
        return NotImplemented
    used.add(target)
    return composite.stands_for(*args, **kwargs)


def _is_short(fx: FxNode) -> bool:
    composite = _COMPOSITES.get(fx.target)
    if composite is None:
        return False
    args: Any = map_arg(fx.args, lambda n: n.meta["val"])
    kwargs: Any = map_arg(fx.kwargs, lambda n: n.meta["val"])
    return composite.applies(*args, **kwargs)


@dataclass(frozen=True, slots=True)
class _Composite:
    """A call that may be short for several.

    Args:
        applies: whether a call with these arguments is; else it is read as it is.
        stands_for: what it computes.
    """

    applies: Callable[..., bool]
    stands_for: Callable[..., Tensor]


def _scaled(x: Tensor, factor: float) -> Tensor:
    return x if factor == 1 else x * factor


def _sum_of(product: Tensor, x: Tensor, beta: float, alpha: float) -> Tensor:
    """torch does not read x where beta is 0."""
    product = _scaled(product, alpha)
    return product if beta == 0 else _scaled(x, beta) + product


def _no_bias(x: Tensor, first: Tensor, second: Tensor, *, beta: float = 1, alpha: float = 1) -> bool:
    """Whether the op that adds a bias to every column cannot say it."""
    return x.ndim != 1 or beta != 1 or alpha != 1


def _addmm(x: Tensor, first: Tensor, second: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    return _sum_of(torch.mm(first, second), x, beta, alpha)


def _baddbmm(x: Tensor, first: Tensor, second: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    return _sum_of(torch.bmm(first, second), x, beta, alpha)


def _moves(x: Tensor, shifts: Any, dims: Any = ()) -> bool:
    """Whether something is moved, along axes whose size is known."""
    sizes = [x.shape[axis] for axis in dims]
    return all(isinstance(n, int) for n in sizes) and any(n and s % n for n, s in zip(sizes, shifts, strict=False))


def _roll(x: Tensor, shifts: Any, dims: Any = ()) -> Tensor:
    """What is moved past the end of an axis comes first."""
    for shift, axis in zip(shifts, dims, strict=True):
        if start := -shift % x.shape[axis]:
            x = torch.cat([x.narrow(axis, start, x.shape[axis] - start), x.narrow(axis, 0, start)], axis)
    return x


def _scales(x: Any, other: Any, *, alpha: float = 1) -> bool:
    return alpha != 1


def _addcmul(x: Tensor, first: Tensor, second: Tensor, *, value: float = 1) -> Tensor:
    return x + _scaled(first * second, value)


def _is_part(x: Tensor, part: Tensor, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> bool:
    """Whether neighbours are written: any along an axis whose size is known, else all."""
    if step != 1 or not all(v is None or isinstance(v, int) for v in (start, end)):
        return False
    return isinstance(x.shape[dim], int) or _covers(start, end)


def _covers(start: int | None, end: int | None) -> bool:
    """Whether a slice is all of an axis, however long that is."""
    return not start and (end is None or end == sys.maxsize)


def _slice_scatter(
    x: Tensor, part: Tensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Tensor:
    """What stands before the part, the part, and what stands behind it."""
    if _covers(start, end):
        return part.clone()
    size, written = x.shape[dim], part.shape[dim]
    first = slice(start, end).indices(size)[0]
    before, behind = x.narrow(dim, 0, first), x.narrow(dim, first + written, size - first - written)
    return torch.cat([side for side in (before, part, behind) if side.shape[dim]], dim)


def _is_whole(x: Tensor, source: Tensor, non_blocking: bool = False) -> bool:
    """Whether nothing is converted."""
    return x.dtype == source.dtype


def _copy(x: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """What is written over all of x, of which nothing is left."""
    return source.clone() if source.shape == x.shape else source.expand(x.shape)


# ---------------------------------------------------------------- Einstein sums
def _subscripts(equation: str) -> tuple[list[str], str]:
    """The axes of the operands, and of the result, as letters; torch's rule where the equation names no result."""
    operands, arrow, result = equation.replace(" ", "").partition("->")
    joined = operands.replace(",", "")
    if not arrow:
        result = "".join(sorted(letter for letter in set(joined) if joined.count(letter) == 1))
    return operands.split(","), result


def _is_plain(equation: str, tensors: Sequence[Tensor], *, path: Any = None) -> bool:
    """Whether no operand is read along a diagonal, and no axes go without letters."""
    return "." not in equation and all(len({*axes}) == len(axes) for axes in _subscripts(equation)[0])


def _einsum(equation: str, tensors: Sequence[Tensor], *, path: Any = None) -> Tensor:
    """One product after the other, from left to right."""
    subscripts, result = _subscripts(equation)
    axes, value = subscripts[0], tensors[0]
    for number in range(1, len(tensors)):
        later = {*result, *"".join(subscripts[number + 1 :])}
        value, axes = _contracted(value, axes, tensors[number], subscripts[number], later)
    return _arranged(*_summed(value, axes, {*result}), result)


def _contracted(a: Tensor, of_a: str, b: Tensor, of_b: str, kept: Collection[str]) -> tuple[Tensor, str]:
    """A product of two operands, summed over the axes that both have and that are not kept, and its axes."""
    a, of_a = _summed(a, of_a, {*kept, *of_b})
    b, of_b = _summed(b, of_b, {*kept, *of_a})
    over = "".join(x for x in of_a if x in of_b and x not in kept)
    batch = "".join(x for x in of_a if x in of_b and x in kept)
    rows, columns = ("".join(x for x in own if x not in batch + over) for own in (of_a, of_b))
    if not over:
        axes = batch + rows + columns
        a, b = _arranged(a, of_a, batch + rows), _arranged(b, of_b, batch + columns)
        for _ in columns:
            a = a.unsqueeze(-1)
        for place in range(len(rows)):
            b = b.unsqueeze(len(batch) + place)
        return a * b, axes
    if not batch and len(columns) > len(rows):  # a weight stands on the right, where it has a scale for every column
        a, of_a, rows, b, of_b, columns = b, of_b, columns, a, of_a, rows
    a, b = _arranged(a, of_a, batch + rows + over), _arranged(b, of_b, batch + over + columns)
    of_rows, of_columns = a.shape[len(batch) : len(batch) + len(rows)], b.shape[len(batch) + len(over) :]
    shared = a.shape[: len(batch)]
    b = _joined(_joined(b, len(batch) + len(over), len(columns)), len(batch), len(over))
    a = _joined(a, len(batch) + len(rows), len(over))
    if batch or not rows:
        a = _joined(a, len(batch), len(rows))
        product = torch.matmul(a, b)
        if len(rows) != 1 or len(columns) != 1:
            product = product.reshape((*shared, *of_rows, *of_columns))
        return product, batch + rows + columns
    product = torch.matmul(a, b)
    return (product if len(columns) == 1 else product.reshape((*of_rows, *of_columns))), rows + columns


def _summed(value: Tensor, axes: str, kept: Collection[str]) -> tuple[Tensor, str]:
    """The value summed over the axes that are not kept, and those that are."""
    over = [i for i, x in enumerate(axes) if x not in kept]
    return (value.sum(over) if over else value), "".join(x for x in axes if x in kept)


def _arranged(value: Tensor, axes: str, order: str) -> Tensor:
    """The value with its axes in this order."""
    return value if axes == order else value.permute([axes.index(x) for x in order])


def _joined(value: Tensor, first: int, count: int) -> Tensor:
    """The value with so many axes, from the first on, as one; a new one of size 1 where there are none."""
    if count == 1:
        return value
    shape = value.shape
    return value.reshape((*shape[:first], math.prod(shape[first : first + count]), *shape[first + count :]))


_aten: Final = torch.ops.aten
_COMPOSITES: Final[Mapping[Any, _Composite]] = {
    _aten.addmm.default: _Composite(_no_bias, _addmm),
    _aten.baddbmm.default: _Composite(lambda *_, **__: True, _baddbmm),
    _aten.add.Tensor: _Composite(_scales, lambda x, other, *, alpha=1: x + other * alpha),
    _aten.sub.Tensor: _Composite(_scales, lambda x, other, *, alpha=1: x - other * alpha),
    _aten.addcmul.default: _Composite(lambda *_, **__: True, _addcmul),
    _aten.copy.default: _Composite(_is_whole, _copy),
    _aten.einsum.default: _Composite(_is_plain, _einsum),
    _aten.roll.default: _Composite(_moves, _roll),
    _aten.slice_scatter.default: _Composite(_is_part, _slice_scatter),
}
