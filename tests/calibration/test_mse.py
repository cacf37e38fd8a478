"""mse: the closed form against exact integration, and its choice against real data."""

from __future__ import annotations

import itertools
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hago.arithmetic.schemes import SCHEMES, Grid
from hago.calibration import estimators as mse
from hago.calibration.estimators import Distribution, MaxRange, Mse, _least, levels, observed
from hago.calibration.observer import constant_statistics
from hago.calibration.statistics import BINS

from .references import quantization_error, squared_error_by_pieces


def error_of(counts: list[int], origin: int, scale: Fraction, lowest: int, count: int) -> float:
    values = Distribution.of(torch.tensor([counts], dtype=torch.float64), origin)
    one = torch.ones(1, 1, dtype=torch.float64)
    return float(values.squared_error(one * float(scale), one * lowest, count))


#: counts, origin, scale, lowest, count
any_grid = given(
    st.lists(st.integers(0, 9), min_size=8, max_size=8).filter(any),
    st.sampled_from([0, 4]),
    st.fractions(Fraction(1, 10), 4, max_denominator=20),
    st.integers(-6, 0),
    st.integers(1, 12),
)


@any_grid
def test_the_closed_form_is_the_integral(
    counts: list[int], origin: int, scale: Fraction, lowest: int, count: int
) -> None:
    exact = float(squared_error_by_pieces(counts, origin, scale, lowest, count))
    assert error_of(counts, origin, scale, lowest, count) == pytest.approx(exact, rel=1e-9, abs=1e-9)


@any_grid
def test_the_error_of_a_grid_is_at_least_its_clipping_error(
    counts: list[int], origin: int, scale: Fraction, lowest: int, count: int
) -> None:
    values = Distribution.of(torch.tensor([counts], dtype=torch.float64), origin)
    lo, hi = (torch.full((1, 1), float(scale) * end, dtype=torch.float64) for end in (lowest, lowest + count))
    places = (torch.arange(8000, dtype=torch.float64) + 0.5) / 1000
    x = (places - origin).unsqueeze(0)
    clipped = ((x - x.clamp(lo, hi)) ** 2 * torch.tensor(counts).repeat_interleave(1000) / 1000).sum()
    assert float(values.clipped(lo, hi)) == pytest.approx(float(clipped), rel=1e-3, abs=1e-4)
    assert float(values.clipped(lo, hi)) <= error_of(counts, origin, scale, lowest, count) + 1e-9


ALL_SCHEMES = [
    Grid(bits, scheme, signed) for bits in (2, 4, 8, 10) for scheme in sorted(SCHEMES) for signed in (True, False)
]


def test_skipped_candidates_would_not_have_been_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [[Mse()(constant_statistics(x), grid) for x in samples().values()] for grid in GRIDS]
    monkeypatch.setattr(mse, "_SLACK", float("inf"))
    every = [[Mse()(constant_statistics(x), grid) for x in samples().values()] for grid in GRIDS]
    for some, all_of_them in zip(found, every, strict=True):
        for (lo, hi), (low, high) in zip(some, all_of_them, strict=True):
            assert lo.equal(low) and hi.equal(high)


@pytest.mark.parametrize(("lowest", "count"), [(0, 300), (-150, 300), (-20, 400)])
def test_the_integral_approximates_many_steps(lowest: int, count: int) -> None:
    counts, origin = [3, 0, 7, 5, 1, 9, 2, 4], 4
    for scale in (Fraction(1, 30), Fraction(1, 75), Fraction(1, 90)):
        exact = float(squared_error_by_pieces(counts, origin, scale, lowest, count))
        found = error_of(counts, origin, scale, lowest, count)
        assert found == pytest.approx(exact, rel=2e-2, abs=1e-9)


def channels() -> Tensor:
    """Channels of weights of all kinds, beside each other: (C, 40)."""
    torch.manual_seed(3)
    normal = torch.randn(80, 40)
    pruned = normal * (torch.rand(80, 40) < 0.1)
    return torch.cat([normal, pruned, normal.abs(), -normal.exp(), torch.randint(-7, 8, (80, 40)), torch.zeros(3, 40)])


