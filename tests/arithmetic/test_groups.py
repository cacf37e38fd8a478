"""Groups of neighbouring entries of a channel, compared with what Python's slices say."""

from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from hago.arithmetic.groups import groups_of, in_groups, spread
from hago.arithmetic.numerics import dequantize, quantize
from hago.arithmetic.schemes import SCHEMES, Grid, make_qparams
from hago.arithmetic.types import dtype
from hago.calibration.estimators import ESTIMATORS, named_estimator
from hago.calibration.threshold_cache import ThresholdCache

SHAPES = st.sampled_from([(3, 1), (2, 7), (4, 8), (1, 33), (2, 3, 2, 2), (3, 5, 3), (1, 2, 1, 2, 3)])


@given(SHAPES, st.integers(2, 40))
def test_every_entry_has_the_value_of_its_group(shape: tuple[int, ...], group: int) -> None:
    channels, groups = groups_of(shape, group)
    assert channels == shape[0] and groups == math.ceil(math.prod(shape[1:]) / group)
    values = torch.arange(channels * groups).reshape(channels, groups)
    entries = spread(values, shape, group).expand(shape)
    for channel, row in enumerate(entries.reshape(channels, -1).tolist()):
        assert row == [values[channel, k // group] for k in range(len(row))]


@given(SHAPES, st.integers(2, 40))
def test_groups_are_cut_from_the_front_and_filled_up_with_zeros(shape: tuple[int, ...], group: int) -> None:
    rows = torch.arange(1, 1 + math.prod(shape)).reshape(shape[0], -1)
    cut = in_groups(rows, group)
    assert tuple(cut.shape) == (*groups_of(shape, group), group)
    for row, parts in zip(rows.tolist(), cut.tolist(), strict=True):
        flat = [v for part in parts for v in part]
        assert flat[: len(row)] == row and not any(flat[len(row) :])


@given(SHAPES, st.integers(2, 40), st.sampled_from(sorted(ESTIMATORS)), st.sampled_from(sorted(SCHEMES)))
def test_a_group_is_estimated_and_rounded_as_a_tensor_of_its_own(
    shape: tuple[int, ...], group: int, name: str, scheme: str
) -> None:
    """All but `mse` read ends and quantiles, which hardly depend on the number of bins."""
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(group))
    grid = Grid(4, scheme, group=group)
    lo, hi = ThresholdCache({}, {"w": weight}, named_estimator(name))("w", grid, 0)
    assert lo.numel() == grid.thresholds_of(shape, 0) == math.prod(groups_of(shape, group))
    ends = [end.reshape(groups_of(shape, group)) for end in (lo, hi)]
    qparams = make_qparams(scheme, *ends, 4, dtype("int4"), group=group)
    integers = quantize(weight.double(), qparams)
    for channel, row in enumerate(weight.flatten(1)):
        for number, part in enumerate(row.split(group)):
            alone = ThresholdCache({}, {"w": part}, named_estimator(name))("w", Grid(4, scheme))
            apart = [end[channel, number] for end in ends]
            if name in ("max_range", "avg_range", "power2_range"):
                assert apart == [end.item() for end in alone]
            own = make_qparams(scheme, *(end.reshape(()) for end in apart), 4, dtype("int4"))
            entries = slice(number * group, (number + 1) * group)
            assert integers.flatten(1)[channel, entries].equal(quantize(part.double(), own))
            real = dequantize(integers, qparams).flatten(1)[channel, entries]
            assert real.equal(dequantize(quantize(part.double(), own), own))


@given(st.integers(5, 60), st.lists(st.integers(2, 24), min_size=2, max_size=4))
def test_groups_of_several_sizes_are_estimated_as_each_alone(length: int, groups: list[int]) -> None:
    """The last group of a channel may be as long as the groups of another size."""
    weight = {"w": torch.randn(3, length, generator=torch.Generator().manual_seed(length))}
    together = ThresholdCache({}, weight, named_estimator("max_range"))
    for group in groups:
        grid = Grid(4, "symmetric", group=group)
        alone = ThresholdCache({}, weight, named_estimator("max_range"))("w", grid, 0)
        assert all(map(torch.equal, together("w", grid, 0), alone))


def test_equal_scales_in_groups_have_another_key() -> None:
    ends = torch.ones(2, 3, dtype=torch.float64)
    keys = {make_qparams("symmetric", -ends, ends, 4, dtype("int4"), group=g).key for g in (4, 5)}
    assert len(keys) == 2
