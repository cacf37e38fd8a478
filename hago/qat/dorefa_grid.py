"""DoReFa-Net's levels as integers: what a Plan holds, in a search and at the end of training.

The integers of a k-bit weight are the odd numbers from -(2**k - 1) to 2**k - 1, so they take k + 1 bits:
an edge of b bits holds DoReFa weights of b - 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from hago.errors import HagoError
from hago.graph import CONST, OUTPUT, Graph
from hago.hardware import Hardware
from hago.ops import Ops
from hago.qat.dorefa import DoReFa, quantize_weight
from hago.schemes import TWO_SIDED
from hago.types import Edge, QParams

#: The largest weight in its unit, where sizes are relative: tanh is linear there to 2 %, as it is on the
#: weights of layers that a batch norm follows, for which DoReFa-Net was made.
LARGEST: Final = 0.25


@dataclass(frozen=True, slots=True)
class Levels:
    """The levels of one weight.

    Args:
        name: of the constant.
        unit: what weights are relative to.
    """

    how: DoReFa
    name: str
    unit: float = 1.0

    @staticmethod
    def of(how: DoReFa, name: str, start: Tensor) -> Levels:
        """Those of a constant that training, or a search, starts from."""
        largest = float(start.abs().max()) if how.relative and start.numel() else 0.0
        return Levels(how, name, largest / LARGEST if largest else 1.0)

    def quantized(self, weight: Tensor, bits: int) -> Tensor:
        """The weight on its levels, with DoReFa's gradient.

        Args:
            bits: k.

        Raises:
            HagoError: all weights are 0.
        """
        try:
            # the mean of 1 bit sums in the order of memory
            within = weight.contiguous() / self.unit
            return self.unit * quantize_weight(within, bits, self.how.variant, self.how.zeros)
        except HagoError as error:
            raise HagoError(f"weight {self.name!r}: {error}") from None

    @torch.no_grad()
    def step(self, weight: Tensor, bits: int) -> Tensor:
        """What the integer 1 stands for: half the distance of two levels; float64."""
        within = weight.contiguous() / self.unit
        if bits == 1:
            top = within.abs().mean().to(torch.float64)
        elif self.how.variant == "tensorpack":
            top = torch.ones((), dtype=torch.float64)
        else:
            top = torch.tanh(within).abs().max().to(torch.float64)
        return self.unit * top / ((1 << bits) - 1)


def held(hardware: Hardware, bits: int) -> int:
    """The threshold of a weight over its scale: of 2**(b-1) or 2**(b-1) - 1, what the hardware's scheme has."""
    return (1 << (bits - 1)) - (hardware.weight.scheme not in ("hago", "hago_affine"))


def unit_threshold(levels: int, scheme: str) -> float:
    """The threshold of activations in [0, 1] on integers from 0 to `levels`."""
    return (levels + 1) / levels if scheme in ("hago", "hago_affine") else 1.0


def is_weight(graph: Graph, edge: Edge, ops: Ops) -> bool:
    """Whether an edge brings a layer its weight, a constant."""
    rule = None if edge.dst == OUTPUT else ops.get(graph[edge.dst].op)
    weight = None if rule is None or rule.integer is None else rule.integer.weight
    return weight is not None and weight.slot == edge.slot and graph[graph.source(edge)].op == CONST


def check_holds(hardware: Hardware, target: QParams | None = None) -> None:
    """Refuse hardware whose weights cannot be DoReFa's.

    Args:
        target: a weight's qparams, where they are known.

    Raises:
        HagoError: it cannot hold the grid.
    """
    signed = target is None or target.dtype.signed
    if hardware.weight.scheme in TWO_SIDED or hardware.requantize.power_of_two or not signed:
        raise HagoError(
            f"{hardware.name} cannot hold DoReFa's weights: they need a symmetric scheme, signed integers and "
            "scales that are no powers of two"
        )
