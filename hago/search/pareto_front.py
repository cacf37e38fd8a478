"""The Pareto front of a search between a measure and a cost, as a value and as a file that is kept current on disk.

`search.session` makes a `FrontWriter` per search and returns its `ParetoFront`; `hago.load_front` reads the file.

Invariants: points are in the order of rising cost, and so of rising score; `load_front` returns what was saved; the
file is replaced atomically. Ranges that several points share are stored once.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any, Final

from hago.cost import METRICS, amount_text
from hago.errors import LogError
from hago.plan import Strategy
from hago.search.goal import FRONT_COST
from hago.search.scoring import GoalScorer
from hago.serialization.file_kind import FRONT, told_from_other_kinds
from hago.serialization.json_text import (
    canonical,
    check_schema,
    check_version,
    json_values,
    parse_json,
    read_file,
    replace_file,
)
from hago.serialization.pictures import (
    BLUE,
    GRAY,
    LIGHT_BLUE,
    axes_for,
    data_frame,
    matplotlib_module,
    picture,
    plain_text,
    style_axes,
)
from hago.serialization.summary import (
    Summarized,
    Summary,
    bits_text,
    figures_text,
    measure_axis,
    measure_name,
    measure_text,
    number_values,
    range_text,
)
from hago.serialization.text_table import BYTE_UNITS, counted, table, unit_of
from hago.study import Score, Trial, TrialFront

FRONT_VERSION: Final = 2


@dataclass(frozen=True, slots=True, repr=False)
class FrontPoint(Summarized):
    """A point of a front: a strategy that no other of the search beats in both figures.

    Args:
        trial: index of the trial.
        strategy: a complete strategy, like that which a search returns.
        score: its measure; more is better.
        interval: the 95 % confidence interval of the score over the samples; None where it was not computed.
        costs, results: all figures of the trial.
    """

    trial: int
    strategy: Strategy
    score: float
    interval: tuple[float, float] | None
    costs: Mapping[str, float]
    results: Mapping[str, Any]

    def summary(self) -> Summary:
        """Its measures, costs and bits."""
        costs = [f"{k} {amount_text(k, v)}" if k in METRICS else f"{k} {v:.6g}" for k, v in self.costs.items()]
        return Summary(
            f"FrontPoint of trial {self.trial} on {self.strategy.hardware.name}",
            {
                "score": f"{self.score:.6g}" + ("" if self.interval is None else f" ({_interval(self.interval)})"),
                "measures": figures_text(self.results),
                "costs": ", ".join(costs),
                "bits": bits_text(self.strategy.bits.values(), "groups of edges"),
            },
        )


def front_point(measure: str, trial: int, strategy: Strategy, score: Score) -> FrontPoint:
    """The point of a trial.

    Args:
        measure: of the front.
        trial: its index.
        score: of the strategy.
    """
    ends = (score.interval[0], score.interval[1]) if score.interval else None
    return FrontPoint(trial, strategy, float(score.results[measure]), ends, score.costs, score.results)


@dataclass(frozen=True, slots=True, repr=False)
class ParetoFront(Summarized):
    """The points of a front, the cheapest first; iterates over them and prints as a table.

    Args:
        measure: the figure that is the score of the points, e.g. `sqnr` or `sim_acc`.
        cost: the cost by which the points are ordered.
        points: the points by rising cost.
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

    def with_point(self, point: FrontPoint) -> ParetoFront:
        """The front with a point in place of the one of the same trial, and without the points that it beats; without
        either where another point beats it, or its score is no number."""
        others = [p for p in self if p.trial != point.trial]
        cost = point.costs[self.cost]
        if math.isnan(point.score) or any(p.score >= point.score and p.costs[self.cost] <= cost for p in others):
            return replace(self, points=tuple(others))
        left = [p for p in others if p.score > point.score or p.costs[self.cost] < cost]
        return replace(self, points=tuple(sorted([*left, point], key=lambda p: p.costs[self.cost])))

    def summary(self) -> Summary:
        """Its ends, which are the cheapest and the best point."""
        ends = [] if not self.points else [("cheapest", self.points[0]), ("best", self.points[-1])]
        hardware = f" on {self.points[0].strategy.hardware.name}" if self.points else ""
        return Summary(
            f"ParetoFront of {counted(len(self), 'point')} of {self.cost} and {measure_name(self.measure)}{hardware}",
            {
                name: f"{self._cost_text(point)}, {measure_name(self.measure)} {self._score_text(point)}, trial "
                f"{point.trial}"
                for name, point in ends
            },
        )

    def _cost_text(self, point: FrontPoint) -> str:
        value = point.costs[self.cost]
        return amount_text(self.cost, value) if self.cost in METRICS else f"{self.cost} {value:.6g}"

    def __str__(self) -> str:
        rows = [(str(p.trial), self._cost_text(p), self._score_text(p), self._range_text(p)) for p in self]
        titles = ("trial", self.cost, measure_name(self.measure), "95 % interval")
        return "\n".join(table(titles, rows, right=titles[:3]))

    def _score_text(self, point: FrontPoint) -> str:
        return measure_text(self.measure, point.score)

    def _range_text(self, point: FrontPoint) -> str:
        return "-" if point.interval is None else range_text(self.measure, point.interval)

    def to_frame(self) -> Any:
        """The points as a data frame of pandas: the measure with its interval, all costs and all results, by trial.

        Raises:
            HagoError: pandas is not installed.
        """
        return data_frame([_cells(self.measure, p) for p in self], "trial")

    def plot(self, ax: Any = None) -> Any:
        """Draw the points over the cost, with their 95 % intervals, on axes of matplotlib.

        Args:
            ax: by default, those of a new figure.

        Returns:
            The axes.

        Raises:
            HagoError: matplotlib is not installed.
        """
        ax = axes_for(ax)
        label, factor = measure_axis(self.measure)
        costs, scores = [p.costs[self.cost] for p in self], [factor * p.score for p in self]
        is_bytes = self.cost in METRICS and METRICS[self.cost].unit == "B"
        size, unit = unit_of(max(costs, default=0.0), BYTE_UNITS) if is_bytes else (1, "")
        costs = [cost / size for cost in costs]
        ax.step(costs, scores, where="post", color=LIGHT_BLUE, linewidth=1.2, zorder=1)
        for cost, score, point in zip(costs, scores, self, strict=True):
            low, high = point.interval or (point.score, point.score)
            arms = [[max(0.0, score - factor * low)], [max(0.0, factor * high - score)]]
            ax.errorbar([cost], [score], yerr=arms, fmt="none", ecolor=GRAY, elinewidth=1.0, capsize=3.0, zorder=2)
        ax.scatter(costs, scores, color=BLUE, s=22.0, zorder=3)
        others = METRICS[self.cost].unit if self.cost in METRICS and not is_bytes else unit
        ax.set_xlabel(f"{self.cost} ({others})" if others and others != self.cost else self.cost)
        ax.set_ylabel(plain_text(label))
        hardware = f" on {self.points[0].strategy.hardware.name}" if self.points else ""
        bars = ", 95 % intervals" if any(p.interval for p in self) else ""
        ax.set_title(plain_text(f"Pareto front{hardware}{bars}"), fontsize="medium")
        if not is_bytes:
            ax.xaxis.set_major_formatter(matplotlib_module("ticker").EngFormatter())
        style_axes(ax)
        return ax

    def _picture(self) -> str:
        return picture(self.plot, "the Pareto front") if self.points else ""

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
        header = {"version": FRONT_VERSION, "measure": self.measure, "cost": self.cost, "made_by": dict(self.made_by)}
        shared: dict[str, Any] = json_values({**header, "points": points}, "front")
        return {**shared, "ranges": [json.loads(text) for text in ranges]}

    def save(self, path: str | PathLike[str]) -> None:
        """Write the front as a JSON file, which is replaced atomically.

        Raises:
            LogError: it could not be written; an older file is unchanged.
        """
        replace_file(Path(path), canonical(self.to_json()) + "\n")


