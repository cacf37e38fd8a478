"""Confirmation: a test of proposed thresholds on samples that did not shape them.

Thresholds that are tuned to few samples may be worse than plain ones on others, above all where they clip values that
the samples did not reach. So a search keeps validation samples aside, and takes a proposal only where it is
significantly better on these. Which they are, `hago.search.folds` says. Where there are several folds, the method of
proposing is confirmed, and the proposal is made again from all samples.

Thresholds of activations are made from statistics of all samples, so they clip hardly any value of the validation
samples, however much they may clip of others. A proposal of such thresholds is therefore tested a second time, as it is
made from statistics of the tuning samples alone (`UnseenSamples`).

A search that refines thresholds makes one Confirmation. Refinement (`hago.search.point_refinement`,
`hago.search.choice_refinement`) makes a ProposalTest with it, which decides whether a proposal is accepted.

References:
    Student, "The Probable Error of a Mean", 1908.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol

import torch
from torch import Tensor

from hago.calibration import Calibration, TensorStatistics, collect
from hago.data import Batch, Batches
from hago.errors import InfeasibleBits
from hago.plan import Bits, Space
from hago.plan.feasibility import plan_or_refusal
from hago.runtime.native import exact_kernels
from hago.search.evaluate import Evaluator, Measurement
from hago.search.folds import Fold, folds_of
from hago.search.gradients import CHUNK_SAMPLES, GRADIENT_CHUNK
from hago.search.objective import OBJECTIVES, Objective
from hago.search.preparation import Prepared
from hago.study import Header

#: Least number of blocks that are compared. A block is a batch or, where batches are fewer, a run of neighbouring
#: samples: neighbours are alike, so samples are not independent.
BLOCKS: Final = 8
#: Part of the mean loss that is added to the losses of blocks before their ratio is taken, so that a block with hardly
#: any loss has hardly any influence.
ADDED_LOSS: Final = 0.01
#: Confidence with which a proposal must be better.
CONFIDENCE: Final = 0.95
#: Part of the loss by which thresholds of activations that clip more must be better: they affect values that no sample
#: has.
MARGIN: Final = 0.05
#: Largest cost of the refinement of one fold in forwards, its gradients and the measuring of activations included:
#: rounds for weights end there. Later rounds gain little.
MAX_FORWARDS: Final = 20.0


def _t_quantile(probability: float, freedom: int) -> float:
    """The value that Student's t with some degrees of freedom stays below with a probability."""
    from scipy import special  # scipy.stats, which has the same function, takes a second to import

    return float(special.stdtrit(freedom, probability))


@dataclass(frozen=True, slots=True)
class Gain:
    """The gain of one proposal over another on validation samples.

    Args:
        part: the difference of losses as a part of the loss.
        errors: mean of the logarithm of the ratio of losses over blocks, in standard errors.
        blocks: number of blocks that were compared.
    """

    part: float
    errors: float
    blocks: int

    def is_significant(self, margin: float = 0.0, candidates: int = 1) -> bool:
        """Whether the gain is significant, and above a part of the loss.

        Args:
            margin: that part.
            candidates: number of proposals of which this one is the best on the same samples. The best of several
                seems better than it is, so each is allowed only its share of the error (Bonferroni's correction).
        """
        if self.blocks < 2:
            return False
        confidence = 1.0 - (1.0 - CONFIDENCE) / candidates
        return self.part > margin and self.errors > _t_quantile(confidence, self.blocks - 1)


