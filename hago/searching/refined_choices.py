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
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hago.errors import InfeasibleBits
from hago.fitting import fitting, planned
from hago.frontend.data import Batch, Batches
from hago.gradients import Gradients
from hago.levels import Levels
from hago.prepare import Prepared
from hago.search.guide import Guide
from hago.search.knapsack import Knapsack
from hago.searching.confirmation import Confirmation, KeptAside, clipped_share, figures_of, losses_of
from hago.searching.guidance import make_guide
from hago.searching.refinement import CHUNK, PASS, Refined, picked_within, weighted, with_refined, with_statistics
from hago.searching.sensitivity import measure_sensitivity
from hago.searching.weight_scales import Thresholds, WeightGradients, WeightScales, of_constants, own_ends
from hago.space import Bits
from hago.trials.evaluate import Evaluator, safe_start
from hago.trials.goal import Goal
from hago.types import Edge


def refined_choices(
    prepared: Prepared,
    goal: Goal,
    metric: str,
    seed: int = 0,
    *,
    evaluator: Evaluator | None = None,
    within: bool = False,
    confirmation: Confirmation | None = None,
) -> Refined:
    """The same with other thresholds, and what a search begins with: over a front, the most bits.

    Args:
        metric: which cost the guide is about; see `make_guide`.
        evaluator: of the search's data; needed for what follows.
        within: begin with the best expected point that keeps the limits on costs instead, with the thresholds that are
            the best there, refined or not.
        confirmation: what is kept aside, to take only thresholds that are surely better there; None, as in logs of
            version 1, to take what is better on all samples within limits, and refined ones over a front.
    """
    start_of = (prepared, with_statistics(prepared, prepared.calibration), goal, metric, seed)
    if confirmation is None:
        return _unconfirmed(_Proposed.of(*start_of), goal, evaluator if within else None)
    if evaluator is None or not confirmation.turns:
        whole = _Proposed.of(*start_of)
        picked = picked_within(whole.ways["refined"], goal, whole.guide, whole.start) if within else whole.start
        return Refined(replace(prepared, refined=confirmation.said), whole.guide, picked, PASS)
    turns = [_Proposed.of(*start_of, aside) for aside in confirmation.turns]
    # what several turns confirm is made again from all samples
    whole = turns[0] if len(turns) == 1 else _Proposed.of(*start_of)
    settled = whole.ways["refined"]
    picked = picked_within(settled, goal, whole.guide, whole.start) if within else whole.start
    # a front is searched from the most bits on, and used at fewer, as a point is whose cost is made least
    tight = within and any(limit.is_cost for limit in goal.limits)
    point = picked if tight else _middle(settled, whole.guide, whole.start)
    value, losses = _measured(prepared, point, goal, evaluator)
    before = [losses] * len(turns)
    found, spent, gain = "estimated", 1.0, confirmation.gain(before, before)
    for way in ("refined", "mse"):
        ways = [turn.ways[way] for turn in (turns if way == "refined" else turns[:1])]
        tried = [_measured(each, point, goal, evaluator) for each in ways]
        spent += len(tried)
        tried *= len(turns) // len(tried)  # the least squared error of values is the same in every turn
        gained = confirmation.gain(before, [after for _, after in tried])
        runs = all(other > -math.inf for other, _ in tried)
        if runs and (value == -math.inf or gained.is_sure()):
            found, gain = way, gained
            break
    plans = [planned(whole.ways[each].resolver, point) for each in (found, "estimated")]
    held = [{} if isinstance(plan, InfeasibleBits) else plan.thresholds for plan in plans]
    shares = [clipped_share(prepared.calibration, prepared.space, thresholds) for thresholds in held]
    said = {**confirmation.said, "thresholds": found, **figures_of(gain, *shares)}
    passes = PASS * len({id(p) for p in (*turns, whole)})
    return Refined(replace(whole.ways[found], refined=said), whole.guide, picked, passes, spent)


