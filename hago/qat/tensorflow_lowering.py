"""A Graph spelt as TensorFlow 1 would: which ops each node and each constant is.

    conv2d       Conv2D, DepthwiseConv2dNative (as many groups as channels); then BiasAdd
    linear       MatMul; then BiasAdd.  matmul of matrices is MatMul too, of batches BatchMatMulV2
    batch_norm   FusedBatchNormV3; between two Reshapes after a linear. A bias that it alone reads is
                 part of its mean, and no op of its own
    relu, clamp  Relu, Relu6 where it clamps to [0, 6]
    weights      VariableV2, read by an Identity once, however many layers share it

Other ops keep a name of their own, which no pattern matches; conv1d, conv3d and transposed
convolutions are among them, as upstream. Scopes are the parts of a node's name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from hago.graph import CONST, INPUT, OUTPUT, Graph, Node
from hago.qat.tensorflow_ops import Op

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
