"""Search strategies for networks of an assets folder and keep them under strategies/.

Labels are not used. Each strategy says how it was made, and `hago replay` checks it.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from _assets import NAMES, load

from hago import from_torch, search_quantize_strategy

SMALL = ("lenet", "mlperf_kws", "mlperf_resnet8", "cifar_resnet20")
HARDWARE = ("x86_vnni", "vta", "int16_accumulator")


def main() -> None:
    """Search and save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--assets", required=True, help="the folder of networks and data")
    parser.add_argument("--models", nargs="+", default=list(SMALL), choices=NAMES)
    parser.add_argument("--hardware", nargs="+", default=list(HARDWARE))
    parser.add_argument("--calibration", type=int, default=256, help="samples, without labels")
    parser.add_argument("--budget", default="60 trials")
    parser.add_argument("--out", type=Path, default=Path("strategies"))
    options = parser.parse_args()
    options.out.mkdir(exist_ok=True)
    for model in options.models:
        asset = load(options.assets, model, options.calibration, 8)
        graph = from_torch(asset.module, tuple(t[:2] for t in asset.calibration[0]))
        for hardware in options.hardware:
            path = options.out / f"{model}-{hardware}.json"
            strategy, score = search_quantize_strategy(
                graph, hardware, asset.calibration, budget=options.budget, save=path
            )
            print(f"{path}: {score:.2f} dB, {sum(strategy.bits.values())} bits on {len(strategy.bits)} edges")


if __name__ == "__main__":
    main()
