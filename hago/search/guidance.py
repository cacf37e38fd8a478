"""Guidance: the Surrogate of a search, made of sensitivities and the cost model.

The entry of a cost in `METRICS` of `hago.cost.cost` says how it is predicted. Costs that count bits (bytes, operations)
are computed for every choice. Other sums over the rows depend on the dtypes of a node's operands, and are taken from
Plans that differ from the start at that node only. Totals that are no sums, such as a maximum over nodes, are taken
from Plans that differ from the start in one choice only, with a warning. The surrogate does not know whether two scales
happen to be equal, so it can differ from the true cost; searchers go by the true cost of the points that they evaluate.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Final

from hago.arithmetic.types import Edge
from hago.cost import EdgeCost, Metric, NodeCost, Part, metric_named, plan_cost
from hago.errors import warn
from hago.plan import FLOAT, INTEGER, Bits, Plan, kind_key
from hago.plan.feasibility import (
    ChoicePoints,
    choices_by_dtype,
    group_feeding,
    groups_at,
    may_have_infeasible_points,
    nearest_feasible,
    widest_feasible,
)
from hago.search.goal import Goal
from hago.search.objective import SQUARED_ERROR, Objective
from hago.search.preparation import Prepared
from hago.search.sensitivity import Sensitivity, sensitivity_of
from hago.searchers import CostConstraint, Surrogate, Term
from hago.study import Score

#: Most combinations of dtypes at one node that are each resolved to a Plan. A concat may have dozens of operands; their
#: cost is then the sum of what each adds, and pairs of neighbours tell which combinations are infeasible.
MIXTURES: Final = 512
#: Most rows of one table.
ROWS: Final = 1 << 17


def make_surrogate(
    prepared: Prepared,
    goal: Goal,
    start: Bits,
    seed: int = 0,
    metric: str = "",
    sensitivity: Sensitivity | None = None,
) -> Surrogate:
    """Make the Surrogate for a goal. The session and refinement call it before the first trial.

    Args:
        start: the point at which costs other than bytes and operations are measured.
        metric: the cost that the surrogate is about; empty for the total of bits.
        sensitivity: expected losses; measured by default.
    """
    sensitivity = sensitivity_of(prepared, goal.objective, seed) if sensitivity is None else sensitivity
    terms, constant = _terms(prepared, metric, start)
    if not metric or not _is_of_signatures(metric_named(metric)):
        terms += _fits(prepared, start)
    most: dict[str, float] = {}
    for x in goal.of_costs.limits:
        if x.most is not None:
            most[x.figure] = min(x.most, most.get(x.figure, math.inf))
    limit = most.pop(metric, None)
    return Surrogate(
        metric,
        sensitivity.losses,
        terms,
        constant,
        limit=limit,
        constraints=[CostConstraint(name, *_terms(prepared, name, start), value) for name, value in most.items()],
        minimize=bool(metric) and goal.minimize == metric,
        loss_of_score=_measured(goal.objective, sensitivity),
        gates=gates(prepared),
        widest=widest_feasible(prepared.resolver).bits,
        merges=prepared.merges_groups,
    )


def gates(prepared: Prepared) -> dict[str, tuple[str, ...]]:
    """For every group that may turn a node float, the groups on the node's in-edges and at its output."""
    groups = prepared.space.groups
    by_kind = {}
    for key, group in groups.items():
        if group.is_kind:
            own = [*(str(e) for e in prepared.graph[group.source].edges), f"{group.source}:out"]
            by_kind[key] = tuple(k for k in own if k in groups)
    return by_kind


def _measured(objective: Objective, sensitivity: Sensitivity) -> Callable[[Score], float] | None:
    """The function that reads from a score the loss that sensitivities predict; None where scores do not have it."""
    if sensitivity.measure == SQUARED_ERROR.name:
        return _relative_error
    # the value of a loss is the negated mean of what its own curvature describes
    described = objective.is_loss and objective.curvature is not None and not objective.curvature.is_relative
    return partial(_loss, objective.figure) if described else None


def _relative_error(score: Score) -> float:
    return float(10.0 ** (-float(score.results.get("sqnr", math.nan)) / 10))


def _loss(figure: str, score: Score) -> float:
    return -float(score.results.get(figure, math.nan))


def _terms(prepared: Prepared, name: str, start: Bits) -> tuple[list[Term], float]:
    """The terms of a cost that depend on choices, and the constant rest. An empty name is the total of bits."""
    if name == "":
        groups = prepared.space.groups
        counted = {key: g for key, g in groups.items() if not g.is_kind}
        return [Term((key,), {(b,): float(b) for b in g.choices}) for key, g in counted.items()], 0.0
    metric = metric_named(name)
    if metric.part is None:
        return _measured_choices(prepared, metric, start)
    if metric.counted_bits == "constants":
        return _constants(prepared, metric.part)
    if metric.counted_bits == "operands":
        return _operations(prepared, metric.part)
    return _rows(prepared, metric.part, start)


