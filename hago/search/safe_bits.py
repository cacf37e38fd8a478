"""The widest bits whose accumulators hold what calibration saw, predicted from the peaks of the float model. Searches
begin with them (`safe_bits`); one-shot quantization simulates what is predicted (`hago.search.one_shot`).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from hago.plan import NodePlan, Resolver
from hago.plan.feasibility import group_feeding, nearest_feasible, widest_feasible
from hago.search.preparation import Prepared


def safe_bits(prepared: Prepared) -> dict[str, int]:
    """The widest feasible point whose accumulators hold the values that calibration saw."""
    return widest_safe_bits(prepared.resolver, prepared.calibration.peaks)


def widest_safe_bits(
    resolver: Resolver, largest: Mapping[str, float], margin: float = 1.0, upstream: bool = False
) -> dict[str, int]:
    """The widest feasible point whose accumulators hold the values of calibration, found without simulating.

    The real peak of a node over its accumulator's scale is the peak in integers. While it does not fit, the widest
    operand of the node loses a bit.

    Args:
        largest: by node, the largest |real value| seen in calibration.
        margin: factor by which accumulators must be able to hold more.
        upstream: whether an operand that has no bits of its own loses those of the nodes that it comes from, through
            nodes that only pass it on.
    """
    group_of = partial(group_feeding, resolver) if upstream else resolver.group_of.get
    space, graph = resolver.space, resolver.graph
    bits, plan = widest_feasible(resolver)
    while True:
        tight = [n for n, p in plan.nodes.items() if _tight(p, largest.get(n, 0.0), margin)]
        changed = False
        for name in tight:
            keys = [k for k in map(group_of, graph[name].edges) if k is not None]
            lowerable = [k for k in keys if bits[k] > space.groups[k].choices[-1]]
            if lowerable:
                widest = max(bits[k] for k in lowerable)
                chosen = [k for k in lowerable if bits[k] == widest]
                for key in chosen if _is_common(resolver, name) else chosen[:1]:
                    bits[key] -= 1
                changed = True
        if not changed:
            return bits
        bits, plan = nearest_feasible(resolver, bits, fewer=True) or (bits, resolver(bits))


def _tight(plan: NodePlan, largest: float, margin: float) -> bool:
    """Whether an accumulator may not hold the peak. Pairs of products, whose peak is unknown, pass only at margin 1."""
    pairs = plan.pairs is not None and margin > 1.0
    return pairs or (not plan.proved and margin * _peak(plan, largest) > 1.0)


def _peak(plan: NodePlan, largest: float) -> float:
    return largest / float(plan.register.scale.min()) / plan.desc.register.dtype.max


def _is_common(resolver: Resolver, name: str) -> bool:
    form = resolver.ops[resolver.graph[name].op].integer
    return form is not None and "common" in form.slots
