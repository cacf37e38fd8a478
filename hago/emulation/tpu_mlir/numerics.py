"""TPU-MLIR's integer arithmetic: round modes, multipliers and shifts, requantization, and casts.

A ratio of scales becomes `multiplier / 2**rshift`. TPU-MLIR has three ways to choose the two: the pair of least error
(the bm1684x family), a truncated multiplier (cv18xx), and that of TFLite (convolutions of cv18xx). The functions round
scales to float32 first, because TPU-MLIR passes them as `float`. The operators of `operators.py` are built on these.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Literal, get_args

import torch
from torch import Tensor

from hago.arithmetic.multipliers import least_error_multiplier
from hago.arithmetic.numerics import saturate
from hago.arithmetic.rounding import ROUNDINGS, round_half_away, rounding_shift
from hago.arithmetic.types import DTYPES, INT8, INT32, DType
from hago.emulation import tflite
from hago.emulation._checks import check_finite, check_range
from hago.errors import HagoError, did_you_mean

#: The largest right shift: products of 32-bit accumulators and multipliers are at most 2**62 in magnitude.
LARGEST_RSHIFT: Final = 62


# ---------------------------------------------------------------- rounding
def _half_odd(x: Tensor) -> Tensor:
    low = x.floor()
    odd = torch.where(torch.remainder(low, 2) == 1, low, low + 1)
    return torch.where((x - low) == 0.5, odd, torch.round(x))


def _half_down(x: Tensor) -> Tensor:
    return -ROUNDINGS["half_up"](-x)


def _half_toward_zero(x: Tensor) -> Tensor:
    return torch.copysign(_half_down(x.abs()), x)


#: TPU-MLIR's round modes on floats, by its own names; all are exact.
ROUND_MODES: Final[Mapping[str, Callable[[Tensor], Tensor]]] = MappingProxyType(
    {
        "HalfAwayFromZero": ROUNDINGS["half_away"],
        "HalfUp": ROUNDINGS["half_up"],
        "HalfDown": _half_down,
        "HalfToEven": torch.round,
        "HalfToOdd": _half_odd,
        "HalfTowardsZero": _half_toward_zero,
        "TowardsZero": torch.trunc,
        "AwayFromZero": lambda x: torch.copysign(x.abs().ceil(), x),
        "Up": torch.ceil,
        "Down": torch.floor,
    }
)


def to_int(x: Tensor, mode: str = "HalfAwayFromZero") -> Tensor:
    """Round float values to int64; `x` itself is not changed.

    Args:
        x: float32 or float64, magnitudes below 2**63.
        mode: a key of ROUND_MODES.

    Raises:
        HagoError: the mode is unknown.

    References:
        TPU-MLIR `to_int` (lib/Support/MathUtils.cpp).
    """
    if mode not in ROUND_MODES:
        known = ", ".join(ROUND_MODES)
        raise HagoError(f"unknown round mode {mode!r}; known: {known}." + did_you_mean(mode, ROUND_MODES))
    return ROUND_MODES[mode](x.clone()).to(torch.int64)


def to_int_saturated(x: Tensor, dtype: DType, mode: str = "HalfAwayFromZero") -> Tensor:
    """Round with `to_int` and clamp into `dtype`; infinities saturate.

    Raises:
        HagoError: a value is NaN, which upstream leaves undefined.
    """
    if bool(torch.isnan(x).any()):
        raise HagoError("values to quantize hold NaN; expected numbers")
    # This clamp only keeps the conversion to int64 defined: its limits are outside every dtype that is supported.
    return saturate(to_int(x.clamp(-(2.0**40), 2.0**40), mode), dtype)


def as_float32(value: float) -> float:
    """The float32 nearest to `value`, as a Python number."""
    return float(torch.tensor(value, dtype=torch.float64).to(torch.float32))


# ---------------------------------------------------------------- multiplier and shift
def scale_and_shift(scale: Tensor | float, bits: int = 32) -> tuple[Tensor, Tensor]:
    """Integers `(multiplier, rshift)` of least error for `scale`; the shift is -32 to 30.

    The candidates are `m = round(scale * 2**n)`, half away from zero, for every shift n, if |m| is below
    2**31 - 1 (`bits` 32) or 127 (`bits` 8). The first with the least `float32(|m / 2**n - scale|)` is returned.

    Args:
        scale: real ratios of any shape, magnitude below 2**31; rounded to float32 first.

    Returns:
        int64 multipliers and right shifts of that shape; a negative one shifts left.

    Raises:
        HagoError: `bits` is neither 8 nor 32, or a scale is not finite or too large.

    References:
        TPU-MLIR `get_scale_and_shift` (lib/Support/MathUtils.cpp).
    """
    return least_error_multiplier(*_checked_scale(scale, bits), first=-32)


def scale_and_shift_positive(scale: Tensor | float, bits: int = 32) -> tuple[Tensor, Tensor]:
    """`scale_and_shift`, limited to shifts 0 to 30.

    Where no multiplier fits, the shift is 0 and the multiplier is the rounded scale, whatever its size.

    References:
        TPU-MLIR `get_scale_and_shift_positive` (lib/Support/MathUtils.cpp).
    """
    return least_error_multiplier(*_checked_scale(scale, bits), first=0)


def _checked_scale(scale: Tensor | float, bits: int) -> tuple[Tensor, int]:
    """The scales in float64 and the bits of a multiplier's magnitude, both checked."""
    if bits not in (8, 32):
        raise HagoError(f"a multiplier of {bits} bits; expected 8 or 32")
    value = torch.as_tensor(scale, dtype=torch.float64)
    check_finite("scales", value)
    if value.numel() and float(value.abs().max()) >= 2.0**31:
        raise HagoError(f"a scale is {float(value.abs().max())}; expected a magnitude below 2**31")
    return value, bits - 1


