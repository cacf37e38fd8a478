"""Time of a training step: hago against float training and torch.ao.quantization.prepare_qat_fx.

    python scripts/benchmark_training.py --assets DIR --net cifar_resnet20 --threads 2

Same network, images, loss and optimizer in one run, steps interleaved; medians of CPU time (or wall time
with --wall, on an idle machine). The float model trains with its batch norms; prepare_qat_fx takes torch's
default x86 mapping, in the layout that is faster for it; hago takes its default scheme and those named.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import _assets
import torch
from _timing import interleaved
from torch import Tensor, nn

import hago

Step = Callable[[], None]


def main() -> None:
    args = _parse()
    torch.set_num_threads(args.threads)
    asset = _assets.load(args.assets, args.net, max(args.batch, 64), 1)
    x = torch.cat([batch[0] for batch in asset.calibration])[: args.batch]
    steps = peers(asset.module, x)
    for scheme in args.schemes.split(","):
        made = hago.prepare_qat(asset.module, args.hardware, dataset=asset.calibration[:2], scheme=scheme)
        steps[f"hago {scheme}"] = training(made.train(), x)
    clock = time.perf_counter if args.wall else time.process_time
    seconds = interleaved(steps, args.rounds, clock)
    report(args, {name: statistics.median(times) for name, times in seconds.items()})


def peers(module: nn.Module, x: Tensor) -> dict[str, Step]:
    """Float training, and prepare_qat_fx in both layouts."""
    from torch.ao.quantization import get_default_qat_qconfig_mapping
    from torch.ao.quantization.quantize_fx import prepare_qat_fx

    found = {"float": training(copy.deepcopy(module).train(), x)}
    for name, layout in (("fx", torch.contiguous_format), ("fx channels_last", torch.channels_last)):
        if layout is torch.channels_last and x.ndim != 4:
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            made: Any = prepare_qat_fx(copy.deepcopy(module).train(), get_default_qat_qconfig_mapping("x86"), (x,)).to(
                memory_format=layout
            )
        found[name] = training(made, x.contiguous(memory_format=layout))
    return found


def training(model: nn.Module, x: Tensor) -> Step:
    """One step of an ordinary loop."""
    optimizer = torch.optim.SGD(model.parameters(), 1e-6)

    def step() -> None:
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


def report(args: argparse.Namespace, medians: dict[str, float]) -> None:
    """Print every time, against the faster form of prepare_qat_fx."""
    fx = min(seconds for name, seconds in medians.items() if name.startswith("fx"))
    print(f"{args.net}, batch {args.batch}, {args.threads} threads, median of {args.rounds} steps")
    for name, seconds in medians.items():
        print(f"{name:<18} {1e3 * seconds:8.1f} ms   {1 / seconds:7.2f} steps/s   {seconds / fx:5.2f} x prepare_qat_fx")
    if args.out is not None:
        setting = {**vars(args), "assets": str(args.assets), "out": str(args.out)}
        args.out.write_text(json.dumps({"setting": setting, "seconds": medians, "fx": fx}, indent=2) + "\n")


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--assets", type=Path, required=True)
    parser.add_argument("--net", default="cifar_resnet20")
    parser.add_argument("--hardware", default="x86_vnni")
    parser.add_argument("--schemes", default="lsq,hago,pytorch,tensorflow", help="of hago, with commas between")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--wall", action="store_true", help="wall time instead of CPU time")
    parser.add_argument("--out", type=Path, help="write the figures there as JSON")
    return parser.parse_args()


if __name__ == "__main__":
    main()
