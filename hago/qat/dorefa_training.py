"""DoReFa-Net's quantizers on a Plan: weights through tanh, activations in [0, 1], gradients rounded at random.

The integers of a k-bit weight are the odd numbers from -(2**k - 1) to 2**k - 1, so they take k + 1 bits:
an edge of b bits holds DoReFa weights of b - 1. What a trained model ships are these integers; the tanh
is gone. Activations that are never negative take all the bits of their edge.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from hago.errors import HagoError
from hago.plan import Plan
from hago.qat.dorefa import Variant, Zeros, quantize_gradient, quantize_weight
from hago.qat.ranges import Range
from hago.schemes import TWO_SIDED
from hago.types import Edge, QParams


@dataclass(frozen=True, slots=True)
class DoReFa:
    """Options of training with DoReFa-Net's quantizers.

    Args:
        variant, zeros: of `dorefa.quantize_weight`.
        gradient_bits: of the gradients of convolutions and linear layers; 32 leaves them alone.
        seed: of the noise that rounds gradients.

    References:
        Zhou et al., arXiv:1606.06160.
    """

    variant: Variant = "tensorpack"
    zeros: Zeros = "raise"
    gradient_bits: int = 32
    seed: int = 0

    def gradients(self, step: int) -> Callable[[Tensor], Tensor] | None:
        """What rounds the gradients of one training pass; None where nothing does."""
        if self.gradient_bits == 32:
            return None
        generator = torch.Generator().manual_seed((self.seed * 1_000_003 + step) % (1 << 62))
        return lambda x: quantize_gradient(x, self.gradient_bits, generator=generator)


@dataclass(frozen=True, slots=True, eq=False)
class Weight:
    """One constant that is quantized so.

    Args:
        name: of the constant.
        bits: k.
        held: what the edge's integers are `2**(b-1)` or `2**(b-1) - 1` of, as the hardware's scheme has it:
            the threshold over the scale.
        ranges: of the edges it travels on; they follow the weight.
    """

    how: DoReFa
    name: str
    bits: int
    held: int
    ranges: tuple[Range, ...]

    def __call__(self, weight: Tensor) -> Tensor:
        """The quantized weight, with DoReFa's gradient; the ranges are set so that their grid is its own.

        Raises:
            HagoError: all weights are 0.
        """
        try:
            found = quantize_weight(weight, self.bits, self.how.variant, self.how.zeros)
        except HagoError as error:
            raise HagoError(f"weight {self.name!r}: {error}") from None
        with torch.no_grad():
            top = found.abs().max().to(torch.float64) if self.bits == 1 else self._top(weight)
            threshold = top / ((1 << self.bits) - 1) * self.held
            for one in self.ranges:
                one.low.copy_((-threshold).expand_as(one.low))
                one.high.copy_(threshold.expand_as(one.high))
        return found

    def _top(self, weight: Tensor) -> Tensor:
        if self.how.variant == "tensorpack":
            return torch.ones((), dtype=torch.float64)
        return torch.tanh(weight).abs().max().to(torch.float64)


def dorefa_weights(
    plan: Plan, bits: Mapping[Edge, int], ranges: Mapping[str, Range], trainable: list[str], how: DoReFa
) -> dict[str, Weight]:
    """The weights of a Plan's convolutions, linear layers and products.

    Raises:
        HagoError: the hardware cannot hold the grid, or an edge has too few bits.
    """
    found: dict[str, Weight] = {}
    for name in trainable:
        edges = [e for e in plan.graph.out_edges[name] if _is_weight(plan, e)]
        if not edges:
            continue
        chosen = {bits[e] for e in edges}
        targets = [plan.nodes[e.dst].operands[e.slot] for e in edges]
        if len(chosen) > 1:
            raise HagoError(f"weight {name!r} has edges of {sorted(chosen)} bits; DoReFa's grid needs one number")
        scheme, held = plan.hardware.weight.scheme, 1 << (min(chosen) - 1)
        signed = all(t is not None and t.dtype.signed for t in targets)
        if scheme in TWO_SIDED or plan.hardware.requantize.power_of_two or not signed:
            raise HagoError(
                f"{plan.hardware.name} cannot hold DoReFa's weights: they need a symmetric scheme, signed integers and "
                "scales that are no powers of two"
            )
        own = {id(r): r for e in edges if (r := ranges.get(str(e))) is not None}
        found[name] = Weight(how, name, min(chosen) - 1, held - (scheme == "symmetric"), tuple(own.values()))
    return found


def _is_weight(plan: Plan, edge: Edge) -> bool:
    node = plan.nodes.get(edge.dst)
    if node is None or edge.slot not in node.consts:
        return False
    form = plan.ops[plan.graph[edge.dst].op].integer
    return form is not None and form.weight is not None and form.weight.slot == edge.slot


def set_activation(found: Range, target: QParams, scheme: str) -> None:
    """Make a range of values that are never negative the one that DoReFa clips to: [0, 1].

    Where the integers are signed, a bit of them is the sign.
    """
    levels = target.qmax - int(target.zero_point.max())  # of [0, 1]: 2**k - 1
    half = scheme in ("hago", "hago_affine")
    threshold = (levels + 1) / levels if half else 1.0
    with torch.no_grad():
        found.low.zero_()
        found.high.fill_(threshold)
