"""Placement policies: which tensors of a model are fake-quantized, by hago's own rule or by another system's.

A policy is a pure function of a graph and a piece of hardware, which returns a `Placement`: `hardware` (hago's rule),
`dorefa` (DoReFa-Net's) and `tensorflow` (contrib.quantize's). Training (`qat.prepare`) applies one with `place_policy`.
Among the patterns of `keep_float`, `policy:<name>` stands for the nodes that a policy keeps float (a node's name has no
colon); `search.prepare` and the API replace it with `expand_policies` before they call `plan.topology.analyze`.
"""

from __future__ import annotations

import glob
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from hago.arithmetic.types import Edge
from hago.emulation.tensorflow import FakeQuantOp, Op, Rewritten, quantize_ops
from hago.errors import HagoError, as_strings, did_you_mean
from hago.graph import CONST, INPUT, OUTPUT, Graph, Node
from hago.hardware import Hardware
from hago.ops import OPS, Ops
from hago.plan.space import build_space
from hago.plan.topology import Topology, analyze, range_node

Role = Literal["weight", "activation", "gradient"]

#: Ops that move the values of one operand, so that quantizing before or after them is the same.
MOVES: Final = frozenset(
    name for name, rule in OPS.items() if rule.moves_values and rule.integer and rule.integer.slot(0) == "follow"
)


@dataclass(frozen=True, slots=True)
class FakeQuantPoint:
    """One tensor that is fake-quantized.

    Args:
        name: of the fake quantization; unique.
        source: the node whose value is quantized.
        edges: the edges that read the quantized value.
        role: a `gradient` is quantized as it arrives at the value of `source` in the backward pass.
        norm: the batch norm that is folded into a weight before it is quantized.
    """

    name: str
    source: str
    edges: tuple[Edge, ...]
    role: Role
    norm: str | None = None


@dataclass(frozen=True, slots=True)
class Placement:
    """The result of applying a policy to a graph.

    Args:
        policy: name of the policy.
        points: the tensors that are fake-quantized.
        keep_float: nodes that a Plan for the hardware must keep float to agree with the policy; a value for the
            `keep_float` of `hago.quantize`, `prepare` and the search.
    """

    policy: str
    points: tuple[FakeQuantPoint, ...]
    keep_float: tuple[str, ...] = ()

    @property
    def edges(self) -> frozenset[Edge]:
        """Every edge that reads a quantized value."""
        return frozenset(e for p in self.points if p.role != "gradient" for e in p.edges)

    def __str__(self) -> str:
        rows = [f"{p.name}: {p.source} -> {', '.join(map(str, p.edges))}" for p in self.points]
        return "\n".join([f"policy {self.policy}", *rows, f"float: {', '.join(self.keep_float) or 'none'}"])


# ---------------------------------------------------------------- DoReFa-Net
# The first and the last layers stay float, and so do the values that the last layers read.


def dorefa_policy(graph: Graph, hardware: Hardware, ops: Ops = OPS) -> Placement:
    """Weights, activations and gradients of all layers but the first and the last.

    A layer is a convolution, linear or matmul with a constant weight. It is a first layer if its input depends on no
    other layer, and a last layer if no other layer depends on its output. An activation is quantized where it is
    computed, before poolings and reshapes, for all its readers but the last layers. A gradient is quantized as it
    arrives at a layer's output. On hardware that requantizes at outputs, the inputs of the last layers are quantized
    nevertheless.

    References:
        Zhou et al., arXiv:1606.06160, section 3.2; tensorpack examples/DoReFa-Net.
    """
    layers = [n for n in graph if _layer_weight_edge(graph, n, ops) is not None]
    outer = _first_layers(graph, layers) | _last_layers(graph, layers)
    inner = [n for n in layers if n.name not in outer]
    points = [*_weight_points(graph, inner, ops), *_activation_points(graph, inner, outer, ops)]
    points += [FakeQuantPoint(f"{n.name}:gradient", n.name, (), "gradient") for n in inner]
    keep_float = tuple(n.name for n in layers if n.name in outer)
    return Placement("dorefa", tuple(points), keep_float)


