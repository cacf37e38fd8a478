"""What passes through an op unchanged: scales, and ranges."""

from __future__ import annotations

from torch import Tensor

from hago.graph import Graph
from hago.ops import Ops
from hago.ops._rule import IntegerForm
from hago.topology import Topology
from hago.types import DType, QParams


def varies_along(scale: Tensor, ndim: int) -> tuple[int, ...]:
    """The axes of an `ndim`-dimensional value along which a scale varies."""
    return tuple(ndim - scale.ndim + d for d, size in enumerate(scale.shape) if size > 1)


def crosses(form: IntegerForm, scale: Tensor, ndim: int) -> bool:
    """Whether an op with this form may take a value of `ndim` axes with this scale as it is."""
    axes = varies_along(scale, ndim)
    return not axes or form.crosses == "all" or (form.crosses == "axis1" and axes == (1,))


def passes(form: IntegerForm, source: QParams, dtype: DType, ndim: int) -> bool:
    """Whether a `follow` operand needs no requantization."""
    return source.dtype == dtype and crosses(form, source.scale, ndim)


def range_node(graph: Graph, topology: Topology, ops: Ops, name: str) -> str:
    """The node whose range a requantized output should cover: past a relu or pooling that alone
    reads it, since what those cut off need not be represented.

    References:
        TPU-MLIR's backward calibration passes; TFLite's fused activations.
    """
    edges = graph.out_edges[name]
    while len(edges) == 1 and topology.nodes.get(edges[0].dst, False):
        form = ops[graph[edges[0].dst].op].integer
        if form is None or form.slots != ("follow",) or not (form.within_hull and form.hides):
            break
        name = edges[0].dst
        edges = graph.out_edges[name]
    return name
