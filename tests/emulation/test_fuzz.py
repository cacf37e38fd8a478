"""A small run of scripts/fuzz_requantize.py, and a check that it finds a wrong rounding."""

from __future__ import annotations

import dataclasses

import fuzz_requantize
import pytest


@pytest.mark.parametrize("check", list(fuzz_requantize.checks()), ids=lambda c: c.name)
def test_requantization_is_exact(check: object) -> None:
    assert fuzz_requantize.differences(check, 300, seed=1) == []


def test_a_wrong_rounding_is_found() -> None:
    checks = {c.name: c for c in fuzz_requantize.checks()}
    right = checks["tpu-mlir applyMultiplierAndRShift half_up"]
    wrong = dataclasses.replace(right, got=checks["tpu-mlir applyMultiplierAndRShift half_away"].got)
    assert fuzz_requantize.differences(wrong, 300, seed=1)
    single = checks["tflite MultiplyByQuantizedMultiplier single"]
    other = dataclasses.replace(single, got=checks["tflite MultiplyByQuantizedMultiplier double"].got)
    assert fuzz_requantize.differences(other, 300, seed=1)
