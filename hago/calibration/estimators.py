"""Estimators: from the statistics of a tensor to the thresholds of a grid.

An estimator is a frozen dataclass that a `ThresholdCache` calls with the statistics of a node and the grid of integers
that will represent it. `named_estimator` makes one of a text such as "mse" or "percentile:99.9". Shared functions
come first, then one section per estimator, then the table.

Invariants: every range contains 0; it lies inside the observed range, unless a power of two is asked for or the
estimator uses the headroom of the scheme; a range without negative values has lo = 0.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import ClassVar, Final, cast

import torch
from torch import Tensor

from hago.arithmetic.numerics import power_of_two_at_least
from hago.arithmetic.schemes import SCHEMES, TWO_SIDED, Grid, Scheme
from hago.arithmetic.types import DType
from hago.calibration.statistics import Estimator, TensorStatistics
from hago.emulation.dorefa import DOREFAS
from hago.errors import HagoError, did_you_mean


def levels(grid: Grid, lo: Tensor, hi: Tensor) -> tuple[Tensor, Tensor, int]:
    """The quantum values that a scheme lays over candidate ranges.

    Args:
        lo, hi: float64, same shape.

    Returns:
        The scale (1 where it would be 0) and the lowest centered integer, float64 of the shape of `lo`; and the number
        of steps from the lowest to the highest integer.
    """
    # Power-of-two thresholds always use the hago scheme; see schemes.make_qparams.
    scheme: Scheme = SCHEMES["hago" if grid.power_of_two else grid.scheme]
    dtype = DType("grid", grid.bits, "int" if grid.signed else "uint", torch.int64)
    scale, zero, qmin, qmax = scheme(lo, hi, grid.bits, dtype)
    return torch.where(scale > 0, scale, torch.ones_like(scale)), qmin - zero, qmax - qmin


def two_sided(grid: Grid) -> bool:
    """Whether both lo and hi determine the scale, as in the affine scheme."""
    return grid.signed and not grid.power_of_two and grid.scheme in TWO_SIDED


def observed(statistics: TensorStatistics) -> tuple[Tensor, Tensor]:
    """The smallest range that holds every value and 0."""
    return statistics.minimum.clamp_max(0.0), statistics.maximum.clamp_min(0.0)


def unless_empty(statistics: TensorStatistics, lo: Tensor, hi: Tensor) -> tuple[Tensor, Tensor]:
    """(lo, hi), replaced by the observed range where lo = hi."""
    low, high = observed(statistics)
    return torch.where(lo == hi, low, lo), torch.where(lo == hi, high, hi)


def peak(statistics: TensorStatistics, grid: Grid) -> Tensor:
    """The largest magnitude that the grid has to represent: float64 (C,)."""
    lo, hi = observed(statistics)
    return torch.maximum(-lo, hi) if grid.signed else hi


@functools.cache
def headroom(grid: Grid) -> float:
    """The ratio of a threshold to the largest value that its grid represents exactly.

    It is 1 if the threshold itself is on the grid, and 128 / 127 for 8 bits of the hago scheme.
    """
    lo = torch.full((1,), -1.0 if grid.signed else 0.0, dtype=torch.float64)
    hi = torch.ones_like(lo)
    scale, _, steps = levels(grid, lo, hi)
    return max(1.0, float((hi - lo) / (scale * steps)))  # an asymmetric grid may reach further on one side


@functools.cache
def steps_above_zero(grid: Grid, one_sided: bool) -> tuple[int, int]:
    """The number of steps from 0 to the threshold, and the highest quantum value.

    Args:
        one_sided: whether the lower threshold is 0, instead of as far from 0 as the upper one.
    """
    one = torch.ones(1, dtype=torch.float64)
    scale, _, count = levels(grid, torch.zeros_like(one) if one_sided else -one, one)
    return round(1 / float(scale)), count if one_sided else count // 2


def around_zero(
    statistics: TensorStatistics, grid: Grid, threshold: Tensor, most: float = 1.0
) -> tuple[Tensor, Tensor]:
    """The range of a symmetric or unsigned grid with a threshold, at most `most` times the largest magnitude.

    The range is cut to the observed one, which moves at most its smaller end, so the threshold remains the larger end.
    A power-of-two grid has the threshold rounded up (0 gives 1) at both ends.
    """
    lo, hi = observed(statistics)
    threshold = torch.minimum(threshold, peak(statistics, grid) * most)
    if grid.power_of_two:
        threshold = power_of_two_at_least(threshold)
        negative = (lo < 0) & grid.signed
        return torch.where(negative, -threshold, torch.zeros_like(threshold)), threshold
    # `0 - t` instead of `-t`, so that strategies do not hold -0.0
    low = torch.maximum(lo * most, 0.0 - threshold) if grid.signed else torch.zeros_like(lo)
    return low, torch.minimum(hi * most, threshold)


def magnitudes(statistics: TensorStatistics, grid: Grid) -> Tensor:
    """The histogram of |x| over [0, limit], or of positive x for an unsigned grid: (C, bins / 2), as the counts are."""
    negative, positive = statistics.counts.tensor_split(2, dim=1)
    return positive + negative.flip(1) if grid.signed else positive


def without_zeros(histogram: Tensor, origin: int) -> Tensor:
    """A histogram in which the bin of zero holds no more than the next bin.

    Zero is exact on every grid, so the zeros of a ReLU or of pruning must not influence the threshold. They share the
    bin at `origin` with small values, of which there are about as many as in the next bin.

    References:
        NVIDIA's pytorch-quantization replaces the first bin by the second before it looks for
        thresholds, for the same reason.
    """
    flattened = histogram.clone()
    flattened[:, origin] = torch.minimum(histogram[:, origin], histogram[:, origin + 1])
    return flattened


# ---------------------------------------------------------------- max_range
@dataclass(frozen=True, slots=True)
class MaxRange:
    """Thresholds at max(|min|, |max|), or at [min, max] for an affine grid."""

    @property
    def name(self) -> str:
        return "max_range"

    def __call__(self, statistics: TensorStatistics, grid: Grid) -> tuple[Tensor, Tensor]:
        """The observed range; see Estimator."""
        if two_sided(grid):
            return observed(statistics)
        return around_zero(statistics, grid, peak(statistics, grid))


# ---------------------------------------------------------------- avg_range
@dataclass(frozen=True, slots=True)
class AvgRange:
    """Thresholds at max(|mean of batch minima|, |mean of batch maxima|), or at both means for an affine grid.

    They depend on how the data is divided into batches. If the means give an empty range, the observed range is used.

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
        threshold = mean_hi
        if grid.signed:
            threshold = torch.maximum(statistics.mean_minimum.abs(), statistics.mean_maximum.abs())
        return around_zero(statistics, grid, torch.where(threshold > 0, threshold, peak(statistics, grid)))


