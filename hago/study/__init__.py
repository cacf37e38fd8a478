"""The search loop and what it needs: the protocol of a searcher, trials, the log, the budget. It knows no Plan."""

from hago.study.budget import Budget
from hago.study.front import Front
from hago.study.interrupts import Interrupts
from hago.study.log import Header, Log, Notice, Trial, make_header, read_header, read_log, versions
from hago.study.progress import Preliminaries
from hago.study.searcher import (
    Ask,
    Feeds,
    GeneratorSearcher,
    Score,
    ScoresByPoint,
    Searcher,
    Steps,
    generator,
    measure,
    point_key,
    shifted,
)
from hago.study.study import StudyResult, run_study
from hago.study.trial_cache import PendingScore, Submit

__all__ = [
    "Ask",
    "Budget",
    "Feeds",
    "Front",
    "GeneratorSearcher",
    "Header",
    "Interrupts",
    "Log",
    "Notice",
    "PendingScore",
    "Preliminaries",
    "Score",
    "ScoresByPoint",
    "Searcher",
    "Steps",
    "StudyResult",
    "Submit",
    "Trial",
    "generator",
    "make_header",
    "measure",
    "point_key",
    "read_header",
    "read_log",
    "run_study",
    "shifted",
    "versions",
]
