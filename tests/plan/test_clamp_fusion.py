"""Fusion of clamps into their readers' clipping: the outputs are equal, and fewer nodes are computed."""

from __future__ import annotations

import pytest
import torch
from building import Builder, residual_block, seeded
from chips import CHIPS, Chip
from plans import fixed_resolver, resolver_of
from products import some

from hago.graph.graph import Graph
from hago.hardware.file import load_hardware
from hago.plan.clamp_fusion import fuse_clamps, redundant_clamps
from hago.plan.plan import Plan
from hago.runtime.reference import IntegerModel
from hago.simulation.simulator import Simulator


def plan_of(graph: Graph, name: str = "x86_vnni") -> Plan:
    resolver = resolver_of(graph, load_hardware(name), [seeded(2, 3, 8, 8)])
    return resolver(resolver.space.widest())


def clamped(low: float | None, high: float | None, *readers: str) -> Graph:
    """A convolution, a clamp, and convolutions that read it."""
    b = Builder()
    conv = b.conv2d(b.input(3, 8, 8, name="x"), seeded(4, 3, 3, 3), seeded(4), name="conv")
    cut = b.call("clamp", conv, min=low, max=high, name="cut")
    outputs = [b.conv2d(cut, seeded(2, 4, 1, 1, seed=i), name=r) for i, r in enumerate(readers)]
    return b.graph(*(outputs or [cut]))


def test_a_clamp_that_only_requantizing_edges_read_is_fused() -> None:
    plan = plan_of(residual_block())
    fused = fuse_clamps(plan)
    assert fused.skipped == {"stem.relu", "left.relu"}  # the pooling takes add.relu's accumulators as they are
    assert {str(e) for e in fused.simqs} == {"left:0", "add:0", "right:0"}


def test_a_watched_value_is_not_fused() -> None:
    plan, seen = plan_of(residual_block()), []
    Simulator(plan).run([seeded(2, 3, 8, 8)], lambda node, value: seen.append(node.name))
    assert {"stem.relu", "left.relu"} <= set(seen)


def test_an_output_is_not_skipped() -> None:
    assert fuse_clamps(plan_of(clamped(0.0, 6.0))).skipped == frozenset()
    b = Builder()
    cut = b.call("relu", b.conv2d(b.input(3, 8, 8), seeded(4, 3, 3, 3), name="conv"), name="relu")
    b.conv2d(cut, seeded(2, 4, 1, 1), name="reader")
    assert fuse_clamps(plan_of(b.graph("relu", "reader"))).skipped == frozenset()


def test_limits_that_differ_by_channel_are_not_fused() -> None:
    """With a scale per channel, 0.7 is a different integer in each channel, and 0 is 0 in all."""
    chip = Chip("uint8", granularity="per_channel").hardware()
    for high, expected in ((0.7, set()), (None, {"cut"})):
        b = Builder()
        conv = b.conv2d(b.input(3, 8, 8, name="x"), seeded(4, 3, 3, 3), name="conv")
        cut = b.call("clamp", conv, min=0.0, max=high, name="cut")
        b.call("add", cut, cut, name="add")
        resolver = resolver_of(b.graph(), chip, [seeded(2, 3, 8, 8)])
        assert fuse_clamps(resolver(resolver.space.widest())).skipped == expected


@pytest.mark.parametrize("name, limits", some(2, sorted(CHIPS), [(0.0, None), (0.0, 6.0), (-0.4, 0.3), (None, 0.2)]))
def test_outputs_are_the_same(name: str, limits: tuple[float | None, float | None]) -> None:
    low, high = limits
    graph = clamped(low, high, "a", "b")
    ranges = {"conv:0": (-2.0, 2.0), "a:0": (-1.0, 1.0), "b:0": (-3.0, 0.5), "cut:0": (-1.0, 1.0)}
    resolver = fixed_resolver(graph, CHIPS[name].hardware(), ranges)
    for bits in (resolver.space.widest(), resolver.space.narrowest()):
        plan = resolver(bits)
        for size in (1.0, 20.0):
            x = [seeded(2, 3, 8, 8, seed=4) * size]
            unwatched = Simulator(plan).run(x)
            watched = Simulator(plan).run(x, lambda node, value: None)
            integer = IntegerModel(plan).run(x)
            for a, b, c in zip(unwatched, watched, integer, strict=True):
                assert torch.equal(a, b) and torch.equal(a, c)


def test_a_clamp_to_the_range_of_its_operand_is_left_out() -> None:
    """The scale of the convolution is that of the clamp, so that the limits are those of its integers."""
    plan = plan_of(clamped(0.0, 6.0, "a", "b"), "tflite")
    assert redundant_clamps(plan) == {"cut"}
    assert not [step for step in Simulator(plan).steps() if step.name == "cut"]
    assert not redundant_clamps(plan_of(clamped(0.0, 6.0), "tflite"))  # an output
    assert not redundant_clamps(plan_of(clamped(0.0, 6.0, "a", "b")))  # its operand is an accumulator


@pytest.mark.parametrize("limits", [(0.0, None), (0.0, 6.0), (-0.4, 0.3), (None, 0.2)])
@pytest.mark.parametrize("observed", [(-2.0, 2.0), (-0.4, 0.3), (-0.1, 0.2), (0.0, 9.0)])
def test_what_is_left_out_changes_nothing(
    limits: tuple[float | None, float | None], observed: tuple[float, float]
) -> None:
    """Whatever range the operand was clipped to: a clamp is left out if and only if no integer is beyond its limits."""
    graph = clamped(*limits, "a", "b")
    ranges = {
        "x:out": (-2.0, 2.0),
        "conv:0": (-2.0, 2.0),
        "conv:out": observed,
        "a:out": (-1.0, 1.0),
        "b:out": (-3.0, 0.5),
    }
    resolver = fixed_resolver(graph, load_hardware("tflite"), ranges)
    plan = resolver(resolver.space.widest())
    x = [seeded(2, 3, 8, 8, seed=4) * 20.0]
    values: dict[str, torch.Tensor] = {}
    watched = Simulator(plan).run(x, lambda node, value: values.update({node.name: value}))
    unwatched, integer = Simulator(plan).run(x), IntegerModel(plan).run(x)
    assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(unwatched, watched, integer, strict=True))
    assert ("cut" in redundant_clamps(plan)) == torch.equal(values["conv"], values["cut"])
