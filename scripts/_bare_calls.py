"""Networks as bare calls of oneDNN and torch on bytes, the yardstick of what an integer model costs.

Only speed is meant: scales are made up, so the values say nothing. Nothing here is exact, and nothing checks it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from hago.graph import CONST, INPUT, Node
from hago.plan import Plan
from hago.runtime.native import exact_kernels
from hago.runtime.native.kernels import CONV, geometry_of, select_kernel
from hago.runtime.native.onednn import OnednnConv, prepack

CLAMPS: Final = ("relu", "clamp")
_SCALE: Final = 2.0**-10

Values = dict[str, Tensor]
Call = Callable[[Values], Tensor]


def macs_alone(plan: Plan, batch: int) -> Callable[[], Any]:
    """The convolutions and matrix products on random bytes, requantized in the kernel, and nothing between."""
    calls: list[tuple[OnednnConv, Tensor]] = []
    for node in plan.graph:
        conv = _conv(plan, node)
        if conv is not None:
            shape = plan.graph[node.inputs[0]].shape or ()
            sizes = shape[2:] if len(shape) == 4 else (1, 1)
            x = torch.randint(0, 256, (batch, conv.geometry.channels, *sizes), dtype=torch.uint8)
            calls.append((conv, x.contiguous(memory_format=torch.channels_last)))

    def run() -> None:
        with torch.no_grad():
            for conv, x in calls:
                conv(x)

    return run


def whole_network(plan: Plan, images: Tensor) -> Callable[[], Tensor]:
    """The network from float images to its last layer: torch quantizes the images, oneDNN convolves with residual
    sums and relus fused, `quantized.max_pool2d` pools bytes, and the mean is torch's.

    Raises:
        ValueError: a node that no such call stands for.
    """
    network = _Network(plan)

    def run() -> Tensor:
        with torch.no_grad():
            return network(images)

    return run


def _conv(plan: Plan, node: Node) -> OnednnConv | None:
    """The call of a convolution or a matrix product; None for other nodes."""
    made = plan.nodes.get(node.name)
    if made is None or select_kernel(plan, node, exact_kernels()).kernel is not CONV:
        return None
    g = geometry_of(node, made)
    assert not isinstance(g, str)
    weight = made.consts[1].reshape(g.out_channels, -1, *g.kernel).contiguous()
    scales, bias = torch.full((g.out_channels,), _SCALE), torch.zeros(g.out_channels)
    return OnednnConv(prepack(weight, g, 0), g, 0, scales, bias, 0, torch.uint8)


@dataclass(frozen=True, slots=True)
class _Summed:
    """A convolution that adds its result to a value that is there already."""

    conv: OnednnConv
    after: str

    def __call__(self, x: Tensor, total: Tensor) -> Tensor:
        c, g = self.conv, self.conv.geometry
        zeros = torch.zeros(g.out_channels, dtype=torch.int32)
        made: Tensor = torch.ops.onednn.qconv2d_pointwise.binary(
            x, 1.0, c.zero, c.weight, c.scales, zeros, total, c.bias, list(g.stride), list(g.padding),
            list(g.dilation), g.groups, 1.0, 0, torch.uint8, 1.0, 0, "sum", 1.0, self.after, [], "",
        )  # fmt: skip
        return made


class _Network:
    """The calls of a graph, in order, by the name of what each makes."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.graph = plan, plan.graph
        self.order = {node.name: i for i, node in enumerate(self.graph)}
        self.stands_for: dict[str, str] = {}  # what is done in another node's call
        self.calls: dict[str, Call] = {}
        sums = self._sums()
        for node in self.graph:
            if node.op not in (INPUT, CONST) and node.name not in self.stands_for:
                self.calls[node.name] = self._call(node, sums)

    def __call__(self, images: Tensor) -> Tensor:
        levels = (images * 32.0).round_().add_(128.0).clamp_(0, 255).to(torch.uint8)
        values = {self.graph.inputs[0]: levels.contiguous(memory_format=torch.channels_last)}
        for name, call in self.calls.items():
            values[name] = call(values)
        return values[self._root(self.graph.outputs[0])]

    def _root(self, name: str) -> str:
        while name in self.stands_for:
            name = self.stands_for[name]
        return name

    def _sums(self) -> Mapping[str, tuple[Node, str]]:
        """By convolution, the sum that is done in its call and the other operand; clamps go with what they read."""
        found: dict[str, tuple[Node, str]] = {}
        for node in self.graph:
            if node.op in CLAMPS:
                self.stands_for[node.name] = node.inputs[0]
            if node.op == "add":
                last, other = sorted(node.inputs, key=self.order.__getitem__, reverse=True)
                if _conv(self.plan, self.graph[last]) is None:
                    raise ValueError(f"{node.name}: a sum of no convolution")
                found[last] = node, other
                self.stands_for[node.name] = last
        return found

    def _call(self, node: Node, sums: Mapping[str, tuple[Node, str]]) -> Call:
        source, attrs = self._root(node.inputs[0]), node.attrs
        conv = _conv(self.plan, node)
        if conv is not None and node.name in sums:
            added, other = sums[node.name]
            clamped = any(self.graph[e.dst].op in CLAMPS for e in self.graph.out_edges[added.name])
            summed, other = _Summed(conv, "relu" if clamped else "none"), self._root(other)
            return lambda values: summed(values[source], values[other])
        if conv is not None and node.op == "linear":
            return lambda values: conv(values[source].reshape(-1, conv.geometry.channels, 1, 1)).flatten(1)
        if conv is not None:
            return lambda values: conv(values[source])
        if node.op == "max_pool2d":
            pool = [attrs[k] for k in ("kernel_size", "stride", "padding", "dilation", "ceil_mode")]
            return lambda values: torch.ops.quantized.max_pool2d(values[source], *pool)
        if node.op == "adaptive_avg_pool2d":
            return lambda values: values[source].float().mean((2, 3), keepdim=True).round().to(torch.uint8)
        if node.op == "reshape":
            return lambda values: values[source].flatten(1)
        raise ValueError(f"{node.name}: no call on bytes for {node.op}")
