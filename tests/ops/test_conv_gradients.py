"""Gradients of convolutions' weights are right in every layout: oneDNN has a fault on AVX2 (its issue 6035)."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F

from hago.emulation._layers import run_layer
from hago.ops import OPS


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize(
    ("kernel", "stride", "padding", "groups"), list(itertools.product([1, 3], [1, 2, 3], [0, 1, "same"], [1, 4]))
)
def test_gradients_of_weights(kernel: int, stride: int, padding: int | str, groups: int, last: bool) -> None:
    if padding == "same" and stride > 1:
        return  # torch refuses it
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(32, 4, 32, 32, generator=generator)
    w = torch.randn(8, 4 // groups, kernel, kernel, generator=generator)
    pads = padding if isinstance(padding, str) else [padding, padding]
    attrs = {"stride": [stride, stride], "padding": pads, "dilation": [1, 1], "groups": groups}
    exact = w.to(torch.float64).requires_grad_()
    expected = F.conv2d(x.to(torch.float64), exact, None, stride, padding, 1, groups)
    if last:
        x, w = (t.contiguous(memory_format=torch.channels_last) for t in (x, w))
    w.requires_grad_()
    found = OPS["conv2d"].compute(attrs, x, w)
    pull = torch.randn(expected.shape, generator=generator)
    found.backward(pull.contiguous(memory_format=torch.channels_last) if last else pull)
    expected.backward(pull.to(torch.float64))
    torch.testing.assert_close(found, expected.to(torch.float32), rtol=1e-4, atol=1e-4)
    assert w.grad is not None and exact.grad is not None
    error = (w.grad - exact.grad).abs().max() / exact.grad.abs().max()
    assert float(error) < 1e-4


@pytest.mark.parametrize("stride", [1, 2])
def test_layers_of_users(stride: int) -> None:
    layer = torch.nn.Conv2d(4, 8, 1, stride)
    layer = layer.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    x = torch.randn(32, 4, 16, 16, generator=torch.Generator().manual_seed(0)).contiguous(
        memory_format=torch.channels_last
    )
    found = run_layer(layer, x, layer.weight, layer.bias)
    expected = torch.einsum("nihw,oi->nohw", x[..., ::stride, ::stride], layer.weight[:, :, 0, 0])
    torch.testing.assert_close(found, expected + layer.bias[:, None, None], rtol=1e-4, atol=1e-4)  # type: ignore[index]
    (gradient,) = torch.autograd.grad(found.square().sum(), layer.weight)
    (exact,) = torch.autograd.grad((expected + layer.bias[:, None, None]).square().sum(), layer.weight)  # type: ignore[index]
    torch.testing.assert_close(gradient, exact, rtol=1e-3, atol=1e-3 * float(exact.abs().max()))
