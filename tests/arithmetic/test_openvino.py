"""The arithmetic of hardware_specs/openvino_cpu.json, against OpenVINO: whole networks, each node fed our integers."""

from __future__ import annotations

import pytest
from networks import Small, randomized
from plans import resolver_of
from random_graphs import random_graph, random_inputs
from test_robustness import DATA

import hago
from hago.export.onnx_check import check_onnx
from hago.export.onnx_engines import engine
from hago.export.onnx_export import make_onnx
from hago.hardware_file import load_hardware

pytest.importorskip("onnx")
pytest.importorskip("openvino")


@pytest.mark.parametrize("estimator", ["power2_range", "mse"])
def test_a_network(estimator: str) -> None:
    """Nothing differs with power-of-two scales; else a quantum, next to ties."""
    plan = hago.quantize(randomized(Small()), "openvino_cpu", DATA, estimator=estimator).plan
    found = check_onnx(make_onnx(plan), plan, [[DATA[0][0]]], engine("openvino"), "openvino")
    assert found.compared > 0 and all(p.largest <= 1 for p in found.places if p.integer), str(found)
    assert found.same or estimator == "mse", str(found)


@pytest.mark.parametrize("seed", [7, 8])
def test_random_networks(seed: int) -> None:
    graph = random_graph(seed)
    inputs = random_inputs(graph, seed)
    resolver = resolver_of(graph, load_hardware("openvino_cpu"), inputs, "power2_range")
    plan = resolver(resolver.space.widest())
    found = check_onnx(make_onnx(plan), plan, [inputs], engine("openvino"), "openvino")
    assert found.compared > 0 and found.differing <= max(1, found.compared // 1000), str(found)
    assert all(p.largest <= 1 for p in found.places if p.integer), str(found)
