"""TPU-MLIR's roundings, its searches for multipliers and its types, against plain definitions."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from exact import clip, round_exactly
from hypothesis import example, given
from hypothesis import strategies as st

from hago.arithmetic.types import DTYPES, INT8, UINT8
from hago.emulation.tpu_mlir import numerics
from hago.emulation.tpu_mlir.numerics import (
    UniformType,
    calibrated_range,
    dequantize,
    quantize,
    requantize,
    uniform_type,
    uniform_type_of_row,
)
from hago.errors import HagoError

#: Each mode on -2.5, -1.5, -0.5, 0.5, 1.5, 2.5, 1.4, -1.4, 1.6, -1.6, 3.
MODES = {
    "HalfAwayFromZero": (-3, -2, -1, 1, 2, 3, 1, -1, 2, -2, 3),
    "HalfUp": (-2, -1, 0, 1, 2, 3, 1, -1, 2, -2, 3),
    "HalfDown": (-3, -2, -1, 0, 1, 2, 1, -1, 2, -2, 3),
    "HalfToEven": (-2, -2, 0, 0, 2, 2, 1, -1, 2, -2, 3),
    "HalfToOdd": (-3, -1, -1, 1, 1, 3, 1, -1, 2, -2, 3),
    "HalfTowardsZero": (-2, -1, 0, 0, 1, 2, 1, -1, 2, -2, 3),
    "TowardsZero": (-2, -1, 0, 0, 1, 2, 1, -1, 1, -1, 3),
    "AwayFromZero": (-3, -2, -1, 1, 2, 3, 2, -2, 2, -2, 3),
    "Up": (-2, -1, 0, 1, 2, 3, 2, -1, 2, -1, 3),
    "Down": (-3, -2, -1, 0, 1, 2, 1, -2, 1, -2, 3),
}


def test_round_modes() -> None:
    assert set(MODES) == set(numerics.ROUND_MODES)
    for mode, expected in MODES.items():
        for dtype in (torch.float32, torch.float64):
            x = torch.tensor([-2.5, -1.5, -0.5, 0.5, 1.5, 2.5, 1.4, -1.4, 1.6, -1.6, 3.0], dtype=dtype)
            before = x.clone()
            assert tuple(numerics.to_int(x, mode).tolist()) == expected
            assert torch.equal(x, before)


# ---------------------------------------------------------------- searches
def least_error(scale: float, limit: int, first: int) -> tuple[int, int]:
    """The search in plain loops: exact products, a float32 error, the first strict minimum."""
    real = Fraction(float(np.float32(scale)))
    best, shift = math.inf, 0
    for n in range(first, 31):
        m = round_exactly(real * Fraction(2) ** n, "half_away")
        error = float(np.float32(abs(float(Fraction(m) / Fraction(2) ** n - real))))
        if error < best and abs(m) < limit:
            best, shift = error, n
    return round_exactly(real * Fraction(2) ** shift, "half_away"), shift


scales = st.floats(2.0**-40, 2.0**30)


@given(st.one_of(scales, scales.map(lambda s: -s), st.just(0.0), st.integers(1, 1 << 20).map(lambda i: i / 64)))
@example(1.0)
@example(126.5)
@example(127.0)
@example(2.0**30)
@example(1 / 3)
def test_searches_find_the_least_error(scale: float) -> None:
    for bits, limit in ((32, (1 << 31) - 1), (8, 127)):
        got = tuple(int(t) for t in numerics.scale_and_shift(scale, bits))
        assert got == least_error(scale, limit, -32)
        got = tuple(int(t) for t in numerics.scale_and_shift_positive(scale, bits))
        assert got == least_error(scale, limit, 0)


def test_a_scale_that_no_positive_shift_holds_keeps_shift_0() -> None:
    assert [int(t) for t in numerics.scale_and_shift_positive(200.0, 8)] == [200, 0]
    assert [int(t) for t in numerics.scale_and_shift(200.0, 8)] == [25, -3]


def test_searches_take_many_scales_at_once() -> None:
    many = torch.tensor([[0.1, 0.7], [3.0, 1e-6]], dtype=torch.float64)
    m, r = numerics.scale_and_shift(many, 8)
    for i in range(2):
        for j in range(2):
            assert (int(m[i, j]), int(r[i, j])) == least_error(float(many[i, j]), 127, -32)


@given(st.floats(0, 1e4), st.sampled_from([127, 255]))
@example(127.0, 127)
@example(0.496, 127)
@example(2.0**-70, 127)
def test_truncated_multipliers(qscale: float, limit: int) -> None:
    m, r = numerics.multiplier_and_rshift_truncated(qscale, limit)
    if qscale > limit:
        assert (m, r) == (limit, 0)
        return
    first = next((r for r in range(63) if Fraction(qscale) * 2 ** (r + 1) >= limit), None)
    assert (m, r) == ((0, 0) if first is None else (math.floor(Fraction(qscale) * 2**first), first))


@given(st.floats(2.0**-31, 1, exclude_max=True))
def test_qdm_multipliers_have_31_bits(qscale: float) -> None:
    m, r = numerics.qdm_multiplier_and_rshift(qscale)
    if qscale < 0.999999:
        assert 1 << 30 <= m < 1 << 31
        assert abs(Fraction(qscale) * 2 ** (31 + r) - m) <= Fraction(1, 2)


def test_a_qdm_ratio_of_one_or_more_is_cut() -> None:
    assert numerics.qdm_multiplier_and_rshift(1.0) == numerics.qdm_multiplier_and_rshift(0.999999)
    assert numerics.qdm_multiplier_and_rshift(7.0) == numerics.qdm_multiplier_and_rshift(0.999999)
    assert numerics.qdm_multiplier_and_rshift(0.0) == (0, 0)


# ---------------------------------------------------------------- requantization
@given(
    st.integers(-(1 << 31), (1 << 31) - 1),
    st.integers(-(1 << 30), 1 << 30),
    st.integers(0, 62),
    st.sampled_from(["half_up", "half_away", "half_even", "half_down", "floor", "toward_zero"]),
)
def test_a_multiplier_and_a_shift_round_as_asked(v: int, m: int, r: int, rounding: str) -> None:
    got = numerics.apply_multiplier_and_rshift(torch.tensor(v), m, r, rounding)
    assert int(got) == round_exactly(Fraction(v * m, 1 << r), rounding)


def test_a_negative_shift_is_to_the_left() -> None:
    assert numerics.apply_multiplier_and_rshift(torch.tensor([3, -3]), 25, -3).tolist() == [600, -600]


@given(st.integers(-(1 << 20), 1 << 20), st.integers(-127, 127), st.integers(0, 20))
def test_the_float_form_rounds_the_float32_quotient_half_up(v: int, m: int, r: int) -> None:
    product = float(np.float32(np.float32(v) * np.float32(m)) / np.float32(1 << r))
    got = int(numerics.apply_multiplier_and_rshift_float(torch.tensor(v), m, r))
    assert got == round_exactly(Fraction(product), "half_up")


@given(st.integers(-(1 << 20), 1 << 20), st.integers(-128, 127), st.booleans())
def test_requantize_adds_the_zero_point_last_and_relu_clamps_there(acc: int, zero: int, relu: bool) -> None:
    target = UniformType(1.0, zero)
    got = int(requantize(torch.tensor(acc), 77, 13, target, do_relu=relu))
    exact = round_exactly(Fraction(acc * 77, 1 << 13), "half_up") + zero
    assert got == clip(max(exact, zero) if relu else exact, -128, 127)


# ---------------------------------------------------------------- types and casts
def test_the_rule_of_the_cast_rounds_the_float32_product() -> None:
    target = UniformType(7 / 255, 18)
    assert quantize(torch.tensor([-3.5]), target).tolist() == [-109]
    assert round_exactly(Fraction(-3.5) / Fraction(7, 255), "half_away") + 18 == -110


@given(
    st.lists(st.floats(-300, 300, width=32), min_size=1, max_size=8),
    st.floats(0.001, 10),
    st.integers(-128, 127),
)
def test_quantize_is_its_definition(values: list[float], scale: float, zero: int) -> None:
    reciprocal = np.float32(1.0 / scale)
    expected = [
        clip(round_exactly(Fraction(float(np.float32(v) * reciprocal)), "half_away") + zero, -128, 127) for v in values
    ]
    assert quantize(torch.tensor(values), UniformType(scale, zero)).tolist() == expected


def test_infinities_saturate_and_nan_is_refused() -> None:
    target = UniformType(0.5, 3, UINT8)
    assert quantize(torch.tensor([math.inf, -math.inf, 1e30]), target).tolist() == [255, 0, 255]
    with pytest.raises(HagoError, match="NaN"):
        quantize(torch.tensor([math.nan]), target)


@given(st.integers(-128, 127), st.floats(0.001, 10), st.integers(-128, 127))
def test_a_round_trip_of_integers_is_the_identity(q: int, scale: float, zero: int) -> None:
    uniform = UniformType(scale, zero)
    assert quantize(dequantize(torch.tensor([q]), uniform), uniform).tolist() == [q]


@pytest.mark.parametrize(
    ("row", "options", "expected"),
    [
        ((2.0, -1.5, 1.9), {}, UniformType(2 / 127)),
        ((2.0, 0.0, 1.9), {}, UniformType(2 / 255, 0, UINT8)),
        ((2.0, -1.5, 1.9), {"bits": 4}, UniformType(2 / 7, 0, DTYPES["int4"])),
        ((2.0, 0.0, 1.9), {"bits": 4}, UniformType(2 / 15, 0, DTYPES["uint4"])),
        ((2.0, -1.5, 1.9), {"bits": 16}, UniformType(2 / 32767, 0, DTYPES["int16"])),
        ((2.1, -1.5, 2.1), {"asymmetric": True}, UniformType(3.6 / 255, -22)),
        ((2.1, 0.0, 2.1), {"asymmetric": True}, UniformType(2.1 / 255, 0, UINT8)),
        ((2.1, 1.0, 2.0), {"asymmetric": True}, UniformType(2.0 / 255, 0, UINT8)),
        ((3.0, -3.0, -1.0), {"asymmetric": True}, UniformType(3.0 / 255, 127)),
        ((2.0, -1.5, 1.9), {"do_relu": True}, UniformType(2 / 255, 0, UINT8)),
        ((9.0, -1.5, 1.9), {"kind": "unit"}, UniformType(1 / 255, 0, UINT8)),
        ((2.0, 0.0, 1.9), {"kind": "abs"}, UniformType(2 / 127)),
        ((2.0, -1.0, 1.9), {"kind": "non_negative"}, UniformType(2 / 255, 0, UINT8)),
        ((2.0, 0.5, 1.9), {"kind": "sub"}, UniformType(2 / 127)),
        ((5.0, -5.0, 4.5), {"kind": "mul", "asymmetric": True}, UniformType(10 / 255, -1)),
    ],
)
def test_types_of_calibration_rows(
    row: tuple[float, float, float], options: dict[str, object], expected: UniformType
) -> None:
    uniform = uniform_type_of_row(*row, **options)  # type: ignore[arg-type]
    assert uniform.scale == pytest.approx(expected.scale)
    assert (uniform.zero_point, uniform.dtype) == (expected.zero_point, expected.dtype)


def test_cv18xx_takes_a_symmetric_range() -> None:
    assert calibrated_range(2.0, 0.5, 1.5, cv18xx=True) == (-2.0, 2.0)


@given(st.floats(-100, 0), st.floats(0, 100))
def test_real_zero_is_an_integer_of_an_asymmetric_type(low: float, high: float) -> None:
    if high - low < 1e-3:
        return
    uniform = uniform_type(low, high, asymmetric=True)
    assert uniform.dtype.min <= uniform.zero_point <= uniform.dtype.max
    assert dequantize(torch.tensor([uniform.zero_point]), uniform).tolist() == [0.0]


@pytest.mark.parametrize(
    "call",
    [
        lambda: numerics.to_int(torch.zeros(1), "HalfUpp"),
        lambda: numerics.scale_and_shift(0.5, 16),
        lambda: numerics.scale_and_shift(float("nan")),
        lambda: numerics.scale_and_shift(2.0**31),
        lambda: numerics.multiplier_and_rshift_truncated(-0.1),
        lambda: numerics.multiplier_and_rshift_truncated(0.1, 0),
        lambda: numerics.qdm_multiplier_and_rshift(float("inf")),
        lambda: numerics.apply_multiplier_and_rshift(torch.tensor(1), 1, 63),
        lambda: numerics.apply_multiplier_and_rshift(torch.tensor(1 << 30), 1 << 30, -5),
        lambda: numerics.apply_multiplier_and_rshift(torch.tensor(1.5), 1, 1),
        lambda: numerics.apply_multiplier_and_rshift(torch.tensor(1), 1, 1, "half_upp"),
        lambda: UniformType(0.0),
        lambda: UniformType(float("nan")),
        lambda: UniformType(1.0, 128),
        lambda: UniformType(1.0, 0, DTYPES["float32"]),
        lambda: uniform_type(0.0, 0.0),
        lambda: uniform_type(1.0, -1.0),
        lambda: uniform_type(-1.0, 1.0, bits=5),
        lambda: calibrated_range(1.0, -1.0, 1.0, kind="softmax"),  # type: ignore[arg-type]
        lambda: calibrated_range(float("inf"), -1.0, 1.0),
    ],
)
def test_bad_arguments_are_refused(call: object) -> None:
    with pytest.raises(HagoError):
        call()  # type: ignore[operator]


def test_a_type_prints_itself() -> None:
    assert str(UniformType(0.5, -3)) == "int8 scale 0.5 zero -3"
    assert UniformType(1.0).dtype is INT8
