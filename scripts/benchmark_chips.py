"""What the integer model of every chip costs on this machine, against the float model's forward pass in the same run.

    python scripts/benchmark_chips.py --cpu --threads 1 --hardware tflite tflite_int16

The integer model is that of one-shot quantization: the most bits whose accumulators hold what the data needs. The
baseline is that of benchmark_speed.py. Rounds are interleaved; a ratio is the median of the ratios of the rounds, with
their quartiles. Beside it the nodes that run on the reference arithmetic. Nothing is asserted.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from _networks import NETWORKS, like_trained
from _timing import Clock, float_forward, interleaved, ratio

from hago import from_torch
from hago.hardware import available_hardware
from hago.runtime.native import Executor, exact_kernels
from hago.search import prepare
from hago.search.safe_bits import widest_safe_bits


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="+", default=list(NETWORKS), choices=NETWORKS)
    parser.add_argument("--hardware", nargs="+", default=list(available_hardware()))
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--cpu", action="store_true", help="processor time, not wall time: for a busy machine")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    print(f"torch {torch.__version__}, {options.threads} threads, batch {options.batch}; {exact_kernels()}")
    for name in options.networks:
        one_network(name, options)


def one_network(name: str, options: argparse.Namespace) -> None:
    """A line for every chip."""
    clock: Clock = time.process_time if options.cpu else time.perf_counter
    images = torch.randn(options.batch, 3, options.size, options.size)
    graph = from_torch(like_trained(NETWORKS[name](), images), (images[:2],))
    for spec in options.hardware:
        prepared = prepare(graph, spec, [images])
        executor = Executor(prepared.resolver(widest_safe_bits(prepared.resolver, prepared.calibration.peaks)))
        parts: dict[str, Callable[[], Any]] = {
            "float": float_forward(graph, [[images]]),
            spec: partial(executor.run, [images]),
        }
        slow = Counter(f"{row.op}: {row.why}" for row in executor.explain().rows if row.kernel == "reference")
        said = "; ".join(f"{count} {why}" for why, count in slow.items())
        seconds = interleaved(parts, options.rounds, clock)
        print(
            f"{name:12} {spec:20} {ratio(seconds, spec, 'float')} of float; on the reference: {said or '-'}", flush=True
        )


if __name__ == "__main__":
    main()
