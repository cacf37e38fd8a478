"""Reports on models and strategies: inspection, explanation, comparison, and timing of a CPU's hardware file.

An inspection (`inspect`) splits the error of every node by cause (`error_causes`) and gives a table
(`graph_statistic`).
"""

from hago.analysis.explain import Explanation, explain_topology
from hago.analysis.graph_statistic import GraphStatistic
from hago.analysis.hardware_timing import measure_hardware
from hago.analysis.inspect import inspect_plan

__all__ = [
    "Explanation",
    "GraphStatistic",
    "comparison",
    "explain_topology",
    "inspect_plan",
    "measure_hardware",
    "speed",
    "stored_run",
    "strategy_comparison",
    "strategy_report",
]
