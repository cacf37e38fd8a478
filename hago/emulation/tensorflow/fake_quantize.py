"""TensorFlow's FakeQuantWithMinMax{Args,Vars,VarsPerChannel}, and the range observers of contrib.quantize.

All arithmetic is float32, as in the kernels, whatever the dtype of `x`. The kernels of different ops and releases
compute in different orders, which changes results at exact ties; the option `kernel` selects the release.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from hago.arithmetic.rounding import round_half_away
from hago.arithmetic.straight_through import apply
from hago.emulation._checks import broadcast_along, check_axis, check_bits, check_float, other_axes
from hago.errors import HagoError, check_choice

Kernel = Literal["2.15", "1.15"]


@dataclass(frozen=True, slots=True)
class FakeQuant:
    """A fake quantization to the integers of `bits` bits: its options, and a method for each of TensorFlow's three ops.

    Args:
        bits: 2 to 16.
        narrow_range: leave out the lowest integer, so that the integers are [1, 2**bits - 1].
        kernel: the TensorFlow release whose order of operations is followed: `2.15`, or `1.15`, on which
            contrib.quantize ran.

    Raises:
        HagoError: an option is out of range.

    References:
        tensorflow/core/kernels/fake_quant_ops_functor.h.
    """

    bits: int = 8
    narrow_range: bool = False
    kernel: Kernel = "2.15"

    def __post_init__(self) -> None:
        check_bits(self.bits, 2, 16, "a TensorFlow fake quantization")
        check_choice("kernel", self.kernel, get_args(Kernel))

    @property
    def qmin(self) -> int:
        """The lowest integer."""
        return int(self.narrow_range)

    @property
    def qmax(self) -> int:
        """The highest integer."""
        return (1 << self.bits) - 1

    def nudge(self, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The range shifted so that 0 is exactly one of its quantized values.

            scale = (high - low) / (qmax - qmin)
            z = clamp(round_half_away(qmin - low / scale), qmin, qmax)
            nudged = ((qmin - z) * scale, (qmax - z) * scale)

        Args:
            low, high: float32, of one shape.

        Returns:
            (nudged low, nudged high, scale, (qmax - qmin) / (high - low)), float32. A range that
            does not hold 0 slides to it: (1, 2) becomes (0, 1).
        """
        # a tensor, because torch rounds twice where it divides a Python number by a tensor
        steps = torch.full_like(low, self.qmax - self.qmin)
        scale, inverse = (high - low) / steps, steps / (high - low)
        zero = round_half_away((self.qmin - low / scale).clamp(self.qmin, self.qmax))
        return (self.qmin - zero) * scale, (self.qmax - zero) * scale, scale, inverse

    def args(self, x: Tensor, low: float = -6.0, high: float = 6.0) -> Tensor:
        """FakeQuantWithMinMaxArgs: the range is constant; `dx = dy` inside the nudged range, else 0.

        Raises:
            HagoError: `low` is not below `high`.
        """
        if not low < high:
            raise HagoError(f"fake quantization of a constant range [{low}, {high}]; expected low below high")
        first, last = (torch.tensor(v, dtype=torch.float32, device=x.device) for v in (low, high))
        return _fake_quant(x, first, last, self, divides=False)

    def vars(self, x: Tensor, low: Tensor, high: Tensor) -> Tensor:
        """FakeQuantWithMinMaxVars: the range is learned, one for the tensor.

        With masks on the nudged range, its ends included: `dx = dy` inside, `dlow = sum(dy below)`,
        `dhigh = sum(dy above)`; NaN counts nowhere. `low = high = 0` gives 0 and `dx = dy`;
        `low = high != 0` gives NaN.

        Args:
            x: float tensor.
            low, high: float, one entry each.
        """
        if low.numel() != 1 or high.numel() != 1:
            raise HagoError(f"low and high have {low.numel()} and {high.numel()} entries; expected one each")
        return _fake_quant(x, low, high, self, divides=True)

    def vars_per_channel(self, x: Tensor, low: Tensor, high: Tensor, axis: int = -1) -> Tensor:
        """FakeQuantWithMinMaxVarsPerChannel: as `vars`, with one range per index of an axis.

        Args:
            x: float tensor.
            low, high: float, of shape (channels,).
            axis: of the channels; TensorFlow itself supports only the last.
        """
        for end in (low, high):
            if end.ndim != 1:
                raise HagoError(f"low and high have shapes {tuple(low.shape)}, {tuple(high.shape)}; expected vectors")
            check_axis(x, axis, end.numel(), "fake quantization")
        low, high = broadcast_along(low, axis, x.ndim), broadcast_along(high, axis, x.ndim)
        return _fake_quant(x, low, high, self, divides=self.kernel == "1.15")


