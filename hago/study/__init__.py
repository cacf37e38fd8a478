"""The search loop and what it needs: the protocol of a searcher, trials, the log, the budget. It knows no Plan."""

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
