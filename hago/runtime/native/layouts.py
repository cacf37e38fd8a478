"""Layouts: the dtypes and scales in which values are stored between kernels.

`wire` rewrites a Plan so that it moves as few bytes as possible. Requantization is monotone, so two rewrites are exact.
It commutes with nodes that only move values or take their maximum, so such a node runs on the narrower integers of its
readers if all readers request the same ones; an operand that it had requantized is then requantized twice in one pass
(`SimQ.via`). And a clamp before a requantization is a narrower clipping (`hago.plan.clamp_fusion`). The result is a
Plan with the same outputs. Intermediate values differ, so the reference engine runs the original Plan when they are
observed.

`RequestedLayouts` collects which conversions of each value of the rewritten Plan the kernels read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final, Literal, Protocol

from hago.arithmetic.types import Edge, QParams, SimQ
from hago.graph import CONST, OUTPUT, Node
from hago.ops import OPS
from hago.plan import NodePlan, Plan, fuse_clamps

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
    """A rewritten Plan, and the nodes that need no kernel because their value is that of their operand. Made by `wire`,
    once per `Executor`."""

    plan: Plan
    skipped: frozenset[str]

    def root(self, name: str) -> str:
        """The node that computes the value of `name`."""
        while name in self.skipped:
            name = self.plan.graph[name].inputs[0]
        return name


def wire(plan: Plan) -> Wiring:
    """Rewrite a Plan so that it moves fewer bytes and has the same outputs; see the module."""
    moved = _requantize_before_movers(plan)
    fused = fuse_clamps(moved)
    return Wiring(_with_edges(moved, fused.simqs), fused.skipped)


def _requantize_before_movers(plan: Plan) -> Plan:
    """The Plan with the requantizations that follow movers and joiners moved before them."""
    nodes, edges = dict(plan.nodes), dict(plan.edges)
    for node in reversed(plan.graph.nodes):
        node_plan = nodes.get(node.name)
        if node_plan is None or (common := _common_requantization(plan, node, node_plan, edges)) is None:
            continue
        simqs, target = _before(plan, node, node_plan, common), common.target
        if simqs is None:
            continue
        assert target is not None
        joined = len(node.edges) if node.op in JOINERS else 1
        operands = (*[target] * joined, *node_plan.operands[joined:])
        nodes[node.name] = replace(node_plan, operands=operands, register=target, out=target)
        edges.update(zip(node.edges, simqs, strict=True))
        edges.update(dict.fromkeys(plan.graph.out_edges[node.name]))  # readers take the value as it is
    return _with_edges(replace(plan, nodes=nodes), edges)


def _common_requantization(
    plan: Plan, node: Node, node_plan: NodePlan, edges: Mapping[Edge, SimQ | None]
) -> SimQ | None:
    """The requantization that all readers of a mover apply to its value, if it is the same one and its target has fewer
    bits; else None."""
    out = plan.graph.out_edges[node.name]
    zeros = not node_plan.attrs.get("value")  # any other padding value would have to be requantized, too
    commutes = (node.op in MOVERS and node_plan.keeps_input_dtype and zeros) or _joins(plan, node, node_plan)
    if not commutes or node_plan.out_simq is not None or not out or any(e.dst == OUTPUT for e in out):
        return None
    simqs = [edges[e] for e in out]
    first = simqs[0]
    if first is None or first.source is None or first.target is None or first.target.scale.numel() > 1:
        return None
    same = all(s is not None and s.target is first.target and s.via is first.via for s in simqs)
    return first if same and first.target.dtype.bits < node_plan.out.dtype.bits else None


def _before(plan: Plan, node: Node, node_plan: NodePlan, common: SimQ) -> tuple[SimQ | None, ...] | None:
    """The SimQs of a mover's in-edges if it runs after the requantization of its readers; None if that is not exact."""
    simqs: list[SimQ | None] = []
    for slot, name in enumerate(node.inputs):
        simq, source = node_plan.simqs[slot], plan.nodes.get(name)
        if slot and node.op not in JOINERS:
            simqs.append(simq)
        elif source is None:
            return None
        elif simq is None:
            # the very scale that readers requantized from: one object in two places means "no change of scale"
            simqs.append(replace(common, source=replace(source.out, scale=node_plan.out.scale)))
        elif simq.source is not None and simq.via is None and common.via is None and _keeps(simq.target, node_plan.out):
            simqs.append(replace(simq, target=common.target, via=simq.target))
        else:
            return None
    return tuple(simqs)


def _keeps(arriving: QParams | None, out: QParams) -> bool:
    """Whether a value has the scale and the dtype in which it arrives."""
    return arriving is not None and arriving.scale is out.scale and arriving.dtype == out.dtype


