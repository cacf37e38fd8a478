"""Topology: which nodes run in integers and which edges are quantized, and why.

The rule, node by node in order: a node is integer if the hardware has an integer signature that its
attributes fit, the user did not keep it float, and (it is a seed such as conv or linear, or one of
its inputs comes from an integer node, or the hardware has no float signature for it).
"""

from __future__ import annotations

import glob
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch

from hago.errors import HagoError, UnsupportedOp, did_you_mean
from hago.graph import CONST, INPUT, OUTPUT, Graph, Node
from hago.hardware import Hardware, OpDesc
from hago.numerics import is_power_of_two
from hago.ops import OPS, Ops
from hago.types import Edge


@dataclass(frozen=True, slots=True)
class Topology:
    """The RFC's node_conds and edge_conds, and the reason of each node.

    Args:
        nodes: whether each node is integer.
        edges: whether each in-edge of a node is quantized.
        reasons: why a node is what it is, in words.
    """

    nodes: Mapping[str, bool]
    edges: Mapping[Edge, bool]
    reasons: Mapping[str, str]


def matches(name: str, patterns: Sequence[str]) -> bool:
    """Whether any shell pattern matches (`"layer1.*"`, say)."""
    return any(fnmatchcase(name, p) for p in patterns)


def escape(name: str) -> str:
    """The pattern that matches one name only."""
    return glob.escape(name)


def check_patterns(patterns: Sequence[str], names: Sequence[str], what: str) -> None:
    """Refuse a pattern that matches nothing.

    Raises:
        HagoError: naming the pattern and the closest name.
    """
    for pattern in patterns:
        if not any(fnmatchcase(n, pattern) for n in names):
            raise HagoError(f"{what} pattern {pattern!r} matches no name.{did_you_mean(pattern, names)}")


def fitting_descs(graph: Graph, node: Node, hardware: Hardware, ops: Ops = OPS) -> tuple[OpDesc, ...]:
    """The integer signatures that the node's attributes and operands fit, preferred first."""
    return () if misfit(graph, node, hardware, ops) else hardware.integer_descs(node.op)


def misfit(graph: Graph, node: Node, hardware: Hardware, ops: Ops = OPS) -> str | None:
    """Why the node cannot be integer on this hardware, or None."""
    rule = hardware.rule(node.op, ops)
    if rule is None or rule.integer is None:
        return f"{node.op} has no integer form"
    if not hardware.integer_descs(node.op):
        return f"{hardware.name} lists no integer signature for {node.op}"
    if node.shape is None or any(graph[s].shape is None for s in node.inputs):
        return "an operand is not a tensor"
    if rule.integer.table and hardware.integer_descs(node.op)[0].requantize_at != "output":
        return f"{node.op} needs a signature that requantizes at the output"
    if rule.integer.table and any(graph[s].op != CONST for s in node.inputs[1:]):
        return "a table needs its other operands to be constants"
    why_not = rule.integer.fits(node.attrs, [graph[s].shape or () for s in node.inputs])
    if why_not is not None:
        return why_not
    if hardware.requantize.power_of_two and not (rule.integer.table or rule.integer.lands):
        scale = rule.integer.scale(node.attrs, [torch.ones((), dtype=torch.float64)] * len(node.inputs))
        if not is_power_of_two(scale):
            return f"it scales by {float(scale):.6g}, no power of two, and {hardware.name} only shifts"
    return None


def analyze(graph: Graph, hardware: Hardware, keep_float: Sequence[str] = (), ops: Ops = OPS) -> Topology:
    """The topology of a graph on a piece of hardware.

    Args:
        keep_float: shell patterns over node names that must stay float.

    Raises:
        UnsupportedOp: an op that the hardware refuses (`other_ops: reject`), with its node.
        HagoError: a pattern that matches no node.
    """
    ops = hardware.computes(ops)
    compute = [n for n in graph if n.op not in (INPUT, CONST)]
    check_patterns(keep_float, [n.name for n in compute], "keep_float")
    integer: dict[str, bool] = {}
    reasons: dict[str, str] = {}
    edges: dict[Edge, bool] = {}
    for node in graph:
        if node.op in (INPUT, CONST):
            integer[node.name], reasons[node.name] = False, node.op
            continue
        integer[node.name], reasons[node.name] = _decide(graph, node, hardware, integer, keep_float, ops)
        for edge in node.edges:
            rule = ops.get(node.op)
            plain = rule is None or rule.integer is None or rule.integer.slot(edge.slot) == "plain"
            edges[edge] = integer[node.name] and not plain
    return Topology(integer, edges, reasons)


def _decide(
    graph: Graph,
    node: Node,
    hardware: Hardware,
    integer: Mapping[str, bool],
    keep_float: Sequence[str],
    ops: Ops,
) -> tuple[bool, str]:
    why_not = misfit(graph, node, hardware, ops)
    has_float = bool(hardware.float_descs(node.op, fits=why_not is None))
    remedy = "List a signature for it, or other_ops: float32"
    if why_not is None and matches(node.name, keep_float):
        why_not, remedy = "kept float by the user", "List a float signature for it, or let it be integer"
    if why_not is not None:
        if not has_float:
            raise UnsupportedOp(
                f"node {node.name!r} ({node.op}) cannot run on {hardware.name}: {why_not}, and the "
                f"hardware takes no float {node.op}. {remedy}"
            )
        return False, why_not
    rule = ops[node.op]
    assert rule.integer is not None
    if rule.integer.seed:
        return True, "starts an integer region"
    if any(integer[s] for s in node.inputs):
        return True, "an input is integer"
    if not has_float:
        return True, f"{hardware.name} has no float {node.op}"
    return False, "no input is integer"


def crossings(graph: Graph, topology: Topology) -> list[Edge]:
    """Edges where values go from integer to float or back, constants aside."""
    found = []
    for edge in graph.edges:
        source = graph.source(edge)
        target = edge.dst != OUTPUT and topology.edges[edge]
        if graph[source].op != CONST and topology.nodes[source] != target:
            found.append(edge)
    return found
