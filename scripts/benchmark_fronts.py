"""Pareto fronts with and without corrections of layers: SQNR on unseen samples at five sizes of the weights.

A front is searched with the default corrections, and once more with those of the graph alone (splitting, equalization).
Sizes are those of 4.5, 5, 6, 7 and 8 bits in every weight. A cell is the SQNR in dB, on samples that the search did not
see, of the point that is the best on the calibration samples and not larger. Time is the processor's on one thread,
import and calibration included, in passes of the float network over the calibration samples.

    python scripts/benchmark_fronts.py --assets DIR --models mlperf_resnet8 cifar_resnet20 --hardware x86_vnni vta
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Sequence

import torch
from _assets import NAMES, Asset, load, outputs, sqnr

import hago
from hago.cost import plan_cost
from hago.search import ParetoFront

BITS = (4.5, 5, 6, 7, 8)
CORRECTIONS = {"of the graph": ["splitting", "equalization"], "default": None}


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--assets", required=True, help="the folder of networks and data")
    parser.add_argument("--models", nargs="+", choices=NAMES, default=["mlperf_resnet8", "cifar_resnet20"])
    parser.add_argument("--hardware", nargs="+", default=["x86_vnni", "vta"])
    parser.add_argument("--calibration", type=int, default=256)
    parser.add_argument("--test", type=int, default=1000)
    options = parser.parse_args(words)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", hago.HagoWarning)
    print("| network, hardware | corrections | " + " | ".join(f"{b:g} bits" for b in BITS) + " | points | forwards |")
    print("|---|---|" + "---|" * (len(BITS) + 2))
    for name in options.models:
        asset = load(options.assets, name, options.calibration, options.test)
        for chip in options.hardware:
            for kind, corrections in CORRECTIONS.items():
                print(f"| {name}, `{chip}` | {kind} | {cells(asset, chip, corrections)} |", flush=True)


def cells(asset: Asset, chip: str, corrections: list[str] | None) -> str:
    """The cells of one search."""
    begun = time.process_time()
    _, score = hago.search_quantize_strategy(
        asset.module, chip, asset.calibration, searcher="pareto", corrections=corrections, progress=False
    )
    seconds = time.process_time() - begun
    begun = time.process_time()
    outputs(asset.module, asset.calibration)
    forwards = seconds / (time.process_time() - begun)
    one_shot = hago.quantize(asset.module, chip, asset.calibration[:1], corrections="none")
    eight = plan_cost(one_shot.plan).weight_bytes  # one shot takes the most bits, 8 on these chips
    unseen = [at_size(asset, chip, score.front, eight * bits / 8) for bits in BITS]
    return " | ".join([*unseen, str(len(score.front)), f"{forwards:.0f}"])


def at_size(asset: Asset, chip: str, front: ParetoFront, most: float) -> str:
    """The SQNR on unseen samples of the best point whose weights take at most so many bytes."""
    within = [point for point in front if point.costs["weight_bytes"] <= most]
    if not within:
        return "-"
    strategy = max(within, key=lambda point: point.score).strategy
    model = hago.create_quantizer(asset.module, chip, strategy).realize()
    return f"{sqnr(outputs(asset.module, asset.test), outputs(model, asset.test)):.1f}"


if __name__ == "__main__":
    main()
