"""What hago's own work costs, against the float model's forward pass in the same run.

The baseline is the imported graph, batch norms folded, run node by node with torch's eager float32
kernels, activations and weights in channels_last. Rounds are interleaved; a ratio is the median of
the ratios of the rounds. Nothing is asserted.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from _networks import NETWORKS, ResNet, like_trained
from _timing import Clock, float_forward, interleaved, ratio, seconds_of
from torch import Tensor, nn

from hago import from_torch
from hago.arithmetic.schemes import Grid
from hago.calibration import ESTIMATORS, collect, named_estimator
from hago.calibration.observer import constant_statistics
from hago.data import Batches
from hago.plan import Resolver
from hago.runtime import compare_plan_exactly
from hago.runtime.native import exact_kernels
from hago.search import Prepared, prepare
from hago.simulation import Simulator

HARDWARE = ("x86_vnni", "vta", "int16_accumulator")
COMPARED = 2


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--hardware", nargs="+", default=list(HARDWARE))
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--cpu", action="store_true", help="processor time, not wall time: for a busy machine")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    clock = time.process_time if options.cpu else time.perf_counter
    print(f"torch {torch.__version__}, {options.threads} threads, {options.size} x {options.size}, ", end="")
    print(f"batch {options.batch}, {'processor' if options.cpu else 'wall'} time")
    images = torch.randn(options.batch, 3, options.size, options.size)
    for name, make in NETWORKS.items():
        simulation(name, like_trained(make(), images), images, options.hardware, options.rounds, clock)
    calibration_cost(ResNet(), images, options.rounds, clock)
    resolve_cost(ResNet((3, 4, 6, 3)), options.rounds, clock)
    estimator_cost(options.rounds, clock)


def simulation(name: str, network: nn.Module, images: Tensor, specs: Sequence[str], rounds: int, clock: Clock) -> None:
    """Simulated forward against float forward, and whether both models agree."""
    graph = from_torch(network, (images[:2],))
    parts = {"float": float_forward(graph, [[images]])}
    differ = {}
    for spec in specs:
        prepared = prepare(graph, spec, [images])
        plan = prepared.resolver(prepared.space.widest())
        simulator = Simulator(plan)
        parts[spec] = partial(simulator.run, [images])
        found = compare_plan_exactly(plan, [images[:COMPARED]])
        differ[spec] = f"{sum(found.differences.values())} of {found.compared} values differ from the integer model"
    seconds = interleaved(parts, rounds, clock)
    print(f"{name}: float forward {1e3 * statistics.median(seconds['float']):.1f} ms")
    for spec in specs:
        print(f"  simulated on {spec:18} {ratio(seconds, spec, 'float')} of it; {differ[spec]}", flush=True)


def calibration_cost(network: nn.Module, images: Tensor, rounds: int, clock: Clock) -> None:
    """One pass of statistics over a batch."""
    graph = from_torch(like_trained(network, images), (images[:2],))
    prepared = prepare(graph, "x86_vnni", [images])
    batches = Batches([images], graph.inputs)
    observed = {g.source for g in prepared.space.groups.values()}
    parts: dict[str, Callable[[], Any]] = {
        "float": float_forward(graph, [[images]]),
        "pass": partial(collect, graph, batches, observed, kernel=exact_kernels().count_bins),
    }
    print(
        f"statistics pass (ResNet-18): {ratio(interleaved(parts, rounds, clock), 'pass', 'float')} of a float forward"
    )


def resolve_cost(network: nn.Module, rounds: int, clock: Clock) -> None:
    """Bits to a Plan: with nothing remembered, and with one edge changed."""
    images = torch.randn(2, 3, 64, 64)
    prepared = prepare(like_trained(network, images), "x86_vnni", [images])
    bits, keys = prepared.space.widest(), list(prepared.space.groups)
    estimated = seconds_of(partial(prepared.resolver, bits), clock)
    first, changed = [], []
    for number in range(rounds):
        resolver = _fresh(prepared)
        first.append(seconds_of(partial(resolver, bits), clock))
        for key in keys[number :: max(1, len(keys) // 10)]:
            changed.append(seconds_of(partial(resolver, {**bits, key: bits[key] - 1}), clock))
    print(
        f"resolve (ResNet-34, {len(keys)} edges to choose): first {1e3 * statistics.median(first):.1f} ms, with the "
        f"thresholds' estimation {1e3 * estimated:.0f} ms; one edge changed {1e3 * statistics.median(changed):.2f} ms "
        f"(at most {1e3 * max(changed):.2f})"
    )


def _fresh(prepared: Prepared) -> Resolver:
    """A resolver that remembers thresholds and nothing else."""
    resolver = prepared.resolver
    return Resolver(prepared.graph, prepared.hardware, prepared.topology, prepared.space, resolver.thresholds)


def estimator_cost(rounds: int, clock: Clock) -> None:
    """A threshold from statistics that are there already."""
    activation = constant_statistics(torch.randn(1 << 20).relu())
    weight = constant_statistics(torch.randn(256, 128, 3, 3), 0)
    for name in ESTIMATORS:
        made = named_estimator(name)
        whole = [seconds_of(partial(made, activation, Grid(8, signed=False)), clock) for _ in range(rounds)]
        each = [seconds_of(partial(made, weight, Grid(8)), clock) for _ in range(rounds)]
        print(
            f"estimator {name:13} {1e3 * statistics.median(whole):7.2f} ms per tensor, "
            f"{1e3 * statistics.median(each):7.2f} ms for 256 channels"
        )


if __name__ == "__main__":
    main()
