"""PyTorch's quantizers: fake_quantize, quantize, and the learnable fake quantize.

The zero point is added after rounding in fake_quantize and before it in quantize, so that the two
differ at ties where it is odd. Both multiply by the float32 reciprocal of the scale.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor

from hago.errors import HagoError
from hago.qat._checks import along, check_axis, check_choice, check_float
from hago.qat.straight_through import apply, straight_through

#: Integers of each quantized dtype, and the torch dtype that holds them.
DTYPES: Final[Mapping[str, tuple[int, int, torch.dtype]]] = {
    "qint8": (-128, 127, torch.int8),
    "quint8": (0, 255, torch.uint8),
    "qint32": (-(2**31), 2**31 - 1, torch.int32),
    "int8": (-128, 127, torch.int8),
    "uint8": (0, 255, torch.uint8),
    "int16": (-(2**15), 2**15 - 1, torch.int16),
    "uint16": (0, 2**16 - 1, torch.int32),
    "int32": (-(2**31), 2**31 - 1, torch.int32),
    "quint4x2": (0, 15, torch.uint8),
}


def fake_quantize(
    x: Tensor, scale: Tensor | float, zero_point: Tensor | float, qmin: int, qmax: int, axis: int | None = None
) -> Tensor:
    """`(clamp(round(x * (1 / scale)) + zero_point, qmin, qmax) - zero_point) * scale`.

    Scales are float32, and so is the arithmetic on narrower values. Of float64 the product with the reciprocal is
    float64, and the one with the scale float32 for one scale, float64 for one per channel, as torch's kernels have it.
    Ties go to even. `dx = dy` where the integer before the clamp is in [qmin, qmax]. NaN becomes
    qmin, infinities saturate.

    Args:
        x: float tensor.
        scale, zero_point: one, or one per index of `axis`.
        qmin, qmax: ends of the integers.

    References:
        torch.fake_quantize_per_tensor_affine and torch.fake_quantize_per_channel_affine.
    """
    step, zero = _broadcast(x, scale, zero_point, axis)
    _check_ends(qmin, qmax)
    q = torch.round(_widened(x.detach()) * (1 / step)) + zero
    return straight_through(
        x, _real(_clamp(q, qmin, qmax) - zero, step, axis is not None, x.dtype), (q >= qmin) & (q <= qmax)
    )


def quantize(
    x: Tensor, scale: Tensor | float, zero_point: Tensor | float, dtype: str, axis: int | None = None
) -> Tensor:
    """`clamp(round(x * (1 / scale) + zero_point))` as integers; ties to even, the zero point inside.

    Product and sum are rounded once (a fused multiply-add, as on x86) for one scale and 8-bit dtypes, else each.

    Args:
        x: float32 tensor.
        scale, zero_point: one, or one per index of `axis`.
        dtype: a name in DTYPES.

    References:
        torch.quantize_per_tensor and torch.quantize_per_channel.
    """
    check_choice("dtype", dtype, tuple(DTYPES))
    qmin, qmax, storage = DTYPES[dtype]
    step, zero = _broadcast(x, scale, zero_point, axis)
    values = x.detach().to(torch.float32)
    inverse = 1 / step
    fused = axis is None and storage != torch.int32
    sums = _fused(values, inverse, zero) if fused else values * inverse + zero
    return _clamp(torch.round(sums).to(torch.float64), qmin, qmax).to(torch.int64).to(storage)


def fake_quantize_learnable(
    x: Tensor,
    scale: Tensor,
    zero_point: Tensor,
    qmin: int,
    qmax: int,
    grad_factor: float = 1.0,
    axis: int | None = None,
) -> Tensor:
    """`fake_quantize` whose scale and zero point are learned.

        d scale = factor * sum(dy * (qmin - z below, qmax - z above, (y - x) / scale inside))
        d zero_point = factor * sum(dy * (-scale outside, 0 inside))

    The zero point is rounded half to even and clamped to [qmin, qmax]; but in the gradient of a
    fake quantization per tensor it is `int(zero_point + 1/2)`, cut toward zero, as torch has it. The
    gradient finds outside and inside by `round(x * (1 / scale) + zero_point)`, rounded once before.

    Args:
        x: float tensor.
        scale, zero_point: float, of shape (1,), or one per index of `axis`; computed with as float32.
        grad_factor: LSQ's is 1 / sqrt(x.numel() * qmax).

    References:
        torch._fake_quantize_learnable_per_tensor_affine and ..._per_channel_affine; Esser et al.,
        arXiv:1902.08153; Jain et al., arXiv:1903.08066.
    """
    _check_ends(qmin, qmax)
    _broadcast(x, scale, zero_point, axis)
    shape = [1] * x.ndim
    if axis is not None:
        shape[axis] = -1
    return apply(
        _Learnable, x, scale.reshape(shape), zero_point.reshape(shape), (qmin, qmax), grad_factor, axis is not None
    )


class _Learnable(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, scale: Tensor, zero_point: Tensor, ends: tuple[int, int], factor: float, channels: bool
    ) -> Tensor:
        ctx.save_for_backward(x, scale, zero_point)
        ctx.options = (ends, factor, channels)
        scale, zero = scale.to(torch.float32), torch.round(zero_point.to(torch.float32)).clamp(*ends)
        q = torch.round(_widened(x) * (1 / scale)) + zero
        return _real(_clamp(q, *ends) - zero, scale, channels, x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None, None]:
        x, scale, zero_point = ctx.saved_tensors
        (qmin, qmax), factor, channels = ctx.options
        kinds = grad.dtype, scale.dtype, zero_point.dtype
        x, grad = _widened(x), _widened(grad)
        scale, zero_point = scale.to(torch.float32), zero_point.to(torch.float32)
        zero = torch.round(zero_point) if channels else (zero_point + 0.5).trunc()
        zero = zero.clamp(qmin, qmax)
        inverse = 1 / scale
        q = torch.round(_fused(x, inverse, zero))
        below, above = q < qmin, q > qmax
        nothing = torch.zeros_like(grad)
        wide = (_clamp(q, qmin, qmax) - zero).to(torch.float64) * scale.to(torch.float64)
        error = (wide - x.to(torch.float64)).to(x.dtype)  # rounded once
        d_scale = torch.where(below, grad * (qmin - zero), torch.where(above, grad * (qmax - zero), 0.0))
        d_scale = torch.where(below | above, d_scale, grad * error * inverse) * factor
        d_zero = torch.where(below | above, -grad * scale, nothing) * factor
        dx = torch.where(below | above, nothing, grad)
        made = (dx, d_scale.sum_to_size(scale.shape), d_zero.sum_to_size(scale.shape))
        return *(d.to(kind) for d, kind in zip(made, kinds, strict=True)), None, None, None


def _widened(x: Tensor) -> Tensor:
    """`x` in what torch's kernels compute in: float32 for narrower dtypes."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _real(integers: Tensor, scale: Tensor, channels: bool, dtype: torch.dtype) -> Tensor:
    """`integers * scale` as torch's kernels round it: in float32 for one scale, else in the values' own width."""
    return ((integers if channels else integers.to(torch.float32)) * scale).to(dtype)


