"""The search space: it has all choices that can change a Plan, and no others."""

from __future__ import annotations

import itertools
import warnings
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from building import Builder, residual_block, seeded
from chips import CHIPS, Chip
from hypothesis import given, settings
from hypothesis import strategies as st
from plans import points, resolver_of
from random_graphs import random_graph, random_inputs

from hago.errors import HagoError, InfeasibleBits
from hago.graph.graph import Graph
from hago.hardware.file import load_hardware
from hago.hardware.hardware import Hardware, OpDesc
from hago.plan.feasibility import plan_or_refusal
from hago.plan.plan import Plan
from hago.plan.space import Space, build_space
from hago.plan.topology import analyze
from plan.test_topology import TOY


def space_of(graph: Graph, hardware: Hardware, fix_bits: dict[str, int] | None = None) -> Space:
    return build_space(graph, hardware, analyze(graph, hardware), fix_bits)


def limits(space: Space) -> dict[str, int]:
    return {key: group.choices[0] for key, group in space.groups.items()}


def one_conv(*after: str) -> Graph:
    b = Builder()
    b.conv2d(b.input(3, 8, 8, name="x"), seeded(4, 3, 3, 3), seeded(4), name="conv")
    for op in after:
        b.call(op, b.values[-1], name=op)
    return b.graph()


# ---------------------------------------------------------------- choices
def test_choices_go_from_the_widest_down() -> None:
    space = space_of(one_conv(), load_hardware("x86_vnni"))
    assert {k: g.choices for k, g in space.groups.items()} == {"conv:0": (8, 7, 6, 5, 4), "conv:1": (8, 7, 6, 5, 4)}
    assert space.size == 10
    assert space.widest() == {"conv:0": 8, "conv:1": 8} and space.narrowest() == {"conv:0": 4, "conv:1": 4}


def test_signatures_take_the_bits_that_they_state() -> None:
    descs = [
        OpDesc(["int8", "int8"], "int32", name="few", max_bits=6),
        OpDesc(["int8", "int8"], "int32", name="many", min_bits=7, cost={"macs_per_cycle": 2}),
        OpDesc(["int16", "int8"], "int32", name="wide", min_bits=5),
        OpDesc(["int4", "int4"], "int32", name="narrow", min_bits=3),
    ]
    x = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    resolver = resolver_of(one_conv(), Hardware({"conv2d": descs}), [x])
    groups, taken = resolver.space.groups, set[str]()
    assert groups["conv:0"].choices == (16, 15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3)
    every = itertools.product(*(g.choices for g in groups.values()))
    for point in (dict(zip(groups, bits, strict=True)) for bits in every):
        fitting = [d for d in descs if all(point[f"conv:{i}"] in d.bits_of(d.in_dtype(i)) for i in (0, 1))]
        plan = plan_or_refusal(resolver, point)
        assert isinstance(plan, Plan) == bool(fitting), point
        if isinstance(plan, Plan):
            assert plan.nodes["conv"].desc in fitting
            taken.add(plan.nodes["conv"].desc.name)
    assert taken == {"few", "many", "wide", "narrow"}


def test_thirty_two_bits_are_twenty_nine_choices() -> None:
    b = Builder()
    conv = b.conv2d(b.input(3, 8, 8), seeded(4, 3, 3, 3), name="conv")
    b.call("concat", conv, conv, axis=1, name="cat")
    chosen = space_of(b.graph(), TOY).groups["cat:0"].choices
    assert len(chosen) == 29 and chosen[0] == 32


def test_a_producer_limits_the_bits_of_its_reader() -> None:
    """A convolution that reads 8 bits has at most 8 bits to choose, whatever its slot takes."""
    wide = Chip("int16", "int40").hardware()
    graph = one_conv()
    assert limits(space_of(graph, wide)) == {"conv:0": 16, "conv:1": 8}
    b = Builder()
    first = b.conv2d(b.input(3, 8, 8), seeded(3, 3, 3, 3), name="first")
    b.conv2d(b.call("sigmoid", first, name="table"), seeded(3, 3, 3, 3), name="second")
    space = space_of(b.graph(), Chip().hardware())
    assert limits(space) == {"first:0": 8, "first:1": 8, "table:0": 8, "table:out": 8, "second:1": 8}


# ---------------------------------------------------------------- edges without a choice
def test_a_relu_has_nothing_to_choose() -> None:
    """The prototype swept the bits before relu in 221 of 551 trials; no bit of them changed anything."""
    space = space_of(one_conv("relu"), load_hardware("x86_vnni"))
    assert list(space.groups) == ["conv:0", "conv:1"]


def test_a_bias_has_nothing_to_choose() -> None:
    assert "conv:2" not in space_of(one_conv(), load_hardware("x86_vnni")).groups


