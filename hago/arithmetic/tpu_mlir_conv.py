"""TPU-MLIR: int8 convolutions per output channel, as bm1684x and its kin run them.

The zero point of the input is folded into the bias, so padding takes the zero point's value.
Accumulators are exact here; the interpreter sums them in float32, which is the same below 2**24.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from hago.arithmetic._checks import require_finite
from hago.arithmetic.tpu_mlir import scale_and_shift, to_int_saturated
from hago.arithmetic.tpu_mlir_cast import UniformType, requantize, require_integers
from hago.errors import HagoError
from hago.numerics import saturate
from hago.rounding import round_half_away
from hago.types import INT8, INT32, UINT8, DType

#: An input scale this small comes from a tensor that is all zero; the bias would overflow.
SMALLEST_INPUT_SCALE: Final = 1e-5


@dataclass(frozen=True, slots=True, eq=False)
class IntegerConv:
    """What a convolution becomes: integers only.

    Args:
        weight: int64 that holds `dtype` values, (out, in / groups, *kernel).
        bias: int64 that holds int32 values, (out,), or None.
        multiplier, rshift: int64, (out,).
    """

    weight: Tensor
    bias: Tensor | None
    multiplier: Tensor
    rshift: Tensor
    dtype: DType


def _power_of_two_step(weight: Tensor, dtype: DType) -> float | None:
    """1 / 2**i for the first i in 0..6 where every `weight * 2**i` is an integer of `dtype`."""
    for i in range(7):
        scaled = weight * float(1 << i)
        if bool(((scaled == scaled.round()) & (scaled >= dtype.min) & (scaled <= dtype.max)).all()):
            return 1.0 / (1 << i)
    return None


def weight_scales(weight: Tensor, dtype: DType) -> Tensor:
    """One scale per output channel: `max(float32(absmax / 127 or 255), float32(1e-5))`, in float64.

    Where the whole weight consists of integers of `dtype` times one of 1, 1/2, ... 1/64, that is
    every channel's scale.

    References:
        TPU-MLIR lib/Conversion/TopToTpu/BM1684X/Conv.cpp and `to_all_int8`.
    """
    step = _power_of_two_step(weight, dtype)
    if step is not None:
        return torch.full((weight.shape[0],), step, dtype=torch.float64)
    scale = weight.flatten(1).abs().amax(1) / float(dtype.max)
    return torch.maximum(scale, torch.tensor(1e-5, dtype=torch.float32)).to(torch.float64)


def _input_scale(source: UniformType, weight: Tensor, bias: Tensor | None) -> float:
    if source.scale > SMALLEST_INPUT_SCALE:
        return source.scale
    largest = float(bias.abs().max()) if bias is not None else 1e-6
    return largest / 127 if largest > 1e-5 else float(weight.abs().max()) / 127


def lower_conv(weight: Tensor, bias: Tensor | None, source: UniformType, target: UniformType) -> IntegerConv:
    """Quantize a convolution: weights per output channel, bias to int32, a 32-bit multiplier each.

    `W = round(w / sw)` half away from zero; `b = round(bias / (sw * sx) - sum(W) * zx)`;
    `multiplier / 2**rshift ~ float32(sw * sx / sy)`. Weights without negative values and without a
    bias are uint8, and then `sum(W) * zx` is left out, as upstream does. A bias past int32 saturates.

    Args:
        weight: float32, (out, in / groups, *kernel).
        bias: float32, (out,), or None.

    Raises:
        HagoError: shapes do not match, or a value is not finite.

    References:
        TPU-MLIR lib/Conversion/TopToTpu/BM1684X/Conv.cpp.
    """
    w, b = check_weights(weight, bias)
    dtype = INT8 if bool((w < 0).any()) or b is not None else UINT8
    sw, sx = weight_scales(w, dtype), _input_scale(source, w, b)
    broadcast = (-1,) + (1,) * (w.dim() - 1)
    integers = to_int_saturated(w.to(torch.float64) / sw.view(broadcast), dtype)
    multiplier, rshift = scale_and_shift(sw * sx / target.scale)
    # The engine folds the zero point in from its int8 weights, which stay 0 where it chose uint8:
    # those layers run without the correction there, so they do here.
    folded = integers.flatten(1).sum(1) * source.zero_point if dtype is INT8 else torch.zeros_like(multiplier)
    if b is None and source.zero_point == 0:
        return IntegerConv(integers, None, multiplier, rshift, dtype)
    real = torch.zeros_like(sw) if b is None else b.to(torch.float64) / (sw * sx)
    rounded = round_half_away(real - folded.to(torch.float64)).clamp(-(2.0**40), 2.0**40)
    return IntegerConv(integers, saturate(rounded.to(torch.int64), INT32), multiplier, rshift, dtype)


def check_weights(weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Weight and bias as float32.

    Raises:
        HagoError: they are not a convolution's, or hold NaN or infinity.
    """
    if weight.dim() not in (3, 4, 5) or weight.numel() == 0:
        raise HagoError(f"a convolution's weight is {tuple(weight.shape)}; expected (out, in, *kernel), 3 to 5 axes")
    require_finite("a convolution's weights", weight)
    if bias is None:
        return weight.to(torch.float32), None
    if bias.shape != weight.shape[:1]:
        raise HagoError(f"a bias of {tuple(bias.shape)} for {weight.shape[0]} output channels; expected one each")
    require_finite("a convolution's bias", bias)
    return weight.to(torch.float32), bias.to(torch.float32)


