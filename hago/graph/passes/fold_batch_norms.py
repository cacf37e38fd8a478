"""Fold batch norms into the convolution or linear before them; where that cannot be, keep an affine.

Done in float64 and rounded once. Training needs the unfolded form, so passes before this one leave batch norms alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

import torch
from torch import Tensor

from hago.errors import GraphError
from hago.graph.graph import CONST, Graph, Node
from hago.ops import OPS

#: The ops into whose weight and bias a batch norm is folded.
FOLDABLE: Final = frozenset({"conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "linear"})


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


def channel_axis(layer: Node) -> int:
    """The axis of the layer's weight along which the output channels lie."""
    weight = OPS[layer.op].weight
    assert weight is not None
    return weight.axis


def scale_channels(weight: Tensor, m: Tensor, layer: Node) -> Tensor:
    """A layer's weight with output channel i multiplied by `m[i]`."""
    axis, groups = channel_axis(layer), layer.attrs.get("groups", 1)
    if axis == 1 and groups > 1:  # (groups * in, out) with one scale per (group, out)
        blocks = weight.reshape(groups, -1, *weight.shape[1:])
        scale = m.reshape(groups, 1, -1, *[1] * (weight.ndim - 2))
        return (blocks * scale).reshape(weight.shape)
    return weight * m.reshape([-1 if d == axis else 1 for d in range(weight.ndim)])


def _fold_one(graph: Graph, norm: Node) -> Graph:
    if any(s not in graph.consts for s in norm.inputs[1:]):
        return graph
    m, o = multiplier_and_offset(graph, norm)
    layer = graph[norm.inputs[0]]
    if not _can_fold(graph, layer):
        affine = replace(norm, op="affine", attrs={"rank": len(norm.shape or ())})
        multiplier, offset = (_free_name(graph, f"{norm.name}.{role}") for role in ("multiplier", "offset"))
        return _replaced(graph, norm, affine, {multiplier: m, offset: o})
    weight = graph.consts[layer.inputs[1]].to(torch.float64)
    bias = graph.consts[layer.inputs[2]].to(torch.float64) if len(layer.inputs) > 2 else torch.zeros_like(m)
    names = (_folded_name(graph, layer, 1, "weight"), _folded_name(graph, layer, 2, "bias"))
    return _replaced(graph, norm, layer, {names[0]: scale_channels(weight, m, layer), names[1]: bias * m + o})


def _can_fold(graph: Graph, layer: Node) -> bool:
    """Whether a batch norm behind this node becomes part of its weight and bias."""
    if layer.op not in FOLDABLE or any(s not in graph.consts for s in layer.inputs[1:]):
        return False
    if layer.op == "linear" and len(layer.shape or ()) != 2:
        return False  # batch norm acts on axis 1, linear on the last
    return len(graph.out_edges[layer.name]) == 1


def _folded_name(graph: Graph, layer: Node, slot: int, role: str) -> str:
    """The name of a folded constant: that of the layer's own where only the layer reads it, else a new one."""
    if slot < len(layer.inputs) and len(graph.out_edges[layer.inputs[slot]]) == 1:
        return layer.inputs[slot]
    return _free_name(graph, f"{layer.name}.{role}")


def _free_name(graph: Graph, name: str) -> str:
    while name in graph.by_name:
        name += "_folded"
    return name


def _replaced(graph: Graph, norm: Node, new: Node, consts: Mapping[str, Tensor]) -> Graph:
    """The graph with a node in place of a batch norm.

    Args:
        new: the layer before the batch norm, or an affine with its name; it reads `consts` behind its first input.
        consts: float64; they take the place of nodes with their names.
    """
    made = {name: t.to(torch.float32) for name, t in consts.items()}
    sources = [*norm.inputs[1:], *(new.inputs[1:] if new.op != "affine" else ())]
    untrained = graph.untrained.union(made) if graph.untrained.issuperset(sources) else graph.untrained
    nodes: list[Node] = []
    for node in graph:
        if node.name == new.name:
            nodes += [Node(name, CONST, (), {}, tuple(t.shape)) for name, t in made.items()]
            nodes.append(replace(new, inputs=(new.inputs[0], *made)))
        elif node.name != norm.name and node.name not in made:
            nodes.append(replace(node, inputs=tuple(new.name if s == norm.name else s for s in node.inputs)))
    outputs = tuple(new.name if o == norm.name else o for o in graph.outputs)
    return replace(graph.with_nodes(nodes, outputs=outputs, consts={**graph.consts, **made}), untrained=untrained)
