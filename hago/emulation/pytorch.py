"""PyTorch's quantizers (fake_quantize, quantize, the learnable fake quantize), its observers, and FakeQuantize.

fake_quantize adds the zero point after rounding, quantize before it, so that the two differ at ties if the zero point
is odd. Both multiply by the float32 reciprocal of the scale.

Observers widen a range to contain 0 when they convert it to scale and zero point. Their state is the range (`min_val`,
`max_val`); that of a FakeQuantize is its last scale and zero point and two switches. The histogram observer searches
for the range in which quantizing the observed values has the least squared error.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from hago.arithmetic.straight_through import apply, straight_through
from hago.emulation._checks import broadcast_along, check_axis, check_float, other_axes
from hago.errors import HagoError, check_choice

#: The lowest and highest integer of each quantized dtype, and the torch dtype that stores them.
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

    Ties are rounded to even, NaN becomes qmin, and infinities saturate. `dx = dy` where the integer before the clamp is
    in [qmin, qmax], else 0. Scales are float32, and so is the arithmetic on float32 and narrower values. For float64
    values the product with the reciprocal is float64; the product with the scale is float32 if there is one scale,
    and float64 if there is one per channel, as in torch's kernels.

    Args:
        x: float tensor.
        scale, zero_point: one, or one per index of `axis`.
        qmin, qmax: the lowest and the highest integer.

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
    """`clamp(round(x * (1 / scale) + zero_point))` as integers, ties to even.

    With one scale and an 8-bit dtype, product and sum are rounded once (a fused multiply-add, as on x86); otherwise
    each is rounded.

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

    The zero point is rounded half to even and clamped to [qmin, qmax]; in the gradient of a fake quantization per
    tensor it is `int(zero_point + 1/2)`, truncated toward zero, as in torch. For the gradient, a value is below, inside
    or above according to `round(x * (1 / scale) + zero_point)`, whose product and sum are rounded once.

    Args:
        x: float tensor.
        scale, zero_point: float, of shape (1,), or one per index of `axis`; converted to float32.
        grad_factor: 1 / sqrt(x.numel() * qmax) in LSQ.

    References:
        torch._fake_quantize_learnable_per_tensor_affine and ..._per_channel_affine; Esser et al.,
        arXiv:1902.08153; Jain et al., arXiv:1903.08066.
    """
    _check_ends(qmin, qmax)
    shape = _broadcast(x, scale, zero_point, axis)[0].shape
    return apply(
        _Learnable, x, scale.reshape(shape), zero_point.reshape(shape), (qmin, qmax), grad_factor, axis is not None
    )


class _Learnable(torch.autograd.Function):
    """`fake_quantize_learnable` with scale and zero point shaped to broadcast against `x`."""

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
        dtypes = grad.dtype, scale.dtype, zero_point.dtype
        x, grad = _widened(x), _widened(grad)
        scale, zero_point = scale.to(torch.float32), zero_point.to(torch.float32)
        zero = torch.round(zero_point) if channels else (zero_point + 0.5).trunc()
        zero = zero.clamp(qmin, qmax)
        inverse = 1 / scale
        q = torch.round(_fused(x, inverse, zero))
        below, above = q < qmin, q > qmax
        zeros = torch.zeros_like(grad)
        wide = (_clamp(q, qmin, qmax) - zero).to(torch.float64) * scale.to(torch.float64)
        error = (wide - x.to(torch.float64)).to(x.dtype)  # rounded once
        d_scale = torch.where(below, grad * (qmin - zero), torch.where(above, grad * (qmax - zero), 0.0))
        d_scale = torch.where(below | above, d_scale, grad * error * inverse) * factor
        d_zero = torch.where(below | above, -grad * scale, zeros) * factor
        dx = torch.where(below | above, zeros, grad)
        gradients = (dx, d_scale.sum_to_size(scale.shape), d_zero.sum_to_size(scale.shape))
        return *(d.to(dtype) for d, dtype in zip(gradients, dtypes, strict=True)), None, None, None


def _widened(x: Tensor) -> Tensor:
    """`x` in the dtype in which torch's kernels compute: float32 for narrower ones."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _real(integers: Tensor, scale: Tensor, channels: bool, dtype: torch.dtype) -> Tensor:
    """`integers * scale` as torch's kernels round it: in float32 for one scale, else in the dtype of `integers`."""
    return ((integers if channels else integers.to(torch.float32)) * scale).to(dtype)


