"""Fronts: what a search found between a measure and a cost, as values and as the file that is on disk while it runs.

Invariants: points stand by rising cost, and so by rising score; `load_front` gives what was saved; the file is
replaced whole or not at all. Ranges that several points share stand in the file once.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, Final

from hago.debug.text import table
from hago.errors import LogError
from hago.json_text import canonical, check_schema, check_version, json_values, parse_json, read_file, replace_file
from hago.strategy import Strategy

VERSION: Final = 2


@dataclass(frozen=True, slots=True)
class FrontPoint:
    """A strategy that no other of the search beats in both figures.

    Args:
        trial: of the search.
        strategy: complete, as one that a search returns.
        score: its measure; more is better.
        interval: the 95 % confidence interval of that over the samples; None where it is not known.
        costs, results: all figures.
    """

    trial: int
    strategy: Strategy
    score: float
    interval: tuple[float, float] | None
    costs: Mapping[str, float]
    results: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ParetoFront:
    """The points of a front, the cheapest first; iterates over them and prints as a table.

    Args:
        measure: what the scores are, e.g. `sqnr` or `sim_acc`.
        cost: what the points are ordered by.
        points: see FrontPoint.
        made_by: how it was found, JSON values only.
    """

    measure: str
    cost: str
    points: tuple[FrontPoint, ...]
    made_by: Mapping[str, Any]

    def __len__(self) -> int:
        return len(self.points)

    def __iter__(self) -> Iterator[FrontPoint]:
        return iter(self.points)

    def __getitem__(self, index: int) -> FrontPoint:
        return self.points[index]

    def __str__(self) -> str:
        rows = [(str(p.trial), f"{p.costs[self.cost]:.6g}", f"{p.score:.6g}", _interval(p.interval)) for p in self]
        return "\n".join(table(("trial", self.cost, self.measure, "95 % interval"), rows))

    def to_json(self) -> dict[str, Any]:
        """JSON values; what `load_front` reads."""
        ranges: dict[str, int] = {}
        points = []
        for p in self:
            strategy = p.strategy.to_json()
            texts = {key: canonical(pair) for key, pair in strategy["thresholds"].items()}
            strategy["thresholds"] = {key: ranges.setdefault(text, len(ranges)) for key, text in texts.items()}
            points.append(
                {
                    "trial": p.trial,
                    "value": p.score,
                    "cost": p.costs[self.cost],
                    "interval": None if p.interval is None else list(p.interval),
                    "results": dict(p.results),
                    "costs": dict(p.costs),
                    "strategy": strategy,
                }
            )
        said = {"version": VERSION, "measure": self.measure, "cost": self.cost, "made_by": dict(self.made_by)}
        shared: dict[str, Any] = json_values({**said, "points": points}, "front")
        return {**shared, "ranges": [json.loads(text) for text in ranges]}

    def save(self, path: str | PathLike[str]) -> None:
        """Write the file beside its place, and rename it.

        Raises:
            LogError: it could not be written; what stood there is untouched.
        """
        replace_file(Path(path), canonical(self.to_json()) + "\n")


def load_front(path: str | PathLike[str]) -> ParetoFront:
    """The front that a search left at the path of its `front=`, finished or not.

    Raises:
        LogError: unreadable, no JSON, malformed, or written by another version of hago.
    """
    where = str(path)
    try:
        text = read_file(path).decode("utf-8")
    except (OSError, ValueError) as error:
        raise LogError(f"cannot read front {where}: {error}") from None
    value = parse_json(text, where)
    check_version(value, VERSION, where)
    if value["version"] < VERSION:
        raise LogError(f"{where} is a front of version 1, without strategies; the search's command writes it anew")
    check_schema(value, "front", where)
    points = tuple(_point(p, value["ranges"], f"{where}: $.points[{i}]") for i, p in enumerate(value["points"]))
    if any(value["cost"] not in p.costs for p in points):
        raise LogError(f"{where}: a point does not say its {value['cost']}")
    return ParetoFront(value["measure"], value["cost"], points, value["made_by"])


def _point(value: Any, ranges: list[Any], where: str) -> FrontPoint:
    strategy = value["strategy"]
    numbers = strategy["thresholds"]
    wrong = [key for key, number in numbers.items() if number >= len(ranges)]
    if wrong:
        raise LogError(f"{where}: thresholds[{wrong[0]!r}] is {numbers[wrong[0]]}, there are {len(ranges)} ranges")
    whole = {**strategy, "thresholds": {key: ranges[number] for key, number in numbers.items()}}
    ends = value["interval"]
    return FrontPoint(
        trial=value["trial"],
        strategy=Strategy.from_json(whole, f"{where}.strategy"),
        score=float(value["value"]),
        interval=None if ends is None else (float(ends[0]), float(ends[1])),
        costs={k: float(v) for k, v in value["costs"].items()},
        results=value["results"],
    )


def _interval(ends: tuple[float, float] | None) -> str:
    return "-" if ends is None else f"{ends[0]:.6g} to {ends[1]:.6g}"
