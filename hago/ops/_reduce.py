"""The rule of reductions over axes, mean and sum. On integers, both are computed as the sum."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hago.arithmetic.numerics import Order
from hago.ops._rule import Addends, Attrs, Call, IntegerForm, Operand, OpRule, Parsed, Refusal, Sample, TermsAt
from hago.ops._shared import axes_of


def _parse(call: Call) -> Parsed | None:
    axes, shape = axes_of(call), call.shape_of("self")
    if call["dtype"] is not None or any(call.is_open("self", axis) for axis in axes):
        return None  # over the batch, the count is known only at run time
    count = math.prod(shape[a] for a in axes)
    return Parsed((call["self"],), {"axes": axes, "keepdim": call["keepdim"], "count": count})


def total(attrs: Attrs, x: Tensor) -> Tensor:
    """The sum over the axes of `attrs`."""
    return x.sum(attrs["axes"], keepdim=attrs["keepdim"])


def _terms(attrs: Attrs, operands: Sequence[Tensor], order: Order) -> TermsAt:
    """The entries in row-major order, the last axis fastest; the order of products makes no difference."""
    x = operands[0]
    axes = sorted(a % x.ndim for a in attrs["axes"])
    kept = [a for a in range(x.ndim) if a not in axes]
    entries = x.permute(*kept, *axes)

    def at(index: tuple[Tensor, ...]) -> Tensor:
        place = tuple(index[a] for a in kept) if attrs["keepdim"] else index
        return entries[place].reshape(-1, attrs["count"])

    return at


def _bound(attrs: Attrs, operands: Sequence[Operand]) -> Tensor:
    return torch.mul(operands[0].magnitude.max(), attrs["count"])


def reduce_rule(
    name: str,
    aten: str,
    fn: Callable[..., Tensor],
    scale: Callable[[Attrs, Sequence[Tensor]], Tensor],
    forms: Mapping[str, IntegerForm] | None = None,
    averages: bool = False,
) -> OpRule:
    """The rule of a reduction that is a sum on integers, with the output's scale given by `scale`."""

    def compute(attrs: Attrs, x: Tensor) -> Tensor:
        return fn(x, attrs["axes"], keepdim=attrs["keepdim"])

    def case(shape: tuple[int, ...], axes: Any, keepdim: bool = False) -> Sample:
        return Sample(lambda x: fn(x, axes, keepdim=keepdim), (shape,))

    return OpRule(
        name=name,
        aten=(aten,),
        parse=_parse,
        compute=compute,
        integer=IntegerForm(slots=("follow",), scale=scale, compute=total, bound=_bound, addends=Addends(_terms)),
        forms=forms or {},
        clips_or_averages=averages,
        samples=(
            case((2, 3, 4, 5), (2, 3)),
            case((2, 3, 4, 5), (-2, -1), keepdim=True),
            case((2, 3, 4), 1),
        ),
        refuses=(Refusal({"axes": [5], "keepdim": False, "count": 1}, ((1, 3, 4),), "axes"),),
    )
