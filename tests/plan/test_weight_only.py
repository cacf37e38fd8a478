"""Weights alone quantized: nodes that compute in float, and read a weight that rests as integers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from building import Builder, seeded
from ops.samples import INTERNAL_KEYS, KEYS, graph_of
from plans import resolver_of

from hago.analysis.explain import explain_topology
from hago.analysis.inspect import inspect_plan
from hago.arithmetic.types import Edge, SimQ, dtype
from hago.cost.cost import float_cost, plan_cost
from hago.data.batches import Batches
from hago.errors import HagoError, HardwareError, ModelFileError, UnsupportedOp
from hago.export.tpu_mlir import make_tables
from hago.graph.graph import CONST, Graph
from hago.hardware.file import check_hardware, hardware_from_document, hardware_hash, hardware_to_document
from hago.hardware.hardware import Accumulator, Hardware, OpDesc, TensorScheme
from hago.ops import OPS
from hago.plan.document_checks import check_plan
from hago.plan.plan import Plan
from hago.plan.space import build_space
from hago.plan.topology import analyze
from hago.runtime.exactness import compare_plan_exactly
from hago.runtime.reference import IntegerModel
from hago.runtime.stored_model import from_file_bytes, load_plan, save_plan, to_file_bytes
from hago.search.preparation import QuantizationOptions, prepare
from hago.search.session import SearchOptions, run_search
from hago.search.stored_strategy import make_strategy, plan_of
from hago.simulation.simulator import Simulator

INT4 = OpDesc(["float32", "int4"], "float32", name="w4", cost={"macs_per_cycle": 8})
INT8 = OpDesc(["float32", "int8"], "float32", name="w8", cost={"macs_per_cycle": 4})
REAL = OpDesc("float32", "float32", name="real", cost={"macs_per_cycle": 2})
MAC = OpDesc(["int8", "int8", "int32"], "int32", name="mac", cost={"macs_per_cycle": 16})
SCHEMES = ("hago", "symmetric", "symmetric_full", "affine", "hago_affine")


def chip(*descs: OpDesc, scheme: str = "symmetric", granularity: str = "per_channel", **more: object) -> Hardware:
    """Every op that has a weight, with these signatures."""
    weighed = [n for n, r in OPS.items() if r.integer is not None and r.integer.weight is not None]
    weight = TensorScheme(scheme, granularity)  # type: ignore[arg-type]
    return Hardware(dict.fromkeys(weighed, descs), name="weights", weight=weight, **more)  # type: ignore[arg-type]


def network() -> Graph:
    """conv -> relu -> flat -> fc, with a second reader of fc's weight."""
    b = Builder()
    x = b.call(
        "relu",
        b.conv2d(b.input(3, 6, 6, name="x"), seeded(4, 3, 3, 3), seeded(4), name="conv", padding=[0, 0]),
        name="relu",
    )
    flat = b.call("reshape", x, name="flat", shape=[-1, 64])
    weight = b.const(seeded(5, 64, seed=2), "weight")
    return b.graph(b.call("linear", flat, weight, name="fc"), b.call("linear", flat, weight, name="again"))


DATA = [seeded(4, 3, 6, 6)]


def plan_on(hardware: Hardware, bits: Mapping[str, int] | None = None) -> Plan:
    resolver = resolver_of(network(), hardware, DATA)
    return resolver({**resolver.space.widest(), **(bits or {})})