def _fused(x: Tensor, factor: Tensor, addend: Tensor) -> Tensor:
    """`x * factor + addend`, rounded once; the product of two float32 is exact in float64."""
    wide = x.to(torch.float64) * factor.to(torch.float64) + addend.to(torch.float64)
    return wide.to(x.dtype)


def _clamp(q: Tensor, qmin: int, qmax: int) -> Tensor:
    """Clamp `q` to [qmin, qmax]; NaN becomes qmin, as on a CPU."""
    return torch.where(torch.isnan(q), torch.full_like(q, qmin), q).clamp(qmin, qmax)


def _check_ends(qmin: int, qmax: int) -> None:
    if not qmin < qmax:
        raise HagoError(f"integers from {qmin} to {qmax}; expected qmin below qmax")


def _broadcast(x: Tensor, scale: Tensor | float, zero_point: Tensor | float, axis: int | None) -> tuple[Tensor, Tensor]:
    """Scale and zero point as float32, shaped to broadcast against `x`."""
    check_float(x, "a PyTorch quantizer")
    shaped = []
    for name, given in (("scale", scale), ("zero_point", zero_point)):
        t = torch.as_tensor(given, dtype=torch.float32, device=x.device).detach().reshape(-1)
        if axis is None:
            if t.numel() != 1:
                raise HagoError(f"{name} has {t.numel()} entries; expected one, or an axis of channels")
            t = t.reshape(())
        else:
            check_axis(x, axis, t.numel(), name)
            t = broadcast_along(t, axis, x.ndim)
        shaped.append(t)
    return shaped[0], shaped[1]


# ---------------------------------------------------------------- observers
_SCHEMES: Final = (
    "per_tensor_affine",
    "per_tensor_symmetric",
    "per_channel_affine",
    "per_channel_symmetric",
    "per_channel_affine_float_qparams",
)
_EPS: Final = torch.finfo(torch.float32).eps


