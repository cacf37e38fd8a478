"""Wiring: the Plan as the engine runs it, with values moved about as few times and as narrow as can be.

Requantization is monotone, so two things hold exactly. It commutes with what only moves values about or takes
their maximum, so such a node runs on its reader's narrow integers where all readers ask for the same; what is
joined from several values is requantized twice before it, in one pass (`SimQ.via`). And a clamp before a
requantization is a narrower clipping (`hago.plan.fusion`). What this gives is a Plan again, with the same
outputs; values inside differ, so it is not used where somebody looks at them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from hago.arithmetic.types import Edge, SimQ
from hago.graph.graph import CONST, OUTPUT, Node
from hago.ops import OPS
from hago.plan.fusion import fuse_clamps
from hago.plan.plan import NodePlan, Plan
from hago.runtime.native.choice import Choice

#: Ops that move the values of their only operand, on its scale.
MOVERS: Final = frozenset(
    name for name, rule in OPS.items() if rule.moves_values and rule.integer and rule.integer.slots == ("follow",)
)
#: Ops that move the values of several operands, all of which they read on one scale.
JOINERS: Final = frozenset(
    name for name, rule in OPS.items() if rule.moves_values and rule.integer and rule.integer.slots == ("common",)
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
        wanted = None if made is None else _common_form(plan, node, made, edges)
        simqs = None if made is None or wanted is None else _before(plan, node, made, wanted)
        if made is None or wanted is None or simqs is None:
            continue
        edges.update(zip(node.edges, simqs, strict=True))
        moved, left = len(node.edges) if node.op in JOINERS else 1, made.operands
        target = wanted.target
        assert target is not None
        nodes[node.name] = replace(made, operands=(*[target] * moved, *left[moved:]), simqs=simqs,
                                   register=target, out=target)  # fmt: skip
        edges.update(dict.fromkeys(plan.graph.out_edges[node.name]))
    return _with_edges(replace(plan, nodes=nodes), {e: s for e, s in edges.items() if e.dst != OUTPUT})


def _common_form(plan: Plan, node: Node, made: NodePlan, edges: Mapping[Edge, SimQ | None]) -> SimQ | None:
    """What all readers of a mover requantize its value to, if they agree and it narrows the value."""
    out = plan.graph.out_edges[node.name]
    zeros = not made.attrs.get("value")  # what is padded with, which stays as it is
    moves = (node.op in MOVERS and made.within_hull and zeros) or _joins(plan, node, made)
    if not moves or made.out_simq is not None or not out or any(e.dst == OUTPUT for e in out):
        return None
    wanted = [edges[e] for e in out]
    first = wanted[0]
    if first is None or first.source is None or first.target is None or first.target.scale.numel() > 1:
        return None
    same = all(s is not None and s.target is first.target and s.via is first.via for s in wanted)
    return first if same and first.target.dtype.bits < made.out.dtype.bits else None


def _before(plan: Plan, node: Node, made: NodePlan, wanted: SimQ) -> tuple[SimQ | None, ...] | None:
    """The SimQs of a mover's edges where its readers' requantization comes first, or None where it cannot."""
    moved: list[SimQ | None] = []
    for slot, name in enumerate(node.inputs):
        simq, source = made.simqs[slot], plan.nodes.get(name)
        if slot and node.op not in JOINERS:
            moved.append(simq)
        elif source is None:
            return None
        elif simq is None:
            # the very scale that readers requantized from: one object in two places means "no change of scale"
            moved.append(replace(wanted, source=replace(source.out, scale=made.out.scale)))
        elif node.op in JOINERS and simq.source is not None and simq.via is None and wanted.via is None:
            moved.append(replace(simq, target=wanted.target, via=simq.target))
        else:
            return None
    return tuple(moved)


def _joins(plan: Plan, node: Node, made: NodePlan) -> bool:
    """Whether a node reads all its operands on the scale of its own value."""
    form, out = plan.ops[node.op].integer, made.out
    common = node.op in JOINERS and form is not None and form.slots == ("common",) and not form.requantizes_output
    return (
        common
        and made.proved
        and all(q is not None and q.scale is out.scale and q.dtype == out.dtype for q in made.operands)
    )


def _with_edges(plan: Plan, simqs: Mapping[Edge, SimQ | None]) -> Plan:
    """The Plan with some edges replaced, in the nodes that they lead to as well."""
    edges = {**plan.edges, **simqs}
    nodes = dict(plan.nodes)
    for name in {e.dst for e in simqs} & nodes.keys():
        own = tuple(edges[e] for e in plan.graph[name].edges)
        if any(new is not old for new, old in zip(own, nodes[name].simqs, strict=True)):
            nodes[name] = replace(nodes[name], simqs=own)
    return replace(plan, nodes=nodes, edges=edges)


# ---------------------------------------------------------------- wants
# Wants: in which forms the readers of every value ask for it.
# A node that stands for itself (not skipped by the wiring) is a *root*. Its value is wanted as it is (under the
# node's name), requantized to a target (`name>1` and so on, one for each target), or real (`name!`).


class Wants:
    """The forms of every value, and the name that every edge reads.

    Args:
        choices: how every root runs.
    """

    def __init__(self, wiring: Wiring, choices: Mapping[str, Choice]) -> None:
        self.wiring, self.plan, self.graph = wiring, wiring.plan, wiring.plan.graph
        self.choices = choices
        self.names: dict[Edge, str] = {}
        self._forms: dict[str, dict[str, SimQ | None]] = {}
        for edge in self.graph.edges:
            if edge.dst not in wiring.skipped:
                self._want(edge)

    def forms(self, root: str) -> Mapping[str, SimQ | None]:
        """What is made of a root's value, by name; None for the value as it is."""
        return self._forms.get(root, {})

    def readers(self, root: str) -> list[Edge]:
        """The edges that a root's value travels on, past skipped nodes."""
        found: list[Edge] = []
        for edge in self.graph.out_edges[root]:
            found += self.readers(edge.dst) if edge.dst in self.wiring.skipped else [edge]
        return found

    def sole(self, root: str) -> Node | None:
        """The node that alone reads a root, through one edge."""
        readers = self.readers(root)
        alone = len(readers) == 1 and readers[0].dst != OUTPUT
        return self.graph[readers[0].dst] if alone else None

    def is_own(self, edge: Edge) -> bool:
        """Whether an edge reads its root's value as it is."""
        return self.names[edge] == self.wiring.root(self.graph.source(edge))

    def _want(self, edge: Edge) -> None:
        root, simq = self.wiring.root(self.graph.source(edge)), self.plan.edges[edge]
        forms = self._forms.setdefault(root, {})
        name = root
        if edge.dst == OUTPUT or self._is_real(edge, simq):
            name = root if simq is None else f"{root}!"
        elif simq is not None and self.graph[root].op != CONST and self._moved_before(edge, simq):
            same = [k for k, s in forms.items() if s is not None and s.target is simq.target and s.via is simq.via]
            name = same[0] if same else f"{root}>{1 + len(forms)}"
        self.names[edge] = name
        forms.setdefault(name, None if name == root else simq)

    def _is_real(self, edge: Edge, simq: SimQ | None) -> bool:
        """Whether a float node reads the real value of integers, which need be made but once."""
        if simq is None or simq.source is None or simq.target is not None or simq.via is not None:
            return False
        return self.choices[edge.dst].kind == "float" and self.graph[self.graph.source(edge)].op != CONST

    def _moved_before(self, edge: Edge, simq: SimQ) -> bool:
        """Whether the reader takes what the edge makes, rather than doing it itself."""
        choice = self.choices[edge.dst]
        return choice.takes == "moved" or (choice.kind == "add" and simq.source is None)
