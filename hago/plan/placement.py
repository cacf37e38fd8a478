"""Placement: which tensors of a model are fake-quantized, by hago's rule from the hardware or another system's.

A policy is a pure function of a graph and a piece of hardware. Wherever nodes can be kept float by pattern,
`policy:<name>` stands for those that the policy keeps float (a node's name has no colon).
"""

from __future__ import annotations

import glob
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from hago.arithmetic.types import Edge
from hago.emulation.tensorflow.rewrite import FakeQuantOp, Op, Rewritten, quantize_ops
from hago.errors import HagoError, as_strings, did_you_mean
from hago.graph.graph import CONST, INPUT, OUTPUT, Graph, Node
from hago.hardware.hardware import Hardware
from hago.ops import OPS, Ops
from hago.plan.space import build_space
from hago.plan.topology import Topology, analyze, range_node

Role = Literal["weight", "activation", "gradient"]

#: Ops that move the values of one operand, so that quantizing before or after them is the same.
MOVES: Final = frozenset(
    name for name, rule in OPS.items() if rule.moves_values and rule.integer and rule.integer.slot(0) == "follow"
)


@dataclass(frozen=True, slots=True)
class Point:
    """One tensor that is fake-quantized.

    Args:
        name: of the fake quantization; unique.
        source: the node whose value is quantized.
        edges: those on which the quantized value travels.
        role: a `gradient` is quantized where it comes back to the value of `source`.
        norm: the batch norm that is folded into a weight before it is quantized.
    """

    name: str
    source: str
    edges: tuple[Edge, ...]
    role: Role
    norm: str | None = None


@dataclass(frozen=True, slots=True)
class Placement:
    """What a policy says of a graph.

    Args:
        policy: its name.
        points: in the order in which the policy found them.
        keep_float: nodes that a plan for the hardware has to leave float for the policy to hold;
            what `keep_float` of `hago.quantize`, `prepare` and the search takes.
    """

    policy: str
    points: tuple[Point, ...]
    keep_float: tuple[str, ...] = ()

    @property
    def edges(self) -> frozenset[Edge]:
        """Every edge that a quantized value travels on."""
        return frozenset(e for p in self.points if p.role != "gradient" for e in p.edges)

    def __str__(self) -> str:
        rows = [f"{p.name}: {p.source} -> {', '.join(map(str, p.edges))}" for p in self.points]
        return "\n".join([f"policy {self.policy}", *rows, f"float: {', '.join(self.keep_float) or 'none'}"])


# ---------------------------------------------------------------- DoReFa-Net
# The first and the last layers stay float, and so does what the last ones read.


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
    if form is None or not form.starts_region:
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


# ---------------------------------------------------------------- a Graph as TensorFlow 1 would spell it
#     conv2d       Conv2D, DepthwiseConv2dNative (as many groups as channels); then BiasAdd
#     linear       MatMul; then BiasAdd. matmul of matrices is MatMul too, of batches BatchMatMulV2
#     batch_norm   FusedBatchNormV3; between two Reshapes after a linear. A bias that it alone reads is part of its mean
#     relu, clamp  Relu, Relu6 where it clamps to [0, 6]
#     weights      VariableV2, read by an Identity once, however many layers share it
# Other ops keep a name of their own, which no pattern matches; conv1d, conv3d and transposed convolutions are among
# them, as upstream. Scopes are the parts of a node's name.

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
#: Slots that may hold a weight, by op.
_WEIGHT_SLOTS: Final = {"conv2d": (1,), "linear": (1,), "matmul": (0, 1)}


@dataclass(frozen=True, slots=True)
class Lowered:
    """A graph's ops, and where they came from.

    Args:
        ops: in the order of the nodes.
        values: the node whose value an op computes; ops in the middle of a node have none.
        weights: the constant that an op reads.
        layers: the node that a layer op is of.
    """

    ops: tuple[Op, ...]
    values: Mapping[str, str]
    weights: Mapping[str, str]
    layers: Mapping[str, str]


def lower(graph: Graph) -> Lowered:
    """The ops of a graph, batch norms folded or not."""
    return _Lowering(graph).run()


def is_depthwise(graph: Graph, node: Node) -> bool:
    """Whether every input channel of a convolution has filters of its own."""
    groups = node.attrs.get("groups", 1)
    shape = graph[node.inputs[0]].shape or ()
    return groups > 1 and len(shape) > 1 and groups == shape[1]


