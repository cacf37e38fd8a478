"""The rules of conv1d, conv2d and conv3d, which differ in the number of spatial axes.

Transposed convolutions and pooling use `windows`, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hago.arithmetic.convolution import without_stride
from hago.arithmetic.numerics import Order
from hago.ops._rule import (
    Addends,
    Attrs,
    IntegerForm,
    MatrixProduct,
    Operand,
    OpRule,
    Refusal,
    Sample,
    TermsAt,
    Weight,
    WindowsOf,
)
from hago.ops._shared import arguments, mac_bound, split_k

_CONV: dict[int, Callable[..., Tensor]] = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
_WEIGHT = Weight(slot=1, axis=0, sums_channels=True)


def _compute(dims: int) -> Callable[..., Tensor]:
    conv = _CONV[dims]

    def compute(attrs: Attrs, x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
        x, stride = without_stride(x, w, attrs["stride"], attrs["padding"])
        return conv(x, w, b, stride, attrs["padding"], attrs["dilation"], attrs["groups"])

    return compute


def _scale(dims: int) -> Callable[[Attrs, Sequence[Tensor]], Tensor]:
    def scale(attrs: Attrs, scales: Sequence[Tensor]) -> Tensor:
        w = scales[1]
        return scales[0] * (w.reshape(1, -1, *[1] * dims) if w.numel() > 1 else w)

    return scale


def _bound(dims: int) -> Callable[[Attrs, Sequence[Operand]], Tensor]:
    def bound(attrs: Attrs, operands: Sequence[Operand]) -> Tensor:
        found = mac_bound(operands, _WEIGHT, math.prod(operands[1].shape[1:]))
        return found.reshape(-1, *[1] * dims)

    return bound


def _pads(attrs: Attrs, kernel: Sequence[int]) -> list[tuple[int, int]]:
    """The number of zeros before and after each spatial axis."""
    if attrs["padding"] == "valid":
        return [(0, 0)] * len(kernel)
    if attrs["padding"] == "same":
        around = [d * (k - 1) for d, k in zip(attrs["dilation"], kernel, strict=True)]
        return [(a // 2, a - a // 2) for a in around]
    return [(p, p) for p in attrs["padding"]]


def _to_matrices(attrs: Attrs, x: Tensor, w: Tensor, x_zero: int, w_zero: Tensor) -> tuple[Tensor, Tensor]:
    """Windows of shape (N, groups, places, K) and weights of shape (groups, K, out / groups).

    Along K stand the places of a window, and at each place its channels, filled up to an even number: chips add the
    products of two neighbouring channels of one place. Padding is 0 in centered integers, and so the zero point in
    stored ones.
    """
    kernel, groups, channels = w.shape[2:], attrs["groups"], w.shape[1]
    seen = windows(x + x_zero, groups, _pads(attrs, kernel), kernel, attrs["stride"], attrs["dilation"], x_zero)
    weights = (w + w_zero).reshape(groups, -1, channels, math.prod(kernel)).permute(0, 3, 2, 1)
    if channels % 2:  # the last channel has no partner to be added to
        seen, weights = F.pad(seen, (0, 1)), F.pad(weights, (0, 0, 0, 1))
    dims = len(kernel)
    return seen.flatten(2 + dims).flatten(2, 1 + dims), weights.flatten(1, 2)


def windows(
    x: Tensor,
    groups: int,
    pads: Sequence[tuple[int, int]],
    kernel: Sequence[int],
    stride: Sequence[int],
    dilation: Sequence[int],
    fill: int = 0,
) -> Tensor:
    """The values that each window reads, (N, groups, *places, *kernel, channels / groups); a view of a padded copy.

    Args:
        pads: the number of padded entries before and after each spatial axis.
        fill: their value.
    """
    padded = F.pad(x, [p for pair in reversed(pads) for p in pair], value=fill)
    padded = padded.reshape(len(x), groups, x.shape[1] // groups, *padded.shape[2:]).movedim(2, -1).contiguous()
    for axis, (k, step, gap) in enumerate(zip(kernel, stride, dilation, strict=True)):
        padded = padded.unfold(2 + axis, (k - 1) * gap + 1, step)[..., ::gap]
    return padded.movedim(2 + len(kernel), -1)


def in_order(terms: Tensor, order: Order) -> Tensor:
    """The terms of n entries, (n, *window, channels), as (n, K) in the order in which a chip adds them up."""
    return (terms if order == "channels_inner" else terms.movedim(-1, 1)).flatten(1)


def _terms(attrs: Attrs, operands: Sequence[Tensor], order: Order) -> TermsAt:
    x, w = operands[:2]
    kernel, groups = w.shape[2:], attrs["groups"]
    seen = windows(x, groups, _pads(attrs, kernel), kernel, attrs["stride"], attrs["dilation"])
    weights = w.movedim(1, -1).contiguous()

    def at(index: tuple[Tensor, ...]) -> Tensor:
        sample, channel, *place = index
        return in_order(seen[(sample, channel // (len(w) // groups), *place)] * weights[channel], order)

    return at


def _windows_at(attrs: Attrs, shape: Sequence[int], w: Tensor, index: tuple[Tensor, ...]) -> WindowsOf:
    sample, *places = index
    kernel, groups, count = w.shape[2:], attrs["groups"], len(index[0])
    row, inside = sample.unsqueeze(1), torch.ones(count, 1, dtype=torch.bool)
    along = zip(places, kernel, _pads(attrs, kernel), attrs["stride"], attrs["dilation"], shape[2:], strict=True)
    for place, k, (before, _), step, gap, size in along:
        entries = (place * step - before).unsqueeze(1) + torch.arange(k) * gap
        is_inside = (entries >= 0) & (entries < size)
        inside = (inside.unsqueeze(2) & is_inside.unsqueeze(1)).flatten(1)
        row = ((row * size).unsqueeze(2) + entries.clamp(0, size - 1).unsqueeze(1)).flatten(1)
    rows, padding = row.flatten(), inside.logical_not().flatten().nonzero()[:, 0]

    def of(x: Tensor) -> Tensor:
        # where the layout is channels-last, rows of channels are a view
        seen = x.movedim(1, -1).flatten(0, -2).index_select(0, rows).index_fill_(0, padding, 0)
        if groups == shape[1]:  # torch copies the transpose of a matrix much faster than that of other tensors
            return seen.t().contiguous().view(groups, count, -1)
        return seen.view(count, -1, groups, w.shape[1]).permute(2, 0, 1, 3).contiguous().flatten(2)

    return of


def _reshape_product(attrs: Attrs, product: Tensor, x: Tensor, w: Tensor) -> Tensor:
    sizes = zip(x.shape[2:], w.shape[2:], _pads(attrs, w.shape[2:]), attrs["stride"], attrs["dilation"], strict=True)
    out = [(n + before + after - d * (k - 1) - 1) // s + 1 for n, k, (before, after), s, d in sizes]
    return product.transpose(-1, -2).reshape(len(x), -1, *out)


def _macs(attrs: Attrs, shapes: Sequence[tuple[int, ...]], out: tuple[int, ...]) -> int:
    return math.prod(out) * math.prod(shapes[1][1:])


def conv_rule(dims: int) -> OpRule:
    """The rule of the `dims`-dimensional convolution."""
    name = f"conv{dims}d"
    return OpRule(
        name=name,
        aten=(f"aten.{name}.default", f"aten.{name}.padding"),
        parse=arguments(("input", "weight", "bias"), ("stride", "padding", "dilation", "groups")),
        compute=_compute(dims),
        integer=IntegerForm(
            slots=("own", "own", "bias"),
            scale=_scale(dims),
            bound=_bound(dims),
            split=split_k(1, 1),
            starts_region=True,
            weight=_WEIGHT,
            product=MatrixProduct(_to_matrices, _reshape_product),
            addends=Addends(_terms, windows_at=_windows_at),
        ),
        macs=_macs,
        samples=_samples(dims),
        refuses=(_refusal(dims),),
        aliases=(f"nn.{name}",),
    )


def _samples(dims: int) -> tuple[Sample, ...]:
    conv = _CONV[dims]
    size = (9, 8, 7)[:dims]
    kernel = (3, 2, 3)[:dims]

    def case(channels: int, out: int, bias: bool = True, **options: Any) -> Sample:
        groups = options.get("groups", 1)
        shapes: tuple[tuple[int, ...], ...] = ((2, channels, *size), (out, channels // groups, *kernel))
        shapes += ((out,),) if bias else ()
        return Sample(lambda *t: conv(*t, **options), shapes, consts=(1, 2)[: len(shapes) - 1])

    return (
        case(3, 4),
        case(3, 4, bias=False, stride=2, padding=1),
        case(4, 6, groups=2, dilation=2, padding=2),
        case(4, 4, groups=4, padding=1),
        case(4, 8, groups=4),
        case(3, 4, padding="same"),
        case(3, 4, padding="valid"),
    )


def _refusal(dims: int) -> Refusal:
    attrs = {"stride": [1] * dims, "padding": [0] * dims, "dilation": [1] * dims, "groups": 2}
    return Refusal(attrs, ((1, 3, *[8] * dims), (4, 3, *[3] * dims)), "groups")
