"""Costs of a model before calibration: `cost_range`, for `hago.api.explain_cost`.

Costs depend on bits, shapes and signatures. Of thresholds it only matters whether two scales are equal, which then need
no requantization; the made-up thresholds here differ between any 32 groups in a row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hago.arithmetic.schemes import Grid
from hago.cost.cost import Cost, amount_text, float_cost, missing_lines, plan_cost, totals_lines
from hago.graph import Graph
from hago.hardware import Hardware
from hago.plan import Resolver, Space, Topology
from hago.plan.feasibility import nearest_feasible, widest_feasible
from hago.serialization.summary import Summarized, Summary


class MadeUpThresholds:
    """A ThresholdSource of symmetric ranges, each a power of two that differs from those of the 31 groups before it."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._powers: dict[str, int] = {}

    def signed(self, key: str, source: str) -> bool:
        """True: the ranges are symmetric."""
        return True

    def __call__(self, key: str, source: str, grid: Grid, channel_axis: int | None) -> tuple[Tensor, Tensor]:
        """The group's range, for every channel."""
        shape = () if channel_axis is None else self._graph.consts[source].shape
        power = self._powers.setdefault(key, len(self._powers) % 32)
        end = torch.full((grid.thresholds_of(shape, channel_axis),), 2.0**power, dtype=torch.float64)
        return (-end if grid.signed else 0.0 * end), end


@dataclass(frozen=True, slots=True, repr=False)
class CostRange(Summarized):
    """The costs of three Plans of one model.

    Args:
        widest, narrowest: costs of the feasible points with the most and the fewest bits.
        floating: cost of the model on the float signatures of the hardware.
    """

    widest: Cost
    narrowest: Cost
    floating: Cost

    def to_json(self) -> dict[str, Any]:
        """JSON values: totals only."""
        parts = {"widest": self.widest, "narrowest": self.narrowest, "float": self.floating}
        totals: dict[str, Mapping[str, float]] = {name: dict(cost.figures) for name, cost in parts.items()}
        return {**totals, "missing": list(self.widest.missing)}

    def summary(self) -> Summary:
        """Each total from the fewest to the most bits, and in float."""
        low, high, real = (cost.figures for cost in (self.narrowest, self.widest, self.floating))
        facts = {}
        for metric in high:
            texts = dict.fromkeys(amount_text(metric, part[metric]) for part in (low, high) if metric in part)
            in_float = f"; {amount_text(metric, real[metric])} in float" if metric in real else ""
            facts[metric] = " to ".join(texts) + in_float
        title = f"CostRange from the fewest to the most bits on {self.widest.hardware}, batch {self.widest.batch}"
        return Summary(title, facts)

    def __str__(self) -> str:
        columns = {"most bits": self.widest, "fewest bits": self.narrowest, "float": self.floating}
        lines = totals_lines({name: cost.figures for name, cost in columns.items()})
        head = f"cost on {self.widest.hardware}, batch {self.widest.batch}"
        return "\n".join([head, *lines, *missing_lines(self.widest)])


def static_resolver(graph: Graph, hardware: Hardware, topology: Topology, space: Space) -> Resolver:
    """A Resolver that needs no calibration: its Plans have made-up scales."""
    return Resolver(graph, hardware, topology, space, MadeUpThresholds(graph), hardware.known_ops)


def cost_range(graph: Graph, hardware: Hardware, topology: Topology, space: Space, batch: int = 1) -> CostRange:
    """The costs of the feasible points with the most and the fewest bits, and of the float model.

    Args:
        topology, space: of this graph on this hardware.
        batch: samples in one run.
    """
    resolver = static_resolver(graph, hardware, topology, space)
    widest = widest_feasible(resolver)
    narrowest = nearest_feasible(resolver, space.narrowest()) or widest
    return CostRange(plan_cost(widest.plan, batch), plan_cost(narrowest.plan, batch), float_cost(widest.plan, batch))
