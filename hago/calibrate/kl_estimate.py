"""kl_estimate: the threshold whose quantized distribution diverges least from the observed one.

All candidate thresholds are scored at once: with cumulative sums over the histogram, the divergence
of a candidate is a sum over its quantum values instead of over its bins.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from hago.calibrate._ranges import around_zero, levels, magnitudes, peak, two_sided, without_zeros
from hago.calibrate.max_range import MaxRange
from hago.calibrate.statistics import TensorStatistics
from hago.numerics import power_of_two_at_least
from hago.schemes import Grid

#: Bins that the widest candidate must have per step; with fewer, all that a step merges is one bin.
_BINS_PER_STEP: Final = 4
#: Entries of the (candidate, quantum value) tables that are worked on at a time.
_TABLE: Final = 1 << 17


def _leading_zero(sums: Tensor) -> Tensor:
    return torch.cat([torch.zeros(1, dtype=sums.dtype), sums])


def divergence(histogram: Tensor, ends: Tensor, steps: int, top: int) -> Tensor:
    """KL(P || Q) of each candidate threshold, in nats.

    P is the histogram clipped at the threshold: what lies beyond counts in the last bin. Q is the
    histogram without what lies beyond, each quantum value's mass spread evenly over those of its
    bins where P is not zero; one whose whole mass lies beyond has the mass of a single value.

    Args:
        histogram: float64 (N,), counts of magnitudes.
        ends: int64 (K,), the bins below each threshold; steps <= ends <= N.
        steps: from 0 to the threshold, so that the scale is ends / steps bins.
        top: the highest quantum value. A bin belongs to the value nearest to its centre.

    Returns:
        float64 (K,); infinite where nothing lies below the threshold.

    References:
        S. Migacz, "8-bit Inference with TensorRT", GTC 2017. There 128 equal cells stand for 8 bits;
        here the cells are those of the grid.
    """
    mass = _leading_zero(histogram.cumsum(0))
    filled = _leading_zero((histogram > 0).to(torch.float64).cumsum(0))
    entropy = _leading_zero(torch.xlogy(histogram, histogram).cumsum(0))
    total, inside, last = mass[-1], mass[ends], histogram[ends - 1]
    beyond = total - inside

    # Bin k reaches q where k + 1/2 >= (q - 1/2) ends / steps: in integers, so that ties are exact.
    cuts = -((steps - torch.arange(1, 2 * top, 2) * ends[:, None]) // (2 * steps))
    cuts = torch.cat([torch.zeros_like(ends)[:, None], cuts, ends[:, None]], dim=1)
    cell, bins = mass[cuts].diff(dim=1), filled[cuts].diff(dim=1)
    weight = cell.clone()
    weight[:, -1] += beyond
    gap = ((last == 0) & (beyond > 0)).to(torch.float64)
    cell[:, -1] = torch.maximum(cell[:, -1], gap)
    bins[:, -1] += gap
    shared = torch.xlogy(weight, cell / bins.clamp_min(1.0)).sum(1)

    own = entropy[ends - 1] + torch.xlogy(last + beyond, last + beyond)
    found = (own - shared) / total - torch.log(total) + torch.log(inside)
    return torch.where(inside > 0, found, torch.inf)


def _steps(grid: Grid, one_sided: bool) -> tuple[int, int]:
    """Steps from 0 to the threshold, and the highest quantum value."""
    one = torch.ones(1, dtype=torch.float64)
    scale, lowest, count = levels(grid, torch.zeros_like(one) if one_sided else -one, one)
    return round(1 / float(scale)), round(float(lowest)) + count


def _candidates(statistics: TensorStatistics, grid: Grid, steps: int) -> Tensor:
    """The thresholds to compare, in bins, ascending: at least one bin per step."""
    largest = peak(statistics, grid)
    widest = power_of_two_at_least(largest) if grid.power_of_two else largest
    end = int(torch.ceil(widest / statistics.bin_width)) if float(largest) > 0 else 0
    if end < _BINS_PER_STEP * steps:
        return torch.zeros(0, dtype=torch.int64)
    if not grid.power_of_two:
        return torch.arange(steps, end + 1)
    return torch.tensor([end >> k for k in range((end // steps).bit_length() - 1, -1, -1)])


@dataclass(frozen=True, slots=True)
class KlEstimate:
    """The threshold of least Kullback-Leibler divergence, for any number of bits.

    Exact zeros do not count: every grid represents them. Where the grid is nearly as fine as the
    histogram (10 bits and more) the divergence cannot tell them apart, and the result is that of
    max_range. Per channel it is that of max_range as well: a channel of a weight has too few values
    for a histogram to say how it is distributed, and Migacz found that clipping weights gains
    nothing. An affine grid is cut at one threshold on both sides of zero, within what was observed.

    References:
        S. Migacz, "8-bit Inference with TensorRT", GTC 2017.
    """

    @property
    def name(self) -> str:
        return "kl_estimate"

    def __call__(self, statistics: TensorStatistics, grid: Grid) -> tuple[Tensor, Tensor]:
        """The range inside the threshold; see Estimator. Of equally good ones the largest."""
        if statistics.channels > 1:
            return MaxRange()(statistics, grid)
        one_sided = not grid.signed or (two_sided(grid) and float(statistics.minimum) >= 0)
        steps, top = _steps(grid, one_sided)
        ends = _candidates(statistics, grid, steps)
        if not len(ends):
            return MaxRange()(statistics, grid)
        histogram = without_zeros(magnitudes(statistics, grid), 0)[0]
        rows = max(1, _TABLE // top)
        pieces = (ends[i : i + rows] for i in range(0, len(ends), rows))
        found = torch.cat([divergence(histogram, piece, steps, top) for piece in pieces])
        best = ends.flip(0)[found.flip(0).argmin()]
        return around_zero(statistics, grid, best * statistics.bin_width)
