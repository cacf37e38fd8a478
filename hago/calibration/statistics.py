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
        histogram: float64 (C, bins), counts of values over [-limit, limit]; a positive value on an
            edge belongs to the bin below it, a negative one to the bin above, zero to bin bins / 2. There are BINS
            bins, or fewer where channels have few values.
        limit: float64 (C,), a power of two at least max(|minimum|, |maximum|).
        derived: values that estimators derive from the statistics and keep for further grids; see `derive`.
    """

    count: int
    minimum: Tensor
    maximum: Tensor
    mean_minimum: Tensor
    mean_maximum: Tensor
    histogram: Tensor
    limit: Tensor
    derived: dict[Hashable, Any] = field(default_factory=dict, init=False, repr=False)

    def derive(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """The derived value of a key; `make` makes it when it is first asked for."""
        if key not in self.derived:
            self.derived[key] = make()
        return self.derived[key]

    def bytes_at_most(self) -> int:
        """An upper bound on the bytes of the histogram and the values derived from it: 4 * BINS numbers per channel."""
        return 5 * self.histogram.numel() * self.histogram.element_size()

    @property
    def channels(self) -> int:
        return self.minimum.numel()

    @property
    def bin_width(self) -> Tensor:
        """float64 (C,), a power of two."""
        return self.limit * (2.0 / self.histogram.shape[-1])

    def channel_slice(self, start: int, stop: int) -> TensorStatistics:
        """Views of the statistics of channels `start:stop`."""
        return replace(
            self,
            minimum=self.minimum[start:stop],
            maximum=self.maximum[start:stop],
            mean_minimum=self.mean_minimum[start:stop],
            mean_maximum=self.mean_maximum[start:stop],
            histogram=self.histogram[start:stop],
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
        histogram=torch.cat([p.histogram for p in parts]),
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
