"""The quantizers against a second implementation of their documented formulas, value by value in numpy's float32.

The tests cover bits, ranges, shapes, axes and steps that the conformance vectors do not. Values include ties, and range
ends that are not powers of two, so that the order of operations matters.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from hago.emulation.dorefa import quantize_activation, quantize_gradient, quantize_weight, stochastic_gradient
from hago.emulation.oneflow import MovingAverageMinMaxObserver, Quantizer
from hago.emulation.tensorflow.fake_quantize import FakeQuant, LastValueQuantize, MovingAvgQuantize, Schedule
from hago.emulation.tensorflow.layers import FoldedLayer

F = np.float32
FLOATS = st.floats(-40, 40, width=32)
SEEDS = st.integers(0, 10_000)


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def away(v: float) -> float:
    """The nearest integer, ties away from zero."""
    return math.copysign(math.floor(abs(v) + 0.5), v)


# ---------------------------------------------------------------- OneFlow
@given(SEEDS, st.integers(2, 8), st.sampled_from(["symmetric", "affine"]), st.sampled_from([(3, 4), (2, 3, 2, 2)]))
def test_oneflow_per_channel(seed: int, bits: int, scheme, shape: tuple[int, ...]) -> None:
    x = drawn(seed, *shape) + 0.25
    options = Quantizer(bits=bits, scheme=scheme, per_layer=False)
    scale, zero = options.observe(x)
    y = options.fake_quantize(x, scale, zero)
    top = F(2 ** (bits - 1) - 1) if scheme == "symmetric" else F(2**bits - 1)
    for row, got, s, z in zip(x.numpy(), y.numpy(), scale.numpy(), zero.numpy(), strict=True):
        low, high = row.min(), row.max()
        if scheme == "symmetric":
            assert (s, z) == (max(abs(low), abs(high)) / top, 0)
            expected = [F(np.clip(np.rint(v / s), -top - 1, top) * s) for v in row.flat]
        else:
            assert s == F(high - low) / top and z == -np.rint(F(low / s))
            expected = [F((np.clip(np.rint(F(F(v / s) + z)), 0, top) - z) * s) for v in row.flat]
        assert got.flatten().tolist() == expected


@given(st.lists(st.lists(FLOATS, min_size=1, max_size=5), min_size=1, max_size=6), st.sampled_from([0.5, 0.9, 0.95]))
def test_oneflow_moving_average(batches: list[list[float]], momentum: float) -> None:
    symmetric = MovingAverageMinMaxObserver(Quantizer(bits=4), 3, momentum)
    affine = MovingAverageMinMaxObserver(Quantizer(bits=4, scheme="affine"), 3, momentum)
    top = high = low = 0.0
    for step, batch in enumerate(batches):
        x = torch.tensor(batch)
        (scale, _), (wide, zero) = symmetric(x, step), affine(x, step)
        if step <= 3:
            top, high, low = (
                v if m == 0 else m * momentum + v * (1 - momentum)
                for m, v in ((top, max(map(abs, batch))), (high, max(batch)), (low, min(batch)))
            )
        assert scale.item() == pytest.approx(top / 7, rel=1e-5, abs=1e-7)
        assert wide.item() == pytest.approx((high - low) / 15, rel=1e-4, abs=1e-5)
        if float(wide) > 0:
            assert zero.item() == -away(float(affine.moving_min / wide))


# ---------------------------------------------------------------- TensorFlow
def grid(v: np.float32, low: np.float32, high: np.float32, options: FakeQuant, divides: bool) -> float:
    """Fake-quantize one value in the order of operations of the kernel."""
    qmin, qmax = F(options.qmin), F(options.qmax)
    scale, inverse = F(high - low) / (qmax - qmin), (qmax - qmin) / F(high - low)
    zero = F(qmin - F(low / scale))
    zero = qmin if zero < qmin else qmax if zero > qmax else F(away(float(zero)))
    first, last = F((qmin - zero) * scale), F((qmax - zero) * scale)
    c = F(min(max(v, first), last))
    if options.kernel == "1.15":
        steps = F(F(c - first) / scale) if divides else F(F(c - first) * F(1 / scale))
        return float(F(F(np.floor(F(steps + F(0.5))) * scale) + first))
    steps = F(F(c - first) / scale) if divides else F(F(c - first) * inverse)
    middle = np.floor(F(F(-first * inverse) + F(0.5)))
    return float(F(np.floor(F(F(steps - middle) + F(0.5))) * scale))


OPTIONS = st.builds(FakeQuant, st.integers(2, 16), st.booleans(), st.sampled_from(["2.15", "1.15"]))


@given(OPTIONS, FLOATS, st.floats(0.0078125, 50, width=32), st.lists(FLOATS, min_size=1, max_size=6))
def test_tensorflow_kernels(options: FakeQuant, low: float, width: float, values: list[float]) -> None:
    first, last = F(low), F(F(low) + F(width))
    middles = [F(first + F((k + 0.5) * float(last - first) / (options.qmax - options.qmin))) for k in range(3)]
    x = torch.tensor([*map(float, middles), *values])
    a, b = torch.tensor(float(first)), torch.tensor(float(last))
    by_division = [grid(v, first, last, options, True) for v in x.numpy()]
    by_product = [grid(v, first, last, options, False) for v in x.numpy()]
    assert options.vars(x, a, b).tolist() == by_division
    assert options.args(x, float(a), float(b)).tolist() == by_product
    channels = options.vars_per_channel(x[None], a.repeat(len(x)), b.repeat(len(x)))
    assert channels[0].tolist() == (by_division if options.kernel == "1.15" else by_product)


@pytest.mark.parametrize("shape", [(4,), (5, 4), (2, 3, 2, 4)])
def test_tensorflow_channel_gradients(shape: tuple[int, ...]) -> None:
    """The gradients of the ends are sums over all axes but the last."""
    options = FakeQuant(5, True)
    x = (drawn(1, *shape) * 3).requires_grad_()
    low, high = (torch.tensor(v, requires_grad=True) for v in ([-1.0, -0.3, 0.0, -2.2], [1.0, 2.0, 0.0, 0.1]))
    grad = drawn(2, *shape)
    options.vars_per_channel(x, low, high).backward(grad)
    first, last, *_ = options.nudge(low.detach(), high.detach())
    sums = np.zeros((3, 4))
    for index in np.ndindex(*shape):
        channel, v, g = index[-1], float(x.detach()[index]), float(grad[index])
        off = low[channel] == 0 and high[channel] == 0
        which = 1 if off else 0 if v < first[channel] else 2 if v > last[channel] else 1
        sums[which, channel] += g
        assert x.grad is not None and float(x.grad[index]) == (g if which == 1 else 0)
    assert low.grad is not None and np.allclose(low.grad, sums[0], atol=1e-5)
    assert high.grad is not None and np.allclose(high.grad, sums[2], atol=1e-5)


@given(st.lists(st.lists(FLOATS, min_size=2, max_size=4), min_size=1, max_size=8), st.sampled_from([0.5, 0.9, 0.999]))
def test_tensorflow_averages_are_zero_debiased(batches: list[list[float]], decay: float) -> None:
    observer = MovingAvgQuantize(ema_decay=decay)
    rate = F(F(1) - F(decay)) if decay == 0.5 else F(1.0 - decay)
    biased = np.zeros(2)
    for step, batch in enumerate(batches, 1):
        observer(torch.tensor(batch))
        biased += (np.array([min(*batch, 0.0), max(*batch, 0.0)]) - biased) * float(rate)
        expected = biased / (1 - float(F(1 - rate)) ** step)
        got = [observer.minimum.item(), observer.maximum.item()]
        assert got == pytest.approx(expected, rel=1e-3 if decay > 0.99 else 1e-5, abs=1e-4)


@given(SEEDS, st.integers(2, 8), st.booleans(), st.booleans(), st.sampled_from([0, 1, -1]))
def test_tensorflow_ranges_of_weights(seed: int, bits: int, narrow: bool, symmetric: bool, axis: int) -> None:
    x = drawn(seed, 3, 4, 2)
    observer = LastValueQuantize(FakeQuant(bits, narrow), symmetric=symmetric, channels=x.shape[axis], axis=axis)
    observer(x)
    ratio = -1.0 if narrow else -(2**bits - 2) / 2**bits
    for i in range(x.shape[axis]):
        low, high = float(x.select(axis, i).min()), float(x.select(axis, i).max())
        wanted = (min(low, high / ratio), max(high, low * ratio)) if symmetric else (min(low, 0), max(high, 0))
        assert (observer.minimum[i].item(), observer.maximum[i].item()) == pytest.approx(wanted, rel=1e-6)


def folds() -> Iterator[tuple[nn.Module, nn.Module, tuple[int, ...]]]:
    torch.manual_seed(0)
    yield nn.Conv2d(4, 8, 3, groups=4), nn.BatchNorm2d(8, eps=1e-3, momentum=0.1), (3, 4, 5, 5)
    yield nn.Linear(6, 4, bias=False), nn.BatchNorm1d(4, eps=1e-3, momentum=0.2), (7, 6)
    yield nn.Conv1d(2, 3, 2), nn.BatchNorm1d(3, momentum=0.3), (4, 2, 6)


@pytest.mark.parametrize("index", range(3))
@pytest.mark.parametrize(("delay", "freeze", "bits"), [(0, None, 8), (2, 3, 4), (0, 1, 3), (3, 2, 8)])
def test_tensorflow_folding_step_by_step(index: int, delay: int, freeze: int | None, bits: int) -> None:
    layer, bn, shape = list(folds())[index]
    with torch.random.fork_rng():
        torch.manual_seed(index)
        nn.init.uniform_(bn.weight, 0.5, 2)
        nn.init.uniform_(bn.bias)
    options = FakeQuant(bits, True, "1.15")
    folded = FoldedLayer(
        layer, bn, torch.relu, weight_quantizer=LastValueQuantize(options), schedule=Schedule(delay, freeze)
    )
    gamma, beta, eps, rate = bn.weight.detach(), bn.bias.detach(), bn.eps, bn.momentum
    mean, var = bn.running_mean.clone(), bn.running_var.clone()
    weight = layer.weight.detach()
    weight_shape = (-1,) + (1,) * (weight.ndim - 1)

    def run(x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
        if isinstance(layer, nn.Linear):
            return functional.linear(x, w, bias)
        return layer._conv_forward(x, w, bias)

    for step in range(1, 5):
        x = drawn(step, *shape)
        y = run(x, weight, None if layer.bias is None else layer.bias.detach())
        dims = tuple(d for d in range(y.ndim) if d != 1)
        mu, population, unbiased = y.mean(dims), y.var(dims, correction=0), y.var(dims)
        sigma_b, sigma_m = torch.sqrt(population + eps), torch.sqrt(var + eps)
        frozen = freeze is not None and step >= freeze
        w = weight * (gamma / sigma_m).reshape(weight_shape)
        if step >= delay:
            w = options.vars(w, w.min().clamp_max(0), w.max().clamp_min(0))
        output_shape = (1, -1) + (1,) * (y.ndim - 2)
        recip = torch.ones_like(sigma_m) if frozen else sigma_m / sigma_b
        offset = gamma * (mu / sigma_b - mean / sigma_m) if frozen else torch.zeros_like(mu)
        bias = 0 if layer.bias is None else layer.bias.detach()
        # mu includes the layer's bias, which the folded layer does not have
        centre = (mu - bias) * gamma / sigma_b
        offset = offset + (bias * gamma * (1 / sigma_m - 1 / sigma_b) if frozen else 0)
        shift = (offset + beta - centre).reshape(output_shape)
        expected = torch.relu(run(x, w, None) * recip.reshape(output_shape) + shift)
        # a value at a tie of the weight's grid may round either way
        assert float(((folded(x) - expected).abs() > 1e-4).float().mean()) < 0.02
        if not frozen:
            mean, var = mean + rate * (mu - mean), var + rate * (unbiased - var)
        assert torch.allclose(bn.running_mean, mean, atol=1e-5) and torch.allclose(bn.running_var, var, atol=1e-5)


# ---------------------------------------------------------------- DoReFa-Net
@given(SEEDS, st.integers(1, 8), st.sampled_from([(7,), (3, 5), (2, 3, 2, 2)]))
def test_dorefa_weights_and_activations(seed: int, bits: int, shape: tuple[int, ...]) -> None:
    x = drawn(seed, *shape).to(torch.float64)
    values, top = x.numpy(), 2**bits - 1
    squashed = np.tanh(values)
    largest = np.abs(squashed).max()
    if bits == 1:
        expected = {v: np.where(values >= 0, 1, -1) * np.abs(values).mean() for v in ("tensorpack", "zzzxxxttt")}
    else:
        unit = 2 * np.rint((squashed / (2 * largest) + 0.5) * top) / top - 1
        expected = {"tensorpack": unit, "zzzxxxttt": largest * unit}
    for variant, wanted in expected.items():
        assert np.allclose(quantize_weight(x, bits, variant), wanted, atol=1e-12)  # type: ignore[arg-type]
    activations = np.rint(np.clip(values, 0, 1) * top) / top
    assert np.allclose(quantize_activation(x, bits), activations, atol=1e-12)


@settings(max_examples=40)
@given(SEEDS, st.integers(1, 8), st.sampled_from([(4, 3), (2, 3, 2), (2, 2, 3, 2)]))
def test_dorefa_gradients(seed: int, bits: int, shape: tuple[int, ...]) -> None:
    """Each example has its own scale, and the noise comes from the generator."""
    dr = drawn(seed, *shape).to(torch.float64)
    noise = torch.rand(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) - 0.5
    x = torch.zeros(shape, dtype=torch.float64, requires_grad=True)
    quantize_gradient(x, bits, generator=torch.Generator().manual_seed(seed)).backward(dr)
    assert x.grad is not None and torch.equal(x.grad, stochastic_gradient(dr, bits, noise))
    top = 2**bits - 1
    for example, sigma, got in zip(dr.numpy(), noise.numpy(), x.grad.numpy(), strict=True):
        m = np.abs(example).max()
        unit = np.clip(example / (2 * m) + 0.5 + sigma / top, 0, 1)
        assert np.allclose(got, 2 * m * (np.rint(unit * top) / top - 0.5), atol=1e-12)
