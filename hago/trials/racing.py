"""Racing: a point is given up once its samples say that it is worse than the best so far.

Samples stand in an order drawn at random, once. Every sample has a loss, 0 or more, whose mean orders
models; D is the loss of the point less that of its rival on the same sample. The rival was measured on
all samples, so it is known that no D is below the rival's largest loss, negated.

While the point is at least as good, the sum of D over all N samples is 0 or less, so after t-1 of them the
next has an expected value of at most mu = -(D_1 + ... + D_(t-1)) / (N - t + 1). Then

    K_t = K_(t-1) * (1 + lambda_t * (D_t - mu)),    0 <= lambda_t * (largest loss + mu) < 1,

is a supermartingale that is never negative, whatever the losses are distributed like, and with Ville's
inequality it ever reaches 1/alpha with a probability of at most alpha. The point is given up where it
does: however often one looks, a point that is at least as good as its rival on all samples is given up
with a probability of at most alpha over the order of the samples.

References:
    Waudby-Smith and Ramdas, "Estimating means of bounded random variables by betting", JRSS B 86, 2024
    (sections 4 and 5: betting, and sampling without replacement).
    Ville, "Etude critique de la notion de collectif", 1939.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from hago.errors import DataError, HagoError
from hago.frontend.data import Batch, Batches

#: Of the largest bet that cannot lose all, what is bet at most.
BOLD: Final = 0.75


@dataclass(frozen=True, slots=True)
class Race:
    """How points are raced.

    Args:
        alpha: the probability at most with which a point is given up that is at least as good as its
            rival on all samples.
        first: samples before the first look; from then on there is a look after twice as many.
    """

    alpha: float = 0.01
    first: int = 16

    def __post_init__(self) -> None:
        if not 0.0 < self.alpha < 1.0 or self.first < 1:
            raise HagoError(f"race with alpha {self.alpha}, first {self.first}; expected 0 < alpha < 1, first >= 1")

    def worse(self, losses: Tensor, rival: Tensor, samples: int) -> bool:
        """Whether a point is to be given up.

        Args:
            losses: (n,) of the point, on the samples seen.
            rival: (samples,) of its rival, the same samples first.
            samples: how many there are.
        """
        largest = float(rival.max())
        evidence, total, squares = 0.0, 0.0, 0.0
        for t, d in enumerate((losses - rival[: len(losses)]).tolist()):
            expected = -total / (samples - t)
            room = largest + expected
            if room < -1e-12 * largest:
                return True  # no order of the rest could make it as good
            if room > 0.0:
                gain = total / (t + 1) - expected
                spread = (squares + largest * largest / 4) / (t + 1)
                bet = min(max(gain / (spread + gain * gain), 0.0) if gain else 0.0, BOLD / room)
                evidence += math.log1p(max(bet * (d - expected), -BOLD))
            elif d > expected:
                return True
            total += d
            squares += d * d
            if evidence >= -math.log(self.alpha):
                return True
        return False


def as_race(given: bool | float | Race) -> Race | None:
    """The race that a user means: none, the default one, or one with an error level."""
    if isinstance(given, Race):
        return given
    if isinstance(given, bool):
        return Race() if given else None
    if not isinstance(given, float):
        raise HagoError(f"race {given!r}; expected True, an error level such as 0.01, or a Race")
    return Race(given)


def shuffled(batches: Batches, seed: int, first: int, names: Sequence[str]) -> Batches:
    """The samples in an order drawn with `seed`, in batches that end where a race looks.

    Raises:
        DataError: the samples are not in memory, or an input has no batch axis.
    """
    whole = batches.kept
    if whole is None:
        raise DataError("racing draws the order of all samples, so they must be in memory: pass fewer, or do not race")
    if any(t.ndim == 0 for b in whole for t in b.inputs):
        raise DataError("racing draws the order of samples; an input without a batch axis has none")
    order = torch.randperm(batches.samples, generator=torch.Generator().manual_seed(seed))
    inputs = [torch.cat(parts)[order] for parts in zip(*(b.inputs for b in whole), strict=True)]
    labelled = [b.labels for b in whole if b.labels is not None]
    labels = torch.cat(labelled)[order] if batches.labelled else None
    ends = _ends(batches.samples, first, max(b.size for b in whole))
    made = [
        Batch(tuple(x[a:b] for x in inputs), None if labels is None else labels[a:b])
        for a, b in zip([0, *ends], ends, strict=False)
    ]
    return Batches(made, names)


def _ends(samples: int, first: int, largest: int) -> list[int]:
    """Where batches end: at every look, and so that none is larger than `largest`."""
    ends, look, at = [], first, 0
    while at < samples:
        at = min(at + largest, look, samples)
        ends.append(at)
        look = 2 * look if at == look else look
    return ends


def looks(sizes: Iterable[int], first: int) -> list[bool]:
    """After which batches there is a look: not after the last, where all is known."""
    found, at, look = [], 0, first
    for size in sizes:
        at += size
        found.append(at >= look)
        while look <= at:
            look *= 2
    return [*found[:-1], False]
