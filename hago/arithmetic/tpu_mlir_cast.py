"""TPU-MLIR: from a calibration row to a quantized type, and the casts between real values and integers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, Literal

import torch
from torch import Tensor

from hago.arithmetic._checks import require_range
from hago.arithmetic.tpu_mlir import apply_multiplier_and_rshift, to_int_saturated
from hago.errors import HagoError
from hago.numerics import saturate
from hago.rounding import round_half_away
from hago.types import DTYPES, INT8, DType

#: How a row of the table is read: as it stands, or as the operator that made the tensor demands.
Kind = Literal["general", "abs", "unit", "mul", "non_negative", "sub"]

KINDS: Final = ("general", "abs", "unit", "mul", "non_negative", "sub")


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
    """The real range that a row of a calibration table gives its tensor.

    Symmetric: `[-threshold or 0, threshold]`, negative where `minimum` is; asymmetric: `[minimum,
    maximum]`. Of the kinds, `abs` takes +-threshold, `unit` (Sigmoid, Softmax) [0, 1], `mul` the
    symmetric range even where the model is asymmetric, `non_negative` (a Mul of one tensor with
    itself, or of Sigmoid and Relu outputs) [0, threshold], and `sub` -threshold or -1e-5 below. A
    fused Relu then cuts at 0, except in `sub`; cv18xx takes +-upper end.

    Raises:
        HagoError: the kind is unknown, or a number is not finite.

    References:
        TPU-MLIR lib/Dialect/Top/Transforms/ImportCalibration.cpp.
    """
    if kind not in KINDS:
        raise HagoError(f"unknown kind of row {kind!r}; known: {', '.join(KINDS)}")
    if not all(math.isfinite(v) for v in (threshold, minimum, maximum)):
        raise HagoError(f"a calibration row is ({threshold}, {minimum}, {maximum}); expected finite numbers")
    below = -threshold if minimum < 0 else 0.0
    ranges = {
        "general": (minimum, maximum) if asymmetric else (below, threshold),
        "abs": (-threshold, threshold),
        "unit": (0.0, 1.0),
        "mul": (below, threshold),
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
    away from zero; where that leaves the integers it is clamped, and the scale is taken from the other end.

    Args:
        low, high: real, finite; `low <= 0` symmetric.
        bits: 4, 8 or 16.

    Raises:
        HagoError: the bits are none of these, or the range has no width.

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
    """`uniform_type` of `calibrated_range`: from a row of a calibration table to integers."""
    low, high = calibrated_range(threshold, minimum, maximum, asymmetric=asymmetric, kind=kind, do_relu=do_relu)
    return uniform_type(low, high, asymmetric=asymmetric, bits=bits)


def quantize(x: Tensor, target: UniformType) -> Tensor:
    """Real values to integers: `sat(half_away(float32(x * float32(1 / scale))) + zero_point)`.

    The product is rounded to float32 before it is rounded to an integer, and the zero point comes
    after: with scale 7/255 and zero point 18, -3.5 gives -109, where exact arithmetic gives -110.

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
        TPU-MLIR tpu.Conv2D and tpu.MatMul in the interpreter (bm1684x and its kin).
    """
    q = apply_multiplier_and_rshift(acc, m, rshift) + target.zero_point
    return saturate(q.clamp_min(target.zero_point) if do_relu else q, target.dtype)


def require_integers(q: Tensor, source: UniformType, what: str) -> None:
    """Refuse integers that the type cannot hold.

    Raises:
        HagoError: a value lies outside the type's dtype.
    """
    require_range(what, q, source.dtype.min, source.dtype.max)