@dataclass(frozen=True, slots=True)
class QRange:
    """The options with which an observer converts a range of values to scale and zero point, and the conversion.

    Args:
        dtype: a name in `hago.emulation.pytorch.DTYPES`.
        qscheme: the scheme, by torch's name.
        reduce_range: use half of the integers, e.g. [-64, 63].
        quant_min, quant_max: limits in place of those of the dtype; give both or none.
        eps: the smallest scale.

    Raises:
        HagoError: an option is out of range.

    References:
        torch.ao.quantization.observer.UniformQuantizationObserverBase.
    """

    dtype: str = "quint8"
    qscheme: str = "per_tensor_affine"
    reduce_range: bool = False
    quant_min: int | None = None
    quant_max: int | None = None
    eps: float = _EPS

    def __post_init__(self) -> None:
        check_choice("dtype", self.dtype, tuple(DTYPES))
        check_choice("qscheme", self.qscheme, _SCHEMES)
        if (self.quant_min is None) != (self.quant_max is None):
            raise HagoError("quant_min and quant_max go together; give both or none")
        if self.quant_min is not None and self.quant_max is not None:
            low, high, _ = DTYPES[self.dtype]
            holds_zero = self.quant_min <= 0 <= self.quant_max and self.quant_min < self.quant_max
            if not holds_zero or self.quant_max - self.quant_min > high - low:
                raise HagoError(
                    f"integers from {self.quant_min} to {self.quant_max} for {self.dtype}; "
                    f"expected at most {high - low + 1} of them, 0 among them"
                )

    @property
    def ends(self) -> tuple[int, int]:
        """The lowest and the highest integer."""
        low, high, _ = DTYPES[self.dtype]
        if self.quant_min is not None and self.quant_max is not None:
            low, high = self.quant_min, self.quant_max
        elif self.dtype not in ("qint8", "int8", "quint8", "uint8"):
            return low, high  # torch reduces only 8-bit dtypes and given limits
        return (low // 2, high // 2) if self.reduce_range else (low, high)

    @property
    def symmetric(self) -> bool:
        """Whether the zero point is always in the middle of the integers."""
        return self.qscheme.endswith("symmetric")

    @property
    def per_channel(self) -> bool:
        """Whether every channel has a scale and a zero point of its own."""
        return self.qscheme.startswith("per_channel")

    def qparams(self, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
        """(scale, zero point) of a range.

            affine:    scale = (high - low) / (qmax - qmin), zero point = clamp(qmin - round(low / scale))
            symmetric: scale = max(-low, high) / ((qmax - qmin) / 2), zero point = 0, or the middle
                       of an unsigned dtype

        with low = min(low, 0), high = max(high, 0), a scale of at least eps, and ties rounded to even. The scheme
        `per_channel_affine_float_qparams` uses low and high as given, replaces scales up to eps by 1, and has the zero
        point -low / scale.

        Args:
            low, high: float32, of one shape.

        Returns:
            float32 scales and int64 zero points (float32 for `per_channel_affine_float_qparams`), of shape (1,) or
            (channels,).

        Raises:
            HagoError: the range is not finite, or upside down.
        """
        low, high = low.reshape(-1), high.reshape(-1)
        if not bool((torch.isfinite(low) & torch.isfinite(high) & (low <= high)).all()):
            raise HagoError(f"an observer saw a range from {low.tolist()} to {high.tolist()}; expected finite values")
        qmin, qmax = self.ends
        if self.qscheme == "per_channel_affine_float_qparams":
            scale = (high - low) / float(qmax - qmin)
            scale = torch.where(scale > self.eps, scale, torch.ones_like(scale))
            return scale, -low / scale
        low, high = low.clamp_max(0.0), high.clamp_min(0.0)
        if self.symmetric:
            scale = (torch.maximum(-low, high) / (float(qmax - qmin) / 2)).clamp_min(self.eps)
            return scale, torch.full_like(scale, self._middle(), dtype=torch.int64)
        scale = ((high - low) / float(qmax - qmin)).clamp_min(self.eps)
        return scale, (qmin - torch.round(low / scale).to(torch.int64)).clamp(qmin, qmax)

    def _middle(self) -> int:
        """The zero point of a symmetric scheme: 128 for 8 unsigned bits, even if the range is reduced."""
        if self.dtype in ("quint8", "uint8"):
            qmin, qmax = self.ends
            return 128 if self.quant_min is None else (qmin + qmax) // 2
        return 2**15 if self.dtype == "uint16" else 0


def _unobserved_qparams(device: torch.device) -> tuple[Tensor, Tensor]:
    """Scale 1 and zero point 0, which an observer has before any data."""
    return torch.ones(1, device=device), torch.zeros(1, dtype=torch.int64, device=device)


class MinMaxObserver(nn.Module):
    """An observer of the smallest and largest value so far, per tensor or per index of an axis.

    Before any data the scale is 1 and the zero point 0. Empty tensors are ignored.

    Args:
        qrange: computes scale and zero point; its scheme decides whether the observer is per channel.
        ch_axis: of the channels, if per channel.
        averaging_constant: None for the extremes; c for a moving average `m += c * (v - m)` that starts at the first
            batch.

    References:
        torch.ao.quantization.{MinMax, MovingAverageMinMax, PerChannelMinMax,
        MovingAveragePerChannelMinMax}Observer.
    """

    min_val: Tensor
    max_val: Tensor

    def __init__(
        self, qrange: QRange | None = None, *, ch_axis: int = 0, averaging_constant: float | None = None
    ) -> None:
        super().__init__()
        self.qrange = qrange or QRange()
        if self.qrange.reduce_range and self.qrange.dtype == "quint8" and self.qrange.symmetric:
            raise HagoError(
                f"reduce_range with {self.qrange.qscheme} quint8 is refused, as torch's observers of extremes do; take "
                "qint8, or an affine scheme"
            )
        self.ch_axis, self.averaging_constant = ch_axis, averaging_constant
        self.register_buffer("min_val", torch.empty(0) if self.qrange.per_channel else torch.tensor(torch.inf))
        self.register_buffer("max_val", torch.empty(0) if self.qrange.per_channel else torch.tensor(-torch.inf))

    @property
    def has_range(self) -> bool:
        """Whether a range was observed."""
        return self.min_val.numel() > 0 and not bool((self.min_val > self.max_val).any())

    def forward(self, x: Tensor) -> Tensor:
        """Observe `x` and return it.

        Raises:
            HagoError: the number of channels changed.
        """
        check_float(x, "an observer")
        if x.numel() == 0:
            return x
        low, high = self._range_of_batch(x.detach().to(self.min_val.dtype))
        if self.has_range:
            if self.qrange.per_channel:
                check_axis(x, self.ch_axis, self.min_val.numel(), "an observer")
            low, high = self._merge(low, high)
        self.min_val, self.max_val = low.clone(), high.clone()
        return x

    def qparams(self) -> tuple[Tensor, Tensor]:
        """(scale, zero point) of the observed range; see QRange.qparams."""
        if not self.has_range:
            return _unobserved_qparams(self.min_val.device)
        return self.qrange.qparams(self.min_val, self.max_val)

    def _range_of_batch(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if not self.qrange.per_channel:
            return x.amin(), x.amax()
        if not -x.ndim <= self.ch_axis < x.ndim:
            raise HagoError(f"no axis {self.ch_axis} in a tensor of shape {tuple(x.shape)}; set ch_axis")
        reduced = other_axes(self.ch_axis, x.ndim)
        return (x.amin(reduced), x.amax(reduced)) if reduced else (x, x)

    def _merge(self, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
        """The range so far, updated with that of a batch."""
        if self.averaging_constant is None:
            return torch.minimum(low, self.min_val), torch.maximum(high, self.max_val)
        c = self.averaging_constant
        return self.min_val + c * (low - self.min_val), self.max_val + c * (high - self.max_val)

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *args: Any) -> None:
        _resize_buffers(self, ("min_val", "max_val"), state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args)


class Observer(Protocol):
    """The interface of an observer that FakeQuantize uses: MinMaxObserver and HistogramObserver have it."""

    qrange: QRange
    ch_axis: int

    @property
    def has_range(self) -> bool:
        """Whether a range was observed."""

    def qparams(self) -> tuple[Tensor, Tensor]:
        """(scale, zero point) for the observed range."""

    def __call__(self, x: Tensor) -> Tensor:
        """Observe `x` and return it."""


class FakeQuantize(nn.Module):
    """An observer, and the fake quantization with its scale and zero point.

    Args:
        observer: while `observer_enabled` is 1, every call updates it, and scale and zero point from it.

    Buffers:
        scale, zero_point: of the fake quantization.
        observer_enabled, fake_quant_enabled: uint8 switches, set with `fill_`.

    References:
        torch.ao.quantization.FakeQuantize.
    """

    scale: Tensor
    zero_point: Tensor
    observer_enabled: Tensor
    fake_quant_enabled: Tensor

    def __init__(self, observer: Observer | None = None) -> None:
        super().__init__()
        self.observer: Observer = observer or MinMaxObserver(averaging_constant=0.01)
        self.register_buffer("scale", torch.ones(1))
        self.register_buffer("zero_point", self.observer.qparams()[1])
        self.register_buffer("observer_enabled", torch.ones(1, dtype=torch.uint8))
        self.register_buffer("fake_quant_enabled", torch.ones(1, dtype=torch.uint8))

    def forward(self, x: Tensor) -> Tensor:
        if bool(self.observer_enabled):
            self.observer(x)
            self.scale, self.zero_point = self.observer.qparams()
        if not bool(self.fake_quant_enabled):
            return x
        axis = self.observer.ch_axis if self.observer.qrange.per_channel and self.observer.has_range else None
        return fake_quantize(x, self.scale, self.zero_point, *self.observer.qrange.ends, axis)

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *args: Any) -> None:
        _resize_buffers(self, ("scale", "zero_point"), state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args)


def _resize_buffers(module: nn.Module, names: tuple[str, ...], state_dict: Mapping[str, Any], prefix: str) -> None:
    """Resize buffers to the shapes in a state dict, because those per channel are empty before any data."""
    for name in names:
        saved = state_dict.get(prefix + name)
        if isinstance(saved, Tensor):
            buffer = module.get_buffer(name)
            setattr(module, name, torch.empty(saved.shape, dtype=buffer.dtype, device=buffer.device))


# ---------------------------------------------------------------- the histogram observer
#: Fraction of the values that one step of the search cuts off at one end of the range.
_STEP: Final = 1e-5
#: Number of equal parts into which the count of a bin is split when it is moved to bins of another width.
_PARTS: Final = 16


def squared_error(histogram: Tensor, width: float, first: int, last: int, levels: int) -> float:
    """The squared error of quantizing to the range of bins `first` to `last`, if values are spread evenly in each bin.

    A level is the middle of an interval of length `d = width * (last - first + 1) / levels`. The error of a bin from b
    to e whose ends are in the intervals of levels i and j, with density p = count / width, is

        error = p * (F(b - m_i, d/2) + (j - i - 1) * F(-d/2, d/2) + F(-d/2, e - m_j)),
        F(u, v) = (v**3 - u**3) / 3,   m_k = (k + 1/2) * d

    Args:
        histogram: float32 (bins,).
        width: of a bin, in real units.
        first, last: the bins at the ends of the range; values outside are clamped to the outermost levels.
        levels: the number of integers.
    """
    step = width * (last - first + 1) / levels
    if step == 0.0:
        return 0.0
    begin = (torch.arange(len(histogram)) - first) * width
    end = begin + width
    from_level, to_level = (torch.div(t, step, rounding_mode="floor").clamp(0, levels - 1) for t in (begin, end))
    half = torch.tensor(step / 2)
    density = histogram / width

    def cubes(low: Tensor, high: Tensor) -> Tensor:
        return density * ((high * high * high - low * low * low) / 3)

    error = cubes(begin - (from_level + 0.5) * step, half.expand(len(histogram)))
    error = error + (to_level - from_level - 1) * cubes(-half, half)
    error = error + cubes(-half, end - (to_level * step + step / 2))
    return float(error.sum())


def least_error_bins(histogram: Tensor, width: float, levels: int) -> tuple[int, int]:
    """Search for the range of least squared error; the result is its first and last bin.

    The search starts with all bins. Each step moves one end inwards by the quantile _STEP, namely the end at which this
    skips more bins, and the search stops when the squared error would increase.
    """
    total = float(histogram.sum())
    below = np.asarray(torch.cumsum(histogram, 0))
    low, high, first, last = 0.0, 1.0, 0, len(histogram) - 1
    least = math.inf
    while low < high:
        next_low, next_high = low + _STEP, high - _STEP
        left = int(np.searchsorted(below, np.float32(next_low * total), "left"))
        left = max(first, min(left, last))
        right = int(np.searchsorted(below, np.float32(next_high * total), "right")) - 1
        right = min(last, max(right, first))
        moved = (first, last)
        if left - first > last - right:
            moved, low = (left, last), next_low
        else:
            moved, high = (first, right), next_high
        if moved == (first, last):
            continue
        error = squared_error(histogram, width, *moved, levels)
        if error > least:
            break
        least, (first, last) = error, moved
    return first, last


class HistogramObserver(nn.Module):
    """An observer with a histogram of the values, whose range is that of least quantization error.

    It is per tensor. Infinite values and empty tensors are ignored. Before any data the scale is 1 and the zero point
    is 0.

    Args:
        qrange: computes scale and zero point of the range.
        bins: the number of bins of the histogram.

    Raises:
        HagoError: the scheme is per channel, or `bins` is not a positive integer.

    References:
        torch.ao.quantization.HistogramObserver; the search is that of caffe2's norm minimization.
    """

    histogram: Tensor
    min_val: Tensor
    max_val: Tensor

    def __init__(self, qrange: QRange | None = None, *, bins: int = 2048) -> None:
        super().__init__()
        self.qrange = qrange or QRange()
        if self.qrange.per_channel:
            raise HagoError(f"a histogram is of a whole tensor; {self.qrange.qscheme} is per channel")
        if isinstance(bins, bool) or not isinstance(bins, int) or bins < 1:
            raise HagoError(f"a histogram of {bins!r} bins; expected a positive integer")
        self.bins, self.ch_axis = bins, 0
        self.register_buffer("histogram", torch.zeros(bins))
        self.register_buffer("min_val", torch.tensor(torch.inf))
        self.register_buffer("max_val", torch.tensor(-torch.inf))

    @property
    def has_range(self) -> bool:
        """Whether a range was observed."""
        return bool(self.min_val <= self.max_val)

    def forward(self, x: Tensor) -> Tensor:
        """Observe `x` and return it.

        Raises:
            HagoError: there is a NaN among the values.
        """
        check_float(x, "an observer")
        values = x.detach().to(torch.float32)
        values = values[~values.isinf()]
        if values.numel() == 0:
            return x
        low, high = torch.aminmax(values)
        if bool(low.isnan()):
            raise HagoError("an observer saw NaN; expected numbers")
        if not self.has_range:
            self.histogram.copy_(self._count(values, low, high))
        else:
            low, high = torch.minimum(low, self.min_val), torch.maximum(high, self.max_val)
            self.histogram.copy_(self._rebinned(low, high) + self._count(values, low, high))
        self.min_val.copy_(low)
        self.max_val.copy_(high)
        return x

    def range(self) -> tuple[Tensor, Tensor]:
        """The range in which quantizing the observed values has the least squared error: (low, high), float32."""
        width = (float(self.max_val) - float(self.min_val)) / self.bins
        low, high, _ = DTYPES[self.qrange.dtype]
        first, last = least_error_bins(self.histogram.cpu(), width, high - low + 1)
        step = (self.max_val - self.min_val) / self.bins
        return self.min_val + step * first, self.min_val + step * (last + 1)

    def qparams(self) -> tuple[Tensor, Tensor]:
        """(scale, zero point) of `range()`; see QRange.qparams."""
        if not self.has_range:
            return _unobserved_qparams(self.min_val.device)
        return self.qrange.qparams(*self.range())

    def _count(self, values: Tensor, low: Tensor, high: Tensor) -> Tensor:
        return torch.histc(values, self.bins, float(low), float(high))

    def _rebinned(self, low: Tensor, high: Tensor) -> Tensor:
        """The histogram so far, in the bins of the wider range from `low` to `high`."""
        if low == self.min_val and high == self.max_val:
            return self.histogram
        if self.min_val == self.max_val:
            return self._count(self.min_val.reshape(1), low, high) * self.histogram.sum()
        parts = self.bins * _PARTS
        edges = torch.linspace(float(self.min_val), float(self.max_val), parts + 1, device=low.device)
        middles = edges[:-1] + 0.5 * ((self.max_val - self.min_val) / parts)
        borders = torch.linspace(float(low), float(high), self.bins + 1, device=low.device)
        target = (torch.bucketize(middles, borders, right=True) - 1).clamp(0, self.bins - 1)
        counts = self.histogram.repeat_interleave(_PARTS) / _PARTS
        return torch.bincount(target, weights=counts, minlength=self.bins)

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *args: Any) -> None:
        saved = state_dict.get(prefix + "histogram")
        if isinstance(saved, Tensor) and saved.numel() != self.bins:
            raise HagoError(f"a histogram of {saved.numel()} bins for an observer of {self.bins}")
        super()._load_from_state_dict(state_dict, prefix, *args)
