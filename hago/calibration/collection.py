"""The collection of statistics in one pass of the float model over the calibration data.

`search.preparation` calls `collect` for all samples, and `search.confirmation` for those that are not kept aside.

Memory: the live values of the graph for one batch, for every observed node one or two histograms of BINS bins and
temporaries of a fixed size, and for every clamp as many numbers as it reads of one sample; nothing grows with the
number of batches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from hago.arithmetic.numerics import extremes
from hago.arithmetic.schemes import Grid
from hago.calibration.given_ranges import GivenRanges
from hago.calibration.observer import CountBins, Observer
from hago.calibration.statistics import CHANNEL_BINS, TensorStatistics
from hago.data import Batch
from hago.errors import DataError
from hago.graph import CONST, OUTPUT, Graph, Node, over_samples, run_real
from hago.ops import OPS, Ops, upper_clip

#: Inputs of a softmax count in statistics as no further below the largest of their row than this: whatever lies below
#: has less than 2e-7 of its weight. Masks of attention put -10000 or less there, which would make all steps coarse.
SOFTMAX_SPAN: Final = 16.0
#: What is added to the inputs of a softmax, and nothing else, counts as no lower than this.
LOWEST_MASK: Final = -4096.0
#: The operators that give a mask another shape.
_RESHAPES: Final = ("reshape", "expand", "unsqueeze", "squeeze", "permute", "slice")


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
        first_samples: of how many samples, from the first on, `of_first` has the statistics; 0 for none.
        of_first: statistics of every observed node as if the data ended there.
        clamped: by node that a clamp reads, the largest magnitude of every entry of its value over all samples, in the
            shape (1, ...) of a single sample's; none where batches differ in that shape.
    """

    statistics: Mapping[str, TensorStatistics]
    ranges: Mapping[str, tuple[float, float]]
    given: GivenRanges = field(default_factory=GivenRanges)
    refined: Mapping[tuple[str, Grid], tuple[Tensor, Tensor]] = field(default_factory=dict)
    channel_bins: int = CHANNEL_BINS
    softmax_span: float | None = SOFTMAX_SPAN
    cut: frozenset[str] = frozenset()
    first_samples: int = 0
    of_first: Mapping[str, TensorStatistics] = field(default_factory=dict)
    clamped: Mapping[str, Tensor] = field(default_factory=dict)

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
    kernel: CountBins | None = None,
    first_samples: int = 0,
) -> Calibration:
    """Collect the statistics of the `observed` nodes and the ranges of all nodes except constants.

    Args:
        softmax_span: how far below the largest of a row inputs of a softmax count; None for all as they are.
        kernel: of `Observer`.
        first_samples: of how many samples, from the first on, statistics are kept beside those of all, if a batch ends
            there; 0 for none.

    Raises:
        DataError: an observed node has values that are not finite in float32, or no float values; names the node.
    """
    observers = {n: Observer(name=n, kernel=kernel) for n in observed if graph[n].op != CONST}
    cut_values = {} if softmax_span is None else _cut_values(graph, observers, softmax_span)
    cut_nodes = {name for name, _ in cut_values.values()}
    ranges: dict[str, tuple[float, float]] = {}
    cut: set[str] = set()
    entries = {name: _EntryExtremes() for name in _clamped(graph)}

    def observe(node: Node, value: Any) -> None:
        if not isinstance(value, Tensor) or not value.is_floating_point() or not value.numel():
            return
        if node.name in entries:
            low, high = entries[node.name].update(value)
        if node.name in observers and node.name not in cut_nodes:
            low, high = (float(end) for end in observers[node.name].update(value))
        elif node.name not in entries:
            low, high = extremes(value)
        if node.name in cut_values:
            name, as_counted = cut_values[node.name]
            # what is infinite even so, or NaN, is refused by the observer
            if float(observers[name].update(as_counted(value))[0]) > low:
                cut.add(name)
        if low == -math.inf:  # masks; what is masked says nothing of the range
            low = float(torch.where(value == -math.inf, high, value).min())
        before = ranges.get(node.name, (low, high))
        ranges[node.name] = (min(before[0], low), max(before[1], high))

    samples, of_first = 0, dict[str, TensorStatistics]()
    for batch in batches:
        run_real(graph, batch.inputs, observe, ops)
        samples += batch.size
        if samples == first_samples and all(name in ranges for name in observers):
            of_first = {n: o.finish() for n, o in observers.items()}
    unseen = [n for n in observers if n not in ranges]
    if unseen:
        raise DataError(f"node {unseen[0]!r} gave no float values to calibrate on; keep its readers float")
    statistics = {n: o.finish() for n, o in observers.items()}
    clamped = {name: seen.largest for name, seen in entries.items() if seen.largest is not None}
    return Calibration(
        statistics,
        ranges,
        softmax_span=softmax_span,
        cut=frozenset(cut),
        first_samples=first_samples if of_first else 0,
        of_first=of_first,
        clamped=clamped,
    )


