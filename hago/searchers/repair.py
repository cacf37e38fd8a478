"""Repair: from a point that overflows to one that does not, in a handful of evaluations."""

from __future__ import annotations

import itertools

from hago.plan.space import Bits, Space
from hago.study.searcher import Feeds, Score, ScoresByPoint, Steps, measure, shifted


def feeds_of(space: Space) -> dict[str, tuple[str, ...]]:
    """The groups that have an in-edge of each node."""
    found: dict[str, list[str]] = {}
    for key, group in space.groups.items():
        for node in dict.fromkeys(edge.dst for edge in group.edges):
            found.setdefault(node, []).append(key)
    return {node: tuple(keys) for node, keys in found.items()}


def swapped(space: Space, feeds: Feeds, bits: Bits) -> list[dict[str, int]]:
    """The points at which one operand of an accumulator has a choice more and another a choice less. Where
    both have their most bits there is nothing to swap."""
    found = []
    for keys in feeds.values():
        for more, less in itertools.permutations([k for k in keys if k in space.groups], 2):
            if bits[more] < space.groups[more].choices[0]:
                there = shifted(space, shifted(space, bits, more, -1), less, 1)
                if there[less] != bits[less]:
                    found.append(there)
    return found


def repair(space: Space, start: Bits, feeds: Feeds, seen: ScoresByPoint) -> Steps[tuple[dict[str, int], Score]]:
    """Lower bits until nothing overflows.

    A bit less on an operand makes the integers that reach the accumulator half as large, so each
    overflowing node asks its groups for as many bits as its accumulator lacked. All such nodes are
    served in one step. Where no group feeds them, or no signature holds the bits, every group gives
    one choice. Each step lowers some group, so it ends at the narrowest point at the latest.

    Args:
        feeds: the groups whose bits decide how large a node's accumulator gets.
        seen: scores by point; what is measured is added.

    Returns:
        The first point that runs, or the best of those measured where none does, and its score.
    """
    bits = dict(start)
    best = bits, (score := (yield from measure(bits, "start", seen)))
    while not score.runs:
        lower = _relieved(space, bits, feeds, score)
        if lower == bits:
            lower = _narrowed(space, bits)
        if lower == bits:
            break
        nodes = ", ".join(score.overflows)
        bits = lower
        score = yield from measure(bits, f"repair: {nodes or 'no signature'}", seen)
        if score.rank > best[1].rank:
            best = bits, score
    return best


def _relieved(space: Space, bits: Bits, feeds: Feeds, score: Score) -> dict[str, int]:
    lower = dict(bits)
    for node in score.overflows:
        groups = [g for g in feeds.get(node, ()) if g in space.groups]
        # Groups may feed several nodes: what they gave for an earlier one counts.
        lacking = score.excess_bits.get(node, 1) - sum(bits[g] - lower[g] for g in groups)
        while lacking > 0:
            able = [g for g in groups if lower[g] > space.groups[g].choices[-1]]
            if not able:
                break
            # The one with most bits gives first, so that operands end up even.
            widest = max(able, key=lambda g: lower[g])
            less = shifted(space, lower, widest, 1)
            lacking -= lower[widest] - less[widest]
            lower = less
    return lower


def _narrowed(space: Space, bits: Bits) -> dict[str, int]:
    lower = dict(bits)
    for key in space.groups:
        lower = shifted(space, lower, key, 1)
    return lower
