"""Guards: the number that keeps a divisor from 0, as in `x / (y + 1e-6)`, becomes a part of the division.

Such a sum would run in integers, where the number is far less than a quantum: the divisor would be 0 wherever `y` is.
A division by a tensor is float everywhere, and adds the number for nothing. The table `PASSES` applies this pass before
`fold_batch_norms`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from hago.graph.graph import CONST, Graph, Node
from hago.ops import OPS, Ops

#: Ops that only move values, so that a number can be added to all of them before or after.
_COMMUTES_WITH_SUM: Final = frozenset({"expand", "permute", "reshape", "select", "slice", "squeeze", "unsqueeze"})


def fold_guards(graph: Graph, ops: Ops) -> Graph:
    """The graph with every number that is added to a divisor, and to nothing else, as the attribute `plus` of the
    division."""
    # a div rule of the user's own does not know `plus`
    if ops.get("div") is not OPS["div"]:
        return graph
    for node in [n for n in graph if n.op == "div" and len(n.inputs) == 2]:
        graph = _fold_one(graph, node)
    return graph


def _fold_one(graph: Graph, division: Node) -> Graph:
    reader, slot = division, 1
    while True:
        node = graph[reader.inputs[slot]]
        if len(graph.out_edges[node.name]) != 1:
            return graph
        if node.op not in _COMMUTES_WITH_SUM:
            break
        reader, slot = node, 0
    added = [s for s in node.inputs if graph[s].op == CONST and graph.consts[s].numel() == 1]
    rest = [s for s in node.inputs if s not in added]
    if node.op != "add" or len(rest) != 1 or graph[rest[0]].shape != node.shape:
        return graph
    plus = float(graph.consts[added[0]])
    changed = {division.name: replace(division, attrs={**division.attrs, "plus": plus})}
    reader = changed.get(reader.name, reader)
    inputs = tuple(rest[0] if i == slot else s for i, s in enumerate(reader.inputs))
    changed[reader.name] = replace(reader, inputs=inputs)
    return graph.with_nodes(changed.get(n.name, n) for n in graph if n.name != node.name)
