"""Concatenations: operands that have no other reader get the scale of the result at their producers."""

from __future__ import annotations

import copy
import random
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import hago
from hago.hardware.file import load_hardware
from hago.plan.plan import Plan
from hago.qat.prepare import from_qat, prepare_qat
from hago.runtime.exactness import compare_plan_exactly
from hago.search.preparation import Prepared, prepare

#: Hardware that requantizes at outputs and concatenates integers of one scale.
JOINING = (
    *("arm_dot", "cmsis_nn", "ethos_u", "onnxruntime_cpu", "tensorrt_gpu", "tflite"),
    *("tpu_mlir_bm1684x", "tpu_mlir_bm1684x_asym"),
)


class Branches(nn.Module):
    """Branches of very different ranges, concatenated after relus; then a result concatenated with its own operand."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.wide, self.narrow = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 1)
        self.last, self.side = nn.Conv2d(8, 4, 1), nn.Conv2d(4, 2, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.stem(x)
        joined = torch.cat([F.relu(8 * self.wide(x)), F.relu(self.narrow(x))], 1)
        y = self.last(F.max_pool2d(joined, 2))
        return y, torch.cat([y, self.side(y)], 1)


@pytest.fixture(scope="module")
def model() -> nn.Module:
    torch.manual_seed(3)
    return Branches().eval()


@pytest.fixture(scope="module")
def data() -> list[Tensor]:
    return [torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(s)) for s in (1, 2)]


def concats(plan: Plan) -> tuple[str, str]:
    first, second = (n.name for n in plan.graph if n.op == "concat")
    return first, second


def some_points(prepared: Prepared) -> list[Plan]:
    chosen = random.Random(5)
    groups = prepared.space.groups.items()
    points = [{k: chosen.choice(g.choices) for k, g in groups} for _ in range(3)]
    return [prepared.resolver(bits) for bits in (prepared.space.widest(), prepared.space.narrowest(), *points)]


@pytest.mark.parametrize("name", JOINING)
def test_operands_and_result_of_a_concatenation_have_one_scale(name: str, model: nn.Module, data: list[Tensor]) -> None:
    prepared = prepare(model, name, data)
    widest, *others = some_points(prepared)
    first, second = concats(widest)
    node = widest.nodes[first]
    assert node.simqs == (None, None) and node.operands[0] is node.operands[1] is node.out
    assert not any(key.startswith(f"{first}:") for key in prepared.space.groups)
    for source in widest.graph[first].inputs:
        assert widest.nodes[source].out is node.out
    # one operand of the second concatenation has other readers, so it keeps a range of its own
    shared = widest.nodes[second].operands
    assert shared[0] is shared[1]
    assert {k for k in prepared.space.groups if k.startswith(f"{second}:")} == {f"{second}:0"}
    for plan in (widest, *others):
        assert compare_plan_exactly(plan, data[:1]).same


@pytest.mark.parametrize("name", ["tflite", "tpu_mlir_bm1684x"])
def test_operands_of_different_bits_get_the_coarsest_scale(name: str, model: nn.Module, data: list[Tensor]) -> None:
    prepared = prepare(model, name, data)
    widest = prepared.space.widest()
    plan = prepared.resolver(widest)
    first, _ = concats(plan)
    producers = [plan.graph[s].inputs[0] for s in plan.graph[first].inputs]
    keys = [next(k for k in (f"{p}:out", f"{plan.graph[p].inputs[0]}:out") if k in widest) for p in producers]
    plan = prepared.resolver({**widest, keys[1]: 5})
    node, sources = plan.nodes[first], [plan.nodes[s].out for s in plan.graph[first].inputs]
    assert float(sources[0].scale) < float(sources[1].scale)
    assert node.out is sources[1] and node.simqs[1] is None and node.simqs[0] is not None
    assert compare_plan_exactly(plan, data[:1]).same


def test_hardware_that_requantizes_on_edges_is_not_affected(model: nn.Module, data: list[Tensor]) -> None:
    prepared = prepare(model, "x86_vnni", data)
    first, _ = concats(prepared.resolver(prepared.space.widest()))
    assert {f"{first}:0", f"{first}:1"} <= set(prepared.space.groups)


def test_ranges_given_per_operand(model: nn.Module, data: list[Tensor]) -> None:
    """Ranges with other signs for the operands than for the result: the concatenation still has one scale."""
    graph = prepare(model, "tpu_mlir_bm1684x", data).graph
    first = next(n for n in graph if n.op == "concat")
    a, b = first.inputs
    rows: dict[str, tuple[float, float]] = {a: (0.0, 9.0), b: (-1.0, 1.0)}
    for name in ("tpu_mlir_bm1684x", "tflite"):
        quantizer = hago.quantize(model, name, data, thresholds=rows)
        node = quantizer.plan.nodes[first.name]
        assert node.operands[0] is node.operands[1]
        assert compare_plan_exactly(quantizer.plan, data[:1]).same
        assert hago.replay(model, name, quantizer.strategy, data).same


def test_training_and_inspection(model: nn.Module, data: list[Tensor]) -> None:
    trained = prepare_qat(copy.deepcopy(model), "tflite", dataset=data).train()
    step = torch.optim.SGD(trained.parameters(), lr=1e-2)
    for x in data:
        loss = sum(y.square().mean() for y in trained(x))
        step.zero_grad()
        loss.backward()
        step.step()
    quantizer, trained = from_qat(trained), trained.eval()
    for ours, theirs in zip(quantizer.realize()(data[0]), trained(data[0]), strict=True):
        assert ours.equal(theirs)
    seen = hago.inspect_graph_statistic(model, "tflite", hago.quantize(model, "tflite", data).strategy, data)
    assert seen.total_differences == 0


def test_a_stored_model_and_its_tables(model: nn.Module, data: list[Tensor], tmp_path: Path) -> None:
    quantizer = hago.quantize(model, load_hardware("tpu_mlir_bm1684x"), data)
    integers = quantizer.realize()
    integers.save(tmp_path / "model.hago")
    again = hago.load_integer_model(tmp_path / "model.hago")
    assert all(a.equal(b) for a, b in zip(again(data[0]), integers(data[0]), strict=True))
