"""mse: the threshold with the least expected squared error of quantization.

Where e_q are the midpoints between neighbouring quantum values and s is the scale,

    E[(x - Q(x))**2] = E[(x - hi)**2] - 2 s sum_q F(e_q),    F(e) = E[max(e - x, 0)],

whatever the distribution, clipping on both sides included: a value x with m midpoints above it
contributes (x - hi)**2 - 2 s (m (hi - x) - s m**2 / 2) = (x - (hi - s m))**2. F is tabulated once per
histogram, values being spread evenly inside their bin, and each candidate costs one look-up per
midpoint. For many levels the sum is the midpoint rule of an integral, whose error is known:
s sum_q F(e_q) = (integral of F from lo to hi) - s**2 / 24 P(lo < x < hi).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final

import torch
from torch import Tensor

from hago.calibrate._ranges import (
    around_zero,
    headroom,
    levels,
    magnitudes,
    observed,
    peak,
    two_sided,
    without_zeros,
)
from hago.calibrate.statistics import TensorStatistics
from hago.numerics import power_of_two_at_least
from hago.schemes import Grid

#: Up to this many steps the sum over midpoints is taken, beyond it the integral.
_MIDPOINTS: Final = 256
#: Candidates are left out whose clipping alone errs more than the first, by so much of the sum of squares.
_SLACK: Final = 1e-9
#: Channels that are worked on at a time: their tables take a few megabytes.
_BLOCK: Final = 64


@dataclass(frozen=True, slots=True, eq=False)
class Distribution:
    """A histogram's moments and antiderivatives, in units of bins from the value 0.

    Args:
        origin: the bin whose left edge is the value 0.
        mass, below, first, second: float64 (C, N + 1), at each bin's left edge: the mass of the bin, the mass
            below, F, and the integral of F.
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
        """The distribution of a histogram (C, N) of counts."""
        channels, bins = histogram.shape
        mass, below, first, second = torch.zeros(4, channels, bins + 1, dtype=torch.float64)
        mass[:, :-1] = histogram
        torch.cumsum(histogram, 1, out=below[:, 1:])
        torch.cumsum(below[:, :-1] + histogram / 2, 1, out=first[:, 1:])
        torch.cumsum(first[:, :-1] + below[:, :-1] / 2 + histogram / 6, 1, out=second[:, 1:])
        centre = torch.arange(bins, dtype=torch.float64) - origin + 0.5
        powers = torch.stack([torch.ones_like(centre), centre, centre * centre + 1 / 12], 1)
        return Distribution(origin, mass, below, first, second, histogram @ powers)

    def _place(self, points: Tensor) -> tuple[Tensor, Tensor]:
        """Where points (C, M) are in the tables, and how far they lie beyond the edge there."""
        points = points + self.origin
        channels, edges = self.mass.shape
        left = points.floor().clamp_(0, edges - 1)
        beyond = points.sub_(left).clamp_min_(0.0)
        return left.to(torch.int64).add_(torch.arange(channels).mul_(edges).unsqueeze(1)), beyond

    def antiderivative(self, points: Tensor) -> Tensor:
        """F at points (C, M)."""
        at, f = self._place(points)
        return self.first.take(at) + f * (self.below.take(at) + f / 2 * self.mass.take(at))

    def between(self, lo: Tensor, hi: Tensor) -> tuple[Tensor, Tensor]:
        """The integral of F from lo to hi (C, K), and the mass there."""

        def up_to(points: Tensor) -> tuple[Tensor, Tensor]:
            at, f = self._place(points)
            mass, below, first = self.mass.take(at), self.below.take(at), self.first.take(at)
            return self.second.take(at) + f * (first + f / 2 * (below + f / 3 * mass)), below + f * mass

        (area, above), (area_lo, below) = up_to(hi), up_to(lo)
        return area - area_lo, above - below

    def clipped(self, lo: Tensor, hi: Tensor) -> Tensor:
        """The sum of squared errors of clipping to [lo, hi] (C, K): what the finest grid there still errs."""
        return self._beyond(hi) - 2 * self.between(lo, hi)[0]

    def squared_error(self, scale: Tensor, lowest: Tensor, count: int) -> Tensor:
        """The sum of squared errors on grids of `count` steps from `lowest`: (C, K).

        Args:
            scale: float64 (C, K), in bins per step.
            lowest: float64 (C, K), the lowest centered integer.
        """
        lo, hi = lowest * scale, (lowest + count) * scale
        if count > _MIDPOINTS:
            area, mass = self.between(lo, hi)
            return self._beyond(hi) - 2 * area + scale * scale / 12 * mass
        steps = torch.arange(count, dtype=torch.float64) + 0.5
        midpoints = (lowest.unsqueeze(2) + steps) * scale.unsqueeze(2)
        sums = self.antiderivative(midpoints.flatten(1)).view(midpoints.shape).sum(2)
        return self._beyond(hi) - 2 * scale * sums

    def _beyond(self, hi: Tensor) -> Tensor:
        """The sum of (x - hi)**2."""
        m0, m1, m2 = self.moments.unsqueeze(2).unbind(1)
        return m2 - 2 * hi * m1 + hi * hi * m0


