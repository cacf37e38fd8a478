"""TPU-MLIR: int8 convolutions of the older chips, both symmetric.

bm1684 has one right shift for the whole layer, no multiplier, and an int16 bias. cv18xx (QDM) has a
32-bit multiplier and a right shift per output channel, and rounds twice, as TFLite does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hago.arithmetic import tflite
from hago.arithmetic.tpu_mlir import (
    apply_multiplier_and_rshift,
    as_float32,
    qdm_multiplier_and_rshift,
    to_int_saturated,
)
from hago.arithmetic.tpu_mlir_cast import UniformType
from hago.arithmetic.tpu_mlir_conv import IntegerConv, accumulate, check_weights
from hago.errors import HagoError, UnsupportedOp
from hago.numerics import saturate
from hago.types import INT8, INT16, INT32


# ---------------------------------------------------------------- bm1684
@dataclass(frozen=True, slots=True, eq=False)
class ShiftConv:
    """A convolution that is requantized by one right shift; bias holds int16 values, or is None."""

    weight: Tensor
    bias: Tensor | None
    rshift: int


def bm1684_rshift(absmax: float, source_scale: float, target_scale: float, bits: int = 8) -> int:
    """The largest r with `float32(absmax) * sx / sy * 2**r < 2**(bits-1) - 1`, at most 31; -1 where there is none.

    Raises:
        HagoError: `absmax` is 0: every shift fits.

    References:
        TPU-MLIR `calRightShiftNum` (lib/Support/MathUtils.cpp).
    """
    value = as_float32(absmax) * source_scale / target_scale
    if not value > 0 or not math.isfinite(value):
        raise HagoError(f"weights times scales are {value}; expected a finite value above 0")
    steps = 0
    while value < (1 << (bits - 1)) - 1:
        value, steps = value * 2, steps + 1
    return 31 if steps > 32 else steps - 1


def _bm1684_bias(bias: Tensor, rshift: int, target_scale: float) -> tuple[Tensor, float]:
    real = bias * as_float32(float(1 << rshift) / target_scale)
    integers = to_int_saturated(real, INT32)
    return saturate(integers, INT16), float(((integers > INT16.max) | (integers < INT16.min)).float().mean())


def lower_conv_bm1684(weight: Tensor, bias: Tensor | None, source: UniformType, target: UniformType) -> ShiftConv:
    """Quantize a convolution for bm1684: one shift r for all channels, `W = round(w * 2**r * sx / sy)`.

    `b = round(bias * 2**r / sy)` saturates at int16; while more than 3 % of it does, r is one less.
    Winograd kernels, a choice of the compiler, are not modelled.

    Raises:
        UnsupportedOp: the shift would be negative: the engine computes the layer in float.
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
    strides: Sequence[int] = (1, 1),
    pads: Sequence[int] = (0, 0, 0, 0),
    dilations: Sequence[int] = (1, 1),
    groups: int = 1,
    do_relu: bool = False,
) -> Tensor:
    """`sat(half_up(acc >> rshift))`; a fused Relu clamps at 0. Arguments as in `tpu_mlir_conv.run_conv`."""
    acc = accumulate(q, conv.weight, conv.bias, source, strides=strides, pads=pads, dilations=dilations, groups=groups)
    out = apply_multiplier_and_rshift(acc, 1, conv.rshift)
    return saturate(out.clamp_min(0) if do_relu else out, target.dtype)


# ---------------------------------------------------------------- cv18xx
def cv18xx_qscale(absmax: float, source_threshold: float, target_threshold: float) -> float:
    """`float32(absmax * tx) / float32(127 * ty)` in float32: the ratio that one output channel needs.

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
    """Quantize a convolution for cv18xx: per output channel a qscale, split as `qdm_multiplier_and_rshift`.

    The qscale is that of the weights, or the bias's where larger (and below 1), at most 0.999999.
    `W = half_even(w * float32(tx / ty * 2**(31+r) / m))`, `b = half_even(bias * float32(127 / ty *
    2**(31+r) / m))`, both products in float32, saturated to int8 and int32.

    Args:
        weight, bias: as in `tpu_mlir_conv.lower_conv`.
        source_threshold, target_threshold: calibrated, real units.

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
    strides: Sequence[int] = (1, 1),
    pads: Sequence[int] = (0, 0, 0, 0),
    dilations: Sequence[int] = (1, 1),
    groups: int = 1,
    do_relu: bool = False,
) -> Tensor:
    """TFLite's double rounding of each channel, saturated. Arguments as in `tpu_mlir_conv.run_conv`."""
    acc = accumulate(q, conv.weight, conv.bias, source, strides=strides, pads=pads, dilations=dilations, groups=groups)
    broadcast = (-1,) + (1,) * (conv.weight.dim() - 2)
    out = tflite.multiply_by_quantized_multiplier(
        acc, conv.multiplier.view(broadcast), -conv.rshift.view(broadcast), "double"
    )
    return saturate(out.clamp_min(0) if do_relu else out, target.dtype)
