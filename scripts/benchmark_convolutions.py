"""Time convolutions of 3 x 3 weights by each way that a library of kernels may multiply: as conv.cpp does, and by
Winograd's F(2 x 2, 3 x 3) and F(4 x 4, 3 x 3).

Ways take turns, and the least time of each counts, in processor time on one thread. Weights are drawn from a normal
distribution, inputs uniformly. Every way must give the same integers as float64; the exit status is 1 if one does not.

    python scripts/benchmark_convolutions.py --shapes 64,64,56 128,128,28 256,256,14 512,512,7 --images 1 32
    HAGO_MAX_CPU_ISA=AVX512_CORE_VNNI python scripts/benchmark_convolutions.py
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from hago.arithmetic.types import INT32, ZERO, QParams
from hago.runtime.native import library as native
from hago.runtime.native.calls import conv_call
from hago.runtime.native.epilogue import Epilogue, StoredOutput
from hago.runtime.native.requantize import AS_IS
from hago.runtime.native.timing import direct_products
from hago.runtime.native.weights import WINOGRAD, Geometry, Products, pack, products_of, sums_fit_winograd

SUMS: Final = QParams(torch.ones((), dtype=torch.float64), ZERO, INT32.min, INT32.max, INT32)
#: Those of ResNet-18 at 224 x 224: channels, output channels, height and width.
SHAPES: Final = ("64,64,56", "128,128,28", "256,256,14", "512,512,7")


def main() -> int:
    """Print the times of every shape; 1 if a value differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=SHAPES, help="channels,output channels,height and width")
    parser.add_argument("--images", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--seconds", type=float, default=1.0, help="of every way, about")
    options = parser.parse_args()
    torch.set_num_threads(1)
    library = native.library()
    if library.calls is None:
        print(library.why)
        return 1
    print(f"kernels {library.why}")
    print(f"{'shape':>14} {'images':>6}  milliseconds, billions of products a second; * is what hago takes")
    differ = False
    for shape in options.shapes:
        channels, out, side = map(int, shape.split(","))
        geometry = Geometry(channels, out, 1, (3, 3), (1, 1), (1, 1), (1, 1), (side, side))
        generator = torch.Generator().manual_seed(0)
        weight = (30 * torch.randn(out, channels, 3, 3, generator=generator)).round().clamp(-127, 127).to(torch.int8)
        found = ways(library.calls, weight, geometry)
        for images in options.images:
            x = torch.randint(0, 256, (images, channels, side, side), generator=generator, dtype=torch.uint8)
            x = x.contiguous(memory_format=torch.channels_last)
            runs = {name: runner(library.calls, x, weight, geometry, how) for name, how in found.items()}
            exact = F.conv2d(x.double(), weight.double(), padding=1)
            differ |= any(not torch.equal(run().double(), exact) for run in runs.values())
            print(
                f"{shape:>14} {images:6}  {times_text(runs, options.seconds, exact.numel() * channels * 9)}", flush=True
            )
    return int(differ)


def ways(calls: native.ctypes.CDLL, weight: Tensor, geometry: Geometry) -> dict[str, Products]:
    """The products that are exact for weights, by name; that which hago takes is marked."""
    adds, taken = calls.hago_adds_bytes(0), products_of(calls, weight, geometry, 255, direct_products)
    found = {"direct": Products(words=adds == native.NEVER, most=255 if adds == native.IF_PAIRS_FIT else 0)}
    if 0 < calls.hago_winograd_channels() <= geometry.channels:
        found |= {f"F({n})": Products(words=True, winograd=n) for n in WINOGRAD if sums_fit_winograd(weight, n)}
    name = f"F({taken.winograd})" if taken.winograd else "direct"
    found[name] = taken
    return {f"{each}*" if each == name else each: how for each, how in found.items()}


def runner(
    calls: native.ctypes.CDLL, x: Tensor, weight: Tensor, geometry: Geometry, how: Products
) -> Callable[[], Tensor]:
    """What computes the sums."""
    packed = replace(pack(calls, weight, geometry, how, tiles=False), fits=how.fits)
    epilogue = Epilogue(geometry.out_channels, [], stored=[StoredOutput("", AS_IS, SUMS)]).build()
    call = conv_call(calls, geometry, packed, (native.TYPES["uint8"], 0), epilogue)
    return lambda: call([x])[0]


def times_text(runs: dict[str, Callable[[], Tensor]], seconds: float, products: int) -> str:
    """The least time of each, by turns."""
    least, begun = dict.fromkeys(runs, float("inf")), time.process_time()
    while time.process_time() - begun < seconds * len(runs):
        for name, run in runs.items():
            started = time.process_time()
            run()
            least[name] = min(least[name], time.process_time() - started)
    return "  ".join(f"{name} {taken * 1e3:.2f}, {products / taken / 1e9:.0f}" for name, taken in least.items())


if __name__ == "__main__":
    sys.exit(main())
