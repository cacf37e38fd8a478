"""TPU-MLIR: int8 LeakyRelu, PRelu and Pad. The rectifiers are symmetric only; upstream floats the rest."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from hago.arithmetic._checks import require_finite, require_range
from hago.arithmetic.tpu_mlir import apply_multiplier_and_rshift, multiplier_and_rshift_truncated, scale_and_shift
from hago.arithmetic.tpu_mlir_cast import UniformType, require_integers
from hago.arithmetic.tpu_mlir_elementwise import truncated_multiplier
from hago.errors import HagoError
from hago.numerics import saturate
from hago.rounding import round_half_away
from hago.types import INT8, INT16, DType


def leaky_relu_multiplier(alpha: float) -> tuple[int, int]:
    """The slope of the negative side by `scale_and_shift` with 8 bits: 0.1 is 51 / 2**9.

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
    require_range("a LeakyRelu's input", q, INT16.min, INT16.max)
    m, r = leaky_relu_multiplier(alpha)
    return saturate(torch.where(q >= 0, q, apply_multiplier_and_rshift(q, m, r)), dtype)


def prelu_slopes(slopes: Tensor) -> tuple[Tensor, int]:
    """Integer slopes with one right shift, from the largest magnitude; each is `trunc(slope * 2**r)`.

    [0.1, -0.3] is [25, -76] / 2**8.

    Args:
        slopes: float32, one per channel.

    Returns:
        int64 that holds int8 values, and the right shift.

    References:
        TPU-MLIR lib/Conversion/TopToTpu/BM1684X/PRelu.cpp.
    """
    require_finite("the slopes of a PRelu", slopes)
    values = slopes.to(torch.float32).reshape(-1)
    if values.numel() == 0:
        raise HagoError("a PRelu has no slope; expected one per channel")
    _, rshift = multiplier_and_rshift_truncated(float(values.abs().max()))
    return torch.tensor([truncated_multiplier(float(v), rshift) for v in values]), rshift


def prelu(q: Tensor, slopes: Tensor, dtype: DType = INT8) -> Tensor:
    """`q` where it is not negative, else `half_up(q * slope >> r)` with its channel's slope.

    A single slope is a LeakyRelu upstream, and here.

    Args:
        q: int64, (N, C, ...), symmetric; input and output share one scale.
        slopes: float32, C values, or one.

    Raises:
        HagoError: the slopes are neither one nor one per channel, or q is out of range.

    References:
        TPU-MLIR tpu.PRelu in the interpreter.
    """
    if slopes.numel() == 1:
        return leaky_relu(q, float(slopes.reshape(())), dtype)
    require_range("a PRelu's input", q, INT16.min, INT16.max)
    if q.dim() < 2 or q.shape[1] != slopes.numel():
        raise HagoError(f"a PRelu of {tuple(q.shape)} with {slopes.numel()} slopes; expected one, or one per channel")
    integers, rshift = prelu_slopes(slopes)
    scaled = apply_multiplier_and_rshift(q, integers.view((-1,) + (1,) * (q.dim() - 2)), rshift)
    return saturate(torch.where(q >= 0, q, scaled), dtype)


def pad_value(value: float, source: UniformType) -> int:
    """The integer that pads: `round(value / scale + zero_point)` in float64, half away from zero.

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
        pads: befores, then afters, one per axis (ONNX's order).

    Raises:
        HagoError: pads are not two per axis or are negative, or q is out of range.
    """
    require_integers(q, source, "a padding's input")
    if len(pads) != 2 * q.dim() or min(pads, default=0) < 0:
        raise HagoError(f"pads {list(pads)} for {q.dim()} axes; expected {2 * q.dim()} of them, 0 or more")
    around = [p for axis in reversed(range(q.dim())) for p in (pads[axis], pads[axis + q.dim()])]
    fill = min(max(pad_value(value, source), source.dtype.min), source.dtype.max)
    return F.pad(q, around, value=fill)
