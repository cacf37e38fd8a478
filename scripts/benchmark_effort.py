"""Quality and cost of efforts and of sets of corrections: SQNR on samples that calibration did not see, and processor
time in passes of the float network over the calibration samples, import and calibration included, as a table.

    python scripts/benchmark_effort.py --assets DIR --models mobilenetv2_cifar96 --hardware vta
    python scripts/benchmark_effort.py --assets DIR --corrections none equalization rounding+bias

A setting is an effort of a search (`search:best`), of one shot (`one_shot:fast`), or corrections in one shot, joined by
`+`. One thread.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from _assets import NAMES, Asset, load, outputs, sqnr

import hago
from hago.plan import Strategy
from hago.search.effort import EFFORTS

MODELS = ["cifar_resnet20", "mobilenetv2_cifar96", "minilm"]
EFFORT_SETTINGS = [f"{kind}:{name}" for kind in ("one_shot", "search") for name in EFFORTS]


def forward_seconds(asset: Asset) -> float:
    """Processor time of the float network over the calibration samples, the median of five."""
    times = []
    for _ in range(5):
        begun = time.process_time()
        outputs(asset.module, asset.calibration)
        times.append(time.process_time() - begun)
    return sorted(times)[2]


def maker(asset: Asset, chip: str, setting: str) -> Callable[[], Strategy]:
    """What makes the strategy of a setting."""
    kind, _, name = setting.partition(":")
    given: tuple[Any, str, Any] = (asset.module, chip, asset.calibration)
    if kind == "search":
        return lambda: hago.search_quantize_strategy(*given, effort=name, progress=False)[0]
    how: dict[str, Any] = {"effort": name} if kind == "one_shot" else {"corrections": setting.split("+")}
    return lambda: hago.quantize(*given, **how).strategy


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--assets", required=True)
    parser.add_argument(
        "--models", nargs="+", default=["cifar_resnet20", "mobilenetv2_cifar96", "minilm"], choices=NAMES
    )
    parser.add_argument("--hardware", nargs="+", default=["vta", "x86_vnni"])
    parser.add_argument("--corrections", nargs="+", default=EFFORT_SETTINGS, metavar="SETTING", dest="settings")
    parser.add_argument("--calibration", type=int, default=256, help="calibration samples")
    parser.add_argument("--test", type=int, default=512, help="test samples")
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", hago.HagoWarning)
    print("| network | hardware | setting | dB on unseen samples | forwards | kept |")
    print("|---|---|---|---|---|---|")
    for name in args.models:
        asset = load(args.assets, name, args.calibration, args.test)
        reference, forward = outputs(asset.module, asset.test), forward_seconds(asset)
        for chip in args.hardware:
            for setting in args.settings:
                make, begun = maker(asset, chip, setting), time.process_time()
                strategy = make()
                cost = (time.process_time() - begun) / forward
                simulated = hago.create_quantizer(asset.module, chip, strategy, asset.calibration[0]).simulate()
                found = sqnr(reference, outputs(simulated, asset.test))
                passes = strategy.made_by.get("passes", ())
                kept = " ".join(f"{'+'.join(p['names'])} {p['after'] - p['before']:+.1f}" for p in passes if p["kept"])
                taken = f" (taken: {strategy.made_by['taken']})" if "taken" in strategy.made_by else ""
                print(f"| {name} | `{chip}` | {setting} | {found:.2f} | {cost:.0f} | {kept}{taken} |", flush=True)


if __name__ == "__main__":
    main()
