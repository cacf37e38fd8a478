"""PyTorch's histogram observer: the range within which quantizing the values seen loses least.

The histogram covers the range of all values so far, in bins of equal width; when the range grows,
counts are spread over the new bins. The range is cut from both ends, in small quantiles, for as long
as the squared error falls.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn

from hago.errors import HagoError
from hago.qat._checks import check_float
from hago.qat.pytorch import DTYPES
from hago.qat.pytorch_observers import QRange

#: The share of the values by which an end moves at a time.
_STEP: Final = 1e-5
#: Into how many parts a bin is cut before its count moves to bins of another width.
_PARTS: Final = 16


def squared_error(histogram: Tensor, width: float, first: int, last: int, levels: int) -> float:
    """What quantizing loses if the range is that of bins `first` to `last`, values spread evenly in each bin.

    Every level stands for an interval of `d = width * (last - first + 1) / levels`, at its middle.
    Of a bin from b to e whose ends fall to the levels i and j, with density p = count / width:

        error = p * (F(b - m_i, d/2) + (j - i - 1) * F(-d/2, d/2) + F(-d/2, e - m_j)),
        F(u, v) = (v**3 - u**3) / 3,   m_k = (k + 1/2) * d

    Args:
        histogram: float32 (bins,).
        width: of a bin.
        first, last: of the range that is kept; what lies outside goes to the outermost levels.
        levels: of the integers.
    """
    step = width * (last - first + 1) / levels
    if step == 0.0:
        return 0.0
    begin = (torch.arange(len(histogram)) - first) * width
    end = begin + width
    from_level, to_level = (torch.div(t, step, rounding_mode="floor").clamp(0, levels - 1) for t in (begin, end))
    half = torch.tensor(step / 2)
    density = histogram / width

    def cubes(low: Tensor, high: Tensor) -> Tensor:
        return density * ((high * high * high - low * low * low) / 3)

    error = cubes(begin - (from_level + 0.5) * step, half.expand(len(histogram)))
    error = error + (to_level - from_level - 1) * cubes(-half, half)
    error = error + cubes(-half, end - (to_level * step + step / 2))
    return float(error.sum())


def least_error_bins(histogram: Tensor, width: float, levels: int) -> tuple[int, int]:
    """The first and the last bin of the range that the search ends at.

    From the whole range, the end whose next quantile skips more bins moves there, until the squared
    error would grow.
    """
    total = float(histogram.sum())
    below = np.asarray(torch.cumsum(histogram, 0))
    low, high, first, last = 0.0, 1.0, 0, len(histogram) - 1
    least = math.inf
    while low < high:
        next_low, next_high = low + _STEP, high - _STEP
        left = int(np.searchsorted(below, np.float32(next_low * total), "left"))
        left = max(first, min(left, last))
        right = int(np.searchsorted(below, np.float32(next_high * total), "right")) - 1
        right = min(last, max(right, first))
        moved = (first, last)
        if left - first > last - right:
            moved, low = (left, last), next_low
        else:
            moved, high = (first, right), next_high
        if moved == (first, last):
            continue
        error = squared_error(histogram, width, *moved, levels)
        if error > least:
            break
        least, (first, last) = error, moved
    return first, last


class HistogramObserver(nn.Module):
    """A histogram of the values seen, and the range within which quantizing them loses least.

    Per tensor. Infinite values are passed over, and so are empty tensors. Before any data the scale
    is 1 and the zero point 0.

    Args:
        qrange: makes scale and zero point of the range.
        bins: of the histogram.

    Raises:
        HagoError: a scheme per channel, or no bins.

    References:
        torch.ao.quantization.HistogramObserver; the search is that of caffe2's norm minimization.
    """

    histogram: Tensor
    min_val: Tensor
    max_val: Tensor

    def __init__(self, qrange: QRange | None = None, *, bins: int = 2048) -> None:
        super().__init__()
        self.qrange = qrange or QRange()
        if self.qrange.qscheme.startswith("per_channel"):
            raise HagoError(f"a histogram is of a whole tensor; {self.qrange.qscheme} is per channel")
        if isinstance(bins, bool) or not isinstance(bins, int) or bins < 1:
            raise HagoError(f"a histogram of {bins!r} bins; expected a positive integer")
        self.bins, self.per_channel, self.ch_axis = bins, False, 0
        self.register_buffer("histogram", torch.zeros(bins))
        self.register_buffer("min_val", torch.tensor(torch.inf))
        self.register_buffer("max_val", torch.tensor(-torch.inf))

    @property
    def seen(self) -> bool:
        """Whether there was any data."""
        return bool(self.min_val <= self.max_val)

    def forward(self, x: Tensor) -> Tensor:
        """`x` itself, after it was taken in.

        Raises:
            HagoError: NaN among the values.
        """
        check_float(x, "an observer")
        values = x.detach().to(torch.float32)
        values = values[~values.isinf()]
        if values.numel() == 0:
            return x
        low, high = torch.aminmax(values)
        if bool(low.isnan()):
            raise HagoError("an observer saw NaN; expected numbers")
        if not self.seen:
            self.histogram.copy_(self._count(values, low, high))
        else:
            low, high = torch.minimum(low, self.min_val), torch.maximum(high, self.max_val)
            self.histogram.copy_(self._moved(low, high) + self._count(values, low, high))
        self.min_val.copy_(low)
        self.max_val.copy_(high)
        return x

    def range(self) -> tuple[Tensor, Tensor]:
        """The range within which quantizing what was seen loses least: (low, high), float32."""
        width = (float(self.max_val) - float(self.min_val)) / self.bins
        low, high, _ = DTYPES[self.qrange.dtype]
        first, last = least_error_bins(self.histogram.cpu(), width, high - low + 1)
        step = (self.max_val - self.min_val) / self.bins
        return self.min_val + step * first, self.min_val + step * (last + 1)

    def qparams(self) -> tuple[Tensor, Tensor]:
        """(scale, zero point) of `range()`; see QRange.qparams."""
        if not self.seen:
            device = self.min_val.device
            return torch.ones(1, device=device), torch.zeros(1, dtype=torch.int64, device=device)
        return self.qrange.qparams(*self.range())

    def _count(self, values: Tensor, low: Tensor, high: Tensor) -> Tensor:
        return torch.histc(values, self.bins, float(low), float(high))

    def _moved(self, low: Tensor, high: Tensor) -> Tensor:
        """The histogram so far, in the bins of a range that holds its own."""
        if low == self.min_val and high == self.max_val:
            return self.histogram
        if self.min_val == self.max_val:
            return self._count(self.min_val.reshape(1), low, high) * self.histogram.sum()
        parts = self.bins * _PARTS
        edges = torch.linspace(float(self.min_val), float(self.max_val), parts + 1, device=low.device)
        middles = edges[:-1] + 0.5 * ((self.max_val - self.min_val) / parts)
        borders = torch.linspace(float(low), float(high), self.bins + 1, device=low.device)
        target = (torch.bucketize(middles, borders, right=True) - 1).clamp(0, self.bins - 1)
        counts = self.histogram.repeat_interleave(_PARTS) / _PARTS
        return torch.bincount(target, weights=counts, minlength=self.bins)

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *args: Any) -> None:
        saved = state_dict.get(prefix + "histogram")
        if isinstance(saved, Tensor) and saved.numel() != self.bins:
            raise HagoError(f"a histogram of {saved.numel()} bins for an observer of {self.bins}")
        super()._load_from_state_dict(state_dict, prefix, *args)
