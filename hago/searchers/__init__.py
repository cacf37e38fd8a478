"""The search algorithms. Each proposes points of a Space and is told their scores; `registry` lists them by name."""

from hago.searchers.knapsack import Knapsack
from hago.searchers.optuna import (
    close_storage,
    hide_password,
    open_storage,
    storage_errors,
    study_numbers,
    trial_outcome,
)
from hago.searchers.registry import (
    AUTO,
    SEARCHERS,
    Refines,
    SearcherEntry,
    check_racing,
    check_seed,
    make_options,
    make_searcher,
    parse_searcher,
    searcher_text,
)
from hago.searchers.repair import feeds_of
from hago.searchers.surrogate import CostConstraint, Surrogate, Term

__all__ = [
    "AUTO",
    "SEARCHERS",
    "CostConstraint",
    "Knapsack",
    "Refines",
    "SearcherEntry",
    "Surrogate",
    "Term",
    "check_racing",
    "check_seed",
    "close_storage",
    "feeds_of",
    "hide_password",
    "make_options",
    "make_searcher",
    "open_storage",
    "parse_searcher",
    "searcher_text",
    "storage_errors",
    "study_numbers",
    "trial_outcome",
]
