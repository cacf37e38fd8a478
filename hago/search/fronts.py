"""The front of a search between a measure and a cost, as values and as the file that is on disk while it runs.

Invariants: points stand by rising cost, and so by rising score; `load_front` gives what was saved; the file is
replaced whole or not at all. Ranges that several points share stand in the file once.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, Final

from hago.cost.report import amount
from hago.errors import LogError
from hago.plan.strategy import Strategy
from hago.search.scoring import PlanScorer
from hago.serialization.json_text import (
    canonical,
    check_schema,
    check_version,
    json_values,
    parse_json,
    read_file,
    replace_file,
)
from hago.serialization.text_table import table
from hago.study.front import Front
from hago.study.log import Trial

VERSION: Final = 2


@dataclass(frozen=True, slots=True)
class FrontPoint:
    """A point of a front: a strategy that no other of the search beats in both figures.

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
        measure: the figure that scores are of, e.g. `sqnr` or `sim_acc`.
        cost: the figure that orders the points.
        points: see FrontPoint.
        made_by: the description of the search, JSON values only.
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
        """JSON values, which `load_front` reads."""
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


# ---------------------------------------------------------------- while the search runs
#: The cost of the front where the goal names none.
FRONT_COST = "weight_bytes"


class FrontWriter:
    """Keeps the front and its file current. The search makes one, and the study calls it with every trial; it returns
    texts for the progress bar.

    Args:
        scorer: of the search.
        path: of the front's file, or None.
        made_by: the description of the search.
        here: whether points are scored in this process, so that the forwards they take are known.
        costs: the costs in use; the front is over the first.
        strategy_of: returns the strategy of a trial.
    """

    def __init__(
        self,
        scorer: PlanScorer,
        path: Path | None,
        made_by: Mapping[str, Any],
        here: bool,
        costs: Sequence[str],
        strategy_of: Callable[[Trial], Strategy],
    ) -> None:
        self._front = Front(scorer.goal.objective.figure, costs[0] if costs else FRONT_COST)
        self._scorer, self._path, self._made_by, self._here = scorer, path, made_by, here
        self._strategy_of = strategy_of
        self._points: dict[int, FrontPoint] = {}
        self._asked = 0
        # forwards before the first trial are not counted
        self._earlier = scorer.evaluator.forwards if here else 0.0
        self._current = False

    def __call__(self, trial: Trial, best: Trial | None, replayed: bool) -> Sequence[str]:
        """Take a trial; the texts that it returns are shown in the bar."""
        self._asked += not replayed
        if self._front.add(trial):
            self._current = False
        if not replayed and not self._current:
            self._write()
        return self._figures(best)

    def finish(self) -> None:
        """Write the file if no trial did, since all of them were in the log."""
        if not self._current:
            self._write()

    def stop(self) -> None:
        """Write the file after an interrupt, unless the trials so far are only a part of the log."""
        if self._asked:
            self.finish()

    @property
    def front(self) -> ParetoFront:
        """The front of the trials so far."""
        kept, front = self._points, self._front
        # strategies are held for points of the front alone
        self._points = {t.index: kept.get(t.index) or self._point(t) for t in front.trials}
        return ParetoFront(front.measure, front.cost, tuple(self._points.values()), self._made_by)

    def _write(self) -> None:
        if self._path is not None:
            self.front.save(self._path)
            self._current = True

    def _point(self, trial: Trial) -> FrontPoint:
        score = trial.score
        ends = (score.interval[0], score.interval[1]) if score.interval else None
        value = self._front.value_of(trial)
        return FrontPoint(trial.index, self._strategy_of(trial), value, ends, score.costs, score.results)

    def _figures(self, best: Trial | None) -> list[str]:
        shown = []
        cost = None if best is None else best.score.costs.get(self._front.cost)
        if cost is not None:
            shown.append(amount(self._front.cost, cost))
        evaluator = self._scorer.evaluator
        if self._here and self._asked:
            # without a cache every point would take one forward at least, repeats included
            shown.append(f"{evaluator.forwards - self._earlier:.0f}/{self._asked} forwards")
            shown.append(f"{100 * evaluator.reuse.spent.share:.0f} % cached")
        return [*shown, f"front {len(self._front)}"]
