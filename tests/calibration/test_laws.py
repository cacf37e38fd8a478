"""Laws that every estimator obeys on every grid, over data of many kinds."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from products import some
from torch import Tensor

from hago.arithmetic.numerics import is_power_of_two, power_of_two_at_least
from hago.arithmetic.schemes import SCHEMES, TWO_SIDED, Grid, make_qparams
from hago.arithmetic.types import DType
from hago.calibration.estimators import ESTIMATORS, MaxRange, headroom, named_estimator, two_sided
from hago.calibration.observer import Observer, constant_statistics
from hago.calibration.statistics import Estimator, TensorStatistics
from hago.errors import HagoError

SPECS = [*ESTIMATORS, "percentile:99", "percentile:100"]
ALL = pytest.mark.parametrize("spec", SPECS)
GRIDS = [
    Grid(bits, scheme, signed, power)
    for bits, scheme, signed, power in itertools.product((2, 4, 8, 16), SCHEMES, (True, False), (False, True))
]
#: Estimators that ignore how values are distributed between the extremes.
BY_EXTREMES = {"max_range", "power2_range", "avg_range"}


def _make_data() -> dict[str, Tensor]:
    torch.manual_seed(0)
    normal = torch.randn(3000)
    return {
        "normal": normal,
        "relu": normal.relu(),
        "laplace": torch.distributions.Laplace(0.0, 2.0).sample((3000,)),
        "lopsided": torch.distributions.Exponential(1.0).sample((3000,)) - 0.2,
        "outlier": torch.cat([normal, torch.tensor([80.0])]),
        "sparse": torch.cat([torch.zeros(30_000), torch.tensor([-3.0, 1.0])]),
        "sparse_negative": torch.cat([torch.zeros(30_000), torch.tensor([-3.0])]),
        "zeros": torch.zeros(100),
        "constant": torch.full((100,), 0.7),
        "negative": torch.full((100,), -0.7),
        "power": torch.full((10,), 4.0),
        "single": torch.tensor([1e-3]),
        "tiny": normal * 1e-25,
        "huge": normal * 1e36,
        "two": torch.tensor([-1.0, 3.0]),
        "integers": torch.arange(-8.0, 8.0),
    }


DATA = _make_data()


def fits(name: str, grid: Grid) -> bool:
    """An unsigned grid is for data without negative values."""
    return grid.signed or float(DATA[name].min()) >= 0


ONE_SIDED = [name for name in DATA if float(DATA[name].min()) >= 0]
SIGNED, UNSIGNED = ([grid for grid in GRIDS if grid.signed == signed] for signed in (True, False))


def cases(one_of: int) -> list[tuple[str, Grid]]:
    """Names of data, and grids that they fit."""
    return [*some(one_of, DATA, SIGNED), *some(3, ONE_SIDED, UNSIGNED)]


CASES = cases(7)


def test_cases_cover_every_grid_and_all_data() -> None:
    assert {name for name, _ in CASES} == set(DATA) and {grid for _, grid in CASES} == set(GRIDS)


def largest(statistics_of_data: TensorStatistics) -> Tensor:
    return torch.maximum(statistics_of_data.minimum.abs(), statistics_of_data.maximum.abs())


def breaks_the_contract(estimate: Estimator, statistics_of_data: TensorStatistics, grid: Grid) -> str:
    """Which clause of an estimator's contract its answer breaks, or an empty string."""
    lo, hi = estimate(statistics_of_data, grid)
    bottom, top = statistics_of_data.minimum.clamp_max(0.0), statistics_of_data.maximum.clamp_min(0.0)
    rounds = grid.power_of_two or estimate.name == "power2_range"
    # mse may reach so far beyond what was observed that the largest value is on the grid
    most = headroom(grid) if estimate.name == "mse" else 1.0
    room = (top - bottom if two_sided(grid) else largest(statistics_of_data)) * (most - 1.0) * (1 + 1e-12)
    if not (lo.dtype == hi.dtype == torch.float64 and lo.shape == hi.shape == (statistics_of_data.channels,)):
        return "float64 of shape (C,)"
    if not bool((lo.isfinite() & hi.isfinite() & (lo <= 0) & (hi >= 0)).all()):
        return "finite, lo <= 0 <= hi"
    if bool(((lo == hi) & (largest(statistics_of_data) > 0)).any()):
        return "lo < hi unless all values are 0"
    if not grid.signed and bool((lo != 0).any()):
        return "lo = 0 where unsigned"
    if not rounds and not bool(((lo >= bottom - room) & (hi <= top + room)).all()):
        return "within what was observed"
    if rounds and not (is_power_of_two(hi) and bool(((lo == -hi) | (lo == 0)).all())):
        return "a power of two"
    if rounds and not bool(((lo == -hi) == (statistics_of_data.minimum < 0)).all()):
        return "lo = -t where there are negative values"
    if rounds and not bool((hi <= power_of_two_at_least(largest(statistics_of_data) * most)).all()):
        return "at most the largest magnitude rounded up"
    return ""


