"""Integers and their simulation are the same where the caller has torch's automatic casts on."""

from __future__ import annotations

import pytest
import torch
from building import seeded
from torch import nn

import hago
from hago.hardware import available_hardware

DATA = [seeded(12, 3, 8, 8)]


def network() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.ConvTranspose2d(8, 6, 2, stride=2), nn.LayerNorm(16)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(6 * 16 * 16, 5)).eval()


@pytest.mark.parametrize("name", available_hardware())
def test_outputs_are_the_same(name: str) -> None:
    quantizer, x = hago.quantize(network(), name, DATA, corrections="none"), seeded(5, 3, 8, 8, seed=1)
    models = [quantizer.simulate(), quantizer.realize("reference"), quantizer.realize()]
    expected = models[0](x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for model in models:
            assert model(x).equal(expected)


def test_a_network_is_imported_and_calibrated_in_float32() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = hago.quantize(network(), "x86_vnni", DATA, corrections="none")
        scores = hago.evaluate_strategy(network(), "x86_vnni", cast.strategy, DATA).results
    plain = hago.quantize(network(), "x86_vnni", DATA, corrections="none")
    assert cast.plan.key == plain.plan.key
    assert scores == hago.evaluate_strategy(network(), "x86_vnni", plain.strategy, DATA).results
