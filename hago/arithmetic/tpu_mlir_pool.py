"""TPU-MLIR: int8 average pooling, with the multipliers of each family of chips.

Symmetric pooling multiplies the exact integer sum of a window; asymmetric pooling is done in float32.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from hago.arithmetic.tpu_mlir import (
    apply_multiplier_and_rshift,
    apply_multiplier_and_rshift_float,
    multiplier_and_rshift_truncated,
    scale_and_shift,
    to_int_saturated,
)
from hago.arithmetic.tpu_mlir_cast import UniformType, require_integers
from hago.arithmetic.tpu_mlir_conv import require_windows
from hago.errors import HagoError, UnsupportedOp
from hago.numerics import saturate
from hago.rounding import round_half_away


# ---------------------------------------------------------------- multipliers
def avg_pool_multiplier(source_scale: float, target_scale: float, window: int) -> tuple[int, int]:
    """bm1684x, symmetric: `sx / (sy * window)` by `scale_and_shift` with 8 bits.

    References:
        TPU-MLIR lib/Conversion/TopToTpu/BM1684X/AvgPool.cpp.
    """
    m, r = scale_and_shift(_ratio(source_scale, target_scale, window), 8)
    return int(m), int(r)


def avg_pool_multiplier_cv18xx(source_scale: float, target_scale: float, window: int) -> tuple[int, int]:
    """cv18xx: the same ratio by `multiplier_and_rshift_truncated`.

    References:
        TPU-MLIR lib/Conversion/TopToTpu/CV18xx/AvgPool.cpp.
    """
    return multiplier_and_rshift_truncated(_ratio(source_scale, target_scale, window))


def avg_pool_multiplier_bm1684(window: int) -> tuple[int, int]:
    """bm1684: `1 / window` alone, as input and output share one scale: the odd part of `round(2**e / window)`.

    e is the largest for which that fits 8 bits: 9 is 57 / 2**9.

    Raises:
        UnsupportedOp: a window past 225, which the engine averages in float.

    References:
        TPU-MLIR lib/Conversion/TopToTpu/BM1684/AvgPool.cpp, whose table this formula reproduces.
    """
    if window < 1:
        raise HagoError(f"a window of {window} values; expected 1 or more")
    if window > 225:
        raise UnsupportedOp(f"bm1684 average pooling over {window} values: past 225 the engine averages in float")
    e = max(e for e in range(17) if (2 * (1 << e) + window) // (2 * window) <= 255)
    m = (2 * (1 << e) + window) // (2 * window)
    while m % 2 == 0:
        m, e = m // 2, e - 1
    return m, e


def avg_pool_scale_and_offset(source: UniformType, target: UniformType, window: int) -> tuple[float, float]:
    """Asymmetric: `sx / (window * sy)`, and `zy - sx / sy * zx`.

    References:
        TPU-MLIR lib/Conversion/TopToTpu/BM1684X/AvgPool.cpp.
    """
    if window < 1:
        raise HagoError(f"a window of {window} values; expected 1 or more")
    offset = target.zero_point - source.scale / target.scale * source.zero_point
    return source.scale / (window * target.scale), offset


def _ratio(source_scale: float, target_scale: float, window: int) -> float:
    if window < 1 or not (math.isfinite(target_scale) and target_scale > 0):
        raise HagoError(f"average pooling of {window} values at scale {target_scale}; expected 1 or more, and above 0")
    return source_scale / (target_scale * window)


# ---------------------------------------------------------------- pooling
def _windows(q: Tensor, kernel: Sequence[int], strides: Sequence[int], pads: Sequence[int], value: int) -> Tensor:
    """The sum of every window, padding included: int64, (N, C, *out)."""
    axes = len(kernel)
    if axes not in (1, 2) or q.dim() != axes + 2 or len(strides) != axes or len(pads) != 2 * axes:
        raise HagoError(
            f"average pooling of {tuple(q.shape)}, kernel {list(kernel)}, strides {list(strides)}, pads {list(pads)}: "
            "expected 1 or 2 spatial axes after batch and channel, a stride each and two pads each"
        )
    require_windows(q.shape[2:], kernel, strides, pads, (1,) * axes)
    around = [p for axis in reversed(range(axes)) for p in (pads[axis], pads[axis + axes])]
    channels = q.shape[1]
    # float64 sums int8 values exactly; a depthwise convolution of ones is the sum of a window.
    padded = F.pad(q, around, value=value).to(torch.float64)
    ones = torch.ones((channels, 1, *kernel), dtype=torch.float64)
    convolve = F.conv1d if axes == 1 else F.conv2d
    return convolve(padded, ones, stride=tuple(strides), groups=channels).to(torch.int64)


def _average_by_window(
    q: Tensor, kernel: Sequence[int], strides: Sequence[int], pads: Sequence[int], value: int, count_include_pad: bool
) -> Tensor:
    """What the float pooling gives, times the window again: float32, as the engine's two steps do."""
    sums = _windows(q, kernel, strides, pads, value if count_include_pad else 0).to(torch.float32)
    size = float(math.prod(kernel))
    count = torch.tensor(size)
    if not count_include_pad:
        count = _windows(torch.ones_like(q), kernel, strides, pads, 0).to(torch.float32)
    average = sums / count
    for side in kernel:
        average = average * float(side)
    return average


