"""TPU-MLIR's fake quantization is its cast to integers and back, with a gradient where nothing saturates."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hago.emulation.tpu_mlir.fake_quantize import fake_quantize
from hago.emulation.tpu_mlir.numerics import uniform_type
from hago.errors import HagoError


@given(st.lists(st.integers(-600, 600), min_size=1, max_size=12), st.integers(-3, 3), st.booleans())
def test_ties_go_away_from_zero_and_the_gradient_stops_at_the_ends(
    halves: list[int], exponent: int, signed: bool
) -> None:
    """With a power-of-two scale everything is exact."""
    scale, top = 2.0**exponent, 127 if signed else 255
    target = uniform_type(-scale * top if signed else 0.0, scale * top)
    assert target.scale == scale
    bottom = -128 if signed else 0
    x = torch.tensor([h / 2 * scale for h in halves], requires_grad=True)
    y = fake_quantize(x, target)
    y.backward(torch.ones_like(y))
    whole = [(abs(h) + 1) // 2 * (1 if h > 0 else -1) for h in halves]
    assert y.tolist() == [min(max(q, bottom), top) * scale for q in whole]
    assert x.grad is not None and x.grad.tolist() == [float(bottom <= q <= top) for q in whole]


def test_asymmetric_ranges_hold_zero() -> None:
    target = uniform_type(-1.0, 2.5, asymmetric=True)
    x = torch.linspace(-1, 2.5, 101)
    assert fake_quantize(torch.zeros(1), target).item() == 0.0
    assert (fake_quantize(x, target) - x).abs().max() <= target.scale * 0.75


def test_integers_are_refused() -> None:
    with pytest.raises(HagoError, match="floating-point"):
        fake_quantize(torch.ones(2, dtype=torch.int32), uniform_type(-1.0, 1.0))
