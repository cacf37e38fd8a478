"""Policies: which tensors of a model are fake-quantized, by hago's rule from the hardware or another system's.

A policy is a pure function of a graph and a piece of hardware. Wherever nodes can be kept float by
pattern, `policy:<name>` stands for those that the policy keeps float (a node's name has no colon).
"""

from __future__ import annotations

import glob
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from hago.errors import HagoError, as_strings, did_you_mean
from hago.graph import CONST, Graph
from hago.hardware import Hardware
from hago.ops import OPS, Ops
from hago.qat.dorefa_policy import dorefa_policy
from hago.qat.placement import Placement, Point
from hago.qat.tensorflow_policy import tensorflow_policy
from hago.space import build_space
from hago.topology import Topology, analyze

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


def place(policy: str | Policy, graph: Graph, hardware: Hardware, ops: Ops = OPS) -> Placement:
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
    """`hago.topology.analyze`, where `policy:<name>` may stand among the patterns.

    Raises:
        HagoError: an unknown policy, or a pattern that matches no node.
        UnsupportedOp: as `analyze`.
    """
    patterns: list[str] = []
    for pattern in as_strings(keep_float, "keep_float"):
        if pattern.startswith(PREFIX):
            patterns += map(glob.escape, place(pattern.removeprefix(PREFIX), graph, hardware, ops).keep_float)
        else:
            patterns.append(pattern)
    return analyze(graph, hardware, patterns, ops)
