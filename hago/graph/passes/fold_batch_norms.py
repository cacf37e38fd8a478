"""Fold batch norms into the convolution or linear before them; where that cannot be, keep an affine.

Done in float64 and rounded once. Training needs the unfolded form, so passes before this one leave batch norms alone.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import torch
from torch import Tensor

from hago.errors import GraphError
from hago.graph.graph import CONST, Graph, Node

#: Along which axis of the weight the output channels lie.
CHANNEL_AXIS: Final = {
    "conv1d": 0,
    "conv2d": 0,
    "conv3d": 0,
    "linear": 0,
    "conv_transpose1d": 1,
    "conv_transpose2d": 1,
}


def fold_batch_norms(graph: Graph) -> Graph:
    """The graph without `batch_norm` nodes: folded into weights, or as `affine` nodes.

    Raises:
        GraphError: statistics that give no finite multiplier; names the batch norm.
    """
    for name in [n.name for n in graph if n.op == "batch_norm"]:
        graph = _fold_one(graph, graph[name])
    return graph


def multiplier_and_offset(graph: Graph, norm: Node) -> tuple[Tensor, Tensor]:
    """Batch norm as `x * m + o`, float64: `m = gamma / sqrt(var + eps)`, `o = beta - mean * m`.

    Raises:
        GraphError: one of them is not finite.
    """
    gamma, beta, mean, var = (graph.consts[s].to(torch.float64) for s in norm.inputs[1:])
    m = gamma / torch.sqrt(var + norm.attrs["eps"])
    o = beta - mean * m
    if not bool((m.isfinite() & o.isfinite()).all()):
        raise GraphError(
            f"batch norm {norm.name!r} multiplies by NaN or infinity; check its weight, bias and running statistics"
        )
    return m, o


def scale_channels(weight: Tensor, m: Tensor, layer: Node) -> Tensor:
    """A layer's weight with output channel i multiplied by `m[i]`."""
    axis, groups = CHANNEL_AXIS[layer.op], layer.attrs.get("groups", 1)
    if axis == 1 and groups > 1:  # (groups * in, out) with one scale per (group, out)
        blocks = weight.reshape(groups, -1, *weight.shape[1:])
        scale = m.reshape(groups, 1, -1, *[1] * (weight.ndim - 2))
        return (blocks * scale).reshape(weight.shape)
    return weight * m.reshape([-1 if d == axis else 1 for d in range(weight.ndim)])


def _fold_one(graph: Graph, norm: Node) -> Graph:
    if any(s not in graph.consts for s in norm.inputs[1:]):
        return graph
    m, o = multiplier_and_offset(graph, norm)
    before = graph[norm.inputs[0]]
    if not _can_fold(graph, before, norm):
        return _as_affine(graph, norm, m, o)
    weight = graph.consts[before.inputs[1]].to(torch.float64)
    bias = graph.consts[before.inputs[2]].to(torch.float64) if len(before.inputs) > 2 else torch.zeros_like(m)
    folded = scale_channels(weight, m, before)
    tensors = (folded.to(torch.float32), (bias * m + o).to(torch.float32))
    names = (_const_name(graph, before, 1, "weight"), _const_name(graph, before, 2, "bias"))
    made = [Node(n, CONST, (), {}, tuple(t.shape)) for n, t in zip(names, tensors, strict=True)]
    new = replace(before, inputs=(before.inputs[0], *names))
    return _substitute(
        graph, {before.name: [*made, new]}, {norm.name: before.name}, dict(zip(names, tensors, strict=True))
    )


def _can_fold(graph: Graph, before: Node, norm: Node) -> bool:
    if before.op not in CHANNEL_AXIS or any(s not in graph.consts for s in before.inputs[1:]):
        return False
    if before.op == "linear" and len(before.shape or ()) != 2:
        return False  # batch norm acts on axis 1, linear on the last
    return len(graph.out_edges[before.name]) == 1


def _const_name(graph: Graph, node: Node, slot: int, role: str) -> str:
    """The constant's own name where only this node reads it, else a new one."""
    if slot < len(node.inputs) and len(graph.out_edges[node.inputs[slot]]) == 1:
        return node.inputs[slot]
    name = f"{node.name}.{role}"
    while name in graph.by_name:
        name += "_folded"
    return name


def _as_affine(graph: Graph, norm: Node, m: Tensor, o: Tensor) -> Graph:
    names = (f"{norm.name}.multiplier", f"{norm.name}.offset")
    tensors = (m.to(torch.float32), o.to(torch.float32))
    made = [Node(n, CONST, (), {}, tuple(t.shape)) for n, t in zip(names, tensors, strict=True)]
    attrs = {"rank": len(norm.shape or ())}
    new = replace(norm, op="affine", inputs=(norm.inputs[0], *names), attrs=attrs)
    return _substitute(graph, {norm.name: [*made, new]}, {}, dict(zip(names, tensors, strict=True)))


def _substitute(
    graph: Graph, replaced: dict[str, list[Node]], renamed: dict[str, str], consts: dict[str, Tensor]
) -> Graph:
    """Nodes replaced in place, nodes renamed away dropped, constants that nothing reads dropped."""
    nodes: list[Node] = []
    for node in graph:
        if node.name in renamed or node.name in consts:
            continue
        for new in replaced.get(node.name, [node]):
            nodes.append(replace(new, inputs=tuple(renamed.get(s, s) for s in new.inputs)))
    outputs = tuple(renamed.get(o, o) for o in graph.outputs)
    read = {s for n in nodes for s in n.inputs} | set(outputs)
    kept = tuple(n for n in nodes if n.op != CONST or n.name in read)
    return graph.with_nodes(kept, outputs=outputs, consts={**graph.consts, **consts})
