"""The collection of statistics in one pass of the float model over the calibration data.

`search.preparation` calls `collect` for all samples, and `search.confirmation` for those that are not kept aside.

Memory: the live values of the graph for one batch, and for every observed node a histogram of BINS bins and temporaries
of a fixed size; nothing grows with the number of batches.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from hago.arithmetic.numerics import extremes
from hago.arithmetic.schemes import Grid
from hago.calibration.given_ranges import GivenRanges
from hago.calibration.observer import Observer
from hago.calibration.statistics import CHANNEL_BINS, TensorStatistics
from hago.data import Batch
from hago.errors import DataError
from hago.graph import CONST, Graph, Node, run_real
from hago.ops import OPS, Ops


@dataclass(frozen=True, slots=True)
class Calibration:
    """The result of `collect`, and ranges and thresholds that replace parts of it.

    Args:
        statistics: statistics of every observed node.
        ranges: (minimum, maximum) of every node with float values.
        given: ranges from the user, in place of observed ones.
        refined: refined thresholds, in place of estimated ones, by group and grid.
        channel_bins: bins of the histograms of channels of constants, whose thresholds are estimated when asked for.
    """

    statistics: Mapping[str, TensorStatistics]
    ranges: Mapping[str, tuple[float, float]]
    given: GivenRanges = field(default_factory=GivenRanges)
    refined: Mapping[tuple[str, Grid], tuple[Tensor, Tensor]] = field(default_factory=dict)
    channel_bins: int = CHANNEL_BINS

    @property
    def peaks(self) -> dict[str, float]:
        """The largest magnitude of every node's value."""
        return {name: max(abs(lo), abs(hi)) for name, (lo, hi) in self.ranges.items()}


def collect(graph: Graph, batches: Iterable[Batch], observed: Collection[str], ops: Ops = OPS) -> Calibration:
    """Collect the statistics of the `observed` nodes and the ranges of all nodes except constants.

    Raises:
        DataError: an observed node has values that are not finite in float32, or no float values; names the node.
    """
    observers = {n: Observer(name=n) for n in observed if graph[n].op != CONST}
    ranges: dict[str, tuple[float, float]] = {}

    def observe(node: Node, value: Any) -> None:
        if not isinstance(value, Tensor) or not value.is_floating_point() or not value.numel():
            return
        if node.name in observers:
            low, high = (float(end) for end in observers[node.name].update(value))
        else:
            low, high = extremes(value)
        before = ranges.get(node.name, (low, high))
        ranges[node.name] = (min(before[0], low), max(before[1], high))

    for batch in batches:
        run_real(graph, batch.inputs, observe, ops)
    unseen = [n for n in observers if n not in ranges]
    if unseen:
        raise DataError(f"node {unseen[0]!r} gave no float values to calibrate on; keep its readers float")
    return Calibration({n: o.finish() for n, o in observers.items()}, ranges)
