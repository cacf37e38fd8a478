"""avg_range: batch minima and maxima, averaged over the batches."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hago.calibrate._ranges import around_zero, observed, peak, two_sided, unless_empty
from hago.calibrate.statistics import TensorStatistics
from hago.schemes import Grid


@dataclass(frozen=True, slots=True)
class AvgRange:
    """max(|mean of batch minima|, |mean of batch maxima|); both means for an affine grid.

    Depends on how the data is cut into batches. Where the means cancel to an empty range, it is the
    observed one.

    References:
        The HAGO RFC's `avg_range` (TVM, 2019), its default.
    """

    @property
    def name(self) -> str:
        return "avg_range"

    def __call__(self, statistics: TensorStatistics, grid: Grid) -> tuple[Tensor, Tensor]:
        """The averaged range, clipped to the observed one; see Estimator."""
        lo, hi = observed(statistics)
        mean_lo = torch.maximum(statistics.mean_minimum.clamp_max(0.0), lo)
        mean_hi = torch.minimum(statistics.mean_maximum.clamp_min(0.0), hi)
        if two_sided(grid):
            return unless_empty(statistics, mean_lo, mean_hi)
        low, high = statistics.mean_minimum.abs(), statistics.mean_maximum.abs()
        threshold = torch.maximum(low, high) if grid.signed else mean_hi
        largest = peak(statistics, grid)
        threshold = torch.where(threshold > 0, threshold, largest)
        return around_zero(statistics, grid, threshold)
