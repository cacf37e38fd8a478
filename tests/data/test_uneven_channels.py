"""Models with dead, tiny or huge channels and biases of any size are quantized on every chip."""

from __future__ import annotations

import math
import random

import pytest
import torch
from building import Builder, seeded
from products import some
from specs import EVERY

import hago
from hago.graph.graph import Graph
from hago.plan.operands import Operands
from hago.plan.plan import NodePlan, Plan
from hago.runtime.exactness import compare_plan_exactly

LAYERS = ("conv2d", "depthwise", "conv_transpose2d", "linear", "affine")
INPUT = seeded(6, 4, 5, 5, seed=3)


def uneven(shape: tuple[int, ...], rng: random.Random, axis: int = 0) -> torch.Tensor:
    """A weight of which each channel has a size of its own, from 0 to 1e6."""
    sizes = [rng.choice((0.0, 1.0, 10.0 ** rng.uniform(-40, 6))) for _ in range(shape[axis])]
    along = [-1 if d == axis else 1 for d in range(len(shape))]
    return seeded(*shape, seed=rng.randrange(1000)) * torch.tensor(sizes).reshape(along)


def biases(count: int, rng: random.Random) -> torch.Tensor:
    return torch.tensor([rng.choice((-1, 1)) * 10.0 ** rng.uniform(-12, 9) for _ in range(count)])


def network(layer: str, seed: int) -> Graph:
    """One uneven layer, a relu, and an ordinary layer that reads all of it."""
    rng, b = random.Random(f"{layer} {seed}"), Builder()
    x = b.input(4, 5, 5, name="x")
    if layer == "conv2d":
        y = b.conv2d(x, uneven((4, 4, 3, 3), rng), biases(4, rng), name="uneven")
    elif layer == "depthwise":
        y = b.conv2d(x, uneven((4, 1, 3, 3), rng), biases(4, rng), name="uneven", groups=4)
    elif layer == "conv_transpose2d":
        weight, bias = b.const(uneven((4, 4, 2, 2), rng, 1)), b.const(biases(4, rng))
        options = {"stride": (2, 2), "padding": (0, 0), "output_padding": (0, 0), "groups": 1, "dilation": (1, 1)}
        y = b.call("conv_transpose2d", x, weight, bias, name="uneven", **options)
    elif layer == "affine":
        y = b.call("affine", x, b.const(uneven((4,), rng)), b.const(biases(4, rng)), name="uneven", rank=4)
    else:
        flat = b.call("reshape", x, shape=(-1, 100))
        return b.graph(b.linear(flat, uneven((4, 100), rng), biases(4, rng), name="uneven"))
    return b.graph(b.conv2d(b.call("relu", y), seeded(3, 4, 1, 1), seeded(3), name="last"))


def room(plan: NodePlan) -> float:
    return min(plan.operands[2].dtype.max, plan.desc.register.dtype.max) / 2  # type: ignore[union-attr]


def quantized(layer: str, chip: str, seed: int) -> Plan:
    return hago.quantize(network(layer, seed), EVERY[chip], [INPUT], corrections="none").plan


@pytest.mark.parametrize(("chip", "layer", "seed"), some(3, sorted(EVERY), LAYERS, range(2)))
def test_no_chip_refuses_uneven_channels(chip: str, layer: str, seed: int) -> None:
    plan = quantized(layer, chip, seed)
    assert not compare_plan_exactly(plan, [INPUT]).differences
    for name, node in plan.nodes.items():
        if 2 in node.consts:
            assert node.saturated_biases == 0, name
            # rounding to a float32 scale moves an integer by less than one
            assert float(node.consts[2].abs().max()) <= room(node) + 1, name


@pytest.mark.parametrize("chip", ["x86_vnni", "tflite", "shift_half_up", "int16_saturates"])
@pytest.mark.parametrize("layer", LAYERS)
def test_scales_are_raised_only_as_far_as_needed(layer: str, chip: str) -> None:
    for seed in range(3):
        node = quantized(layer, chip, seed).nodes.get("uneven")
        if node is None or 2 not in node.consts:
            continue
        graph = network(layer, seed)
        made, bias = node.operands[1], graph.consts[graph["uneven"].inputs[2]].to(torch.float64)
        ends = node.thresholds["uneven:1"]
        assert made is not None and node.operands[0] is not None
        full = bias.abs() / (node.operands[0].scale * room(node))
        need = full if made.scale.numel() > 1 else full.max().reshape(1)
        coarsest = 2.0 if EVERY[chip].requantize.power_of_two else 1 + 2.0**-22
        for channel, scale in enumerate(made.scale.flatten().tolist()):
            if channel in node.raised:
                assert need[channel] * (1 - 1e-12) <= scale <= need[channel] * coarsest
            else:
                assert need[channel] <= scale * (1 + 1e-12)
                end = max(abs(float(e[channel])) for e in ends) or math.inf
                assert scale <= 2 * end


def test_without_raised_scales_biases_saturate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Operands, "_with_room_for_bias", lambda self, slot, x, w, desc: w)
    assert quantized("conv2d", "x86_vnni", 0).nodes["uneven"].saturated_biases


def test_a_stored_strategy_raises_the_same_channels() -> None:
    quantizer = hago.quantize(network("conv2d", 0), "x86_vnni", [INPUT])
    again = hago.create_quantizer(network("conv2d", 0), "x86_vnni", quantizer.strategy)
    assert again.plan.key == quantizer.plan.key
    assert quantizer.plan.nodes["uneven"].raised == again.plan.nodes["uneven"].raised != ()


@pytest.mark.parametrize("searcher", ["gradient", "pareto", "greedy"])
def test_searches_take_uneven_channels(searcher: str) -> None:
    strategy, _ = hago.search_quantize_strategy(
        network("depthwise", 1), "tflite", [INPUT], searcher=searcher, budget=4, progress=False
    )
    assert not compare_plan_exactly(
        hago.create_quantizer(network("depthwise", 1), "tflite", strategy).plan, [INPUT]
    ).differences


def test_trained_scales_are_raised_as_well() -> None:
    graph = network("conv2d", 0)
    model = hago.prepare_qat(graph, "x86_vnni", hago.quantize(graph, "x86_vnni", [INPUT]).strategy)
    trained = model.train()(INPUT).detach()
    assert trained.isfinite().all()
    quantizer = hago.from_qat(model.eval())
    assert quantizer.plan.nodes["uneven"].raised
    assert torch.equal(model(INPUT), quantizer.simulate()(INPUT))
