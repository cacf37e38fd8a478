"""TensorFlow's FakeQuantWithMinMax{Args,Vars,VarsPerChannel}, and the range observers of contrib.quantize.

All arithmetic is float32, as in the kernels, whatever the dtype of `x`. The order of operations differs by op and by
release and shows at exact ties, so it is an option (`kernel`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from hago.arithmetic.rounding import round_half_away
from hago.arithmetic.straight_through import apply
from hago.emulation._checks import along, but, check_axis, check_bits, check_choice, check_float
from hago.errors import HagoError

Kernel = Literal["2.15", "1.15"]


@dataclass(frozen=True, slots=True)
class FakeQuant:
    """The options of a fake quantization to the integers of `bits` bits.

    Args:
        bits: 2 to 16.
        narrow_range: leave out the lowest integer, so that it is [1, 2**bits - 1].
        kernel: the release whose order of operations is kept: `2.15`, or `1.15`, which
            contrib.quantize ran on.

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
        check_choice("kernel", self.kernel, ("2.15", "1.15"))

    @property
    def qmin(self) -> int:
        """The lowest integer."""
        return int(self.narrow_range)

    @property
    def qmax(self) -> int:
        """The highest integer."""
        return (1 << self.bits) - 1

    def nudge(self, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The range moved so that 0 is one of its integers.

            scale = (high - low) / (qmax - qmin)
            z = clamp(round_half_away(qmin - low / scale), qmin, qmax)
            nudged = ((qmin - z) * scale, (qmax - z) * scale)

        Args:
            low, high: float32, of one shape.

        Returns:
            (nudged low, nudged high, scale, (qmax - qmin) / (high - low)), float32. A range that
            does not hold 0 slides to it: (1, 2) becomes (0, 1).
        """
        # as a tensor: torch divides a number by a tensor in two roundings
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
            axis: of the channels; TensorFlow knows the last only.
        """
        for end in (low, high):
            if end.ndim != 1:
                raise HagoError(f"low and high have shapes {tuple(low.shape)}, {tuple(high.shape)}; expected vectors")
            check_axis(x, axis, end.numel(), "fake quantization")
        low, high = along(low, axis, x.ndim), along(high, axis, x.ndim)
        return _fake_quant(x, low, high, self, divides=self.kernel == "1.15")


def _round(c: Tensor, nudged: tuple[Tensor, Tensor, Tensor, Tensor], divides: bool, kernel: Kernel) -> Tensor:
    """Clamped values to the nearest of the grid; what differs between kernels.

                 divides                                          multiplies
        2.15     floor((c - lo) / s - q + .5) * s                 floor((c - lo) * inv - q + .5) * s
        1.15     floor((c - lo) / s + .5) * s + lo                floor((c - lo) * (1 / s) + .5) * s + lo

    with `q = floor(-lo * inv + .5)`, the zero point less qmin.
    """
    low, _, scale, inverse = nudged
    if kernel == "1.15":
        steps = (c - low) / scale if divides else (c - low) * (1 / scale)
        return torch.floor(steps + 0.5) * scale + low
    steps = (c - low) / scale if divides else (c - low) * inverse
    return torch.floor(steps - torch.floor(-low * inverse + 0.5) + 0.5) * scale


class _FakeQuant(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, low: Tensor, high: Tensor, how: FakeQuant, divides: bool) -> Tensor:
        nudged = how.nudge(low, high)
        off = (low == 0) & (high == 0)
        below, above = (x < nudged[0]) & ~off, (x > nudged[1]) & ~off
        inside = ((x >= nudged[0]) & (x <= nudged[1])) | off
        ctx.save_for_backward(below, inside, above)
        ctx.shape = low.shape
        c = torch.minimum(torch.maximum(x, nudged[0]), nudged[1])
        return torch.where(off, torch.zeros_like(x), _round(c, nudged, divides, how.kernel))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        below, inside, above = (torch.where(m, grad, torch.zeros_like(grad)) for m in ctx.saved_tensors)
        return inside, below.sum_to_size(ctx.shape), above.sum_to_size(ctx.shape), None, None


def _fake_quant(x: Tensor, low: Tensor, high: Tensor, how: FakeQuant, *, divides: bool) -> Tensor:
    check_float(x, "fake quantization")
    shape = [1] * (x.ndim - low.ndim) + list(low.shape) if low.ndim <= x.ndim else [1] * x.ndim
    ends = (t.to(torch.float32).reshape(shape) for t in (low, high))
    return apply(_FakeQuant, x.to(torch.float32), *ends, how, divides).to(x.dtype)


# ---------------------------------------------------------------- range observers
# LastValueQuantize and MovingAvgQuantize are modules that fake-quantize with the range that they have just updated (in
# training) or hold (in eval). Ranges always hold 0 and take no gradient. State: the range, and what the average needs.


@dataclass(frozen=True, slots=True)
class BatchRange:
    """How the range of one batch is taken.

        plain:     [min(x, 0), max(x, 0)]
        symmetric: [min(lo, hi / r), max(hi, lo * r)], with r = -1 where the range is narrow, else
                   r = -(2**bits - 2) / 2**bits

    Args:
        how: bits and narrow range of the fake quantization.
        symmetric: widen the smaller side.
        axis: None for one range, or the axis of the channels.

    Raises:
        HagoError: no values, or NaN or infinity among them, which would stay in an average for ever.

    References:
        tensorflow/contrib/quantize/python/quant_ops.py (r1.15).
    """

    how: FakeQuant
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
            rest = but(self.axis, x.ndim)
            low, high = low.amin(rest), high.amax(rest)
        if not bool((low.isfinite() & high.isfinite()).all()):
            raise HagoError(f"an observer saw values from {low.tolist()} to {high.tolist()}; expected finite numbers")
        if not self.symmetric:
            return low.clamp_max(0.0), high.clamp_min(0.0)
        levels = 1 << self.how.bits
        ratio = -1.0 if self.how.narrow_range else -(levels - 2) / levels
        return torch.minimum(low, high / ratio), torch.maximum(high, low * ratio)


class RangeObserver(nn.Module):
    """What both observers share: the stored range and the fake quantization.

    Args:
        how: of the fake quantization; contrib.quantize ran on the kernels of 1.15.
        symmetric: whether ranges are symmetric.
        channels: one range for the tensor if None, else one per index of `axis`.
        axis: of the channels; TensorFlow knows the last only.
        init_min, init_max: the range before any training; only eval sees it.
    """

    minimum: Tensor
    maximum: Tensor

    def __init__(
        self,
        how: FakeQuant | None = None,
        *,
        symmetric: bool = False,
        channels: int | None = None,
        axis: int = -1,
        init_min: float = -6.0,
        init_max: float = 6.0,
    ) -> None:
        super().__init__()
        self.how = how or FakeQuant(kernel="1.15")
        self.axis = None if channels is None else axis
        self.batch_range = BatchRange(self.how, symmetric, self.axis)
        size = () if channels is None else (channels,)
        self.register_buffer("minimum", torch.full(size, init_min, dtype=torch.float32))
        self.register_buffer("maximum", torch.full(size, init_max, dtype=torch.float32))

    def forward(self, x: Tensor, *, quantize: bool = True) -> Tensor:
        """`x` fake-quantized; in training the range is updated first.

        Args:
            x: float tensor.
            quantize: return `x` as it is where False (during a quantization delay the range is
                updated all the same).
        """
        if self.training:
            if self.axis is not None:
                check_axis(x, self.axis, self.minimum.numel(), "an observer")
            self.update(*self.batch_range(x))
        if not quantize:
            return x
        if self.axis is None:
            return self.how.vars(x, self.minimum, self.maximum)
        return self.how.vars_per_channel(x, self.minimum, self.maximum, self.axis)

    def update(self, low: Tensor, high: Tensor) -> None:
        """Take in the range of a batch: float32, of the stored range's shape."""
        self.minimum.copy_(low)
        self.maximum.copy_(high)


class LastValueQuantize(RangeObserver):
    """The range of the last batch; what contrib.quantize gives weights (with a narrow range)."""


class MovingAvgQuantize(RangeObserver):
    """A zero-debiased moving average of the batches' ranges; what contrib.quantize gives activations.

        biased += (v - biased) * (1 - d),  value = biased / (1 - (1 - (1 - d))**t)

    in float32, `1 - d` rounded to float32 first. So the first value is not the batch's to the last
    bit: at d = .999 it is 1.0000129 times as large. The initial range plays no part in training.

    Args:
        ema_decay: d, the weight of the past.
        others: of RangeObserver.
    """

    biased_minimum: Tensor
    biased_maximum: Tensor
    local_step: Tensor

    def __init__(
        self,
        how: FakeQuant | None = None,
        *,
        ema_decay: float = 0.999,
        symmetric: bool = False,
        channels: int | None = None,
        axis: int = -1,
        init_min: float = -6.0,
        init_max: float = 6.0,
    ) -> None:
        super().__init__(how, symmetric=symmetric, channels=channels, axis=axis, init_min=init_min, init_max=init_max)
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
    """When quantization and frozen batch norms begin, by a step that counts from 1.

    Args:
        quant_delay: values are float while `step < quant_delay`.
        freeze_bn_delay: statistics are frozen from `step >= freeze_bn_delay`; never if None.

    References:
        tensorflow/contrib/quantize/python/quant_ops.py: the step is incremented before it is compared.
    """

    quant_delay: int = 0
    freeze_bn_delay: int | None = None

    def quantizes(self, step: int) -> bool:
        """Whether values are quantized at this step."""
        return step >= self.quant_delay

    def freezes(self, step: int) -> bool:
        """Whether batch norms use, and no longer update, their moving statistics at this step."""
        return self.freeze_bn_delay is not None and step >= self.freeze_bn_delay
