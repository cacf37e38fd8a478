"""Racing: a point is dropped once its samples show that it is worse than the best so far.

The samples are put in a random order, once. Every sample has a loss, 0 or more, whose mean orders models. D is the loss
of the point less that of its rival on the same sample. The rival was measured on all samples, so no D is below the
negated largest loss of the rival.

If the point is at least as good, the sum of D over all N samples is 0 or less. So after t-1 of them the next has an
expected value of at most mu = -(D_1 + ... + D_(t-1)) / (N - t + 1). Then

    K_t = K_(t-1) * (1 + lambda_t * (D_t - mu)),    0 <= lambda_t * (largest loss + mu) < 1,

is a supermartingale that is never negative, whatever the distribution of the losses. By Ville's inequality it reaches
1/alpha with a probability of at most alpha, and the point is dropped when it does. So however often one looks, a point
that is at least as good as its rival on all samples is dropped with a probability of at most alpha over the order of
the samples.

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

from hago.data import Batch, Batches
from hago.errors import DataError, HagoError
from hago.graph import Graph
from hago.ops import OPS, Ops
from hago.plan import Bits, Plan
from hago.search.evaluate import Evaluator, Measurement
from hago.search.objective import OBJECTIVES, Objective
from hago.simulation import AccumulatorExtremes
from hago.study import Score

#: The largest lambda * (largest loss + mu). At 1, one sample could make K zero for ever.
LARGEST_STAKE: Final = 0.75


# ---------------------------------------------------------------- the test
@dataclass(frozen=True, slots=True)
class RaceOptions:
    """Options of a race, and its test.

    Args:
        alpha: the largest probability with which a point is dropped that is at least as good as its rival on all
            samples.
        first: number of samples before the first look; every further look is after twice as many.

    Raises:
        HagoError: an option is out of range.
    """

    alpha: float = 0.01
    first: int = 16

    def __post_init__(self) -> None:
        if not 0.0 < self.alpha < 1.0 or self.first < 1:
            raise HagoError(f"race with alpha {self.alpha}, first {self.first}; expected 0 < alpha < 1, first >= 1")

    def worse(self, losses: Tensor, rival: Tensor, samples: int) -> bool:
        """Whether a point should be dropped.

        Args:
            losses: (n,), of the point on the first n samples.
            rival: (samples,), of its rival on all samples in the same order.
            samples: number of all samples.
        """
        largest = float(rival.max())
        log_k, total, squares = 0.0, 0.0, 0.0  # K, mu and lambda are those of the module's docstring
        for t, d in enumerate((losses - rival[: len(losses)]).tolist()):
            mu = -total / (samples - t)
            room = largest + mu
            if room < -1e-12 * largest:
                return True  # no values of the rest could make it as good
            if room > 0.0:
                gain = total / (t + 1) - mu
                spread = (squares + largest * largest / 4) / (t + 1)
                lambda_ = min(max(gain / (spread + gain * gain), 0.0) if gain else 0.0, LARGEST_STAKE / room)
                log_k += math.log1p(max(lambda_ * (d - mu), -LARGEST_STAKE))
            elif d > mu:
                return True
            total += d
            squares += d * d
            if log_k >= -math.log(self.alpha):
                return True
        return False


def as_race(given: bool | float | RaceOptions) -> RaceOptions | None:
    """The options that the user's `race=` stands for: None for no race, the default ones, or an error level."""
    if isinstance(given, RaceOptions):
        return given
    if isinstance(given, bool):
        return RaceOptions() if given else None
    if not isinstance(given, float):
        raise HagoError(f"race {given!r}; expected True, an error level such as 0.01, or hago.search.RaceOptions")
    return RaceOptions(given)


def shuffled(batches: Batches, seed: int, first: int, names: Sequence[str]) -> Batches:
    """The samples in a random order, in batches that end where a race looks.

    Raises:
        DataError: the samples are not in memory, or an input has no batch axis.
    """
    kept = batches.kept
    if kept is None:
        raise DataError("racing draws the order of all samples, so they must be in memory: pass fewer, or do not race")
    if any(t.ndim == 0 for b in kept for t in b.inputs):
        raise DataError("racing draws the order of samples; an input without a batch axis has none")
    order = torch.randperm(batches.samples, generator=torch.Generator().manual_seed(seed))
    samples = Batch.joined(kept)
    drawn = Batch(tuple(x[order] for x in samples.inputs), None if samples.labels is None else samples.labels[order])
    ends = _ends(batches.samples, first, max(b.size for b in kept))
    return Batches([drawn.rows(a, b) for a, b in zip([0, *ends], ends, strict=False)], names)


