"""Observers: statistics of a tensor from one streaming pass over its batches, in memory of a fixed size.

`collect` makes one Observer per observed node.

Invariants: the width of a bin is a power of two, and doubling the limit merges pairs of neighbouring bins. So the
histogram, the minimum and the maximum do not depend on how the values are divided into batches, or on the order of the
batches. Only the batch means do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

import torch
from torch import Tensor

from hago.arithmetic.numerics import power_of_two_at_least
from hago.calibration.statistics import BINS, TensorStatistics
from hago.errors import DataError

#: A kernel that counts values in bins, of which half lie on each side of 0, exactly as `count_in_bins` does without
#: one: from contiguous float32 values, of which none is beyond the outermost bins, the bins per unit (a power of two)
#: and the number of bins to int64 (bins,). `search.preparation` hands one in where this machine has it.
CountBins = Callable[[Tensor, float, int], Tensor]

#: The smallest limit of a histogram. The reciprocals of its bins are finite in float32.
SMALLEST_LIMIT: Final = 2.0**-100
#: Elements that are binned at a time, so that temporaries stay in the second-level cache.
_CHUNK: Final = 1 << 17
#: The factor, exact in float32, by which values are shrunk so that +-limit lie inside the outermost bins.
_INSIDE: Final = 1.0 - 2.0**-24


def _cells(value: Tensor, channel_axis: int | None) -> Tensor:
    """`value` with the shape (outer, C, inner), in the order of its memory: a view if it is dense."""
    order = sorted(range(value.ndim), key=value.stride, reverse=True)
    dense = value.permute(order)
    if channel_axis is None:
        return dense.reshape(1, 1, -1)
    position = order.index(channel_axis)
    outer, channels = dense.shape[:position].numel(), dense.shape[position]
    return dense.reshape(outer, channels, -1)


def _extremes(cells: Tensor) -> tuple[Tensor, Tensor]:
    """The minima and maxima, float64 (C,); NaN if there is one; zeros are positive."""
    if cells.shape[1] == 1:
        low, high = (end.reshape(1) for end in torch.aminmax(cells))
    else:
        # One axis at a time: reducing both at once is ten times slower where `inner` is short.
        low, high = cells.amin(0).amin(-1), cells.amax(0).amax(-1)
    return low.to(torch.float64) + 0.0, high.to(torch.float64) + 0.0


def _pieces(cells: Tensor, size: int) -> Iterator[Tensor]:
    """Pieces of `cells` of about `size` elements, cut along `outer`, and along `inner` if one slab is larger."""
    outer, channels, inner = cells.shape
    rows = max(1, size // (channels * inner))
    for top in range(0, outer, rows):
        slab = cells[top : top + rows]
        columns = max(1, size // (channels * slab.shape[0]))
        for left in range(0, inner, columns):
            yield slab[:, :, left : left + columns]


def _scaled(piece: Tensor, per_value: Tensor) -> Tensor:
    """A new tensor of the values in units of bins, shrunk so that +-limit lie inside the outermost bins.

    Doubling the width of bins must exactly merge them, so the shrinking rounds in the precision of the value, and the
    multiplication by a power of two that follows must be exact. If it could underflow, which would turn a small
    negative value into zero, it is done in float64.

    Args:
        per_value: float64 (C,), bins per unit; a power of two.
    """
    carrier = piece if piece.dtype == torch.float64 else piece.to(torch.float32)
    if bool((per_value >= 1).all()):
        factor = per_value.to(carrier.dtype) * _INSIDE
        return carrier * (float(factor) if factor.numel() == 1 else factor.view(-1, 1))
    return (carrier * _INSIDE).to(torch.float64).mul_(per_value.view(-1, 1))


def count_in_bins(cells: Tensor, limit: Tensor, bins: int, kernel: CountBins | None = None) -> Tensor:
    """The number of values of each channel in each bin: int64 (C, bins).

    Args:
        cells: (outer, C, inner), none of the values beyond the limit of its channel.
        limit: float64 (C,), powers of two: where the histograms of channels end on each side of 0.
        bins: even.
        kernel: of `Observer`.
    """
    channels = cells.shape[1]
    per_value = (bins // 2) / limit
    if kernel is not None and channels == 1 and cells.dtype == torch.float32 and cells.is_contiguous():
        return kernel(cells, float(per_value), bins).view(1, bins)
    first: int | Tensor = bins // 2
    index, size = torch.int16, _CHUNK
    if channels > 1:
        index = torch.int32 if channels * bins < 1 << 31 else torch.int64
        first = torch.arange(channels, dtype=index).mul_(bins).add_(bins // 2).view(-1, 1)
        # Each bincount makes a table of its own, so a piece is at least half as long as the table.
        size = max(_CHUNK, channels * bins // 2)
    total = torch.zeros(0, dtype=torch.int64)
    for piece in _pieces(cells, size):
        numbers = _scaled(piece, per_value).floor_().to(index).add_(first)
        counts = torch.bincount(numbers.reshape(-1), minlength=channels * bins)
        total = total.add_(counts) if len(total) else counts
    return total.view(channels, bins)


def rebin(histogram: Tensor, limit: Tensor, wider: Tensor) -> Tensor:
    """Convert a histogram (C, bins) over [-limit, limit] to one over [-wider, wider] by merging neighbouring bins.

    Args:
        limit, wider: float64 (C,), powers of two, limit <= wider.
    """
    if bool((limit == wider).all()):
        return histogram
    halvings = torch.frexp(wider / limit)[1].to(torch.int64).sub_(1).clamp_max(62).view(-1, 1)
    bins = histogram.shape[1]
    target = (torch.arange(bins).sub_(bins // 2) >> halvings).add_(bins // 2)
    return torch.zeros_like(histogram).scatter_add_(1, target, histogram)


class Observer:
    """Accumulates the statistics of one tensor. Call `update` with every batch, and `finish` at any time.

    `collect` makes one for every observed node, and `constant_statistics` one for every constant.

    Args:
        channel_axis: the axis along which statistics are kept per channel (negative values count from the end); None
            for statistics of the whole tensor. With C channels the memory is 8 * C * bins bytes.
        name: the name of the node, for errors.
        bins: of the histogram of a channel; even.
        kernel: counts values, where there is one; the statistics are the same without it.
    """

    def __init__(
        self,
        channel_axis: int | None = None,
        name: str = "tensor",
        bins: int = BINS,
        kernel: CountBins | None = None,
    ) -> None:
        self._axis = channel_axis
        self._name, self._bins, self._kernel = name, bins, kernel
        self._batches = self._count = 0

    def update(self, value: Tensor) -> tuple[Tensor, Tensor]:
        """Add one batch.

        Args:
            value: a float tensor of any shape and memory format; it is neither kept nor changed.

        Returns:
            The smallest and the largest value of the batch, float64 (C,).

        Raises:
            DataError: the batch is empty, not float, holds NaN or values that are not finite in float32, or has
                another number of channels than the batches before it.
        """
        cells = self._checked(value.detach())
        low, high = _extremes(cells)
        peak = torch.maximum(low.abs(), high.abs())
        if not bool((peak <= torch.finfo(torch.float32).max).all()):  # False for NaN, too
            raise DataError(
                f"node {self._name!r} has NaN, infinite or out-of-float32 values in batch {self._batches}; "
                "calibration data and weights must be finite"
            )
        limit = power_of_two_at_least(peak.clamp_min(SMALLEST_LIMIT))
        if self._batches:
            self._merge(cells, low, high, limit)
        else:
            self._minimum, self._maximum, self._limit = low, high, limit
            self._sum_minimum, self._sum_maximum = low, high
            self._histogram = count_in_bins(cells, limit, self._bins, self._kernel).to(torch.float64)
        self._batches += 1
        self._count += cells.numel() // cells.shape[1]
        return low, high

    def _checked(self, value: Tensor) -> Tensor:
        got = f"a {value.dtype} tensor of shape {tuple(value.shape)}"
        if not value.is_floating_point() or value.numel() == 0:
            raise DataError(f"node {self._name!r}: expected float values to observe; got {got}")
        axis = self._axis
        if axis is not None:
            if not -value.ndim <= axis < value.ndim:
                raise DataError(f"node {self._name!r}: {got} has no axis {axis}")
            self._axis = axis = axis % value.ndim
        cells = _cells(value.cpu(), axis)
        if self._batches and cells.shape[1] != self._minimum.numel():
            raise DataError(
                f"node {self._name!r}: {got} has {cells.shape[1]} channels on axis {axis}, "
                f"the batches before it {self._minimum.numel()}"
            )
        return cells

    def _merge(self, cells: Tensor, low: Tensor, high: Tensor, limit: Tensor) -> None:
        wider = torch.maximum(self._limit, limit)
        counts = count_in_bins(cells, wider, self._bins, self._kernel)
        self._histogram = rebin(self._histogram, self._limit, wider).add_(counts)
        self._limit = wider
        self._minimum = torch.minimum(self._minimum, low)
        self._maximum = torch.maximum(self._maximum, high)
        self._sum_minimum = self._sum_minimum + low
        self._sum_maximum = self._sum_maximum + high

    def finish(self) -> TensorStatistics:
        """The statistics so far; later updates do not change the returned value.

        Raises:
            DataError: `update` has not been called.
        """
        if not self._batches:
            raise DataError(f"node {self._name!r} was observed on no batch; calibrate with at least one")
        return self._statistics(self._histogram.clone())

    def finish_at_once(self, value: Tensor) -> TensorStatistics:
        """The statistics of a tensor that is the only batch. Raises what `update` raises."""
        self.update(value)
        return self._statistics(self._histogram)

    def _statistics(self, histogram: Tensor) -> TensorStatistics:
        return TensorStatistics(
            count=self._count,
            minimum=self._minimum,
            maximum=self._maximum,
            mean_minimum=self._sum_minimum / self._batches,
            mean_maximum=self._sum_maximum / self._batches,
            counts=histogram,
            limit=self._limit,
        )


def constant_statistics(
    tensor: Tensor, channel_axis: int | None = None, name: str = "constant", bins: int = BINS
) -> TensorStatistics:
    """Statistics of a constant, such as a weight, observed as one batch.

    Args:
        tensor: float, any shape.
        channel_axis: the axis of the channels (8 * C * bins bytes); None for statistics of the whole tensor.
        name: the name of the node, for errors.
        bins: of the histogram of a channel; even.

    Raises:
        DataError: the tensor is empty, not float or not finite, or has no such axis.
    """
    return Observer(channel_axis, name, bins).finish_at_once(tensor)
