"""Training: what stays the same while a Plan is trained."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hago.plan import Plan
from hago.qat.moves import Slope
from hago.qat.ranges import Range
from hago.topology import Topology
from hago.types import Edge

#: What qparams depend on (producers' qparams, states of ranges), and what they were last time.
Known = tuple[tuple[Any, ...], Any]


@dataclass(frozen=True, eq=False)
class Training:
    """What stays the same in training.

    Args:
        plan: that training starts from.
        topology: of its graph.
        bits: by group.
        groups: whose bits each edge has.
        ranges: by the key of the threshold; edges that ask for the same integers share one.
        cut: relus that are part of their readers' clipping.
        slope: how gradients pass.
        known: qparams that were resolved before and take no gradient.
    """

    plan: Plan
    topology: Topology
    bits: Mapping[str, int]
    groups: Mapping[Edge, str]
    ranges: Mapping[str, Range]
    cut: frozenset[str]
    slope: Slope
    known: dict[str, Known] = field(default_factory=dict)

    def range_of(self, edge: Edge) -> Range | None:
        """The range of an edge that has one."""
        return self.ranges.get(str(edge))