def test_real_operands_and_indices_have_nothing_to_choose() -> None:
    b = Builder()
    conv = b.conv2d(b.input(3, 8, 8), seeded(4, 3, 3, 3), name="conv")
    picked = b.call("index", conv, b.const(torch.tensor([0, 2])), axis=1, name="index")
    b.call("softmax", picked, axis=1, name="soft")
    assert list(space_of(b.graph(), Chip().hardware()).groups) == ["conv:0", "conv:1"]


def test_a_reshape_requantizes_a_scale_per_channel() -> None:
    b = Builder()
    conv = b.conv2d(b.input(3, 8, 8), seeded(4, 3, 3, 3), name="conv")
    b.call("reshape", conv, shape=[-1, 256], name="flat")
    per_tensor, per_channel = Chip(), Chip(granularity="per_channel")
    assert "flat:0" not in space_of(b.graph(), per_tensor.hardware()).groups
    assert "flat:0" in space_of(b.graph(), per_channel.hardware()).groups


def test_two_slots_that_read_one_value_are_two_groups() -> None:
    b = Builder()
    conv = b.conv2d(b.input(3, 8, 8), seeded(4, 3, 3, 3), name="conv")
    b.call("add", conv, conv, name="add")
    assert {"add:0", "add:1"} <= set(space_of(b.graph(), load_hardware("x86_vnni")).groups)


def test_the_output_of_a_node_that_requantizes_is_one_group() -> None:
    graph = residual_block()
    groups = space_of(graph, CHIPS["at_output"].hardware()).groups
    assert groups["stem:out"].source == "stem.relu"  # what relu cuts off need not be represented
    assert [str(e) for e in groups["stem:out"].edges] == ["stem.relu:0"]
    assert "fc:out" in groups
    # the relu passes on a value that was requantized before
    assert not {"stem.relu:0", "left:0", "right:0", "add:0", "add:1"} & set(groups)


@settings(max_examples=25)
@given(st.integers(0, 10_000), st.sampled_from(["x86_vnni", "vta", "int16_accumulator"]))
def test_every_choice_changes_some_plan(seed: int, name: str) -> None:
    """A choice may have no effect together with some other choices (the Plans are then equal), but not with all."""
    graph = random_graph(seed, steps=6)
    resolver = resolver_of(graph, load_hardware(name), random_inputs(graph, seed))
    for key, group in resolver.space.groups.items():
        beside = islice(points(resolver.space, seed), 4)
        keys = [{resolver({**bits, key: choice}).key for choice in group.choices[:2]} for bits in beside]
        assert max(map(len, keys)) == len(group.choices[:2]), key


# ---------------------------------------------------------------- points
def test_bits_that_are_no_point_are_refused() -> None:
    space = space_of(one_conv(), load_hardware("x86_vnni"))
    space.check(space.widest())
    for bits, says in (
        ({"conv:0": 8}, "no bits for edge 'conv:1'; expected one of"),
        ({"conv:0": 8, "conv:1": 9}, r"9 bits for edge 'conv:1' fit no signature; expected one of \[8, 7, 6, 5, 4\]"),
        ({"conv:0": 8, "conv:1": 8, "conv:2": 8}, "'conv:2' has no bits to choose"),
    ):
        with pytest.raises(InfeasibleBits, match=says):
            space.check(bits)


# ---------------------------------------------------------------- fix_bits
def test_fixed_bits_leave_one_choice() -> None:
    graph, chip = residual_block(), load_hardware("x86_vnni")
    assert space_of(graph, chip, {"stem:1": 5}).groups["stem:1"].choices == (5,)
    by_node = space_of(graph, chip, {"stem": 6})
    assert [k for k, g in by_node.groups.items() if g.choices == (6,)] == ["stem:0", "stem:1"]
    every = space_of(graph, chip, {"*": 8})
    assert {g.choices for g in every.groups.values()} == {(8,)}


def test_the_most_specific_pattern_counts_in_any_order() -> None:
    patterns = {"stem:0": 7, "stem*": 5, "*": 8, "fc": 6, "fc:*": 5}
    for order in itertools.permutations(patterns.items()):
        space = space_of(residual_block(), load_hardware("x86_vnni"), dict(order))
        chosen = {key: group.choices for key, group in space.groups.items()}
        assert [chosen[k] for k in ("stem:0", "stem:1", "fc:0", "fc:1")] == [(7,), (5,), (6,), (6,)], dict(order)
        assert (chosen["left:1"], chosen["left:0"]) == ((8,), (5,))  # left:0 is the value of stem