def _is_of_signatures(metric: Metric) -> bool:
    """Whether the terms of a cost are tables by the signatures of nodes, which leave infeasible bits out."""
    return metric.part is not None and metric.counted_bits == "none"


# ---------------------------------------------------------------- bytes of constants
def _constants(prepared: Prepared, part: Part) -> tuple[list[Term], float]:
    groups = prepared.space.groups
    levels = ChoicePoints(prepared.resolver)
    rows = [_edges_at(levels, rung) for rung in range(max(1, levels.count))]
    whole_cost = replace(plan_cost(widest_feasible(prepared.resolver).plan), edges=tuple(rows[0].values()))

    def size(edge: EdgeCost) -> float:
        return float(part(edge, whole_cost) or 0.0)

    terms = []
    for key, group in groups.items():
        if key in rows[0] and rows[0][key].kind == "weight":
            table: dict[tuple[int, ...], float] = {(b,): size(rows[r][key]) for r, b in enumerate(group.choices)}
            in_float = size(replace(rows[0][key], bits=32, weight_bytes=4 * rows[0][key].elements, group_bytes=0))
            terms.append(_with_kind(prepared, key.rpartition(":")[0], Term((key,), table), in_float))
    chosen = {t.keys[0] for t in terms}
    rest = math.fsum(size(e) for key, e in rows[0].items() if key not in chosen)
    return terms, rest


def _edges_at(levels: ChoicePoints, rung: int) -> dict[str, EdgeCost]:
    """The cost of every edge, if its group has its choice number `rung`."""
    costs: dict[str, EdgeCost] = {}
    for shown in levels.of(rung):
        rows = {e.edge: e for e in plan_cost(shown.plan).edges}
        costs |= {k: row for k, row in rows.items() if k in shown.keys or k not in costs}
    return costs


def _with_kind(prepared: Prepared, node: str, term: Term, in_float: float | None) -> Term:
    """The term, extended by the choice of running its node in float, if there is one.

    Args:
        in_float: the cost in float, whatever the bits are; None if float is infeasible.
    """
    key = kind_key(node)
    if key not in prepared.space.groups:
        return term
    table = {(*row, INTEGER): value for row, value in term.table.items()}
    if in_float is not None:
        # in float, rows that no integer signature supports are feasible as well
        rows = dict.fromkeys([*term.table, *itertools.product(*(prepared.space.groups[k].choices for k in term.keys))])
        table |= {(*row, FLOAT): in_float for row in rows}
    return Term((*term.keys, key), table)


# ---------------------------------------------------------------- operations
def _operations(prepared: Prepared, part: Part) -> tuple[list[Term], float]:
    widest = plan_cost(widest_feasible(prepared.resolver).plan)
    bits = {e.edge: e.bits for e in widest.edges}
    terms, rest = [], 0.0

    def price(node: NodeCost, bops: int) -> float:
        return float(part(replace(node, bops=bops), widest) or 0.0)

    for node in widest.nodes:
        if not node.macs:
            continue
        edges = [Edge(node.node, 0), Edge(node.node, 1)]
        if not node.integer and not any(prepared.topology.edges[e] for e in edges):
            rest += price(node, node.bops)
            continue
        keys = [group_feeding(prepared.resolver, e) if prepared.topology.edges[e] else None for e in edges]
        own = list(dict.fromkeys(k for k in keys if k is not None))
        table = {}
        for row in itertools.product(*(prepared.space.groups[k].choices for k in own)):
            chosen = dict(zip(own, row, strict=True))
            operands = (bits[str(e)] if k is None else chosen[k] for e, k in zip(edges, keys, strict=True))
            table[row] = price(node, node.macs * math.prod(operands))
        if own:
            terms.append(_with_kind(prepared, node.node, Term(tuple(own), table), price(node, 1024 * node.macs)))
        else:
            rest += table[()]
    return terms, rest


# ---------------------------------------------------------------- other costs
def _rows(prepared: Prepared, part: Part, start: Bits) -> tuple[list[Term], float]:
    """The cost of every node with its in-edges as terms, by the dtypes that its groups need."""
    groups = prepared.space.groups
    before = _local(part, prepared.resolver(start))
    terms, rest = [], math.fsum(before.values())
    whole = rest
    for node in before:
        keys = _keys_at(prepared, node)
        kind = kind_key(node)
        if not keys and kind not in groups:
            continue
        base, of_node = _at_node(prepared, start, keys, partial(_cost_at, part, node), before[node])
        rest -= before[node]
        in_float: float | None = 0.0
        if kind in groups:
            # including the conversions that its neighbours then need
            float_point = nearest_feasible(prepared.resolver, {**start, kind: FLOAT}, [kind])
            others = whole - before[node]
            in_float = None if float_point is None else math.fsum(_local(part, float_point.plan).values()) - others
            if len(of_node) != 1:
                of_node, base = [Term((), {(): base}), *of_node], 0.0
        rest += base
        for term in of_node:
            first = term is of_node[0] or in_float is None
            terms.append(_with_kind(prepared, node, term, in_float if first else 0.0))
    return terms, rest


