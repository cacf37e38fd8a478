"""DoReFa-Net's policy: the first and the last layers stay float, and so does what the last ones read."""

from __future__ import annotations

from collections.abc import Iterator

from hago.graph import CONST, OUTPUT, Graph, Node
from hago.hardware import Hardware
from hago.ops import OPS, Ops
from hago.qat.placement import MOVES, Placement, Point
from hago.types import Edge


def dorefa_policy(graph: Graph, hardware: Hardware, ops: Ops = OPS) -> Placement:
    """Weights, activations and gradients of all layers but the first and the last.

    A layer is a convolution, linear or matmul with a constant weight; it is a first one if no layer
    stands before it, a last one if none stands behind it. An activation is quantized where it is
    made, before poolings and reshapes, and for all who read it but the last layers; a gradient as it
    comes back to a layer's output. A plan for hardware that requantizes at outputs quantizes what
    the last layers read all the same.

    References:
        Zhou et al., arXiv:1606.06160, section 3.2; tensorpack examples/DoReFa-Net.
    """
    layers = [n for n in graph if _weight_edge(graph, n, ops) is not None]
    ends = _first(graph, layers) | _last(graph, layers)
    inner = [n for n in layers if n.name not in ends]
    points = [*_weights(graph, inner, ops), *_activations(graph, inner, ends, ops)]
    points += [Point(f"{n.name}:gradient", n.name, (), "gradient") for n in inner]
    keep = tuple(n.name for n in layers if n.name in ends)
    return Placement("dorefa", tuple(points), keep)


def _weight_edge(graph: Graph, node: Node, ops: Ops) -> Edge | None:
    """The edge that a layer's weight comes on; None if the node is no layer."""
    form = ops[node.op].integer if node.op in ops else None
    if form is None or not form.seed:
        return None
    consts = [e for e in node.edges if form.slot(e.slot) == "own" and graph[graph.source(e)].op == CONST]
    return consts[0] if len(consts) == 1 else None


def _first(graph: Graph, layers: list[Node]) -> set[str]:
    names = {n.name for n in layers}
    behind: set[str] = set()  # values that a layer stands before
    for node in graph:
        if any(s in names or s in behind for s in node.inputs):
            behind.add(node.name)
    return names - behind


def _last(graph: Graph, layers: list[Node]) -> set[str]:
    names = {n.name for n in layers}
    before: set[str] = set()
    for node in reversed(graph.nodes):
        if any(e.dst in names or e.dst in before for e in graph.out_edges[node.name]):
            before.add(node.name)
    return names - before


def _weights(graph: Graph, inner: list[Node], ops: Ops) -> Iterator[Point]:
    by_source: dict[str, list[Edge]] = {}
    for node in inner:
        edge = _weight_edge(graph, node, ops)
        assert edge is not None
        by_source.setdefault(graph.source(edge), []).append(edge)
    for source, edges in by_source.items():
        yield Point(f"{source}:weight", source, tuple(edges), "weight")


def _activations(graph: Graph, inner: list[Node], ends: set[str], ops: Ops) -> Iterator[Point]:
    sources: dict[str, None] = {}
    for node in inner:
        weight = _weight_edge(graph, node, ops)
        for edge in node.edges:
            source = graph[graph.source(edge)]
            if edge == weight or source.op == CONST:
                continue
            while source.op in MOVES:
                source = graph[source.inputs[0]]
            sources[source.name] = None
    for name in sources:
        edges = tuple(e for e in graph.out_edges[name] if not _ends_at(graph, e, ends))
        yield Point(f"{name}:activation", name, edges, "activation")


def _ends_at(graph: Graph, edge: Edge, ends: set[str]) -> bool:
    """Whether an edge leads to layers in `ends` and nowhere else."""
    if edge.dst == OUTPUT or edge.dst in ends:
        return edge.dst != OUTPUT
    edges = graph.out_edges[edge.dst]
    return graph[edge.dst].op in MOVES and bool(edges) and all(_ends_at(graph, e, ends) for e in edges)
