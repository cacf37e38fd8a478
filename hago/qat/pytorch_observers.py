"""PyTorch's min-max observers and the module that joins one to a fake quantization.

Ranges are widened to hold 0 when they become scale and zero point. State: the range (in
`min_val`, `max_val`), and of FakeQuantize its last scale and zero point and two switches.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

import torch
from torch import Tensor, nn

from hago.errors import HagoError
from hago.qat._checks import but, check_axis, check_choice, check_float
from hago.qat.pytorch import DTYPES, fake_quantize

_SCHEMES: Final = (
    "per_tensor_affine",
    "per_tensor_symmetric",
    "per_channel_affine",
    "per_channel_symmetric",
    "per_channel_affine_float_qparams",
)
_SYMMETRIC: Final = ("per_tensor_symmetric", "per_channel_symmetric")
_EPS: Final = torch.finfo(torch.float32).eps


@dataclass(frozen=True, slots=True)
class QRange:
    """From a range of values to scale and zero point.

    Args:
        dtype: a name in `hago.qat.pytorch.DTYPES`.
        qscheme: torch's name of the scheme.
        reduce_range: use half of the integers, e.g. [-64, 63].
        quant_min, quant_max: integers other than the dtype's; both or none.
        eps: the smallest scale.

    Raises:
        HagoError: an option is out of range. What torch's observers refuse of the combinations, ours refuse.

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
            return low, high  # torch reduces 8-bit dtypes and given ranges only
        return (low // 2, high // 2) if self.reduce_range else (low, high)

    @property
    def symmetric(self) -> bool:
        """Whether the zero point is in the middle, whatever the range."""
        return self.qscheme.endswith("symmetric")

    def qparams(self, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
        """(scale, zero point) of a range.

            affine:    scale = (high - low) / (qmax - qmin), zero point = clamp(qmin - round(low / scale))
            symmetric: scale = max(-low, high) / ((qmax - qmin) / 2), zero point = 0, or the middle
                       of an unsigned dtype

        with low = min(low, 0), high = max(high, 0), scale at least eps, ties to even.
        `per_channel_affine_float_qparams` takes low and high as they are, sets scales up to eps to 1,
        and its zero point is -low / scale.

        Args:
            low, high: float32, of one shape.

        Returns:
            float32 scales and int64 zero points (float32 where the scheme says so), of shape (1,)
            or (channels,).

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
        """The zero point of a symmetric scheme: for 8 unsigned bits 128 even where the range is reduced."""
        if self.dtype in ("quint8", "uint8"):
            qmin, qmax = self.ends
            return 128 if self.quant_min is None else (qmin + qmax) // 2
        return 2**15 if self.dtype == "uint16" else 0


class MinMaxObserver(nn.Module):
    """The smallest and largest value seen so far; per tensor, or per index of an axis.

    Before any data the scale is 1 and the zero point 0. Empty tensors are passed over.

    Args:
        qrange: makes scale and zero point; its scheme decides whether the observer is per channel.
        ch_axis: of the channels, where per channel.
        averaging_constant: None for the extremes; c for a moving average
            `m += c * (v - m)` whose first value is the batch's.

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
        if self.qrange.reduce_range and self.qrange.dtype == "quint8" and self.qrange.qscheme in _SYMMETRIC:
            raise HagoError(
                f"reduce_range with {self.qrange.qscheme} quint8 is refused, as torch's observers of extremes do; take "
                "qint8, or an affine scheme"
            )
        self.per_channel = self.qrange.qscheme.startswith("per_channel")
        self.ch_axis, self.averaging_constant = ch_axis, averaging_constant
        self.register_buffer("min_val", torch.empty(0) if self.per_channel else torch.tensor(torch.inf))
        self.register_buffer("max_val", torch.empty(0) if self.per_channel else torch.tensor(-torch.inf))

    @property
    def seen(self) -> bool:
        """Whether there was any data."""
        return self.min_val.numel() > 0 and not bool((self.min_val > self.max_val).any())

    def forward(self, x: Tensor) -> Tensor:
        """`x` itself, after it was taken in.

        Raises:
            HagoError: the number of channels changed.
        """
        check_float(x, "an observer")
        if x.numel() == 0:
            return x
        low, high = self._batch(x.detach().to(self.min_val.dtype))
        if self.seen:
            if self.per_channel:
                check_axis(x, self.ch_axis, self.min_val.numel(), "an observer")
            low, high = self._joined(low, high)
        self.min_val, self.max_val = low.clone(), high.clone()
        return x

    def qparams(self) -> tuple[Tensor, Tensor]:
        """(scale, zero point) of what was seen; see QRange.qparams."""
        if not self.seen:
            device = self.min_val.device
            return torch.ones(1, device=device), torch.zeros(1, dtype=torch.int64, device=device)
        return self.qrange.qparams(self.min_val, self.max_val)

    def _batch(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if not self.per_channel:
            return x.amin(), x.amax()
        if not -x.ndim <= self.ch_axis < x.ndim:
            raise HagoError(f"no axis {self.ch_axis} in a tensor of shape {tuple(x.shape)}; set ch_axis")
        rest = but(self.ch_axis, x.ndim)
        return (x.amin(rest), x.amax(rest)) if rest else (x, x)

    def _joined(self, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
        if self.averaging_constant is None:
            return torch.minimum(low, self.min_val), torch.maximum(high, self.max_val)
        c = self.averaging_constant
        return self.min_val + c * (low - self.min_val), self.max_val + c * (high - self.max_val)

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *args: Any) -> None:
        _take_shapes(self, ("min_val", "max_val"), state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args)


class Observer(Protocol):
    """What FakeQuantize needs of an observer: MinMaxObserver, or HistogramObserver."""

    qrange: QRange
    per_channel: bool
    ch_axis: int

    @property
    def seen(self) -> bool:
        """Whether there was any data."""

    def qparams(self) -> tuple[Tensor, Tensor]:
        """(scale, zero point) of what was seen."""

    def __call__(self, x: Tensor) -> Tensor:
        """`x` itself, after it was taken in."""


class FakeQuantize(nn.Module):
    """An observer and the fake quantization by what it has seen.

    Args:
        observer: updated by every call while `observer_enabled` is 1; scale and zero point follow.

    State:
        scale, zero_point; observer_enabled, fake_quant_enabled: uint8 switches, set with `fill_`.

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
        axis = self.observer.ch_axis if self.observer.per_channel and self.observer.seen else None
        return fake_quantize(x, self.scale, self.zero_point, *self.observer.qrange.ends, axis)

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *args: Any) -> None:
        _take_shapes(self, ("scale", "zero_point"), state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args)


def _take_shapes(module: nn.Module, names: tuple[str, ...], state_dict: Mapping[str, Any], prefix: str) -> None:
    """Give buffers that grow with the channels the shapes they are about to be loaded with."""
    for name in names:
        saved = state_dict.get(prefix + name)
        if isinstance(saved, Tensor):
            kept = module.get_buffer(name)
            setattr(module, name, torch.empty(saved.shape, dtype=kept.dtype, device=kept.device))
