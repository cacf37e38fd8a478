"""The observer: exact bins, results that do not depend on the division into batches, and refusals."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import pytest
import torch
from building import seeded
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hago.calibration.observer import SMALLEST_LIMIT, CountBins, Observer, _cells, constant_statistics, rebin
from hago.calibration.statistics import BINS, TensorStatistics
from hago.errors import DataError
from hago.runtime.native import exact_kernels

#: Values of at most 17 significant bits: none lies within rounding of an edge without being on it.
values = st.builds(
    lambda n, e: float(n) * 2.0**e, st.integers(-(2**16), 2**16), st.integers(-40, 20).map(lambda e: e // 2)
)


def observe(*batches: Tensor, channel_axis: int | None = None) -> TensorStatistics:
    observer = Observer(channel_axis)
    for batch in batches:
        observer.update(batch)
    return observer.finish()


def same(a: TensorStatistics, b: TensorStatistics) -> bool:
    """Equal but for the batch means."""
    return (
        a.count == b.count
        and torch.equal(a.minimum, b.minimum)
        and torch.equal(a.maximum, b.maximum)
        and torch.equal(a.limit, b.limit)
        and torch.equal(a.histogram, b.histogram)
    )


FORMATS = {
    "contiguous": lambda x: x.contiguous(),
    "channels_last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "permuted": lambda x: x.permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0),
    "sliced": lambda x: torch.cat([x, x], 2)[:, :, : x.shape[2]],
    "reversed": lambda x: x.flip(0).contiguous().flip(0),
}


def exact_bin(value: float, limit: float) -> int:
    """The bin by its definition: an edge belongs to the bin nearer to zero, zero to the middle."""
    place = Fraction(value) / (Fraction(limit) * 2 / BINS)
    if place > 0:
        return BINS // 2 + math.ceil(place) - 1
    return BINS // 2 + math.floor(place)


@given(st.lists(values, min_size=1, max_size=30))
def test_bins_are_exact(numbers: list[float]) -> None:
    seen = constant_statistics(torch.tensor(numbers))
    limit = float(seen.limit)
    largest = max(map(abs, numbers))
    assert limit == (2.0 ** math.ceil(math.log2(largest)) if largest else SMALLEST_LIMIT)
    expected = torch.zeros(BINS, dtype=torch.float64)
    for number in numbers:
        expected[exact_bin(number, limit)] += 1
    assert torch.equal(seen.histogram[0], expected)
    assert (float(seen.minimum), float(seen.maximum)) == (min(numbers), max(numbers))
    assert seen.count == len(numbers)


@given(
    st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=30),
    st.data(),
)
def test_division_into_batches_and_their_order_do_not_matter(numbers: list[float], data: st.DataObject) -> None:
    shuffled = data.draw(st.permutations(numbers))
    cuts = sorted(data.draw(st.sets(st.integers(1, len(numbers)), max_size=4)) | {0, len(numbers)})
    batches = [torch.tensor(shuffled[i:j]) for i, j in itertools.pairwise(cuts)]
    whole = constant_statistics(torch.tensor(numbers))
    assert same(observe(*batches), whole)
    assert float(whole.histogram.sum()) == len(numbers)


@given(
    st.lists(
        st.tuples(st.integers(-2048, 2048), st.sampled_from([-math.inf, None, math.inf]), st.integers(-20, 20)),
        min_size=2,
        max_size=20,
    )
)
def test_values_next_to_bin_edges_do_not_depend_on_batches(places: list[tuple[int, float | None, int]]) -> None:
    x = torch.tensor([k * 2.0**e for k, _, e in places])
    toward = torch.tensor([v if d is None else d for v, (_, d, _) in zip(x.tolist(), places, strict=True)])
    x = torch.nextafter(x, toward)
    assert same(observe(*x.view(-1, 1)), constant_statistics(x))


def kernel() -> CountBins:
    found = exact_kernels().count_bins
    if found is None:
        pytest.skip(exact_kernels().why)
    return found


@given(
    st.lists(
        st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=40),
        min_size=1,
        max_size=3,
    )
)
def test_a_kernel_counts_as_torch_does(batches: list[list[float]]) -> None:
    """Subnormals, zeros of both signs and the largest floats among them."""
    plain, counted = Observer(), Observer(kernel=kernel())
    for batch in batches:
        plain.update(torch.tensor(batch))
        counted.update(torch.tensor(batch))
    assert same(plain.finish(), counted.finish())


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("limit", [1e-38, 1.0, 1e4, 1e38])
@pytest.mark.parametrize("form", ["contiguous", "channels_last", "sliced"])
def test_threads_and_layouts_of_a_kernel_do_not_matter(threads: int, limit: float, form: str) -> None:
    x = FORMATS[form](seeded(3, 40, 61, 41) * limit)
    before = torch.get_num_threads()
    counted = Observer(kernel=kernel())
    try:
        torch.set_num_threads(threads)
        counted.update(x)
        counted.update(x.relu())
        counted.update(torch.zeros(5))
    finally:
        torch.set_num_threads(before)
    assert same(counted.finish(), observe(x, x.relu(), torch.zeros(5)))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_kernel_never_sees_what_is_refused(value: float) -> None:
    def never(values: Tensor, per_value: float, bins: int) -> Tensor:
        raise AssertionError

    with pytest.raises(DataError):
        Observer(kernel=never).update(torch.tensor([1.0, value]))


@pytest.mark.parametrize("x", [torch.ones(4, dtype=torch.float64), torch.ones(2, 3)])
def test_other_values_than_a_kernel_takes_are_counted_by_torch(x: Tensor) -> None:
    def never(values: Tensor, per_value: float, bins: int) -> Tensor:
        raise AssertionError

    observer = Observer(0 if x.ndim == 2 else None, kernel=never)
    observer.update(x)
    assert same(observer.finish(), constant_statistics(x, 0 if x.ndim == 2 else None))


@pytest.mark.parametrize("tiny", [-1e-45, -1e-36, -1e-30, -1e-20, 1e-45])
@pytest.mark.parametrize("large", [3e38, 2.0**41, -(2.0**13), 2049.0])
@pytest.mark.parametrize("axis", [None, 1])
def test_small_values_keep_their_sign_next_to_large_ones(tiny: float, large: float, axis: int | None) -> None:
    x = torch.tensor([[tiny, tiny], [large, 1.0]])
    seen = constant_statistics(x, axis)
    assert same(observe(x[:1], x[1:], channel_axis=axis), seen)
    side = seen.histogram[0, : BINS // 2] if tiny < 0 else seen.histogram[0, BINS // 2 :]
    assert float(side.sum()) >= 1


@pytest.mark.parametrize("form", ["contiguous", "channels_last", "permuted"])
@pytest.mark.parametrize("axis", [None, 0, 1, 2, 3])
def test_dense_tensors_are_not_copied(form: str, axis: int | None) -> None:
    laid = FORMATS[form](torch.randn(3, 5, 4, 2))
    assert _cells(laid, axis).data_ptr() == laid.data_ptr()
    assert _cells(laid, axis).numel() == laid.numel()


def test_batches_with_growing_values() -> None:
    torch.manual_seed(0)
    x = torch.randn(8, 70_000) * torch.logspace(-6, 3, 8).unsqueeze(1)
    assert same(observe(*x), constant_statistics(x))
    assert same(observe(*x.flip(0)), constant_statistics(x))
    assert float(constant_statistics(x).histogram.sum()) == x.numel()


def test_doubling_values_only_doubles_the_limit() -> None:
    x = torch.randn(1000)
    once, twice = constant_statistics(x), constant_statistics(2 * x)
    assert torch.equal(once.histogram, twice.histogram)
    assert torch.equal(once.limit * 2, twice.limit)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("axis", [None, 0, 1, 2, 3, -1])
def test_memory_format_does_not_matter(form: str, axis: int | None) -> None:
    torch.manual_seed(1)
    x = torch.randn(3, 5, 4, 2) * torch.tensor([1.0, 0.01, 100.0, 0.0, 7.0]).view(1, 5, 1, 1)
    laid = FORMATS[form](x)
    before = laid.clone()
    assert same(constant_statistics(laid, axis), constant_statistics(x.contiguous(), axis))
    assert torch.equal(laid, before)


def test_values_of_an_expanded_tensor_are_all_counted() -> None:
    x = torch.randn(1, 6).expand(4, 6)
    assert same(constant_statistics(x), constant_statistics(x.contiguous()))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_float_dtypes_are_counted_by_value(dtype: torch.dtype) -> None:
    x = torch.randn(500).to(dtype)
    assert same(constant_statistics(x), constant_statistics(x.to(torch.float32).to(torch.float64)))
    if dtype != torch.float64:
        assert same(constant_statistics(x), constant_statistics(x.to(torch.float32)))


@pytest.mark.parametrize("shape", [(40, 3, 3, 3), (7, 300), (1, 5), (600,)])
@pytest.mark.parametrize("batches", [1, 3])
def test_statistics_of_channels_are_those_of_each_channel_alone(shape: tuple[int, ...], batches: int) -> None:
    torch.manual_seed(2)
    for axis in range(len(shape)):
        scales = torch.logspace(-4, 4, shape[axis]).view([-1 if d == axis else 1 for d in range(len(shape))])
        parts = [torch.randn(shape) * scales * 3**i for i in range(batches)]
        seen = observe(*parts, channel_axis=axis)
        assert seen.channels == shape[axis]
        for c in range(0, shape[axis], 7):
            alone = observe(*(part.select(axis, c) for part in parts))
            view = seen.channel_slice(c, c + 1)
            assert same(view, alone)
            assert torch.equal(view.mean_minimum, alone.mean_minimum)
            assert torch.equal(view.mean_maximum, alone.mean_maximum)


def test_batch_means() -> None:
    seen = observe(torch.tensor([[-1.0, 2.0], [3.0, -4.0]]), torch.tensor([[-2.0, 1.0], [5.0, 0.0]]))
    assert (float(seen.minimum), float(seen.maximum)) == (-4.0, 5.0)
    assert (float(seen.mean_minimum), float(seen.mean_maximum)) == (-3.0, 4.0)


@pytest.mark.parametrize("number", [0.0, -0.0, 1e-45, -1e-38, 2.0**-100, 1.0, -8.0, 3.4e38, -3.4e38])
def test_the_limit_is_a_power_of_two_above_extreme_values(number: float) -> None:
    seen = constant_statistics(torch.tensor([number, 0.0]))
    assert float(seen.limit) >= abs(number)
    assert float(seen.histogram.sum()) == 2
    assert math.log2(float(seen.limit)).is_integer()


def test_rebin_merges_neighbours_by_channel() -> None:
    histogram = torch.rand(3, BINS, dtype=torch.float64)
    limit = torch.tensor([1.0, 1.0, 2.0**-90], dtype=torch.float64)
    wider = torch.tensor([1.0, 4.0, 2.0**90], dtype=torch.float64)
    out = rebin(histogram, limit, wider)
    assert torch.equal(out[0], histogram[0])
    quarter = histogram[1].view(-1, 4).sum(1)
    start = BINS // 2 - BINS // 8
    torch.testing.assert_close(out[1, start : start + BINS // 4], quarter)
    assert int((out[1] > 0).sum()) == BINS // 4
    halves = histogram[2].view(2, -1).sum(1)
    torch.testing.assert_close(out[2, BINS // 2 - 1 : BINS // 2 + 1], halves)


def test_finish_is_a_snapshot() -> None:
    observer = Observer()
    observer.update(torch.tensor([1.0, -0.5]))
    first = observer.finish()
    kept = first.histogram.clone()
    observer.update(torch.tensor([0.25, 3.0]))
    assert torch.equal(first.histogram, kept)
    assert (float(first.maximum), first.count) == (1.0, 2)
    assert observer.finish().count == 4


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("axis", [None, 0])
def test_values_that_are_not_finite_name_the_node(bad: float, axis: int | None) -> None:
    observer = Observer(axis, name="layer1.0.conv")
    observer.update(torch.ones(3, 4))
    x = torch.ones(3, 4)
    x[1, 2] = bad
    with pytest.raises(DataError, match=r"'layer1\.0\.conv'.*batch 1"):
        observer.update(x)
    assert observer.finish().count == (12 if axis is None else 4)


@pytest.mark.parametrize(
    ("value", "axis", "says"),
    [
        (torch.zeros(0, 3), None, r"shape \(0, 3\)"),
        (torch.zeros(3, dtype=torch.int64), None, "int64"),
        (torch.zeros(3, dtype=torch.bool), None, "bool"),
        (torch.zeros(3), 1, "no axis 1"),
        (torch.tensor(1.0), 0, "no axis 0"),
        (torch.tensor([1e300], dtype=torch.float64), None, "float32"),
    ],
)
def test_refusals(value: Tensor, axis: int | None, says: str) -> None:
    with pytest.raises(DataError, match=says):
        constant_statistics(value, axis, name="w")


def test_a_changed_number_of_channels_and_no_batch_are_refused() -> None:
    observer = Observer(1, name="x")
    with pytest.raises(DataError, match="no batch"):
        observer.finish()
    observer.update(torch.ones(2, 3))
    with pytest.raises(DataError, match=r"'x'.*4 channels on axis 1.*3"):
        observer.update(torch.ones(2, 4))
