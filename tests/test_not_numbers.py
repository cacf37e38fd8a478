"""Float nodes may make what no integer stands for: 0 divided by a divisor that was rounded to 0. Every engine goes on
with the same integers."""

from __future__ import annotations

import math
from typing import Any, Final

import pytest
import torch
from networks import images, randomized
from specs import SHIPPED
from torch import Tensor, nn

import hago
from hago.arithmetic.numerics import quantize
from hago.arithmetic.rounding import ROUNDINGS
from hago.arithmetic.types import DTYPES, QParams
from hago.runtime.exactness import compare_plan_exactly
from hago.simulation.simulator import Simulator

OUTSIDE: Final = torch.tensor([math.nan, -math.inf, math.inf, -1e30, 1e30])


class Shares(nn.Module):
    """Features, and what divides them, with numbers that no grid has between that and 0."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 40, 1)

    def forward(self, x: Tensor) -> Tensor:
        features = torch.relu(self.first(x))
        return self.last(features / (features + torch.full((4, 1, 1), 1e-15)))


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("zero_point", [0, 3])
def test_it_becomes_the_least_integer(rounding: str, zero_point: int) -> None:
    target = QParams(torch.tensor(0.1, dtype=torch.float64), torch.tensor(zero_point), -128, 127, DTYPES["int8"])
    expected = [-128 - zero_point, -128 - zero_point, 127 - zero_point, -128 - zero_point, 127 - zero_point]
    assert quantize(OUTSIDE, target, rounding).tolist() == expected


@pytest.mark.parametrize("chip", SHIPPED)
def test_engines_agree(chip: str) -> None:
    model, data = randomized(Shares()), list(images(8, 3, 5, 7).split(4))
    quantizer = hago.quantize(model, chip, data)
    plan = quantizer.plan
    made: dict[str, Any] = {}
    Simulator(plan).run([data[0]], lambda node, value: made.__setitem__(node.op, value))
    assert compare_plan_exactly(plan, data[:1]).same
    assert quantizer.simulate()(data[0]).isfinite().all()
    # where no value is quantized, no divisor is rounded to 0
    assert made["div"].isnan().any() == bool(plan.nodes)
