"""Weights in the order that the native convolution reads them, kept between engines of one search.

A convolution of one dimension, a linear layer and a matrix product by a constant are convolutions of two
dimensions: `Geometry` says which.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from hago.arithmetic.numerics import Requantize
from hago.arithmetic.types import SimQ
from hago.caching import LRU
from hago.runtime.native.requantize import SLACK, Requantization, requantization_of

#: Bytes of packed weights that one Packs keeps.
PACKED_BYTES: Final = 1 << 29
#: Requantizations that one Packs keeps, each with an array or two of its channels.
MOVES: Final = 1 << 13
#: Tables of pairs of bytes that one Packs keeps, 64 KiB each.
TABLES: Final = 1 << 9
#: Output channels worked on at once, at most; a multiple of LANES.
WIDEST: Final = 64
LANES: Final = 16
#: Bytes of a row of a matrix tile.
STEP: Final = 64
#: Bytes of a window from which on matrix tiles pay: below, their sums are stored more often than they are added to.
LEAST_TILED: Final = 384
#: Rows that are woven, at most.
MOST_WOVEN: Final = 16
AT_PIXELS, IN_ROWS, IN_PATCH = range(3)

Made = TypeVar("Made")


@dataclass(frozen=True, slots=True)
class Geometry:
    """A convolution of two dimensions. `padding` may be "same" or "valid" no more."""

    channels: int
    out_channels: int
    groups: int
    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]

    @property
    def pointwise(self) -> bool:
        """Whether every pixel stands by itself."""
        return self.kernel == (1, 1) and self.stride == (1, 1) and self.padding == (0, 0)

    @property
    def window(self) -> int:
        """Values of a window."""
        return self.channels // self.groups * self.kernel[0] * self.kernel[1]

    def out_size(self, height: int, width: int) -> tuple[int, int]:
        """The size of the result."""
        sizes = zip((height, width), self.kernel, self.stride, self.padding, self.dilation, strict=True)
        h, w = ((n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in sizes)
        return h, w


def conv_geometry(attrs: Mapping[str, Any], weight: Tensor) -> Geometry | str:
    """The geometry of conv1d or conv2d, or why it has none."""
    dims = weight.ndim - 2
    kernel, dilation = list(weight.shape[2:]), list(attrs["dilation"])
    padding = attrs["padding"]
    if padding == "valid":
        padding = [0] * dims
    elif padding == "same":
        whole = [d * (k - 1) for k, d in zip(kernel, dilation, strict=True)]
        if any(n % 2 for n in whole):
            return "padding that is wider on one side"
        padding = [n // 2 for n in whole]
    ones = [1] * (2 - dims)
    pairs = [(*ones, *kernel), (*ones, *attrs["stride"]), (*[0] * (2 - dims), *padding), (*ones, *dilation)]
    channels, groups = int(weight.shape[1]) * attrs["groups"], int(attrs["groups"])
    return Geometry(channels, int(weight.shape[0]), groups, *pairs)


@dataclass(frozen=True, slots=True)
class Packed:
    """Packed weights.

    Args:
        weight: int8, or int16 for values of 16 bits, as native/conv.h says.
        panel: output channels worked on at once; 0 where every channel stands by itself.
        panels: of a group.
        depth: bytes of a tap.
        taps, gather: how a window is read, in the words of native/conv.h.
        steps: of 64 bytes, of a window that is read in matrix tiles; 0 for no tiles.
        sums: int64 (out_channels,), of the weights of each output channel.
    """

    weight: Tensor
    sums: Tensor
    panel: int
    panels: int
    depth: int
    taps: int
    gather: int
    steps: int = 0
    woven: int = 0

    def offsets(self, bias: Tensor | None, zero: int, groups: int) -> Tensor:
        """What sums start from: the bias less the zero point's share, modulo 2**32, in panels."""
        total = -zero * self.sums if bias is None else bias.flatten().to(torch.int64) - zero * self.sums
        each = len(total) // groups if self.panel else len(total)
        room = self.panels * self.panel if self.panel else -(-each // WIDEST) * WIDEST
        placed = torch.zeros(len(total) // each, room, dtype=torch.int64)
        placed[:, :each] = total.reshape(-1, each)
        # int64 to int32 keeps the low bits: a sum modulo 2**32
        return torch.cat([placed.flatten().to(torch.int32), torch.zeros(SLACK, dtype=torch.int32)])


class Packs:
    """What kernels made of weights, by the weights and the kind of kernel, bounded by PACKED_BYTES; and their
    requantizations and tables, by what they do, bounded by MOVES and TABLES."""

    def __init__(self) -> None:
        self._kept: LRU[Hashable, tuple[Tensor, Any]] = LRU(PACKED_BYTES, lambda pair: 2 * pair[0].numel())
        self._moves: LRU[Hashable, Requantization | str] = LRU(MOVES)
        self.tables: LRU[Hashable, Tensor] = LRU(TABLES)

    def kept(self, weight: Tensor, key: Hashable, make: Callable[[Tensor], Made]) -> Made:
        """`make(weight)`, made once for every key."""
        # holding the key's object keeps its id unique
        made: Made = self._kept.made((id(weight), key), lambda: (weight, make(weight)))[1]
        return made

    def requantization(self, simq: SimQ | None, how: Requantize, channels: int, largest: float) -> Requantization | str:
        """`moves.requantization_of`, made once for equal SimQs."""
        if simq is None or simq.source is None or simq.target is None:
            return requantization_of(simq, how, channels, largest)
        ends = (simq.source, *((simq.via,) if simq.via else ()), simq.target)
        # one scale in two formats means "no change of scale", which equal ones do not
        same = tuple(a.scale is b.scale for a, b in itertools.pairwise(ends))
        key = (simq.key, same, how, channels, largest)
        return self._moves.made(key, lambda: requantization_of(simq, how, channels, largest))

    def __call__(
        self, weight: Tensor, geometry: Geometry, tiles: bool, transposed: bool = False, words: bool = False
    ) -> Packed:
        """The packed form of centered weights (out, in / groups, h, w), or (in, out) where `transposed`.

        Args:
            words: whether they meet values of 16 bits.
        """

        def make(weight: Tensor) -> Packed:
            laid = (weight.t() if transposed else weight).to(torch.int16 if words else torch.int8)
            return pack(laid.reshape(geometry.out_channels, -1, *geometry.kernel), geometry, tiles)

        return self.kept(weight, (geometry, tiles, transposed, words), make)


def pack(weight: Tensor, geometry: Geometry, tiles: bool) -> Packed:
    """int8 or int16 weights (out, in / groups, h, w) in panels, for matrix tiles (int8) or not; depthwise ones channel
    by channel."""
    size = weight.element_size()
    four = 4 // size  # values in four bytes
    sums = weight.to(torch.int64).flatten(1).sum(1)
    if geometry.groups == geometry.channels == geometry.out_channels > 1:
        return _pack_channels(weight, sums)
    each = geometry.out_channels // geometry.groups
    panel = _panel(each)
    panels = -(-each // panel)
    taps = weight.permute(0, 2, 3, 1).reshape(geometry.out_channels, -1, weight.shape[1])
    gather, woven = _gather(geometry, four), _woven(geometry) if tiles else 0
    if woven:
        taps = _weave(weight, woven)
    elif gather != AT_PIXELS:
        taps = taps.reshape(geometry.out_channels, geometry.kernel[0] if gather == IN_ROWS else 1, -1)
    depth = -(-taps.shape[2] // four) * four
    room = torch.zeros(geometry.groups, panels * panel, taps.shape[1], depth, dtype=weight.dtype)
    room[:, :each, :, : taps.shape[2]] = taps.reshape(geometry.groups, each, taps.shape[1], -1)
    step = depth if woven else STEP
    steps = -(-taps.shape[1] * depth // step) if tiles else 0
    laid = _tiled(room, steps, step) if steps else _paneled(room, panel, four)
    return Packed(laid.contiguous(), sums, panel, panels, depth * size, taps.shape[1], gather, steps, woven)


def tiles_pay(geometry: Geometry) -> bool:
    """Whether matrix tiles take less time than vectors."""
    return geometry.window >= LEAST_TILED or (geometry.kernel[0] > 1 and _woven(geometry) > 0)


def _woven(geometry: Geometry) -> int:
    """Rows of a window that a step of tiles reads at once; 0 where windows are not read in rows."""
    height, row = geometry.kernel[0], geometry.kernel[1] * geometry.channels
    if _gather(geometry, 4) != IN_ROWS or row > STEP:
        return 0
    steps = -(-height // min(STEP // row, MOST_WOVEN))
    return -(-height // steps)


def _weave(weight: Tensor, rows: int) -> Tensor:
    """(out, in, h, w) as (out, step, w * rows * in), with zeros for rows that are not there."""
    out, channels, height, width = weight.shape
    steps = -(-height // rows)
    taps = F.pad(weight.permute(0, 2, 3, 1), (0, 0, 0, 0, 0, steps * rows - height))
    return taps.reshape(out, steps, rows, width, channels).transpose(2, 3).reshape(out, steps, -1)


def _gather(geometry: Geometry, four: int) -> int:
    """How a window is read: of few channels a row of it at once, or all of it where it is no row."""
    if geometry.channels // geometry.groups % four == 0:
        return AT_PIXELS
    return IN_ROWS if geometry.groups == 1 and geometry.dilation[1] == 1 else IN_PATCH


def _paneled(room: Tensor, panel: int, four: int) -> Tensor:
    """(group, channel, tap, value of a tap) as [group][panel][tap][depth / four][panel channels][four]."""
    groups, channels, taps, depth = room.shape
    return room.reshape(groups, channels // panel, panel, taps, depth // four, four).permute(0, 1, 3, 4, 2, 5)


def _tiled(room: Tensor, steps: int, step: int) -> Tensor:
    """The same as [16 channels of a panel][step][step / 4][16 channels][4], windows filled up with zeros."""
    windows = room.reshape(-1, room.shape[2] * room.shape[3])
    windows = F.pad(windows, (0, steps * step - windows.shape[1]))
    return windows.reshape(-1, LANES, steps, step // 4, 4).permute(0, 2, 3, 1, 4)


def _panel(channels: int) -> int:
    """Channels of a panel: as few panels as can be, and of those the narrowest."""
    panels = -(-channels // WIDEST)
    return -(-channels // (panels * LANES)) * LANES


def _pack_channels(weight: Tensor, sums: Tensor) -> Packed:
    """[block of 64 channels][column of a window][four rows][4][16 channels][4]; channel 16 l + 4 i + e of a block is
    (i, l, e), and the channels of a block of at most 32 stand there twice.

    Of int16: [block of 32 channels][two taps][2][16 channels][2]; channel 8 l + 4 i + e is (i, l, e)."""
    channels, _, height, width = weight.shape
    four = 4 // weight.element_size()
    if four == 4:
        taps = F.pad(weight[:, 0].mT, (0, -height % four)).reshape(channels, -1)
    else:
        taps = F.pad(weight.reshape(channels, -1), (0, height * width % four))
    fours, block = taps.shape[1] // four, LANES * four
    blocks = -(-channels // block)
    room = torch.zeros(blocks * block, four * fours, dtype=weight.dtype)
    room[:channels] = taps
    if four == 4 and 0 < channels % block <= block // 2:
        room[-block // 2 :] = room[-block : -block // 2]
    parts = room.reshape(blocks, 4, four, 4, fours, four).permute(0, 4, 2, 1, 3, 5)
    return Packed(parts.contiguous(), sums, 0, 1, 4 * fours, height * width, AT_PIXELS)
