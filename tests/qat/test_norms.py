"""Batch norms in training: without quantization they equal torch's, and frozen they equal the folded layer."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from networks import Small, randomized
from torch import Tensor, nn

from hago.emulation.tensorflow.layers import FoldedLayer
from hago.errors import HagoError
from hago.qat.model import QatModel
from hago.qat.prepare import from_qat, prepare_qat

STYLES = ("tensorflow", "oneflow")


class Net(nn.Module):
    """Convolutions of every kind with batch norms: grouped, without bias, transposed; and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.bn_a = nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4, momentum=0.3)
        self.b, self.bn_b = nn.Conv2d(4, 4, 3, groups=4, bias=False), nn.BatchNorm2d(4, eps=1e-3)
        self.c, self.bn_c = nn.ConvTranspose2d(4, 6, 2, stride=2, groups=2), nn.BatchNorm2d(6)
        self.d, self.bn_d = nn.Linear(6, 5), nn.BatchNorm1d(5)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.bn_a(self.a(x)))
        x = torch.relu(self.bn_b(self.b(x)))
        x = self.bn_c(self.c(x)).mean((2, 3))
        return self.bn_d(self.d(x))


def data(samples: int = 16, seed: int = 1) -> Tensor:
    return torch.randn(samples, 2, 6, 6, generator=torch.Generator().manual_seed(seed))


def prepared(style: str, **options: Any) -> tuple[nn.Module, QatModel]:
    model = randomized(Net())
    trained = prepare_qat(model, "x86_vnni", dataset=[data()], scheme="pytorch", norms=style, **options)
    return model, trained.train()


@pytest.mark.parametrize("style", STYLES)
def test_without_quantization_they_equal_torchs(style: str) -> None:
    """Outputs and moving statistics; in TensorFlow's style, whose statistics have a gradient, gradients too."""
    model, trained = prepared(style)
    trained.quantizing = False
    reference = copy.deepcopy(model).train()
    for step in range(2):
        x = data(seed=step)
        output, expected = trained(x), reference(x)
        if style == "tensorflow":
            assert torch.allclose(output, expected, atol=1e-4)
    output.square().mean().backward()
    expected.square().mean().backward()
    for name in ("a", "b", "c", "d") if style == "tensorflow" else ("a",):  # OneFlow's variance is unbiased
        norm, bn = trained.norms[name], getattr(reference, f"bn_{name}")
        assert torch.allclose(norm.mean, bn.running_mean, atol=1e-4)
        if style == "tensorflow":
            assert torch.allclose(norm.variance, bn.running_var, rtol=1e-3)
            assert torch.allclose(norm.weight.grad, getattr(reference, name).weight.grad, atol=1e-3)
            assert torch.allclose(norm.gamma.grad, bn.weight.grad, atol=1e-3)
            assert torch.allclose(norm.beta.grad, bn.bias.grad, atol=1e-3)


@pytest.mark.parametrize("style", STYLES)
def test_before_training_they_are_the_folded_layers(style: str) -> None:
    model, trained = prepared(style)
    frozen = prepare_qat(model, "x86_vnni", dataset=[data()], scheme="pytorch", norms="frozen")
    assert torch.equal(trained.eval()(data()), frozen.eval()(data()))
    assert from_qat(trained).strategy.model_hash == from_qat(frozen).strategy.model_hash


@pytest.mark.parametrize("style", STYLES)
def test_the_trained_model_is_the_shipped_one(style: str) -> None:
    _, trained = prepared(style)
    step = torch.optim.SGD(trained.parameters(), 0.05)
    for seed in range(3):
        trained(data(seed=seed)).square().mean().backward()
        step.step()
        step.zero_grad()
    x = data(seed=9)
    quantizer = from_qat(trained)
    output = trained.eval()(x)
    assert torch.equal(output, quantizer.simulate()(x)) and torch.equal(output, quantizer.realize()(x))
    trained.train().freeze_norms()
    trained.observe(False)
    before = trained.norms["a"].mean.clone()
    assert torch.equal(trained(x), output) and torch.equal(trained.norms["a"].mean, before)
    trained(x).sum().backward()
    assert trained.norms["a"].gamma.grad.abs().sum() > 0


@pytest.mark.parametrize("style", STYLES)
def test_at_8_bits_training_is_nearly_unquantized(style: str) -> None:
    _, trained = prepared(style)
    other = copy.deepcopy(trained)
    other.quantizing = False
    x = data(64, seed=3)
    output, expected = trained(x), other(x)
    assert (output - expected).square().mean() < 5e-3 * expected.square().mean()


def test_tensorflows_is_that_of_its_single_layer() -> None:
    """The weight that is quantized, and the output, as `FoldedLayer` has them: held against TensorFlow's vectors."""
    model, trained = prepared("tensorflow")
    layer = FoldedLayer(copy.deepcopy(model.a), copy.deepcopy(model.bn_a)).train()
    x = data(seed=4)
    expected = layer.trace(x)
    folded = trained.norms["a"].in_training(lambda w, b: nn.functional.conv2d(x, w, b, padding=1))
    assert torch.allclose(folded.weight, expected.mul_fold, atol=1e-6)
    assert folded.correction is not None and folded.shift is not None
    conv = nn.functional.conv2d(x, folded.weight, padding=1)
    output = conv * folded.correction.reshape(1, -1, 1, 1) + folded.shift.reshape(1, -1, 1, 1)
    assert torch.allclose(output, expected.add_fold, atol=1e-5)
    assert torch.allclose(trained.norms["a"].variance, layer.bn.running_var, rtol=1e-6)


def test_delays_count_training_passes_from_1() -> None:
    """quant_delay 2: the first pass is float, the second is not; freeze_bn_delay 3: the third moves no statistics."""
    _, trained = prepared("tensorflow", quant_delay=2, freeze_bn_delay=3)
    other = copy.deepcopy(trained)
    other.quantizing = False
    x, moved = data(seed=5), []
    same = []
    for _ in range(3):
        before = trained.norms["a"].mean.clone()
        same.append(torch.equal(trained(x), other(x)))
        moved.append(not torch.equal(before, trained.norms["a"].mean))
    assert same == [True, False, False] and moved == [True, True, False]
    trained.observe(False)
    assert torch.equal(trained(x), trained.eval()(x))


# ---------------------------------------------------------------- bad input
@pytest.mark.parametrize("style", STYLES)
def test_one_value_per_channel_is_refused(style: str) -> None:
    _, trained = prepared(style)
    with pytest.raises(HagoError, match="batch norm 'bn_d' got one value per channel in training"):
        trained(data(1))
    trained.freeze_norms()
    assert trained(data(1)).shape == (1, 5)


def test_a_cumulative_average_is_refused() -> None:
    model = randomized(Small())
    model.stem[1].momentum = None
    with pytest.raises(HagoError, match=r"batch norm 'stem.1' keeps a cumulative average"):
        prepare_qat(model, "x86_vnni", dataset=[torch.randn(4, 1, 8, 8)], scheme="tensorflow")


def test_an_unknown_style_is_refused() -> None:
    with pytest.raises(HagoError, match=r"norms is 'tensorflw'; .* Did you mean 'tensorflow'"):
        prepared("tensorflw")
