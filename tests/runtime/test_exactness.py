"""Simulator and integer model, bit for bit: random networks on random hardware at random bits."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import islice

import pytest
import torch
from building import Builder, residual_block, seeded
from chips import CHIPS, STORED_CHIPS
from plans import fixed_resolver, points, resolver_of
from products import whole
from random_graphs import random_graph, random_inputs
from specs import EVERY
from torch import Tensor

from hago.arithmetic.numerics import Requantize, RequantizeForm
from hago.graph.execute import run_real
from hago.graph.graph import Graph
from hago.ops._rule import Attrs
from hago.runtime.exactness import compare_plan_exactly
from hago.runtime.reference import IntegerModel
from hago.search.preparation import QuantizationOptions, prepare
from hago.search.quantizer import Quantizer
from hago.search.stored_strategy import make_strategy, plan_of
from hago.simulation.simulator import Simulator

ESTIMATORS = ("max_range", "mse", "percentile", "power2_range")


# ---------------------------------------------------------------- the promise
@pytest.mark.parametrize("seed", range(60 if whole() else 14))
def test_random_networks(seed: int) -> None:
    """No difference on any edge, node or output; and a stored strategy gives the plan again."""
    rng = random.Random(seed)
    graph = random_graph(seed)
    data = [tuple(random_inputs(graph, 10 * seed + i)) for i in range(2)]
    for name in rng.sample(sorted(EVERY), 2):
        prepared = prepare(graph, EVERY[name], data, QuantizationOptions(estimator=rng.choice(ESTIMATORS)))
        for bits in islice(points(prepared.space, seed), 3):
            plan = prepared.resolver(bits)
            for size in (1.0, 6.0):
                found = compare_plan_exactly(plan, random_inputs(graph, seed + 77, size=size))
                assert found.compared > 100
                assert found.same, (seed, name, dict(found.differences))
            strategy = make_strategy(prepared, plan, bits, {})
            assert plan_of(graph, EVERY[name], strategy).key == plan.key


@pytest.mark.parametrize("seed", range(100, 112 if whole() else 106))
@pytest.mark.parametrize("name", STORED_CHIPS)
def test_random_networks_with_stored_weights(name: str, seed: int) -> None:
    """The same where layers compute in float on weights that rest as integers, among integer nodes."""
    graph = random_graph(seed)
    hardware = STORED_CHIPS[name].hardware(name=name)
    prepared = prepare(graph, hardware, [tuple(random_inputs(graph, seed))], QuantizationOptions(estimator="max_range"))
    for bits in islice(points(prepared.space, seed), 3):
        plan = prepared.resolver(bits)
        found = compare_plan_exactly(plan, random_inputs(graph, seed + 77))
        assert found.same, (seed, name, dict(found.differences))
        strategy = make_strategy(prepared, plan, bits, {})
        assert plan_of(graph, hardware, strategy).key == plan.key


@pytest.mark.parametrize("form", ["float32", "multiplier_shift"])
@pytest.mark.parametrize("seed", range(6))
def test_layers_of_one_channel(seed: int, form: RequantizeForm) -> None:
    """Their one scale has the dimensions of the weight, which values need not have once they are reshaped."""
    chip, graph = replace(EVERY["x86_vnni"], requantize=Requantize(form)), random_graph(seed, widths=(1, 1, 3))
    resolver = resolver_of(graph, chip, random_inputs(graph, seed))
    found = compare_plan_exactly(resolver(resolver.space.widest()), random_inputs(graph, seed + 77))
    assert found.same, dict(found.differences)


@pytest.mark.parametrize("size", [0.0, 1e-30, 1e30])
@pytest.mark.parametrize("name", ["x86_vnni", "arm_dot", "vta", "int16_accumulator"])
def test_values_of_any_size(name: str, size: float) -> None:
    graph = residual_block()
    resolver = resolver_of(graph, EVERY[name], [seeded(2, 3, 8, 8)])
    assert compare_plan_exactly(resolver(resolver.space.widest()), [seeded(2, 3, 8, 8, seed=5) * size]).same


def test_calibration_on_zeros_only() -> None:
    for name in EVERY:
        graph = residual_block()
        resolver = resolver_of(graph, EVERY[name], [torch.zeros(2, 3, 8, 8)])
        assert compare_plan_exactly(resolver(resolver.space.widest()), [seeded(2, 3, 8, 8)]).same


@pytest.mark.parametrize("batch", [1, 2, 5])
def test_any_batch(batch: int) -> None:
    graph = residual_block()
    resolver = resolver_of(graph, EVERY["x86_vnni"], [seeded(2, 3, 8, 8)])
    plan = resolver(resolver.space.widest())
    x = seeded(5, 3, 8, 8, seed=5)
    whole = IntegerModel(plan)(x)
    assert IntegerModel(plan)(x[:batch]).equal(whole[:batch]) and Simulator(plan)(x[:batch]).equal(whole[:batch])


# ---------------------------------------------------------------- sums that float32 does not hold
@pytest.mark.parametrize("depth, parts", [(1024, 1), (1100, 2), (4608, 5), (40_000, 1)])
def test_deep_sums_stay_exact(depth: int, parts: int) -> None:
    """Up to 2**24 in float32, then as exact partial sums, then in float64."""
    weight = torch.where(seeded(2, depth) < 0, -1.0, 1.0)
    b = Builder()
    b.linear(b.input(depth, name="x"), weight, name="fc")
    resolver = fixed_resolver(b.graph(), CHIPS["symmetric"].hardware(), {"fc:0": (-1.0, 1.0)})
    plan = resolver({"fc:0": 8, "fc:1": 8})
    node = plan.nodes["fc"]
    assert node.bound == 127 * 127 * depth and node.parts == parts
    assert compare_plan_exactly(plan, [torch.cat([weight, seeded(3, depth)])]).same


def test_a_deep_convolution_is_split_over_its_channels() -> None:
    weight = torch.where(seeded(3, 200, 3, 3) < 0, -1.0, 1.0)
    b = Builder()
    b.conv2d(b.input(200, 4, 4, name="x"), weight, seeded(3), name="conv")
    resolver = fixed_resolver(b.graph(), CHIPS["symmetric"].hardware(), {"conv:0": (-1.0, 1.0)})
    plan = resolver({"conv:0": 8, "conv:1": 8})
    assert plan.nodes["conv"].parts == 2
    assert compare_plan_exactly(
        plan, [torch.ones(1, 200, 4, 4), torch.where(seeded(1, 200, 4, 4) < 0, -1.0, 1.0)][:1]
    ).same


# ---------------------------------------------------------------- what the two models are
def quantizer_of(graph: Graph, name: str = "x86_vnni") -> Quantizer:
    prepared = prepare(graph, name, [seeded(4, 3, 8, 8)])
    bits = prepared.space.widest()
    plan = prepared.resolver(bits)
    return Quantizer(plan, make_strategy(prepared, plan, bits, {}))


def test_the_integer_model_stores_integers() -> None:
    quantizer = quantizer_of(residual_block())
    model = quantizer.realize()
    stored = {name: buffer.dtype for name, buffer in model.named_buffers()}
    assert stored["stem:1"] == torch.int8 and stored["stem:2"] == torch.int32
    assert not any(t.is_floating_point() for t in model.buffers())
    seen: dict[str, torch.dtype] = {}
    model.run([seeded(2, 3, 8, 8)], lambda node, value: seen.__setitem__(node.name, value.dtype))
    assert {seen[name] for name in quantizer.plan.nodes} <= {torch.int8, torch.uint8, torch.int16, torch.int32}
    assert seen["x"] == torch.float32


def test_quantization_is_close_to_the_float_model() -> None:
    graph, x = residual_block(), seeded(4, 3, 8, 8)
    (reference,) = run_real(graph, [x])
    for name in ("x86_vnni", "arm_dot"):
        out = quantizer_of(graph, name).simulate()(x)
        noise = float((out - reference).square().sum() / reference.square().sum())
        assert 0 < noise < 1e-2


def test_outputs_that_are_inputs_constants_or_shared() -> None:
    b = Builder()
    x = b.input(3, 8, 8, name="x")
    conv = b.conv2d(x, seeded(4, 3, 3, 3), name="conv")
    b.call("relu", conv, name="relu")
    graph = b.graph("x", "relu", "conv", "relu", "conv.weight")
    for name in ("x86_vnni", "arm_dot", "vta"):
        resolver = resolver_of(graph, EVERY[name], [seeded(2, 3, 8, 8)])
        plan = resolver(resolver.space.widest())
        assert compare_plan_exactly(plan, [seeded(2, 3, 8, 8)]).same
        outputs = Simulator(plan).run([seeded(2, 3, 8, 8)])
        assert outputs[0].equal(seeded(2, 3, 8, 8)) and outputs[1].equal(outputs[3])
        assert outputs[4].equal(graph.consts["conv.weight"])


# ---------------------------------------------------------------- the comparison itself
def test_differences_are_located() -> None:
    plan = quantizer_of(residual_block()).plan
    rule = plan.ops["relu"]
    assert rule.integer is not None

    def off_by_one(attrs: Attrs, c: Tensor) -> Tensor:
        return torch.relu(c) + (not c.is_floating_point())

    broken = replace(rule, integer=replace(rule.integer, compute=off_by_one))
    found = compare_plan_exactly(replace(plan, ops={**plan.ops, "relu": broken}), [seeded(2, 3, 8, 8)])
    assert not found.same
    assert next(iter(found.differences)) == "stem.relu"  # the first place, and all of it
    assert found.differences["stem.relu"] == 2 * 4 * 8 * 8
