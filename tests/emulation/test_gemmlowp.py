"""gemmlowp's primitives against exact fractions, and its example product."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from exact import clip, round_exactly
from hypothesis import example, given
from hypothesis import strategies as st

from hago.emulation import gemmlowp
from hago.errors import HagoError

int32 = st.integers(-(1 << 31), (1 << 31) - 1)
int16 = st.integers(-(1 << 15), (1 << 15) - 1)


@given(int32, int32)
@example(-(1 << 31), -(1 << 31))
@example(-3, 1 << 30)
def test_high_multiply_of_32_bits_rounds_ties_up(a: int, b: int) -> None:
    got = int(gemmlowp.saturating_rounding_doubling_high_mul(torch.tensor(a), torch.tensor(b)))
    assert got == clip(round_exactly(Fraction(a * b, 1 << 31), "half_up"), -(1 << 31), (1 << 31) - 1)


@given(int16, int16)
@example(-(1 << 15), -(1 << 15))
def test_high_multiply_of_16_bits_rounds_ties_up(a: int, b: int) -> None:
    got = int(gemmlowp.saturating_rounding_doubling_high_mul(torch.tensor(a), torch.tensor(b), bits=16))
    assert got == clip(round_exactly(Fraction(a * b, 1 << 15), "half_up"), -(1 << 15), (1 << 15) - 1)


@given(int32, st.integers(0, 31))
@example(-2, 2)
@example((1 << 31) - 1, 31)
def test_division_by_a_power_of_two_rounds_ties_away(x: int, exponent: int) -> None:
    assert int(gemmlowp.rounding_divide_by_pot(torch.tensor(x), exponent)) == round_exactly(
        Fraction(x, 1 << exponent), "half_away"
    )


@given(st.floats(2.0**-30, 1, exclude_max=True, width=32))
def test_a_multiplier_has_31_bits_and_is_the_nearest(real: float) -> None:
    multiplier, shift = gemmlowp.quantize_multiplier_smaller_than_one(real)
    assert 1 << 30 <= multiplier < 1 << 31 and shift >= 0
    assert abs(Fraction(real) * 2 ** (31 + shift) - multiplier) <= Fraction(1, 2)


@given(st.floats(-100, 100, width=32), st.floats(0, 100, width=32))
def test_a_range_is_widened_to_zero_and_quantizes_onto_the_zero_point(lo: float, width: float) -> None:
    if max(lo + width, 0) - min(lo, 0) < 1e-30:
        return
    scale, zero = gemmlowp.choose_quantization_params(lo, lo + width)
    assert scale > 0 and 0 <= zero <= 255
    assert gemmlowp.quantize(torch.zeros(1), scale, zero).tolist() == [zero]


def test_a_product_of_quantized_matrices_is_near_the_real_one() -> None:
    draw = torch.Generator().manual_seed(0)
    lhs, rhs = torch.rand(5, 16, generator=draw) * 2 - 1, torch.rand(16, 7, generator=draw) * 2 - 1
    gemm = gemmlowp.quantized_gemm(lhs, rhs)
    real = (gemm.result - gemm.result_zero_point) * gemm.result_scale
    assert float((real - lhs @ rhs).abs().max()) < 4 * gemm.result_scale
    exact = [
        [sum((int(a) - gemm.lhs_zero_point) * (int(b) - gemm.rhs_zero_point) for a, b in zip(row, column, strict=True))
         for column in gemm.rhs.T]
        for row in gemm.lhs
    ]  # fmt: skip
    stage = gemmlowp.quantize_down(torch.tensor(exact), gemm.multiplier, gemm.right_shift, gemm.result_zero_point)
    assert torch.equal(stage, gemm.result)


@pytest.mark.parametrize(
    "call",
    [
        lambda: gemmlowp.saturating_rounding_doubling_high_mul(torch.tensor(1 << 31), torch.tensor(1)),
        lambda: gemmlowp.saturating_rounding_doubling_high_mul(torch.tensor(1 << 15), torch.tensor(1), bits=16),
        lambda: gemmlowp.saturating_rounding_doubling_high_mul(torch.tensor(1), torch.tensor(1), bits=8),
        lambda: gemmlowp.saturating_rounding_doubling_high_mul(torch.tensor(1.0), torch.tensor(1)),
        lambda: gemmlowp.rounding_divide_by_pot(torch.tensor(1), 32),
        lambda: gemmlowp.rounding_divide_by_pot(torch.tensor(1), -1),
        lambda: gemmlowp.quantize_multiplier_smaller_than_one(1.0),
        lambda: gemmlowp.quantize_multiplier_smaller_than_one(0.0),
        lambda: gemmlowp.quantize_multiplier_smaller_than_one(float("nan")),
        lambda: gemmlowp.choose_quantization_params(0.0, 0.0),
        lambda: gemmlowp.choose_quantization_params(2.0, 1.0),
        lambda: gemmlowp.choose_quantization_params(float("nan"), 1.0),
        lambda: gemmlowp.quantize(torch.tensor([float("inf")]), 1.0, 0),
        lambda: gemmlowp.quantized_gemm(torch.ones(2, 3), torch.ones(2, 3)),
    ],
)
def test_bad_arguments_are_refused(call: object) -> None:
    with pytest.raises(HagoError):
        call()  # type: ignore[operator]