@ALL
def test_contract(spec: str) -> None:
    for name, grid in cases(3):
        assert breaks_the_contract(named_estimator(spec), constant_statistics(DATA[name]), grid) == "", (name, grid)


@dataclass(frozen=True, slots=True)
class Scaled:
    """max_range with its answer spoilt."""

    spoil: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
    name: str = "scaled"

    def __call__(self, statistics: TensorStatistics, grid: Grid) -> tuple[Tensor, Tensor]:
        return self.spoil(*MaxRange()(statistics, grid))


@pytest.mark.parametrize(
    ("spoil", "grid", "says"),
    [
        (lambda lo, hi: (lo, 1.01 * hi), Grid(8), "within"),
        (lambda lo, hi: (lo, 0.99 * hi), Grid(8, power_of_two=True), "a power"),
        (lambda lo, hi: (2 * lo, 2 * hi), Grid(8, power_of_two=True), "at most"),
        (lambda lo, hi: (0 * lo, hi), Grid(8, power_of_two=True), "lo = -t"),
        (lambda lo, hi: (-hi, hi), Grid(8, signed=False), "lo = 0"),
        (lambda lo, hi: (hi, hi), Grid(8), "finite"),
        (lambda lo, hi: (lo, hi * math.nan), Grid(8), "finite"),
        (lambda lo, hi: (0 * lo, 0 * hi), Grid(8), "lo < hi"),
        (lambda lo, hi: (lo.float(), hi.float()), Grid(8), "float64"),
        (lambda lo, hi: (lo.sum(), hi.sum()), Grid(8), "float64"),
    ],
)
def test_broken_contracts_fail(spoil: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]], grid: Grid, says: str) -> None:
    statistics_of_data = constant_statistics(DATA["normal"])
    assert breaks_the_contract(MaxRange(), statistics_of_data, grid) == ""
    assert breaks_the_contract(Scaled(spoil), statistics_of_data, grid).startswith(says)


@ALL
def test_thresholds_make_quantization_parameters(spec: str) -> None:
    for name, grid in CASES:
        lo, hi = named_estimator(spec)(constant_statistics(DATA[name]), grid)
        dtype = DType("grid", grid.bits, "int" if grid.signed else "uint", torch.int64)
        estimate = make_qparams(grid.scheme, lo, hi, grid.bits, dtype, power_of_two=grid.power_of_two)
        if grid.power_of_two:
            assert is_power_of_two(estimate.scale)
            steps = 2 ** (grid.bits - grid.signed)
            assert float(estimate.scale) * steps == max(float(hi), 2.0**-100 * steps), name