def multiplier_and_rshift_truncated(qscale: float, max_multiplier: int = 127) -> tuple[int, int]:
    """The multiplier `trunc(qscale * 2**r)` for the first right shift r with `qscale * 2**(r+1) >= max_multiplier`.

    A qscale above `max_multiplier` gives (max_multiplier, 0); one too small for a shift of 62 gives (0, 0).

    Args:
        qscale: TPU-MLIR's name for a ratio of scales that becomes a multiplier and a shift.
        max_multiplier: the largest multiplier.

    Raises:
        HagoError: `qscale` is negative or not finite, or `max_multiplier` is not positive.

    References:
        TPU-MLIR `getRShiftAndMultiplierFromQScale` with `qdm` off (lib/Support/MathUtils.cpp).
    """
    if not math.isfinite(qscale) or qscale < 0 or max_multiplier < 1:
        raise HagoError(f"a qscale of {qscale}, multipliers up to {max_multiplier}; expected 0 or more, and 1 or more")
    if qscale > max_multiplier:
        return max_multiplier, 0
    for rshift in range(63):
        if math.ldexp(qscale, rshift + 1) >= max_multiplier:
            return int(math.ldexp(qscale, rshift)), rshift
    return 0, 0


def qdm_multiplier_and_rshift(qscale: float) -> tuple[int, int]:
    """A 32-bit multiplier in [2**30, 2**31) and its right shift: `qscale ~ m / 2**31 / 2**rshift`.

    QDM is TPU-MLIR's name for a 32-bit multiplier with TFLite's two roundings, as convolutions on cv18xx have.

    A qscale of 1 or more becomes 0.999999; one below about 2**-32 gives (0, 0).

    Raises:
        HagoError: `qscale` is negative or not finite.

    References:
        TPU-MLIR `getRShiftAndMultiplierFromQScale` with `qdm` on: cv18xx convolutions.
    """
    if not math.isfinite(qscale) or qscale < 0:
        raise HagoError(f"a qscale of {qscale}; expected a finite one, 0 or more")
    m, shift = tflite.quantize_multiplier(0.999999 if qscale >= 1 else qscale, "single")
    return int(m), -int(shift)


# ---------------------------------------------------------------- requantization
def apply_multiplier_and_rshift(v: Tensor, m: Tensor | int, rshift: Tensor | int, rounding: str = "half_up") -> Tensor:
    """`round(v * m / 2**rshift)` in int64; a negative shift is to the left.

    Args:
        v: int64 that holds int32 values; their product with `m`, shifted left, must stay below 2**62.
        m, rshift: broadcast against `v`; the shift is -32 to 62.
        rounding: a mode of `hago.arithmetic.rounding`. The interpreter of TPU-MLIR always rounds half up, whatever
            round mode is printed with an operator.

    Raises:
        HagoError: a value is out of range.

    References:
        TPU-MLIR `applyMultiplierAndRShift`, MultiplierShift (lib/Support/MathUtils.cpp).
    """
    multiplier, n = torch.as_tensor(m, dtype=torch.int64), torch.as_tensor(rshift, dtype=torch.int64)
    check_range("v of a requantization", v, -(1 << 31), (1 << 31) - 1)
    check_range("the multiplier of a requantization", multiplier, INT32.min, INT32.max)
    check_range("the right shift of a requantization", n, -32, LARGEST_RSHIFT)
    if rounding not in ROUNDINGS:
        known = ", ".join(ROUNDINGS)
        raise HagoError(f"unknown rounding {rounding!r}; known: {known}." + did_you_mean(rounding, ROUNDINGS))
    product = v * multiplier
    left = -int(n.min()) if n.numel() else 0
    if left > 0:
        check_range(f"a product shifted left by {left}", product, -(1 << (62 - left)), 1 << (62 - left))
    return rounding_shift(product, n, rounding)


