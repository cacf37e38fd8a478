"""Which nodes become integer, and why."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from building import Builder, residual_block, seeded
from hypothesis import given, settings
from hypothesis import strategies as st
from random_graphs import random_graph
from specs import MADE_UP, SHIPPED
from torch import Tensor, nn

import hago
from hago.arithmetic.types import Edge
from hago.errors import HagoError, UnsupportedOp
from hago.graph.graph import CONST, INPUT, OUTPUT, Graph
from hago.hardware.file import load_hardware
from hago.hardware.hardware import Hardware, OpDesc
from hago.ops import OPS
from hago.plan.topology import (
    analyze,
    check_patterns,
    fitting_descs,
    float_boundaries,
    weight_edge,
    weight_only_descs,
    why_not_integer,
)

#: The prototype's own test hardware: products of bytes, concat in three ways, the rest float.
TOY = Hardware(
    {
        "concatenate": [OpDesc("float32", "float32"), OpDesc("int8", "int8"), OpDesc("int32", "int32")],
        "add": [OpDesc("int8", "int32")],
        "dense": [OpDesc("int8", "int32")],
        "conv2d": [OpDesc("int8", "int32")],
        "relu": [OpDesc("int32", "int32")],
    },
    name="toy",
)


def integers(graph: Graph, hardware: Hardware, keep_float: tuple[str, ...] = ()) -> set[str]:
    return {name for name, integer in analyze(graph, hardware, keep_float).nodes.items() if integer}


# ---------------------------------------------------------------- the rule, part by part
def test_inputs_and_constants_are_not_computed() -> None:
    topology = analyze(residual_block(), load_hardware("x86_vnni"))
    for node in residual_block():
        if node.op in (INPUT, CONST):
            assert not topology.nodes[node.name] and topology.reasons[node.name] == node.op


def test_a_region_starts_at_a_seed_and_goes_on() -> None:
    b = Builder()
    x = b.input(3, 8, 8, name="x")
    first = b.call("relu", x, name="before")
    conv = b.conv2d(first, seeded(4, 3, 3, 3), name="conv")
    soft = b.call("softmax", b.call("relu", conv, name="after"), axis=1, name="soft")
    b.call("relu", soft, name="later")
    topology = analyze(b.graph(), load_hardware("x86_vnni"))
    assert {n for n, i in topology.nodes.items() if i} == {"conv", "after"}
    assert topology.reasons["before"] == "nothing that it reads is quantized"
    assert topology.reasons["conv"] == "starts an integer region"
    assert topology.reasons["after"] == "an input is integer"
    assert topology.reasons["soft"] == "softmax has no integer form"
    assert topology.reasons["later"] == "nothing that it reads is quantized"


def test_an_op_without_a_float_signature_is_integer_wherever_it_stands() -> None:
    b = Builder()
    b.call("relu", b.input(4), name="relu")
    topology = analyze(b.graph(), TOY)
    assert topology.nodes["relu"] and topology.reasons["relu"] == "toy has no float relu"


def test_an_unlisted_op_is_float_or_refused() -> None:
    graph = residual_block()
    assert "pool" not in integers(graph, TOY)
    with pytest.raises(UnsupportedOp) as caught:
        analyze(graph, replace(TOY, other_ops="reject"))
    assert all(word in str(caught.value) for word in ("'pool'", "adaptive_avg_pool2d", "toy", "other_ops: float32"))


def test_a_node_that_no_listed_signature_fits_is_one_of_the_other_ops() -> None:
    b = Builder()
    conv = b.conv2d(b.input(3, 8, 8), seeded(4, 3, 3, 3), name="conv")
    b.call("clamp", conv, min=0.5, max=1.0, name="clamp")
    graph, only_integer = b.graph(), replace(TOY, ops={**TOY.ops, "clamp": [OpDesc("int32", "int32")]})
    topology = analyze(graph, only_integer)
    assert topology.nodes["conv"] and not topology.nodes["clamp"]
    assert "leaves out 0" in topology.reasons["clamp"]
    with pytest.raises(UnsupportedOp, match="'clamp'.*leaves out 0.*other_ops: float32"):
        analyze(graph, replace(only_integer, other_ops="reject"))
    with pytest.raises(UnsupportedOp, match="'conv'.*kept float by the user.*List a float signature"):
        analyze(graph, only_integer, keep_float=["conv"])


def test_attributes_that_do_not_fit() -> None:
    b = Builder()
    conv = b.conv2d(b.input(3, 8, 8), seeded(4, 3, 3, 3), name="conv")
    b.call("clamp", conv, min=0.5, max=1.0, name="clamp")
    topology = analyze(b.graph(), load_hardware("x86_vnni"))
    assert not topology.nodes["clamp"] and "leaves out 0" in topology.reasons["clamp"]


def test_only_powers_of_two_can_be_shifted() -> None:
    b = Builder()
    conv = b.conv2d(b.input(3, 6, 6), seeded(4, 3, 3, 3), name="conv")
    b.call("mean", conv, axes=[2, 3], keepdim=False, count=36, name="mean")
    topology = analyze(b.graph(), load_hardware("vta"))
    assert not topology.nodes["mean"] and "no power of two" in topology.reasons["mean"]
    b = Builder()
    conv = b.conv2d(b.input(3, 8, 8), seeded(4, 3, 3, 3), name="conv")
    b.call("mean", conv, axes=[2, 3], keepdim=False, count=64, name="mean")
    assert "mean" in integers(b.graph(), load_hardware("vta"))


def test_division_by_a_tensor_is_float_on_hardware_that_shifts() -> None:
    b = Builder()
    conv = b.conv2d(b.input(3, 6, 6), seeded(4, 3, 3, 3), name="conv")
    b.call("div", conv, b.const(torch.full((4, 1, 1), 2.0)), name="div")
    for spec in ("vta", "x86_vnni"):
        assert "div" not in integers(b.graph(), load_hardware(spec))


def test_indices_are_not_quantized() -> None:
    b = Builder()
    conv = b.conv2d(b.input(3, 8, 8), seeded(4, 3, 3, 3), name="conv")
    b.call("index", conv, b.const(torch.tensor([2, 0]), name="which"), axis=1, name="index")
    topology = analyze(b.graph(), load_hardware("x86_vnni"))
    assert topology.edges[Edge("index", 0)] and not topology.edges[Edge("index", 1)]


class Masked(nn.Module):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return torch.relu(x.unsqueeze(-1)) * mask.unsqueeze(-1).float()


class Indices(nn.Module):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return torch.relu(x) * torch.exp(mask)


def test_what_only_moves_indices_or_masks_is_not_quantized() -> None:
    chip = load_hardware("tflite")
    chip = replace(chip, ops={**chip.ops, "unsqueeze": [d for d in chip.ops["unsqueeze"] if d.is_integer]})

    x, mask = seeded(2, 3), torch.tensor([[1, 0, 1], [0, 1, 1]])
    graph = hago.from_torch(Masked().eval(), (x, mask))
    assert integers(graph, chip) == {"unsqueeze", "relu", "mul"}
    refusing = replace(
        chip,
        other_ops="reject",
        ops={**chip.ops, **{op: [OpDesc("float32", "float32")] for op in ("to", "relu", "mul")}},
    )
    with pytest.raises(UnsupportedOp, match="'exp'.*has no rule for aten.exp"):  # it makes real values of indices
        analyze(hago.from_torch(Indices().eval(), (x, mask)), refusing)
    for keep_float in ((), ("unsqueeze_1",)):
        assert (
            hago.quantize(Masked().eval(), chip, [(x, mask)], keep_float=keep_float).realize()(x, mask).isfinite().all()
        )


def test_an_opaque_op_is_float() -> None:
    b = Builder()
    conv = b.conv2d(b.input(3, 8, 8), seeded(4, 3, 3, 3), name="conv")
    b.call("opaque", conv, target="aten.cumsum.default", args=[{"$": 0}, 1], kwargs={}, name="cumsum")
    topology = analyze(b.graph(), load_hardware("x86_vnni"))
    assert topology.reasons["cumsum"] == "hago has no rule for aten.cumsum.default"
    assert [str(e) for e in float_boundaries(b.graph(), topology)] == ["conv:0", "cumsum:0"]


# ---------------------------------------------------------------- keep_float
def test_keep_float_by_pattern() -> None:
    graph, chip = residual_block(), load_hardware("x86_vnni")
    everything = integers(graph, chip)
    assert integers(graph, chip, ("fc",)) == everything - {"fc"}
    assert integers(graph, chip, ("l*.relu", "stem")) == everything - {"stem", "stem.relu", "left.relu"}
    assert integers(graph, chip, ("*",)) == set()
    assert analyze(graph, chip, ["fc"]).reasons["fc"] == "kept float by the user"


def test_a_pattern_that_matches_nothing() -> None:
    with pytest.raises(HagoError, match=r"keep_float pattern 'stem.rleu' matches no name. Did you mean 'stem.relu'"):
        analyze(residual_block(), load_hardware("x86_vnni"), ["stem.rleu"])
    with pytest.raises(HagoError, match="fix_bits pattern 'z.' matches no name. hago.explain lists the nodes"):
        check_patterns(["z*"], ["a", "b"], "fix_bits")


def test_what_must_be_integer_cannot_be_kept_float() -> None:
    with pytest.raises(UnsupportedOp, match=r"kept float by the user, and the hardware takes no float conv2d"):
        analyze(residual_block(), TOY, ["stem"])


# ---------------------------------------------------------------- over random graphs
HARDWARE = {**SHIPPED, "floats_too": MADE_UP["floats_too"]}


@settings(max_examples=60)
@given(st.integers(0, 10_000), st.sampled_from(sorted(HARDWARE)))
def test_the_rule_over_random_graphs(seed: int, name: str) -> None:
    graph, chip = random_graph(seed), HARDWARE[name]
    topology, ops = analyze(graph, chip), chip.rules(OPS)
    assert set(topology.nodes) == {n.name for n in graph}
    assert set(topology.edges) == {e for n in graph for e in n.edges}
    for node in graph:
        form = ops[node.op].integer if node.op in ops else None
        if topology.nodes[node.name]:
            assert form is not None and why_not_integer(graph, node, chip) is None
            fed = any(topology.nodes[s] for s in node.inputs)
            assert form.starts_region or fed or not chip.float_descs(node.op)
            assert fitting_descs(graph, node, chip) == chip.integer_descs(node.op)
        quantized = {e for e in node.edges if topology.edges[e]}
        of_floats = {weight_edge(node)} if weight_only_descs(graph, node, chip) else set()
        assert topology.nodes[node.name] or quantized <= of_floats
    for edge in float_boundaries(graph, topology):
        source = graph.source(edge)
        reader = edge.dst != OUTPUT and topology.edges[edge]
        assert topology.nodes[source] != reader and graph[source].op != CONST
