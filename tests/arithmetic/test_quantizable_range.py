"""The quantizable range: it agrees with the qparams of a threshold, and `thresholds_for` inverts it."""

from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from hago.arithmetic.schemes import SCHEMES, Grid, make_qparams, quantizable_range, thresholds_for
from hago.arithmetic.types import DTYPES

ENDS = st.floats(0.001, 1e4)
GRIDS = st.builds(
    Grid,
    bits=st.integers(2, 8),
    scheme=st.sampled_from(sorted(SCHEMES)),
    signed=st.booleans(),
    power_of_two=st.booleans(),
)


def range_of_qparams(lo: float, hi: float, grid: Grid) -> tuple[float, float]:
    """What a Plan's integers stand for, from the qparams themselves."""
    ends = [torch.tensor(v, dtype=torch.float64) for v in (lo, hi)]
    dtype = DTYPES["int8" if grid.signed else "uint8"]
    made = make_qparams(grid.scheme, *ends, grid.bits, dtype, power_of_two=grid.power_of_two)
    scale, zero = float(made.scale), int(made.zero_point)
    return (made.qmin - zero) * scale, (made.qmax - zero) * scale


@given(low=ENDS, high=ENDS, grid=GRIDS)
def test_the_range_is_that_of_the_qparams_of_the_threshold(low: float, high: float, grid: Grid) -> None:
    lo = -low if grid.signed else 0.0
    found = quantizable_range(lo, high, grid)
    expected = range_of_qparams(lo, high, grid)
    assert all(math.isclose(a, b, rel_tol=1e-6, abs_tol=1e-12) for a, b in zip(found, expected, strict=True))


@given(low=ENDS, high=ENDS, grid=GRIDS)
def test_thresholds_for_inverts_quantizable_range(low: float, high: float, grid: Grid) -> None:
    seen = quantizable_range(-low if grid.signed else 0.0, high, grid)
    again = quantizable_range(*thresholds_for(*seen, grid, slack=seen[1] * 1e-9), grid)
    assert all(math.isclose(a, b, rel_tol=1e-9, abs_tol=1e-12) for a, b in zip(again, seen, strict=True))


def test_the_schemes_differ_by_a_quantum() -> None:
    assert quantizable_range(-1.0, 1.0, Grid(8, "hago")) == (-127 / 128, 127 / 128)
    assert quantizable_range(-1.0, 1.0, Grid(8, "symmetric")) == (-1.0, 1.0)
    assert quantizable_range(0.0, 1.0, Grid(8, "hago", signed=False)) == (0.0, 255 / 256)
    assert quantizable_range(-0.25, 0.7, Grid(4, "hago", power_of_two=True)) == (-7 / 8, 7 / 8)
