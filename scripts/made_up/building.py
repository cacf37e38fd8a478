"""Graphs built by hand, call by call; shapes are inferred."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hago.graph import CONST, INPUT, Graph, Node, infer_shape
from hago.ops import OPS, Ops

Shape = tuple[int, ...]


class Builder:
    """A graph in the making. Each method gives the name of the node it adds."""

    def __init__(self, ops: Ops = OPS) -> None:
        self.ops = ops
        self.nodes: list[Node] = []
        self.consts: dict[str, Tensor] = {}
        self.shapes: dict[str, Shape] = {}
        self.inputs: list[str] = []
        self.values: list[str] = []  # inputs and results, newest last

    def _add(
        self, op: str, inputs: tuple[str, ...], attrs: Mapping[str, Any], name: str = "", shape: Shape | None = None
    ) -> str:
        node = Node(name or f"{op}_{len(self.nodes)}", op, inputs, attrs)
        shape = infer_shape(node, [self.shapes[s] for s in inputs], self.ops) if shape is None else shape
        self.nodes.append(Node(node.name, op, inputs, attrs, shape))
        self.shapes[node.name] = shape
        return node.name

    def input(self, *shape: int, name: str = "") -> str:
        """A float32 input; `shape` is without the batch."""
        made = self._add(INPUT, (), {"dtype": "float32"}, name, (1, *shape))
        self.inputs.append(made)
        self.values.append(made)
        return made

    def const(self, tensor: Tensor, name: str = "") -> str:
        made = self._add(CONST, (), {}, name, tuple(tensor.shape))
        self.consts[made] = tensor
        return made

    def call(self, op: str, *inputs: str, name: str = "", **attrs: Any) -> str:
        made = self._add(op, inputs, attrs, name)
        self.values.append(made)
        return made

    def conv2d(self, x: str, weight: Tensor, bias: Tensor | None = None, name: str = "", **attrs: Any) -> str:
        """A convolution that keeps the size of its image unless told otherwise."""
        weights = (self.const(weight, f"{name}.weight" if name else ""),)
        if bias is not None:
            weights += (self.const(bias, f"{name}.bias" if name else ""),)
        padding = [k // 2 for k in weight.shape[2:]]
        chosen = {"stride": [1, 1], "padding": padding, "dilation": [1, 1], "groups": 1, **attrs}
        return self.call("conv2d", x, *weights, name=name, **chosen)

    def linear(self, x: str, weight: Tensor, bias: Tensor | None = None, name: str = "") -> str:
        weights = (self.const(weight, f"{name}.weight" if name else ""),)
        if bias is not None:
            weights += (self.const(bias, f"{name}.bias" if name else ""),)
        return self.call("linear", x, *weights, name=name)

    def graph(self, *outputs: str) -> Graph:
        """The graph so far; its output is the newest value unless others are named."""
        return Graph(tuple(self.nodes), tuple(self.inputs), outputs or (self.values[-1],), dict(self.consts))


def seeded(*shape: int, seed: int = 0, size: float = 1.0) -> Tensor:
    """Values in [-2, 2] that are the same each time and on each machine: drawn as integers."""
    drawn = torch.randint(-2000, 2001, shape, generator=torch.Generator().manual_seed(seed))
    return drawn.to(torch.float32) / 1000 * size


def residual_block() -> Graph:
    """A network with most that matters: conv, relu, a residual add, pooling, and a linear at the end."""
    b = Builder()
    x = b.input(3, 8, 8, name="x")
    stem = b.call("relu", b.conv2d(x, seeded(4, 3, 3, 3, seed=1), seeded(4, seed=2), name="stem"), name="stem.relu")
    left = b.call("relu", b.conv2d(stem, seeded(4, 4, 3, 3, seed=3), name="left"), name="left.relu")
    right = b.conv2d(left, seeded(4, 4, 1, 1, seed=4), seeded(4, seed=5), name="right")
    total = b.call("relu", b.call("add", stem, right, name="add"), name="add.relu")
    pooled = b.call("adaptive_avg_pool2d", total, output_size=[1, 1], input_size=[8, 8], name="pool")
    flat = b.call("reshape", pooled, shape=[-1, 4], name="flat")
    b.linear(flat, seeded(5, 4, seed=6), seeded(5, seed=7), name="fc")
    return b.graph()
