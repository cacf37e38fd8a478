"""Refined choices: thresholds for the error at the outputs, of every weight at every number of bits, from one pass.

Each channel takes the threshold with which it is expected to lose the least by itself (`WeightScales.alone`). What
others lose does not matter to that, so the thresholds hold all over the space, and a front is searched with them. The
pass is the one that measures sensitivities, and gives those of the refined choices. Activations: see `refinement`.

Under limits on costs they are better than thresholds that were made better together at one point: a search goes where
the limits are, and those hold at their point alone.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection
from dataclasses import replace

from hago.errors import InfeasibleBits
from hago.fitting import planned
from hago.gradients import Gradients
from hago.levels import Levels
from hago.prepare import Prepared
from hago.searching.guidance import make_guide
from hago.searching.refinement import CHUNK, PASS, Refined, picked_within, weighted, with_refined, with_statistics
from hago.searching.sensitivity import measure_sensitivity
from hago.searching.weight_scales import Thresholds, WeightGradients, WeightScales, of_constants, own_ends
from hago.space import Bits
from hago.trials.evaluate import Evaluator, safe_start
from hago.trials.goal import Goal
from hago.types import Edge


def refined_choices(
    prepared: Prepared, goal: Goal, metric: str, seed: int = 0, *, within: Evaluator | None = None
) -> Refined:
    """The same with other thresholds, and what a search over a front begins with: the most bits.

    Args:
        metric: which cost the guide is about; see `make_guide`.
        within: begin with the best expected point that keeps the limits on costs instead, with the thresholds that are
            the best there, refined or not, by this evaluator of the search's data.
    """
    begun = with_statistics(prepared, prepared.calibration)
    probes, settled, known = WeightGradients.of_probes(begun), begun, _always_scaled(begun)

    def settle(seen: Gradients) -> tuple[Prepared, Gradients]:
        nonlocal settled
        thresholds, losses = _chosen(begun, probes, known)
        shown = with_statistics(begun, weighted(begun, seen.spectra))
        settled = with_refined(shown, thresholds)
        return settled, replace(seen, weights={**seen.weights, **losses})

    chunk = max(1, min(CHUNK, prepared.batches.samples // probes.count))
    sensitivity = measure_sensitivity(begun, goal.objective, seed, chunk, probes.see, settle, known)
    start = safe_start(settled.resolver, prepared.calibration.peaks)
    guide = make_guide(settled, goal, start, seed, metric, sensitivity)
    guide = replace(guide, most=start)
    if within is None:
        return Refined(settled, guide, start, PASS)
    picked = picked_within(settled, goal, guide, start)
    # each channel's threshold is the best alone by a few random vectors; together they may be worse than none
    ways = [settled, begun, prepared]
    best = max(ways, key=lambda way: _value(way, picked, goal, within))
    return Refined(best, guide, picked, PASS, float(len(ways)))


def _value(prepared: Prepared, bits: Bits, goal: Goal, evaluator: Evaluator) -> float:
    """The objective at a point; less than any where it does not run."""
    plan = planned(prepared.resolver, bits)
    if isinstance(plan, InfeasibleBits):
        return -math.inf
    measured = evaluator.measure(plan)
    if any(measured.peaks.overflows.values()):
        return -math.inf
    value = float(goal.objective.finish(measured.contributions[goal.objective.name].mean(0)))
    return -math.inf if math.isnan(value) else value


def _chosen(
    prepared: Prepared, probes: WeightGradients, known: Collection[Edge]
) -> tuple[Thresholds, dict[Edge, list[float]]]:
    """The thresholds of all choices of weights; and what each choice is then expected to lose, by edge, those of
    most bits first.

    Args:
        known: the weights that have thresholds at every choice; the pass itself measures the others' losses.
    """
    thresholds: Thresholds = {}
    losses: dict[Edge, list[float]] = {}
    levels = Levels(prepared.resolver)
    for shown in itertools.chain.from_iterable(map(levels.of, range(levels.count))):
        scales = WeightScales.of(prepared, shown.plan, shown.bits)
        scales.weights = {e: w for e, w in scales.weights.items() if e in known and w.key in shown.keys}
        scales.take_probes(probes)
        alone = scales.alone(shown.plan)
        thresholds |= scales.thresholds(alone)
        for edge, loss in scales.losses(alone).items():
            losses.setdefault(edge, []).append(loss)
    return thresholds, losses


def _always_scaled(prepared: Prepared) -> set[Edge]:
    """The weights that have thresholds of their own at every number of their bits."""
    groups = of_constants(prepared)
    found, levels = {g.edges[0] for g in groups}, Levels(prepared.resolver)
    for shown in itertools.chain.from_iterable(map(levels.of, range(levels.count))):
        found -= {g.edges[0] for g in groups if g.key in shown.keys and own_ends(shown.plan, g) is None}
    return found