def _fused(x: Tensor, factor: Tensor, addend: Tensor) -> Tensor:
    """`x * factor + addend`, rounded once; the product of two float32 is exact in float64."""
    wide = x.to(torch.float64) * factor.to(torch.float64) + addend.to(torch.float64)
    return wide.to(x.dtype)


def _clamp(q: Tensor, qmin: int, qmax: int) -> Tensor:
    """`q` in [qmin, qmax]; NaN is qmin, as on a CPU."""
    return torch.where(torch.isnan(q), torch.full_like(q, qmin), q).clamp(qmin, qmax)


def _check_ends(qmin: int, qmax: int) -> None:
    if not qmin < qmax:
        raise HagoError(f"integers from {qmin} to {qmax}; expected qmin below qmax")


def _broadcast(x: Tensor, scale: Tensor | float, zero_point: Tensor | float, axis: int | None) -> tuple[Tensor, Tensor]:
    """Scale and zero point as float32, shaped to broadcast against `x`."""
    check_float(x, "a PyTorch quantizer")
    found = []
    for name, given in (("scale", scale), ("zero_point", zero_point)):
        t = torch.as_tensor(given, dtype=torch.float32, device=x.device).detach().reshape(-1)
        if axis is None:
            if t.numel() != 1:
                raise HagoError(f"{name} has {t.numel()} entries; expected one, or an axis of channels")
            t = t.reshape(())
        else:
            check_axis(x, axis, t.numel(), name)
            t = along(t, axis, x.ndim)
        found.append(t)
    return found[0], found[1]
