"""One-shot quantization: the widest bits that do not overflow on the data, without a search.

`hago.quantize` and training call `quantize_in_one_shot`.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass

from hago.errors import InfeasibleBits
from hago.plan import NodePlan, Resolver
from hago.search.description import made_by
from hago.search.evaluate import Evaluator, Measurement
from hago.search.objective import named_objective
from hago.search.preparation import Prepared
from hago.search.quantizer import Quantizer
from hago.search.safe_bits import widest_safe_bits
from hago.search.stored_strategy import make_strategy
from hago.study import Score


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


def quantize_in_one_shot(prepared: Prepared) -> Quantizer:
    """Quantize to the widest bits whose accumulators do not overflow on the data, as `hago.quantize` does.

    Raises:
        InfeasibleBits: accumulators overflow on the data at every width.
    """
    return quantize_and_measure(prepared).quantizer


def quantize_and_measure(prepared: Prepared) -> OneShot:
    """The same, with what was measured on the way."""
    objective = named_objective("sqnr")
    evaluator = Evaluator(prepared.graph, prepared.batches, objective, prepared.hardware.known_ops)
    bits, score, measured = first_safe_bits(evaluator, prepared.resolver, prepared.calibration.peaks)
    plan = prepared.resolver(bits)
    provenance = made_by(prepared, objective.name, 0) | {"results": dict(score.results)}
    return OneShot(Quantizer(plan, make_strategy(prepared, plan, bits, provenance)), evaluator, measured)


def first_safe_bits(
    evaluator: Evaluator, resolver: Resolver, largest: Mapping[str, float]
) -> tuple[dict[str, int], Score, Measurement]:
    """The widest point that does not overflow on the data, with its Score, and what was measured of it.

    The peaks of the float model are nearly enough. Quantized values can be a little larger, so the margin grows until
    the simulation shows no overflow. Partial sums, where every addition saturates, can be much larger than their
    results, so their peaks are those of the simulation. Where no margin is enough, operands whose bits are those of a
    node further up lose these, too.

    Raises:
        InfeasibleBits: every margin overflows; the message names the nodes.
    """
    peaks = dict(largest)
    tried: list[dict[str, int]] = []
    for upstream, margin in itertools.product((False, True), (1.0, 1.25, 1.5, 2.0, 3.0, 4.0)):
        bits = widest_safe_bits(resolver, peaks, margin, upstream)
        if bits in tried:
            continue
        tried.append(bits)
        plan = resolver(bits)
        measured = evaluator.measure(plan)
        score = evaluator.concluded(plan, bits, measured)
        if not score.overflows:
            return bits, score, measured
        for name in score.overflows:
            if plan.nodes[name].additions is not None:
                partial = measured.extremes.peaks[name] * _largest_held(plan.nodes[name])
                peaks[name] = max(peaks.get(name, 0.0), partial)
    node, count = max(score.overflows.items(), key=lambda item: item[1])
    hardware, op = resolver.hardware, resolver.graph[node].op
    others = "" if len(score.overflows) == 1 else f", as do {len(score.overflows) - 1} others,"
    register = resolver(bits).nodes[node].desc.register.dtype
    helps = f"give {op} a signature with a wider accumulator in the hardware file"
    if all(hardware.float_descs(resolver.graph[name].op) for name in score.overflows):
        full = ", ".join(map(repr, sorted(score.overflows)))
        helps = f"keep what overflows float (keep_float=[{full}]), or {helps}"
    raise InfeasibleBits(
        f"node {node!r} overflows its accumulator ({register}){others} {count} times on the calibration data with as "
        f"few bits as its operands may have; {helps}"
    )


def _largest_held(plan: NodePlan) -> float:
    """The largest real value that every accumulator of a node can hold."""
    return float(plan.register.scale.min()) * plan.desc.register.dtype.max
