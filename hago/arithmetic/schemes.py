"""Schemes: quantization parameters for a range of real values, one pure function per scheme.

A scheme maps thresholds `[lo, hi]`, bits and a dtype to (scale, zero point, qmin, qmax). `make_qparams` calls it and
rounds the scale to float32, in which engines store it. The numbered equations are in docs/numerics.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from hago.arithmetic.groups import groups_of
from hago.arithmetic.numerics import power_of_two_at_least
from hago.arithmetic.types import DTYPES, DType, QParams
from hago.errors import HagoError, did_you_mean

#: Scales below this would make float32 ratios of scales overflow or lose bits.
SMALLEST_SCALE: Final = 2.0**-100

Scheme = Callable[[Tensor, Tensor, int, DType], tuple[Tensor, Tensor, int, int]]


def _unsigned(lo: Tensor, dtype: DType) -> bool:
    return not dtype.signed and not bool((lo < 0).any())


def _symmetric(
    lo: Tensor, hi: Tensor, bits: int, dtype: DType, quanta_above_top: int
) -> tuple[Tensor, Tensor, int, int]:
    """A scheme with zero point 0, or the middle of an unsigned dtype that has to hold negative values.

    Args:
        quanta_above_top: the quanta between the largest integer and the threshold.
    """
    if _unsigned(lo, dtype):
        top = (1 << bits) - 1
        return hi / (top + quanta_above_top), torch.zeros_like(hi), 0, top
    zero = 0 if dtype.signed else 1 << (bits - 1)
    top = (1 << (bits - 1)) - 1
    t = torch.maximum(lo.abs(), hi.abs())
    return t / (top + quanta_above_top), torch.full_like(t, zero), zero - top, zero + top


def _two_sided(lo: Tensor, hi: Tensor, bits: int, dtype: DType, quanta: int) -> tuple[Tensor, Tensor, int, int]:
    """A scheme over a range that is widened to hold 0, with a rounded zero point.

    Args:
        quanta: between the ends of the range.
    """
    lo, hi = lo.clamp_max(0.0), hi.clamp_min(0.0)
    qmin = -(1 << (bits - 1)) if dtype.signed else 0
    qmax = qmin + (1 << bits) - 1
    scale = (hi - lo) / float(quanta)
    safe = torch.where(scale > 0, scale, torch.ones_like(scale))
    return scale, torch.round(qmin - lo / safe).clamp(qmin, qmax), qmin, qmax


def hago(lo: Tensor, hi: Tensor, bits: int, dtype: DType) -> tuple[Tensor, Tensor, int, int]:
    """`scale = max(|lo|, |hi|) / 2**(bits-1)`, q in +-(2**(bits-1) - 1)  (S1).

    In an unsigned dtype, a tensor without negative values has `scale = hi / 2**bits` and q in [0, 2**bits - 1]. A
    power-of-two threshold gives a power-of-two scale, and a value exactly at the threshold saturates one quantum below
    it.

    References:
        The HAGO RFC (bits 8, threshold 4.0: scale 0.03125, clip +-127).
    """
    return _symmetric(lo, hi, bits, dtype, 1)


def symmetric(lo: Tensor, hi: Tensor, bits: int, dtype: DType) -> tuple[Tensor, Tensor, int, int]:
    """`scale = max(|lo|, |hi|) / (2**(bits-1) - 1)`, q in +-(2**(bits-1) - 1)  (S2).

    The threshold itself is on the grid.

    References:
        TFLite's quantization specification (int8 weights); ONNX Runtime's symmetric weights.
    """
    return _symmetric(lo, hi, bits, dtype, 0)


def affine(lo: Tensor, hi: Tensor, bits: int, dtype: DType) -> tuple[Tensor, Tensor, int, int]:
    """`scale = (hi - lo) / (2**bits - 1)` over a range widened to hold 0; the zero point is rounded  (S3).

    References:
        Jacob et al., arXiv:1712.05877; ONNX Runtime's asymmetric activations.
    """
    return _two_sided(lo, hi, bits, dtype, (1 << bits) - 1)


def hago_affine(lo: Tensor, hi: Tensor, bits: int, dtype: DType) -> tuple[Tensor, Tensor, int, int]:
    """`scale = (hi - lo) / 2**bits` over a range widened to hold 0; the zero point is rounded  (S4).

    It differs from `affine` as `hago` does from `symmetric`: power-of-two thresholds (-t, t) or (0, t) give
    power-of-two scales, and a value exactly at `hi` saturates one quantum below it.
    """
    return _two_sided(lo, hi, bits, dtype, 1 << bits)


def symmetric_full(lo: Tensor, hi: Tensor, bits: int, dtype: DType) -> tuple[Tensor, Tensor, int, int]:
    """`symmetric` with one more integer: values below the lower threshold reach `-2**(bits-1)`  (S5).

    References:
        TPU-MLIR's symmetric activations; TensorRT's int8, which clips to [-128, 127].
    """
    scale, zero, qmin, qmax = symmetric(lo, hi, bits, dtype)
    return (scale, zero, qmin, qmax) if _unsigned(lo, dtype) else (scale, zero, qmin - 1, qmax)


SCHEMES: Final[Mapping[str, Scheme]] = {
    "hago": hago,
    "symmetric": symmetric,
    "symmetric_full": symmetric_full,
    "affine": affine,
    "hago_affine": hago_affine,
}
#: The schemes that use both ends of a range; the others use its largest magnitude.
TWO_SIDED: Final = frozenset({"affine", "hago_affine"})


@dataclass(frozen=True, slots=True)
class Grid:
    """The integers that represent a tensor whose thresholds are still to be estimated.

    Estimators receive it with the statistics of the tensor.

    Args:
        bits: the number of bits, sign included.
        scheme: a name in `hago.arithmetic.schemes.SCHEMES`.
        signed: False if no value is negative and the dtype is unsigned: then 2**bits integers
            cover [0, hi]; else 2**bits - 1 cover [-t, t] (symmetric), or 2**bits cover [lo, hi]
            (affine).
        power_of_two: whether the threshold must be a power of two.
        group: of a weight, the number of neighbouring entries of a channel that have a threshold of their own; None if
            a channel, or the tensor, has one. See `hago.arithmetic.groups`.

    Raises:
        HagoError: the scheme is unknown, the bits are not 2 to 64 (63 if unsigned), or the group is empty.
    """

    bits: int
    scheme: str = "hago"
    signed: bool = True
    power_of_two: bool = False
    group: int | None = None

    def __post_init__(self) -> None:
        if self.scheme not in SCHEMES:
            raise HagoError(
                f"unknown scheme {self.scheme!r}; known: {', '.join(SCHEMES)}." + did_you_mean(self.scheme, SCHEMES)
            )
        most = 64 if self.signed else 63
        if not 2 <= self.bits <= most:
            raise HagoError(f"a grid of {self.bits} bits; expected 2 to {most}")
        if self.group is not None and self.group < 1:
            raise HagoError(f"a grid with groups of {self.group} entries; expected 1 or more")

    def thresholds_of(self, shape: Sequence[int], channel_axis: int | None) -> int:
        """The number of thresholds of a constant of this shape: one for the tensor, for each channel along an axis, or
        for each group of each channel, those of the first channel first."""
        if self.group is not None:
            return math.prod(groups_of(shape, self.group))
        return 1 if channel_axis is None else shape[channel_axis]


def make_qparams(
    scheme: str,
    lo: Tensor,
    hi: Tensor,
    bits: int,
    dtype: DType,
    *,
    power_of_two: bool = False,
    group: int | None = None,
) -> QParams:
    """Make the quantization parameters of real values in `[lo, hi]`.

    Args:
        scheme: a name in SCHEMES.
        lo, hi: float64, same shape, broadcasting against the value; (channels, groups) if `group` is given.
        bits: the number of bits, sign included; at most `dtype.bits`.
        group: the number of entries of a weight that have a scale of their own.
        power_of_two: whether to round the threshold up so that the scale is a power of two, in the `hago` scheme
            (zero point 0, or the middle of the dtype).

    Raises:
        HagoError: `lo` or `hi` is not finite, `lo` exceeds `hi`, or the bits do not fit the dtype.
    """
    if not bool(((lo <= hi) & (lo > -torch.inf) & (hi < torch.inf)).all()):
        raise HagoError(f"thresholds must be finite with lo <= hi; got lo {lo.tolist()}, hi {hi.tolist()}")
    if not 1 < bits <= dtype.bits:
        raise HagoError(f"{bits} bits do not fit {dtype}; expected 2 to {dtype.bits}")
    if power_of_two:
        t = power_of_two_at_least(torch.maximum(lo.abs(), hi.abs()))
        lo, hi, scheme = torch.where(lo < 0, -t, torch.zeros_like(t)), t, "hago"
    scale, zero, qmin, qmax = SCHEMES[scheme](lo, hi, bits, dtype)
    empty = (lo == 0) & (hi == 0)
    scale = torch.where(empty, torch.ones_like(scale), scale.clamp_min(SMALLEST_SCALE))
    scale = scale.to(torch.float32).to(torch.float64)
    return QParams(scale, zero.to(torch.int64), qmin, qmax, dtype, group)


# ---------------------------------------------------------------- quantizable range
# The largest integer represents another value in every scheme: in `hago` one quantum less than the threshold, in
# `symmetric` the threshold itself. So hago and other tools exchange the quantizable range, the smallest and the largest
# value that integers represent, instead of thresholds. `quantizable_range` and `thresholds_for` are inverses.

_SIGNED: Final = DTYPES["int64"]
_UNSIGNED: Final = DTYPES["uint8"]

Range = tuple[float, float]


def quantizable_range(lo: float, hi: float, grid: Grid) -> Range:
    """The smallest and the largest real value that the integers of a grid represent.

    Args:
        lo, hi: thresholds, real units.
    """
    if not grid.signed and grid.scheme not in TWO_SIDED:
        lo = 0.0
    ends = [torch.tensor(v, dtype=torch.float64) for v in (lo, hi)]
    if grid.power_of_two:
        top = power_of_two_at_least(torch.maximum(ends[0].abs(), ends[1].abs()))
        ends = [-top if grid.signed else torch.zeros_like(top), top]
    elif grid.signed and grid.scheme not in TWO_SIDED:
        top = torch.maximum(ends[0].abs(), ends[1].abs())
        ends = [-top, top]
    scheme = SCHEMES["hago" if grid.power_of_two else grid.scheme]
    # schemes read nothing of a dtype but its sign, which here is that of the grid
    scale, zero, qmin, qmax = scheme(ends[0], ends[1], grid.bits, _SIGNED if grid.signed else _UNSIGNED)
    return _end(qmin - zero, scale), _end(qmax - zero, scale)


def _end(c: Tensor, scale: Tensor) -> float:
    return float(c * scale) + 0.0  # no negative zero


def thresholds_for(lo: float, hi: float, grid: Grid, slack: float = 0.0) -> Range:
    """The thresholds with which the integers of a grid represent `[lo, hi]`; the inverse of `quantizable_range`.

    Args:
        lo, hi: the range, lo <= 0 <= hi.
        slack: the rounding error of `lo` and `hi`, real units. A power-of-two threshold that exceeds a power of two by
            less than this is rounded down to it, not up to the next one.
    """
    if grid.scheme in TWO_SIDED and not grid.power_of_two:
        represented = quantizable_range(lo, hi, grid)
        width = represented[1] - represented[0]
        return (lo, lo + (hi - lo) * ((hi - lo) / width)) if width > 0 else (lo, hi)
    slack = slack if grid.power_of_two else 0.0
    below, above = quantizable_range(-1.0 if grid.signed else 0.0, 1.0, grid)
    top = max(hi - slack, 0.0) / above
    if grid.signed:
        top = max(top, max(-lo - slack, 0.0) / -below)
    return (-top if grid.signed else 0.0), top