# ---------------------------------------------------------------- power2_range
@dataclass(frozen=True, slots=True)
class Power2Range:
    """Thresholds at 2**ceil(log2(max(|min|, |max|))), and at 1 if all values are 0, for all grids.

    References:
        The HAGO RFC's `power2_range` (TVM, 2019).
    """

    @property
    def name(self) -> str:
        return "power2_range"

    def __call__(self, statistics: TensorStatistics, grid: Grid) -> tuple[Tensor, Tensor]:
        """(-t, t), or (0, t) if no value is negative; see Estimator."""
        return around_zero(statistics, replace(grid, power_of_two=True), peak(statistics, grid))


# ---------------------------------------------------------------- percentile
def quantile(histogram: Tensor, fraction: float) -> Tensor:
    """The point below which `fraction` of a histogram's mass lies, in bins from its left end: float64 (C,).

    Values are assumed to be spread evenly inside their bin.
    """
    below = histogram.cumsum(1)
    target = below[:, -1:] * fraction
    index = torch.searchsorted(below, target).clamp_max(histogram.shape[1] - 1)
    inside = histogram.gather(1, index)
    before = below.gather(1, index) - inside
    return (index + (target - before) / inside.clamp_min(1.0)).squeeze(1)


@dataclass(frozen=True, slots=True)
class Percentile:
    """Thresholds at a percentile of |x|; for an affine grid, half of the remaining values are cut off at each end.

    Args:
        percent: above 0, at most 100, which clips nothing.

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
            threshold = quantile(magnitudes(statistics, grid).to(torch.float64), self.percent / 100) * width
            return around_zero(statistics, grid, threshold)
        lo, hi = observed(statistics)
        kept = 1 - (100 - self.percent) / 200
        high = quantile(statistics.histogram, kept) * width - statistics.limit
        low = statistics.limit - quantile(statistics.histogram.flip(1), kept) * width
        low, high = torch.maximum(low, lo).clamp_max(0.0), torch.minimum(high, hi).clamp_min(0.0)
        return unless_empty(statistics, low, high)


# ---------------------------------------------------------------- mse
# With e_q the midpoints between neighbouring quantum values and s the scale,
#     E[(x - Q(x))**2] = E[(x - hi)**2] - 2 s sum_q F(e_q),    F(e) = E[max(e - x, 0)],
# for any distribution, clipping on both sides included: a value x with m midpoints above it contributes
# (x - hi)**2 - 2 s (m (hi - x) - s m**2 / 2) = (x - (hi - s m))**2. F is tabulated once per histogram, with values
# spread evenly inside their bin, so a candidate costs one look-up per midpoint. For many quantum values the sum is the
# midpoint rule of an integral, whose error is known:
#     s sum_q F(e_q) = (integral of F from lo to hi) - s**2 / 24 P(lo < x < hi).
#: The most steps for which the sum over midpoints is computed; for more steps, the integral is.
_MIDPOINTS: Final = 256
#: A candidate is skipped for a channel if its clipping error alone exceeds the error of the first candidate by this
#: part of the sum of squares.
_SLACK: Final = 1e-9
#: Bins of the channels that are processed at a time; their tables take 8 MiB, those of affine grids 16 MiB.
_BINS_AT_ONCE: Final = 1 << 19


@functools.cache
def _mean_powers(bins: int, origin: int) -> Tensor:
    """The means of 1, x and x**2 in each bin, in units of bins from the value 0: float64 (bins, 3)."""
    centre = torch.arange(bins, dtype=torch.float64) - origin + 0.5
    return torch.stack([torch.ones_like(centre), centre, centre * centre + 1 / 12], 1)


@dataclass(frozen=True, slots=True, eq=False)
class Distribution:
    """Moments and antiderivatives of a histogram, in units of bins from the value 0.

    Methods take points or grids of R rows. Row i is of channel i, or of channel rows[i] if `rows` is given: int64 (R,).

    Args:
        origin: the bin whose left edge is the value 0.
        mass, below, first, second: (C, N + 1), at each bin's left edge: the mass of the bin, the mass below, F (see the
            comment above), and the integral of F. Float64; the first two are float32 if the counts were int16, which is
            exact.
        moments: float64 (C, 3): sums of 1, x and x**2.
    """

    origin: int
    mass: Tensor
    below: Tensor
    first: Tensor
    second: Tensor
    moments: Tensor

    @staticmethod
    def of(histogram: Tensor, origin: int) -> Distribution:
        """The distribution of a histogram (C, N) of counts, float64 or of an integer dtype."""
        channels, bins = histogram.shape
        mass, below, first, second = (torch.empty(channels, bins + 1, dtype=torch.float64) for _ in range(4))
        mass[:, :-1], mass[:, -1] = histogram, 0.0
        below[:, 0] = first[:, 0] = second[:, 0] = 0.0
        counts = mass[:, :-1]
        torch.cumsum(counts, 1, out=below[:, 1:])
        inside = torch.add(below[:, :-1], counts, alpha=1 / 2)
        torch.cumsum(inside, 1, out=first[:, 1:])
        torch.add(first[:, :-1], below[:, :-1], alpha=1 / 2, out=inside).add_(counts / 6)
        torch.cumsum(inside, 1, out=second[:, 1:])
        moments = counts @ _mean_powers(bins, origin)
        if histogram.dtype == torch.int16:
            mass, below = mass.to(torch.float32), below.to(torch.float32)
        return Distribution(origin, mass, below, first, second, moments)

    def _place(self, points: Tensor, rows: Tensor | None) -> tuple[Tensor, Tensor]:
        """The table indices of points (R, M), int32 (R * M,), and the distances of points from the edges at these
        indices, float64 (R, M)."""
        channels, edges = self.mass.shape
        points = points + self.origin if self.origin else points
        left = points.floor().clamp_(0, edges - 1)
        beyond = (points - left).clamp_min_(0.0)
        starts = (torch.arange(channels) if rows is None else rows) * edges
        return left.add_(starts.unsqueeze(1)).to(torch.int32).view(-1), beyond

    def antiderivative(self, points: Tensor, rows: Tensor | None = None) -> Tensor:
        """F at points (R, M)."""
        at, f = self._place(points, rows)
        mass, below, first = (_entries(t, at, f) for t in (self.mass, self.below, self.first))
        return (f * 0.5).mul_(mass).add_(below).mul_(f).add_(first)

    def between(self, lo: Tensor, hi: Tensor, rows: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The integral of F from lo to hi (R, K), and the mass there."""

        def up_to(points: Tensor) -> tuple[Tensor, Tensor]:
            at, f = self._place(points, rows)
            mass, below, first, second = (_entries(t, at, f) for t in (self.mass, self.below, self.first, self.second))
            return second + f * (first + f / 2 * (below + f / 3 * mass)), below + f * mass

        area, above = up_to(hi)
        if self.origin == 0 and not lo.any():  # there is nothing below 0
            return area, above
        area_lo, below = up_to(lo)
        return area - area_lo, above - below

    def clipped(self, lo: Tensor, hi: Tensor) -> Tensor:
        """The sum of squared errors of clipping to [lo, hi]: (C, K). It is the error of an infinitely fine grid."""
        return self._beyond(hi) - 2 * self.between(lo, hi)[0]

    def squared_error(self, scale: Tensor, lowest: Tensor, count: int, rows: Tensor | None = None) -> Tensor:
        """The sum of squared errors on grids of `count` steps from `lowest`: (R, K).

        Args:
            scale: float64 (R, K), in bins per step.
            lowest: float64 (R, K) or (1, 1), the lowest centered integer.
        """
        hi = (lowest + count) * scale
        if count > _MIDPOINTS:
            area, mass = self.between(lowest * scale, hi, rows)
            return self._beyond(hi, rows) - 2 * area + scale * scale / 12 * mass
        steps = torch.arange(count, dtype=torch.float64) + 0.5
        midpoints = (lowest.unsqueeze(2) + steps) * scale.unsqueeze(2)
        sums = self.antiderivative(midpoints.flatten(1), rows).view(midpoints.shape).sum(2)
        return self._beyond(hi, rows) - 2 * scale * sums

    def _beyond(self, hi: Tensor, rows: Tensor | None = None) -> Tensor:
        """The sum of (x - hi)**2."""
        moments = self.moments if rows is None else self.moments.index_select(0, rows)
        m0, m1, m2 = moments.unsqueeze(2).unbind(1)
        return m2 - 2 * hi * m1 + hi * hi * m0


