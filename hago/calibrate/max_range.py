"""max_range: the threshold is the largest magnitude observed, so that nothing is clipped."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from hago.calibrate._ranges import around_zero, observed, peak, two_sided
from hago.calibrate.statistics import TensorStatistics
from hago.schemes import Grid


@dataclass(frozen=True, slots=True)
class MaxRange:
    """max(|min|, |max|); [min, max] for an affine grid."""

    @property
    def name(self) -> str:
        return "max_range"

    def __call__(self, statistics: TensorStatistics, grid: Grid) -> tuple[Tensor, Tensor]:
        """The observed range; see Estimator."""
        if two_sided(grid):
            return observed(statistics)
        return around_zero(statistics, grid, peak(statistics, grid))
