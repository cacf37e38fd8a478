"""DoReFa-Net's weights as integers of a Plan, in a search and in training.

The integers of a k-bit weight are the odd numbers from -(2**k - 1) to 2**k - 1, so they take k + 1 bits: an edge of b
bits holds DoReFa weights of b - 1.

`plan.threshold_sources.estimated_resolver` makes a `DoReFaWeights` and a `DoReFaThresholds` if the estimator is
DoReFa's. Every point of a search then has its weights on DoReFa's levels, without training; training with the scheme of
the same name (`qat.dorefa`) starts from the same integers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from hago.arithmetic.numerics import quantize
from hago.arithmetic.schemes import TWO_SIDED, Grid
from hago.arithmetic.types import Edge, QParams
from hago.emulation.dorefa import DOREFAS, DoReFa, quantize_weight
from hago.errors import HagoError
from hago.graph import CONST, OUTPUT, Graph
from hago.hardware import Hardware
from hago.ops import Ops
from hago.plan.operands import ThresholdSource
from hago.plan.topology import weight_edge

#: The largest weight after division by its unit, in schemes that are relative to the size of the weights. Up to there
#: tanh is linear to 2 %, as it is on the weights of layers that a batch norm follows, for which DoReFa-Net was made.
LARGEST_UNIT_WEIGHT: Final = 0.25


@dataclass(frozen=True, slots=True)
class DoReFaLevels:
    """The levels of one weight: the values that DoReFa's quantizer gives.

    Args:
        how: the variant of the scheme.
        name: name of the constant.
        unit: the unit of the weights, by which they are divided first.
    """

    how: DoReFa
    name: str
    unit: float = 1.0

    @staticmethod
    def of(how: DoReFa, name: str, start: Tensor) -> DoReFaLevels:
        """The levels of a constant that training or a search starts from."""
        largest = float(start.abs().max()) if how.relative and start.numel() else 0.0
        return DoReFaLevels(how, name, largest / LARGEST_UNIT_WEIGHT if largest else 1.0)

    def quantized(self, weight: Tensor, bits: int) -> Tensor:
        """The weight on its levels, with DoReFa's gradient.

        Args:
            bits: k.

        Raises:
            HagoError: all weights are 0.
        """
        try:
            # contiguous, since the mean that 1 bit takes is summed in the order of memory
            normalized = weight.contiguous() / self.unit
            return self.unit * quantize_weight(normalized, bits, self.how.variant, self.how.zeros)
        except HagoError as error:
            if self.how.zeros == "raise" and not bool(weight.any()):
                raise HagoError(
                    f"weight {self.name!r} is all 0, which DoReFa cannot scale; keep its layer float (keep_float)"
                ) from None
            raise HagoError(f"weight {self.name!r}: {error}") from None

    @torch.no_grad()
    def step(self, weight: Tensor, bits: int) -> Tensor:
        """The real value of the integer 1: half the distance of two levels; float64."""
        normalized = weight.contiguous() / self.unit
        if bits == 1:
            top = normalized.abs().mean().to(torch.float64)
        elif self.how.variant == "tensorpack":
            top = torch.ones((), dtype=torch.float64)
        else:
            top = torch.tanh(normalized).abs().max().to(torch.float64)
        return self.unit * top / ((1 << bits) - 1)


def threshold_to_scale(hardware: Hardware, bits: int) -> int:
    """The ratio of a weight's threshold to its scale at `bits` bits: 2**(bits-1), or 2**(bits-1) - 1, by the scheme of
    the hardware."""
    return (1 << (bits - 1)) - (hardware.weight.scheme not in ("hago", "hago_affine"))


def unit_threshold(levels: int, scheme: str) -> float:
    """The threshold of activations in [0, 1] on integers from 0 to `levels`."""
    return (levels + 1) / levels if scheme in ("hago", "hago_affine") else 1.0


def is_layer_weight(graph: Graph, edge: Edge, ops: Ops) -> bool:
    """Whether a layer reads its weight, a constant, on this edge."""
    is_weight = edge.dst != OUTPUT and weight_edge(graph[edge.dst], ops) == edge
    return is_weight and graph[graph.source(edge)].op == CONST


def check_dorefa_hardware(hardware: Hardware, target: QParams | None = None) -> None:
    """Check that a piece of hardware can represent DoReFa's weights.

    Args:
        target: a weight's qparams, where they are known.

    Raises:
        HagoError: it cannot.
    """
    signed = target is None or target.dtype.signed
    if any(d.groups for descs in hardware.ops.values() for d in descs):
        raise HagoError(f"{hardware.name} has scales for groups of weights; DoReFa's weights have one for the tensor")
    if hardware.weight.scheme in TWO_SIDED or hardware.requantize.power_of_two or not signed:
        raise HagoError(
            f"{hardware.name} cannot hold DoReFa's weights: they need a symmetric scheme, signed integers and "
            "scales that are no powers of two"
        )


# ---------------------------------------------------------------- in a search
class DoReFaWeights:
    """The `constants` of a Resolver: gives the integers of a graph's weights on DoReFa's levels.

    Args:
        scheme: a name in DOREFAS.

    Raises:
        HagoError: the hardware cannot hold them.
    """

    def __init__(self, graph: Graph, hardware: Hardware, scheme: str, ops: Ops) -> None:
        self.how: DoReFa = DOREFAS[scheme]
        self._graph, self._hardware = graph, hardware
        sources = {graph.source(e) for e in graph.edges if is_layer_weight(graph, e, ops)}
        self._levels = {name: DoReFaLevels.of(self.how, name, graph.consts[name]) for name in sorted(sources)}
        check_dorefa_hardware(hardware)

    def __call__(self, name: str, target: QParams) -> Tensor | None:
        """The centered integers of a weight, float64; None for other constants.

        Raises:
            HagoError: all weights are 0, or they have more bits than DoReFa's form has.
        """
        levels = self._levels.get(name)
        if levels is None:
            return None
        check_dorefa_hardware(self._hardware, target)
        weight = levels.quantized(self._graph.consts[name], target.qmax.bit_length())
        return quantize(weight.to(torch.float64), target, self._hardware.requantize.rounding)

    def threshold(self, name: str, bits: int) -> Tensor | None:
        """The threshold whose grid of `bits` bits is DoReFa's; None for a constant that is no weight."""
        levels = self._levels.get(name)
        if levels is None:
            return None
        return levels.step(self._graph.consts[name], bits - 1) * threshold_to_scale(self._hardware, bits)


