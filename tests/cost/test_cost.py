"""Costs: laws over plans of every shipped spec, and figures worked out by hand."""

from __future__ import annotations

import copy
import itertools
import json
import math
import pickle
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from building import Builder, residual_block, seeded
from plans import fixed_resolver, points, resolver_of
from specs import SHIPPED
from torch import Tensor, nn

from hago import serialization
from hago.arithmetic.types import dtype
from hago.cost.cost import METRICS, Cost, amount_text, float_cost, node_macs, plan_cost, rows_of
from hago.cost.report import cost_range
from hago.errors import HagoError
from hago.graph.frontend import composites, from_torch
from hago.graph.graph import Graph
from hago.hardware.hardware import Accumulator, Hardware, OpDesc
from hago.plan.plan import Plan
from hago.plan.resolve import Resolver
from hago.plan.space import build_space
from hago.plan.topology import analyze
from hago.runtime.reference import IntegerModel

#: Figures that no chip has, so that every term of every sum is nonzero and tells itself apart.
CHIP_COST = {
    "clock_hz": 1e6,
    "cores": 2,
    "bytes_per_cycle": 0.5,
    "requantize_per_cycle": 3,
    "picojoules_per_byte": 7,
    "picojoules_per_requantize": 11,
}
#: Figures that a hardware file may have and no cost reads.
RECORDED_ONLY = ("on_chip_bytes",)


def priced(hardware: Hardware) -> Hardware:
    """The hardware with every figure of cost."""

    def with_figures(desc: OpDesc) -> OpDesc:
        return replace(desc, cost={"macs_per_cycle": 4, "elements_per_cycle": 2, "picojoules_per_mac": 5, **desc.cost})

    ops = {op: tuple(map(with_figures, descs)) for op, descs in hardware.ops.items()}
    return replace(hardware, ops=ops, cost={**hardware.cost, **CHIP_COST})


CHIPS = {name: priced(chip) for name, chip in SHIPPED.items()}


@pytest.fixture(scope="module", params=CHIPS)
def resolver(request: pytest.FixtureRequest) -> Resolver:
    return resolver_of(residual_block(), CHIPS[request.param], [seeded(8, 3, 8, 8)])


def plans(resolver: Resolver, count: int = 6) -> list[Plan]:
    return [resolver(bits) for bits in itertools.islice(points(resolver.space, 0), count)]


# ---------------------------------------------------------------- laws
def test_totals_are_sums_of_the_rows(resolver: Resolver) -> None:
    for plan in plans(resolver):
        cost = plan_cost(plan, 3)
        assert set(cost.figures) == set(METRICS) and not cost.missing
        rows = list(rows_of(cost))
        outputs = [e for e in cost.edges if e.edge.startswith("output:")]
        assert [n.node for n, _ in rows] == [n.name for n in plan.graph if n.op not in ("input", "const")]
        assert sum(len(edges) for _, edges in rows) + len(outputs) == len(cost.edges) == len(plan.graph.edges)
        every = [r for n, edges in rows for r in (n, *edges)] + outputs
        assert cost["cycles"] == pytest.approx(math.fsum(r.cycles or 0.0 for r in every))
        assert cost["energy"] == pytest.approx(1e-12 * math.fsum(r.picojoules or 0.0 for r in every))
        assert cost["requantized"] == sum(r.requantized for r in every)
        assert cost["latency"] == cost["cycles"] / 1e6
        for name, metric in METRICS.items():
            if metric.part is not None:
                parts = [metric.part(row, cost) or 0.0 for row in cost.rows]
                assert cost[name] == pytest.approx(math.fsum(parts)), name


def test_the_page_on_costs_has_a_row_for_every_metric() -> None:
    page = (Path(__file__).parents[2] / "docs" / "cost.md").read_text("utf-8")
    rows = re.findall(r"^\| `(\w+)` \| (\w*) ?\|", page[: page.index("## Memory")], re.M)
    assert dict(rows) == {name: metric.unit for name, metric in METRICS.items()}


def test_additive_over_nodes() -> None:
    """What two networks take side by side is what each takes alone."""

    def branch(b: Builder, x: str, name: str) -> str:
        return b.call("relu", b.conv2d(x, seeded(4, 3, 3, 3, seed=1), name=name), name=f"{name}.relu")

    def network(*names: str) -> Graph:
        b = Builder()
        x = b.input(3, 8, 8, name="x")
        return b.graph(*[branch(b, x, name) for name in names])

    for chip in CHIPS.values():

        def cost(*names: str, chip: Hardware = chip) -> Cost:
            resolver = resolver_of(network(*names), chip, [seeded(2, 3, 8, 8)])
            return plan_cost(resolver(resolver.space.narrowest()), 2)

        a, b, both = cost("a"), cost("b"), cost("a", "b")
        for metric in {name for name, m in METRICS.items() if m.part is not None} - {"effective_bits"}:
            assert both[metric] == pytest.approx(a[metric] + b[metric]), metric


