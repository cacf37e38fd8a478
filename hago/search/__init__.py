"""One search of one model on one chip: prepare, measure sensitivities, refine thresholds, evaluate, replay."""

from hago.search import objective
from hago.search.continuation import is_of_a_cost, logged_gains
from hago.search.correcting import (
    CORRECTIONS,
    DEFAULT_CORRECTIONS,
    correct,
    correct_point,
    logged_corrections,
    of_seconds,
)
from hago.search.earlier_logs import LogPath, hashes_of
from hago.search.effort import DEFAULT_EFFORT, EFFORTS, Effort, effort_of, logged_effort, named_effort
from hago.search.evaluate import Evaluator, Measurement, held_out_figures, thresholds_sha256
from hago.search.goal import (
    FRONT_COST,
    Goal,
    GoalOptions,
    Limit,
    normalized_limit,
    normalized_limits,
    parse_limits,
    resolved_text,
)
from hago.search.intervals import (
    paired_difference,
    paired_interval,
    quick_interval,
    share_difference,
    wilson_interval,
)
from hago.search.measured_point import MeasuredPoint, sqnr_evaluator
from hago.search.narrow_biases import warn_of_narrow_biases
from hago.search.one_shot import OneShot, quantize_and_measure, quantize_in_one_shot
from hago.search.pareto_front import ParetoFront, load_front
from hago.search.preparation import (
    Prepared,
    QuantizationOptions,
    import_with_held_out,
    prepare,
    with_search_topology,
)
from hago.search.quantizer import Quantizer
from hago.search.racing import RaceOptions
from hago.search.reachability import FRONT_SEARCHERS
from hago.search.replay import Replay, logged_front_cost, logged_scorer, replay_log, replay_strategy
from hago.search.running import RunningSearch, SearchCallback, check_callbacks
from hago.search.sensitivity import SENSITIVITY_VERSION, Sensitivity, sensitivity_of
from hago.search.session import (
    RunOptions,
    SearchOptions,
    SearchOutcome,
    SearchScore,
    continued,
    for_training,
    run_search,
)
from hago.search.stored_strategy import (
    chosen_estimator,
    is_one_shot,
    make_strategy,
    passes_of,
    plan_and_batches,
    plan_of,
    stored_resolver,
)

__all__ = [
    "CORRECTIONS",
    "DEFAULT_CORRECTIONS",
    "DEFAULT_EFFORT",
    "EFFORTS",
    "FRONT_COST",
    "FRONT_SEARCHERS",
    "SENSITIVITY_VERSION",
    "Effort",
    "Evaluator",
    "Goal",
    "GoalOptions",
    "Limit",
    "LogPath",
    "MeasuredPoint",
    "Measurement",
    "OneShot",
    "ParetoFront",
    "Prepared",
    "QuantizationOptions",
    "Quantizer",
    "RaceOptions",
    "Replay",
    "RunOptions",
    "RunningSearch",
    "SearchCallback",
    "SearchOptions",
    "SearchOutcome",
    "SearchScore",
    "Sensitivity",
    "check_callbacks",
    "chosen_estimator",
    "continued",
    "correct",
    "correct_point",
    "effort_of",
    "for_training",
    "hashes_of",
    "held_out_figures",
    "import_with_held_out",
    "is_of_a_cost",
    "is_one_shot",
    "load_front",
    "logged_corrections",
    "logged_effort",
    "logged_front_cost",
    "logged_gains",
    "logged_scorer",
    "make_strategy",
    "named_effort",
    "normalized_limit",
    "normalized_limits",
    "objective",
    "of_seconds",
    "paired_difference",
    "paired_interval",
    "parse_limits",
    "passes_of",
    "plan_and_batches",
    "plan_of",
    "prepare",
    "quantize_and_measure",
    "quantize_in_one_shot",
    "quick_interval",
    "replay_log",
    "replay_strategy",
    "resolved_text",
    "run_search",
    "sensitivity_of",
    "share_difference",
    "sqnr_evaluator",
    "stored_resolver",
    "thresholds_sha256",
    "warn_of_narrow_biases",
    "wilson_interval",
    "with_search_topology",
]
