"""DoReFa-Net's quantizers on a Plan in training: of weights, which pass through tanh, and of activations.

`QatModel` calls `dorefa_weights` and `set_norm_quantizers` when it is made; `hago.qat.prepare` calls `set_activation`.
A trained model ships the integers of `hago.plan.dorefa_weights`, without the tanh. Activations that are never negative
use all the bits of their edge.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from hago.arithmetic.types import Edge, QParams
from hago.emulation.dorefa import DoReFa
from hago.errors import HagoError
from hago.plan import Plan
from hago.plan.dorefa_weights import (
    DoReFaLevels,
    check_dorefa_hardware,
    is_layer_weight,
    threshold_to_scale,
    unit_threshold,
)
from hago.qat.batch_norm import FoldedNorm
from hago.qat.ranges import TrainableRange


@dataclass(frozen=True, slots=True, eq=False)
class DoReFaWeight:
    """The quantizer of one weight, which also sets the ranges of its edges; QatModel calls it in every forward pass.

    Args:
        levels: DoReFa's levels of the weight.
        bits: DoReFa's k, one less than the bits of the edges.
        held: see `hago.plan.dorefa_weights.threshold_to_scale`.
        ranges: of the edges that read the weight; they are set so that the integers are DoReFa's.
    """

    levels: DoReFaLevels
    bits: int
    held: int
    ranges: tuple[TrainableRange, ...]

    def __call__(self, weight: Tensor, multiplier: Tensor | None = None) -> Tensor:
        """Quantize the weight, with DoReFa's gradient, and set the ranges to its grid.

        Args:
            multiplier: (channels,), of a batch norm that will be folded in; the ranges are set for the product.

        Raises:
            HagoError: all weights are 0.
        """
        quantized = self.levels.quantized(weight, self.bits)
        with torch.no_grad():
            threshold = self.levels.step(weight, self.bits) * self.held
            if multiplier is not None:
                threshold = threshold * multiplier.to(torch.float64).abs()
            for trained in self.ranges:
                trained.low.copy_((-threshold).expand_as(trained.low))
                trained.high.copy_(threshold.expand_as(trained.high))
        return quantized


def dorefa_weights(
    plan: Plan,
    bits: Mapping[Edge, int],
    ranges: Mapping[str, TrainableRange],
    starts: Mapping[str, Tensor],
    options: DoReFa,
) -> dict[str, DoReFaWeight]:
    """The quantizers of the weights of a Plan's convolutions, linear layers and products, by constant.

    Args:
        bits: of every edge.
        ranges: by the key of the threshold.
        starts: the constants that are trained, with the values that training starts from.
        options: the options of DoReFa-Net.

    Raises:
        HagoError: the hardware cannot hold the grid, or an edge has too few bits.
    """
    quantizers: dict[str, DoReFaWeight] = {}
    for name, start in starts.items():
        edges = [
            e
            for e in plan.graph.out_edges[name]
            if plan.target(e) is not None and is_layer_weight(plan.graph, e, plan.ops)
        ]
        if not edges:
            continue
        chosen = {bits[e] for e in edges}
        if len(chosen) > 1:
            raise HagoError(f"weight {name!r} has edges of {sorted(chosen)} bits; DoReFa's grid needs one number")
        for edge in edges:
            check_dorefa_hardware(plan.hardware, plan.target(edge))
        width = min(chosen)
        distinct = {id(r): r for e in edges if (r := ranges.get(str(e))) is not None}
        levels = DoReFaLevels.of(options, name, start)
        quantizers[name] = DoReFaWeight(
            levels, width - 1, threshold_to_scale(plan.hardware, width), tuple(distinct.values())
        )
    return quantizers


def set_norm_quantizers(
    plan: Plan,
    bits: Mapping[Edge, int],
    ranges: Mapping[str, TrainableRange],
    norms: Iterable[FoldedNorm],
    options: DoReFa,
) -> None:
    """Give live batch norms a quantizer of their layer's weight, which is applied before they are folded in.

    Raises:
        HagoError: the hardware has one scale for all channels, which cannot represent the folded levels.
    """
    for norm in norms:
        name = norm.site.folded[0]
        quantizer = dorefa_weights(plan, bits, ranges, {name: norm.weight.detach()}, options).get(name)
        if quantizer is None:
            continue
        if any(r.low.numel() != norm.mean.numel() for r in quantizer.ranges):
            raise HagoError(
                f"{plan.hardware.name} has one scale for all channels of a weight, so it cannot hold DoReFa's levels "
                f"times the batch norm {norm.site.norm.name!r}; use norms='frozen'"
            )
        norm.quantizer = quantizer


def set_activation(activation: TrainableRange, target: QParams, scheme: str) -> None:
    """Set the range of an activation that is never negative to the one to which DoReFa clips, [0, 1].

    If the integers are signed, the sign takes one of their bits.
    """
    with torch.no_grad():
        activation.low.zero_()
        activation.high.fill_(unit_threshold(target.qmax - int(target.zero_point.max()), scheme))
