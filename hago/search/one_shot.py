"""One-shot quantization: the widest bits that do not overflow on the data, without a search.

`hago.quantize` and training call `quantize_in_one_shot`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hago.search.correcting import correct_in_turns
from hago.search.description import made_by
from hago.search.effort import Effort
from hago.search.evaluate import Evaluator, Measurement
from hago.search.measured_point import first_point, sqnr_evaluator
from hago.search.output_thresholds import choose_thresholds
from hago.search.preparation import Prepared
from hago.search.quantizer import Quantizer
from hago.search.stored_strategy import make_strategy


@dataclass(frozen=True, slots=True)
class OneShot:
    """The result of one-shot quantization.

    Args:
        evaluator: of the calibration data.
        measured: what it measured of the result.
    """

    quantizer: Quantizer
    evaluator: Evaluator
    measured: Measurement


def quantize_in_one_shot(
    prepared: Prepared, evaluator: Evaluator | None = None, effort: Effort | None = None
) -> Quantizer:
    """Quantize to the widest bits whose accumulators do not overflow on the data, as `hago.quantize` does.

    Args:
        evaluator: what measured the corrections of the model; by default a new one.
        effort: says how many turns of corrections are made; by default the default one.

    Raises:
        InfeasibleBits: accumulators overflow on the data at every width.
    """
    return quantize_and_measure(prepared, evaluator, effort).quantizer


def quantize_and_measure(
    prepared: Prepared,
    evaluator: Evaluator | None = None,
    effort: Effort | None = None,
    report: Callable[[str], None] = lambda step: None,
) -> OneShot:
    """The same, with what was measured on the way.

    Args:
        report: called with a text at every step of what takes minutes.
    """
    evaluator = evaluator or sqnr_evaluator(prepared)
    first, turns = first_point(prepared, evaluator), 1 if effort is None else effort.turns
    point = correct_in_turns(choose_thresholds(first, evaluator).point, evaluator, turns, report)
    results = evaluator.summary(point.measured.contributions)
    refined = {"refined": True} if point.prepared.refinement_record else {}
    done = {} if effort is None else {"effort": effort.to_json()}
    provenance = made_by(point.prepared, evaluator.objective.name, 0) | done | refined | {"results": results}
    strategy = make_strategy(point.prepared, point.plan, point.bits, provenance)
    return OneShot(Quantizer(point.plan, strategy), evaluator, point.measured)