def _term(prepared: Prepared, start: Bits, keys: Sequence[str], price: Callable[[Plan], float]) -> Term:
    """The cost of points by the bits of a few groups, without combinations that no signature supports.

    Args:
        price: the cost of a feasible point.
    """
    kinds = [choices_by_dtype(prepared.resolver, prepared.space.groups[k]) for k in keys]
    table: dict[tuple[int, ...], float] = {}
    for alike in itertools.product(*kinds):
        chosen = {k: (start[k] if start[k] in c else c[0]) for k, c in zip(keys, alike, strict=True)}
        point = nearest_feasible(prepared.resolver, {**start, **chosen}, chosen)
        if point is not None:
            table |= dict.fromkeys(itertools.product(*alike), price(point.plan))
    return Term(tuple(keys), table)


def _at_node(
    prepared: Prepared, start: Bits, keys: Sequence[str], price: Callable[[Plan], float], before: float
) -> tuple[float, list[Term]]:
    """The cost of points by the bits of the groups at a node: a constant and terms.

    Where the groups are few, it is one term. Otherwise the constant is the cost of the start, each group has a term for
    what it adds to that, and pairs of neighbours that no signature supports together have a term that leaves them out.
    That is exact where the costs of operands add up, as those of a concat do.

    Args:
        before: the cost of the start.
    """
    groups = prepared.space.groups
    mixtures = math.prod(len(choices_by_dtype(prepared.resolver, groups[k])) for k in keys)
    if mixtures <= MIXTURES and math.prod(len(groups[k].choices) for k in keys) <= ROWS:
        return 0.0, [_term(prepared, start, keys, price)]
    alone = [_term(prepared, start, [k], lambda plan: price(plan) - before) for k in keys]
    pairs = [_term(prepared, start, two, lambda plan: 0.0) for two in itertools.pairwise(keys)]
    return before, [*alone, *(p for p in pairs if _leaves_out(prepared, p))]


def _leaves_out(prepared: Prepared, term: Term) -> bool:
    """Whether no signature supports some combination of bits of the groups of a term."""
    return len(term.table) < math.prod(len(prepared.space.groups[k].choices) for k in term.keys)


def _fits(prepared: Prepared, start: Bits) -> list[Term]:
    """Terms of cost 0 that leave out infeasible combinations, for costs that do not depend on signatures."""
    if not may_have_infeasible_points(prepared.resolver):
        return []
    terms = []
    for name in prepared.topology.nodes:
        _, of_node = _at_node(prepared, start, _keys_at(prepared, name), lambda plan: 0.0, 0.0)
        terms += [_with_kind(prepared, name, term, 0.0) for term in of_node if _leaves_out(prepared, term)]
    return terms


def _keys_at(prepared: Prepared, node: str) -> list[str]:
    """The groups that choose between dtypes of a node."""
    resolver, groups = prepared.resolver, prepared.space.groups
    return [k for k in groups_at(resolver, node) if len(choices_by_dtype(resolver, groups[k])) > 1]


def _cost_at(part: Part, node: str, plan: Plan) -> float:
    return _local(part, plan)[node]


def _local(part: Part, plan: Plan) -> dict[str, float]:
    """The cost of every node with its in-edges; the outputs of the graph under a name of their own."""
    cost = plan_cost(plan)
    costs: dict[str, float] = {}
    for row in cost.rows:
        node = row.node if isinstance(row, NodeCost) else row.edge.rpartition(":")[0]
        costs[node] = costs.get(node, 0.0) + (part(row, cost) or 0.0)
    return costs


# ---------------------------------------------------------------- totals that are no sums
def _measured_choices(prepared: Prepared, metric: Metric, start: Bits) -> tuple[list[Term], float]:
    """A term for every group: what each of its choices adds to the total of the start, and the total as the constant.
    That is exact one choice away from the start, and a guess where several choices change."""
    warn(
        f"cost {metric.name!r} is no sum over nodes and edges, so the search is guided by what every single choice of "
        "bits changes of it at the starting point; its true values choose among what is evaluated. Searchers without a "
        "guide, such as greedy, go by these alone"
    )
    total = plan_cost(prepared.resolver(start))[metric.name]
    terms = []
    for key, group in prepared.space.groups.items():
        table: dict[tuple[int, ...], float] = {}
        for choice in group.choices:
            point = nearest_feasible(prepared.resolver, {**start, key: choice}, [key])
            if point is not None:
                table[choice,] = plan_cost(point.plan)[metric.name] - total
        terms.append(Term((key,), table))
    return terms, total
