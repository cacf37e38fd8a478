"""One-shot quantization takes the widest bits that do not overflow, wherever these are chosen."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from building import seeded
from torch import nn

import hago
from hago.errors import InfeasibleBits
from hago.search import safe_bits


def test_bits_further_up_are_lowered_where_an_operand_has_none_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a chip that requantizes outputs, a layer behind a pooling reads the integers of the layer before it."""
    hago.save_hardware(hago.load_hardware("cmsis_nn"), tmp_path / "narrow.json")
    document = json.loads((tmp_path / "narrow.json").read_text("utf-8"))
    document["name"] = "narrow"
    products = document["signatures"][document["ops"]["linear"][0]]
    products |= {"in": ["int8", "int8", "int16"], "accumulator": {"dtype": "int16", "overflow": "wrap"}}
    (tmp_path / "narrow.json").write_text(json.dumps(document), "utf-8")
    model = nn.Sequential(nn.Conv2d(3, 24, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(3), nn.Flatten(), nn.Linear(216, 5))
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.copy_(seeded(*parameter.shape, seed=number))
        model[0].bias.fill_(8.0)  # so that all values are near the largest
        model[4].weight.abs_()
    data = [seeded(16, 3, 8, 8)]
    quantizer = hago.quantize(model.eval(), tmp_path / "narrow.json", data)
    assert not hago.evaluate_strategy(model, tmp_path / "narrow.json", quantizer.strategy, data).overflows
    widest = safe_bits.widest_safe_bits
    monkeypatch.setattr(safe_bits, "widest_safe_bits", lambda *how, **_: widest(*how[:3]))
    with pytest.raises(InfeasibleBits, match="overflows its accumulator"):
        hago.quantize(model, tmp_path / "narrow.json", data)


def test_a_strategy_is_loaded_whatever_patterns_its_bits_came_of(tmp_path: Path) -> None:
    """Files sort the patterns, and earlier versions took the first that matched."""
    model, data = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()).eval(), [seeded(4, 3, 8, 8)]
    quantizer = hago.quantize(model, "x86_vnni", data, fix_bits={"*:1": 4})
    patterns = {**quantizer.strategy.made_by, "fix_bits": {"*:1": 4, "0:1": 8}}
    replace(quantizer.strategy, made_by=patterns).save(tmp_path / "earlier.json")
    again = hago.create_quantizer(model, "x86_vnni", tmp_path / "earlier.json")
    assert again.plan.key == quantizer.plan.key and again.strategy.bits["0:1"] == 4
