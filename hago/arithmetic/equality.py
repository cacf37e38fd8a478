"""Equality: the one definition of when two values are equal, which every comparison of hago calls.

Integers and booleans of all dtypes are compared as int64. Floats are compared by value: NaN equals NaN,
and -0 equals 0. A float equals an integer if it is that integer exactly, also beyond 2**53. Tensors of different
shapes differ in every entry. There is no tolerance; comparisons with a tolerance have other names and state it.

Real numbers that an engine gives for quanta are rounded to integers first, by `to_quanta` and nowhere else.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

#: Floats of at least this size lie outside of int64.
_BEYOND_INT64: Final = 2.0**63


class Differences(NamedTuple):
    """The number and the size of the differences of two values.

    Args:
        differing: the number of entries that differ.
        largest: the largest |a - b| of these. 0 if nothing differs; the largest float64 if a NaN or an infinity
            is compared with something else, or if shapes or structures differ.
    """

    differing: int
    largest: float


def equal(a: Any, b: Any) -> bool:
    """Whether two values are equal: tensors, numbers, or tuples, lists and dicts of such."""
    return count_differing(a, b) == 0


def count_differing(a: Any, b: Any) -> int:
    """The number of entries in which two values differ; see `equal`."""
    return differences(a, b).differing


def differences(a: Any, b: Any) -> Differences:
    """Compare two values, and return how many entries differ and by how much at most.

    If shapes or structures differ, every entry of the larger value counts, and at least one.

    Args:
        a, b: tensors, numbers, or tuples, lists and dicts of such; anything else is compared with `==`.
    """
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return _tensor_differences(a, b) if a.shape == b.shape else _differ_wholly(a, b)
    if isinstance(a, (tuple, list)) and isinstance(b, (tuple, list)):
        if len(a) != len(b):
            return _differ_wholly(a, b)
        return _total([differences(x, y) for x, y in zip(a, b, strict=True)])
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return _total([differences(a[key], b[key]) for key in a]) if a.keys() == b.keys() else _differ_wholly(a, b)
    if isinstance(a, (int, float)) and isinstance(b, (int, float)):
        return Differences(0, 0.0) if a == b or (a != a and b != b) else Differences(1, _gap(a, b))
    structured = (Tensor, tuple, list, Mapping)
    if isinstance(a, structured) or isinstance(b, structured) or a != b:
        return _differ_wholly(a, b)
    return Differences(0, 0.0)


def to_quanta(values: Tensor, scale: Tensor | float = 1.0) -> Tensor:
    """Convert quanta that an engine gave as real numbers to whole numbers in float64; integers are returned unchanged.

    Args:
        values: multiples of `scale` up to the engine's own rounding. NaN and infinities are kept.
        scale: real units per quantum; broadcasts against the values.
    """
    return (values.to(torch.float64) / scale).round() if values.is_floating_point() else values


def _tensor_differences(a: Tensor, b: Tensor) -> Differences:
    a, b = _comparable(a), _comparable(b)
    apart = _differ(a, b)
    count = int(apart.sum())
    return Differences(count, _largest_gap(a[apart], b[apart]) if count else 0.0)


def _comparable(x: Tensor) -> Tensor:
    """Integers and booleans as int64, complex numbers as pairs of floats, floats unchanged."""
    if x.is_complex():
        return torch.view_as_real(x.resolve_conj())
    return x if x.is_floating_point() else x.to(torch.int64)


def _differ(a: Tensor, b: Tensor) -> Tensor:
    """Entry by entry, whether two tensors of float or int64 dtypes differ."""
    if a.is_floating_point() and b.is_floating_point():
        return (a != b) & ~(a.isnan() & b.isnan())
    if not a.is_floating_point() and not b.is_floating_point():
        return a != b
    floats, integers = (a.to(torch.float64), b) if a.is_floating_point() else (b.to(torch.float64), a)
    # a whole number of float64 within int64 converts exactly, where int64 would be rounded in float64
    converts = (floats >= -_BEYOND_INT64) & (floats < _BEYOND_INT64) & (floats == floats.trunc())
    return ~converts | (torch.where(converts, floats, 0.0).to(torch.int64) != integers)


def _largest_gap(a: Tensor, b: Tensor) -> float:
    """The largest |a - b| of entries that differ."""
    gaps = (a.to(torch.float64) - b.to(torch.float64)).abs()
    if not a.is_floating_point() and not b.is_floating_point():
        gaps = torch.where(gaps < _BEYOND_INT64 / 2, (a - b).abs().to(torch.float64), gaps)  # exact where it fits
    most = sys.float_info.max
    return float(gaps.nan_to_num(nan=most, posinf=most).max())


def _gap(a: float, b: float) -> float:
    """|a - b| of two Python numbers; integers may be larger than any float."""
    try:
        gap = abs(float(a) - float(b))
    except OverflowError:
        return sys.float_info.max
    return gap if math.isfinite(gap) else sys.float_info.max


def _entries(x: Any) -> int:
    if isinstance(x, Tensor):
        return x.numel()
    if isinstance(x, (tuple, list)):
        return sum(map(_entries, x))
    return sum(map(_entries, x.values())) if isinstance(x, Mapping) else 1


def _differ_wholly(a: Any, b: Any) -> Differences:
    return Differences(max(_entries(a), _entries(b), 1), sys.float_info.max)


def _total(parts: list[Differences]) -> Differences:
    return Differences(sum(p.differing for p in parts), max((p.largest for p in parts), default=0.0))
