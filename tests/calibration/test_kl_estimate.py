"""kl_estimate against the usual loop over candidates, and on data with outliers."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hago.arithmetic.schemes import Grid
from hago.calibration.estimators import KlEstimate, MaxRange, kl_divergence, magnitudes, without_zeros
from hago.calibration.observer import constant_statistics

from .references import divergence_by_loops


def ends_from(steps: int, bins: int) -> Tensor:
    return torch.arange(steps, bins + 1)


@given(
    st.lists(st.integers(0, 5), min_size=24, max_size=60).filter(any),
    st.integers(1, 12),
    st.booleans(),
)
def test_every_candidate_has_the_divergence_of_the_loop(counts: list[int], steps: int, whole: bool) -> None:
    top = steps if whole else max(1, steps - 1)
    ends = ends_from(steps, len(counts))
    found = kl_divergence(torch.tensor(counts, dtype=torch.float64), ends, steps, top)
    expected = [divergence_by_loops(counts, int(end), steps, top) for end in ends]
    for got, want in zip(found.tolist(), expected, strict=True):
        assert got == want or math.isclose(got, want, rel_tol=1e-9, abs_tol=1e-9)


SHAPES = {
    "normal": lambda: torch.randn(20_000),
    "laplace": lambda: torch.distributions.Laplace(0.0, 1.0).sample((20_000,)),
    "outlier": lambda: torch.cat([torch.randn(20_000), torch.tensor([50.0])]),
    "relu": lambda: torch.randn(20_000).relu(),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_the_minimum_of_a_real_histogram_is_that_of_the_loop(shape: str) -> None:
    torch.manual_seed(0)
    seen = constant_statistics(SHAPES[shape]())
    grid = Grid(6)
    histogram = without_zeros(magnitudes(seen, grid), 0)[0]
    last = int(torch.ceil(max(-seen.minimum, seen.maximum) / seen.bin_width))
    # Every eighth candidate: the loop takes milliseconds for each.
    ends = torch.arange(32, last + 1, 8)
    found = kl_divergence(histogram, ends, 32, 31)
    counts = histogram.tolist()
    expected = torch.tensor([divergence_by_loops(counts, int(e), 32, 31) for e in ends], dtype=torch.float64)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
    assert int(found.argmin()) == int(expected.argmin())
    lo, hi = KlEstimate()(seen, grid)
    everywhere = kl_divergence(histogram, ends_from(32, last), 32, 31)
    chosen = (32 + int(everywhere.argmin())) * float(seen.bin_width)
    assert max(-float(lo), float(hi)) == min(chosen, max(-float(seen.minimum), float(seen.maximum)))


@pytest.mark.parametrize("shape", ["normal", "laplace", "outlier"])
@pytest.mark.parametrize("scheme", ["hago", "symmetric", "affine"])
def test_long_tails_are_cut_below_the_largest_value(shape: str, scheme: str) -> None:
    torch.manual_seed(1)
    x = SHAPES[shape]()
    lo, hi = KlEstimate()(constant_statistics(x), Grid(8, scheme))
    largest = float(x.abs().max())
    threshold = max(-float(lo), float(hi))
    assert threshold < largest
    assert threshold > 3 * float(x.std()) if shape == "normal" else threshold < largest * 0.97
    if shape == "outlier":
        assert threshold < 10


def test_fewer_bits_clip_more() -> None:
    torch.manual_seed(2)
    seen = constant_statistics(torch.distributions.Laplace(0.0, 1.0).sample((100_000,)))
    chosen = [float(KlEstimate()(seen, Grid(bits))[1]) for bits in (2, 3, 4, 6, 8)]
    assert chosen == sorted(chosen)
    assert chosen[0] < chosen[-1]


def test_powers_of_two_are_compared_too() -> None:
    torch.manual_seed(3)
    x = torch.cat([torch.randn(20_000), torch.tensor([50.0])])
    seen = constant_statistics(x)
    for bits in (4, 6, 8):
        grid = Grid(bits, power_of_two=True)
        lo, hi = KlEstimate()(seen, grid)
        assert (float(lo), float(hi)) == (-4.0, 4.0)


@pytest.mark.parametrize("bits", [10, 12, 16, 32])
@pytest.mark.parametrize("scheme", ["hago", "affine"])
def test_a_grid_as_fine_as_the_histogram_clips_nothing(bits: int, scheme: str) -> None:
    seen = constant_statistics(torch.distributions.Laplace(0.0, 1.0).sample((20_000,)))
    grid = Grid(bits, scheme)
    for got, want in zip(KlEstimate()(seen, grid), MaxRange()(seen, grid), strict=True):
        assert torch.equal(got, want)


def test_zeros_do_not_influence_the_threshold() -> None:
    torch.manual_seed(4)
    x = torch.randn(20_000).abs()
    sparse = torch.cat([x, torch.zeros(200_000)])
    grid = Grid(8, signed=False)
    _, dense_hi = KlEstimate()(constant_statistics(x), grid)
    _, sparse_hi = KlEstimate()(constant_statistics(sparse), grid)
    assert math.isclose(float(dense_hi), float(sparse_hi), rel_tol=0.02)


def test_channels_are_not_clipped() -> None:
    seen = constant_statistics(torch.randn(4, 500), 0)
    for got, want in zip(KlEstimate()(seen, Grid(4)), MaxRange()(seen, Grid(4)), strict=True):
        assert torch.equal(got, want)
