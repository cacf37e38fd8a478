"""A small run of scripts/fuzz_requantize.py, and that it would notice."""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

PATH = Path(__file__).parents[2] / "scripts" / "fuzz_requantize.py"


def _load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("fuzz_requantize", PATH)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # a dataclass looks its module up by name
    spec.loader.exec_module(module)
    return module


FUZZ = _load()


@pytest.mark.parametrize("check", list(FUZZ.checks()), ids=lambda c: c.name)
def test_requantization_is_exact(check: object) -> None:
    assert FUZZ.differences(check, 300, seed=1) == []


def test_a_wrong_rounding_is_found() -> None:
    checks = {c.name: c for c in FUZZ.checks()}
    right = checks["tpu-mlir applyMultiplierAndRShift half_up"]
    wrong = dataclasses.replace(right, got=checks["tpu-mlir applyMultiplierAndRShift half_away"].got)
    assert FUZZ.differences(wrong, 300, seed=1)
    single = checks["tflite MultiplyByQuantizedMultiplier single"]
    other = dataclasses.replace(single, got=checks["tflite MultiplyByQuantizedMultiplier double"].got)
    assert FUZZ.differences(other, 300, seed=1)
