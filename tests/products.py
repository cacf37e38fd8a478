"""Products of cases, of which a run takes a part: all of them with `--whole`."""

from __future__ import annotations

from collections.abc import Collection
from itertools import product
from typing import Any

#: What was asked for; conftest.py puts it here before anything is collected.
asked = {"whole": False, "named": False}


def whole() -> bool:
    """Whether every case was asked for."""
    return asked["whole"]


def named() -> bool:
    """Whether tests were asked for by name."""
    return asked["named"]


def some(one_of: int, *axes: Collection[Any]) -> list[tuple[Any, ...]]:
    """Diagonals of a product: each value meets one of every `one_of` neighbours on another axis.

    Every value stays where another axis has `one_of` values or more.
    """
    return [
        tuple(value for _, value in numbered)
        for numbered in product(*(enumerate(axis) for axis in axes))
        if whole() or sum(number for number, _ in numbered) % one_of == 0
    ]
