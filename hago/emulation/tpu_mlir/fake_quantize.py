"""TPU-MLIR's quantization as a fake quantization, to train for a chip that TPU-MLIR compiles for.

TPU-MLIR itself does not train. Types, thresholds and casts are those of `hago.arithmetic`.
"""

from __future__ import annotations

from torch import Tensor

from hago.arithmetic.straight_through import straight_through
from hago.emulation._checks import check_float
from hago.emulation.tpu_mlir.numerics import UniformType, dequantize, quantize


def fake_quantize(x: Tensor, target: UniformType) -> Tensor:
    """`(q - zero_point) * scale` with `q = saturate(half_away(x * float32(1 / scale)) + zero_point)`.

    `dx = dy` where q does not saturate, else 0.

    Args:
        x: float32 tensor.
        target: of `hago.emulation.tpu_mlir.numerics.uniform_type(low, high)`: symmetric where the range
            of a tensor is its threshold (`hago.emulation.tpu_mlir.calibration.threshold`), or not.

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
