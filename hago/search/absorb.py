"""Find which constant parts of channels to move into the biases behind them, see `hago.correction.absorption`.

One pass of the float model gives the mean and the standard deviation of every channel of a layer or norm whose channels
can be shifted; its bulk lies within three of these of the mean, and within its extremes. Behind a relu, a channel is
shifted by where its bulk begins, if that is above 0; else so that its bulk is symmetric around 0. A node is shifted
where the widest bulk, which the steps of the edges behind it follow, gets smaller.

References:
    M. Nagel et al., "Data-Free Quantization Through Weight Equalization and Bias Correction", ICCV 2019, section 4.1.3,
    take the mean minus three standard deviations behind a relu.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from hago.correction import Passage, Shifts, channel_axis, shiftable
from hago.graph import Graph, Node, run_real
from hago.plan import Plan
from hago.search.preparation import Prepared
from hago.search.squared_gradients import is_rounded

#: How many standard deviations around the mean count as the bulk of a channel.
BULK: Final = 3.0
#: A node is shifted if the widest bulk becomes smaller than this part of what it is.
LEAST_NARROWER: Final = 0.95


def find_absorption(prepared: Prepared, plan: Plan) -> Mapping[str, Shifts]:
    """The shifts that are expected to make steps smaller, by node.

    Args:
        plan: says which edges are rounded, and on which grids.
    """
    graph, found = prepared.graph, dict[str, Shifts]()
    passages = {
        name: passage
        for name, passage in shiftable(graph, prepared.hardware.known_ops).items()
        if _grids(graph, plan, passage)
    }
    for name, seen in _channel_moments(prepared, passages).items():
        passage = passages[name]
        low, high = seen.bulk()
        wanted = (low + high) / 2
        if passage.one_sided:
            wanted = torch.where((low > 0.0) & (seen.most <= passage.limit), low, 0.0)
            low, high = (end.clamp(0.0, passage.limit) for end in (low, high))
        shifts = Shifts.towards(wanted)
        shift = shifts.values()
        narrower = [
            _width(low - shift, high - shift, symmetric=of) < LEAST_NARROWER * _width(low, high, symmetric=of)
            for of in _grids(graph, plan, passage)
        ]
        if all(narrower):
            found[name] = shifts
    return found


def _grids(graph: Graph, plan: Plan, passage: Passage) -> set[bool]:
    """Of the edges with shifted values that a plan rounds, whether their grids are symmetric."""
    edges = [edge for name in passage.values for edge in graph.out_edges[name] if is_rounded(plan, edge)]
    targets = [target for edge in edges if (target := plan.target(edge)) is not None]
    return {bool(target.qmin < 0) and not bool(target.zero_point.any()) for target in targets}


def _width(low: Tensor, high: Tensor, *, symmetric: bool) -> float:
    """The width of the range of all channels, 0 included."""
    least, most = min(0.0, float(low.min())), max(0.0, float(high.max()))
    return 2 * max(-least, most) if symmetric else most - least


@dataclass(frozen=True, slots=True)
class _Moments:
    """What was seen of the channels of a value, each float64 (channels,).

    Args:
        least, most: the extremes.
        total, squares: the sums of values and of their squares.
        count: number of values of a channel.
    """

    least: Tensor
    most: Tensor
    total: Tensor
    squares: Tensor
    count: int

    @staticmethod
    def of(rows: Tensor) -> _Moments:
        """Of values (channels, n)."""
        least, most = rows.aminmax(dim=1)
        return _Moments(least, most, rows.sum(1), rows.square().sum(1), rows.shape[1])

    def __add__(self, other: _Moments) -> _Moments:
        return _Moments(
            torch.minimum(self.least, other.least),
            torch.maximum(self.most, other.most),
            self.total + other.total,
            self.squares + other.squares,
            self.count + other.count,
        )

    def bulk(self) -> tuple[Tensor, Tensor]:
        """Where most values of every channel begin and end."""
        mean = self.total / self.count
        reach = BULK * (self.squares / self.count - mean.square()).clamp_min(0.0).sqrt()
        return torch.maximum(self.least, mean - reach), torch.minimum(self.most, mean + reach)


def _channel_moments(prepared: Prepared, names: Collection[str]) -> dict[str, _Moments]:
    """What one pass over all samples sees of the channels of nodes."""
    found: dict[str, _Moments] = {}

    def see(node: Node, value: Any) -> None:
        if node.name in names:
            seen = _Moments.of(value.movedim(channel_axis(node), 0).flatten(1).to(torch.float64))
            found[node.name] = found[node.name] + seen if node.name in found else seen

    if names:
        for batch in prepared.batches:
            run_real(prepared.graph, batch.inputs, see, prepared.hardware.known_ops)
    return found
