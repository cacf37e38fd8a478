"""CostRange: what a model costs at its most bits, at its fewest, and in float, before any data is seen.

Costs depend on bits, shapes and signatures. Of thresholds it only matters whether two scales are
equal, which then need no requantization; here all differ.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hago.cost import Cost
from hago.costing import float_cost, plan_cost
from hago.fitting import fitting, widest_fitting
from hago.graph import Graph
from hago.hardware import Hardware
from hago.ops import OPS, Ops
from hago.resolve import Resolver
from hago.schemes import Grid
from hago.space import Space
from hago.topology import Topology


class MadeUpThresholds:
    """Symmetric ranges, another power of two for every group."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._powers: dict[str, int] = {}

    def signed(self, key: str, source: str) -> bool:
        """Always."""
        return True

    def __call__(self, key: str, source: str, grid: Grid, channel_axis: int | None) -> tuple[Tensor, Tensor]:
        """The group's range, for every channel."""
        channels = 1 if channel_axis is None else self._graph.consts[source].shape[channel_axis]
        power = self._powers.setdefault(key, len(self._powers) % 32)
        end = torch.full((channels,), 2.0**power, dtype=torch.float64)
        return (-end if grid.signed else 0.0 * end), end


@dataclass(frozen=True, slots=True)
class CostRange:
    """Costs of three plans of one model.

    Args:
        widest, narrowest: of the space's points with the most and the fewest bits.
        floating: of the model on the float signatures of the hardware.
    """

    widest: Cost
    narrowest: Cost
    floating: Cost

    def to_json(self) -> dict[str, Any]:
        """JSON values: totals only."""
        parts = {"widest": self.widest, "narrowest": self.narrowest, "float": self.floating}
        totals: dict[str, Mapping[str, float]] = {name: dict(cost.figures) for name, cost in parts.items()}
        return {**totals, "missing": list(self.widest.missing)}


def static_resolver(graph: Graph, hardware: Hardware, topology: Topology, space: Space, ops: Ops = OPS) -> Resolver:
    """A Resolver whose plans have true costs and made-up scales."""
    return Resolver(graph, hardware, topology, space, MadeUpThresholds(graph), ops)


def cost_range(
    graph: Graph, hardware: Hardware, topology: Topology, space: Space, ops: Ops = OPS, batch: int = 1
) -> CostRange:
    """What the points at the ends of a space cost.

    Args:
        topology, space: of this graph on this hardware.
        batch: samples in one run.
    """
    resolver = static_resolver(graph, hardware, topology, space, ops)

    widest = widest_fitting(resolver)
    narrowest = fitting(resolver, space.narrowest()) or widest
    return CostRange(plan_cost(widest.plan, batch), plan_cost(narrowest.plan, batch), float_cost(widest.plan, batch))
