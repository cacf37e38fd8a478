"""power2_range: the largest magnitude observed, rounded up to a power of two."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from hago.calibrate._ranges import around_zero, peak
from hago.calibrate.statistics import TensorStatistics
from hago.schemes import Grid


@dataclass(frozen=True, slots=True)
class Power2Range:
    """2**ceil(log2(max(|min|, |max|))), and 1 where all values are 0, whatever the grid asks.

    References:
        The HAGO RFC's `power2_range` (TVM, 2019).
    """

    @property
    def name(self) -> str:
        return "power2_range"

    def __call__(self, statistics: TensorStatistics, grid: Grid) -> tuple[Tensor, Tensor]:
        """(-t, t), or (0, t) where no value is negative; see Estimator."""
        return around_zero(statistics, replace(grid, power_of_two=True), peak(statistics, grid))
