"""The table of searchers by name, and the functions that make a Searcher from a name and options.

`search.searcher_choice` calls `make_searcher` once per search; the command line parses `NAME:OPTION=VALUE` with
`parse_searcher`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from types import MappingProxyType
from typing import Any, Final, Literal

from hago.errors import HagoError, did_you_mean
from hago.plan import Bits, Space
from hago.searchers.annealing import AnnealingOptions, annealing_search
from hago.searchers.evaluation_history import EvaluationHistory
from hago.searchers.exhaustive import ExhaustiveOptions, StartOnlyOptions, exhaustive_search, start_only_search
from hago.searchers.greedy import GreedyOptions, RfcGreedyOptions, greedy_search, rfc_greedy_search
from hago.searchers.optuna import OptunaOptions, gp, nsga2, tpe
from hago.searchers.pareto import ParetoOptions, pareto_search
from hago.searchers.random import RandomOptions, random_search
from hago.searchers.repair import feeds_of
from hago.searchers.surrogate import Surrogate, plain_surrogate
from hago.searchers.surrogate_search import (
    GradientOptions,
    LimitedOptions,
    SensitivityOptions,
    gradient_search,
    limited_search,
    sensitivity_search,
)
from hago.study import Feeds, Searcher

Refines = Literal["", "at_point", "every_choice", "every_choice_within_limits"]

#: In place of a searcher's name: the one that is best for the effort and the goal, see `hago.search.effort`.
AUTO: Final = "auto"


@dataclass(frozen=True, slots=True)
class SearcherEntry:
    """An entry of the table of searchers.

    Args:
        make: takes (space, start, seed, options, feeds); if guided, (history, start, seed, options) with an empty
            EvaluationHistory, which has the space, the feeds and the surrogate.
        options: the dataclass of its options.
        when: when to take it, in one line, for the help of the command line.
        guided: whether it reads expected losses and costs.
        refines: the thresholds that are refined before it starts, unless the user decides: those of the point that it
            starts from, or those of every choice, for a start with the most bits or within the limits; empty for none.
        front: whether it searches for a Pareto front, to which points that are worse than the best may belong.
    """

    make: Callable[..., Searcher]
    options: type[Any]
    when: str
    guided: bool = False
    refines: Refines = ""
    front: bool = False


#: The searchers by name. To add one, add its entry here; messages and the help of `--searcher` list the names.
SEARCHERS: Final[Mapping[str, SearcherEntry]] = MappingProxyType(
    {
        "default": SearcherEntry(
            start_only_search,
            StartOnlyOptions,
            "to measure the most bits with estimated thresholds, without a search",
        ),
        "gradient": SearcherEntry(
            gradient_search,
            GradientOptions,
            "for the best accuracy without limits: refines thresholds, then tries few points",
            guided=True,
            refines="at_point",
        ),
        "random": SearcherEntry(random_search, RandomOptions, "as a baseline for other searchers"),
        "greedy": SearcherEntry(
            greedy_search,
            GreedyOptions,
            "for an objective of your own: lowers one value's bits at a time, by measurements",
        ),
        "annealing": SearcherEntry(
            annealing_search,
            AnnealingOptions,
            "where greedy gets stuck and many trials are affordable",
        ),
        "exhaustive": SearcherEntry(
            exhaustive_search,
            ExhaustiveOptions,
            "for spaces of some hundred points: evaluates every one",
        ),
        "sensitivity": SearcherEntry(
            sensitivity_search,
            SensitivityOptions,
            "for a quick front with estimated thresholds",
            guided=True,
            front=True,
        ),
        "limited": SearcherEntry(
            limited_search,
            LimitedOptions,
            "for limits on costs, or the least cost: refines thresholds, tries points near limits",
            guided=True,
            refines="every_choice_within_limits",
        ),
        "pareto": SearcherEntry(
            pareto_search,
            ParetoOptions,
            "if no limit is known yet: finds the front of the objective and a cost",
            guided=True,
            refines="every_choice",
            front=True,
        ),
        "tpe": SearcherEntry(
            tpe,
            OptunaOptions,
            "for hundreds of trials, also by many machines on one storage (Optuna)",
            guided=True,
        ),
        "nsga2": SearcherEntry(
            nsga2,
            OptunaOptions,
            "the same for a front: an evolutionary search (Optuna)",
            guided=True,
            front=True,
        ),
        "gp": SearcherEntry(
            gp, OptunaOptions, "for few groups of bits and slow trials: a Gaussian process (Optuna)", guided=True
        ),
        "rfc_greedy": SearcherEntry(
            rfc_greedy_search,
            RfcGreedyOptions,
            "to compare with the greedy search of the HAGO RFC",
        ),
    }
)


def parse_searcher(text: str) -> tuple[str, dict[str, float | str]]:
    """Parse `NAME` or `NAME:OPTION=VALUE,...` into a name and options.

    Raises:
        HagoError: an option without a value.

    >>> parse_searcher("greedy:tolerance=0.1,max_passes=2")
    ('greedy', {'tolerance': 0.1, 'max_passes': 2.0})
    """
    name, colon, assignments = text.partition(":")
    options: dict[str, float | str] = {}
    for part in assignments.split(",") if colon else []:
        key, equals, value = part.partition("=")
        if not (equals and key.strip() and value.strip()):
            raise HagoError(f"searcher {text!r}: got {part!r}, expected OPTION=VALUE")
        options[key.strip()] = _value(value.strip())
    return name, options


def searcher_text(name: str, options: Mapping[str, Any]) -> str:
    """The text that `parse_searcher` parses into a name and options.

    >>> searcher_text("gradient", {"moves": 2})
    'gradient:moves=2'
    """
    assignments = ",".join(f"{key}={value}" for key, value in options.items())
    return f"{name}:{assignments}" if assignments else name


def _value(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


def make_searcher(
    name: str,
    space: Space,
    start: Bits | None = None,
    seed: int = 0,
    feeds: Feeds | None = None,
    options: Any = None,
    surrogate: Surrogate | None = None,
) -> Searcher:
    """Make a searcher.

    Args:
        name: a key of SEARCHERS.
        start: the point that it starts from; by default the most bits everywhere.
        seed: seed of its randomness, 0 or more.
        feeds: by node, the groups that decide how large its accumulator gets; by default those of its in-edges.
        options: the searcher's options dataclass, or a mapping of its fields; others have their defaults.
        surrogate: expected losses and costs, for a guided searcher; by default `plain_surrogate`.

    Raises:
        HagoError: an unknown name or option, or one of a wrong type or range.
        InfeasibleBits: `start` is not a point of the space.
    """
    if name not in SEARCHERS:
        raise HagoError(f"unknown searcher {name!r}; known: {', '.join(SEARCHERS)}.{did_you_mean(name, SEARCHERS)}")
    check_seed(seed)
    first_point = space.widest() if start is None else {k: int(b) for k, b in start.items()}
    space.check(first_point)
    entry = SEARCHERS[name]
    typed_options = make_options(name, options)
    if not entry.guided:
        return entry.make(space, first_point, seed, typed_options, feeds)
    history = EvaluationHistory(
        space, plain_surrogate(space) if surrogate is None else surrogate, feeds or feeds_of(space)
    )
    return entry.make(history, first_point, seed, typed_options)


def check_racing(name: str) -> None:
    """Refuse to race for a searcher that needs the whole score of every point.

    Raises:
        HagoError: it searches for a Pareto front.
    """
    if name in SEARCHERS and SEARCHERS[name].front:
        raise HagoError(
            f"searcher {name!r} looks for a front, on which points that are worse than the best belong, too; "
            "do not race"
        )


def check_seed(seed: Any) -> None:
    """Check that a seed is an integer, 0 or more.

    Raises:
        HagoError: it is not.
    """
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise HagoError(f"seed {seed!r}; expected an integer, 0 or more")


def make_options(name: str, options: Any = None) -> Any:
    """A searcher's options as its dataclass.

    Args:
        name: a key of SEARCHERS.
        options: that dataclass, or a mapping of its fields.

    Raises:
        HagoError: an unknown option, or one of a wrong type or range.
    """
    kind = SEARCHERS[name].options
    values = asdict(options) if isinstance(options, kind) else options or {}
    if not isinstance(values, Mapping):
        raise HagoError(f"options of searcher {name!r}: got {options!r}, expected {kind.__name__} or a mapping")
    defaults = {f.name: f.default for f in fields(kind)}
    typed = {}
    for key, value in values.items():
        if key not in defaults:
            known = f"known: {', '.join(defaults)}" if defaults else "it has none"
            raise HagoError(f"searcher {name!r} has no option {key!r}; {known}.{did_you_mean(str(key), defaults)}")
        typed[key] = _as_type_of(defaults[key], value, f"option {key!r} of searcher {name!r}")
    return kind(**typed)


def _as_type_of(default: Any, value: Any, what: str) -> Any:
    kind = type(default)
    if kind is str:
        if not isinstance(value, str):
            raise HagoError(f"{what}: got {value!r}, expected a text")
        return value
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or (kind is int and value != int(value)):
        raise HagoError(f"{what}: got {value!r}, expected {'an integer' if kind is int else 'a number'}")
    return kind(value)
