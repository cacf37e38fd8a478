"""Hardware files: reading, refusals that name the place of a mistake, and writing."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hago.arithmetic.types import INT32
from hago.errors import HardwareError
from hago.hardware.file import hardware_from_document, hardware_to_document, load_hardware, save_hardware
from hago.hardware.hardware import Accumulator, Hardware, OpDesc
from hago.ops import OPS


def small() -> dict[str, Any]:
    """A document without mistakes."""
    mac = OpDesc(["uint8", "int8"], "int8", Accumulator(INT32), "output", name="mac", cost={"macs_per_cycle": 64})
    return hardware_to_document(
        Hardware({"conv2d": (mac,), "add": (OpDesc("int32", "int32", name="i32", max_bits=23),)})
    )


def write(folder: Path, document: Any) -> Path:
    path = folder / "chip.json"
    path.write_text(document if isinstance(document, str) else json.dumps(document), "utf-8")
    return path


def refusal(folder: Path, document: Any) -> str:
    with pytest.raises(HardwareError) as caught:
        load_hardware(write(folder, document))
    return str(caught.value)


def test_a_file_is_read(tmp_path: Path) -> None:
    chip = load_hardware(write(tmp_path, small()))
    (mac,) = chip.ops["conv2d"]
    assert (mac.name, mac.cost, mac.register) == ("mac", {"macs_per_cycle": 64}, Accumulator(INT32))
    assert chip.ops["add"][0].max_bits == 23
    assert chip.origin.endswith("chip.json")


def test_mistakes_are_counted_and_listed(tmp_path: Path) -> None:
    document = small() | {"rounding": "half_eve", "nmae": "x"}
    message = refusal(tmp_path, document)
    assert message.startswith(f"hardware {str(tmp_path / 'chip.json')!r} has 2 mistakes:\n  $.nmae: ")
    assert "\n  $.rounding: unknown rounding" in message


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
def test_text_that_is_not_hardware_is_refused(tmp_path: Path, text: str, says: str) -> None:
    assert says in refusal(tmp_path, text)


def test_files_truncated_anywhere_are_refused(tmp_path: Path) -> None:
    text = json.dumps(small(), indent=1)
    for end in range(0, len(text) - 1, 37):
        message = refusal(tmp_path, text[:end])
        assert "is not JSON at line" in message, end


def test_bytes_that_are_not_utf8_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "chip.json"
    path.write_bytes(b'{"name": "\xff\xfe"}')
    with pytest.raises(HardwareError, match="is not JSON"):
        load_hardware(path)


def test_a_byte_order_mark_is_ignored(tmp_path: Path) -> None:
    path = tmp_path / "chip.json"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(small()).encode())
    assert load_hardware(path).name == "custom"


def test_repeated_keys_are_refused(tmp_path: Path) -> None:
    text = json.dumps(small())
    text = text.replace('"overflow": "wrap"', '"overflow": "wrap", "overflow": "saturate_end"')
    text = text.replace('"name": "custom"', '"name": "a", "name": "b", "name": "c"')
    message = refusal(tmp_path, text)
    assert "$.signatures.mac.accumulator.overflow: the key occurs 2 times" in message
    assert "$.name: the key occurs 3 times" in message


# ---------------------------------------------------------------- names and paths
@pytest.mark.parametrize("place", ["no/such/file.json", "nowhere.json", ".", "./", "a\0b.json"])
def test_a_missing_file_is_reported(place: str) -> None:
    with pytest.raises(HardwareError, match="cannot be read"):
        load_hardware(Path(place) if place == "." else place)


def test_an_unknown_name_is_reported() -> None:
    with pytest.raises(HardwareError, match=r"no hardware is called 'x86_vni'.*Did you mean 'x86_vnni'\?"):
        load_hardware("x86_vni")


def test_a_user_op(tmp_path: Path) -> None:
    mine = replace(OPS["relu"], name="my_relu", aliases=())
    document = small()
    document["ops"]["my_relu"] = ["i32"]
    ops = {**OPS, "my_relu": mine}
    path = write(tmp_path, document)
    with pytest.raises(HardwareError, match=r"\$\.ops\.my_relu: unknown op.*Did you mean 'relu'\?"):
        load_hardware(path)
    chip = load_hardware(path, known_ops=ops)
    assert chip.ops["my_relu"][0].name == "i32"
    save_hardware(chip, path)
    assert load_hardware(path, known_ops=ops) == chip


# ---------------------------------------------------------------- writing
def test_unnamed_signatures_are_named(tmp_path: Path) -> None:
    wide = OpDesc(["int8", "int8"], "int32", max_bits=7)
    chip = Hardware({"conv2d": (OpDesc(["int8", "int8"], "int32"), wide), "linear": (wide,)})
    save_hardware(chip, tmp_path / "chip.json")
    document = json.loads((tmp_path / "chip.json").read_text("utf-8"))
    assert list(document["signatures"]) == ["int8_int8_to_int32", "int8_int8_to_int32_2"]
    assert document["ops"]["linear"] == ["int8_int8_to_int32_2"]
    assert load_hardware(tmp_path / "chip.json") == chip


def test_hardware_that_a_file_cannot_express_is_not_written(tmp_path: Path) -> None:
    path = tmp_path / "chip.json"
    with pytest.raises(HardwareError, match="at least 1 entry"):
        save_hardware(Hardware({}), path)
    assert list(tmp_path.iterdir()) == []


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path, small())
    before = path.read_bytes()
    chip = load_hardware(path)

    def fail(descriptor: int) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(HardwareError, match=r"cannot be written.*disk full"):
        save_hardware(replace(chip, name="other"), path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_missing_folder_is_reported(tmp_path: Path) -> None:
    with pytest.raises(HardwareError, match="cannot be written"):
        save_hardware(hardware_from_document(small(), "", OPS), tmp_path / "no" / "chip.json")


def test_a_file_names_a_schema_only_where_there_is_one(tmp_path: Path) -> None:
    save_hardware(load_hardware("vta"), tmp_path / "chip.json")
    assert "$schema" not in json.loads((tmp_path / "chip.json").read_text("utf-8"))
    schema = tmp_path / "hago" / "serialization" / "schemas" / "hardware.schema.json"
    schema.parent.mkdir(parents=True)
    schema.write_text("{}", "utf-8")
    (tmp_path / "hardware_specs").mkdir()
    save_hardware(load_hardware("vta"), tmp_path / "hardware_specs" / "chip.json")
    said = json.loads((tmp_path / "hardware_specs" / "chip.json").read_text("utf-8"))["$schema"]
    assert (tmp_path / "hardware_specs" / said).samefile(schema)
    assert load_hardware(tmp_path / "chip.json") == load_hardware(tmp_path / "hardware_specs" / "chip.json")
