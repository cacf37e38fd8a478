"""The sources of a Resolver's thresholds: estimated in calibration or given by the user (`EstimatedThresholds`), or
stored in a strategy (`StoredThresholds`).
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from typing import Final

import torch
from torch import Tensor

from hago.arithmetic.schemes import Grid
from hago.calibration import Calibration, Estimator, TensorStatistics, ThresholdCache, dorefa_of, finite_masks
from hago.errors import StrategyMismatch
from hago.graph import Graph
from hago.hardware import Hardware
from hago.ops import OPS, Ops
from hago.plan.dorefa_weights import DoReFaThresholds, DoReFaWeights
from hago.plan.plan import Plan
from hago.plan.resolve import Resolver
from hago.plan.space import Space
from hago.plan.strategy import Strategy
from hago.plan.topology import Topology

#: The range of an operand that was always 0, relative to the largest value of the operands that share its scale.
_NEGLIGIBLE: Final = 2.0**-24


class EstimatedThresholds:
    """A ThresholdSource over calibration statistics. A threshold is, in this order, the refined one, the range that the
    user gave, or the estimator's. `search.prepare` makes one together with the Resolver.

    An operand that was always 0 is exact at any scale. Where it shares a scale with others, in an addition or a concat,
    it gets a range that is negligible beside theirs. Otherwise a bias that was never trained, or a branch that training
    left at 0, would determine the scale of all.
    """

    def __init__(self, graph: Graph, calibration: Calibration, estimator: Estimator, ops: Ops = OPS) -> None:
        consts = {**graph.consts, **finite_masks(graph)}
        self._thresholds = ThresholdCache(calibration.statistics, consts, estimator, calibration.channel_bins)
        self._given, self._consts, self._refined = calibration.given, graph.consts, calibration.refined
        self._sharing_scale = _sharing_scale(graph, ops)

    def with_refined(self, refined: Mapping[tuple[str, Grid], tuple[Tensor, Tensor]]) -> EstimatedThresholds:
        """A source with these refined thresholds, by group and grid; estimates are shared."""
        other = copy(self)
        other._refined = refined
        return other

    def with_statistics(self, statistics: Mapping[str, TensorStatistics]) -> EstimatedThresholds:
        """A source with other statistics of activations; estimates of constants are shared."""
        other = copy(self)
        other._thresholds = self._thresholds.with_statistics(statistics)
        return other

    def _name_of_given_range(self, key: str, source: str) -> str | None:
        """The node or edge by which the user gave a range for the group; None where none is given."""
        return None if source in self._consts else self._given.named(key, source)

    def signed(self, key: str, source: str) -> bool:
        """Whether the node's values were ever negative."""
        row = self._name_of_given_range(key, source)
        return self._thresholds.range_of(source)[0] < 0.0 if row is None else self._given.signed(row)

    def __call__(self, key: str, source: str, grid: Grid, channel_axis: int | None) -> tuple[Tensor, Tensor]:
        """(lo, hi) of a group on a grid; see ThresholdSource."""
        if (refined := self._refined.get((key, grid))) is not None:
            return refined[0].clone(), refined[1].clone()
        row = self._name_of_given_range(key, source)
        ends = self._thresholds(source, grid, channel_axis) if row is None else self._given.thresholds(row, grid)
        was_always_zero = key in self._sharing_scale and not any(bool(end.any()) for end in ends)
        return self._negligible(key, grid, ends[1]) if was_always_zero else ends

    def _negligible(self, key: str, grid: Grid, zeros: Tensor) -> tuple[Tensor, Tensor]:
        """A range of the shape of `zeros` that is negligible beside those of the operands that share its scale."""
        ranges = [self._thresholds.range_of(s) for s in self._sharing_scale[key] if self._thresholds.knows(s)]
        largest = max((max(map(abs, pair)) for pair in ranges), default=0.0)
        hi = torch.full_like(zeros, _NEGLIGIBLE * largest)
        return -hi if grid.signed else torch.zeros_like(hi), hi


def _sharing_scale(graph: Graph, ops: Ops) -> dict[str, tuple[str, ...]]:
    """By edge, the sources of all edges that share its scale."""
    sources: dict[str, tuple[str, ...]] = {}
    for node in graph:
        form = ops[node.op].integer if node.op in ops else None
        if form is not None and "common" in form.slots:
            edges = [e for e in node.edges if form.slot(e.slot) == "common"]
            sources |= {str(e): tuple(graph.source(e) for e in edges) for e in edges}
    return sources


def estimated_resolver(
    graph: Graph,
    hardware: Hardware,
    topology: Topology,
    space: Space,
    calibration: Calibration,
    estimator: Estimator,
    ops: Ops = OPS,
) -> Resolver:
    """Make a Resolver with thresholds from calibration, and with DoReFa's weights if the estimator is DoReFa's.

    Raises:
        HagoError: the hardware cannot hold DoReFa's weights.
    """
    source, scheme = EstimatedThresholds(graph, calibration, estimator, ops), dorefa_of(estimator)
    if scheme is None:
        return Resolver(graph, hardware, topology, space, source, ops)
    weights = DoReFaWeights(graph, hardware, scheme, ops)
    thresholds = DoReFaThresholds(weights, source, graph)
    return Resolver(graph, hardware, topology, space, thresholds, ops, constants=weights)


class StoredThresholds:
    """A ThresholdSource with the thresholds of a strategy. Made when a strategy is replayed or applied.

    Raises:
        StrategyMismatch: a call for a key that the strategy lacks, or whose number of channels is not the model's.
    """

    def __init__(self, graph: Graph, strategy: Strategy) -> None:
        self._graph = graph
        self._pairs = {k: (_tensor(lo), _tensor(hi)) for k, (lo, hi) in strategy.thresholds.items()}

    def signed(self, key: str, source: str) -> bool:
        """Whether the stored range goes below 0."""
        return bool((self._pair(key)[0] < 0).any())

    def __call__(self, key: str, source: str, grid: Grid, channel_axis: int | None) -> tuple[Tensor, Tensor]:
        """The stored pair."""
        lo, hi = self._pair(key)
        of_const = () if channel_axis is None else self._graph.consts[source].shape
        count = grid.thresholds_of(of_const, channel_axis)
        if lo.numel() != count:
            parts = "channels" if grid.group is None else f"groups of {grid.group} entries"
            raise StrategyMismatch(
                f"the strategy holds thresholds of {lo.numel()} {parts} for edge {key!r}; this model on this hardware "
                f"has {count} there; it was edited, or made for another model"
            )
        return lo, hi

    def _pair(self, key: str) -> tuple[Tensor, Tensor]:
        if key not in self._pairs:
            raise StrategyMismatch(f"the strategy holds no threshold for edge {key!r}; it was made for another model")
        return self._pairs[key]


def _tensor(end: float | tuple[float, ...]) -> Tensor:
    return torch.tensor(end if isinstance(end, tuple) else [end], dtype=torch.float64)


def store_thresholds(plan: Plan) -> dict[str, tuple[float | tuple[float, ...], float | tuple[float, ...]]]:
    """A Plan's thresholds as a strategy stores them."""
    return {k: (_numbers(lo), _numbers(hi)) for k, (lo, hi) in plan.thresholds.items()}


def _numbers(end: Tensor) -> float | tuple[float, ...]:
    values = end.flatten().tolist()
    return values[0] if len(values) == 1 else tuple(values)
