"""Reports on models, strategies and machines: inspection, explanation, comparison, the answer that commands end with,
and timing of a CPU's hardware file.

An inspection (`inspect`) splits the error of every node by cause (`error_causes`) and gives a table
(`graph_statistic`).
"""

from hago.analysis.explain import Explanation, explain_topology
from hago.analysis.graph_statistic import GraphStatistic, NodeStatistic, cause_in_words
from hago.analysis.hardware_timing import measure_hardware
from hago.analysis.inspect import inspect_plan
from hago.analysis.machine import examine_machine
from hago.analysis.remedies import Change, Remedies, find_remedies, given_options

__all__ = [
    "Change",
    "Explanation",
    "GraphStatistic",
    "NodeStatistic",
    "Remedies",
    "answer",
    "cause_in_words",
    "comparison",
    "examine_machine",
    "explain_topology",
    "find_remedies",
    "given_options",
    "inspect_plan",
    "measure_hardware",
    "speed",
    "stored_run",
    "strategy_comparison",
    "strategy_report",
]