def test_linear_in_the_batch(resolver: Resolver) -> None:
    for plan in plans(resolver, 3):
        one, five, nine = (plan_cost(plan, batch) for batch in (1, 5, 9))
        for metric in ("macs", "bops", "requantized", "activation_bytes"):
            assert (five[metric], nine[metric]) == (5 * one[metric], 9 * one[metric])
        for metric in ("weight_bytes", "effective_bits"):
            assert one[metric] == five[metric] == nine[metric]
        # weights are read once for all samples
        assert nine["bytes_moved"] - five["bytes_moved"] == five["bytes_moved"] - one["bytes_moved"]
        assert one["cycles"] < five["cycles"] <= 5 * one["cycles"]


def test_narrower_bits_never_cost_more_bytes(resolver: Resolver) -> None:
    space = resolver.space
    for bits in itertools.islice(points(space, 1), 4):
        here = plan_cost(resolver(bits)).figures
        for key, group in space.groups.items():
            index = group.choices.index(bits[key])
            if index + 1 < len(group.choices):
                there = plan_cost(resolver({**bits, key: group.choices[index + 1]})).figures
                for metric in ("weight_bytes", "activation_bytes", "bytes_moved", "bops", "effective_bits"):
                    assert there[metric] <= here[metric], (key, metric)


def test_equal_plans_have_equal_costs(resolver: Resolver) -> None:
    bits = resolver.space.widest()
    assert plan_cost(resolver(bits)) == plan_cost(resolver(dict(bits)))


def test_a_float_model_has_no_conversions(resolver: Resolver) -> None:
    plan = resolver(resolver.space.widest())
    cost = float_cost(plan, 2)
    assert cost["requantized"] == 0 and cost["effective_bits"] == 32
    assert cost["weight_bytes"] == 4 * sum(t.numel() for t in plan.graph.consts.values())
    assert cost["macs"] == plan_cost(plan, 2)["macs"] and cost["bops"] == 1024 * cost["macs"]


def test_the_size_of_a_strategy_is_the_same_everywhere(resolver: Resolver) -> None:
    for bits in (resolver.space.widest(), resolver.space.narrowest()):
        plan = resolver(bits)
        sizes = plan.weight_sizes
        assert sizes.at_bits == plan_cost(plan)["weight_bytes"] == plan_cost(plan).weight_bytes
        assert sizes.integer == sum(b.numel() * b.element_size() for b in IntegerModel(plan).buffers())
        assert sizes.at_bits <= sizes.stored
        floats = float_cost(plan)["weight_bytes"]
        assert sizes.before == floats


def test_totals_are_attributes(resolver: Resolver) -> None:
    cost = plan_cost(resolver(resolver.space.widest()))
    for metric in METRICS:
        if metric in cost.figures:
            assert getattr(cost, metric) == cost[metric] and metric in dir(cost)
        else:
            with pytest.raises(AttributeError, match=f"does not give what '{metric}' needs"):
                getattr(cost, metric)
    with pytest.raises(AttributeError, match="a cost has no 'weight_byte'.*weight_bytes.*Did you mean 'weight_bytes'"):
        cost.weight_byte  # noqa: B018
    assert not hasattr(cost, "nonsense")
    assert pickle.loads(pickle.dumps(cost)) == copy.deepcopy(cost) == cost


def test_cost_range_matches_the_costs_of_calibrated_plans(resolver: Resolver) -> None:
    graph, chip = resolver.graph, resolver.hardware
    topology = analyze(graph, chip)
    found = cost_range(graph, chip, topology, build_space(graph, chip, topology))
    for made_up, bits in ((found.widest, resolver.space.widest()), (found.narrowest, resolver.space.narrowest())):
        real = plan_cost(resolver(bits))
        # data decides between signatures that differ only in signs
        assert [replace(n, signature="") for n in made_up.nodes] == [replace(n, signature="") for n in real.nodes]
        # an edge between equal scales needs no requantization, which is known only with data
        assert [e.weight_bytes for e in made_up.edges] == [e.weight_bytes for e in real.edges]
        assert all(a.requantized >= b.requantized for a, b in zip(made_up.edges, real.edges, strict=True))
    assert found.floating == float_cost(resolver(resolver.space.widest()))
    assert "fewest bits" in str(found)


