"""The rules of conv_transpose1d and conv_transpose2d, which differ in the number of spatial axes.

Their weight has the shape (in, out / groups, *kernel). A weight that is quantized per channel has a scale for each
entry of axis 1. With groups, channel i of every group has the same scale.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hago.arithmetic.numerics import Order
from hago.ops._conv import in_order, windows
from hago.ops._rule import Addends, Attrs, IntegerForm, Operand, OpRule, Refusal, Sample, TermsAt, Weight
from hago.ops._shared import arguments, bias_bound, split_k

_CONV: dict[int, Callable[..., Tensor]] = {1: F.conv_transpose1d, 2: F.conv_transpose2d}
#: In the order of torch's arguments.
_ATTRS = ("stride", "padding", "output_padding", "groups", "dilation")


def _compute(dims: int) -> Callable[..., Tensor]:
    conv = _CONV[dims]

    def compute(attrs: Attrs, x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
        return conv(x, w, b, *(attrs[a] for a in _ATTRS))

    return compute


def _scale(dims: int) -> Callable[[Attrs, Sequence[Tensor]], Tensor]:
    def scale(attrs: Attrs, scales: Sequence[Tensor]) -> Tensor:
        w = scales[1]
        per_channel = w.flatten().repeat(attrs["groups"]).reshape(1, -1, *[1] * dims)
        return scales[0] * (per_channel if w.numel() > 1 else w)

    return scale


def _bound(dims: int) -> Callable[[Attrs, Sequence[Operand]], Tensor]:
    def bound(attrs: Attrs, operands: Sequence[Operand]) -> Tensor:
        """Per output channel: the largest output of the op itself on |w| and the largest |x|, since a stride gives each
        output only some of the taps. An input as large as the kernel's reach shows them all."""
        x, w = operands[0], operands[1]
        ones = torch.ones(w.shape, dtype=torch.float64)
        weight = ones * w.magnitude.max() if w.values is None else w.values.to(torch.float64).abs()
        dilation = torch.as_tensor(attrs["dilation"]).expand(dims).tolist()
        reach = [(k - 1) * d + 1 for k, d in zip(w.shape[2:], dilation, strict=True)]
        size = [min(n, r) for n, r in zip(x.shape[2:], reach, strict=True)]
        full = torch.ones(1, x.shape[1], *size, dtype=torch.float64) * x.magnitude.max()
        found = _CONV[dims](full, weight, None, attrs["stride"], 0, 0, attrs["groups"], dilation)
        largest = found.flatten(2).amax((0, 2))
        if len(operands) > 2:
            largest = largest + bias_bound(operands[2])
        return largest.reshape(-1, *[1] * dims)

    return bound


def _terms(dims: int) -> Callable[[Attrs, Sequence[Tensor], Order], TermsAt]:
    def terms(attrs: Attrs, operands: Sequence[Tensor], order: Order) -> TermsAt:
        """As a convolution with a flipped kernel over an image with stride - 1 zeros between its entries. The positions
        of a window, by which `order` adds products, are those of the input, row by row."""
        x, w = operands[:2]
        stride, padding, output_padding, dilation = (
            torch.as_tensor(attrs[a]).expand(dims).tolist() for a in ("stride", "padding", "output_padding", "dilation")
        )
        spread = x.new_zeros(*x.shape[:2], *((n - 1) * s + 1 for n, s in zip(x.shape[2:], stride, strict=True)))
        spread[(slice(None), slice(None), *(slice(None, None, s) for s in stride))] = x
        kernel, groups, axes = w.shape[2:], attrs["groups"], tuple(range(3, 3 + dims))
        around = [d * (k - 1) - p for d, k, p in zip(dilation, kernel, padding, strict=True)]
        pads = [(a, a + b) for a, b in zip(around, output_padding, strict=True)]
        seen = windows(spread, groups, pads, kernel, [1] * dims, dilation)
        # (groups, out / groups, *kernel, in / groups)
        weights = w.reshape(groups, -1, *w.shape[1:]).transpose(1, 2).flip(axes).movedim(2, -1).contiguous()

        def at(index: tuple[Tensor, ...]) -> Tensor:
            sample, channel, *place = index
            group, within = channel // w.shape[1], channel % w.shape[1]
            return in_order(seen[(sample, group, *place)] * weights[group, within], order)

        return at

    return terms


def _macs(attrs: Attrs, shapes: Sequence[tuple[int, ...]], out: tuple[int, ...]) -> int:
    return math.prod(shapes[0]) * math.prod(shapes[1][1:])


def conv_transpose_rule(dims: int) -> OpRule:
    """The rule of the `dims`-dimensional transposed convolution."""
    name = f"conv_transpose{dims}d"
    return OpRule(
        name=name,
        aten=("aten.conv_transpose1d.default" if dims == 1 else f"aten.{name}.input",),
        parse=arguments(("input", "weight", "bias"), _ATTRS),
        compute=_compute(dims),
        integer=IntegerForm(
            slots=("own", "own", "bias"),
            scale=_scale(dims),
            bound=_bound(dims),
            split=split_k(x_axis=1, w_axis=0),
            starts_region=True,
            weight=Weight(slot=1, axis=1),
            addends=Addends(_terms(dims)),
        ),
        macs=_macs,
        samples=_samples(dims),
        refuses=(_refusal(dims),),
        aliases=(f"nn.{name}", f"nn.conv{dims}d_transpose"),
    )


def _samples(dims: int) -> tuple[Sample, ...]:
    conv = _CONV[dims]
    size, kernel = (6, 5)[:dims], (3, 2)[:dims]

    def case(channels: int, out: int, bias: bool = True, **options: Any) -> Sample:
        groups = options.get("groups", 1)
        shapes: tuple[tuple[int, ...], ...] = ((2, channels, *size), (channels, out // groups, *kernel))
        shapes += ((out,),) if bias else ()
        return Sample(lambda *t: conv(*t, **options), shapes, consts=(1, 2)[: len(shapes) - 1])

    return (
        case(3, 4),
        case(3, 4, bias=False, stride=2, padding=1, output_padding=1),
        case(4, 6, groups=2, stride=2),
        case(4, 4, groups=4, dilation=2, padding=1),
        case(3, 2, stride=3, dilation=2, output_padding=2),
    )


def _refusal(dims: int) -> Refusal:
    ones, zeros, nines = [1] * dims, [0] * dims, [9] * dims
    attrs = {"stride": ones, "padding": nines, "output_padding": zeros, "groups": 1, "dilation": ones}
    return Refusal(attrs, ((1, 3, *[2] * dims), (3, 4, *[3] * dims)), "padding")
