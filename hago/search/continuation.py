"""Whether a log can be continued with the options of a search, as far as its header tells before the model is imported.

`run_search` and the command line call `check_same_options` before any work. What depends on the model and the data is
checked by the log itself (`Header.check_same`), once these are loaded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from hago.calibration import BINS, named_estimator
from hago.errors import LONGEST_QUOTE, HagoError, LogError, StrategyMismatch, as_strings, shortened, shortened_to
from hago.hardware import Hardware, hardware_hash
from hago.search.correcting import wanted_corrections
from hago.search.effort import logged_effort
from hago.search.goal import Goal, GoalOptions, make_goal, normalized_limits, parse_limits
from hago.search.preparation import QuantizationOptions, default_estimator, with_search_topology
from hago.search.racing import as_race
from hago.search.searcher_choice import costs_in_use
from hago.searchers import SEARCHERS, make_options, parse_searcher, searcher_text
from hago.serialization.json_text import canonical
from hago.study import IMPLIED_OPTIONS, Header

#: The setting of a log whose search merged groups in its integer programs.
MERGED_GROUPS: Final = "merged_groups"
#: The setting of a log whose search lowers bits further up where operands have none of their own.
TRACED_FEEDS: Final = "traced_feeds"
#: Options of searchers that logs do not hold as they were given: a storage's URL is logged without its password.
_NOT_LOGGED = ("storage",)


@dataclass(frozen=True, slots=True)
class ChangedOption:
    """An option of a search that is not the one with which a log was begun.

    Args:
        name: the keyword of `hago.search_quantize_strategy`.
        logged, given: what it was and what it is, in words.
    """

    name: str
    logged: str
    given: str


def check_same_options(
    options: Any, hardware: Hardware, logged: Header, where: str, spell: Callable[[str], str] = str
) -> None:
    """Refuse to continue a log with other options than those with which it was begun.

    Args:
        options: the SearchOptions of this search, with `auto` replaced by the searcher of the log.
        where: the path of the log.
        spell: how the user writes an option, given the keyword of `hago.search_quantize_strategy`.

    Raises:
        StrategyMismatch: the log is of other hardware.
        LogError: another option differs. Both name the option, what it was and what it is.
    """
    changes = list(changed_options(options, hardware, logged))
    if not changes:
        return
    which = "; ".join(f"{spell(c.name)} was {_quoted(c.logged)}, is {_quoted(c.given)}" for c in changes)
    kind = StrategyMismatch if any(c.name == "hardware" for c in changes) else LogError
    again = "that option" if len(changes) == 1 else "those options"
    raise kind(f"log {where} cannot be continued: {which}; use {again} again, or give another {spell('log')}")


def changed_options(options: Any, hardware: Hardware, logged: Header) -> Iterator[ChangedOption]:
    """Yield the options that differ from those with which a log was begun."""
    goal, settings = make_goal(options.goal), logged.settings
    same_goal = goal.minimize == settings.get("minimize") and same_limits(
        _limits(settings), [x.text for x in goal.limits]
    )
    if hardware_hash(hardware) != logged.hardware.hash:
        now = hardware.name if hardware.name != logged.hardware.name else f"{hardware.name} with other content"
        yield ChangedOption("hardware", logged.hardware.name, now)
    yield from _changed_searcher(options.searcher, logged.searcher)
    yield from _changed("seed", logged.seed, options.seed)
    yield from _changed("objective", logged.objective, goal.objective.name)
    yield from _changed("minimize", settings.get("minimize"), goal.minimize)
    yield from _changed_limits(goal, settings)
    race = as_race(options.race)
    yield from _changed("race", settings.get("race"), None if race is None else asdict(race))
    yield from _changed_quantization(options.quantization, hardware, logged)
    if not same_goal and options.quantization.search_topology is None:
        return  # it follows from the goal
    costs = costs_in_use(options.searcher, goal)
    searched = with_search_topology(options.quantization, costs, hardware).search_topology
    yield from _changed("search_topology", settings.get("topology") == "searched", bool(searched))


def _changed_searcher(searcher: Any, logged: Mapping[str, Any]) -> Iterator[ChangedOption]:
    """A change of a searcher that is given by name; `make_options` refuses unknown options."""
    if not isinstance(searcher, str):
        return
    name, given = parse_searcher(searcher)
    if name != logged["name"]:
        yield ChangedOption("searcher", str(logged["name"]), searcher)
    elif name in SEARCHERS:
        now, before = asdict(make_options(name, given)), logged["options"]
        keys = [k for k in sorted({*now, *before}) if now.get(k) != before.get(k) and k not in _NOT_LOGGED]
        if keys:
            was = searcher_text(name, {k: before.get(k) for k in keys})
            yield ChangedOption("searcher", was, searcher_text(name, {k: now.get(k) for k in keys}))


def with_later_options(searcher: Any, logged: Header) -> Any:
    """A searcher that is given by name, with the options that it did not have when the log was begun, unless the user
    gives them, as they were then: so an earlier log goes on with the command that began it."""
    name, given = parse_searcher(searcher) if isinstance(searcher, str) else ("", {})
    if name != logged.searcher["name"]:
        return searcher
    implied, options = IMPLIED_OPTIONS.get(name, {}), logged.searcher["options"]
    later = {key: value for key, value in implied.items() if key not in given and options[key] == value}
    return searcher_text(name, {**given, **later}) if later else searcher


def same_limits(before: Sequence[str], now: Sequence[str]) -> bool:
    """Whether two lists of limits say the same, however each is written."""
    return normalized_limits(before) == normalized_limits(now)


def with_limits_as_logged(options: GoalOptions, logged: Header) -> GoalOptions:
    """The options with limits written as in the header of a log, if they are the same: logs hold their texts."""
    texts, keep = _limits(logged.settings), normalized_limits(options.keep)
    if not same_limits(texts, [*keep, *normalized_limits(options.budget_cost)]):
        return options
    return replace(options, keep=texts[: len(keep)], budget_cost=texts[len(keep) :])


def logged_channel_bins(logged: Header) -> int:
    """The bins of the histograms of channels of constants with which a log was begun; earlier logs do not state them.

    Raises:
        LogError: the header was edited.
    """
    bins = logged.settings.get("channel_bins", BINS)
    # magnitudes have half as many, of which estimators need the one beside that of zero
    if isinstance(bins, bool) or not isinstance(bins, int) or not 4 <= bins <= BINS or bins % 2:
        raise LogError(f"channel_bins is {shortened(bins)} in the header of the log; it was edited")
    return bins


def logged_softmax_span(logged: Header) -> float | None:
    """How far below the largest of a row inputs of a softmax count in the statistics of a log; None where it does not
    state that any counted otherwise than they are.

    Raises:
        LogError: the header was edited.
    """
    span = logged.settings.get("softmax_span")
    if span is not None and (isinstance(span, bool) or not isinstance(span, (int, float)) or not 0 < span < math.inf):
        raise LogError(f"softmax_span is {shortened(span)} in the header of the log; it was edited")
    return None if span is None else float(span)


def merges_groups(logged: Header | None) -> bool:
    """Whether integer programs merge groups and remember solutions: in new searches, and where a log says so."""
    return logged is None or bool(logged.settings.get(MERGED_GROUPS))


def traces_feeds(logged: Header | None) -> bool:
    """Whether bits further up are lowered where an accumulator overflows whose operands have none of their own: in new
    searches, and where a log says so."""
    return logged is None or bool(logged.settings.get(TRACED_FEEDS))


def logged_gains(settings: Mapping[str, Any]) -> dict[str, float]:
    """The expected gains of a goal that the header of a log, or a strategy, records; none of earlier ones.

    Raises:
        LogError: the record was edited.
    """
    gains = settings.get("expected_gains", {})
    known = isinstance(gains, Mapping) and all(
        isinstance(g, (int, float)) and not isinstance(g, bool) and 0.0 <= g < math.inf for g in gains.values()
    )
    if not known:
        raise LogError(f"expected_gains is {shortened(gains)} in the record of a goal; it was edited")
    return {str(name): float(gain) for name, gain in gains.items()}


def _limits(settings: Mapping[str, Any]) -> list[str]:
    """The limits of a log as the user wrote them."""
    return list(settings.get("limits_given", settings.get("limits", ())))


def _changed_limits(goal: Goal, settings: Mapping[str, Any]) -> Iterator[ChangedOption]:
    for name, are_costs in (("budget_cost", True), ("keep", False)):
        before = [text for text in _limits(settings) if is_of_a_cost(text) == are_costs]
        now = [limit.text for limit in goal.limits if limit.is_cost == are_costs]
        if not same_limits(before, now):
            yield ChangedOption(name, _text(before), _text(now))


def is_of_a_cost(limit: str) -> bool:
    try:
        return parse_limits([limit])[0].is_cost
    except HagoError:
        return False  # of an objective of the user's


def _changed_quantization(given: QuantizationOptions, hardware: Hardware, logged: Header) -> Iterator[ChangedOption]:
    """Changes of the estimator and of patterns; what tables of other tools say depends on the model."""
    if given.thresholds is None and given.estimator is None and not logged.settings.get("refined"):
        if hardware_hash(hardware) == logged.hardware.hash:
            yield from _changed("estimator", logged.estimator, default_estimator(hardware), unset="the default")
    elif given.estimator is not None:
        before = None if logged.settings.get("refined") else logged.estimator
        yield from _changed("estimator", before, named_estimator(given.estimator).name)
    if given.effort is not None:
        yield from _changed("effort", logged_effort(logged).name, given.effort)
    if given.corrections is not None:
        names = list(logged.settings.get("corrections", {}).get("names", ()))
        yield from _changed("corrections", names, list(wanted_corrections(given.corrections)))
    if given.modes is None:
        yield from _changed("keep_float", list(logged.keep_float), list(as_strings(given.keep_float, "keep_float")))
        yield from _changed("fix_bits", dict(logged.fix_bits), dict(given.fix_bits or {}))


def _changed(name: str, logged: Any, given: Any, unset: str = "") -> Iterator[ChangedOption]:
    if canonical(logged) != canonical(given):
        yield ChangedOption(name, _text(logged), unset or _text(given))


def _text(value: Any) -> str:
    """The value of an option in words."""
    if value is None or value is False or value in ([], {}):
        return "not given"
    if isinstance(value, Mapping):
        return ", ".join(f"{k}={v}" for k, v in value.items())
    return ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else "given" if value is True else str(value)


def _quoted(text: str) -> str:
    return shortened_to(text, LONGEST_QUOTE)