def _layer_weight_edge(graph: Graph, node: Node, ops: Ops) -> Edge | None:
    """The edge on which a layer reads its weight; None if the node is no layer."""
    form = ops[node.op].integer if node.op in ops else None
    if form is None or not form.starts_region:
        return None
    consts = [e for e in node.edges if form.slot(e.slot) == "own" and graph[graph.source(e)].op == CONST]
    return consts[0] if len(consts) == 1 else None


def _first_layers(graph: Graph, layers: list[Node]) -> set[str]:
    names = {n.name for n in layers}
    behind: set[str] = set()  # nodes that depend on a layer
    for node in graph:
        if any(s in names or s in behind for s in node.inputs):
            behind.add(node.name)
    return names - behind


def _last_layers(graph: Graph, layers: list[Node]) -> set[str]:
    names = {n.name for n in layers}
    before: set[str] = set()  # nodes that a layer depends on
    for node in reversed(graph.nodes):
        if any(e.dst in names or e.dst in before for e in graph.out_edges[node.name]):
            before.add(node.name)
    return names - before


def _weight_points(graph: Graph, inner: list[Node], ops: Ops) -> Iterator[FakeQuantPoint]:
    by_source: dict[str, list[Edge]] = {}
    for node in inner:
        edge = _layer_weight_edge(graph, node, ops)
        assert edge is not None
        by_source.setdefault(graph.source(edge), []).append(edge)
    for source, edges in by_source.items():
        yield FakeQuantPoint(f"{source}:weight", source, tuple(edges), "weight")


def _activation_points(graph: Graph, inner: list[Node], outer: set[str], ops: Ops) -> Iterator[FakeQuantPoint]:
    sources: dict[str, None] = {}
    for node in inner:
        weight = _layer_weight_edge(graph, node, ops)
        for edge in node.edges:
            source = graph[graph.source(edge)]
            if edge == weight or source.op == CONST:
                continue
            while source.op in MOVES:
                source = graph[source.inputs[0]]
            sources[source.name] = None
    for name in sources:
        edges = tuple(e for e in graph.out_edges[name] if not _leads_only_to(graph, e, outer))
        yield FakeQuantPoint(f"{name}:activation", name, edges, "activation")


def _leads_only_to(graph: Graph, edge: Edge, layers: set[str]) -> bool:
    """Whether an edge, past ops that only move values, leads to these layers and nowhere else."""
    if edge.dst == OUTPUT or edge.dst in layers:
        return edge.dst != OUTPUT
    edges = graph.out_edges[edge.dst]
    return graph[edge.dst].op in MOVES and bool(edges) and all(_leads_only_to(graph, e, layers) for e in edges)


# ---------------------------------------------------------------- a Graph as ops of TensorFlow 1
# `lower` writes a Graph as the ops that TensorFlow 1 would have for it, on which contrib.quantize's patterns are
# matched:
#     conv2d       Conv2D, DepthwiseConv2dNative (as many groups as channels); then BiasAdd
#     linear       MatMul; then BiasAdd. matmul of matrices is MatMul too, of batches BatchMatMulV2
#     batch_norm   FusedBatchNormV3; between two Reshapes after a linear. A bias that it alone reads is part of its mean
#     relu, clamp  Relu, Relu6 where it clamps to [0, 6]
#     weights      VariableV2, read by an Identity once, however many layers share it
# Other ops keep hago's name, which no pattern matches, e.g. conv1d, conv3d and transposed convolutions, as upstream.
# The scopes of an op's name are the parts of its node's name.

_TYPES: Final = {
    "add": "AddV2",
    "sub": "Sub",
    "mul": "Mul",
    "relu": "Relu",
    "concat": "ConcatV2",
    "reshape": "Reshape",
    "max_pool2d": "MaxPool",
    "avg_pool2d": "AvgPool",
    "sigmoid": "Sigmoid",
    INPUT: "Placeholder",
}
#: The slots whose constants TensorFlow holds in variables, by op; a MatMul multiplies by a variable on either side.
_WEIGHT_SLOTS: Final = {"conv2d": (1,), "linear": (1,), "matmul": (0, 1)}


