"""The arithmetic against exact models: Python's integers, fractions, and numpy's float32 scalars."""

from __future__ import annotations

from fractions import Fraction
from itertools import product
from typing import get_args

import numpy as np
import pytest
import torch
from exact import clip, round_exactly, wrap_exactly
from hypothesis import assume, example, given
from hypothesis import strategies as st

from hago.arithmetic.multipliers import multiplier_and_shift
from hago.arithmetic.numerics import (
    EXACT_FLOAT32,
    OVERFLOWS,
    Overflow,
    Requantize,
    RequantizeForm,
    _one_product,
    _two_products,
    apply_overflow,
    apply_simq,
    clip_range,
    dequantize,
    doubling_high_multiply,
    is_power_of_two,
    multiply_by_quantized_multiplier,
    multiply_carrier,
    overflowed,
    power_of_two_at_least,
    quantize,
    requantize,
)
from hago.arithmetic.rounding import ROUNDINGS
from hago.arithmetic.types import DTYPES, INT8, INT32, UINT8, ZERO, QParams, SimQ, dtype
from hago.errors import HagoError

INTEGERS = [d for d in DTYPES.values() if d.is_int and d.bits < 64]
ROUNDING = st.sampled_from(list(ROUNDINGS))
#: Scales as thresholds make them: float32 values.
SCALES = st.floats(2.0**-30, 2.0**20, width=32)


def qparams(
    scale: float, name: str = "int8", zero: int = 0, low: int | None = None, high: int | None = None
) -> QParams:
    kind = dtype(name)
    ends = (kind.min if low is None else low, kind.max if high is None else high)
    return QParams(torch.tensor(scale, dtype=torch.float64), torch.tensor(zero), *ends, kind)


def number(t: torch.Tensor) -> int:
    return int(t.item())


# ---------------------------------------------------------------- overflow
@given(st.sampled_from(INTEGERS), st.integers(-(1 << 52), 1 << 52), st.sampled_from(["wrap", "saturate_end"]))
@example(DTYPES["int32"], 1 << 31, "wrap")
@example(DTYPES["int32"], -(1 << 31) - 1, "wrap")
@example(DTYPES["uint8"], -1, "wrap")
def test_registers_on_both_carriers(kind: object, c: int, overflow: str) -> None:
    assert isinstance(kind, type(INT8))
    expected = wrap_exactly(c, kind.min, kind.max) if overflow == "wrap" else clip(c, kind.min, kind.max)
    carriers = [torch.int64, torch.float64, *([torch.float32] if abs(c) <= EXACT_FLOAT32 and kind.bits < 25 else [])]
    for carrier in carriers:
        value = torch.tensor([c], dtype=carrier)
        assert number(apply_overflow(value, kind, overflow)) == expected  # type: ignore[arg-type]
        assert number(value) == c  # the input stays
        assert number(overflowed(value, kind)) == (not kind.min <= c <= kind.max)


def test_sixty_four_bits_never_overflow() -> None:
    c = torch.tensor([-(1 << 63), (1 << 63) - 1])
    assert apply_overflow(c, dtype("int64"), "wrap").equal(c) and apply_overflow(
        c, dtype("int64"), "saturate_end"
    ).equal(c)


@given(st.sampled_from(INTEGERS), st.lists(st.integers(-(1 << 40), 1 << 40), min_size=2, max_size=6))
def test_a_wrapped_sum_does_not_depend_on_order(kind: object, terms: list[int]) -> None:
    assert isinstance(kind, type(INT8))
    whole = apply_overflow(torch.tensor(sum(terms)), kind, "wrap")
    partial = torch.tensor(0)
    for term in reversed(terms):
        partial = apply_overflow(partial + term, kind, "wrap")
    assert number(whole) == number(partial)


def test_the_table_lists_every_overflow() -> None:
    assert tuple(OVERFLOWS) == get_args(Overflow)


@pytest.mark.parametrize("overflow", ["saturate", "", "wrap_end"])
def test_an_unknown_overflow_is_refused(overflow: str) -> None:
    with pytest.raises(HagoError, match=f"unknown overflow '{overflow}'; known: wrap, saturate_end"):
        apply_overflow(torch.tensor([300]), INT8, overflow)  # type: ignore[arg-type]


# ---------------------------------------------------------------- quantize and dequantize
@given(st.floats(-1e6, 1e6, width=32), SCALES, ROUNDING, st.integers(0, 255))
def test_quantize_divides_in_float32(x: float, scale: float, rounding: str, zero: int) -> None:
    target = qparams(scale, "uint8", zero)
    exact = np.float32(x) / np.float32(scale)
    expected = clip(round_exactly(Fraction(float(exact)), rounding), -zero, 255 - zero)
    assert number(quantize(torch.tensor([x]), target, rounding)) == expected


