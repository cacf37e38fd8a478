"""Explanations of a topology: they agree with the topology and the space, and the bits that they call safe are safe."""

from __future__ import annotations

import json

import pytest
import torch
from products import some
from specs import SHIPPED
from torch import Tensor, nn

from hago.analysis.explain import Explanation, explain_topology
from hago.errors import UnsupportedOp
from hago.graph.graph import CONST, INPUT, Graph
from hago.hardware.hardware import Hardware, OpDesc
from hago.plan.resolve import Resolver
from hago.plan.space import Space, build_space
from hago.plan.topology import Topology, analyze

from .golden_files import assert_golden
from .models import CHIPS, MODELS, OUTPUT, WIDE, Concat, Island, Pooled, Ranges, Residual, import_model, sample

CASES = some(2, MODELS, {**CHIPS, **SHIPPED})


def explained(
    model: nn.Module, chip: Hardware, keep_float: tuple[str, ...] = ()
) -> tuple[Graph, Topology, Space, Explanation]:
    graph = import_model(model)
    topology = analyze(graph, chip, keep_float)
    space = build_space(graph, chip, topology)
    return graph, topology, space, explain_topology(graph, chip, topology, space)


@pytest.fixture(params=CASES, ids="-".join)
def case(request: pytest.FixtureRequest) -> tuple[Hardware, Graph, Topology, Space, Explanation]:
    model, hardware = request.param
    chip = {**CHIPS, **SHIPPED}[hardware]
    try:
        return (chip, *explained(MODELS[model](), chip))
    except UnsupportedOp as error:
        pytest.skip(str(error))


Case = tuple[Hardware, Graph, Topology, Space, Explanation]


def test_agrees_with_the_topology(case: Case) -> None:
    _, graph, topology, space, explanation = case
    computed = [n.name for n in graph if n.op not in (INPUT, CONST)]
    assert [r.name for r in explanation.rows] == computed
    assert {r.name: r.integer for r in explanation.rows} == {n: topology.nodes[n] for n in computed}
    assert {r.name: r.reason for r in explanation.rows} == {n: topology.reasons[n] for n in computed}
    assert explanation.integer_nodes + explanation.float_nodes == len(computed)
    assert (explanation.groups, explanation.choices) == (len(space.groups), space.size)


def test_every_choice_of_the_space_is_listed_once(case: Case) -> None:
    *_, space, explanation = case
    listed = {e.key: e.choices for r in explanation.rows for e in r.edges if e.why == "chosen"}
    assert listed == {key: g.choices for key, g in space.groups.items()}


def test_crossings_are_where_the_dtype_changes(case: Case) -> None:
    _, graph, topology, _, explanation = case
    for crossing in explanation.crossings:
        assert topology.nodes[crossing.source] == (crossing.to == "float")
    edges = {c.edge for c in explanation.crossings}
    assert all((f"output:{i}" in edges) == topology.nodes[name] for i, name in enumerate(graph.outputs))


def test_prints_and_json(case: Case) -> None:
    *_, explanation = case
    assert json.loads(json.dumps(explanation.to_json(), allow_nan=False)) == explanation.to_json()
    lines = str(explanation).splitlines()
    assert max(map(len, lines)) <= 140
    assert all(any(line.startswith(r.name) for line in lines) for r in explanation.rows)


def test_safe_bits_are_proved_by_every_plan(case: Case) -> None:
    chip, graph, topology, space, explanation = case
    for large in (0.25, 4.0, 1000.0):
        ranges = Ranges(graph, [sample() * large])
        resolver = Resolver(graph, chip, topology, space, ranges)
        for bits in (space.widest(), space.narrowest()):
            nodes = resolver(bits).nodes
            assert all(nodes[r.name].proved for r in explanation.rows if r.always_safe)
            safe = {
                r.name: nodes[r.name].proved
                for r in explanation.rows
                if r.safe_bits is not None and all(bits.get(e.key, 0) <= r.safe_bits for e in r.edges)
            }
            assert all(safe.values())


def test_adding_two_operands_as_wide_as_the_register_is_not_safe() -> None:
    ops = {"conv2d": (OpDesc(["int8", "int8", "int32"], "int32"),), "add": (OpDesc("int32", "int32"),)}
    chip = Hardware(ops, name="full")
    graph, topology, space, explanation = explained(Residual(), chip)
    row = next(r for r in explanation.rows if r.op == "add")
    assert (row.safe_bits, row.always_safe, row.overflow) == (31, False, "never to 31 bits")
    resolver = Resolver(graph, chip, topology, space, Ranges(graph, [sample()]))
    keys = [e.key for e in row.edges]
    assert not resolver({**space.widest(), **dict.fromkeys(keys, 32)}).nodes[row.name].proved
    assert resolver({**space.widest(), **dict.fromkeys(keys, 31)}).nodes[row.name].proved


def test_macs_are_counted() -> None:
    _, _, _, explanation = explained(Residual(), WIDE)
    assert {r.name: r.macs for r in explanation.rows if r.macs} == {"first": 2 * 16 * 18, "second": 2 * 16 * 18}
    assert (explanation.integer_macs, explanation.float_macs) == (1152, 0)


def test_why_a_node_stays_float() -> None:
    _, _, _, explanation = explained(Island(), WIDE, ("last",))
    why = {r.name: r.reason for r in explanation.rows}
    assert why["cumsum"] == "hago has no rule for aten.cumsum.default" and why["last"] == "kept float by the user"
    assert next(r.op for r in explanation.rows if r.name == "cumsum") == "aten.cumsum.default"
    assert (explanation.integer_macs, explanation.float_macs) == (64, 64)
    assert [str(c) for c in explanation.crossings] == ["x -> first:0 to integer", "first -> cumsum:0 to float"]
    assert "kept float by the user" in str(explanation) and "50.0 %" in str(explanation)


def test_a_model_without_macs() -> None:
    class Bare(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.relu(x)

    *_, explanation = explained(Bare(), WIDE)
    assert explanation.integer_macs == explanation.float_macs == 0
    assert "0 of 0 MACs" in str(explanation)


@pytest.mark.parametrize(
    ("name", "model", "chip"),
    [("residual_wide", Residual, WIDE), ("concat_output", Concat, OUTPUT), ("island_wide", Island, WIDE)],
)
def test_golden_explanation(name: str, model: type[nn.Module], chip: Hardware) -> None:
    *_, explanation = explained(model(), chip)
    assert_golden(f"explain_{name}.txt", f"{explanation}\n")


def test_pooled_output_edges_name_their_producer() -> None:
    *_, explanation = explained(Pooled(), OUTPUT)
    row = next(r for r in explanation.rows if r.name == "last")
    assert any(e.why.startswith("of ") or e.why in ("as emitted", "chosen") for e in row.edges)
