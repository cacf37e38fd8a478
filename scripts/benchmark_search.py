"""What a search costs, in forward passes of the float model measured in the same run.

The baseline of every ratio is the folded float model over the same images, activations and weights in
channels_last, on the same threads. A trial is what a search evaluates: its time is all evaluation time of a
greedy search from a cold cache, divided by its distinct Plans. Baselines: the RFC's naive simulation (seven
passes on every edge, nothing kept) and the RFC's greedy (every choice of every edge in turn). Medians are over
--pairs interleaved measurements; nothing is asserted.

    python scripts/benchmark_search.py --assets DIR
    python scripts/benchmark_search.py --only trial,workers --images 32 --size 64 --trials 40 --pairs 5
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from _fronts import Row, write
from _naive import float_forward
from _search_cost import search_cost
from _search_quality import BASELINES, quality
from _search_scaling import scaling, workers
from _search_subjects import naive_and_float, seconds_of, subjects

from hago.bench import Bench
from hago.evaluate import Evaluator, safe_start
from hago.objective import objective
from hago.prepare import Prepared, prepare
from hago.search.driver import SearchResult, search
from hago.search.searcher import Score
from hago.search.searchers import make_searcher
from hago.space import Bits

SECTIONS = ("trial", "search", "quality", "scaling", "workers")
SCALES = {"powers of two": "power2_range", "float scales": "mse"}


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
    parser.add_argument("--searcher", default="greedy", help="the default search of the section `search`")
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
    }  # fmt: skip
    for name in options.only.split(","):
        print(f"\n== {name}", flush=True)
        rows = sections[name](options)
        if rows and options.out:
            write(options.out, name, rows)


@dataclass
class Timed:
    """A bench whose evaluation time is counted; a float forward is timed now and then between."""

    bench: Bench
    clock: Callable[[], float]
    seconds: float = 0.0
    evaluated: int = 0

    def __call__(self, bits: Bits) -> Score:
        begun = self.clock()
        score = self.bench.score(bits)
        self.seconds += self.clock() - begun
        self.evaluated += 1
        return score


def greedy_search(prepared: Prepared, score: Callable[[Bits], Score], trials: int | None) -> SearchResult:
    start = safe_start(prepared.resolver, prepared.calibration.peaks)
    searcher = make_searcher("greedy", prepared.space, start)
    return search(prepared.space, searcher, score, budget=trials, plan_key=lambda b: prepared.resolver(b).key)


# ---------------------------------------------------------------- cost of a trial
def trial_cost(options: Any) -> None:
    """All evaluation time of a greedy search / distinct Plans / a float forward."""
    print(f"{'network':22} {'scales':14} {'engine':6} {'trials':>6} {'a trial':>9} {'reused':>7} {'naive trial':>12}")
    for subject in subjects(options):
        for scales, estimator in SCALES.items():
            prepared = prepare(subject.network, options.hardware[0], subject.batches, estimator=estimator)
            forward = float_forward(prepared.graph, subject.batches)
            pairs = naive_and_float(prepared, subject, options)
            said = statistics.median(n / f for n, f in pairs)
            for engine in ("auto", "float"):
                row = _trial(prepared, engine, forward, options)
                print(f"{subject.name:22} {scales:14} {engine:6} {row} {said:12.2f}", flush=True)


def _trial(prepared: Prepared, engine: Any, forward: Callable[[], Any], options: Any) -> str:
    ops = prepared.hardware.known_ops
    evaluator = Evaluator(prepared.graph, prepared.batches, objective("sqnr"), ops, engine=engine)
    timed = Timed(Bench(prepared.resolver, evaluator), options.clock)
    floats: list[float] = []

    def score(bits: Bits) -> Score:
        if timed.evaluated % 16 == 0 or len(floats) < options.pairs:
            floats.append(seconds_of(forward, options.clock))
        return timed(bits)

    greedy_search(prepared, score, options.trials)
    ratio = timed.seconds / timed.evaluated / statistics.median(floats)
    return f"{timed.evaluated:6} {ratio:9.3f} {100 * evaluator.reuse.spent.share:5.0f} %"


if __name__ == "__main__":
    main()
