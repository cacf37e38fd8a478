"""Hardware files: every mistake is found, named by its path, and reported with all others."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest

from hago import hardware, json_text, numerics
from hago.errors import HardwareError
from hago.hardware import Accumulator, Hardware, OpDesc
from hago.hardware_document import from_document
from hago.hardware_file import load_hardware, save_hardware
from hago.ops import OPS
from hago.ops._rule import OpRule
from hago.types import INT32
from tests.hardware_documents import Document, small

def write(folder: Path, document: Any) -> Path:
    path = folder / "chip.json"
    path.write_text(document if isinstance(document, str) else json.dumps(document), "utf-8")
    return path


def refusal(folder: Path, document: Any) -> str:
    with pytest.raises(HardwareError) as caught:
        load_hardware(write(folder, document))
    return str(caught.value)


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
    (put("signatures", "i32", "form", value="comon_scale"), "$.signatures.i32.form", "'common_scale'?"),
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
    (put("signatures", "mac", "accumulator", "dtype", value="int16"), "accumulator.dtype", "operand's 32 bits"),
    (put("signatures", "mac", "out", value="int8"), "$.signatures.mac.out", "requantize_at: output"),
    (put("signatures", "i32", "min_bits", value=30), "$.signatures.i32.max_bits", "at least min_bits, 30"),
    (put("signatures", "mac", "min_bits", value=9), "$.signatures.mac.min_bits", "at most 8"),
    (put("signatures", "mac", "in", 1, value="int3"), "$.signatures.mac.min_bits", "got 4 (the default)"),
    (put("signatures", "i32", "max_bits", value=40), "$.signatures.i32.max_bits", "at most 32"),
    (put("signatures", "mac", "form", value="common_scale"), "$.ops.conv2d[0]", "no operands on one scale"),
    (put("requantize", "two_stage", value=True), "$.requantize.two_stage", "multiplier_shift"),
    (put("requantize", "multiplier_bits", value=7), "$.requantize.multiplier_bits", "multiplier_shift"),
    (put("requantize", value={"form": "multiplier_shift", "multiplier_bits": 15, "two_stage": True}),
     "$.requantize.two_stage", "multiplier_bits 31"),
    (lambda d: d.update(requantize={"form": "shift"}, activation={"scheme": "affine", "granularity": "per_tensor"}),
     "$.activation.scheme", "powers of two"),
    (lambda d: d.update(requantize={"form": "shift"}, weight={"scheme": "symmetric", "granularity": "per_tensor"}),
     "$.weight.scheme", "powers of two"),
]  # fmt: skip


def test_the_small_document_has_no_mistake(tmp_path: Path) -> None:
    chip = load_hardware(write(tmp_path, small()))
    mac = chip.ops["conv2d"][0]
    assert (mac.name, mac.cost, mac.register) == ("mac", {"macs_per_cycle": 64}, Accumulator(INT32))
    assert chip.ops["add"][0].max_bits == 23
    assert chip.origin.endswith("chip.json")


@pytest.mark.parametrize(("change", "path", "says"), MISTAKES, ids=[f"{i}:{m[1]}" for i, m in enumerate(MISTAKES)])
def test_a_mistake_is_named(
    tmp_path: Path, change: Callable[[Document], None], path: str, says: str
) -> None:
    document = small()
    change(document)
    message = refusal(tmp_path, document)
    (line,) = [text for text in message.splitlines() if path in text and says in text]
    assert line.strip().startswith("$.")


def test_all_mistakes_are_reported_at_once(tmp_path: Path) -> None:
    document = small()
    chosen = [MISTAKES[i] for i, m in enumerate(MISTAKES) if m[1] in {
        "$.version", "$.ruonding", "$.rounding", "$.weight.granularity", "$.signatures.mac.in[0]", "$.ops.con2d",
        "$.cost.clock_mhz", "$.signatures.i32.form",
    }]  # fmt: skip
    for change, _, _ in chosen:
        change(document)
    message = refusal(tmp_path, document)
    assert all(path in message for _, path, _ in chosen)
    assert message.startswith(f"hardware {str(tmp_path / 'chip.json')!r} has ")


def test_one_mistake_is_reported_once(tmp_path: Path) -> None:
    document = small()
    document["signatures"]["mac"]["in"][0] = 8
    assert "has 1 mistake:" in refusal(tmp_path, document)


# ---------------------------------------------------------------- JSON itself
@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "line 1, column 1"),
        ('{\n  "version": 1,\n', "line 3, column 1: Expecting property name enclosed in double quotes; the file ends"),
        ('{"version": 1,\n "name": }', "line 2, column 10"),
        ('{"version": 1e}', "line 1, column"),
        ("[" * 100_000, "nested too deeply"),
        ("9" * 5000, ""),
        ("null", "got null; expected a JSON object"),
        ("NaN", "a JSON object"),
    ],
)  # fmt: skip
def test_text_that_is_no_hardware(tmp_path: Path, text: str, says: str) -> None:
    assert says in refusal(tmp_path, text)


def test_truncation_anywhere(tmp_path: Path) -> None:
    text = json.dumps(small(), indent=1)
    for end in range(0, len(text) - 1, 37):
        message = refusal(tmp_path, text[:end])
        assert "is no JSON at line" in message, end


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    path = tmp_path / "chip.json"
    path.write_bytes(b'{"name": "\xff\xfe"}')
    with pytest.raises(HardwareError, match="is no JSON"):
        load_hardware(path)


def test_a_byte_order_mark_is_read_over(tmp_path: Path) -> None:
    path = tmp_path / "chip.json"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(small()).encode())
    assert load_hardware(path).name == "small"


def test_repeated_keys_are_refused(tmp_path: Path) -> None:
    text = json.dumps(small())
    text = text.replace('"overflow": "wrap"', '"overflow": "wrap", "overflow": "saturate_end"')
    text = text.replace('"name": "small"', '"name": "small", "name": "b", "name": "c"')
    message = refusal(tmp_path, text)
    assert "$.signatures.mac.accumulator.overflow: the key stands 2 times" in message
    assert "$.name: the key stands 3 times" in message


def test_nan_in_a_figure_is_refused(tmp_path: Path) -> None:
    document = small()
    document["cost"]["clock_hz"] = float("nan")
    document["signatures"]["mac"]["macs_per_cycle"] = float("inf")
    message = refusal(tmp_path, document)
    assert "$.cost.clock_hz: got NaN" in message
    assert "$.signatures.mac.macs_per_cycle: got Infinity" in message


# ---------------------------------------------------------------- names and paths
@pytest.mark.parametrize("place", ["no/such/file.json", "nowhere.json", ".", "./", "a\0b.json"])
def test_a_file_that_is_not_there(place: str) -> None:
    with pytest.raises(HardwareError, match="cannot be read"):
        load_hardware(Path(place) if place == "." else place)


def test_a_name_that_is_not_there() -> None:
    with pytest.raises(HardwareError, match=r"no hardware is called 'x86_vni'.*Did you mean 'x86_vnni'\?"):
        load_hardware("x86_vni")


def test_a_user_op(tmp_path: Path) -> None:
    mine = replace(OPS["relu"], name="my_relu", aliases=())
    document = small()
    document["ops"]["my_relu"] = ["i32"]
    ops: dict[str, OpRule] = {**OPS, "my_relu": mine}
    path = write(tmp_path, document)
    with pytest.raises(HardwareError, match=r"\$\.ops\.my_relu: unknown op.*Did you mean 'relu'\?"):
        load_hardware(path)
    chip = load_hardware(path, known_ops=ops)
    assert chip.ops["my_relu"][0].name == "i32"
    save_hardware(chip, path)
    assert load_hardware(path, known_ops=ops) == chip


def test_an_op_without_an_integer_form_takes_no_integers(tmp_path: Path) -> None:
    ops = {**OPS, "soft": replace(OPS["relu"], name="soft", aliases=(), integer=None)}
    document = small()
    document["ops"]["soft"] = ["f32", "i32"]
    with pytest.raises(HardwareError, match=r"\$\.ops\.soft\[1\]: hago has no integer form of soft"):
        load_hardware(write(tmp_path, document), known_ops=ops)


def test_a_table_op_requantizes_at_the_output(tmp_path: Path) -> None:
    integer = OPS["relu"].integer
    assert integer is not None
    ops = {**OPS, "squash": replace(OPS["relu"], name="squash", aliases=(), integer=replace(integer, table=True))}
    document = small()
    document["signatures"]["look_up"] = {"in": ["uint8"], "out": "uint8", "requantize_at": "output"}
    document["ops"]["squash"] = ["look_up"]
    path = write(tmp_path, document)
    assert load_hardware(path, known_ops=ops).ops["squash"][0].requantize_at == "output"
    document["ops"]["squash"] = ["look_up", "i32"]
    with pytest.raises(HardwareError, match=r"\$\.ops\.squash\[1\]: squash is looked up in a table"):
        load_hardware(write(tmp_path, document), known_ops=ops)


# ---------------------------------------------------------------- writing
def test_the_schema_lists_what_the_code_knows() -> None:
    text = Path(hardware.__file__).with_name("schemas") / "hardware.schema.json"
    schema = json.loads(text.read_text("utf-8"))
    parts, signature = schema["properties"], schema["$defs"]["signature"]["properties"]
    assert tuple(parts["requantize"]["properties"]["form"]["enum"]) == get_args(numerics.Form)
    assert tuple(parts["weight"]["properties"]["granularity"]["enum"]) == get_args(hardware.Granularity)
    assert tuple(parts["other_ops"]["enum"]) == get_args(hardware.OtherOps)
    assert tuple(signature["requantize_at"]["enum"]) == get_args(hardware.RequantizeAt)
    overflow = signature["accumulator"]["properties"]["overflow"]["enum"]
    assert tuple(overflow) == get_args(numerics.Overflow)


def test_unnamed_signatures_are_named(tmp_path: Path) -> None:
    wide = OpDesc(["int8", "int8"], "int32", max_bits=7)
    chip = Hardware({"conv2d": (OpDesc(["int8", "int8"], "int32"), wide), "linear": (wide,)})
    save_hardware(chip, tmp_path / "chip.json")
    document = json.loads((tmp_path / "chip.json").read_text("utf-8"))
    assert list(document["signatures"]) == ["int8_int8_to_int32", "int8_int8_to_int32_2"]
    assert document["ops"]["linear"] == ["int8_int8_to_int32_2"]
    assert load_hardware(tmp_path / "chip.json") == chip


def test_what_a_file_cannot_say_is_not_written(tmp_path: Path) -> None:
    path = tmp_path / "chip.json"
    with pytest.raises(HardwareError, match="no op lists|at least 1 entry"):
        save_hardware(Hardware({}), path)
    assert list(tmp_path.iterdir()) == []


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path, small())
    before = path.read_bytes()
    chip = load_hardware(path)

    def fail(descriptor: int) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(json_text.os, "fsync", fail)
    with pytest.raises(HardwareError, match="cannot be written.*disk full"):
        save_hardware(replace(chip, name="other"), path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(HardwareError, match="cannot be written"):
        save_hardware(from_document(small(), "", OPS), tmp_path / "no" / "chip.json")
