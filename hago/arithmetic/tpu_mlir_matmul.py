"""TPU-MLIR: int8 matrix products of bm1684x and its kin, per tensor and per output channel."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hago.arithmetic._checks import require_finite
from hago.arithmetic.tpu_mlir import scale_and_shift, to_int_saturated
from hago.arithmetic.tpu_mlir_cast import UniformType, requantize, require_integers
from hago.errors import HagoError, UnsupportedOp
from hago.numerics import saturate
from hago.rounding import round_half_away
from hago.types import INT8, INT32


@dataclass(frozen=True, slots=True, eq=False)
class IntegerMatMul:
    """What a matrix product with a constant becomes.

    Args:
        weight: int64 that holds int8 values, (..., K, N).
        bias: int64 that holds int32 values, (N,), or None.
        multiplier, rshift: int64, (1,) per tensor or (N,) per channel; one rshift value throughout.
    """

    weight: Tensor
    bias: Tensor | None
    multiplier: Tensor
    rshift: Tensor


def common_shift(scale: Tensor) -> tuple[Tensor, Tensor]:
    """Multipliers with one common right shift: the per-channel form of a matrix product.

    Each scale gets its own 32-bit multiplier and shift; the largest shift (at least 0) wins, the
    other multipliers move left to meet it. Where one then passes 2**31, all start again from 8-bit
    multipliers.

    Args:
        scale: real ratios, (N,).

    Returns:
        Multipliers and the shift, both (N,).

    Raises:
        HagoError: the scales are too far apart even so.

    References:
        TPU-MLIR lib/Conversion/TopToTpu/BM1684X/MatMul.cpp, `matmul_perchannel`.
    """
    for bits in (32, 8):
        m, n = scale_and_shift(scale, bits)
        shift = n.max().clamp_min(0)
        moved = torch.where(shift - n < 32, m << (shift - n).clamp_max(31), 1 << 62)
        # Upstream lets 2**31 itself pass, which its int32 multiplier then holds as -2**31.
        if not bool((moved > INT32.max).any()):
            return moved, shift.expand_as(moved)
    raise HagoError(
        f"scales per channel from {float(scale.min())} to {float(scale.max())} share no right shift; "
        "quantize this matrix product per tensor"
    )


def lower_matmul(
    weight: Tensor, bias: Tensor | None, source: UniformType, target: UniformType, *, per_channel: bool = False
) -> IntegerMatMul:
    """Quantize a matrix product with a constant: one weight scale, `absmax / 127`, or one per column.

    `W = round(w / sw)` half away from zero; `b = round(bias / (sw * sx) - sum(W) * zx)` in float64;
    `multiplier / 2**rshift ~ float32(sx * sw / sy)`. A bias past int32 saturates.

    Args:
        weight: float32, (K, N), or (batch..., K, N) where the input's zero point is 0.
        bias: float32, (N,), or None.
        per_channel: one weight scale per column, multipliers with a common shift.

    Raises:
        UnsupportedOp: a batched weight with an input zero point: the engine computes it in float.
        HagoError: shapes do not match, a value is not finite, or the weights (of a column) are all 0.

    References:
        TPU-MLIR lib/Conversion/TopToTpu/BM1684X/MatMul.cpp.
    """
    w, b = _checked(weight, bias, source)
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
    rounded = round_half_away(real.to(torch.float64) - folded.to(torch.float64)).clamp(-(2.0**40), 2.0**40)
    return IntegerMatMul(integers, saturate(rounded.to(torch.int64), INT32), multiplier, rshift)


def _checked(weight: Tensor, bias: Tensor | None, source: UniformType) -> tuple[Tensor, Tensor | None]:
    if weight.dim() < 2 or weight.numel() == 0:
        raise HagoError(f"a matrix product's weight is {tuple(weight.shape)}; expected (K, N), batches before it")
    if weight.dim() > 2 and source.zero_point != 0:
        raise UnsupportedOp("a batched matrix product of an input with a zero point: the engine computes it in float")
    require_finite("a matrix product's weights", weight)
    if bias is None:
        return weight.to(torch.float32), None
    if bias.numel() != weight.shape[-1]:
        raise HagoError(f"a bias of {tuple(bias.shape)} for {weight.shape[-1]} columns; expected one each")
    require_finite("a matrix product's bias", bias)
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
    require_integers(q, source, "a matrix product's input")
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
        UnsupportedOp: a zero point is not 0: the engine computes the product in float.
        HagoError: the shapes do not multiply, or an operand is out of range.

    References:
        TPU-MLIR lib/Conversion/TopToTpu/BM1684X/MatMul.cpp, both operands mutable.
    """
    if left_type.zero_point or right_type.zero_point or target.zero_point:
        raise UnsupportedOp("an asymmetric product of two activations: the engine computes it in float")
    require_integers(left, left_type, "a matrix product's left operand")
    require_integers(right, right_type, "a matrix product's right operand")
    if min(left.dim(), right.dim()) < 2 or left.shape[-1] != right.shape[-2]:
        raise HagoError(f"matrices of {tuple(left.shape)} and {tuple(right.shape)} do not multiply")
    multiplier, rshift = scale_and_shift(left_type.scale * right_type.scale / target.scale)
    return requantize(left @ right, multiplier, rshift, target)
