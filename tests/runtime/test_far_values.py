"""Simulations equal integer models where ratios of scales are beyond what multipliers and float32 hold: inputs far from
those of calibration, and weights, biases and constants from 1e-37 to the largest of float32."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import hago
from hago.arithmetic.equality import equal
from hago.hardware import available_hardware

NETWORKS: dict[str, Callable[[nn.Module, Tensor, float], Tensor]] = {
    "chain": lambda m, x, far: m.b(torch.relu(m.a(x))),
    "added": lambda m, x, far: m.b(torch.relu(m.a(x) + m.a(x) * 0.5)),
    "constant": lambda m, x, far: torch.relu(m.a(x) + far),
    "joined": lambda m, x, far: m.c(torch.cat([m.a(x) * far, m.a(x)], 1)),
    "clamped": lambda m, x, far: torch.clamp(m.a(x) * far, -1e-3, 1e-3),
    "chosen": lambda m, x, far: torch.softmax(torch.cat([m.a(x), m.b(m.a(x)) + far], 1), 1),
}
FAR = (1e-5, 1e-13, 1e-20, 1e-37, 1e20, 1e37, -3e38)


class Far(nn.Module):
    """Two inputs that cancel each other in calibration."""

    def __init__(self, kind: str, far: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = nn.Linear(2, 1), nn.Linear(1, 1, bias=False), nn.Linear(2, 2)
        self.kind, self.far = kind, far
        with torch.no_grad():
            self.a.weight.copy_(torch.tensor([[1.0, -1.0]]))
            self.a.bias.fill_(far if kind in ("chain", "added") else 0.5)
            self.b.weight.fill_(1.0)

    def forward(self, x: Tensor) -> Tensor:
        return NETWORKS[self.kind](self, x, self.far)


@pytest.mark.some_cases(60)
@pytest.mark.filterwarnings("ignore::hago.HagoWarning")
@pytest.mark.parametrize("far", FAR)
@pytest.mark.parametrize("kind", NETWORKS)
@pytest.mark.parametrize("chip", available_hardware())
def test_simulations_equal_integer_models(chip: str, kind: str, far: float) -> None:
    model, generator = Far(kind, far).eval(), torch.Generator().manual_seed(0)
    data = torch.rand(64, 1, generator=generator).expand(64, 2) * 100
    near = torch.tensor([[100.0, 0.0], [50.0, 0.0], [0.0, 100.0], [1.0, 0.0], [3.0, 1.0], [100.0, 30.0]])
    x = torch.cat([near, torch.randn(20, 2, generator=generator) * 100])
    try:
        quantizer = hago.quantize(model, chip, [data], corrections="none")
    except hago.HagoError:  # values beyond float32, scales beyond the chip's, overflows on the data
        assert abs(far) >= 1e20
        return
    simulated = quantizer.simulate()(x)
    assert not simulated.isnan().any()
    for engine in ("auto", "reference"):
        assert equal(simulated, quantizer.realize(engine=engine)(x))
