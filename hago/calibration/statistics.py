"""TensorStatistics: what a streaming pass keeps of one tensor, and the Grid an estimator aims at."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Protocol

import torch
from torch import Tensor

from hago.arithmetic.schemes import Grid

#: Histogram bins over [-limit, limit]; even, so that zero is an edge between two bins.
BINS: Final = 4096


@dataclass(frozen=True, slots=True, eq=False)
class TensorStatistics:
    """Statistics of one tensor, per channel (C) or of the whole tensor (C = 1).

    Args:
        count: values seen per channel.
        minimum, maximum: float64 (C,).
        mean_minimum, mean_maximum: float64 (C,), the batch minima and maxima averaged over batches.
        histogram: float64 (C, BINS), counts of values over [-limit, limit]; a positive value on an
            edge belongs to the bin below it, a negative one to the bin above, zero to bin BINS / 2.
        limit: float64 (C,), a power of two at least max(|minimum|, |maximum|).
        channel_axis: the axis that C runs along, or None where C = 1 is the whole tensor.
        derived: what estimators made of them and keep for the next grid, by a key of their own.
    """

    count: int
    minimum: Tensor
    maximum: Tensor
    mean_minimum: Tensor
    mean_maximum: Tensor
    histogram: Tensor
    limit: Tensor
    channel_axis: int | None = None
    derived: dict[Hashable, Any] = field(default_factory=dict, init=False, repr=False)

    def derive(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """`make()`, which is called once for a key."""
        if key not in self.derived:
            self.derived[key] = make()
        return self.derived[key]

    def bytes_at_most(self) -> int:
        """Of the histogram and of what estimators derive from it: tables of 4 * BINS numbers a channel."""
        return 5 * self.histogram.numel() * self.histogram.element_size()

    @property
    def channels(self) -> int:
        return self.minimum.numel()

    @property
    def bin_width(self) -> Tensor:
        """float64 (C,), a power of two."""
        return self.limit * (2.0 / self.histogram.shape[-1])

    def channel_slice(self, start: int, stop: int) -> TensorStatistics:
        """Those of the channels from `start` up to `stop`, as views."""
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
    """Statistics of whole tensors as channels of one; `count` is that of the first."""
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
    """Turns statistics into thresholds. Frozen, hashable; prints as its name with its options.

    Channels are independent: the thresholds of a channel depend on its own statistics alone. One that costs much and
    does not read `count` may have `together = True`: it is then given the statistics of many nodes at once, as channels
    of one tensor.
    """

    @property
    def name(self) -> str: ...

    def __call__(self, statistics: TensorStatistics, grid: Grid) -> tuple[Tensor, Tensor]:
        """(lo, hi), float64 of shape (C,), finite, lo <= 0 <= hi, lo < hi unless all values are 0."""
        ...