@given(st.floats(-1e6, 1e6), SCALES)
def test_quantize_divides_constants_in_float64(x: float, scale: float) -> None:
    found = quantize(torch.tensor([x], dtype=torch.float64), qparams(scale, "int32"))
    assert number(found) == clip(round_exactly(Fraction(x / scale), "half_even"), INT32.min, INT32.max)


def test_quantize_leaves_its_input() -> None:
    x = torch.tensor([0.5, 1.5, 2.5, -0.5, 300.0])
    assert quantize(x, qparams(1.0)).tolist() == [0, 2, 2, 0, 127]
    assert x.tolist() == [0.5, 1.5, 2.5, -0.5, 300.0]


@given(st.integers(-(1 << 31), (1 << 31) - 1), SCALES)
def test_dequantize_multiplies_in_float32(c: int, scale: float) -> None:
    expected = np.float32(c) * np.float32(scale)
    for carrier in (torch.int64, torch.float64):
        found = dequantize(torch.tensor([c], dtype=carrier), qparams(scale))
        assert found.dtype == torch.float32 and float(found) == float(expected)


def test_large_values_saturate_at_limits_that_float32_cannot_hold() -> None:
    """float32 would round 2**31 - 1 up to 2**31."""
    wide = qparams(1.0, "int32", low=-(2**31 - 1), high=2**31 - 1)
    assert number(quantize(torch.tensor([4e9]), wide)) == 2**31 - 1
    for carrier in (torch.float32, torch.float64, torch.int64):
        for how in (Requantize("float32"), Requantize("shift"), Requantize("multiplier_shift")):
            found = requantize(torch.tensor([1 << 23], dtype=carrier), qparams(1024.0, "int32"), wide, how)
            assert number(found) == 2**31 - 1


@pytest.mark.parametrize("zero", [-(2**24) - 151, 2**24 + 151])
def test_limits_beyond_float32_are_exact_for_narrow_ranges(zero: int) -> None:
    """A zero point outside of the range: float32 would round the limits to even integers, and leave the range."""
    narrow = qparams(1.0, "int32", zero, low=-50, high=51)
    for x, q in ((1e9, 51), (-1e9, -50)):
        assert number(quantize(torch.tensor([x]), narrow)) + zero == q
        for carrier in (torch.float32, torch.float64, torch.int64):
            for how in (Requantize("float32"), Requantize("shift"), Requantize("multiplier_shift")):
                c = torch.tensor([x / 1e9 * 2**22], dtype=carrier)
                assert number(requantize(c, qparams(1024.0, "int32"), narrow, how)) + zero == q


# ---------------------------------------------------------------- requantize
@given(st.integers(-(1 << 31), (1 << 31) - 1), SCALES, SCALES, ROUNDING, st.integers(-128, 127))
def test_the_float32_form(c: int, s_in: float, s_out: float, rounding: str, zero: int) -> None:
    """float32(c) times float32(s_in / s_out), each rounded to nearest even; then one rounding, then the clip."""
    with np.errstate(all="ignore"):
        product_ = np.float32(c) * np.float32(np.float64(s_in) / np.float64(s_out))
    assume(np.isfinite(product_))
    expected = clip(round_exactly(Fraction(float(product_)), rounding), -128 - zero, 127 - zero)
    source, target = qparams(s_in, "int32"), qparams(s_out, "int8", zero)
    found = requantize(torch.tensor([c]), source, target, Requantize("float32", rounding))
    assert number(found) == expected


@given(st.integers(-(1 << 31), (1 << 31) - 1), st.integers(-20, 40), ROUNDING)
def test_the_shift_form(c: int, n: int, rounding: str) -> None:
    source, target = qparams(2.0**-n, "int32"), qparams(1.0, "int8")
    exact = Fraction(c) / (1 << n) if n >= 0 else Fraction(c * (1 << -n))
    expected = clip(round_exactly(exact, rounding), -128, 127)
    assert number(requantize(torch.tensor([c]), source, target, Requantize("shift", rounding))) == expected


@given(st.floats(2.0**-31, 2.0**20), st.integers(2, 31))
@example(0.9999999999999999, 31)
def test_the_multiplier_is_the_nearest(r: float, bits: int) -> None:
    m, n = (number(t) for t in multiplier_and_shift(torch.tensor(r, dtype=torch.float64), bits))
    assert 1 << (bits - 1) <= m < 1 << bits
    assert abs(m - Fraction(r) * Fraction(2) ** n) <= Fraction(1, 2)


