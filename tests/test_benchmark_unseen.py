"""The paired test by which the default search is compared with one shot."""

from __future__ import annotations

import math

import pytest
import torch
from benchmark_unseen import LEVEL, Gain, gain, verdict
from torch import Tensor


def noises(samples: int, seed: int, scale: float = 1.0) -> Tensor:
    """Noise of samples, of which some are much harder than others."""
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(samples, generator=generator, dtype=torch.float64).exp()


def test_a_gain_is_the_ratio_of_mean_noises_in_decibels() -> None:
    before = noises(50, 0)
    for factor in (0.5, 1.25):
        found = gain(before, factor * before * (1 + 1e-3 * noises(50, 1)))
        assert found.decibels == pytest.approx(-10 * math.log10(factor), abs=0.05)
        assert found.errors * found.decibels > 0  # their signs are the same
    assert gain(before, before) == Gain(0.0, 0.0)
    assert gain(before, 0 * before).decibels == math.inf and gain(0 * before, before).decibels == -math.inf


def test_it_is_paired() -> None:
    hard = noises(100, 2)
    paired = gain(hard, 1.02 * hard + 0.001 * noises(100, 3))
    assert paired.chance < LEVEL  # 2 % more noise on every sample
    assert gain(hard, 1.02 * hard[torch.randperm(100, generator=torch.Generator().manual_seed(4))]).chance > LEVEL


def test_equal_models_are_called_worse_as_often_as_the_level_says() -> None:
    trials = 2000
    worse = sum(
        gain(base * noises(200, 2 * seed), base * noises(200, 2 * seed + 1)).chance < LEVEL
        for seed in range(trials)
        for base in (noises(200, seed + 10_000),)
    )
    assert worse < 3 * LEVEL * trials


@pytest.mark.parametrize(
    ("gains", "holds"),
    [
        ([(1.0, 5.0), (0.0, 0.0), (-0.1, -1.0)], True),
        ([(0.1, 1.0), (-1.0, -1.0)], False),  # worse on average
        ([(1.0, 5.0)] * 8 + [(-0.1, -4.0)] * 2, False),  # more cells are worse than chance gives
        ([(1.0, 5.0)] * 100 + [(-0.1, -4.0)] * 2, True),
        ([], False),
    ],
)
def test_the_verdict(gains: list[tuple[float, float]], holds: bool) -> None:
    said, found = verdict([{"gain": decibels, "errors": errors} for decibels, errors in gains])
    assert found == holds and said.startswith(f"{len(gains) or 'no'} cells")