def _joins(plan: Plan, node: Node, node_plan: NodePlan) -> bool:
    """Whether a joiner reads all operands on the scale and in the dtype of its own value, and cannot overflow."""
    form, out = plan.ops[node.op].integer, node_plan.out
    common = node.op in JOINERS and form is not None and form.slots == ("common",) and not form.requantizes_output
    return common and node_plan.proved and all(_keeps(q, out) for q in node_plan.operands)


def _with_edges(plan: Plan, simqs: Mapping[Edge, SimQ | None]) -> Plan:
    """The Plan with some edges replaced, both in its edges and in the nodes that they lead to."""
    edges = {**plan.edges, **simqs}
    nodes = dict(plan.nodes)
    for name in {e.dst for e in simqs} & nodes.keys():
        simqs_of_node = tuple(edges[e] for e in plan.graph[name].edges)
        if any(new is not old for new, old in zip(simqs_of_node, nodes[name].simqs, strict=True)):
            nodes[name] = replace(nodes[name], simqs=simqs_of_node)
    return replace(plan, nodes=nodes, edges=edges)


# ---------------------------------------------------------------- requested layouts
#: The conversions of its operands that a kernel makes itself: none, those from integers, or all of them.
Converts = Literal["nothing", "integers", "everything"]
#: The part of an epilogue in which the kernel of a sum can compute a node.
Fusion = Literal["add", "clamp", "max_pool"]


class ConsumerKernel(Protocol):
    """The properties of a kernel on which the layouts of its operands depend; see `kernels.Kernel`."""

    @property
    def converts(self) -> Converts: ...

    @property
    def reads_real(self) -> bool: ...

    @property
    def fuses_as(self) -> Fusion | None: ...


class RequestedLayouts:
    """The conversions of each value that kernels read, and the name of the value that each edge reads.

    A node that the wiring does not skip is a *root*. Its readers may read the value itself (under the name of the
    node), conversions to the targets to which they requantize it (`name>1` and so on), and its real value (`name!`).
    Made by `Lowering` after kernel selection; kernels read it when they emit their calls.

    Args:
        kernels: the kernel of every root.
    """

    def __init__(self, wiring: Wiring, kernels: Mapping[str, ConsumerKernel]) -> None:
        self.wiring, self.plan, self.graph = wiring, wiring.plan, wiring.plan.graph
        self.kernels = kernels
        self.names: dict[Edge, str] = {}
        self._conversions: dict[str, dict[str, SimQ | None]] = {}
        for edge in self.graph.edges:
            if edge.dst not in wiring.skipped:
                self._request(edge)

    def conversions(self, root: str) -> Mapping[str, SimQ | None]:
        """The conversions of a root's value that kernels read, by name; None for the value itself."""
        return self._conversions.get(root, {})

    def readers(self, root: str) -> list[Edge]:
        """The edges that read a root's value, directly or through skipped nodes."""
        edges: list[Edge] = []
        for edge in self.graph.out_edges[root]:
            edges += self.readers(edge.dst) if edge.dst in self.wiring.skipped else [edge]
        return edges

    def only_reader(self, root: str) -> Node | None:
        """The node that reads a root's value, if it is the only one and reads it once; else None."""
        readers = self.readers(root)
        alone = len(readers) == 1 and readers[0].dst != OUTPUT
        return self.graph[readers[0].dst] if alone else None

    def is_own(self, edge: Edge) -> bool:
        """Whether an edge reads its root's value itself, not a conversion of it."""
        return self.names[edge] == self.wiring.root(self.graph.source(edge))

    def _request(self, edge: Edge) -> None:
        root, simq = self.wiring.root(self.graph.source(edge)), self.plan.edges[edge]
        conversions = self._conversions.setdefault(root, {})
        name = root
        if edge.dst == OUTPUT or self._is_real(edge, simq):
            name = root if simq is None else f"{root}!"
        elif simq is not None and self.graph[root].op != CONST and self._converts_before(edge, simq):
            # constants are not converted: kernels take them from `NodePlan.consts`, already as integers
            known = ((k, s) for k, s in conversions.items() if s is not None)
            same = [k for k, s in known if s.target is simq.target and s.via is simq.via]
            name = same[0] if same else f"{root}>{1 + len(conversions)}"
        self.names[edge] = name
        conversions.setdefault(name, None if name == root else simq)

    def _is_real(self, edge: Edge, simq: SimQ | None) -> bool:
        """Whether a float node reads the real value of integers, which is made once for all float nodes."""
        if simq is None or simq.source is None or simq.target is not None or simq.via is not None:
            return False
        return self.kernels[edge.dst].reads_real and self.graph[self.graph.source(edge)].op != CONST

    def _converts_before(self, edge: Edge, simq: SimQ) -> bool:
        """Whether a step before the reader makes the conversion of an edge, not the reader's own kernel."""
        converts, reader = self.kernels[edge.dst].converts, self.plan.nodes.get(edge.dst)
        if reader is not None and reader.rescaling(edge.slot) is not None:
            return converts != "everything"  # narrow operands are stored as such
        return converts == "nothing" or (converts == "integers" and simq.source is None)
