"""Ranges and modes that the user gives, from tables of another tool and from those that hago exports."""

from __future__ import annotations

import functools
import math
from pathlib import Path

import pytest
import torch
from torch import nn

import hago
from hago.arithmetic.schemes import Grid
from hago.calibration.given_ranges import GivenRanges, make_given_ranges
from hago.emulation.tpu_mlir.tables import (
    CalibrationTable,
    QuantizeTable,
    Row,
    format_calibration_table,
    format_quantize_table,
    parse_calibration_table,
    parse_quantize_table,
)
from hago.errors import DataError, HagoError
from hago.export.tpu_mlir import make_tables
from hago.graph.graph import Graph
from hago.hardware.file import available_hardware, load_hardware
from hago.search.preparation import QuantizationOptions, prepare


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.head = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3), nn.Linear(64, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.second(self.first(x).relu()).flatten(1))


@functools.cache
def net() -> Graph:
    return hago.from_torch(Net().eval(), (data()[0],))


def data() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(8, 3, 8, 8, generator=generator) for _ in range(2)]


# ---------------------------------------------------------------- written, read, the same
@pytest.mark.parametrize("name", [n for n in available_hardware() if load_hardware(n).integer_descs("conv2d")])
def test_a_strategys_own_tables_give_the_same_scales(name: str) -> None:
    """Equal qparams on every data edge, but for what seven printed digits leave open."""
    quantizer = hago.quantize(
        net(), name, data(), keep_float=[] if name == "int16_accumulator" else ["head"], corrections="none"
    )
    tables = make_tables(quantizer.plan, quantizer.strategy.bits)
    rows = parse_calibration_table(format_calibration_table(tables.calibration))
    modes = parse_quantize_table(format_quantize_table(tables.quantize))
    assert modes.modes == tables.quantize.modes
    chip = load_hardware(name)
    again = prepare(
        quantizer.plan.graph,
        chip,
        data(),
        QuantizationOptions(thresholds=rows, modes={k: m for k, m in modes.modes.items() if m == "F32"}),
    )
    plan = again.resolver(quantizer.strategy.bits)
    compared = 0
    for node, made in quantizer.plan.nodes.items():
        for key in made.thresholds:
            source, slot = key.rpartition(":")[0], key.rpartition(":")[2]
            if slot == "out":
                old, new = made.out, plan.nodes[node].out
            else:
                old, new = (p.nodes[source].operands[int(slot)] for p in (quantizer.plan, plan))  # type: ignore[assignment]
            assert torch.allclose(old.scale, new.scale, rtol=1e-5), key
            assert torch.equal(old.zero_point, new.zero_point) and (old.qmin, old.qmax) == (new.qmin, new.qmax), key
            compared += 1
    assert compared >= 4
    if chip.requantize.power_of_two:
        assert plan.key == quantizer.plan.key  # to the last bit


# ---------------------------------------------------------------- what a row means
def test_a_row_is_read_according_to_the_scheme() -> None:
    table = CalibrationTable({"a": Row(2.0, -1.0, 3.0), "b": Row(2.0, 0.0, 3.0)}, {"a": Row(0.5, -0.5, 0.5)})
    one_sided, two_sided = (make_given_ranges(table, None, load_hardware(n)) for n in ("vta", "arm_dot"))
    assert one_sided.ranges == {"a": (-2.0, 2.0), "b": (0.0, 2.0)}
    assert two_sided.ranges == {"a": (-1.0, 3.0), "b": (0.0, 3.0)}
    assert one_sided.narrow == {"a": (-0.5, 0.5)}
    lo, hi = one_sided.thresholds("a", Grid(8, "hago"))
    assert math.isclose(float(hi), 2.0 * 128 / 127, rel_tol=1e-6) and float(lo) == -float(hi)
    assert math.isclose(float(one_sided.thresholds("a", Grid(4, "symmetric"))[1]), 0.5, rel_tol=1e-6)
    assert math.isclose(float(one_sided.thresholds("b", Grid(4, "symmetric", False))[1]), 2.0, rel_tol=1e-6)


