"""TensorFlow's policy: fake quantization where contrib.quantize's training graph has it."""

from __future__ import annotations

from typing import Final

from hago.crossing import range_node
from hago.graph import CONST, INPUT, Graph, Node
from hago.hardware import Hardware
from hago.ops import OPS, Ops
from hago.qat.placement import MOVES, Placement, Point
from hago.qat.tensorflow_lowering import Lowered, lower
from hago.qat.tensorflow_rewrite import FakeQuantOp, Rewritten, quantize_ops
from hago.topology import Topology, analyze
from hago.types import Edge

#: Ops whose values are those of their inputs moved, picked, cut off or averaged: the range holds.
_KEEPS_RANGE: Final = MOVES | {
    "relu", "clamp", "concat", "stack", "avg_pool1d", "avg_pool2d", "adaptive_avg_pool1d", "adaptive_avg_pool2d",
    "mean", "upsample_bilinear2d",
}  # fmt: skip


def tensorflow_policy(graph: Graph, hardware: Hardware, ops: Ops = OPS) -> Placement:
    """Where contrib.quantize's training graph has fake quantization; see `quantize_ops` for the patterns.

    Inputs of the model have none, since their range is stated when a model is converted, and neither
    have values whose range follows from quantized ones (pooling, say). A plan leaves float what
    multiplies or adds anything else, and layers whose weight no pattern matched.

    References:
        tensorflow/contrib/quantize/python/quantize.py (r1.15); Jacob et al., arXiv:1712.05877, section 3.
    """
    lowered = lower(graph)
    rewritten = quantize_ops(lowered.ops)
    points = tuple(_point(graph, lowered, rewritten, made) for made in rewritten.fake_quants)
    return Placement("tensorflow", points, _unquantized(graph, hardware, points, ops))


def _point(graph: Graph, lowered: Lowered, rewritten: Rewritten, made: FakeQuantOp) -> Point:
    producer = rewritten.stands_for.get(made.producer, made.producer)
    if producer in lowered.values:
        source = lowered.values[producer]
        return Point(made.name, source, graph.out_edges[source], made.role)
    source = lowered.weights[producer]
    if producer == made.producer:
        return Point(made.name, source, graph.out_edges[source], made.role)
    (layer,) = {lowered.layers[rewritten.stands_for[name]] for name in made.consumers}
    edges = tuple(e for e in graph.out_edges[source] if e.dst == layer)
    norm = next(e.dst for e in graph.out_edges[layer] if graph[e.dst].op == "batch_norm")
    return Point(made.name, source, edges, made.role, norm)


def _unquantized(graph: Graph, hardware: Hardware, points: tuple[Point, ...], ops: Ops) -> tuple[str, ...]:
    """The nodes that the hardware could run in integers, but whose operands or result the policy leaves float."""
    topology = analyze(graph, hardware, (), ops)
    quantized = frozenset(e for p in points for e in p.edges)
    held = _held(graph, {p.source for p in points})
    return tuple(
        n.name
        for n in graph
        if topology.nodes[n.name]
        and not (_takes_held(graph, n, ops, held, quantized) and _gives_held(graph, n, hardware, topology, ops, held))
    )


def _held(graph: Graph, sources: set[str]) -> frozenset[str]:
    """The nodes whose values are quantized, or made of quantized ones so that no further range is needed."""
    held: set[str] = set()
    for node in graph:
        values = [s for s in node.inputs if graph[s].op != CONST]
        follows = node.op in _KEEPS_RANGE and all(s in held for s in values)
        if node.op == INPUT or node.name in sources or follows:
            held.add(node.name)
    return frozenset(held)


def _takes_held(graph: Graph, node: Node, ops: Ops, held: frozenset[str], quantized: frozenset[Edge]) -> bool:
    form = ops[node.op].integer
    assert form is not None
    for edge, source in zip(node.edges, node.inputs, strict=True):
        if form.slot(edge.slot) not in ("own", "common"):
            continue
        is_weight = form.weight is not None and edge.slot == form.weight.slot
        if graph[source].op == CONST:
            if is_weight and edge not in quantized:
                return False
        elif source not in held:
            return False
    return True


def _gives_held(
    graph: Graph, node: Node, hardware: Hardware, topology: Topology, ops: Ops, held: frozenset[str]
) -> bool:
    """Whether a result that the hardware requantizes is one that the policy quantizes."""
    if all(desc.requantize_at == "edge" for desc in hardware.integer_descs(node.op)):
        return True
    return range_node(graph, hardware, topology, ops, node.name) in held
