"""A cache of estimated thresholds, by node, grid and channel axis."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from hago.arithmetic.schemes import Grid
from hago.calibration.observer import constant_statistics
from hago.calibration.statistics import CHANNEL_BINS, Estimator, TensorStatistics, stack
from hago.errors import DataError, HagoError, did_you_mean

#: The number of channels of a constant that are estimated at a time: their histograms take 4 MiB.
_BLOCK = 512
#: The number of groups of a constant that are estimated at a time, and the bins of their histograms: a group has few
#: values, and a constant many groups.
_GROUPS, _GROUP_BINS = 2048, 512
#: The number of observed nodes that are estimated at a time.
_TOGETHER = 64
#: The bytes of statistics of constants' channels that are kept; see `_Blocks`.
_BYTES = 1 << 28

RangeOfNode = tuple[Tensor, Tensor]
#: A node, a grid, a channel axis, and the id of the statistics (of None for a constant).
_Key = tuple[str, Grid, int | None, int]
#: A constant, the axis of its channels, the size of groups or 0, the number of rows, and the first row of a block.
_BlockKey = tuple[str, int, int, int, int]


class _Blocks:
    """The statistics of blocks of constants' channels, with packed counts; a `ThresholdCache` makes one.

    The first blocks that fit in _BYTES are kept. A search asks for all blocks for one grid after another, and a cache
    that evicts what was not used for longest would evict each of them just before it is asked for again.
    """

    def __init__(self) -> None:
        self._kept: dict[_BlockKey, TensorStatistics] = {}
        self._bytes = 0

    def get_or_make(self, key: _BlockKey, make: Callable[[], TensorStatistics]) -> TensorStatistics:
        """The statistics of a block; `make()` makes them if they are not kept."""
        if key in self._kept:
            return self._kept[key]
        statistics = make()
        size = statistics.bytes_at_most()
        if self._bytes + size <= _BYTES:
            self._kept[key] = statistics
            self._bytes += size
        return statistics


class ThresholdCache:
    """The thresholds that an estimator gives, each computed when it is first asked for.

    Made by `plan.threshold_sources.EstimatedThresholds`, which calls it whenever a Plan is resolved. The statistics
    of a constant are computed when they are first needed. Those of whole tensors are kept. Those per channel (15 KiB
    each with 1,024 bins, with what `Mse` derives from them, more than the weight itself) are computed in blocks, of
    which those that fit in 256 MiB are kept. So are those per group, each of which is estimated as a channel with
    coarser bins.

    Args:
        statistics: statistics of the observed nodes, by name.
        constants: float tensors by name; looked up before `statistics`.
        estimator: called for one tensor, or for many nodes at once if it has `together`.
        channel_bins: bins of the histogram of a channel of a constant.
    """

    def __init__(
        self,
        statistics: Mapping[str, TensorStatistics],
        constants: Mapping[str, Tensor],
        estimator: Estimator,
        channel_bins: int = CHANNEL_BINS,
    ) -> None:
        self.estimator, self.channel_bins = estimator, channel_bins
        self._statistics = statistics
        self._constants = constants
        self._whole: dict[str, TensorStatistics] = {}  # of constants
        self._stacked: dict[str, tuple[tuple[str, ...], TensorStatistics]] = {}
        self._blocks = _Blocks()
        self._ranges: dict[_Key, tuple[RangeOfNode, TensorStatistics | None]] = {}

    def with_statistics(self, statistics: Mapping[str, TensorStatistics]) -> ThresholdCache:
        """A cache with other statistics of observed nodes, which shares all thresholds that do not depend on them."""
        other = ThresholdCache(statistics, self._constants, self.estimator, self.channel_bins)
        other._whole, other._ranges, other._blocks = self._whole, self._ranges, self._blocks
        return other

    def __call__(self, node: str, grid: Grid, channel_axis: int | None = None) -> RangeOfNode:
        """(lo, hi) of a node for a grid.

        Args:
            node: an observed node or a constant.
            grid: the integers that represent its value.
            channel_axis: the axis of a constant along which each channel gets thresholds of its own; None for one pair.
                0 if the grid has groups.

        Returns:
            float64 tensors of shape (C,), (C * groups,), or (1,) without a channel axis; the caller may change them.

        Raises:
            HagoError: there is no such node, or the estimator broke its contract.
            DataError: the node is no constant that has that axis, or its values are not finite.
        """
        if channel_axis is not None:
            if node not in self._constants:
                self._observed(node)  # raises where there is no such node
                raise DataError(f"node {node!r} is no constant, so it has no thresholds along axis {channel_axis}")
            ndim = self._constants[node].ndim
            if not -ndim <= channel_axis < ndim:
                raise DataError(f"constant {node!r} has {ndim} axes; there is no axis {channel_axis}")
            channel_axis %= ndim
        statistics = None if node in self._constants else self._statistics.get(node)
        key = (node, grid, channel_axis, id(statistics))
        if key not in self._ranges:
            if channel_axis is None and statistics is not None and getattr(self.estimator, "together", False):
                self._estimate_together(node, grid)
            else:
                # the statistics are kept with the range, so that no others can get their id
                self._ranges[key] = self._estimate(node, grid, channel_axis), statistics
        lo, hi = self._ranges[key][0]
        return lo.clone(), hi.clone()

    def knows(self, node: str) -> bool:
        """Whether a node was observed or is a constant."""
        return node in self._statistics or node in self._constants

    def range_of(self, node: str) -> tuple[float, float]:
        """The smallest and the largest value of a node.

        Raises:
            HagoError: there is no such node.
            DataError: the node is a constant that is empty or not finite.
        """
        statistics = self._whole_tensor(node)
        return float(statistics.minimum), float(statistics.maximum)

    def _estimate(self, node: str, grid: Grid, channel_axis: int | None) -> RangeOfNode:
        if channel_axis is None:
            return self._checked(node, self._whole_tensor(node), grid)
        channels = self._constants[node].movedim(channel_axis, 0)
        if grid.group is None:
            return self._rows(node, channels, grid, (node, channel_axis, 0))
        # the last group of a channel may be shorter, so those of all channels are estimated apart from the others
        rows, size = channels.flatten(1), grid.group
        whole = rows.shape[1] // size * size
        parts = [rows[:, :whole].reshape(len(rows), -1, size)] if whole else []
        parts += [rows[:, whole:].unsqueeze(1)] if whole < rows.shape[1] else []
        found = [self._rows(node, p.flatten(0, 1), grid, (node, 0, p.shape[2])) for p in parts]
        ends = (torch.cat([end.view(len(rows), -1) for end in of_parts], 1) for of_parts in zip(*found, strict=True))
        lo, hi = (end.flatten() for end in ends)
        return lo, hi

    def _rows(self, node: str, rows: Tensor, grid: Grid, key: tuple[str, int, int]) -> RangeOfNode:
        """The thresholds of every row of a constant, (rows, ...), in blocks.

        Args:
            key: of the cached statistics, equal for equal rows if their number is, too: the node, the axis of its
                channels, and the size of groups or 0. Short last groups may be as long as the groups of another grid.
        """
        at_once, bins = (_BLOCK, self.channel_bins) if grid.group is None else (_GROUPS, _GROUP_BINS)

        def statistics(start: int) -> TensorStatistics:
            return constant_statistics(rows[start : start + at_once], 0, node, bins).packed()

        ranges = [
            self._checked(
                node, self._blocks.get_or_make((*key, len(rows), start), functools.partial(statistics, start)), grid
            )
            for start in range(0, max(1, len(rows)), at_once)
        ]
        return torch.cat([lo for lo, _ in ranges]), torch.cat([hi for _, hi in ranges])

    def _estimate_together(self, node: str, grid: Grid) -> None:
        """Estimate a node, and others that will probably be asked for on the same grid, as channels of one tensor."""
        names, stacked = self._estimated_with(node)
        lo, hi = self._checked(node, stacked, grid)
        for index, name in enumerate(names):
            channel = slice(index, index + 1)
            statistics = self._statistics[name]
            self._ranges[name, grid, None, id(statistics)] = (lo[channel], hi[channel]), statistics

    def _estimated_with(self, node: str) -> tuple[tuple[str, ...], TensorStatistics]:
        """The observed nodes that a node is estimated with, and their stacked statistics.

        Either all of them have negative values or none has, so that their grids have the same sign.
        """
        if not self._stacked:
            signed: dict[bool, list[str]] = {}
            for name in self._statistics:
                signed.setdefault(self.range_of(name)[0] < 0.0, []).append(name)
            for names in signed.values():
                for start in range(0, len(names), _TOGETHER):
                    block = tuple(names[start : start + _TOGETHER])
                    stacked = stack([self._whole_tensor(name) for name in block])
                    self._stacked |= dict.fromkeys(block, (block, stacked))
        return self._stacked[node]

    def _observed(self, node: str) -> TensorStatistics:
        if node not in self._statistics:
            known = [*self._statistics, *self._constants]
            raise HagoError(f"no statistics of node {node!r}; calibrate it first.{did_you_mean(node, known)}")
        assert self._statistics[node].channels == 1, f"node {node!r} was observed channel by channel"
        return self._statistics[node]

    def _whole_tensor(self, node: str) -> TensorStatistics:
        if node not in self._constants:
            return self._observed(node)
        if node not in self._whole:
            self._whole[node] = constant_statistics(self._constants[node], name=node)
        return self._whole[node]

    def _checked(self, node: str, statistics: TensorStatistics, grid: Grid) -> RangeOfNode:
        said: Any = self.estimator(statistics, grid)
        ends = list(said) if isinstance(said, Iterable) else []
        if len(ends) != 2 or not all(isinstance(end, Tensor) for end in ends):
            raise HagoError(
                f"estimator {self.estimator.name} returned {said!r} for node {node!r}; expected two tensors (lo, hi)"
            )
        lo, hi = ends
        shape = (statistics.channels,)
        well_formed = all(t.dtype == torch.float64 and tuple(t.shape) == shape for t in (lo, hi))
        if not (well_formed and bool((lo.isfinite() & hi.isfinite() & (lo <= 0) & (hi >= 0)).all())):
            raise HagoError(
                f"estimator {self.estimator.name} gave lo {lo.tolist()}, hi {hi.tolist()} for node {node!r}; "
                f"expected finite float64 of shape {shape} with lo <= 0 <= hi"
            )
        return lo, hi
