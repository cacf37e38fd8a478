"""TPU-MLIR's quantization as a fake quantization, to train for a chip that TPU-MLIR compiles for.

TPU-MLIR itself does not train. The types and casts are those of `hago.emulation.tpu_mlir.numerics`.
"""

from __future__ import annotations

from torch import Tensor

from hago.arithmetic.straight_through import straight_through
from hago.emulation._checks import check_float
from hago.emulation.tpu_mlir.numerics import UniformType, dequantize, quantize


def fake_quantize(x: Tensor, target: UniformType) -> Tensor:
    """Quantize and dequantize.

        q = saturate(half_away(x * float32(1 / scale)) + zero_point)
        y = (q - zero_point) * scale

    The gradient passes where q does not saturate: `dx = dy` there, else 0.

    Args:
        x: float32 tensor.
        target: scale, zero point and integers, made by `hago.emulation.tpu_mlir.numerics.uniform_type` from the
            range of a tensor, or from its threshold (`hago.emulation.tpu_mlir.calibration.threshold`).

    Raises:
        HagoError: x is not floating point, or holds NaN.

    References:
        sophgo/tpu-mlir 1.30.2, lib/Support/MathUtils.cpp (f32 to int8 casts).
    """
    check_float(x, "fake quantization")
    values = x.detach()
    real = dequantize(quantize(values, target), target).to(x.dtype)
    low, high = ((end - target.zero_point) * target.scale for end in (target.dtype.min, target.dtype.max))
    half = target.scale / 2
    return straight_through(x, real, (values > low - half) & (values < high + half))
