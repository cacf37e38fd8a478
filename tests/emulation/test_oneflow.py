"""OneFlow's quantizers against exact arithmetic, and laws beyond the vectors."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hago.emulation.oneflow import MovingAverageMinMaxObserver, Quantizer
from hago.errors import HagoError

EIGHTHS = st.lists(st.integers(-4096, 4096), min_size=1, max_size=20).map(lambda v: [k / 8 for k in v])
FORMS = [("google", "symmetric"), ("google", "affine"), ("cambricon", "symmetric")]


@given(EIGHTHS, st.integers(2, 9), st.integers(-4, 4), st.sampled_from(["symmetric", "affine"]), st.integers(0, 255))
def test_integers_are_the_nearest_ties_to_even(values: list[float], bits: int, exponent: int, scheme, zero) -> None:
    """With a power-of-two scale everything is exact, so fractions must agree."""
    quantizer = Quantizer(bits=bits, scheme=scheme)
    zero = zero if scheme == "affine" else 0
    low = 0 if zero or scheme == "affine" else -(2 ** (bits - 1))
    high = low + 2**bits - 1
    scale, zero_point = torch.tensor([2.0**exponent]), torch.tensor([float(zero)])
    x = torch.tensor(values)
    expected = [min(max(round(Fraction(v) / Fraction(2) ** exponent + zero), low), high) for v in values]
    assert quantizer.quantize(x, scale, zero_point).tolist() == expected
    real = [float((q - zero) * Fraction(2) ** exponent) for q in expected]
    assert quantizer.fake_quantize(x, scale, zero_point).tolist() == real


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("formula", "scheme"), FORMS)
def test_dtype_follows_the_input(formula, scheme, dtype: torch.dtype) -> None:
    quantizer = Quantizer(formula, 4, scheme)
    x = torch.tensor([-1.0, 3.0], dtype=dtype)
    scale, zero = quantizer.observe(x)
    assert {scale.dtype, zero.dtype, quantizer.quantize(x, scale, zero).dtype} == {dtype}
    assert quantizer.fake_quantize(x, scale, zero).dtype == dtype
    assert scale.shape == zero.shape == (1,)


@pytest.mark.parametrize(("formula", "scheme"), FORMS)
def test_gradient_passes_everywhere(formula, scheme) -> None:
    quantizer = Quantizer(formula, 4, scheme)
    x = torch.tensor([-1e6, -1.0, 0.0, 0.3, 1e6, torch.nan], requires_grad=True)
    scale, zero = torch.tensor([0.5], requires_grad=True), torch.tensor([3.0], requires_grad=True)
    quantizer.fake_quantize(x, scale, zero).backward(torch.arange(6.0))
    assert x.grad is not None and x.grad.tolist() == [0, 1, 2, 3, 4, 5]
    assert scale.grad is None and zero.grad is None
    assert not quantizer.quantize(x, scale, zero).requires_grad


def test_the_two_observers_round_zero_points_differently() -> None:
    x = torch.tensor([-128.5, 126.5])
    quantizer = Quantizer(scheme="affine")
    assert quantizer.observe(x)[1].tolist() == [128]
    assert MovingAverageMinMaxObserver(quantizer)(x)[1].tolist() == [129]


@pytest.mark.parametrize(
    ("given_zero", "used"), [(-10.0, 246), (300.0, 44), (128.5, 129), (torch.inf, 0), (-0.25, 0), (-0.5, 255)]
)
def test_zero_point_wraps_only_if_asked(given_zero: float, used: int) -> None:
    zero = torch.tensor([given_zero])
    assert Quantizer(scheme="affine", wraps=True).zero_point_used(zero).tolist() == [used]
    assert Quantizer(scheme="affine").zero_point_used(zero).tolist() == [given_zero]
    assert Quantizer().zero_point_used(zero).tolist() == [0]


@given(st.integers(1, 2**24 - 1), st.integers(-20, 20), st.integers(2, 8))
def test_cambricon_exponent_is_that_of_the_largest(mantissa: int, exponent: int, bits: int) -> None:
    top = Fraction(mantissa) * Fraction(2) ** exponent
    x = torch.tensor([float(top), -float(top) / 2], dtype=torch.float64)
    power = mantissa.bit_length() - 1 + exponent
    assert Quantizer("cambricon", bits).observe(x)[0].tolist() == [power - (bits - 2)]


@pytest.mark.parametrize("values", [[1.0, 1.5, 3.0], [-3.0, -1.0], [-1.0, 2.0]])
def test_ranges_without_zero_are_kept_unless_zero_points_wrap(values: list[float]) -> None:
    x = torch.tensor(values)
    near, wrapped = (Quantizer(scheme="affine", wraps=w) for w in (False, True))
    scale, zero = near.observe(x)
    assert (near.fake_quantize(x, scale, zero) - x).abs().max() <= scale.item() * 0.501
    differs = (wrapped.fake_quantize(x, scale, zero) - x).abs().max() > 1
    assert differs == (min(values) > 0 or max(values) < 0)


def test_nan_counts_only_where_it_comes_first() -> None:
    per_channel = Quantizer(scheme="affine", per_layer=False)
    x = torch.tensor([[torch.nan, 1.0], [1.0, torch.nan], [0.0, 255.0]])
    scale, zero = per_channel.observe(x)
    assert scale.isnan().tolist() == [True, False, False]
    assert (scale[2].item(), zero[2].item()) == (1.0, 0.0)


@pytest.mark.parametrize("scheme", ["symmetric", "affine"])
def test_channels_are_quantized_each_alone(scheme) -> None:
    x = torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(1))
    channels, layer = Quantizer(bits=4, scheme=scheme, per_layer=False), Quantizer(bits=4, scheme=scheme)
    scale, zero = channels.observe(x)
    each = [layer.fake_quantize(row, *layer.observe(row)) for row in x]
    assert scale.shape == (3,)
    assert torch.equal(channels.fake_quantize(x, scale, zero), torch.stack(each))


class TestMovingAverage:
    def test_a_buffer_at_zero_is_replaced(self) -> None:
        observer = MovingAverageMinMaxObserver(Quantizer(scheme="affine"), 10)
        observer(torch.tensor([0.0, 1.0]))
        observer(torch.tensor([-2.0, 1.0]))
        assert observer.moving_min.tolist() == [-2.0] and observer.moving_max.tolist() == [1.0]

    def test_stops_after_its_iterations_and_in_eval(self) -> None:
        observer = MovingAverageMinMaxObserver(stop_update_after_iters=3)
        observer(torch.tensor([1.0]), torch.tensor([3]))
        kept = observer.moving_max.clone()
        observer(torch.tensor([9.0]), 4)
        observer.eval()(torch.tensor([9.0]), 0)
        assert torch.equal(observer.moving_max, kept) and kept.item() == 1.0

    def test_state_round_trips(self) -> None:
        trained, fresh = MovingAverageMinMaxObserver(), MovingAverageMinMaxObserver()
        trained(torch.tensor([-3.0, 2.0]))
        fresh.load_state_dict(trained.state_dict())
        x = torch.tensor([0.5])
        assert set(trained.state_dict()) == {"moving_max", "moving_min"}
        assert fresh.eval()(x)[0].tolist() == trained.eval()(x)[0].tolist() != [0.0]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: Quantizer(formula="gogle"), "Did you mean 'google'"),  # type: ignore[arg-type]
        (lambda: Quantizer(scheme="afine"), "expected one of symmetric, affine"),  # type: ignore[arg-type]
        (lambda: Quantizer(bits=33), "33 bits; expected an integer from 1 to 32"),
        (lambda: Quantizer("cambricon", per_layer=False), "no per-channel form"),
        (lambda: MovingAverageMinMaxObserver(Quantizer(per_layer=False)), "no per-channel form"),
        (lambda: Quantizer().observe(torch.zeros(0)), "empty tensor"),
        (lambda: Quantizer(per_layer=False).observe(torch.tensor(1.0)), "got a scalar"),
        (lambda: Quantizer().observe(torch.ones(2, dtype=torch.int64)), "floating-point"),
        (lambda: Quantizer().quantize(torch.ones(2), torch.ones(3), torch.ones(3)), "3 entries per channel"),
        (lambda: Quantizer("cambricon").quantize(torch.ones(2), torch.ones(2), torch.ones(2)), "2 scales"),
    ],
)
def test_bad_input_is_refused(wrong, message: str) -> None:
    with pytest.raises(HagoError, match=message):
        wrong()
