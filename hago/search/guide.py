"""Guide: what is expected of points before any is evaluated: a loss and a cost for every choice.

A cost is a sum of terms, each a table over the bits of a few groups; most have one, the bit operations
of a convolution have two. Bits that a table leaves out fit no signature, and cost without end. The guide
proposes; evaluations decide.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from hago.search.searcher import Score
from hago.space import FLOAT, Bits, Space


@dataclass(frozen=True, slots=True)
class Term:
    """A part of the cost.

    Args:
        keys: the groups that it depends on.
        table: by their bits, in that order; finite, without bits that no signature holds together.
    """

    keys: tuple[str, ...]
    table: Mapping[tuple[int, ...], float]

    def __call__(self, bits: Bits) -> float:
        return self.table.get(tuple(bits[k] for k in self.keys), math.inf)

    def beside(self, bits: Bits, there: Bits) -> float:
        """The cost where these groups have other bits."""
        return self.table.get(tuple(there.get(k, bits[k]) for k in self.keys), math.inf)


class Priced:
    """What knows the parts of a cost.

    Attributes:
        metric: the cost's name in `Score.costs`.
        terms, constant: they add up to it.
    """

    __slots__ = ()
    metric: str
    terms: Sequence[Term]
    constant: float

    def cost(self, bits: Bits) -> float:
        """The expected cost of a point."""
        return self.constant + math.fsum(term(bits) for term in self.terms)

    def cost_of(self, bits: Bits, score: Score) -> float:
        """The true cost of a scored point; what is expected where nobody counted, as of bits that fit no signature."""
        found = score.costs.get(self.metric)
        return self.cost(bits) if found is None else found


@dataclass(frozen=True, slots=True)
class Held(Priced):
    """A cost beside the guide's own that has a limit: its name in `Score.costs`, its parts, and what it may be."""

    metric: str
    terms: Sequence[Term]
    constant: float
    most: float

    def spare(self, bits: Bits, score: Score) -> float:
        """How much more a scored point may cost; negative where it misses the limit."""
        return self.most - self.cost_of(bits, score)


@dataclass(frozen=True, slots=True)
class Guide(Priced):
    """Expected losses and costs.

    Args:
        metric: the cost's name in `Score.costs`; empty for the total of bits.
        losses: by group, by bits, never less for fewer bits; they add up.
        terms: of the cost, a constant aside.
        constant: what every point costs beside the terms.
        limit: what the cost may be at most.
        held: other costs that have limits.
        minimize: whether the cost is what the search makes least.
        measured: the loss that a score tells of, in the unit of `losses`; None where it tells none.
        gates: by the group that may turn a node float, the groups whose losses are then gone.
        most: a point with as many bits as accumulators are known to hold; None for the first that runs.
        widest: a point with the most bits that signatures take together; None where they take the most of each.
    """

    metric: str
    losses: Mapping[str, Mapping[int, float]]
    terms: Sequence[Term]
    constant: float = 0.0
    limit: float | None = None
    held: Sequence[Held] = ()
    minimize: bool = False
    measured: Callable[[Score], float] | None = None
    gates: Mapping[str, Sequence[str]] = field(default_factory=dict)
    most: Bits | None = None
    widest: Bits | None = None

    def parts(self, bits: Bits) -> dict[str, float]:
        """The expected loss of a point by group."""
        gone = {k for gate, keys in self.gates.items() if bits[gate] == FLOAT for k in keys}
        return {k: 0.0 if k in gone else by[bits[k]] for k, by in self.losses.items()}

    def loss(self, bits: Bits) -> float:
        """The expected loss of a point."""
        return math.fsum(self.parts(bits).values())

    def corrected(self, factors: Mapping[str, Mapping[int, float]]) -> Guide:
        """With every loss times the factor of its group and bits, where there is one; so fewer bits may be expected to
        lose less."""
        none: Mapping[int, float] = {}
        losses = {k: {b: x * factors.get(k, none).get(b, 1.0) for b, x in by.items()} for k, by in self.losses.items()}
        return replace(self, losses=losses)


def plain_guide(space: Space) -> Guide:
    """What is known of any space: a bit less makes the squared error four times as large, and every bit
    costs one."""
    losses = {key: {b: 4.0 ** -min(b, 64) for b in g.choices} for key, g in space.groups.items()}
    terms = [Term((key,), {(b,): float(b) for b in g.choices}) for key, g in space.groups.items()]
    return Guide("", losses, terms)
