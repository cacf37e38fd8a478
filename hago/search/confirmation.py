"""Confirmation: whether what some samples proposed is better on samples that did not shape it.

Thresholds that are tuned to few samples may lose more on others than plain ones, above all where they clip values that
the samples did not reach. So a search keeps samples aside, and takes what it proposes only where it is surely better
on these. Where there are many, the last quarter is kept aside. Where there are few, every sample is kept aside once:
what is confirmed is then the way of proposing, and the proposal is made again from all of them.

References:
    M. Stone, "Cross-Validatory Choice and Assessment of Statistical Predictions", 1974; Student, "The Probable Error
    of a Mean", 1908.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from scipy import stats
from torch import Tensor

from hago.calibration.collect import Calibration
from hago.plan.space import Space
from hago.search.evaluate import Measurement
from hago.search.objective import OBJECTIVES, Objective

#: Parts of the samples; of many the last is kept aside, of fewer than so many each in turn.
TURNS: Final = 4
FEW: Final = 64
#: How much smaller or larger than others a part may be for the sake of whole batches.
UNEVEN: Final = 0.6
#: Batches, or, where these are fewer, blocks of neighbouring samples that are compared as one each: neighbours are
#: alike, so that a sample by itself says less than it seems to.
BLOCKS: Final = 8
#: What is added to the losses of blocks, as a part of the mean, before they are divided: a block that loses next to
#: nothing says next to nothing.
LEAST_GAIN: Final = 0.01
#: How sure it must be that what is proposed is better.
CONFIDENCE: Final = 0.95
#: By which part of the loss activations' thresholds that clip more must be better: they decide what happens to values
#: that no sample has.
MARGIN: Final = 0.05


@dataclass(frozen=True, slots=True)
class KeptAside:
    """Samples that must not shape a proposal: those from `first` up to `last`."""

    first: int
    last: int

    def shaping(self, batches: Iterable[Sequence[Tensor]]) -> Iterator[list[Tensor]]:
        """What of each batch may shape it."""
        begin = 0
        for tensors in batches:
            size = len(tensors[0])
            first, last = (min(max(0, end - begin), size) for end in (self.first, self.last))
            begin += size
            if first == last:
                yield list(tensors)
            elif last - first < size:
                yield [torch.cat([t[:first], t[last:]]) for t in tensors]

    def without(self, contributions: Tensor) -> Tensor:
        """Those of samples that may shape it."""
        return torch.cat([contributions[: self.first], contributions[self.last :]])


def turns_of(sizes: Sequence[int]) -> tuple[KeptAside, ...]:
    """What is kept aside of batches of these sizes: one part of many samples; parts that together are all of few; none
    of one. Samples of one batch are alike, so parts are whole batches; of few batches, runs of samples.
    """
    total = sum(sizes)
    if total < 2:
        return ()
    count = min(TURNS, total)
    cuts = _cuts(list(itertools.accumulate(sizes)), total, count)
    parts = [b - a for a, b in itertools.pairwise(cuts)]
    if len(parts) < count or not all(UNEVEN <= part * count / total <= 1 / UNEVEN for part in parts):
        cuts = _cuts(list(range(1, total + 1)), total, count)
    turns = tuple(itertools.starmap(KeptAside, itertools.pairwise(cuts)))
    return turns[-1:] if total >= FEW else turns


def _cuts(ends: Sequence[int], total: int, count: int) -> list[int]:
    """Where so many parts of about the same size begin and end, each at one of these ends."""
    return sorted({0, total, *(min(ends, key=lambda end: abs(end - total * i / count)) for i in range(1, count))})


@dataclass(frozen=True, slots=True)
class Gain:
    """How much better one is than another on samples that were kept aside.

    Args:
        part: of the loss.
        errors: the mean logarithm of the ratio of losses, block by block, in standard errors.
        blocks: how many were compared.
    """

    part: float
    errors: float
    blocks: int

    def is_sure(self, margin: float = 0.0, candidates: int = 1) -> bool:
        """Whether it is by more than chance, and by more than that part of the loss.

        Args:
            candidates: how many there were of which this is the best on the same samples. The best of several seems
                better than it is, so that each is allowed its share of the error alone (Bonferroni's correction).
        """
        if self.blocks < 2:
            return False
        confidence = 1.0 - (1.0 - CONFIDENCE) / candidates
        return self.part > margin and self.errors > float(stats.t.ppf(confidence, self.blocks - 1))


@dataclass(frozen=True, slots=True)
class Confirmation:
    """The samples of a search, and which of them are kept aside.

    Args:
        sizes: of the batches.
        turns: see `turns_of`.
    """

    sizes: tuple[int, ...]
    turns: tuple[KeptAside, ...]

    @staticmethod
    def of(sizes: Sequence[int]) -> Confirmation:
        """What is kept aside of batches of these sizes."""
        return Confirmation(tuple(sizes), turns_of(sizes))

    @property
    def count(self) -> int:
        """How many samples are kept aside in any turn."""
        return sum(t.last - t.first for t in self.turns)

    @property
    def said(self) -> dict[str, int]:
        """What a log says of it before anything is measured."""
        return {"kept_aside": self.count, "turns": len(self.turns)}

    def gain(self, before: Sequence[Tensor], after: Sequence[Tensor]) -> Gain:
        """How much better the one is than the other where it was not shaped.

        Args:
            before, after: by turn, the losses of all samples.
        """
        gains, losses = [], []
        for turn, old, new in zip(self.turns, before, after, strict=True):
            here = slice(turn.first, turn.last)
            gains.append((old[here] - new[here]).to(torch.float64))
            losses.append(old[here].to(torch.float64))
        difference = torch.cat(gains) if gains else torch.zeros(0)
        if not len(difference) or not bool(difference.isfinite().all()):
            return Gain(0.0, 0.0, 0)  # nothing to compare: one of them does not run
        old_losses = torch.cat(losses)
        blocks = list(itertools.pairwise(self._blocks(len(difference))))
        mean = float(difference.mean())
        part = mean / whole if (whole := float(old_losses.mean())) > 0.0 else 0.0
        # a few samples lose most; ratios let every block say as much
        least = LEAST_GAIN * abs(whole)
        befores, afters = (
            torch.stack([x[a:b].mean() for a, b in blocks]).clamp_min(0.0) + least
            for x in (old_losses, old_losses - difference)
        )
        ratios = (befores / afters).log() if least > 0.0 else torch.zeros(len(blocks), dtype=torch.float64)
        error = float(ratios.std()) / math.sqrt(len(blocks)) if len(blocks) > 1 else math.inf
        middle = float(ratios.mean())
        errors = middle / error if error > 0.0 else math.copysign(math.inf, middle) if middle else 0.0
        return Gain(part, errors, len(blocks))

    def _blocks(self, count: int) -> list[int]:
        """Where blocks begin and end among those kept aside."""
        first = self.turns[0].first
        batches = [end - first for end in itertools.accumulate(self.sizes) if first < end <= first + count]
        if len(batches) >= BLOCKS:
            return [0, *batches]
        blocks = min(BLOCKS, count)
        return [i * count // blocks for i in range(blocks + 1)]


def losses_of(objective: Objective, measured: Measurement) -> Tensor:
    """The losses of all samples, float64: those of the objective, or squared errors where it has none of single samples
    or counts classes, of which few samples say little."""
    if objective.loss is None or objective.counts_classes:
        squared = OBJECTIVES["sqnr"]
        assert squared.loss is not None
        return squared.loss(measured.contributions[squared.name])
    return objective.loss(measured.contributions[objective.name])


def clipped_share(calibration: Calibration, space: Space, thresholds: Mapping[str, tuple[Tensor, Tensor]]) -> float:
    """The part of all values that calibration saw which these thresholds clip.

    Args:
        thresholds: by group, as a Plan has them.
    """
    clipped = total = 0.0
    for key, (lo, hi) in thresholds.items():
        seen = calibration.statistics.get(space.groups[key].source) if key in space.groups else None
        if seen is None or lo.numel() not in (1, seen.channels):
            continue
        bins = seen.histogram.shape[1]
        width, limit = seen.bin_width.unsqueeze(1), seen.limit.unsqueeze(1)
        middles = (torch.arange(bins, dtype=torch.float64) + 0.5) * width - limit
        outside = (middles < lo.reshape(-1, 1)) | (middles > hi.reshape(-1, 1))
        clipped += float(seen.histogram[outside.expand_as(seen.histogram)].sum())
        total += float(seen.histogram.sum())
    return clipped / total if total else 0.0


def figures_of(gain: Gain, clipped: float, before: float) -> dict[str, Any]:
    """What is said of a gain, as JSON values.

    Args:
        clipped, before: see `clipped_share`, of what is proposed and of what it replaces.
    """
    return {
        "gain": round(gain.part, 4),
        "standard_errors": round(min(max(gain.errors, -99.0), 99.0), 2),
        "clipped": round(clipped, 7),
        "clipped_before": round(before, 7),
    }
