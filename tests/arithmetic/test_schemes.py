"""Quantization parameters of ranges: known values, and laws of every scheme."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hago.arithmetic.numerics import dequantize, is_power_of_two, quantize, simulated_quantize
from hago.arithmetic.schemes import SCHEMES, SMALLEST_SCALE, TWO_SIDED, Grid, make_qparams
from hago.arithmetic.types import INT8, INT16, INT32, UINT8, DType, QParams, dtype
from hago.errors import HagoError

ENDS = st.floats(0.0, 2.0**60)


def qparams_of(scheme: str, lo: float, hi: float, bits: int, kind: DType, **options: bool) -> QParams:
    ends = (torch.tensor(end, dtype=torch.float64) for end in (lo, hi))
    return make_qparams(scheme, *ends, bits, kind, **options)


def numbers_of(q: QParams) -> tuple[float, int, int, int]:
    return float(q.scale), int(q.zero_point), q.qmin, q.qmax


# ---------------------------------------------------------------- known values
@pytest.mark.parametrize(
    "bits, threshold, scale, top, kind",
    [
        (8, 4.0, 0.03125, 127, INT8),
        (6, 4.0, 0.125, 31, INT8),
        (4, 1.0, 0.125, 7, INT8),
        (16, 6.0, 0.00018310546875, 32767, INT16),
        (32, 1.0, 4.656612873077393e-10, 2147483647, INT32),
    ],
)
def test_the_values_of_the_rfc(bits: int, threshold: float, scale: float, top: int, kind: DType) -> None:
    assert numbers_of(qparams_of("hago", -threshold, threshold, bits, kind)) == (scale, 0, -top, top)


@pytest.mark.parametrize(
    "scheme, lo, hi, kind, expected",
    [
        ("hago", 0.0, 4.0, UINT8, (4 / 256, 0, 0, 255)),
        ("hago", -1.0, 4.0, UINT8, (4 / 128, 128, 1, 255)),
        ("hago", 0.0, 4.0, INT8, (4 / 128, 0, -127, 127)),
        ("symmetric", -12.7, 3.0, INT8, (float(np.float32(0.1)), 0, -127, 127)),
        ("symmetric", 0.0, 25.5, UINT8, (float(np.float32(0.1)), 0, 0, 255)),
        ("affine", -1.0, 3.0, UINT8, (float(np.float32(4 / 255)), 64, 0, 255)),
        ("affine", -1.0, 3.0, INT8, (float(np.float32(4 / 255)), -64, -128, 127)),
        ("affine", 1.0, 3.0, UINT8, (float(np.float32(3 / 255)), 0, 0, 255)),
        ("affine", -3.0, -1.0, UINT8, (float(np.float32(3 / 255)), 255, 0, 255)),
        ("hago_affine", -2.0, 2.0, INT8, (4 / 256, 0, -128, 127)),
        ("hago_affine", 0.0, 2.0, INT8, (2 / 256, -128, -128, 127)),
    ],
)
def test_known_grids(scheme: str, lo: float, hi: float, kind: DType, expected: tuple[float, int, int, int]) -> None:
    assert numbers_of(qparams_of(scheme, lo, hi, 8, kind)) == expected


def test_a_tensor_of_zeros_has_scale_one() -> None:
    for scheme in SCHEMES:
        assert float(qparams_of(scheme, 0.0, 0.0, 8, INT8).scale) == 1.0
    assert float(qparams_of("hago", 0.0, 1e-40, 8, INT8).scale) == SMALLEST_SCALE


# ---------------------------------------------------------------- what holds of all
@pytest.mark.parametrize("scheme", SCHEMES)
@given(ENDS, ENDS, st.integers(2, 8), st.sampled_from(["int8", "uint8", "int16"]))
def test_every_scheme(scheme: str, below: float, above: float, bits: int, name: str) -> None:
    """Real zero is represented exactly, the ends to within a quantum (and a zero point's rounding), and
    the scale is a float32."""
    kind = dtype(name)
    q = qparams_of(scheme, -below, above, bits, kind)
    scale, zero, qmin, qmax = numbers_of(q)
    assert scale == float(np.float32(scale)) and scale >= SMALLEST_SCALE
    assert kind.min <= qmin <= zero <= qmax <= kind.max
    assert qmax - qmin < 1 << bits
    assert float(dequantize(quantize(torch.tensor([0.0]), q), q)) == 0.0
    slack = scale * (1.5 if scheme == "hago_affine" else 1.0) * (1 + 1e-5) + max(below, above) * 1e-6
    assert (qmin - zero) * scale <= -below + slack
    assert (qmax - zero) * scale >= above - slack


@pytest.mark.parametrize("scheme", SCHEMES)
@given(ENDS, ENDS, st.integers(2, 7))
def test_more_bits_are_never_coarser(scheme: str, below: float, above: float, bits: int) -> None:
    scales = [float(qparams_of(scheme, -below, above, b, INT8).scale) for b in (bits, bits + 1)]
    assert scales[1] <= scales[0]


@given(ENDS, ENDS, st.integers(2, 8), st.sampled_from(["int8", "uint8"]))
def test_powers_of_two(below: float, above: float, bits: int, name: str) -> None:
    q = qparams_of("symmetric", -below, above, bits, dtype(name), power_of_two=True)
    scale, zero, _qmin, qmax = numbers_of(q)
    assert is_power_of_two(q.scale) and zero in (0, 1 << (bits - 1))
    most = max(below, above)
    assert (qmax + 1 - zero) * scale >= most
    if most > 1e-20:
        assert (qmax + 1 - zero) * scale < 2 * most * (1 + 1e-9)


def test_per_channel_is_each_channel_alone() -> None:
    lo, hi = torch.tensor([[-1.0], [-2.0], [-0.5]]).double(), torch.tensor([[3.0], [1.0], [0.5]]).double()
    for scheme in SCHEMES:
        whole = make_qparams(scheme, lo, hi, 8, INT8)
        for row in range(3):
            alone = make_qparams(scheme, lo[row], hi[row], 8, INT8)
            assert whole.scale[row].equal(alone.scale) and whole.zero_point[row].equal(alone.zero_point)


def test_two_sided_schemes_are_those_that_use_both_ends() -> None:
    for scheme in SCHEMES:
        differ = float(qparams_of(scheme, -1.0, 3.0, 8, INT8).scale) != float(
            qparams_of(scheme, -3.0, 3.0, 8, INT8).scale
        )
        assert differ == (scheme in TWO_SIDED)


@pytest.mark.parametrize("lo, hi", [(1.0, -1.0), (0.0, math.inf), (math.nan, 1.0), (-math.inf, 0.0)])
def test_invalid_ranges_are_refused(lo: float, hi: float) -> None:
    with pytest.raises(HagoError, match="finite with lo <= hi"):
        qparams_of("hago", lo, hi, 8, INT8)


@pytest.mark.parametrize("bits, kind", [(9, INT8), (1, INT8), (0, INT16), (17, INT16)])
def test_bits_that_do_not_fit(bits: int, kind: DType) -> None:
    with pytest.raises(HagoError, match=f"{bits} bits do not fit {kind}"):
        qparams_of("hago", -1.0, 1.0, bits, kind)


def test_invalid_grids_are_refused() -> None:
    with pytest.raises(HagoError, match="Did you mean 'affine'"):
        Grid(8, "afine")
    for bits, signed in ((1, True), (65, True), (64, False)):
        with pytest.raises(HagoError, match=f"a grid of {bits} bits"):
            Grid(bits, signed=signed)


# ---------------------------------------------------------------- the RFC's operator on real values
def real(x: list[float], **options: object) -> list[float]:
    return simulated_quantize(torch.tensor(x), **options).tolist()  # type: ignore[arg-type]


def test_simulated_quantize_clips_one_quantum_below_the_threshold() -> None:
    x = [-1.5, -1, -0.3, 0, 0.004, 0.5, 0.996, 1, 1.5]
    found = real(x, out_scale=1 / 128, clip_min=-127, clip_max=127, out_dtype="int8")
    assert found == [-0.9921875, -0.9921875, -0.296875, 0, 0.0078125, 0.5, 0.9921875, 0.9921875, 0.9921875]
    x = [-1.5, -1, -0.3, 0, 0.1, 0.5, 0.99, 1, 1.5]
    found = real(x, out_scale=1 / 8, clip_min=-7, clip_max=7, out_dtype="int8")
    assert found == [-0.875, -0.875, -0.25, 0, 0.125, 0.5, 0.875, 0.875, 0.875]


def test_simulated_quantize_wraps_values_beyond_in_dtype() -> None:
    assert real([63.5, 64, -64, -64.5, 100], in_scale=0.5, in_dtype="int8") == [63.5, -64, -64, 63.5, -28]
    assert real([32767, 32768, 40000, -32769], in_dtype="int16") == [32767, -32768, -25536, 32767]


def test_simulated_quantize_from_one_scale_to_another() -> None:
    x = [0, 0.04, 0.06, 1, 12.7, 13, -20]
    found = real(x, in_scale=0.01, out_scale=0.1, clip_min=-127, clip_max=127, in_dtype="int32", out_dtype="int8")
    assert found == pytest.approx([0, 0, 0.1, 1, 12.7, 12.7, -12.7], rel=1e-6)


def test_simulated_quantize_between_floats_changes_nothing() -> None:
    assert real([0.1, -7.3]) == torch.tensor([0.1, -7.3]).tolist()
    assert real([0.5, 1.5], out_dtype="int8", rounding="half_up") == [1, 2]
    with pytest.raises(HagoError, match="Did you mean 'int8'"):
        real([0.0], out_dtype="itn8")


def channels(x: float, thresholds: list[float]) -> Tensor:
    ends = torch.tensor(thresholds, dtype=torch.float64).reshape(1, -1, 1)
    q = make_qparams("hago", -ends, ends, 8, INT8)
    return dequantize(quantize(torch.full((3, len(thresholds), 5), x), q), q)


def test_a_threshold_per_channel() -> None:
    found = channels(0.7, [1.0, 2.0, 4.0, 8.0])
    assert found[0, :, 0].tolist() == [0.703125, 0.703125, 0.6875, 0.6875]
    assert bool((found == found[:1, :, :1]).all())
