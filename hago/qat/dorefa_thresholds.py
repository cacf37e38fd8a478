"""DoReFa-Net's quantizers in a search: every point's weights on DoReFa's levels of its bits, without training.

They are those that training with the scheme of the same name starts from, integer for integer.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hago.graph import Graph
from hago.hardware import Hardware
from hago.numerics import quantize
from hago.operands import ThresholdSource
from hago.ops import Ops
from hago.qat.dorefa import DOREFAS, DoReFa
from hago.qat.dorefa_grid import Levels, check_holds, held, is_weight, unit_threshold
from hago.schemes import TWO_SIDED, Grid
from hago.types import QParams


class DoReFaWeights:
    """The integers of a graph's weights; for a Resolver.

    Args:
        scheme: a name in DOREFAS.

    Raises:
        HagoError: the hardware cannot hold them.
    """

    def __init__(self, graph: Graph, hardware: Hardware, scheme: str, ops: Ops) -> None:
        self.how: DoReFa = DOREFAS[scheme]
        self._graph, self._hardware = graph, hardware
        sources = {graph.source(e) for e in graph.edges if is_weight(graph, e, ops)}
        self._levels = {name: Levels.of(self.how, name, graph.consts[name]) for name in sorted(sources)}
        check_holds(hardware)

    def __call__(self, name: str, target: QParams) -> Tensor | None:
        """The centered integers of a weight, float64; None for other constants.

        Raises:
            HagoError: all weights are 0, or they have more bits than DoReFa's form has.
        """
        levels = self._levels.get(name)
        if levels is None:
            return None
        check_holds(self._hardware, target)
        found = levels.quantized(self._graph.consts[name], target.qmax.bit_length())
        return quantize(found.to(torch.float64), target, self._hardware.requantize.rounding)

    def threshold(self, name: str, bits: int) -> Tensor | None:
        """The threshold whose grid of `bits` bits is DoReFa's; None for what is no weight."""
        levels = self._levels.get(name)
        if levels is None:
            return None
        return levels.step(self._graph.consts[name], bits - 1) * held(self._hardware, bits)


class DoReFaThresholds:
    """A ThresholdSource: weights as DoReFaWeights has them, the rest as another source says.

    Args:
        inner: of thresholds, and of which values are negative.
    """

    def __init__(self, weights: DoReFaWeights, inner: ThresholdSource, graph: Graph) -> None:
        self._weights, self._inner, self._graph = weights, inner, graph

    def signed(self, key: str, source: str) -> bool:
        """As the other source says."""
        return self._inner.signed(key, source)

    def __call__(self, key: str, source: str, grid: Grid, channel_axis: int | None) -> tuple[Tensor, Tensor]:
        """Weights: symmetric, one number for all channels."""
        found = self._weights.threshold(source, grid.bits)
        if found is not None:
            end = found.expand(1 if channel_axis is None else self._graph.consts[source].shape[channel_axis]).clone()
            return -end, end
        low, high = self._inner(key, source, grid, channel_axis)
        const = source in self._graph.consts
        if self._weights.how.relative or const or self.signed(key, source) or grid.bits > 16:
            return low, high
        whole = grid.scheme in TWO_SIDED or not grid.signed
        levels = (1 << (grid.bits if whole else grid.bits - 1)) - 1
        return torch.zeros_like(high), torch.full_like(high, unit_threshold(levels, grid.scheme))


def dorefa_made(made_by: Any) -> str | None:
    """What a strategy says of its weights: a name in DOREFAS, or None where they are the nearest integers."""
    said = made_by.get("weights")
    return said if isinstance(said, str) and said in DOREFAS else None