@dataclass(slots=True)
class _EntryExtremes:
    """The largest magnitude of every entry of a node's value over all samples; `collect` makes one for each value that
    a clamp reads.

    Args:
        largest: in the shape (1, ...) of a single sample's value; None before the first batch, and where batches differ
            in that shape.
    """

    largest: Tensor | None = None
    differs: bool = False

    def update(self, value: Tensor) -> tuple[float, float]:
        """Add one batch; its smallest and largest value. That takes no longer than finding these alone."""
        low, high = over_samples(value, torch.amin), over_samples(value, torch.amax)
        new, old = torch.maximum(low.abs(), high.abs()), self.largest
        self.differs = self.differs or (old is not None and old.shape != new.shape)
        self.largest = None if self.differs else new if old is None else torch.maximum(old, new)
        return float(low.min()), float(high.max())


def _clamped(graph: Graph) -> set[str]:
    """The nodes that a clamp from 0 to a limit reads, such as relu6."""
    return {n.inputs[0] for n in graph if n.op == "clamp" and upper_clip(n.attrs) is not None}


def _cut_values(
    graph: Graph, observed: Collection[str], span: float
) -> dict[str, tuple[str, Callable[[Tensor], Tensor]]]:
    """By the node whose values are seen: the observed node that has the same values, and as what they count."""
    found: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = {}
    masks = _masks(graph)
    for name in observed:
        if (before := _before_softmax(graph, name)) is not None:
            seen, softmax = before
            found[seen] = name, partial(_as_softmax_sees, softmax=softmax, span=span)
        elif (behind := _softmax_behind_sums(graph, name)) is not None:
            # the largest of a row may be masked by what is still to be added
            found[name] = name, partial(_as_softmax_sees, softmax=behind, span=2.0 * span)
        elif name in masks:
            found[name] = name, partial(torch.clamp_min, min=LOWEST_MASK)
    return found


def _before_softmax(graph: Graph, name: str) -> tuple[str, Node] | None:
    """The node with the values of another, at most reshaped, that a softmax reads, and that softmax; None if anything
    else reads the values."""
    while len(edges := graph.out_edges[name]) == 1 and edges[0].dst != OUTPUT:
        node = graph[edges[0].dst]
        if node.op == "softmax":
            return (name, node) if node.attrs.get("scale", 1.0) > 0.0 else None
        if node.op != "reshape":
            return None
        name = node.name
    return None


def _softmax_behind_sums(graph: Graph, name: str) -> Node | None:
    """The softmax that reads a sum of the same shape after other things are added to it; None if there is none, or
    anything else reads the values."""
    shape = graph[name].shape
    while graph[name].op == "add" and len(edges := graph.out_edges[name]) == 1 and edges[0].dst != OUTPUT:
        name = edges[0].dst
        if graph[name].op != "add" or graph[name].shape != shape:
            return None
        if (before := _before_softmax(graph, name)) is not None:
            return before[1] if before[0] == name else None
    return None


def _masks(graph: Graph) -> set[str]:
    """The nodes of which all that is done with their values is to add them to inputs of a softmax, or to other masks,
    possibly in another shape."""
    found: set[str] = set()
    for node in reversed(list(graph)):
        edges = graph.out_edges[node.name]
        if edges and all(edge.dst != OUTPUT and _takes_masks(graph, edge.dst, found) for edge in edges):
            found.add(node.name)
    return found


def _takes_masks(graph: Graph, name: str, masks: Collection[str]) -> bool:
    """Whether what a node reads is a mask: it adds it to inputs of a softmax, or is a mask itself."""
    if graph[name].op == "add" and _before_softmax(graph, name) is not None:
        return True
    return graph[name].op in ("add", *_RESHAPES) and name in masks


def finite_masks(graph: Graph) -> dict[str, Tensor]:
    """The constants that are masks with numbers below `LOWEST_MASK`, such as -inf, which count as that."""
    masks = {name: graph.consts[name] for name in _masks(graph) & graph.consts.keys()}
    low = {name: mask for name, mask in masks.items() if mask.is_floating_point() and bool((mask < LOWEST_MASK).any())}
    return {name: mask.clamp_min(LOWEST_MASK) for name, mask in low.items()}


def _as_softmax_sees(value: Tensor, softmax: Node, span: float) -> Tensor:
    """The values, none of which lies more than a span below the largest of its row."""
    largest = value.amax(softmax.attrs["axis"], keepdim=True)
    return torch.maximum(value, largest - span / softmax.attrs.get("scale", 1.0))
