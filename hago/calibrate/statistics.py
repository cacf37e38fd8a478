"""TensorStatistics: what a streaming pass keeps of one tensor, and the Grid an estimator aims at."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, Protocol

from torch import Tensor

from hago.errors import HagoError, did_you_mean
from hago.schemes import SCHEMES

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
    """

    count: int
    minimum: Tensor
    maximum: Tensor
    mean_minimum: Tensor
    mean_maximum: Tensor
    histogram: Tensor
    limit: Tensor
    channel_axis: int | None = None

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


@dataclass(frozen=True, slots=True)
class Grid:
    """The integers that will stand for a tensor.

    Args:
        bits: how many, sign included.
        scheme: a name in `hago.schemes.SCHEMES`.
        signed: False where no value is negative and the dtype is unsigned: then 2**bits levels
            cover [0, hi]; else 2**bits - 1 cover [-t, t] (symmetric), or 2**bits cover [lo, hi]
            (affine).
        power_of_two: whether the threshold must be a power of two.

    Raises:
        HagoError: the scheme is unknown, or the bits are not 2 to 64 (63 where unsigned).
    """

    bits: int
    scheme: str = "hago"
    signed: bool = True
    power_of_two: bool = False

    def __post_init__(self) -> None:
        if self.scheme not in SCHEMES:
            raise HagoError(
                f"unknown scheme {self.scheme!r}; known: {', '.join(SCHEMES)}."
                + did_you_mean(self.scheme, SCHEMES)
            )
        most = 64 if self.signed else 63
        if not 2 <= self.bits <= most:
            raise HagoError(f"a grid of {self.bits} bits; expected 2 to {most}")


class Estimator(Protocol):
    """Turns statistics into thresholds. Frozen, hashable; prints as its name with its options.

    Channels are independent: the thresholds of a channel depend on its own statistics alone.
    """

    @property
    def name(self) -> str: ...

    def __call__(self, statistics: TensorStatistics, grid: Grid) -> tuple[Tensor, Tensor]:
        """(lo, hi), float64 of shape (C,), finite, lo <= 0 <= hi, lo < hi unless all values are 0."""
        ...