def _cells(measure: str, point: FrontPoint) -> dict[str, Any]:
    """The row of a point in a data frame."""
    low, high = point.interval or (None, None)
    own = {"trial": point.trial, measure: point.score, f"{measure}_low": low, f"{measure}_high": high}
    return {**own, **point.costs, **{k: v for k, v in number_values(point.results).items() if k not in own}}


def load_front(path: str | PathLike[str]) -> ParetoFront:
    """Read the file of a front that a search wrote, finished or not.

    Raises:
        LogError: unreadable, no JSON, malformed, or written by another version of hago.
    """
    where = str(path)
    try:
        data = read_file(path)
        text = data.decode("utf-8")
    except (OSError, ValueError) as error:
        raise LogError(f"cannot read front {where}: {error}") from None
    with told_from_other_kinds(data, where, FRONT):
        value = parse_json(text, where)
        check_version(value, FRONT_VERSION, where)
        if value["version"] < FRONT_VERSION:
            raise LogError(f"{where} is a front of version 1, without strategies; the search's command writes it anew")
        check_schema(value, "front", where)
    points = tuple(_point(p, value["ranges"], f"{where}: $.points[{i}]") for i, p in enumerate(value["points"]))
    if any(value["cost"] not in p.costs for p in points):
        raise LogError(f"{where}: a point has no figure {value['cost']!r} among its costs")
    return ParetoFront(value["measure"], value["cost"], points, value["made_by"])