def test_given_ranges_are_kept_and_other_nodes_estimated() -> None:
    given = hago.quantize(net(), "x86_vnni", data(), thresholds={"x": (-1.0, 1.0)})
    plain = hago.quantize(net(), "x86_vnni", data())
    assert list(given.strategy.made_by["estimated"]) == ["relu", "second", "reshape"]
    assert "estimated" not in plain.strategy.made_by
    low, high = given.strategy.thresholds["first:0"]
    target = given.plan.nodes["first"].operands[0]
    assert target is not None and low < 0 < high
    assert math.isclose(float((target.qmax - target.zero_point) * target.scale), 1.0, rel_tol=2e-2)
    weights = [k for k in plain.strategy.thresholds if k.endswith(":1")]
    assert weights and all(given.strategy.thresholds[k] == plain.strategy.thresholds[k] for k in weights)
    assert given.strategy.thresholds["second:0"] == plain.strategy.thresholds["second:0"]


def test_onnx_names_of_the_engine_are_understood() -> None:
    seed = GivenRanges({"first_Conv": (-1.0, 1.0), "x": (-2.0, 2.0)}, modes={"head_Gemm": "F32"})
    found = seed.at(net())
    assert set(found.ranges) == {"first", "x"} and found.modes == {"head": "F32"}


# ---------------------------------------------------------------- modes
def test_modes_keep_float_and_fix_bits() -> None:
    modes = {"head": "F16", "first": "W4INT8", "second": "INT4"}
    prepared = prepare(net(), "vta", data(), QuantizationOptions(modes=modes))
    assert not prepared.topology.nodes["head"]
    choices = {k: g.choices for k, g in prepared.space.groups.items()}
    assert choices["first:0"] == (8,) and choices["first:1"] == (4,)
    assert choices["second:0"] == (4,) and choices["second:1"] == (4,)


def test_a_search_with_tables_is_continued_and_replayed(tmp_path: Path) -> None:
    (tmp_path / "cali").write_text(format_calibration_table(CalibrationTable({"x": Row(1.5, -1.5, 1.5)})))
    (tmp_path / "q").write_text(format_quantize_table(QuantizeTable({"head": "F32"})))
    how = {"log": tmp_path / "l.jsonl", "budget": 3, "searcher": "random", "progress": False}
    tables = {"thresholds": tmp_path / "cali", "modes": tmp_path / "q"}
    strategy, _ = hago.search_quantize_strategy(net(), "vta", data(), **how, **tables)  # type: ignore[arg-type]
    assert strategy.topology.node_conds["head"] is False
    again, _ = hago.search_quantize_strategy(net(), "vta", data(), **how, **tables)  # type: ignore[arg-type]
    assert again.thresholds == strategy.thresholds
    assert hago.replay(net(), "vta", tmp_path / "l.jsonl", data()).same
    assert hago.create_quantizer(net(), "vta", strategy).plan.key
    with pytest.raises(HagoError, match="settings.*thresholds"):
        hago.search_quantize_strategy(net(), "vta", data(), **how, modes=tmp_path / "q")  # type: ignore[arg-type]


# ---------------------------------------------------------------- refused
@pytest.mark.parametrize(
    "thresholds, modes, why",
    [
        ({"fist": (-1.0, 1.0)}, None, "'fist', which is not a node of the model. Did you mean 'first'"),
        (None, {"secondd": "F32"}, "Did you mean 'second'"),
        ({"first": (-1.0, 1.0), "first_Conv": (-1.0, 1.0)}, None, "node 'first' twice"),
        ({"first": (1.0, 2.0)}, None, "low <= 0 <= high"),
        ({"first": (math.nan, 2.0)}, None, "finite"),
        ({"first": (0.0,)}, None, r"expected \(low, high\)"),
        (None, {"first": "F8"}, "counterparts of F32"),
        (None, {"first": "INT5"}, "Did you mean 'INT"),
        ("no_such_table", None, "cannot read table"),
        (__file__, None, "line"),
        (None, __file__, "line"),
    ],
)
def test_wrong_tables_are_refused_by_name(thresholds: object, modes: object, why: str) -> None:
    with pytest.raises((HagoError, DataError), match=why):
        make_given_ranges(thresholds, modes, load_hardware("vta")).at(net())  # type: ignore[arg-type]
