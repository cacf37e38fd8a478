"""The goal of a search: the figure that is optimized, and the limits on other figures.

A figure is a measure of the outputs (sqnr, agreement, accuracy, ...), of which more is better, or a cost
(weight_bytes, cycles, ...), of which less is. Either may be the one that is optimized.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from hago.cost import METRICS, Cost, amount_text
from hago.cost import Unit as CostUnit
from hago.errors import HagoError, as_strings, did_you_mean
from hago.search.objective import OBJECTIVES, Objective, ObjectiveLike, Unit, named_objective
from hago.study import Score

#: The cost of a Pareto front where the goal names none.
FRONT_COST: Final = "weight_bytes"

_COUNTS: Final = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_BYTES: Final = {
    **{f"{p}B": size for p, size in (("", 1.0), ("k", 1e3), ("K", 1e3), ("M", 1e6), ("G", 1e9))},
    **{f"{p}iB": 2.0**power for p, power in (("K", 10), ("M", 20), ("G", 30))},
    "": 1.0,
}
#: What stands behind a plain number of a cost, by its unit, where a number alone is refused.
_PLAIN: Final = {"s": " s", "J": " J"}
_PREFIXES: Final = {"": 1.0, "m": 1e-3, "u": 1e-6, "n": 1e-9}
#: What may follow a number, by the unit of a cost.
_UNITS_OF_COSTS: Final[Mapping[CostUnit, Mapping[str, float]]] = {
    "B": _BYTES,
    "": _COUNTS,
    "bits": {"": 1.0, "bit": 1.0, "bits": 1.0},
    "cycles": {**_COUNTS, **{f"{p}{' ' if p else ''}cycles": size for p, size in _COUNTS.items()}},
    "s": {f"{p}s": size for p, size in _PREFIXES.items()},
    "J": {f"{p}J": size for p, size in _PREFIXES.items()},
}
#: What may follow a number, by the unit of an objective.
_UNITS_OF_OBJECTIVES: Final[Mapping[Unit, Mapping[str, float]]] = {
    "share": {"": 1.0, "%": 0.01},
    "dB": {"": 1.0, "dB": 1.0},
    "": {"": 1.0},
}
#: What may follow a number in a limit on a cost, as a part of the cost of the widest bits.
_PARTS: Final = {"%": 0.01, "x": 1.0}
#: What may follow the number of a share below the float model's.
_BELOW: Final = {**_UNITS_OF_OBJECTIVES["share"], "points": 0.01, "point": 0.01}
_NUMBER: Final = r"[-+]?[\d.]+(?:[eE][-+]?\d+)?"
_LIMIT: Final = re.compile(
    rf"\s*(?P<name>\w+)\s*(?P<sign><=|>=|=<|=>|<|>)\s*(?:(?P<number>{_NUMBER})\s*(?P<unit>.*?)|(?P<float>float\b.*?))\s*",
    re.ASCII,
)
_BELOW_FLOAT: Final = re.compile(rf"float(?:\s*-\s*({_NUMBER})\s*(.*))?", re.ASCII)
#: Other names of costs in limits and goals.
ALIASES: Final = {"size": "weight_bytes"}
#: By word that people use, the figures that they may mean.
_MEANT: Final = {
    **dict.fromkeys(("flash", "model_size", "parameters", "params", "storage", "weights"), ("weight_bytes",)),
    **dict.fromkeys(("memory", "mem"), ("weight_bytes", "activation_bytes")),
    **dict.fromkeys(("ram", "sram", "activations"), ("activation_bytes",)),
    **dict.fromkeys(("bytes",), ("weight_bytes", "activation_bytes", "bytes_moved")),
    **dict.fromkeys(("bandwidth", "traffic"), ("bytes_moved",)),
    **dict.fromkeys(("delay", "duration", "runtime", "seconds", "speed", "time"), ("latency",)),
    **dict.fromkeys(("flops", "ops"), ("macs", "bops")),
    **dict.fromkeys(("joules", "power"), ("energy",)),
    **dict.fromkeys(("bit", "bits", "bitwidth"), ("effective_bits",)),
    **dict.fromkeys(("acc", "sim_acc", "top1", "top_1"), ("accuracy",)),
    **dict.fromkeys(("psnr", "snr"), ("sqnr",)),
    **dict.fromkeys(("error", "loss", "noise"), ("mse", "kl")),
}


@dataclass(frozen=True, slots=True)
class Relative:
    """The number of a limit that is relative to another model.

    Args:
        name: the figure's name in limits.
        amount: of a cost, the part of that of the widest bits; of a measure, how much it may be below the float
            model's on the same data.
    """

    name: str
    amount: float


@dataclass(frozen=True, slots=True)
class Limit:
    """A limit on a figure. `parse_limits` makes it from a text.

    Args:
        figure: name of a cost, or of a measure in `Score.results` (accuracy is `sim_acc` there).
        least: the smallest value that keeps the limit; None for a limit from above.
        most: the largest value that keeps the limit; None for a limit from below.
        text: the limit as the user wrote it; of a relative one that was resolved, the same limit as a plain number.
        relative: for a limit that `resolved` has yet to make a plain number; it has neither least nor most.
        given: of a relative limit that was resolved, the text that the user wrote.
    """

    figure: str
    least: float | None
    most: float | None
    text: str
    relative: Relative | None = None
    given: str = ""

    @property
    def is_cost(self) -> bool:
        return self.figure in METRICS

    @property
    def quoted(self) -> str:
        """The limit in messages: as the user wrote it, with the number that a relative one came to."""
        return f"{self.given!r} ({resolved_text(self.given, self.text)})" if self.given else repr(self.text)

    def amount(self, value: float) -> str:
        """A value of its figure in messages, with its unit; a share and a loss, which results hold negated, as it is
        written in a limit, without."""
        if self.is_cost:
            return amount_text(self.figure, value)
        return f"{-value if '<' in self.text else value:.6g}"  # of measures, losses alone have limits from above

    @property
    def maybe_meant(self) -> str:
        """A question whether a small number of a cost without a unit was meant as a percentage; or nothing."""
        if not self.is_cost or METRICS[self.figure].unit == "bits" or self.most is None or not 0 < self.most <= 100:
            return ""
        return f". Did you mean '{self.text} %'?" if not self.given and self.text[-1].isdigit() else ""

    def resolved(self, base: float) -> Limit:
        """A relative limit as a plain number; any other unchanged.

        Args:
            base: the cost of the widest bits, or the measure of the float model.
        """
        if self.relative is None:
            return self
        name, amount = self.relative.name, self.relative.amount
        if self.is_cost:
            most = amount * base
            return Limit(
                self.figure, None, most, f"{name} <= {most!r}{_PLAIN.get(METRICS[name].unit, '')}", None, self.text
            )
        least = base - amount
        return Limit(self.figure, least, None, f"{name} >= {least!r}", None, self.text)

    def shortfall(self, value: float) -> float:
        """The amount by which a value violates the limit, relative to the limit; 0 where it keeps it."""
        assert self.relative is None, f"{self.text} is not resolved"
        limit, excess = (self.most, value - self.most) if self.most is not None else (self.least, 0.0)
        if self.least is not None:
            excess = self.least - value
        if not excess > 0.0:
            return 0.0 if excess == excess else math.inf
        return excess / max(abs(limit or 0.0), 1e-12)


def parse_limits(texts: str | Iterable[str] | None, objective: Objective | None = None) -> tuple[Limit, ...]:
    """Parse limits such as "weight_bytes <= 4 MB, agreement >= 99 %".

    Args:
        texts: one text or several; commas separate limits within one.
        objective: the objective of the search, on which there may be a limit if it is the user's own.

    Raises:
        HagoError: an unknown figure or unit, or a limit on the wrong side.
    """
    objectives = OBJECTIVES if objective is None else {objective.name: objective, **OBJECTIVES}
    return tuple(_parse_limit(part, objectives) for text in as_strings(texts, "a limit") for part in text.split(","))


def limits_on_costs(texts: str | Iterable[str] | None) -> tuple[Limit, ...]:
    """The limits on costs among others, which may be on figures of the user's own.

    Raises:
        HagoError: a limit on a cost has an unknown unit, or is on the wrong side.
    """
    parts = (part for text in as_strings(texts, "a limit") for part in text.split(","))
    named = [(match["name"], part) for part in parts if (match := _LIMIT.fullmatch(part))]
    return parse_limits([part for name, part in named if ALIASES.get(name, name) in METRICS])


def normalized_limit(text: str) -> str:
    """A limit in one way of writing it, e.g. 'size <= 60 %' for 'size<60%'; a text that is no limit unchanged."""
    match = _LIMIT.fullmatch(text)
    if match is None:
        return text
    name, sign, number, unit, of_float = match.groups()
    value = " ".join(of_float.split()) if of_float else f"{number} {unit}".strip()
    return f"{name} {'<=' if '<' in sign else '>='} {value}"


def normalized_limits(texts: str | Iterable[str] | None) -> list[str]:
    """Limits in one way of writing them, one text each."""
    return [normalized_limit(part) for text in as_strings(texts, "a limit") for part in text.split(",")]


def resolved_text(given: str, text: str) -> str:
    """What a relative limit came to, for people: of a cost "6.799 KiB, 60 % of 11.33 KiB at the widest bits"; of a
    measure the limit with its number.

    Args:
        given: the limit as the user wrote it.
        text: the same limit as a plain number.
    """
    name = text.partition(" ")[0]
    if name not in METRICS:
        return text
    (relative,), (plain,) = parse_limits(given), parse_limits(text)
    assert relative.relative is not None and plain.most is not None
    part = relative.relative.amount
    base = f" of {amount_text(name, plain.most / part)}" if part else " of that"
    return f"{amount_text(name, plain.most)}, {100.0 * part:.4g} %{base} at the widest bits"


def _parse_limit(text: str, objectives: Mapping[str, Objective]) -> Limit:
    match = _LIMIT.fullmatch(text)
    if match is None:
        raise HagoError(
            f"limit {text!r}; expected FIGURE <= NUMBER UNIT, e.g. 'weight_bytes <= 4 MB', 'size <= 60 %' (of the "
            "widest bits), 'agreement >= 99 %' or 'accuracy >= float - 0.5 %'"
        )
    name, sign, number, unit, of_float = match.groups()
    name, from_above = ALIASES.get(name, name), "<" in sign
    figures = [*METRICS, *ALIASES, *objectives]
    if name not in figures:
        kind = [*METRICS, *ALIASES] if from_above else []
        kind += [n for n, measure in objectives.items() if measure.is_loss == from_above]
        raise HagoError(f"limit {text!r}: unknown figure {name!r}; known: {', '.join(figures)}.{meant(name, kind)}")
    measure = None if name in METRICS else objectives[name]
    if of_float:
        return _limit_of_float(text, name, measure, from_above, of_float)
    if from_above != (measure is None or measure.is_loss):
        raise HagoError(f"limit {text!r} is on the wrong side; expected {name} {'>=' if from_above else '<='} a number")
    if measure is None and unit in _PARTS:
        return Limit(name, None, None, text.strip(), Relative(name, _parse_number(text, number) * _PARTS[unit]))
    units = _UNITS_OF_COSTS[METRICS[name].unit] if measure is None else _UNITS_OF_OBJECTIVES[measure.unit]
    value = _parse_number(text, number) * _scale(text, units, unit, "" if measure else ", or % or x of the widest bits")
    if measure is None:
        return Limit(name, None, value, text.strip())
    if measure.unit == "share" and value > 1.0:
        raise HagoError(f"limit {text!r} cannot be met: {name} is at most 1")
    return Limit(measure.figure, -value if measure.is_loss else value, None, text.strip())


def _limit_of_float(text: str, name: str, measure: Objective | None, from_above: bool, of_float: str) -> Limit:
    """A limit that is relative to the measure of the float model."""
    if measure is None or measure.unit != "share" or measure.is_loss or from_above:
        shares = ", ".join(o.name for o in OBJECTIVES.values() if o.unit == "share" and not o.is_loss)
        raise HagoError(
            f"limit {text!r}: only measures that are shares can be compared with the float model, from below, as in "
            f"'accuracy >= float - 0.5 %': {shares}; give {name} as a number"
        )
    match = _BELOW_FLOAT.fullmatch(of_float)
    if match is None:
        raise HagoError(f"limit {text!r}; expected 'float - NUMBER %', e.g. '{name} >= float - 0.5 %'")
    number, unit = match.groups()
    below = 0.0 if number is None else _parse_number(text, number) * _scale(text, _BELOW, unit)
    return Limit(measure.figure, None, None, text.strip(), Relative(name, below))


def meant(name: str, known: Iterable[str]) -> str:
    """A question whether known figures were meant, by what people call them or by a close spelling; or nothing."""
    known = list(known)
    figures = [figure for figure in _MEANT.get(name.lower(), ()) if figure in known]
    if figures:
        return f" Did you mean {' or '.join(map(repr, figures))}?"
    return did_you_mean(name, known)


def _parse_number(text: str, number: str) -> float:
    try:
        return float(number)
    except ValueError:
        raise HagoError(f"limit {text!r}: {number!r} is no number") from None


def _scale(text: str, units: Mapping[str, float], unit: str, more: str = "") -> float:
    if unit not in units:
        expected = ", ".join(u for u in units if u) or "no unit"
        raise HagoError(f"limit {text!r}: unknown unit {unit!r}; expected {expected}{more}")
    return units[unit]


@dataclass(frozen=True, slots=True)
class Goal:
    """The objective or cost that is optimized, and the limits, which together order the points. Made by `make_goal`.

    Args:
        objective: the measure that is maximized, or that breaks ties where a cost is minimized.
        minimize: the cost that is minimized; None where the objective is maximized.
        limits: the limits that every accepted point keeps.
        expected_gains: by figure of a limit on a measure, how much it is expected to gain once the layers of a point
            are corrected. Points are measured before that, so they may miss the limit by so much.
    """

    objective: Objective
    minimize: str | None = None
    limits: tuple[Limit, ...] = ()
    expected_gains: Mapping[str, float] = field(default_factory=dict)

    @property
    def costs(self) -> tuple[str, ...]:
        """The costs in use, the one that breaks ties first; empty where costs do not matter."""
        named = [self.minimize] if self.minimize else []
        return tuple(dict.fromkeys([*named, *(x.figure for x in self.limits if x.is_cost)]))

    @property
    def asked(self) -> Goal:
        """The goal as the user gave it, for points whose layers are corrected."""
        return replace(self, expected_gains={})

    def keeps_asked(self, score: Score) -> bool:
        """Whether a score is accepted, and keeps the limits without what corrections are expected to gain."""
        return score.accepted and not self.asked.shortfall({**score.results, **score.costs})

    @property
    def of_costs(self) -> Goal:
        """The goal without its limits on measures."""
        return replace(self, limits=tuple(x for x in self.limits if x.is_cost))

    @property
    def measures(self) -> tuple[Objective, ...]:
        """The objectives with a limit, which evaluations must report as well."""
        limited = {x.figure for x in self.limits if not x.is_cost}
        return tuple(OBJECTIVES[name] for name in sorted(OBJECTIVES) if OBJECTIVES[name].figure in limited)

    def measure_of(self, figure: str) -> Objective:
        """The objective that is reported as this figure."""
        return next(o for o in (*OBJECTIVES.values(), self.objective) if o.figure == figure)

    def applied(self, score: Score, figures: Mapping[str, float]) -> Score:
        """The score with its costs, and with the value and the shortfall that this goal gives it.

        Args:
            score: whose value is the objective's.
            figures: costs by name.
        """
        costs = {name: float(value) for name, value in figures.items()}
        shortfall = self.shortfall({**score.results, **costs})
        if self.minimize is not None:
            value, tie = -costs[self.minimize], score.value
        else:
            value, tie = score.value, -costs[self.costs[0]] if self.costs else 0.0
        return replace(score, value=value, tie=tie if math.isfinite(tie) else 0.0, shortfall=shortfall, costs=costs)

    def shortfall(self, values: Mapping[str, Any]) -> float:
        """By how much limits are violated, each relative to the limit, summed.

        Args:
            values: costs and measures by figure.
        """
        return math.fsum(self.missed(limit, float(values[limit.figure])) for limit in self.limits)

    def missed(self, limit: Limit, value: float) -> float:
        """By how much a value violates a limit, relative to the limit, with what corrections are expected to gain."""
        return limit.shortfall(value + self.expected_gains.get(limit.figure, 0.0))

    def check(self, cost: Cost) -> None:
        """Check that the hardware file has the figures for the costs in use.

        Raises:
            HagoError: it does not; names what is missing.
        """
        for name in self.costs:
            cost[name]

    def to_json(self) -> dict[str, Any]:
        """JSON values for a log; empty for a goal that is only an objective."""
        parts: dict[str, Any] = {"minimize": self.minimize, "limits": [x.text for x in self.limits]}
        if any(x.given for x in self.limits):
            parts["limits_given"] = [x.given or x.text for x in self.limits]
        parts["expected_gains"] = dict(self.expected_gains)
        return {k: v for k, v in parts.items() if v}


@dataclass(frozen=True, slots=True)
class GoalOptions:
    """The goal of a search as the user states it; `hago.search_quantize_strategy` documents the fields."""

    objective: ObjectiveLike = "sqnr"
    maximize: ObjectiveLike | None = None
    minimize: str | None = None
    keep: str | Sequence[str] | None = None
    budget_cost: str | Sequence[str] | None = None
    allow_overflow: bool = False


def make_goal(options: GoalOptions) -> Goal:
    """Make the Goal that the options describe.

    Raises:
        HagoError: both `maximize` and `minimize` are given, or `maximize` and another objective, or a figure or a limit
            is unknown or malformed.
    """
    maximize, minimize = options.maximize, options.minimize
    minimize = ALIASES.get(minimize, minimize) if isinstance(minimize, str) else minimize
    if maximize is not None and minimize is not None:
        raise HagoError(
            f"got maximize={maximize!r} and minimize={minimize!r}; give one of them and limit the other "
            "(keep='...' or budget_cost='...'), or take the searcher 'pareto', which finds every trade between them"
        )
    if maximize is not None and options.objective not in (GoalOptions().objective, maximize):
        raise HagoError(f"got maximize={maximize!r} and objective={options.objective!r}, which mean the same; give one")
    if minimize is not None and minimize not in METRICS:
        close = meant(str(minimize), [*METRICS, *ALIASES])
        raise HagoError(f"minimize={minimize!r}; expected a cost: {', '.join(METRICS)}.{close}")
    chosen = named_objective(options.objective if maximize is None else maximize)
    limits = (*parse_limits(options.keep, chosen), *parse_limits(options.budget_cost, chosen))
    return Goal(chosen, minimize, limits)