@given(st.integers(1 - (1 << 31), (1 << 31) - 1), st.floats(2.0**-30, 2.0**10), st.integers(2, 31), ROUNDING)
def test_the_multiplier_form_rounds_once(c: int, r: float, bits: int, rounding: str) -> None:
    m, n = multiplier_and_shift(torch.tensor(r, dtype=torch.float64), bits)
    found = multiply_by_quantized_multiplier(torch.tensor(c), m, n, Requantize("multiplier_shift", rounding, bits))
    assert number(found) == round_exactly(Fraction(c * number(m)) / Fraction(2) ** number(n), rounding)


@given(st.integers(-(1 << 31), (1 << 31) - 1), st.integers(-(1 << 31), (1 << 31) - 1))
@example(-(1 << 31), -(1 << 31))
@example(-3 * (1 << 30), 1 << 30)
def test_the_doubling_high_multiply(a: int, b: int) -> None:
    expected = min(round_exactly(Fraction(a * b, 1 << 31), "half_up"), (1 << 31) - 1)
    assert number(doubling_high_multiply(torch.tensor(a), torch.tensor(b))) == expected


def test_the_doubling_high_multiply_has_ties_toward_plus_infinity() -> None:
    a, b = torch.tensor([-3 * (1 << 30), 3 * (1 << 30), -(1 << 31)]), torch.tensor([1, 1, -(1 << 31)])
    assert doubling_high_multiply(a, b).tolist() == [-1, 2, (1 << 31) - 1]


@given(st.integers(-(1 << 24), 1 << 24), st.floats(2.0**-20, 60.0))
def test_two_stages(c: int, r: float) -> None:
    """A doubling high multiply, ties up, and then a division by a power of two, ties away from zero."""
    m, n = multiplier_and_shift(torch.tensor(r, dtype=torch.float64))
    left, right = max(0, 31 - number(n)), max(0, number(n) - 31)
    high = round_exactly(Fraction((c << left) * number(m), 1 << 31), "half_up")
    expected = round_exactly(Fraction(high, 1 << right), "half_away")
    found = multiply_by_quantized_multiplier(torch.tensor(c), m, n, Requantize("multiplier_shift", two_stage=True))
    assert number(found) == expected


@given(
    st.integers(1 - (1 << 31), (1 << 31) - 1),
    st.integers(-4, 60),
    st.floats(1.0, 1.99),
    st.sampled_from(["one", "two", "short"]),
    st.sampled_from(["int8", "uint8", "int16", "int32"]),
)
@example((1 << 31) - 1, 1, 1.375, "two", "int8")
@example(1, 40, 1.375, "one", "int8")
def test_large_ratios_saturate(c: int, exponent: int, mantissa: float, stages: str, name: str) -> None:
    """What no register holds is clipped on the side on which it lies, on every carrier."""
    how = Requantize("multiplier_shift", "half_up", 15 if stages == "short" else 31, two_stage=stages == "two")
    kind, source = dtype(name), qparams(mantissa * 2.0**exponent, "int32")
    target = QParams(torch.tensor(1.0, dtype=torch.float64), ZERO, kind.min, kind.max, kind)
    m, n = (number(t) for t in how.multiplier(source.scale))
    exact = round_exactly(Fraction(c * m) / Fraction(2) ** n, "half_up")
    if stages == "two":
        high = round_exactly(Fraction((c << max(0, 31 - n)) * m, 1 << 31), "half_up")
        exact = round_exactly(Fraction(min(high, (1 << 31) - 1), 1 << max(0, n - 31)), "half_away")
    expected = clip(exact, kind.min, kind.max)
    for carrier in (torch.int64, torch.float64, *([torch.float32] if abs(c) <= EXACT_FLOAT32 else [])):
        assert number(requantize(torch.tensor([c], dtype=carrier), source, target, how)) == expected


@pytest.mark.parametrize(
    "c, r, once, twice", [(-10, 0.25, -2, -3), (3, 0.125, 0, 1), (10, 0.25, 3, 3), (4, 0.125, 1, 1)]
)
def test_two_stages_differ_from_one(c: int, r: float, once: int, twice: int) -> None:
    """Known facts: rounding twice turns 0.375 into 1, and -2.5 into -3 where rounding up gives -2."""
    m, n = multiplier_and_shift(torch.tensor(r, dtype=torch.float64))
    for two_stage, expected in ((False, once), (True, twice)):
        how = Requantize("multiplier_shift", "half_up", two_stage=two_stage)
        assert number(multiply_by_quantized_multiplier(torch.tensor(c), m, n, how)) == expected


