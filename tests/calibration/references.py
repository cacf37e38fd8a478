"""Slow, plain definitions that the vectorised estimators are compared with."""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections.abc import Sequence
from fractions import Fraction

import torch
from torch import Tensor

from hago.arithmetic.numerics import quantize
from hago.arithmetic.schemes import Grid, make_qparams
from hago.arithmetic.types import DType


def quantization_error(x: Tensor, grid: Grid, lo: Tensor, hi: Tensor) -> float:
    """The mean squared error of real values through the arithmetic that models run on."""
    dtype = DType("grid", grid.bits, "int" if grid.signed else "uint", torch.int64)
    target = make_qparams(grid.scheme, lo, hi, grid.bits, dtype, power_of_two=grid.power_of_two)
    real = x.to(torch.float64)
    return float((quantize(real, target) * target.scale - real).square().mean())


def divergence_by_loops(histogram: Sequence[float], end: int, steps: int, top: int) -> float:
    """KL(P || Q) for one threshold of `end` bins: first P, then the cells of Q, then the sum."""
    total = sum(histogram)
    p = list(histogram[:end])
    beyond = total - sum(p)
    inside = sum(p)
    if inside == 0:
        return math.inf
    p[-1] += beyond
    cells: dict[int, list[int]] = {}
    for k in range(end):
        nearest = math.floor(Fraction(2 * k + 1, 2) * steps / end + Fraction(1, 2))
        cells.setdefault(min(nearest, top), []).append(k)
    q = [0.0] * end
    for bins in cells.values():
        mass = sum(histogram[k] for k in bins)
        filled = [k for k in bins if p[k] > 0]
        if mass == 0 and filled:
            mass = 1
        for k in filled:
            q[k] = mass / len(filled)
    return sum(a / total * math.log((a / total) / (b / inside)) for a, b in zip(p, q, strict=True) if a > 0)


def squared_error_by_pieces(
    histogram: Sequence[int], origin: int, scale: Fraction, lowest: int, count: int
) -> Fraction:
    """The integral of (x - Q(x))**2 over values spread evenly in each bin, cut at every midpoint."""
    midpoints = [(lowest + j + Fraction(1, 2)) * scale for j in range(count)]
    total = Fraction(0)
    for k, mass in enumerate(histogram):
        left, right = Fraction(k - origin), Fraction(k - origin + 1)
        cuts = [left, *(m for m in midpoints if left < m < right), right]
        for a, b in itertools.pairwise(cuts):
            level = scale * (lowest + bisect_left(midpoints, (a + b) / 2))
            total += mass * ((b - level) ** 3 - (a - level) ** 3) / 3
    return total