# ---------------------------------------------------------------- what is computed
@pytest.mark.parametrize("stored", ["int4", "uint4", "int8", "uint8", "int3", "int16"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_float_nodes_read_scale_times_integer(stored: str, scheme: str) -> None:
    """On every value and engine; and the node is torch's own on the weight so made, in any granularity."""
    for granularity in ("per_channel", "per_tensor"):
        desc = OpDesc(["float32", stored], "float32", min_bits=3)
        plan = plan_on(chip(desc, scheme=scheme, granularity=granularity))
        assert set(map(str, plan.weights)) == {"conv:1", "fc:1", "again:1"} and not plan.nodes
        x = seeded(4, 3, 6, 6, seed=7)
        assert compare_plan_exactly(plan, [x]).same
        consts = dict(plan.graph.consts)
        made = {
            e.dst: w.integers.to(torch.float32) * w.qparams.scale.to(torch.float32) for e, w in plan.weights.items()
        }
        conv = torch.nn.functional.conv2d(x, made["conv"], consts["conv.bias"])
        expected = torch.nn.functional.linear(conv.relu().reshape(-1, 64), made["fc"])
        assert Simulator(plan).run([x])[0].equal(expected)
        error = (made["fc"] - consts["weight"]).abs() / plan.weights[Edge("fc", 1)].qparams.scale
        assert float(error.max()) < (1.51 if scheme.startswith("hago") else 0.51)  # a threshold is one quantum below


#: Samples whose weight is a constant.
WEIGHED = [
    key
    for key in (*KEYS, *(k for k in INTERNAL_KEYS if k[0] == "affine"))
    if key[0] == "affine" or (key[0] in chip(INT4).ops and 1 in OPS[key[0]].samples[key[1]].consts)
]


@pytest.mark.parametrize("key", WEIGHED, ids=lambda k: f"{k[0]}-{k[1]}")
def test_every_op_that_has_a_weight(key: tuple[str, int]) -> None:
    graph = graph_of(*key)
    shapes = [(3, *(graph[n].shape or ())[1:]) for n in graph.inputs]
    resolver = resolver_of(graph, chip(INT4), [seeded(*s) for s in shapes])
    plan = resolver(resolver.space.widest())
    assert [e.slot for e in plan.weights] == [1]
    assert compare_plan_exactly(plan, [seeded(*s, seed=4) for s in shapes]).same


def test_integers_that_differ_from_the_nearest_show() -> None:
    """The comparison bites: the integer model with one other integer is not the simulator's."""
    model = IntegerModel(plan_on(chip(INT8)))
    other = model.get_buffer("fc:1").clone()  # both layers read the same integers
    other[0, 0] += 1
    setattr(model, "fc:1", other)
    x = seeded(4, 3, 6, 6)
    ours, theirs = Simulator(model.plan).run([x]), model.run([x])
    assert not ours[0].equal(theirs[0]) and ours[1].equal(theirs[1])


# ---------------------------------------------------------------- which nodes
@pytest.mark.parametrize(
    ("descs", "keep", "integer", "stored"),
    [
        ((INT4, MAC, REAL), [], "", "conv fc again"),  # preferred first
        ((MAC, INT4, REAL), [], "conv fc again", ""),
        ((MAC, REAL, INT4), ["fc:0"], "conv again", "fc"),  # its data float, its weight not
        ((MAC, REAL, INT4), ["*:0"], "", "conv fc again"),
        ((MAC, REAL, INT4), ["fc"], "conv again", ""),  # float as a whole
        ((MAC, REAL, INT4), ["fc:1"], "conv again", ""),
        ((INT4, MAC, REAL), ["fc"], "", "conv again"),
        ((REAL, INT4), [], "", ""),
        ((INT4, REAL), ["fc:1", "again"], "", "conv"),
    ],
)
def test_which_nodes(descs: tuple[OpDesc, ...], keep: list[str], integer: str, stored: str) -> None:
    hardware = chip(*descs)
    prepared = prepare(network(), hardware, [tuple(DATA)], QuantizationOptions(keep_float=keep, estimator="max_range"))
    bits = prepared.space.widest()
    plan = prepared.resolver(bits)
    assert set(plan.nodes) - {"relu", "flat"} == set(integer.split())
    assert {e.dst for e in plan.weights} == set(stored.split())
    assert compare_plan_exactly(plan, DATA).same
    strategy = make_strategy(prepared, plan, bits, {"keep_float": keep})
    assert plan_of(network(), hardware, strategy).key == plan.key


def test_a_pattern_of_no_edge_is_refused() -> None:
    with pytest.raises(HagoError, match="'fc:7' matches no name"):
        analyze(network(), chip(MAC, REAL), ["fc:7"])


def test_a_weight_that_is_no_constant_stays_float() -> None:
    b = Builder()
    x = b.input(4, 4, name="x")
    graph = b.graph(b.call("matmul", x, x, name="square"))
    assert not any(analyze(graph, chip(INT4)).edges.values())
    says = "no integer signature for matmul, .* float matmul only with a constant weight, .* 'x' is computed"
    with pytest.raises(UnsupportedOp, match=f"'square'.*{says}"):
        analyze(graph, chip(INT4, other_ops="reject"))
    strict = chip(INT4, other_ops="reject")
    strict = replace(strict, ops={**strict.ops, "relu": (REAL,), "reshape": (REAL,)})
    with pytest.raises(UnsupportedOp, match="'fc' .* its weight is kept float by the user .fc:1."):
        analyze(network(), strict, ["fc:1"])


def test_a_point_of_kinds_keeps_what_is_stored_stored() -> None:
    """A node that turns float leaves others as they are: their data float, their weights not."""
    hardware = chip(MAC, REAL, INT4)
    prepared = prepare(
        network(),
        hardware,
        [tuple(DATA)],
        QuantizationOptions(keep_float=["fc:0"], estimator="max_range", search_topology=True),
    )
    plan = prepared.resolver({**prepared.space.widest(), "conv:kind": 1})
    assert set(map(str, plan.weights)) == {"fc:1"} and set(plan.nodes) == {"again"}


# ---------------------------------------------------------------- bits and costs
def test_bits_choose_the_signature() -> None:
    plan = plan_on(chip(INT4, INT8), {"fc:1": 4, "again:1": 6})
    assert {e.dst: w.qparams.dtype.name for e, w in plan.weights.items()} == {
        "conv": "int8",
        "fc": "int4",
        "again": "int8",
    }
    space = build_space(network(), chip(INT4, INT8), analyze(network(), chip(INT4, INT8)))
    assert {k: g.choices for k, g in space.groups.items()} == dict.fromkeys(
        ["conv:1", "fc:1", "again:1"], (8, 7, 6, 5, 4)
    )


def test_costs() -> None:
    """Weights at their bits, products at their signature's rate, values as float."""
    hardware = chip(INT4, INT8, REAL, cost={"bytes_per_cycle": 4})
    plan = plan_on(hardware, {"conv:1": 8, "fc:1": 4, "again:1": 5})
    cost, real = plan_cost(plan), float_cost(plan)
    edges, nodes = ({getattr(r, k): r for r in rows} for rows, k in ((cost.edges, "edge"), (cost.nodes, "node")))
    assert {e: edges[e].weight_bytes for e in ("conv:1", "fc:1", "again:1")} == {
        "conv:1": 108, "fc:1": 160, "again:1": 200
    }  # fmt: skip
    assert nodes["fc"].bops == 320 * 32 * 4 and nodes["fc"].compute_cycles == 320 / 8 and not nodes["fc"].integer
    assert nodes["fc"].read_bytes == 64 * 4 + 160 and nodes["conv"].signature == "w8"
    assert cost["activation_bytes"] == real["activation_bytes"] and cost["requantized"] == 0
    assert real["weight_bytes"] == 4 * (108 + 4 + 320)


@pytest.mark.parametrize("searcher", ["greedy", "sensitivity", "gradient", "pareto"])
def test_a_search_gives_bits_to_weights(searcher: str) -> None:
    hardware = chip(OpDesc(["float32", "int8"], "float32"), REAL)
    options = SearchOptions.of(searcher, budget="12 trials", progress=False, budget_cost="weight_bytes <= 600")
    found = run_search(network(), hardware, [(seeded(8, 3, 6, 6),)], options)
    assert set(found.strategy.bits) == {"conv:1", "fc:1", "again:1"}
    plan = plan_of(network(), hardware, found.strategy)
    assert 400 < plan_cost(plan)["weight_bytes"] <= 600 and not plan.nodes


# ---------------------------------------------------------------- what is said
def test_explain_and_inspect() -> None:
    hardware, graph = chip(INT4, INT8), network()
    topology = analyze(graph, hardware)
    rows = {r.name: r for r in explain_topology(graph, hardware, topology, build_space(graph, hardware, topology)).rows}
    assert [e.choices for e in rows["fc"].edges] == [(), (8, 7, 6, 5, 4)] and not rows["fc"].integer
    assert rows["fc"].signatures == ("(float32, int4) -> float32", "(float32, int8) -> float32")
    plan = plan_on(hardware, {"fc:1": 4})
    statistic = inspect_plan(plan, Batches([tuple(DATA)], graph.inputs))
    assert all(statistic[n].differences == 0 for n in ("conv", "fc"))
    assert statistic["conv"].main_cause == "constants" and statistic["relu"].main_cause is None
    assert [(e.edge, e.bits) for e in statistic["fc"].edges] == [("fc:1", 4)]


def test_tpu_mlir_is_refused() -> None:
    with pytest.raises(HagoError, match="node 'conv' computes in float with its weight as integers"):
        make_tables(plan_on(chip(INT4)), {})


# ---------------------------------------------------------------- what is stored
def test_a_stored_model_holds_packed_integers(tmp_path: Path) -> None:
    plan = plan_on(chip(INT4, granularity="per_channel"))
    save_plan(tmp_path / "model", plan)
    again, _ = load_plan(tmp_path / "model")
    x = seeded(3, 3, 6, 6, seed=3)
    assert IntegerModel(again).run([x])[0].equal(Simulator(plan).run([x])[0])
    assert to_file_bytes(again) == to_file_bytes(plan) and again.key == plan.key
    kept = [n.name for n in again.graph if n.op == CONST and again.graph.consts[n.name].is_meta]
    assert kept == ["conv.weight", "weight"]
    weights = sum(t.numel() for t in (plan.graph.consts[n] for n in kept))
    grown = len(to_file_bytes(plan_on(chip(INT8, min_size := REAL)))) - len(to_file_bytes(plan))
    assert min_size is REAL and weights / 2 < grown  # each takes half a byte less


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (lambda d: d["weights"]["fc:1"].update(desc=1), "signature or its constant do not allow"),
        (lambda d: d["edges"].pop("fc:1"), "no edge that dequantizes them"),
        (lambda d: d["weights"].update({"fc:0": d["weights"]["fc:1"]}), "contradict"),
        (lambda d: d["weights"]["fc:1"]["integers"].update(shape=[64, 5]), "shape"),
        (lambda d: d["weights"].update({"nobody:1": d["weights"]["fc:1"]}), "contradict"),
    ],
)
def test_an_edited_model_is_refused(edit: object, says: str) -> None:
    from hago.plan.document import plan_from_document as plan_from
    from hago.plan.document import plan_to_document as plan_to

    assert callable(edit)
    document, tensors = plan_to(plan_on(chip(INT4, REAL)))
    document = json.loads(json.dumps(document))
    assert plan_from(document, tensors, "x").weights
    edit(document)
    with pytest.raises(ModelFileError, match=says):
        plan_from(document, tensors, "x")


