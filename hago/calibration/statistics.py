"""Statistics of tensors: histograms and ranges of a streaming pass, and the protocol of estimators, which read them.

An `Observer` makes them; a `ThresholdCache` hands them to an Estimator.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Protocol

import torch
from torch import Tensor

from hago.arithmetic.schemes import Grid

#: Histogram bins over [-limit, limit]; even, so that zero is an edge between two bins.
BINS: Final = 4096
#: Bins of the histogram of one channel of a constant, which has few values.
CHANNEL_BINS: Final = 1024


@dataclass(frozen=True, slots=True, eq=False)
class TensorStatistics:
    """Statistics of one tensor, per channel (C) or of the whole tensor (C = 1).

    Args:
        count: the number of observed values per channel.
        minimum, maximum: float64 (C,).
        mean_minimum, mean_maximum: float64 (C,), the batch minima and maxima averaged over batches.
        counts: (C, bins), counts of values over [-limit, limit], float64, or an integer dtype if they are `packed`; a
            positive value on an edge belongs to the bin below it, a negative one to the bin above, zero to bin
            bins / 2. There are BINS bins, or fewer where channels have few values.
        limit: float64 (C,), a power of two at least max(|minimum|, |maximum|).
        derived: what estimators derive from the statistics and keep for further grids; see `derive`.
    """

    count: int
    minimum: Tensor
    maximum: Tensor
    mean_minimum: Tensor
    mean_maximum: Tensor
    counts: Tensor
    limit: Tensor
    derived: dict[Hashable, Any] = field(default_factory=dict, init=False, repr=False)

    def derive(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """The derived value of a key. `make` makes it, and it is kept until a value of another key is asked for."""
        if key not in self.derived:
            self.derived.clear()
            self.derived[key] = make()
        return self.derived[key]

    def packed(self) -> TensorStatistics:
        """The same statistics with counts, whole numbers, in the narrowest dtype that holds those of a channel."""
        dtype = next(d for d in (torch.int16, torch.int32, torch.int64) if self.count <= torch.iinfo(d).max)
        return replace(self, counts=self.counts.to(dtype))

    def bytes_at_most(self) -> int:
        """An upper bound on the bytes of packed counts and of what estimators derive from them: for each channel, 12
        bytes for each bin if counts are int16, else 16, and 1 KiB."""
        size = self.counts.element_size()
        return self.counts.numel() * (size + (12 if size == 2 else 16)) + 1024 * self.channels

    @property
    def histogram(self) -> Tensor:
        """The counts, float64 (C, bins)."""
        return self.counts.to(torch.float64)

    @property
    def channels(self) -> int:
        return self.minimum.numel()

    @property
    def bin_width(self) -> Tensor:
        """float64 (C,), a power of two."""
        return self.limit * (2.0 / self.counts.shape[-1])

    def channel_slice(self, start: int, stop: int) -> TensorStatistics:
        """Views of the statistics of channels `start:stop`."""
        return replace(
            self,
            minimum=self.minimum[start:stop],
            maximum=self.maximum[start:stop],
            mean_minimum=self.mean_minimum[start:stop],
            mean_maximum=self.mean_maximum[start:stop],
            counts=self.counts[start:stop],
            limit=self.limit[start:stop],
        )


def stack(parts: Sequence[TensorStatistics]) -> TensorStatistics:
    """Stack the statistics of whole tensors as channels of one tensor; `count` is that of the first."""
    return TensorStatistics(
        count=parts[0].count,
        minimum=torch.cat([p.minimum for p in parts]),
        maximum=torch.cat([p.maximum for p in parts]),
        mean_minimum=torch.cat([p.mean_minimum for p in parts]),
        mean_maximum=torch.cat([p.mean_maximum for p in parts]),
        counts=torch.cat([p.histogram for p in parts]),
        limit=torch.cat([p.limit for p in parts]),
    )


class Estimator(Protocol):
    """Estimates thresholds from statistics. `ThresholdCache` calls it, once for every tensor and grid.

    An estimator is frozen and hashable, and its name contains its options. Channels are independent: the thresholds of
    a channel depend on its own statistics alone. An estimator that is slow and does not read `count` may have
    `together = True`: it is then called with the statistics of many nodes at once, as channels of one tensor.
    """

    @property
    def name(self) -> str: ...

    def __call__(self, statistics: TensorStatistics, grid: Grid) -> tuple[Tensor, Tensor]:
        """Estimate (lo, hi): float64 of shape (C,), finite, lo <= 0 <= hi, and lo < hi unless all values are 0."""
        ...