@dataclass(frozen=True, slots=True)
class Lowered:
    """The ops of a graph, and the nodes that they come from. Returned by `lower`.

    Args:
        ops: in the order of the nodes.
        values: by op, the node whose value it computes; a node's intermediate ops are absent.
        weights: by op that reads a weight, the constant's node.
        layers: by op that multiplies by a weight, its node.
    """

    ops: tuple[Op, ...]
    values: Mapping[str, str]
    weights: Mapping[str, str]
    layers: Mapping[str, str]


def lower(graph: Graph) -> Lowered:
    """Lower a graph to ops of TensorFlow 1; its batch norms may be folded or not."""
    return _Lowering(graph).run()


def is_depthwise(graph: Graph, node: Node) -> bool:
    """Whether every input channel of a convolution has filters of its own."""
    groups = node.attrs.get("groups", 1)
    shape = graph[node.inputs[0]].shape or ()
    return groups > 1 and len(shape) > 1 and groups == shape[1]


class _Lowering:
    """The state of one call of `lower`."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.ops: dict[str, Op] = {}
        self.values: dict[str, str] = {}
        self.weights: dict[str, str] = {}
        self.layers: dict[str, str] = {}
        self.op_of: dict[str, str] = {}  # the op that computes a node's value

    def run(self) -> Lowered:
        for node in self.graph:
            self.op_of[node.name] = op = self._lower_const(node) if node.op == CONST else self._lower_node(node)
            if node.op != CONST:
                self.values[op] = node.name
        for index, name in enumerate(self.graph.outputs):
            self._add_op(f"{OUTPUT}/{index}", "Output", self.op_of[name])
        return Lowered(tuple(self.ops.values()), self.values, self.weights, self.layers)

    def _add_op(self, name: str, kind: str, *inputs: str) -> str:
        unique, number = name, 0
        while unique in self.ops:
            number += 1
            unique = f"{name}_{number}"
        self.ops[unique] = Op(unique, kind, inputs)
        return unique

    def _lower_const(self, node: Node) -> str:
        name = node.name.replace(".", "/")
        edges = [e for e in self.graph.out_edges[node.name] if e.dst != OUTPUT]
        if not any(e.slot in _WEIGHT_SLOTS.get(self.graph[e.dst].op, ()) for e in edges):
            return self._add_op(name, "Const")
        read = self._add_op(f"{name}/read", "Identity", self._add_op(name, "VariableV2"))
        self.weights[read] = node.name
        return read

    def _lower_node(self, node: Node) -> str:
        inputs = [self.op_of[s] for s in node.inputs]
        scope = node.name.replace(".", "/")
        if node.op == "conv2d":
            kind = "DepthwiseConv2dNative" if is_depthwise(self.graph, node) else "Conv2D"
            return self._lower_layer(node, kind, inputs)
        if node.op in ("linear", "matmul"):
            matrices = node.op == "linear" or all(len(self.graph[s].shape or ()) == 2 for s in node.inputs[:2])
            return self._lower_layer(node, "MatMul" if matrices else "BatchMatMulV2", inputs)
        if node.op == "batch_norm" and self._norms_channels(node):
            return self._lower_batch_norm(scope, inputs)
        return self._add_op(scope, self._type(node), *inputs)

    @staticmethod
    def _type(node: Node) -> str:
        if node.op == "clamp" and (node.attrs["min"], node.attrs["max"]) == (0, 6):
            return "Relu6"
        if node.op == "clamp" and (node.attrs["min"], node.attrs["max"]) == (0, None):
            return "Relu"
        return _TYPES.get(node.op, node.op)

    def _lower_layer(self, node: Node, kind: str, inputs: list[str]) -> str:
        scope = node.name.replace(".", "/")
        op = self._add_op(f"{scope}/{'depthwise' if kind.startswith('Depthwise') else kind}", kind, *inputs[:2])
        self.layers[op] = node.name
        readers = [self.graph[e.dst] for e in self.graph.out_edges[node.name] if e.dst != OUTPUT]
        is_normed = len(self.graph.out_edges[node.name]) == 1 and [r.op for r in readers] == ["batch_norm"]
        if len(inputs) < 3 or (is_normed and self._norms_channels(readers[0])):
            return op
        return self._add_op(f"{scope}/BiasAdd", "BiasAdd", op, inputs[2])

    def _norms_channels(self, norm: Node) -> bool:
        """Whether the axis that the norm acts on is that of the output channels before it."""
        before = self.graph[norm.inputs[0]]
        return before.op != "linear" or len(before.shape or ()) == 2

    def _lower_batch_norm(self, scope: str, inputs: list[str]) -> str:
        is_flat = self.ops[inputs[0]].type == "MatMul"
        if is_flat:
            size = self._add_op(f"{scope}/Reshape/shape", "Const")
            inputs[0] = self._add_op(f"{scope}/Reshape", "Reshape", inputs[0], size)
        op = self._add_op(f"{scope}/FusedBatchNormV3", "FusedBatchNormV3", *inputs)
        return self._add_op(f"{scope}/Reshape", "Reshape", op, f"{scope}/Reshape/shape") if is_flat else op


# ---------------------------------------------------------------- TensorFlow
# Fake quantization is placed where contrib.quantize's training graph has it.

#: Ops that only move, join, clip or average the values of their operands, so that the ranges of these hold for the
#: result.
_RANGE_FOLLOWS_OPERANDS: Final = MOVES | frozenset(
    name
    for name, rule in OPS.items()
    if rule.clips_or_averages or (rule.moves_values and rule.integer and rule.integer.slots == ("common",))
)


def tensorflow_policy(graph: Graph, hardware: Hardware, ops: Ops = OPS) -> Placement:
    """Fake quantization as in contrib.quantize's training graph; see `quantize_ops` for the patterns.

    Inputs of the model have none, since their range is stated when a model is converted. Neither have values whose
    range follows from that of quantized ones (e.g. of pooling). A Plan keeps float the nodes that multiply or add other
    values, and layers whose weight no pattern matched.

    References:
        tensorflow/contrib/quantize/python/quantize.py (r1.15); Jacob et al., arXiv:1712.05877, section 3.
    """
    lowered = lower(graph)
    rewritten = quantize_ops(lowered.ops)
    points = tuple(_fake_quant_point(graph, lowered, rewritten, fake_quant) for fake_quant in rewritten.fake_quants)
    return Placement("tensorflow", points, _kept_float(graph, hardware, points, ops))


def _fake_quant_point(graph: Graph, lowered: Lowered, rewritten: Rewritten, fake_quant: FakeQuantOp) -> FakeQuantPoint:
    producer = rewritten.stands_for.get(fake_quant.producer, fake_quant.producer)
    if producer in lowered.values:
        source = lowered.values[producer]
        return FakeQuantPoint(fake_quant.name, source, graph.out_edges[source], fake_quant.role)
    source = lowered.weights[producer]
    if producer == fake_quant.producer:
        return FakeQuantPoint(fake_quant.name, source, graph.out_edges[source], fake_quant.role)
    (layer,) = {lowered.layers[rewritten.stands_for[name]] for name in fake_quant.consumers}
    edges = tuple(e for e in graph.out_edges[source] if e.dst == layer)
    norm = next(e.dst for e in graph.out_edges[layer] if graph[e.dst].op == "batch_norm")
    return FakeQuantPoint(fake_quant.name, source, edges, fake_quant.role, norm)


def _kept_float(graph: Graph, hardware: Hardware, points: tuple[FakeQuantPoint, ...], ops: Ops) -> tuple[str, ...]:
    """The nodes that the hardware could run in integers, but whose operands or result the policy keeps float."""
    topology = analyze(graph, hardware, (), ops)
    quantized_edges = frozenset(e for p in points for e in p.edges)
    quantized_nodes = _quantized_nodes(graph, {p.source for p in points})
    return tuple(
        n.name
        for n in graph
        if topology.nodes[n.name]
        and not (
            _reads_only_quantized(graph, n, hardware, ops, quantized_nodes, quantized_edges)
            and _has_quantized_result(graph, n, hardware, topology, ops, quantized_nodes)
        )
    )


def _quantized_nodes(graph: Graph, sources: set[str]) -> frozenset[str]:
    """The nodes whose values are quantized, or whose range follows from that of quantized values."""
    quantized: set[str] = set()
    for node in graph:
        operands = [s for s in node.inputs if graph[s].op != CONST]
        keeps_range = node.op in _RANGE_FOLLOWS_OPERANDS and all(s in quantized for s in operands)
        if node.op == INPUT or node.name in sources or keeps_range:
            quantized.add(node.name)
    return frozenset(quantized)


def _reads_only_quantized(
    graph: Graph,
    node: Node,
    hardware: Hardware,
    ops: Ops,
    quantized_nodes: frozenset[str],
    quantized_edges: frozenset[Edge],
) -> bool:
    """Whether all operands of a node that need a scale are quantized, its weight included."""
    rule = hardware.rule(node.op, ops)
    assert rule is not None and rule.integer is not None
    form = rule.integer
    for edge, source in zip(node.edges, node.inputs, strict=True):
        if form.slot(edge.slot) not in ("own", "common"):
            continue
        is_weight = form.weight is not None and edge.slot == form.weight.slot
        if graph[source].op == CONST:
            if is_weight and edge not in quantized_edges:
                return False
        elif source not in quantized_nodes:
            return False
    return True


def _has_quantized_result(
    graph: Graph, node: Node, hardware: Hardware, topology: Topology, ops: Ops, quantized_nodes: frozenset[str]
) -> bool:
    """Whether the policy quantizes the node's result, or the hardware does not requantize it at the node."""
    if all(desc.requantize_at == "edge" for desc in hardware.integer_descs(node.op)):
        return True
    return range_node(graph, hardware, topology, ops, node.name) in quantized_nodes


