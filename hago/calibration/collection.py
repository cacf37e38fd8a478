"""The collection of statistics in one pass of the float model over the calibration data.

`search.preparation` calls `collect` for all samples, and `search.confirmation` for those that are not kept aside.

Memory: the live values of the graph for one batch, and for every observed node a histogram of BINS bins and temporaries
of a fixed size; nothing grows with the number of batches.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor

from hago.arithmetic.numerics import extremes
from hago.arithmetic.schemes import Grid
from hago.calibration.given_ranges import GivenRanges
from hago.calibration.observer import Observer
from hago.calibration.statistics import CHANNEL_BINS, TensorStatistics
from hago.data import Batch
from hago.errors import DataError
from hago.graph import CONST, OUTPUT, Graph, Node, run_real
from hago.ops import OPS, Ops

#: Inputs of a softmax count in statistics as no further below the largest of their row than this: whatever lies below
#: has less than 2e-7 of its weight. Masks of attention put -10000 or less there, which would make all steps coarse.
SOFTMAX_SPAN: Final = 16.0
#: What is added to the inputs of a softmax, and nothing else, counts as no lower than this.
LOWEST_MASK: Final = -4096.0


@dataclass(frozen=True, slots=True)
class Calibration:
    """The result of `collect`, and ranges and thresholds that replace parts of it.

    Args:
        statistics: statistics of every observed node.
        ranges: (minimum, maximum) of every node with float values.
        given: ranges from the user, in place of observed ones.
        refined: refined thresholds, in place of estimated ones, by group and grid.
        channel_bins: bins of the histograms of channels of constants, whose thresholds are estimated when asked for.
        softmax_span: of `collect`.
        cut: the nodes of which some values counted as larger ones for it.
    """

    statistics: Mapping[str, TensorStatistics]
    ranges: Mapping[str, tuple[float, float]]
    given: GivenRanges = field(default_factory=GivenRanges)
    refined: Mapping[tuple[str, Grid], tuple[Tensor, Tensor]] = field(default_factory=dict)
    channel_bins: int = CHANNEL_BINS
    softmax_span: float | None = SOFTMAX_SPAN
    cut: frozenset[str] = frozenset()

    @property
    def counted_ranges(self) -> dict[str, tuple[float, float]]:
        """The ranges of the values as they count in the statistics."""
        ends = {n: (float(self.statistics[n].minimum.min()), float(self.statistics[n].maximum.max())) for n in self.cut}
        return {**self.ranges, **ends}

    @property
    def peaks(self) -> dict[str, float]:
        """The largest magnitude of every node's value."""
        return {name: max(abs(lo), abs(hi)) for name, (lo, hi) in self.ranges.items()}


def collect(
    graph: Graph,
    batches: Iterable[Batch],
    observed: Collection[str],
    ops: Ops = OPS,
    softmax_span: float | None = SOFTMAX_SPAN,
) -> Calibration:
    """Collect the statistics of the `observed` nodes and the ranges of all nodes except constants.

    Args:
        softmax_span: how far below the largest of a row inputs of a softmax count; None for all as they are.

    Raises:
        DataError: an observed node has values that are not finite in float32, or no float values; names the node.
    """
    observers = {n: Observer(name=n) for n in observed if graph[n].op != CONST}
    # by the node that a softmax reads, the node whose statistics its values are, and the softmax
    before_softmax: dict[str, tuple[str, Node]] = {}
    for name in observers if softmax_span is not None else ():
        if (found := _read_by_softmax(graph, name)) is not None:
            before_softmax[found[0]] = name, found[1]
    delayed = {name for name, _ in before_softmax.values()}
    masks = {name for name in observers if softmax_span is not None and _is_added_before_softmax(graph, name)}
    ranges: dict[str, tuple[float, float]] = {}
    cut: set[str] = set()

    def observe(node: Node, value: Any) -> None:
        if not isinstance(value, Tensor) or not value.is_floating_point() or not value.numel():
            return
        low, high = (float(end) for end in extremes(value))
        if node.name in observers and node.name not in delayed:
            counted = value.clamp_min(LOWEST_MASK) if node.name in masks and math.isfinite(low) else value
            if float(observers[node.name].update(counted)[0]) > low:
                cut.add(node.name)
        if node.name in before_softmax and softmax_span is not None:
            name, softmax = before_softmax[node.name]
            counted = _as_softmax_sees(value, softmax, softmax_span) if math.isfinite(low) else value
            if float(observers[name].update(counted)[0]) > low:
                cut.add(name)
        before = ranges.get(node.name, (low, high))
        ranges[node.name] = (min(before[0], low), max(before[1], high))

    for batch in batches:
        run_real(graph, batch.inputs, observe, ops)
    unseen = [n for n in observers if n not in ranges]
    if unseen:
        raise DataError(f"node {unseen[0]!r} gave no float values to calibrate on; keep its readers float")
    statistics = {n: o.finish() for n, o in observers.items()}
    return Calibration(statistics, ranges, softmax_span=softmax_span, cut=frozenset(cut))


def _read_by_softmax(graph: Graph, name: str) -> tuple[str, Node] | None:
    """The node with the values of another, at most reshaped, that a softmax reads, and that softmax; None if anything
    else reads the values."""
    while len(edges := graph.out_edges[name]) == 1 and edges[0].dst != OUTPUT:
        node = graph[edges[0].dst]
        if node.op == "softmax":
            return name, node
        if node.op != "reshape":
            return None
        name = node.name
    return None


def _is_added_before_softmax(graph: Graph, name: str) -> bool:
    """Whether all that is done with the values of a node is to add them to inputs of a softmax."""
    edges = graph.out_edges[name]
    adds = [edge.dst for edge in edges if edge.dst != OUTPUT and graph[edge.dst].op == "add"]
    return 0 < len(adds) == len(edges) and all(_read_by_softmax(graph, add) is not None for add in adds)


def _as_softmax_sees(value: Tensor, softmax: Node, span: float) -> Tensor:
    """The values, none of which lies more than a span below the largest of its row."""
    span /= abs(float(softmax.attrs.get("scale", 1.0))) or 1.0
    return torch.maximum(value, value.amax(softmax.attrs["axis"], keepdim=True) - span)