@ALL
@pytest.mark.parametrize("factor", [2.0**-7, 2.0, 2.0**9])
def test_scaling_data_by_a_power_of_two_scales_thresholds(spec: str, factor: float) -> None:
    for name, grid in CASES:
        if name in ("zeros", "huge"):
            continue
        once = named_estimator(spec)(constant_statistics(DATA[name]), grid)
        scaled = named_estimator(spec)(constant_statistics(DATA[name] * factor), grid)
        for a, b in zip(once, scaled, strict=True):
            assert torch.equal(a * factor, b), (name, grid)


@ALL
def test_order_does_not_matter(spec: str) -> None:
    generator = torch.Generator().manual_seed(1)
    for name, grid in CASES:
        x = DATA[name]
        shuffled = x[torch.randperm(len(x), generator=generator)]
        for a, b in zip(
            named_estimator(spec)(constant_statistics(x), grid),
            named_estimator(spec)(constant_statistics(shuffled), grid),
            strict=True,
        ):
            assert torch.equal(a, b), (name, grid)


@ALL
def test_mirrored_data_has_mirrored_thresholds(spec: str) -> None:
    for name, grid in CASES:
        if not grid.signed or grid.power_of_two or grid.scheme in TWO_SIDED:
            continue
        if spec == "power2_range":
            continue
        lo, hi = named_estimator(spec)(constant_statistics(DATA[name]), grid)
        low, high = named_estimator(spec)(constant_statistics(-DATA[name]), grid)
        assert torch.equal(lo, -high) and torch.equal(hi, -low), (name, grid)


@ALL
@pytest.mark.parametrize("grid", [Grid(8), Grid(4, "affine"), Grid(4, "symmetric"), Grid(8, power_of_two=True)])
def test_channels_are_independent(spec: str, grid: Grid) -> None:
    torch.manual_seed(2)
    x = torch.randn(21, 200) * torch.logspace(-5, 5, 21).unsqueeze(1)
    x[3], x[4], x[5] = 0.0, x[4].relu(), -2.5
    together = named_estimator(spec)(constant_statistics(x, 0), grid)
    # kl_estimate clips no channels; see its docstring.
    alone = MaxRange() if spec == "kl_estimate" else named_estimator(spec)
    for c in range(21):
        for a, b in zip(together, alone(constant_statistics(x[c]), grid), strict=True):
            assert torch.equal(a[c : c + 1], b), c


@ALL
@given(st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=8), st.sampled_from(GRIDS))
def test_contract_on_any_values(spec: str, numbers: list[float], grid: Grid) -> None:
    x = torch.tensor(numbers)
    statistics_of_data = constant_statistics(x if grid.signed else x.abs())
    assert breaks_the_contract(named_estimator(spec), statistics_of_data, grid) == ""


@ALL
@pytest.mark.parametrize("name", ["constant", "negative", "power", "single"])
def test_a_constant_is_its_own_threshold(spec: str, name: str) -> None:
    statistics_of_data = constant_statistics(DATA[name])
    size = float(DATA[name].abs().max())
    for bits in (4, 8, 16):
        lo, hi = named_estimator(spec)(statistics_of_data, Grid(bits))
        if spec == "power2_range":
            assert max(-float(lo), float(hi)) == float(power_of_two_at_least(torch.tensor(size)))
        else:
            most = headroom(Grid(bits)) if spec == "mse" else 1.0
            assert max(-float(lo), float(hi)) == pytest.approx(size * most, rel=1e-3)


@ALL
@pytest.mark.parametrize("grid", [Grid(8), Grid(4, "affine"), Grid(8, signed=False)])
def test_all_zeros_have_an_empty_range(spec: str, grid: Grid) -> None:
    lo, hi = named_estimator(spec)(constant_statistics(torch.zeros(7)), grid)
    assert (float(lo), float(hi)) == (0.0, 1.0 if spec == "power2_range" else 0.0)


@ALL
def test_all_zeros_have_the_power_of_two_one(spec: str) -> None:
    lo, hi = named_estimator(spec)(constant_statistics(torch.zeros(7)), Grid(8, power_of_two=True))
    assert (float(lo), float(hi)) == (0.0, 1.0)


