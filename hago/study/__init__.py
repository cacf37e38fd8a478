"""The search loop, which knows no Plan: trials, log, budget, resume, and the protocol of a searcher."""

from hago.study.budget import Budget
from hago.study.log import Trial, read_log
from hago.study.searcher import Score, Searcher

__all__ = [
    "Budget",
    "Score",
    "Searcher",
    "Trial",
    "read_log",
]
