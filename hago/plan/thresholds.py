"""Where thresholds come from: an estimator over what was seen, ranges that were given, or a strategy."""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from typing import Final

import torch
from torch import Tensor

from hago.arithmetic.schemes import Grid
from hago.calibration.collect import Calibration
from hago.calibration.estimators import dorefa_of
from hago.calibration.statistics import Estimator, TensorStatistics
from hago.calibration.thresholds import ThresholdCache
from hago.errors import StrategyMismatch
from hago.graph.graph import Graph
from hago.hardware.hardware import Hardware
from hago.ops import OPS, Ops
from hago.plan.dorefa_weights import DoReFaThresholds, DoReFaWeights
from hago.plan.plan import Plan
from hago.plan.resolve import Resolver
from hago.plan.space import Space
from hago.plan.strategy import Strategy
from hago.plan.topology import Topology

#: What part of the largest value beside it the range of an operand is that was always 0.
_NOTHING: Final = 2.0**-24


class EstimatedThresholds:
    """Thresholds from an estimator over calibration statistics, or as they were given.

    An operand that was always 0 has no range, and stands for itself at any scale. Where it is joined to others on one
    scale, by an addition or a concat, it takes a range that is nothing beside theirs, so that theirs decides: a bias
    that was never trained, or a branch that training left at 0, would take all others with it.
    """

    def __init__(self, graph: Graph, calibration: Calibration, estimator: Estimator, ops: Ops = OPS) -> None:
        self._thresholds = ThresholdCache(calibration.statistics, graph.consts, estimator)
        self._given, self._consts, self._refined = calibration.given, graph.consts, calibration.refined
        self._beside = _joined(graph, ops)

    def with_refined(self, refined: Mapping[tuple[str, Grid], tuple[Tensor, Tensor]]) -> EstimatedThresholds:
        """The same with these instead of estimated ones, by group and grid; what was estimated is shared."""
        other = copy(self)
        other._refined = refined
        return other

    def with_statistics(self, statistics: Mapping[str, TensorStatistics]) -> EstimatedThresholds:
        """The same for other values of activations; what was estimated of constants is shared."""
        other = copy(self)
        other._thresholds = self._thresholds.with_statistics(statistics)
        return other

    def _row(self, key: str, source: str) -> str | None:
        return None if source in self._consts else self._given.named(key, source)

    def signed(self, key: str, source: str) -> bool:
        """Whether the node's values were ever negative."""
        row = self._row(key, source)
        return self._thresholds.range_of(source)[0] < 0.0 if row is None else self._given.signed(row)

    def __call__(self, key: str, source: str, grid: Grid, channel_axis: int | None) -> tuple[Tensor, Tensor]:
        """What the estimator says of the node, or was given for it, or was found to be better."""
        if (refined := self._refined.get((key, grid))) is not None:
            return refined[0].clone(), refined[1].clone()
        row = self._row(key, source)
        found = self._thresholds(source, grid, channel_axis) if row is None else self._given.thresholds(row, grid)
        return self._nothing(key, grid, found) if key in self._beside and not bool(found[1].any()) else found

    def _nothing(self, key: str, grid: Grid, found: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """The range of an operand that was never above 0, among those that share its scale."""
        lo, hi = found
        if bool(lo.any()):
            return found
        seen = [self._thresholds.range_of(s) for s in self._beside[key] if self._thresholds.knows(s)]
        largest = max((max(map(abs, ends)) for ends in seen), default=0.0)
        hi = torch.full_like(hi, _NOTHING * largest)
        return -hi if grid.signed else torch.zeros_like(hi), hi


def _joined(graph: Graph, ops: Ops) -> dict[str, tuple[str, ...]]:
    """By the edge, what arrives with it on one scale."""
    found: dict[str, tuple[str, ...]] = {}
    for node in graph:
        form = ops[node.op].integer if node.op in ops else None
        if form is not None and "common" in form.slots:
            edges = [e for e in node.edges if form.slot(e.slot) == "common"]
            found |= {str(e): tuple(graph.source(e) for e in edges) for e in edges}
    return found


def estimated_resolver(
    graph: Graph,
    hardware: Hardware,
    topology: Topology,
    space: Space,
    calibration: Calibration,
    estimator: Estimator,
    ops: Ops = OPS,
) -> Resolver:
    """A Resolver with thresholds, and where the estimator is DoReFa's also weights, from what was seen.

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
    """Thresholds as a strategy stores them.

    Raises:
        StrategyMismatch: a key that the strategy does not hold, or other channels than the model's.
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
        channels = 1 if channel_axis is None else self._graph.consts[source].shape[channel_axis]
        if lo.numel() != channels:
            raise StrategyMismatch(
                f"the strategy holds thresholds of {lo.numel()} channels for edge {key!r}; this model on this hardware "
                f"has {channels} there: it was edited, or made for another model"
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
    values = [float(v) for v in end.flatten()]
    return values[0] if len(values) == 1 else tuple(values)
