"""What integer models cost on this machine, against the float model's forward pass in the same run.

The baseline is the imported graph, batch norms folded, run node by node with torch's eager float32 kernels,
activations and weights in channels_last. Beside it: the integer model with power-of-two scales and with float
scales (hardware x86_vnni), and the bare sequence of oneDNN calls, which is the network's convolutions and
matrix products with requantization fused and nothing between them. Rounds are interleaved; a ratio is the
median of the ratios of the rounds. Nothing is asserted.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from _networks import MobileNetV2, ResNet, with_statistics
from benchmark_speed import float_forward, interleaved, ratio
from torch import Tensor, nn

from hago import Graph, from_torch
from hago.engine.allocator import keep_freed_memory
from hago.engine.choice import choose
from hago.engine.executor import Executor
from hago.engine.kernels import Verdict, kernels
from hago.engine.onednn import OnednnConv, prepack
from hago.errors import InfeasibleBits
from hago.exactness import differing
from hago.plan import Plan
from hago.prepare import prepare
from hago.realization import IntegerModel
from hago.stored import float_bytes, save_plan

HARDWARE = "x86_vnni"
SCALES = {"power-of-two scales": "power2_range", "float scales": "mse"}
COMPARED = 2


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, nargs="+", default=[32, 1])
    parser.add_argument("--threads", type=int, nargs="+", default=[torch.get_num_threads()])
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--networks", nargs="+", default=list(NETWORKS), choices=NETWORKS)
    parser.add_argument(
        "--cpu", action="store_true", help="processor time, not wall time: for a busy machine, 1 thread"
    )
    parser.add_argument("--compile", action="store_true", help="torch.compile of the float and the integer model too")
    parser.add_argument("--keep-freed-memory", action="store_true", help="the allocator setting, for every model alike")
    parser.add_argument("--explain", action="store_true", help="which kernel runs each node")
    options = parser.parse_args()
    if options.keep_freed_memory:
        print("allocator:", "keeps freed memory" if keep_freed_memory() else "has no such setting")
    print(f"torch {torch.__version__}; {kernels()}")
    for name in options.networks:
        network = Measured(name, options)
        for threads in options.threads:
            torch.set_num_threads(threads)
            for batch in options.batches:
                network.speed(batch, threads)
        network.sizes()


NETWORKS: dict[str, Callable[[], nn.Module]] = {"ResNet-18": ResNet, "MobileNetV2": MobileNetV2}


class Measured:
    """One network: its graph and its Plans."""

    def __init__(self, name: str, options: Any) -> None:
        torch.manual_seed(0)
        self.name, self.options = name, options
        self.clock = time.process_time if options.cpu else time.perf_counter
        images = torch.randn(8, 3, options.size, options.size)
        self.graph = from_torch(with_statistics(NETWORKS[name](), images), (images[:2],))
        self.prepared = {s: prepare(self.graph, HARDWARE, [images], estimator=e) for s, e in SCALES.items()}
        self.plans = {s: p.resolver(p.space.widest()) for s, p in self.prepared.items()}
        if options.explain:
            for scales, plan in self.plans.items():
                print(f"{name}, {scales}\n{Executor(plan).explain()}")

    def speed(self, batch: int, threads: int) -> None:
        """Forward passes of one batch size."""
        images = torch.randn(batch, 3, self.options.size, self.options.size)
        models = {scales: Executor(plan) for scales, plan in self.plans.items()}
        parts: dict[str, Callable[[], Any]] = {"float": float_forward(self.graph, images)}
        parts |= {scales: partial(model.run, [images]) for scales, model in models.items()}
        plan = self.plans["power-of-two scales"]
        onednn = Executor(plan, using=replace(kernels(), conv=Verdict(False, "left out to measure oneDNN")))
        parts["the same on oneDNN"] = partial(onednn.run, [images])
        parts["bare oneDNN calls"] = bare_calls(plan, batch, self.options.size)
        if self.options.compile:
            parts |= compiled(self.graph, models["power-of-two scales"], images)
        seconds = interleaved(parts, self.options.rounds, self.clock)
        middle = 1e3 * statistics.median(seconds["float"])
        print(f"{self.name}, batch {batch}, {threads} threads: float forward {middle:.1f} ms")
        for part in list(parts)[1:]:
            print(f"  {part:24} {ratio(seconds, part, 'float')} of float", end="")
            print(f", {ratio(seconds, part, 'bare oneDNN calls')} of the bare calls", flush=True)
        for scales, plan in self.plans.items():
            wrong = differences(plan, models[scales], images[:COMPARED])
            print(f"  {scales}: {wrong} values differ from the reference engine", flush=True)

    def sizes(self) -> None:
        """Bytes on disk, in float and with weights of 8 and 4 bits."""
        prepared = self.prepared["power-of-two scales"]
        found = [f"float weights {float_bytes(self.plans['float scales']) / 1e6:.2f} MB"]
        for bits in (8, 4):
            chosen = {
                key: min(group.choices, key=lambda b: abs(b - bits)) if group.source in self.graph.consts else value
                for (key, group), value in zip(
                    prepared.space.groups.items(), prepared.space.widest().values(), strict=True
                )
            }
            try:
                plan = prepared.resolver(chosen)
            except InfeasibleBits as error:
                found.append(f"{bits} bits: {error}")
                continue
            with tempfile.TemporaryDirectory() as folder:
                size = save_plan(Path(folder) / "model.safetensors", plan)
            found.append(f"weights of {bits} bits {size.file / 1e6:.2f} MB ({size.file / size.float_model:.3f})")
        print(f"{self.name} on disk: " + ", ".join(found), flush=True)


def bare_calls(plan: Plan, batch: int, size: int) -> Callable[[], Any]:
    """The convolutions and matrix products on random bytes, requantized in the kernel, and nothing between."""
    calls: list[tuple[OnednnConv, Tensor]] = []
    for node in plan.graph:
        choice = choose(plan, node, conv=True, passes=True) if node.name in plan.nodes else None
        if choice is None or choice.geometry is None:
            continue
        g, made, shape = choice.geometry, plan.nodes[node.name], plan.graph[node.inputs[0]].shape or ()
        weight = made.consts[1].reshape(g.out_channels, -1, *g.kernel).contiguous()
        sizes = shape[2:] if len(shape) == 4 else (1, 1)
        x = torch.randint(0, 256, (batch, g.channels, *sizes), dtype=torch.uint8)
        bias, scales = torch.zeros(g.out_channels), torch.full((g.out_channels,), 2.0**-10)
        conv = OnednnConv(prepack(weight, g, 0), g, 0, scales, bias, 0, torch.uint8)
        calls.append((conv, x.contiguous(memory_format=torch.channels_last)))

    def run() -> None:
        with torch.no_grad():
            for conv, x in calls:
                conv(x)

    return run


def compiled(graph: Graph, model: Executor, images: Tensor) -> dict[str, Callable[[], Any]]:
    """torch.compile of the integer model as a module."""
    module = torch.compile(Whole(model))
    return {"compiled integer model": partial(module, images)}


class Whole(nn.Module):
    """An executor as a module."""

    def __init__(self, model: Executor) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Any:
        """The outputs."""
        return self.model.run([images])


def differences(plan: Plan, model: Executor, images: Tensor) -> int:
    """In how many output values both engines differ."""
    pairs = zip(model.run([images]), IntegerModel(plan).run([images]), strict=True)
    return sum(differing(a, b) for a, b in pairs)


if __name__ == "__main__":
    main()
