"""The figures by which benchmarks compare fronts."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from _fronts import Point, as_good_after, at_budgets, beaten, compared, front, hypervolume, listed


def point(cost: float, noise: float, label: str = "", spread: float = 0.0, right: float = 0.5) -> Point:
    """100 samples of signal 1; every other one has more noise."""
    noises = torch.full((100,), noise, dtype=torch.float64)
    noises[::2] += spread
    noises[1::2] -= spread
    hits = (torch.arange(100) < 100 * right).double()
    return Point(cost, torch.ones(100, dtype=torch.float64), noises, hits, label)


def test_a_front_holds_what_nothing_beats() -> None:
    points = [point(4, 0.1), point(2, 0.01), point(2, 0.1), point(6, 0.001), point(5, 0.01)]
    assert [(p.cost, round(p.sqnr)) for p in front(points)] == [(2, 20), (6, 30)]
    assert front(front(points)) == front(points)


def test_the_hypervolume_is_what_squares_under_the_front_count() -> None:
    points = [point(2.0, 0.1), point(5.0, 0.01), point(7.0, 0.05), point(30.0, 0.001)]
    widths = torch.linspace(0.0, math.log2(10.0), 2001, dtype=torch.float64)
    middles = 2.0 ** ((widths[1:] + widths[:-1]) / 2)
    inside = sum(any(p.cost <= b and p.sqnr > d + 0.5 for p in points) for b in middles.tolist() for d in range(40))
    assert hypervolume(points, 10.0) == pytest.approx(inside * float(widths[1]), rel=1e-3)
    assert hypervolume(points, 2.0) == 0.0
    assert hypervolume([point(1, 10.0)], 5.0) == 0.0  # less than nothing in dB


def test_a_point_lies_above_where_the_paired_interval_says_so() -> None:
    ours = [point(10, 0.01, spread=0.005), point(20, 0.001)]
    # the same samples are harder in both, so a small gain is certain
    assert [p.label for p, _ in beaten([point(12, 0.0099, "better", 0.005)], ours)] == ["better"]
    # as much better in the mean, but not on the same samples
    assert beaten([point(12, 0.0099, "luck", -0.009)], ours) == []
    assert beaten([point(12, 0.0101, "worse", 0.005), point(25, 0.001, "equal")], ours) == []
    assert beaten([point(9, 0.0)], [point(8, 0.0)]) == []  # neither has any noise
    assert [said for _, said in beaten([point(9, 0.1)], ours)] == ["fewer bytes than any of ours"]


def test_what_is_compared_and_listed() -> None:
    fronts = {
        "mine": [point(10, 0.01, right=0.6), point(20, 0.001, right=0.7)],
        "other": [point(20, 0.01, right=0.9)],
        "same": [point(10, 0.01, right=0.6), point(20, 0.001, right=0.7)],
    }
    rows = {r["front"]: r for r in compared(fronts, "mine", 30.0)}
    assert rows["same"]["hypervolume"] == rows["mine"]["hypervolume"] == 1.0
    other, both = 20 * math.log2(30 / 20), 20 * math.log2(20 / 10) + 30 * math.log2(30 / 20)
    assert rows["other"]["hypervolume"] == pytest.approx(other / both)
    assert [r["above"] for r in rows.values()] == [0, 0, 0]
    assert [r["top1_above"] for r in rows.values()] == [0, 1, 0]
    for row in listed(fronts):
        low, high = row["interval"]
        assert low <= row["sqnr"] <= high and math.isfinite(high - low)


def test_when_a_front_is_as_good_as_another() -> None:
    ours = [replace(point(20, 0.001), seconds=7.0), replace(point(10, 0.01), seconds=2.0)]

    def after(*theirs: Point) -> float:
        return as_good_after(ours, theirs, 40.0, theirs)

    assert after(point(10, 0.1)) == 2.0
    assert after(point(20, 0.002)) == 7.0
    assert after(point(20, 0.0001)) == math.inf
    # better between the budgets alone
    theirs = [point(15, 0.005)]
    assert after(*theirs) == math.inf
    assert as_good_after(ours, theirs, 40.0, at_budgets(theirs, [10, 20, 40])) == 7.0


def test_the_best_points_within_budgets() -> None:
    points = [point(4, 0.1), point(8, 0.01), point(9, 0.05)]
    assert [(p.cost, round(p.sqnr)) for p in at_budgets(points, [2, 4, 7, 10])] == [(4, 10), (7, 10), (10, 20)]
