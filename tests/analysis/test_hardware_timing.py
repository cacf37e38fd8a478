"""Measured copies of hardware files: the figures that may differ, and the refusals; no timing is asserted."""

from __future__ import annotations

import json
import math
import platform
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import hago
from hago.analysis import hardware_timing as timing
from hago.analysis.hardware_timing import TIMED, Case, Measurement, TimedOp, measure_hardware
from hago.cli import main
from hago.errors import HardwareError
from hago.hardware.file import available_hardware, hardware_to_document, load_hardware, save_hardware
from hago.hardware.hardware import Hardware, OpDesc
from hago.runtime.native.self_test import exact_kernels

COST = {"macs_per_cycle", "elements_per_cycle"}
CHIP = {"clock_hz", "cores", "bytes_per_cycle", "requantize_per_cycle"}


@pytest.fixture(scope="module", autouse=True)
def quick() -> Iterator[None]:
    """Replace the timed sizes by small ones."""
    small = {}
    for op in ("conv2d", "relu"):
        shapes = tuple((2, s[1], 4, 4) for s in TIMED[op].in_cache.shapes)
        case = Case(TIMED[op].in_cache.make, shapes)
        small[op] = TimedOp(TIMED[op].kind, case, case)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timing, "ROUNDS", 2)
        patch.setattr(timing, "SLICE", 0.0)
        patch.setattr(timing, "_COPIED", 1 << 16)
        patch.setattr(timing, "TIMED", small)
        yield


def chip_of(**ops: Sequence[OpDesc]) -> Hardware:
    """x86_vnni with a few ops, of any CPU."""
    return replace(load_hardware("x86_vnni"), name="small", processor="cpu", ops=ops)


X86_OPS = load_hardware("x86_vnni").ops
RELU = X86_OPS["relu"][0]
ODD = OpDesc("int16", "int64", name="odd", cost={"elements_per_cycle": 3.0, "picojoules_per_mac": 2.0})
#: Its sums fit no simulation, since float64 does not hold them.
WIDE = OpDesc(["int32", "int32"], "int64", name="wide", cost={"macs_per_cycle": 5.0}, min_bits=30)


@pytest.fixture(scope="module")
def chip() -> Hardware:
    """A chip with signatures for which this machine has a kernel, and others."""
    return chip_of(conv2d=(*X86_OPS["conv2d"], WIDE), relu=(RELU, X86_OPS["relu"][-1]), reshape=(ODD,))


@pytest.fixture(scope="module")
def threads() -> int:
    """The number of threads while it is measured; other tests may set another."""
    return torch.get_num_threads()


@pytest.fixture(scope="module")
def measured(chip: Hardware, threads: int) -> Measurement:
    return measure_hardware(chip)


def without_costs(document: dict[str, Any]) -> dict[str, Any]:
    signatures = {n: {k: v for k, v in b.items() if k not in COST} for n, b in document["signatures"].items()}
    chip = {k: v for k, v in document.get("cost", {}).items() if k not in CHIP}
    others = {k: v for k, v in document.items() if k not in ("name", "sources", "notes", "cost")}
    return {**others, "signatures": signatures, "chip": chip}


def test_only_costs_differ_and_they_are_figures(
    chip: Hardware, measured: Measurement, threads: int, tmp_path: Path
) -> None:
    copy = measured.hardware
    assert without_costs(hardware_to_document(copy)) == without_costs(hardware_to_document(chip))
    assert copy.name == "small_measured"
    # without hago's kernels nothing requantizes as an engine would
    assert set(copy.cost) >= (CHIP if exact_kernels().passes.exact else CHIP - {"requantize_per_cycle"})
    figures = [*copy.cost.values(), *(v for ds in copy.ops.values() for d in ds for v in d.cost.values())]
    assert all(math.isfinite(v) and v > 0 for v in figures)
    assert copy.cost["cores"] == threads
    save_hardware(copy, tmp_path / "copy.json")
    assert load_hardware(tmp_path / "copy.json") == copy