def _entries(table: Tensor, at: Tensor, like: Tensor) -> Tensor:
    """The entries of a table at indices (R * M,), in the shape (R, M) of `like`."""
    return table.view(-1).index_select(0, at).view_as(like)


def _least(
    values: Distribution, clipped: Tensor, first: Tensor, errors_of: Callable[[Tensor, Tensor], Tensor]
) -> tuple[Tensor, Tensor]:
    """The index of the candidate with the least error, the first of equals, and its error: int64 and float64 (C, 1).

    Args:
        clipped: float64 (C, K), the clipping errors of candidates, which are lower bounds of their errors.
        first: float64 (C, 1), the errors of the first candidates.
        errors_of: computes the errors of R other candidates, float64 (R, 1), from the mask (C, K) that selects them and
            from their channels, int64 (R,).
    """
    promising = clipped <= first + _SLACK * values.moments[:, 2:]
    promising[:, 0] = False  # computed already
    errors = torch.full_like(clipped, torch.inf)
    errors[:, :1] = first
    errors.masked_scatter_(promising, errors_of(promising, promising.nonzero()[:, 0]))
    index = errors.argmin(1, keepdim=True)
    return index, errors.gather(1, index)


@functools.cache
def _factors(low: int, high: int, per_octave: int) -> Tensor:
    """The factors 2**(j / per_octave) for j from `high` down to `low`; 1 comes first."""
    exponents = [0, *(j for j in range(high, low - 1, -1) if j)]
    return torch.tensor([2.0 ** (j / per_octave) for j in exponents], dtype=torch.float64)