# ---------------------------------------------------------------- policies by name

Policy = Callable[[Graph, Hardware, Ops], Placement]

POLICY_PREFIX: Final = "policy:"


def hardware_policy(graph: Graph, hardware: Hardware, ops: Ops = OPS) -> Placement:
    """hago's own rule: every value whose bits can be chosen on the hardware is fake-quantized, group by group."""
    groups = build_space(graph, hardware, analyze(graph, hardware, (), ops), None, ops).groups
    points = (
        FakeQuantPoint(key, g.source, g.edges, "weight" if graph[g.source].op == CONST else "activation")
        for key, g in groups.items()
    )
    return Placement("hardware", tuple(points))


POLICIES: Final[Mapping[str, Policy]] = {
    "hardware": hardware_policy,
    "tensorflow": tensorflow_policy,
    "dorefa": dorefa_policy,
}


def place_policy(policy: str | Policy, graph: Graph, hardware: Hardware, ops: Ops = OPS) -> Placement:
    """Apply a policy to a graph on a piece of hardware.

    Args:
        policy: a name in POLICIES, or a function with the signature of these.
        graph: its batch norms may be folded or not.

    Raises:
        HagoError: an unknown name.
    """
    if callable(policy):
        return policy(graph, hardware, ops)
    if policy not in POLICIES:
        raise HagoError(
            f"unknown policy {policy!r}; known: {', '.join(POLICIES)}." + did_you_mean(str(policy), POLICIES)
        )
    return POLICIES[policy](graph, hardware, ops)


def expand_policies(keep_float: str | Sequence[str], graph: Graph, hardware: Hardware, ops: Ops = OPS) -> list[str]:
    """The patterns of `keep_float`, with `policy:<name>` replaced by the nodes that the policy keeps float.

    Raises:
        HagoError: an unknown policy.
    """
    patterns: list[str] = []
    for pattern in as_strings(keep_float, "keep_float"):
        if pattern.startswith(POLICY_PREFIX):
            placement = place_policy(pattern.removeprefix(POLICY_PREFIX), graph, hardware, ops)
            patterns += map(glob.escape, placement.keep_float)
        else:
            patterns.append(pattern)
    return patterns
