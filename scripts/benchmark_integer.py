"""What integer models cost on this machine, against the float model's forward pass in the same run.

The baseline is the imported graph, batch norms folded, run node by node with torch's eager float32 kernels,
activations and weights in channels_last. Beside it: the integer model with power-of-two scales and with float
scales, and two bare sequences of calls, whose values mean nothing: the network's convolutions
and matrix products alone, in oneDNN with requantization fused, each on bytes that are there; and the whole network
from float images on, with residual sums fused in oneDNN, and pooling, mean and quantization by torch; these of
ResNet-18 and MobileNetV2 alone. Rounds are interleaved; a ratio is the median of the ratios of the rounds. Beside the
ratio of an integer model stands the part of its multiply-adds that run in integers. Nothing is asserted.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from _bare_calls import macs_alone, whole_network
from _networks import ALL_NETWORKS, NETWORKS, like_trained
from _peer_engines import peers
from _timing import float_forward, interleaved, ratio
from torch import Tensor, nn

from hago import Graph, from_torch
from hago.arithmetic.equality import count_differing
from hago.cost import plan_cost
from hago.errors import InfeasibleBits
from hago.plan import Plan
from hago.runtime import IntegerModel, float_bytes, save_plan
from hago.runtime.native import Executor, NativeIntegerModel, exact_kernels, keep_freed_memory
from hago.runtime.native.self_test import Verdict
from hago.search import QuantizationOptions, prepare

SCALES = {"power-of-two scales": "power2_range", "float scales": "mse"}
COMPARED = 2
LAYERS, WHOLE = "oneDNN's layers alone", "whole network, bare"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, nargs="+", default=[32, 1])
    parser.add_argument("--threads", type=int, nargs="+", default=[torch.get_num_threads()])
    parser.add_argument("--hardware", default="x86_vnni", help="default: %(default)s")
    parser.add_argument(
        "--byte-sums",
        action="store_true",
        help="the integer model with 8 bits for operands of sums that another node reads, too: on x86_vnni, "
        "bytes in residual connections",
    )
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--networks", nargs="+", default=list(ALL_NETWORKS), choices=ALL_NETWORKS)
    parser.add_argument(
        "--cpu", action="store_true", help="processor time, not wall time: for a busy machine, 1 thread"
    )
    parser.add_argument("--compile", action="store_true", help="torch.compile of the float and the integer model too")
    parser.add_argument("--keep-freed-memory", action="store_true", help="the allocator setting, for every model alike")
    parser.add_argument("--without-tiles", action="store_true", help="the integer model without matrix tiles too")
    parser.add_argument(
        "--without-conv",
        action="store_true",
        help="and without any convolution of our own, on oneDNN where exact: slow",
    )
    parser.add_argument(
        "--peers", action="store_true", help="the float and int8 models of ONNX Runtime and OpenVINO too"
    )
    parser.add_argument("--explain", action="store_true", help="which kernel runs each node")
    options = parser.parse_args()
    if options.keep_freed_memory:
        print("allocator:", "keeps freed memory" if keep_freed_memory() else "has no such setting")
    print(f"torch {torch.__version__}; {exact_kernels()}")
    for name in options.networks:
        network = Measured(name, options)
        for threads in options.threads:
            torch.set_num_threads(threads)
            for batch in options.batches:
                network.speed(batch, threads)
        network.sizes()


class Measured:
    """One network: its graph and its Plans."""

    def __init__(self, name: str, options: Any) -> None:
        torch.manual_seed(0)
        self.name, self.options, self.network = name, options, ALL_NETWORKS[name]
        self.clock = time.process_time if options.cpu else time.perf_counter
        self.calibration = self.network.inputs(8, options.size)
        self.module = like_trained(self.network.make(), *self.calibration)
        self.graph = from_torch(self.module, tuple(x[:2] for x in self.calibration))
        self.prepared = {
            s: prepare(self.graph, options.hardware, [self.calibration], QuantizationOptions(estimator=e))
            for s, e in SCALES.items()
        }
        self.plans = {s: p.resolver(p.space.widest()) for s, p in self.prepared.items()}
        if options.byte_sums:
            made = self.prepared["float scales"]
            bits = dict.fromkeys(shared_operands(self.graph), 8)
            self.plans["byte sums"] = made.resolver(made.space.widest() | bits)
        if options.explain:
            for scales, plan in self.plans.items():
                print(f"{name}, {scales}\n{Executor(plan).explain()}")

    def speed(self, batch: int, threads: int) -> None:
        """Forward passes of one batch size."""
        inputs = self.network.inputs(batch, self.options.size)
        models = {scales: NativeIntegerModel(plan) for scales, plan in self.plans.items()}
        shares = {scales: integer_share(plan) for scales, plan in self.plans.items()}
        parts: dict[str, Callable[[], Any]] = {"float": float_forward(self.graph, [inputs])}
        parts |= {scales: partial(model.run, inputs) for scales, model in models.items()}
        plan = self.plans["power-of-two scales"]
        for name, without in {"tiles": self.options.without_tiles, "conv": self.options.without_conv}.items():
            if without:
                left = Executor(
                    plan, using=replace(exact_kernels(), **{name: Verdict(False, "left out to measure the rest")})
                )
                parts[f"without {name}"] = partial(left.run, inputs)
        if exact_kernels().onednn.exact and self.name in NETWORKS:  # elsewhere its sums are others, and its kernels too
            parts[LAYERS] = macs_alone(plan, batch)
            parts[WHOLE] = whole_network(plan, *inputs)
        if self.options.peers:
            found = peers(self.module, self.calibration, inputs, threads)
            parts |= {name: peer.call for name, peer in found.items()}
            shares |= {name: peer.integer_share for name, peer in found.items() if peer.integer_share is not None}
        if self.options.compile:
            parts["compiled integer model"] = partial(torch.compile(Whole(models["power-of-two scales"])), *inputs)
        seconds = interleaved(parts, self.options.rounds, self.clock)
        middle = 1e3 * statistics.median(seconds["float"])
        print(f"{self.name}, batch {batch}, {threads} threads: float forward {middle:.1f} ms")
        for part in list(parts)[1:]:
            print(f"  {part:24} {ratio(seconds, part, 'float')} of float", end="")
            if part in shares:
                print(f", {100 * shares[part]:.1f} % in integers", end="")
            if WHOLE in parts:
                print(f", {ratio(seconds, part, WHOLE)} of the whole network in bare calls", end="")
                print(f", {ratio(seconds, part, LAYERS)} of oneDNN's layers alone", end="")
            print(flush=True)
        for scales, plan in self.plans.items():
            wrong = differences(plan, models[scales], [x[:COMPARED] for x in inputs])
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


class Whole(nn.Module):
    """An integer model on flat inputs as a module."""

    def __init__(self, model: NativeIntegerModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, *inputs: Tensor) -> Any:
        """The outputs."""
        return self.model.run(inputs)


def shared_operands(graph: Graph) -> list[str]:
    """The operands of sums whose value another node reads, too."""
    sums = (node for node in graph if node.op == "add")
    return [str(e) for node in sums for e in node.edges if len(graph.out_edges[graph.source(e)]) > 1]


def integer_share(plan: Plan) -> float:
    """The part of the multiply-adds that run in integers."""
    nodes = plan_cost(plan).nodes
    return sum(n.macs for n in nodes if n.integer) / sum(n.macs for n in nodes)


def differences(plan: Plan, model: NativeIntegerModel, inputs: Sequence[Tensor]) -> int:
    """In how many output values both engines differ."""
    pairs = zip(model.run(inputs), IntegerModel(plan).run(inputs), strict=True)
    return sum(count_differing(a, b) for a, b in pairs)


if __name__ == "__main__":
    main()
