"""Numbers that keep divisors from 0 are added in float, by the divisions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import pytest
import torch
from networks import images, randomized
from torch import Tensor, nn

import hago
from hago.export.onnx.export import make_onnx
from hago.export.onnx.verification import check_onnx
from hago.graph.execute import run_real
from hago.graph.frontend import from_torch
from hago.graph.frontend.exported_program import Importer
from hago.runtime.exactness import compare_plan_exactly


def twice(f: Tensor, divisor: Tensor) -> Tensor:
    return f / divisor + divisor


#: Of features (batch, 4, 5, 7) that are 0 in places, values to divide and what divides them.
GUARDED: Final[Mapping[str, Callable[[Tensor], Tensor]]] = {
    "a sum": lambda f: f / (f.sum(1, keepdim=True) + 1e-6),
    "itself": lambda f: f / (1e-15 + f),
    "a part": lambda f: f[:, :3] / (f[:, 3:] + 1e-6),
    "moved": lambda f: f / (f[:, 0] + 1e-6).unsqueeze(1).expand_as(f),
    "one": lambda f: f / (1 + f),
}
#: Sums that something else reads, or that add more than one number.
OTHERS: Final[Mapping[str, Callable[[Tensor], Tensor]]] = {
    "read twice": lambda f: twice(f, f + 1e-6),
    "of channels": lambda f: f / (f + torch.full((4, 1, 1), 1e-6)),
    "a dividend": lambda f: (f + 1) / (f.mean((2, 3), keepdim=True) * 2),
}


class Net(nn.Module):
    """Layers around a division."""

    def __init__(self, divide: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 4, 1)
        self.divide = divide

    def forward(self, x: Tensor) -> Tensor:
        return self.divide(torch.relu(self.first(x)))


def made(divide: Callable[[Tensor], Tensor]) -> tuple[nn.Module, list[Tensor]]:
    """A network, and data."""
    return randomized(Net(divide)), list(images(8, 3, 5, 7).split(4))


@pytest.mark.parametrize("name", GUARDED)
def test_it_is_part_of_the_division(name: str) -> None:
    model, (x, _) = made(GUARDED[name])
    graph = from_torch(model, (x,))
    (division,) = [node for node in graph if node.op == "div"]
    assert division.attrs["plus"] > 0 and not any(node.op == "add" for node in graph)
    with torch.no_grad():
        assert torch.equal(run_real(graph, [x])[0], model(x))


@pytest.mark.parametrize("name", OTHERS)
def test_other_sums_are_left(name: str) -> None:
    model, (x, _) = made(OTHERS[name])
    graph = from_torch(model, (x,))
    assert not any("plus" in node.attrs for node in graph) and any(node.op == "add" for node in graph)


@pytest.mark.parametrize("name", GUARDED)
@pytest.mark.parametrize("chip", ["tflite", "x86_vnni", "vta"])
def test_what_is_not_0_divides(chip: str, name: str) -> None:
    model, data = made(GUARDED[name])
    quantizer = hago.quantize(model, chip, data)
    assert compare_plan_exactly(quantizer.plan, data[:1]).same
    assert quantizer.simulate()(data[0]).isfinite().all()


def test_a_file_says_it() -> None:
    model, data = made(GUARDED["a sum"])
    plan = hago.quantize(model, "onnxruntime_cpu", data).plan
    assert check_onnx(make_onnx(plan, "qdq"), plan, [data[:1]]).differing == 0


@pytest.mark.parametrize("name", GUARDED)
def test_what_was_made_for_the_sum_applies(name: str) -> None:
    model, (x, _) = made(GUARDED[name])
    program = torch.export.export(model, (x,), dynamic_shapes=({0: torch.export.Dim.AUTO},))
    first = Importer(program, converts=False).run()
    assert from_torch(model, (x,)).model_hash != first.model_hash
    assert from_torch(model, (x,), made_for=(first.model_hash,)).model_hash == first.model_hash
