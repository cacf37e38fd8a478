"""Equalization: channels of values divided by factors, and weights multiplied by them, so that a network computes the
same with ranges that are easier to quantize.

Factors are powers of 2**(1/16), and stored as whole exponents. In float, an equalized network differs from the original
by the rounding of its constants; where a factor is a power of two, not at all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

import torch
from torch import Tensor

from hago.correction.channels import FIXED, LAYERS, Channels, track_channels
from hago.errors import LogError
from hago.graph import Graph, Node
from hago.ops import OPS, Ops

#: Factors are powers of the n-th root of 2.
STEPS_PER_OCTAVE: Final = 16


def divide_channels(graph: Graph, channels: Channels, factors: Tensor, clamps: Sequence[str] = ()) -> Graph:
    """Divide the channels of all values by factors, in the constants that make and read them.

    Args:
        factors: float64 (channels.count,), by the number of a channel; 1 for FIXED.
        clamps: the clamps that get a limit for each channel, divided by its factor.
    """
    consts = dict(graph.consts)
    for name, found in channels.scalable.items():
        node, gives, reads = graph[name], factors[found.gives], factors[found.reads]
        weight, *others = (graph.consts[s] for s in node.inputs[1:])
        if node.op in LAYERS:
            ratio = weight_factors(node, weight.shape, reads, gives)
        else:
            ratio = (reads / gives if found.reads.numel() else 1 / gives).reshape(weight.shape)
        changed = [weight.to(torch.float64) * ratio, *(b.to(torch.float64) / gives.reshape(b.shape) for b in others)]
        for source, before, after in zip(node.inputs[1:], (weight, *others), changed, strict=True):
            consts[source] = after.to(before.dtype)
    nodes = [_with_limits(n, channels, factors) if n.name in clamps else n for n in graph]
    return replace(graph, nodes=tuple(nodes), consts=consts, corrected_from=graph.uncorrected)


def _with_limits(clamp: Node, channels: Channels, factors: Tensor) -> Node:
    """A clamp with a limit for each channel."""
    axis, numbers = channels.axis_of(clamp.name), channels.values[clamp.name]
    assert axis is not None
    limits = channels.clips[clamp.name] / factors[numbers.movedim(axis, 0).flatten(1)[:, 0]]
    attrs = {"limits": limits.tolist(), "axis": axis, "rank": numbers.ndim}
    return replace(clamp, op="channel_clamp", attrs=attrs)


def weight_factors(node: Node, shape: Sequence[int], reads: Tensor, gives: Tensor) -> Tensor:
    """The factors of a layer's weight whose operand is divided by `reads`, and whose value is divided by `gives`.

    Args:
        shape: of the weight.
        reads, gives: float64, one for each channel.

    Returns:
        float64, of a shape that broadcasts against the weight.
    """
    out_axis, in_axis = LAYERS[node.op]
    groups = node.attrs.get("groups", 1)
    per_output = gives.reciprocal().reshape(_along(out_axis, len(shape)))
    if groups == 1:
        return per_output * reads.reshape(_along(in_axis, len(shape)))
    per_row = reads.reshape(groups, -1).repeat_interleave(shape[0] // groups, 0)
    return per_output * per_row.reshape(*per_row.shape, *[1] * (len(shape) - 2))


def _along(axis: int, dims: int) -> list[int]:
    return [-1 if d == axis else 1 for d in range(dims)]


def steps_by_node(channels: Channels, steps: Tensor) -> dict[str, tuple[int, ...]]:
    """Exponents by node, as they are stored: of nodes whose channels are not all left as they are.

    Args:
        steps: int64 (channels.count,), by the number of a channel.
    """
    by_node = {name: steps[found.gives] for name, found in channels.scalable.items()}
    return {name: tuple(of.tolist()) for name, of in by_node.items() if bool(of.any())}


def equalized(graph: Graph, stored: Mapping[str, Sequence[int]], clamps: Sequence[str] = (), ops: Ops = OPS) -> Graph:
    """The graph with stored exponents applied.

    Args:
        clamps: of `divide_channels`.

    Raises:
        LogError: they do not fit the graph; names the node.
    """
    channels = track_channels(graph, ops)
    steps = torch.zeros(channels.count, dtype=torch.int64)
    for name, of in stored.items():
        found = channels.scalable.get(name)
        where = f"at $.corrections.equalization[{name!r}]"
        if found is None:
            raise LogError(f"{where}: got a node that is no layer whose channels can be divided; it was edited")
        if len(of) != len(found.gives):
            raise LogError(f"{where}: got {len(of)} exponents, expected {len(found.gives)}; it was edited")
        steps[found.gives] = torch.tensor(of)
    steps[: FIXED + 1] = 0
    if {k: tuple(v) for k, v in stored.items()} != steps_by_node(channels, steps):
        raise LogError("at $.corrections.equalization: got factors that do not keep what the network computes; edited")
    for name in clamps:
        if name not in channels.clips or channels.axis_of(name) is None:
            raise LogError(
                f"at $.corrections.clamps: {name!r} is no clamp that can have a limit for each channel; edited"
            )
    return divide_channels(graph, channels, factors_of(steps), clamps)


def factors_of(steps: Tensor) -> Tensor:
    """The factors of exponents, float64; equal on every machine, since a power of two is exact."""
    roots = torch.tensor([2.0 ** (n / STEPS_PER_OCTAVE) for n in range(STEPS_PER_OCTAVE)], dtype=torch.float64)
    octaves = torch.div(steps, STEPS_PER_OCTAVE, rounding_mode="floor")
    return torch.ldexp(roots[steps - STEPS_PER_OCTAVE * octaves], octaves)
