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
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor

from hago.caching import LRU
from hago.data.batches import Batch, Batches
from hago.errors import DataError, HagoError
from hago.plan.plan import Plan
from hago.plan.space import Bits
from hago.search.evaluate import Evaluator, Measurement
from hago.simulation.overflow import AccumulatorExtremes
from hago.study.searcher import Score

#: Of the largest bet that cannot lose all, what is bet at most.
BOLD: Final = 0.75


@dataclass(frozen=True, slots=True)
class RaceOptions:
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


def as_race(given: bool | float | RaceOptions) -> RaceOptions | None:
    """The race that a user means: none, the default one, or one with an error level."""
    if isinstance(given, RaceOptions):
        return given
    if isinstance(given, bool):
        return RaceOptions() if given else None
    if not isinstance(given, float):
        raise HagoError(f"race {given!r}; expected True, an error level such as 0.01, or a Race")
    return RaceOptions(given)


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


# ---------------------------------------------------------------- racer
# Racer: scores points of a race, each against the best so far on the same samples.

#: Of how many points the contributions of all samples are remembered.
REMEMBERED: Final = 64


class Pruner:
    """Scores points; those that are worse than their rival, on fewer samples.

    Args:
        evaluator: over samples in a drawn order, see `hago.search.racing.shuffled`.

    Raises:
        HagoError: the objective has no loss by sample.
    """

    def __init__(self, evaluator: Evaluator, race: RaceOptions) -> None:
        if evaluator.objective.loss is None:
            raise HagoError(
                f"objective {evaluator.objective.name!r} gives no loss for each sample, so points cannot be raced; "
                "take one of sqnr, kl, mse, cosine, agreement and accuracy, or do not race"
            )
        self.evaluator, self.race, self._loss = evaluator, race, evaluator.objective.loss
        self._looks = looks((b.size for b in evaluator.batches), race.first)
        self._whole: LRU[str, Tensor] = LRU(REMEMBERED)

    def score(self, plan: Plan, bits: Bits, rival: Plan | None) -> Score:
        """The Score of a point; `dropped` says where it was given up.

        Args:
            rival: the best so far, which overflowed nowhere; None where there is none.
        """
        if rival is None or rival.key == plan.key:
            return self._complete(plan, bits)
        theirs = self._contributions(rival)
        name, look = self.evaluator.objective.name, iter(self._looks)
        because = ""

        def enough(found: Mapping[str, Tensor], peaks: AccumulatorExtremes) -> bool:
            nonlocal because
            if next(look):
                worse = self.race.worse(self._loss(found[name]), self._loss(theirs), len(theirs))
                because = "overflows" if peaks.overflows else "worse" if worse else ""
            return bool(because)

        measured = self.evaluator.measure(plan, enough)
        if not because:
            self._whole.put(plan.key, measured.contributions[name])
            return self.evaluator.concluded(plan, bits, measured)
        return self._dropped(plan, bits, measured, theirs, because)

    def _complete(self, plan: Plan, bits: Bits) -> Score:
        measured = self.evaluator.measure(plan)
        self._whole.put(plan.key, measured.contributions[self.evaluator.objective.name])
        return self.evaluator.concluded(plan, bits, measured)

    def _contributions(self, rival: Plan) -> Tensor:
        """Those of a rival; measured here where another session or worker measured them."""
        found = self._whole.get(rival.key)
        if found is None:
            found = self.evaluator.measure(rival).contributions[self.evaluator.objective.name]
            self._whole.put(rival.key, found)
        return found

    def _dropped(self, plan: Plan, bits: Bits, measured: Measurement, theirs: Tensor, because: str) -> Score:
        objective = self.evaluator.objective
        mine = measured.contributions[objective.name]
        best = objective.finish(theirs.mean(0))
        # Samples are paired: what differs on those seen is added to what the rival has on all.
        value = objective.finish(theirs.mean(0) + (mine - theirs[: len(mine)]).mean(0))
        value = min(value, math.nextafter(best, -math.inf))
        figure = objective.figure
        results = {**self.evaluator.summary(measured.contributions), figure: value}
        samples = {"samples": len(mine), "of": len(theirs)}
        score = self.evaluator.described(plan, bits, measured, value, results)
        dropped = {**samples, "because": because, "rival": best}
        return replace(score, forwards=len(mine) / len(theirs), dropped=dropped)
