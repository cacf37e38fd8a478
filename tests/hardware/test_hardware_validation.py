"""Checks of hardware documents: every mistake is reported with its path, together with all others."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest

from hago.arithmetic import numerics
from hago.hardware import hardware
from hago.hardware.file import hardware_from_document
from hago.hardware.validation import check_hardware_document
from hago.ops import OPS, Ops

Document = dict[str, Any]


def test_the_schema_has_every_requantize_form() -> None:
    schema = json.loads((Path(hardware.__file__).parents[1] / "serialization/schemas/hardware.schema.json").read_text())
    listed = schema["properties"]["requantize"]["properties"]["form"]["enum"]
    assert listed == list(get_args(numerics.RequantizeForm))


def small() -> Document:
    """A document without mistakes."""
    return {
        "$schema": "../hago/serialization/schemas/hardware.schema.json",
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


def mistakes(document: Any, ops: Ops = OPS) -> list[str]:
    return [str(f) for f in check_hardware_document(document, ops)]


def put(*path: str | int, value: Any) -> Callable[[Document], None]:
    def change(document: Document) -> None:
        at: Any = document
        for key in path[:-1]:
            at = at[key]
        at[path[-1]] = value

    return change


def drop(*path: str) -> Callable[[Document], None]:
    def change(document: Document) -> None:
        at: Any = document
        for key in path[:-1]:
            at = at[key]
        del at[path[-1]]

    return change


MISTAKES: list[tuple[Callable[[Document], None], str, str]] = [
    # shape
    (drop("ops"), "$.ops", "missing"),
    (drop("signatures", "mac", "out"), "$.signatures.mac.out", "missing"),
    (put("version", value=2), "$.version", "got 2; expected 1"),
    (put("version", value=True), "$.version", "got true; expected 1"),
    (put("name", value=""), "$.name", "at least 1"),
    (put("name", value=7), "$.name", "got 7; expected a JSON string"),
    (put("sources", value="a book"), "$.sources", "a JSON array"),
    (put("ruonding", value="half_up"), "$.ruonding", "Did you mean 'rounding'?"),
    (put("signatures", "mac", "acumulator", value={}), "$.signatures.mac.acumulator", "Did you mean 'accumulator'?"),
    (put("signatures", "mac", "mac_per_cycle", value=1), "$.signatures.mac.mac_per_cycle", "'macs_per_cycle'?"),
    (put("cost", "clock_mhz", value=1), "$.cost.clock_mhz", "Did you mean 'clock_hz'?"),
    (put("cost", "clock_hz", value=0), "$.cost.clock_hz", "more than 0"),
    (put("cost", "clock_hz", value=-1.5), "$.cost.clock_hz", "more than 0"),
    (put("signatures", "mac", "in", value=[]), "$.signatures.mac.in", "at least 1 entry"),
    (put("signatures", "mac", "in", value="int8"), "$.signatures.mac.in", "a JSON array"),
    (put("signatures", "my mac", value={"in": ["int8"], "out": "int8"}), "$.signatures", '"my mac"'),
    (put("signatures", "mac", "requantize_at", value="edges"), "$.signatures.mac.requantize_at", "'edge'?"),
    (put("signatures", "mac", "min_bits", value=1), "$.signatures.mac.min_bits", "at least 2"),
    (put("signatures", "mac", "accumulator", "overflow", value="saturate"), "overflow", "'saturate_end'?"),
    (put("ops", "add", value=[]), "$.ops.add", "at least 1 entry"),
    (put("ops", "add", value=["i32", "i32", "f32"]), "$.ops.add", "each entry once"),
    (put("ops", value={}), "$.ops", "at least 1 entry"),
    (put("other_ops", value="refuse"), "$.other_ops", "one of float32, reject"),
    (put("activation", "granularity", value="per_channel"), "$.activation.granularity", 'expected "per_tensor"'),
    (put("weight", "granularity", value="per_chanel"), "$.weight.granularity", "'per_channel'?"),
    (put("requantize", "form", value="multiplier-shift"), "$.requantize.form", "'multiplier_shift'?"),
    # names
    (put("rounding", value="halfeven"), "$.rounding", "Did you mean 'half_even'?"),
    (put("activation", "scheme", value="afine"), "$.activation.scheme", "Did you mean 'affine'?"),
    (put("weight", "scheme", value="symetric"), "$.weight.scheme", "Did you mean 'symmetric'?"),
    (put("signatures", "mac", "in", 0, value="unit8"), "$.signatures.mac.in[0]", "Did you mean 'uint8'?"),
    (put("signatures", "mac", "out", value="int3 2"), "$.signatures.mac.out", "Did you mean 'int32'?"),
    (put("signatures", "mac", "accumulator", "dtype", value="i32"), "$.signatures.mac.accumulator.dtype", "int32"),
    (put("signatures", "i32", "form", value="comon_scale"), "$.ops.add[0]", "'common_scale'?"),
    (put("ops", "con2d", value=["mac"]), "$.ops.con2d", "Did you mean 'conv2d'?"),
    (put("ops", "conv2d", 0, value="mc"), "$.ops.conv2d[0]", "Did you mean 'mac'?"),
    # meaning
    (put("ops", "nn.conv2d", value=["mac"]), "$.ops.nn.conv2d", "lists conv2d a second time"),
    (put("ops", "add", value=["f32"]), "$.signatures.i32", "no op lists this signature"),
    (put("signatures", "mac", "in", 1, value="float32"), "$.signatures.mac", "mixes integer and float"),
    (put("signatures", "f32", "accumulator", value={"dtype": "float32", "overflow": "wrap"}),
     "$.signatures.f32.accumulator", "a float signature has none"),
    (put("signatures", "f32", "requantize_at", value="output"), "$.signatures.f32.requantize_at", "remove it"),
    (put("signatures", "f32", "max_bits", value=8), "$.signatures.f32.max_bits", "remove it"),
    (put("signatures", "mac", "accumulator", "dtype", value="float32"), "accumulator.dtype", "an integer dtype"),
    (put("signatures", "mac", "accumulator", "dtype", value="int16"),
     "accumulator.dtype", "32 bits of the operand in[2], of a layer the bias"),
    (put("signatures", "i32", "accumulator", value={"dtype": "int16", "overflow": "wrap"}),
     "accumulator.dtype", "32 bits of the operand in[0]"),
    (put("signatures", "mac", "out", value="int8"), "$.signatures.mac.out", "requantize_at: output"),
    (put("signatures", "i32", "min_bits", value=30), "$.signatures.i32.max_bits", "at least min_bits, 30"),
    (put("signatures", "mac", "min_bits", value=9), "$.signatures.mac.min_bits", "at most 8"),
    (put("signatures", "mac", "in", 1, value="int3"), "$.signatures.mac.min_bits", "got 4 (the default)"),
    (put("signatures", "i32", "max_bits", value=40), "$.signatures.i32.max_bits", "at most 32"),
    (put("signatures", "mac", "form", value="common_scale"), "$.ops.conv2d[0]", "conv2d has no form"),
    (put("signatures", "i32", "form", value="tflite"), "$.ops.add[0]", "expected requantize_at: output"),
    (put("requantize", value={"form": "multiplier_shift", "search": "nearst"}), "$.requantize.search", "'nearest'?"),
    (put("requantize", "search", value="reduced"), "$.requantize.search", "multiplier_shift"),
    (put("requantize", "two_stage", value=True), "$.requantize.two_stage", "multiplier_shift"),
    (put("requantize", "multiplier_bits", value=7), "$.requantize.multiplier_bits", "multiplier_shift"),
    (put("requantize", value={"form": "multiplier_shift", "multiplier_bits": 15, "two_stage": True}),
     "$.requantize.two_stage", "multiplier_bits 31"),
    (lambda d: d.update(requantize={"form": "shift"}, activation={"scheme": "affine", "granularity": "per_tensor"}),
     "$.activation.scheme", "powers of two"),
    (lambda d: d.update(requantize={"form": "shift"}, weight={"scheme": "symmetric", "granularity": "per_tensor"}),
     "$.weight.scheme", "powers of two"),
    (lambda d: (put("requantize", value={"form": "multiplier_shift"})(d),
                put("signatures", "mac", "accumulator", value={"dtype": "int40", "overflow": "wrap"})(d)),
     "$.signatures.mac.accumulator.dtype", "multiplier_bits of at most 23"),
    (lambda d: (d.update(requantize={"form": "shift"}), put("signatures", "mac", "requantize_at", value="output")(d),
                put("signatures", "mac", "fixed_out", value={"scale": 0.75, "zero_point": 0})(d)),
     "$.signatures.mac.fixed_out.scale", "got 0.75; expected a power of two"),
]  # fmt: skip


def test_the_example_document_is_valid() -> None:
    assert mistakes(small()) == []


@pytest.mark.parametrize(("change", "path", "says"), MISTAKES, ids=[f"{i}:{m[1]}" for i, m in enumerate(MISTAKES)])
def test_a_mistake_is_named(change: Callable[[Document], None], path: str, says: str) -> None:
    document = small()
    change(document)
    (found,) = [text for text in mistakes(document) if path in text and says in text]
    assert found.startswith("$.")


def test_all_mistakes_are_reported_at_once() -> None:
    document = small()
    together = {
        "$.version", "$.ruonding", "$.rounding", "$.weight.granularity", "$.signatures.mac.in[0]", "$.ops.con2d",
        "$.cost.clock_mhz", "$.ops.add[0]",
    }  # fmt: skip
    chosen = {path: change for change, path, _ in reversed(MISTAKES) if path in together}
    assert chosen.keys() == together
    for change in chosen.values():
        change(document)
    found = mistakes(document)
    assert all(any(text.startswith(path) for text in found) for path in together)


def test_forms_of_ops() -> None:
    document = small()
    document["signatures"]["sum"] = {
        "in": ["int8"], "out": "int8", "accumulator": {"dtype": "int32", "overflow": "wrap"},
        "requantize_at": "output", "form": "tflite",
    }  # fmt: skip
    document["ops"]["add"] = ["sum", "i32"]
    goes_with, two = mistakes(document)
    assert goes_with.startswith("$.ops.add[0]:") and "multiplier_shift; got float32" in goes_with
    assert two.startswith("$.ops.add:") and "2 forms (tflite, none)" in two
    document["requantize"] = {"form": "multiplier_shift"}
    document["ops"] = {"add": ["sum", "f32"], "conv2d": ["mac"], "relu": ["i32"]}
    assert mistakes(document) == []
    document["signatures"]["sum"]["form"] = "tflight"
    assert mistakes(document) == [
        '$.ops.add[0]: add has no form "tflight"; it has common_scale, rescaled, tflite, tpu_mlir, dequantize, '
        "qlinear. Did you mean 'tflite'?"
    ]


def test_one_mistake_is_reported_once() -> None:
    document = small()
    document["signatures"]["mac"]["in"][0] = 8
    assert len(mistakes(document)) == 1


@pytest.mark.parametrize("document", [None, [], "x86_vnni", 7, {}])
def test_other_json_values_are_refused(document: Any) -> None:
    assert mistakes(document)


def test_nan_is_refused() -> None:
    document = small()
    document["cost"]["clock_hz"] = float("nan")
    document["signatures"]["mac"]["macs_per_cycle"] = float("inf")
    found = "; ".join(mistakes(document))
    assert "$.cost.clock_hz: got NaN" in found
    assert "$.signatures.mac.macs_per_cycle: got Infinity" in found


def test_an_op_without_an_integer_form_takes_no_integers() -> None:
    ops = {**OPS, "soft": replace(OPS["relu"], name="soft", aliases=(), integer=None)}
    document = small()
    document["ops"]["soft"] = ["f32", "i32"]
    assert mistakes(document, ops) == ["$.ops.soft[1]: hago has no integer form of soft; expected a float signature"]


def test_a_table_op_requantizes_at_the_output() -> None:
    document = small()
    document["signatures"]["look_up"] = {"in": ["uint8"], "out": "uint8", "requantize_at": "output"}
    document["ops"]["sigmoid"] = ["look_up"]
    assert mistakes(document) == []
    document["ops"]["sigmoid"] = ["look_up", "i32"]
    (found,) = mistakes(document)
    assert found.startswith("$.ops.sigmoid[1]: sigmoid is looked up in a table")


def test_tables_have_entries_for_at_most_16_bits() -> None:
    document = small()
    document["signatures"]["look_up"] = {"in": ["int32"], "out": "int32", "requantize_at": "output"}
    document["ops"]["sigmoid"] = ["look_up"]
    (found,) = mistakes(document)
    assert "got inputs of 32 bits, expected at most 16: set max_bits" in found
    document["signatures"]["look_up"]["max_bits"] = 16
    assert mistakes(document) == []


def test_an_op_requantizes_in_one_place() -> None:
    document = small()
    document["signatures"]["narrow"] = {
        "in": ["uint8", "int8", "int32"], "out": "uint8", "accumulator": {"dtype": "int32", "overflow": "wrap"},
        "requantize_at": "output",
    }  # fmt: skip
    document["ops"]["linear"] = ["narrow", "f32"]
    assert mistakes(document) == []
    document["ops"]["conv2d"] = ["mac", "narrow", "f32"]
    (found,) = mistakes(document)
    assert found == (
        "$.ops.conv2d: lists signatures that requantize in two places (mac: edge, narrow: output); expected the same "
        "requantize_at in all: list those of one place only"
    )


def test_the_schema_lists_the_names_of_the_code() -> None:
    text = Path(hardware.__file__).parents[1] / "serialization" / "schemas" / "hardware.schema.json"
    schema = json.loads(text.read_text("utf-8"))
    parts, signature = schema["properties"], schema["$defs"]["signature"]["properties"]
    assert tuple(parts["requantize"]["properties"]["form"]["enum"]) == get_args(numerics.RequantizeForm)
    assert tuple(parts["weight"]["properties"]["granularity"]["enum"]) == get_args(hardware.Granularity)
    assert tuple(parts["other_ops"]["enum"]) == get_args(hardware.OtherOps)
    assert tuple(signature["requantize_at"]["enum"]) == get_args(hardware.RequantizeAt)
    overflow = signature["accumulator"]["properties"]["overflow"]["enum"]
    assert tuple(overflow) == get_args(numerics.Overflow)


@pytest.mark.parametrize(
    "path",
    [
        *(("requantize", "form"), ("requantize", "power_of_two"), ("activation", "scheme"), ("weight", "granularity")),
        *(("rounding",), ("power_of_two",)),
    ],
)
@pytest.mark.parametrize("word", ["power_of_two", "power_of_2", "pow2", "PowersOfTwo"])
def test_scales_that_are_powers_of_two_are_asked_for_by_the_form_shift(path: tuple[str, ...], word: str) -> None:
    document = small()
    put(*(word if key == "power_of_two" else key for key in path), value=word)(document)
    (found,) = mistakes(document)
    advised = re.search(r'"requantize": ({.*?}), and the scheme "(\w+)"', found)
    assert advised is not None and "powers of two" in found
    right = small() | {"requantize": json.loads(advised[1])}
    assert all(right[part]["scheme"] == advised[2] for part in ("activation", "weight")) and mistakes(right) == []
    assert hardware_from_document(right, "x.json", OPS).requantize.power_of_two