#: Arguments of `_factors`: coarse candidates, then fine ones around the best; for each end of an affine grid; and for
#: powers of two.
_COARSE: Final = (-80, 0, 8)
_FINE: Final = (-3, 3, 32)
_COARSE_EACH: Final = (-40, 0, 4)
_POWERS: Final = (-10, 0, 1)


def _symmetric(statistics: TensorStatistics, grid: Grid) -> tuple[Tensor, Tensor]:
    """The best range of a symmetric or unsigned grid."""
    most = headroom(grid)
    steps, top = steps_above_zero(grid, one_sided=not grid.signed)
    zero, width = torch.zeros(1, 1, dtype=torch.float64), statistics.bin_width.unsqueeze(1)
    largest = peak(statistics, grid).unsqueeze(1)

    def tables() -> tuple[Distribution, Tensor]:
        """The distribution of magnitudes, and the clipping errors of coarse candidates: the part of the largest
        magnitude that a candidate represents does not depend on the bits."""
        values = Distribution.of(without_zeros(magnitudes(statistics, grid), 0), 0)
        return values, values.clipped(zero, largest * _factors(*_COARSE) / width)

    made: tuple[Distribution, Tensor] = statistics.derive(("magnitudes", grid.signed), tables)
    values, clipped = made

    def errors_of(candidates: Tensor, chosen: Tensor, rows: Tensor) -> Tensor:
        scale = candidates.masked_select(chosen).unsqueeze(1) / width.index_select(0, rows) / steps
        return values.squared_error(scale, zero, top, rows)

    largest = power_of_two_at_least(largest * most) if grid.power_of_two else largest * most
    best, least = largest, values.squared_error(largest / width / steps, zero, top)
    for reach in (_POWERS,) if grid.power_of_two else (_COARSE, _FINE):
        candidates = torch.minimum(best * _factors(*reach), largest)
        if reach != _COARSE:
            clipped = values.clipped(zero, candidates / width * (top / steps))
        index, least = _least(values, clipped, least, functools.partial(errors_of, candidates))
        best = candidates.gather(1, index)
    return around_zero(statistics, grid, best.squeeze(1), most)