def _point(value: Any, ranges: list[Any], where: str) -> FrontPoint:
    strategy = value["strategy"]
    numbers = strategy["thresholds"]
    unknown = [key for key, number in numbers.items() if number >= len(ranges)]
    if unknown:
        raise LogError(f"{where}: thresholds[{unknown[0]!r}] is {numbers[unknown[0]]}, there are {len(ranges)} ranges")
    complete = {**strategy, "thresholds": {key: ranges[number] for key, number in numbers.items()}}
    ends = value["interval"]
    return FrontPoint(
        trial=value["trial"],
        strategy=Strategy.from_json(complete, f"{where}.strategy"),
        score=float(value["value"]),
        interval=None if ends is None else (float(ends[0]), float(ends[1])),
        costs={k: float(v) for k, v in value["costs"].items()},
        results=value["results"],
    )


def _interval(ends: tuple[float, float] | None) -> str:
    return "-" if ends is None else f"{ends[0]:.6g} to {ends[1]:.6g}"


# ---------------------------------------------------------------- while the search runs
class FrontWriter:
    """Keeps the front and its file current. `search.session` makes one per search, and the study calls it with every
    trial; it returns texts for the line of progress.

    Args:
        scorer: of the search.
        path: of the front's file, or None.
        made_by: the description of the search.
        is_local: whether points are scored in this process, so that their forward passes are counted.
        costs: the costs in use; the first is the cost of the front.
        strategy_of: makes the strategy of a trial.
    """

    def __init__(
        self,
        scorer: GoalScorer,
        path: Path | None,
        made_by: Mapping[str, Any],
        *,
        is_local: bool,
        costs: Sequence[str],
        strategy_of: Callable[[Trial], Strategy],
    ) -> None:
        self._front = TrialFront(scorer.goal.objective.figure, costs[0] if costs else FRONT_COST)
        self._scorer, self._path, self._made_by, self._is_local = scorer, path, made_by, is_local
        self._strategy_of = strategy_of
        self._points: dict[int, FrontPoint] = {}
        self._corrected: ParetoFront | None = None
        self._new_trials = 0
        # forwards before the first trial are not counted
        self._forwards_before = scorer.evaluator.forwards if is_local else 0.0
        self._is_written = False

    def __call__(self, trial: Trial, best: Trial | None, replayed: bool) -> Sequence[str]:
        """Add a trial, and write the file if the front changed; returns texts for the line of progress."""
        self._new_trials += not replayed
        if self._scorer.goal.keeps_asked(trial.score) and self._front.add(trial):
            self._is_written = False
        if not replayed and not self._is_written:
            self._write()
        return self._figures(best)

    def finish(self) -> None:
        """Write the file if it is not current, as when all trials were read from the log."""
        if not self._is_written:
            self._write()

    def stop(self) -> None:
        """Write the file after an interrupt, unless the log was still being replayed, when the front is incomplete."""
        if self._new_trials:
            self.finish()

    @property
    def cost(self) -> str:
        """The cost by which the front is ordered."""
        return self._front.cost

    def replace(self, front: ParetoFront) -> None:
        """Put the front with corrected points in place of that of the trials, and write the file."""
        self._corrected = front
        self._write()

    @property
    def front(self) -> ParetoFront:
        """The front of the trials so far, or what was put in its place."""
        if self._corrected is not None:
            return self._corrected
        kept, front = self._points, self._front
        # only strategies of points that are on the front are kept
        self._points = {t.index: kept.get(t.index) or self._point(t) for t in front.trials}
        return ParetoFront(front.measure, front.cost, tuple(self._points.values()), self._made_by)

    def _write(self) -> None:
        if self._path is not None:
            self.front.save(self._path)
            self._is_written = True

    def _point(self, trial: Trial) -> FrontPoint:
        return front_point(self._front.measure, trial.index, self._strategy_of(trial), trial.score)

    def _figures(self, best: Trial | None) -> list[str]:
        shown = []
        cost = None if best is None else best.score.costs.get(self._front.cost)
        if cost is not None:
            shown.append(f"{self._front.cost} {amount_text(self._front.cost, cost)}")
        shown.append(f"front of {len(self._front)}")
        evaluator = self._scorer.evaluator
        if self._is_local and self._new_trials:
            shown.append(f"{evaluator.forwards - self._forwards_before:.0f} forwards")
            shown.append(f"{100 * evaluator.reuse.spent.share:.0f} % cached")
        return shown
