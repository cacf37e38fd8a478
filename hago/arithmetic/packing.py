"""Packing: integers stored in as few bytes as their range needs.

Invariant: `unpack(pack(t)) == t`, dtype and shape included, for every integer tensor. If the range of the values fits
two or four bits, they are stored as `value - offset` in 2 or 4 bits each, the first value in the lowest bits of the
first byte; other values are stored in the smallest dtype that holds them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from hago.errors import HagoError

#: The dtypes of values that are not packed, smallest first.
_STORAGE_DTYPES: Final = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)
#: The bits of packed values.
_WIDTHS: Final = (2, 4)


@dataclass(frozen=True, slots=True, eq=False)
class Packed:
    """Integers as they are stored. Made by `pack`.

    Args:
        data: uint8 and flat if packed; else of the tensor's shape.
        bits: bits of each packed value, 2 or 4; None if the values are not packed.
        offset: the value that packed 0 stands for.
    """

    data: Tensor
    bits: int | None = None
    offset: int = 0


def pack(values: Tensor) -> Packed:
    """Store an integer tensor, which must not be empty, in the fewest bytes."""
    low, high = (int(v) for v in torch.aminmax(values))
    for bits in _WIDTHS:
        if high - low < 1 << bits:
            return Packed(_fold((values.to(torch.int64) - low).to(torch.uint8).flatten(), bits), bits, low)
    return Packed(values.to(next(d for d in _STORAGE_DTYPES if _holds(d, low, high))).contiguous())


def _holds(dtype: torch.dtype, low: int, high: int) -> bool:
    limits = torch.iinfo(dtype)
    return limits.min <= low and high <= limits.max


def _fold(small: Tensor, bits: int) -> Tensor:
    """Put several values below 2**bits, uint8 and flat, into each byte."""
    per_byte = 8 // bits
    padded = torch.nn.functional.pad(small, (0, -small.numel() % per_byte)).reshape(-1, per_byte)
    packed = torch.zeros(len(padded), dtype=torch.uint8)
    for place in range(per_byte):
        packed |= padded[:, place] << (bits * place)
    return packed


def unpack(packed: Packed, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Restore a tensor that was packed.

    Raises:
        HagoError: the data holds another number of values than the shape, or `bits` is neither 2 nor 4.
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
