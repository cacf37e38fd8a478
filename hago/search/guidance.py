"""Guidance: the Surrogate of a search, made of sensitivities and the cost model.

Bytes and operations are computed for every choice. Other costs of a node depend on the dtypes of its operands, and are
taken from Plans that differ from the start at that node only. The surrogate does not know whether two scales happen to
be equal, so it can differ from the true cost; searchers go by the true cost of the points that they evaluate.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Final

from hago.arithmetic.types import Edge
from hago.cost.cost import EdgeCost, NodeCost, plan_cost
from hago.plan.feasibility import (
    ChoicePoints,
    choices_by_dtype,
    feeding,
    groups_at,
    may_refuse,
    nearest_feasible,
    widest_feasible,
)
from hago.plan.plan import Plan
from hago.plan.space import FLOAT, INTEGER, Bits, kind_key
from hago.search.goal import Goal
from hago.search.objective import SQUARED_ERROR
from hago.search.prepare import Prepared
from hago.search.sensitivity import Sensitivity, sensitivity_of
from hago.searchers.surrogate import CostConstraint, Surrogate, Term
from hago.study.searcher import Score

#: The default cost of a front.
DEFAULT_COST: Final = "weight_bytes"
#: Costs that do not depend on the signatures that run the nodes; empty stands for the total of bits.
OF_ALL_DTYPES: Final = frozenset({"", "weight_bytes", "effective_bits", "bops"})
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
    if metric in OF_ALL_DTYPES:
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
        measured=_measured(sensitivity),
        gates=gates(prepared),
        widest=widest_feasible(prepared.resolver).bits,
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


def _measured(sensitivity: Sensitivity) -> Callable[[Score], float] | None:
    """How a score tells of the loss that was expected."""
    if sensitivity.measure == SQUARED_ERROR.name:
        return _relative_error
    return _divergence if sensitivity.objective == "kl" else None


def _relative_error(score: Score) -> float:
    return float(10.0 ** (-float(score.results.get("sqnr", math.nan)) / 10))


def _divergence(score: Score) -> float:
    return -float(score.results.get("kl", math.nan))


def _terms(prepared: Prepared, metric: str, start: Bits) -> tuple[list[Term], float]:
    """The terms of a cost that depend on choices, and the constant rest."""
    if metric in ("weight_bytes", "effective_bits"):
        return _constants(prepared, metric)
    if metric == "bops":
        return _operations(prepared)
    if metric == "":
        groups = prepared.space.groups
        counted = {key: g for key, g in groups.items() if not g.is_kind}
        return [Term((key,), {(b,): float(b) for b in g.choices}) for key, g in counted.items()], 0.0
    return _rows(prepared, metric, start)


# ---------------------------------------------------------------- bytes of constants
def _constants(prepared: Prepared, metric: str) -> tuple[list[Term], float]:
    groups = prepared.space.groups
    levels = ChoicePoints(prepared.resolver)
    rows = [_edges_at(levels, rung) for rung in range(max(1, levels.count))]
    weights = sum(e.elements for e in rows[0].values() if e.kind == "weight" and e.weight_bytes) or 1

    def size(edge: EdgeCost) -> float:
        if metric == "weight_bytes":
            return float(edge.weight_bytes)
        return edge.elements * edge.bits / weights if edge.kind == "weight" and edge.weight_bytes else 0.0

    terms = []
    for key, group in groups.items():
        if key in rows[0] and rows[0][key].kind == "weight":
            table: dict[tuple[int, ...], float] = {(b,): size(rows[r][key]) for r, b in enumerate(group.choices)}
            whole = size(replace(rows[0][key], bits=32, weight_bytes=4 * rows[0][key].elements))
            terms.append(_with_kind(prepared, key.rpartition(":")[0], Term((key,), table), whole))
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
def _operations(prepared: Prepared) -> tuple[list[Term], float]:
    widest = plan_cost(widest_feasible(prepared.resolver).plan)
    bits = {e.edge: e.bits for e in widest.edges}
    terms, rest = [], 0.0
    for node in widest.nodes:
        if not node.macs:
            continue
        edges = [Edge(node.node, 0), Edge(node.node, 1)]
        if not node.integer and not any(prepared.topology.edges[e] for e in edges):
            rest += node.bops
            continue
        keys = [feeding(prepared.resolver, e) if prepared.topology.edges[e] else None for e in edges]
        own = list(dict.fromkeys(k for k in keys if k is not None))
        table = {}
        for row in itertools.product(*(prepared.space.groups[k].choices for k in own)):
            chosen = dict(zip(own, row, strict=True))
            table[row] = node.macs * math.prod(
                bits[str(e)] if k is None else chosen[k] for e, k in zip(edges, keys, strict=True)
            )
        if own:
            term = Term(tuple(own), {r: float(v) for r, v in table.items()})
            terms.append(_with_kind(prepared, node.node, term, 1024.0 * node.macs))
        else:
            rest += table[()]
    return terms, rest


# ---------------------------------------------------------------- other costs
def _rows(prepared: Prepared, metric: str, start: Bits) -> tuple[list[Term], float]:
    """The cost of every node with its in-edges as terms, by the dtypes that its groups need."""
    groups = prepared.space.groups
    before = _local(metric, prepared.resolver(start))
    terms, rest = [], math.fsum(before.values())
    whole = rest
    for node in before:
        keys = _keys_at(prepared, node)
        kind = kind_key(node)
        if not keys and kind not in groups:
            continue
        base, of_node = _at_node(prepared, start, keys, partial(_cost_at, metric, node), before[node])
        rest -= before[node]
        in_float: float | None = 0.0
        if kind in groups:
            # including the conversions that its neighbours then need
            float_point = nearest_feasible(prepared.resolver, {**start, kind: FLOAT}, [kind])
            others = whole - before[node]
            in_float = None if float_point is None else math.fsum(_local(metric, float_point.plan).values()) - others
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
    if not may_refuse(prepared.resolver):
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


def _cost_at(metric: str, node: str, plan: Plan) -> float:
    return _local(metric, plan)[node]


def _local(metric: str, plan: Plan) -> dict[str, float]:
    """The cost of every node with its in-edges; the outputs of the graph under a name of their own."""
    cost = plan_cost(plan)
    rows: tuple[NodeCost | EdgeCost, ...] = (*cost.nodes, *cost.edges)
    costs: dict[str, float] = {}
    for row in rows:
        node = row.node if isinstance(row, NodeCost) else row.edge.rpartition(":")[0]
        costs[node] = costs.get(node, 0.0) + _part(metric, row, cost.clock_hz)
    return costs


def _part(metric: str, row: NodeCost | EdgeCost, clock_hz: float | None) -> float:
    """The part of one row in a cost."""
    if metric == "cycles":
        return row.cycles or 0.0
    if metric == "latency":
        return (row.cycles or 0.0) / (clock_hz or 1.0)
    if metric == "energy":
        return (row.picojoules or 0.0) * 1e-12
    if metric == "requantized":
        return float(row.requantized)
    if isinstance(row, EdgeCost):
        return 0.0
    moved = {"activation_bytes": row.write_bytes, "bytes_moved": row.read_bytes + row.write_bytes, "macs": row.macs}
    return float(moved[metric])