def test_a_figure_is_of_its_signature(measured: Measurement) -> None:
    by_key = {(f.of, f.key): f for f in measured.figures}
    assert set(by_key) >= {("u8_mac", "macs_per_cycle"), ("f32", "macs_per_cycle"), ("u8", "elements_per_cycle")}
    assert by_key["f32", "macs_per_cycle"].said.endswith("torch")
    conv, _, _ = measured.hardware.ops["conv2d"]
    assert conv.cost == {"macs_per_cycle": by_key["u8_mac", "macs_per_cycle"].now}


@pytest.mark.parametrize(
    ("name", "figure", "why"),
    [("odd", 3.0, "none of its ops is among those"), ("wide", 5.0, "conv2d: no bits were found that fit")],
)
def test_a_figure_that_cannot_be_measured_is_kept_with_a_note(
    measured: Measurement, name: str, figure: float, why: str
) -> None:
    (unmeasured,) = [f for f in measured.figures if f.of == name]
    assert unmeasured.now == unmeasured.before == figure
    assert unmeasured.said.startswith(f"not measured: {why}")
    (desc,) = [d for ds in measured.hardware.ops.values() for d in ds if d.name == name]
    assert dict(desc.cost) == dict({"odd": ODD, "wide": WIDE}[name].cost)
    assert any(note.startswith(f"{name}, {unmeasured.key}: not measured") for note in measured.hardware.notes)


def test_the_machine_the_day_and_the_versions_are_named(measured: Measurement, threads: int) -> None:
    source = measured.hardware.sources[-1]
    assert platform.machine() in source
    assert f"torch {torch.__version__.partition('+')[0]}" in source
    assert f"hago {hago.__version__}" in source
    assert f"{threads} thread{'' if threads == 1 else 's'}, " in source
    assert re.search(r"20\d\d-\d\d-\d\d", source)


def test_a_copy_of_a_copy_has_the_same_name(measured: Measurement) -> None:
    again = measure_hardware(replace(measured.hardware, ops={"relu": (RELU,)}))
    assert again.hardware.name == measured.hardware.name == "small_measured"


@pytest.mark.parametrize("name", available_hardware())
def test_only_cpus_are_measured(name: str) -> None:
    chip = load_hardware(name)
    if chip.processor not in ("x86", "arm", "cpu"):
        with pytest.raises(HardwareError, match=f"{name}.*not said to be a CPU"):
            measure_hardware(chip)
    other = "arm" if platform.machine().lower() in ("x86_64", "amd64", "i686") else "x86"
    with pytest.raises(HardwareError, match=f"is of an {other} CPU"):
        measure_hardware(replace(chip, processor=other))


def test_the_copy_can_be_searched_for_latency(measured: Measurement) -> None:
    model = torch.nn.Sequential(torch.nn.Conv2d(1, 4, 3), torch.nn.ReLU()).eval()
    torch.manual_seed(0)
    data = [torch.randn(4, 1, 6, 6)]
    best, _ = hago.search_quantize_strategy(
        model, measured.hardware, data, minimize="latency", keep="sqnr >= -99", budget=3, progress=False
    )
    assert best.made_by["costs"]["latency"] > 0


# ---------------------------------------------------------------- the command
def test_the_command_writes_a_valid_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given, output = tmp_path / "small.json", tmp_path / "made" / "copy.json"
    save_hardware(chip_of(relu=(RELU,)), given)
    assert main(["hardware", "measure", str(given), "--output", str(output), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["name"] == load_hardware(output).name == "small_measured"
    assert {f["key"] for f in document["figures"]} >= CHIP - {"requantize_per_cycle"}
    assert main(["hardware", "check", str(output)]) == 0


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["vta", "--output", "copy.json"], "not said to be a CPU"),
        (["x86_vnni", "--output", "copy.txt"], "ends in .json"),
        (["x86_vnni"], "--output"),
        (["nothing", "--output", "copy.json"], "no hardware is called"),
    ],
)
def test_what_is_refused(
    words: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["hardware", "measure", *words]) == 2
    assert says in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_file_is_not_measured_over_itself(chip: Hardware, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "small.json"
    save_hardware(chip, path)
    before = path.read_bytes()
    assert main(["hardware", "measure", str(path), "--output", str(path)]) == 2
    assert "another name" in capsys.readouterr().err
    assert path.read_bytes() == before