def avg_pool(
    q: Tensor,
    kernel: Sequence[int],
    source: UniformType,
    target: UniformType,
    *,
    strides: Sequence[int] | None = None,
    pads: Sequence[int] | None = None,
    count_include_pad: bool = True,
    how: tuple[int, int] | None = None,
    cv18xx: bool = False,
) -> Tensor:
    """Symmetric: `sat(half_up(sum * m >> r))`, on the window's integer sum.

    Where padding is not counted, the sum is the average over what was counted, times the whole
    window, rounded half away from zero (half up on cv18xx).

    Args:
        q: int64, (N, C, *spatial), integers of `source`.
        kernel, strides: one per spatial axis; strides are the kernel by default.
        pads: befores, then afters; 0 by default.
        how: multiplier and right shift; `avg_pool_multiplier` by default.
        cv18xx: multiply in float32 as that family does.

    Raises:
        HagoError: shapes do not match, a zero point is not 0, or q is out of range.

    References:
        TPU-MLIR tpu.Pool1D, tpu.Pool2D in the interpreter.
    """
    if source.zero_point or target.zero_point:
        raise HagoError("symmetric average pooling got a zero point; use avg_pool_asymmetric")
    require_integers(q, source, "average pooling's input")
    spread = _average_by_window(q, kernel, strides or kernel, pads or (0,) * (2 * len(kernel)), 0, count_include_pad)
    m, r = how or avg_pool_multiplier(source.scale, target.scale, math.prod(kernel))
    if cv18xx:
        sums = (spread.to(torch.float64) + 0.5).floor().to(torch.int64)
        return saturate(apply_multiplier_and_rshift_float(sums, m, r), target.dtype)
    return saturate(apply_multiplier_and_rshift(round_half_away(spread).to(torch.int64), m, r), target.dtype)


def avg_pool_asymmetric(
    q: Tensor,
    kernel: Sequence[int],
    source: UniformType,
    target: UniformType,
    *,
    strides: Sequence[int] | None = None,
    pads: Sequence[int] | None = None,
    count_include_pad: bool = True,
) -> Tensor:
    """`sat(half_away(float32(sum * scale + offset)))`; padding takes the zero point.

    Args:
        As in `avg_pool`.

    Raises:
        UnsupportedOp: windows do not cover the padded input exactly: the engine pools in float.
        HagoError: shapes do not match, or q is out of range.

    References:
        TPU-MLIR lib/Conversion/TopToTpu/BM1684X/AvgPool.cpp and tpu.Pool2D.
    """
    require_integers(q, source, "average pooling's input")
    steps, around = strides or kernel, pads or (0,) * (2 * len(kernel))
    spread = _average_by_window(q, kernel, steps, around, source.zero_point, count_include_pad)
    for axis, (side, step) in enumerate(zip(kernel, steps, strict=True)):
        padded = q.shape[axis + 2] + around[axis] + around[axis + len(kernel)]
        if (spread.shape[axis + 2] - 1) * step + side < padded:
            raise UnsupportedOp(
                f"asymmetric average pooling leaves part of {padded} values on spatial axis {axis} out "
                f"(kernel {side}, stride {step}): the engine pools in float"
            )
    scale, offset = avg_pool_scale_and_offset(source, target, math.prod(kernel))
    real = (spread.to(torch.float64) * scale + offset).to(torch.float32)
    return to_int_saturated(real, target.dtype)
