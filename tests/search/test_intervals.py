"""Quantiles and intervals equal those of scipy.stats, which takes too long to import, to the last bit."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from hago.search.confirmation import _t_quantile
from hago.search.intervals import _normal_quantile, share_difference, wilson_interval

PROBABILITIES = st.floats(0.5, 1.0)


@given(PROBABILITIES)
def test_the_normal_quantile(probability: float) -> None:
    assert _normal_quantile(probability) == float(stats.norm.ppf(probability))


@given(PROBABILITIES, st.integers(1, 500))
def test_the_quantile_of_students_t(probability: float, freedom: int) -> None:
    assert _t_quantile(probability, freedom) == float(stats.t.ppf(probability, freedom))


def test_quantiles_of_certainty() -> None:
    assert _normal_quantile(1.0) == _t_quantile(1.0, 3) == math.inf


@given(st.data(), st.integers(1, 5000), st.floats(0.5, 0.999))
def test_the_interval_of_a_proportion(data: st.DataObject, samples: int, confidence: float) -> None:
    right = data.draw(st.integers(0, samples))
    scipys = stats.binomtest(right, samples).proportion_ci(confidence, method="wilson")
    assert wilson_interval(float(right), samples, confidence) == (float(scipys.low), float(scipys.high))


@pytest.mark.parametrize("right", [0, 7])
def test_an_interval_ends_where_proportions_do(right: int) -> None:
    assert wilson_interval(right, 7)[right // 7] == right / 7


def test_a_difference_of_shares_needs_enough_samples_that_differ() -> None:
    for samples in (200, 2000):
        for won, lost in itertools.product(range(16), range(4)):
            first, second = torch.zeros(samples), torch.zeros(samples)
            second[:won], first[won : won + lost] = 1.0, 1.0
            mean, low, high = share_difference(first, second)
            assert mean == pytest.approx((won - lost) / samples, abs=1e-9)
            assert share_difference(second, first) == pytest.approx((-mean, -high, -low), abs=1e-12)
            if won + lost and (low > 0.0 or high < 0.0):
                assert stats.binomtest(won, won + lost).pvalue < 0.05
            if won >= 6 and not lost:
                assert low > 0.0
    assert share_difference(torch.ones(5), torch.ones(5)) == (0.0, 0.0, 0.0)


def test_the_interval_of_a_difference_of_shares_holds_the_difference() -> None:
    generator = torch.Generator().manual_seed(0)
    for gain, loss in ((0.01, 0.01), (0.02, 0.0), (0.1, 0.05)):
        held = 0
        for _ in range(400):
            x = torch.rand(300, generator=generator)
            first, second = ((x >= gain) & (x < gain + loss)).float(), (x < gain).float()
            _, low, high = share_difference(first, second)
            held += low <= gain - loss <= high
        assert held >= 0.93 * 400
