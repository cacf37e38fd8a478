"""Pareto fronts of weight bytes and SQNR, all measured on the same held-out samples.

Fronts are compared by their hypervolumes, whose axes are dB and the logarithm of bytes, and at budgets of bytes. A
point has the contribution of every sample, so that two points are compared sample by sample. A point lies above a
front if the best point of the front with no more bytes is worse, and the 95 % interval of the paired difference does
not include 0.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from hago.search.intervals import jackknife_interval, paired_interval
from hago.search.objective import decibels

#: A line of a table, as JSON values.
Row: TypeAlias = dict[str, Any]


@dataclass(frozen=True)
class Point:
    """A quantized model on held-out samples.

    Args:
        cost: bytes of its weights.
        signal, noise: (samples,) sums of squares of the float model's outputs, and of the differences from them.
        right: (samples,) whether the class is right; None without labels.
        label: describes it, e.g. by its bits.
        seconds: time of the search at which it was found.
    """

    cost: float
    signal: Tensor
    noise: Tensor
    right: Tensor | None = None
    label: str = ""
    seconds: float = 0.0

    @property
    def sqnr(self) -> float:
        """The SQNR of all samples together, in dB."""
        return decibels(float(self.signal.sum()), float(self.noise.sum()))

    @property
    def top1(self) -> float | None:
        """The fraction of the samples that is classified correctly."""
        return None if self.right is None else float(self.right.double().mean())

    def above(self, other: Point) -> tuple[float, float, float]:
        """The number of dB by which it lies above another point, with the paired 95 % interval."""
        noises = torch.stack([other.noise, self.noise], 1).double()

        def gain(mean: Tensor) -> float:
            return decibels(float(mean[0]), float(mean[1]))

        return gain(noises.mean(0)), *jackknife_interval(noises, gain)

    def interval(self) -> tuple[float, float]:
        """The 95 % interval of its SQNR."""
        parts = torch.stack([self.signal, self.noise], 1)
        return jackknife_interval(parts, lambda mean: decibels(float(mean[0]), float(mean[1])))


def front(points: Iterable[Point]) -> list[Point]:
    """The points that no other point beats in both bytes and SQNR, in order of bytes."""
    found: list[Point] = []
    for point in sorted(points, key=lambda p: (p.cost, -p.sqnr)):
        if not found or point.sqnr > found[-1].sqnr:
            found.append(point)
    return found


def hypervolume(points: Sequence[Point], most: float) -> float:
    """The area that a front dominates up to `most` bytes and down to 0 dB; its axes are dB and log2 of bytes."""
    line = [p for p in front(points) if p.cost <= most and p.sqnr > 0.0]
    ends = [*(p.cost for p in line), most][1:]
    return sum(math.log2(end / p.cost) * p.sqnr for p, end in zip(line, ends, strict=True))


def best_within(points: Sequence[Point], cost: float) -> Point | None:
    """The best point with at most `cost` bytes; None if all points have more."""
    return max((p for p in points if p.cost <= cost), key=lambda p: p.sqnr, default=None)


def at_budgets(points: Sequence[Point], budgets: Iterable[float]) -> list[Point]:
    """The best point within each budget of bytes, as if it had all of these bytes."""
    found = ((best_within(points, budget), budget) for budget in budgets)
    return [replace(point, cost=budget) for point, budget in found if point is not None]


def beaten(theirs: Sequence[Point], ours: Sequence[Point]) -> list[tuple[Point, str]]:
    """The points of their front that lie above ours, each with the difference as text."""
    found = []
    for point in front(theirs):
        best = best_within(ours, point.cost)
        if best is None:
            if point.sqnr > 0.0:
                found.append((point, "fewer bytes than any of ours"))
            continue
        mean, low, high = point.above(best)
        if low > 0.0 and point.sqnr > best.sqnr:  # two without noise are equal
            found.append((point, f"{mean:+.2f} dB [{low:+.2f}, {high:+.2f}]"))
    return found


def compared(fronts: Mapping[str, Sequence[Point]], mine: str, most: float | None = None) -> list[Row]:
    """A row for every front: its hypervolume, and the number of its points that lie above the front `mine`.

    Args:
        most: bytes up to which volumes count; by default those of the largest point.
    """
    edge = max(p.cost for line in fronts.values() for p in line) if most is None else most
    whole = hypervolume(fronts[mine], edge) or 1.0
    rows = []
    for name, line in fronts.items():
        over = [] if name == mine else beaten(line, fronts[mine])
        lost = [_lost(p, fronts[mine]) for p in front(line)] if name != mine else []
        rows.append(
            {
                "front": name,
                "points": len(front(line)),
                "hypervolume": hypervolume(line, edge) / whole,
                "above": len(over),
                "above_said": [f"{p.label} of {p.cost:.0f} B: {said}" for p, said in over],
                "top1_above": sum(lost),
            }
        )
    return rows


def as_good_after(ours: Sequence[Point], theirs: Sequence[Point], most: float, rivals: Sequence[Point]) -> float:
    """The seconds after which our front had their hypervolume, up to `most` bytes, and none of `rivals`, which are
    points of theirs, lay above it; infinite if that was never the case."""
    for seconds in sorted(p.seconds for p in ours):
        known = [p for p in ours if p.seconds <= seconds]
        if hypervolume(known, most) >= hypervolume(theirs, most) and not beaten(rivals, known):
            return seconds
    return float("inf")


def _lost(point: Point, ours: Sequence[Point]) -> bool:
    """Whether the top-1 of a point lies above that of our best point with no more bytes, beyond the paired interval."""
    cheaper = [p for p in ours if p.cost <= point.cost and p.right is not None]
    if point.right is None or not cheaper:
        return False
    best = max(cheaper, key=lambda p: p.top1 or 0.0)
    assert best.right is not None
    return paired_interval(point.right.double() - best.right.double())[1] > 0.0


def listed(fronts: Mapping[str, Sequence[Point]]) -> list[Row]:
    """Every point of every front with its interval."""
    return [
        {
            "front": name,
            "label": p.label,
            "bytes": p.cost,
            "sqnr": p.sqnr,
            "interval": list(p.interval()),
            "top1": p.top1,
        }
        for name, line in fronts.items()
        for p in front(line)
    ]


def plot(fronts: Mapping[str, Sequence[Point]], path: Path, title: str) -> str:
    """Draw the fronts, and return a line that says where; without matplotlib nothing is drawn, and the line says so."""
    try:
        import matplotlib
    except ImportError:
        return "matplotlib is not installed: no plot"
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 6))
    for name, points in fronts.items():
        line = front(points)
        ranges = [p.interval() for p in line]
        bars = [[p.sqnr - low for p, (low, _) in zip(line, ranges, strict=True)]]
        bars.append([high - p.sqnr for p, (_, high) in zip(line, ranges, strict=True)])
        values = [p.sqnr for p in line]
        axes.errorbar([p.cost for p in line], values, yerr=bars, label=name, fmt=".-", lw=0.8, capsize=2)
    axes.set_xlabel("bytes of weights")
    axes.set_ylabel("SQNR of held-out samples, dB")
    axes.set_title(title)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return f"plotted in {path}"


def write(folder: Path, name: str, rows: Sequence[Row]) -> None:
    """Write rows as JSON, and their numbers and texts as a table in Markdown."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(list(rows), indent=1))
    titles = [k for k, v in rows[0].items() if isinstance(v, (int, float, str))]
    lines = [f"| {' | '.join(titles)} |", "|" + "---|" * len(titles)]
    lines += [f"| {' | '.join(_cell(row.get(k, '')) for k in titles)} |" for row in rows]
    (folder / f"{name}.md").write_text("\n".join(lines) + "\n")


def _cell(value: Any) -> str:
    if not isinstance(value, float):
        return str(value)
    return f"{value:.4g}" if abs(value) < 1e4 else f"{value:.0f}"