class _Lowering:
    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.ops: dict[str, Op] = {}
        self.values: dict[str, str] = {}
        self.weights: dict[str, str] = {}
        self.layers: dict[str, str] = {}
        self.of: dict[str, str] = {}  # the op that computes a node's value

    def run(self) -> Lowered:
        for node in self.graph:
            self.of[node.name] = made = self._const(node) if node.op == CONST else self._node(node)
            if node.op != CONST:
                self.values[made] = node.name
        for index, name in enumerate(self.graph.outputs):
            self._add(f"{OUTPUT}/{index}", "Output", self.of[name])
        return Lowered(tuple(self.ops.values()), self.values, self.weights, self.layers)

    def _add(self, name: str, kind: str, *inputs: str) -> str:
        found, number = name, 0
        while found in self.ops:
            number += 1
            found = f"{name}_{number}"
        self.ops[found] = Op(found, kind, inputs)
        return found

    def _const(self, node: Node) -> str:
        name = node.name.replace(".", "/")
        edges = [e for e in self.graph.out_edges[node.name] if e.dst != OUTPUT]
        if not any(e.slot in _WEIGHT_SLOTS.get(self.graph[e.dst].op, ()) for e in edges):
            return self._add(name, "Const")
        read = self._add(f"{name}/read", "Identity", self._add(name, "VariableV2"))
        self.weights[read] = node.name
        return read

    def _node(self, node: Node) -> str:
        inputs = [self.of[s] for s in node.inputs]
        scope = node.name.replace(".", "/")
        if node.op == "conv2d":
            kind = "DepthwiseConv2dNative" if is_depthwise(self.graph, node) else "Conv2D"
            return self._layer(node, kind, inputs)
        if node.op in ("linear", "matmul"):
            matrices = node.op == "linear" or all(len(self.graph[s].shape or ()) == 2 for s in node.inputs[:2])
            return self._layer(node, "MatMul" if matrices else "BatchMatMulV2", inputs)
        if node.op == "batch_norm" and self._norms_channels(node):
            return self._batch_norm(scope, inputs)
        return self._add(scope, self._type(node), *inputs)

    @staticmethod
    def _type(node: Node) -> str:
        if node.op == "clamp" and (node.attrs["min"], node.attrs["max"]) == (0, 6):
            return "Relu6"
        if node.op == "clamp" and (node.attrs["min"], node.attrs["max"]) == (0, None):
            return "Relu"
        return _TYPES.get(node.op, node.op)

    def _layer(self, node: Node, kind: str, inputs: list[str]) -> str:
        scope = node.name.replace(".", "/")
        made = self._add(f"{scope}/{'depthwise' if kind.startswith('Depthwise') else kind}", kind, *inputs[:2])
        self.layers[made] = node.name
        readers = [self.graph[e.dst] for e in self.graph.out_edges[node.name] if e.dst != OUTPUT]
        normed = len(self.graph.out_edges[node.name]) == 1 and [r.op for r in readers] == ["batch_norm"]
        if len(inputs) < 3 or (normed and self._norms_channels(readers[0])):
            return made
        return self._add(f"{scope}/BiasAdd", "BiasAdd", made, inputs[2])

    def _norms_channels(self, norm: Node) -> bool:
        """Whether the axis that the norm acts on is that of the output channels before it."""
        before = self.graph[norm.inputs[0]]
        return before.op != "linear" or len(before.shape or ()) == 2

    def _batch_norm(self, scope: str, inputs: list[str]) -> str:
        flat = self.ops[inputs[0]].type == "MatMul"
        if flat:
            size = self._add(f"{scope}/Reshape/shape", "Const")
            inputs[0] = self._add(f"{scope}/Reshape", "Reshape", inputs[0], size)
        made = self._add(f"{scope}/FusedBatchNormV3", "FusedBatchNormV3", *inputs)
        return self._add(f"{scope}/Reshape", "Reshape", made, f"{scope}/Reshape/shape") if flat else made


# ---------------------------------------------------------------- TensorFlow
# Fake quantization stands where contrib.quantize's training graph has it.

#: Ops whose values are those of their operands moved, joined, cut off or averaged, so that ranges of operands hold.
_KEEPS_RANGE: Final = MOVES | frozenset(
    name
    for name, rule in OPS.items()
    if rule.clips_or_averages or (rule.moves_values and rule.integer and rule.integer.slots == ("common",))
)


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


# ---------------------------------------------------------------- policies by name

Policy = Callable[[Graph, Hardware, Ops], Placement]

PREFIX: Final = "policy:"


def hardware_policy(graph: Graph, hardware: Hardware, ops: Ops = OPS) -> Placement:
    """hago's own rule: a point for every group of edges whose bits the hardware lets one choose."""
    groups = build_space(graph, hardware, analyze(graph, hardware, (), ops), None, ops).groups
    points = (
        Point(key, g.source, g.edges, "weight" if graph[g.source].op == CONST else "activation")
        for key, g in groups.items()
    )
    return Placement("hardware", tuple(points))


POLICIES: Final[Mapping[str, Policy]] = {
    "hardware": hardware_policy,
    "tensorflow": tensorflow_policy,
    "dorefa": dorefa_policy,
}


def place_policy(policy: str | Policy, graph: Graph, hardware: Hardware, ops: Ops = OPS) -> Placement:
    """What a policy says of a graph on a piece of hardware.

    Args:
        policy: hardware, tensorflow, dorefa, or a function like these.
        graph: with batch norms folded or not.

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


def topology_of(graph: Graph, hardware: Hardware, keep_float: str | Sequence[str] = (), ops: Ops = OPS) -> Topology:
    """`hago.plan.topology.analyze`, where `policy:<name>` may stand among the patterns.

    Raises:
        HagoError: an unknown policy, or a pattern that matches no node.
        UnsupportedOp: as `analyze`.
    """
    patterns: list[str] = []
    for pattern in as_strings(keep_float, "keep_float"):
        if pattern.startswith(PREFIX):
            patterns += map(glob.escape, place_policy(pattern.removeprefix(PREFIX), graph, hardware, ops).keep_float)
        else:
            patterns.append(pattern)
    return analyze(graph, hardware, patterns, ops)
