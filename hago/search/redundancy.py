"""Pruning of redundant choices: choices of bits that differ neither in a cost in use nor in overflow.

Fewer bits are never expected to be more accurate. So of the choices that need the same dtypes, only the one with the
most bits is worth a trial, unless a cost in use counts bits, or an accumulator that the group feeds could overflow. If
all costs in use are of constants, other values need no narrower dtype either, unless another group has its choices only
beside that dtype.
`search.session` calls `prune_redundant_choices` before a search, and `search.replay` before a replay.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from hago.arithmetic.types import Edge
from hago.cost import metric_named
from hago.graph import CONST
from hago.plan import Group, Plan, Space
from hago.plan.feasibility import choices_by_dtype, may_have_infeasible_points, nearest_feasible, widest_feasible
from hago.search.preparation import Prepared
from hago.study import Header, space_hash


def prune_redundant_choices(prepared: Prepared, costs: Collection[str], logged: Header | None = None) -> Prepared:
    """Remove redundant choices from the space.

    Args:
        costs: the costs in use. Without any, fewer bits break ties, so no choice is redundant.
        logged: the header of the log that is continued or replayed. An earlier one may have a choice for every dtype.
    """
    if not costs:
        return prepared
    keeps_dtypes = may_have_infeasible_points(prepared.resolver)
    pruned = _pruned(prepared, costs, keeps_dtypes)
    if logged is None or keeps_dtypes or space_hash(pruned.space) == logged.space["hash"]:
        return pruned
    return _pruned(prepared, costs, keeps_dtypes=True)


def _pruned(prepared: Prepared, costs: Collection[str], keeps_dtypes: bool) -> Prepared:
    resolver, groups = prepared.resolver, prepared.space.groups
    most = widest_feasible(resolver)

    def widest(group: Group) -> Plan:
        """The Plan of a feasible point at which the group has its most bits."""
        wanted = {**most.bits, group.key: group.choices[0]}
        point = most if wanted == most.bits else nearest_feasible(resolver, wanted, [group.key])
        return (point or most).plan

    space = Space(
        {
            key: _without_redundant_choices(prepared, widest(group), group, costs, keeps_dtypes)
            for key, group in groups.items()
        }
    )
    return replace(prepared, space=space, resolver=prepared.resolver.with_space(space))


def _without_redundant_choices(
    prepared: Prepared, plan: Plan, group: Group, costs: Collection[str], keeps_dtypes: bool
) -> Group:
    is_const = all(prepared.graph[prepared.graph.source(e)].op == CONST for e in group.edges) and bool(group.edges)
    counted = {metric_named(name).counted_bits for name in costs}
    if group.is_kind or "operands" in counted or (is_const and "constants" in counted):
        return group
    if any(not plan.nodes[name].proved for name in _fed_nodes(plan, group)):
        return group
    if counted == {"constants"} and not is_const and not keeps_dtypes:
        return replace(group, choices=group.choices[:1])
    return replace(group, choices=tuple(c[0] for c in choices_by_dtype(prepared.resolver, group)))


def _fed_nodes(plan: Plan, group: Group) -> set[str]:
    """The integer nodes whose accumulators depend on a group's bits: its readers, and the readers of those that only
    move values."""
    nodes: set[str] = set()
    edges: list[Edge] = list(group.edges)
    node, _, slot = group.key.rpartition(":")
    if slot == "out":
        edges += plan.graph.out_edges[node]
    while edges:
        edge = edges.pop()
        reader = plan.nodes.get(edge.dst)
        if reader is not None and edge.dst not in nodes:
            nodes.add(edge.dst)
            if reader.keeps_input_dtype:
                edges += plan.graph.out_edges[edge.dst]
    return nodes
