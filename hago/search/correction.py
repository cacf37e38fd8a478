"""Correction: what evaluations say of expected losses, as a factor for every choice of every group."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import numpy as np

from hago.search.guide import Guide
from hago.search.searcher import Score
from hago.space import Bits

#: How far a measured loss may be off what factors can explain, as a part of it.
_NOISE: Final = 0.2
#: How far factors are expected to be off 1: of a group, and of one choice beside its group's.
_GROUP: Final = 0.5
_CHOICE: Final = 0.5
#: Expected losses that are further off than this from what was measured teach nothing.
_LEAST: Final = 1e-3
#: Factors stay within this many times up or down.
_MOST: Final = 8.0


def factors(guide: Guide, scored: Sequence[tuple[Bits, Score]]) -> dict[str, dict[int, float]]:
    """Factors f, by group and bits, that bring sum f_gb * loss_gb(bits) closest to what was measured, relative to it;
    those of choices that no evaluation tells apart stay near their group's, and those of groups near the common one.

    Interactions between groups are in what is measured, so the factors carry them where the search is.
    The mean of a Gaussian process: one deviation for every group and one for every choice, both around the median of
    measured over expected losses.

    References:
        C. E. Rasmussen and C. K. I. Williams, "Gaussian Processes for Machine Learning", 2006, section 2.1.
    """
    groups = {key: i for i, key in enumerate(guide.losses)}
    choices = {(key, b): i for i, (key, b) in enumerate((k, b) for k, by in guide.losses.items() for b in by)}
    parts, choice = [], []
    for bits, score in scored:
        loss = math.nan if guide.measured is None or not score.runs else guide.measured(score)
        expected = guide.parts(bits)
        total = math.fsum(expected.values())
        # where nothing is lost, or next to nothing, there is nothing to learn
        if math.isfinite(loss) and loss > 0.0 and _LEAST < total / loss < 1 / _LEAST:
            parts.append([expected[k] / loss for k in groups])
            choice.append([choices[k, bits[k]] for k in groups])
    if not parts or not groups:
        return {}
    matrix, columns = np.array(parts), np.array(choice)
    common = float(np.median(1.0 / np.maximum(matrix.sum(1), 1e-300)))
    matrix *= common
    spread = np.zeros((len(matrix), len(choices)))
    np.put_along_axis(spread, columns, matrix, 1)
    kernel = _GROUP**2 * matrix @ matrix.T + _CHOICE**2 * spread @ spread.T
    weights = np.linalg.solve(kernel + _NOISE**2 * np.eye(len(matrix)), 1.0 - matrix.sum(1))
    of_group, of_choice = _GROUP**2 * matrix.T @ weights, _CHOICE**2 * spread.T @ weights
    return {
        key: {
            b: common * float(min(max(1.0 + of_group[i] + of_choice[choices[key, b]], 1 / _MOST), _MOST))
            for b in guide.losses[key]
        }
        for key, i in groups.items()
    }
