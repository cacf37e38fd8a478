"""Nearby: what a guide expects of points that differ from one point in a few groups.

A comparison takes as long as what the points differ in, whatever the size of the space; its figures are those
of the whole guide to the last bit, since sums are rounded once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hago.search.guide import Guide, Term
from hago.space import FLOAT, Bits


@dataclass(frozen=True, slots=True)
class Change:
    """Other bits for a few groups, and what is expected of them.

    Args:
        loss, cost: the change; the cost is infinite where a term leaves out these bits, and negatively so where it
            leaves out only the bits here.
        churn: the sum of the sizes of all changes of loss.
    """

    bits: Mapping[str, int]
    loss: float
    cost: float
    churn: float


class Nearby:
    """The surroundings of one point."""

    def __init__(self, guide: Guide, bits: Bits) -> None:
        self.guide, self.bits = guide, bits
        self._losses = guide.parts(bits)
        self._terms: dict[str, list[Term]] = {}
        for term in guide.terms:
            for key in dict.fromkeys(term.keys):
                self._terms.setdefault(key, []).append(term)
        self._gates: dict[str, list[str]] = {}
        for gate, keys in guide.gates.items():
            for key in keys:
                self._gates.setdefault(key, []).append(gate)
        self._sum = exact_sum([x for term in guide.terms if math.isfinite(x := term(bits))])
        self._cost = guide.constant + math.fsum(self._sum)

    def change(self, bits: Bits) -> Change:
        """What is expected where these groups have these bits and all others what they have here."""
        there = {k: b for k, b in bits.items() if b != self.bits[k]}
        felt = dict.fromkeys(k for key in there for k in (key, *self.guide.gates.get(key, ())))
        changes = [self._loss(k, there) - self._losses[k] for k in felt if k in self._losses]
        terms = {id(t): t for key in there for t in self._terms.get(key, ())}.values()
        cost = self._costs_more([t.beside(self.bits, there) for t in terms], [t(self.bits) for t in terms])
        return Change(there, math.fsum(changes), cost, math.fsum(map(abs, changes)))

    def _costs_more(self, there: Sequence[float], here: Sequence[float]) -> float:
        if math.inf in there or math.inf in here:
            return math.inf if math.inf in there else -math.inf
        return self.guide.constant + math.fsum([*self._sum, *there, *(-x for x in here)]) - self._cost

    def _loss(self, key: str, there: Bits) -> float:
        if any(self._at(gate, there) == FLOAT for gate in self._gates.get(key, ())):
            return 0.0
        return self.guide.losses[key][self._at(key, there)]

    def _at(self, key: str, there: Bits) -> int:
        return there.get(key, self.bits[key])


def exact_sum(values: Sequence[float]) -> list[float]:
    """A few numbers whose exact sum is that of all values, so that a sum with others is rounded once.

    References:
        J. R. Shewchuk, "Adaptive Precision Floating-Point Arithmetic", 1997, which `math.fsum` follows.
    """
    parts: list[float] = []
    while left := math.fsum([*values, *(-p for p in parts)]):
        parts.append(left)
    return parts
