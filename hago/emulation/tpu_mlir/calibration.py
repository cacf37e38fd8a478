"""TPU-MLIR's calibration: the histogram that it gathers batch by batch, and the methods that choose a threshold.

Bin k of a histogram counts the magnitudes nearest to k * width; zeros are not counted. Widths and positions are
float32, as in TPU-MLIR. Sums that TPU-MLIR computes in float32 in numpy's order are computed in float64 here; the
thresholds differ from its own by some parts in 10**6. hago's own calibration, `hago.calibration`, uses none of this.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final

import torch
from torch import Tensor

from hago.emulation._checks import check_finite, check_range
from hago.errors import DataError, HagoError, did_you_mean

BINS: Final = 2048
#: A batch that would need more bins than this starts the histogram over.
MOST_BINS: Final = 8_000_000
#: Added to a probability before its logarithm is taken.
EPSILON: Final = 1e-30

_SINGLE: Final = struct.Struct("f")


@dataclass(frozen=True, slots=True, eq=False)
class Histogram:
    """Counts of magnitudes: `counts[k]` of those nearest to `k * width`.

    Args:
        counts: int64, (bins,).
        width: real units per bin.
        top: the magnitude that the last bin stands for.
    """

    counts: Tensor
    width: float
    top: float


def _count(x: Tensor, top: float, bins: int) -> tuple[Tensor, float]:
    """The counts of the magnitudes of `x` up to `top`, and the width of a bin."""
    width = top / (bins - 1)
    if width == 0:
        return torch.zeros(bins, dtype=torch.int64), 0.0
    magnitudes = x.to(torch.float32).abs().reshape(-1)
    # The width is a float32 tensor, so that quotient and sum are rounded to float32, as by numpy upstream.
    position = magnitudes[magnitudes != 0] / torch.tensor(width, dtype=torch.float32)
    index = (position + 0.5).floor()
    kept = index[index <= bins - 1].to(torch.int64)
    return torch.bincount(kept, minlength=bins), width


def histogram(x: Tensor, bins: int = BINS) -> Histogram:
    """The histogram of one batch: `width = absmax / (bins - 1)`, index `floor(|x| / width + 0.5)`.

    Raises:
        DataError: `x` is empty or not finite.
        HagoError: fewer than 2 bins.

    References:
        TPU-MLIR `histogram` (python/calibration/cali_math.py).
    """
    _check(x)
    if bins < 2:
        raise HagoError(f"a histogram of {bins} bins; expected 2 or more")
    top = float(x.to(torch.float32).abs().max())
    counts, width = _count(x, top, bins)
    return Histogram(counts, width, top)


def extend_histogram(before: Histogram, x: Tensor, bins: int = BINS) -> Histogram:
    """The histogram of all earlier batches and one more.

    A batch within the range of the histogram is counted in its n bins. For any other, bins are appended: with
    `step = top / n` there are `(absmax - top) // step + 1` more, the new top is a whole number of steps, and earlier
    counts keep their bins. The width becomes `new_top / (new_n - 1)`, which differs from the earlier one by less than
    one part in n. If that takes more than MOST_BINS bins, the earlier counts are dropped and the histogram starts over.
    After zeros alone, which are not counted, it is that of the batch.

    Args:
        before: the histogram of the earlier batches.
        x: the values of the next batch.
        bins: the number of bins with which a histogram starts over.

    Raises:
        DataError: `x` is empty or not finite.

    References:
        TPU-MLIR `combine_histogram` (python/calibration/cali_math.py).
    """
    _check(x)
    top = float(x.to(torch.float32).abs().max())
    n = before.counts.numel()
    if top <= before.top:
        counts, _ = _count(x, before.top, n)
        return replace(before, counts=before.counts + counts)
    if before.top == 0:
        return histogram(x, n)
    step = before.top / n
    more = int((top - before.top) // step + 1)
    if n + more > MOST_BINS:
        return histogram(x, bins)
    new_top = more * step + before.top
    counts, width = _count(x, new_top, n + more)
    counts[:n] += before.counts
    return Histogram(counts, width, new_top)


def _check(x: Tensor) -> None:
    if x.numel() == 0:
        raise DataError("a batch for calibration is empty; expected values")
    check_finite("values for calibration", x)


# ---------------------------------------------------------------- kl
def _candidate(counts: Tensor, end: int, groups: int) -> tuple[Tensor, Tensor]:
    """The float32 distributions P and Q of the candidate that keeps `end` bins; see `divergences`."""
    total = counts.sum().to(torch.float32)
    kept = counts[:end].clone()
    kept[-1] += counts[end:].sum()
    p = kept.to(torch.float32) / total
    cells = counts[:end].view(groups, end // groups)
    mass = cells.sum(1).to(torch.float32)
    filled = (cells > 0).sum(1).clamp_min(1).to(torch.float32)
    level = mass / filled / counts[:end].sum().to(torch.float32)
    q = torch.where(cells > 0, level.unsqueeze(1), torch.zeros(())).reshape(-1)
    return p, q


def divergences(counts: Tensor, groups: int = 128) -> Tensor:
    """KL(P || Q), with log10, of every candidate threshold: float32, (bins // groups,).

    The candidates keep the first groups, 2 * groups, 3 * groups, ... bins. P is the histogram of these bins, with the
    counts of all others added to the last, divided by its sum. Q has the kept bins divided into `groups` runs of equal
    length; the counts of a run are spread evenly over its non-empty bins and divided by the sum of the kept counts.
    The divergence is `sum(P * (log10(P + 1e-30) - log10(Q + 1e-30)))`, each term in float64, added bin by bin in
    float32.

    Raises:
        HagoError: counts are negative, all 0 or fewer than `groups`.

    References:
        TPU-MLIR `kl_diversity_hist` (calibration_math.cpp).
    """
    if groups < 1 or counts.dim() != 1 or counts.numel() < groups:
        raise HagoError(f"counts of {tuple(counts.shape)} for {groups} groups; expected at least {groups} bins")
    check_range("a histogram's counts", counts, 0, 1 << 62)
    if int(counts.sum()) == 0:
        raise HagoError("a histogram's counts are all 0; expected at least one value that is not 0")
    terms = []
    for end in range(groups, counts.numel() + 1, groups):
        p, q = _candidate(counts, end, groups)
        filled = p > 0  # an empty bin's term is exactly 0
        a, b = p[filled].to(torch.float64), q[filled].to(torch.float64)
        terms.append(_sum_in_float32(a * ((a + EPSILON).log10() - (b + EPSILON).log10())))
    return torch.stack(terms)


def _sum_in_float32(terms: Tensor) -> Tensor:
    """Add float64 terms in their order to a float32 total, which is rounded after each."""
    total = 0.0
    for term in terms.tolist():
        (total,) = _SINGLE.unpack(_SINGLE.pack(total + term))
    return torch.tensor(total, dtype=torch.float32)


def kl_threshold_of_counts(counts: Tensor, width: float, groups: int = 128) -> float:
    """The threshold of least divergence: `width * (m + 1) * groups` in float32, m the first index of the least.

    Args:
        counts: int64, (bins,).
        width: real units per bin, rounded to float32.
        groups: 128 for 8 bits, 8 for 4 bits upstream.

    Raises:
        HagoError: as in `divergences`, or the width is not positive.

    References:
        TPU-MLIR `kl_diversity_hist` (calibration_math.cpp).
    """
    if not width > 0:
        raise HagoError(f"a histogram's width is {width}; expected one above 0")
    values = divergences(counts, groups).tolist()
    m = values.index(min(values))
    step = torch.tensor(width, dtype=torch.float64).to(torch.float32)
    return float(step * float(m + 1) * float(groups))


# ---------------------------------------------------------------- threshold methods
# Those in METHODS are functions from values to one number, 0 or more, which may exceed the largest magnitude.
# `table_threshold` turns the thresholds of a tensor's batches into the one number that TPU-MLIR writes into a
# calibration table.

#: The least threshold in a calibration table; lesser ones and NaN are replaced by it.
SMALLEST_THRESHOLD: Final = 1e-5

#: The clipping thresholds of ACIQ for 4 and 8 bits, in units of the distribution's spread.
_GAUSS: Final = MappingProxyType({4: 2.55913642, 8: 3.92403337})
_LAPLACE: Final = MappingProxyType({4: 5.02864014, 8: 9.89675982})


def _values(x: Tensor) -> Tensor:
    """The values of `x`, rounded to float32 and held in float64, as a vector; checked."""
    if x.numel() == 0:
        raise DataError("values for calibration are empty; expected some")
    check_finite("values for calibration", x)
    return x.to(torch.float32).to(torch.float64).reshape(-1)


def _factor_of_bits(table: Mapping[int, float], bits: int) -> float:
    if bits not in table:
        raise HagoError(f"a threshold for {bits} bits; expected 4 or 8")
    return table[bits]


def max_threshold(x: Tensor) -> float:
    """The largest magnitude."""
    return float(_values(x).abs().max())


def kl_threshold(x: Tensor, bits: int = 8, bins: int = BINS) -> float:
    """The kl threshold of one batch's histogram: 128 groups for 8 bits, 8 for 4. If all values are 0, so is
    the threshold.

    References:
        TPU-MLIR python/calibration/kld_calibrator.py, the default method.
    """
    return kl_threshold_of_histogram(histogram(x, bins), bits)


def kl_threshold_of_histogram(gathered: Histogram, bits: int = 8) -> float:
    """The kl threshold of a histogram made by `histogram` and `extend_histogram`; 0 if all values were 0."""
    if bits not in (4, 8):
        raise HagoError(f"a threshold for {bits} bits; expected 4 or 8")
    if gathered.width == 0:
        return 0.0
    return kl_threshold_of_counts(gathered.counts, gathered.width, 128 if bits == 8 else 8)


def mse_threshold(x: Tensor, bits: int = 8) -> float:
    """OCTAV: the fixed point of the threshold that balances clipping and rounding error.

    The iteration starts at `s = sum|x| / #(x != 0)` and is repeated at most 20 times:

        s = sum(|x|; |x| > s) / (4**-bits / 3 / u * #(|x| <= s) + #(|x| > s))

    with u = 4 if the least value is within 1e-6 of 0, else 1. It stops at a step below 1e-6 and returns the value
    before that step. If all values are 0, the threshold is 1.0.

    References:
        Sakr et al., Optimal Clipping and Magnitude-aware Differentiation, ICML 2022;
        TPU-MLIR `threshold_mse` (python/calibration/cali_math.py).
    """
    if not 1 <= bits <= 16:
        raise HagoError(f"a threshold for {bits} bits; expected 1 to 16")
    values = _values(x)
    u = 4 if abs(float(values.min())) < 1e-6 else 1
    magnitudes = values.abs()
    if not bool((magnitudes > 0).any()):
        return 1.0
    s = float(magnitudes.sum()) / int((magnitudes > 0).sum())
    for _ in range(20):
        above = magnitudes > s
        clipped = int(above.sum())
        rounding = 1 / 4**bits / 3 / u * (magnitudes.numel() - clipped)
        following = float(magnitudes[above].sum()) / (rounding + clipped)
        if abs(following - s) < 1e-6:
            break
        s = following
    return s


def aciq_gauss_threshold(x: Tensor, bits: int = 8) -> float:
    """`alpha * std` with `std = (max - min) * 0.175 * (1 + sqrt(pi * ln 4)) / sqrt(2 ln N)`.

    alpha is 3.92403337 for 8 bits and 2.55913642 for 4. The result may exceed the largest magnitude.

    Raises:
        DataError: fewer than 2 values.

    References:
        Banner et al., arXiv:1810.05723; TPU-MLIR `threshold_aciq_gauss`.
    """
    values = _values(x)
    if values.numel() < 2:
        raise DataError("aciq_gauss got one value; expected two or more")
    constant = 0.5 * 0.35 * (1 + math.sqrt(math.pi * math.log(4)))
    spread = float(values.max() - values.min())
    return _factor_of_bits(_GAUSS, bits) * spread * constant / math.sqrt(2 * math.log(values.numel()))


def aciq_laplace_threshold(x: Tensor, bits: int = 8) -> float:
    """`beta * mean|x - mean(x)|`, with beta 9.89675982 for 8 bits and 5.02864014 for 4.

    The result may exceed the largest magnitude.

    References:
        Banner et al., arXiv:1810.05723; TPU-MLIR `threshold_aciq_laplace`.
    """
    values = _values(x)
    return _factor_of_bits(_LAPLACE, bits) * float((values - values.mean()).abs().mean())


def percentile_range(x: Tensor, percent: float = 99.99) -> tuple[float, float]:
    """The values at `percent` from below and from above, between the two nearest order statistics.

    With N values, `t = percent / 100 * (N - 1)` and `k = int(N * (1 - percent / 100)) + 1`: the k-th
    largest value, moved towards the next larger one by the fraction of t; the minimum likewise from below. If k is 1,
    the range is that of all values.

    Args:
        percent: in (0, 100); TPU-MLIR uses `percentile_of_operator`.

    Returns:
        (minimum, maximum); the threshold is the larger magnitude.

    Raises:
        HagoError: `percent` is not between 0 and 100.

    References:
        TPU-MLIR `process_compute_threshold`, method percentile9999.
    """
    if not 0 < percent < 100:
        raise HagoError(f"a percentile of {percent}; expected one between 0 and 100")
    values = _values(x).sort().values
    n = values.numel()
    k = min(int(n * (1 - percent / 100)) + 1, n)
    position = percent / 100 * (n - 1)
    fraction = position - int(position)
    if k == 1:
        return float(values[0]), float(values[-1])
    high, low = values[n - k :], values[:k].flip(0)
    return (
        float(low[0] + fraction * (low[1] - low[0])),
        float(high[0] + fraction * (high[1] - high[0])),
    )


def percentile_of_operator(index: int, operators: int) -> float:
    """The percentile that TPU-MLIR uses for operator `index` of `operators`: from 99.99 up to below 99.999999.

    Raises:
        HagoError: the index is not in `[0, operators)`.

    References:
        TPU-MLIR `process_statistic`.
    """
    if not 0 <= index < operators:
        raise HagoError(f"operator {index} of {operators}; expected an index from 0")
    return 99.99 + index * ((99.999999 - 99.99) / operators)


def percentile_threshold(x: Tensor, percent: float = 99.99) -> float:
    """The larger magnitude of `percentile_range`."""
    low, high = percentile_range(x, percent)
    return max(abs(low), abs(high))


#: TPU-MLIR's methods by its own names: functions from values and bits to a threshold.
METHODS: Final[Mapping[str, Callable[[Tensor, int], float]]] = MappingProxyType(
    {
        "kl": kl_threshold,
        "mse": mse_threshold,
        "aciq_gauss": aciq_gauss_threshold,
        "aciq_laplace": aciq_laplace_threshold,
        "percentile9999": lambda x, bits: percentile_threshold(x),
        "max": lambda x, bits: max_threshold(x),
    }
)


def threshold(x: Tensor, method: str, bits: int = 8) -> float:
    """The threshold of one batch by a method of METHODS.

    Raises:
        HagoError: the method is unknown, or does not support the bits.
        DataError: `x` is empty or too small.
    """
    if method not in METHODS:
        raise HagoError(f"unknown method {method!r}; known: {', '.join(METHODS)}." + did_you_mean(method, METHODS))
    return METHODS[method](x, bits)


def table_threshold(thresholds: Sequence[float], absmax: float) -> float:
    """The threshold that TPU-MLIR writes: the mean over batches, at most `absmax` and at least 1e-5.

    Args:
        thresholds: one per batch, or one for all batches with the methods kl and max.
        absmax: the largest magnitude over all batches.

    Raises:
        DataError: there is no threshold.

    References:
        TPU-MLIR `calibration_result.canonicalize` and `dump_cali_table`.
    """
    if not thresholds:
        raise DataError("no batch has a threshold; expected at least one")
    mean = min(sum(thresholds) / len(thresholds), absmax)
    return mean if mean > SMALLEST_THRESHOLD else SMALLEST_THRESHOLD