HOWS = [Requantize(f, r) for f, r in product(get_args(RequantizeForm), ROUNDINGS)]
HOWS += [Requantize("multiplier_shift", "half_up", 7), Requantize("multiplier_shift", two_stage=True)]


@given(st.integers(1, 30), st.integers(-(1 << 24), 1 << 24), st.integers(-2, 2))
@example(25, 0, -1)
def test_half_up_shifts_are_exact_next_to_every_tie(shift: int, multiple: int, off: int) -> None:
    """The integers around (multiple + 1/2) * 2**shift, up to the largest that a carrier holds."""
    for carrier, most in ((torch.float32, 1 << 24), (torch.float64, 1 << 53)):
        c = max(-most, min(most, (multiple << shift) + (1 << (shift - 1)) + off))
        source, target = qparams(2.0**-shift, "int32"), qparams(1.0, "int32", low=-(1 << 31), high=(1 << 31) - 1)
        found = requantize(torch.tensor([c], dtype=carrier), source, target, Requantize("shift", "half_up"))
        assert number(found) == clip(round_exactly(Fraction(c, 1 << shift), "half_up"), -(1 << 31), (1 << 31) - 1)


@pytest.mark.parametrize("how", HOWS, ids=str)
@given(
    st.lists(st.integers(-(1 << 26), 1 << 26), min_size=3, max_size=3),
    st.lists(st.integers(-12, 4), min_size=6, max_size=6),
    st.lists(st.integers(-9, 9), min_size=3, max_size=3),
    st.sampled_from(["int8", "uint8", "int16", "int32"]),
)
def test_carriers_agree(how: Requantize, c: list[int], exponents: list[int], zeros: list[int], name: str) -> None:
    """The same integers on int64, float64 and (where it holds them) float32, per channel or not."""
    step = 1.0 if how.form == "shift" else 1.37
    scales = [float(np.float32(step * 2.0**e)) for e in exponents]
    kind = dtype(name)
    source = QParams(torch.tensor(scales[:3], dtype=torch.float64), torch.zeros(3, dtype=torch.int64), 0, 0, INT32)
    target = QParams(torch.tensor(scales[3:], dtype=torch.float64), torch.tensor(zeros), kind.min, kind.max, kind)
    found = requantize(torch.tensor(c), source, target, how)
    assert found.dtype == torch.int64
    for carrier in (torch.float64, *([torch.float32] if max(map(abs, c)) <= EXACT_FLOAT32 else [])):
        carried = torch.tensor(c, dtype=carrier)
        assert requantize(carried, source, target, how).tolist() == found.tolist()
        assert carried.tolist() == c
    low, high = clip_range(target)
    assert bool((found >= torch.as_tensor(low)).all()) and bool((found <= torch.as_tensor(high)).all())


def test_apply_simq_quantizes_requantizes_dequantizes_or_does_nothing() -> None:
    how, q = Requantize(), qparams(0.5)
    x = torch.tensor([1.3])
    assert apply_simq(x, None, how) is x
    assert float(apply_simq(x, SimQ(None, q), how)) == 3
    assert float(apply_simq(torch.tensor([3]), SimQ(q, None), how)) == 1.5
    assert number(apply_simq(torch.tensor([3]), SimQ(q, qparams(0.25)), how)) == 6


@pytest.mark.parametrize(
    "bad", [{"form": "shfit"}, {"rounding": "half_evn"}, {"multiplier_bits": 1}, {"multiplier_bits": 32}]
)
def test_invalid_requantizations_are_refused(bad: dict[str, object]) -> None:
    with pytest.raises(HagoError) as caught:
        Requantize(**bad)  # type: ignore[arg-type]
    assert str(next(iter(bad.values()))) in str(caught.value)


# ---------------------------------------------------------------- powers of two
@pytest.mark.parametrize(
    "t, expected",
    [(0.3, 0.5), (0.5, 0.5), (0.51, 1.0), (1.0, 1.0), (2.632871389389038, 4.0), (5.0, 8.0), (8.0, 8.0), (0.0, 1.0)],
)
def test_the_power_of_two_above(t: float, expected: float) -> None:
    assert float(power_of_two_at_least(torch.tensor(t, dtype=torch.float64))) == expected


