"""The search loop and what it needs: the protocol of a searcher, trials, the log, the budget. It knows no Plan."""

from hago.study.budget import Budget
from hago.study.interrupts import Interrupts, interruptible_job
from hago.study.log import (
    IMPLIED_OPTIONS,
    Header,
    Log,
    Notice,
    Trial,
    best_trial,
    is_log,
    make_header,
    read_header,
    read_log,
    space_hash,
    versions,
)
from hago.study.loop import StudyResult, run_study
from hago.study.score import Score
from hago.study.searcher import (
    Ask,
    Feeds,
    GeneratorSearcher,
    ScoresByPoint,
    Searcher,
    Steps,
    ask_score,
    point_key,
    random_generator,
    shifted,
)
from hago.study.trial_cache import PendingScore, Submit, infeasible_score, normalized
from hago.study.trial_front import TrialFront

__all__ = [
    "IMPLIED_OPTIONS",
    "Ask",
    "Budget",
    "Feeds",
    "GeneratorSearcher",
    "Header",
    "Interrupts",
    "Log",
    "Notice",
    "PendingScore",
    "Score",
    "ScoresByPoint",
    "Searcher",
    "Steps",
    "StudyResult",
    "Submit",
    "Trial",
    "TrialFront",
    "ask_score",
    "best_trial",
    "infeasible_score",
    "interruptible_job",
    "is_log",
    "make_header",
    "normalized",
    "point_key",
    "random_generator",
    "read_header",
    "read_log",
    "run_study",
    "shifted",
    "space_hash",
    "versions",
]
