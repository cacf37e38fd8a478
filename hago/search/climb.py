"""Climb: other bits for one group of a point that was measured, ranked by what they should add to a front.

A neighbour is expected to lose what its point was measured to lose, and the difference that the guide expects of
the one change; so what groups do to each other at that point is in the expectation.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from hago.search.guide import Guide, Term
from hago.space import FLOAT, Bits, Space

#: A neighbour is never expected to lose less than this part of what its point loses.
_LEAST: Final = 0.5


@dataclass(frozen=True, slots=True)
class Measured:
    """A point of a front: its cost, and how good it is, in logarithms of its loss; larger is better."""

    cost: float
    merit: float
    bits: Bits


def neighbours(
    space: Space, guide: Guide, line: Sequence[Measured], rooms: Mapping[tuple[str, ...], int]
) -> Iterator[dict[str, int]]:
    """Points that differ from one of a front in one group, those first that should add the most to its area.

    Args:
        guide: corrected by what was measured; its losses are those that merits are the logarithms of.
        line: by rising cost and merit.
        rooms: how many bits groups may have together.
    """
    terms: dict[str, list[Term]] = {}
    for term in guide.terms:
        for key in term.keys:
            terms.setdefault(key, []).append(term)
    costs = [p.cost for p in line]
    found: list[tuple[float, int, str, int]] = []
    for number, point in enumerate(line):
        # bits of a node that is float say nothing
        idle = {k for gate, keys in guide.gates.items() if point.bits[gate] == FLOAT for k in keys}
        for key, listed in terms.items():
            if key not in guide.losses or key in idle:
                continue
            for bits in space.groups[key].choices:
                if bits == point.bits[key] or not _fits(rooms, point.bits, key, bits):
                    continue
                cost = point.cost + math.fsum(_change(term, point.bits, key, bits) for term in listed)
                loss = math.exp(-point.merit)
                change = guide.losses[key][bits] - guide.losses[key][point.bits[key]]
                gain = _gain(line, costs, cost, -math.log(max(loss + change, _LEAST * loss)))
                if gain > 0.0:
                    found.append((gain, number, key, bits))
    for _, number, key, bits in sorted(found, key=lambda f: -f[0]):
        yield {**line[number].bits, key: bits}


def _change(term: Term, here: Bits, key: str, bits: int) -> float:
    """What a term costs more with other bits for one of its groups; without end where it leaves out either."""
    change = term.beside(here, {key: bits}) - term(here)
    return change if math.isfinite(change) else math.inf


def _gain(line: Sequence[Measured], costs: Sequence[float], cost: float, merit: float) -> float:
    """What a point adds to the area under a front, costs in logarithms."""
    place = bisect.bisect_right(costs, cost)
    if place == 0:
        return 0.0
    added, left = 0.0, cost
    for lower, upper in zip(line[place - 1 :], line[place:], strict=False):
        if merit <= lower.merit:
            return added
        added += (merit - lower.merit) * math.log(upper.cost / max(left, 1e-300))
        left = upper.cost
    return added


def _fits(rooms: Mapping[tuple[str, ...], int], here: Bits, key: str, bits: int) -> bool:
    """Whether accumulators that the group feeds are known to hold as many bits."""
    return all(sum(bits if k == key else here[k] for k in keys) <= most for keys, most in rooms.items() if key in keys)
