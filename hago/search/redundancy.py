"""Redundant choices: choices of bits that no cost in use and no overflow can tell apart, removed from the space.

Fewer bits are never expected to be more accurate. So of the choices that share a signature, only the one of most bits
is worth a trial, unless a cost in use counts bits, or an accumulator that they feed could overflow.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from hago.arithmetic.types import Edge
from hago.cost.cost import metric_named
from hago.graph.graph import CONST
from hago.plan.feasibility import choices_by_dtype, nearest_feasible, widest_feasible
from hago.plan.plan import Plan
from hago.plan.space import Group, Space
from hago.search.prepare import Prepared


def prune_redundant_choices(prepared: Prepared, costs: Collection[str]) -> Prepared:
    """Remove redundant choices from the space.

    Args:
        costs: the costs in use. Without any, fewer bits win ties, so all choices differ and all are kept.
    """
    if not costs:
        return prepared
    resolver, groups = prepared.resolver, prepared.space.groups
    most = widest_feasible(resolver)

    def widest(group: Group) -> Plan:
        """The Plan of a point where the group has its most bits."""
        there = {**most.bits, group.key: group.choices[0]}
        point = most if there == most.bits else nearest_feasible(resolver, there, [group.key])
        return (point or most).plan

    space = Space({key: _merged(prepared, widest(group), group, costs) for key, group in groups.items()})
    return replace(prepared, space=space, resolver=prepared.resolver.with_space(space))


def _merged(prepared: Prepared, plan: Plan, group: Group, costs: Collection[str]) -> Group:
    is_const = all(prepared.graph[prepared.graph.source(e)].op == CONST for e in group.edges) and bool(group.edges)
    counted = {metric_named(name).counted_bits for name in costs}
    if group.is_kind or "operands" in counted or (is_const and "constants" in counted):
        return group
    if any(not plan.nodes[name].proved for name in _fed(plan, group)):
        return group
    return replace(group, choices=tuple(c[0] for c in choices_by_dtype(prepared.resolver, group)))


def _fed(plan: Plan, group: Group) -> set[str]:
    """The integer nodes whose accumulators depend on a group's bits: its readers, and theirs where the
    values pass through unchanged."""
    found: set[str] = set()
    waiting: list[Edge] = list(group.edges)
    node, _, slot = group.key.rpartition(":")
    if slot == "out":
        waiting += plan.graph.out_edges[node]
    while waiting:
        edge = waiting.pop()
        reader = plan.nodes.get(edge.dst)
        if reader is not None and edge.dst not in found:
            found.add(edge.dst)
            if reader.keeps_input_dtype:
                waiting += plan.graph.out_edges[edge.dst]
    return found
