"""Peaks: what was seen of accumulators that could leave their registers."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from torch import Tensor

from hago.arithmetic.numerics import Lost, extremes
from hago.graph.graph import Node
from hago.plan.plan import NodePlan, Plan


@dataclass(frozen=True, slots=True)
class SeenAccumulators:
    """Accumulators of one node in one pass.

    Args:
        accumulators: how many.
        overflows: how many of them leave their register.
        peak: the largest, as a part of what the register holds.
    """

    accumulators: int = 0
    overflows: int = 0
    peak: float = 0.0


@dataclass(slots=True)
class AccumulatorExtremes:
    """What was seen of accumulators that could overflow; a `watch` for the simulator. Those of nodes
    that are proved not to are not counted."""

    plan: Plan
    overflows: dict[str, int] = field(default_factory=dict)
    peaks: dict[str, float] = field(default_factory=dict)
    accumulators: dict[str, int] = field(default_factory=dict)
    latest: SeenAccumulators = field(default_factory=SeenAccumulators)

    def __call__(self, node: Node, c: Tensor, lost: Lost | None = None) -> None:
        """Count accumulators outside their register, and those of which a partial sum was cut."""
        plan = self.plan.nodes[node.name]
        if not plan.proved:
            self.latest = _seen(plan, c, lost)
            self.add(node.name, self.latest)

    def add(self, name: str, seen: SeenAccumulators) -> None:
        """Take note of a pass through a node."""
        self.accumulators[name] = self.accumulators.get(name, 0) + seen.accumulators
        self.peaks[name] = max(self.peaks.get(name, 0.0), seen.peak)
        if seen.overflows:
            self.overflows[name] = self.overflows.get(name, 0) + seen.overflows

    @property
    def excess_bits(self) -> dict[str, int]:
        """By node, how many bits too few the register has for what was seen."""
        return {n: max(1, math.ceil(math.log2(self.peaks[n]))) for n in self.overflows}


def _seen(plan: NodePlan, c: Tensor, lost: Lost | None) -> SeenAccumulators:
    if not c.numel():
        return SeenAccumulators()
    dtype = plan.desc.register.dtype
    low, high = extremes(c)
    peak = max(high / dtype.max, low / min(dtype.min, -1))
    if lost is not None and bool(lost.cut.any()):
        return SeenAccumulators(c.numel(), int(lost.cut.sum()), max(peak, lost.peak))
    outside = int(((c < dtype.min) | (c > dtype.max)).sum()) if peak > 1.0 else 0
    return SeenAccumulators(c.numel(), outside, peak)
