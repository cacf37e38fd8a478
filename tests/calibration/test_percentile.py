"""percentile against numpy's, on magnitudes and on both tails."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hago.arithmetic.schemes import Grid
from hago.calibration.estimators import MaxRange, Percentile
from hago.calibration.observer import constant_statistics
from hago.errors import HagoError

PERCENTS = [5.0, 50.0, 90.0, 99.0, 99.9, 99.99]


def samples() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {
        "normal": torch.randn(200_000),
        "lopsided": torch.distributions.Exponential(1.0).sample((200_000,)) - 0.3,
        "uniform": torch.rand(200_000),
    }


@pytest.mark.parametrize("percent", PERCENTS)
def test_magnitudes(percent: float) -> None:
    for name, x in samples().items():
        seen = constant_statistics(x)
        lo, hi = Percentile(percent)(seen, Grid(8))
        exact = float(np.percentile(x.abs().double().numpy(), percent))
        width = float(seen.bin_width)
        assert max(-float(lo), float(hi)) == pytest.approx(exact, abs=1.1 * width), name
        if name == "uniform":
            _, unsigned = Percentile(percent)(seen, Grid(8, signed=False))
            assert float(unsigned) == float(hi)


@pytest.mark.parametrize("percent", PERCENTS)
def test_both_tails(percent: float) -> None:
    for name, x in samples().items():
        seen = constant_statistics(x)
        lo, hi = Percentile(percent)(seen, Grid(8, "affine"))
        tail = (100 - percent) / 2
        low, high = np.percentile(x.double().numpy(), [tail, 100 - tail])
        width = float(seen.bin_width)
        assert float(lo) == pytest.approx(min(low, 0.0), abs=1.1 * width), name
        assert float(hi) == pytest.approx(max(high, 0.0), abs=1.1 * width), name


def test_values_are_assumed_evenly_spread_inside_a_bin() -> None:
    x = torch.cat([torch.zeros(1).add(4096.0), torch.full((99,), 0.75)])
    seen = constant_statistics(x)
    assert float(seen.bin_width) == 2.0
    assert float(Percentile(49.5)(seen, Grid(8))[1]) == 1.0


def test_a_larger_percentile_never_gives_a_smaller_range() -> None:
    for x in samples().values():
        for grid in (Grid(8), Grid(8, "affine"), Grid(8, power_of_two=True)):
            ranges = [Percentile(p)(constant_statistics(x), grid) for p in (*PERCENTS, 100.0)]
            his, los = [float(hi) for _, hi in ranges], [float(lo) for lo, _ in ranges]
            assert his == sorted(his)
            assert los == sorted(los, reverse=True)


@pytest.mark.parametrize("grid", [Grid(8), Grid(8, "affine"), Grid(8, power_of_two=True)])
def test_hundred_percent_clips_nothing(grid: Grid) -> None:
    for x in [*samples().values(), torch.tensor([-2.0, 1.0]), torch.tensor([7.999999])]:
        seen = constant_statistics(x)
        for got, want in zip(Percentile(100)(seen, grid), MaxRange()(seen, grid), strict=True):
            assert torch.equal(got, want)


@pytest.mark.parametrize("percent", [0.0, -1.0, 100.5, float("nan")])
def test_percentages_out_of_range_are_refused(percent: float) -> None:
    with pytest.raises(HagoError, match="at most 100"):
        Percentile(percent)
