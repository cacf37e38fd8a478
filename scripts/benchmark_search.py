"""What a search costs, in forward passes of the float model measured in the same run.

The baseline of every ratio is the folded float model over the same images, activations and weights in
channels_last, on the same threads. A trial is what a search evaluates: its time is all evaluation time of a
greedy, raced or sensitivity search from a cold cache, divided by its distinct Plans. Baselines: the RFC's naive
simulation (seven passes on every edge, nothing kept) and the RFC's greedy (every choice of every edge in turn).
Medians are over --pairs interleaved measurements; nothing is asserted.

    python scripts/benchmark_search.py --assets DIR
    python scripts/benchmark_search.py --assets DIR --only default --images 64 --searcher auto --cpu --threads 1
    python scripts/benchmark_search.py --assets DIR --only trial --nets squeezenet1_1 --searches greedy
    python scripts/benchmark_search.py --only trial,workers --images 32 --size 64 --trials 40 --pairs 5
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from _fronts import Row, write
from _search_cost import default_cost, search_cost
from _search_quality import BASELINES, quality
from _search_scaling import scaling, workers
from _trial_cost import SEARCHES, trial_cost

SECTIONS = ("trial", "search", "quality", "scaling", "workers")
#: The cost of the default search alone; it is asked for by name.
DEFAULT = "default"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(SECTIONS), help="sections, with commas between")
    parser.add_argument("--assets", help="the folder of pretrained networks; without it SqueezeNet is left out")
    parser.add_argument("--nets", nargs="+", help="of these only")
    parser.add_argument("--hardware", nargs="+", default=["x86_vnni", "arm_dot"])
    parser.add_argument("--images", type=int, default=128)
    parser.add_argument("--size", type=int, default=224, help="of images for ResNet-18 and MobileNetV2")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--trials", type=int, help="of a search, at most; by default until it ends")
    parser.add_argument(
        "--searches", default=";".join(SEARCHES), help="of the section `trial`, with semicolons between"
    )
    parser.add_argument(
        "--carrier-images", type=int, default=16, help="images of the slow paths of the section `trial`"
    )
    parser.add_argument("--searcher", default="gradient", help="the default search of the section `search`")
    parser.add_argument(
        "--cache-bytes", type=int, help="of the section `default`; by default a quarter of what is free"
    )
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--edges", type=int, nargs="+", default=[10, 100, 1000])
    parser.add_argument("--cpu", action="store_true", help="processor time, not wall time: for a busy machine")
    parser.add_argument("--held-out", type=int, default=1000, help="samples that fronts are compared on")
    parser.add_argument(
        "--baselines", default=",".join(BASELINES), help="of the section `quality`, with commas between"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="a folder for the figures as JSON, as tables, and for plots")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    options.clock = time.process_time if options.cpu else time.perf_counter
    how = f"{options.images} images in batches of {options.batch}, {'processor' if options.cpu else 'wall'} time"
    print(f"torch {torch.__version__}, {options.threads} threads, {how}", flush=True)
    sections: dict[str, Callable[[Any], Sequence[Row] | None]] = {
        "trial": trial_cost, "search": search_cost, "quality": quality, "scaling": scaling, "workers": workers,
        DEFAULT: default_cost,
    }  # fmt: skip
    for name in options.only.split(","):
        print(f"\n== {name}", flush=True)
        rows = sections[name](options)
        if rows and options.out:
            write(options.out, name, rows)


if __name__ == "__main__":
    main()
