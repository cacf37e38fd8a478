"""percentile: the threshold that a given percentage of the values does not exceed."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hago.calibrate._ranges import around_zero, magnitudes, observed, two_sided, unless_empty
from hago.calibrate.statistics import TensorStatistics
from hago.errors import HagoError
from hago.schemes import Grid


def quantile(histogram: Tensor, fraction: float) -> Tensor:
    """Where `fraction` of a histogram's mass lies below, in bins from its left: float64 (C,).

    Values are taken to be spread evenly inside their bin.
    """
    below = histogram.cumsum(1)
    target = below[:, -1:] * fraction
    index = torch.searchsorted(below, target).clamp_max(histogram.shape[1] - 1)
    inside = histogram.gather(1, index)
    before = below.gather(1, index) - inside
    return (index + (target - before) / inside.clamp_min(1.0)).squeeze(1)


@dataclass(frozen=True, slots=True)
class Percentile:
    """The `percent` percentile of |x|; for an affine grid half of the rest is cut off at each end.

    Args:
        percent: above 0, at most 100 (then nothing is clipped).

    Raises:
        HagoError: percent is not in that range.
    """

    percent: float = 99.99

    def __post_init__(self) -> None:
        if not 0 < self.percent <= 100:
            raise HagoError(f"percentile {self.percent:g}; expected above 0 and at most 100, e.g. 99.99")

    @property
    def name(self) -> str:
        return f"percentile:{self.percent!r}"

    def __call__(self, statistics: TensorStatistics, grid: Grid) -> tuple[Tensor, Tensor]:
        """The range inside the percentile; see Estimator."""
        width = statistics.bin_width
        if not two_sided(grid):
            threshold = quantile(magnitudes(statistics, grid), self.percent / 100) * width
            return around_zero(statistics, grid, threshold)
        lo, hi = observed(statistics)
        kept = 1 - (100 - self.percent) / 200
        high = quantile(statistics.histogram, kept) * width - statistics.limit
        low = statistics.limit - quantile(statistics.histogram.flip(1), kept) * width
        low, high = torch.maximum(low, lo).clamp_max(0.0), torch.minimum(high, hi).clamp_min(0.0)
        return unless_empty(statistics, low, high)
