"""Which of two exact kernels takes less time, where no rule holds for all processors."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable
from typing import Any, Final

import torch

from hago.runtime.native import library as native
from hago.runtime.native.self_test import packed_sums
from hago.runtime.native.weights import Geometry, Products, pack

#: By the channels of the convolution that is timed, the height and width of its images, which squares of four fill.
TIMED: Final = {64: 56, 128: 28, 256: 16}
#: How often each kernel is timed; the least time counts.
ROUNDS: Final = 5
#: Threads would slow down what others time.
_ONE_AT_A_TIME: Final = threading.Lock()


def direct_products(calls: Any, channels: int) -> float:
    """The time that the direct kernel takes for the nine products of a window, as a number of the products of F(4 x 4,
    3 x 3), of which it takes 36 for sixteen windows. Timed once per process, in some tens of milliseconds.

    Args:
        calls: the library; of the products of bytes, those that are exact for all weights are timed, else of words.
        channels: of the convolution, 64 or more.
    """
    with _ONE_AT_A_TIME:
        return _direct_products(calls, max(timed for timed in TIMED if timed <= channels))


@functools.cache
def _direct_products(calls: Any, channels: int) -> float:
    side, generator = TIMED[channels], torch.Generator().manual_seed(0)
    geometry = Geometry(channels, channels, 1, (3, 3), (1, 1), (1, 1), (1, 1), (side, side))
    weight = torch.randint(-9, 10, (channels, channels, 3, 3), generator=generator).to(torch.int8)
    x = torch.randint(0, 256, (1, channels, side, side), generator=generator, dtype=torch.uint8)
    x = x.contiguous(memory_format=torch.channels_last)
    ways = [Products(words=calls.hago_adds_bytes(0) != native.EXACTLY), Products(words=True, winograd=4)]
    packed = [pack(calls, weight, geometry, how, tiles=False) for how in ways]
    source = (native.TYPES["uint8"], 0)
    direct, fours = least_seconds(*(functools.partial(packed_sums, calls, x, p, geometry, source) for p in packed))
    return 36 / 16 * direct / fours


def least_seconds(*runs: Callable[[], object]) -> list[float]:
    """The least time of each of some runs, which take turns."""
    seconds = [float("inf")] * len(runs)
    for _ in range(ROUNDS):
        for index, run in enumerate(runs):
            started = time.perf_counter()
            run()
            seconds[index] = min(seconds[index], time.perf_counter() - started)
    return seconds
