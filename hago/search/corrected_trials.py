"""What trials become once their layers are corrected: the best one within the limits, and the front.

Correcting the layers of a point takes some forwards, so trials are measured without it, and it is made for the points
that are returned.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Final

from hago.search.correcting import OF_LAYERS, correct_in_turns, correct_point, float_layers
from hago.search.effort import Effort
from hago.search.float_layers import FloatLayers
from hago.search.goal import Limit
from hago.search.measured_point import MeasuredPoint
from hago.search.objective import OBJECTIVES
from hago.search.preparation import Prepared
from hago.search.scoring import GoalScorer
from hago.study import Score, Trial

#: The most points of a front whose layers are corrected, unless all are.
FRONT_POINTS: Final = 16


@dataclass(frozen=True, slots=True)
class CorrectedTrial:
    """A trial with the corrections of its layers that improve it.

    Args:
        trial: as it was searched.
        prepared: with the corrections, and the records of all that were tried.
        score: with the corrections, under the limits as the user gave them.
        is_sure: whether limits on measures also hold on the last quarter of the samples alone, which gives no
            corrections; not asked of shares of classes, which few samples determine only roughly.
    """

    trial: Trial
    prepared: Prepared
    score: Score
    is_sure: bool = True


#: Corrects the layers of a point.
Correct = Callable[[MeasuredPoint], MeasuredPoint]


class CorrectedTrials:
    """Corrects the layers of trials. `search.session` makes one when the trials are over.

    Which corrections go together is tried at the first trial with few bits, and kept for all others with few, unless
    the effort says that all do. What layers read in the float model is kept for all trials, see `FloatLayers`.

    Args:
        scorer: of the search.
        effort: says how often the best trial is corrected, and of how many points of a front.
        report: called with a text at every step.
        journal: of `correct_in_turns`.
    """

    def __init__(
        self, scorer: GoalScorer, effort: Effort, report: Callable[[str], None], journal: Path | None = None
    ) -> None:
        self._journal = journal
        self._searched, self._asked = scorer.goal, scorer.goal.asked
        self._scorer, self._effort, self._report = scorer.with_goal(self._asked), effort, report
        self._together: tuple[str, ...] | None = None if effort.tries_apart else OF_LAYERS

    @cached_property
    def _float_layers(self) -> FloatLayers:
        return float_layers(self._scorer.prepared, self._scorer.evaluator)

    def best(self, best: Trial, trials: Sequence[Trial]) -> CorrectedTrial:
        """The best trial, its layers corrected as often as the effort says; where limits on measures were lowered by
        what corrections are expected to gain, the best with which the limits hold, or the one that comes nearest.

        Args:
            best: of the search.
        """
        once = self._within_limits(best, trials) if any(self._searched.expected_gains.values()) else None
        evaluator, turns, names = self._scorer.evaluator, self._effort.turns, self._scorer.prepared.correction_names
        trial = best if once is None else once.trial
        if names:
            self._report("correcting the layers of the best")
        if turns == 1 and not any(name.startswith("reconstruction") for name in names):
            return self._by(self._correct, trial) if once is None else once

        def in_turns(point: MeasuredPoint) -> MeasuredPoint:
            return correct_in_turns(point, evaluator, turns, self._report, self._journal, self._float_layers)

        further = self._by(in_turns, trial)
        # turns go by the objective, so they may lose a limit
        return further if once is None else max(further, once, key=lambda made: made.score.rank)

    def spread(self, trials: Sequence[Trial]) -> Iterator[CorrectedTrial]:
        """Correct trials of a front: with an effort of several turns all, and else FRONT_POINTS, spread evenly. The
        cheapest come first, since points with few bits gain most.

        Args:
            trials: by rising cost.
        """
        last = len(trials) - 1
        count = len(trials) if self._effort.turns > 1 else min(FRONT_POINTS, len(trials))
        chosen = [round(i * last / max(1, count - 1)) for i in range(count)]
        for number, index in enumerate(chosen, 1):
            self._report(f"correcting the layers of point {number} of {len(chosen)} of the front")
            yield self._by(self._correct, trials[index])

    def _within_limits(self, best: Trial, trials: Sequence[Trial]) -> CorrectedTrial:
        """The best trial with which the limits hold once it is corrected, by bisection."""
        candidates = self._candidates(best, trials)
        low, high = 0, len(candidates)
        probe = next((i for i, trial in enumerate(candidates) if trial.score.accepted), high // 2)
        sure: CorrectedTrial | None = None
        others: CorrectedTrial | None = None  # the best of those that are not sure
        while low < high:
            self._report(f"correcting the layers of trial {candidates[probe].index}")
            made = self._by(self._correct, candidates[probe])
            if made.is_sure and not made.score.shortfall:
                sure, high = made, probe
            else:
                others = made if others is None or made.score.rank > others.score.rank else others
                low = probe + 1
            probe = (low + high) // 2
        return sure or others or self._by(self._correct, best)

    def _candidates(self, best: Trial, trials: Sequence[Trial]) -> list[Trial]:
        """The trials that may be the best one once they are corrected, the best by the goal first; each next one is
        closer to the limits, and the last keeps them without corrections, if any does. Where no cost is minimized, the
        first is the best of the search, which may be one that was confirmed."""

        def shortfall(trial: Trial) -> float:
            return self._asked.shortfall({**trial.results, **trial.score.costs})

        candidates, left = list[Trial](), math.inf
        if self._searched.minimize is None:
            candidates, left = [best], shortfall(best)
        usable = [t for t in trials if t.score.runs and not t.score.dropped and t.same_as is None]
        for trial in sorted(usable, key=lambda t: (-t.score.value, -t.score.tie, t.index)):
            keeps_costs = not self._asked.of_costs.shortfall(trial.score.costs)
            if keeps_costs and shortfall(trial) < left:
                candidates.append(trial)
                left = shortfall(trial)
        return candidates

    def _by(self, correct: Correct, trial: Trial) -> CorrectedTrial:
        """A trial as a function corrects its layers, or as it was where that does not improve it, by the goal."""
        prepared, evaluator = self._scorer.prepared, self._scorer.evaluator
        if not prepared.correction_names:
            return CorrectedTrial(trial, prepared, trial.score)
        point = MeasuredPoint(prepared, trial.bits, evaluator.measure(prepared.resolver(trial.bits)))
        corrected = correct(point)
        before, after = (
            self._scorer.under_goal(p.plan, evaluator.concluded(p.plan, p.bits, p.measured)) for p in (point, corrected)
        )
        if after.rank > before.rank:
            return CorrectedTrial(trial, corrected.prepared, after, self._is_sure(corrected))
        # the corrections bring the outputs closer, but the goal counts the trial no higher
        passes = corrected.prepared.passes
        made = [p if p in prepared.passes or p.why_not else replace(p, why_not="no gain") for p in passes]
        return CorrectedTrial(trial, replace(prepared, passes=tuple(made)), before)

    def _is_sure(self, point: MeasuredPoint) -> bool:
        """See `CorrectedTrial.is_sure`."""
        limits = tuple(limit for limit in self._asked.limits if self._is_of_losses(limit))
        return not replace(self._asked, limits=limits).shortfall(self._scorer.evaluator.summary_of_last(point.measured))

    def _is_of_losses(self, limit: Limit) -> bool:
        """Whether a limit is on a measure of every sample that counts no classes."""
        measure = None if limit.is_cost else self._asked.measure_of(limit.figure)
        return measure is not None and measure.name in OBJECTIVES and not measure.counts_classes

    def _correct(self, point: MeasuredPoint) -> MeasuredPoint:
        together = self._together if point.has_few_bits else None
        corrected = correct_point(point, self._scorer.evaluator, self._float_layers, together)
        if point.has_few_bits and together is None:
            passes = corrected.prepared.passes[len(point.prepared.passes) :]
            self._together = next((made.names for made in passes if made.kept and made.names[0] in OF_LAYERS), None)
        return corrected