@pytest.mark.parametrize("grid", [*ALL_SCHEMES, Grid(8, power_of_two=True), Grid(3, power_of_two=True)], ids=str)
def test_grids_that_share_tables_have_the_thresholds_of_grids_alone(
    grid: Grid, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of channels whose tables were made for other grids, from packed counts, without skipping candidates and with."""
    seen = constant_statistics(channels(), 0, bins=1024)
    packed = seen.packed()
    assert packed.counts.dtype == torch.int16 and torch.equal(packed.histogram, seen.histogram)
    for other in (Grid(16), Grid(3, "symmetric"), Grid(5, signed=False), Grid(4, "affine")):
        Mse()(packed, other)
    found = Mse()(packed, grid)
    monkeypatch.setattr(mse, "_SLACK", float("inf"))
    for got, want in zip(found, Mse()(seen, grid), strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("count", [40, 40_000])
def test_what_is_kept_has_no_more_bytes_than_are_counted(count: int) -> None:
    """Whatever grids the thresholds were for."""
    packed = constant_statistics(torch.randn(3, count), 0, bins=1024).packed()
    for grid in (Grid(8), Grid(4), Grid(8, signed=False), Grid(8, "affine"), Grid(4, power_of_two=True)):
        Mse()(packed, grid)
        (blocks,) = packed.derived.values()
        tables = [
            t for block in blocks for values, clipped in block.derived.values() for t in (*fields_of(values), clipped)
        ]
        kept = [packed.counts, *tables]
        assert len(tables) == 6
        assert sum(t.untyped_storage().nbytes() for t in kept) <= packed.bytes_at_most()


def fields_of(values: Distribution) -> list[Tensor]:
    return [values.mass, values.below, values.first, values.second, values.moments]


GRIDS = [
    Grid(bits, scheme, power_of_two=power)
    for bits, scheme, power in itertools.product((2, 3, 4, 6, 8), ("hago", "symmetric", "affine"), (False, True))
    if not (power and scheme == "affine")
]


def samples() -> dict[str, Tensor]:
    torch.manual_seed(0)
    normal = torch.randn(5_000)
    return {
        "normal": normal,
        "relu": normal.relu(),
        "laplace": torch.distributions.Laplace(0.0, 1.0).sample((5_000,)),
        "outlier": torch.cat([normal, torch.tensor([50.0])]),
        "lopsided": torch.distributions.Exponential(1.0).sample((5_000,)) - 0.3,
        "few": torch.tensor([0.3, -1.7, 0.9, 4.0]),
        "uniform": torch.rand(5_000) * 2 - 1,
    }


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_the_error_on_real_data_is_at_most_that_of_max_range(grid: Grid) -> None:
    for name, x in samples().items():
        seen = constant_statistics(x)
        ours = quantization_error(x, grid, *Mse()(seen, grid))
        theirs = quantization_error(x, grid, *MaxRange()(seen, grid))
        width = float(seen.bin_width)
        assert ours <= theirs * 1.01 + width * width, name


@given(st.lists(st.integers(-1000, 1000), min_size=1, max_size=12), st.sampled_from(GRIDS))
def test_the_error_on_few_values_is_at_most_that_of_max_range(numbers: list[int], grid: Grid) -> None:
    x = torch.tensor(numbers, dtype=torch.float32)
    seen = constant_statistics(x)
    ours = quantization_error(x, grid, *Mse()(seen, grid))
    theirs = quantization_error(x, grid, *MaxRange()(seen, grid))
    # Inside a bin the histogram does not know where a value lies.
    width = float(seen.bin_width)
    assert ours <= (theirs**0.5 + width) ** 2


def test_few_bits_have_a_much_smaller_error() -> None:
    x = samples()["laplace"]
    seen = constant_statistics(x)
    for grid in (Grid(3), Grid(3, "affine"), Grid(3, power_of_two=True)):
        ours = quantization_error(x, grid, *Mse()(seen, grid))
        assert ours < 0.6 * quantization_error(x, grid, *MaxRange()(seen, grid))


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_both_ends_of_an_affine_grid_are_nearly_the_best_pair(bits: int) -> None:
    factors = torch.tensor([2.0 ** (-j / 8) for j in range(81)], dtype=torch.float64)
    for name, x in samples().items():
        seen, grid = constant_statistics(x), Grid(bits, "affine")
        lowest, highest = observed(seen)
        los, his = torch.meshgrid(lowest * factors, highest * factors, indexing="ij")
        values = Distribution.of(seen.histogram, seen.histogram.shape[1] // 2)

        def error(lo: Tensor, hi: Tensor) -> Tensor:
            width = seen.bin_width  # noqa: B023
            return values.squared_error(*levels(grid, lo / width, hi / width))  # noqa: B023

        best = float(error(los.reshape(1, -1), his.reshape(1, -1)).min())
        lo, hi = Mse()(seen, grid)
        assert float(error(lo.view(1, 1), hi.view(1, 1))) <= best * 1.05 + 1e-6 * x.numel(), name


@pytest.mark.parametrize("bits", [2, 3, 4, 6, 8])
@pytest.mark.parametrize("name", ["normal", "laplace", "outlier", "lopsided"])
def test_the_best_power_of_two_is_chosen(name: str, bits: int) -> None:
    x, grid = samples()[name], Grid(bits, power_of_two=True)
    ends = {k: torch.tensor(2.0**k, dtype=torch.float64) for k in range(-3, 7)}
    errors = {k: quantization_error(x, grid, -end, end) for k, end in ends.items()}
    lo, hi = Mse()(constant_statistics(x), grid)
    assert float(lo) == -float(hi)
    assert float(hi) == 2.0 ** min(errors, key=lambda k: errors[k])


@pytest.mark.parametrize("bits", [12, 16, 32])
def test_many_bits_clip_nothing(bits: int) -> None:
    x = samples()["outlier"]
    seen = constant_statistics(x)
    for scheme in ("hago", "affine"):
        lo, hi = Mse()(seen, Grid(bits, scheme))
        assert float(hi) == pytest.approx(50.0, rel=2.0 ** (2 - bits))
        assert float(hi) >= 50.0
        assert float(lo) == pytest.approx(float(x.min()), rel=0.1)


@given(st.integers(0, 2**32 - 1), st.sampled_from([2, 3, 4, 8, 10]), st.booleans())
def test_skipped_candidates_are_never_the_best(seed: int, bits: int, folded: bool) -> None:
    """Of channels with few values, equal values or none, beside each other."""
    generator = torch.Generator().manual_seed(seed)
    counts = torch.randint(0, 50, (6, 64), generator=generator).to(torch.float64)
    counts *= torch.rand(6, 64, generator=generator) < torch.tensor([0.0, 0.02, 0.1, 0.5, 1.0, 1.0]).view(-1, 1)
    values = Distribution.of(counts, 0 if folded else 32)
    hi = (64 if folded else 32) * 2.0 ** -(torch.arange(41, dtype=torch.float64) / 4).expand(6, -1)
    grid = Grid(bits, "hago" if folded else "affine")
    scale, lowest, count = levels(grid, -hi, hi)
    if folded:
        lowest, count = torch.zeros_like(lowest), count // 2
    errors = values.squared_error(scale, lowest, count)

    def errors_of(chosen: Tensor, rows: Tensor) -> Tensor:
        return values.squared_error(scale[chosen].unsqueeze(1), lowest[chosen].unsqueeze(1), count, rows)

    clipped = values.clipped(lowest * scale, (lowest + count) * scale)
    index, least = _least(values, clipped, errors[:, :1], errors_of)
    assert torch.equal(least, errors.amin(1, keepdim=True))
    assert torch.equal(index, errors.argmin(1, keepdim=True))


def test_narrow_tables_give_the_same_errors() -> None:
    """The tables of int16 counts, of which two are float32."""
    counts = torch.randint(0, 60, (5, 512)).to(torch.int16)
    counts[0] = 0
    counts[1, 0] = 32_767
    wide, narrow = Distribution.of(counts.to(torch.float64), 0), Distribution.of(counts, 0)
    assert narrow.below.dtype == torch.float32 and wide.below.dtype == torch.float64
    scale = torch.rand(5, 7, dtype=torch.float64) * 8
    for count in (1, 7, 127, 300):
        errors = [values.squared_error(scale, torch.zeros(1, 1), count) for values in (wide, narrow)]
        assert torch.equal(*errors)


def test_blocks_of_channels_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = constant_statistics(torch.randn(37, 50) * torch.logspace(-3, 3, 37).view(-1, 1), 0)
    for grid in (Grid(4), Grid(4, "affine"), Grid(4, power_of_two=True)):
        blocks = Mse()(seen, grid)
        monkeypatch.setattr(mse, "_BINS_AT_ONCE", 5 * BINS)
        for got, want in zip(Mse()(seen, grid), blocks, strict=True):
            assert torch.equal(got, want)
        monkeypatch.undo()
