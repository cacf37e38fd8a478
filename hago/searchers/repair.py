"""Repair of points that overflow, in a few evaluations, and trades of bits between operands of one accumulator.

Greedy search, annealing, Pareto search and the searches led by a surrogate begin with `first_point_that_runs`.
"""

from __future__ import annotations

import itertools

from hago.plan import Bits, Space
from hago.study import Feeds, Score, ScoresByPoint, Steps, ask_score, shifted


def feeds_of(space: Space) -> dict[str, tuple[str, ...]]:
    """By node, the groups of its in-edges; the default of a searcher's `feeds`."""
    feeds: dict[str, list[str]] = {}
    for key, group in space.groups.items():
        for node in dict.fromkeys(edge.dst for edge in group.edges):
            feeds.setdefault(node, []).append(key)
    return {node: tuple(keys) for node, keys in feeds.items()}


def bit_trades(space: Space, feeds: Feeds, bits: Bits) -> list[dict[str, int]]:
    """The points at which one operand of an accumulator has the next more bits and another the next fewer."""
    points = []
    for keys in feeds.values():
        for more, less in itertools.permutations([k for k in keys if k in space.groups], 2):
            if bits[more] < space.groups[more].choices[0]:
                point = shifted(space, shifted(space, bits, more, -1), less, 1)
                if point[less] != bits[less]:
                    points.append(point)
    return points


def first_point_that_runs(
    space: Space, start: Bits, feeds: Feeds, known_scores: ScoresByPoint
) -> Steps[tuple[dict[str, int], Score]]:
    """Repair the start: lower bits until nothing overflows.

    One bit fewer on an operand halves the integers in the accumulator. So each step lowers the groups that feed an
    overflowing node by as many bits as its accumulator lacked, for all such nodes at once. Where no group feeds them,
    or the point is infeasible, every group is lowered by one choice. Each step lowers some group, so the loop ends at
    the narrowest point at the latest.

    Args:
        feeds: by node, the groups whose bits determine how large its accumulator gets.
        known_scores: the scores so far; new ones are added.

    Returns:
        The first point that runs, or the best of the points evaluated where none does, and its score.
    """
    bits = dict(start)
    score = yield from ask_score(bits, "start", known_scores)
    best = bits, score
    while not score.runs:
        lower = _lowered_at_overflows(space, bits, feeds, score)
        if lower == bits:
            lower = _lowered_everywhere(space, bits)
        if lower == bits:
            break
        nodes = ", ".join(score.overflows)
        bits = lower
        score = yield from ask_score(bits, f"repair: {nodes or 'no signature'}", known_scores)
        if score.rank > best[1].rank:
            best = bits, score
    return best


def _lowered_at_overflows(space: Space, bits: Bits, feeds: Feeds, score: Score) -> dict[str, int]:
    """The point with fewer bits on the groups that feed overflowing nodes."""
    lower = dict(bits)
    for node in score.overflows:
        groups = [g for g in feeds.get(node, ()) if g in space.groups]
        # a group may feed several nodes: bits by which it was lowered for an earlier node count
        lacking = score.excess_bits.get(node, 1) - sum(bits[g] - lower[g] for g in groups)
        while lacking > 0:
            reducible = [g for g in groups if lower[g] > space.groups[g].choices[-1]]
            if not reducible:
                break
            # the widest operand first, so that operands end up with similar bits
            widest = max(reducible, key=lambda g: lower[g])
            narrower = shifted(space, lower, widest, 1)
            lacking -= lower[widest] - narrower[widest]
            lower = narrower
    return lower


def _lowered_everywhere(space: Space, bits: Bits) -> dict[str, int]:
    """The point with the next fewer bits on every group."""
    lower = dict(bits)
    for key in space.groups:
        lower = shifted(space, lower, key, 1)
    return lower
