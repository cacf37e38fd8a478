"""The histogram observer against that of torch, and laws of its own."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor

from hago.emulation.pytorch import FakeQuantize, HistogramObserver, QRange, least_error_bins, squared_error
from hago.errors import HagoError


def both(batches: list[Tensor], bins: int, dtype: str = "quint8", scheme: str = "per_tensor_affine", reduce=False):
    upstream = pytest.importorskip("torch.ao.quantization.observer")
    ours = HistogramObserver(QRange(dtype, scheme, reduce), bins=bins)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # infinities, and no data
        theirs = upstream.HistogramObserver(
            bins=bins, dtype=getattr(torch, dtype), qscheme=getattr(torch, scheme), reduce_range=reduce
        )
        for batch in batches:
            ours(batch), theirs(batch)
        return ours, theirs, theirs.calculate_qparams()


def same(batches: list[Tensor], bins: int, *options) -> None:
    ours, theirs, expected = both(batches, bins, *options)
    assert torch.equal(ours.histogram, theirs.histogram)
    for mine, upstream in zip(ours.qparams(), expected, strict=True):
        assert torch.equal(mine, upstream.reshape(1).to(mine.dtype))


@pytest.mark.parametrize("bins", [1, 3, 16, 100])
def test_any_batches_give_the_results_of_torch(bins: int) -> None:
    g = torch.Generator().manual_seed(bins)
    for sizes in ([1, 9, 3], [40, 2]):
        same([torch.randint(-64, 64, (n,), generator=g) / 8 for n in sizes], bins)


@pytest.mark.parametrize(
    "options",
    [
        ("qint8", "per_tensor_affine", True),
        ("qint8", "per_tensor_symmetric", False),
        ("quint8", "per_tensor_symmetric", False),
        ("quint8", "per_tensor_symmetric", True),
    ],
)
@pytest.mark.parametrize("power", [1, 3])
def test_long_tails_are_cut_as_torch_cuts_them(power: int, options) -> None:
    g = torch.Generator().manual_seed(0)
    batches = [torch.randn(5, 300, generator=g) ** power * (k + 1) for k in range(3)]
    same(batches, 2048, *options)
    ours = both(batches, 2048, *options)[0]
    low, high = ours.range()
    assert ours.min_val <= low < high <= ours.max_val
    assert power == 1 or high - low < ours.max_val - ours.min_val


def test_constant_batches_and_others_after_them() -> None:
    same([torch.ones(4)], 8)
    same([torch.ones(4), torch.zeros(3), torch.zeros(2), torch.tensor([2.0, 5.0])], 3)


@pytest.mark.parametrize(("first", "last", "levels"), [(0, 7, 4), (2, 5, 8), (1, 6, 3), (3, 3, 2)])
def test_the_squared_error_is_that_of_evenly_spread_values(first: int, last: int, levels: int) -> None:
    histogram, width = torch.tensor([1.0, 4.0, 0.0, 7.0, 5.0, 9.0, 4.0, 2.0]), 0.5
    step = width * (last - first + 1) / levels
    within = (torch.arange(4000, dtype=torch.float64) + 0.5) / 4000 * width
    x = (torch.arange(8)[:, None] - first) * width + within
    middle = ((x / step).floor().clamp(0, levels - 1) + 0.5) * step
    expected = ((x - middle) ** 2).mean(1) @ histogram.to(torch.float64)
    assert squared_error(histogram, width, first, last, levels) == pytest.approx(float(expected), rel=1e-4)


def test_a_lone_value_far_off_is_cut_away() -> None:
    histogram = torch.zeros(64)
    histogram[0], histogram[40:] = 1.0, 10000.0
    assert least_error_bins(histogram, 0.1, 16)[0] == 40


def test_infinities_and_empty_tensors_are_ignored_and_nan_is_refused() -> None:
    observer = HistogramObserver(bins=4)
    assert [t.tolist() for t in observer.qparams()] == [[1.0], [0]]
    observer(torch.zeros(0))
    observer(torch.tensor([torch.inf, -torch.inf]))
    assert not observer.has_range
    observer(torch.tensor([1.0, torch.inf, 3.0]))
    assert (observer.min_val.item(), observer.max_val.item()) == (1.0, 3.0)
    with pytest.raises(HagoError, match="NaN"):
        observer(torch.tensor([torch.nan]))


def test_it_drives_a_fake_quantization_whose_state_round_trips() -> None:
    trained, fresh = (FakeQuantize(HistogramObserver(QRange("qint8"), bins=64)) for _ in range(2))
    x = torch.linspace(-3, 5, 101)
    y = trained(x)
    assert 0 < (y - x)[5:-5].abs().max() <= trained.scale.item() * 0.501
    fresh.load_state_dict(trained.state_dict())
    assert torch.equal(fresh(x), trained(x))
    with pytest.raises(HagoError, match="64 bins for an observer of 8"):
        FakeQuantize(HistogramObserver(bins=8)).load_state_dict(trained.state_dict())


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: HistogramObserver(bins=0), "positive integer"),
        (lambda: HistogramObserver(QRange(qscheme="per_channel_affine")), "whole tensor"),
        (lambda: HistogramObserver()(torch.ones(2, dtype=torch.int64)), "floating-point"),
    ],
)
def test_bad_input_is_refused(wrong, message: str) -> None:
    with pytest.raises(HagoError, match=message):
        wrong()
