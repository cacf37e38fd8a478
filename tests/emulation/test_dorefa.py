"""DoReFa-Net: levels, gradients by finite differences, noise from generators, tensors of zeros."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hago.emulation.dorefa import (
    quantize_activation,
    quantize_gradient,
    quantize_k,
    quantize_weight,
    stochastic_gradient,
    ternarize,
)
from hago.errors import HagoError

VARIANTS = ["tensorpack", "zzzxxxttt"]


def weights(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


@given(st.integers(0, 2**20), st.integers(1, 16))
def test_quantize_k_is_the_nearest_level_ties_to_even(numerator: int, bits: int) -> None:
    r = Fraction(numerator, 2**20)
    top = 2**bits - 1
    q = quantize_k(torch.tensor([float(r)], dtype=torch.float64), bits)
    assert round(float(q) * top) == round(r * top)


@pytest.mark.parametrize("bits", [1, 2, 3, 8])
@pytest.mark.parametrize("variant", VARIANTS)
def test_weights_lie_on_two_to_the_k_levels(variant, bits: int) -> None:
    w = weights(50, 7)
    y = quantize_weight(w, bits, variant)
    top = y.abs().max()
    expected = {"tensorpack": 1.0, "zzzxxxttt": torch.tanh(w).abs().max().item()}[variant]
    assert top.item() == pytest.approx(w.abs().mean().item() if bits == 1 else expected)
    levels = (y / top + 1) / 2 * (2**bits - 1)
    assert torch.allclose(levels, levels.round(), atol=1e-9) and len(levels.round().unique()) <= 2**bits


@pytest.mark.parametrize("bits", [2, 8])
@pytest.mark.parametrize("variant", VARIANTS)
def test_weight_gradient_is_that_of_the_curve_before_rounding(variant, bits: int) -> None:
    """By finite differences of tanh(w) / max|tanh(w)|, or of tanh(w) where the maximum is constant."""
    w = weights(9)
    tensorpack = variant == "tensorpack"

    def curve(v: torch.Tensor) -> torch.Tensor:
        t = torch.tanh(v)
        return t / t.abs().max() if tensorpack else t

    grad_out = torch.linspace(-1, 2, 9, dtype=torch.float64)
    leaf = w.clone().requires_grad_()
    quantize_weight(leaf, bits, variant).backward(grad_out)
    h = 1e-6
    steps = torch.eye(9, dtype=torch.float64) * h
    numeric = torch.stack([((curve(w + s) - curve(w - s)) * grad_out).sum() / (2 * h) for s in steps])
    assert leaf.grad is not None and torch.allclose(leaf.grad, numeric, atol=1e-7)


@pytest.mark.parametrize("variant", VARIANTS)
def test_one_bit_weights(variant) -> None:
    w = torch.tensor([-2.0, 0.0, 1.0], requires_grad=True)
    y = quantize_weight(w, 1, variant)
    assert y.tolist() == [-1.0, 1.0 if variant == "tensorpack" else 0.0, 1.0]
    y.backward(torch.tensor([1.0, 2.0, 3.0]))
    assert w.grad is not None and w.grad.tolist() == [1, 2, 3]


@pytest.mark.parametrize("variant", VARIANTS)
def test_32_bits_do_not_quantize(variant) -> None:
    x = torch.tensor([-0.123, 0.123, 3.0])
    assert torch.equal(quantize_weight(x, 32, variant), x)
    assert torch.equal(quantize_gradient(x, 32), x)
    assert torch.equal(quantize_k(x, 32), x)
    assert torch.equal(quantize_activation(x, 32, variant), x.relu() if variant == "tensorpack" else x)


@pytest.mark.parametrize("variant", VARIANTS)
def test_one_bit_activations_differ(variant) -> None:
    x = torch.tensor([-1.0, 0.0, 0.1, 0.6, 2.0])
    assert quantize_activation(x, 1, variant).tolist() == (
        [0, 0, 0, 1, 1] if variant == "tensorpack" else [0, 0, 1, 1, 1]
    )


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("bits", [1, 2, 5])
def test_activation_gradient_is_that_of_the_clip(variant, bits: int) -> None:
    x = torch.tensor([-0.5, 0.0, 0.4, 1.0, 1.5], requires_grad=True)
    quantize_activation(x, bits, variant).backward(torch.ones(5))
    assert x.grad is not None and x.grad.tolist() == [0, 1, 1, 1, 0]
    assert torch.equal(quantize_activation(x, 4), quantize_k(x.clamp(0, 1), 4))


@pytest.mark.parametrize("variant", VARIANTS)
def test_weights_of_zeros_are_a_choice(variant) -> None:
    w = torch.zeros(3, requires_grad=True)
    with pytest.raises(HagoError, match="zeros='zero'"):
        quantize_weight(w, 2, variant)
    assert quantize_weight(w, 2, variant, zeros="nan").isnan().all()
    y = quantize_weight(w, 2, variant, zeros="zero")
    y.sum().backward()
    assert y.tolist() == [0, 0, 0] and w.grad is not None and w.grad.tolist() == [0, 0, 0]
    assert quantize_weight(w, 1, variant).tolist() == [0, 0, 0]


class TestGradients:
    def test_value_passes_and_noise_comes_from_the_generator(self) -> None:
        def run(seed: int) -> torch.Tensor:
            x = torch.ones(2, 5, requires_grad=True)
            y = quantize_gradient(x, 2, generator=torch.Generator().manual_seed(seed))
            assert torch.equal(y, x)
            y.backward(torch.linspace(-1, 1, 10).reshape(2, 5))
            assert x.grad is not None
            return x.grad

        before = torch.random.get_rng_state()
        assert torch.equal(run(1), run(1)) and not torch.equal(run(1), run(2))
        assert torch.equal(torch.random.get_rng_state(), before)

    @pytest.mark.parametrize("bits", [1, 2, 4])
    def test_unbiased(self, bits: int) -> None:
        dr = torch.tensor([[1.0, -0.3, 0.05], [0.0, 0.02, -0.04]])
        g = torch.Generator().manual_seed(0)
        draws = torch.stack([stochastic_gradient(dr, bits, torch.rand(2, 3, generator=g) - 0.5) for _ in range(3000)])
        assert float(((draws.mean(0) - dr) / dr.abs().amax(1, keepdim=True)).abs().max()) < 0.05

    def test_each_example_has_its_own_scale(self) -> None:
        dr = torch.tensor([[4.0, 0.0], [0.25, 0.0]])
        out = stochastic_gradient(dr, 2, torch.zeros(2, 2))
        assert torch.equal(out[0], out[1] * 16)
        vector = torch.tensor([3.0, -0.5, 0.0])
        assert stochastic_gradient(vector, 2, torch.zeros(3)).tolist() == [3.0, -0.5, 0.0]

    def test_examples_without_gradient_are_a_choice(self) -> None:
        dr, noise = torch.tensor([[0.0, 0.0], [1.0, -1.0]]), torch.zeros(2, 2)
        assert stochastic_gradient(dr, 4, noise).tolist() == [[0, 0], [1, -1]]
        assert stochastic_gradient(dr, 4, noise, "nan").isnan().tolist() == [[True, True], [False, False]]
        with pytest.raises(HagoError, match="all 0"):
            stochastic_gradient(dr, 4, noise, "raise")


def test_ternary_values_and_their_gradients() -> None:
    w = torch.tensor([-2.0, -0.1, 0.05, 0.1, 1.0], requires_grad=True)
    positive, negative = torch.tensor(3.0, requires_grad=True), torch.tensor(0.5, requires_grad=True)
    y = ternarize(w, positive, negative, 0.05)
    assert y.tolist() == [-0.5, -1.0, 0.0, 1.0, 3.0]
    y.backward(torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0]))
    assert w.grad is not None and w.grad.tolist() == [0.5, 2, 4, 8, 48]
    assert positive.grad == 16 and negative.grad == -1


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: quantize_weight(torch.ones(2), 9, "zzzxxxttt"), "9 bits; expected an integer from 1 to 8"),
        (lambda: quantize_weight(torch.ones(2), 0), "0 bits"),
        (lambda: quantize_weight(torch.ones(2), 2, "tensorflow"), "expected one of tensorpack"),  # type: ignore[arg-type]
        (lambda: quantize_weight(torch.ones(0), 2), "empty tensor"),
        (lambda: quantize_activation(torch.ones(2, dtype=torch.int64), 2), "floating-point"),
        (lambda: quantize_gradient(torch.ones(2), 2), "noise or a generator"),
        (lambda: stochastic_gradient(torch.ones(2), 2, torch.ones(3)), "noise of shape"),
        (lambda: stochastic_gradient(torch.ones(2), 2, torch.ones(2), "none"), "zeros is 'none'"),  # type: ignore[arg-type]
    ],
)
def test_bad_input_is_refused(wrong, message: str) -> None:
    with pytest.raises(HagoError, match=message):
        wrong()


def test_noise_may_be_given() -> None:
    x = torch.zeros(1, 2, requires_grad=True)
    quantize_gradient(x, 1, noise=torch.tensor([[0.0, 0.4]])).backward(torch.tensor([[1.0, -0.2]]))
    assert x.grad is not None and x.grad.tolist() == [[1.0, 1.0]]
