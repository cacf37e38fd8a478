"""Packing: integers in as few bytes as their range needs, two to a byte where four bits hold them.

Invariant: `unpack(pack(t)) == t`, dtype and shape included, for every integer tensor. Values of at most
four bits are stored as `value - offset` in 2 or 4 bits each, the first value in the lowest bits of the
first byte; wider ones in the smallest dtype that holds them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from hago.errors import HagoError

#: Smallest first.
_WHOLE: Final = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)
_WIDTHS: Final = (2, 4)


@dataclass(frozen=True, slots=True, eq=False)
class Packed:
    """Integers as they are stored.

    Args:
        data: uint8 and flat where packed; else of the tensor's shape.
        bits: of each value where packed, 2 or 4; None where every value has a dtype's own size.
        offset: what packed values count from.
    """

    data: Tensor
    bits: int | None = None
    offset: int = 0


def pack(values: Tensor) -> Packed:
    """The smallest form of an integer tensor that holds something."""
    low, high = (int(v) for v in torch.aminmax(values))
    for bits in _WIDTHS:
        if high - low < 1 << bits:
            return Packed(_fold((values.to(torch.int64) - low).to(torch.uint8).flatten(), bits), bits, low)
    return Packed(values.to(next(d for d in _WHOLE if _holds(d, low, high))).contiguous())


def _holds(dtype: torch.dtype, low: int, high: int) -> bool:
    limits = torch.iinfo(dtype)
    return limits.min <= low and high <= limits.max


def _fold(small: Tensor, bits: int) -> Tensor:
    """Values below 2**bits, uint8 and flat, several to a byte."""
    per_byte = 8 // bits
    padded = torch.nn.functional.pad(small, (0, -small.numel() % per_byte)).reshape(-1, per_byte)
    found = torch.zeros(len(padded), dtype=torch.uint8)
    for place in range(per_byte):
        found |= padded[:, place] << (bits * place)
    return found


def unpack(packed: Packed, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """The tensor that was packed.

    Raises:
        HagoError: the data holds another number of values than the shape, or bits other than 2 and 4.
    """
    data, bits = packed.data, packed.bits
    count = torch.Size(shape).numel()
    if bits is None:
        flat, expected = data.flatten(), count
    elif bits in _WIDTHS and data.dtype == torch.uint8:
        expected = -(-count * bits // 8)
        places = torch.arange(0, 8, bits, dtype=torch.uint8)
        flat = ((data.reshape(-1, 1) >> places) & ((1 << bits) - 1)).flatten()[:count]
    else:
        raise HagoError(f"packed integers of {bits} bits in {data.dtype}; expected 2 or 4 bits in uint8")
    if data.numel() != expected:
        raise HagoError(f"{data.numel()} stored elements for a tensor of shape {list(shape)}; expected {expected}")
    if bits is None:
        return flat.to(dtype).reshape(shape)
    return (flat.to(torch.int64) + packed.offset).to(dtype).reshape(shape)
