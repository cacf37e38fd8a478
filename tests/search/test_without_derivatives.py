"""Networks with operators of which torch has no derivative: what stands before them gets no gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import hago


class Steps(nn.Module):
    """Sums through a step and through a division without remainder."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        return self.last(torch.heaviside(y, torch.tensor(0.0))) + y // 0.1 + y


@pytest.mark.parametrize("effort", ["fast", "good", "best"])
def test_they_are_quantized_and_searched(effort: str) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = Steps().eval()
    data = [torch.randn(16, 8, generator=torch.Generator().manual_seed(0))]
    hago.quantize(net, "vta", data, effort=effort)
    how = {"effort": effort, "budget": 4, "progress": False, "budget_cost": "size <= 90 %"}
    strategy, score = hago.search_quantize_strategy(net, "x86_vnni", data, **how)  # type: ignore[arg-type]
    assert score > 0 and strategy.bits
    assert hago.measure_sensitivity(net, "x86_vnni", data)
