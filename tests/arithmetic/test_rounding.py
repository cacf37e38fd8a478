"""Rounding modes against exact fractions: on floats, and as shifts of integers."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from exact import round_exactly
from hypothesis import example, given
from hypothesis import strategies as st

from hago.arithmetic.rounding import ROUNDINGS, rounding_shift

EVERY = pytest.mark.parametrize("rounding", ROUNDINGS)

#: Rounded by each mode, in the order of ROUNDINGS: half even, up, away, down, toward zero, floor.
#: The roundings that the columns of TABLE are about, in order.
TABLED = ("half_even", "half_up", "half_away", "half_down", "toward_zero", "floor")
TABLE = {
    -2.5: (-2, -2, -3, -3, -2, -3),
    -1.5: (-2, -1, -2, -2, -1, -2),
    -0.5: (0, 0, -1, -1, 0, -1),
    -0.25: (0, 0, 0, 0, 0, -1),
    0.5: (0, 1, 1, 0, 0, 0),
    0.75: (1, 1, 1, 1, 0, 0),
    1.5: (2, 2, 2, 1, 1, 1),
    2.5: (2, 3, 3, 2, 2, 2),
}


def rounded(x: float, rounding: str, dtype: torch.dtype) -> int:
    out = ROUNDINGS[rounding](torch.tensor([x], dtype=dtype))
    assert out.dtype == dtype
    return int(out.item())


def test_the_table() -> None:
    for x, expected in TABLE.items():
        for dtype in (torch.float32, torch.float64):
            assert tuple(rounded(x, r, dtype) for r in TABLED) == expected
        assert tuple(round_exactly(Fraction(x), r) for r in TABLED) == expected


@EVERY
@given(st.floats(-(2.0**40), 2.0**40, width=32))
@example(0.49999997)  # 0.5 - 2**-25: adding a half would round up to 1
@example(8388609.0)
@example(-0.0)
def test_float32(rounding: str, x: float) -> None:
    assert rounded(x, rounding, torch.float32) == round_exactly(Fraction(x), rounding)


@EVERY
@given(st.floats(-(2.0**60), 2.0**60))
@example(0.49999999999999994)
def test_float64(rounding: str, x: float) -> None:
    assert rounded(x, rounding, torch.float64) == round_exactly(Fraction(x), rounding)


@EVERY
@given(st.integers(-(1 << 23), 1 << 23), st.sampled_from([-1, 0, 1]))
def test_ties_and_their_neighbours_in_float32(rounding: str, whole: int, side: int) -> None:
    tie = np.float32(whole) + np.float32(0.5)
    x = float(np.nextafter(tie, np.float32(side * math.inf), dtype=np.float32) if side else tie)
    assert rounded(x, rounding, torch.float32) == round_exactly(Fraction(x), rounding)


@EVERY
@given(st.integers(-(1 << 62), 1 << 62), st.integers(0, 62))
@example(-3 * (1 << 30), 31)
def test_shift(rounding: str, p: int, n: int) -> None:
    out = rounding_shift(torch.tensor(p), torch.tensor(n), rounding)
    assert int(out) == round_exactly(Fraction(p, 1 << n), rounding)


@EVERY
@given(st.integers(-(1 << 61), 1 << 61), st.integers(0, 4), st.integers(1, 200))
def test_shift_of_multiples_of_the_tie(rounding: str, p: int, n: int, odd: int) -> None:
    tie = odd << (n - 1) if n else odd
    for value in (tie, -tie):
        out = rounding_shift(torch.tensor(value), torch.tensor(n), rounding)
        assert int(out) == round_exactly(Fraction(value, 1 << n), rounding)


@EVERY
@given(st.integers(-(1 << 30), 1 << 30), st.integers(-30, 0))
def test_a_negative_shift_multiplies(rounding: str, p: int, n: int) -> None:
    assert int(rounding_shift(torch.tensor(p), torch.tensor(n), rounding)) == p << -n


@EVERY
@given(st.integers(1 - (1 << 62), (1 << 62) - 1), st.integers(63, 80))
@example(-1, 63)
def test_a_shift_past_the_word(rounding: str, p: int, n: int) -> None:
    out = rounding_shift(torch.tensor(p), torch.tensor(n), rounding)
    assert int(out) == round_exactly(Fraction(p, 1 << n), rounding)


@EVERY
def test_shifts_broadcast(rounding: str) -> None:
    p, n = torch.tensor([[5], [-5]]), torch.tensor([0, 1, 2])
    expected = [[round_exactly(Fraction(v, 1 << s), rounding) for s in (0, 1, 2)] for v in (5, -5)]
    assert rounding_shift(p, n, rounding).tolist() == expected
