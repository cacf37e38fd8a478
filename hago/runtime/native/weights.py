"""Weights, packed in the order in which the native convolution reads them, and the cache of packed weights.

One-dimensional convolutions, linear layers and matrix products by constants run as two-dimensional convolutions with a
`Geometry`. A `KernelConstantCache` keeps what executors derive from weights; the executors of one search share it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from hago.arithmetic.numerics import Requantize
from hago.arithmetic.types import SimQ
from hago.caching import LRU
from hago.runtime.native import library as native
from hago.runtime.native.requantize import SLACK, Requantization, requantization_of

#: The most bytes of packed weights that a `KernelConstantCache` keeps.
PACKED_BYTES: Final = 1 << 29
#: The most requantizations that a `KernelConstantCache` keeps, each with one or two arrays of a value per channel.
REQUANTIZATIONS: Final = 1 << 13
#: The most tables of pairs of bytes that a `KernelConstantCache` keeps, 64 KiB each.
TABLES: Final = 1 << 9
#: The output channels of a block of a depthwise convolution of bytes.
BLOCK: Final = 64
#: The number of int32 sums in a vector register.
LANES: Final = 16
#: The bytes of a row of a matrix tile.
STEP: Final = 64
#: The least bytes of a window for which matrix tiles are faster; for smaller ones, storing their sums dominates.
LEAST_TILED: Final = 384
#: The most rows of a window that are interleaved.
MOST_WOVEN: Final = 16
#: The channels of a vector of products of bytes whose pairs must fit: the int32 sums of a register of AVX2.
VECTOR: Final = 8
#: The part of its time that a run of four saves in a pair.
PAIRED_GAIN: Final = 0.15
#: The most that runs of four may cost, see `_pack_fours`; beyond, words are faster (measured on a Zen 3). Output
#: channels share the time that it takes to widen their input to words, which is `WIDENING` for one.
MOST_COST: Final = 1.05
WIDENING: Final = 5
#: By the side of a square of pixels, the matrix G of Winograd's F(2 x 2, 3 x 3) and F(4 x 4, 3 x 3), as integers: twice
#: G, and 24 times, but for the last row, which the kernel doubles so that words hold the weights.
WINOGRAD: Final = {
    2: ((2, 0, 0), (1, 1, 1), (1, -1, 1), (0, 0, 2)),
    4: ((6, 0, 0), (-4, -4, -4), (-4, 4, -4), (1, 2, 4), (1, -2, 4), (0, 0, 12)),
}
#: By the side, what sums are multiplied by until the kernel divides them; of 576, modulo 2**32, it takes 9 out before.
_MULTIPLIED: Final = {2: 4, 4: 64}
#: The time of the nine products of a window, as a number of products of words, by how bytes are multiplied. Where
#: they are multiplied exactly, it is the count of instructions, and stands in for the time that is not measured.
_DIRECT: Final = {native.NEVER: 9.0, native.IF_PAIRS_FIT: 7.0, native.EXACTLY: 4.5}
#: The most weights of a layer that are transformed for squares of 4 by 4 pixels, to 8 times their bytes, that come from
#: memory in every pass of a network whose weights leave the cache; those of F(2 x 2, 3 x 3) take 3.6 times.
MOST_IN_FOURS: Final = 2**20
#: How a window is read; see `_gather`.
AT_PIXELS, IN_ROWS, IN_PATCH = range(3)

Derived = TypeVar("Derived")
#: (library, channels) to the time of the nine products of a window, as a number of products of words.
DirectProducts = Callable[[Any, int], float]


@dataclass(frozen=True, slots=True)
class Geometry:
    """The geometry of a two-dimensional convolution, with padding in numbers.

    Args:
        sample: the height and width of the output for the sample inputs; None where they are not known.
    """

    channels: int
    out_channels: int
    groups: int
    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]
    sample: tuple[int, int] | None = None

    @property
    def pointwise(self) -> bool:
        """Whether every output pixel depends on one input pixel only."""
        return self.kernel == (1, 1) and self.stride == (1, 1) and self.padding == (0, 0)

    @property
    def by_channel(self) -> bool:
        """Whether every output channel depends on one input channel only."""
        return self.groups == self.channels == self.out_channels > 1

    @property
    def fits_winograd(self) -> bool:
        """Whether Winograd's algorithm for 3 x 3 computes it. Dot products add two words, so channels are even."""
        even = self.channels // self.groups % 2 == 0
        return self.kernel == (3, 3) and self.stride == (1, 1) and self.dilation == (1, 1) and even

    @property
    def window(self) -> int:
        """The number of values in a window."""
        return self.channels // self.groups * self.kernel[0] * self.kernel[1]

    def out_size(self, height: int, width: int) -> tuple[int, int]:
        """The height and the width of the output."""
        sizes = zip((height, width), self.kernel, self.stride, self.padding, self.dilation, strict=True)
        h, w = ((n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in sizes)
        return h, w


def conv_geometry(attrs: Mapping[str, Any], weight: Tensor) -> Geometry | str:
    """The geometry of a conv1d or conv2d, or the reason why the native convolution cannot compute it."""
    dims = weight.ndim - 2
    kernel, dilation = list(weight.shape[2:]), list(attrs["dilation"])
    padding = attrs["padding"]
    if padding == "valid":
        padding = [0] * dims
    elif padding == "same":
        totals = [d * (k - 1) for k, d in zip(kernel, dilation, strict=True)]
        if any(n % 2 for n in totals):
            return "padding that is wider on one side"
        padding = [n // 2 for n in totals]
    ones = [1] * (2 - dims)
    pairs = [(*ones, *kernel), (*ones, *attrs["stride"]), (*[0] * (2 - dims), *padding), (*ones, *dilation)]
    channels, groups = int(weight.shape[1]) * attrs["groups"], int(attrs["groups"])
    return Geometry(channels, int(weight.shape[0]), groups, *pairs)


@dataclass(frozen=True, slots=True)
class Packed:
    """Packed weights. Made by `pack`, kept by `KernelConstantCache`.

    Args:
        weight: int8, or int16 for products of words, in the layout that cpp/conv.h describes.
        sums: int64 (out_channels,), the sum of the weights of each output channel.
        panel: output channels computed together; 0 for depthwise convolutions.
        panels: panels of a group.
        depth: bytes of a tap.
        taps, gather: how a window is read; see cpp/conv.h.
        steps: steps of 64 bytes in a window that is read in matrix tiles; 0 for no tiles.
        woven: rows of a window that are interleaved in a step; 0 for none.
        fits: of the `Products` that they are packed for.
        fours: of weights in runs of four, the int32 arrays `four_starts`, `places` and `four_taps` of cpp/conv.h, with
            vectors in the order [group][panel][vector of a panel]. Empty for other weights.
        winograd: the side of the squares that `winograd_weights` is for; 0 for other weights.
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
    fits: int = 0
    fours: tuple[Tensor, ...] = ()
    winograd: int = 0

    @property
    def way(self) -> str:
        """How bytes are multiplied by them, for the name of a kernel; empty where it is as the library multiplies."""
        ways = {" on tiles": self.steps, " by Winograd": self.winograd, " in pairs": self.fits, " in fours": self.fours}
        return next((way for way, taken in ways.items() if taken), "")

    def offsets(self, bias: Tensor | None, zero: int, groups: int) -> Tensor:
        """The initial values of the sums, in panels: the bias minus the zero point times the sum of the weights, modulo
        2**32."""
        total = -zero * self.sums if bias is None else bias.flatten().to(torch.int64) - zero * self.sums
        each = len(total) // groups if self.panel else len(total)
        room = self.panels * self.panel if self.panel else -(-each // BLOCK) * BLOCK
        placed = torch.zeros(len(total) // each, room, dtype=torch.int64)
        placed[:, :each] = total.reshape(-1, each)
        # int64 to int32 keeps the low bits: a sum modulo 2**32
        return torch.cat([placed.flatten().to(torch.int32), torch.zeros(SLACK, dtype=torch.int32)])


def _derived_bytes(pair: tuple[Tensor, Any]) -> int:
    """The bytes of what is derived from a weight; at most, if it is not packed."""
    weight, derived = pair
    if not isinstance(derived, Packed):
        return 2 * weight.numel()
    return sum(x.nbytes for x in (derived.weight, derived.sums, *derived.fours))


class KernelConstantCache:
    """A bounded cache of packed weights, requantizations and tables of pairs of bytes.

    Made by the evaluator of a search, which hands it to every `Executor`; an executor that gets none makes its own.
    Kernels read it when they emit their calls.
    """

    def __init__(self) -> None:
        self._kept: LRU[Hashable, tuple[Tensor, Any]] = LRU(PACKED_BYTES, _derived_bytes)
        self._requantizations: LRU[Hashable, Requantization | str] = LRU(REQUANTIZATIONS)
        self.tables: LRU[Hashable, Tensor] = LRU(TABLES)

    def derive(self, weight: Tensor, key: Hashable, make: Callable[[Tensor], Derived]) -> Derived:
        """`make(weight)`, computed once for every weight and key."""
        # the weight is kept with the derived value, so that no other tensor can get its id
        derived: Derived = self._kept.get_or_make((id(weight), key), lambda: (weight, make(weight)))[1]
        return derived

    def requantization(self, simq: SimQ | None, how: Requantize, channels: int, largest: float) -> Requantization | str:
        """`requantize.requantization_of`, computed once for equal arguments."""
        if simq is None or simq.source is None or simq.target is None:
            return requantization_of(simq, how, channels, largest)
        ends = (simq.source, *((simq.via,) if simq.via else ()), simq.target)
        # the same object as both scales means "no change of scale"; two equal objects do not
        same = tuple(a.scale is b.scale for a, b in itertools.pairwise(ends))
        key = (simq.key, same, how, channels, largest)
        return self._requantizations.get_or_make(key, lambda: requantization_of(simq, how, channels, largest))

    def packed(
        self,
        calls: Any,
        weight: Tensor,
        geometry: Geometry,
        most: int | None,
        *,
        tiles: bool,
        transposed: bool,
        direct: DirectProducts | None = None,
    ) -> Packed:
        """`pack_for` of centered weights of shape (out, in / groups, h, w), or (in, out) if `transposed`.

        Args:
            calls, most, tiles: of `pack_for`.
            direct: of `products_of`.
        """

        def rows(weight: Tensor) -> Tensor:
            return (weight.t() if transposed else weight).reshape(geometry.out_channels, -1, *geometry.kernel)

        found = (calls, geometry, most, transposed)
        how = self.derive(weight, found, lambda w: products_of(calls, rows(w), geometry, most, direct))
        # other activations may read the same weights, and images of other sizes
        key = (replace(geometry, sample=None), how.words, how.most, how.winograd, tiles, transposed)
        packed = self.derive(weight, key, lambda w: pack(calls, rows(w), geometry, how, tiles))
        return replace(packed, fits=how.fits)


@dataclass(frozen=True, slots=True)
class Products:
    """How a library of kernels multiplies activations by weights. Made by `products_of`.

    Args:
        words: whether both are words of 16 bits, to which bytes are widened.
        fits: how many sums of pairs of products of bytes are added in 16 bits; 0 where these are exact in any case, or
            where weights are split so that they are.
        most: the largest byte for which `fours_that_fit` splits weights; 0 where it does not.
        winograd: the side of the squares for which `winograd_weights` transforms them to words; 0 for none.
    """

    words: bool
    fits: int = 0
    most: int = 0
    winograd: int = 0


def products_of(
    calls: Any, weight: Tensor, geometry: Geometry, most: int | None, direct: DirectProducts | None = None
) -> Products:
    """How a library multiplies by weights of shape (out, in / groups, h, w).

    Args:
        calls: the library.
        most: the largest byte of the activations and their padding, as it is read; None for activations of 16 bits.
        direct: `timing.direct_products`, which is asked where bytes are multiplied exactly; by default the count of
            instructions tells.
    """
    if most is None:
        return Products(words=True)
    if side := _winograd_side(calls, weight, geometry, direct):
        return Products(words=True, winograd=side)
    adds = calls.hago_adds_bytes(geometry.by_channel)
    if adds != native.IF_PAIRS_FIT:
        return Products(words=adds != native.EXACTLY)
    fits = pairs_that_fit(weight, geometry, most)
    return Products(words=False, fits=fits, most=0 if fits else most)


def _winograd_side(calls: Any, weight: Tensor, geometry: Geometry, direct: DirectProducts | None) -> int:
    """The side of the squares for which a library computes a convolution by Winograd's algorithm: that which takes the
    fewest products of words. 0 where the direct kernel takes as few, or weights or channels do not fit.

    Where bytes are multiplied exactly, the fewer products of F(2 x 2, 3 x 3) gain nothing, and those of F(4 x 4, 3 x 3)
    only if enough channels share the transforms, and the processor is quick at these.
    """
    least, adds = calls.hago_winograd_channels(), calls.hago_adds_bytes(0)
    exactly = adds == native.EXACTLY
    shared = min(geometry.channels, geometry.out_channels) if exactly else geometry.channels
    if not geometry.fits_winograd or not 0 < least <= shared // geometry.groups:
        return 0
    sides = [
        side
        for side in ((4,) if exactly else (2, 4))
        if sums_fit_winograd(weight, side) and (side == 2 or weight.numel() <= MOST_IN_FOURS)
    ]
    if not sides:
        return 0
    height, width = geometry.sample or (4, 4)
    window = direct(calls, shared // geometry.groups) if exactly and direct is not None else _DIRECT[adds]
    products = {0: window * height * width}
    products |= {n: (n + 2) ** 2 * -(-height // n) * -(-width // n) for n in sides}
    return min(products, key=products.__getitem__)  # of equal ones the smaller squares


def pack_for(calls: Any, weight: Tensor, geometry: Geometry, most: int | None, tiles: bool) -> Packed:
    """Pack weights of shape (out, in / groups, h, w) for the products of a library.

    Args:
        calls, most: as in `products_of`.
        tiles: whether to pack them for matrix tiles, if products are of bytes.
    """
    how = products_of(calls, weight, geometry, most)
    return replace(pack(calls, weight, geometry, how, tiles), fits=how.fits)


def pack(calls: Any, weight: Tensor, geometry: Geometry, how: Products, tiles: bool) -> Packed:
    """Pack weights of shape (out, in / groups, h, w): depthwise ones by channel, others in panels.

    Args:
        calls: the library.
        how: the products. Weights that take many runs of four to fit are packed as words.
        tiles: whether to lay panels out for matrix tiles; of int8 only.
    """
    widest = calls.hago_widest_panel()
    if how.winograd:
        return _pack_points(weight, geometry, widest, how.winograd)
    centered, weight, tiles = weight, weight.to(torch.int16 if how.words else torch.int8), tiles and not how.words
    size = weight.element_size()
    four = 4 // size  # values in four bytes
    sums = weight.to(torch.int64).flatten(1).sum(1)
    if geometry.by_channel:
        return _pack_channels(weight, sums)
    gather, woven = _gather(geometry, four), _woven(geometry) if tiles else 0
    taps = _weave(weight, woven) if woven else _by_taps(weight, geometry, gather)
    room, panel, panels = _in_panels(taps, geometry, widest, four)
    depth = room.shape[3]
    if how.most:
        lanes = room.reshape(geometry.groups, panels, -1, VECTOR, *room.shape[2:]).permute(0, 1, 2, 4, 5, 3)
        most_cost = MOST_COST + WIDENING / (geometry.out_channels // geometry.groups)
        found = _pack_fours(calls, lanes.flatten(0, 2), how.most, most_cost)
        if found is None:
            return pack(calls, centered, geometry, Products(words=True), tiles)
        laid, fours = found
        return Packed(laid, sums, panel, panels, depth, taps.shape[1], gather, fours=fours)
    step = depth if woven else STEP
    steps = -(-taps.shape[1] * depth // step) if tiles else 0
    laid = _tiled(room, steps, step) if steps else _paneled(room, panel, four)
    return Packed(laid.contiguous(), sums, panel, panels, depth * size, taps.shape[1], gather, steps, woven)


def _pack_points(weight: Tensor, geometry: Geometry, widest: int, side: int) -> Packed:
    """Pack `winograd_weights`: as words, with their points as taps."""
    room, panel, panels = _in_panels(winograd_weights(weight, side), geometry, widest, four=2)
    laid, sums = _paneled(room, panel, four=2).contiguous(), weight.to(torch.int64).flatten(1).sum(1)
    return Packed(laid, sums, panel, panels, 2 * room.shape[3], room.shape[2], AT_PIXELS, winograd=side)


def _in_panels(taps: Tensor, geometry: Geometry, widest: int, four: int) -> tuple[Tensor, int, int]:
    """(out, tap, value of a tap) as (group, channel, tap, value of a tap), filled up with zeros to whole panels and to
    multiples of `four` values; the channels of a panel, and the panels of a group."""
    each = geometry.out_channels // geometry.groups
    panel = _panel(each, widest)
    panels = -(-each // panel)
    depth = -(-taps.shape[2] // four) * four
    room = torch.zeros(geometry.groups, panels * panel, taps.shape[1], depth, dtype=taps.dtype)
    room[:, :each, :, : taps.shape[2]] = taps.reshape(geometry.groups, each, taps.shape[1], -1)
    return room, panel, panels


def _pack_fours(
    calls: Any, lanes: Tensor, most: int, most_cost: float
) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]] | None:
    """Pack weights in runs of four whose pairs fit. They cost (runs - PAIRED_GAIN * runs in pairs) / least runs, where
    the least are those that would do if all pairs fitted.

    Args:
        lanes: int8 (vectors, taps, depth, channels of a vector).
        most: the largest byte by which they are multiplied.
        most_cost: the most that they may cost.

    Returns:
        The runs, and `Packed.fours`; None if they cost more.
    """
    vectors, taps, depth, _ = lanes.shape
    firsts, places, weight = fours_that_fit(lanes.flatten(0, 1), most)
    starts = firsts[::taps].to(torch.int64)  # of vectors
    least = int((starts.diff() > 0).sum()) * taps * depth // 4  # vectors of zeros take none
    if (1 - PAIRED_GAIN) * len(weight) > most_cost * least:
        return None
    order, paired = pair_fours(calls, weight, starts, most)
    if len(weight) - PAIRED_GAIN * int(paired.sum()) > most_cost * least:
        return None
    tap = (torch.arange(vectors * taps, dtype=torch.int32) % taps).repeat_interleave(firsts.diff())
    interleaved = torch.stack([starts[:-1], starts[:-1] + paired], 1).flatten()
    four_starts = torch.cat([interleaved, starts[-1:]]).to(torch.int32)
    return weight[order], (four_starts, places[order], tap[order])


def fours_that_fit(lanes: Tensor, most: int) -> tuple[Tensor, Tensor, Tensor]:
    """Split weights into runs of four neighbours, so that 16 bits hold the sum of the first two products of each run,
    and of the last two, whatever the input: VPMADDUBSW, which saturates such sums, is exact.

    Where two neighbours do not fit, the second is left to the next run, so runs overlap. Every weight is in one run;
    the others have zero in its place. Any weight fits beside a zero, since 255 * 128 < 2**15, so there is always a
    split, and of those into runs that each cover neighbours, the one that is returned has the fewest: each run covers
    as many weights as it can, and to begin farther on never takes more runs.

    Args:
        lanes: int8 (vectors, depth, channels of a vector), with a depth that is a multiple of 4. A run holds weights of
            all channels of a vector.
        most: the largest byte by which weights are multiplied.

    Returns:
        int32 (vectors + 1,), the number of the first run of each vector, and the number of all runs.
        int32 (runs,), the place of the first weight of each.
        int8 (runs, channels of a vector, 4).
    """
    vectors, depth, _ = lanes.shape
    highest, lowest = (part[:, 1:] + part[:, :-1] for part in _signed_parts(lanes))
    fit = _fits(highest, lowest, most).all(2)
    at = torch.arange(depth - 3)
    first, second = fit[:, : depth - 3], fit[:, 2:].int()
    # for every weight, the run that reaches farthest from it on, and where it ends
    places, ends = torch.zeros(2, vectors, depth + 1, dtype=torch.int64)
    ends[:, depth] = depth
    for before, reach in enumerate(
        (torch.where(first, 3 + second, 1), 3 + second, 3 + second, torch.full_like(second, 4))
    ):
        # runs that begin `before` it, so that it is the first, the second, the third or the fourth of theirs
        place, end = (part[:, before : depth - 3 + before] for part in (places, ends))
        better = at + reach > end
        place.copy_(torch.where(better, at, place))
        end.copy_(torch.where(better, at + reach, end))
    # weights that are zero for all channels are in no run
    filled = torch.where((lanes != 0).any(2), torch.arange(depth), depth)
    following = F.pad(filled.flip(1).cummin(1).values.flip(1), (0, 1), value=depth)
    onward = following.gather(1, ends)
    begins = torch.zeros(vectors, depth + 1, dtype=torch.bool)
    begin = following[:, :1]
    while int(begin.min()) < depth:
        begins.scatter_(1, begin, True)
        begin = onward.gather(1, begin)
    vector, own = begins[:, :depth].nonzero(as_tuple=True)
    place, end = places[vector, own], ends[vector, own]
    covered = place[:, None] + torch.arange(4)
    taken = (covered >= own[:, None]) & (covered < end[:, None])
    weight = torch.where(taken[..., None], lanes[vector[:, None], covered], 0).mT.contiguous()
    firsts = F.pad(begins[:, :depth].sum(1).cumsum(0), (1, 0))
    return firsts.to(torch.int32), place.to(torch.int32), weight


def pair_fours(calls: Any, weight: Tensor, firsts: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Pair runs of four of which 16 bits hold the sums of the products of both, so that one addition of them in 32 bits
    serves two.

    Args:
        calls: the library of kernels, which computes it.
        weight: int8 (runs, channels of a vector, 4).
        firsts: int64 (vectors + 1,), the number of the first run of each vector, and the number of all runs.
        most: the largest byte by which weights are multiplied, from 1 to 255.

    Returns:
        int64 (runs,), the numbers of the runs of each vector: first those in pairs, one pair after the other.
        int32 (vectors,), how many of each are in pairs.
    """
    order = torch.empty(len(weight), dtype=torch.int64)
    paired = torch.empty(len(firsts) - 1, dtype=torch.int32)
    pointers = (tensor.data_ptr() for tensor in (weight, firsts))
    calls.hago_pair_fours(*pointers, len(paired), most, order.data_ptr(), paired.data_ptr())
    return order, paired


def _signed_parts(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Weights with the negative ones set to zero, and with the positive ones set to zero, as int32."""
    return weight.clamp_min(0).to(torch.int32), weight.clamp_max(0).to(torch.int32)


def _fits(highest: Tensor, lowest: Tensor, most: int) -> Tensor:
    """Whether 16 bits hold sums of products of weights by bytes from 0 to `most`.

    A sum is greatest where the bytes of positive weights are `most` and the others are 0, and least where those of
    negative weights are.

    Args:
        highest, lowest: the sums of the positive weights, and of the negative ones.
    """
    return (most * highest < 2**15) & (most * lowest >= -(2**15))


def pairs_that_fit(weight: Tensor, geometry: Geometry, most: int) -> int:
    """How many sums of two products, of neighbouring bytes by weights, 16 bits hold whatever the input, so that
    VPMADDUBSW is exact: 4, 2 or 1; 0 where a single one may exceed them.

    Args:
        weight: integers of 8 bits, of shape (out, in / groups, h, w).
        most: the largest byte that is read, as an unsigned one.
    """
    taps = _by_taps(weight, geometry, _gather(geometry, 4))
    fours, fit = -(-taps.shape[2] // 4), 0
    for count in (1, 2, 4):
        runs = -(-fours // count)
        filled = F.pad(taps, (0, runs * count * 4 - taps.shape[2]))
        # in a run, the sums of the first two bytes of each four are added, and those of the last two
        lanes = filled.reshape(*taps.shape[:2], runs, count, 2, 2)
        highest, lowest = (part.sum((3, 5)) for part in _signed_parts(lanes))
        if not bool(_fits(highest, lowest, most).all()):
            break
        fit = count
    return fit


def sums_fit_winograd(weight: Tensor, side: int) -> bool:
    """Whether int32 holds what Winograd's algorithm for squares of a side makes of sums of products, before it divides
    them, for weights of shape (out, in / groups, h, w) and bytes less their zero point, which is one of them."""
    highest, lowest = (part.flatten(1).sum(1).abs().max() for part in _signed_parts(weight.to(torch.int64)))
    return _MULTIPLIED[side] * 255 * int(max(highest, lowest)) < 2**31


def winograd_weights(weight: Tensor, side: int) -> Tensor:
    """Weights of 3 x 3 as the points of Winograd's F(2 x 2, 3 x 3) or F(4 x 4, 3 x 3): GgG' of Lavin and Gray, "Fast
    Algorithms for Convolutional Neural Networks" (2016), with the integers of `WINOGRAD`.

    Args:
        weight: integers of 8 bits, of shape (out, in / groups, 3, 3), of which `sums_fit_winograd`.
        side: of the squares of pixels that are computed together, 2 or 4.

    Returns:
        int16 (out, point, in / groups).
    """
    g = torch.tensor(WINOGRAD[side])
    return (g @ weight.to(torch.int64) @ g.T).flatten(2).mT.to(torch.int16)


def _by_taps(weight: Tensor, geometry: Geometry, gather: int) -> Tensor:
    """Weights of shape (out, in / groups, h, w) as (out, tap, value of a tap), for a way to read windows."""
    taps = weight.permute(0, 2, 3, 1).reshape(geometry.out_channels, -1, weight.shape[1])
    if gather == AT_PIXELS:
        return taps
    return taps.reshape(geometry.out_channels, geometry.kernel[0] if gather == IN_ROWS else 1, -1)


def tiles_pay(geometry: Geometry) -> bool:
    """Whether matrix tiles are faster than vector instructions."""
    return geometry.window >= LEAST_TILED or (geometry.kernel[0] > 1 and _woven(geometry) > 0)


def _woven(geometry: Geometry) -> int:
    """The rows of a window that a step of tiles reads together; 0 if windows are not read by rows."""
    height, row = geometry.kernel[0], geometry.kernel[1] * geometry.channels
    if _gather(geometry, 4) != IN_ROWS or row > STEP:
        return 0
    steps = -(-height // min(STEP // row, MOST_WOVEN))
    return -(-height // steps)


def _weave(weight: Tensor, rows: int) -> Tensor:
    """Weights of shape (out, in, h, w) as (out, step, w * rows * in), padded with rows of zeros."""
    out, channels, height, width = weight.shape
    steps = -(-height // rows)
    taps = F.pad(weight.permute(0, 2, 3, 1), (0, 0, 0, 0, 0, steps * rows - height))
    return taps.reshape(out, steps, rows, width, channels).transpose(2, 3).reshape(out, steps, -1)


def _gather(geometry: Geometry, four: int) -> int:
    """How a window is read: pixel by pixel; or with few channels row by row, or as a patch if rows have gaps."""
    if geometry.channels // geometry.groups % four == 0:
        return AT_PIXELS
    return IN_ROWS if geometry.groups == 1 and geometry.dilation[1] == 1 else IN_PATCH


def _paneled(room: Tensor, panel: int, four: int) -> Tensor:
    """(group, channel, tap, value of a tap) as [group][panel][tap][depth / four][panel channels][four]."""
    groups, channels, taps, depth = room.shape
    return room.reshape(groups, channels // panel, panel, taps, depth // four, four).permute(0, 1, 3, 4, 2, 5)


def _tiled(room: Tensor, steps: int, step: int) -> Tensor:
    """(group, channel, tap, value of a tap) as [16 channels of a panel][step][step / 4][16 channels][4], with windows
    padded with zeros."""
    windows = room.reshape(-1, room.shape[2] * room.shape[3])
    windows = F.pad(windows, (0, steps * step - windows.shape[1]))
    return windows.reshape(-1, LANES, steps, step // 4, 4).permute(0, 2, 3, 1, 4)


def _panel(channels: int, widest: int) -> int:
    """The channels of a panel: the fewest that give the least number of panels."""
    panels = -(-channels // widest)
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