def _least(values: Distribution, grid: Grid, lo: Tensor, hi: Tensor, folded: bool) -> Tensor:
    """Which candidate range (C, K) errs least, the first of equals: int64 (C, 1)."""
    scale, lowest, count = levels(grid, lo, hi)
    if folded and grid.signed:
        lowest, count = torch.zeros_like(lowest), count // 2
    first = values.squared_error(scale[:, :1], lowest[:, :1], count)
    clipped = values.clipped(lowest * scale, (lowest + count) * scale)
    hopeful = (clipped <= first + _SLACK * values.moments[:, 2:]).any(0)
    rest = 1 + hopeful[1:].nonzero().squeeze(1)
    errors = torch.cat([first, values.squared_error(scale[:, rest], lowest[:, rest], count)], 1)
    return torch.cat([rest.new_zeros(1), rest])[errors.argmin(1, keepdim=True)]


def _factors(low: int, high: int, per_octave: int) -> Tensor:
    """1 first, then the powers of two with exponents low / per_octave ... high / per_octave, falling."""
    exponents = [0, *(j for j in range(high, low - 1, -1) if j)]
    return torch.tensor([2.0 ** (j / per_octave) for j in exponents], dtype=torch.float64)


#: Shrinking factors: tried coarsely, then finely about the best; and for powers of two.
_COARSE: Final = (-80, 0, 8)
_FINE: Final = (-3, 3, 32)
_COARSE_EACH: Final = (-40, 0, 4)
_POWERS: Final = (-10, 0, 1)


def _symmetric(statistics: TensorStatistics, grid: Grid) -> tuple[Tensor, Tensor]:
    """The best range of a symmetric or unsigned grid."""
    values: Distribution = statistics.derive(
        ("magnitudes", grid.signed), lambda: Distribution.of(without_zeros(magnitudes(statistics, grid), 0), 0)
    )
    most = headroom(grid)
    width, largest = statistics.bin_width.unsqueeze(1), peak(statistics, grid).unsqueeze(1) * most
    if grid.power_of_two:
        largest = power_of_two_at_least(largest)
    best = largest
    for reach in (_POWERS,) if grid.power_of_two else (_COARSE, _FINE):
        tried = torch.minimum(best * _factors(*reach), largest)
        hi = tried / width
        lo = -hi if grid.signed else torch.zeros_like(hi)
        best = tried.gather(1, _least(values, grid, lo, hi, folded=True))
    return around_zero(statistics, grid, best.squeeze(1), most)


def _affine(statistics: TensorStatistics, grid: Grid) -> tuple[Tensor, Tensor]:
    """The best ends of an affine grid: first cut evenly around zero, then each on its own."""
    origin = statistics.histogram.shape[1] // 2
    values: Distribution = statistics.derive(
        "values", lambda: Distribution.of(without_zeros(statistics.histogram, origin), origin)
    )
    width = statistics.bin_width.unsqueeze(1)
    lowest, highest = (end.unsqueeze(1) for end in observed(statistics))
    highest = highest + (highest - lowest) * (headroom(grid) - 1.0)
    coarse, fine = _factors(*_COARSE_EACH), _factors(*_FINE)

    def best(lo: Tensor, hi: Tensor) -> tuple[Tensor, Tensor]:
        shape = (lo + hi).shape
        lo, hi = torch.maximum(lo, lowest).expand(shape), torch.minimum(hi, highest).expand(shape)
        index = _least(values, grid, lo / width, hi / width, folded=False)
        return lo.gather(1, index), hi.gather(1, index)

    even = torch.maximum(-lowest, highest) * coarse
    lo, hi = best(-even, even)
    for factors in (coarse, fine):
        lo, hi = best(lo, hi * factors)
        lo, hi = best(lo * factors, hi)
    return lo.squeeze(1), hi.squeeze(1)


@dataclass(frozen=True, slots=True)
class Mse:
    """The threshold of least expected squared error, found among candidates on the histogram.

    Thresholds from the largest magnitude down to a thousandth of it are compared, and again more
    finely about the best; where the grid asks for powers of two, those in that reach. For an affine
    grid the range is cut evenly around zero, then each end on its own. On the histogram the result
    never errs more than that of max_range. Exact zeros do not count.
    """

    together: ClassVar[bool] = True

    @property
    def name(self) -> str:
        return "mse"

    def __call__(self, statistics: TensorStatistics, grid: Grid) -> tuple[Tensor, Tensor]:
        """The range of least error; see Estimator."""
        search = _affine if two_sided(grid) else _symmetric
        starts = range(0, statistics.channels, _BLOCK)
        blocks = statistics.derive("blocks", lambda: [statistics.channel_slice(i, i + _BLOCK) for i in starts])
        lo, hi = zip(*(search(block, grid) for block in blocks), strict=True)
        return torch.cat(lo), torch.cat(hi)
