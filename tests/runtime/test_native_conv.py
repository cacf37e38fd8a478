"""The native convolution is exact for all windows, edges and zero points, on every instruction set of this machine."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, Final

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from hago.runtime.native import library as native
from hago.runtime.native import self_test, timing
from hago.runtime.native.requantize import StorageFormat
from hago.runtime.native.self_test import check_squares, packed_sums
from hago.runtime.native.weights import (
    Geometry,
    KernelConstantCache,
    Packed,
    Products,
    fours_that_fit,
    pack,
    pack_for,
    pair_fours,
    pairs_that_fit,
    products_of,
    sums_fit_winograd,
    winograd_weights,
)
from runtime.instruction_sets import INSTRUCTION_SETS, library_for

sides = st.sampled_from([1, 2, 3, 3, 4, 5, 7])
pairs = st.tuples(st.integers(1, 3), st.integers(1, 3))


def sums_of(calls: Any, x: Tensor, w: Tensor, geometry: Geometry, zero: int, tiles: bool) -> Tensor:
    """Sums of the kernel, of values whose zero point is `zero`."""
    most = None if x.dtype == torch.int16 else max(int(x.max()), zero) + 128 * (x.dtype == torch.int8)
    return packed_sums(calls, x, pack_for(calls, w, geometry, most, tiles), geometry, source_of(x, zero))


def source_of(x: Tensor, zero: int) -> StorageFormat:
    """How values are stored."""
    return native.TYPES[str(x.dtype).removeprefix("torch.")], zero


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@settings(max_examples=150, deadline=None)
@given(
    kernel=st.tuples(sides, sides),
    stride=pairs,
    padding=st.tuples(st.integers(0, 3), st.integers(0, 3)),
    dilation=pairs,
    images=st.integers(1, 3),
    size=st.tuples(st.integers(7, 24), st.integers(7, 24)),
    channels=st.sampled_from(
        [
            *((3, 64, 1), (1, 16, 1), (18, 33, 1), (30, 16, 1), (8, 20, 1), (64, 64, 1), (128, 16, 1), (16, 200, 2)),
            *((6, 6, 6), (32, 32, 32), (64, 64, 64), (70, 70, 70), (120, 120, 120)),
        ]
    ),
    dtype=st.sampled_from([torch.uint8, torch.int8, torch.int16]),
    zero=st.sampled_from([0, 0, 7, 255]),
    bits=st.sampled_from([8, 8, 7, 6, 4]),
    seed=st.integers(0, 2**20),
)
# fewer pixels than a matrix tile has rows, and windows between them that are of no pixel
@example(
    kernel=(3, 3),
    stride=(1, 1),
    padding=(1, 1),
    dilation=(1, 1),
    images=1,
    size=(3, 4),
    channels=(128, 16, 1),
    dtype=torch.uint8,
    zero=7,
    bits=8,
    seed=0,
)
def test_sums_are_exact(
    instruction_set: str,
    kernel: tuple[int, int],
    stride: tuple[int, int],
    padding: tuple[int, int],
    dilation: tuple[int, int],
    images: int,
    size: tuple[int, int],
    channels: tuple[int, int, int],
    dtype: torch.dtype,
    zero: int,
    bits: int,
    seed: int,
) -> None:
    library = library_for(instruction_set)
    assume(all(n + 2 * p > d * (k - 1) for n, p, d, k in zip(size, padding, dilation, kernel, strict=True)))
    generator = torch.Generator().manual_seed(seed)
    each, out, groups = channels[0] // channels[2], channels[1], channels[2]
    words, ends = dtype == torch.int16, torch.iinfo(dtype)
    x = torch.randint(ends.min, ends.max + 1, (images, channels[0], *size), generator=generator, dtype=dtype)
    zero = 0 if words else zero + ends.min
    kind = torch.int16 if words else torch.int8
    w = torch.randint(torch.iinfo(kind).min, torch.iinfo(kind).max + 1, (out, each, *kernel), generator=generator)
    if not words:
        w = w.clamp(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)  # so that 16 bits hold sums of pairs of products
    exact = F.conv2d(x.double() - zero, w.double(), None, stride, padding, dilation, groups)
    geometry = Geometry(channels[0], out, groups, kernel, stride, padding, dilation)
    for tiles in (False, True)[: 1 + (library.has_tiles and not words)]:
        found = sums_of(library.calls, x, w.to(kind), geometry, zero, tiles)
        assert torch.equal(found, exact.to(torch.int64).to(torch.int32))  # modulo 2**32


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@settings(max_examples=100, deadline=None)
@given(
    padding=st.tuples(st.integers(0, 3), st.integers(0, 3)),
    images=st.integers(1, 3),
    size=st.tuples(st.integers(1, 20), st.integers(1, 20)),
    channels=st.sampled_from([(34, 16, 1), (50, 33, 1), (64, 80, 1), (32, 1, 1), (68, 24, 2), (128, 64, 1)]),
    dtype=st.sampled_from([torch.uint8, torch.int8]),
    zero=st.sampled_from([0, 0, 7, 255]),
    extreme=st.booleans(),
    threads=st.integers(1, 2),
    side=st.sampled_from([2, 4]),
    seed=st.integers(0, 2**20),
)
def test_sums_of_squares_of_pixels_are_exact(
    instruction_set: str,
    padding: tuple[int, int],
    images: int,
    size: tuple[int, int],
    channels: tuple[int, int, int],
    dtype: torch.dtype,
    zero: int,
    extreme: bool,
    threads: int,
    side: int,
    seed: int,
) -> None:
    calls = library_for(instruction_set).calls
    assume(all(n + 2 * p >= 3 for n, p in zip(size, padding, strict=True)))
    generator, ends = torch.Generator().manual_seed(seed), torch.iinfo(dtype)
    x = torch.randint(ends.min, ends.max + 1, (images, channels[0], *size), generator=generator, dtype=dtype)
    w = torch.randint(-128, 128, (channels[1], channels[0] // channels[2], 3, 3), generator=generator)
    if extreme:
        x = torch.where(torch.rand(x.shape, generator=generator) < 0.5, ends.max, ends.min).to(dtype)
        w = torch.where(torch.rand(w.shape, generator=generator) < 0.5, -128, 127)
    zero += ends.min
    geometry = Geometry(channels[0], channels[1], channels[2], (3, 3), (1, 1), padding, (1, 1))
    assume(sums_fit_winograd(w, side))
    packed = pack(calls, w, geometry, Products(words=True, winograd=side), tiles=False)
    exact = F.conv2d(x.double() - zero, w.double(), None, 1, padding, 1, channels[2])
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        found = packed_sums(calls, x, packed, geometry, source_of(x, zero))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found, exact.to(torch.int32))


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@pytest.mark.parametrize(("side", "times", "largest"), [(2, 4, 9), (4, 64, 144)])
@pytest.mark.parametrize("sign", [1, -1])
def test_weights_are_transformed_where_int32_holds_their_sums(
    instruction_set: str, side: int, times: int, largest: int, sign: int
) -> None:
    calls = library_for(instruction_set).calls
    # the others have no part in the largest sum
    weight = torch.full((2, 4096, 3, 3), -sign * 3, dtype=torch.int8)
    held = (2**31 - 1) // (times * 255)
    flat = weight[1].permute(1, 2, 0).flatten()
    flat[: held // 127] = sign * 127
    flat[held // 127] = sign * (held % 127)
    weight[1] = flat.view(3, 3, -1).permute(2, 0, 1)
    assert sums_fit_winograd(weight, side)
    flat[held // 127] += sign
    beyond = weight.clone()
    beyond[1] = flat.view(3, 3, -1).permute(2, 0, 1)
    assert not sums_fit_winograd(beyond, side)
    geometry = Geometry(4096, 2, 1, (3, 3), (1, 1), (1, 1), (1, 1))
    x = torch.where(weight[1] * sign > 0, 255, 0).to(torch.uint8)[None]
    packed = pack(calls, weight, geometry, Products(words=True, winograd=side), tiles=False)
    found = packed_sums(calls, x, packed, geometry, source_of(x, 0))
    assert torch.equal(found, F.conv2d(x.double(), weight.double(), padding=1).to(torch.int32))
    assert int(found[0, 1, 1, 1]) == sign * 255 * held
    points = winograd_weights(torch.full((1, 1, 3, 3), -128), side)
    assert points.shape == (1, (side + 2) ** 2, 1) and int(points.abs().max()) == largest * 128


def test_the_side_of_squares_is_that_of_the_fewest_products() -> None:
    """It is the larger one where int32 holds the sums and the transformed weights are not too many."""
    generator = torch.Generator().manual_seed(0)

    def side(adds: int, least: int, channels: int, out: int, *, weight: int | None = None, **sizes: Any) -> int:
        calls = SimpleNamespace(hago_winograd_channels=lambda: least, hago_adds_bytes=lambda by_channel: adds)
        w = torch.randint(-9, 9, (out, channels, 3, 3), generator=generator)
        w = w if weight is None else torch.full_like(w, weight)
        geometry = Geometry(channels, out, 1, (3, 3), (1, 1), (1, 1), (1, 1), sizes.get("size"))
        return products_of(calls, w, geometry, 255, sizes.get("direct")).winograd

    for adds in (native.NEVER, native.IF_PAIRS_FIT):
        assert [side(adds, 16, *channels) for channels in ((16, 8), (256, 256), (512, 512), (14, 64))] == [4, 4, 2, 0]
        assert side(adds, 16, 128, 64, weight=127) == 2
        assert side(adds, 0, 64, 64) == 0
        # squares pass the edges of small images
        sides = {n: side(adds, 16, 64, 64, size=(n, n)) for n in (1, 2, 3, 4, 5, 6, 7, 8, 14)}
        assert sides == {1: 0, 2: 2, 3: 4, 4: 4, 5: 2, 6: 2, 7: 4, 8: 4, 14: 4}
    # where bytes are multiplied twice as fast as words
    wide = [side(native.EXACTLY, 64, *channels) for channels in ((64, 64), (64, 32), (32, 64), (512, 512))]
    assert wide == [4, 0, 0, 0] and side(native.EXACTLY, 64, 128, 64, weight=127) == 0
    assert [side(native.EXACTLY, 64, 64, 64, size=(n, n)) for n in (2, 3, 5, 6, 7)] == [0, 4, 0, 4, 4]
    # as the processor was timed; others are not asked
    asked = []

    def slow_at_many_channels(calls: Any, channels: int) -> float:
        asked.append(channels)
        return 2.0 if channels > 100 else 4.0

    ways = [side(native.EXACTLY, 64, n, 2 * n, direct=slow_at_many_channels) for n in (32, 64, 128)]
    assert ways == [0, 4, 0] and asked == [64, 128]
    assert side(native.NEVER, 16, 128, 256, direct=slow_at_many_channels) == 4 and asked == [64, 128]


def test_of_runs_that_take_turns_the_least_times_count(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, runs = [0.0], list[str]()
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])

    def run(name: str, seconds: list[float]) -> None:
        runs.append(name)
        clock[0] += seconds.pop()

    durations = [[5.0, 3.0, 9.0, 4.0, 6.0], [7.0, 8.0, 2.0, 8.0, 7.0]]
    assert timing.least_seconds(*(partial(run, name, of) for name, of in zip("ab", durations, strict=True))) == [3, 2]
    assert runs == list("ab" * timing.ROUNDS)


def test_the_direct_kernel_is_timed_once_for_as_many_channels(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes, calls = list[tuple[int, ...]](), library_for("").calls

    def measured(*runs: Callable[[], Tensor]) -> list[float]:
        direct, fours = (run() for run in runs)
        assert torch.equal(direct, fours)
        shapes.append(tuple(direct.shape))
        return [3.0, 2.0]

    monkeypatch.setattr(timing, "least_seconds", measured)
    timing._direct_products.cache_clear()
    assert [timing.direct_products(calls, n) for n in (64, 127, 128, 512)] == [36 / 16 * 3 / 2] * 4
    assert shapes == [(1, 64, 56, 56), (1, 128, 28, 28), (1, 256, 16, 16)]
    timing._direct_products.cache_clear()


def test_images_of_several_sizes_share_weights() -> None:
    calls, cache = library_for("").calls, KernelConstantCache()
    w = torch.ones(64, 64, 3, 3, dtype=torch.int8)
    small, large, tiny = (Geometry(64, 64, 1, (3, 3), (1, 1), (1, 1), (1, 1), (n, n)) for n in (8, 56, 1))
    packed = [cache.packed(calls, w, g, 255, tiles=False, transposed=False) for g in (small, large, tiny)]
    assert packed[0].weight is packed[1].weight
    if calls.hago_winograd_channels():
        assert [p.winograd for p in packed] == [4, 4, 0]


@pytest.mark.parametrize("side", [2, 4])
def test_a_wrong_pixel_of_a_square_is_noticed(side: int, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = library_for("").calls
    assert check_squares(calls).exact
    made = self_test.conv_call

    def nearly(calls: Any, geometry: Geometry, packed: Packed, *rest: Any) -> Any:
        call = made(calls, geometry, packed, *rest)

        def run(values: list[Tensor]) -> list[Tensor]:
            (sums,) = call(values)
            sums[0, 19, 3, 6] += packed.winograd == side
            return [sums]

        return run

    monkeypatch.setattr(self_test, "conv_call", nearly)
    verdict = check_squares(calls)
    assert not verdict.exact and verdict.why.startswith("6 of")


def exact_pairs(weight: Tensor, most: int) -> bool:
    """Whether 16 bits hold, for all bytes up to `most`, the sums of two products of neighbours in runs of four."""
    first, second = weight[..., 0::2].to(torch.int64), weight[..., 1::2].to(torch.int64)
    sums = torch.stack([a * first + b * second for a in (0, most) for b in (0, most)])
    return bool(((sums >= -(2**15)) & (sums < 2**15)).all())


def fewest_runs(lanes: Tensor, most: int) -> int:
    """The fewest runs of four that hold all weights (depth, channels) but zeros, of those that hold neighbours each."""
    depth, needed = len(lanes), [0] * (len(lanes) + 1)
    for start in reversed(range(depth)):
        if not bool(lanes[start].any()):
            needed[start] = needed[start + 1]
            continue
        found = []
        for place in range(max(0, start - 3), min(start, depth - 4) + 1):
            run = torch.zeros(lanes.shape[1], 4, dtype=torch.int8)
            for end in range(start + 1, place + 5):
                run[:, end - 1 - place] = lanes[end - 1]
                if not exact_pairs(run, most):
                    break
                found.append(1 + needed[end])
        needed[start] = min(found)
    return needed[0]


@given(
    depth=st.sampled_from([4, 8, 12, 64]),
    most=st.sampled_from([255, 200, 127, 1]),
    spread=st.sampled_from([10, 35, 60, 1000]),
    zeros=st.sampled_from([0.0, 0.5, 0.99, 1.0]),
    seed=st.integers(0, 2**20),
)
def test_fours_that_fit_hold_every_weight_once(depth: int, most: int, spread: int, zeros: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    lanes = (spread * torch.randn(5, depth, 8, generator=generator)).round().clamp(-128, 127).to(torch.int8)
    lanes[torch.rand(5, depth, generator=generator) < zeros] = 0
    firsts, places, weight = fours_that_fit(lanes, most)
    assert int(firsts[0]) == 0 and int(firsts[-1]) == len(places) == len(weight)
    assert len(places) == 0 or (int(places.min()) >= 0 and int(places.max()) <= depth - 4)
    vectors = torch.repeat_interleave(torch.arange(5), firsts.diff().to(torch.int64))
    found = torch.zeros(5, depth, 8, dtype=torch.int64)
    for i in range(4):
        found.index_put_((vectors, places.to(torch.int64) + i), weight[..., i].to(torch.int64), accumulate=True)
    assert torch.equal(found, lanes.to(torch.int64))
    assert exact_pairs(weight, most)
    assert firsts.diff().tolist() == [fewest_runs(vector, most) for vector in lanes]


def test_fours_that_fit_overlap_where_pairs_do_not_fit() -> None:
    lanes = torch.full((1, 8, 8), 64, dtype=torch.int8)
    assert fours_that_fit(lanes, 255)[1].tolist() == [0, 4]
    lanes[0, 2, 5] = 65  # with its neighbours it exceeds 128, the most that fits
    assert [part.tolist() for part in fours_that_fit(lanes, 255)[:2]] == [[0, 3], [0, 3, 4]]
    assert [part.tolist() for part in fours_that_fit(lanes, 254)[:2]] == [[0, 2], [0, 4]]


def both_fit(first: Tensor, second: Tensor, most: int) -> bool:
    """Whether 16 bits hold the sums of the products of two runs of four by bytes up to `most`."""
    parts = torch.stack([first, second]).to(torch.int64).unflatten(2, (2, 2))
    return all(
        most * int(sums.min()) >= -(2**15) and most * int(sums.max()) < 2**15
        for sums in (parts.clamp_min(0).sum((0, 3)), parts.clamp_max(0).sum((0, 3)))
    )


@given(
    counts=st.lists(st.integers(0, 40), min_size=1, max_size=4),
    most=st.sampled_from([255, 200, 150, 128, 1]),
    spread=st.sampled_from([2, 10, 25, 35, 1000]),
    seed=st.integers(0, 2**20),
)
def test_fours_are_paired_where_16_bits_hold_both(counts: list[int], most: int, spread: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = (spread * torch.randn(sum(counts), 8, 4, generator=generator)).round()
    weight = weight.clamp(-128, 127).to(torch.int8)
    firsts = F.pad(torch.tensor(counts).cumsum(0), (1, 0))
    order, paired = pair_fours(native.library().calls, weight, firsts, most)
    for begin, end, count in zip(firsts, firsts[1:], paired.tolist(), strict=False):
        numbers = order[begin:end]
        assert sorted(numbers.tolist()) == list(range(int(begin), int(end)))
        assert count % 2 == 0 and count <= len(numbers)
        assert all(both_fit(weight[a], weight[b], most) for a, b in numbers[:count].reshape(-1, 2))
        alone = weight[numbers[count:]]
        assert not any(both_fit(a, b, most) for i, a in enumerate(alone) for b in alone[:i])


def test_fours_are_paired_among_the_next_thousand_only() -> None:
    # two of the first 1500 do not fit; the others fit beside them, but are more than 1024 places behind the first 476
    weight = torch.full((2000, 8, 4), 40, dtype=torch.int8)
    weight[1500:] = 1
    order, paired = pair_fours(native.library().calls, weight, torch.tensor([0, 2000]), 255)
    assert int(paired) == 1000 and order[:1000].reshape(-1, 2)[[0, -1]].tolist() == [[476, 1500], [975, 1999]]
    assert sorted(order.tolist()) == list(range(2000))


def weights_of(kind: str, out: int, each: int, generator: torch.Generator) -> Tensor:
    """Weights of windows of 3x3, of which some pairs of neighbours do not fit 16 bits."""
    shape = (out, each, 3, 3)
    signs = torch.where(torch.rand(shape, generator=generator) < 0.5, 127, -128)
    if kind == "bell-shaped":
        return (35 * torch.randn(shape, generator=generator)).round().clamp(-128, 127).to(torch.int8)
    if kind == "largest":
        return torch.full(shape, 127, dtype=torch.int8)
    if kind == "alternating":
        return torch.where(torch.arange(each) % 2 == 0, 127, -128)[:, None, None].expand(shape).to(torch.int8)
    # pairs at both ends of 16 bits, and a few beyond
    return torch.where(torch.rand(shape, generator=generator) < 0.02, signs, signs.clamp(-64, 64)).to(torch.int8)


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@pytest.mark.parametrize("kind", ["bell-shaped", "largest", "alternating", "at the ends"])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8])
def test_weights_with_pairs_that_do_not_fit(instruction_set: str, kind: str, dtype: torch.dtype) -> None:
    calls, generator = library_for(instruction_set).calls, torch.Generator().manual_seed(0)
    low = torch.iinfo(dtype).min
    # in squares, in groups, row by row, and as a patch
    for channels, out, groups, dilation in (
        *((64, 40, 1, 1), (256, 16, 1, 1), (64, 24, 2, 1), (3, 16, 1, 1), (18, 8, 1, 1), (18, 8, 1, 2)),
    ):
        geometry = Geometry(channels, out, groups, (3, 3), (1, 1), (1, 1), (dilation, dilation))
        w = weights_of(kind, out, channels // groups, generator)
        ends = torch.randint(0, 2, (2, channels, 7, 9), generator=generator) * 255
        for values in (
            ends,
            torch.full_like(ends, 255),
            (w.sum((0, 2, 3)) > 0).repeat(groups)[:, None, None] * 255 + 0 * ends,
        ):
            x = (values + low).to(dtype)
            for zero in (low, 3):
                exact = F.conv2d(x.double() - zero, w.double(), None, 1, 1, dilation, groups)
                found = sums_of(calls, x, w, geometry, zero, tiles=False)
                assert torch.equal(found, exact.to(torch.int64).to(torch.int32))


#: Channels, output channels, groups, kernel, stride, padding, dilation of convolutions whose bell-shaped weights are
#: split into fours: rows longer than a tile, windows across edges, halves of panels, long and short taps.
WITH_FOURS: Final = (
    *((64, 40, 1, (3, 3), (2, 2), (1, 1), (1, 1)), (32, 24, 1, (3, 3), (1, 2), (1, 1), (1, 1))),
    *((64, 24, 2, (3, 3), (2, 1), (1, 1), (2, 1)), (32, 33, 1, (5, 5), (1, 1), (2, 2), (1, 1))),
    *((64, 8, 1, (1, 1), (2, 2), (1, 1), (1, 1)), (40, 16, 1, (1, 3), (1, 1), (0, 4), (1, 1))),
    *((256, 16, 1, (3, 3), (2, 2), (1, 1), (1, 1)), (72, 48, 1, (1, 1), (1, 1), (0, 0), (1, 1))),
    *((96, 24, 3, (1, 1), (1, 1), (0, 0), (1, 1)), (3, 8, 1, (7, 7), (2, 2), (3, 3), (1, 1))),
)


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8])
@pytest.mark.parametrize("sizes", WITH_FOURS)
def test_windows_of_fours(instruction_set: str, threads: int, dtype: torch.dtype, sizes: tuple[Any, ...]) -> None:
    calls, generator = library_for(instruction_set).calls, torch.Generator().manual_seed(0)
    channels, out, groups, kernel, stride, padding, dilation = sizes
    geometry, low = Geometry(*sizes), torch.iinfo(dtype).min
    w = (30 * torch.randn(out, channels // groups, *kernel, generator=generator)).round().clamp(-128, 127)
    x = (torch.randint(0, 2, (2, channels, 19, 31), generator=generator) * 255 + low).to(dtype)
    split = calls.hago_adds_bytes(0) == native.IF_PAIRS_FIT
    assert bool(pack_for(calls, w, geometry, 255, tiles=False).fours) == split
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for zero in (low, 3):
            exact = F.conv2d(x.double() - zero, w.double(), None, stride, padding, dilation, groups)
            found = sums_of(calls, x, w, geometry, zero, tiles=False)
            assert torch.equal(found, exact.to(torch.int64).to(torch.int32))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("out", [8, 200])
def test_weights_are_words_where_fours_cost_more(out: int) -> None:
    calls = library_for("").calls
    if calls.hago_adds_bytes(0) != native.IF_PAIRS_FIT:
        pytest.skip("the processor adds products of bytes exactly, or never")
    w = (43 * torch.randn(out, 96, 1, 1, generator=torch.Generator().manual_seed(0))).round().clamp(-128, 127)
    geometry = Geometry(96, out, 1, (1, 1), (1, 1), (0, 0), (1, 1))
    packed = pack_for(calls, w, geometry, 255, tiles=False)
    # with many output channels, widening the input costs less than more products
    assert bool(packed.fours) == (out == 8) and packed.weight.dtype == (torch.int8 if out == 8 else torch.int16)
    assert packed.way == (" in fours" if out == 8 else "")
    # of weights of 4 bits, every pair fits
    assert pack_for(calls, (w / 16).round(), geometry, 255, tiles=False).way == " in pairs"


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@pytest.mark.parametrize("sign", [1, -1])
def test_one_pair_that_does_not_fit(instruction_set: str, sign: int) -> None:
    calls, geometry = library_for(instruction_set).calls, Geometry(32, 16, 1, (1, 1), (1, 1), (0, 0), (1, 1))
    x = torch.full((1, 32, 3, 5), 255, dtype=torch.uint8)
    split = calls.hago_adds_bytes(0) == native.IF_PAIRS_FIT
    for place in range(31):
        w = torch.zeros(16, 32, 1, 1, dtype=torch.int8)
        w[::2] = torch.arange(-20, 12)[:, None, None]
        w[place % 16, place : place + 2] = 100 * sign
        packed = pack_for(calls, w, geometry, 255, tiles=False)
        assert bool(packed.fours) == (split and not pairs_that_fit(w, geometry, 255))
        exact = F.conv2d(x.double(), w.double()).to(torch.int32)
        assert torch.equal(sums_of(calls, x, w, geometry, 0, tiles=False), exact)
