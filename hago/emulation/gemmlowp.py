"""gemmlowp: its fixed-point primitives, and the quantized matrix multiplication of its example from end to end.

Integers are int64 tensors that hold values of the width that a function names. The primitives call those of
`hago.arithmetic.numerics` and `hago.arithmetic.rounding`, and check the ranges that gemmlowp's types imply.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hago.arithmetic.multipliers import multiplier_and_shift
from hago.arithmetic.numerics import doubling_high_multiply
from hago.arithmetic.rounding import round_half_away, rounding_shift
from hago.arithmetic.types import INT16, INT32
from hago.emulation._checks import check_finite, check_range
from hago.errors import HagoError


def saturating_rounding_doubling_high_mul(a: Tensor, b: Tensor, bits: int = 32) -> Tensor:
    """`round(a * b / 2**(bits-1))`, ties toward +infinity; only min * min saturates.

    Args:
        a, b: int64 that hold int32 (`bits` 32) or int16 (`bits` 16) values; they broadcast.

    Returns:
        int64 of the broadcast shape, in the range of the width.

    Raises:
        HagoError: `bits` is neither 16 nor 32, or a value does not fit them.

    References:
        gemmlowp `SaturatingRoundingDoublingHighMul` (fixedpoint/fixedpoint.h): the product plus
        2**(bits-2), or 1 - 2**(bits-2) where it is negative, divided with truncation.
    """
    if bits not in (16, 32):
        raise HagoError(f"a doubling high multiply of {bits} bits; expected 16 or 32")
    dtype = INT16 if bits == 16 else INT32
    check_range("a doubling high multiply", a, dtype.min, dtype.max)
    check_range("a doubling high multiply", b, dtype.min, dtype.max)
    if bits == 32:
        return doubling_high_multiply(a, b)
    return rounding_shift(a * b, torch.full_like(b, 15), "half_up").clamp_max(dtype.max)


def rounding_divide_by_pot(x: Tensor, exponent: Tensor | int) -> Tensor:
    """`round(x / 2**exponent)`, ties away from zero.

    Args:
        x: int64 that holds int32 values.
        exponent: 0 to 31; broadcasts against `x`.

    Raises:
        HagoError: an argument is out of range.

    References:
        gemmlowp `RoundingDivideByPOT` (fixedpoint/fixedpoint.h).
    """
    n = torch.as_tensor(exponent, dtype=torch.int64)
    check_range("the exponent of a rounding division", n, 0, 31)
    check_range("a rounding division", x, INT32.min, INT32.max)
    return rounding_shift(x, n, "half_away")


def quantize_multiplier_smaller_than_one(real: float) -> tuple[int, int]:
    """Integers `(multiplier, right_shift)` with `real ~ multiplier / 2**31 / 2**right_shift`.

    Args:
        real: a ratio of scales, above 0 and below 1.

    Returns:
        The multiplier, in [2**30, 2**31), and the right shift, 0 or more.

    Raises:
        HagoError: `real` is not between 0 and 1.

    References:
        gemmlowp doc/quantization_example.cc `QuantizeMultiplierSmallerThanOne`.
    """
    if not 0 < real < 1:
        raise HagoError(f"a multiplier smaller than one is {real}; expected a value above 0 and below 1")
    m, n = multiplier_and_shift(torch.tensor(real, dtype=torch.float64))
    return int(m), int(n) - 31


def choose_quantization_params(lo: float, hi: float) -> tuple[float, int]:
    """The uint8 `(scale, zero_point)` of a real range, widened to contain 0, in float32.

    `scale = (hi - lo) / 255`; the zero point is `-lo / scale`, ties away from zero, clamped.

    Raises:
        HagoError: the range is not finite, upside down, or too narrow for a float32 scale.

    References:
        gemmlowp doc/quantization_example.cc `ChooseQuantizationParams`.
    """
    ends = torch.tensor([lo, hi], dtype=torch.float32)
    check_finite("a range", ends)
    if lo > hi:
        raise HagoError(f"a range is [{lo}, {hi}]; expected the lower end first")
    low, high = ends[0].clamp_max(0.0), ends[1].clamp_min(0.0)
    scale = float((high - low) / 255)
    if scale == 0:
        raise HagoError(f"a range is [{lo}, {hi}] around 0, too narrow for a float32 scale; expected a wider one")
    zero = round_half_away(torch.tensor(-float(low) / scale, dtype=torch.float64))
    return scale, int(zero.clamp(0, 255))


def quantize(x: Tensor, scale: float, zero_point: int) -> Tensor:
    """`clamp(round(zero_point + x / scale), 0, 255)` in float32, ties away from zero.

    The zero point is added before rounding.

    References:
        gemmlowp doc/quantization_example.cc `Quantize`.
    """
    check_finite("values to quantize", x)
    real = zero_point + x.to(torch.float32) / torch.tensor(scale, dtype=torch.float32)
    return round_half_away(real.clamp(0, 255)).to(torch.int64)


def quantize_down(acc: Tensor, multiplier: int, right_shift: int, offset: int, low: int = 0, high: int = 255) -> Tensor:
    """Requantize accumulators: `clamp(RDBPOT(SRDHM(acc, multiplier), right_shift) + offset, low, high)`.

    RDBPOT is `rounding_divide_by_pot`, SRDHM is `saturating_rounding_doubling_high_mul`.

    Args:
        acc: int64 that holds int32 accumulators.

    References:
        gemmlowp `OutputStageQuantizeDownInt32ByFixedPoint`, then the saturating cast to uint8.
    """
    m = torch.tensor(multiplier, dtype=torch.int64)
    scaled = rounding_divide_by_pot(saturating_rounding_doubling_high_mul(acc, m), right_shift)
    return (scaled + offset).clamp(low, high)


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedGemm:
    """A uint8 matrix product with all intermediate values, returned by `quantized_gemm`; scales are float32 values."""

    lhs_scale: float
    lhs_zero_point: int
    rhs_scale: float
    rhs_zero_point: int
    result_scale: float
    result_zero_point: int
    lhs: Tensor
    rhs: Tensor
    real_multiplier: float
    multiplier: int
    right_shift: int
    result: Tensor


def quantized_gemm(lhs: Tensor, rhs: Tensor) -> QuantizedGemm:
    """Quantize two real matrices to uint8, multiply them in integers, and requantize the product to uint8.

    The range of the result is that of the float product. Accumulators are exact.

    Args:
        lhs: float32, (rows, depth).
        rhs: float32, (depth, columns).

    Raises:
        HagoError: the shapes do not multiply, a value is not finite, a range is too narrow, or the
            ratio of scales is not smaller than one.

    References:
        gemmlowp doc/quantization_example.cc.
    """
    if lhs.dim() != 2 or rhs.dim() != 2 or lhs.shape[1] != rhs.shape[0]:
        raise HagoError(f"matrices of {tuple(lhs.shape)} and {tuple(rhs.shape)} do not multiply")
    a, b = lhs.to(torch.float32), rhs.to(torch.float32)
    real = a @ b
    (sa, za), (sb, zb), (sr, zr) = (choose_quantization_params(float(t.min()), float(t.max())) for t in (a, b, real))
    qa, qb = quantize(a, sa, za), quantize(b, sb, zb)
    product = torch.tensor(sa, dtype=torch.float32) * torch.tensor(sb, dtype=torch.float32)
    ratio = float(product / torch.tensor(sr, dtype=torch.float32))
    multiplier, shift = quantize_multiplier_smaller_than_one(ratio)
    result = quantize_down((qa - za) @ (qb - zb), multiplier, shift, zr)
    return QuantizedGemm(sa, za, sb, zb, sr, zr, qa, qb, ratio, multiplier, shift, result)
