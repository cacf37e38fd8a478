"""FoldedLayer equals the layer and its batch norm without quantization, and else quantizes the deployed weight."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hago.emulation.tensorflow.fake_quantize import FakeQuant, LastValueQuantize, MovingAvgQuantize, Schedule
from hago.emulation.tensorflow.layers import FoldedLayer
from hago.errors import HagoError

LAYERS: dict[str, tuple[Any, Any, tuple[int, ...]]] = {
    "conv1d": (lambda: nn.Conv1d(3, 4, 2), nn.BatchNorm1d, (2, 3, 5)),
    "conv2d": (lambda: nn.Conv2d(3, 4, 2, padding=1, bias=False), nn.BatchNorm2d, (2, 3, 4, 4)),
    "depthwise": (lambda: nn.Conv2d(2, 4, 2, groups=2), nn.BatchNorm2d, (2, 2, 4, 4)),
    "conv3d": (lambda: nn.Conv3d(2, 4, 2), nn.BatchNorm3d, (2, 2, 3, 3, 3)),
    "linear": (lambda: nn.Linear(3, 4), nn.BatchNorm1d, (6, 3)),
}


def layer_norm_and_input(name: str, *, affine: bool = True) -> tuple[Any, Any, Tensor]:
    """A float64 layer and its norm, both random, and an input."""
    make, norm, shape = LAYERS[name]
    g = torch.Generator().manual_seed(5)
    layer, bn = make().double(), norm(4, affine=affine, momentum=0.3, eps=1e-3).double()
    with torch.no_grad():
        for t in [*layer.parameters(), *bn.parameters()]:
            t.copy_(torch.rand(t.shape, generator=g, dtype=t.dtype) + 0.1)
        bn.running_mean.copy_(torch.rand(4, generator=g))
        bn.running_var.copy_(torch.rand(4, generator=g) + 0.5)
    return layer, bn, torch.randn(shape, generator=g, dtype=torch.float64)


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("name", LAYERS)
def test_unquantized_it_is_layer_then_norm(name: str, affine: bool) -> None:
    """Outputs, gradients, moving statistics, and eval."""
    layer, bn, x = layer_norm_and_input(name, affine=affine)
    folded = FoldedLayer(copy.deepcopy(layer), copy.deepcopy(bn), torch.relu)
    for _ in range(2):
        xs = [x.clone().requires_grad_() for _ in range(2)]
        ours, theirs = folded(xs[0]), torch.relu(bn(layer(xs[1])))
        weights = torch.linspace(-1, 2, ours.numel(), dtype=torch.float64).reshape(ours.shape)
        (ours * weights).sum().backward()
        (theirs * weights).sum().backward()
        assert torch.allclose(ours, theirs, atol=1e-10)
        assert torch.allclose(xs[0].grad, xs[1].grad, atol=1e-10)
    for ours_p, theirs_p in zip([*folded.layer.parameters()], [*layer.parameters()], strict=True):
        # a bias before a norm has no effect in training: its gradient is 0 up to rounding
        grad = torch.zeros_like(theirs_p) if ours_p.grad is None else ours_p.grad
        assert torch.allclose(grad, theirs_p.grad, atol=1e-9)
    for key, value in bn.state_dict().items():
        assert torch.allclose(folded.bn.state_dict()[key], value, atol=1e-10), key
    assert torch.allclose(folded.eval()(x), torch.relu(bn.eval()(layer(x))), atol=1e-10)


def test_gradients_by_finite_differences() -> None:
    layer, bn, x = layer_norm_and_input("conv2d")

    def output(x: Tensor, weight: Tensor, gamma: Tensor, beta: Tensor) -> Tensor:
        folded = FoldedLayer(copy.deepcopy(layer), copy.deepcopy(bn))
        for module, name, value in ((folded.layer, "weight", weight), (folded.bn, "weight", gamma)):
            del module._parameters[name]
            setattr(module, name, value)
        del folded.bn._parameters["bias"]
        folded.bn.bias = beta
        return folded.trace(x).add_fold

    leaves = [t.detach().clone().requires_grad_() for t in (x, layer.weight, bn.weight, bn.bias)]
    assert torch.autograd.gradcheck(output, leaves, fast_mode=True)


def quantized(schedule: Schedule | None = None, **more: Any) -> tuple[FoldedLayer, Tensor]:
    layer, bn, x = layer_norm_and_input("conv2d")
    return FoldedLayer(
        layer.float(),
        bn.float(),
        torch.relu,
        weight_quantizer=LastValueQuantize(FakeQuant(8, True, "1.15")),
        activation_quantizer=MovingAvgQuantize(),
        schedule=schedule,
        **more,
    ), x.float()


def test_quantized_weights_are_those_of_the_deployed_layer() -> None:
    """The quantized weight in training is folded with the moving sigma, and on the grid that eval uses."""
    folded, x = quantized()
    assert folded.bn.running_var is not None
    sigma = torch.sqrt(folded.bn.running_var + folded.bn.eps)
    run = folded.trace(x)
    expected = folded.layer.weight * (folded.bn.weight / sigma).reshape(-1, 1, 1, 1)
    assert torch.allclose(run.mul_fold, expected, atol=1e-6)
    step = (folded.weight_quantizer.maximum - folded.weight_quantizer.minimum) / 254  # type: ignore[union-attr]
    steps, exact = (run.weights_quant / step).detach(), (run.mul_fold / step).detach()
    assert float((steps - exact).abs().max()) <= 0.5001
    assert float((steps - steps.round()).abs().max()) < 1e-3


def test_schedule_of_delays_and_freezing() -> None:
    folded, x = quantized(Schedule(quant_delay=2, freeze_bn_delay=3))
    assert folded.bn.running_var is not None
    runs, variances = [], []
    for _ in range(4):
        runs.append(folded.trace(x))
        variances.append(folded.bn.running_var.clone())
    assert torch.equal(runs[0].weights_quant, runs[0].mul_fold)
    assert not torch.equal(runs[1].weights_quant, runs[1].mul_fold)
    assert not torch.equal(variances[0], variances[1]) and torch.equal(variances[1], variances[3])
    assert torch.equal(runs[2].conv_fold, runs[2].post_conv_mul)
    frozen, deployed = folded(x), folded.eval()(x)
    assert torch.allclose(frozen, deployed, atol=float(folded.activation_quantizer.maximum) / 200)  # type: ignore[union-attr]


def test_eval_may_wait_for_training() -> None:
    folded, x = quantized(eval_quant_delay=1)
    before = folded.eval().trace(x)
    assert torch.equal(before.weights_quant, before.mul_fold) and int(folded.step) == 0
    folded.train()(x)
    after = folded.eval().trace(x)
    assert not torch.equal(after.weights_quant, after.mul_fold) and int(folded.step) == 1


def test_state_round_trips() -> None:
    trained, x = quantized()
    fresh, _ = quantized()
    trained(x)
    fresh.load_state_dict(trained.state_dict())
    assert torch.equal(fresh.eval()(x), trained.eval()(x))


def test_unfused_norms_average_the_population_variance() -> None:
    fused, x = quantized()
    unfused, _ = quantized(fused=False)
    before = fused.bn.running_var.clone()  # type: ignore[union-attr]
    fused(x), unfused(x)
    gains = [m.bn.running_var - before * 0.7 for m in (fused, unfused)]  # type: ignore[operator]
    count = 2 * 5 * 5
    assert torch.allclose(gains[0] / gains[1], torch.full((4,), count / (count - 1)), rtol=1e-3)


def test_what_cannot_be_folded_is_refused() -> None:
    with pytest.raises(HagoError, match="expected Conv1d"):
        FoldedLayer(nn.Embedding(2, 2), nn.BatchNorm1d(2))  # type: ignore[arg-type]
    with pytest.raises(HagoError, match="5 channels after 4"):
        FoldedLayer(nn.Linear(3, 4), nn.BatchNorm1d(5))
    with pytest.raises(HagoError, match="running average"):
        FoldedLayer(nn.Linear(3, 4), nn.BatchNorm1d(4, momentum=None))
    with pytest.raises(HagoError, match="at least 2"):
        FoldedLayer(nn.Linear(3, 4), nn.BatchNorm1d(4))(torch.ones(1, 3))
