"""Costs: the bytes, operations, cycles, latency and energy of a Plan on its hardware."""

from hago.cost.cost import METRICS, Cost, EdgeCost, Metric, NodeCost, float_cost, plan_cost
from hago.cost.report import CostRange, cost_range, cost_text

__all__ = [
    "METRICS",
    "Cost",
    "CostRange",
    "EdgeCost",
    "Metric",
    "NodeCost",
    "cost_range",
    "cost_text",
    "float_cost",
    "plan_cost",
]