@given(st.floats(2.0**-300, 2.0**300))
def test_the_power_of_two_is_the_smallest(t: float) -> None:
    power = power_of_two_at_least(torch.tensor([t], dtype=torch.float64))
    assert is_power_of_two(power) and t <= float(power) < 2 * t
    numerator, denominator = Fraction(t).as_integer_ratio()
    assert is_power_of_two(torch.tensor([t], dtype=torch.float64)) == ((numerator * denominator).bit_count() == 1)


def test_unsigned_dtypes_hold_negative_values_around_the_middle() -> None:
    middle = QParams(torch.tensor(0.5, dtype=torch.float64), torch.tensor(128), 1, 255, UINT8)
    assert clip_range(middle) == (-127, 127)
    assert quantize(torch.tensor([-1e9, -0.5, 1e9]), middle).tolist() == [-127, -1, 127]


@given(
    st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=30),
    st.integers(2**30, 2**31 - 1),
    st.integers(17, 62),
    st.sampled_from([*ROUNDINGS, "two stages"]),
)
def test_products_of_62_bits_are_exact_in_float64(values: list[int], m: int, n: int, rounding: str) -> None:
    """On carriers as on integers, next to ties above all."""
    ties = [v // m for v in (k * 2**n + 2 ** (n - 1) + d for k in (-3, -1, 0, 2) for d in (-1, 0, 1))]
    c = torch.tensor([*values, *(t for t in ties if abs(t) < 2**31)], dtype=torch.int64)
    two = rounding == "two stages"
    how = Requantize("multiplier_shift", "half_up" if two else rounding, two_stage=two)
    parts = torch.tensor(m), torch.tensor(n)
    computed = _two_products(*parts, how)
    if computed is not None:
        found = computed(c.to(torch.float64)).to(torch.int64)
        assert found.tolist() == multiply_by_quantized_multiplier(c, *parts, how).tolist()
    assert (computed is None) == (n < 31 if two else n > 52 or rounding not in ("half_up", "half_away"))


@given(
    st.lists(st.integers(-(2**16), 2**16), min_size=1, max_size=30),
    st.integers(2**30, 2**31 - 1),
    st.integers(17, 62),
    st.integers(0, 20),
    st.sampled_from(["half_up", "half_away", "half_even", "two stages"]),
)
def test_products_of_shifted_integers_are_exact_on_carriers(
    values: list[int], m: int, n: int, left: int, rounding: str
) -> None:
    """`c << left` is multiplied on a carrier that holds c alone as it is in integers."""
    two = rounding == "two stages"
    how = Requantize("multiplier_shift", "half_up" if two else rounding, two_stage=two)
    ties = [((k * 2**n + 2 ** (n - 1)) // m >> left) + d for k in (-3, -1, 0, 2) for d in (0, 1)]
    c = torch.tensor([v for v in (*values, *ties) if abs(v << left) < 2**31], dtype=torch.int64)
    parts = torch.tensor(m), torch.tensor(n)
    found = multiply_carrier(c.to(torch.float64), *parts, how, left).to(torch.int64)
    assert found.tolist() == multiply_by_quantized_multiplier(c << left, *parts, how).tolist()


@pytest.mark.parametrize("rounding", [*ROUNDINGS, "two stages"])
@given(
    st.lists(st.integers(-(2**31), 2**31 - 1), max_size=5),
    st.integers(2**30, 2**31 - 1),
    st.integers(31, 52),
    st.integers(-8, 260),
    st.integers(0, 255),
)
def test_clipped_products_are_exact_on_carriers(
    rounding: str, values: list[int], m: int, n: int, near: int, zero: int
) -> None:
    """On float carriers as on integers, next to the ties of both stages, within the clipped range and beyond."""
    two = rounding == "two stages"
    how = Requantize("multiplier_shift", "half_up" if two else rounding, two_stage=two)
    target = qparams(1.0, "uint8", zero)
    tie = (near - zero) * 2**n + 2 ** (n - 1)
    values += [(tie + side * 2**30) // m + d for side in (-1, 0, 1) for d in (-1, 0, 1)]
    c = torch.tensor([v for v in (*values, 0, 1, -1) if -(2**31) <= v < 2**31], dtype=torch.float64)
    parts = torch.tensor([m]), torch.tensor([n])
    computed = _one_product(INT32, *parts, how, target)
    assert (computed is None) == (n > 44)
    if computed is not None:
        before = c.tolist()
        found = computed(c).clamp(-zero, 255 - zero)
        assert c.tolist() == before
        exact = multiply_by_quantized_multiplier(c.to(torch.int64), *parts, how).clamp(-zero, 255 - zero)
        assert found.tolist() == exact.tolist()
