"""TensorFlow's FakeQuantWithMinMax{Args,Vars,VarsPerChannel}: nudged affine fake quantization.

All arithmetic is float32, as in the kernels, whatever the dtype of `x`. The order of operations
differs by op and by release and shows at exact ties, so it is an option (`kernel`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from hago.errors import HagoError
from hago.qat._checks import along, check_axis, check_bits, check_choice, check_float
from hago.qat.straight_through import apply
from hago.rounding import round_half_away

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