def _round(c: Tensor, nudged: tuple[Tensor, Tensor, Tensor, Tensor], divides: bool, kernel: Kernel) -> Tensor:
    """Round clamped values to the grid, in the order of operations of the op and the release.

                 divides                                          multiplies
        2.15     floor((c - lo) / s - q + .5) * s                 floor((c - lo) * inv - q + .5) * s
        1.15     floor((c - lo) / s + .5) * s + lo                floor((c - lo) * (1 / s) + .5) * s + lo

    with `q = floor(-lo * inv + .5)`, the zero point minus qmin.

    Args:
        c: `x`, clamped to the nudged range.
        nudged: the result of `FakeQuant.nudge`.
        divides: whether the op divides by the scale, or multiplies by its inverse.
    """
    low, _, scale, inverse = nudged
    if kernel == "1.15":
        steps = (c - low) / scale if divides else (c - low) * (1 / scale)
        return torch.floor(steps + 0.5) * scale + low
    steps = (c - low) / scale if divides else (c - low) * inverse
    return torch.floor(steps - torch.floor(-low * inverse + 0.5) + 0.5) * scale


class _FakeQuant(torch.autograd.Function):
    """The three ops with their gradients; `low` and `high` broadcast against `x`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, low: Tensor, high: Tensor, options: FakeQuant, divides: bool) -> Tensor:
        nudged = options.nudge(low, high)
        empty = (low == 0) & (high == 0)
        below, above = (x < nudged[0]) & ~empty, (x > nudged[1]) & ~empty
        inside = ((x >= nudged[0]) & (x <= nudged[1])) | empty
        ctx.save_for_backward(below, inside, above)
        ctx.shape = low.shape
        c = torch.minimum(torch.maximum(x, nudged[0]), nudged[1])
        return torch.where(empty, torch.zeros_like(x), _round(c, nudged, divides, options.kernel))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        below, inside, above = (torch.where(m, grad, torch.zeros_like(grad)) for m in ctx.saved_tensors)
        return inside, below.sum_to_size(ctx.shape), above.sum_to_size(ctx.shape), None, None


def _fake_quant(x: Tensor, low: Tensor, high: Tensor, options: FakeQuant, *, divides: bool) -> Tensor:
    check_float(x, "fake quantization")
    shape = [1] * (x.ndim - low.ndim) + list(low.shape) if low.ndim <= x.ndim else [1] * x.ndim
    ends = (t.to(torch.float32).reshape(shape) for t in (low, high))
    return apply(_FakeQuant, x.to(torch.float32), *ends, options, divides).to(x.dtype)


# ---------------------------------------------------------------- range observers
# Modules that a training graph calls once per step on a weight or an activation. In training they update their range
# from the batch and fake-quantize with it; in eval they fake-quantize with the stored range. Ranges always contain 0
# and take no gradient. Their buffers are the range and the state of its average.


@dataclass(frozen=True, slots=True)
class BatchRange:
    """The range of one batch, called by `RangeObserver` in training.

        plain:     [min(x, 0), max(x, 0)]
        symmetric: [min(lo, hi / r), max(hi, lo * r)], with r = -1 where the range is narrow, else
                   r = -(2**bits - 2) / 2**bits

    Args:
        options: bits and narrow range of the fake quantization.
        symmetric: widen the shorter side of 0.
        axis: None for one range, or the axis of the channels.

    Raises:
        HagoError: there are no values, or NaN or infinity among them, which a moving average would never forget.

    References:
        tensorflow/contrib/quantize/python/quant_ops.py (r1.15).
    """

    options: FakeQuant
    symmetric: bool = False
    axis: int | None = None

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(low, high), float32: scalars, or of shape (channels,)."""
        check_float(x, "an observer")
        if x.numel() == 0:
            raise HagoError(f"an observer got an empty tensor of shape {tuple(x.shape)}; expected values")
        low = high = x.detach().to(torch.float32)
        if self.axis is None:
            low, high = low.amin(), high.amax()
        elif x.ndim > 1:  # an empty tuple of axes would reduce them all
            reduced = other_axes(self.axis, x.ndim)
            low, high = low.amin(reduced), high.amax(reduced)
        if not bool((low.isfinite() & high.isfinite()).all()):
            raise HagoError(f"an observer saw values from {low.tolist()} to {high.tolist()}; expected finite numbers")
        if not self.symmetric:
            return low.clamp_max(0.0), high.clamp_min(0.0)
        levels = 1 << self.options.bits
        ratio = -1.0 if self.options.narrow_range else -(levels - 2) / levels
        return torch.minimum(low, high / ratio), torch.maximum(high, low * ratio)


