"""TensorFlow Lite: quantized multipliers, requantization in both roundings, and quantization parameters.

A real multiplier is `multiplier / 2**31 * 2**shift` with the multiplier in [2**30, 2**31); a positive shift is to the
left. The reference kernels round twice by default, and once in a build with `TFLITE_SINGLE_ROUNDING`; at ties and near
them the two results differ by one.
"""

from __future__ import annotations

import math
from typing import Final, Literal, get_args

import torch
from torch import Tensor

from hago.arithmetic.multipliers import multiplier_and_shift
from hago.arithmetic.numerics import saturate, wrap
from hago.arithmetic.rounding import round_half_away, rounding_shift
from hago.arithmetic.types import INT8, INT32, DType
from hago.emulation._checks import check_finite, check_range
from hago.emulation.gemmlowp import rounding_divide_by_pot, saturating_rounding_doubling_high_mul
from hago.errors import HagoError, check_choice

Rounding = Literal["double", "single"]

#: Multipliers with a smaller shift are replaced by 0.
SMALLEST_SHIFT: Final = -31
#: Single rounding saturates the multiplier at larger shifts.
LARGEST_SHIFT: Final = 30


def quantize_multiplier(real: Tensor | float, rounding: Rounding = "double") -> tuple[Tensor, Tensor]:
    """Integers `(multiplier, shift)` with `real ~ multiplier * 2**(shift - 31)`.

    `frexp` splits the value, its fraction times 2**31 is rounded half away from zero, and a carry goes into the
    shift. 0, and magnitudes below about 2**-32, give (0, 0). With single rounding a shift above
    30 saturates to (2**31 - 1, 30).

    Args:
        real: float64 multipliers of any shape and sign, or one number.

    Returns:
        int64 multipliers and shifts of that shape.

    Raises:
        HagoError: a multiplier is not finite, or the rounding is unknown.

    References:
        TFLite `QuantizeMultiplier` and `QuantizeMultiplierArray`
        (lite/kernels/internal/quantization_util.cc).
    """
    check_choice("rounding", rounding, get_args(Rounding))
    value = torch.as_tensor(real, dtype=torch.float64)
    check_finite("multipliers", value)
    m, n = multiplier_and_shift(value)
    shift = 31 - n
    flushed = shift < SMALLEST_SHIFT
    m, shift = torch.where(flushed, 0, m), torch.where(flushed, 0, shift)
    if rounding == "single":
        saturated = shift > LARGEST_SHIFT
        m, shift = torch.where(saturated, INT32.max, m), torch.where(saturated, LARGEST_SHIFT, shift)
    return m, shift


def quantize_multiplier_smaller_than_one(real: float) -> tuple[int, int]:
    """`quantize_multiplier` of a value above 0 and below 1; the shift is 0 or negative.

    Raises:
        HagoError: the value is not between 0 and 1, or rounds up to 1.

    References:
        TFLite `QuantizeMultiplierSmallerThanOneExp`.
    """
    if not 0 < real < 1:
        raise HagoError(f"a multiplier smaller than one is {real}; expected a value above 0 and below 1")
    m, shift = quantize_multiplier(real)
    if int(shift) > 0:
        raise HagoError(f"the multiplier {real} rounds up to 1; expected one that 31 bits tell from 1")
    return int(m), int(shift)


def quantize_multiplier_greater_than_one(real: float) -> tuple[int, int]:
    """`quantize_multiplier` of a finite value above 1; the shift is 0 or positive.

    Raises:
        HagoError: the value is not above 1 or not finite.

    References:
        TFLite `QuantizeMultiplierGreaterThanOne`.
    """
    if not real > 1:
        raise HagoError(f"a multiplier greater than one is {real}; expected a value above 1")
    m, shift = quantize_multiplier(real)
    return int(m), int(shift)


def multiply_by_quantized_multiplier(
    x: Tensor, multiplier: Tensor | int, shift: Tensor | int, rounding: Rounding = "double"
) -> Tensor:
    """`x * multiplier * 2**(shift - 31)` as an int32.

        double: RDBPOT(SRDHM(x << max(shift, 0), multiplier), max(-shift, 0)), ties up, then away from zero
        single: (x * multiplier + 2**(30 - shift)) >> (31 - shift), ties up, rounded once

    SRDHM and RDBPOT are gemmlowp's `saturating_rounding_doubling_high_mul` and `rounding_divide_by_pot`. Where the left
    shift or the result does not fit int32, which upstream leaves undefined, it wraps.

    Args:
        x: int64 that holds int32 values.
        multiplier: int32 values, either sign; broadcasts against `x`.
        shift: -31 to 30; broadcasts against `x`.

    Raises:
        HagoError: an argument is out of range, or the rounding is unknown.

    References:
        TFLite `MultiplyByQuantizedMultiplier` (lite/kernels/internal/common.h).
    """
    check_choice("rounding", rounding, get_args(Rounding))
    m, s = torch.as_tensor(multiplier, dtype=torch.int64), torch.as_tensor(shift, dtype=torch.int64)
    check_range("x of a requantization", x, INT32.min, INT32.max)
    check_range("the multiplier of a requantization", m, INT32.min, INT32.max)
    check_range("the shift of a requantization", s, SMALLEST_SHIFT, LARGEST_SHIFT)
    if rounding == "single":
        return wrap(rounding_shift(x * m, 31 - s, "half_up"), INT32)
    shifted = wrap(x << s.clamp_min(0), INT32)
    return rounding_divide_by_pot(saturating_rounding_doubling_high_mul(shifted, m), (-s).clamp_min(0))


