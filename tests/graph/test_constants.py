"""Calls that read constants alone are computed at import, those with several results as well."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import pytest
import torch
from networks import images, randomized
from torch import Tensor, nn
from torch.nn import functional as F

import hago
from hago.graph.execute import run_real
from hago.graph.frontend import from_torch
from hago.graph.frontend.exported_program import Importer


def standardized(w: Tensor) -> Tensor:
    """As timm's StdConv2d does, and BiT and NFNets with it."""
    return F.batch_norm(w.reshape(1, len(w), -1), None, None, training=True, momentum=0.0).reshape_as(w)


def centered(w: Tensor) -> Tensor:
    variance, mean = torch.var_mean(w, dim=(1, 2, 3), keepdim=True)
    return (w - mean) / torch.sqrt(variance + 1e-5)


def largest(w: Tensor) -> Tensor:
    values, indices = w.flatten(1).topk(3)
    return w * values.sum() + indices.sum()


#: What a network makes of its weights when it runs.
WEIGHTS: Final[Mapping[str, Callable[[Tensor], Tensor]]] = {
    "standardized": standardized,
    "centered": centered,
    "the largest": largest,
    "parts": lambda w: torch.cat(w.split([3, 1])[::-1]),
    "orthogonal": lambda w: w / torch.linalg.svd(w.flatten(1)).S.max(),
}


class Net(nn.Module):
    """A convolution whose weight is made when it runs."""

    def __init__(self, make: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, 3, 3, 3))
        self.make = make

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.make(self.weight))


@pytest.mark.parametrize("name", WEIGHTS)
def test_what_is_made_of_weights_is_a_constant(name: str) -> None:
    model, x = randomized(Net(WEIGHTS[name])), images(4, 3, 5, 5)
    graph = from_torch(model, (x,))
    assert sorted(node.op for node in graph) == ["const", "conv2d", "input"]
    with torch.no_grad():
        torch.testing.assert_close(run_real(graph, [x])[0], model(x))
    node = hago.quantize(model, "x86_vnni", [x]).plan.nodes["conv2d"]
    weight = node.operands[1]
    assert weight is not None and weight.scale.numel() == 4  # a scale for every channel, as of other weights


@pytest.mark.parametrize("name", ["standardized", "centered", "the largest", "orthogonal"])
def test_what_was_made_for_the_calls_applies(name: str) -> None:
    model, x = randomized(Net(WEIGHTS[name])), images(4, 3, 5, 5)
    program = torch.export.export(model, (x,), dynamic_shapes=({0: torch.export.Dim.AUTO},))
    first = Importer(program, converts=False).run()
    assert from_torch(model, (x,)).model_hash != first.model_hash
    assert from_torch(model, (x,), made_for=(first.model_hash,)).model_hash == first.model_hash
