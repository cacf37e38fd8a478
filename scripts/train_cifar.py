"""Fine-tuning on calibration images alone, without labels: what it recovers of what quantization lost.

    python scripts/train_cifar.py --assets DIR --net cifar_resnet20 --bits 4 --budget 5m --seeds 3

Every conv and linear operand (weights and activations, first and last layer included) gets `--bits`; the
strategy is the post-training one on the same calibration images, and training continues it. Tested on
images that are in neither. Intervals are of paired differences over test images, at 95 %.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import _assets
import torch
from torch import Tensor

import hago
from hago.search.intervals import paired_interval


def main() -> None:
    args = _parse()
    torch.set_num_threads(args.threads)
    asset = _assets.load(args.assets, args.net, args.samples, args.test)
    calibrated = sum(len(batch[0]) for batch in asset.calibration)
    fixed = operand_bits(asset, args.hardware, args.bits)
    start = hago.quantize(asset.module, args.hardware, asset.calibration, fix_bits=fixed)
    correct = {"float": right(asset, asset.module), "post-training": right(asset, start.simulate())}
    rows = []
    for seed in range(args.seeds):
        began = time.monotonic()
        options = {"steps": args.steps, "budget": args.budget, "lr": args.lr, "range_lr": args.range_lr}
        found = hago.finetune(asset.module, args.hardware, start.strategy, asset.calibration, seed=seed, **options)
        correct[f"trained, seed {seed}"] = right(asset, found.quantizer.simulate())
        rows.append({"seed": seed, "seconds": time.monotonic() - began, "steps": found.steps, "kept": found.kept})
        print(f"seed {seed}: {found.steps} steps in {rows[-1]['seconds']:.0f} s", flush=True)
    print(f"\n{args.net} on {args.hardware}, {args.bits} bits, {calibrated} calibration images, {asset.samples} tested")
    report = table(correct)
    if args.out is not None:
        setting = {**vars(args), "out": str(args.out), "assets": str(args.assets), "calibration": calibrated}
        args.out.write_text(json.dumps({"setting": setting, "runs": rows, "results": report}, indent=2) + "\n")


def operand_bits(asset: _assets.Asset, hardware: str, bits: int) -> dict[str, int]:
    """`bits` for every operand of a convolution or linear that can have them."""
    graph = hago.from_torch(asset.module, asset.calibration[0])
    macs = [n.name for n in graph if n.op in ("conv1d", "conv2d", "linear")]
    known = hago.quantize(asset.module, hardware, asset.calibration[:1]).strategy.bits
    return {f"{name}:{slot}": bits for name in macs for slot in (0, 1) if f"{name}:{slot}" in known}


def right(asset: _assets.Asset, model: Any) -> Tensor:
    """1 for every test sample that the model gets right, else 0."""
    assert asset.labels is not None, "a network with top-1 as its metric"
    return (_assets.outputs(model, asset.test).argmax(1) == asset.labels).double()


def table(correct: dict[str, Tensor]) -> dict[str, Any]:
    """Print accuracies, differences from the post-training model, and the part of its loss that is recovered."""
    lost = float((correct["float"] - correct["post-training"]).mean())
    report: dict[str, Any] = {}
    print(f"{'model':<18} {'top-1':>8}  {'against post-training':<28} recovered")
    for name, hits in correct.items():
        mean, low, high = paired_interval(hits - correct["post-training"])
        recovered = mean / lost if lost else float("nan")
        report[name] = {
            "top_1": float(hits.mean()),
            "difference": mean,
            "interval": [low, high],
            "recovered": recovered,
        }
        print(f"{name:<18} {float(hits.mean()):8.2%}  {mean:+.2%} ({low:+.2%} to {high:+.2%})   {recovered:6.1%}")
    return report


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--assets", type=Path, required=True)
    parser.add_argument("--net", default="cifar_resnet20")
    parser.add_argument("--hardware", default="x86_vnni")
    parser.add_argument("--bits", type=int, default=4)
    parser.add_argument("--samples", type=int, default=1024, help="calibration images")
    parser.add_argument("--test", type=int, help="test images; default: all")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--budget", help="of one run, e.g. 5m")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--range-lr", type=float, default=2e-3)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, help="write the figures there as JSON")
    return parser.parse_args()


if __name__ == "__main__":
    main()