class DoReFaThresholds:
    """A ThresholdSource with the thresholds of weights from DoReFaWeights, and all others from another source.

    Args:
        inner: the other source.
    """

    def __init__(self, weights: DoReFaWeights, inner: ThresholdSource, graph: Graph) -> None:
        self._weights, self._inner, self._graph = weights, inner, graph

    def signed(self, key: str, source: str) -> bool:
        """Whether values were ever negative, from the other source."""
        return self._inner.signed(key, source)

    def __call__(self, key: str, source: str, grid: Grid, channel_axis: int | None) -> tuple[Tensor, Tensor]:
        """(lo, hi); those of a weight are symmetric and equal for all channels."""
        threshold = self._weights.threshold(source, grid.bits)
        if threshold is not None:
            weight = self._graph.consts[source]
            end = threshold.expand(grid.thresholds_of(weight.shape, channel_axis)).clone()
            return -end, end
        low, high = self._inner(key, source, grid, channel_axis)
        const = source in self._graph.consts
        if self._weights.how.relative or const or self.signed(key, source) or grid.bits > 16:
            return low, high
        has_no_sign_bit = grid.scheme in TWO_SIDED or not grid.signed
        levels = (1 << (grid.bits if has_no_sign_bit else grid.bits - 1)) - 1
        return torch.zeros_like(high), torch.full_like(high, unit_threshold(levels, grid.scheme))


def dorefa_scheme_of(made_by: Any) -> str | None:
    """The scheme of the weights in a strategy's `made_by`: a name in DOREFAS, or None for the nearest integers."""
    scheme = made_by.get("weights")
    return scheme if isinstance(scheme, str) and scheme in DOREFAS else None
