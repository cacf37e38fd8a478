"""Represented: the range that the integers of a grid stand for, and the thresholds that make a grid stand for a range.

A threshold means something else in every scheme: in `hago` the largest integer stands for a value one
quantum below it, in `symmetric` for the threshold itself. What integers stand for is the same
everywhere, so it is what tools exchange. The two functions are each other's inverse.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from hago.numerics import power_of_two_at_least
from hago.schemes import SCHEMES, TWO_SIDED, Grid
from hago.types import DTYPES

_SIGNED: Final = DTYPES["int64"]
_UNSIGNED: Final = DTYPES["uint8"]

Range = tuple[float, float]


def represented(lo: float, hi: float, grid: Grid) -> Range:
    """The smallest and the largest real value that the integers of a grid stand for.

    Args:
        lo, hi: thresholds, real units.
    """
    if not grid.signed and grid.scheme not in TWO_SIDED:
        lo = 0.0
    ends = [torch.tensor(v, dtype=torch.float64) for v in (lo, hi)]
    if grid.power_of_two:
        top = power_of_two_at_least(torch.maximum(ends[0].abs(), ends[1].abs()))
        ends = [-top if grid.signed else torch.zeros_like(top), top]
    elif grid.signed and grid.scheme not in TWO_SIDED:
        top = torch.maximum(ends[0].abs(), ends[1].abs())
        ends = [-top, top]
    scheme = SCHEMES["hago" if grid.power_of_two else grid.scheme]
    # nothing but the sign of a dtype matters to a scheme, and that of the grid is the one that counts
    scale, zero, qmin, qmax = scheme(ends[0], ends[1], grid.bits, _SIGNED if grid.signed else _UNSIGNED)
    return _end(qmin - zero, scale), _end(qmax - zero, scale)


def _end(c: Tensor, scale: Tensor) -> float:
    return float(c * scale) + 0.0  # no negative zero


def thresholds_for(lo: float, hi: float, grid: Grid, slack: float = 0.0) -> Range:
    """Thresholds that make the integers of a grid stand for `[lo, hi]`: `represented` gives it back.

    Args:
        lo, hi: the range, lo <= 0 <= hi.
        slack: how far the range's ends may be off, real units. Where thresholds are powers of two, one
            that lies that little above a power is taken for it, and not for the next.
    """
    if grid.scheme in TWO_SIDED and not grid.power_of_two:
        seen = represented(lo, hi, grid)
        width = seen[1] - seen[0]
        return (lo, lo + (hi - lo) * ((hi - lo) / width)) if width > 0 else (lo, hi)
    slack = slack if grid.power_of_two else 0.0
    below, above = represented(-1.0 if grid.signed else 0.0, 1.0, grid)
    top = max(hi - slack, 0.0) / above
    if grid.signed:
        top = max(top, max(-lo - slack, 0.0) / -below)
    return (-top if grid.signed else 0.0), top
