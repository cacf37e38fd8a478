"""Costs of a model before calibration (`cost_range`, for `hago.api.explain_cost`), and costs as text for the
command line.

Costs depend on bits, shapes and signatures. Of thresholds it only matters whether two scales are equal, which then need
no requantization; the made-up thresholds here differ between any 32 groups in a row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from hago.arithmetic.schemes import Grid
from hago.cost.cost import METRICS, Cost, EdgeCost, NodeCost, float_cost, plan_cost, rows_of
from hago.graph import Graph
from hago.hardware import Hardware
from hago.plan import Resolver, Space, Topology
from hago.plan.feasibility import nearest_feasible, widest_feasible
from hago.serialization.text_table import count, head, number, table, tail, wrapped


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
        channels = 1 if channel_axis is None else self._graph.consts[source].shape[channel_axis]
        power = self._powers.setdefault(key, len(self._powers) % 32)
        end = torch.full((channels,), 2.0**power, dtype=torch.float64)
        return (-end if grid.signed else 0.0 * end), end


@dataclass(frozen=True, slots=True)
class CostRange:
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


# ---------------------------------------------------------------- as text

_SIZES: Final = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))
_TIMES: Final = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns"))
_JOULES: Final = ((1.0, "J"), (1e-3, "mJ"), (1e-6, "uJ"), (1e-9, "nJ"))


def amount_text(metric: str, value: float) -> str:
    """A total with its unit, in three or four digits."""
    unit = METRICS[metric].unit
    if unit == "B":
        return _scaled(value, (*_SIZES, (1, "B")))
    if unit in ("s", "J"):
        return _scaled(value, _TIMES if unit == "s" else _JOULES)
    if unit == "bits":
        return f"{value:.4g} bits"
    return f"{count(round(value))}{' cycles' if unit else ''}"


def _scaled(value: float, units: Sequence[tuple[float, str]]) -> str:
    for size, name in units:
        if value >= size:
            return f"{value / size:.4g} {name}"
    return f"{value / units[-1][0]:.4g} {units[-1][1]}"


def cost_text(cost: Cost) -> str:
    """Every node with what happens on its edges, and the totals."""
    titles = ("node", "op", "signature", "MACs", "BOPs", "bits of its edges", "weights", "moved", "cycles", "of edges")
    rows = [_row(node, edges) for node, edges in rows_of(cost)]
    right = ("MACs", "BOPs", "weights", "moved", "cycles", "of edges")
    title = f"cost on {cost.hardware}, batch {cost.batch}"
    return "\n".join([title, "", *table(titles, rows, right), "", *_totals({"": cost.figures}), *_missing(cost)])


def _row(node: NodeCost, edges: Sequence[EdgeCost]) -> tuple[str, ...]:
    edge_cycles = [e.cycles for e in edges if e.cycles is not None]
    return (
        tail(node.node, 36),
        head(node.op, 24),
        head(node.signature, 24),
        count(node.macs) if node.macs else "",
        count(node.bops) if node.bops else "",
        " ".join(_edge(e) for e in edges),
        count(sum(e.weight_bytes for e in edges)) if any(e.weight_bytes for e in edges) else "",
        count(node.read_bytes + node.write_bytes),
        number(node.cycles, 4),
        number(sum(edge_cycles), 4) if edge_cycles else "",
    )


def _edge(edge: EdgeCost) -> str:
    """The bits of an edge, `f` for real values; with a `>` if the edge is converted while the model runs: `>8`."""
    bits = "f" if edge.dtype.startswith(("float", "bfloat")) else str(edge.bits)
    return f">{bits}" if edge.requantized else bits


def range_text(costs: CostRange) -> str:
    """The totals of a CostRange side by side."""
    columns = {"most bits": costs.widest, "fewest bits": costs.narrowest, "float": costs.floating}
    lines = _totals({name: cost.figures for name, cost in columns.items()})
    return "\n".join([f"cost on {costs.widest.hardware}, batch {costs.widest.batch}", *lines, *_missing(costs.widest)])


def _totals(columns: Mapping[str, Mapping[str, float]]) -> list[str]:
    known = [m for m in METRICS if any(m in figures for figures in columns.values())]
    rows = [(m, *(amount_text(m, f[m]) if m in f else "-" for f in columns.values())) for m in known]
    return table(("total", *columns), rows, right=tuple(columns))


def _missing(cost: Cost) -> list[str]:
    if not cost.missing:
        return []
    missing = "; ".join(cost.missing)
    return [
        "",
        *wrapped(f"not in {cost.hardware}, and so not counted, which makes cycles and energy lower bounds: {missing}"),
    ]
