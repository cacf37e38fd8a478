"""Zeros around what only convolutions read are a part of their windows, since 0 is the zero point on every grid:
of integers, and of reals that are quantized behind the padding.

Engines have no integer kernel for padding by itself and would go through real values for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from torch import Tensor

from hago.export.onnx_real import pad_sizes, pads
from hago.graph import OUTPUT, Node
from hago.plan import Plan

_CONVS: Final = ("conv1d", "conv2d", "conv3d")


def padded_convolutions(plan: Plan) -> tuple[frozenset[str], Mapping[str, Node]]:
    """Which pads need not be written, and the convolutions that take them over: their `padding` is starts, then
    ends, as ONNX has it."""
    graph, convolutions = plan.graph, dict[str, Node]()
    merged: set[str] = set()
    for node in graph:
        readers = graph.out_edges.get(node.name, ())
        if readers and _adds_zeros(plan, node) and all(_pads_itself(plan, node, e.dst, e.slot) for e in readers):
            merged.add(node.name)
            convolutions |= {e.dst: _with(plan, node, graph[e.dst]) for e in readers}
    return frozenset(merged), convolutions


def inside(value: Tensor, pad: Node) -> Tensor:
    """A padded value without its padding."""
    sizes = pad_sizes(pad, value.ndim)
    starts, ends = sizes[: value.ndim], sizes[value.ndim :]
    within = [slice(low, size - high) for low, size, high in zip(starts, value.shape, ends, strict=True)]
    return value[tuple(within)]


def _adds_zeros(plan: Plan, node: Node) -> bool:
    """Whether a node pads spatial axes with 0, on the grid that its input is on."""
    if node.op != "pad" or node.attrs["mode"] != "constant" or node.attrs["value"] or min(node.attrs["pad"]) < 0:
        return False
    made = plan.nodes.get(node.name)
    q = None if made is None else made.operands[0]
    same_grid = made is None or (q is not None and made.out_simq is None and q.key == made.out.key)
    return same_grid and len(node.attrs["pad"]) <= 2 * (len(node.shape or ()) - 2)


def _pads_itself(plan: Plan, pad: Node, reader: str, slot: int) -> bool:
    """Whether a reader is a convolution of what is padded; one in float does not read integers."""
    if reader == OUTPUT or slot != 0 or plan.graph[reader].op not in _CONVS:
        return False
    return reader in plan.nodes or pad.name not in plan.nodes


def _with(plan: Plan, pad: Node, conv: Node) -> Node:
    """The convolution with the zeros of a pad before it."""
    kernel = (plan.graph[conv.inputs[1]].shape or ())[2:]
    around = pad_sizes(pad, len(kernel))
    own = pads(conv.attrs, kernel)
    return replace(conv, attrs={**conv.attrs, "padding": [a + b for a, b in zip(around, own, strict=True)]})
