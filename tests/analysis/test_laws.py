"""Laws for every model on every chip: the causes sum to the error, simulated equals integer, and nothing is NaN."""

from __future__ import annotations

import csv
import functools
import io
import json
import math

import pytest
import torch
from products import some
from specs import SHIPPED

from hago.analysis.error_causes import CAUSES, NodeSplitter
from hago.analysis.graph_statistic import GraphStatistic
from hago.analysis.inspect import Lockstep, inspect_plan
from hago.errors import UnsupportedOp
from hago.graph.execute import run_real
from hago.hardware.hardware import Hardware
from hago.plan.plan import Plan
from hago.simulation.simulator import Simulator

from .models import CHIPS, MODELS, batches, make_plan, sample

#: One of each kind of register, of requantization and of forms; the others differ in what is listed.
CHOSEN = ("arm_dot", "int16_accumulator", "sample", "vta", "x86_avx2", "x86_vnni", "tflite", "tpu_mlir_bm1684x")
SPECS = {name: SHIPPED[name] for name in CHOSEN if name in SHIPPED}
CASES = some(2, MODELS, {**CHIPS, **SPECS}, (64, 5))


@functools.cache
def plan_of(model: str, hardware: str, bits: int) -> Plan:
    chip: Hardware = {**CHIPS, **SPECS}[hardware]
    try:
        return make_plan(MODELS[model](), chip, at_most=bits)
    except UnsupportedOp as error:
        pytest.skip(str(error))


@functools.cache
def inspected(model: str, hardware: str, bits: int) -> tuple[Plan, GraphStatistic]:
    plan = plan_of(model, hardware, bits)
    return plan, inspect_plan(plan, batches(sample()))


@pytest.fixture(params=CASES, ids=lambda c: "-".join(map(str, c)))
def case(request: pytest.FixtureRequest) -> tuple[Plan, GraphStatistic]:
    return inspected(*request.param)


def test_simulator_and_integer_model_agree(case: tuple[Plan, GraphStatistic]) -> None:
    _, statistic = case
    assert [r.name for r in statistic.rows if r.differences] == []
    assert statistic.total_differences == 0
    assert all(r.integer_values == r.simulated_values for r in statistic.rows)


def test_shares_sum_to_one(case: tuple[Plan, GraphStatistic]) -> None:
    _, statistic = case
    for row in statistic.rows:
        shares = [row.causes[c].share for c in CAUSES]
        if not row.error_power:
            assert shares == [None] * len(CAUSES)
        else:
            assert sum(s for s in shares if s is not None) == pytest.approx(1.0, abs=1e-9), row.name


def test_float_nodes_only_inherit(case: tuple[Plan, GraphStatistic]) -> None:
    plan, statistic = case
    for row in statistic.rows:
        assert row.integer == (row.name in plan.nodes)
        if not row.integer:
            assert all(row.causes[c].power == 0.0 for c in CAUSES[1:]), row.name
            assert row.verdict == "float"


def test_errors_are_those_of_the_two_executions(case: tuple[Plan, GraphStatistic]) -> None:
    plan, statistic = case
    reference, simulated = run_real(plan.graph, [sample()]), Simulator(plan).run([sample()])
    for name, real, value in zip(plan.graph.outputs, reference, simulated, strict=True):
        error = value.double() - real.double()
        row = statistic[name]
        if row.past is not None:
            continue
        assert row.max_error == pytest.approx(float(error.abs().max()), abs=1e-12)
        assert row.error_power == pytest.approx(float(error.square().mean()), rel=1e-12, abs=1e-15)
        if row.error_power:
            expected = 10 * math.log10(float(real.double().square().sum() / error.square().sum()))
            assert row.sqnr == pytest.approx(expected, abs=1e-6)


def test_blame_is_a_partition(case: tuple[Plan, GraphStatistic]) -> None:
    plan, statistic = case
    parts = statistic.blame
    assert all(p > 0.0 for p in parts.values())
    assert set(parts) <= {r.name for r in statistic.rows}
    wrong_outputs = [n for n in plan.graph.outputs if statistic[n].error_power]
    assert sum(parts.values()) == pytest.approx(1.0 if wrong_outputs else 0.0)


def test_json_and_csv_hold_the_same(case: tuple[Plan, GraphStatistic]) -> None:
    _, statistic = case
    told = json.loads(json.dumps(statistic.to_json(), allow_nan=False))
    assert told == statistic.to_json()
    rows = list(csv.DictReader(io.StringIO(statistic.to_csv())))
    assert [r["node"] for r in rows] == [r.name for r in statistic.rows] == [n["name"] for n in told["nodes"]]
    for line, row, node in zip(rows, statistic.rows, told["nodes"], strict=True):
        assert float(line["max_error"]) == row.max_error == node["max_error"]
        assert float(line["float_std"]) == row.float_values.deviation == node["float_values"]["deviation"]
        assert line["overflow_share"] == (
            "" if row.causes["overflow"].share is None else str(row.causes["overflow"].share)
        )
        assert int(line["differences"]) == row.differences == node["differences"]


def test_text_fits_a_terminal(case: tuple[Plan, GraphStatistic]) -> None:
    _, statistic = case
    lines = str(statistic).splitlines()
    assert max(map(len, lines)) <= 140
    assert sum(any(line.startswith(r.name) for r in statistic.rows) for line in lines) >= len(statistic.rows)


@pytest.mark.parametrize("case_", CASES[::3], ids=lambda c: "-".join(map(str, c)))
def test_steps_telescope_elementwise(case_: tuple[str, str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_of(*case_)
    checked_nodes = 0
    split = NodeSplitter.__call__

    def checked(self, reference, sources, carriers, accumulator, final, **rest):  # type: ignore[no-untyped-def]
        nonlocal checked_nodes
        checked_nodes += 1
        statistic = split(self, reference, sources, carriers, accumulator, final, **rest)
        start, end = reference, final
        for node in self.chain:
            start, end = (plan.ops[node.op].compute(node.attrs, v) for v in (start, end))
        assert torch.equal(statistic.reference, start) and torch.equal(statistic.steps[-1][1], end)
        total, before = torch.zeros_like(start, dtype=torch.float64), start.double()
        for cause, value in statistic.steps:
            assert cause in CAUSES and value.shape == start.shape
            total, before = total + (value.double() - before), value.double()
        torch.testing.assert_close(total, end.double() - start.double(), rtol=0, atol=1e-12)
        return statistic

    monkeypatch.setattr(NodeSplitter, "__call__", checked)
    Lockstep(plan).feed([sample()])
    assert checked_nodes == len(plan.nodes) > 0
