"""What passes through an op unchanged: scales, and ranges."""

from __future__ import annotations

from torch import Tensor

from hago.graph import Graph
from hago.hardware import Hardware
from hago.ops import Ops
from hago.ops._integer import IntegerForm
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


def range_chain(graph: Graph, hardware: Hardware, topology: Topology, ops: Ops, name: str) -> tuple[str, ...]:
    """The nodes past which the range of a requantized output is taken, each the only reader of the one before:
    relus and poolings, since what those cut off need not be represented, and concatenations, since their
    operands need one scale.

    References:
        TPU-MLIR's backward calibration passes; TFLite's fused activations, and its converter, which gives all
        operands of CONCATENATION and its output the same scale.
    """
    found = []
    edges = graph.out_edges[name]
    while len(edges) == 1 and topology.nodes.get(edges[0].dst, False):
        name = edges[0].dst
        form = ops[graph[name].op].integer
        if form is None or not (form.within_hull and form.hides):
            break
        if form.slots != ("follow",) and not joins(form, hardware, graph[name].op):
            break
        found.append(name)
        edges = graph.out_edges[name]
    return tuple(found)


def joins(form: IntegerForm, hardware: Hardware, op: str) -> bool:
    """Whether an op puts operands of one scale together and changes nothing, whatever signature it takes."""
    descs = hardware.integer_descs(op)
    widths = {d.in_dtype(0).bits for d in descs}
    return form.slots == ("common",) and form.within_hull and len(widths) == 1 and descs[0].requantize_at == "edge"


def range_node(graph: Graph, hardware: Hardware, topology: Topology, ops: Ops, name: str) -> str:
    """The node whose range a requantized output should cover: the last of `range_chain`, or itself."""
    return (name, *range_chain(graph, hardware, topology, ops, name))[-1]