@pytest.mark.parametrize(("bits", "signed"), [(-8, True), (1, True), (65, True), (64, False)])
def test_bits_of_no_grid_are_refused(bits: int, signed: bool) -> None:
    with pytest.raises(HagoError, match=f"{bits} bits"):
        Grid(bits, signed=signed)


@ALL
@pytest.mark.parametrize(("bits", "signed"), [(32, True), (32, False), (64, True), (63, False)])
def test_the_widest_grids(spec: str, bits: int, signed: bool) -> None:
    for scheme, power in itertools.product(SCHEMES, (True, False)):
        grid = Grid(bits, scheme, signed, power)
        for name in ("relu", "sparse", "zeros"):
            if fits(name, grid):
                assert breaks_the_contract(named_estimator(spec), constant_statistics(DATA[name]), grid) == ""


def test_an_unknown_scheme_is_refused() -> None:
    with pytest.raises(HagoError, match=r"'symetric'.*Did you mean 'symmetric'"):
        Grid(8, "symetric")


def _rfc() -> TensorStatistics:
    observer = Observer()
    observer.update(torch.tensor([[-1.0, 2.0], [3.0, -4.0]]))
    observer.update(torch.tensor([[-2.0, 1.0], [5.0, 0.0]]))
    return observer.finish()


@pytest.mark.parametrize(("spec", "threshold"), [("max_range", 5.0), ("power2_range", 8.0), ("avg_range", 4.0)])
def test_the_first_estimators_on_two_batches(spec: str, threshold: float) -> None:
    lo, hi = named_estimator(spec)(_rfc(), Grid(8))
    assert max(-float(lo), float(hi)) == threshold


def test_ends_of_an_affine_grid_on_two_batches() -> None:
    for spec, ends in {"max_range": (-4.0, 5.0), "avg_range": (-3.0, 4.0)}.items():
        lo, hi = named_estimator(spec)(_rfc(), Grid(8, "affine"))
        assert (float(lo), float(hi)) == ends


@pytest.mark.parametrize("spec", sorted(BY_EXTREMES))
@pytest.mark.parametrize(
    ("value", "power"),
    [
        (0.3, 0.5),
        (0.5, 0.5),
        (0.51, 1.0),
        (1.0, 1.0),
        (2.632871389389038, 4.0),
        (5.0, 8.0),
        (8.0, 8.0),
        (0.0, 1.0),
    ],
)
def test_powers_of_two(spec: str, value: float, power: float) -> None:
    statistics_of_data = constant_statistics(torch.tensor([value, value / 2]))
    assert float(named_estimator(spec)(statistics_of_data, Grid(8, power_of_two=True))[1]) == power
    assert float(named_estimator("power2_range")(statistics_of_data, Grid(8))[1]) == power


def test_weights_per_output_channel() -> None:
    weight = torch.tensor([[1.0, -3.0], [0.5, 0.25]]).view(2, 2, 1, 1)
    lo, hi = MaxRange()(constant_statistics(weight, 0), Grid(8))
    assert torch.maximum(-lo, hi).tolist() == [3.0, 0.5]


def test_means_that_cancel_leave_the_observed_range() -> None:
    observer = Observer()
    observer.update(torch.full((4,), -1.0))
    observer.update(torch.full((4,), 1.0))
    for scheme in ("hago", "affine"):
        lo, hi = named_estimator("avg_range")(observer.finish(), Grid(8, scheme))
        assert (float(lo), float(hi)) == (-1.0, 1.0)


@ALL
@pytest.mark.parametrize("values", [(-0.0, 1.0), (-0.0, 0.0), (-0.0, -0.0), (0.0, 0.0)])
def test_thresholds_have_no_negative_zero(spec: str, values: tuple[float, float]) -> None:
    statistics_of_data = constant_statistics(torch.tensor(values))
    for grid in GRIDS:
        for end in named_estimator(spec)(statistics_of_data, grid):
            assert not bool(torch.signbit(end).any()), grid
