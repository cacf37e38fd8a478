"""ONNX Runtime on CPUs that saturate pairs of products: files are checked exactly, and what helps is said.

Where this CPU does not saturate them, what is said is tested, and that the advice does no harm.
"""

from __future__ import annotations

import pytest
import torch
from networks import images
from torch import nn

import hago
from hago.analysis.comparison import compare_plan
from hago.data.batches import Batches
from hago.export.onnx.export import make_onnx
from hago.export.onnx.verification import check_onnx

onnx_check = pytest.importorskip("hago.export.onnx.verification")
pytest.importorskip("onnxruntime")
DATA = [images(8, 3, 6, 6)]


def large_weights() -> nn.Module:
    """Whose products of neighbours are as large as bytes allow."""
    model = nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.ReLU(), nn.Conv2d(8, 4, 3, bias=False)).eval()
    with torch.no_grad():
        for part in model:
            if isinstance(part, nn.Conv2d):
                part.weight.copy_(
                    torch.where(torch.arange(part.weight.numel()).reshape(part.weight.shape) % 7 > 0, 1, -1)
                )
    return model


def saturating(monkeypatch: pytest.MonkeyPatch) -> bool:
    """As if this CPU saturated pairs; whether it does."""
    really = bool(onnx_check.saturates_pairs())
    for module in ("hago.export.onnx.verification", "hago.analysis.comparison"):
        monkeypatch.setattr(f"{module}.saturates_pairs", lambda: True)
    return really


def test_the_check_says_why_and_what_helps(monkeypatch: pytest.MonkeyPatch) -> None:
    really = saturating(monkeypatch)
    plan = hago.quantize(large_weights(), "onnxruntime_cpu", DATA).plan
    found = check_onnx(make_onnx(plan), plan, [DATA])
    assert found.same and found.by_default is not None
    assert any(p.differing for p in found.by_default) == really
    assert "session.x64quantprecision=1" in str(found) and "fix_bits" in str(found)
    assert len(found.to_json()["by_default"]) == 1
    # what it advises: the option was set for the check, which found no difference; and narrow weights
    plan = hago.quantize(large_weights(), "onnxruntime_cpu", DATA, fix_bits={"*:1": 7}).plan
    found = check_onnx(make_onnx(plan), plan, [DATA])
    assert found.by_default is not None and not any(p.differing for p in found.by_default)


def test_nothing_is_said_where_nothing_saturates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hago.export.onnx.verification.saturates_pairs", lambda: False)
    plan = hago.quantize(large_weights(), "onnxruntime_cpu", DATA).plan
    found = check_onnx(make_onnx(plan), plan, [DATA])
    assert found.by_default is None and "x64quantprecision" not in str(found)


def test_a_comparison_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    saturating(monkeypatch)
    plan = hago.quantize(large_weights(), "onnxruntime_cpu", DATA).plan
    batches = Batches(DATA, plan.graph.inputs)
    found = compare_plan(plan, batches, ["onnxruntime"])
    assert "saturate at 16 bits" in str(found) and found.to_json()["notes"]
    assert not compare_plan(plan, batches, ["fast"]).notes