def test_integers_are_read_where_an_op_has_its_weight_only() -> None:
    """A file whose hardware has another signature may not say so either."""
    plan = plan_on(chip(INT4, REAL))
    weight = plan.weights[Edge("conv", 1)]
    scale, zero = (t.flatten() for t in (weight.qparams.scale, weight.qparams.zero_point))
    qparams = replace(weight.qparams, scale=scale, zero_point=zero)
    desc = OpDesc(["float32", "float32", "int4"], "float32")
    bias = replace(weight, desc=desc, qparams=qparams, integers=torch.zeros(4, dtype=torch.int8))
    check_plan(plan)
    edge = Edge("conv", 2)
    edges = {**plan.edges, edge: SimQ(qparams, None)}
    with pytest.raises(HagoError, match="conv:2 has integers .* its op has no weight there"):
        check_plan(replace(plan, weights={**plan.weights, edge: bias}, edges=edges))


# ---------------------------------------------------------------- hardware
@pytest.mark.parametrize(
    ("op", "desc", "says"),
    [
        ("linear", OpDesc(["int4", "float32"], "float32"), r"the weight of linear is operand 1; got an integer as op"),
        ("add", OpDesc(["float32", "int4"], "float32"), r"hago knows no weight of add"),
        ("linear", OpDesc(["float32", "int32"], "float32"), r"expected at most 16 bits of a weight"),
        ("linear", OpDesc(["float32", "int3"], "float32"), r"min_bits: got 4 \(the default\); expected at most 3"),
        ("linear", OpDesc(["float32", "int4"], "float32", max_bits=9), r"at most 4, as no operand holds more"),
        ("linear", OpDesc(["float32", "int4"], "float32", requantize_at="output"), r"computes in float has none"),
    ],
)
def test_signatures_that_are_refused(op: str, desc: OpDesc, says: str) -> None:
    with pytest.raises(HardwareError, match=says):
        check_hardware(Hardware({op: (desc,)}))


