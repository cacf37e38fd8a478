"""Operands and accumulators of more than 53 bits, which float64 does not hold exactly."""

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from networks import randomized
from torch import Tensor, nn

import hago
from hago.arithmetic.numerics import EXACT_FLOAT64
from hago.errors import HardwareError, InfeasibleBits
from hago.hardware import hardware as hardware_module
from hago.plan import resolve

OPS = ("conv2d", "linear", "concat", "add", "relu")


class Joined(nn.Module):
    """Two layers of very different results, which are joined, or added, as integers of the accumulator."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(4, 3, 3, padding=1), nn.Conv2d(4, 3, 3, padding=1)
        self.c = nn.Conv2d(6 if how == "concat" else 3, 4, 3)
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        a, b = torch.relu(self.a(x)), self.b(x)
        both: Tensor = self.c(torch.cat([a, b], 1) if self.how == "concat" else torch.relu(a + b))
        return both


def wide_chip(wide: str, read: str = "int16", weight: str = "int8", **limits: int) -> hago.Hardware:
    document = {
        "version": 1,
        "name": "wide",
        "sources": ["made up"],
        "activation": {"scheme": "hago", "granularity": "per_tensor"},
        "weight": {"scheme": "hago", "granularity": "per_channel"},
        "requantize": {"form": "float32"},
        "rounding": "half_even",
        "other_ops": "float32",
        "signatures": {
            "mac": {"in": [read, weight, wide], "out": wide},
            "wide": {"in": [wide], "out": wide, **limits},
            "f32": {"in": ["float32"], "out": "float32"},
        },
        "ops": {op: ["mac" if op in ("conv2d", "linear") else "wide", "f32"] for op in OPS},
    }
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "wide.json")
        path.write_text(json.dumps(document))
        return hago.load_hardware(path)


def differs(model: nn.Module, hardware: hago.Hardware, data: Tensor) -> bool:
    """Whether a simulation differs from its integer model on inputs that are up to four times as large as those of
    calibration."""
    quantizer = hago.quantize(model, hardware, [data], corrections="none")
    far = torch.cat([data, torch.randn(data.shape, generator=torch.Generator().manual_seed(5)) * 4])
    simulated = quantizer.simulate()(far)
    return any(not torch.equal(simulated, quantizer.realize(engine=e)(far)) for e in ("auto", "reference"))


@pytest.mark.parametrize("how", ["concat", "add"])
@pytest.mark.parametrize("wide", ["int40", "int64"])
def test_simulations_equal_integer_models(how: str, wide: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, data = randomized(Joined(how)), torch.randn(16, 4, 8, 8, generator=torch.Generator().manual_seed(1))
    assert not differs(model, wide_chip(wide), data)
    if wide == "int64":  # the law bites
        monkeypatch.setattr(hardware_module, "MOST_BITS", 64)
        monkeypatch.setattr(resolve.NodeBuilder, "_check_simulated", lambda self, bound: None)
        assert differs(model, wide_chip(wide), data)


def test_operands_have_fewer_bits_where_their_sums_are_too_large() -> None:
    model, data = randomized(nn.Sequential(nn.Linear(96, 8))), torch.randn(32, 96)
    hardware = wide_chip("int64", "int32", "int32")
    quantizer = hago.quantize(model, hardware, [data], corrections="none")
    bits = quantizer.strategy.bits
    assert 40 < sum(bits.values()) < 53 and quantizer.plan.nodes["0"].bound <= EXACT_FLOAT64
    assert not differs(model, hardware, data)
    with pytest.raises(InfeasibleBits, match=r"sums of node '0' \(linear\) may reach 2\*\*6\d.* fewer bits together"):
        hago.quantize(model, hardware, [data], fix_bits={"0:0": 32, "0:1": 32})
    strategy, _ = hago.search_quantize_strategy(model, hardware, [data], searcher="random", budget=20, progress=False)
    assert sum(strategy.bits.values()) < 53


@pytest.mark.parametrize("scale", [1e-30, 1e-10])
@pytest.mark.parametrize("chip", ["tflite_int16", "cmsis_nn_int16", "tflite", "x86_vnni"])
def test_biases_of_layers_with_tiny_weights_fit(chip: str, scale: float) -> None:
    model = nn.Sequential(nn.Linear(8, 4)).eval()
    with torch.no_grad():
        model[0].weight[1] *= scale
        model[0].bias.fill_(1.0)
    x = torch.randn(32, 8)
    quantizer = hago.quantize(model, chip, [x], corrections="none")
    assert quantizer.plan.nodes["0"].bound <= EXACT_FLOAT64
    assert not differs(model, hago.load_hardware(chip), x)
    # all engines compute what the network does: products with multipliers fit 64 bits
    assert float((quantizer.realize()(x) - model(x)).detach().abs().max()) < 0.05


def test_files_that_ask_for_more_bits_are_refused() -> None:
    with pytest.raises(HardwareError, match="max_bits: got 54; expected at most 53, since hago simulates integers"):
        wide_chip("int64", max_bits=54)
    assert wide_chip("int64", max_bits=53)


def test_limits_are_obeyed_by_any_hardware_in_python() -> None:
    desc: Any = wide_chip("int64").ops["concat"][0]
    assert desc.bits_of(desc.in_dtype(0))[-1] == 53
