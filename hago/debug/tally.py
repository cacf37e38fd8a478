"""Tally: what is summed up about one node while batches stream by.

Everything is float64 and over finite values: where any of a position's values is infinite or NaN
(masks of attention, say), the position is left out.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import Tensor

from hago.debug.causes import CAUSES, EdgeSample, Split

#: How many values are turned into float64 at a time.
CHUNK: Final = 1 << 17


@dataclass(slots=True)
class Moments:
    """Count, range, mean and sum of squared deviations, merged chunk by chunk.

    References:
        T. Chan, G. Golub, R. LeVeque, "Updating formulae and a pairwise algorithm for computing
        sample variances", 1979.
    """

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0
    low: float = math.inf
    high: float = -math.inf

    def add(self, x: Tensor) -> None:
        """Take in a flat float64 tensor of finite values."""
        if not x.numel():
            return
        mean, n = float(x.mean()), x.numel()
        squares = float((x - mean).square().sum())
        total, apart = self.count + n, mean - self.mean
        self.squares += squares + apart * apart * self.count * n / total
        self.mean += apart * n / total
        self.count = total
        low, high = torch.aminmax(x)
        self.low, self.high = min(self.low, float(low)), max(self.high, float(high))

    @property
    def deviation(self) -> float:
        """The standard deviation of the values seen."""
        return math.sqrt(self.squares / self.count) if self.count else 0.0


@dataclass(slots=True)
class EdgeTally:
    """Sums of EdgeSamples."""

    saturated: int = 0
    values: int = 0
    signal: float = 0.0
    rounded: float = 0.0
    clipped: float = 0.0

    def add(self, sample: EdgeSample) -> None:
        """Take in one batch."""
        self.saturated += sample.saturated
        self.values += sample.values
        self.signal += sample.signal
        self.rounded += sample.rounded
        self.clipped += sample.clipped


def _zeros() -> list[float]:
    return [0.0] * len(CAUSES)


def _gram() -> Tensor:
    return torch.zeros(len(CAUSES), len(CAUSES), dtype=torch.float64)


@dataclass(slots=True)
class Tally:
    """Sums over all batches for one node.

    Attributes:
        products: sums of the products of every pair of causes (CAUSES x CAUSES).
        largest: of each cause, the largest magnitude.
        signal, simulated_signal, cross, noise: sums of F^2, S^2, F * S and (S - F)^2.
        max_error: the largest |S - F|.
        differences: values that differ between simulator and integer model.
        max_difference: by how much, in quanta; in real units for a float node.
    """

    float_values: Moments = field(default_factory=Moments)
    simulated_values: Moments = field(default_factory=Moments)
    integer_values: Moments | None = None
    products: Tensor = field(default_factory=_gram)
    largest: list[float] = field(default_factory=_zeros)
    count: int = 0
    signal: float = 0.0
    simulated_signal: float = 0.0
    cross: float = 0.0
    noise: float = 0.0
    max_error: float = 0.0
    left_out: int = 0
    edges: dict[int, EdgeTally] = field(default_factory=dict)
    overflows: int = 0
    accumulators: int = 0
    differences: int = 0
    max_difference: float = 0.0

    def add_split(self, split: Split) -> None:
        """Take in the causes of one batch."""
        for slot, sample in split.edges.items():
            self.edges.setdefault(slot, EdgeTally()).add(sample)
        self.overflows += split.overflows
        self.accumulators += split.accumulators
        for first, *rest in _chunks([split.reference, *(value for _, value in split.steps)]):
            together = torch.stack([first, *rest])
            if not math.isfinite(float(together.sum())):  # one pass tells that no value is infinite or NaN
                finite = torch.isfinite(together).all(0)
                self.left_out += int((~finite).sum())
                together = together[:, finite]
            self._add_errors(together, split)

    def _add_errors(self, values: Tensor, split: Split) -> None:
        """Take in the reference and each step's values, one row each."""
        reference, simulated = values[0], values[-1]
        if not reference.numel():
            return
        added = torch.zeros(len(CAUSES), reference.numel(), dtype=torch.float64)
        for i, (cause, _) in enumerate(split.steps):
            added[CAUSES.index(cause)] += values[i + 1] - values[i]
        self.products += added @ added.T
        low, high = torch.aminmax(added, dim=1)
        peaks = torch.maximum(-low, high).tolist()
        self.largest = [max(a, b) for a, b in zip(self.largest, peaks, strict=True)]
        error = simulated - reference
        self.count += reference.numel()
        self.signal += float(reference.dot(reference))
        self.simulated_signal += float(simulated.dot(simulated))
        self.cross += float(reference.dot(simulated))
        self.noise += float(error.dot(error))
        self.max_error = max(self.max_error, float(error.abs().max()))

    def add_values(self, reference: Tensor, simulated: Tensor, realized: Tensor | None) -> None:
        """Take in the values of one batch; `realized` is None where it equals `simulated`."""
        if realized is not None and self.integer_values is None:
            self.integer_values = copy.copy(self.simulated_values)
        self._moments(self.float_values, reference)
        self._moments(self.simulated_values, simulated)
        if self.integer_values is not None:
            self._moments(self.integer_values, simulated if realized is None else realized)

    @staticmethod
    def _moments(moments: Moments, x: Tensor) -> None:
        for (chunk,) in _chunks([x]):
            moments.add(chunk if math.isfinite(float(chunk.sum())) else chunk[torch.isfinite(chunk)])


def _chunks(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """The tensors, flat, side by side, in float64 pieces."""
    flat = [t.reshape(-1) for t in tensors]
    for start in range(0, flat[0].numel(), CHUNK):
        yield [t[start : start + CHUNK].to(torch.float64) for t in flat]
