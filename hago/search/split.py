"""Find what to split in a network, see `hago.correction.splitting`, before its channels are equalized.

All norms that can be computed once more for layers are split; `hago.search.correcting` drops those that equalization
leaves as they are.

Channels are put into parts where that is expected to lessen the error of the outputs most. Rounding to steps D adds
errors of variance D**2 / 12, which reach the outputs by their gradients g (`hago.search.gradients`), and D follows the
largest channel of a part: so the expected loss of a value in parts P is

    sum over parts of (D * largest of P / largest of all)**2 / 12 * sum over channels in P of E[g**2].

The values on the way from the first layer of a chain to the second count, and weights with one scale. Channels are
tried in the order of their sizes on each of these.

References:
    Z. Yuan et al., "RPTQ: Reorder-based Post-training Quantization for Large Language Models", arXiv:2304.01089, which
    clusters channels by their ranges; here gradients weigh them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from hago.arithmetic.types import Edge
from hago.correction import LAYERS, Chain, Splits, chains_of, channel_axis, norms_to_separate
from hago.graph import Graph
from hago.plan import Plan
from hago.search.equalize import TINY
from hago.search.squared_gradients import SquaredGradients

#: The most further parts of a chain.
MOST_PARTS: Final = 2
#: A part has at most this many channels, and at most a quarter of all.
MOST_CHANNELS: Final = 64
#: A further part is made if it takes away this share of the expected loss of the whole network.
LEAST_SHARE: Final = 0.01


@dataclass(frozen=True, slots=True)
class _Rounded:
    """What is rounded with one scale on the way through a chain.

    Args:
        sizes: float64 (channels,), the largest magnitudes.
        losses: float64 (channels,), the losses that errors of the present step cause.
    """

    sizes: Tensor
    losses: Tensor

    def expected(self, parts: Sequence[Tensor]) -> float:
        """The expected loss in parts, each given as indices of channels."""
        largest = float(self.sizes.max().clamp_min(TINY))
        return math.fsum(
            (float(self.sizes[p].max()) / largest) ** 2 * float(self.losses[p].sum()) for p in parts if len(p)
        )


def find_splits(graph: Graph, plan: Plan, measured: Callable[[], SquaredGradients], *, norms: bool) -> Splits:
    """The norms that can be computed once more for layers, and the channels that are better computed in parts.

    Args:
        plan: of the graph.
        measured: measures the graph with this plan; called if there are layers whose channels can be in parts.
        norms: whether norms are split.
    """
    layers = {n.name for n in graph if n.op in LAYERS and plan.target(Edge(n.name, 1)) is not None}
    apart = tuple(n for n in norms_to_separate(graph) if any(e.dst in layers for e in graph.out_edges[n]))
    chains = _apart_from_each_other(graph, [c for c in chains_of(graph) if {c.first, c.last} <= layers])
    if not chains:
        return Splits(apart if norms else ())
    losses, sizes = _measured(graph, plan, chains, measured())
    total = max(math.fsum(float(loss.sum()) for loss in losses.values()), TINY)
    channels = {}
    for chain in chains:
        rounded = [r for e in _edges(graph, chain) if (r := _rounded(graph, chain, e, losses, sizes)) is not None]
        parts = _parts(rounded, total) if rounded else ()
        if parts:
            channels[chain.last] = parts
    return Splits(apart if norms else (), channels)


def _apart_from_each_other(graph: Graph, chains: Sequence[Chain]) -> list[Chain]:
    """The chains that share no layer with one before."""
    taken: set[str] = set()
    chosen = []
    for chain in chains:
        if not taken & {chain.first, chain.last}:
            taken |= {chain.first, chain.last}
            chosen.append(chain)
    return chosen


def _edges(graph: Graph, chain: Chain) -> list[Edge]:
    """The edges that are rounded on the way: weights, and values between the layers."""
    return [Edge(chain.first, 1), *(Edge(n, 0) for n in chain.between), Edge(chain.last, 0), Edge(chain.last, 1)]


def _measured(
    graph: Graph, plan: Plan, chains: Sequence[Chain], measured: SquaredGradients
) -> tuple[dict[Edge, Tensor], dict[str, Tensor]]:
    """By edge that the plan rounds, the expected loss by channel of a chain (of other edges: in all), and by node
    between layers its largest magnitudes by channel."""
    axes = {e: _axis(graph, chain, e) for chain in chains for e in _edges(graph, chain)}
    between = {graph.source(e): axis for e, axis in axes.items() if e.slot == 0}
    losses = {}
    for edge in measured.edges:
        target, loss = plan.target(edge), measured.expected_loss(plan, edge)
        assert target is not None
        apart = target.scale.numel() == 1 and edge in axes
        losses[edge] = loss.movedim(axes[edge], 0).flatten(1).sum(1) if apart else loss.sum().reshape(1)
    sizes = {
        name: measured.largest[name].movedim(axis, 0).flatten(1).amax(1).to(torch.float64)
        for name, axis in between.items()
        if name in measured.largest
    }
    return losses, sizes


def _axis(graph: Graph, chain: Chain, edge: Edge) -> int:
    """The axis of the chain's channels on an edge."""
    if edge.slot == 1:
        return 0 if edge.dst == chain.first else 1
    return channel_axis(graph[chain.first])


def _rounded(
    graph: Graph, chain: Chain, edge: Edge, losses: dict[Edge, Tensor], sizes: dict[str, Tensor]
) -> _Rounded | None:
    """What is rounded on an edge of a chain with one scale; None if nothing is."""
    found = losses.get(edge)
    if found is None or found.numel() == 1:
        return None
    if edge.slot == 0:
        return _Rounded(sizes[graph.source(edge)], found)
    weight = graph.consts[graph.source(edge)]
    return _Rounded(weight.abs().movedim(_axis(graph, chain, edge), 0).flatten(1).amax(1).to(torch.float64), found)


def _parts(rounded: Sequence[_Rounded], total: float) -> tuple[tuple[int, ...], ...]:
    """The further parts of a chain: each is the one that lessens the expected loss most, if that is worth a part."""
    count = len(rounded[0].sizes)
    rest, parts = torch.arange(count), list[Tensor]()

    def loss(split: Sequence[Tensor]) -> float:
        return math.fsum(r.expected(split) for r in rounded)

    while len(parts) < MOST_PARTS:
        now = loss([rest, *parts])
        best, best_loss = None, now - LEAST_SHARE * total
        for r in rounded:
            order = rest[torch.sort(r.sizes[rest], descending=True, stable=True).indices]
            size = 1
            while size <= min(MOST_CHANNELS, len(rest) // 4):
                tried = loss([order[size:], order[:size], *parts])
                if tried < best_loss:
                    best, best_loss = order[:size], tried
                size *= 2
        if best is None:
            break
        parts.append(best.sort().values)
        rest = torch.tensor([c for c in rest.tolist() if c not in {*best.tolist()}])
    return tuple(tuple(part.tolist()) for part in parts)
