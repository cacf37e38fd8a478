"""Wiring: the Plan as the engine runs it, with values moved about as few times and as narrow as can be.

Requantization is monotone, so two things hold exactly. It commutes with what only moves values about or takes
their maximum, so such a node runs on its reader's narrow integers where all readers ask for the same. And
a clamp before it is a narrower clipping (`hago.fusion`). What this gives is a Plan again, with the same
outputs; values inside differ, so it is not used where somebody looks at them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from hago.fusion import fuse_clamps
from hago.graph import OUTPUT, Node
from hago.plan import NodePlan, Plan
from hago.types import Edge, QParams, SimQ

#: Ops that give every value of their operand back or leave it out, or the largest of several.
MOVERS: Final = frozenset(
    {
        *("max_pool1d", "max_pool2d", "adaptive_max_pool2d", "reshape", "permute", "squeeze", "unsqueeze"),
        *("slice", "select", "expand", "pixel_shuffle", "upsample_nearest2d"),
    }
)


@dataclass(frozen=True, slots=True)
class Wiring:
    """A Plan, and which of its nodes are nothing but another name for their operand."""

    plan: Plan
    skipped: frozenset[str]

    def root(self, name: str) -> str:
        """The node whose value stands for that of `name`."""
        while name in self.skipped:
            name = self.plan.graph[name].inputs[0]
        return name


def wire(plan: Plan) -> Wiring:
    """The Plan rewired; see the module."""
    sunk = _sink(plan)
    fused = fuse_clamps(sunk)
    return Wiring(_with_edges(sunk, fused.simqs), fused.skipped)


def plain(plan: Plan) -> Wiring:
    """The Plan as it is: every node's value can be seen."""
    return Wiring(plan, frozenset())


def _sink(plan: Plan) -> Plan:
    nodes, edges = dict(plan.nodes), dict(plan.edges)
    for node in reversed(plan.graph.nodes):
        made = nodes.get(node.name)
        target = None if made is None else _common_target(plan, node, made, edges)
        if made is None or target is None:
            continue
        # the very scale that readers requantized from: one object in two places means "no change of scale"
        simq = SimQ(replace(nodes[node.inputs[0]].out, scale=made.out.scale), target)
        edges[node.edges[0]] = simq
        nodes[node.name] = replace(made, operands=(target, *made.operands[1:]), simqs=(simq, *made.simqs[1:]),
                                   register=target, out=target)  # fmt: skip
        edges.update(dict.fromkeys(plan.graph.out_edges[node.name]))
    return _with_edges(replace(plan, nodes=nodes), {e: s for e, s in edges.items() if e.dst != OUTPUT})


def _common_target(plan: Plan, node: Node, made: NodePlan, edges: dict[Edge, SimQ | None]) -> QParams | None:
    """What all readers of a mover requantize its value to, if they agree and it narrows the value."""
    source = plan.nodes.get(node.inputs[0]) if node.inputs else None
    out = plan.graph.out_edges[node.name]
    moves = node.op in MOVERS and made.within_hull and made.out_simq is None and made.simqs[0] is None
    if not moves or source is None or not out or any(e.dst == OUTPUT for e in out):
        return None
    targets = [s.target if (s := edges[e]) is not None and s.source is not None else None for e in out]
    first = targets[0]
    if first is None or any(t is not first for t in targets) or first.scale.numel() > 1:
        return None
    return first if first.dtype.bits < made.out.dtype.bits else None


def _with_edges(plan: Plan, simqs: Mapping[Edge, SimQ | None]) -> Plan:
    """The Plan with some edges replaced, in the nodes that they lead to as well."""
    edges = {**plan.edges, **simqs}
    nodes = dict(plan.nodes)
    for name in {e.dst for e in simqs}:
        if name in nodes:
            own = tuple(edges[e] for e in plan.graph[name].edges)
            nodes[name] = replace(nodes[name], simqs=own)
    return replace(plan, nodes=nodes, edges=edges)
