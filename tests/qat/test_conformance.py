"""Conformance vectors of training: every quantizer gives the results and gradients of the original implementation.

The vectors are in tests/golden/conformance_*.json. The environment variable HAGO_CONFORMANCE may name one more file.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from . import dispatch_dorefa, dispatch_oneflow, dispatch_pytorch, dispatch_tensorflow
from .vectors import SYSTEMS, Vector, read, wrong

Run = Callable[[Vector], dict[str, Any]]

GOLDEN = Path(__file__).parents[1] / "golden"

DISPATCH: Mapping[str, Mapping[str, Run]] = {
    "oneflow": dispatch_oneflow.DISPATCH,
    "tensorflow": dispatch_tensorflow.DISPATCH,
    "dorefa": dispatch_dorefa.DISPATCH,
    "pytorch": dispatch_pytorch.DISPATCH,
}

#: Ops that are whole workflows of torch; `test_pytorch.py` tests them.
ELSEWHERE = ("prepare_fx",)


def vectors() -> list[Vector]:
    golden = [v for system in SYSTEMS for v in read(GOLDEN / f"conformance_{system}.json")]
    further = os.environ.get("HAGO_CONFORMANCE")
    if further:
        golden += [replace(v, id=f"further:{v.id}") for v in read(Path(further))]
    return [v for v in golden if not v.op.startswith(ELSEWHERE)]


def run_of(vector: Vector) -> Run:
    """The function that computes a vector: that of the longest prefix of its op."""
    table = DISPATCH[vector.system]
    fitting = [prefix for prefix in table if vector.op.startswith(prefix)]
    assert fitting, f"no quantizer for {vector.system} {vector.op!r}"
    return table[max(fitting, key=len)]


@pytest.mark.parametrize("vector", vectors(), ids=lambda v: f"{v.id} {v.op}")
def test_conforms(vector: Vector) -> None:
    got = run_of(vector)(vector)
    missing = vector.expected.keys() - got.keys()
    assert not missing, f"not computed: {sorted(missing)}"
    mismatches = {key: wrong(got[key], expected, vector.tolerance) for key, expected in vector.expected.items()}
    assert not any(mismatches.values()), {key: why for key, why in mismatches.items() if why}


def test_the_comparison_finds_differences() -> None:
    assert wrong([1.0, 2.0], [1.0, 2.0], 0) == ""
    assert wrong([1.0, 2.0000002], [1.0, 2.0], 0) != ""
    assert wrong([1.0], [1.0, 2.0], 1e-6) != ""
    assert wrong([float("nan")], ["nan"], 0) == ""
    assert wrong([0.0], ["nan"], 1.0) != ""
    assert wrong([1e9], ["inf"], 1.0) != ""
    assert wrong([2.00001], [2.0], 1e-6) != ""
    assert wrong("oneflow.float32", "oneflow.float32", 1e-6) == ""
