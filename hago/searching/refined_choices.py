"""Refined choices: thresholds for the error at the outputs, of every weight at every number of bits, from one pass.

Each channel takes the threshold with which it is expected to lose the least by itself (`WeightScales.alone`). What
others lose does not matter to that, so the thresholds hold all over the space, and a front is searched with them. The
pass is the one that measures sensitivities, and gives those of the refined choices. Activations: see `refinement`.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from hago.cost_range import level
from hago.gradients import Gradients
from hago.prepare import Prepared
from hago.searching.guidance import make_guide
from hago.searching.refinement import CHUNK, PASS, Refined, weighted, with_refined, with_statistics
from hago.searching.sensitivity import measure_sensitivity
from hago.searching.weight_scales import Thresholds, WeightGradients, WeightScales, of_constants, own_ends
from hago.trials.evaluate import safe_start
from hago.trials.goal import Goal
from hago.types import Edge


def refined_choices(prepared: Prepared, goal: Goal, metric: str, seed: int = 0) -> Refined:
    """The same with other thresholds, and what a search over a front begins with: the most bits.

    Args:
        metric: which cost the guide is about; see `make_guide`.
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
    return Refined(settled, replace(guide, most=start), start, PASS)


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
    groups = prepared.space.groups
    for rung in range(_rungs(prepared)):
        bits = level(prepared.space, rung)
        plan = prepared.resolver(bits)
        scales = WeightScales.of(prepared, plan, bits)
        scales.weights = {e: w for e, w in scales.weights.items() if e in known and rung < len(groups[w.key].choices)}
        scales.take_probes(probes)
        alone = scales.alone(plan)
        thresholds |= scales.thresholds(alone)
        for edge, loss in scales.losses(alone).items():
            losses.setdefault(edge, []).append(loss)
    return thresholds, losses


def _always_scaled(prepared: Prepared) -> set[Edge]:
    """The weights that have thresholds of their own at every number of their bits."""
    groups = of_constants(prepared)
    found = {g.edges[0] for g in groups}
    for rung in range(_rungs(prepared)):
        plan = prepared.resolver(level(prepared.space, rung))
        found -= {g.edges[0] for g in groups if rung < len(g.choices) and own_ends(plan, g) is None}
    return found


def _rungs(prepared: Prepared) -> int:
    return max((len(g.choices) for g in prepared.space.groups.values()), default=0)