def test_patterns_of_which_none_is_more_specific_are_refused() -> None:
    with pytest.raises(HagoError, match="give edge 'stem:1' 6 and 7 bits, and neither is more specific; fix"):
        space_of(residual_block(), load_hardware("x86_vnni"), {"ste*:1": 7, "s*em:1": 6})
    given = {"ste*:1": 7, "s*em:1": 6, "stem:1": 5}
    assert space_of(residual_block(), load_hardware("x86_vnni"), given).groups["stem:1"].choices == (5,)


def test_fixed_bits_that_no_signature_holds() -> None:
    with pytest.raises(
        InfeasibleBits, match="fix_bits 'stem:1': 9 bits for edge 'stem:1' fit no signature of x86_vnni"
    ):
        space_of(residual_block(), load_hardware("x86_vnni"), {"stem:1": 9})
    with pytest.raises(HagoError, match="fix_bits pattern 'stme' matches no name. Did you mean"):
        space_of(residual_block(), load_hardware("x86_vnni"), {"stme": 8})


@pytest.mark.parametrize(
    ("pattern", "why"),
    [
        ("sigmoid", "sigmoid stays float: toy lists no integer signature for sigmoid"),
        ("relu", "relu has no bits of its own"),
        ("conv.bias", "conv.bias has no bits of its own"),
        *(("conv", None), ("conv.weight", None), ("conv:1", None), ("x", None), ("*", None), ("[cs]*", None)),
    ],
)
def test_fixed_bits_without_effect_are_warned_of(pattern: str, why: str | None) -> None:
    chip = load_hardware("x86_vnni")
    chip = replace(chip, name="toy", ops={op: descs for op, descs in chip.ops.items() if op != "sigmoid"})
    graph = one_conv("relu", "sigmoid")
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        fixed = space_of(graph, chip, {pattern: 7})
    said = [str(w.message) for w in seen]
    expected = f"fix_bits {pattern!r} has no effect, since {why}; leave it out, or name another node"
    assert said == ([] if why is None else [expected])
    assert (fixed == space_of(graph, chip)) == (why is not None)


@pytest.mark.parametrize("bits", ["8", 8.0, True, None])
def test_fixed_bits_are_whole_numbers(bits: Any) -> None:
    with pytest.raises(
        HagoError, match=rf"fix_bits 'stem:1' is {bits!r}, of type {type(bits).__name__}; expected a whole"
    ):
        space_of(residual_block(), load_hardware("x86_vnni"), {"stem:1": bits})
    fixed = space_of(residual_block(), load_hardware("x86_vnni"), {"stem:1": np.int64(8)})
    assert fixed.groups["stem:1"].choices == (8,)


# ---------------------------------------------------------------- the prototype's toys
def test_one_dense() -> None:
    b = Builder()
    b.linear(b.input(16, name="data"), seeded(10, 16), name="dense")
    graph = b.graph()
    assert limits(space_of(graph, TOY)) == {"dense:0": 8, "dense:1": 8}
    topology = analyze(graph, TOY)
    assert [topology.nodes[n] for n in ("data", "dense.weight", "dense")] == [False, False, True]
    plan = resolver_of(graph, TOY, [seeded(8, 16)])({"dense:0": 8, "dense:1": 8})
    scales = [float(q.scale) for q in plan.nodes["dense"].operands if q]
    assert float(plan.nodes["dense"].register.scale) == scales[0] * scales[1]


def four_joined() -> Graph:
    b = Builder()
    x = b.input(16, name="data")
    parts = [b.linear(x, seeded(10, 16, seed=i), name=f"dense{i}") for i in range(4)]
    b.linear(b.call("concat", *parts, axis=1, name="cat"), seeded(5, 40), name="last")
    return b.graph()


def test_four_dense_joined() -> None:
    """14 edges; concat runs in int32 for more than 8 bits, and else in int8."""
    resolver = resolver_of(four_joined(), TOY, [seeded(8, 16)])
    found = limits(resolver.space)
    assert list(found.values()) == [8] * 8 + [32] * 4 + [8, 8]
    assert str(resolver(resolver.space.widest()).nodes["cat"].desc) == "(int32) -> int32"
    narrow = resolver.space.widest() | {f"cat:{i}": 8 for i in range(4)}
    assert str(resolver(narrow).nodes["cat"].desc) == "(int8) -> int8"
    assert str(resolver(narrow | {"cat:2": 9}).nodes["cat"].desc) == "(int32) -> int32"


def test_a_sum_of_rows() -> None:
    """The prototype kept it float and so had nothing to choose; here the hardware decides."""
    b = Builder()
    b.call("add", b.input(32, name="a"), b.input(32, name="b"), name="add")
    assert limits(space_of(b.graph(), TOY)) == {"add:0": 8, "add:1": 8}
