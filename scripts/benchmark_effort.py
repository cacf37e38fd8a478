"""Quality and cost of efforts and of sets of corrections: SQNR on samples that calibration did not see, and processor
time in passes of the float network over the calibration samples, import and calibration included, as a table.

    python scripts/benchmark_effort.py --assets DIR --models mobilenetv2_cifar96 --hardware vta
    python scripts/benchmark_effort.py --assets DIR --corrections none equalization rounding+bias
    python scripts/benchmark_effort.py --assets DIR --stages

A setting is an effort of a search (`search:best`), of one shot (`one_shot:fast`), or corrections in one shot, joined by
`+`. One thread.

With --stages, one shot without corrections and with the default ones is divided into its stages instead, in forwards;
medians of --rounds, in which the forward is timed between the two.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from _assets import NAMES, Asset, load, outputs, sqnr
from _command_shares import OTHER, Parts, sampled

import hago
from hago.plan import Strategy
from hago.search.effort import EFFORTS

MODELS = ["cifar_resnet20", "mobilenetv2_cifar96", "minilm"]
EFFORT_SETTINGS = [f"{kind}:{name}" for kind in ("one_shot", "search") for name in EFFORTS]
#: The stages of one shot that corrections do not change, see `_command_shares.PARTS`.
PREPARING: Parts = {
    "import": (("hago/importing.py", ""),),
    "float outputs": (("hago/search/evaluate.py", "__init__"),),
    "calibration": (("hago/search/preparation.py", "prepare"),),
}
#: All of its stages; what has no rule is OTHER.
STAGES: Parts = {
    **PREPARING,
    "calibrating anew": (("hago/search/preparation.py", "corrected"),),
    "splits and equalization": (
        ("hago/search/split.py", "find_splits"),
        ("hago/search/equalize.py", "find_equalization"),
    ),
    "thresholds of outputs": (("hago/search/output_thresholds.py", ""),),
    "rounding and biases": (("hago/search/layer_correction.py", ""), ("hago/search/float_layers.py", "")),
    "bits and their plans": (("hago/search/safe_bits.py", "widest_safe_bits"), ("hago/plan/resolve.py", "")),
    "measuring": (("hago/search/evaluate.py", "measure"),),
    OTHER: (),
}


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


def stage_forwards(asset: Asset, chip: str, rounds: int) -> dict[str, dict[str, float]]:
    """The forwards of every stage, without corrections and with the default ones."""
    rows: dict[str, dict[str, list[float]]] = {"none": defaultdict(list), "default": defaultdict(list)}
    for number in range(rounds + 1):
        for name, row in rows.items():
            seconds: dict[str, float] = defaultdict(float)
            corrections = "none" if name == "none" else None
            before = forward_seconds(asset)
            with sampled(seconds, STAGES, time.process_time):
                hago.quantize(asset.module, chip, asset.calibration, corrections=corrections)
            forward = (before + forward_seconds(asset)) / 2
            for stage in STAGES if number else ():  # the first round compiles kernels
                row[stage].append(seconds[stage] / forward)
    return {name: {s: statistics.median(values) for s, values in row.items()} for name, row in rows.items()}


def print_stages(args: argparse.Namespace) -> None:
    """Print the stages of one shot of every network on every chip."""
    for name in args.models:
        asset = load(args.assets, name, args.calibration, 1)
        for chip in args.hardware:
            found = stage_forwards(asset, chip, args.rounds)
            print(f"{name}, {chip}, {args.calibration} samples, one forward takes {forward_seconds(asset):.2f} s")
            for stage in STAGES:
                print(f"  {stage:24}" + "".join(f"{row[stage]:8.2f}" for row in found.values()))
            whole, after_preparing = (
                [sum(forwards for stage, forwards in row.items() if stage not in left_out) for row in found.values()]
                for left_out in ({}, PREPARING)
            )
            print(f"  {'whole':24}" + "".join(f"{forwards:8.2f}" for forwards in whole))
            print(f"  {'for corrections':24}{after_preparing[1] - after_preparing[0]:16.2f}\n", flush=True)


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
    parser.add_argument("--stages", action="store_true", help="divide one shot into its stages")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="of --stages; default: %(default)s")
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", hago.HagoWarning)
    if args.stages:
        print_stages(args)
        return
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