def _unconfirmed(whole: _Proposed, goal: Goal, evaluator: Evaluator | None) -> Refined:
    """What searches whose logs are of version 1 begin with.

    Args:
        evaluator: of the search's data where it goes by limits; None for a front.
    """
    if evaluator is None:
        return Refined(whole.ways["refined"], whole.guide, whole.start, PASS)
    picked = picked_within(whole.ways["refined"], goal, whole.guide, whole.start)
    values = {name: _measured(way, picked, goal, evaluator)[0] for name, way in whole.ways.items()}
    best = max(values, key=lambda name: values[name])
    return Refined(whole.ways[best], whole.guide, picked, PASS, float(len(values)))


@dataclass(frozen=True, slots=True)
class _Proposed:
    """What one pass over samples says.

    Args:
        ways: thresholds that may be taken: `refined`, of the least squared error (`mse`), and as they were
            (`estimated`). Each channel's refined threshold is the best alone by a few random vectors; together they
            may be worse than others.
        start: the most bits that hold.
    """

    ways: Mapping[str, Prepared]
    guide: Guide
    start: Bits

    @staticmethod
    def of(
        prepared: Prepared, begun: Prepared, goal: Goal, metric: str, seed: int, aside: KeptAside | None = None
    ) -> _Proposed:
        """What samples say that are not kept aside.

        Args:
            begun: with thresholds of the least squared error.
        """
        probes, settled, known = WeightGradients.of_probes(begun), begun, _always_scaled(begun)

        def settle(seen: Gradients) -> tuple[Prepared, Gradients]:
            nonlocal settled
            thresholds, losses = _chosen(begun, probes, known)
            shown = with_statistics(begun, weighted(begun, seen.spectra))
            settled = with_refined(shown, thresholds)
            return settled, replace(seen, weights={**seen.weights, **losses})

        samples = prepared.batches.samples - (0 if aside is None else aside.last - aside.first)
        chunk = max(1, min(CHUNK, samples // probes.count))
        batches = None if aside is None else _shaping(prepared.batches, aside)
        sensitivity = measure_sensitivity(begun, goal.objective, seed, chunk, probes.see, settle, known, batches)
        start = safe_start(settled.resolver, prepared.calibration.peaks)
        guide = make_guide(settled, goal, start, seed, metric, sensitivity)
        ways = {"refined": settled, "mse": begun, "estimated": prepared}
        return _Proposed(ways, replace(guide, most=start), start)


def _shaping(batches: Batches, aside: KeptAside) -> Iterator[Batch]:
    """What of all data may shape thresholds."""
    inputs = aside.shaping(b.inputs for b in batches)
    if not batches.labelled:
        yield from (Batch(tuple(tensors), None) for tensors in inputs)
        return
    labels = aside.shaping([b.labels] for b in batches if b.labels is not None)
    yield from (Batch(tuple(tensors), own) for tensors, (own,) in zip(inputs, labels, strict=True))


def _middle(prepared: Prepared, guide: Guide, start: Bits) -> Bits:
    """A point half way along the front, as far as the guide knows one."""
    program = Knapsack(prepared.space, guide)
    solved = None if program.range is None else program.solve(sum(program.range) / 2)
    fits = None if solved is None else fitting(prepared.resolver, solved.bits, fewer=True)
    return start if fits is None else fits.bits


def _measured(prepared: Prepared, bits: Bits, goal: Goal, evaluator: Evaluator) -> tuple[float, Tensor]:
    """The objective at a point, less than any where it does not run, and the losses of all samples."""
    plan = planned(prepared.resolver, bits)
    if isinstance(plan, InfeasibleBits):
        return -math.inf, torch.full((evaluator.batches.samples,), math.inf, dtype=torch.float64)
    measured = evaluator.measure(plan)
    losses = losses_of(goal.objective, measured)
    if any(measured.peaks.overflows.values()):
        return -math.inf, losses
    value = float(goal.objective.finish(measured.contributions[goal.objective.name].mean(0)))
    return -math.inf if math.isnan(value) else value, losses


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
