"""Fitting: points that fit the hardware, where not all bits go together.

A chip may take 16 bits by 4 and 8 by 8, and not 16 by 8; one that reads 4 bits may give 4 only. Each choice of a group
then needs some of another's. What does fit is asked of the Resolver, which alone decides.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Collection, Iterator
from typing import Final, NamedTuple

from hago.errors import InfeasibleBits
from hago.plan import Plan
from hago.resolve import Resolver
from hago.signatures import classes, descs_at, groups_at, most_bits
from hago.space import Bits

#: Points that are tried for one that fits, for every group.
TRIES: Final = 16
#: What a bit more than asked weighs beside the loss that bits fewer are expected to cause.
_MORE: Final = 1e-12


class Fitted(NamedTuple):
    """A point that fits, and its Plan."""

    bits: dict[str, int]
    plan: Plan


def fitting(resolver: Resolver, bits: Bits, held: Collection[str] = (), *, fewer: bool = False) -> Fitted | None:
    """The nearest point that fits: where bits must be fewer, those that lose the least; None where none is found.

    Args:
        held: groups that keep their bits.
        fewer: whether no group may have more bits than it has here.
    """
    made = planned(resolver, bits)
    return Fitted(dict(bits), made) if isinstance(made, Plan) else _Fitting(resolver, bits, held, fewer).found(made)


class _Fitting:
    """A search from one point, along the graph: what a node refuses gets the bits that one of its signatures takes, or,
    where it has such bits, another dtype at the node or behind it."""

    def __init__(self, resolver: Resolver, bits: Bits, held: Collection[str], fewer: bool) -> None:
        self.resolver, self.bits, self.held, self.fewer = resolver, bits, held, fewer
        self._classes: dict[str, list[tuple[int, ...]]] = {}

    def found(self, error: InfeasibleBits) -> Fitted | None:
        """The nearest point that fits.

        Args:
            error: why the first one does not.
        """
        place = {node.name: i for i, node in enumerate(self.resolver.graph)}
        order, point, seen = itertools.count(), dict(self.bits), {tuple(self.bits.values())}
        waiting: list[tuple[int, float, int, dict[str, int]]] = []
        for _ in range(TRIES * (1 + len(self.bits))):
            for other in self._others(point, error.node):
                if (key := tuple(other.values())) not in seen:
                    seen.add(key)
                    # those first that came furthest through the graph
                    heapq.heappush(waiting, (-place[error.node], self._distance(other), next(order), other))
            if not waiting:
                return None
            point = heapq.heappop(waiting)[-1]
            made = planned(self.resolver, point)
            if isinstance(made, Plan):
                return Fitted(point, made)
            error = made
        return None

    def _others(self, point: dict[str, int], node: str) -> Iterator[dict[str, int]]:
        """Points at which the node may run."""
        able = False
        for desc in descs_at(self.resolver, node):
            most = most_bits(self.resolver, node, desc)
            over = [k for k, limit in most.items() if point[k] > limit]
            if not any(k in self.held for k in over):
                able = True
                fewer = {k: self._at_most(k, most[k]) for k in over}
                if fewer and None not in fewer.values():
                    yield {**point, **{k: b for k, b in fewer.items() if b is not None}}
        if able:
            yield from self._steps(point, node)

    def _at_most(self, key: str, limit: int) -> int | None:
        return next((b for b in self.resolver.space.groups[key].choices if b <= limit), None)

    def _steps(self, point: dict[str, int], node: str) -> Iterator[dict[str, int]]:
        for key in self._groups_behind(node):
            listed = self._classes_of(key)
            at = next(i for i, c in enumerate(listed) if point[key] in c)
            for step in (1, -1):
                if 0 <= at + step < len(listed):
                    bits = self._nearest(key, listed[at + step])
                    if not (self.fewer and bits > self.bits[key]):
                        yield {**point, key: bits}

    def _groups_behind(self, node: str) -> list[str]:
        """The groups at a node, and those at the nodes that give it what it reads."""
        found = dict.fromkeys(groups_at(self.resolver, node))
        for key in list(found):
            name, _, slot = key.rpartition(":")
            if slot == "out" and name != node:
                found |= dict.fromkeys(groups_at(self.resolver, name))
        groups = self.resolver.space.groups
        return [k for k in found if k in groups and k not in self.held and not groups[k].is_kind]

    def _classes_of(self, key: str) -> list[tuple[int, ...]]:
        if key not in self._classes:
            self._classes[key] = classes(self.resolver, self.resolver.space.groups[key])
        return self._classes[key]

    def _nearest(self, key: str, alike: tuple[int, ...]) -> int:
        return min(max(self.bits[key], alike[-1]), alike[0])

    def _distance(self, point: Bits) -> float:
        pairs = [(bits, self.bits[key]) for key, bits in point.items()]
        return sum(4.0**-b - 4.0**-a if b < a else _MORE * (b - a) for b, a in pairs)


def planned(resolver: Resolver, bits: Bits) -> Plan | InfeasibleBits:
    """The Plan of a point, or the error of the first node that has no signature for its bits."""
    try:
        return resolver(bits)
    except InfeasibleBits as error:
        if not error.node:
            raise
        return error


def widest_fitting(resolver: Resolver) -> Fitted:
    """The most bits that fit.

    Raises:
        InfeasibleBits: no bits were found to fit.
    """
    widest = resolver.space.widest()
    found = fitting(resolver, widest, fewer=True)
    if found is None:
        raise InfeasibleBits(
            f"no bits were found that fit every node of the network on {resolver.hardware.name}; at the most, "
            f"{planned(resolver, widest)}. Fix fewer bits (fix_bits), keep nodes float (keep_float), or list "
            "signatures whose dtypes neighbours share"
        )
    return found
