"""Racer: scores points of a race, each against the best so far on the same samples."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from torch import Tensor

from hago.errors import HagoError
from hago.lru import LRU
from hago.peaks import Peaks
from hago.plan import Plan
from hago.search.searcher import Score
from hago.space import Bits
from hago.trials.evaluate import Evaluator, Measured
from hago.trials.racing import Race, looks

#: Of how many points the contributions of all samples are remembered.
REMEMBERED: Final = 64


class Racer:
    """Scores points; those that are worse than their rival, on fewer samples.

    Args:
        evaluator: over samples in a drawn order, see `hago.trials.racing.shuffled`.

    Raises:
        HagoError: the objective has no loss by sample.
    """

    def __init__(self, evaluator: Evaluator, race: Race) -> None:
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

        def enough(found: Mapping[str, Tensor], peaks: Peaks) -> bool:
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

    def _dropped(self, plan: Plan, bits: Bits, measured: Measured, theirs: Tensor, because: str) -> Score:
        objective = self.evaluator.objective
        mine = measured.contributions[objective.name]
        best = objective.finish(theirs.mean(0))
        # Samples are paired: what differs on those seen is added to what the rival has on all.
        value = objective.finish(theirs.mean(0) + (mine - theirs[: len(mine)]).mean(0))
        value = min(value, math.nextafter(best, -math.inf))
        figure = "sim_acc" if objective.name == "accuracy" else objective.name
        results = {**self.evaluator.summary(measured.contributions), figure: value}
        samples = {"samples": len(mine), "of": len(theirs)}
        score = self.evaluator.described(plan, bits, measured, value, results)
        dropped = {**samples, "because": because, "rival": best}
        return replace(score, forwards=len(mine) / len(theirs), dropped=dropped)
