"""Folds: which samples of a data set are kept aside, so that proposed thresholds can be tested on them.

Of many samples, the last quarter is kept aside. Of few, the samples are split into folds, as in cross-validation: every
sample is kept aside in one of them. The samples of a fold that are kept aside are its validation samples, and the
others, which may shape a proposal, its tuning samples. `hago.search.confirmation` tests proposals.

A correction is found on a few samples and judged by the others, see `spread_samples` and `other_samples`. Samples often
come in an order, of classes, of files, of time, so the few are spread over the data.

References:
    M. Stone, "Cross-Validatory Choice and Assessment of Statistical Predictions", 1974.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from hago.data import Batch, spread_indices

#: Number of parts that samples are split into.
FOLDS: Final = 4
#: Of fewer samples than these each part is kept aside in one fold; of more, only the last part is.
FEW: Final = 64
#: The least size of a part, relative to an equal share, that is accepted so that parts are whole batches.
UNEVEN: Final = 0.6


@dataclass(frozen=True, slots=True)
class Fold:
    """A split of a data set: the validation samples `first:last`, and the others, which are the tuning samples."""

    first: int
    last: int

    @property
    def size(self) -> int:
        """Number of validation samples."""
        return self.last - self.first

    def tuning_tensors(self, batches: Iterable[Sequence[Tensor]]) -> Iterator[list[Tensor]]:
        """Yield the tuning samples of each batch, given as its tensors."""
        begin = 0
        for tensors in batches:
            first, last = self._within(begin, len(tensors[0]))
            begin += len(tensors[0])
            if first == last:
                yield list(tensors)
            elif last - first < len(tensors[0]):
                yield [torch.cat([t[:first], t[last:]]) for t in tensors]

    def validation_batches(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Yield the validation samples, batch by batch."""
        begin = 0
        for batch in batches:
            first, last = self._within(begin, batch.size)
            begin += batch.size
            if first < last:
                yield batch.rows(first, last)

    def tuning_batches(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Yield the tuning samples, batch by batch."""
        begin = 0
        for batch in batches:
            first, last = self._within(begin, batch.size)
            begin += batch.size
            if first == last:
                yield batch
            elif last - first < batch.size:
                kept = [torch.cat([t[:first], t[last:]]) for t in batch.inputs]
                labels = None if batch.labels is None else torch.cat([batch.labels[:first], batch.labels[last:]])
                yield Batch(tuple(kept), labels)

    def _within(self, begin: int, size: int) -> tuple[int, int]:
        """The validation samples `first:last` of a batch whose first sample has the number `begin`."""
        first, last = (min(max(0, end - begin), size) for end in (self.first, self.last))
        return first, last

    def tuning(self, values: Tensor) -> Tensor:
        """The values of the tuning samples among those of all samples."""
        return torch.cat([values[: self.first], values[self.last :]])


def folds_of(sizes: Sequence[int]) -> tuple[Fold, ...]:
    """The folds of batches of these sizes.

    There is one fold for many samples, several whose validation samples are all of few, and none for a single sample.
    Samples of one batch are alike, so parts are whole batches, or runs of samples where there are few batches.
    """
    total = sum(sizes)
    if total < 2:
        return ()
    count = min(FOLDS, total)
    cuts = _cuts(list(itertools.accumulate(sizes)), total, count)
    parts = [b - a for a, b in itertools.pairwise(cuts)]
    if len(parts) < count or not all(UNEVEN <= part * count / total <= 1 / UNEVEN for part in parts):
        cuts = _cuts(list(range(1, total + 1)), total, count)
    folds = tuple(itertools.starmap(Fold, itertools.pairwise(cuts)))
    return folds[-1:] if total >= FEW else folds


def spread_samples(total: int, most: int) -> list[int]:
    """The numbers of at most `most` samples, evenly spread over all before the last quarter, which always judges."""
    return spread_indices(max(1, total - total // FOLDS), most)


def last_samples(total: int) -> list[int]:
    """The numbers of the last quarter; of all, where that has none."""
    return list(range(total - total // FOLDS, total)) or list(range(total))


def other_samples(total: int, used: Sequence[int]) -> list[int]:
    """The numbers of all samples but these; of all, where there are no others."""
    taken = set(used)
    return [number for number in range(total) if number not in taken] or list(range(total))


def _cuts(ends: Sequence[int], total: int, count: int) -> list[int]:
    """The bounds of `count` parts of about the same size, each at one of the `ends`."""
    return sorted({0, total, *(min(ends, key=lambda end: abs(end - total * i / count)) for i in range(1, count))})


def first_tuning_samples(sizes: Sequence[int]) -> int:
    """The number of samples before the single validation part of batches of these sizes; 0 where there are several
    folds, or none. Calibration keeps their statistics beside those of all samples if a batch ends there."""
    folds = folds_of(sizes)
    return folds[0].first if len(folds) == 1 else 0
