"""The trials of a log as a report shows them: columns, the front, what every move of the searcher gained, and what
fewer bits cost. All of it is read from the log alone, so that the page of a running search is cheap."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, Literal

from hago.plan import Bits
from hago.report.amounts import STORED
from hago.report.document import AskedGoal, FewerBits, Figure, Move, SearchStory, Trials, rounded
from hago.report.goals import allowances, asked_goal, kept_by, misses
from hago.search import logged_front_cost
from hago.search.objective import OBJECTIVES, Objective
from hago.serialization.summary import measure_name
from hago.serialization.text_table import counted
from hago.study import Header, Trial, TrialFront, best_trial

#: The most digits of bits that a report holds; of longer logs, only trials of the front keep their bits.
MOST_BITS: Final = 1_000_000
#: The most reasons that are listed one by one; where a searcher gives more, those with the same first word are joined.
MOST_MOVES: Final = 40
#: The most bits on average that the list of what fewer bits cost begins with.
MOST_MEAN: Final = 8
#: The corrections that are made of the strategy that was found, after all trials.
_OF_LAYERS: Final = frozenset(("rounding", "bias", "affine", "reconstruction"))
_DIGITS: Final = "0123456789abcdefghijklmnopqrstuvwxyz"


def with_stored_bytes(columns: Trials, stored: Mapping[int, float]) -> Trials:
    """The columns with the bytes that some trials take as stored; the same columns where no trial has them."""
    if not stored:
        return columns
    column = tuple(rounded(stored.get(i)) for i in range(len(columns.value)))
    names = list(columns.costs)
    names.insert(names.index("weight_bytes") + 1 if "weight_bytes" in names else len(names), STORED)
    costs = {**columns.costs, STORED: column}
    return replace(columns, costs={name: costs[name] for name in names})


def measure_figure(name: str, own: Objective | None = None) -> Figure:
    """The figure that trials are judged by, with its title and unit.

    Args:
        name: of the objective.
        own: the objective, where it is one of the user's own.
    """
    objective = own or OBJECTIVES.get(name)
    figure = name if objective is None else objective.figure
    title = measure_name(figure)
    if objective is not None and objective.is_loss:
        title = f"negative {title}"  # as the log has it: more is better
    return Figure(figure, title, "" if objective is None else objective.unit)


def columns_of(
    header: Header,
    trials: Sequence[Trial],
    taken: Bits | None = None,
    results: Mapping[str, Any] | None = None,
    own: Objective | None = None,
) -> Trials:
    """The trials of a log, by column.

    Args:
        taken: the bits of the strategy that the search gave, where that is known.
        results: its figures on the data of the search, with all corrections.
        own: the objective, where it is one of the user's own.
    """
    measure, cost = measure_figure(str(header.objective), own).name, logged_front_cost(header)
    front = TrialFront(measure, cost)
    gains: list[float | None] = []
    highest: Trial | None = None
    for trial in trials:
        front.add(trial)
        if _is_taken(trial) and (highest is None or trial.score.rank > highest.score.rank):
            gains.append(rounded(_value(trial, measure) - _value(highest, measure)) if highest is not None else 0.0)
            highest = trial
        else:
            gains.append(None)
    best = next((trial for trial in trials if taken is not None and trial.bits == taken), None)
    if best is None:
        best = best_trial(trials, float(header.searcher.get("options", {}).get("tolerance") or 0.0))
        best = best if best is not None and best.score.accepted else None
    goal = asked_goal(header.settings, str(header.objective), own)
    kept = kept_by(goal, results or {})
    groups = tuple(trials[0].bits) if trials else ()
    on_front = {trial.index for trial in front.trials}
    is_long = len(trials) * len(groups) > MOST_BITS
    reasons = {trial.why: None for trial in trials}
    number_of = {why: i for i, why in enumerate(reasons)}
    names = list(dict.fromkeys([cost, *(name for trial in trials for name in trial.score.costs)]))
    return Trials(
        groups=groups,
        value=tuple(rounded(_value(t, measure)) for t in trials),
        low=tuple(rounded(t.score.interval[0]) if t.score.interval else None for t in trials),
        high=tuple(rounded(t.score.interval[1]) if t.score.interval else None for t in trials),
        costs={name: tuple(rounded(t.score.costs.get(name)) for t in trials) for name in names},
        bits=tuple("" if is_long and t.index not in on_front else bits_text(t.bits, groups) for t in trials),
        same_as=tuple(t.same_as for t in trials),
        why=tuple(reasons),
        reason=tuple(number_of[t.why] for t in trials),
        seconds=tuple(round(t.seconds, 3) for t in trials),
        elapsed=tuple(round(t.elapsed, 3) for t in trials),
        gain=tuple(gains),
        rejected=tuple("" if t is best else _why_rejected(t, goal) for t in trials),
        front=tuple(t.index for t in front.trials),
        front_cost=cost,
        best=None if best is None else best.index,
        best_note="" if best is None else _why_taken(best, goal, kept),
    )


def bits_text(bits: Mapping[str, int], groups: Sequence[str]) -> str:
    """The bits of every group, a digit of base 36 each."""
    return "".join(_DIGITS[min(bits[group], len(_DIGITS) - 1)] for group in groups)


def story_of(
    header: Header,
    trials: Sequence[Trial],
    columns: Trials,
    passes: Sequence[Mapping[str, Any]],
    own: Objective | None = None,
    *,
    running: bool,
) -> SearchStory:
    """The course of a search.

    Args:
        columns: of the same trials.
        passes: what corrections gained, where a strategy has more of them than the log.
        own: of `columns_of`.
    """
    corrections = header.settings.get("corrections")
    logged = corrections.get("passes", ()) if isinstance(corrections, Mapping) else ()
    of, means = _mean_bits(trials, columns)
    return SearchStory(
        settings=_settings(header, asked_goal(header.settings, str(header.objective), own)),
        moves=_moves(trials, columns),
        time=_time(trials),
        passes=tuple(passes or logged),
        fewer=_fewer_bits(trials, columns, means),
        fewer_of=of,
        uncorrected=any(_corrects_layers(each) for each in passes or logged),
        running=running,
    )


# ---------------------------------------------------------------- parts
def _corrects_layers(made: Mapping[str, Any]) -> bool:
    """Whether a pass of corrections was made of the strategy that was found, after all trials, and kept."""
    names = (str(name).partition(":")[0] for name in made.get("names", ()))
    return bool(made.get("kept")) and not _OF_LAYERS.isdisjoint(names)


def _is_taken(trial: Trial) -> bool:
    return trial.score.accepted and not trial.score.dropped and trial.same_as is None


def _value(trial: Trial, measure: str) -> float:
    value = trial.results.get(measure, trial.score.value)
    return float(value) if isinstance(value, (int, float)) else math.nan


def _why_rejected(trial: Trial, goal: AskedGoal | None) -> str:
    """Why a trial cannot be taken as it is; empty where it can."""
    score = trial.score
    if score.infeasible:
        return score.infeasible
    if score.dropped:
        return f"stopped early: {score.dropped.get('because', 'worse')}"
    if score.overflows:
        return f"overflows at {len(score.overflows)} nodes"
    if not score.shortfall:
        return ""
    return "; ".join(misses(goal, {**trial.results, **score.costs})) or "violates a limit"


def _why_taken(best: Trial, goal: AskedGoal | None, kept: bool | None) -> str:
    """Why the trial that the search gave is taken although it misses limits as it is; empty where it does not.

    Args:
        kept: whether the limits hold for what the search gave; None where that is not known.
    """
    text = _why_rejected(best, goal)
    if not text:
        return ""
    limits = "the limit" if goal is not None and len(goal.limits) == 1 else "the limits"
    how = {True: f": corrected, it keeps {limits}", False: f": corrected, it misses {limits}"}
    return f"{text}; taken all the same{'' if kept is None else how[kept]}"


def _effort_in_words(record: Mapping[str, Any]) -> str:
    """The name of an effort, and how many samples it looked at where these are not all."""
    samples = record.get("samples")
    return str(record.get("name", "")) + ("" if samples is None else f", on at most {counted(samples, 'sample')}")


def _settings(header: Header, goal: AskedGoal | None) -> dict[str, str]:
    """What the header says of the search, in words."""
    options = ", ".join(f"{k}={v}" for k, v in header.searcher.get("options", {}).items() if v not in ("", None))
    effort = header.settings.get("effort")
    limits = header.settings.get("limits_given") or header.settings.get("limits") or ()
    words = {
        "searcher": f"{header.searcher['name']}{f' ({options})' if options else ''}",
        "objective": str(header.objective),
        "minimized": str(header.settings.get("minimize") or ""),
        "limits": ", ".join(map(str, limits)),
        "before corrections": ", ".join(allowances(goal)),
        "estimator": str(header.estimator),
        "effort": _effort_in_words(effort) if isinstance(effort, Mapping) else "",
        "kept float": ", ".join(header.keep_float),
        "fixed bits": ", ".join(f"{pattern}={bits}" for pattern, bits in header.fix_bits.items()),
        "choices": f"{header.space['groups']} groups of edges, {_size(header.space['choices'])} points",
        "seed": str(header.seed),
    }
    return {name: text for name, text in words.items() if text}


def _size(choices: Any) -> str:
    return f"{choices:.3g}" if isinstance(choices, (int, float)) and choices < 1e300 else "more than 1e+300"


def _moves(trials: Sequence[Trial], columns: Trials) -> tuple[Move, ...]:
    names = [trial.why or "no reason given" for trial in trials]
    for cut in (":", " "):
        if len(set(names)) > MOST_MOVES:
            names = [name.partition(cut)[0] for name in names]
    front = set(columns.front)
    moves = []
    for why in dict.fromkeys(names):
        own = [trial for trial, name in zip(trials, names, strict=True) if name == why]
        gained = [columns.gain[t.index] or 0.0 for t in own]
        moves.append(
            Move(
                why=why,
                trials=len(own),
                repeats=sum(t.same_as is not None for t in own),
                gain=rounded(sum(gained)) or 0.0,
                front=sum(t.index in front for t in own),
                seconds=round(sum(t.seconds for t in own), 3),
            )
        )
    return tuple(moves)


def _time(trials: Sequence[Trial]) -> dict[str, float]:
    """Where the time of a search went, as far as its log says."""
    if not trials:
        return {}
    before = max(0.0, trials[0].elapsed - trials[0].seconds)
    evaluating, total = sum(t.seconds for t in trials), trials[-1].elapsed
    parts = {"before the first trial": before, "evaluating trials": evaluating}
    # trials that are scored at the same time take less time together than their sum
    between = total - before - evaluating
    parts |= {"between trials": between} if between >= 0.0 else {}
    return {name: round(seconds, 3) for name, seconds in {**parts, "in all": total}.items()}


def _mean_bits(trials: Sequence[Trial], columns: Trials) -> tuple[Literal["weights", "edges"], list[float]]:
    """What the mean of bits is over, and that of every trial; see `SearchStory.fewer_of`."""
    weights = columns.costs.get("effective_bits", ())
    if weights and all(bits is not None for bits in weights) and min(map(_number, weights)) <= MOST_MEAN:
        return "weights", [_number(bits) for bits in weights]
    varied = [group for group in columns.groups if len({trial.bits[group] for trial in trials}) > 1]
    if not varied:
        return "edges", [math.inf] * len(trials)
    return "edges", [sum(trial.bits[group] for group in varied) / len(varied) for trial in trials]


def _number(value: float | None) -> float:
    return math.inf if value is None else value


def _fewer_bits(trials: Sequence[Trial], columns: Trials, means: Sequence[float]) -> tuple[FewerBits, ...]:
    """The best trial with at most 8, 7, 6, ... bits on average."""
    values = [-math.inf if value is None else value for value in columns.value]
    usable = [t.index for t in trials if _is_taken(t) and math.isfinite(means[t.index])]
    found: list[FewerBits] = []
    most = max((math.ceil(means[i]) for i in usable), default=0)
    for limit in range(min(MOST_MEAN, most), 0, -1):
        allowed = [i for i in usable if means[i] <= limit]
        if not allowed:
            break
        best = max(allowed, key=lambda i: (values[i], -i))
        costs = {name: column[best] for name, column in columns.costs.items()}
        ends = columns.low[best], columns.high[best]
        found.append(FewerBits(limit, best, rounded(means[best]) or 0.0, columns.value[best], *ends, costs))
    return tuple(found)
