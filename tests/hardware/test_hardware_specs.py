"""The hardware that ships with hago: every file is valid, has sources, and covers the ops that its chip runs."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import hago
from hago.arithmetic.types import INT8, INT16, INT32, INT64, UINT8
from hago.hardware.file import (
    available_hardware,
    check_hardware,
    hardware_hash,
    hardware_to_document,
    load_hardware,
    save_hardware,
)
from hago.hardware.hardware import Accumulator, FixedOut, Hardware, create_sample_hardware
from hago.ops import OPS

FOLDER = Path(hago.__file__).parent.parent / "hardware_specs"
NAMES = tuple(sorted(path.stem for path in FOLDER.glob("*.json")))


def test_shipped_hardware_is_listed() -> None:
    assert available_hardware() == NAMES


def test_the_page_on_hardware_has_a_row_for_every_file() -> None:
    page = (FOLDER.parent / "docs" / "hardware.md").read_text("utf-8")
    shipped = page[page.index("## What ships") : page.index("## The format")]
    rows = re.findall(r"^\| (`.*?`) \|", shipped, re.M)
    assert sorted(re.findall(r"`(\w+)`", " ".join(rows))) == list(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_every_spec_is_valid(name: str, tmp_path: Path) -> None:
    chip = load_hardware(name)
    assert chip.name == name
    assert chip.origin == f"hardware_specs/{name}.json"
    check_hardware(chip)
    assert chip.sources
    assert chip.notes
    save_hardware(chip, tmp_path / "chip.json")
    again = load_hardware(tmp_path / "chip.json")
    assert again == chip
    assert hardware_hash(again) == hardware_hash(chip)


@pytest.mark.parametrize("name", NAMES)
def test_a_spec_is_found_by_path_too(name: str) -> None:
    assert load_hardware(FOLDER / f"{name}.json") == load_hardware(name)


@pytest.mark.parametrize("name", NAMES)
def test_the_schema_of_every_spec_exists(name: str) -> None:
    said = json.loads((FOLDER / f"{name}.json").read_text("utf-8"))["$schema"]
    assert json.loads((FOLDER / said).read_text("utf-8"))["title"] == "hago hardware description"


@pytest.mark.parametrize("name", NAMES)
def test_saving_a_spec_gives_its_file(name: str, tmp_path: Path) -> None:
    save_hardware(load_hardware(name), tmp_path / "chip.json")
    ours, shipped = ((p.read_text("utf-8")) for p in (tmp_path / "chip.json", FOLDER / f"{name}.json"))
    assert json.loads(ours)["ops"] == json.loads(shipped)["ops"]


@pytest.mark.parametrize("name", NAMES)
def test_no_signature_repeats_the_dtypes_of_an_earlier_one(name: str) -> None:
    """Such a signature would never be selected."""
    chip = load_hardware(name)
    for op, descs in chip.ops.items():
        integers = [d for d in descs if d.is_integer]
        for i, desc in enumerate(integers):
            takes = (desc.in_dtypes, desc.out_dtype)
            assert all((d.in_dtypes, d.out_dtype) != takes for d in integers[:i]), (op, desc.name)


def leaves_float(chip: Hardware) -> set[str]:
    """The ops with an integer form that the hardware runs in float only."""
    return {op for op, rule in OPS.items() if rule.integer is not None and not chip.integer_descs(op)}


@pytest.mark.parametrize("name", ["x86_vnni", "arm_dot", "vta"])
def test_ops_that_can_run_in_integers_do(name: str) -> None:
    assert leaves_float(load_hardware(name)) == {"channel_clamp"}


@pytest.mark.parametrize("name", [n for n in NAMES if load_hardware(n).integer_descs("conv2d")])
def test_following_ops_accept_the_dtypes_of_producers(name: str) -> None:
    """A value passes from a convolution through ops that only move it without a requantization."""
    chip = load_hardware(name)
    emitted = chip.integer_descs("conv2d")[0].out_dtype
    for op, rule in OPS.items():
        if rule.integer is not None and rule.integer.slots == ("follow",) and chip.integer_descs(op):
            taken = {d.in_dtype(0) for d in chip.integer_descs(op)}
            assert emitted in taken or (name == "sample" and op in ("pad", "permute")), op


@pytest.mark.parametrize("name", NAMES)
def test_table_outputs_are_inputs_of_convolutions(name: str) -> None:
    chip = load_hardware(name)
    operands = {d.in_dtype(0) for d in chip.integer_descs("conv2d")}
    for op, rule in OPS.items():
        if rule.integer is not None and rule.integer.table:
            assert all(d.out_dtype in operands for d in chip.integer_descs(op)), op


def test_x86_vnni() -> None:
    chip = load_hardware("x86_vnni")
    conv = chip.ops["conv2d"][0]
    assert [conv.in_dtype(i) for i in range(3)] == [UINT8, INT8, INT32]
    assert (conv.register.overflow, conv.out_dtype, conv.requantize_at) == ("wrap", INT32, "edge")
    assert (chip.weight.granularity, chip.requantize.form, chip.requantize.rounding) == (
        "per_channel",
        "float32",
        "half_even",
    )
    for op in ("add", "sub"):
        dtypes = [(d.in_dtype(0), d.in_dtype(1)) for d in chip.integer_descs(op)]
        assert dtypes == [(UINT8, UINT8), (UINT8, INT32), (INT32, UINT8), (INT32, INT32)]
        assert all(d.max_bits == 23 for d in chip.integer_descs(op)[1:])


def test_arm_dot() -> None:
    chip = load_hardware("arm_dot")
    assert (chip.requantize.form, chip.requantize.multiplier_bits, chip.requantize.two_stage) == (
        "multiplier_shift",
        31,
        True,
    )
    assert (chip.activation.scheme, chip.weight.scheme) == ("affine", "symmetric")
    assert chip.ops["conv2d"][0].requantize_at == "output"


def test_x86_avx2() -> None:
    chip = load_hardware("x86_avx2")
    for op in ("conv2d", "linear", "matmul"):
        assert chip.integer_descs(op)[0].register == Accumulator(INT32, "saturate_pairs")
    assert chip.integer_descs("affine")[0].register.overflow == "wrap" and not chip.integer_descs("conv_transpose2d")


def test_arm_neon() -> None:
    """Pairs in 16 bits hold int8 data times weights in [-127, 127], and are proved to."""
    chip = load_hardware("arm_neon")
    assert chip.integer_descs("conv2d")[0].register == Accumulator(INT32, "wrap_pairs")
    assert chip.weight.scheme == "symmetric" and INT16.max >= 2 * 128 * 127


#: Ops in forms of TensorFlow Lite's kernels.
KERNELS = ("add", "sub", "mul", "leaky_relu", "prelu", "avg_pool2d")


@pytest.mark.parametrize("name", ["tflite", "cmsis_nn", "ethos_u"])
def test_tflite_and_its_relatives(name: str) -> None:
    chip = load_hardware(name)
    how = chip.requantize
    assert (how.form, how.multiplier_bits, how.two_stage, how.search) == ("multiplier_shift", 31, True, "nearest")
    assert {op: chip.ops[op][0].form for op in KERNELS} == dict.fromkeys(KERNELS, "tflite")
    conv = chip.ops["conv2d"][0]
    assert [conv.in_dtype(i) for i in range(3)] == [INT8, INT8, INT32] and conv.out_dtype == INT8
    assert (chip.activation.scheme, chip.weight.scheme, chip.weight.granularity) == (
        "affine",
        "symmetric",
        "per_channel",
    )


@pytest.mark.parametrize("name", ["tflite_int16", "cmsis_nn_int16"])
def test_sixteen_bit_activations(name: str) -> None:
    chip = load_hardware(name)
    conv = chip.ops["conv2d"][0]
    assert [conv.in_dtype(i) for i in range(3)] == [INT16, INT8, INT64]
    assert (conv.out_dtype, conv.register.dtype) == (INT16, INT64)
    wide, narrow = chip.requantize.of_register(INT64), chip.requantize.of_register(INT32)
    assert (wide.search, wide.multiplier_bits, wide.two_stage, wide.shift_rounding) == ("reduced", 15, False, "half_up")
    assert narrow is chip.requantize and narrow.two_stage
    assert {d.fixed_out for op in ("sigmoid", "tanh") for d in chip.integer_descs(op)} == {FixedOut(2.0**-15, 0)}
    assert chip.activation.scheme == "symmetric"


@pytest.mark.parametrize("name, scheme", [("tpu_mlir_bm1684x", "symmetric_full"), ("tpu_mlir_bm1684x_asym", "affine")])
def test_tpu_mlir(name: str, scheme: str) -> None:
    chip = load_hardware(name)
    how = chip.requantize
    assert (how.search, how.multiplier_bits, how.shift_rounding, how.rounding) == (
        "least_error",
        31,
        "half_up",
        "half_away",
    )
    assert (chip.activation.scheme, chip.weight.granularity) == (scheme, "per_channel")
    signs = [(d.in_dtype(0).signed, d.out_dtype.signed) for d in chip.integer_descs("conv2d")]
    assert signs == [(False, False), (False, True), (True, False), (True, True)]
    assert {op for op in ("leaky_relu", "prelu") if chip.integer_descs(op)} == (
        {"leaky_relu", "prelu"} if scheme == "symmetric_full" else set()
    )


def test_openvino_cpu() -> None:
    chip = load_hardware("openvino_cpu")
    conv = chip.integer_descs("conv2d")[0]
    assert [conv.in_dtype(i) for i in range(3)] == [UINT8, INT8, INT32]
    assert (conv.out_dtype, conv.register.overflow, conv.requantize_at) == (UINT8, "wrap", "output")
    assert (chip.requantize.form, chip.requantize.rounding) == ("float32", "half_even")
    assert {chip.ops[op][0].form for op in ("add", "mul", "concat")} == {"dequantize"}


def test_tensorrt_gpu() -> None:
    chip = load_hardware("tensorrt_gpu")
    assert [str(d) for d in chip.ops["linear"]] == [
        "(int8, int8, int32) -> int8 in int32 wrap requantized at output",
        "(float32) -> float32",
        "(float32, int4, float32) -> float32",
    ]
    assert {op for op, descs in chip.ops.items() if any(d.is_weight_only for d in descs)} == {"linear", "matmul"}
    assert any("every block of 64 or 128 weights" in note for note in chip.notes)
    assert (chip.activation.scheme, chip.requantize.form, chip.requantize.rounding) == (
        "symmetric_full",
        "float32",
        "half_even",
    )


def test_cambricon_mlu() -> None:
    chip = load_hardware("cambricon_mlu")
    assert chip.requantize.power_of_two and chip.requantize.rounding == "half_even"
    assert any(note.startswith("Not found:") for note in chip.notes)


def test_vta_shifts() -> None:
    chip = load_hardware("vta")
    assert chip.requantize.power_of_two
    assert chip.requantize.rounding == "half_up"
    assert chip.weight.granularity == "per_tensor"
    assert {d.out_dtype for d in chip.integer_descs("conv2d")} == {INT32}


def test_int16_accumulator_is_the_rfc_example() -> None:
    chip = load_hardware("int16_accumulator")
    said = {
        "add": ["float32", "int16"],
        "conv2d": ["int16"],
        "relu": ["int16"],
        "clamp": ["int16"],
        "max_pool2d": ["int16"],
        "avg_pool2d": ["float32"],
        "adaptive_avg_pool2d": ["float32"],
        "linear": ["float32"],
    }
    assert {op: [str(d.out_dtype) for d in chip.ops[op]] for op in said} == said
    assert chip.ops["conv2d"][0].in_dtype(1) == INT8
    assert chip.ops["conv2d"][0].register.dtype == INT16
    listed = [str(d.out_dtype) for d in chip.ops["concat"]]
    assert [d for d in listed if d != "int16"] == ["float32", "int8", "int32"]


def test_sample_is_the_rfc_listing() -> None:
    shipped, built = load_hardware("sample"), create_sample_hardware()
    assert replace(shipped, sources=(), notes=()) == built
    assert hardware_hash(shipped) == hardware_hash(built)


@pytest.mark.parametrize("name", NAMES)
def test_the_table_has_a_line_per_signature(name: str) -> None:
    chip = load_hardware(name)
    lines = str(chip).splitlines()
    first = lines.index("") + 2
    rows = [line for line in lines[first:] if line[0] != " "]  # others go on with the line before
    assert f"from hardware_specs/{name}.json" in lines
    assert len(rows) == sum(map(len, chip.ops.values()))
    assert len(hardware_to_document(chip)["signatures"]) == len({line.split()[-1] for line in rows})
    assert all(row["source"].startswith(f"hardware_specs/{name}.json: ") for row in chip.table().to_json()["rows"])
    assert max(map(len, lines)) <= 100


def test_specs_are_found_from_another_folder(tmp_path: Path) -> None:
    code = "from hago.hardware.file import available_hardware; print(*available_hardware())"
    where = {"PYTHONPATH": str(FOLDER.parent), "OMP_NUM_THREADS": "1"}
    ran = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=where, capture_output=True, check=True)
    assert ran.stdout.decode().split() == list(NAMES)