def apply_multiplier_and_rshift_float(v: Tensor, m: Tensor | int, rshift: int) -> Tensor:
    """`round(float32(v) * m / 2**rshift)` half up, in float32: the requantization of cv18xx except in convolutions.

    References:
        TPU-MLIR `applyMultiplierAndRShift` on cv18xx (lib/Support/MathUtils.cpp).
    """
    scaled = v.to(torch.float32) * torch.as_tensor(m).to(torch.float32) / float(1 << rshift)
    return to_int(scaled, "HalfUp")


# ---------------------------------------------------------------- casts
# Quantized types, made from rows of a calibration table, and casts between real values and integers.

#: How the range is derived from a row: by the general rule, or by that of the operator that produced the tensor.
Kind = Literal["general", "abs", "unit", "mul", "non_negative", "sub"]

KINDS: Final[tuple[Kind, ...]] = get_args(Kind)


@dataclass(frozen=True, slots=True)
class UniformType:
    """MLIR's uniform quantized type: `real = (q - zero_point) * scale`, q in `dtype`.

    Raises:
        HagoError: the scale is not positive and finite, or the zero point is not in the dtype.
    """

    scale: float
    zero_point: int = 0
    dtype: DType = INT8

    def __post_init__(self) -> None:
        if not (math.isfinite(self.scale) and self.scale > 0):
            raise HagoError(f"a scale is {self.scale}; expected a finite one above 0")
        if not self.dtype.is_int or not self.dtype.min <= self.zero_point <= self.dtype.max:
            raise HagoError(f"a zero point of {self.zero_point} is not in {self.dtype}")

    def __str__(self) -> str:
        return f"{self.dtype} scale {self.scale:.9g} zero {self.zero_point}"


def calibrated_range(
    threshold: float,
    minimum: float,
    maximum: float,
    *,
    asymmetric: bool = False,
    kind: Kind = "general",
    do_relu: bool = False,
    cv18xx: bool = False,
) -> tuple[float, float]:
    """The real range of a tensor, from its row of a calibration table.

        kind            range
        general         symmetric: [-threshold, threshold], or [0, threshold] where `minimum` is not negative;
                        asymmetric: [minimum, maximum]
        abs             [-threshold, threshold]
        unit            [0, 1]: the outputs of Sigmoid and Softmax
        mul             the symmetric range of `general`, even in an asymmetric model
        non_negative    [0, threshold]: a Mul of a tensor with itself, or of outputs of Sigmoid and Relu
        sub             [-threshold, threshold], or [-1e-5, threshold] where `minimum` is not negative

    A fused Relu then raises the lower end to 0, except with `sub`; on cv18xx the lower end is minus the upper one.

    Raises:
        HagoError: the kind is unknown, or a number is not finite.

    References:
        TPU-MLIR lib/Dialect/Top/Transforms/ImportCalibration.cpp.
    """
    if kind not in KINDS:
        raise HagoError(f"unknown kind of row {kind!r}; known: {', '.join(KINDS)}")
    if not all(math.isfinite(v) for v in (threshold, minimum, maximum)):
        raise HagoError(f"a calibration row is ({threshold}, {minimum}, {maximum}); expected finite numbers")
    symmetric_low = -threshold if minimum < 0 else 0.0
    ranges = {
        "general": (minimum, maximum) if asymmetric else (symmetric_low, threshold),
        "abs": (-threshold, threshold),
        "unit": (0.0, 1.0),
        "mul": (symmetric_low, threshold),
        "non_negative": (0.0, threshold),
        "sub": (-threshold if minimum < 0 else -1e-5, threshold),
    }
    low, high = ranges[kind]
    if do_relu and kind != "sub":
        low = 0.0
    return (-high, high) if cv18xx else (low, high)