def _ends(samples: int, first: int, largest: int) -> list[int]:
    """The ends of batches: at every look, and so that no batch is larger than `largest`."""
    ends, look, at = [], first, 0
    while at < samples:
        at = min(at + largest, look, samples)
        ends.append(at)
        look = 2 * look if at == look else look
    return ends


def looks(sizes: Iterable[int], first: int) -> list[bool]:
    """For every batch, whether there is a look after it. There is none after the last, when all is known."""
    after, at, look = [], 0, first
    for size in sizes:
        at += size
        after.append(at >= look)
        while look <= at:
            look *= 2
    return [*after[:-1], False]


# ---------------------------------------------------------------- scoring
class RacingEvaluator(Evaluator):
    """An Evaluator over samples in random order, which measures points worse than their rival on fewer of them.

    Args:
        race: options of the test.
        seed: of the order of samples.
        also, cache_bytes, quiet: see Evaluator.

    Raises:
        HagoError: the objective has no loss per sample.
    """

    def __init__(
        self,
        graph: Graph,
        batches: Batches,
        objective: Objective,
        ops: Ops = OPS,
        *,
        race: RaceOptions,
        seed: int = 0,
        also: Sequence[Objective] = (),
        cache_bytes: int | None = None,
        quiet: bool = False,
    ) -> None:
        if objective.loss is None:
            raced = [name for name, known in OBJECTIVES.items() if known.loss is not None]
            raise HagoError(
                f"objective {objective.name!r} gives no loss for each sample, so points cannot be raced; "
                f"take one of {', '.join(raced[:-1])} and {raced[-1]}, or do not race"
            )
        batches = shuffled(batches, seed, race.first, graph.inputs)
        super().__init__(graph, batches, objective, ops, also=also, cache_bytes=cache_bytes, quiet=quiet)
        self.race, self._loss = race, objective.loss
        self._looks = looks((b.size for b in self.batches), race.first)

    def score(self, plan: Plan, bits: Bits, rival: Plan | None = None) -> Score:
        """The Score of a point; its `dropped` tells after how many samples and why, if it was dropped.

        Args:
            rival: the best so far, which overflowed nowhere; None if there is none.
        """
        if rival is None or rival.key == plan.key:
            return super().score(plan, bits)
        name, look = self.objective.name, iter(self._looks)
        # measured again if another session or worker measured it
        of_rival = self.measure(rival).contributions[name]
        because = ""

        def enough(contributions: Mapping[str, Tensor], extremes: AccumulatorExtremes) -> bool:
            nonlocal because
            if next(look):
                worse = self.race.worse(self._loss(contributions[name]), self._loss(of_rival), len(of_rival))
                because = "overflows" if extremes.overflows else "worse" if worse else ""
            return bool(because)

        measured = self.measure(plan, enough)
        if not because:
            self.keep(plan, measured)
            return self.concluded(plan, bits, measured)
        return self._dropped(plan, bits, measured, of_rival, because)

    def _dropped(self, plan: Plan, bits: Bits, measured: Measurement, theirs: Tensor, because: str) -> Score:
        objective = self.objective
        mine = measured.contributions[objective.name]
        best = objective.finish(theirs.mean(0))
        # Samples are paired: what differs on those seen is added to what the rival has on all.
        value = objective.finish(theirs.mean(0) + (mine - theirs[: len(mine)]).mean(0))
        value = min(value, math.nextafter(best, -math.inf))
        figure = objective.figure
        results = {**self.summary(measured.contributions), figure: value}
        samples = {"samples": len(mine), "of": len(theirs)}
        score = self.described(plan, bits, measured, value, results)
        dropped = {**samples, "because": because, "rival": best}
        return replace(score, forwards=len(mine) / len(theirs), dropped=dropped)


def make_evaluator(
    graph: Graph,
    batches: Batches,
    objective: Objective,
    ops: Ops = OPS,
    *,
    race: RaceOptions | None = None,
    seed: int = 0,
    also: Sequence[Objective] = (),
    cache_bytes: int | None = None,
    quiet: bool = False,
) -> Evaluator:
    """Make the evaluator of a search, in the process that searches and in every worker.

    Args:
        race: options of the race; None for none.
        seed: of the order of samples in a race.
        also, cache_bytes, quiet: see Evaluator.
    """
    if race is None:
        return Evaluator(graph, batches, objective, ops, also=also, cache_bytes=cache_bytes, quiet=quiet)
    return RacingEvaluator(
        graph, batches, objective, ops, race=race, seed=seed, also=also, cache_bytes=cache_bytes, quiet=quiet
    )