@pytest.mark.parametrize("ins", [["int8"], ["int8", "int8"], ["float32", "int4", "int4"], ["float32", "int4", "int32"]])
def test_other_mixtures_are_refused(ins: list[str]) -> None:
    with pytest.raises(HardwareError, match="mixes integer and float"):
        OpDesc(ins, "float32")


def test_an_integer_register_of_floats_is_no_weight() -> None:
    for ins in (["float32", "float32"], ["float32", "int4"]):
        with pytest.raises(HardwareError, match="mixes integer and float"):
            OpDesc(ins, "float32", accumulator=Accumulator(dtype("int32")))


def test_a_signature_is_read_as_it_was_written() -> None:
    hardware = chip(OpDesc(["float32", "int8", "float32"], "float32", min_bits=5, max_bits=7), REAL)
    check_hardware(hardware)
    again = hardware_from_document(json.loads(json.dumps(hardware_to_document(hardware))), "", OPS)
    assert again == hardware and hardware_hash(again) == hardware_hash(hardware)
    assert hardware_hash(again) != hardware_hash(chip(OpDesc(["float32", "int8", "float32"], "float32"), REAL))


def test_a_layer_of_tensorrt_with_int4_weights() -> None:
    prepared = prepare(
        network(), "tensorrt_gpu", [tuple(DATA)], QuantizationOptions(keep_float=["fc:0"], estimator="max_range")
    )
    plan = prepared.resolver(prepared.space.widest())
    weight = plan.weights[Edge("fc", 1)].qparams
    assert (weight.dtype.name, weight.qmin, weight.qmax, weight.scale.numel()) == ("int4", -7, 7, 5)
    assert {"conv", "again"} <= set(plan.nodes) and compare_plan_exactly(plan, DATA).same
    assert from_file_bytes(to_file_bytes(plan), "x")[0].key == plan.key
