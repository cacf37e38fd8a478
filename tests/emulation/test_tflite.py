"""TFLite's multipliers and both roundings, against exact fractions."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from exact import clip, round_exactly, wrap_exactly
from hypothesis import example, given
from hypothesis import strategies as st

from hago.arithmetic.types import INT8, UINT8
from hago.emulation import tflite
from hago.errors import HagoError

LOW, HIGH = -(1 << 31), (1 << 31) - 1
int32 = st.integers(LOW, HIGH)
multipliers = st.one_of(st.integers(1 << 30, HIGH), st.integers(0, HIGH), st.integers(-HIGH, -1))


@given(st.floats(2.0**-32, 2.0**30), st.sampled_from([1, -1]))
@example(1 - 2.0**-40, 1)
@example(0.5 - 2.0**-53, 1)
def test_a_quantized_multiplier_is_the_nearest_of_31_bits(real: float, sign: int) -> None:
    m, shift = (int(t) for t in tflite.quantize_multiplier(sign * real))
    assert abs(Fraction(sign * real) * Fraction(2) ** (31 - shift) - m) <= Fraction(1, 2)
    assert 1 << 30 <= abs(m) <= 1 << 31 and m <= HIGH


@pytest.mark.parametrize("real", [0.0, -0.0, 2.0**-33, -(2.0**-40), 5e-324])
def test_what_is_too_small_is_flushed(real: float) -> None:
    assert [int(t) for t in tflite.quantize_multiplier(real)] == [0, 0]


def test_single_rounding_saturates_a_shift_past_30() -> None:
    assert [int(t) for t in tflite.quantize_multiplier(2.0**40, "single")] == [HIGH, 30]
    assert [int(t) for t in tflite.quantize_multiplier(2.0**40)] == [1 << 30, 41]


def test_many_multipliers_are_each_their_own() -> None:
    reals = torch.tensor([[-4.0, 0.0], [0.3, 1e-12]], dtype=torch.float64)
    m, shift = tflite.quantize_multiplier(reals)
    for i in range(2):
        for j in range(2):
            one = tflite.quantize_multiplier(float(reals[i, j]))
            assert (int(m[i, j]), int(shift[i, j])) == tuple(int(t) for t in one)


@given(int32, multipliers, st.integers(-31, 30))
@example(3, 1 << 30, -2)
@example(LOW, LOW, 0)
@example(HIGH, HIGH, 30)
def test_double_rounding_is_two_roundings(x: int, m: int, shift: int) -> None:
    moved = wrap_exactly(x << max(shift, 0), LOW, HIGH)
    high = clip(round_exactly(Fraction(moved * m, 1 << 31), "half_up"), LOW, HIGH)
    expected = round_exactly(Fraction(high, 1 << max(-shift, 0)), "half_away")
    assert int(tflite.multiply_by_quantized_multiplier(torch.tensor(x), m, shift)) == expected


@given(int32, multipliers, st.integers(-31, 30))
def test_single_rounding_is_one(x: int, m: int, shift: int) -> None:
    exact = round_exactly(Fraction(x * m) / Fraction(2) ** (31 - shift), "half_up")
    got = tflite.multiply_by_quantized_multiplier(torch.tensor(x), m, shift, "single")
    assert int(got) == wrap_exactly(exact, LOW, HIGH)


@given(st.integers(-(1 << 47), (1 << 47) - 1), st.integers(0, HIGH), st.integers(-31, 7))
@example((1 << 47) - 1, HIGH, -31)
@example(1, 0x7FFEFFFF, 0)
def test_48_bit_accumulators_take_a_15_bit_multiplier(x: int, m: int, shift: int) -> None:
    reduced = 0x7FFF if m >= 0x7FFF0000 else round_exactly(Fraction(m, 1 << 16), "half_up")
    exact = round_exactly(Fraction(x * reduced) / Fraction(2) ** (15 - shift), "half_up")
    got = tflite.multiply_by_quantized_multiplier_int64(torch.tensor(x), m, shift)
    assert int(got) == wrap_exactly(exact, LOW, HIGH)


def test_the_two_roundings_differ_where_one_of_them_ties() -> None:
    m, shift = tflite.quantize_multiplier(0.125)
    three = torch.tensor(3)
    assert int(tflite.multiply_by_quantized_multiplier(three, m, shift, "double")) == 1
    assert int(tflite.multiply_by_quantized_multiplier(three, m, shift, "single")) == 0


def test_an_output_stage_scales_each_channel_then_adds_the_zero_point_and_clamps() -> None:
    acc = torch.tensor([[1000, -1000], [100000, -100000]])
    m, shift = tflite.quantize_multiplier(torch.tensor([0.01, 0.02], dtype=torch.float64))
    assert tflite.requantize(acc, m, shift, -3).tolist() == [[7, -23], [127, -128]]
    assert tflite.requantize(acc, m, shift, 128, UINT8).tolist() == [[138, 108], [255, 0]]
    assert tflite.requantize(acc, m, shift, -3, INT8, "single").tolist() == [[7, -23], [127, -128]]


@given(st.floats(-1e6, 0), st.floats(0, 1e6), st.sampled_from([(0, 255), (-128, 127), (-127, 127), (0, 15)]))
def test_chosen_parameters_hold_the_range_and_zero(rmin: float, rmax: float, ends: tuple[int, int]) -> None:
    qmin, qmax = ends
    if rmax - rmin < 1e-290:
        return
    scale, zero = tflite.choose_quantization_params(rmin, rmax, qmin, qmax)
    assert qmin <= zero <= qmax
    assert math.isclose(scale, (rmax - rmin) / (qmax - qmin))
    # The range moves by at most half a step.
    assert (qmin - zero) * scale <= rmin + 0.501 * scale
    assert (qmax - zero) * scale >= rmax - 0.501 * scale


def test_an_empty_range_at_zero_has_no_scale() -> None:
    assert tflite.choose_quantization_params(0.0, 0.0) == (0.0, 0)


@pytest.mark.parametrize(
    "call",
    [
        lambda: tflite.quantize_multiplier(float("inf")),
        lambda: tflite.quantize_multiplier(0.5, "triple"),
        lambda: tflite.quantize_multiplier(torch.tensor([1.0, float("nan")])),
        lambda: tflite.quantize_multiplier_smaller_than_one(1.0),
        lambda: tflite.quantize_multiplier_smaller_than_one(-0.5),
        lambda: tflite.quantize_multiplier_smaller_than_one(1 - 2.0**-50),
        lambda: tflite.quantize_multiplier_greater_than_one(1.0),
        lambda: tflite.quantize_multiplier_greater_than_one(float("nan")),
        lambda: tflite.multiply_by_quantized_multiplier(torch.tensor(1 << 31), 1, 0),
        lambda: tflite.multiply_by_quantized_multiplier(torch.tensor(1), 1 << 31, 0),
        lambda: tflite.multiply_by_quantized_multiplier(torch.tensor(1), 1, 31),
        lambda: tflite.multiply_by_quantized_multiplier(torch.tensor(1), 1, -32),
        lambda: tflite.multiply_by_quantized_multiplier(torch.tensor(1), 1, 0, "triple"),
        lambda: tflite.multiply_by_quantized_multiplier_int64(torch.tensor(1 << 47), 1, 0),
        lambda: tflite.multiply_by_quantized_multiplier_int64(torch.tensor(1), -1, 0),
        lambda: tflite.multiply_by_quantized_multiplier_int64(torch.tensor(1), 1, 8),
        lambda: tflite.choose_quantization_params(10.0, 30.0),
        lambda: tflite.choose_quantization_params(10.0, -30.0),
        lambda: tflite.choose_quantization_params(-1.0, 1.0, 5, 5),
        lambda: tflite.choose_quantization_params(-5e-324, 0.0),
    ],
)
def test_bad_arguments_are_refused(call: object) -> None:
    with pytest.raises(HagoError):
        call()  # type: ignore[operator]
