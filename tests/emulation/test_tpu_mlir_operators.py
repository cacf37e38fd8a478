"""TPU-MLIR's other operators against loops over Python's integers, with the rules of the older chips."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from exact import clip, round_exactly
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from emulation.integers import ASYMMETRIC, SHIFTED, SYMMETRIC, TARGET, draw, half_up, integers
from hago.emulation.tpu_mlir import operators
from hago.emulation.tpu_mlir.numerics import UniformType, multiplier_and_rshift_truncated, scale_and_shift
from hago.emulation.tpu_mlir.operators import Multipliers
from hago.errors import HagoError, UnsupportedOp


# ---------------------------------------------------------------- matrix products
@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize(("source", "target"), [(SYMMETRIC, TARGET), (ASYMMETRIC, SHIFTED)])
@pytest.mark.parametrize("with_bias", [False, True])
def test_matrix_product(source: UniformType, target: UniformType, per_channel: bool, with_bias: bool) -> None:
    weight, bias = draw(1, 5, 3) * torch.tensor([1.0, 0.2, 3.0]), draw(2, 3)
    q = integers(3, 2, 4, 5)
    lowered = operators.lower_matmul(weight, bias if with_bias else None, source, target, per_channel=per_channel)
    got = operators.run_matmul(q, lowered, source, target)
    columns = weight.abs().amax(0) if per_channel else weight.abs().max().expand(3)
    for n in range(3):
        sw = float(columns[n]) / 127
        w = [round_exactly(Fraction(float(v) / sw), "half_away") for v in weight[:, n]]
        assert lowered.weight[:, n].tolist() == w
        real = (float(bias[n]) / (sw * source.scale) if with_bias else 0.0) - sum(w) * source.zero_point
        b = round_exactly(Fraction(real), "half_away")
        m, r = int(lowered.multiplier[n if per_channel else 0]), int(lowered.rshift[n if per_channel else 0])
        assert abs(m / 2**r - source.scale * sw / target.scale) < 1e-4
        for i, j in itertools.product(range(2), range(4)):
            acc = sum(int(a) * k for a, k in zip(q[i, j], w, strict=True)) + b
            assert int(got[i, j, n]) == clip(half_up(acc, m, r) + target.zero_point, -128, 127)


def test_one_scale_takes_the_32_bit_search() -> None:
    weight = draw(1, 5, 3)
    lowered = operators.lower_matmul(weight, None, SYMMETRIC, TARGET)
    m, r = scale_and_shift(0.02 * (float(weight.abs().max()) / 127) / 0.05)
    assert (lowered.multiplier.tolist(), lowered.rshift.tolist()) == ([int(m)], [int(r)])


def test_scales_per_channel_share_the_largest_shift_and_fall_back_to_8_bits() -> None:
    near = torch.tensor([0.1, 0.003, 0.02])
    m, r = operators.common_shift(near)
    separate = scale_and_shift(near)
    assert r.unique().numel() == 1 and int(r[0]) == int(separate[1].max())
    assert [int(a) for a in m] == [int(a) << int(r[0] - b) for a, b in zip(*separate, strict=True)]
    far = torch.tensor([1000.0, 0.01])
    m, r = operators.common_shift(far)
    separate = scale_and_shift(far, 8)
    assert r.tolist() == [int(separate[1].max())] * 2
    assert m.tolist() == [int(separate[0][0]) << int(separate[1][1] - separate[1][0]), int(separate[0][1])]
    with pytest.raises(HagoError, match="per tensor"):
        operators.common_shift(torch.tensor([1000.0, 1e-9]))


def test_product_of_two_activations() -> None:
    a, b = integers(0, 2, 3), integers(1, 3, 4)
    got = operators.matmul_of_activations(a, b, SYMMETRIC, UniformType(0.01), TARGET)
    m, r = (int(t) for t in scale_and_shift(0.02 * 0.01 / 0.05))
    for i, j in itertools.product(range(2), range(4)):
        acc = sum(int(x) * int(y) for x, y in zip(a[i], b[:, j], strict=True))
        assert int(got[i, j]) == clip(half_up(acc, m, r), -128, 127)


# ---------------------------------------------------------------- Add and Mul
@given(st.lists(st.floats(0.01, 3), min_size=1, max_size=3), st.integers(0, 100), st.booleans(), st.booleans())
@settings(max_examples=60)
def test_addition_rounds_every_operand(scales: list[float], seed: int, asymmetric: bool, relu: bool) -> None:
    zero = 9 if asymmetric else 0
    sources = [UniformType(s, zero) for s in scales]
    target = UniformType(0.5, -4 if asymmetric else 0)
    operands = [integers(seed + i, 20) for i in range(len(scales))]
    scaling = operators.add_multipliers(scales, target.scale)
    got = operators.add(operands, sources, target, scaling, do_relu=relu)
    for i in range(20):
        each = zip(operands, scaling.multipliers, scaling.rshifts, strict=True)
        parts = [half_up(int(q[i]) - zero, m, r) for q, m, r in each]
        total = max(sum(parts), 0) if relu else sum(parts)
        assert int(got[i]) == clip(total + target.zero_point, -128, 127)


def test_addition_on_cv18xx_rounds_the_sum() -> None:
    sources = [SYMMETRIC, UniformType(0.04)]
    scaling = operators.add_multipliers_cv18xx([0.02, 0.04], 0.05)
    assert scaling == Multipliers((51, 102), (7, 7))
    a, b = integers(0, 50), integers(1, 50)
    got = operators.add_cv18xx([a, b], sources, TARGET, scaling)
    expected = [clip(half_up(51 * int(x) + 102 * int(y), 1, 7), -128, 127) for x, y in zip(a, b, strict=True)]
    assert got.tolist() == expected


@given(st.floats(0.001, 20))
def test_bm1684_multipliers_of_an_addition(ratio: float) -> None:
    scaling = operators.add_multipliers_bm1684([ratio], 1.0)
    (m,), (r,) = scaling.multipliers, scaling.rshifts
    # The largest shift that keeps the multiplier within 127; a logarithm decides, so its edge has width.
    assert ratio * 2**r <= 127 * (1 + 1e-12) and ratio * 2 ** (r + 1) > 127 * (1 - 1e-12)
    assert m == clip(round_exactly(Fraction(float(np.float32(ratio * 2**r))), "half_away"), -128, 127)


def test_bm1684_rounds_where_cv18xx_cuts() -> None:
    assert operators.add_multipliers_bm1684([0.4, 0.8], 1.0) == Multipliers((102, 102), (8, 7))
    assert operators.add_multipliers_bm1684([0.4059], 1.0) == Multipliers((104,), (8,))
    assert multiplier_and_rshift_truncated(0.4059) == (103, 8)
    with pytest.raises(UnsupportedOp, match="float"):
        operators.add_multipliers_bm1684([0.4], 1.0, [-1.0])


def test_coefficients_scale_an_operand() -> None:
    plain = operators.add_multipliers([0.02, 0.02], 0.05)
    halved = operators.add_multipliers([0.02, 0.02], 0.05, [1.0, -0.5])
    assert halved.multipliers == (plain.multipliers[0], -plain.multipliers[1])
    assert halved.rshifts == (plain.rshifts[0], plain.rshifts[1] + 1)
    negative = operators.add_multipliers_cv18xx([0.1, 0.3], 1.0, [1.0, -1.0])
    assert negative == Multipliers((25, -76), (8, 8))


@given(st.integers(0, 100), st.booleans(), st.booleans())
@settings(max_examples=40)
def test_multiplication(seed: int, asymmetric: bool, relu: bool) -> None:
    zeros = (18, -3, 5) if asymmetric else (0, 0, 0)
    sources = [UniformType(0.02, zeros[0]), UniformType(0.3, zeros[1])]
    target = UniformType(0.7, zeros[2])
    a, b = integers(seed, 30), integers(seed + 1, 30)
    m, r = (int(t) for t in scale_and_shift(0.02 * 0.3 / 0.7, 8))
    got = operators.mul([a, b], sources, target, do_relu=relu)
    for x, y, z in zip(a.tolist(), b.tolist(), got.tolist(), strict=True):
        product = (x - zeros[0]) * (y - zeros[1])
        v = half_up(max(product, 0) if relu else product, m, r)
        assert z == clip(v + zeros[2], -128, 127)


# ---------------------------------------------------------------- rectifiers and padding
@given(st.integers(-128, 127), st.floats(0.001, 0.999))
def test_leaky_relu(q: int, alpha: float) -> None:
    m, r = (int(t) for t in scale_and_shift(alpha, 8))
    expected = q if q >= 0 else clip(half_up(q, m, r), -128, 127)
    assert operators.leaky_relu(torch.tensor([q]), alpha).tolist() == [expected]


@given(st.lists(st.floats(-1.5, 1.5, width=32), min_size=2, max_size=4), st.integers(0, 100))
def test_prelu(slopes: list[float], seed: int) -> None:
    _, r = multiplier_and_rshift_truncated(max(abs(s) for s in slopes))
    expected = [math.trunc(Fraction(s) * 2**r) for s in slopes]
    got_slopes, got_shift = operators.prelu_slopes(torch.tensor(slopes))
    assert (got_slopes.tolist(), got_shift) == (expected, r)
    q = integers(seed, 1, len(slopes), 6)
    got = operators.prelu(q, torch.tensor(slopes))
    for c, i in itertools.product(range(len(slopes)), range(6)):
        v = int(q[0, c, i])
        assert int(got[0, c, i]) == clip(v if v >= 0 else half_up(v, expected[c], r), -128, 127)


def test_one_slope_is_a_leaky_relu() -> None:
    q = integers(0, 1, 3, 4)
    assert torch.equal(operators.prelu(q, torch.tensor([0.3])), operators.leaky_relu(q, 0.3))


def test_padding_fills_with_the_integer_of_the_value() -> None:
    q = torch.tensor([[1, 2], [3, 4]])
    assert operators.pad(q, (0, 1, 1, 0), 0.1, SYMMETRIC).tolist() == [[5, 1, 2], [5, 3, 4], [5, 5, 5]]
    assert operators.pad_value(0.7, UniformType(3.5 / 255, 18)) == 69
    assert operators.pad(torch.tensor([0]), (1, 0), 99.0, SYMMETRIC).tolist() == [127, 0]


# ---------------------------------------------------------------- average pooling
def windows(q: Tensor, side: int, step: int, pad: int) -> list[list[int]]:
    """For every output position, the values of its window that are inside the input."""
    out = []
    for top in range(-pad, q.shape[0] + pad - side + 1, step):
        for left in range(-pad, q.shape[1] + pad - side + 1, step):
            places = itertools.product(range(top, top + side), range(left, left + side))
            out.append([int(q[y, x]) for y, x in places if 0 <= y < q.shape[0] and 0 <= x < q.shape[1]])
    return out


@pytest.mark.parametrize(("side", "step", "pad"), [(2, 2, 0), (3, 1, 0), (3, 2, 1)])
@pytest.mark.parametrize("counted", [True, False])
def test_symmetric_pooling_multiplies_the_sum_of_a_window(side: int, step: int, pad: int, counted: bool) -> None:
    q = integers(5, 7, 7)
    m, r = operators.avg_pool_multiplier(0.02, 0.015, side * side)
    assert (m, r) == tuple(int(t) for t in scale_and_shift(0.02 / (0.015 * side * side), 8))
    got = operators.avg_pool(
        q[None, None], (side, side), SYMMETRIC, UniformType(0.015), strides=(step, step), pads=(pad,) * 4,
        count_include_pad=counted,
    )  # fmt: skip
    expected = []
    for inside in windows(q, side, step, pad):
        total = Fraction(sum(inside)) if counted else Fraction(sum(inside) * side * side, len(inside))
        expected.append(clip(half_up(round_exactly(total, "half_away"), m, r), -128, 127))
    assert got.flatten().tolist() == expected


def test_asymmetric_pooling_is_a_float32_line_rounded_half_away() -> None:
    q = integers(6, 6, 6)
    scale, offset = operators.avg_pool_scale_and_offset(ASYMMETRIC, SHIFTED, 4)
    assert (scale, offset) == (pytest.approx(0.1), pytest.approx(-7 - 0.4 * 18))
    got = operators.avg_pool_asymmetric(q[None, None], (2, 2), ASYMMETRIC, SHIFTED)
    expected = [
        clip(round_exactly(Fraction(float(np.float32(sum(inside) * scale + offset))), "half_away"), -128, 127)
        for inside in windows(q, 2, 2, 0)
    ]
    assert got.flatten().tolist() == expected


def test_asymmetric_pooling_pads_with_the_zero_point_and_refuses_a_remainder() -> None:
    constant = torch.full((1, 1, 2, 2), 18)
    got = operators.avg_pool_asymmetric(constant, (2, 2), ASYMMETRIC, SHIFTED, pads=(1, 1, 1, 1))
    assert got.unique().tolist() == [-7]
    with pytest.raises(UnsupportedOp, match="float"):
        operators.avg_pool_asymmetric(integers(0, 1, 1, 5, 5), (2, 2), ASYMMETRIC, SHIFTED)


def test_pooling_in_one_axis_is_that_of_a_row() -> None:
    q = integers(7, 1, 2, 8)
    flat = operators.avg_pool(q, (4,), SYMMETRIC, TARGET)
    assert torch.equal(flat, operators.avg_pool(q.unsqueeze(2), (1, 4), SYMMETRIC, TARGET)[:, :, 0])


def test_cv18xx_pools_with_a_truncated_multiplier_in_float32() -> None:
    q = integers(8, 4, 4)
    m, r = operators.avg_pool_multiplier_cv18xx(0.02, 0.0123, 4)
    assert (m, r) == multiplier_and_rshift_truncated(0.02 / (0.0123 * 4))
    got = operators.avg_pool(
        q[None, None], (2, 2), SYMMETRIC, UniformType(0.0123), multiplier_and_rshift=(m, r), cv18xx=True
    )
    expected = [clip(half_up(sum(inside), m, r), -128, 127) for inside in windows(q, 2, 2, 0)]
    assert got.flatten().tolist() == expected


@pytest.mark.parametrize(
    ("window", "expected"),
    [(1, (1, 0)), (2, (1, 1)), (3, (171, 9)), (4, (1, 2)), (9, (57, 9)), (25, (41, 10)), (49, (167, 13)),
     (64, (1, 6)), (100, (41, 12)), (131, (125, 14)), (196, (167, 15)), (225, (73, 14))],
)  # fmt: skip
def test_bm1684_pools_with_an_8_bit_reciprocal(window: int, expected: tuple[int, int]) -> None:
    assert operators.avg_pool_multiplier_bm1684(window) == expected


def test_bm1684_reciprocals_are_odd_and_near() -> None:
    for window in range(1, 226):
        m, r = operators.avg_pool_multiplier_bm1684(window)
        assert m % 2 == 1 and m <= 255
        assert abs(m / 2**r * window - 1) <= 0.5 / 128
    with pytest.raises(UnsupportedOp, match="float"):
        operators.avg_pool_multiplier_bm1684(226)


# ---------------------------------------------------------------- refusals
Q = torch.zeros(1, 1, 4, 4, dtype=torch.int64)


@pytest.mark.parametrize(
    "call",
    [
        lambda: operators.lower_matmul(torch.ones(3), None, SYMMETRIC, TARGET),
        lambda: operators.lower_matmul(torch.zeros(3, 2), None, SYMMETRIC, TARGET),
        lambda: operators.lower_matmul(torch.ones(3, 2), torch.ones(3), SYMMETRIC, TARGET),
        lambda: operators.lower_matmul(torch.ones(2, 3, 2), None, ASYMMETRIC, TARGET),
        lambda: operators.matmul_of_activations(Q, Q, ASYMMETRIC, SYMMETRIC, TARGET),
        lambda: operators.add_multipliers([0.1], 1.0, [1.0, 2.0]),
        lambda: operators.add_multipliers([0.1], 0.0),
        lambda: operators.add_multipliers_bm1684([0.1], 1.0, [0.0]),
        lambda: operators.add([Q], [SYMMETRIC, SYMMETRIC], TARGET, Multipliers((1,), (0,))),
        lambda: operators.add([Q, Q], [SYMMETRIC, SYMMETRIC], TARGET, Multipliers((1,), (0,))),
        lambda: operators.mul([], [], TARGET),
        lambda: operators.mul_multiplier([], 1.0),
        lambda: operators.prelu(Q, torch.ones(3)),
        lambda: operators.prelu_slopes(torch.ones(0)),
        lambda: operators.prelu_slopes(torch.tensor([math.nan])),
        lambda: operators.leaky_relu(Q, math.inf),
        lambda: operators.pad_value(math.nan, SYMMETRIC),
        lambda: operators.pad(Q, (1, 1), 0.0, SYMMETRIC),
        lambda: operators.pad(Q, (-1,) * 8, 0.0, SYMMETRIC),
        lambda: operators.avg_pool(Q, (2, 2), ASYMMETRIC, TARGET),
        lambda: operators.avg_pool(Q, (2,), SYMMETRIC, TARGET),
        lambda: operators.avg_pool_multiplier(0.1, 0.1, 0),
        lambda: operators.avg_pool_scale_and_offset(SYMMETRIC, TARGET, 0),
        lambda: operators.avg_pool_multiplier_bm1684(0),
        lambda: operators.mul([Q, Q[..., :3]], [SYMMETRIC, SYMMETRIC], TARGET),
        lambda: operators.matmul_of_activations(Q, Q[..., :3, :], SYMMETRIC, SYMMETRIC, TARGET),
        lambda: operators.avg_pool(Q, (5, 2), SYMMETRIC, TARGET),
        lambda: operators.avg_pool(Q, (2, 2), SYMMETRIC, TARGET, strides=(0, 2)),
    ],
)
def test_bad_arguments_are_refused(call: object) -> None:
    with pytest.raises(HagoError):
        call()  # type: ignore[operator]
