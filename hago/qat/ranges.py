"""Range: the threshold of one or several edges as module state: fixed, observed in training, or learned.

Invariants: `low <= 0 <= high`; a range that holds negative values keeps doing so and one that does not
never will, since that decides zero points and signs of the integers, which training must not change.
"""

from __future__ import annotations

import math
from typing import Final

import torch
from torch import Tensor, nn

from hago.errors import HagoError
from hago.qat.fake_quantize import scale_gradient

#: The smallest end of a range that must stay below 0.
_LEAST: Final = 2.0**-90


class Average(nn.Module):
    """How the ranges of batches become one: the base class keeps the last.

    Subclasses hold what they need in buffers and override `update`.
    """

    def update(self, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
        """The range after a batch with extremes `low` and `high`, float64 of shape (channels,)."""
        return low, high


class TrainableRange(nn.Module):
    """One range.

    Args:
        name: the edges it is for, in words; errors begin with it.
        low, high: float64, of shape (1,) or (channels,); where training starts.
        two_sided: whether both ends count (affine schemes), or the larger magnitude alone.
        learned: whether the ends are parameters. They are learned as logarithms, relative to where
            they started, so that signs stay and steps are relative.
        features: how many values of one sample the range is for, and
        levels: how many integers; the gradient is multiplied by `1 / sqrt(features * levels)`.
        average: takes in the range of every batch in training; None where nothing is observed.

    State:
        low, high; log (learned only), shape (2, channels) where two-sided, else (1, channels).

    References:
        Esser et al., arXiv:1902.08153, section 2.2 (gradient scale); Jain et al., arXiv:1903.08066
        (thresholds in the log domain).
    """

    low: Tensor
    high: Tensor

    def __init__(
        self,
        name: str,
        low: Tensor,
        high: Tensor,
        *,
        two_sided: bool,
        learned: bool = False,
        features: int = 1,
        levels: int = 1,
        average: Average | None = None,
    ) -> None:
        super().__init__()
        self.name, self.two_sided = name, two_sided
        self.signed = bool((low < 0).any())
        self.register_buffer("low", low.clone())
        self.register_buffer("high", high.clone())
        self.average = average
        shape = (2 if two_sided else 1, low.numel())
        self.log = nn.Parameter(torch.zeros(shape)) if learned else None
        self.slope = 1.0 / math.sqrt(max(1, features) * max(1, levels))
        self.observing = True

    def ends(self) -> tuple[Tensor, Tensor]:
        """(low, high), float64, with their gradients where they are learned."""
        if self.log is None:
            return self.low, self.high
        factor = torch.exp(scale_gradient(self.log, self.slope)).to(torch.float64)
        return self.low * factor[0], self.high * factor[-1]

    @property
    def stamp(self) -> tuple[Tensor | int, ...]:
        """Changes whenever the range may have changed."""
        held = (self.low, self.high) if self.log is None else (self.low, self.high, self.log)
        return tuple(x for t in held for x in (t, t._version))

    @property
    def moves(self) -> bool:
        """Whether the ends take a gradient."""
        return self.log is not None and self.log.requires_grad

    @property
    def observes(self) -> bool:
        """Whether a batch in training changes the range."""
        return self.average is not None and self.observing

    @torch.no_grad()
    def observe(self, low: Tensor, high: Tensor) -> None:
        """Take in the extremes of a batch.

        Args:
            low, high: of shape (1,) or (channels,).

        Raises:
            HagoError: they are NaN or infinite.
        """
        if self.average is None:
            return
        low, high = low.to(torch.float64).clamp_max(0.0), high.to(torch.float64).clamp_min(0.0)
        self._check(low, high)
        if self.signed and not self.two_sided:
            high = torch.maximum(-low, high)
            low = -high
        low, high = self.average.update(low, high)
        self._check(low, high)  # an average kept in float32 overflows earlier
        self.low.copy_(low.clamp_max(-_LEAST) if self.signed else torch.zeros_like(low))
        self.high.copy_(high)

    def _check(self, low: Tensor, high: Tensor) -> None:
        """Refuse extremes that are NaN or infinite."""
        if not bool((low.isfinite() & high.isfinite()).all()):
            raise HagoError(
                f"{self.name}: an observer saw NaN or infinite values; lower the learning rate, or look for what "
                "makes them (`torch.autograd.set_detect_anomaly`)"
            )
