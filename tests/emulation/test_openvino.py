"""The arithmetic of hardware_specs/openvino_cpu.json against OpenVINO, on networks whose nodes read hago's integers."""

from __future__ import annotations

import pytest
from building import Builder, seeded
from networks import Small, randomized
from plans import resolver_of
from random_graphs import random_graph, random_inputs
from test_robustness import DATA

import hago
from hago.export.onnx.engines import engine
from hago.export.onnx.export import make_onnx
from hago.export.onnx.verification import check_onnx
from hago.hardware.file import load_hardware

pytest.importorskip("onnx")
pytest.importorskip("openvino")


@pytest.mark.parametrize("estimator", ["power2_range", "mse"])
def test_a_network(estimator: str) -> None:
    """With power-of-two scales nothing differs; with others, results next to a tie may differ by one quantum."""
    plan = hago.quantize(randomized(Small()), "openvino_cpu", DATA, estimator=estimator).plan
    comparison = check_onnx(make_onnx(plan), plan, [[DATA[0][0]]], engine("openvino"), "openvino")
    assert comparison.compared > 0 and all(p.largest <= 1 for p in comparison.places if p.integer), str(comparison)
    assert comparison.same or estimator == "mse", str(comparison)


@pytest.mark.parametrize("seed", [7, 8])
def test_random_networks(seed: int) -> None:
    graph = random_graph(seed)
    inputs = random_inputs(graph, seed)
    resolver = resolver_of(graph, load_hardware("openvino_cpu"), inputs, "power2_range")
    plan = resolver(resolver.space.widest())
    comparison = check_onnx(make_onnx(plan), plan, [inputs], engine("openvino"), "openvino")
    assert comparison.compared > 0 and comparison.differing <= max(1, comparison.compared // 1000), str(comparison)
    assert all(p.largest <= 1 for p in comparison.places if p.integer), str(comparison)


@pytest.mark.parametrize("batch", [(3, 3), (3, 2)])
def test_multipliers_for_each_channel(batch: tuple[int, int]) -> None:
    """The exported file states the number of channels; without it OpenVINO uses the first multiplier for all."""
    b = Builder()
    x = b.call("relu", b.conv2d(b.input(3, 9, 9, name="x"), seeded(8, 3, 3, 3), name="first"))
    deep = b.conv2d(x, seeded(8, 1, 3, 3), groups=8, name="deep")
    graph = b.graph(b.conv2d(deep, seeded(4, 8, 1, 1), name="last"))
    inputs = [[seeded(size, 3, 9, 9, seed=size)] for size in batch]
    resolver = resolver_of(graph, load_hardware("x86_vnni"), inputs[0], "mse")
    plan = resolver(resolver.space.widest())
    comparison = check_onnx(make_onnx(plan, "qoperator"), plan, inputs, engine("openvino"), "openvino")
    assert comparison.compared > 0 and comparison.tolerable, str(comparison)
