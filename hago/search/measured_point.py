"""A point that corrections start from: its thresholds, its bits, and what was measured of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from hago.correction import CorrectionPass, WhyNot
from hago.errors import InfeasibleBits
from hago.plan import Bits, Plan
from hago.search.evaluate import Evaluator, Measurement
from hago.search.objective import OBJECTIVES, Objective
from hago.search.preparation import Prepared
from hago.search.safe_bits import first_safe_bits

#: The objective by which corrections are kept.
SQNR: Final = "sqnr"
#: Where operands have fewer bits, weights are also rounded without moving biases, and biases moved without rounding
#: weights, since each may then lose by the other; and weights get thresholds that are chosen for the outputs.
FEW_BITS: Final = 7


@dataclass(frozen=True, slots=True)
class MeasuredPoint:
    """A point of the space, and what was measured of it on all samples."""

    prepared: Prepared
    bits: Bits
    measured: Measurement

    @property
    def plan(self) -> Plan:
        return self.prepared.resolver(self.bits)

    @property
    def has_few_bits(self) -> bool:
        """Whether an operand has fewer than FEW_BITS."""
        return any(b < FEW_BITS for b in self.bits.values())

    def with_passes(self, *passes: CorrectionPass) -> MeasuredPoint:
        """The same with the records of further passes."""
        return replace(self, prepared=replace(self.prepared, passes=(*self.prepared.passes, *passes)))


def first_point(prepared: Prepared, evaluator: Evaluator) -> MeasuredPoint:
    """The widest bits that do not overflow on the data.

    Raises:
        InfeasibleBits: accumulators overflow at every width.
    """
    bits, _, measured = first_safe_bits(evaluator, prepared.resolver, prepared.calibration.peaks)
    return MeasuredPoint(prepared, bits, measured)


def first_point_if_any(prepared: Prepared, evaluator: Evaluator) -> MeasuredPoint | None:
    """The same; None where accumulators overflow at every width."""
    try:
        return first_point(prepared, evaluator)
    except InfeasibleBits:
        return None


def sqnr_evaluator(prepared: Prepared) -> Evaluator:
    """An evaluator of the calibration data, for one-shot quantization and the corrections before it."""
    return Evaluator(prepared.graph, prepared.batches, OBJECTIVES[SQNR], prepared.hardware.known_ops)


def pass_record(
    names: tuple[str, ...],
    before: float,
    after: float,
    samples: int,
    *,
    kept: bool,
    if_better: WhyNot = "another gains more",
) -> CorrectionPass:
    """The record of a pass that was measured.

    Args:
        before, after: values of the SQNR in dB; infinite where accumulators overflow.
        if_better: why it is not kept if the outputs are closer with it.
    """
    why: WhyNot = "overflow" if after == -math.inf else if_better if after > before else "no gain"
    known_before, known_after = (None if math.isinf(value) else round(value, 3) for value in (before, after))
    return CorrectionPass(names, known_before, known_after, samples, "" if kept else why)


def decibels_on(measured: Measurement, samples: Sequence[int]) -> float:
    """The SQNR on the samples of these numbers."""
    return value_on(OBJECTIVES[SQNR], measured, samples)


def value_on(objective: Objective, measured: Measurement, samples: Sequence[int]) -> float:
    """The value of an objective on the samples of these numbers."""
    return objective.finish(measured.contributions[objective.name][list(samples)].mean(0))
