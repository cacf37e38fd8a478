"""Ranges: the thresholds of edges as module state that is fixed, observed in training, or learned.

Invariants: `low <= 0 <= high`. Whether a range contains negative values never changes, because that determines the zero
points and signs of the integers, which training must not change.
"""

from __future__ import annotations

import math
from typing import Final

import torch
from torch import Tensor, nn

from hago.arithmetic.fake_quantize import scale_gradient
from hago.errors import HagoError

#: The least magnitude of the low end of a range that contains negative values.
_LEAST: Final = 2.0**-90


class Average(nn.Module):
    """Combines the ranges of successive batches into one; this base class keeps that of the last batch.

    A TrainingScheme makes one per range; `TrainableRange.observe` calls `update` once per batch. Subclasses override
    `update` and keep their state in buffers.
    """

    def update(self, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
        """The range after a batch with extremes `low` and `high`, float64 of shape (channels,)."""
        return low, high


class TrainableRange(nn.Module):
    """The range of one or several edges that share integers. `make_trainable` makes it; a QatModel owns it.

    Args:
        name: of the edges; error messages begin with it.
        low, high: the ends at the start of training; float64, of shape (1,) or (channels,).
        two_sided: whether both ends count (affine schemes), or only the larger magnitude.
        learned: whether the ends are parameters. They are learned as logarithms of their ratio to the ends at the
            start, so that signs do not change and steps are relative.
        features: number of values of one sample that the range is for.
        levels: the largest magnitude of the integers; the gradient is multiplied by `1 / sqrt(features * levels)`.
        average: combines the ranges of batches in training; None for a range that is not observed.

    Parameters and buffers:
        low, high: the ends; of a learned range, those at the start of training.
        log: of a learned range, of shape (2, channels) where two-sided, else (1, channels).

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
        learned: bool,
        features: int,
        levels: int,
        average: Average | None,
    ) -> None:
        super().__init__()
        self.name, self.two_sided = name, two_sided
        self.signed = bool((low < 0).any())
        self.register_buffer("low", low.clone())
        self.register_buffer("high", high.clone())
        self.average = average
        shape = (2 if two_sided else 1, low.numel())
        self.log = nn.Parameter(torch.zeros(shape)) if learned else None
        self.gradient_scale = 1.0 / math.sqrt(max(1, features) * max(1, levels))
        self.observing = True

    def ends(self) -> tuple[Tensor, Tensor]:
        """The ends (low, high), float64, with their gradients if they are learned."""
        if self.log is None:
            return self.low, self.high
        factor = torch.exp(scale_gradient(self.log, self.gradient_scale)).to(torch.float64)
        return self.low * factor[0], self.high * factor[-1]

    @property
    def stamp(self) -> tuple[Tensor | int, ...]:
        """A key that differs whenever the range may have changed: its tensors and their versions."""
        tensors = (self.low, self.high) if self.log is None else (self.low, self.high, self.log)
        return tuple(x for t in tensors for x in (t, t._version))

    @property
    def learns(self) -> bool:
        """Whether the ends take a gradient."""
        return self.log is not None and self.log.requires_grad

    @property
    def observes(self) -> bool:
        """Whether the range changes with the batches of training."""
        return self.average is not None and self.observing

    @torch.no_grad()
    def observe(self, low: Tensor, high: Tensor) -> None:
        """Update the range with the extremes of a batch; a range without an average ignores them.

        Args:
            low, high: the extremes, of shape (1,) or (channels,).

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
        self._check(low, high)  # an average in float32 can overflow although its inputs are finite
        self.low.copy_(low.clamp_max(-_LEAST) if self.signed else torch.zeros_like(low))
        self.high.copy_(high)

    def _check(self, low: Tensor, high: Tensor) -> None:
        """Refuse extremes that are NaN or infinite."""
        if not bool((low.isfinite() & high.isfinite()).all()):
            raise HagoError(
                f"{self.name}: an observer saw NaN or infinite values; lower the learning rate, or look for what "
                "makes them (`torch.autograd.set_detect_anomaly`)"
            )
