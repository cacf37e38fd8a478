"""The thresholds that refinement compares, each as a copy of a prepared search with other thresholds.

A search makes the RefinementTask; `hago.search.point_refinement` and `hago.search.choice_refinement` call the rest.
Thresholds of least squares minimize the error of a tensor. Where every value counts by its squared gradient
(`gradient_weighted`), they minimize the error at the outputs instead. Thresholds of weights are refined in
`hago.search.weight_scales`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import torch
from torch import Tensor

from hago.arithmetic.schemes import Grid
from hago.arithmetic.types import Edge
from hago.calibration import Calibration, Mse, TensorStatistics
from hago.plan import Bits, EstimatedThresholds, ThresholdSource, estimated_resolver
from hago.search.evaluate import Evaluator
from hago.search.goal import Goal
from hago.search.gradients import Spectrum
from hago.search.preparation import Prepared

#: Share of the unweighted histogram in the weighted one, so that values without a gradient still count a little.
COUNT_SHARE: Final = 0.002


@dataclass(frozen=True, slots=True)
class RefinementTask:
    """The thresholds that are to be refined, and the search that they are refined for. Made once per search.

    Args:
        estimated: the search with estimated thresholds, which stay where no proposal is better.
        least_squares: the search with thresholds of least squared error, on which proposals are built.
        goal: of the search.
        metric: name of the cost that the surrogate predicts; empty for the total of bits.
        evaluator: of the search, over its data.
        seed: of random vectors.
    """

    estimated: Prepared
    least_squares: Prepared
    goal: Goal
    metric: str
    evaluator: Evaluator
    seed: int

    @staticmethod
    def of(prepared: Prepared, goal: Goal, metric: str, evaluator: Evaluator, seed: int = 0) -> RefinementTask:
        """The task of refining the thresholds of a prepared search."""
        return RefinementTask(
            prepared, with_least_squares(prepared, prepared.calibration), goal, metric, evaluator, seed
        )


def with_estimates(prepared: Prepared, calibration: Calibration) -> Prepared:
    """A copy with thresholds of activations that the same estimator gives on these statistics."""
    source = prepared.resolver.thresholds
    assert isinstance(source, EstimatedThresholds)
    resolver = prepared.resolver.with_thresholds(source.with_statistics(calibration.statistics))
    return replace(prepared, calibration=calibration, resolver=resolver)


def with_least_squares(prepared: Prepared, calibration: Calibration) -> Prepared:
    """A copy with thresholds of least squared error on these statistics. Those of constants are estimated again only if
    they were of another estimator."""
    p, mse, source = prepared, Mse(), prepared.resolver.thresholds
    if p.estimator == mse and isinstance(source, EstimatedThresholds):
        resolver = p.resolver.with_thresholds(source.with_statistics(calibration.statistics))
    else:
        ops = p.hardware.known_ops
        resolver = estimated_resolver(p.graph, p.hardware, p.topology, p.space, calibration, mse, ops)
    return replace(p, calibration=calibration, estimator=mse, resolver=resolver, refinement_record=True)


def with_refined(prepared: Prepared, refined: Mapping[tuple[str, Grid], tuple[Tensor, Tensor]]) -> Prepared:
    """A copy with these thresholds; the others are not estimated again."""
    source = prepared.resolver.thresholds
    assert isinstance(source, EstimatedThresholds)
    resolver = prepared.resolver.with_thresholds(source.with_refined(refined))
    return replace(prepared, calibration=replace(prepared.calibration, refined=refined), resolver=resolver)


def with_scaled(prepared: Prepared, bits: Bits, factors: Mapping[str, float | Tensor]) -> Prepared:
    """A copy whose thresholds at a point are multiplied by factors.

    Args:
        bits: the point.
        factors: by group, one or one for each channel.
    """
    scaled = _ScaledThresholds(prepared.resolver.thresholds, factors)
    prepared.resolver.with_thresholds(scaled)(bits)
    return with_refined(prepared, {**prepared.calibration.refined, **scaled.found})


class _ScaledThresholds:
    """A ThresholdSource whose thresholds are those of another, some multiplied by factors.

    Args:
        factors: by group, one or one for each channel.

    Attributes:
        found: those that were multiplied, by group and grid.
    """

    def __init__(self, source: ThresholdSource, factors: Mapping[str, float | Tensor]) -> None:
        self.source, self.factors = source, factors
        self.found: dict[tuple[str, Grid], tuple[Tensor, Tensor]] = {}

    def signed(self, key: str, source: str) -> bool:
        return self.source.signed(key, source)

    def __call__(self, key: str, source: str, grid: Grid, channel_axis: int | None) -> tuple[Tensor, Tensor]:
        low, high = self.source(key, source, grid, channel_axis)
        if (factor := self.factors.get(key)) is not None:
            low, high = low * factor, high * factor
            self.found[key, grid] = (low, high)
        return low, high


def gradient_weighted(prepared: Prepared, spectra: Mapping[Edge, Spectrum]) -> Calibration:
    """The statistics of activations with every value counted by its squared gradient."""
    masses: dict[str, dict[Edge, Spectrum]] = {}
    for key, group in prepared.space.groups.items():
        node, _, slot = key.rpartition(":")
        edges = prepared.graph.out_edges[node] if slot == "out" else group.edges
        masses.setdefault(group.source, {}).update({e: spectra[e] for e in edges if e in spectra})
    statistics = dict(prepared.calibration.statistics)
    for source, seen in masses.items():
        if source in statistics and statistics[source].channels == 1:
            statistics[source] = _weighted(statistics[source], list(seen.values()))
    return replace(prepared.calibration, statistics=statistics)


def _weighted(plain: TensorStatistics, spectra: Sequence[Spectrum]) -> TensorStatistics:
    bins = plain.histogram.shape[1]
    bin_edges = np.linspace(-1.0, 1.0, bins + 1) * float(plain.limit)
    mass = np.zeros(bins)
    for spectrum in spectra:
        # the mass of each bin, by interpolating the cumulative mass of the spectrum
        cumulative = np.concatenate([[0.0], np.cumsum(spectrum.mass.numpy())])
        if not np.isfinite(cumulative[-1]):  # of outputs so large that squared gradients are infinite
            return plain
        spectrum_edges = spectrum.low + spectrum.width * np.arange(len(cumulative))
        mass += np.diff(np.interp(bin_edges, spectrum_edges, cumulative))
    if not mass.sum() > 0.0:
        return plain
    by_gradient = torch.from_numpy(mass / mass.sum()).unsqueeze(0)
    by_count = plain.histogram / plain.histogram.sum()
    return replace(plain, counts=by_gradient * (1.0 - COUNT_SHARE) + by_count * COUNT_SHARE)