def multiply_by_quantized_multiplier_int64(x: Tensor, multiplier: Tensor | int, shift: Tensor | int) -> Tensor:
    """`x * multiplier * 2**(shift - 31)` of a 48-bit accumulator, with the multiplier reduced to 15 bits.

    `reduced = (multiplier + 2**15) >> 16`, or 0x7FFF from 0x7FFF0000 on; the result is
    `(x * reduced + 2**(14 - shift)) >> (15 - shift)`, wrapped to int32 if it does not fit.

    Args:
        x: int64 in [-2**47, 2**47).
        multiplier: 0 to 2**31 - 1.
        shift: -31 to 7.

    Raises:
        HagoError: an argument is out of range.

    References:
        TFLite `MultiplyByQuantizedMultiplier(int64_t, ...)`: the 16x8 kernels.
    """
    m, s = torch.as_tensor(multiplier, dtype=torch.int64), torch.as_tensor(shift, dtype=torch.int64)
    check_range("x of a 48-bit requantization", x, -(1 << 47), (1 << 47) - 1)
    check_range("the multiplier of a 48-bit requantization", m, 0, INT32.max)
    check_range("the shift of a 48-bit requantization", s, SMALLEST_SHIFT, 7)
    reduced = torch.where(m >= 0x7FFF0000, 0x7FFF, (m + (1 << 15)) >> 16)
    return wrap(rounding_shift(x * reduced, 15 - s, "half_up"), INT32)


def requantize(
    acc: Tensor,
    multiplier: Tensor | int,
    shift: Tensor | int,
    zero_point: Tensor | int = 0,
    dtype: DType = INT8,
    rounding: Rounding = "double",
) -> Tensor:
    """The output stage of a kernel: `multiply_by_quantized_multiplier`, plus the zero point, clamped into `dtype`.

    Args:
        acc: int64 that holds int32 accumulators, bias added.
        multiplier, shift: per tensor or, in a shape that broadcasts against `acc`, per channel.

    References:
        TFLite's int8 convolution and fully connected reference kernels.
    """
    return saturate(multiply_by_quantized_multiplier(acc, multiplier, shift, rounding) + zero_point, dtype)


def choose_quantization_params(rmin: float, rmax: float, qmin: int = 0, qmax: int = 255) -> tuple[float, int]:
    """The affine `(scale, zero_point)` of a range that contains 0, in float64.

    `scale = (rmax - rmin) / (qmax - qmin)`. The zero point is computed from the end with the
    smaller bound of the rounding error, `|q| + |r / scale|`, or from the upper one at a tie; it is rounded half away
    from zero and clamped. An empty range gives (0.0, 0).

    Raises:
        HagoError: 0 is not in [rmin, rmax], the range is not finite or too narrow, or qmin is not below qmax.

    References:
        TFLite `ChooseQuantizationParams` (lite/kernels/internal/quantization_util.h).
    """
    if not (math.isfinite(rmin) and math.isfinite(rmax) and rmin <= 0 <= rmax):
        raise HagoError(f"a range is [{rmin}, {rmax}]; expected finite ends with 0 between them")
    if qmin >= qmax:
        raise HagoError(f"the integers are [{qmin}, {qmax}]; expected the smaller first")
    if rmin == rmax:
        return 0.0, 0
    scale = (rmax - rmin) / (qmax - qmin)
    if scale == 0 or not math.isfinite(scale):
        raise HagoError(f"a range of [{rmin}, {rmax}] has no scale in float64; expected a wider or a narrower one")
    from_min, from_max = qmin - rmin / scale, qmax - rmax / scale
    zero = from_min if abs(qmin) + abs(rmin / scale) < abs(qmax) + abs(rmax / scale) else from_max
    if zero < qmin or zero > qmax:
        return scale, qmin if zero < qmin else qmax
    return scale, int(round_half_away(torch.tensor(zero, dtype=torch.float64)))