def uniform_type(low: float, high: float, *, asymmetric: bool = False, bits: int = 8) -> UniformType:
    """The type of a calibrated range: signed where `low` is negative, else unsigned.

    Symmetric: `scale = high / (2**(bits-1) - 1)`, or `/ (2**bits - 1)` where unsigned.
    Asymmetric: `scale = (high - low) / (2**bits - 1)`, zero point `round(qmin - low / scale)` half
    away from zero; if that is not one of the integers, it is clamped, and the scale is computed from the other end.

    Args:
        low, high: real, finite; `low <= 0` symmetric.
        bits: 4, 8 or 16.

    Raises:
        HagoError: the bits are none of these, or the range is empty or not finite.

    References:
        TPU-MLIR `getScale`, `getScaleAndZeroPoint` (lib/Support/Module.cpp).
    """
    if bits not in (4, 8, 16):
        raise HagoError(f"a type of {bits} bits; expected 4, 8 or 16")
    dtype = DTYPES[f"int{bits}" if low < 0 else f"uint{bits}"]
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise HagoError(f"a calibrated range is [{low}, {high}]; expected finite ends, the lower first")
    if not asymmetric:
        return UniformType(high / dtype.max, 0, dtype)
    scale = (high - low) / (dtype.max - dtype.min)
    zero = dtype.min - low / scale
    if zero < dtype.min:
        return UniformType(high / (dtype.max - dtype.min), dtype.min, dtype)
    if zero > dtype.max:
        return UniformType(low / (dtype.min - dtype.max), dtype.max, dtype)
    return UniformType(scale, int(round_half_away(torch.tensor(zero, dtype=torch.float64))), dtype)


def uniform_type_of_row(
    threshold: float,
    minimum: float,
    maximum: float,
    *,
    asymmetric: bool = False,
    kind: Kind = "general",
    do_relu: bool = False,
    bits: int = 8,
) -> UniformType:
    """The type of a tensor, from its row of a calibration table: `uniform_type` of its `calibrated_range`."""
    low, high = calibrated_range(threshold, minimum, maximum, asymmetric=asymmetric, kind=kind, do_relu=do_relu)
    return uniform_type(low, high, asymmetric=asymmetric, bits=bits)


def quantize(x: Tensor, target: UniformType) -> Tensor:
    """Real values to integers: `sat(half_away(float32(x * float32(1 / scale))) + zero_point)`.

    The product is rounded to float32 before it is rounded to an integer, and the zero point is added last: with
    scale 7/255 and zero point 18, -3.5 gives -109, where exact arithmetic gives -110.

    Args:
        x: rounded to float32; infinities saturate.

    Raises:
        HagoError: a value is NaN.

    References:
        TPU-MLIR `requant` and tpu.Cast (lib/Dialect/Tpu/Interfaces/Common/Cast.cpp), except on cv18xx.
    """
    reciprocal = torch.tensor(1.0 / target.scale, dtype=torch.float64).to(torch.float32)
    rounded = round_half_away(x.to(torch.float32) * reciprocal)
    return to_int_saturated(rounded + float(target.zero_point), target.dtype)


def dequantize(q: Tensor, source: UniformType) -> Tensor:
    """Integers to real values: `float32(scale) * (q - zero_point)` in float32.

    References:
        TPU-MLIR `dequant` and tpu.Cast.
    """
    return torch.tensor(source.scale, dtype=torch.float32) * (q - source.zero_point).to(torch.float32)


def requantize(
    acc: Tensor, m: Tensor | int, rshift: Tensor | int, target: UniformType, *, do_relu: bool = False
) -> Tensor:
    """`sat(half_up(acc * m / 2**rshift) + zero_point)`; a fused Relu clamps at the zero point.

    Args:
        acc: int64 accumulators, bias added; m and rshift broadcast against it.

    References:
        TPU-MLIR tpu.Conv2D and tpu.MatMul in the interpreter (the bm1684x family).
    """
    q = apply_multiplier_and_rshift(acc, m, rshift) + target.zero_point
    return saturate(q.clamp_min(target.zero_point) if do_relu else q, target.dtype)


def check_integers(q: Tensor, source: UniformType, what: str) -> None:
    """Refuse integers outside the dtype of `source`.

    Raises:
        HagoError: as said; the message begins with `what`.
    """
    check_range(what, q, source.dtype.min, source.dtype.max)
