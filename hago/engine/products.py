"""Calls of the native kernels that take two values; frozen, so that they may run in any thread.

An operand that is a constant stands in `consts`, as stored; the others come with the call, in order, and after
them what is added to the product, if anything is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from ctypes import addressof
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from hago.engine import native
from hago.engine.calls import together
from hago.engine.moves import period
from hago.engine.tail import Built
from hago.graph import Node
from hago.plan import Plan
from hago.realization import compute_integer

#: Code and zero point of a value as stored.
Place = tuple[int, int]
Pair = tuple[Tensor | None, Tensor | None]


def _operands(consts: Pair, values: Sequence[Any]) -> tuple[Tensor, Tensor, Tensor | None]:
    rest = iter(values)
    a, b = (next(rest) if const is None else const for const in consts)
    return a, b, next(rest, None)


# ---------------------------------------------------------------- entry by entry
@dataclass(frozen=True, slots=True)
class MultiplyCall:
    """A product entry by entry, operands broadcast.

    Args:
        channels: entries of the tail's arrays, along `axis`; 1 and None where nothing varies.
    """

    calls: Any
    tail: Built
    places: tuple[Place, Place]
    consts: Pair
    channels: int
    axis: int | None

    def __call__(self, values: Sequence[Any]) -> Sequence[Tensor]:
        a, b, addend = _operands(self.consts, values)
        shape, places = together(a.shape, b.shape, *([] if addend is None else [addend.shape])), self.places
        if a.shape != shape:
            a, b, places = b, a, places[::-1]
        order = _order(a.expand(shape), self.axis)
        large, small = (x.expand(shape).permute(order) for x in (a, b))
        large = large.contiguous()
        made = [torch.empty(large.shape, dtype=dtype) for dtype in self.tail.dtypes]
        if addend is not None:
            addend = addend.expand(shape).permute(order).contiguous()
        tail = self.tail.bound(made, 0, addend)
        if large.numel():
            spread, small = _spread(small)
            pair = [native.Operand(x.data_ptr(), *place) for x, place in zip((large, small), places, strict=True)]
            self.calls.hago_multiply(
                addressof(tail), *map(addressof, pair), addressof(spread), large.numel(), self.channels,
                period(self.channels), torch.get_num_threads(),
            )  # fmt: skip
        return [m.permute(_back(order)) for m in made]


@dataclass(frozen=True, slots=True)
class PairTableCall:
    """A table by the bytes of two operands, broadcast.

    Args:
        entries: (65536,) as stored; that of a and b at 256 * a + b, both read as uint8.
    """

    calls: Any
    entries: Tensor
    consts: Pair

    def __call__(self, values: Sequence[Any]) -> Sequence[Tensor]:
        a, b, _ = _operands(self.consts, values)
        shape = together(a.shape, b.shape)
        order = _order((a if a.shape == shape else b).expand(shape), None)
        a, b = (x.expand(shape).permute(order).contiguous() for x in (a, b))
        made = torch.empty(a.shape, dtype=self.entries.dtype)
        pointers = (x.data_ptr() for x in (a, b, self.entries, made))
        self.calls.hago_pair_table(*pointers, made.numel(), torch.get_num_threads())
        return (made.permute(_back(order)),)


def entries_of_pairs(plan: Plan, node: Node) -> Tensor:
    """What a node makes of every pair of bytes, in the order of `PairTableCall`, by the reference arithmetic."""
    made, byte = plan.nodes[node.name], torch.arange(256, dtype=torch.uint8)
    held = [q.dtype.torch for q in made.operands if q is not None]
    values = [x.view(dtype) for x, dtype in zip((byte.repeat_interleave(256), byte.repeat(256)), held, strict=True)]
    told = replace(made, simqs=(None, None), consts={})
    return compute_integer(plan, node, told, values, lambda _, slot: values[slot])


def _order(x: Tensor, axis: int | None) -> list[int]:
    """The axes in the order of memory: `axis` innermost where there is one, else as they lie."""
    if axis is None and x.ndim == 4 and not x.is_contiguous() and x.is_contiguous(memory_format=torch.channels_last):
        axis = 1
    order = list(range(x.ndim))
    return order if axis is None else [*order[:axis], *order[axis + 1 :], axis]


def _back(order: Sequence[int]) -> list[int]:
    return sorted(range(len(order)), key=order.__getitem__)


def _spread(x: Tensor) -> tuple[native.Spread, Tensor]:
    """How an expanded operand lies against one that is whole, and the entries that it has."""
    sizes = [size for size in x.shape if size > 1]
    varies = [stride > 0 for size, stride in zip(x.shape, x.stride(), strict=True) if size > 1]
    first = varies.index(False) if False in varies else 0
    last = len(varies) - varies[::-1].index(False) if False in varies else 0
    if any(varies[first:last]) or first == last:
        return native.Spread(1, x.numel()), x.contiguous()
    kept = x[tuple(0 if stride == 0 else slice(None) for stride in x.stride())]
    return native.Spread(math.prod(sizes[first:last]), math.prod(sizes[last:])), kept.contiguous()


# ---------------------------------------------------------------- matrices
@dataclass(frozen=True, slots=True)
class MatmulCall:
    """A product of matrices (..., m, k) and (..., k, n); the latter may be a constant.

    Args:
        offset: int32 (n,), what sums start from; None for nothing.
        turned: whether the second operand comes as (..., n, k), as weights of linear layers do.
    """

    calls: Any
    tail: Built
    places: tuple[Place, Place]
    consts: Pair
    offset: Tensor | None
    turned: bool = False

    def __call__(self, values: Sequence[Any]) -> Sequence[Tensor]:
        a, b, addend = _operands(self.consts, values)
        b = b.mT if self.turned else b
        product = (*together(a.shape[:-2], b.shape[:-2]), a.shape[-2], b.shape[-1])
        shape = product if addend is None else together(product, addend.shape)
        *batch, rows, columns = shape
        made = [torch.empty(shape, dtype=dtype) for dtype in self.tail.dtypes]
        a, b = a.expand(*a.shape[:-2], rows, a.shape[-1]), b.expand(*b.shape[:-1], columns)
        if b.ndim == 2:  # every row stands by itself
            a = a.expand(*batch, *a.shape[-2:]).reshape(1, -1, a.shape[-1])
            batch, rows = [1], a.shape[1]
        a, b = _two_batches(a, batch), _two_batches(b, batch)
        a = a if a.stride(-1) == 1 else a.contiguous()
        b = b if 1 in b.stride()[-2:] else b.contiguous()
        (a_type, a_zero), (b_type, b_zero) = self.places
        matrices = native.Matrices(
            *a.shape[:2], rows, columns, a.shape[-1], *a.stride()[:3], *b.stride(), a_type, a_zero, b_type, b_zero,
            0 if self.offset is None else self.offset.data_ptr(),
        )  # fmt: skip
        # a tail holds no tensors: this one must stay
        addend = None if addend is None else addend.expand(shape).contiguous()
        tail = self.tail.bound(made, columns, addend)
        if made[0].numel():
            self.calls.hago_matmul(
                addressof(matrices), addressof(tail), a.data_ptr(), b.data_ptr(), self.tail.period,
                torch.get_num_threads(),
            )  # fmt: skip
        return made


def _two_batches(x: Tensor, batch: Sequence[int]) -> Tensor:
    """The matrices with two axes of batches before them."""
    x = x.expand(*batch, *x.shape[-2:])
    if len(batch) > 2:
        return x.reshape(-1, batch[-1], *x.shape[-2:])
    return x[(None,) * (2 - len(batch))]
