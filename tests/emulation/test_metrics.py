"""Similarities and losses against values worked out by hand, and the laws that they keep."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hago.emulation.tpu_mlir import metrics
from hago.errors import HagoError

vectors = st.lists(st.floats(-100, 100, width=32), min_size=2, max_size=8).map(torch.tensor)


def test_by_hand() -> None:
    a, b = torch.tensor([3.0, 4.0]), torch.tensor([4.0, 3.0])
    assert metrics.cosine_similarity(a, b) == pytest.approx(24 / 25)
    assert metrics.euclidean_similarity(a, b) == pytest.approx(1 - math.sqrt(2) / (math.sqrt(24.5) + 1e-7))
    assert metrics.snr_loss(a, b) == pytest.approx(2 / (25 + 1e-7))
    assert metrics.mse_loss(a, b) == 1.0
    # a - mean: -.5, .5; noise -1, 1: 10 log10(0.5 / 2).
    assert metrics.sqnr(a, b) == pytest.approx(10 * math.log10(0.25))


def test_zeros_of_the_reference_can_be_left_out() -> None:
    a, b = torch.tensor([0.0, 1.0, 3.0]), torch.tensor([9.0, 1.5, 3.0])
    assert metrics.sqnr(a, b, remove_zero=True) == pytest.approx(10 * math.log10(2 / 0.125))
    assert metrics.sqnr(a, b) < 0
    assert metrics.sqnr(torch.zeros(3), b, remove_zero=True) == math.inf


@given(vectors)
def test_a_tensor_is_like_itself(a: Tensor) -> None:
    assert metrics.cosine_similarity(a, a) == pytest.approx(1.0)
    assert metrics.euclidean_similarity(a, a) == 1.0
    assert metrics.sqnr(a, a) == math.inf
    assert metrics.snr_loss(a, a) == metrics.mse_loss(a, a) == 0.0


@given(vectors, st.integers(0, 99))
def test_cosine_is_symmetric_bounded_and_blind_to_size(a: Tensor, seed: int) -> None:
    b = torch.randn(a.shape, generator=torch.Generator().manual_seed(seed))
    one = metrics.cosine_similarity(a, b)
    assert -1 - 1e-9 <= one <= 1 + 1e-9
    assert one == pytest.approx(metrics.cosine_similarity(b, a), abs=1e-9)
    assert one == pytest.approx(metrics.cosine_similarity(a, b * 4), abs=1e-9)


def test_a_model_is_accepted_where_both_similarities_pass() -> None:
    a = torch.tensor([1.0, 2.0, 3.0])
    near, shrunk, turned = a + 0.2, a * 0.7, torch.tensor([1.0, 2.0, -3.0])
    assert metrics.accepted(a, a.clone(), (2.0, 2.0)) and metrics.accepted(torch.zeros(2), torch.zeros(2))
    assert metrics.accepted(a, near, metrics.ACCEPTANCE["int8_symmetric"])
    # Its euclidean similarity, 0.647, lies between what the two tests ask.
    assert not metrics.accepted(a, shrunk, metrics.ACCEPTANCE["int8_symmetric"])
    assert metrics.accepted(a, shrunk, metrics.ACCEPTANCE["int8_asymmetric"])
    assert not metrics.accepted(a, turned, (0.9, -9.0)) and not metrics.accepted(a, turned, (-9.0, 0.9))


def test_zero_tensors_and_opposites() -> None:
    zero, one = torch.zeros(3), torch.ones(3)
    assert metrics.cosine_similarity(zero, zero) == 1.0
    assert metrics.cosine_similarity(zero, one) == 0.0
    assert metrics.cosine_similarity(one, -one) == pytest.approx(-1.0)
    assert metrics.euclidean_similarity(one, -one) < -1e6


def test_nan_counts_as_zero_and_infinity_as_unlike() -> None:
    a = torch.tensor([1.0, math.nan])
    assert metrics.cosine_similarity(a, torch.tensor([2.0, 0.0])) == pytest.approx(1.0)
    assert metrics.euclidean_similarity(a, torch.tensor([1.0, 0.0])) == 1.0
    assert metrics.euclidean_similarity(torch.tensor([math.inf, 1.0]), torch.ones(2)) == 0.0


def test_shapes_may_differ_but_counts_may_not() -> None:
    assert metrics.mse_loss(torch.zeros(2, 3), torch.zeros(6)) == 0.0
    similarities = (metrics.cosine_similarity, metrics.euclidean_similarity, metrics.sqnr)
    for function in (*similarities, metrics.snr_loss, metrics.mse_loss):
        for a, b in ((torch.zeros(2), torch.zeros(3)), (torch.zeros(0), torch.zeros(0))):
            with pytest.raises(HagoError, match="compare"):
                function(a, b)