@dataclass(frozen=True, slots=True)
class Confirmation:
    """The batches of a search, and their folds.

    Args:
        sizes: of the batches.
        folds: see `folds_of`.
        is_blind: whether thresholds of activations are tested by `UnseenSamples`, too; not for older logs.
        max_forwards: the largest cost of one fold, see MAX_FORWARDS; infinite for older logs.
        most_chunk: the most samples that share a random vector where thresholds are refined at every choice of bits;
            CHUNK_SAMPLES for older logs.
        refines_weights: whether thresholds of weights are refined, too.
        takes_one_shot: whether the thresholds of one shot are taken in place of refined ones, so that only the best
            trial is confirmed.
    """

    sizes: tuple[int, ...]
    folds: tuple[Fold, ...]
    is_blind: bool = True
    max_forwards: float = MAX_FORWARDS
    most_chunk: int = GRADIENT_CHUNK
    refines_weights: bool = True
    takes_one_shot: bool = False

    @staticmethod
    def of(batches: Batches, logged: Header | None = None, *, takes_one_shot: bool = False) -> Confirmation | None:
        """The confirmation for these batches; None to take proposals without one, as logs of version 1 did.

        Args:
            logged: the header of the log that is continued or replayed; None for a new search.
            takes_one_shot: whether a new search takes the thresholds of one shot.
        """
        refined = None if logged is None else logged.settings.get("refined")
        if refined is True:
            return None
        made = Confirmation(batches.sizes, folds_of(batches.sizes))
        if refined is None:
            return replace(made, takes_one_shot=takes_one_shot)
        limit = float(refined.get("forwards", math.inf))
        return replace(
            made,
            is_blind=bool(refined.get("blind")),
            max_forwards=limit,
            most_chunk=int(refined.get("chunk", CHUNK_SAMPLES)),
            refines_weights=bool(refined.get("refines_weights", True)),
            takes_one_shot=bool(refined.get("one_shot")),
        )

    @property
    def count(self) -> int:
        """Number of validation samples, over all folds."""
        return sum(fold.size for fold in self.folds)

    @property
    def record(self) -> dict[str, Any]:
        """The entries of the log's header that are known before anything is measured."""
        entries: dict[str, Any] = {"kept_aside": self.count, "turns": len(self.folds)}
        if self.takes_one_shot:
            return {**entries, "one_shot": True}
        if self.is_blind and self.folds:
            entries["blind"] = True
        return entries if self.refines_weights else {**entries, "refines_weights": False}

    def gain(self, before: Sequence[Tensor], after: Sequence[Tensor]) -> Gain:
        """The gain of `after` over `before` on the validation samples.

        Args:
            before, after: the losses of all samples, by fold.
        """
        gains, losses = [], []
        for fold, old, new in zip(self.folds, before, after, strict=True):
            validation = slice(fold.first, fold.last)
            gains.append((old[validation] - new[validation]).to(torch.float64))
            losses.append(old[validation].to(torch.float64))
        difference = torch.cat(gains) if gains else torch.zeros(0)
        if not len(difference) or not bool(difference.isfinite().all()):
            return Gain(0.0, 0.0, 0)  # nothing to compare: one of them does not run
        old_losses = torch.cat(losses)
        blocks = list(itertools.pairwise(self._blocks(len(difference))))
        mean = float(difference.mean())
        part = mean / whole if (whole := float(old_losses.mean())) > 0.0 else 0.0
        # a few samples have most of the loss; ratios give all blocks the same weight
        added = ADDED_LOSS * abs(whole)
        befores, afters = (
            torch.stack([x[a:b].mean() for a, b in blocks]).clamp_min(0.0) + added
            for x in (old_losses, old_losses - difference)
        )
        ratios = (befores / afters).log() if added > 0.0 else torch.zeros(len(blocks), dtype=torch.float64)
        error = float(ratios.std()) / math.sqrt(len(blocks)) if len(blocks) > 1 else math.inf
        middle = float(ratios.mean())
        errors = middle / error if error > 0.0 else math.copysign(math.inf, middle) if middle else 0.0
        return Gain(part, errors, len(blocks))

    def _blocks(self, count: int) -> list[int]:
        """The bounds of the blocks, counted among the validation samples."""
        first = self.folds[0].first
        batches = [end - first for end in itertools.accumulate(self.sizes) if first < end <= first + count]
        if len(batches) >= BLOCKS:
            return [0, *batches]
        blocks = min(BLOCKS, count)
        return [i * count // blocks for i in range(blocks + 1)]


# ---------------------------------------------------------------- the test of a proposal
class Proposer(Protocol):
    """The maker of the proposals of one fold."""

    def proposal_with(self, name: str, calibration: Calibration) -> Prepared:
        """The proposal of a name, or the `estimated` thresholds, with those of activations made from these
        statistics."""
        ...


class ProposalTest:
    """The test of proposals against estimated thresholds. Each refinement makes one.

    Args:
        estimated: the search with the estimated thresholds.
        proposers, points: by fold, the maker of proposals, and the bits at which they are compared.
    """

    def __init__(
        self,
        estimated: Prepared,
        objective: Objective,
        confirmation: Confirmation,
        proposers: Sequence[Proposer],
        points: Sequence[Bits],
    ) -> None:
        self.estimated, self.objective, self.confirmation = estimated, objective, confirmation
        self.proposers, self.points = proposers, points
        self._unseen: UnseenSamples | None = None
        self._before_unseen: list[Tensor] | None = None

    def accepts(self, name: str, before: Sequence[Tensor], after: Sequence[Tensor], margin: float = 0.0) -> bool:
        """Whether a proposal is significantly better than the estimated thresholds on the validation samples: as it is,
        and with thresholds of activations that are made from statistics of the tuning samples alone.

        Args:
            before, after: the losses of all samples with the estimated thresholds and with the proposal, by fold.
            margin: part of the loss that must be gained.
        """
        if not self.confirmation.gain(before, after).is_significant(margin):
            return False
        return not self.confirmation.is_blind or self._unseen_gain(name).is_significant(margin)

    def _unseen_gain(self, name: str) -> Gain:
        if self._unseen is None:
            self._unseen = UnseenSamples(self.estimated, self.objective, self.confirmation)
            self._before_unseen = self._unseen.losses(self._proposals("estimated", self._unseen), self.points)
        after = self._unseen.losses(self._proposals(name, self._unseen), self.points)
        return self._unseen.gain(self._before_unseen, after)

    def _proposals(self, name: str, unseen: UnseenSamples) -> list[Prepared]:
        pairs = zip(self.proposers, unseen.calibrations, strict=True)
        return [proposer.proposal_with(name, calibration) for proposer, calibration in pairs]

    @property
    def forwards(self) -> float:
        """The cost of statistics of tuning samples, and of measuring with them, as budgets count."""
        return 0.0 if self._unseen is None else self._unseen.forwards


class UnseenSamples:
    """The validation samples of each fold, and statistics of activations that were collected without them. A
    ProposalTest makes one when it is first needed.

    Args:
        prepared: with statistics of all samples.

    Attributes:
        calibrations: by fold, the calibration with statistics of the tuning samples.
        forwards: the cost so far, in forwards. As budgets count, it has a pass for the statistics of every fold, though
            calibration may have kept them.
    """

    def __init__(self, prepared: Prepared, objective: Objective, confirmation: Confirmation) -> None:
        self.confirmation, self._objective = confirmation, objective
        graph, ops, batches = prepared.graph, prepared.hardware.known_ops, prepared.batches
        calibration, judge = prepared.calibration, _objective_of_losses(objective)
        self.calibrations: list[Calibration] = []
        self._evaluators: list[Evaluator] = []
        for fold in confirmation.folds:
            self.calibrations.append(replace(calibration, statistics=_statistics_of_tuning(prepared, fold)))
            validation = Batches(_ValidationBatches(batches, fold), graph.inputs)
            self._evaluators.append(Evaluator(graph, validation, judge, ops, cache_bytes=0, quiet=True))
        self.forwards = float(len(confirmation.folds))

    def losses(self, proposals: Sequence[Prepared], points: Sequence[Bits]) -> list[Tensor] | None:
        """By fold, the losses of all samples, 0 for tuning samples; None where one of the Plans is infeasible or
        overflows.

        Args:
            proposals, points: by fold, the thresholds and the bits.
        """
        total, by_fold = sum(self.confirmation.sizes), list[Tensor]()
        folds = zip(self.confirmation.folds, proposals, points, self._evaluators, strict=True)
        for fold, prepared, bits, evaluator in folds:
            plan = plan_or_refusal(prepared.resolver, bits)
            if isinstance(plan, InfeasibleBits):
                return None
            measured = evaluator.measure(plan)
            self.forwards += fold.size / total
            if any(measured.extremes.overflows.values()):
                return None
            losses = torch.zeros(total, dtype=torch.float64)
            losses[fold.first : fold.last] = losses_of(self._objective, measured)
            by_fold.append(losses)
        return by_fold

    def gain(self, before: Sequence[Tensor] | None, after: Sequence[Tensor] | None) -> Gain:
        """The gain of `after` over `before`, both made by `losses`; none where one of them does not run."""
        if before is None or after is None:
            return Gain(0.0, 0.0, 0)
        return self.confirmation.gain(before, after)


def _statistics_of_tuning(prepared: Prepared, fold: Fold) -> Mapping[str, TensorStatistics]:
    """The statistics of the tuning samples of a fold: those that calibration kept, or of another pass over them."""
    calibration, batches = prepared.calibration, prepared.batches
    if fold.last == batches.samples and fold.first == calibration.first_samples:
        return calibration.of_first
    return collect(
        prepared.graph,
        fold.tuning_batches(batches),
        calibration.statistics.keys(),
        prepared.hardware.known_ops,
        calibration.softmax_span,
        exact_kernels().count_bins,
    ).statistics


@dataclass(frozen=True, slots=True)
class _ValidationBatches:
    """The validation samples of a fold, which can be read any number of times."""

    batches: Batches
    fold: Fold

    def __iter__(self) -> Iterator[Batch]:
        return self.fold.validation_batches(self.batches)


def _objective_of_losses(objective: Objective) -> Objective:
    """The objective by whose losses proposals are compared: the squared error where an objective has no losses of
    single samples, or counts classes, of which few samples say little."""
    return OBJECTIVES["sqnr"] if objective.loss is None or objective.counts_classes else objective


def losses_of(objective: Objective, measured: Measurement) -> Tensor:
    """The losses of all samples by which proposals are compared, float64."""
    judge = _objective_of_losses(objective)
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