# ---------------------------------------------------------------- by hand
def by_hand(**changes: object) -> tuple[Graph, Hardware]:
    """x (6) -> fc 6 to 4 with bias -> relu -> head 4 to 2, which is float."""
    b = Builder()
    x = b.input(6, name="x")
    hidden = b.call("relu", b.linear(x, seeded(4, 6, seed=1), seeded(4, seed=2), name="fc"), name="relu")
    b.call("softmax", hidden, axis=1, name="soft")
    chip = Hardware(
        {
            "linear": [
                OpDesc(
                    ["int8", "int8", "int16"], "int32", name="mac", cost={"macs_per_cycle": 8, "picojoules_per_mac": 2}
                )
            ],
            "relu": [OpDesc("int32", "int32", name="move", cost={"elements_per_cycle": 0.5})],
            "softmax": [OpDesc("float32", "float32", name="f32", cost={"elements_per_cycle": 0.25})],
        },
        name="paper",
        cost={**CHIP_COST, **changes},
    )
    return b.graph(), chip


def test_by_hand_at_the_edge() -> None:
    graph, chip = by_hand()
    plan = fixed_resolver(graph, chip, {"fc:0": (-1.0, 1.0)})({"fc:0": 7, "fc:1": 5})
    cost = plan_cost(plan, 10)
    # 24 weights of 5 bits = 15 B; 4 biases in int16 = 8 B
    assert cost["weight_bytes"] == 15 + 8 and cost["effective_bits"] == 5
    # fc and relu store 10 x 4 int32, softmax 10 x 4 float32
    assert cost["activation_bytes"] == 3 * 160
    # fc reads 60 floats, 24 bytes of weights and 8 of biases
    assert cost["bytes_moved"] == (240 + 24 + 8 + 160) + (160 + 160) + (160 + 160)
    assert (cost["macs"], cost["bops"]) == (240, 240 * 7 * 5)
    # 60 inputs are quantized, 40 values dequantized for the softmax
    assert cost["requantized"] == 60 + 40
    nodes = {n.node: n for n in cost.nodes}
    assert (nodes["fc"].compute_cycles, nodes["fc"].memory_cycles) == (240 / 16, 432 / 0.5)
    assert (nodes["relu"].compute_cycles, nodes["relu"].memory_cycles) == (40 / 1.0, 320 / 0.5)
    assert (nodes["soft"].compute_cycles, nodes["soft"].memory_cycles) == (40 / 0.5, 320 / 0.5)
    assert cost["cycles"] == pytest.approx(864 + 640 + 640 + 100 / 6)
    assert cost["energy"] == pytest.approx(1e-12 * (240 * 2 + 1072 * 7 + 100 * 11))
    assert "elements_per_cycle" not in " ".join(cost.missing)


def test_compute_bound_and_requantized_at_the_output() -> None:
    graph, chip = by_hand(bytes_per_cycle=1e9, cores=1)
    acc = Accumulator(dtype("int32"))
    mac = OpDesc(["int8", "int8"], "int8", acc, "output", name="mac", cost={"macs_per_cycle": 8})
    move = OpDesc("int8", "int8", name="move", cost={"elements_per_cycle": 0.5})
    chip = replace(chip, ops={**chip.ops, "linear": (mac,), "relu": (move,)})
    resolver = fixed_resolver(graph, chip, {"fc:0": (-1.0, 1.0), "fc:out": (-4.0, 4.0)})
    cost = plan_cost(resolver({"fc:0": 8, "fc:1": 8, "fc:out": 8}))
    nodes = {n.node: n for n in cost.nodes}
    assert (nodes["fc"].requantized, nodes["fc"].write_bytes, nodes["relu"].write_bytes) == (4, 4, 4)
    assert nodes["fc"].cycles == pytest.approx(24 / 8 + 4 / 3)
    assert nodes["relu"].cycles == 8 and nodes["soft"].cycles == 16
    # biases in the accumulator's int32; 6 inputs quantized, 4 outputs requantized, 4 values dequantized
    assert cost["weight_bytes"] == 24 + 16 and cost["requantized"] == 6 + 4 + 4
    assert cost["cycles"] == pytest.approx(3 + 4 / 3 + 8 + 16 + 10 / 3)


def test_narrow_dtypes_are_read_packed_and_shared_constants_count_once() -> None:
    b = Builder()
    x, weight = b.input(6, name="x"), b.const(seeded(4, 6, seed=1), "w")
    one, two = b.call("linear", x, weight, name="one"), b.call("linear", x, weight, name="two")
    chip = Hardware({"linear": [OpDesc(["int4", "int4"], "int32", name="mac")]}, name="nibbles")
    resolver = fixed_resolver(b.graph(one, two), chip, {"one:0": (-1.0, 1.0), "two:0": (-1.0, 1.0)})
    cost = plan_cost(resolver(resolver.space.widest()))
    assert cost["weight_bytes"] == 12 and cost["effective_bits"] == 4
    assert {n.read_bytes for n in cost.nodes} == {24 + 12}
    assert {"cycles", "latency", "energy"}.isdisjoint(cost.figures)


