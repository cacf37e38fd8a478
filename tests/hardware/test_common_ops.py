"""The common ops that chips lack, and the start of a file for a new chip."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from hago import from_torch
from hago.demo import DigitNet
from hago.errors import HardwareError
from hago.hardware.common_ops import COMMON_OPS, DATA_MOVEMENT, FOREIGN_OPS, foreign_op, missing_common_ops
from hago.hardware.file import (
    available_hardware,
    check_hardware,
    hardware_hash,
    hardware_to_document,
    load_hardware,
    save_hardware,
)
from hago.hardware.hardware import Hardware, OpDesc
from hago.hardware.start import start_hardware
from hago.hardware.validation import check_hardware_document
from hago.importing import import_for_chip
from hago.ops import OPS, aliases
from hago.plan.topology import analyze

LISTED = [op for ops in COMMON_OPS.values() for op in ops]


def test_the_tables_name_ops_once() -> None:
    assert set(LISTED) <= set(OPS) and set(DATA_MOVEMENT) <= set(OPS)
    assert len(set(LISTED)) == len(LISTED) and len(set(DATA_MOVEMENT)) == len(DATA_MOVEMENT)


def test_the_ops_of_small_networks_are_common() -> None:
    mobile = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU6(), nn.Hardswish(), nn.SiLU(), nn.Sigmoid())
    attention = nn.TransformerEncoderLayer(8, 2, 16, activation="gelu", batch_first=True)
    seen: set[str] = set()
    for model, shape in ((DigitNet(), (2, 1, 8, 8)), (mobile, (2, 1, 8, 8)), (attention, (2, 4, 8))):
        graph = import_for_chip(model.eval(), load_hardware("x86_vnni"), (torch.randn(shape),))
        seen |= {node.op for node in graph if node.op in OPS}
    assert {"conv2d", "clamp", "matmul", "softmax"} <= seen <= set(LISTED)


@pytest.mark.parametrize("name", available_hardware())
def test_missing_ops_are_those_without_integers(name: str) -> None:
    chip = load_hardware(name)
    missing = missing_common_ops(chip)
    for family, ops in COMMON_OPS.items():
        lacking = {*missing.unlisted.get(family, ()), *missing.float_only.get(family, ())}
        assert lacking == {op for op in ops if not chip.integer_descs(op)}
        assert all(op in str(missing) for op in lacking)


@pytest.mark.parametrize("op", ["relu", "conv2d"])
def test_a_missing_op_is_a_float_island(op: str) -> None:
    whole = load_hardware("x86_vnni")
    assert op not in str(missing_common_ops(whole)).replace("_", " ").replace(",", " ").split()
    chip = replace(whole, ops={k: v for k, v in whole.ops.items() if k != op})
    missing = missing_common_ops(chip)
    assert op in next(iter(missing.unlisted.values())) and "float islands" in str(missing)
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Conv2d(2, 2, 3))
    graph = from_torch(model.eval(), (torch.randn(2, 1, 8, 8),))
    topology = analyze(graph, chip)
    assert all(not topology.nodes[node.name] for node in graph if node.op == op)
    assert "refuses networks with them" in str(missing_common_ops(replace(chip, other_ops="reject")))


def test_a_chip_with_all_common_ops_says_so() -> None:
    chip = Hardware({op: OpDesc("int8", "int8") for op in LISTED})
    assert str(missing_common_ops(chip)) == "all common ops run in integers"


# ---------------------------------------------------------------- the start of a file
@pytest.mark.parametrize("base", available_hardware())
def test_a_start_is_a_valid_file_with_the_ops_of_its_base(base: str, tmp_path: Path) -> None:
    given = load_hardware(base)
    chip = start_hardware("my_dsp", given)
    check_hardware(chip)
    save_hardware(chip, tmp_path / "my_dsp.json")
    again = load_hardware(tmp_path / "my_dsp.json")
    assert again == replace(chip, origin=again.origin) and hardware_hash(again) != hardware_hash(given)
    assert list(again.ops) == list(given.ops)
    assert (again.activation, again.weight, again.requantize) == (given.activation, given.weight, given.requantize)
    assert not again.cost and not again.processor and not any(d.cost for descs in again.ops.values() for d in descs)
    notes = "\n".join(again.notes)
    assert all(op in notes for op in {*DATA_MOVEMENT} & set(given.ops))
    assert all(op in notes for op in OPS if op not in given.ops)
    for key in ("activation", "weight", "requantize", "rounding", "signatures", "ops", "other_ops", "cost"):
        assert key in notes


@pytest.mark.parametrize(
    ("name", "says"),
    [("vta", "ships with hago; give the new one another name"), ("a/b", "expected letters"), ("", "expected letters")],
)
def test_names_that_are_taken_or_none(name: str, says: str) -> None:
    with pytest.raises(HardwareError, match=says):
        start_hardware(name, load_hardware("vta"))
    assert start_hardware("my_vta", load_hardware("vta")).name == "my_vta"


@pytest.mark.parametrize("name", FOREIGN_OPS)
def test_an_op_by_the_name_of_another_system_is_called_what_hago_calls_it(name: str) -> None:
    own, more = FOREIGN_OPS[name]
    assert own in OPS and name not in OPS and name not in aliases()
    assert all(other in OPS for other in more.removeprefix("or ").strip("'").split("' or '") if more.startswith("or "))
    document = hardware_to_document(load_hardware("x86_vnni"))
    document["ops"][name] = document["ops"][own]
    (finding,) = [f for f in check_hardware_document(document, OPS) if f.path == ("ops", name)]
    assert finding.text.startswith(f"unknown op; hago calls it {own!r}")
    assert foreign_op(name.upper(), OPS) == foreign_op(name, OPS) and not foreign_op("conv9d", OPS)


def test_a_chip_with_a_depthwise_convolution_is_told_of_groups() -> None:
    assert "groups" in foreign_op("depthwise_conv2d", OPS)
