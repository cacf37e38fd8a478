"""Confirmation: a test of proposed thresholds on samples that did not shape them.

Thresholds that are tuned to few samples may be worse than plain ones on others, above all where they clip values that
the samples did not reach. So a search keeps samples aside, and takes a proposal only where it is surely better on
these. Of many samples, the last quarter is kept aside. Of few, every sample is kept aside in one of several turns: the
method of proposing is confirmed then, and the proposal is made again from all samples.

Thresholds of activations are made from statistics of all samples, so they clip hardly any value of the samples that are
kept aside, however much they may clip of others. A proposal of such thresholds is therefore confirmed a second time,
as it is made from statistics that were collected without these samples (`UnseenSamples`).

A search makes one Confirmation, and refinement (`hago.search.refinement`, `hago.search.choice_refinement`) asks it for
the Gain of every proposal.

References:
    M. Stone, "Cross-Validatory Choice and Assessment of Statistical Predictions", 1974; Student, "The Probable Error
    of a Mean", 1908.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from scipy import stats
from torch import Tensor

from hago.calibration import Calibration, collect
from hago.data import Batch, Batches
from hago.errors import InfeasibleBits
from hago.plan import Bits, Space
from hago.plan.feasibility import plan_or_refusal
from hago.search.evaluate import Evaluator, Measurement
from hago.search.objective import OBJECTIVES, Objective
from hago.search.preparation import Prepared

#: Number of parts that samples are split into.
TURNS: Final = 4
#: Of fewer samples than these each part is kept aside in turn; of more, only the last part.
FEW: Final = 64
#: The least size of a part, relative to an equal share, that is accepted so that parts are whole batches.
UNEVEN: Final = 0.6
#: Least number of blocks that are compared. A block is a batch or, where batches are fewer, a run of neighbouring
#: samples: neighbours are alike, so samples are not independent.
BLOCKS: Final = 8
#: Part of the mean loss that is added to the losses of blocks before their ratio is taken, so that a block with hardly
#: any loss has hardly any influence.
LEAST_GAIN: Final = 0.01
#: Confidence with which a proposal must be better.
CONFIDENCE: Final = 0.95
#: Part of the loss by which thresholds of activations that clip more must be better: they affect values that no sample
#: has.
MARGIN: Final = 0.05


@dataclass(frozen=True, slots=True)
class KeptAside:
    """The samples `first:last` of a data set, which must not shape a proposal."""

    first: int
    last: int

    def shaping(self, batches: Iterable[Sequence[Tensor]]) -> Iterator[list[Tensor]]:
        """Yield the rest of each batch, which may shape it."""
        begin = 0
        for tensors in batches:
            first, last = self._within(begin, len(tensors[0]))
            begin += len(tensors[0])
            if first == last:
                yield list(tensors)
            elif last - first < len(tensors[0]):
                yield [torch.cat([t[:first], t[last:]]) for t in tensors]

    def rows(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Yield the samples that are kept aside, batch by batch."""
        begin = 0
        for batch in batches:
            first, last = self._within(begin, batch.size)
            begin += batch.size
            if first < last:
                yield batch.rows(first, last)

    def shaping_rows(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Yield the samples that may shape a proposal, batch by batch."""
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
        """The part `first:last` that is kept aside of a batch whose first sample has the number `begin`."""
        first, last = (min(max(0, end - begin), size) for end in (self.first, self.last))
        return first, last

    def without(self, contributions: Tensor) -> Tensor:
        """The contributions of the samples that may shape it."""
        return torch.cat([contributions[: self.first], contributions[self.last :]])


def turns_of(sizes: Sequence[int]) -> tuple[KeptAside, ...]:
    """The samples that are kept aside of batches of these sizes, turn by turn.

    There is one turn for many samples, several that cover all of few, and none for a single sample. Samples of one
    batch are alike, so parts are whole batches, or runs of samples where there are few batches.
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
    """The bounds of `count` parts of about the same size, each at one of the `ends`."""
    return sorted({0, total, *(min(ends, key=lambda end: abs(end - total * i / count)) for i in range(1, count))})


@dataclass(frozen=True, slots=True)
class Gain:
    """The gain of one proposal over another on samples that were kept aside.

    Args:
        part: the difference of losses as a part of the loss.
        errors: mean of the logarithm of the ratio of losses over blocks, in standard errors.
        blocks: number of blocks that were compared.
    """

    part: float
    errors: float
    blocks: int

    def is_sure(self, margin: float = 0.0, candidates: int = 1) -> bool:
        """Whether the gain is significant, and above a part of the loss.

        Args:
            margin: that part.
            candidates: number of proposals of which this one is the best on the same samples. The best of several
                seems better than it is, so each is allowed only its share of the error (Bonferroni's correction).
        """
        if self.blocks < 2:
            return False
        confidence = 1.0 - (1.0 - CONFIDENCE) / candidates
        return self.part > margin and self.errors > float(stats.t.ppf(confidence, self.blocks - 1))


@dataclass(frozen=True, slots=True)
class Confirmation:
    """The batches of a search, and the samples of them that are kept aside.

    Args:
        sizes: of the batches.
        turns: see `turns_of`.
        is_blind: whether thresholds of activations are confirmed by `UnseenSamples` too; not for older logs.
    """

    sizes: tuple[int, ...]
    turns: tuple[KeptAside, ...]
    is_blind: bool = True

    @staticmethod
    def of(sizes: Sequence[int], logged: Any = None) -> Confirmation | None:
        """The confirmation for batches of these sizes; None to take proposals without one, as logs of version 1 did.

        Args:
            logged: the entry `refined` of the log that is continued or replayed; None for a new search.
        """
        if logged is True:
            return None
        return Confirmation(tuple(sizes), turns_of(sizes), logged is None or bool(logged.get("blind")))

    @property
    def count(self) -> int:
        """Number of samples that are kept aside, over all turns."""
        return sum(t.last - t.first for t in self.turns)

    @property
    def record(self) -> dict[str, Any]:
        """The entries of the log's header that are known before anything is measured."""
        entries: dict[str, Any] = {"kept_aside": self.count, "turns": len(self.turns)}
        return {**entries, "blind": True} if self.is_blind and self.turns else entries

    def gain(self, before: Sequence[Tensor], after: Sequence[Tensor]) -> Gain:
        """The gain of `after` over `before` on the samples that are kept aside.

        Args:
            before, after: the losses of all samples, by turn.
        """
        gains, losses = [], []
        for turn, old, new in zip(self.turns, before, after, strict=True):
            aside = slice(turn.first, turn.last)
            gains.append((old[aside] - new[aside]).to(torch.float64))
            losses.append(old[aside].to(torch.float64))
        difference = torch.cat(gains) if gains else torch.zeros(0)
        if not len(difference) or not bool(difference.isfinite().all()):
            return Gain(0.0, 0.0, 0)  # nothing to compare: one of them does not run
        old_losses = torch.cat(losses)
        blocks = list(itertools.pairwise(self._blocks(len(difference))))
        mean = float(difference.mean())
        part = mean / whole if (whole := float(old_losses.mean())) > 0.0 else 0.0
        # a few samples have most of the loss; ratios give all blocks the same weight
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
        """The bounds of the blocks, counted among the samples that are kept aside."""
        first = self.turns[0].first
        batches = [end - first for end in itertools.accumulate(self.sizes) if first < end <= first + count]
        if len(batches) >= BLOCKS:
            return [0, *batches]
        blocks = min(BLOCKS, count)
        return [i * count // blocks for i in range(blocks + 1)]


class UnseenSamples:
    """The samples that each turn keeps aside, and statistics of activations that were collected without them. Made once
    per search, where a proposal of thresholds of activations seems to be better.

    Args:
        prepared: with statistics of all samples.

    Attributes:
        calibrations: by turn, the calibration with statistics of the other samples.
        forwards: the cost so far, in passes of the float model over the data.
    """

    def __init__(self, prepared: Prepared, objective: Objective, confirmation: Confirmation) -> None:
        self.confirmation, self._objective = confirmation, objective
        graph, ops, batches = prepared.graph, prepared.hardware.known_ops, prepared.batches
        calibration, judge = prepared.calibration, _loss_of(objective)
        self.calibrations: list[Calibration] = []
        self._evaluators: list[Evaluator] = []
        for turn in confirmation.turns:
            shaping = collect(graph, turn.shaping_rows(batches), calibration.statistics.keys(), ops)
            self.calibrations.append(replace(calibration, statistics=shaping.statistics))
            kept = Batches(_Rows(batches, turn), graph.inputs)
            self._evaluators.append(Evaluator(graph, kept, judge, ops, cache_bytes=0, quiet=True))
        self.forwards = float(len(confirmation.turns))

    def losses(self, proposals: Sequence[Prepared], points: Sequence[Bits]) -> list[Tensor] | None:
        """By turn, the losses of all samples, 0 for those that are not kept aside; None where one of the Plans is
        infeasible or overflows.

        Args:
            proposals, points: by turn, the thresholds and the bits.
        """
        total, by_turn = sum(self.confirmation.sizes), list[Tensor]()
        turns = zip(self.confirmation.turns, proposals, points, self._evaluators, strict=True)
        for turn, prepared, bits, evaluator in turns:
            plan = plan_or_refusal(prepared.resolver, bits)
            if isinstance(plan, InfeasibleBits):
                return None
            measured = evaluator.measure(plan)
            self.forwards += (turn.last - turn.first) / total
            if any(measured.peaks.overflows.values()):
                return None
            losses = torch.zeros(total, dtype=torch.float64)
            losses[turn.first : turn.last] = losses_of(self._objective, measured)
            by_turn.append(losses)
        return by_turn

    def gain(self, before: Sequence[Tensor] | None, after: Sequence[Tensor] | None) -> Gain:
        """The gain of `after` over `before`, both made by `losses`; none where one of them does not run."""
        if before is None or after is None:
            return Gain(0.0, 0.0, 0)
        return self.confirmation.gain(before, after)


@dataclass(frozen=True, slots=True)
class _Rows:
    """The samples that a turn keeps aside, which can be read any number of times."""

    batches: Batches
    turn: KeptAside

    def __iter__(self) -> Iterator[Batch]:
        return self.turn.rows(self.batches)


def _loss_of(objective: Objective) -> Objective:
    """The objective by whose losses proposals are compared: the squared error where an objective has no losses of
    single samples, or counts classes, of which few samples say little."""
    return OBJECTIVES["sqnr"] if objective.loss is None or objective.counts_classes else objective


def losses_of(objective: Objective, measured: Measurement) -> Tensor:
    """The losses of all samples by which proposals are compared, float64."""
    judge = _loss_of(objective)
    assert judge.loss is not None
    return judge.loss(measured.contributions[judge.name])


def clipped_share(calibration: Calibration, space: Space, thresholds: Mapping[str, tuple[Tensor, Tensor]]) -> float:
    """The fraction of all values seen in calibration that thresholds clip.

    Args:
        thresholds: by key of the group, as in a Plan.
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
    """The entries of the log's header for a gain, as JSON values.

    Args:
        clipped, before: the `clipped_share` of the proposal and of the thresholds that it replaces.
    """
    return {
        "gain": round(gain.part, 4),
        "standard_errors": round(min(max(gain.errors, -99.0), 99.0), 2),
        "clipped": round(clipped, 7),
        "clipped_before": round(before, 7),
    }
