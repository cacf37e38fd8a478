"""Training nodes that compute in float with their weights as integers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from networks import Small, images, randomized
from plan.test_weight_only import INT4, INT8, MAC, REAL, chip

import hago
from hago.hardware.hardware import Hardware

DATA = [(images(8, 1, 8, 8),)]
WEIGHT_ONLY = chip(INT4)


def start(hardware: Hardware, keep_float: tuple[str, ...] = ()) -> tuple[torch.nn.Module, hago.Quantizer]:
    model = randomized(Small()).eval()
    options: dict[str, Any] = {"estimator": "max_range", "corrections": "none"}
    return model, hago.quantize(model, hardware, DATA, keep_float=keep_float, **options)


def trained(
    model: torch.nn.Module, hardware: Hardware, first: hago.Quantizer, scheme: str, norms: str | None
) -> object:
    qat_model = hago.prepare_qat(model, hardware, first.strategy, scheme=scheme, norms=norms, example_inputs=DATA[0])
    assert qat_model.eval()(*DATA[0]).equal(first.simulate()(*DATA[0]))
    qat_model.train()
    optimizer = torch.optim.SGD(qat_model.parameters(), lr=1e-3)
    goal = model(*DATA[0]).detach()
    for _ in range(2):
        optimizer.zero_grad()
        (qat_model(*DATA[0]) - goal).square().mean().backward()
        optimizer.step()
    assert all(
        p.grad is not None and bool(p.grad.abs().sum()) for n, p in qat_model.named_parameters() if "weight" in n
    )
    return qat_model.eval()


@pytest.mark.parametrize(
    ("scheme", "norms"),
    [
        ("lsq", None),
        ("hago", "tensorflow"),
        ("tensorflow", None),
        ("oneflow", None),
        ("pytorch", "frozen"),
        ("nudged", None),
    ],
)
def test_the_trained_model_is_the_shipped_one(scheme: str, norms: str | None) -> None:
    model, first = start(WEIGHT_ONLY)
    assert first.plan.weights and not first.plan.nodes
    qat_model = trained(model, WEIGHT_ONLY, first, scheme, norms)
    shipped = hago.from_qat(qat_model)
    outputs = [
        shipped.simulate()(*DATA[0]),
        shipped.realize()(*DATA[0]),
        shipped.realize(engine="reference")(*DATA[0]),
    ]
    assert all(o.equal(qat_model(*DATA[0])) for o in outputs)
    assert not outputs[0].equal(first.simulate()(*DATA[0]))


def test_a_layer_among_integer_ones() -> None:
    hardware = chip(MAC, REAL, INT4)
    model, first = start(hardware, ("fc:0",))
    assert [e.dst for e in first.plan.weights] == ["fc"] and first.plan.nodes
    qat_model = trained(model, hardware, first, "lsq", None)
    assert hago.from_qat(qat_model).realize()(*DATA[0]).equal(qat_model(*DATA[0]))


def test_fine_tuning_recovers_four_bits() -> None:
    hardware, data = chip(INT4, INT8), [(images(48, 1, 8, 8),)]
    model = randomized(Small()).eval()
    fixed = hago.quantize(model, hardware, data, fix_bits={"*:1": 4}, estimator="max_range", corrections="none")
    tuned = hago.finetune(model, hardware, fixed.strategy, data, steps=30, batch_size=16, progress=False)
    assert tuned.kept and tuned.after["sqnr"] > tuned.before["sqnr"] + 1
    assert {w.qparams.dtype.name for w in tuned.quantizer.plan.weights.values()} == {"int4"}
