"""TPU-MLIR's histograms and threshold methods against loops, and the laws that thresholds keep."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hago.emulation.tpu_mlir import calibration
from hago.emulation.tpu_mlir.calibration import (
    Histogram,
    divergences,
    extend_histogram,
    histogram,
    kl_threshold_of_counts,
)
from hago.errors import DataError, HagoError


def draw(seed: int, count: int = 2000) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed))


# ---------------------------------------------------------------- histograms
@given(st.integers(0, 50), st.integers(2, 64))
@settings(max_examples=40)
def test_a_histogram_counts_magnitudes_to_the_nearest_bin(seed: int, bins: int) -> None:
    x = torch.cat([draw(seed, 50), torch.zeros(3)])
    result = histogram(x, bins)
    width = np.float32(float(x.abs().max()) / (bins - 1))
    expected = [0] * bins
    for v in np.abs(x.numpy()):
        if v != 0:
            expected[int(np.floor(np.float32(v / width) + np.float32(0.5)))] += 1
    assert result.counts.tolist() == expected
    assert result.top == float(x.abs().max()) and result.width == pytest.approx(float(width))
    assert int(result.counts.sum()) == 50


def test_a_batch_within_the_range_is_counted_in_the_same_bins() -> None:
    first = histogram(torch.tensor([0.0, 1.0, 2.0, 3.0]), 4)
    second = extend_histogram(first, torch.tensor([1.0, -2.9, 0.0]))
    assert first.counts.tolist() == [0, 1, 1, 1]
    assert second.counts.tolist() == [0, 2, 1, 2]
    assert (second.width, second.top) == (first.width, first.top)


def test_a_batch_past_the_range_appends_whole_steps() -> None:
    first = histogram(torch.tensor([1.0, 2.0, 4.0]), 8)
    second = extend_histogram(first, torch.tensor([-5.2]))
    # step 4 / 8; (5.2 - 4) // 0.5 + 1 = 3 more bins, up to 5.5.
    assert second.counts.numel() == 11 and second.top == 5.5
    assert second.width == pytest.approx(5.5 / 10)
    assert second.counts[:8].tolist() == first.counts.tolist()
    assert second.counts[8:].tolist() == [0, 1, 0]


def test_no_value_is_lost_over_batches() -> None:
    gathered = histogram(draw(0), 256)
    for seed in range(1, 6):
        gathered = extend_histogram(gathered, draw(seed) * seed)
    assert int(gathered.counts.sum()) == 6 * 2000
    assert gathered.top >= max(float((draw(s) * max(s, 1)).abs().max()) for s in range(6))


def test_a_range_that_grows_too_far_or_from_zero_starts_the_histogram_over() -> None:
    leap = extend_histogram(histogram(torch.tensor([1e-6]), 16), torch.tensor([100.0, 50.0]), 16)
    assert leap.counts.numel() == 16 and int(leap.counts.sum()) == 2
    nothing = histogram(torch.zeros(4), 16)
    assert nothing.width == 0 and int(nothing.counts.sum()) == 0
    assert extend_histogram(nothing, torch.tensor([3.0])).top == 3.0


# ---------------------------------------------------------------- kl
def divergence_by_loops(hist: list[int], end: int, groups: int) -> float:
    """The divergence of one candidate, bin by bin, in float32 where TPU-MLIR uses it."""
    f = np.float32
    p = [f(0)] * end
    for j, count in enumerate(hist):
        p[min(j, end - 1)] += f(count)
    p = [v / f(sum(hist)) for v in p]
    inside, size, q = f(sum(hist[:end])), end // groups, []
    for g in range(groups):
        run = hist[g * size : (g + 1) * size]
        level = f(sum(run)) / f(max(1, sum(c > 0 for c in run))) / inside
        q += [level if c > 0 else f(0) for c in run]
    total = f(0)
    for a, b in zip(p, q, strict=True):
        total = f(float(total) + float(a) * (math.log10(float(a) + 1e-30) - math.log10(float(b) + 1e-30)))
    return float(total)


@given(st.lists(st.integers(0, 40), min_size=32, max_size=70), st.sampled_from([4, 8]))
@settings(max_examples=40)
def test_divergences_are_their_definition(hist: list[int], groups: int) -> None:
    hist[0] += 1
    got = divergences(torch.tensor(hist), groups).tolist()
    expected = [divergence_by_loops(hist, end, groups) for end in range(groups, len(hist) + 1, groups)]
    assert got == pytest.approx(expected, rel=1e-5, abs=1e-6)
    m = got.index(min(got))
    assert kl_threshold_of_counts(torch.tensor(hist), 0.5, groups) == (m + 1) * groups * 0.5


def test_a_long_tail_is_clipped_and_a_flat_histogram_is_not() -> None:
    x = draw(0, 20000)
    x[0] = 50.0
    assert calibration.kl_threshold(x) == pytest.approx(128 * 50 / 2047, rel=1e-6)
    assert kl_threshold_of_counts(torch.full((2048,), 100), 1.0) == 2048


def test_kl_of_batches_is_that_of_their_histogram() -> None:
    gathered = extend_histogram(histogram(draw(0)), draw(1) * 3)
    threshold = calibration.kl_threshold_of_histogram(gathered)
    assert threshold == kl_threshold_of_counts(gathered.counts, gathered.width)
    assert 0 < threshold <= gathered.top * 1.001
    four = calibration.kl_threshold_of_histogram(gathered, 4)
    assert four == kl_threshold_of_counts(gathered.counts, gathered.width, 8) and four < threshold


# ---------------------------------------------------------------- other methods
def octav_by_loops(values: list[float], bits: int) -> float:
    unsigned = 4 if abs(min(values)) < 1e-6 else 1
    magnitudes = [abs(v) for v in values]
    s = sum(magnitudes) / sum(m > 0 for m in magnitudes)
    for _ in range(20):
        above = [m for m in magnitudes if m > s]
        below = len(magnitudes) - len(above)
        following = sum(above) / (below / (4**bits * 3 * unsigned) + len(above))
        if abs(following - s) < 1e-6:
            break
        s = following
    return s


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("seed", range(4))
def test_mse_is_octav(seed: int, bits: int) -> None:
    x = draw(seed, 400) * (seed + 1)
    for values in (x, x.abs().clamp_min(0.1), torch.relu(x)):
        listed = [float(v) for v in values]
        assert calibration.mse_threshold(values, bits) == pytest.approx(octav_by_loops(listed, bits), rel=1e-9)


def test_aciq_follows_its_formulas() -> None:
    x = draw(3, 1000)
    spread = float(x.max() - x.min())
    std = spread * 0.175 * (1 + math.sqrt(math.pi * math.log(4))) / math.sqrt(2 * math.log(1000))
    assert calibration.aciq_gauss_threshold(x) == pytest.approx(3.92403337 * std)
    assert calibration.aciq_gauss_threshold(x, 4) == pytest.approx(2.55913642 * std)
    mean = float(x.double().mean())
    b = sum(abs(float(v) - mean) for v in x) / 1000
    assert calibration.aciq_laplace_threshold(x) == pytest.approx(9.89675982 * b)
    assert calibration.aciq_laplace_threshold(x, 4) == pytest.approx(5.02864014 * b)


@given(st.integers(2, 400), st.sampled_from([50.0, 90.0, 99.0, 99.9, 99.99]))
@settings(max_examples=60)
def test_percentiles_interpolate_between_order_statistics(count: int, percent: float) -> None:
    x = draw(count, count)
    low, high = calibration.percentile_range(x, percent)
    if int(count * (1 - percent / 100)) + 1 == 1:
        assert (low, high) == (float(x.min()), float(x.max()))
    else:
        values = np.sort(x.double().numpy())
        # The engine counts from the top and interpolates upwards: up to two order statistics away
        # from the percentile by the book.
        k = int(percent / 100 * (count - 1))
        assert values[max(k - 1, 0)] <= high <= values[min(k + 3, count - 1)]
        assert values[max(count - 4 - k, 0)] <= low <= values[min(count - k, count - 1)]
    assert calibration.percentile_threshold(x, percent) == max(abs(low), abs(high))


def test_a_percentile_by_hand() -> None:
    # 15000 values keep int(1.5) + 1 = 2 at either end; the fraction of 0.9999 * 14999 is 0.5001.
    x = torch.arange(15000, dtype=torch.float32)
    low, high = calibration.percentile_range(x, 99.99)
    assert (low, high) == (pytest.approx(1 - 0.5001), pytest.approx(14998.5001))
    assert calibration.percentile_of_operator(0, 10) == 99.99
    assert 99.9999 < calibration.percentile_of_operator(999, 1000) < 99.999999


@pytest.mark.parametrize("method", calibration.METHODS)
def test_thresholds_scale_with_the_values_and_ignore_their_sign(method: str) -> None:
    x = draw(9)
    one, four = calibration.threshold(x, method), calibration.threshold(x * 4, method)
    assert four == pytest.approx(4 * one, rel=1e-4)
    assert calibration.threshold(-x, method) == pytest.approx(one, rel=1e-4)
    assert one > 0


def test_values_that_are_all_zero() -> None:
    zeros = torch.zeros(10)
    assert calibration.threshold(zeros, "mse") == 1.0
    for method in ("max", "kl", "percentile9999", "aciq_gauss", "aciq_laplace"):
        assert calibration.threshold(zeros, method) == 0.0
        assert calibration.table_threshold([calibration.threshold(zeros, method)], 0.0) == 1e-5


def test_a_table_holds_the_mean_over_batches_within_the_range() -> None:
    assert calibration.table_threshold([1.0, 2.0], 5.0) == 1.5
    assert calibration.table_threshold([8.0, 9.0], 5.0) == 5.0
    assert calibration.table_threshold([1e-5], 5.0) == 1e-5
    assert calibration.table_threshold([math.nan], 5.0) == 1e-5


@pytest.mark.parametrize(
    "call",
    [
        lambda: histogram(torch.zeros(0)),
        lambda: histogram(torch.tensor([math.nan])),
        lambda: histogram(torch.ones(3), 1),
        lambda: extend_histogram(Histogram(torch.ones(4).long(), 1.0, 3.0), torch.tensor([math.inf])),
        lambda: divergences(torch.zeros(256, dtype=torch.int64)),
        lambda: divergences(torch.ones(100, dtype=torch.int64)),
        lambda: divergences(-torch.ones(256, dtype=torch.int64)),
        lambda: kl_threshold_of_counts(torch.ones(256, dtype=torch.int64), 0.0),
        lambda: calibration.threshold(torch.ones(3), "klx"),
        lambda: calibration.threshold(torch.zeros(0), "max"),
        lambda: calibration.threshold(torch.ones(3), "kl", 5),
        lambda: calibration.threshold(torch.ones(3), "aciq_gauss", 5),
        lambda: calibration.threshold(torch.ones(1), "aciq_gauss"),
        lambda: calibration.mse_threshold(torch.ones(3), 0),
        lambda: calibration.percentile_range(torch.ones(3), 100.0),
        lambda: calibration.percentile_of_operator(3, 3),
        lambda: calibration.table_threshold([], 1.0),
    ],
)
def test_bad_arguments_are_refused(call: object) -> None:
    with pytest.raises(HagoError):
        call()  # type: ignore[operator]


def test_empty_data_is_a_data_error() -> None:
    with pytest.raises(DataError, match="empty"):
        calibration.max_threshold(torch.zeros(0))
