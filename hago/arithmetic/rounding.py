"""Rounding: every mode, on floats and as a right shift of integers.

The first four modes round to the nearest integer and differ on ties only; `toward_zero` and `floor` truncate. All are
exact for every float and every int64: a tie of a float is found by a subtraction that has no rounding error. The
functions may change their argument in place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import torch
from torch import Tensor


# Ties are found by an exact subtraction: |x - round(x)| <= 1/2 has no rounding error.
# `floor(x + 0.5)` would be wrong for x = 0.5 - 2**-25, where the sum rounds up to 1.
def _half_even(x: Tensor) -> Tensor:
    return x.round_()


def _half_up(x: Tensor) -> Tensor:
    r = torch.round(x)
    return r.add_((x - r) == 0.5)


def round_half_away(x: Tensor) -> Tensor:
    # With the float below 1/2, the sum rounds up to the next integer from a tie on, and from no float below a tie.
    below = torch.nextafter(torch.tensor(0.5, dtype=x.dtype), torch.tensor(0.0, dtype=x.dtype))
    return torch.copysign(below, x).add_(x).trunc_()


def _half_down(x: Tensor) -> Tensor:
    r = torch.round(x)
    return r.sub_(((r - x) == 0.5).to(r.dtype))


def _toward_zero(x: Tensor) -> Tensor:
    return x.trunc_()


def _floor(x: Tensor) -> Tensor:
    return x.floor_()


ROUNDINGS: Final[Mapping[str, Callable[[Tensor], Tensor]]] = {
    "half_even": _half_even,
    "half_up": _half_up,
    "half_away": round_half_away,
    "half_down": _half_down,
    "toward_zero": _toward_zero,
    "floor": _floor,
}


def saturating_shift(p: Tensor, n: Tensor, limit: int) -> Tensor:
    """`p * 2**n` in int64, clamped to [-limit, limit]; n < 0 counts as 0.

    Args:
        p: int64.
        n: int64, broadcasts against p.
        limit: a power of two, or one less than one.
    """
    left = n.clamp(0, limit.bit_length() - 1)
    most = torch.full_like(left, limit) >> left
    return torch.minimum(torch.maximum(p, -most), most) << left


def rounding_shift(p: Tensor, n: Tensor, rounding: str) -> Tensor:
    """`round(p / 2**n)` in int64, exact; n < 0 shifts left, and results beyond int64 saturate.

    Args:
        p: int64.
        n: int64, broadcasts against p.
        rounding: a name in ROUNDINGS.
    """
    right = n.clamp(0, 62)
    p = saturating_shift(p, -n, torch.iinfo(torch.int64).max)
    beyond = (n - 62).clamp(0, 62)  # bits shifted past the word are or'ed into one sticky bit
    kept = p >> beyond
    p = kept | ((kept << beyond) != p)
    floor = p >> right
    remainder = p - (floor << right)
    half = torch.where(right > 0, torch.ones_like(right) << (right - 1).clamp_min(0), torch.ones_like(right))
    above, tie = remainder > half, (remainder == half) & (right > 0)
    up = {
        "half_even": above | (tie & ((floor & 1) == 1)),
        "half_up": above | tie,
        "half_down": above,
        "half_away": above | (tie & (floor >= 0)),
        "toward_zero": (remainder > 0) & (floor < 0),
        "floor": torch.zeros_like(above),
    }[rounding]
    return floor + up
