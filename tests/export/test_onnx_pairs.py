"""ONNX Runtime on CPUs that saturate pairs of products: files are checked exactly, and the report advises what to do.

On a CPU that does not saturate them, the tests check the report, and that its advice does no harm.
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
    """A model in which sums of two neighbouring products are as large as possible."""
    model = nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.ReLU(), nn.Conv2d(8, 4, 3, bias=False)).eval()
    with torch.no_grad():
        for part in model:
            if isinstance(part, nn.Conv2d):
                part.weight.copy_(
                    torch.where(torch.arange(part.weight.numel()).reshape(part.weight.shape) % 7 > 0, 1, -1)
                )
    return model


def saturating(monkeypatch: pytest.MonkeyPatch) -> bool:
    """Pretend that this CPU saturates pairs, and return whether it really does."""
    saturates = bool(onnx_check.saturates_pairs())
    for module in ("hago.export.onnx.verification", "hago.analysis.comparison"):
        monkeypatch.setattr(f"{module}.saturates_pairs", lambda: True)
    return saturates


def test_the_check_explains_the_differences_and_gives_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    saturates = saturating(monkeypatch)
    plan = hago.quantize(large_weights(), "onnxruntime_cpu", DATA).plan
    result = check_onnx(make_onnx(plan), plan, [DATA])
    assert result.same and result.by_default is not None
    assert any(p.differing for p in result.by_default) == saturates
    assert ("session.x64quantprecision=1" in str(result) and "fix_bits" in str(result)) == saturates
    assert len(result.to_json()["by_default"]) == 1
    # the advice: the option, with which the check found no difference, and narrower weights
    plan = hago.quantize(large_weights(), "onnxruntime_cpu", DATA, fix_bits={"*.weight": 7}).plan
    result = check_onnx(make_onnx(plan), plan, [DATA])
    assert result.by_default is not None and not any(p.differing for p in result.by_default)


def test_no_explanation_on_a_cpu_that_does_not_saturate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hago.export.onnx.verification.saturates_pairs", lambda: False)
    plan = hago.quantize(large_weights(), "onnxruntime_cpu", DATA).plan
    result = check_onnx(make_onnx(plan), plan, [DATA])
    assert result.by_default is None and "x64quantprecision" not in str(result)


def test_a_comparison_has_the_explanation_as_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    saturating(monkeypatch)
    plan = hago.quantize(large_weights(), "onnxruntime_cpu", DATA).plan
    batches = Batches(DATA, plan.graph.inputs)
    result = compare_plan(plan, batches, ["onnxruntime"])
    assert "saturate at 16 bits" in str(result) and result.to_json()["notes"]
    assert not compare_plan(plan, batches, ["fast"]).notes
