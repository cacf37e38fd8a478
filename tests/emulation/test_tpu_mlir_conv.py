"""TPU-MLIR's convolutions against loops over Python's integers, and the older chips against their rules."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from exact import clip, round_exactly
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from emulation.integers import ASYMMETRIC, RELU, SHIFTED, SYMMETRIC, TARGET, draw, half_up, integers
from hago.arithmetic.types import INT8, UINT8
from hago.emulation.tpu_mlir import operators
from hago.emulation.tpu_mlir.numerics import UniformType, scale_and_shift
from hago.emulation.tpu_mlir.operators import IntegerConv
from hago.errors import HagoError, UnsupportedOp


# ---------------------------------------------------------------- convolution
def conv_by_loops(
    q: Tensor, conv: IntegerConv, source: UniformType, target: UniformType, step: int, pad: int, relu: bool
) -> list[list[list[int]]]:
    """Convolve one image with one group and square steps and pads, subtracting the zero point from every value."""
    out, depth, kh, kw = conv.weight.shape
    height, width = q.shape[1] + 2 * pad - kh, q.shape[2] + 2 * pad - kw
    answer = []
    for o in range(out):
        # The bias contains -sum(W) * zx: remove it, because the zero point is subtracted from every value here.
        folded = int(conv.weight[o].sum()) * source.zero_point
        bias = folded + (0 if conv.bias is None else int(conv.bias[o]))
        rows = []
        for top in range(0, height + 1, step):
            row = []
            for left in range(0, width + 1, step):
                acc = bias
                for c, i, j in itertools.product(range(depth), range(kh), range(kw)):
                    y, x = top + i - pad, left + j - pad
                    inside = 0 <= y < q.shape[1] and 0 <= x < q.shape[2]
                    real = int(q[c, y, x]) - source.zero_point if inside else 0
                    acc += real * int(conv.weight[o, c, i, j])
                v = half_up(acc, int(conv.multiplier[o]), int(conv.rshift[o])) + target.zero_point
                v = max(v, target.zero_point) if relu else v
                row.append(clip(v, target.dtype.min, target.dtype.max))
            rows.append(row)
        answer.append(rows)
    return answer


@pytest.mark.parametrize(
    ("source", "target", "relu"),
    [
        (SYMMETRIC, TARGET, False),
        (ASYMMETRIC, SHIFTED, False),
        (ASYMMETRIC, RELU, True),
        (UniformType(0.02, 30, UINT8), SHIFTED, True),
    ],
)
@pytest.mark.parametrize(("step", "pad"), [(1, 0), (1, 1), (2, 1)])
def test_convolution(source: UniformType, target: UniformType, relu: bool, step: int, pad: int) -> None:
    weight, bias = draw(1, 3, 2, 2, 3), draw(2, 3)
    q = integers(3, 2, 5, 6, low=source.dtype.min, high=source.dtype.max)
    conv = operators.lower_conv(weight, bias, source, target)
    got = operators.run_conv(q.unsqueeze(0), conv, source, target, strides=(step, step), pads=(pad,) * 4, do_relu=relu)
    assert got[0].tolist() == conv_by_loops(q, conv, source, target, step, pad, relu)


def test_a_convolutions_weights_bias_and_multipliers() -> None:
    weight, bias = draw(1, 4, 3, 3, 3), draw(2, 4)
    conv = operators.lower_conv(weight, bias, ASYMMETRIC, SHIFTED)
    for o in range(4):
        sw = float(np.float32(np.float32(weight[o].abs().max()) / np.float32(127)))
        expected = [round_exactly(Fraction(float(w) / sw), "half_away") for w in weight[o].flatten()]
        assert conv.weight[o].flatten().tolist() == expected
        real = float(bias[o]) / (sw * 0.02) - sum(expected) * 18
        assert conv.bias is not None and int(conv.bias[o]) == round_exactly(Fraction(real), "half_away")
        pair = scale_and_shift(sw * 0.02 / 0.05)
        assert (int(conv.multiplier[o]), int(conv.rshift[o])) == (int(pair[0]), int(pair[1]))


def test_nonnegative_weights_without_a_bias_are_unsigned_and_have_no_zero_point_correction() -> None:
    weight = draw(1, 2, 1, 2, 2).abs()
    conv = operators.lower_conv(weight, None, SYMMETRIC, TARGET)
    assert conv.dtype is UINT8 and conv.bias is None
    assert conv.weight.flatten(1).max(1).values.tolist() == [255, 255]
    shifted = operators.lower_conv(weight, None, ASYMMETRIC, TARGET)
    assert shifted.bias is not None and shifted.bias.tolist() == [0, 0]


def test_weights_that_are_multiples_of_a_power_of_two_have_it_as_their_scale() -> None:
    weight = torch.tensor([[[[1.5, -2.0]]], [[[0.25, 3.0]]]])
    conv = operators.lower_conv(weight, None, SYMMETRIC, TARGET)
    assert conv.weight.flatten().tolist() == [6, -8, 1, 12]
    assert conv.multiplier.unique().numel() == 1


def test_a_channel_of_zeros_has_the_smallest_scale_and_an_input_of_zeros_that_of_the_bias() -> None:
    weight = torch.stack([torch.zeros(1, 1, 1), torch.full((1, 1, 1), 0.3)])
    scales = operators.weight_scales(weight, INT8)
    assert scales.tolist() == [float(np.float32(1e-5)), float(np.float32(0.3) / np.float32(127))]
    silent = UniformType(1e-7)
    conv = operators.lower_conv(weight, torch.tensor([1.27, -1.27]), silent, TARGET)
    assert conv.bias is not None and conv.bias[1] == -round(1.27 / (float(scales[1]) * 0.01))


def test_one_and_three_axes_and_groups() -> None:
    q = integers(0, 1, 2, 9)
    conv = operators.lower_conv(draw(0, 3, 2, 3), draw(1, 3), ASYMMETRIC, SHIFTED)
    flat = operators.run_conv(q, conv, ASYMMETRIC, SHIFTED, strides=(2,), pads=(1, 0))
    plane = IntegerConv(conv.weight.unsqueeze(2), conv.bias, conv.multiplier, conv.rshift, conv.dtype)
    tall = operators.run_conv(q.unsqueeze(2), plane, ASYMMETRIC, SHIFTED, strides=(1, 2), pads=(0, 1, 0, 0))
    assert torch.equal(flat, tall[:, :, 0])
    cube = IntegerConv(plane.weight.unsqueeze(2), conv.bias, conv.multiplier, conv.rshift, conv.dtype)
    deep = operators.run_conv(
        q.unsqueeze(2).unsqueeze(2), cube, ASYMMETRIC, SHIFTED, strides=(1, 1, 2), pads=(0, 0, 1, 0, 0, 0)
    )
    assert torch.equal(flat, deep[:, :, 0, 0])
    grouped = operators.lower_conv(draw(0, 4, 1, 2, 2), draw(1, 4), ASYMMETRIC, SHIFTED)
    x = integers(1, 1, 2, 4, 4)
    both = operators.run_conv(x, grouped, ASYMMETRIC, SHIFTED, groups=2)
    halves = [
        operators.run_conv(
            x[:, g : g + 1],
            IntegerConv(
                grouped.weight[2 * g : 2 * g + 2],
                None if grouped.bias is None else grouped.bias[2 * g : 2 * g + 2],
                grouped.multiplier[2 * g : 2 * g + 2],
                grouped.rshift[2 * g : 2 * g + 2],
                INT8,
            ),
            ASYMMETRIC,
            SHIFTED,
        )
        for g in (0, 1)
    ]
    assert torch.equal(both, torch.cat(halves, 1))


# ---------------------------------------------------------------- convolution on older chips
@given(st.floats(2.0**-10, 8, width=32), st.floats(0.001, 1), st.floats(0.001, 1))
def test_bm1684_takes_the_largest_shift_that_keeps_the_weights_in_8_bits(absmax: float, sx: float, sy: float) -> None:
    r = operators.bm1684_rshift(absmax, sx, sy)
    ratio = float(np.float32(absmax)) * sx / sy
    if r < 0:
        assert ratio >= 127
    else:
        assert ratio * 2**r < 127
        assert r == 31 or ratio * 2 ** (r + 1) >= 127


def test_bm1684_convolution() -> None:
    weight, bias, q = draw(1, 3, 2, 2, 2), draw(2, 3), integers(3, 1, 2, 4, 4)
    conv = operators.lower_conv_bm1684(weight, bias, SYMMETRIC, TARGET)
    scale = np.float32(2.0**conv.rshift * 0.02 / 0.05)
    expected = [round_exactly(Fraction(float(np.float32(w) * scale)), "half_away") for w in weight.flatten().tolist()]
    assert conv.weight.flatten().tolist() == expected
    step = np.float32(2.0**conv.rshift / 0.05)
    products = [Fraction(float(np.float32(b) * step)) for b in bias.tolist()]
    assert conv.bias is not None
    assert conv.bias.tolist() == [round_exactly(p, "half_away") for p in products]
    as_shift = IntegerConv(conv.weight, conv.bias, torch.ones(3).long(), torch.full((3,), conv.rshift), INT8)
    got = operators.run_conv_bm1684(q, conv, SYMMETRIC, TARGET, do_relu=True)
    assert got[0].tolist() == conv_by_loops(q[0], as_shift, SYMMETRIC, TARGET, 1, 0, True)


def test_bm1684_reduces_the_shift_if_the_bias_overflows_and_refuses_a_negative_shift() -> None:
    weight = torch.full((1, 1, 1, 1), 0.01)
    without = operators.lower_conv_bm1684(weight, None, SYMMETRIC, TARGET)
    with_bias = operators.lower_conv_bm1684(weight, torch.tensor([100.0]), SYMMETRIC, TARGET)
    assert with_bias.rshift < without.rshift
    assert with_bias.bias is not None and abs(int(with_bias.bias)) <= 32767
    with pytest.raises(UnsupportedOp, match="float"):
        operators.lower_conv_bm1684(torch.full((1, 1, 1, 1), 1e4), None, SYMMETRIC, TARGET)


def test_cv18xx_convolution_rounds_twice() -> None:
    weight, bias, q = draw(1, 3, 2, 2, 2), draw(2, 3) * 0.1, integers(3, 1, 2, 4, 4)
    tx, ty = 127 * SYMMETRIC.scale, 127 * TARGET.scale * 4
    conv = operators.lower_conv_cv18xx(weight, bias, tx, ty)
    assert bool((conv.weight.flatten(1).abs().max(1).values == 127).all())
    got = operators.run_conv_cv18xx(q, conv, SYMMETRIC, UniformType(TARGET.scale * 4))
    assert conv.bias is not None
    for o, i, j in itertools.product(range(3), range(3), range(3)):
        acc = int((q[0, :, i : i + 2, j : j + 2] * conv.weight[o]).sum()) + int(conv.bias[o])
        high = round_exactly(Fraction(acc * int(conv.multiplier[o]), 1 << 31), "half_up")
        v = round_exactly(Fraction(high, 1 << int(conv.rshift[o])), "half_away")
        assert int(got[0, o, i, j]) == clip(v, -128, 127)


def test_windows_of_one_axis_have_the_same_defaults_on_every_chip() -> None:
    weight, q = torch.tensor([[[0.5, -0.25]]]), torch.tensor([[[4, 8, -12]]])
    shifted = operators.lower_conv_bm1684(weight, None, SYMMETRIC, TARGET)
    doubly_rounded = operators.lower_conv_cv18xx(weight, None, 1.0, 1.0)
    explicit = {"strides": (1,), "pads": (0, 0), "dilations": (1,)}
    for run, conv in ((operators.run_conv_bm1684, shifted), (operators.run_conv_cv18xx, doubly_rounded)):
        got = run(q, conv, SYMMETRIC, TARGET)  # type: ignore[operator]
        assert torch.equal(got, run(q, conv, SYMMETRIC, TARGET, **explicit))  # type: ignore[operator]


def test_cv18xx_ratios_are_limited_to_below_one_and_raised_for_the_bias() -> None:
    big = operators.lower_conv_cv18xx(torch.full((1, 1, 1, 1), 300.0), None, 1.0, 1.0)
    assert (int(big.multiplier[0]), int(big.rshift[0])) == (round(0.999999 * 2**31), 0)
    assert int(big.weight) == 127  # 300 / 0.999999 saturates
    small = torch.full((1, 1, 1, 1), 1e-9)
    of_bias = operators.lower_conv_cv18xx(small, torch.tensor([50.0]), 1.0, 1.0)
    assert of_bias.bias is not None and 0.99 * (1 << 31) < int(of_bias.bias) < 1 << 31
    assert operators.cv18xx_qscale(1.0, 1.0, -3.0) == operators.cv18xx_qscale(1.0, 1.0, 1e-5)


# ---------------------------------------------------------------- refusals
W = torch.ones(2, 1, 2, 2)
CONV = operators.lower_conv(W, None, SYMMETRIC, TARGET)
Q = torch.zeros(1, 1, 4, 4, dtype=torch.int64)


@pytest.mark.parametrize(
    "call",
    [
        lambda: operators.lower_conv(torch.ones(2, 2), None, SYMMETRIC, TARGET),
        lambda: operators.lower_conv(W * math.nan, None, SYMMETRIC, TARGET),
        lambda: operators.lower_conv(W, torch.ones(3), SYMMETRIC, TARGET),
        lambda: operators.lower_conv(W, torch.tensor([math.inf, 0.0]), SYMMETRIC, TARGET),
        lambda: operators.run_conv(Q + 200, CONV, SYMMETRIC, TARGET),
        lambda: operators.run_conv(Q.float(), CONV, SYMMETRIC, TARGET),
        lambda: operators.run_conv(Q[0], CONV, SYMMETRIC, TARGET),
        lambda: operators.run_conv(Q, CONV, SYMMETRIC, TARGET, pads=(1, 1)),
        lambda: operators.run_conv(Q, CONV, SYMMETRIC, TARGET, groups=2),
        lambda: operators.bm1684_rshift(0.0, 1.0, 1.0),
        lambda: operators.run_conv(Q[..., :1], CONV, SYMMETRIC, TARGET),
        lambda: operators.run_conv(Q, CONV, SYMMETRIC, TARGET, strides=(0, 1)),
        lambda: operators.run_conv(Q, CONV, SYMMETRIC, TARGET, strides=(1,)),
        lambda: operators.run_conv(Q, CONV, SYMMETRIC, TARGET, dilations=(4, 1)),
        lambda: operators.run_conv(Q, CONV, SYMMETRIC, TARGET, pads=(-1, 0, 0, 0)),
    ],
)
def test_bad_arguments_are_refused(call: object) -> None:
    with pytest.raises(HagoError):
        call()  # type: ignore[operator]
