"""Exact integer arithmetic: dtypes, schemes, scales, multipliers, rounding, requantization, packing; and gradients."""

from hago.arithmetic import (
    convolution,
    equality,
    fake_quantize,
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
    "fake_quantize",
    "groups",
    "multipliers",
    "numerics",
    "packing",
    "rounding",
    "schemes",
    "straight_through",
    "types",
]
