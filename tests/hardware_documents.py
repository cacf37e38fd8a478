"""A hardware document without mistakes, for tests to spoil."""

from __future__ import annotations

from typing import Any

Document = dict[str, Any]


def small() -> Document:
    """A document without mistakes."""
    return {
        "$schema": "../hago/schemas/hardware.schema.json",
        "version": 1,
        "name": "small",
        "sources": ["made up"],
        "activation": {"scheme": "hago", "granularity": "per_tensor"},
        "weight": {"scheme": "hago", "granularity": "per_channel"},
        "requantize": {"form": "float32"},
        "rounding": "half_even",
        "signatures": {
            "mac": {
                "in": ["uint8", "int8", "int32"],
                "out": "int32",
                "accumulator": {"dtype": "int32", "overflow": "wrap"},
                "macs_per_cycle": 64,
            },
            "i32": {"in": ["int32"], "out": "int32", "max_bits": 23},
            "f32": {"in": ["float32"], "out": "float32", "macs_per_cycle": 16},
        },
        "ops": {"conv2d": ["mac", "f32"], "add": ["i32", "f32"]},
        "other_ops": "float32",
        "cost": {"clock_hz": 3e9},
    }
