"""TPU-MLIR's int8 operators, as its interpreter computes them for each family of chips: bm1684x, bm1684 and cv18xx.

For each operator there are functions that lower it, from float weights or scales to integers, multipliers and shifts,
and a function that runs it on stored integers (int64 tensors). `hago.ops.forms.tpu_mlir` offers those of bm1684x as
forms; the others are for users who compare chips.

In an Add the bm1684x family multiplies every operand by its own multiplier and shift, rounds it half up, and then
sums; cv18xx sums first and shifts once. Multipliers have 8 bits in both. Convolutions of the bm1684x family fold the
zero point of the input into the bias, so that padding is filled with the zero point. Accumulators are exact here; the
interpreter sums them in float32, which is the same below 2**24.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from hago.arithmetic.numerics import saturate, wrap
from hago.arithmetic.rounding import round_half_away
from hago.arithmetic.types import INT8, INT16, INT32, UINT8, DType
from hago.emulation import tflite
from hago.emulation._checks import broadcast_along, check_finite, check_range
from hago.emulation.tpu_mlir.numerics import (
    UniformType,
    apply_multiplier_and_rshift,
    apply_multiplier_and_rshift_float,
    as_float32,
    check_integers,
    multiplier_and_rshift_truncated,
    qdm_multiplier_and_rshift,
    requantize,
    scale_and_shift,
    scale_and_shift_positive,
    to_int_saturated,
)
from hago.errors import HagoError, UnsupportedOp


@dataclass(frozen=True, slots=True)
class Multipliers:
    """One multiplier and one right shift per operand of an Add, made by one of the `add_multipliers` functions."""

    multipliers: tuple[int, ...]
    rshifts: tuple[int, ...]


def _ratios(scales: Sequence[float], target_scale: float, coefficients: Sequence[float] | None) -> list[float]:
    """`c * s / sy` of every operand, with checked arguments."""
    factors = [1.0] * len(scales) if coefficients is None else list(coefficients)
    if len(factors) != len(scales) or not scales:
        raise HagoError(f"{len(scales)} operands and {len(factors)} coefficients; expected as many, at least one")
    if not (math.isfinite(target_scale) and target_scale > 0):
        raise HagoError(f"a scale is {target_scale}; expected a finite one above 0")
    return [c * (s / target_scale) for c, s in zip(factors, scales, strict=True)]


# ---------------------------------------------------------------- multipliers of an Add
def add_multipliers(
    scales: Sequence[float], target_scale: float, coefficients: Sequence[float] | None = None
) -> Multipliers:
    """bm1684x: each operand's `c * s / sy` by `scale_and_shift_positive` with 8 bits.

    Raises:
        HagoError: the numbers of scales and coefficients differ.

    References:
        TPU-MLIR lib/Conversion/TopToTpu/BM1684X/Add.cpp.
    """
    m, r = scale_and_shift_positive(torch.tensor(_ratios(scales, target_scale, coefficients)), 8)
    return Multipliers(tuple(m.tolist()), tuple(r.tolist()))


def add_multipliers_bm1684(
    scales: Sequence[float], target_scale: float, coefficients: Sequence[float] | None = None
) -> Multipliers:
    """bm1684: `r = floor(log2(127 / (|c| * s / sy)))`, 0 to 31; `m = round(c * float32(2**r * s / sy))`.

    The multiplier rounds half away from zero into int8.

    Raises:
        UnsupportedOp: a multiplier would be negative; the engine then adds in float.
        HagoError: a coefficient is 0, or the numbers of scales and coefficients differ.

    References:
        TPU-MLIR lib/Conversion/TopToTpu/BM1684/Add.cpp, `calRightShiftNumUseCblas`.
    """
    ratios = _ratios(scales, target_scale, None)
    factors = [1.0] * len(ratios) if coefficients is None else [as_float32(c) for c in coefficients]
    _ratios(scales, target_scale, factors)  # refuses coefficients that are not as many as the scales
    multipliers, rshifts = [], []
    for ratio, factor in zip(ratios, factors, strict=True):
        if factor == 0 or ratio <= 0:
            raise HagoError("an operand of an addition has scale or coefficient 0; expected another")
        rshift = min(max(math.floor(math.log(127 / (abs(factor) * ratio)) / math.log(2.0)), 0), 31)
        real = torch.tensor(factor) * torch.tensor(as_float32(math.ldexp(ratio, rshift)))
        m = int(to_int_saturated(real, INT8))
        if m < 0:
            raise UnsupportedOp("bm1684 addition with a negative coefficient: the engine adds in float")
        multipliers.append(m)
        rshifts.append(rshift)
    return Multipliers(tuple(multipliers), tuple(rshifts))


def add_multipliers_cv18xx(
    scales: Sequence[float], target_scale: float, coefficients: Sequence[float] | None = None
) -> Multipliers:
    """cv18xx: one right shift, from the largest `|float32(c * s / sy)|`; `m = trunc(q * 2**r)` for each.

    Args:
        scales, target_scale: or thresholds, because only their ratios matter.

    References:
        TPU-MLIR lib/Conversion/TopToTpu/CV18xx/Add.cpp.
    """
    qscales = [as_float32(q) for q in _ratios(scales, target_scale, coefficients)]
    _, rshift = multiplier_and_rshift_truncated(max(abs(q) for q in qscales))
    return Multipliers(tuple(truncated_multiplier(q, rshift) for q in qscales), (rshift,) * len(qscales))


def truncated_multiplier(qscale: float, rshift: int) -> int:
    """`trunc(qscale * 2**rshift)` as an int8; values that do not fit wrap.

    References:
        TPU-MLIR `getMultiplierI8FromQScaleAndRShift` (lib/Support/MathUtils.cpp).
    """
    return int(wrap(torch.tensor(math.trunc(math.ldexp(qscale, rshift))), INT8))


# ---------------------------------------------------------------- Add
def _check_operands(
    operands: Sequence[Tensor], sources: Sequence[UniformType], what: str, scaling: Multipliers | None
) -> None:
    """Refuse operands that do not match their types and multipliers, or do not broadcast."""
    multipliers = len(operands) if scaling is None else len(scaling.multipliers)
    if not operands or not len(operands) == len(sources) == multipliers:
        raise HagoError(
            f"{what} of {len(operands)} operands, {len(sources)} types and {multipliers} multipliers; "
            "expected as many of each, at least one"
        )
    for q, source in zip(operands, sources, strict=True):
        check_integers(q, source, f"an operand of {what}")
    for sizes in itertools.zip_longest(*(reversed(q.shape) for q in operands), fillvalue=1):
        if len(set(sizes) - {1}) > 1:
            raise HagoError(f"{what} of {[tuple(q.shape) for q in operands]}: the shapes do not broadcast")


def add(
    operands: Sequence[Tensor],
    sources: Sequence[UniformType],
    target: UniformType,
    scaling: Multipliers,
    *,
    do_relu: bool = False,
) -> Tensor:
    """`sat(sum(half_up((q - z) * m >> r)) + zy)`, rounded per operand; a Relu is applied before the zero
    point is added.

    Args:
        operands: int64 stored integers that broadcast.
        scaling: made by `add_multipliers` or `add_multipliers_bm1684`.

    Raises:
        HagoError: the numbers of operands, types and multipliers differ, or a value is out of range.

    References:
        TPU-MLIR tpu.Add in the interpreter, all chips but cv18xx.
    """
    _check_operands(operands, sources, "an addition", scaling)
    total = torch.zeros((), dtype=torch.int64)
    for q, source, m, r in zip(operands, sources, scaling.multipliers, scaling.rshifts, strict=True):
        total = total + apply_multiplier_and_rshift(q - source.zero_point, m, r)
    return saturate((total.clamp_min(0) if do_relu else total) + target.zero_point, target.dtype)


def add_cv18xx(
    operands: Sequence[Tensor],
    sources: Sequence[UniformType],
    target: UniformType,
    scaling: Multipliers,
    *,
    do_relu: bool = False,
) -> Tensor:
    """`sat(half_up(sum(q * m) / 2**r))` in float32, symmetric: one rounding for all operands.

    Args:
        scaling: made by `add_multipliers_cv18xx`.

    References:
        TPU-MLIR tpu.Add in the interpreter, on cv18xx.
    """
    _check_operands(operands, sources, "an addition", scaling)
    total = torch.zeros((), dtype=torch.int64)
    for q, m in zip(operands, scaling.multipliers, strict=True):
        total = total + q * m
    out = apply_multiplier_and_rshift_float(total.clamp_min(0) if do_relu else total, 1, scaling.rshifts[0])
    return saturate(out, target.dtype)


# ---------------------------------------------------------------- Mul
def mul_multiplier(scales: Sequence[float], target_scale: float) -> tuple[int, int]:
    """bm1684x: the product of the scales over `target_scale`, by `scale_and_shift` with 8 bits.

    References:
        TPU-MLIR lib/Conversion/TopToTpu/BM1684X/Mul.cpp.
    """
    if not scales or not (math.isfinite(target_scale) and target_scale > 0):
        raise HagoError(f"a product of {len(scales)} operands at scale {target_scale}; expected some, and above 0")
    m, r = scale_and_shift(math.prod(scales) / target_scale, 8)
    return int(m), int(r)


def mul(
    operands: Sequence[Tensor],
    sources: Sequence[UniformType],
    target: UniformType,
    *,
    do_relu: bool = False,
) -> Tensor:
    """`sat(half_up(prod(q - z) * m >> r) + zy)`, with m and r from `mul_multiplier`.

    Args:
        operands: int64 stored integers that broadcast; one or two.

    Raises:
        HagoError: the numbers of operands and types differ, or a value is out of range.

    References:
        TPU-MLIR tpu.Mul in the interpreter.
    """
    _check_operands(operands, sources, "a multiplication", None)
    m, r = mul_multiplier([s.scale for s in sources], target.scale)
    product = operands[0] - sources[0].zero_point
    for q, source in zip(operands[1:], sources[1:], strict=True):
        product = product * (q - source.zero_point)
    out = apply_multiplier_and_rshift(product.clamp_min(0) if do_relu else product, m, r)
    return saturate(out + target.zero_point, target.dtype)


# ---------------------------------------------------------------- LeakyRelu, PRelu, Pad
# LeakyRelu and PRelu are symmetric only; upstream computes asymmetric ones in float.


def leaky_relu_multiplier(alpha: float) -> tuple[int, int]:
    """The slope of the negative side, by `scale_and_shift` with 8 bits: 0.1 becomes 51 / 2**9.

    References:
        TPU-MLIR lib/Conversion/TopToTpu/BM1684X/LeakyRelu.cpp.
    """
    m, r = scale_and_shift(alpha, 8)
    return int(m), int(r)


def leaky_relu(q: Tensor, alpha: float, dtype: DType = INT8) -> Tensor:
    """`q` where it is not negative, else `half_up(q * m >> r)`; saturated into the output's `dtype`.

    Args:
        q: int64, symmetric; input and output share one scale.

    Raises:
        HagoError: q is out of range, or alpha is not finite.

    References:
        TPU-MLIR tpu.LeakyRelu in the interpreter.
    """
    check_range("a LeakyRelu's input", q, INT16.min, INT16.max)
    m, r = leaky_relu_multiplier(alpha)
    return saturate(torch.where(q >= 0, q, apply_multiplier_and_rshift(q, m, r)), dtype)


def prelu_slopes(slopes: Tensor) -> tuple[Tensor, int]:
    """Integer slopes `trunc(slope * 2**r)` with one right shift r, which the largest magnitude determines.

    [0.1, -0.3] becomes [25, -76] / 2**8.

    Args:
        slopes: float32, one per channel.

    Returns:
        int64 that holds int8 values, and the right shift.

    References:
        TPU-MLIR lib/Conversion/TopToTpu/BM1684X/PRelu.cpp.
    """
    check_finite("the slopes of a PRelu", slopes)
    values = slopes.to(torch.float32).reshape(-1)
    if values.numel() == 0:
        raise HagoError("a PRelu has no slope; expected one per channel")
    _, rshift = multiplier_and_rshift_truncated(float(values.abs().max()))
    return torch.tensor([truncated_multiplier(float(v), rshift) for v in values]), rshift


def prelu(q: Tensor, slopes: Tensor, dtype: DType = INT8) -> Tensor:
    """`q` where it is not negative, else `half_up(q * slope >> r)` with its channel's slope.

    A single slope is computed as a LeakyRelu, as upstream.

    Args:
        q: int64, (N, C, ...), symmetric; input and output share one scale.
        slopes: float32, C values, or one.

    Raises:
        HagoError: there is neither one slope nor one per channel, or q is out of range.

    References:
        TPU-MLIR tpu.PRelu in the interpreter.
    """
    if slopes.numel() == 1:
        return leaky_relu(q, float(slopes.reshape(())), dtype)
    check_range("a PRelu's input", q, INT16.min, INT16.max)
    if q.dim() < 2 or q.shape[1] != slopes.numel():
        raise HagoError(f"a PRelu of {tuple(q.shape)} with {slopes.numel()} slopes; expected one, or one per channel")
    integers, rshift = prelu_slopes(slopes)
    scaled = apply_multiplier_and_rshift(q, broadcast_along(integers, 1, q.dim()), rshift)
    return saturate(torch.where(q >= 0, q, scaled), dtype)


def pad_value(value: float, source: UniformType) -> int:
    """The integer that fills the padding: `round(value / scale + zero_point)` in float64, half away from zero.

    Not saturated here: 0.7 at scale 2/127 is 44, at scale 3.5/255 with zero point 18 it is 69.

    References:
        TPU-MLIR lib/Conversion/TopToTpu/BM1684X/Pad.cpp.
    """
    if not math.isfinite(value):
        raise HagoError(f"a padding value is {value}; expected a finite number")
    return int(round_half_away(torch.tensor(value / source.scale + source.zero_point, dtype=torch.float64)))


def pad(q: Tensor, pads: Sequence[int], value: float, source: UniformType) -> Tensor:
    """Constant padding of stored integers with `pad_value`, saturated into the type.

    Args:
        q: int64 of any shape, integers of `source`, which the output keeps.
        pads: one per axis at its beginning, then one per axis at its end (ONNX's order).

    Raises:
        HagoError: there are not two pads per axis, a pad is negative, or q is out of range.
    """
    check_integers(q, source, "a padding's input")
    if len(pads) != 2 * q.dim() or min(pads, default=0) < 0:
        raise HagoError(f"pads {list(pads)} for {q.dim()} axes; expected {2 * q.dim()} of them, 0 or more")
    fill = min(max(pad_value(value, source), source.dtype.min), source.dtype.max)
    return F.pad(q, _torch_pads(pads), value=fill)


def _torch_pads(pads: Sequence[int]) -> list[int]:
    """Pads in ONNX's order, in that of `torch.nn.functional.pad`: begin and end of the last axis first."""
    axes = len(pads) // 2
    return [pad for axis in reversed(range(axes)) for pad in (pads[axis], pads[axis + axes])]


# ---------------------------------------------------------------- convolutions of the bm1684x family

#: An input scale up to this comes from a tensor of zeros; a bias that is divided by it would overflow.
SMALLEST_INPUT_SCALE: Final = 1e-5


@dataclass(frozen=True, slots=True, eq=False)
class IntegerConv:
    """A convolution in integers, made by `lower_conv` or `lower_conv_cv18xx`.

    Args:
        weight: int64 that holds `dtype` values, (out, in / groups, *kernel).
        bias: int64 that holds int32 values, (out,), or None.
        multiplier, rshift: int64, (out,).
        dtype: int8 or uint8.
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

    If all weights are integers of `dtype` times one of 1, 1/2, ... 1/64, that is the scale of every channel.

    References:
        TPU-MLIR lib/Conversion/TopToTpu/BM1684X/Conv.cpp and `to_all_int8`.
    """
    step = _power_of_two_step(weight, dtype)
    if step is not None:
        return torch.full((weight.shape[0],), step, dtype=torch.float64)
    scale = weight.flatten(1).abs().amax(1) / float(dtype.max)
    return torch.maximum(scale, torch.tensor(1e-5, dtype=torch.float32)).to(torch.float64)


def _input_scale(source: UniformType, weight: Tensor, bias: Tensor | None) -> float:
    """The scale of the input; for an input of zeros one derived from the bias or the weight, as upstream."""
    if source.scale > SMALLEST_INPUT_SCALE:
        return source.scale
    largest = float(bias.abs().max()) if bias is not None else 1e-6
    return largest / 127 if largest > 1e-5 else float(weight.abs().max()) / 127


def lower_conv(weight: Tensor, bias: Tensor | None, source: UniformType, target: UniformType) -> IntegerConv:
    """Quantize a convolution: weights per output channel, the bias to int32, a 32-bit multiplier per channel.

    `W = round(w / sw)` half away from zero; `b = round(bias / (sw * sx) - sum(W) * zx)`;
    `multiplier / 2**rshift ~ float32(sw * sx / sy)`. If there is no bias and no negative weight, weights are
    uint8 and `sum(W) * zx` is left out, as upstream. A bias outside int32 saturates.

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
    integers = to_int_saturated(w.to(torch.float64) / broadcast_along(sw, 0, w.dim()), dtype)
    multiplier, rshift = scale_and_shift(sw * sx / target.scale)
    # TPU-MLIR computes the correction for the zero point from its int8 weights, which are 0 where it chose uint8, so
    # that these layers run without the correction.
    folded = integers.flatten(1).sum(1) * source.zero_point if dtype is INT8 else torch.zeros_like(multiplier)
    if b is None and source.zero_point == 0:
        return IntegerConv(integers, None, multiplier, rshift, dtype)
    real = torch.zeros_like(sw) if b is None else b.to(torch.float64) / (sw * sx)
    return IntegerConv(integers, _round_to_int32(real - folded.to(torch.float64)), multiplier, rshift, dtype)


def _round_to_int32(real: Tensor) -> Tensor:
    """Round half away from zero and saturate to int32."""
    # The clamp keeps the conversion to int64 defined.
    return saturate(round_half_away(real).clamp(-(2.0**40), 2.0**40).to(torch.int64), INT32)


def check_weights(weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Check the weight and bias of a convolution, and convert them to float32.

    Raises:
        HagoError: their shapes are not those of a convolution, or a value is not finite.
    """
    if weight.dim() not in (3, 4, 5) or weight.numel() == 0:
        raise HagoError(f"a convolution's weight is {tuple(weight.shape)}; expected (out, in, *kernel), 3 to 5 axes")
    check_finite("a convolution's weights", weight)
    if bias is None:
        return weight.to(torch.float32), None
    if bias.shape != weight.shape[:1]:
        raise HagoError(f"a bias of {tuple(bias.shape)} for {weight.shape[0]} output channels; expected one each")
    check_finite("a convolution's bias", bias)
    return weight.to(torch.float32), bias.to(torch.float32)


def accumulate(
    q: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    source: UniformType,
    *,
    strides: Sequence[int] | None,
    pads: Sequence[int] | None,
    dilations: Sequence[int] | None,
    groups: int,
) -> Tensor:
    """The exact accumulators of a convolution over stored integers: int64, (N, out, *spatial).

    Args:
        q: int64, (N, in, *spatial), stored values (zero point not subtracted).
        strides, pads, dilations: as in `run_conv`.

    Raises:
        HagoError: shapes do not match, or q is out of range.
    """
    axes = weight.dim() - 2
    strides, dilations, pads = strides or (1,) * axes, dilations or (1,) * axes, pads or (0,) * (2 * axes)
    check_integers(q, source, "a convolution's input")
    if q.dim() != axes + 2 or q.shape[1] != weight.shape[1] * groups or len(pads) != 2 * axes:
        raise HagoError(
            f"a convolution of {tuple(q.shape)} by {tuple(weight.shape)}, groups {groups}, pads {list(pads)}: "
            f"expected {axes + 2} axes, {weight.shape[1] * groups} channels and {2 * axes} pads"
        )
    check_windows(q.shape[2:], weight.shape[2:], strides, pads, dilations)
    padded = F.pad(q, _torch_pads(pads), value=source.zero_point).to(torch.float64)
    convolve = (F.conv1d, F.conv2d, F.conv3d)[axes - 1]
    # exact: sums of int8 products fit the 53 bits of float64
    sums = convolve(padded, weight.to(torch.float64), None, tuple(strides), 0, tuple(dilations), groups).to(torch.int64)
    return sums if bias is None else sums + broadcast_along(bias, 1, sums.dim())


def check_windows(
    sizes: Sequence[int], kernel: Sequence[int], strides: Sequence[int], pads: Sequence[int], dilations: Sequence[int]
) -> None:
    """Refuse windows that are larger than the padded input, strides or dilations below 1, and negative pads.

    Raises:
        HagoError: as said, or the numbers of strides, dilations and axes differ.
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
        pads: one per spatial axis at its beginning, then one per axis at its end (ONNX's order); 0 each by
            default. Padding is filled with the zero point.

    Returns:
        int64, (N, out, *spatial), integers of `target`.

    Raises:
        HagoError: shapes do not match, or q is out of range.

    References:
        TPU-MLIR tpu.Conv2D in the interpreter.
    """
    acc = accumulate(q, conv.weight, conv.bias, source, strides=strides, pads=pads, dilations=dilations, groups=groups)
    multiplier, rshift = (broadcast_along(t, 1, acc.dim()) for t in (conv.multiplier, conv.rshift))
    return requantize(acc, multiplier, rshift, target, do_relu=do_relu)


# ---------------------------------------------------------------- convolutions of the older chips
# Both chips are symmetric only. bm1684 has one right shift for the whole layer, no multiplier, and an int16 bias.
# cv18xx, in a form that TPU-MLIR calls QDM, has a 32-bit multiplier and a right shift per output channel, and rounds
# twice, as TFLite does.


@dataclass(frozen=True, slots=True, eq=False)
class ShiftConv:
    """A convolution of bm1684, requantized by one right shift; made by `lower_conv_bm1684`.

    Args:
        weight: int64 that holds int8 values, (out, in / groups, *kernel).
        bias: int64 that holds int16 values, (out,), or None.
        rshift: 0 or more.
    """

    weight: Tensor
    bias: Tensor | None
    rshift: int


def bm1684_rshift(absmax: float, source_scale: float, target_scale: float, bits: int = 8) -> int:
    """The largest r, at most 31, with `float32(absmax) * sx / sy * 2**r < 2**(bits-1) - 1`; -1 if there is none.

    Raises:
        HagoError: `absmax` is 0, so that every shift fits, or not finite.

    References:
        TPU-MLIR `calRightShiftNum` (lib/Support/MathUtils.cpp).
    """
    value = as_float32(absmax) * source_scale / target_scale
    if not value > 0 or not math.isfinite(value):
        raise HagoError(f"weights times scales are {value}; expected a finite value above 0")
    doublings = 0
    while value < (1 << (bits - 1)) - 1:
        value, doublings = value * 2, doublings + 1
    return 31 if doublings > 32 else doublings - 1


def _bm1684_bias(bias: Tensor, rshift: int, target_scale: float) -> tuple[Tensor, float]:
    """The bias in int16, and the fraction of its values that saturated."""
    real = bias * as_float32(float(1 << rshift) / target_scale)
    integers = to_int_saturated(real, INT32)
    return saturate(integers, INT16), float(((integers > INT16.max) | (integers < INT16.min)).float().mean())


def lower_conv_bm1684(weight: Tensor, bias: Tensor | None, source: UniformType, target: UniformType) -> ShiftConv:
    """Quantize a convolution for bm1684: one shift r for all channels, `W = round(w * 2**r * sx / sy)`.

    `b = round(bias * 2**r / sy)` saturates at int16; while more than 3 % of its values do, r is reduced by one.
    Winograd kernels, which the compiler may choose, are not emulated.

    Raises:
        UnsupportedOp: the shift would be negative; the engine then computes the layer in float.
        HagoError: shapes do not match, or a value is not finite.

    References:
        TPU-MLIR lib/Conversion/TopToTpu/BM1684/Conv.cpp.
    """
    w, b = check_weights(weight, bias)
    rshift = bm1684_rshift(float(w.abs().max()), source.scale, target.scale)
    if rshift < 0:
        raise UnsupportedOp("bm1684 convolution: the right shift would be negative, so the engine computes it in float")
    integers = None
    if b is not None:
        integers, overflowing = _bm1684_bias(b, rshift, target.scale)
        while as_float32(overflowing) > 0.03 and rshift > 0:
            rshift -= 1
            integers, overflowing = _bm1684_bias(b, rshift, target.scale)
    scale = as_float32(float(1 << rshift) * source.scale / target.scale)
    return ShiftConv(to_int_saturated(w * scale, INT8), integers, rshift)


def run_conv_bm1684(
    q: Tensor,
    conv: ShiftConv,
    source: UniformType,
    target: UniformType,
    *,
    strides: Sequence[int] | None = None,
    pads: Sequence[int] | None = None,
    dilations: Sequence[int] | None = None,
    groups: int = 1,
    do_relu: bool = False,
) -> Tensor:
    """`sat(half_up(acc >> rshift))`; a fused Relu clamps at 0. Arguments as in `run_conv`."""
    acc = accumulate(q, conv.weight, conv.bias, source, strides=strides, pads=pads, dilations=dilations, groups=groups)
    out = apply_multiplier_and_rshift(acc, 1, conv.rshift)
    return saturate(out.clamp_min(0) if do_relu else out, target.dtype)


def cv18xx_qscale(absmax: float, source_threshold: float, target_threshold: float) -> float:
    """`float32(absmax * tx) / float32(127 * ty)` in float32: the ratio of scales of one output channel.

    References:
        TPU-MLIR `getQscaleForFilter` (lib/Support/MathUtils.cpp).
    """
    if not target_threshold > 0:
        target_threshold = 1e-5
    a, x, y = (torch.tensor(v, dtype=torch.float32) for v in (absmax, source_threshold, target_threshold))
    return float((a * x) / (torch.tensor(127.0, dtype=torch.float32) * y))


def cv18xx_qscale_of_bias(absmax: float, target_threshold: float) -> float:
    """`absmax * 127 / (0.998 * (2**31 - 1) * ty)`: the smallest ratio at which the bias fits int32.

    References:
        TPU-MLIR `getQscaleForBias` (lib/Support/MathUtils.cpp).
    """
    if not target_threshold > 0:
        target_threshold = 1e-5
    product = float(torch.tensor(absmax, dtype=torch.float32) * torch.tensor(127.0, dtype=torch.float32))
    return product / (0x7FFFFFFF * 0.998 * as_float32(target_threshold))


def lower_conv_cv18xx(
    weight: Tensor, bias: Tensor | None, source_threshold: float, target_threshold: float
) -> IntegerConv:
    """Quantize a convolution for cv18xx, with a qscale per output channel split by `qdm_multiplier_and_rshift`.

    The qscale is `cv18xx_qscale` of the weights, at most 0.999999, or that of the bias if this is larger and below 1.
    `W = half_even(w * float32(tx / ty * 2**(31+r) / m))`, `b = half_even(bias * float32(127 / ty *
    2**(31+r) / m))`, both products in float32, saturated to int8 and int32.

    Args:
        weight, bias: as in `lower_conv`.
        source_threshold, target_threshold: from the calibration table, in real units.

    References:
        TPU-MLIR lib/Conversion/TopToTpu/CV18xx/Conv.cpp.
    """
    w, b = check_weights(weight, bias)
    tx, ty = as_float32(source_threshold), as_float32(target_threshold)
    rows, biases, multipliers, rshifts = [], [], [], []
    for channel, row in enumerate(w):
        qscale = cv18xx_qscale(float(row.abs().max()), tx, ty)
        qscale = 0.999999 if qscale >= 1 else qscale
        if b is not None:
            of_bias = cv18xx_qscale_of_bias(abs(float(b[channel])), ty)
            qscale = of_bias if qscale < of_bias < 1 else qscale
        m, rshift = qdm_multiplier_and_rshift(qscale)
        step = math.ldexp(1.0, rshift + 31) / m if m else 0.0
        rows.append(to_int_saturated(row * as_float32(as_float32(tx / ty) * step), INT8, "HalfToEven"))
        if b is not None:
            biases.append(to_int_saturated(b[channel] * as_float32(as_float32(127.0 / ty) * step), INT32, "HalfToEven"))
        multipliers.append(m)
        rshifts.append(rshift)
    integers = torch.stack(biases) if b is not None else None
    return IntegerConv(torch.stack(rows), integers, torch.tensor(multipliers), torch.tensor(rshifts), INT8)


def run_conv_cv18xx(
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
    """Requantize by TFLite's double rounding per channel, and saturate. Arguments as in `run_conv`."""
    acc = accumulate(q, conv.weight, conv.bias, source, strides=strides, pads=pads, dilations=dilations, groups=groups)
    multiplier, rshift = (broadcast_along(t, 1, acc.dim()) for t in (conv.multiplier, conv.rshift))
    out = tflite.multiply_by_quantized_multiplier(acc, multiplier, -rshift, "double")
    return saturate(out.clamp_min(0) if do_relu else out, target.dtype)


# ---------------------------------------------------------------- matrix products of the bm1684x family


@dataclass(frozen=True, slots=True, eq=False)
class IntegerMatMul:
    """A matrix product with a constant, in integers; made by `lower_matmul`.

    Args:
        weight: int64 that holds int8 values, (..., K, N).
        bias: int64 that holds int32 values, (N,), or None.
        multiplier, rshift: int64, (1,) per tensor or (N,) per channel, with the same rshift for all channels.
    """

    weight: Tensor
    bias: Tensor | None
    multiplier: Tensor
    rshift: Tensor


def common_shift(scale: Tensor) -> tuple[Tensor, Tensor]:
    """Multipliers with one common right shift, which a matrix product per channel needs.

    Each scale is given a 32-bit multiplier and a shift. The common shift is the largest, at least 0; the other
    multipliers are shifted left to match it. If one of them then exceeds int32, all are computed again from 8-bit
    multipliers.

    Args:
        scale: real ratios, (N,).

    Returns:
        Multipliers and the shift, both (N,).

    Raises:
        HagoError: one exceeds int32 even then, because the scales differ too much.

    References:
        TPU-MLIR lib/Conversion/TopToTpu/BM1684X/MatMul.cpp, `matmul_perchannel`.
    """
    for bits in (32, 8):
        m, n = scale_and_shift(scale, bits)
        shift = n.max().clamp_min(0)
        shifted = torch.where(shift - n < 32, m << (shift - n).clamp_max(31), 1 << 62)
        # Upstream accepts 2**31 too, although its int32 multiplier then holds -2**31.
        if not bool((shifted > INT32.max).any()):
            return shifted, shift.expand_as(shifted)
    raise HagoError(
        f"scales per channel from {float(scale.min())} to {float(scale.max())} share no right shift; "
        "quantize this matrix product per tensor"
    )


def lower_matmul(
    weight: Tensor, bias: Tensor | None, source: UniformType, target: UniformType, *, per_channel: bool = False
) -> IntegerMatMul:
    """Quantize a matrix product with a constant; the weight scale is `absmax / 127`, of the tensor or per column.

    `W = round(w / sw)` half away from zero; `b = round(bias / (sw * sx) - sum(W) * zx)` in float64;
    `multiplier / 2**rshift ~ float32(sx * sw / sy)`. A bias outside int32 saturates.

    Args:
        weight: float32, (K, N), or (batch..., K, N) if the zero point of the input is 0.
        bias: float32, (N,), or None.
        per_channel: use one weight scale per column, and multipliers with a common shift.

    Raises:
        UnsupportedOp: a batched weight and an input with a zero point; the engine then computes in float.
        HagoError: shapes do not match, a value is not finite, or the weights (of a column) are all 0.

    References:
        TPU-MLIR lib/Conversion/TopToTpu/BM1684X/MatMul.cpp.
    """
    w, b = _check_matmul_weights(weight, bias, source)
    axes = tuple(range(w.dim() - 1)) if per_channel else tuple(range(w.dim()))
    absmax = w.abs().amax(axes).reshape(-1).to(torch.float64)
    if bool((absmax == 0).any()):
        raise HagoError("the weights of a matrix product, or of one of its columns, are all 0; they have no scale")
    sw = absmax / 127.0
    integers = to_int_saturated(w.to(torch.float64) / sw, INT8)
    ratio = source.scale * sw / target.scale
    multiplier, rshift = common_shift(ratio.to(torch.float32)) if per_channel else scale_and_shift(ratio)
    if b is None and source.zero_point == 0:
        return IntegerMatMul(integers, None, multiplier, rshift)
    folded = integers.reshape(-1, w.shape[-1]).sum(0) * source.zero_point
    real = torch.zeros(()) if b is None else b.to(torch.float64) / (sw * source.scale)
    bias_integers = _round_to_int32(real.to(torch.float64) - folded.to(torch.float64))
    return IntegerMatMul(integers, bias_integers, multiplier, rshift)


def _check_matmul_weights(weight: Tensor, bias: Tensor | None, source: UniformType) -> tuple[Tensor, Tensor | None]:
    """Check the weight and bias of a matrix product, and convert them to float32."""
    if weight.dim() < 2 or weight.numel() == 0:
        raise HagoError(f"a matrix product's weight is {tuple(weight.shape)}; expected (K, N), batches before it")
    if weight.dim() > 2 and source.zero_point != 0:
        raise UnsupportedOp("a batched matrix product of an input with a zero point: the engine computes it in float")
    check_finite("a matrix product's weights", weight)
    if bias is None:
        return weight.to(torch.float32), None
    if bias.numel() != weight.shape[-1]:
        raise HagoError(f"a bias of {tuple(bias.shape)} for {weight.shape[-1]} columns; expected one each")
    check_finite("a matrix product's bias", bias)
    return weight.to(torch.float32), bias.to(torch.float32).reshape(-1)


def run_matmul(
    q: Tensor, matmul: IntegerMatMul, source: UniformType, target: UniformType, *, do_relu: bool = False
) -> Tensor:
    """`sat(half_up((q @ W + b) * multiplier >> rshift) + zy)`; a fused Relu clamps at zy.

    Args:
        q: int64, (..., K), stored integers of `source`.

    Returns:
        int64, (..., N), integers of `target`.

    Raises:
        HagoError: shapes do not multiply, or q is out of range.

    References:
        TPU-MLIR tpu.MatMul in the interpreter.
    """
    check_integers(q, source, "a matrix product's input")
    if q.dim() < 1 or q.shape[-1] != matmul.weight.shape[-2]:
        raise HagoError(f"matrices of {tuple(q.shape)} and {tuple(matmul.weight.shape)} do not multiply")
    acc = q @ matmul.weight
    if matmul.bias is not None:
        acc = acc + matmul.bias
    return requantize(acc, matmul.multiplier, matmul.rshift, target, do_relu=do_relu)


def matmul_of_activations(
    left: Tensor, right: Tensor, left_type: UniformType, right_type: UniformType, target: UniformType
) -> Tensor:
    """A symmetric product of two activations: `sat(half_up((left @ right) * m >> r))`.

    Raises:
        UnsupportedOp: a zero point is not 0; the engine then computes the product in float.
        HagoError: the shapes do not multiply, or an operand is out of range.

    References:
        TPU-MLIR lib/Conversion/TopToTpu/BM1684X/MatMul.cpp, where neither operand is constant.
    """
    if left_type.zero_point or right_type.zero_point or target.zero_point:
        raise UnsupportedOp("an asymmetric product of two activations: the engine computes it in float")
    check_integers(left, left_type, "a matrix product's left operand")
    check_integers(right, right_type, "a matrix product's right operand")
    if min(left.dim(), right.dim()) < 2 or left.shape[-1] != right.shape[-2]:
        raise HagoError(f"matrices of {tuple(left.shape)} and {tuple(right.shape)} do not multiply")
    multiplier, rshift = scale_and_shift(left_type.scale * right_type.scale / target.scale)
    return requantize(left @ right, multiplier, rshift, target)


# ---------------------------------------------------------------- average pooling
# Symmetric pooling multiplies the exact integer sum of a window; asymmetric pooling is computed in float32.


def avg_pool_multiplier(source_scale: float, target_scale: float, window: int) -> tuple[int, int]:
    """bm1684x, symmetric: `sx / (sy * window)` by `scale_and_shift` with 8 bits.

    References:
        TPU-MLIR lib/Conversion/TopToTpu/BM1684X/AvgPool.cpp.
    """
    m, r = scale_and_shift(_pool_ratio(source_scale, target_scale, window), 8)
    return int(m), int(r)


def avg_pool_multiplier_cv18xx(source_scale: float, target_scale: float, window: int) -> tuple[int, int]:
    """cv18xx: the same ratio by `multiplier_and_rshift_truncated`.

    References:
        TPU-MLIR lib/Conversion/TopToTpu/CV18xx/AvgPool.cpp.
    """
    return multiplier_and_rshift_truncated(_pool_ratio(source_scale, target_scale, window))


def avg_pool_multiplier_bm1684(window: int) -> tuple[int, int]:
    """bm1684: `1 / window` alone, because input and output share one scale.

    It is `round(2**e / window) / 2**e` with the largest e for which the multiplier fits 8 bits, reduced to lowest
    terms: a window of 9 gives 57 / 2**9.

    Raises:
        UnsupportedOp: a window of more than 225 values, which the engine averages in float.

    References:
        TPU-MLIR lib/Conversion/TopToTpu/BM1684/AvgPool.cpp, whose table this formula reproduces.
    """
    if window < 1:
        raise HagoError(f"a window of {window} values; expected 1 or more")
    if window > 225:
        raise UnsupportedOp(f"bm1684 average pooling over {window} values: past 225 the engine averages in float")
    e = max(e for e in range(17) if (2 * (1 << e) + window) // (2 * window) <= 255)
    m = (2 * (1 << e) + window) // (2 * window)
    while m % 2 == 0:
        m, e = m // 2, e - 1
    return m, e


def avg_pool_scale_and_offset(source: UniformType, target: UniformType, window: int) -> tuple[float, float]:
    """Asymmetric: the scale `sx / (window * sy)` and the offset `zy - sx / sy * zx`.

    References:
        TPU-MLIR lib/Conversion/TopToTpu/BM1684X/AvgPool.cpp.
    """
    if window < 1:
        raise HagoError(f"a window of {window} values; expected 1 or more")
    offset = target.zero_point - source.scale / target.scale * source.zero_point
    return source.scale / (window * target.scale), offset


def _pool_ratio(source_scale: float, target_scale: float, window: int) -> float:
    """`sx / (sy * window)`, with checked arguments."""
    if window < 1 or not (math.isfinite(target_scale) and target_scale > 0):
        raise HagoError(f"average pooling of {window} values at scale {target_scale}; expected 1 or more, and above 0")
    return source_scale / (target_scale * window)


def _window_sums(q: Tensor, kernel: Sequence[int], strides: Sequence[int], pads: Sequence[int], value: int) -> Tensor:
    """The sum of every window, padding included: int64, (N, C, *out)."""
    axes = len(kernel)
    if axes not in (1, 2) or q.dim() != axes + 2 or len(strides) != axes or len(pads) != 2 * axes:
        raise HagoError(
            f"average pooling of {tuple(q.shape)}, kernel {list(kernel)}, strides {list(strides)}, pads {list(pads)}: "
            "expected 1 or 2 spatial axes after batch and channel, a stride each and two pads each"
        )
    check_windows(q.shape[2:], kernel, strides, pads, (1,) * axes)
    channels = q.shape[1]
    # a depthwise convolution with ones; sums of int8 values are exact in float64
    padded = F.pad(q, _torch_pads(pads), value=value).to(torch.float64)
    ones = torch.ones((channels, 1, *kernel), dtype=torch.float64)
    convolve = F.conv1d if axes == 1 else F.conv2d
    return convolve(padded, ones, stride=tuple(strides), groups=channels).to(torch.int64)


def _averages_times_window(
    q: Tensor, kernel: Sequence[int], strides: Sequence[int], pads: Sequence[int], value: int, count_include_pad: bool
) -> Tensor:
    """The average of every window times the window's size: float32, computed in these two steps as upstream."""
    sums = _window_sums(q, kernel, strides, pads, value if count_include_pad else 0).to(torch.float32)
    size = float(math.prod(kernel))
    count = torch.tensor(size)
    if not count_include_pad:
        count = _window_sums(torch.ones_like(q), kernel, strides, pads, 0).to(torch.float32)
    average = sums / count
    for side in kernel:
        average = average * float(side)
    return average


def avg_pool(
    q: Tensor,
    kernel: Sequence[int],
    source: UniformType,
    target: UniformType,
    *,
    strides: Sequence[int] | None = None,
    pads: Sequence[int] | None = None,
    count_include_pad: bool = True,
    multiplier_and_rshift: tuple[int, int] | None = None,
    cv18xx: bool = False,
) -> Tensor:
    """Symmetric average pooling: `sat(half_up(sum * m >> r))` of the integer sum of every window.

    If padding is not counted, the sum is replaced by the average of the counted values times the size of the
    window, rounded half away from zero (half up on cv18xx).

    Args:
        q: int64, (N, C, *spatial), integers of `source`.
        kernel, strides: one per spatial axis; strides are the kernel by default.
        pads: one per spatial axis at its beginning, then one per axis at its end; 0 by default.
        multiplier_and_rshift: by default those of `avg_pool_multiplier`.
        cv18xx: multiply in float32, as that family does.

    Raises:
        HagoError: shapes do not match, a zero point is not 0, or q is out of range.

    References:
        TPU-MLIR tpu.Pool1D, tpu.Pool2D in the interpreter.
    """
    if source.zero_point or target.zero_point:
        raise HagoError("symmetric average pooling got a zero point; use avg_pool_asymmetric")
    check_integers(q, source, "average pooling's input")
    sums = _averages_times_window(q, kernel, strides or kernel, pads or (0,) * (2 * len(kernel)), 0, count_include_pad)
    m, r = multiplier_and_rshift or avg_pool_multiplier(source.scale, target.scale, math.prod(kernel))
    if cv18xx:
        rounded = (sums.to(torch.float64) + 0.5).floor().to(torch.int64)
        return saturate(apply_multiplier_and_rshift_float(rounded, m, r), target.dtype)
    return saturate(apply_multiplier_and_rshift(round_half_away(sums).to(torch.int64), m, r), target.dtype)


def avg_pool_asymmetric(
    q: Tensor,
    kernel: Sequence[int],
    source: UniformType,
    target: UniformType,
    *,
    strides: Sequence[int] | None = None,
    pads: Sequence[int] | None = None,
    count_include_pad: bool = True,
) -> Tensor:
    """Asymmetric average pooling: `sat(half_away(float32(sum * scale + offset)))`.

    Padding is filled with the zero point.

    Args:
        As in `avg_pool`.

    Raises:
        UnsupportedOp: the windows do not cover the padded input exactly; the engine then pools in float.
        HagoError: shapes do not match, or q is out of range.

    References:
        TPU-MLIR lib/Conversion/TopToTpu/BM1684X/AvgPool.cpp and tpu.Pool2D.
    """
    check_integers(q, source, "average pooling's input")
    steps, padding = strides or kernel, pads or (0,) * (2 * len(kernel))
    sums = _averages_times_window(q, kernel, steps, padding, source.zero_point, count_include_pad)
    for axis, (side, step) in enumerate(zip(kernel, steps, strict=True)):
        padded = q.shape[axis + 2] + padding[axis] + padding[axis + len(kernel)]
        if (sums.shape[axis + 2] - 1) * step + side < padded:
            raise UnsupportedOp(
                f"asymmetric average pooling leaves part of {padded} values on spatial axis {axis} out "
                f"(kernel {side}, stride {step}): the engine pools in float"
            )
    scale, offset = avg_pool_scale_and_offset(source, target, math.prod(kernel))
    real = (sums.to(torch.float64) * scale + offset).to(torch.float32)
    return to_int_saturated(real, target.dtype)
