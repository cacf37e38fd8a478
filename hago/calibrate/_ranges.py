"""What the estimators share: which grid a range meets, and how a threshold becomes (lo, hi).

Invariants: every range holds 0; it lies inside what was observed, unless a power of two was asked
for or the estimator reaches for the headroom of the scheme; a range without negative values has lo = 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hago.calibrate.statistics import TensorStatistics
from hago.numerics import power_of_two_at_least
from hago.schemes import SCHEMES, Grid, Scheme
from hago.types import DType


def levels(grid: Grid, lo: Tensor, hi: Tensor) -> tuple[Tensor, Tensor, int]:
    """The quantum values that a scheme lays over candidate ranges.

    Args:
        lo, hi: float64, same shape.

    Returns:
        scale (1 where it would be 0), the lowest centered integer (float64), both of the shape of
        `lo`, and how many steps there are from the lowest to the highest.
    """
    # A power-of-two threshold is always read by the hago scheme: see schemes.make_qparams.
    scheme: Scheme = SCHEMES["hago" if grid.power_of_two else grid.scheme]
    dtype = DType("grid", grid.bits, "int" if grid.signed else "uint", torch.int64)
    scale, zero, qmin, qmax = scheme(lo, hi, grid.bits, dtype)
    return torch.where(scale > 0, scale, torch.ones_like(scale)), qmin - zero, qmax - qmin


def two_sided(grid: Grid) -> bool:
    """Whether lo and hi matter each on its own, as in the affine scheme."""
    if grid.power_of_two or not grid.signed:
        return False
    lo, hi = torch.tensor([-1.0, -3.0], dtype=torch.float64), torch.full((2,), 3.0, dtype=torch.float64)
    scale, _, _ = levels(grid, lo, hi)
    return bool(scale[0] != scale[1])


def observed(statistics: TensorStatistics) -> tuple[Tensor, Tensor]:
    """The smallest range that holds every value and 0."""
    return statistics.minimum.clamp_max(0.0), statistics.maximum.clamp_min(0.0)


def unless_empty(statistics: TensorStatistics, lo: Tensor, hi: Tensor) -> tuple[Tensor, Tensor]:
    """(lo, hi), and the observed range where lo = hi."""
    low, high = observed(statistics)
    return torch.where(lo == hi, low, lo), torch.where(lo == hi, high, hi)


def peak(statistics: TensorStatistics, grid: Grid) -> Tensor:
    """The largest magnitude that the grid has to represent: float64 (C,)."""
    lo, hi = observed(statistics)
    return torch.maximum(-lo, hi) if grid.signed else hi


def headroom(grid: Grid) -> float:
    """How far beyond a value its threshold must be for the value to be represented exactly, as a factor.

    1 where the threshold itself is on the grid; 128 / 127 for 8 bits of the hago scheme.
    """
    lo = torch.full((1,), -1.0 if grid.signed else 0.0, dtype=torch.float64)
    hi = torch.ones_like(lo)
    scale, _, steps = levels(grid, lo, hi)
    return max(1.0, float((hi - lo) / (scale * steps)))  # a lopsided grid may reach further on one side


def around_zero(
    statistics: TensorStatistics, grid: Grid, threshold: Tensor, most: float = 1.0
) -> tuple[Tensor, Tensor]:
    """The range of a symmetric or unsigned grid: values within +-threshold, which is at most `most`
    times the largest magnitude.

    An end where less was observed stands at what was observed: the larger end is the threshold all
    the same. A power-of-two grid has the threshold rounded up (0 gives 1) on both ends.
    """
    lo, hi = observed(statistics)
    threshold = torch.minimum(threshold, peak(statistics, grid) * most)
    if grid.power_of_two:
        threshold = power_of_two_at_least(threshold)
        negative = (lo < 0) & grid.signed
        return torch.where(negative, -threshold, torch.zeros_like(threshold)), threshold
    # `0 - t` instead of `-t`: a strategy should not say -0.0.
    low = torch.maximum(lo * most, 0.0 - threshold) if grid.signed else torch.zeros_like(lo)
    return low, torch.minimum(hi * most, threshold)


def magnitudes(statistics: TensorStatistics, grid: Grid) -> Tensor:
    """The histogram of |x| over [0, limit]: float64 (C, BINS / 2); of x > 0 where unsigned."""
    negative, positive = statistics.histogram.tensor_split(2, dim=1)
    return positive + negative.flip(1) if grid.signed else positive


def without_zeros(histogram: Tensor, origin: int) -> Tensor:
    """A histogram with the spike at zero cut down to its neighbours.

    Zero is represented exactly by every grid, so the zeros that a ReLU or pruning made must not
    weigh. They share the bin at `origin` with small values, of which there are about as many as in
    the next bin.

    References:
        NVIDIA's pytorch-quantization replaces the first bin by the second before it looks for
        thresholds, for the same reason.
    """
    level = histogram.clone()
    level[:, origin] = torch.minimum(histogram[:, origin], histogram[:, origin + 1])
    return level
