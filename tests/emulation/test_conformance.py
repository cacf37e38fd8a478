"""Conformance vectors: `hago.emulation` computes the results and gradients of the original implementations.

The environment variable HAGO_CONFORMANCE may name one more file of vectors, which are then tested too.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch

from emulation.dorefa_vectors import DOREFA
from emulation.oneflow_vectors import ONEFLOW
from emulation.pytorch_vectors import PYTORCH
from emulation.tensorflow_vectors import TENSORFLOW
from emulation.tflite_vectors import GEMMLOWP, TFLITE, Answer
from emulation.tpu_mlir_vectors import TPU_MLIR
from emulation.vectors import MORE, Vector, differences, float_differences, generate, load
from hago.emulation.tpu_mlir.numerics import uniform_type_of_row

#: Functions by the beginning of an operation's name, by system; the longest that matches is called.
BY_PREFIX: Mapping[str, Mapping[str, Callable[[Vector], Answer]]] = {
    "gemmlowp": GEMMLOWP,
    "tflite": TFLITE,
    "oneflow": ONEFLOW,
    "tensorflow": TENSORFLOW,
    "dorefa": DOREFA,
    "pytorch": PYTORCH,
}
#: Systems whose results are compared in float32; those of the others are integers, or compared as they are.
IN_FLOAT32 = ("oneflow", "tensorflow", "dorefa", "pytorch")
#: Operations that are whole workflows of torch; `test_pytorch.py` tests them.
ELSEWHERE = ("prepare_fx",)
VECTORS = [v for v in load((*BY_PREFIX, "tpu-mlir")) if not v.op.startswith(ELSEWHERE)]


def answer(vector: Vector) -> Answer:
    """Compute a vector's results with hago."""
    if vector.system == "tpu-mlir":
        for pattern, function in TPU_MLIR:
            match = re.fullmatch(pattern, vector.op)
            if match:
                return function(vector, match)
    table = BY_PREFIX.get(vector.system, {})
    prefixes = [prefix for prefix in table if vector.op.startswith(prefix)]
    assert prefixes, f"{vector.id}: nothing answers {vector.op!r} of {vector.system}"
    return table[max(prefixes, key=len)](vector)


@pytest.mark.parametrize("vector", VECTORS, ids=lambda v: f"{v.id} {v.op}")
def test_agrees(vector: Vector) -> None:
    compare = float_differences if vector.system in IN_FLOAT32 else differences
    mismatches = compare(answer(vector), vector.expected, vector.tolerance)
    assert not mismatches, "\n".join(mismatches)


def test_every_system_has_its_vectors() -> None:
    counts = Counter(v.system for v in VECTORS)
    least = {
        "gemmlowp": 20,
        "tflite": 29,
        "tpu-mlir": 46,
        "oneflow": 37,
        "tensorflow": 81,
        "dorefa": 19,
        "pytorch": 36,
    }
    assert all(counts[system] >= count for system, count in least.items())


@pytest.mark.parametrize("vector", [v for v in VECTORS if "calibration" in v.params], ids=lambda v: v.id)
def test_a_types_scale_and_zero_point_follow_from_its_calibration_row(vector: Vector) -> None:
    p = vector.params
    for name, row in p["calibration"].items():
        kind = "mul" if name == "y_Mul" else "general"
        derived = uniform_type_of_row(*row, asymmetric="asymmetric" in vector.op, kind=kind)
        if "in_scale" in p:
            stated = (p["in_scale"], p["in_zp"]) if name == "x" else (p["out_scale"], p["out_zp"])
        else:
            stated = tuple(p["in_" if name == "x" else name if name in p else "out"])
        # LeakyRelu, PRelu and Pad keep their input's type.
        if name.startswith(("y_Leaky", "y_PRelu", "y_Pad")):
            continue
        assert (derived.scale, derived.zero_point) == pytest.approx(stated, rel=1e-12)


# ---------------------------------------------------------------- the comparison itself
@pytest.mark.parametrize(
    ("got", "expected", "tolerance"),
    [
        (3, 4, 0),
        (1.1, 1.0, 1e-2),
        ([1, 2], [1, 2, 3], 0),
        ({"a": 1}, {"a": 1, "b": 2}, 0),
        ({"a": [1, 2]}, {"a": [1, 3]}, 0),
        ("int8", "uint8", 0),
        (0.0, "nan", 0),
        (1e300, "inf", 0),
        (None, [1], 0),
    ],
)
def test_a_difference_is_found(got: object, expected: object, tolerance: float) -> None:
    assert differences(got, expected, tolerance)


def test_differences_in_float32() -> None:
    def differ(got: object, expected: object, tolerance: float) -> bool:
        return bool(float_differences({"y": got}, {"y": expected}, tolerance))

    assert not differ([1.0, 2.0], [1.0, 2.0], 0)
    assert differ([1.0, 2.0000002], [1.0, 2.0], 0) and not differ([1.0, 2.00000002], [1.0, 2.0], 0)
    assert differ([1.0], [1.0, 2.0], 1e-6)
    assert not differ(torch.tensor([[float("nan")]]), ["nan"], 0) and differ([0.0], ["nan"], 1.0)
    assert differ([1e9], ["inf"], 1.0) and not differ([float("inf")], ["inf"], 1.0)
    assert differ([2.00001], [2.0], 1e-6)
    assert not differ("oneflow.float32", "oneflow.float32", 1e-6)
    assert float_differences({}, {"y": 1.0}, 0) == ["not computed: y"]


def test_what_is_within_the_tolerance_passes() -> None:
    got = {"a": [100.9, float("nan")], "b": "int8", "c": 0.009, "more": 1}
    assert not differences(got, {"a": [100.0, "nan"], "b": "int8", "c": 0}, 1e-2)


def test_a_changed_expectation_fails() -> None:
    vector = next(v for v in VECTORS if v.id == "tflite-045")
    changed = json.loads(json.dumps(vector.expected))
    changed["single_rounding"][3] += 1
    assert differences(answer(vector), changed, vector.tolerance)


def test_another_file_of_vectors_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    extra, foreign = {**asdict(VECTORS[0]), "id": "more-1"}, {**asdict(VECTORS[0]), "id": "more-2", "system": "other"}
    (tmp_path / "more.json").write_text(json.dumps([extra, foreign]), encoding="utf-8")
    monkeypatch.setenv(MORE, str(tmp_path / "more.json"))
    names = {v.id for v in load(tuple(BY_PREFIX))}
    assert "more-1" in names and "more-2" not in names


# ---------------------------------------------------------------- generated inputs
def test_a_generator_is_arithmetic_on_numpy() -> None:
    assert generate("i=arange(4); (i*2 - 1)/2 as float32").tolist() == [-0.5, 0.5, 1.5, 2.5]
    drawn = generate("np.abs(np.random.RandomState(3).randn(5)) float32 with x[0]=50")
    expected = np.abs(np.random.RandomState(3).randn(5)).astype(np.float32)
    assert drawn[0] == 50 and drawn[1:].tolist() == expected[1:].tolist()


@pytest.mark.parametrize("text", ["np.load('x')", "np.random.seed(1)", "(1).__class__", "[i for i in (1, 2)]"])
def test_a_generator_may_do_nothing_else(text: str) -> None:
    with pytest.raises((ValueError, KeyError)):
        generate(text)
