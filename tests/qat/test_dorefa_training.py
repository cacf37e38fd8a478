"""DoReFa-Net's quantizers in training: the integers that are shipped are its levels."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from chips import CHIPS
from torch import Tensor, nn

from hago.emulation.dorefa import DOREFAS, DoReFa, quantize_weight
from hago.errors import HagoError
from hago.graph.frontend import from_torch
from hago.graph.graph import Graph
from hago.hardware.file import load_hardware
from hago.hardware.hardware import TensorScheme
from hago.plan.dorefa_weights import DoReFaLevels
from hago.qat.model import QatModel
from hago.qat.prepare import from_qat, prepare_qat
from hago.qat.scheme import TRAINING_SCHEMES

HARDWARE = {
    "x86_vnni": load_hardware("x86_vnni"),
    "symmetric": CHIPS["symmetric"].hardware(),
    "unsigned": CHIPS["unsigned_symmetric"].hardware(),
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = nn.Conv2d(2, 4, 3), nn.Conv2d(4, 4, 3), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.b(torch.relu(self.a(x))))
        return self.c(x.mean((2, 3)))


def data() -> Tensor:
    return torch.rand(16, 2, 8, 8, generator=torch.Generator().manual_seed(1))


@functools.cache
def net() -> Graph:
    return from_torch(Net().eval(), (data(),))


def prepared(hardware: str, bits: int, **options: object) -> QatModel:
    fixed = {f"{n}:1": bits for n in "abc"}
    scheme = replace(TRAINING_SCHEMES["dorefa"], dorefa=DoReFa(**options))  # type: ignore[arg-type]
    chip = HARDWARE[hardware]
    low = {op: tuple(replace(d, min_bits=2) if d.is_integer else d for d in descs) for op, descs in chip.ops.items()}
    return prepare_qat(net(), replace(chip, ops=low), dataset=[data()], scheme=scheme, fix_bits=fixed).train()


@pytest.mark.parametrize("variant", ["tensorpack", "zzzxxxttt"])
@pytest.mark.parametrize("hardware", sorted(HARDWARE))
@pytest.mark.parametrize("bits", [2, 3, 5, 8])
def test_the_integers_shipped_are_dorefas_levels(hardware: str, bits: int, variant: str) -> None:
    """Odd numbers up to 2**k - 1 that stand for `quantize_weight`, after training too."""
    trained = prepared(hardware, bits, variant=variant)
    for _ in range(2):
        trained(data()).square().mean().backward()
        torch.optim.SGD(trained.parameters(), 0.05).step()
        trained.zero_grad()
    output = trained(data())
    quantizer = from_qat(trained)
    assert torch.equal(output, trained.eval()(data()))
    assert torch.equal(output, quantizer.simulate()(data())) and torch.equal(output, quantizer.realize()(data()))
    k = bits - 1
    for name in "abc":
        plan = quantizer.plan.nodes[name]
        integers, qparams = plan.consts[1], plan.operands[1]
        assert qparams is not None
        expected = quantize_weight(trained.weights.get_parameter(f"{name}/weight").detach(), k, variant)
        assert integers.abs().max() <= (1 << k) - 1 and bool((integers % 2 == 1).all())
        assert torch.allclose(integers * qparams.scale, expected.double(), rtol=1e-6)


def test_activations_are_clipped_to_one() -> None:
    trained = prepared("unsigned", 5)
    plan = from_qat(trained).plan
    for edge in ("b:0", "c:0"):
        operand = plan.nodes[edge[0]].operands[0]
        assert operand is not None and operand.qmin == 0
        assert float(operand.qmax * operand.scale) == pytest.approx(1.0)


def test_gradients_of_few_bits_are_noisy_and_unbiased() -> None:
    exact, noisy = prepared("x86_vnni", 5), prepared("x86_vnni", 5, gradient_bits=3)
    (expected,) = _gradients(exact, 1)
    output = torch.stack(_gradients(noisy, 200))
    assert not torch.equal(output[0], output[1])
    error = (output.mean(0) - expected).abs().max()
    assert error < 0.25 * (output - expected).abs().amax() and error < 0.2 * expected.abs().max()


def _gradients(trained: QatModel, count: int) -> list[Tensor]:
    output = []
    for _ in range(count):
        trained.zero_grad()
        trained(data()).square().sum().backward()
        grad = trained.weights.get_parameter("c/weight").grad
        assert grad is not None
        output.append(grad.clone())
    return output


# ---------------------------------------------------------------- live batch norms
class Normed(nn.Module):
    """As DoReFa-Net: the batch norm sees the quantized layer's output."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.bn_a = nn.Conv2d(2, 4, 3, bias=False), nn.BatchNorm2d(4)
        self.b, self.bn_b = nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4)
        nn.init.uniform_(self.bn_a.weight, -1, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.bn_b(self.b(torch.relu(self.bn_a(self.a(x)))))


def normed(bits: int, scheme: str = "dorefa", chip: str = "x86_vnni") -> tuple[Normed, QatModel]:
    model = Normed().train()
    for rate in (1.0, 1.0, 0.1):  # moving statistics are the data's, as of a network that was trained
        model.bn_a.momentum = model.bn_b.momentum = rate
        with torch.no_grad():
            model(data())
    model.eval()
    trained = prepare_qat(
        model, HARDWARE[chip], dataset=[data()], scheme=scheme, norms="tensorflow", fix_bits={"?:1": bits}
    )
    return model, trained.train()


@pytest.mark.parametrize("scheme", ["dorefa", "dorefa_relative"])
@pytest.mark.parametrize("bits", [4, 5, 8])
def test_live_batch_norms_see_the_quantized_layer(bits: int, scheme: str) -> None:
    """Forward and gradient are those of the paper's network; what ships are the levels, whatever gamma's sign."""
    model, trained = normed(bits, scheme)
    reference = copy.deepcopy(model).train()

    def paper(x: Tensor) -> Tensor:
        for index, (conv, norm) in enumerate(((reference.a, reference.bn_a), (reference.b, reference.bn_b))):
            levels = DoReFaLevels.of(DOREFAS[scheme], "w", conv.weight.detach())
            x = norm(conv._conv_forward(x, levels.quantized(conv.weight, bits - 1), conv.bias))
            x = torch.relu(x) if index == 0 and scheme != "dorefa" else x.clamp(0, 1) if index == 0 else x
        return x

    output, expected = trained(data()), paper(data())
    assert (output - expected).square().mean() < 2e-3 * expected.square().mean()  # activations of 8 bits
    output.square().mean().backward()
    expected.square().mean().backward()
    for name in "ab":
        ours = trained.norms[name].weight.grad.flatten()
        assert torch.cosine_similarity(ours, getattr(reference, name).weight.grad.flatten(), 0) > 0.9
    torch.optim.SGD(trained.parameters(), 0.05).step()
    trained(data())
    quantizer = from_qat(trained)
    assert torch.equal(trained.eval()(data()), quantizer.realize()(data()))
    for name in "ab":
        integers, weight = quantizer.plan.nodes[name].consts[1], trained.norms[name].weight.detach()
        assert bool((integers % 2 == 1).all()) and int(integers.abs().max()) <= 2 ** (bits - 1) - 1
        sign = trained.norms[name].gamma.detach().sign().reshape(-1, 1, 1, 1)
        levels = DoReFaLevels.of(DOREFAS[scheme], "w", getattr(model, name).weight.detach())
        expected = levels.quantized(weight, bits - 1) / levels.step(weight, bits - 1) * sign
        assert torch.equal(integers.double(), expected.round().double())
    trained.train().freeze_norms()
    trained.observe(False)
    assert torch.equal(trained(data()), trained.eval()(data()))
    trained.quantizing = False
    assert not torch.equal(trained(data()), quantizer.realize()(data()))


def test_the_whole_gradient_of_a_layer_under_a_live_batch_norm_is_quantized(monkeypatch: pytest.MonkeyPatch) -> None:
    """With what comes through the statistics of the batch: the gradient of a normalized value sums to 0."""
    seen: list[Tensor] = []

    def gradients(self: DoReFa, step: int) -> Callable[[Tensor], Tensor]:
        def spy(x: Tensor) -> Tensor:
            y = x * 1
            y.register_hook(seen.append)
            return y

        return spy

    monkeypatch.setattr(DoReFa, "gradients", gradients)
    _, trained = normed(5)
    trained(data()).sin().sum().backward()
    assert len(seen) == 2
    for gradient in seen:
        assert bool((gradient.sum((0, 2, 3)).abs() < 1e-4 * gradient.abs().sum((0, 2, 3))).all())


def test_a_gradient_of_many_bits_under_live_batch_norms_is_the_exact_one() -> None:
    (_, exact), (_, rounded) = normed(5), normed(5)
    rounded.dorefa = DoReFa(gradient_bits=24)
    outputs = [trained(data()) for trained in (exact, rounded)]
    assert torch.equal(*outputs)
    for output in outputs:
        output.sin().sum().backward()
    expected = dict(exact.named_parameters())
    for name, parameter in rounded.named_parameters():
        if expected[name].grad is not None:
            assert torch.allclose(parameter.grad, expected[name].grad, rtol=1e-3, atol=1e-3), name


def test_live_batch_norms_need_a_scale_per_channel() -> None:
    chip = HARDWARE["symmetric"]
    HARDWARE["one scale"] = replace(chip, weight=replace(chip.weight, granularity="per_tensor"))
    with pytest.raises(HagoError, match=r"one scale for all channels .* the batch norm 'bn_a'; use norms='frozen'"):
        normed(5, chip="one scale")


# ---------------------------------------------------------------- bad input
def test_weights_of_zeros_are_refused_by_name() -> None:
    trained = prepared("x86_vnni", 5)
    with torch.no_grad():
        trained.weights.get_parameter("b/weight").zero_()
    with pytest.raises(HagoError, match=r"weight 'b.weight' is all 0, .* keep its layer float"):
        trained(data())
    kept = prepared("x86_vnni", 5, zeros="zero")
    with torch.no_grad():
        kept.weights.get_parameter("b/weight").zero_()
    assert kept(data()).isfinite().all()


@pytest.mark.parametrize("scheme, granularity", [("affine", "per_tensor")])
def test_hardware_that_cannot_hold_the_grid_is_refused(scheme: str, granularity: str) -> None:
    model = Net().eval()
    with pytest.raises(HagoError, match=r"vta cannot hold DoReFa's weights"):
        prepare_qat(model, "vta", dataset=[data()], scheme="dorefa")
    chip = replace(HARDWARE["symmetric"], weight=TensorScheme(scheme, granularity))  # type: ignore[arg-type]
    with pytest.raises(HagoError, match=r"cannot hold DoReFa's weights"):
        prepare_qat(model, chip, dataset=[data()], scheme="dorefa")