def _affine(statistics: TensorStatistics, grid: Grid) -> tuple[Tensor, Tensor]:
    """The best range of an affine grid: among ranges that are symmetric around zero first, then each end by itself."""
    origin = statistics.counts.shape[1] // 2
    values = Distribution.of(without_zeros(statistics.histogram, origin), origin)
    width = statistics.bin_width.unsqueeze(1)
    lowest, highest = (end.unsqueeze(1) for end in observed(statistics))
    highest = highest + (highest - lowest) * (headroom(grid) - 1.0)
    coarse, fine = _factors(*_COARSE_EACH), _factors(*_FINE)

    def best(lo: Tensor, hi: Tensor, first: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """The best candidate and its error; `first` is the error of the first candidate, if it is known."""
        shape = (lo + hi).shape
        lo, hi = torch.maximum(lo, lowest).expand(shape), torch.minimum(hi, highest).expand(shape)
        scale, low, count = levels(grid, lo / width, hi / width)
        if first is None:
            first = values.squared_error(scale[:, :1], low[:, :1], count)

        def errors_of(chosen: Tensor, rows: Tensor) -> Tensor:
            scales, lows = (t.masked_select(chosen).unsqueeze(1) for t in (scale, low))
            return values.squared_error(scales, lows, count, rows)

        index, least = _least(values, values.clipped(low * scale, (low + count) * scale), first, errors_of)
        return lo.gather(1, index), hi.gather(1, index), least

    even = torch.maximum(-lowest, highest) * coarse
    lo, hi, least = best(-even, even)
    for factors in (coarse, fine):
        lo, hi, least = best(lo, hi * factors, least)
        lo, hi, least = best(lo * factors, hi, least)
    return lo.squeeze(1), hi.squeeze(1)


@dataclass(frozen=True, slots=True)
class Mse:
    """Thresholds with the least expected squared error on the histogram, chosen among candidates.

    The candidates are thresholds from the largest magnitude down to a thousandth of it, then finer steps around the
    best one; or the powers of two in that range, if the grid requires one. For an affine grid they are ranges that are
    symmetric around zero, then each end is varied by itself. The largest candidate represents the largest magnitude,
    which max_range leaves to saturation in schemes of headroom. Exact zeros do not count.
    """

    together: ClassVar[bool] = True  # called with many nodes at once; see Estimator

    @property
    def name(self) -> str:
        return "mse"

    def __call__(self, statistics: TensorStatistics, grid: Grid) -> tuple[Tensor, Tensor]:
        """The range of least error; see Estimator."""
        search = _affine if two_sided(grid) else _symmetric
        size = max(1, _BINS_AT_ONCE // statistics.counts.shape[1])
        starts = range(0, statistics.channels, size)
        blocks = statistics.derive("blocks", lambda: [statistics.channel_slice(i, i + size) for i in starts])
        lo, hi = zip(*(search(block, grid) for block in blocks), strict=True)
        return torch.cat(lo), torch.cat(hi)


# ---------------------------------------------------------------- kl_estimate
# All candidate thresholds are scored at once: with cumulative sums over the histogram, the divergence of a candidate is
# a sum over its quantum values instead of over its bins.
#: The least number of bins per step of the widest candidate; with fewer, P and Q are almost equal for all candidates.
_BINS_PER_STEP: Final = 4
#: The number of entries of (candidate, quantum value) tables that are computed at a time.
_TABLE: Final = 1 << 17


def _leading_zero(sums: Tensor) -> Tensor:
    return torch.cat([torch.zeros(1, dtype=sums.dtype), sums])


def kl_divergence(histogram: Tensor, ends: Tensor, steps: int, top: int) -> Tensor:
    """KL(P || Q) of each candidate threshold, in nats.

    P is the histogram clipped at the threshold: the mass beyond it counts in the last bin. Q is the histogram up to the
    threshold, with the mass of each quantum value spread evenly over those of its bins where P is not zero. A quantum
    value whose mass is all beyond the threshold has the mass of a single value.

    Args:
        histogram: float64 (N,), counts of magnitudes.
        ends: int64 (K,), the number of bins below each threshold; steps <= ends <= N.
        steps: the number of steps from 0 to the threshold, so that the scale is ends / steps bins.
        top: the highest quantum value. A bin belongs to the quantum value that is nearest to its centre.

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

    entropy_of_p = entropy[ends - 1] + torch.xlogy(last + beyond, last + beyond)
    divergence = (entropy_of_p - shared) / total - torch.log(total) + torch.log(inside)
    return torch.where(inside > 0, divergence, torch.inf)


def _candidates(statistics: TensorStatistics, grid: Grid, steps: int) -> Tensor:
    """The candidate thresholds in bins, ascending, with at least one bin per step; none if the grid is too fine."""
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
    """The threshold with the least Kullback-Leibler divergence, for any number of bits.

    Exact zeros do not count: every grid represents them. If the grid is nearly as fine as the histogram (10 bits and
    more), the divergence cannot compare candidates, and the result is that of max_range. For statistics per channel it
    is that of max_range, too: a channel of a weight has too few values for a meaningful histogram, and Migacz reports
    no gain from clipping weights. An affine grid has the same threshold on both sides of zero, within the observed
    range.

    References:
        S. Migacz, "8-bit Inference with TensorRT", GTC 2017.
    """

    @property
    def name(self) -> str:
        return "kl_estimate"

    def __call__(self, statistics: TensorStatistics, grid: Grid) -> tuple[Tensor, Tensor]:
        """The range of the best threshold, the largest of equals; see Estimator."""
        if statistics.channels > 1:
            return MaxRange()(statistics, grid)
        one_sided = not grid.signed or (two_sided(grid) and float(statistics.minimum) >= 0)
        steps, top = steps_above_zero(grid, one_sided)
        ends = _candidates(statistics, grid, steps)
        if not len(ends):
            return MaxRange()(statistics, grid)
        histogram = without_zeros(magnitudes(statistics, grid), 0)[0].to(torch.float64)
        rows = max(1, _TABLE // top)
        pieces = (ends[i : i + rows] for i in range(0, len(ends), rows))
        divergences = torch.cat([kl_divergence(histogram, piece, steps, top) for piece in pieces])
        best = ends.flip(0)[divergences.flip(0).argmin()]
        return around_zero(statistics, grid, best * statistics.bin_width)


# ---------------------------------------------------------------- dorefa
@dataclass(frozen=True, slots=True)
class DoReFaEstimator:
    """DoReFa-Net's quantization of weights, with another estimator for everything else.

    Calling it gives thresholds of everything but weights. `plan.threshold_sources.estimated_resolver` reads the scheme,
    which determines weights and, in some schemes, puts activations in [0, 1].

    Args:
        scheme: a name in DOREFAS; not one of `schemes.SCHEMES`.
        inner: the estimator of everything but weights.
    """

    scheme: str
    inner: Estimator

    @property
    def name(self) -> str:
        return f"{self.scheme}:{self.inner.name}"

    def __call__(self, statistics: TensorStatistics, grid: Grid) -> tuple[Tensor, Tensor]:
        return self.inner(statistics, grid)


def dorefa_of(estimator: Estimator) -> str | None:
    """The scheme of a `DoReFaEstimator`, a name in DOREFAS; None for other estimators."""
    return estimator.scheme if isinstance(estimator, DoReFaEstimator) else None


# ---------------------------------------------------------------- estimators by name
ESTIMATORS: Final[Mapping[str, type[Estimator]]] = {
    "avg_range": AvgRange,
    "kl_estimate": KlEstimate,
    "max_range": MaxRange,
    "mse": Mse,
    "percentile": Percentile,
    "power2_range": Power2Range,
}


def named_estimator(spec: str | Estimator) -> Estimator:
    """The estimator that `spec` names, e.g. "mse" or "percentile:99.9"; an estimator is returned unchanged.

    The options after the colon are numbers, separated by commas, in the order of the class's fields. The option of
    "dorefa" and "dorefa_relative" is the estimator of everything but weights, by default "mse".
    `named_estimator(e.name) == e` for every estimator e of hago.

    Raises:
        HagoError: there is no such estimator, it does not take these options, or one of the user's own has the name of
            one of hago's.
    """
    if not isinstance(spec, str):
        if isinstance(spec, type) or not callable(spec) or not hasattr(spec, "name"):
            raise HagoError(f"{spec!r} is not an estimator; expected one of {', '.join(ESTIMATORS)}")
        own = str(spec.name).partition(":")[0]
        if own in (*ESTIMATORS, *DOREFAS) and type(spec) not in (*ESTIMATORS.values(), DoReFaEstimator):
            raise HagoError(
                f"an estimator of your own has the name {spec.name!r}, which means one of hago's own in logs and "
                "strategies; give it another name"
            )
        return spec
    name, colon, options_text = spec.strip().partition(":")
    if name in DOREFAS:
        return DoReFaEstimator(name, named_estimator(options_text or "mse"))
    if name not in ESTIMATORS:
        raise HagoError(f"unknown estimator {name!r}; known: {', '.join(ESTIMATORS)}.{did_you_mean(name, ESTIMATORS)}")
    kind = ESTIMATORS[name]
    options = options_text.split(",") if colon else []
    known = [f.name for f in fields(kind)]  # type: ignore[arg-type]
    if len(options) > len(known):
        raise HagoError(f"estimator {spec!r} has {len(options)} options; {name} takes {', '.join(known) or 'none'}")
    try:
        values = [float(option) for option in options]
    except ValueError:
        raise HagoError(f"the options of estimator {spec!r} must be numbers, e.g. 'percentile:99.9'") from None
    return cast("Callable[..., Estimator]", kind)(*values)
