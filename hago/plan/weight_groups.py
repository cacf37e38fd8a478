"""Weights of integer nodes whose groups have integer multipliers, and the registers of their partial sums.

A chip multiplies and adds the integers of one group of a channel in a partial register, multiplies that sum by the
group's multiplier, and adds up the results of all groups, and the bias, in the accumulator:

    P[o, g] = sum over the entries k of group g of  x[k] * c[o, k]
    accumulator[o] = sum over g of  m[o, g] * P[o, g]  +  bias[o]                                          (N16)

All of these are integers, so their order does not matter unless a register overflows. A weight is worth
`c[o, k] * m[o, g] * scale[o]`, and the accumulator has the scale `scale[o]` times that of x. As long as no partial
register overflows, this is the sum of products of x with the *joined* integers `m * c`, which is what the engines
compute; where one may, `GroupSums.lost` gives the difference.

`NodeBuilder` makes a `WeightGroups` for every such node plan, and a document holds it.

References:
    S. Dai et al., "VS-Quant: Per-Vector Scaled Quantization for Accurate Low-Precision Neural Network Inference",
    MLSys 2021, which has scales in two levels: an integer for each vector, a float for each channel.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hago.arithmetic.groups import in_groups, spread
from hago.arithmetic.numerics import EXACT_FLOAT32, OVERFLOWS, Lost
from hago.arithmetic.types import QParams
from hago.hardware import Accumulator, Groups
from hago.ops import OpRule


@dataclass(frozen=True, slots=True, eq=False)
class WeightGroups:
    """The groups of the weight of an integer node. Made by `plan.resolve.NodeBuilder`, or read from a file.

    Args:
        slot: of the weight.
        stored: the qparams of the integers that the chip stores; the scale of a group is the node's scale of the
            weight times the multiplier.
        integers: c, of the shape of the weight, in their storage dtype.
        multipliers: int64 (channels, groups), 1 or more.
        sums: the partial sums that may overflow; None where none can, or where it does not matter.
    """

    slot: int
    stored: QParams
    integers: Tensor
    multipliers: Tensor
    sums: GroupSums | None

    def joined(self) -> Tensor:
        """The integers times the multipliers of their groups, which the node reads."""
        assert self.stored.group is not None
        factors = spread(self.multipliers, self.integers.shape, self.stored.group)
        return smallest_integers(self.integers.to(torch.int64) * factors)


def smallest_integers(exact: Tensor) -> Tensor:
    """Centered integers in the smallest torch integer type that holds them."""
    largest = float(exact.abs().max()) if exact.numel() else 0.0
    return exact.to(torch.int8 if largest < 128 else torch.int16 if largest < 32768 else torch.int64)


# ---------------------------------------------------------------- partial sums that may overflow
@dataclass(frozen=True, slots=True, eq=False)
class GroupSums:
    """The partial sums of one node that may leave their register. Made by `group_sums_of`; kept in the NodePlan.

    Args:
        compute: the op on centered integers, without a register.
        attrs: attributes of the op, in integer units.
        channel_axis: the axis of data and of results along which channels lie.
        integers, multipliers, size: of the groups.
        register: of the partial sums.
        largest: the largest |partial sum| that any input can cause.
    """

    compute: Callable[..., Tensor]
    attrs: Mapping[str, Any]
    channel_axis: int
    integers: Tensor
    multipliers: Tensor
    size: int
    register: Accumulator
    largest: float

    @property
    def over(self) -> float:
        """The ratio of the largest partial sum to the largest value of its register; more than 1."""
        return self.largest / self.register.dtype.max

    def lost(self, operands: Sequence[Tensor]) -> Lost:
        """The change of every accumulator by its partial sums: `sum over g of m * (cut(P) - P)`.

        Only the groups of channels whose sums some data can make leave the register are added up.

        Args:
            operands: centered integers in any carrier; of these, the data is read.
        """
        carrier = torch.float32 if self.largest < EXACT_FLOAT32 else torch.float64
        x, dtype = operands[0].to(carrier), self.register.dtype
        cut, magnitudes = OVERFLOWS[self.register.overflow].of_sum, magnitudes_of_groups(self.integers, self.size)
        bounds = magnitudes * (self.largest / float(magnitudes.max()))
        may_leave = bounds > dtype.max * (1.0 - 2.0**-40)  # the quotient is rounded
        shape = self.compute(self.attrs, x.to("meta"), self.integers.to("meta", carrier)).shape
        amount, was_cut, peak = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.bool), 0.0
        for group in torch.nonzero(may_leave.any(0)).flatten().tolist():
            channels = torch.arange(len(self.integers))
            if self.attrs.get("groups", 1) == 1:
                channels = torch.nonzero(may_leave[:, group]).flatten()
            partial = self._partial(x, group, channels, carrier)
            change = (cut(partial, dtype) - partial).to(torch.int64)
            peak = max(peak, float(partial.max()) / dtype.max, float(partial.min()) / dtype.min)
            factor = self.multipliers[channels, group].reshape(-1, *[1] * ((-self.channel_axis - 1) % change.ndim))
            amount.index_add_(self.channel_axis, channels, change * factor)
            was_cut.index_copy_(
                self.channel_axis, channels, was_cut.index_select(self.channel_axis, channels) | (change != 0)
            )
        return Lost(amount, was_cut, peak)

    def _partial(self, x: Tensor, group: int, channels: Tensor, carrier: torch.dtype) -> Tensor:
        """The sums of the products of one group, for every output of some channels."""
        shape = self.integers.shape
        places, entries = math.prod(shape[2:]), math.prod(shape[1:])
        start, end = group * self.size, min((group + 1) * self.size, entries)
        weight = torch.zeros(len(channels), entries, dtype=carrier)
        weight[:, start:end] = self.integers.flatten(1)[channels, start:end].to(carrier)
        weight = weight.reshape(len(channels), *shape[1:])
        if self.attrs.get("groups", 1) == 1:  # input channels without a product in the group are left out
            first, last = start // places, -(-end // places)
            x, weight = x.narrow(self.channel_axis, first, last - first), weight[:, first:last]
        return self.compute(self.attrs, x, weight)


def magnitudes_of_groups(integers: Tensor, size: int) -> Tensor:
    """The sum of the magnitudes of the integers of every group of a weight, float64 (channels, groups)."""
    return in_groups(integers.flatten(1).to(torch.int64).abs(), size).sum(2).to(torch.float64)


def largest_partial_sum(groups: Groups, integers: Tensor, register: Accumulator, largest_data: float) -> float | None:
    """The largest magnitude of a partial sum that may leave its register; None where no input can make one leave it,
    and where both registers wrap and the partial one is as wide: sums modulo 2**bits are then the same, whatever wraps
    in between.

    Args:
        integers: of the weight.
        register: the accumulator; partial sums overflow as it does.
        largest_data: the largest |c| of the data.
    """
    partial = register.dtype if groups.partial is None else groups.partial
    largest = float(magnitudes_of_groups(integers, groups.size).max()) * largest_data if integers.numel() else 0.0
    wraps_anyway = register.overflow == "wrap" and partial.bits >= register.dtype.bits
    return None if largest <= partial.max or wraps_anyway else largest


def group_sums(
    rule: OpRule,
    attrs: Mapping[str, Any],
    groups: Groups,
    integers: Tensor,
    multipliers: Tensor,
    register: Accumulator,
    largest: float,
) -> GroupSums:
    """The partial sums of a node that may leave their register.

    Args:
        rule: of the op.
        attrs: attributes in integer units.
        integers, multipliers: of the weight.
        register: the accumulator; partial sums overflow as it does.
        largest: see `largest_partial_sum`.
    """
    assert rule.integer is not None and rule.integer.addends is not None
    partial = Accumulator(register.dtype if groups.partial is None else groups.partial, register.overflow)
    axis = rule.integer.addends.bias_axis
    return GroupSums(rule.compute_int, attrs, axis, integers, multipliers, groups.size, partial, largest)
