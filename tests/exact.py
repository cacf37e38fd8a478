"""Exact arithmetic to test against: Python's integers and fractions, nothing of torch or hago."""

from __future__ import annotations

import math
from fractions import Fraction


def round_exactly(x: Fraction, rounding: str) -> int:
    """`x` rounded to an integer; what each mode means, in words of its own."""
    floor = math.floor(x)
    rest = x - floor
    if rounding == "floor":
        return floor
    if rounding == "toward_zero":
        return math.trunc(x)
    if rest != Fraction(1, 2):
        return floor + (rest > Fraction(1, 2))
    upper = {
        "half_even": floor % 2 == 1,
        "half_up": True,
        "half_down": False,
        "half_away": x > 0,
    }
    return floor + upper[rounding]


def wrap_exactly(c: int, low: int, high: int) -> int:
    """The number in [low, high] that is `c` modulo the size of that range."""
    return (c - low) % (high - low + 1) + low


def clip(c: int, low: int, high: int) -> int:
    return min(max(c, low), high)