class RangeObserver(nn.Module):
    """The base of both observers: the stored range and the fake quantization with it.

    Args:
        options: of the fake quantization; by default with the kernels of 1.15, on which contrib.quantize ran.
        symmetric: make ranges symmetric.
        channels: one range for the tensor if None, else one per index of `axis`.
        axis: of the channels; TensorFlow itself supports only the last.
        init_min, init_max: the range before the first training step; used only in eval.
    """

    minimum: Tensor
    maximum: Tensor

    def __init__(
        self,
        options: FakeQuant | None = None,
        *,
        symmetric: bool = False,
        channels: int | None = None,
        axis: int = -1,
        init_min: float = -6.0,
        init_max: float = 6.0,
    ) -> None:
        super().__init__()
        self.options = options or FakeQuant(kernel="1.15")
        self.axis = None if channels is None else axis
        self.batch_range = BatchRange(self.options, symmetric, self.axis)
        size = () if channels is None else (channels,)
        self.register_buffer("minimum", torch.full(size, init_min, dtype=torch.float32))
        self.register_buffer("maximum", torch.full(size, init_max, dtype=torch.float32))

    def forward(self, x: Tensor, *, quantize: bool = True) -> Tensor:
        """`x` fake-quantized; in training the range is updated first.

        Args:
            x: float tensor.
            quantize: if False, return `x` itself; the range is updated in training all the same, which
                is what a quantization delay does.
        """
        if self.training:
            if self.axis is not None:
                check_axis(x, self.axis, self.minimum.numel(), "an observer")
            self.update(*self.batch_range(x))
        if not quantize:
            return x
        if self.axis is None:
            return self.options.vars(x, self.minimum, self.maximum)
        return self.options.vars_per_channel(x, self.minimum, self.maximum, self.axis)

    def update(self, low: Tensor, high: Tensor) -> None:
        """Update the stored range with that of a batch: float32, of the stored range's shape."""
        self.minimum.copy_(low)
        self.maximum.copy_(high)


class LastValueQuantize(RangeObserver):
    """Quantizes with the range of the last batch; contrib.quantize uses it for weights, with a narrow range."""


class MovingAvgQuantize(RangeObserver):
    """Quantizes with a zero-debiased moving average of the batches' ranges; contrib.quantize uses it for activations.

        biased += (v - biased) * (1 - d),  value = biased / (1 - (1 - (1 - d))**t)

    in float32, with `1 - d` rounded to float32 first. The first value therefore differs from that of the
    batch in its last bits: at d = .999 it is 1.0000129 times as large. The initial range has no effect in training.

    Args:
        ema_decay: d, the weight of the past.
        Other arguments are those of RangeObserver.
    """

    biased_minimum: Tensor
    biased_maximum: Tensor
    local_step: Tensor

    def __init__(
        self,
        options: FakeQuant | None = None,
        *,
        ema_decay: float = 0.999,
        symmetric: bool = False,
        channels: int | None = None,
        axis: int = -1,
        init_min: float = -6.0,
        init_max: float = 6.0,
    ) -> None:
        super().__init__(
            options, symmetric=symmetric, channels=channels, axis=axis, init_min=init_min, init_max=init_max
        )
        if not 0 <= ema_decay < 1:
            raise HagoError(f"ema_decay is {ema_decay}; expected 0 to below 1")
        self.ema_decay = ema_decay
        self.register_buffer("biased_minimum", torch.zeros_like(self.minimum))
        self.register_buffer("biased_maximum", torch.zeros_like(self.maximum))
        self.register_buffer("local_step", torch.zeros(()))

    def update(self, low: Tensor, high: Tensor) -> None:
        rate = torch.tensor(1.0 - self.ema_decay, dtype=torch.float32, device=low.device)
        self.local_step.add_(1)
        weight = 1 - torch.pow(1 - rate, self.local_step)
        for biased, value in ((self.biased_minimum, low), (self.biased_maximum, high)):
            biased.sub_((biased - value) * rate)
        super().update(self.biased_minimum / weight, self.biased_maximum / weight)


@dataclass(frozen=True, slots=True)
class Schedule:
    """The training steps, counted from 1, at which quantization begins and batch norms are frozen.

    Args:
        quant_delay: values are float while `step < quant_delay`.
        freeze_bn_delay: statistics are frozen once `step >= freeze_bn_delay`; never if None.

    References:
        tensorflow/contrib/quantize/python/quant_ops.py: the step is incremented before it is compared.
    """

    quant_delay: int = 0
    freeze_bn_delay: int | None = None

    def quantizes(self, step: int) -> bool:
        """Whether values are quantized at this step."""
        return step >= self.quant_delay

    def freezes(self, step: int) -> bool:
        """Whether batch norms at this step use their moving statistics and no longer update them."""
        return self.freeze_bn_delay is not None and step >= self.freeze_bn_delay
