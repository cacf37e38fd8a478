"""Exact integer arithmetic: dtypes, schemes, scales, multipliers, rounding, requantization, packing."""

from hago.arithmetic import (
    convolution,
    equality,
    groups,
    multipliers,
    numerics,
    packing,
    rounding,
    schemes,
    straight_through,
    types,
)

__all__ = [
    "convolution",
    "equality",
    "groups",
    "multipliers",
    "numerics",
    "packing",
    "rounding",
    "schemes",
    "straight_through",
    "types",
]
