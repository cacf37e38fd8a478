"""Nodes that ONNX Runtime would fuse into kernels of other arithmetic are not fused in an exported file."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import hago
from hago.export.onnx.export import make_onnx
from hago.export.onnx.verification import check_onnx

pytest.importorskip("onnxruntime")


class Chosen(nn.Module):
    """A softmax between two quantized layers, with a scale whose inverse is not an integer."""

    def __init__(self) -> None:
        super().__init__()
        self.scores, self.mixed = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.mixed(torch.softmax(2 * self.scores(x), -1))


@pytest.mark.parametrize("form", ["qdq", "qoperator"])
def test_a_softmax_between_quantized_tensors(form: str) -> None:
    """QLinearSoftmax multiplies by floor(1 / scale), by which 4 % of the following values would be off by one."""
    torch.manual_seed(3)
    data = torch.randn(2000, 8)
    plan = hago.quantize(Chosen().eval(), "onnxruntime_cpu", [data[:200]]).plan
    (target,) = (plan.nodes["mixed"].operands[0],)
    assert target is not None and float(1 / target.scale) % 1 > 0.01
    checked = check_onnx(make_onnx(plan, form), plan, [(data,)])
    assert checked.same and sum(o.differing for o in checked.outputs) <= 1