# ---------------------------------------------------------------- what is not known
def test_figures_that_the_hardware_lacks_are_reported_as_missing() -> None:
    graph, chip = by_hand()
    for name in CHIP_COST:
        poorer = replace(chip, cost={k: v for k, v in chip.cost.items() if k != name})
        cost = plan_cost(fixed_resolver(graph, poorer, {"fc:0": (-1.0, 1.0)})({"fc:0": 8, "fc:1": 8}))
        assert any(m.startswith(name) for m in cost.missing) == (name != "cores")
    bare = replace(chip, cost={}, ops={o: [replace(d, cost={}) for d in ds] for o, ds in chip.ops.items()})
    cost = plan_cost(fixed_resolver(graph, bare, {"fc:0": (-1.0, 1.0)})({"fc:0": 8, "fc:1": 8}))
    assert {"cycles", "latency", "energy"}.isdisjoint(cost.figures)
    assert "macs_per_cycle of signature 'mac' (latency)" in cost.missing
    with pytest.raises(
        HagoError, match=r"'paper' does not give what 'latency' needs.*macs_per_cycle.*hardware measure"
    ):
        cost["latency"]
    with pytest.raises(
        HagoError, match="'energy' needs.*picojoules_per_mac to signatures, which docs/hardware.md explains$"
    ):
        cost["energy"]
    with pytest.raises(HagoError, match="unknown cost 'wieght_bytes'.*Did you mean 'weight_bytes'"):
        cost["wieght_bytes"]
    assert "not in paper" in str(cost)


def test_every_figure_of_a_chip_is_read_and_has_its_formula() -> None:
    schemas = Path(serialization.__file__).parent / "schemas"
    schema = json.loads((schemas / "hardware.schema.json").read_text("utf-8"))
    page = (Path(__file__).parents[2] / "docs" / "cost.md").read_text("utf-8")
    chip_figures = set(schema["properties"]["cost"]["properties"])
    assert chip_figures == {*CHIP_COST, *RECORDED_ONLY}
    assert {name for name in chip_figures if name not in page} == set()
    graph, chip = by_hand()

    def totals(cost: dict[str, float]) -> dict[str, float]:
        plan = fixed_resolver(graph, replace(chip, cost=cost), {"fc:0": (-1.0, 1.0)})({"fc:0": 8, "fc:1": 8})
        return dict(plan_cost(plan).figures)

    for name in CHIP_COST:
        assert totals({**CHIP_COST, name: CHIP_COST[name] / 1000}) != totals(CHIP_COST), name
    for name in RECORDED_ONLY:
        assert totals({**CHIP_COST, name: 1.0}) == totals(CHIP_COST), name


def test_without_a_clock_cycles_are_counted() -> None:
    graph, chip = by_hand()
    cost = plan_cost(fixed_resolver(graph, replace(chip, cost={}), {"fc:0": (-1.0, 1.0)})({"fc:0": 8, "fc:1": 8}))
    assert cost["cycles"] == 24 / 8 + 8 + 16
    with pytest.raises(HagoError, match="use 'cycles'"):
        cost["latency"]


@pytest.mark.parametrize("batch", [0, -1, True, 2.0])
def test_a_batch_is_a_count(batch: object) -> None:
    graph, chip = by_hand()
    plan = fixed_resolver(graph, chip, {"fc:0": (-1.0, 1.0)})({"fc:0": 8, "fc:1": 8})
    with pytest.raises(HagoError, match="batch"):
        plan_cost(plan, batch)  # type: ignore[arg-type]


def test_amounts_as_text() -> None:
    said = [
        amount_text(m, v) for m, v in (("weight_bytes", 3 << 20), ("latency", 0.0025), ("cycles", 1234), ("macs", 0))
    ]
    assert said == ["3 MiB", "2.5 ms", "1.23k cycles", "0"]


def test_products_in_calls_without_a_rule_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(composites, "_COMPOSITES", {})  # which would make a matrix product of einsum

    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm, self.gru = nn.LSTM(5, 4, bidirectional=True, batch_first=True), nn.GRU(8, 3, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return torch.einsum("bij,jk->bik", self.gru(self.lstm(x)[0])[0], torch.ones(3, 2)).cumsum(1)

    graph = from_torch(Tagger().eval(), (seeded(2, 7, 5),))
    plan = fixed_resolver(graph, CHIPS["vta"], {})({})
    # gates, their inputs and states; two directions
    expected = {"lstm": 2 * 7 * 4 * 4 * (5 + 4), "gru": 7 * 3 * 3 * (8 + 3), "bmm": 7 * 3 * 2}
    for batch in (1, 3):
        found = [n.macs for n in plan_cost(plan, batch).nodes if n.macs]
        assert found == [batch * macs for macs in expected.values()]
    assert node_macs(graph, next(n for n in graph if n.attrs.get("target") == "aten.cumsum.default"), plan.ops) == 0
