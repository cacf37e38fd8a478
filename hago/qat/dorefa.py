"""DoReFa-Net's quantizers on a Plan in training: weights through tanh, gradients rounded at random.

What a trained model ships are the integers of `dorefa_grid`; the tanh is gone. Activations that are never
negative take all the bits of their edge.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from hago.arithmetic.types import Edge, QParams
from hago.emulation.dorefa import DoReFa
from hago.errors import HagoError
from hago.plan.dorefa_weights import DoReFaLevels, check_holds, held, is_layer_weight, unit_threshold
from hago.plan.plan import Plan
from hago.qat.batch_norm import FoldedNorm
from hago.qat.ranges import TrainableRange


@dataclass(frozen=True, slots=True, eq=False)
class Weight:
    """One constant that is quantized so.

    Args:
        levels: DoReFa's for it.
        bits: k.
        held: see `dorefa_grid.held`.
        ranges: of the edges it travels on; they follow the weight.
    """

    levels: DoReFaLevels
    bits: int
    held: int
    ranges: tuple[TrainableRange, ...]

    def __call__(self, weight: Tensor, multiplier: Tensor | None = None) -> Tensor:
        """The quantized weight, with DoReFa's gradient; the ranges are set so that their grid is its own.

        Args:
            multiplier: (channels,), of a batch norm that will be folded in; the ranges are for the product.

        Raises:
            HagoError: all weights are 0.
        """
        found = self.levels.quantized(weight, self.bits)
        with torch.no_grad():
            threshold = self.levels.step(weight, self.bits) * self.held
            if multiplier is not None:
                threshold = threshold * multiplier.to(torch.float64).abs()
            for one in self.ranges:
                one.low.copy_((-threshold).expand_as(one.low))
                one.high.copy_(threshold.expand_as(one.high))
        return found


def dorefa_weights(
    plan: Plan,
    bits: Mapping[Edge, int],
    ranges: Mapping[str, TrainableRange],
    starts: Mapping[str, Tensor],
    how: DoReFa,
) -> dict[str, Weight]:
    """The weights of a Plan's convolutions, linear layers and products.

    Args:
        starts: what constants are trained, and what they start from.

    Raises:
        HagoError: the hardware cannot hold the grid, or an edge has too few bits.
    """
    found: dict[str, Weight] = {}
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
            check_holds(plan.hardware, plan.target(edge))
        width = min(chosen)
        own = {id(r): r for e in edges if (r := ranges.get(str(e))) is not None}
        levels = DoReFaLevels.of(how, name, start)
        found[name] = Weight(levels, width - 1, held(plan.hardware, width), tuple(own.values()))
    return found


def squash_norms(
    plan: Plan, bits: Mapping[Edge, int], ranges: Mapping[str, TrainableRange], norms: Iterable[FoldedNorm], how: DoReFa
) -> None:
    """Quantize the weights of layers with live batch norms before the batch norm, as DoReFa-Net has them.

    Raises:
        HagoError: the hardware has one scale for all channels, which cannot hold the folded levels.
    """
    for norm in norms:
        name = norm.site.folded[0]
        made = dorefa_weights(plan, bits, ranges, {name: norm.part("weight").detach()}, how).get(name)
        if made is None:
            continue
        if any(r.low.numel() != norm.mean.numel() for r in made.ranges):
            raise HagoError(
                f"{plan.hardware.name} has one scale for all channels of a weight, so it cannot hold DoReFa's levels "
                f"times the batch norm {norm.site.norm.name!r}; use norms='frozen'"
            )
        norm.squash = made


def set_activation(found: TrainableRange, target: QParams, scheme: str) -> None:
    """Make a range of values that are never negative the one that DoReFa clips to: [0, 1].

    Where the integers are signed, a bit of them is the sign.
    """
    with torch.no_grad():
        found.low.zero_()
        found.high.fill_(unit_threshold(target.qmax - int(target.zero_point.max()), scheme))
