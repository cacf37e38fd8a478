"""The bytes of the constants of a Plan: at their bits, as they are stored, and in the float model."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor

from hago.arithmetic.types import QParams
from hago.serialization.text_table import bytes_text


@dataclass(frozen=True, slots=True)
class WeightSizes:
    """The sizes of the constants of a model, in bytes. `Plan.weight_sizes` makes it.

    Args:
        before: all constants of the float model.
        at_bits: all constants, integers packed to their bits, and the scales of groups: the cost `weight_bytes`, which
            searches limit.
        integer: constants that became integers, in their storage dtypes, in which an integer model holds them.
        left: constants that stayed float.
        scales: the scales or multipliers of groups, and their zero points where these differ.
    """

    before: int
    at_bits: int
    integer: int
    left: int
    scales: int = 0

    @property
    def stored(self) -> int:
        """All constants as an integer model holds them."""
        return self.integer + self.scales + self.left

    def to_json(self) -> dict[str, int]:
        """The sizes as JSON values."""
        return {
            "float_model": self.before,
            "at_bits": self.at_bits,
            "integer": self.integer,
            "left_float": self.left,
            "scales": self.scales,
        }

    def text(self) -> str:
        """The sizes in words."""
        stored = "" if self.stored == self.at_bits else f" at their bits ({bytes_text(self.stored)} as stored)"
        scales = f", {bytes_text(self.scales)} of them of groups" if self.scales else ""
        left = f", {bytes_text(self.left)} of them float" if self.left else ""
        return f"{bytes_text(self.at_bits)}{stored}{scales}{left}; {bytes_text(self.before)} in the float model"

    def __str__(self) -> str:
        times = f", {self.before / self.at_bits:.2f} times more" if self.at_bits else ""
        return f"weights: {self.text()}{times}"


def bits_of(qparams: QParams) -> int:
    """The number of bits that distinguish the integers of a range."""
    return max(1, (qparams.qmax - qparams.qmin).bit_length())


def packed_bytes(elements: int, bits: int) -> int:
    """The bytes of elements that are packed to their bits."""
    return -(-elements * bits // 8)


def group_bytes(qparams: QParams, multiplier_bits: int | None) -> int:
    """The bytes of what the groups of a weight have of their own: multipliers, or float32 scales and, where these
    differ, zero points packed to the bits of the integers. Scales of channels and tensors are not counted.

    Args:
        qparams: of the integers of groups.
        multiplier_bits: of the groups; None where they have scales.
    """
    if multiplier_bits is not None:
        return packed_bytes(qparams.scale.numel(), multiplier_bits)
    zeros = qparams.zero_point.flatten()
    differ = zeros.numel() > 1 and bool((zeros != zeros[0]).any())
    return 4 * qparams.scale.numel() + (packed_bytes(zeros.numel(), bits_of(qparams)) if differ else 0)


def weight_sizes(constants: Iterable[tuple[str, Tensor, QParams | None, int]], before: int) -> WeightSizes:
    """The sizes of constants.

    Args:
        constants: the name and the tensor of every constant that is read, the integers in which it is (None where it is
            read as real values), and the bytes of what its groups have of their own. Equal integers that several nodes
            read are counted once.
        before: bytes of all constants of the float model.
    """
    seen: set[tuple[str, object]] = set()
    at_bits, integer, left, scales = 0, 0, 0, 0
    for name, tensor, target, of_groups in constants:
        key = (name, None if target is None else target.key)
        if key in seen:
            continue
        seen.add(key)
        elements = math.prod(tensor.shape)
        if target is None:
            left += elements * tensor.element_size()
        else:
            at_bits += packed_bytes(elements, bits_of(target))
            integer += elements * target.dtype.torch.itemsize
            scales += of_groups
    return WeightSizes(before, at_bits + scales + left, integer, left, scales)
