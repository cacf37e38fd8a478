"""The widest bits whose accumulators hold what calibration saw, predicted from the peaks of the float model. Searches
begin with them (`safe_bits`); one-shot quantization simulates what is predicted (`first_safe_bits`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from functools import partial

from hago.errors import InfeasibleBits
from hago.plan import Bits, NodePlan, Resolver, Space
from hago.plan.feasibility import group_feeding, groups_behind, nearest_feasible, widest_feasible
from hago.search.evaluate import Evaluator, Measurement
from hago.search.preparation import Prepared
from hago.study import Feeds, Score


def safe_bits(prepared: Prepared) -> dict[str, int]:
    """The widest feasible point whose accumulators hold the values that calibration saw."""
    return widest_safe_bits(prepared.resolver, prepared.calibration.peaks, behind=feeds_behind(prepared))


def feeds_behind(prepared: Prepared) -> Feeds:
    """By node whose accumulator may overflow, and some of whose operands have no bits of their own, the groups of its
    operands and of the nodes that these come from; none in searches that were begun without
    (`Prepared.traces_feeds`)."""
    resolver = prepared.resolver
    if not prepared.traces_feeds:
        return {}
    widest = widest_feasible(resolver)
    unproved = [name for name, plan in widest.plan.nodes.items() if not plan.proved]
    behind = {name: groups_behind(resolver, widest, name) for name in unproved}
    return {name: groups for name, groups in behind.items() if not set(groups) <= set(_own_groups(resolver, name))}


def _own_groups(resolver: Resolver, name: str) -> list[str]:
    """The groups of a node's in-edges."""
    return [key for edge in resolver.graph[name].edges if (key := resolver.group_of.get(edge)) is not None]


def widest_safe_bits(
    resolver: Resolver,
    largest: Mapping[str, float],
    margin: float = 1.0,
    upstream: bool = False,
    behind: Feeds | None = None,
) -> dict[str, int]:
    """The widest feasible point whose accumulators hold the values of calibration, found without simulating.

    The real peak of a node over its accumulator's scale is the peak in integers. While it does not fit, the widest
    operand of the node loses a bit.

    Args:
        largest: by node, the largest |real value| seen in calibration.
        margin: factor by which accumulators must be able to hold more.
        upstream: whether an operand that has no bits of its own loses those of the nodes that it comes from, through
            nodes that only pass it on.
        behind: by node, the groups that lose bits where those of its operands have none to lose.
    """
    group_of = partial(group_feeding, resolver) if upstream else resolver.group_of.get
    space, graph = resolver.space, resolver.graph
    bits, plan = widest_feasible(resolver)
    while True:
        tight = [n for n, p in plan.nodes.items() if _tight(p, largest.get(n, 0.0), margin)]
        changed = False
        for name in tight:
            keys = [k for k in map(group_of, graph[name].edges) if k is not None]
            lowerable = _lowerable(space, bits, keys) or _lowerable(space, bits, (behind or {}).get(name, ()))
            if lowerable:
                widest = max(bits[k] for k in lowerable)
                chosen = [k for k in lowerable if bits[k] == widest]
                for key in chosen if _is_common(resolver, name) else chosen[:1]:
                    bits[key] -= 1
                changed = True
        if not changed:
            return bits
        bits, plan = nearest_feasible(resolver, bits, fewer=True) or (bits, resolver(bits))


def _lowerable(space: Space, bits: Bits, keys: Iterable[str]) -> list[str]:
    return [key for key in keys if bits[key] > space.groups[key].choices[-1]]


def _tight(plan: NodePlan, largest: float, margin: float) -> bool:
    """Whether an accumulator may not hold the peak. Pairs of products and sums of groups, whose peaks are unknown, pass
    only at margin 1."""
    partial = (plan.pairs is not None or plan.group_sums is not None) and margin > 1.0
    return partial or (not plan.proved and margin * _peak(plan, largest) > 1.0)


def _peak(plan: NodePlan, largest: float) -> float:
    return largest / float(plan.register.scale.min()) / plan.desc.register.dtype.max


def _is_common(resolver: Resolver, name: str) -> bool:
    form = resolver.ops[resolver.graph[name].op].integer
    return form is not None and "common" in form.slots


def first_safe_bits(
    evaluator: Evaluator, resolver: Resolver, largest: Mapping[str, float]
) -> tuple[dict[str, int], Score, Measurement]:
    """The widest point that does not overflow on the data, with its Score, and what was measured of it.

    The peaks of the float model are nearly enough. Quantized values can be a little larger, so the margin grows until
    the simulation shows no overflow. Partial sums, where every addition saturates, can be much larger than their
    results, so their peaks are those of the simulation. Where no margin is enough, operands whose bits are those of a
    node further up lose these, too.

    Raises:
        InfeasibleBits: every margin overflows; the message names the nodes.
    """
    peaks = dict(largest)
    tried: list[dict[str, int]] = []
    for upstream, margin in itertools.product((False, True), (1.0, 1.25, 1.5, 2.0, 3.0, 4.0)):
        bits = widest_safe_bits(resolver, peaks, margin, upstream)
        if bits in tried:
            continue
        tried.append(bits)
        plan = resolver(bits)
        measured = evaluator.measure(plan)
        score = evaluator.concluded(plan, bits, measured)
        if not score.overflows:
            return bits, score, measured
        for name in score.overflows:
            if plan.nodes[name].additions is not None:
                partial = measured.extremes.peaks[name] * _largest_held(plan.nodes[name])
                peaks[name] = max(peaks.get(name, 0.0), partial)
    node, count = max(score.overflows.items(), key=lambda item: item[1])
    hardware, op = resolver.hardware, resolver.graph[node].op
    others = "" if len(score.overflows) == 1 else f", as do {len(score.overflows) - 1} others,"
    node_plan = resolver(bits).nodes[node]
    sums = node_plan.group_sums
    register = f"{sums.register.dtype} for a group" if sums else str(node_plan.desc.register.dtype)
    helps = f"give {op} a signature with a wider accumulator in the hardware file"
    if all(hardware.float_descs(resolver.graph[name].op) for name in score.overflows):
        full = ", ".join(map(repr, sorted(score.overflows)))
        helps = f"keep what overflows float (keep_float=[{full}]), or {helps}"
    raise InfeasibleBits(
        f"node {node!r} overflows its accumulator ({register}){others} {count} times on the calibration data with as "
        f"few bits as its operands may have; {helps}"
    )


def _largest_held(plan: NodePlan) -> float:
    """The largest real value that every accumulator of a node can hold."""
    return float(plan.register.scale.min()) * plan.desc.register.dtype.max
