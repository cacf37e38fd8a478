"""Nodes that ONNX Runtime would fuse into kernels of other arithmetic are not fused in an exported file."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import hago
from hago.export.onnx.export import make_onnx
from hago.export.onnx.verification import OnnxCheck, PlaceCheck, check_onnx

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


class Averaged(nn.Module):
    """An average of windows that leave the input, between two quantized layers."""

    def __init__(self, dims: int, include: bool) -> None:
        super().__init__()
        conv, pool = (nn.Conv1d, nn.AvgPool1d) if dims == 1 else (nn.Conv2d, nn.AvgPool2d)
        self.first, self.last = conv(3, 8, 3), conv(8, 4, 1)
        self.pool = pool(3, 2, 1, ceil_mode=True, count_include_pad=include)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.pool(self.first(x)))
        return out


@pytest.mark.parametrize("form", ["qdq", "qoperator"])
@pytest.mark.parametrize("include", [True, False])
@pytest.mark.parametrize("dims", [1, 2])
def test_an_average_with_ceil_mode_between_quantized_tensors(dims: int, include: bool, form: str) -> None:
    """QLinearAveragePool divides by the whole window where that leaves the input."""
    torch.manual_seed(0)
    data = torch.randn(16, 3, *(12,) * dims)
    plan = hago.quantize(Averaged(dims, include).eval(), "onnxruntime_cpu", [data], corrections="none").plan
    checked = check_onnx(make_onnx(plan, form), plan, [(data,)])
    assert checked.same and not any(o.differing for o in checked.outputs) and checked.reasons == ()


def test_a_file_that_differs_as_a_whole_fails() -> None:
    """A check of nodes alone does not see what an engine fuses."""
    node = PlaceCheck("pool", "avg_pool2d", 100, 0, 0.0, integer=True)
    off = PlaceCheck("out", "avg_pool2d", 100, 3, 22.0, integer=True)
    check = OnnxCheck("onnxruntime", (node,), (off,))
    assert not check.tolerable and "3 of 100 of output out differ, by at most 22 quanta" in check.reasons[0]
    near = PlaceCheck("out", "avg_pool2d", 100, 3, 1.0, integer=True)
    real = PlaceCheck("softmax", "softmax", 100, 0, 0.0, integer=False)
    for passing in (OnnxCheck("onnxruntime", (node,), (near,)), OnnxCheck("onnxruntime", (node, real), (off,))):
        assert passing.tolerable and passing.reasons == ()
