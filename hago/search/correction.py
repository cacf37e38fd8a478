"""Correction: what evaluations say of expected losses, as one factor for every group."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import numpy as np

from hago.search.guide import Guide
from hago.search.searcher import Score
from hago.space import Bits

#: How strongly factors are held at their common value, in evaluations of which one group is all the loss.
_PRIOR: Final = 1.0
#: Expected losses that are further off than this from what was measured teach nothing.
_LEAST: Final = 1e-3
#: Factors stay within this many times up or down.
_MOST: Final = 8.0


def factors(guide: Guide, scored: Sequence[tuple[Bits, Score]]) -> dict[str, float]:
    """Factors f that bring sum f_g * loss_g(bits) closest to what was measured, relative to it; those of
    groups that no evaluation tells apart stay near the common one.

    Interactions between groups are in what is measured, so the factors carry them where the search is.
    A ridge regression towards the median of measured over expected losses.
    """
    keys = list(guide.losses)
    rows = []
    for bits, score in scored:
        loss = math.nan if guide.measured is None or not score.runs else guide.measured(score)
        parts = guide.parts(bits)
        expected = math.fsum(parts.values())
        # where nothing is lost, or next to nothing, there is nothing to learn
        if math.isfinite(loss) and loss > 0.0 and _LEAST < expected / loss < 1 / _LEAST:
            rows.append([parts[k] / loss for k in keys])
    if not rows or not keys:
        return {}
    matrix = np.array(rows)
    common = float(np.median(1.0 / np.maximum(matrix.sum(1), 1e-300)))
    matrix *= common
    gram = matrix.T @ matrix + _PRIOR * np.eye(len(keys))
    found = 1.0 + np.linalg.solve(gram, matrix.T @ (1.0 - matrix.sum(1)))
    return {k: common * float(min(max(f, 1 / _MOST), _MOST)) for k, f in zip(keys, found, strict=True)}
