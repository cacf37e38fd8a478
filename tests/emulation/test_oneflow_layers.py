"""OneFlow's layers: their integers after freezing, with and without the defects of the demo."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from hago.emulation.oneflow import Frozen, QatConv1d, QatConv2d, QatConv3d, QConvBN, QLayer, Quantizer, Range
from hago.errors import HagoError


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def seeded(module: nn.Module) -> nn.Module:
    g = generator(7)
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(torch.rand(p.shape, generator=g) - 0.5)
    return module


def integer_output(layer: QLayer, frozen: Frozen, x: Tensor, qi: Range, qo: Range) -> Tensor:
    """Run the frozen layer in integers, and dequantize its output."""
    quantizer = qi.quantizer
    q = quantizer.quantize(x, qi.scale, qi.zero_point) - quantizer.zero_point_used(qi.zero_point)
    copy = seeded(nn.Conv2d(3, 4, 3, padding=1)) if isinstance(layer.layer, nn.Conv2d) else seeded(nn.Linear(6, 4))
    with torch.no_grad():
        copy.weight.copy_(frozen.weight)
        copy.bias.copy_(frozen.bias)
        acc = copy(q)
    m = frozen.multiplier if acc.ndim == 2 else frozen.multiplier.reshape(1, -1, 1, 1)
    zero = quantizer.zero_point_used(qo.zero_point)
    top = 2.0 ** (quantizer.bits - 1) - 1 if quantizer.symmetric else 2.0**quantizer.bits - 1
    out = (torch.round(acc * m) + zero).clamp(-top - 1 if quantizer.symmetric else 0.0, top)
    return (out - zero) * qo.step


CASES = [
    Quantizer(),
    Quantizer(per_layer=False),
    Quantizer(scheme="affine"),
    Quantizer(scheme="affine", per_layer=False),
    Quantizer("cambricon"),
    Quantizer(bits=6),
]


@pytest.mark.parametrize("quantizer", CASES, ids=str)
@pytest.mark.parametrize("kind", ["conv", "linear", "conv_bn"])
def test_frozen_integers_give_the_trained_output(kind: str, quantizer: Quantizer) -> None:
    plain = seeded(nn.Linear(6, 4)) if kind == "linear" else seeded(nn.Conv2d(3, 4, 3, padding=1))
    x = torch.randn((5, 6) if kind == "linear" else (5, 3, 6, 6), generator=generator())
    if kind == "conv_bn":
        layer: QLayer = QConvBN(plain, seeded(nn.BatchNorm2d(4)), quantizer)
        layer(x)
        layer.eval()
    else:
        layer = QLayer(plain, quantizer)
    y = layer(x)
    frozen = layer.freeze()
    assert layer.qi is not None and layer.qo is not None
    difference = (integer_output(layer, frozen, x, layer.qi, layer.qo) - y.detach()).abs() / layer.qo.step
    # only the bias is rounded again, so that an output may change by one quantum at a tie
    assert float(difference.max()) <= 1.001
    assert float((difference > 0.5).float().mean()) < 0.02
    assert torch.equal(frozen.weight, frozen.weight.round())


def test_negative_biases_are_kept_unless_upstream() -> None:
    layer = QLayer(seeded(nn.Conv2d(3, 4, 3)))
    layer(torch.randn(1, 3, 5, 5, generator=generator()))
    corrected, upstream = layer.freeze(), layer.freeze(upstream=True)
    assert corrected.bias is not None and upstream.bias is not None
    assert bool((corrected.bias < 0).any())
    assert torch.equal(upstream.bias, corrected.bias.clamp_min(0))
    assert torch.equal(upstream.weight, corrected.weight) and torch.allclose(upstream.multiplier, corrected.multiplier)


def test_upstream_folds_with_the_variance_itself() -> None:
    bn = nn.BatchNorm2d(4)
    bn.running_var.fill_(4.0)
    layer = QConvBN(seeded(nn.Conv2d(3, 4, 3)), bn)
    layer.eval()(torch.randn(1, 3, 5, 5, generator=generator()))
    root, variance = (layer._weight_and_bias_to_freeze(upstream=u)[0] for u in (False, True))
    assert torch.allclose(variance * 2, root)


@pytest.mark.parametrize("bad", [QLayer(nn.Linear(2, 2)), QLayer(nn.Conv2d(1, 1, 1), Quantizer(per_layer=False))])
def test_upstream_refuses_layers_that_the_demo_cannot_freeze(bad: QLayer) -> None:
    with pytest.raises(HagoError, match="the demo cannot freeze"):
        bad.freeze(upstream=True)


def test_ranges_come_from_the_layer_or_from_its_neighbour() -> None:
    observing = QLayer(nn.Linear(2, 2))
    unobserved = QLayer(nn.Linear(2, 2), quantize_input=False, quantize_output=False)
    given = Range(Quantizer())
    with pytest.raises(HagoError, match="qi is given"):
        observing.freeze(qi=given)
    with pytest.raises(HagoError, match="qo is missing"):
        unobserved.freeze(qi=given)
    x = torch.ones(3, 2)
    given.update(x)
    unobserved(x)
    frozen = unobserved.freeze(given, given)
    assert torch.allclose(frozen.multiplier, unobserved.qw.scale)


@pytest.mark.parametrize(("kind", "rank"), [(QatConv1d, 1), (QatConv2d, 2), (QatConv3d, 3)])
def test_qat_conv_quantizes_and_trains(kind, rank: int) -> None:
    conv = kind(2, 3, 2, stride=2, padding=1, quantizer=Quantizer(bits=4, per_layer=False))
    x = torch.randn(2, 2, *[5] * rank, generator=generator(), requires_grad=True)
    y = conv(x)
    plain = nn.Module.__getattribute__(conv, "_conv_forward")(x, conv.weight, conv.bias)
    assert y.shape == plain.shape and not torch.equal(y, plain)
    y.sum().backward()
    assert conv.weight.grad is not None and x.grad is not None and bool((conv.weight.grad != 0).any())


def test_a_counter_past_one_freezes_the_input_range() -> None:
    conv = QatConv2d(1, 1, 1)
    x = torch.ones(1, 1, 2, 2)
    conv(x)
    conv.current_train_step.fill_(2)
    conv(x * 9)
    assert conv.input_observer.moving_max.tolist() == [1.0]
    fresh = QatConv2d(1, 1, 1)
    fresh.load_state_dict(conv.state_dict())
    assert fresh.input_observer.moving_max.tolist() == [1.0] and fresh.current_train_step.tolist() == [2]


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("inverted", [True, False])
def test_conv_bn_without_rounding_is_conv_then_norm(affine: bool, inverted: bool) -> None:
    """At 24 bits the quantization vanishes: outputs and statistics are those of torch."""
    conv, bn = seeded(nn.Conv2d(3, 4, 3)), nn.BatchNorm2d(4, affine=affine, momentum=0.3)
    reference = nn.BatchNorm2d(4, affine=affine, momentum=0.7 if inverted else 0.3)
    x = torch.randn(4, 3, 6, 6, generator=generator())
    layer = QConvBN(conv, bn, Quantizer(bits=24), inverted_momentum=inverted)
    y, plain = layer(x), conv(x)
    scale = torch.sqrt((plain.var((0, 2, 3), correction=0) + 1e-5) / (plain.var((0, 2, 3)) + 1e-5))
    assert torch.allclose(y, reference(plain) * scale.reshape(1, -1, 1, 1), atol=1e-4)
    assert torch.allclose(bn.running_mean, reference.running_mean, atol=1e-5)
    assert torch.allclose(bn.running_var, reference.running_var, atol=1e-4)
    assert torch.allclose(layer.eval()(x), reference.eval()(plain), atol=1e-4)


def test_layers_that_cannot_be_folded_are_refused() -> None:
    with pytest.raises(HagoError, match="ConvTranspose2d; expected Conv1d"):
        QLayer(nn.ConvTranspose2d(1, 1, 1))  # type: ignore[arg-type]
    with pytest.raises(HagoError, match="running average"):
        QConvBN(nn.Conv2d(1, 1, 1), nn.BatchNorm2d(1, track_running_stats=False))
    with pytest.raises(HagoError, match="one value per channel"):
        QConvBN(nn.Conv2d(1, 1, 1), nn.BatchNorm2d(1))(torch.ones(1, 1, 1, 1))
