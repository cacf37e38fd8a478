"""The threshold cache: it estimates each threshold of observed nodes and constants once."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from hago.arithmetic.schemes import Grid
from hago.calibration import threshold_cache
from hago.calibration.estimators import ESTIMATORS, MaxRange, named_estimator
from hago.calibration.observer import Observer, constant_statistics
from hago.calibration.statistics import CHANNEL_BINS, TensorStatistics
from hago.calibration.threshold_cache import ThresholdCache
from hago.errors import DataError, HagoError


@dataclass(frozen=True)
class Counting:
    """max_range that keeps the grids it was asked for; unhashable, as a user's may be."""

    asked: list[Grid] = field(default_factory=list)
    name: str = "counting"

    def __call__(self, statistics: TensorStatistics, grid: Grid) -> tuple[Tensor, Tensor]:
        self.asked.append(grid)
        return MaxRange()(statistics, grid)


def observed() -> dict[str, TensorStatistics]:
    torch.manual_seed(0)
    each = Observer()
    each.update(torch.randn(8, 3, 5) * torch.tensor([1.0, 10.0, 0.1]).view(1, 3, 1))
    return {"relu": constant_statistics(torch.rand(50)), "conv": each.finish()}


WEIGHT = torch.arange(-12.0, 12.0).view(4, 3, 2)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_thresholds_are_those_of_the_estimator(name: str) -> None:
    estimate, statistics_by_node, grid = named_estimator(name), observed(), Grid(4)
    ask = ThresholdCache(statistics_by_node, {"weight": WEIGHT}, estimate)
    expected = {
        ("relu", None): estimate(statistics_by_node["relu"], grid),
        ("conv", None): estimate(statistics_by_node["conv"], grid),
        ("weight", None): estimate(constant_statistics(WEIGHT), grid),
        ("weight", 0): estimate(constant_statistics(WEIGHT, 0, bins=CHANNEL_BINS), grid),
        ("weight", -1): estimate(constant_statistics(WEIGHT, 2, bins=CHANNEL_BINS), grid),
        ("weight", 1): estimate(constant_statistics(WEIGHT, 1, bins=CHANNEL_BINS), grid),
    }
    for (node, axis), ends in expected.items():
        for got, want in zip(ask(node, grid, axis), ends, strict=True):
            assert torch.equal(got, want), (node, axis)


def test_each_threshold_is_computed_once() -> None:
    counting = Counting()
    ask = ThresholdCache(observed(), {"weight": WEIGHT}, counting)
    for _ in range(3):
        for grid in (Grid(4), Grid(8), Grid(8, "affine")):
            ask("relu", grid)
            ask("weight", grid, 0)
            ask("weight", grid, -3)
    assert len(counting.asked) == 6
    assert set(counting.asked) == {Grid(4), Grid(8), Grid(8, "affine")}


def test_changing_returned_thresholds_does_not_change_the_cache() -> None:
    ask = ThresholdCache(observed(), {}, MaxRange())
    lo, hi = ask("relu", Grid(8))
    kept = float(hi)
    hi.zero_()
    lo.sub_(1)
    assert [float(end) for end in ask("relu", Grid(8))] == [0.0, kept]


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_blocks_of_channels_do_not_matter(axis: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(1)
    weight = torch.randn(17, 9, 13)
    whole = ThresholdCache({}, {"w": weight}, named_estimator("mse"))("w", Grid(4), axis)
    monkeypatch.setattr(threshold_cache, "_BLOCK", 4)
    for got, want in zip(
        ThresholdCache({}, {"w": weight}, named_estimator("mse"))("w", Grid(4), axis), whole, strict=True
    ):
        assert got.shape == (weight.shape[axis],)
        assert torch.equal(got, want)


@pytest.mark.parametrize("axis", [0, 1])
def test_blocks_that_fit_are_computed_once(axis: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that do not fit are computed again for each grid, and give the same thresholds."""
    torch.manual_seed(1)
    weight, made = torch.randn(16, 8, 9), list[int]()

    def counted(rows: Tensor, *of: Any) -> TensorStatistics:
        made.append(len(rows))
        return constant_statistics(rows, *of)

    monkeypatch.setattr(threshold_cache, "constant_statistics", counted)
    monkeypatch.setattr(threshold_cache, "_BLOCK", 4)
    grids, blocks = [Grid(8), Grid(6), Grid(4)], weight.shape[axis] // 4
    all_fit = ThresholdCache({}, {"w": weight}, named_estimator("mse"))
    expected = [all_fit("w", grid, axis) for grid in grids]
    assert len(made) == blocks

    made.clear()
    size = constant_statistics(weight[:4], 0, bins=CHANNEL_BINS).packed().bytes_at_most()
    monkeypatch.setattr(threshold_cache, "_BYTES", size * 3 // 2)  # of one block
    one_fits = ThresholdCache({}, {"w": weight}, named_estimator("mse"))
    found = [one_fits("w", grid, axis) for grid in grids]
    assert len(made) == 1 + (blocks - 1) * len(grids)
    for got, want in zip(found, expected, strict=True):
        assert torch.equal(torch.stack(got), torch.stack(want))


def test_ranges() -> None:
    statistics_by_node = observed()
    ask = ThresholdCache(statistics_by_node, {"weight": WEIGHT, "half": torch.tensor(0.5)}, MaxRange())
    assert ask.range_of("weight") == (-12.0, 11.0)
    assert ask.range_of("half") == (0.5, 0.5)
    conv = statistics_by_node["conv"]
    assert ask.range_of("conv") == (float(conv.minimum), float(conv.maximum))


def test_refusals() -> None:
    bad = torch.ones(3, 3)
    bad[1, 1] = torch.nan
    ask = ThresholdCache(observed(), {"weight": WEIGHT, "bad": bad, "none": torch.zeros(0, 2)}, MaxRange())
    with pytest.raises(HagoError, match=r"'rellu'.*Did you mean 'relu'"):
        ask("rellu", Grid(8))
    with pytest.raises(HagoError, match=r"'waight'.*Did you mean 'weight'"):
        ask.range_of("waight")
    with pytest.raises(DataError, match="'relu' is no constant, so it has no thresholds along axis 1"):
        ask("relu", Grid(8), 1)
    with pytest.raises(DataError, match="'weight' has 3 axes; there is no axis 3"):
        ask("weight", Grid(8), 3)
    for axis in (None, 0):
        with pytest.raises(DataError, match="'bad'"):
            ask("bad", Grid(8), axis)
        with pytest.raises(DataError, match="'none'"):
            ask("none", Grid(8), axis)


@pytest.mark.parametrize(
    "ends",
    [
        (torch.zeros(1), torch.ones(1)),
        (torch.zeros(2, dtype=torch.float64), torch.ones(2, dtype=torch.float64)),
        (torch.ones(1, dtype=torch.float64), torch.ones(1, dtype=torch.float64)),
        (torch.zeros(1, dtype=torch.float64), torch.full((1,), torch.inf, dtype=torch.float64)),
    ],
)
def test_an_estimator_that_breaks_its_contract_is_named(ends: tuple[Tensor, Tensor]) -> None:
    class Broken:
        name = "broken"

        def __call__(self, statistics: TensorStatistics, grid: Grid) -> tuple[Tensor, Tensor]:
            return ends

    with pytest.raises(HagoError, match=r"'broken'|broken gave .*'relu'"):
        ThresholdCache(observed(), {}, Broken())("relu", Grid(8))
