"""What the user asked of a search, the cost that is minimized and the limits, and whether values keep it, in words."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

from hago.errors import HagoError
from hago.report.amounts import cost_text
from hago.report.document import AskedGoal, AskedLimit, rounded
from hago.search import Limit, logged_gains, normalized_limit, parse_limits
from hago.search.objective import OBJECTIVES, Objective
from hago.serialization.summary import measure_text

#: Relative difference below which a figure that was rounded for the document equals a limit.
_SAME: Final = 1e-11
#: Digits of a number that rounds to the one that it misses.
_DIGITS: Final = 10


def asked_goal(settings: Mapping[str, Any], objective: str, own: Objective | None = None) -> AskedGoal | None:
    """The goal of a search; None where nothing is limited or minimized.

    Args:
        settings: of the header of its log, or the goal that a strategy records.
        objective: its name.
        own: the objective, where it is one of the user's own.
    """
    texts, minimize = list(settings.get("limits") or ()), str(settings.get("minimize") or "")
    if not texts and not minimize:
        return None
    given, gains = list(settings.get("limits_given") or texts), logged_gains(settings)
    limits = [_asked(plain, text, gains, own) for plain, text in zip(texts, given, strict=True)]
    measure = own or OBJECTIVES.get(objective)
    return AskedGoal(minimize, objective, tuple(limits), measure is not None and measure.is_loss)


def limited_measures(goal: AskedGoal | None) -> tuple[Objective, ...]:
    """The measures of hago's own that a goal limits."""
    figures = set() if goal is None else {limit.figure for limit in goal.limits if not limit.is_cost}
    return tuple(each for each in OBJECTIVES.values() if each.figure in figures)


def keeps(limit: AskedLimit, value: float, whole: float | None = None) -> bool:
    """Whether a value keeps a limit.

    Args:
        whole: the figure of the float model on the same data, for limits that are relative to it.
    """
    least = least_of(limit, whole)
    if not math.isfinite(value) or (limit.most is not None and not _is_within(value, limit.most)):
        return False
    return least is None or _is_within(least, value)


def _is_within(low: float, high: float) -> bool:
    """Whether a number is at most another, in the digits of the document."""
    return low <= high or low - high <= _SAME * abs(high)


def least_of(limit: AskedLimit, whole: float | None) -> float | None:
    """The least value that keeps a limit on some data.

    Args:
        whole: the figure of the float model there.
    """
    return limit.least if limit.below_float is None or whole is None else whole - limit.below_float


def misses(goal: AskedGoal | None, figures: Mapping[str, Any]) -> list[str]:
    """What a trial misses: every limit with the value, and what was asked of trials.

    Args:
        figures: measures and costs of the trial.
    """
    texts = []
    for limit in () if goal is None else goal.limits:
        value = figures.get(limit.figure)
        asked = limit.most if limit.before is None else limit.before
        if asked is None or not isinstance(value, (int, float)):
            continue
        value = float(value)
        kept = _is_within(value, asked) if limit.is_cost else _is_within(asked, value)
        if kept:
            continue
        side = "above" if limit.is_cost or limit.is_loss else "below"
        shown, wanted = number_text(limit, value, asked), limit_text(limit, asked, value)
        is_lowered = limit.before is not None and limit.before != limit.least
        before = " before corrections" if is_lowered else ""
        texts.append(f"{limit.name} {shown}, {side} the {wanted} that were asked{before}")
    return texts


def allowances(goal: AskedGoal | None) -> list[str]:
    """By how much trials may miss limits on measures, before their layers are corrected."""
    texts = []
    for limit in () if goal is None else goal.limits:
        if limit.before is None or limit.least is None or limit.before == limit.least:
            continue
        gain = measure_text(limit.figure, limit.least - limit.before).replace(" %", " points")
        texts.append(f"{limit.name} may be {gain} {'above' if limit.is_loss else 'below'} its limit")
    return texts


def kept_by(goal: AskedGoal | None, figures: Mapping[str, Any]) -> bool | None:
    """Whether figures keep all limits on measures; None where one of these is not known.

    Args:
        figures: of the strategy that a search returned, on the data of the search.
    """
    limits = [limit for limit in (() if goal is None else goal.limits) if not limit.is_cost]
    values = [figures.get(limit.figure) for limit in limits]
    if not limits or any(limit.least is None for limit in limits):
        return None
    if not all(isinstance(value, (int, float)) for value in values):
        return None
    return all(keeps(limit, float(value)) for limit, value in zip(limits, values, strict=True) if value is not None)


def limit_text(limit: AskedLimit, value: float, other: float | None = None) -> str:
    """The number of a limit as limits are written, so without dB: `20`, `99.5 %`; of a loss with its own sign.

    Args:
        other: as of `number_text`.
    """
    digits, space, unit = number_text(limit, value, other).partition(" ")
    is_plain = limit.is_cost or "." not in digits or "e" in digits
    return f"{digits if is_plain else digits.rstrip('0').rstrip('.')}{space}{unit}"


def number_text(limit: AskedLimit, value: float, other: float | None = None) -> str:
    """A value of a limit's figure without dB, of a loss with its own sign.

    Args:
        other: a number that it is beside; where both differ and have the same text, it has more digits.
    """
    text = _text(limit, value)
    if other is None or value == other or text != _text(limit, other):
        return text
    if limit.is_cost:
        return f"{value:.{_DIGITS}g}"
    is_share = text.endswith("%")
    return f"{_signed(limit, value) * (100 if is_share else 1):.{_DIGITS}g}{' %' if is_share else ''}"


# ---------------------------------------------------------------- parts
def _asked(plain: str, given: str, gains: Mapping[str, float], own: Objective | None) -> AskedLimit:
    text, relative = normalized_limit(given), None
    try:
        (limit,) = parse_limits(plain, own)
        if given != plain:
            relative = parse_limits(given, own)[0].relative
    except HagoError:  # a limit on a measure of the user's own, which is not at hand
        limit = Limit("", None, None, text)
    below = None if relative is None or limit.is_cost else relative.amount
    before = None if limit.least is None else limit.least - gains.get(limit.figure, 0.0)
    measure = next((o for o in (*OBJECTIVES.values(), *([own] if own else [])) if o.figure == limit.figure), None)
    return AskedLimit(
        text=text,
        figure=limit.figure,
        name=limit.figure if measure is None else measure.name,
        least=rounded(limit.least),
        most=rounded(limit.most),
        before=rounded(before),
        below_float=below,
        is_relative=relative is not None,
        is_cost=limit.is_cost,
        is_loss=measure is not None and measure.is_loss,
    )


def _signed(limit: AskedLimit, value: float) -> float:
    return -value if limit.is_loss else value


def _text(limit: AskedLimit, value: float) -> str:
    if limit.is_cost:
        return cost_text(limit.figure, value)
    return measure_text(limit.figure, _signed(limit, value)).removesuffix(" dB")
