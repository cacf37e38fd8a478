"""DoReFa-Net's quantizers on a Plan in training: weights through tanh, gradients rounded at random.

What a trained model ships are the integers of `dorefa_grid`; the tanh is gone. Activations that are never
negative take all the bits of their edge.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from hago.errors import HagoError
from hago.plan import Plan
from hago.qat.dorefa_grid import DoReFa, Levels, check_holds, held, is_weight, unit_threshold
from hago.qat.ranges import Range
from hago.types import Edge, QParams


@dataclass(frozen=True, slots=True, eq=False)
class Weight:
    """One constant that is quantized so.

    Args:
        levels: DoReFa's for it.
        bits: k.
        held: see `dorefa_grid.held`.
        ranges: of the edges it travels on; they follow the weight.
    """

    levels: Levels
    bits: int
    held: int
    ranges: tuple[Range, ...]

    def __call__(self, weight: Tensor) -> Tensor:
        """The quantized weight, with DoReFa's gradient; the ranges are set so that their grid is its own.

        Raises:
            HagoError: all weights are 0.
        """
        found = self.levels.quantized(weight, self.bits)
        with torch.no_grad():
            threshold = self.levels.step(weight, self.bits) * self.held
            for one in self.ranges:
                one.low.copy_((-threshold).expand_as(one.low))
                one.high.copy_(threshold.expand_as(one.high))
        return found


def dorefa_weights(
    plan: Plan, bits: Mapping[Edge, int], ranges: Mapping[str, Range], trainable: list[str], how: DoReFa
) -> dict[str, Weight]:
    """The weights of a Plan's convolutions, linear layers and products.

    Raises:
        HagoError: the hardware cannot hold the grid, or an edge has too few bits.
    """
    found: dict[str, Weight] = {}
    for name in trainable:
        edges = [e for e in plan.graph.out_edges[name] if e.dst in plan.nodes and is_weight(plan.graph, e, plan.ops)]
        if not edges:
            continue
        chosen = {bits[e] for e in edges}
        if len(chosen) > 1:
            raise HagoError(f"weight {name!r} has edges of {sorted(chosen)} bits; DoReFa's grid needs one number")
        for edge in edges:
            check_holds(plan.hardware, plan.nodes[edge.dst].operands[edge.slot])
        width = min(chosen)
        own = {id(r): r for e in edges if (r := ranges.get(str(e))) is not None}
        levels = Levels.of(how, name, plan.graph.consts[name])
        found[name] = Weight(levels, width - 1, held(plan.hardware, width), tuple(own.values()))
    return found


def set_activation(found: Range, target: QParams, scheme: str) -> None:
    """Make a range of values that are never negative the one that DoReFa clips to: [0, 1].

    Where the integers are signed, a bit of them is the sign.
    """
    with torch.no_grad():
        found.low.zero_()
        found.high.fill_(unit_threshold(target.qmax - int(target.zero_point.max()), scheme))
