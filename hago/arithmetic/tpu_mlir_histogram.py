"""TPU-MLIR: the histogram that its calibration gathers, batch by batch, and the kl threshold of one.

Bin k counts the magnitudes nearest to k * width; zeros are not counted. Widths and positions are
float32, as the engine's are.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor

from hago.arithmetic._checks import require_finite, require_range
from hago.errors import DataError, HagoError

BINS: Final = 2048
#: Past this many bins a batch whose range leaps starts the histogram over.
MOST_BINS: Final = 8_000_000
#: The floor under logarithms.
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
    width = top / (bins - 1)
    if width == 0:
        return torch.zeros(bins, dtype=torch.int64), 0.0
    magnitudes = x.to(torch.float32).abs().reshape(-1)
    # A tensor divided by a float32 scalar and rounded in float32, as numpy does it upstream.
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
    """The histogram of all batches so far and one more.

    A batch within the range is counted with the same bins. Else bins are appended: with
    `step = top / n` the histogram grows by `(absmax - top) // step + 1` of them, the new top is a
    whole number of steps, and old counts keep their bins. The width is then `top' / (n' - 1)`, which
    differs from the old one by less than one part in n. Past MOST_BINS the old counts are dropped.

    Args:
        bins: of a histogram that starts over.

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
    require_finite("values for calibration", x)


# ---------------------------------------------------------------- kl
def _candidate(counts: Tensor, end: int, groups: int) -> tuple[Tensor, Tensor]:
    """float32 distributions of the first `end` bins: P with the tail folded in, Q from `groups` groups."""
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
    """KL(P || Q) in decades for the first groups, 2 * groups, ... bins: float32, (bins // groups,).

    P is the first i bins with the tail's mass in the last, over the total; Q spreads each of
    `groups` equal runs of them over its non-empty bins, over the mass inside. The sum is `sum of
    P * (log10(P + 1e-30) - log10(Q + 1e-30))`, each term in float64, added up bin by bin in float32.

    Raises:
        HagoError: counts are negative, all 0 or fewer than `groups`.

    References:
        TPU-MLIR `kl_diversity_hist` (calibration_math.cpp).
    """
    if groups < 1 or counts.dim() != 1 or counts.numel() < groups:
        raise HagoError(f"counts of {tuple(counts.shape)} for {groups} groups; expected at least {groups} bins")
    require_range("a histogram's counts", counts, 0, 1 << 62)
    if int(counts.sum()) == 0:
        raise HagoError("a histogram's counts are all 0; expected at least one value that is not 0")
    found = []
    for end in range(groups, counts.numel() + 1, groups):
        p, q = _candidate(counts, end, groups)
        some = p > 0  # an empty bin's term is exactly 0
        a, b = p[some].to(torch.float64), q[some].to(torch.float64)
        found.append(_sum_in_float32(a * ((a + EPSILON).log10() - (b + EPSILON).log10())))
    return torch.stack(found)


def _sum_in_float32(terms: Tensor) -> Tensor:
    """float64 terms added one after the other to a float32 total, which is rounded each time."""
    total = 0.0
    for term in terms.tolist():
        (total,) = _SINGLE.unpack(_SINGLE.pack(total + term))
    return torch.tensor(total, dtype=torch.float32)


def kl_threshold_of_counts(counts: Tensor, width: float, groups: int = 128) -> float:
    """`width * (m + 1) * groups` in float32, m the first of the least `divergences`.

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
