"""Levels: points in which every group has each of its choices, for whatever is read off Plans choice by choice."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from hago.errors import InfeasibleBits
from hago.fitting import fitting, widest_fitting
from hago.plan import Plan
from hago.resolve import Resolver
from hago.signatures import may_refuse
from hago.space import Bits, Space


def level(space: Space, rung: int) -> dict[str, int]:
    """Every group at its `rung`-th choice, or at its last where it has fewer; all nodes integer."""
    return {key: g.choices[0 if g.is_kind else min(rung, len(g.choices) - 1)] for key, g in space.groups.items()}


@dataclass(frozen=True, slots=True)
class Shown:
    """A point that fits.

    Args:
        keys: the groups that are to be looked at in it: each has one of its choices in some point.
    """

    bits: Bits
    plan: Plan
    keys: frozenset[str]


class Levels:
    """Points that have every group at its `rung`-th choice: one for each rung, and more where these bits do not go
    together."""

    def __init__(self, resolver: Resolver) -> None:
        self.resolver = resolver
        self._found: list[list[Shown]] = []

    @property
    def count(self) -> int:
        """Rungs of the group with the most choices."""
        return max((len(g.choices) for g in self.resolver.space.groups.values()), default=0)

    def of(self, rung: int) -> list[Shown]:
        """The points of a rung. A group is in none of them where no point fits that has its choice."""
        while len(self._found) <= rung:
            self._found.append(self._points(len(self._found)))
        return self._found[rung]

    def plan(self, rung: int, key: str) -> Plan:
        """The Plan to look at a group in.

        Raises:
            InfeasibleBits: no point that fits has its choice.
        """
        for shown in self.of(rung):
            if key in shown.keys:
                return shown.plan
        bits = level(self.resolver.space, rung)[key]
        raise InfeasibleBits(f"{bits} bits for edge {key!r} fit no signature, whatever the others have")

    def _points(self, rung: int) -> list[Shown]:
        groups, wanted, found = self.resolver.space.groups, level(self.resolver.space, rung), list[Shown]()
        left = [k for k, g in groups.items() if rung < len(g.choices) and not g.is_kind]

        def look(held: Collection[str]) -> None:
            nonlocal left
            point = fitting(self.resolver, wanted, held)
            if point is not None:
                keys = frozenset(k for k in left if point.bits[k] == wanted[k])
                found.append(Shown(*point, keys))
                left = [k for k in left if k not in keys]

        look(())
        if left:
            look(left)
        while left:
            key = left[0]
            look([key])
            left = [k for k in left if k != key]
        return found


def supported(resolver: Resolver) -> Space:
    """The space without choices that no point has that fits.

    Raises:
        InfeasibleBits: no point fits.
    """
    space = resolver.space
    if not may_refuse(resolver):
        return space
    widest_fitting(resolver)
    levels = Levels(resolver)
    kept: dict[str, dict[int, None]] = {key: {} for key in space.groups}
    for rung in range(levels.count):
        for shown in levels.of(rung):
            for key in shown.keys:
                kept[key][shown.bits[key]] = None
    groups = {k: g if g.is_kind else replace(g, choices=tuple(kept[k])) for k, g in space.groups.items()}
    return space if groups == space.groups else Space(groups)
