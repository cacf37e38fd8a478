"""Networks whose outputs are infinite, such as masked logits, or not numbers."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import hago
from hago.errors import DataError
from hago.search.objective import OBJECTIVES


class Policy(nn.Module):
    """Logits, of which those of actions that are not allowed are -inf."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor, allowed: Tensor) -> Tensor:
        return self.last(torch.relu(self.first(x))).masked_fill(allowed < 0.5, float("-inf"))


class Logarithm(nn.Module):
    """Not a number where a sum is negative."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.log(self.layer(x))


def policy() -> tuple[nn.Module, list[tuple[Tensor, Tensor]]]:
    """The network, and data of which one sample allows nothing."""
    generator = torch.Generator().manual_seed(0)
    allowed = (torch.rand(3, 16, 4, generator=generator) > 0.3).float()
    allowed[0, 5] = 0
    data = list(zip(torch.randn(3, 16, 8, generator=generator), allowed, strict=True))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Policy().eval(), data


@pytest.mark.parametrize("objective", ["sqnr", "kl", "mse", "cosine", "agreement"])
def test_equal_infinities_are_no_error(objective: str, tmp_path: Path) -> None:
    net, data = policy()
    log = tmp_path / "log.jsonl"
    how = {"objective": objective, "budget": 4, "log": log, "progress": False}
    strategy, score = hago.search_quantize_strategy(net, "x86_vnni", data, **how)  # type: ignore[arg-type]
    assert math.isfinite(score)
    assert hago.replay(net, "x86_vnni", log, data).same
    strategy.save(tmp_path / "strategy.json")
    evaluated = hago.evaluate_strategy(net, "x86_vnni", hago.Strategy.load(tmp_path / "strategy.json"), data)
    assert math.isfinite(evaluated.results["sqnr"]) and evaluated.results["sqnr"] > 20


def test_an_infinity_in_one_model_alone_is_an_error() -> None:
    finite, infinite = torch.zeros(1, 2), torch.tensor([[0.0, -math.inf]])
    sqnr = OBJECTIVES["sqnr"]
    assert sqnr.finish(sqnr.per_sample([infinite + 1], [finite], None)[0]) < -100
    kl = OBJECTIVES["kl"]
    assert kl.finish(kl.per_sample([finite], [infinite], None)[0]) == -math.inf


def test_outputs_that_are_no_numbers_are_refused() -> None:
    x = torch.rand(16, 8, generator=torch.Generator().manual_seed(0))
    x[11] -= 1.0
    net = Logarithm().eval()
    nn.init.ones_(net.layer.weight), nn.init.zeros_(net.layer.bias)
    with pytest.raises(DataError, match="output 0 of the model in floats is NaN for sample 11; leave such samples out"):
        hago.quantize(net, "x86_vnni", [x])
    assert hago.quantize(net, "x86_vnni", [x[:11]]).realize()(x[:11]).isfinite().all()


@pytest.mark.filterwarnings("error")
def test_outputs_whose_squares_float32_does_not_hold() -> None:
    class Large(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(torch.relu(self.first(x))) * 1e30

    data = [torch.randn(16, 8, generator=torch.Generator().manual_seed(0))]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = Large().eval()
    strategy = hago.quantize(net, "x86_vnni", data).strategy
    assert hago.evaluate_strategy(net, "x86_vnni", strategy, data).results["sqnr"] > 20
