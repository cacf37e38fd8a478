"""Weights in groups: alone, with a float scale for each; in integer products, with an integer multiplier for each."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from building import Builder, seeded
from exact import clip, wrap_exactly
from hypothesis import given, settings
from hypothesis import strategies as st
from plans import resolver_of
from torch import Tensor

import hago
from hago.analysis.explain import explain_topology
from hago.analysis.inspect import inspect_plan
from hago.arithmetic.numerics import Requantize
from hago.arithmetic.types import Edge, SimQ, dtype
from hago.correction import Corrections
from hago.cost.cost import plan_cost
from hago.data.batches import Batches
from hago.errors import HagoError, HardwareError, ModelFileError, UnsupportedOp
from hago.export.tpu_mlir import make_tables
from hago.graph.graph import Graph
from hago.hardware.file import check_hardware, hardware_from_document, hardware_hash, hardware_to_document
from hago.hardware.hardware import Accumulator, Groups, Hardware, OpDesc, TensorScheme
from hago.ops import OPS
from hago.plan.document import plan_from_document, plan_to_document
from hago.plan.plan import NodePlan, Plan
from hago.plan.space import build_space
from hago.plan.topology import analyze
from hago.plan.weight_groups import GroupSums
from hago.runtime.exactness import compare_plan_exactly
from hago.runtime.reference import IntegerModel, center
from hago.runtime.stored_model import from_file_bytes, to_file_bytes
from hago.search.evaluate import Evaluator
from hago.search.float_layers import FloatLayers
from hago.search.layer_correction import correct_layers
from hago.search.objective import named_objective
from hago.search.preparation import QuantizationOptions, prepare
from hago.search.session import SearchOptions, run_search
from hago.search.stored_strategy import plan_of
from hago.simulation.simulator import Simulator

LAYERS = ("linear", "conv1d", "conv2d", "conv3d")
REAL = OpDesc("float32", "float32")
#: The unit roundoff of float32.
ROUNDOFF = 2.0**-24


def alone(size: int = 32, stored: str = "int4", **more: Any) -> OpDesc:
    return OpDesc(["float32", stored, "float32"], "float32", groups=Groups(size), **more)


def product(groups: Groups, stored: str = "int4", register: str = "int32", overflow: str = "wrap") -> OpDesc:
    sums = Accumulator(dtype(register), overflow)  # type: ignore[arg-type]
    return OpDesc(["int8", stored, register], register, sums, groups=groups)


def chip(*descs: OpDesc, scheme: str = "symmetric", granularity: str = "per_channel", **more: Any) -> Hardware:
    weight = TensorScheme(scheme, granularity)  # type: ignore[arg-type]
    moves = (OpDesc("int8", "int8"), OpDesc("int32", "int32"), REAL)
    ops = {**dict.fromkeys(LAYERS, descs), **dict.fromkeys(("relu", "reshape"), moves)}
    more = {"activation": TensorScheme("symmetric"), **more}
    return Hardware(ops, name="groups", weight=weight, **more)


def network() -> Graph:
    """conv -> relu -> depthwise conv -> flat -> fc."""
    b = Builder()
    x = b.input(5, 6, 6, name="x")
    x = b.call("relu", b.conv2d(x, seeded(8, 5, 3, 3), seeded(8), name="conv", padding=[0, 0]), name="relu")
    attrs = {"stride": [1, 1], "padding": [1, 1], "dilation": [1, 1], "groups": 4}
    x = b.call("conv2d", x, b.const(seeded(8, 2, 3, 3), "w"), name="grouped", **attrs)
    flat = b.call("reshape", x, name="flat", shape=[-1, 128])
    return b.graph(b.linear(flat, seeded(7, 128), seeded(7), name="fc"))


DATA = [seeded(6, 5, 6, 6)]


def plan_on(hardware: Hardware, graph: Graph | None = None, data: list[Tensor] | None = None) -> Plan:
    check_hardware(hardware)
    resolver = resolver_of(graph or network(), hardware, data or DATA, "max_range")
    return resolver(resolver.space.widest())


# ---------------------------------------------------------------- weights alone
@pytest.mark.parametrize("stored", ["int4", "uint4", "int8", "int3", "int16"])
@pytest.mark.parametrize("scheme", ["hago", "symmetric", "symmetric_full", "affine", "hago_affine"])
@pytest.mark.parametrize("size", [2, 16, 50, 1000])
def test_float_nodes_read_the_integer_times_the_scale_of_its_group(stored: str, scheme: str, size: int) -> None:
    """On every engine; and each result is within (K + 2) u sum |x w| of float64, u being float32's roundoff."""
    plan = plan_on(chip(alone(size, stored, min_bits=3), scheme=scheme))
    assert set(map(str, plan.weights)) == {"conv:1", "grouped:1", "fc:1"} and not plan.nodes
    x = seeded(4, 5, 6, 6, seed=7)
    assert compare_plan_exactly(plan, [x]).same
    read: dict[str, Tensor] = {}
    values: dict[str, Tensor] = {"x": x}
    Simulator(plan).run([x], lambda node, value: values.__setitem__(node.name, value))
    for edge, weight in plan.weights.items():
        rows = weight.integers.flatten(1)
        scale = torch.stack([weight.qparams.scale[:, k // size] for k in range(rows.shape[1])], 1)
        read[edge.dst] = (rows.to(torch.float32) * scale.to(torch.float32)).reshape(weight.integers.shape)
        error = (read[edge.dst] - plan.graph.consts[plan.graph.source(edge)]).abs().flatten(1) / scale
        assert float(error.max()) < (1.51 if scheme.startswith("hago") else 0.51)
    for name, source in (("conv", "x"), ("grouped", "relu"), ("fc", "flat")):
        node, (w, *bias) = plan.graph[name], [read[name], *(plan.graph.consts[n] for n in plan.graph[name].inputs[2:])]
        compute = OPS[node.op].compute
        exact = compute(node.attrs, values[source].double(), w.double(), *(b.double() for b in bias))
        size_of_terms = compute(
            node.attrs, values[source].double().abs(), w.double().abs(), *(b.double().abs() for b in bias)
        )
        bound = (w[0].numel() + 2) * ROUNDOFF * size_of_terms
        assert bool(((values[name].double() - exact).abs() <= bound).all())


def test_finer_groups_have_smaller_errors() -> None:
    """A law of the rounding of weights that `max_range` covers: a group's scale is at most that of its channel."""
    errors = []
    for desc in (REAL, *(alone(size) for size in (1000, 64, 16, 4))):
        weight = plan_on(chip(desc if desc.groups else replace(alone(), groups=None))).weights[Edge("fc", 1)]
        real = weight.integers * weight.qparams.spread_over(weight.integers.shape).scale
        errors.append(float((real - network().consts["fc.weight"]).square().mean()))
    assert errors[0] == errors[1] and errors[1] > errors[2] > errors[3] > errors[4]


def test_other_integers_show() -> None:
    """The comparison bites."""
    plan = plan_on(chip(alone()))
    edge = Edge("fc", 1)
    right = plan.weights[edge].qparams
    wrong = replace(right, scale=right.scale.roll(1, 1))  # of the next group
    model, other = IntegerModel(plan), IntegerModel(replace(plan, edges={**plan.edges, edge: SimQ(wrong, None)}))
    assert not model.run(DATA)[0].equal(other.run(DATA)[0])


@pytest.mark.parametrize("searcher", ["gradient", "pareto"])
def test_a_search_with_a_limit_counts_the_scales(searcher: str) -> None:
    hardware = chip(alone(), alone(stored="int8"))
    options = SearchOptions.of(searcher, budget="8 trials", progress=False, budget_cost="weight_bytes <= 1250")
    found = run_search(network(), hardware, [tuple(DATA)], options)
    plan = plan_of(network(), hardware, found.strategy)
    cost = plan_cost(plan)
    packed = sum(-(-w.integers.numel() * found.strategy.bits[str(e)] // 8) for e, w in plan.weights.items())
    scales = 4 * sum(w.qparams.scale.numel() for w in plan.weights.values())
    biases = 4 * (8 + 7)
    assert cost.weight_bytes == plan.weight_sizes.at_bits == packed + scales + biases <= 1250
    assert plan.weight_sizes.scales == scales
    assert cost.effective_bits == pytest.approx(8 * (packed + scales) / cost.weights, rel=1e-3)


# ---------------------------------------------------------------- integer products
def by_hand(x: list[int], w: list[int], m: list[int], size: int, partial: Any, register: Any, saturates: bool) -> int:
    """One sum as the chip computes it, with Python's integers."""

    def held(value: int, kind: Any) -> int:
        return clip(value, kind.min, kind.max) if saturates else wrap_exactly(value, kind.min, kind.max)

    total = 0
    for group, start in enumerate(range(0, len(w), size)):
        part = sum(a * b for a, b in zip(x[start : start + size], w[start : start + size], strict=True))
        total += m[group] * held(part, partial)
    return held(total, register)


def accumulators(plan: Plan, x: Tensor) -> tuple[NodePlan, Tensor, Tensor]:
    """The plan of the only integer node, the centered integers that it reads, and the sums that it emits."""
    (name,) = plan.nodes
    node, seen, held = plan.nodes[name], dict[str, Tensor](), dict[str, Tensor]()
    IntegerModel(plan).run([x], lambda n, v: held.__setitem__(n.name, v), lambda e, c: seen.__setitem__(str(e), c))
    assert compare_plan_exactly(plan, [x]).same
    return node, seen[f"{name}:0"], center(held[name], node.out)


@settings(max_examples=40, deadline=None)
@given(
    st.integers(2, 20), st.sampled_from([2, 3, 4, 8]), st.integers(2, 8), st.sampled_from(["wrap", "saturate_end"]),
    st.sampled_from([None, "int8", "int16"]), st.sampled_from(["int16", "int32"]), st.sampled_from(["int4", "int8"]),
    st.sampled_from(["per_channel", "per_tensor"]), st.integers(0, 99),
)  # fmt: skip
def test_rows(
    depth: int, size: int, bits: int, overflow: str, partial: str | None, register: str, stored: str, granularity: str,
    seed: int,
) -> None:  # fmt: skip
    """Sums of groups in their register, multiplied and added up in the accumulator, entry by entry."""
    groups = Groups(size, bits, partial and dtype(partial))
    desc = product(groups, stored, register, overflow)
    weight = seeded(3, depth, seed=seed) * torch.exp(seeded(3, depth, seed=seed + 1))
    b = Builder()
    b.call("linear", b.input(depth, name="x"), b.const(weight, "w"), name="fc")
    hardware = Hardware(
        {"linear": (desc,)},
        weight=TensorScheme("symmetric", granularity),
        activation=TensorScheme("symmetric"),  # type: ignore[arg-type]
    )
    x = seeded(4, depth, seed=seed + 2).sign() * (1 - seeded(4, depth, seed=seed + 3).abs() / 9)
    node, read, held = accumulators(plan_on(hardware, b.graph(), [x]), x)
    assert node.groups is not None
    c, m = node.groups.integers.tolist(), node.groups.multipliers.tolist()
    register_of_group = dtype(partial or register)
    for row, out in zip(read.tolist(), held.tolist(), strict=True):
        parts = (size, register_of_group, dtype(register), overflow == "saturate_end")
        assert out == [by_hand(row, c[o], m[o], *parts) for o in range(3)]


@pytest.mark.parametrize("options", [{}, {"groups": 2}, {"groups": 4, "padding": [1, 0]}, {"stride": [2, 1]}])
def test_windows(options: dict[str, Any]) -> None:
    """A group runs over the places of an input channel, then over those of the next."""
    attrs = {"stride": [1, 1], "padding": [0, 0], "dilation": [1, 1], "groups": 1} | options
    channels = 4 // attrs["groups"]
    weight = seeded(4, channels, 2, 3) * torch.exp(seeded(4, channels, 2, 3, seed=3))
    b = Builder()
    b.call("conv2d", b.input(4, 4, 5, name="x"), b.const(weight, "w"), name="conv", **attrs)
    desc = product(Groups(5, 4, dtype("int8")))
    hardware = Hardware(
        {"conv2d": (desc,)}, weight=TensorScheme("symmetric", "per_channel"), activation=TensorScheme("symmetric")
    )
    x = seeded(2, 4, 4, 5).sign()
    node, read, held = accumulators(plan_on(hardware, b.graph(), [x]), x)
    assert node.groups is not None and node.groups.sums is not None
    (top, left), per = attrs["padding"], 4 // attrs["groups"]
    padded = torch.nn.functional.pad(read, (left, left, top, top))
    cut = 0
    for n, o, i, j in torch.cartesian_prod(*map(torch.arange, held.shape)).tolist():
        g, (down, across) = o // per, attrs["stride"]
        window = padded[n, g * channels : (g + 1) * channels, i * down : i * down + 2, j * across : j * across + 3]
        c, m = node.groups.integers[o].flatten().tolist(), node.groups.multipliers[o].tolist()
        row = window.flatten().tolist()
        expected = by_hand(row, c, m, 5, dtype("int8"), dtype("int32"), saturates=False)
        assert int(held[n, o, i, j]) == expected
        cut += expected != sum(a * b * m[k // 5] for k, (a, b) in enumerate(zip(row, c, strict=True)))
    assert cut


@pytest.mark.parametrize("how", [Requantize(), Requantize("multiplier_shift"), Requantize("shift", "half_up")])
@pytest.mark.parametrize("granularity", ["per_channel", "per_tensor"])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_networks(how: Requantize, granularity: str, bits: int) -> None:
    """Simulation and integer models agree, multipliers stay in their bits, and a file holds all of it."""
    scheme = "hago" if how.power_of_two else "symmetric"
    activation = TensorScheme(scheme)
    hardware = chip(
        product(Groups(16, bits)), scheme=scheme, granularity=granularity, requantize=how, activation=activation
    )
    plan = plan_on(hardware)
    assert {n for n, p in plan.nodes.items() if p.groups} == {"conv", "grouped", "fc"}
    for name in ("conv", "grouped", "fc"):
        node = plan.nodes[name]
        groups, joined = node.groups, node.operands[1]
        assert groups is not None and joined is not None and groups.sums is None
        top = 1 << (bits - 1) if how.power_of_two else (1 << bits) - 1
        assert int(groups.multipliers.min()) >= 1 and int(groups.multipliers.max()) == top
        assert groups.stored.scale.equal(joined.scale.reshape(-1, 1) * groups.multipliers)
        assert plan.target(Edge(name, 1)) is groups.stored
    x = seeded(4, 5, 6, 6, seed=7)
    assert compare_plan_exactly(plan, [x]).same
    again, _ = from_file_bytes(to_file_bytes(plan), "x")
    assert again.key == plan.key and IntegerModel(again).run([x])[0].equal(Simulator(plan).run([x])[0])
    assert to_file_bytes(again) == to_file_bytes(plan)


def test_a_register_that_wraps_may_wrap_in_between() -> None:
    """Sums modulo 2**bits are the same, so the partial sums of a register that is as wide need no watch."""
    weight, x = torch.ones(2, 40), torch.ones(2, 40)
    x[:, 20:], b = -1.0, Builder()
    b.call("linear", b.input(40, name="x"), b.const(weight, "w"), name="fc")
    for partial, exact in ((None, True), ("int16", True), ("int8", False)):
        desc = product(Groups(20, 2, partial and dtype(partial)), "int8", "int16")
        hardware = Hardware({"linear": (desc,)}, weight=TensorScheme("symmetric"), activation=TensorScheme("symmetric"))
        plan = plan_on(hardware, b.graph(), [x])
        assert (plan.nodes["fc"].group_sums is None) == exact
        assert compare_plan_exactly(plan, [x]).same
        assert not plan.nodes["fc"].proved  # the accumulator itself may overflow


def test_the_law_of_partial_sums_bites(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the sums of other groups, integers differ from those by hand."""
    honest = GroupSums._partial
    monkeypatch.setattr(GroupSums, "_partial", lambda self, x, group, *more: honest(self, x, 0, *more))
    with pytest.raises(AssertionError):
        test_windows({})


def test_a_search_lowers_bits_until_sums_of_groups_fit() -> None:
    b = Builder()
    b.call("linear", b.input(64, name="x"), b.const(torch.ones(3, 64), "w"), name="fc")
    desc = replace(product(Groups(32, 4, dtype("int16")), "int8", overflow="saturate_end"), min_bits=3)
    hardware = Hardware({"linear": (desc,)}, weight=TensorScheme("symmetric"), activation=TensorScheme("symmetric"))
    x = [torch.ones(4, 64) - torch.arange(4)[:, None] / 9]
    resolver = resolver_of(b.graph(), hardware, x, "max_range")
    widest = resolver(resolver.space.widest()).nodes["fc"]
    assert widest.group_sums is not None and widest.group_sums.over > 15
    quantizer = hago.quantize(b.graph(), hardware, x, estimator="max_range", corrections="none")
    assert quantizer.plan.nodes["fc"].proved and sum(quantizer.strategy.bits.values()) < 16
    small = replace(desc, groups=Groups(32, 4, dtype("int3")))
    with pytest.raises(HagoError, match="overflows its accumulator .int3 for a group."):
        hago.quantize(b.graph(), replace(hardware, ops={"linear": (small,)}), x, corrections="none")


def test_a_computed_weight_has_no_groups() -> None:
    b = Builder()
    x = b.call("reshape", b.input(16, name="x"), name="square", shape=[4, 4])
    graph = b.graph(b.call("linear", x, b.call("relu", x), name="fc"))
    hardware = chip(product(Groups(16, 4)), REAL)
    assert analyze(graph, hardware).reasons["fc"].startswith("its weight is computed")
    both = chip(product(Groups(16, 4)), replace(product(Groups(16, 4)), groups=None))
    assert analyze(graph, both).nodes["fc"]
    with pytest.raises(UnsupportedOp, match="its weight is computed, and the hardware multiplies groups of constant"):
        analyze(graph, chip(product(Groups(16, 4)), other_ops="reject"))


# ---------------------------------------------------------------- costs, reports, corrections
def test_costs_of_integer_products() -> None:
    """Bits of the stored integers, and a multiplier for each group."""
    cost = plan_cost(plan := plan_on(chip(product(Groups(16, 6)))))
    edges = {e.edge: e for e in cost.edges}
    groups = 7 * 8
    assert edges["fc:1"].bits == 4 and edges["fc:1"].group_bytes == groups * 6 // 8
    assert edges["fc:1"].weight_bytes == 7 * 128 // 2 + groups * 6 // 8
    assert cost.weight_bytes == plan.weight_sizes.at_bits
    assert {n.node: n.bops for n in cost.nodes}["fc"] == 7 * 128 * 8 * 4


@pytest.mark.parametrize("desc", [alone(16), product(Groups(16, 4)), product(Groups(16, 4, dtype("int8")))])
def test_explain_and_inspect(desc: OpDesc) -> None:
    graph, hardware = network(), chip(desc)
    topology = analyze(graph, hardware)
    rows = {r.name: r for r in explain_topology(graph, hardware, topology, build_space(graph, hardware, topology)).rows}
    assert "weights in groups of 16" in rows["fc"].signatures[0]
    plan = plan_on(hardware)
    statistic = inspect_plan(plan, Batches([tuple(DATA)], graph.inputs))
    assert all(statistic[n].differences == 0 for n in ("conv", "grouped", "fc"))
    (edge,) = (e for e in statistic["fc"].edges if e.edge == "fc:1")
    assert (edge.bits, edge.dtype) == (4, "int4") and "groups of 16" in str(hardware)


def smooth(seed: int) -> Tensor:
    """Images whose neighbouring values are alike, so that one weight can make up for another."""
    return seeded(48, 5, 6, 6, seed=seed).cumsum(2).cumsum(3) / 3


@pytest.mark.parametrize("desc", [alone(16), replace(alone(), groups=None), product(Groups(16, 4))])
def test_rounding_with_error_feedback_helps(desc: OpDesc) -> None:
    """Weights of float layers too; a strategy holds the offsets, and a file the integers."""
    x = [smooth(0)]
    hardware = chip(desc)
    resolver = resolver_of(network(), hardware, x, "max_range")
    plan = resolver(resolver.space.widest())
    offsets = correct_layers(plan, FloatLayers(plan.graph, plan.ops, x), rounding=True, bias=False)
    assert {"conv.weight", "w", "fc.weight"} >= set(offsets) and "fc.weight" in offsets
    quantizer = hago.quantize(network(), hardware, [tuple(x)], estimator="max_range", corrections="rounding")
    plain = hago.quantize(network(), hardware, [tuple(x)], estimator="max_range", corrections="none")
    fresh = smooth(99)
    real = Simulator(replace(plan, nodes={}, weights={}, edges=dict.fromkeys(plan.edges))).run([fresh])[0]
    ours, theirs = (float((q.simulate()(fresh) - real).square().sum()) for q in (quantizer, plain))
    assert quantizer.strategy.corrections.offsets and ours < theirs
    assert quantizer.plan.key != plain.plan.key
    again = plan_of(network(), hardware, quantizer.strategy)
    assert again.key == quantizer.plan.key and compare_plan_exactly(again, [fresh]).same
    stored, _ = from_file_bytes(to_file_bytes(again), "x")
    assert stored.key == again.key and IntegerModel(stored).run([fresh])[0].equal(quantizer.simulate()(fresh))


def test_what_has_no_groups_says_so() -> None:
    with pytest.raises(HagoError, match="node 'conv' has a multiplier for every group, which TPU-MLIR's tables have"):
        make_tables(plan_on(chip(product(Groups(16, 4)), REAL)), {})
    for desc, says in ((alone(16), "a scale for every 16 entries"), (product(Groups(16, 4)), "groups of the weight")):
        quantizer = hago.quantize(network(), chip(desc, REAL), [tuple(DATA)], corrections="none")
        with pytest.raises(HagoError, match=says):
            hago.prepare_qat(network(), chip(desc, REAL), quantizer.strategy)


# ---------------------------------------------------------------- files
@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (lambda d: d["qparams"][d["edges"]["fc:1"][0]].update(group=17), "signature or its constant do not allow"),
        (lambda d: d["qparams"][d["edges"]["fc:1"][0]].pop("group"), "signature or its constant do not allow"),
        (lambda d: d["qparams"][d["edges"]["conv:1"][0]].update(scale=0), "do not allow"),
    ],
)
def test_an_edited_model_of_weights_alone_is_refused(edit: Any, says: str) -> None:
    document, tensors = plan_to_document(plan_on(chip(alone(16))))
    document = json.loads(json.dumps(document))
    assert plan_from_document(document, tensors, "x").weights
    document["scales"][0] = {"hago": "tensor", "dtype": "float64", "shape": [], "values": [1.0]}
    edit(document)
    with pytest.raises(ModelFileError, match=says):
        plan_from_document(document, tensors, "x")


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (lambda g: g.update(slot=0), "its signature or its op has none"),
        (lambda g: g["multipliers"].update(shape=[8, 7]), "expected one from 1 to 15 for every group"),
        (lambda g: g.update(multipliers=g["integers"]), "expected one from 1 to 15 for every group"),
        (lambda g: g["integers"].update(shape=[128, 7]), "expected one from 1 to 15|its shape|within range"),
        (lambda g: g.update(largest_sum=-1.0), "groups with multipliers where the signature has them"),
    ],
)
def test_an_edited_model_of_products_is_refused(edit: Any, says: str) -> None:
    document, tensors = plan_to_document(plan_on(chip(product(Groups(16, 4)))))
    document = json.loads(json.dumps(document))
    assert plan_from_document(document, tensors, "x").nodes["fc"].groups
    edit(document["plans"]["fc"]["groups"])
    with pytest.raises(ModelFileError, match=says):
        plan_from_document(document, tensors, "x")


def test_a_plan_without_its_groups_is_refused() -> None:
    document, tensors = plan_to_document(plan_on(chip(product(Groups(16, 4)))))
    document = json.loads(json.dumps(document))
    groups = document["plans"]["fc"].pop("groups")
    document["plans"]["fc"]["consts"]["1"] = groups["integers"]
    with pytest.raises(ModelFileError, match="groups with multipliers where the signature has them"):
        plan_from_document(document, tensors, "x")


# ---------------------------------------------------------------- hardware
def test_a_signature_is_read_as_it_was_written() -> None:
    descs = (alone(), product(Groups(32, 4)), product(Groups(32, 4, dtype("int16"))), product(Groups(32, 5)))
    hashes = {hardware_hash(chip(desc)) for desc in descs}
    assert len(hashes) == len(descs)
    for desc in descs:
        document = json.loads(json.dumps(hardware_to_document(chip(desc))))
        again = hardware_from_document(document, "", OPS)
        assert again == chip(desc) and hardware_hash(again) in hashes


def in_file(granularity: dict[str, Any], op: str = "linear", scheme: str = "symmetric", **signature: Any) -> Hardware:
    """The hardware of a file with one signature, which is refused."""
    document = hardware_to_document(chip(alone()))
    body = {"in": ["int8", "int4", "int32"], "out": "int32", **signature}
    document |= {
        "signatures": {"s": {k: v for k, v in body.items() if v is not None} | {"granularity": granularity}},
        "ops": {op: ["s"]},
        "weight": {"scheme": scheme, "granularity": "per_channel"},
    }
    from hago.hardware.file import _refuse
    from hago.hardware.validation import check_hardware_document

    _refuse("x", check_hardware_document(document, OPS))
    return hardware_from_document(document, "x", OPS)


REALS = {"in": ["float32", "int4"], "out": "float32"}


@pytest.mark.parametrize(
    ("granularity", "more", "says"),
    [
        ({"group": 32}, {}, r"granularity.multiplier_bits: the key is missing"),
        ({"group": 1}, REALS, r"granularity.group: got 1; expected at least 2"),
        ({"group": 32.5}, REALS, r"granularity.group: got 32.5; expected a JSON integer"),
        ({"group": 32, "multiplier_bits": 4}, REALS, r"multiplier_bits: got 4; the scales of groups are floats"),
        ({"group": 32, "multiplier_bits": 9}, {}, r"multiplier_bits: got 9; expected at most 8"),
        ({"group": 32, "multiplier_bits": 4, "partial": "int9"}, {}, r"partial: unknown dtype .int9."),
        ({"group": 32, "multiplier_bits": 4, "partial": "int64"}, {}, r"partial: got .int64.; expected a signed"),
        ({"group": 32, "multiplier_bits": 4, "partial": "uint8"}, {}, r"partial: got .uint8.; expected a signed"),
        ({"group": 32, "multiplier_bits": 4}, {"op": "matmul"}, r"hago knows no groups of the weight of matmul"),
        ({"group": 32, "multiplier_bits": 4}, {"op": "add"}, r"hago knows no groups of the weight of add"),
        ({"group": 32}, {**REALS, "op": "conv_transpose2d"}, r"hago knows no groups of the weight of conv_transpose2d"),
        ({"group": 32}, {"in": ["float32"], "out": "float32"}, r"granularity: got .*; a float signature has none"),
        ({"group": 32, "multiplier_bits": 4}, {"scheme": "affine"}, r"weight.scheme: got .affine.; expected"),
        ({"group": 32, "multiplier_bits": 4}, {"in": ["int8", "uint4", "int32"]}, r"got .uint4.; expected signed int"),
        ({"group": 32, "multiplier_bits": 4}, {"in": ["int8", "int16", "int32"]}, r"got .int16.; expected signed int"),
        (
            {"group": 32, "multiplier_bits": 4},
            {"accumulator": {"dtype": "int32", "overflow": "wrap_pairs"}},
            r"overflow: got .wrap_pairs.; expected wrap or saturate_end with groups",
        ),
    ],
)  # fmt: skip
def test_signatures_that_are_refused(granularity: dict[str, Any], more: dict[str, Any], says: str) -> None:
    with pytest.raises(HardwareError, match=says):
        in_file(granularity, **more)


def test_what_python_refuses() -> None:
    for make, says in (
        (lambda: Groups(1), "groups of 1 entries"),
        (lambda: Groups(32, 1), "multipliers of groups have 1 bits"),
        (lambda: Groups(32, None, dtype("int16")), "expected a signed integer dtype, with multiplier_bits"),
        (lambda: OpDesc("float32", "float32", groups=Groups(32)), "expected multipliers where all operands are"),
        (lambda: replace(alone(), groups=Groups(32, 4)), "expected multipliers where all operands are integers"),
        (lambda: product(Groups(32)), "expected multipliers where all operands are integers"),
        (lambda: product(Groups(32, 4), overflow="wrap_pairs"), "an accumulator with wrap_pairs; expected wrap or"),
    ):
        with pytest.raises(HardwareError, match=says):
            make()


def test_the_hardware_that_ships() -> None:
    """Four bits where they are asked for, eight otherwise."""
    for fixed, name in (({}, "int8"), ({"*:1": 4}, "int4")):
        options = QuantizationOptions(estimator="max_range", fix_bits=fixed)
        prepared = prepare(network(), "cpu_weight_only", [tuple(DATA)], options)
        plan = prepared.resolver(prepared.space.widest())
        assert {w.qparams.dtype.name for w in plan.weights.values()} == {name}
        assert {w.qparams.group for w in plan.weights.values()} == {32} and compare_plan_exactly(plan, DATA).same


@pytest.mark.parametrize("engine", ["integer", "simulation"])
def test_values_of_other_integers_are_not_reused(engine: Any) -> None:
    """An evaluator that has measured a plan twice measures corrected ones as another does that has measured none."""
    batches = [(smooth(seed)[:16],) for seed in range(2)]
    prepared = prepare(network(), chip(alone(16), REAL), batches, QuantizationOptions(estimator="max_range"))
    bits = prepared.space.widest()
    plan = prepared.resolver(bits)
    offsets = correct_layers(plan, FloatLayers(plan.graph, plan.ops, [batches[0][0]]), rounding=True, bias=False)
    equalized = prepared.corrected(Corrections({"conv": [7] * 8}))
    used: list[Plan] = []
    objective = named_objective("sqnr")
    for corrected in (prepared.with_offsets(offsets).resolver(bits), equalized.resolver(bits)):
        shared, fresh = (
            Evaluator(prepared.graph, prepared.batches, objective, engine=engine, measurement_bytes=0) for _ in range(2)
        )
        for _ in range(3):
            shared.score(plan, bits)  # the values of the best plan are kept
        before = shared.measure(plan).contributions["sqnr"]
        ours, theirs = (e.measure(corrected).contributions["sqnr"] for e in (shared, fresh))
        assert ours.equal(theirs) and not ours.equal(before)
        used.append(corrected)
    assert len({p.key for p in (plan, *used)}) == 3
