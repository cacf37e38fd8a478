"""Offsets of integers: by how much the integers of constants differ from the nearest ones, as a strategy holds them."""

from __future__ import annotations

import base64
import binascii
import zlib
from collections.abc import Mapping
from typing import Final

import numpy as np
import torch
from torch import Tensor

from hago.arithmetic.numerics import quantize
from hago.arithmetic.types import QParams
from hago.errors import LogError
from hago.graph import Graph

#: The types in which offsets are stored, the smaller first.
_TYPES: Final = ("int8", "int32")
#: The level of compression: more takes ten times as long, for a few percent.
COMPRESSION: Final = 4


def encode_offsets(offsets: Tensor) -> str:
    """Offsets as text: their type, and their little-endian bytes, compressed, in base 64."""
    fits = next(t for t in _TYPES if bool((offsets.abs() <= np.iinfo(t).max).all()))
    values = np.ascontiguousarray(offsets.numpy().astype(np.dtype(fits).newbyteorder("<")))
    return f"{fits}:{base64.b64encode(zlib.compress(values.tobytes(), COMPRESSION)).decode('ascii')}"


def decode_offsets(name: str, text: str, shape: torch.Size) -> Tensor:
    """The offsets of a constant, int64.

    Raises:
        LogError: the text is none of `encode_offsets`, or of another shape.
    """
    where = f"at $.corrections.offsets[{name!r}]"
    kind, _, packed = text.partition(":")
    if kind not in _TYPES:
        known = ", ".join(_TYPES)
        raise LogError(f"{where}: got offsets of type {kind[:12]!r}, expected one of {known}; it was edited")
    dtype = np.dtype(kind).newbyteorder("<")
    expected = shape.numel() * dtype.itemsize
    unpacking = zlib.decompressobj()
    try:
        data = unpacking.decompress(base64.b64decode(packed, validate=True), expected + 1)
    except (binascii.Error, zlib.error, ValueError) as error:
        raise LogError(f"{where}: cannot be read ({error}); it was edited") from None
    if len(data) != expected or not unpacking.eof:
        raise LogError(f"{where}: got other than the {shape.numel()} offsets of this constant; it was edited")
    return torch.from_numpy(np.frombuffer(data, dtype).astype(np.int64)).reshape(shape)


class OffsetConstants:
    """The `constants` of a Resolver: the nearest integers of constants, moved by offsets.

    Args:
        offsets: by name of a constant, of its shape.
        rounding: the rounding of the hardware.
    """

    def __init__(self, graph: Graph, offsets: Mapping[str, Tensor], rounding: str) -> None:
        self._graph, self.offsets, self._rounding = graph, offsets, rounding

    @staticmethod
    def stored(graph: Graph, texts: Mapping[str, str], rounding: str) -> OffsetConstants:
        """From the texts of `encode_offsets`, by name of a constant.

        Raises:
            LogError: a constant is not in the graph, or offsets do not fit it.
        """
        for name in texts:
            if name not in graph.consts:
                raise LogError(f"at $.corrections.offsets[{name!r}]: got no constant of this network; it was edited")
        offsets = {name: decode_offsets(name, text, graph.consts[name].shape) for name, text in texts.items()}
        return OffsetConstants(graph, offsets, rounding)

    def encoded(self) -> dict[str, str]:
        """The offsets as a strategy holds them."""
        return {name: encode_offsets(offsets) for name, offsets in self.offsets.items()}

    def __call__(self, name: str, target: QParams) -> Tensor | None:
        """The centered integers of a constant, float64; None for one without offsets."""
        offsets = self.offsets.get(name)
        if offsets is None:
            return None
        nearest = quantize(self._graph.consts[name].to(torch.float64), target, self._rounding)
        zero = target.spread_over(nearest.shape).zero_point
        low, high = target.qmin - zero, target.qmax - zero
        return torch.maximum(torch.minimum(nearest + offsets, high.to(nearest)), low.to(nearest))
