"""Overflow of accumulators in a simulation: counts and extremes, for nodes where overflow is not proved impossible.

The evaluator makes one `AccumulatorWatch` per measurement. It is the `watch` of the Simulator, and `Reuse` adds the
remembered observations of nodes that do not run.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from torch import Tensor

from hago.arithmetic.numerics import Lost, extremes
from hago.graph import Node
from hago.plan import NodePlan, Plan


@dataclass(frozen=True, slots=True)
class SeenAccumulators:
    """The accumulators of one node in one batch.

    Args:
        accumulators: their number.
        overflows: the number of those that leave their register.
        peak: the largest accumulator relative to the largest value of the register.
    """

    accumulators: int = 0
    overflows: int = 0
    peak: float = 0.0


@dataclass(slots=True)
class AccumulatorExtremes:
    """Largest accumulator values and overflow counts, by node, over the batches of a pass. Nodes that are proved not to
    overflow are left out."""

    overflows: dict[str, int] = field(default_factory=dict)
    peaks: dict[str, float] = field(default_factory=dict)
    accumulators: dict[str, int] = field(default_factory=dict)

    def add(self, name: str, observed: SeenAccumulators) -> None:
        """Add the observation of one node in one batch."""
        self.accumulators[name] = self.accumulators.get(name, 0) + observed.accumulators
        self.peaks[name] = max(self.peaks.get(name, 0.0), observed.peak)
        if observed.overflows:
            self.overflows[name] = self.overflows.get(name, 0) + observed.overflows

    @property
    def excess_bits(self) -> dict[str, int]:
        """The number of bits that the register lacks for the largest accumulator, by node that overflowed."""
        return {n: max(1, math.ceil(math.log2(self.peaks[n]))) for n in self.overflows}


@dataclass(slots=True)
class AccumulatorWatch:
    """A `watch` for the simulator of a Plan, which keeps the extremes of its accumulators.

    Args:
        latest: the observation of the node that ran last, which `Reuse` remembers.
    """

    plan: Plan
    extremes: AccumulatorExtremes = field(default_factory=AccumulatorExtremes)
    latest: SeenAccumulators = field(default_factory=SeenAccumulators)

    def __call__(self, node: Node, c: Tensor, lost: Lost | None) -> None:
        """Count the accumulators of a batch that leave their register, or of which a partial sum overflowed.

        Args:
            c: the accumulators of the node, as centered integers before overflow.
            lost: the effect of partial sums that overflowed; None if the hardware has no such overflow.
        """
        plan = self.plan.nodes[node.name]
        if not plan.proved:
            self.latest = _observe(plan, c, lost)
            self.extremes.add(node.name, self.latest)


def _observe(plan: NodePlan, c: Tensor, lost: Lost | None) -> SeenAccumulators:
    """The observation of one node; of an empty batch, no accumulators."""
    if not c.numel():
        return SeenAccumulators()
    dtype = plan.desc.register.dtype
    low, high = extremes(c)
    peak = max(high / dtype.max, low / min(dtype.min, -1))
    if lost is not None and bool(lost.cut.any()):
        return SeenAccumulators(c.numel(), int(lost.cut.sum()), max(peak, lost.peak))
    outside = int(((c < dtype.min) | (c > dtype.max)).sum()) if peak > 1.0 else 0
    return SeenAccumulators(c.numel(), outside, peak)
