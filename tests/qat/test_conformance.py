"""Every quantizer gives what the original gives, and where vectors say so, its gradient.

The vectors are in tests/golden/conformance_*.json. The environment variable HAGO_CONFORMANCE may
name a further file of the same kind.
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

#: Ops that are torch's own machinery.
ELSEWHERE = ("prepare_fx",)


def vectors() -> list[Vector]:
    found = [v for system in SYSTEMS for v in read(GOLDEN / f"conformance_{system}.json")]
    further = os.environ.get("HAGO_CONFORMANCE")
    if further:
        found += [replace(v, id=f"further:{v.id}") for v in read(Path(further))]
    return [v for v in found if not v.op.startswith(ELSEWHERE)]


def run_of(vector: Vector) -> Run:
    """What computes a vector: the longest prefix of its op."""
    table = DISPATCH[vector.system]
    fitting = [prefix for prefix in table if vector.op.startswith(prefix)]
    assert fitting, f"no quantizer for {vector.system} {vector.op!r}"
    return table[max(fitting, key=len)]


@pytest.mark.parametrize("vector", vectors(), ids=lambda v: f"{v.id} {v.op}")
def test_conforms(vector: Vector) -> None:
    got = run_of(vector)(vector)
    missing = vector.expected.keys() - got.keys()
    assert not missing, f"not computed: {sorted(missing)}"
    found = {key: wrong(got[key], expected, vector.tolerance) for key, expected in vector.expected.items()}
    assert not any(found.values()), {key: why for key, why in found.items() if why}


def test_every_vector_bites() -> None:
    """A result that is off by one quantum, or by sign, is refused."""
    assert wrong([1.0, 2.0], [1.0, 2.0], 0) == ""
    assert wrong([1.0, 2.0000002], [1.0, 2.0], 0) != ""
    assert wrong([1.0], [1.0, 2.0], 1e-6) != ""
    assert wrong([float("nan")], ["nan"], 0) == ""
    assert wrong([0.0], ["nan"], 1.0) != ""
    assert wrong([1e9], ["inf"], 1.0) != ""
    assert wrong([2.00001], [2.0], 1e-6) != ""
    assert wrong("oneflow.float32", "oneflow.float32", 1e-6) == ""
