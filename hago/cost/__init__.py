"""Costs: the bytes, operations, cycles, latency and energy of a Plan on its hardware."""

from hago.cost.cost import (
    METRICS,
    Cost,
    EdgeCost,
    Metric,
    NodeCost,
    Part,
    Row,
    Unit,
    amount_text,
    float_cost,
    metric_named,
    node_macs,
    plan_cost,
    prices_float,
)
from hago.cost.report import CostRange, cost_range

__all__ = [
    "METRICS",
    "Cost",
    "CostRange",
    "EdgeCost",
    "Metric",
    "NodeCost",
    "Part",
    "Row",
    "Unit",
    "amount_text",
    "cost_range",
    "float_cost",
    "metric_named",
    "node_macs",
    "plan_cost",
    "prices_float",
]