def accumulate(
    q: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    source: UniformType,
    *,
    strides: Sequence[int],
    pads: Sequence[int],
    dilations: Sequence[int],
    groups: int,
) -> Tensor:
    """The exact accumulators of a convolution over stored integers: int64, (N, out, *spatial).

    Args:
        q: int64, (N, in, *spatial), stored values (zero point not subtracted).
        pads: befores, then afters, one per spatial axis: ONNX's order.

    Raises:
        HagoError: shapes do not match, or q is out of range.
    """
    axes = weight.dim() - 2
    require_integers(q, source, "a convolution's input")
    if q.dim() != axes + 2 or q.shape[1] != weight.shape[1] * groups or len(pads) != 2 * axes:
        raise HagoError(
            f"a convolution of {tuple(q.shape)} by {tuple(weight.shape)}, groups {groups}, pads {list(pads)}: "
            f"expected {axes + 2} axes, {weight.shape[1] * groups} channels and {2 * axes} pads"
        )
    require_windows(q.shape[2:], weight.shape[2:], strides, pads, dilations)
    around = [p for axis in reversed(range(axes)) for p in (pads[axis], pads[axis + axes])]
    padded = F.pad(q, around, value=source.zero_point).to(torch.float64)
    convolve = (F.conv1d, F.conv2d, F.conv3d)[axes - 1]
    # float64 sums int8 products exactly.
    sums = convolve(padded, weight.to(torch.float64), None, tuple(strides), 0, tuple(dilations), groups).to(torch.int64)
    return sums if bias is None else sums + bias.view((-1,) + (1,) * axes)


def require_windows(
    sizes: Sequence[int], kernel: Sequence[int], strides: Sequence[int], pads: Sequence[int], dilations: Sequence[int]
) -> None:
    """Refuse windows that do not fit the padded input once, and steps and pads that are none.

    Raises:
        HagoError: as said; the message names the spatial axis.
    """
    if not len(sizes) == len(strides) == len(dilations) or min(*strides, *dilations) < 1 or min(pads) < 0:
        raise HagoError(
            f"strides {list(strides)}, dilations {list(dilations)}, pads {list(pads)} for {len(sizes)} spatial axes; "
            "expected one of the first two each, 1 or more, and pads of 0 or more"
        )
    for axis, (size, side, step) in enumerate(zip(sizes, kernel, dilations, strict=True)):
        padded = size + pads[axis] + pads[axis + len(sizes)]
        if padded < (side - 1) * step + 1:
            raise HagoError(f"a window of {side} (dilation {step}) on spatial axis {axis}, which has {padded} values")


def run_conv(
    q: Tensor,
    conv: IntegerConv,
    source: UniformType,
    target: UniformType,
    *,
    strides: Sequence[int] | None = None,
    pads: Sequence[int] | None = None,
    dilations: Sequence[int] | None = None,
    groups: int = 1,
    do_relu: bool = False,
) -> Tensor:
    """`sat(half_up(acc * multiplier >> rshift) + zy)`; a fused Relu clamps at zy.

    Args:
        q: int64, (N, in, *spatial), integers of `source`.
        strides, dilations: one per spatial axis; 1 each by default.
        pads: befores, then afters (ONNX's order); 0 each by default. Padding takes the zero point.

    Returns:
        int64, (N, out, *spatial), integers of `target`.

    Raises:
        HagoError: shapes do not match, or q is out of range.

    References:
        TPU-MLIR tpu.Conv2D in the interpreter.
    """
    axes = conv.weight.dim() - 2
    acc = accumulate(
        q,
        conv.weight,
        conv.bias,
        source,
        strides=strides or (1,) * axes,
        pads=pads or (0,) * (2 * axes),
        dilations=dilations or (1,) * axes,
        groups=groups,
    )
    broadcast = (-1,) + (1,) * axes
    return requantize(acc, conv.multiplier.view(broadcast), conv.rshift.view(broadcast), target, do_relu=do_relu)
