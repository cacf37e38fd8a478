"""TPU-MLIR: int8 Add and Mul, with the multipliers of each family of chips.

bm1684x and its kin scale every operand of an Add on its own, rounding half up each time, and sum
after; cv18xx sums first, with one common right shift. Multipliers have 8 bits in both.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hago.arithmetic.tpu_mlir import (
    apply_multiplier_and_rshift,
    apply_multiplier_and_rshift_float,
    as_float32,
    multiplier_and_rshift_truncated,
    scale_and_shift,
    scale_and_shift_positive,
    to_int_saturated,
)
from hago.arithmetic.tpu_mlir_cast import UniformType, require_integers
from hago.errors import HagoError, UnsupportedOp
from hago.numerics import saturate, wrap
from hago.types import INT8


@dataclass(frozen=True, slots=True)
class Multipliers:
    """One multiplier and one right shift per operand."""

    multipliers: tuple[int, ...]
    rshifts: tuple[int, ...]


def _ratios(scales: Sequence[float], target_scale: float, coefficients: Sequence[float] | None) -> list[float]:
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
        UnsupportedOp: a multiplier would be negative: the engine adds in float.
        HagoError: a coefficient is 0, or the numbers of scales and coefficients differ.

    References:
        TPU-MLIR lib/Conversion/TopToTpu/BM1684/Add.cpp, `calRightShiftNumUseCblas`.
    """
    ratios = _ratios(scales, target_scale, None)
    factors = [1.0] * len(ratios) if coefficients is None else [as_float32(c) for c in coefficients]
    _ratios(scales, target_scale, factors)
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
        scales, target_scale: thresholds do as well; only their ratios count.

    References:
        TPU-MLIR lib/Conversion/TopToTpu/CV18xx/Add.cpp.
    """
    qscales = [as_float32(q) for q in _ratios(scales, target_scale, coefficients)]
    _, rshift = multiplier_and_rshift_truncated(max(abs(q) for q in qscales))
    return Multipliers(tuple(truncated_multiplier(q, rshift) for q in qscales), (rshift,) * len(qscales))


def truncated_multiplier(qscale: float, rshift: int) -> int:
    """`trunc(qscale * 2**rshift)` as an int8; what does not fit wraps.

    References:
        TPU-MLIR `getMultiplierI8FromQScaleAndRShift` (lib/Support/MathUtils.cpp).
    """
    return int(wrap(torch.tensor(math.trunc(math.ldexp(qscale, rshift))), INT8))


# ---------------------------------------------------------------- Add
def _check(operands: Sequence[Tensor], sources: Sequence[UniformType], what: str, how: Multipliers | None) -> None:
    multipliers = len(operands) if how is None else len(how.multipliers)
    if not operands or not len(operands) == len(sources) == multipliers:
        raise HagoError(
            f"{what} of {len(operands)} operands, {len(sources)} types and {multipliers} multipliers; "
            "expected as many of each, at least one"
        )
    for q, source in zip(operands, sources, strict=True):
        require_integers(q, source, f"an operand of {what}")
    for sizes in itertools.zip_longest(*(reversed(q.shape) for q in operands), fillvalue=1):
        if len(set(sizes) - {1}) > 1:
            raise HagoError(f"{what} of {[tuple(q.shape) for q in operands]}: the shapes do not broadcast")


def add(
    operands: Sequence[Tensor],
    sources: Sequence[UniformType],
    target: UniformType,
    how: Multipliers,
    *,
    do_relu: bool = False,
) -> Tensor:
    """`sat(sum(half_up((q - z) * m >> r)) + zy)`, rounded per operand; a Relu acts before the zero point.

    Args:
        operands: int64 stored integers that broadcast.
        how: from `add_multipliers` or `add_multipliers_bm1684`.

    Raises:
        HagoError: operands, types and multipliers are not as many, or a value is out of range.

    References:
        TPU-MLIR tpu.Add in the interpreter, all chips but cv18xx.
    """
    _check(operands, sources, "an addition", how)
    total = torch.zeros((), dtype=torch.int64)
    for q, source, m, r in zip(operands, sources, how.multipliers, how.rshifts, strict=True):
        total = total + apply_multiplier_and_rshift(q - source.zero_point, m, r)
    return saturate((total.clamp_min(0) if do_relu else total) + target.zero_point, target.dtype)


def add_cv18xx(
    operands: Sequence[Tensor],
    sources: Sequence[UniformType],
    target: UniformType,
    how: Multipliers,
    *,
    do_relu: bool = False,
) -> Tensor:
    """`sat(half_up(sum(q * m) / 2**r))` in float32, symmetric: one rounding for all operands.

    Args:
        how: from `add_multipliers_cv18xx`.

    References:
        TPU-MLIR tpu.Add in the interpreter, on cv18xx.
    """
    _check(operands, sources, "an addition", how)
    total = torch.zeros((), dtype=torch.int64)
    for q, m in zip(operands, how.multipliers, strict=True):
        total = total + q * m
    out = apply_multiplier_and_rshift_float(total.clamp_min(0) if do_relu else total, 1, how.rshifts[0])
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
    """`sat(half_up(prod(q - z) * m >> r) + zy)`, m and r from `mul_multiplier`.

    Args:
        operands: int64 stored integers that broadcast; one or two.

    Raises:
        HagoError: operands and types are not as many, or a value is out of range.

    References:
        TPU-MLIR tpu.Mul in the interpreter.
    """
    _check(operands, sources, "a multiplication", None)
    m, r = mul_multiplier([s.scale for s in sources], target.scale)
    product = operands[0] - sources[0].zero_point
    for q, source in zip(operands[1:], sources[1:], strict=True):
        product = product * (q - source.zero_point)
    out = apply_multiplier_and_rshift(product.clamp_min(0) if do_relu else product, m, r)
    return saturate(out + target.zero_point, target.dtype)
