"""Random networks on random hardware at random bits: simulator, integer model and fast engine, bit for bit.

Networks have residual sums, concatenations, depthwise convolutions, shared weights, several outputs and
`add(x, x)`; hardware is what ships and chips made up at random. Exits with 1 if any value differs, with
the seed that shows it: `--seed THAT --graphs 1`.

With --corrections, a part of the networks are transformers, and all are corrected by some corrections at random: those
of the graph whether they gain or not, those of layers where they gain. The strategy as it is stored must then give the
same Plan.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent / "made_up"))

from random_graphs import WIDTHS, random_graph, random_inputs
from random_hardware import random_hardware
from random_transformers import random_transformer
from torch import Tensor

from hago.errors import HagoWarning, InfeasibleBits, UnsupportedOp
from hago.graph import Graph
from hago.hardware import Hardware, available_hardware, load_hardware
from hago.plan import Bits, Plan, Strategy
from hago.plan.feasibility import nearest_feasible
from hago.runtime import compare_plan_exactly
from hago.runtime.native import exact_kernels
from hago.search import MeasuredPoint, Prepared, QuantizationOptions, correcting, prepare, sqnr_evaluator
from hago.search.correcting import CORRECTIONS, correct_in_turns
from hago.search.stored_strategy import make_strategy, plan_of

#: Output channels of convolutions, enough for every kernel.
WIDE = (32, 40, 66)
#: The same of every fourth network: layers of one channel have scales that values of other dimensions keep.
NARROW = (1, 4)
ESTIMATORS = ("max_range", "mse", "percentile", "power2_range")


@dataclass
class Counts:
    """What was run, and what was found."""

    graphs: int = 0
    plans: int = 0
    values: int = 0
    refused: int = 0
    hardware: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        chips = sum(n for name, n in self.hardware.items() if name.startswith("random_"))
        shipped = ", ".join(
            f"{n} {name}" for name, n in sorted(self.hardware.items()) if not name.startswith("random_")
        )
        return (
            f"{self.graphs:,} networks, {self.plans:,} plans, {self.values:,} values compared, "
            f"{len(self.wrong):,} plans with differences\n"
            f"on {chips} random chips ({self.refused} more could not run their network) and {shipped}"
        )


def main() -> int:
    """Run as many networks as asked; 1 if anything differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graphs", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0, help="of the first network; each has the next one")
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument("--corrections", action="store_true", help="correct the networks, too")
    kinds.add_argument("--wide", action="store_true", help="convolutions with as many channels as all kernels take")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", HagoWarning)  # of operators that run in float
    counts, start = Counts(), time.perf_counter()
    for seed in range(options.seed, options.seed + options.graphs):
        (check_corrected if options.corrections else check_wide if options.wide else check)(seed, counts)
        if counts.graphs % 100 == 0:
            print(f"{counts.graphs:,} networks in {time.perf_counter() - start:.0f} s", flush=True)
    print(counts)
    print(f"kernels {exact_kernels().why}")
    for line in counts.wrong[:20]:
        print(line)
    return 1 if counts.wrong else 0


def check(seed: int, counts: Counts, widths: Sequence[int] | None = None) -> None:
    """One network on one piece of hardware, at its widest bits and at random ones.

    Args:
        widths: of `random_graph`; None for narrow ones.
    """
    rng = random.Random(seed)
    prepared = _prepared(seed, rng, counts, widths or (NARROW if seed % 4 == 0 else WIDTHS))
    chosen = _random_bits(prepared, rng)
    for bits, size in ((prepared.space.widest(), rng.choice([1.0, 6.0])), (chosen, 1.0)):
        _compare(seed, prepared.resolver(bits), random_inputs(prepared.graph, seed + 77, batch=2, size=size), counts)


def check_wide(seed: int, counts: Counts) -> None:
    """The same, with channels that are multiples of a register's and of half of one, and others."""
    check(seed, counts, WIDE)


def check_corrected(seed: int, counts: Counts) -> None:
    """One network, corrected, on one piece of hardware at random bits."""
    rng = random.Random(seed)
    graph = random_transformer(seed) if rng.random() < 0.4 else random_graph(seed, steps=rng.choice([4, 7, 10]))
    data = [tuple(random_inputs(graph, 10 * seed + i, batch=4)) for i in range(3)]
    prepared = _on_hardware(graph, data, rng, counts, clamps=rng.random() < 0.5)
    named = [f"{name}:3" if name == "reconstruction" else name for name in CORRECTIONS if rng.random() < 0.7]
    prepared = replace(prepared, correction_names=tuple(named))
    try:
        rotated = correcting._rotated(prepared, prepared.batches) if "rotation" in named else []
        changed = rotated or correcting._of_graph(prepared, prepared.batches)
        before = changed[-1][1] if changed else prepared
        point = nearest_feasible(before.resolver, _random_bits(before, rng))
    except InfeasibleBits:
        point = None
    if point is None:
        counts.refused += 1
        return
    evaluator = sqnr_evaluator(before)
    measured = MeasuredPoint(before, point.bits, evaluator.measure(point.plan))
    corrected = correct_in_turns(measured, evaluator, rng.choice([1, 1, 2]))
    strategy = make_strategy(corrected.prepared, corrected.plan, corrected.bits, {})
    stored = Strategy.from_json(json.loads(json.dumps(strategy.to_json())), "the strategy")
    again = plan_of(graph, prepared.hardware, stored)
    if again.key != corrected.plan.key:
        counts.wrong.append(f"--corrections --seed {seed} --graphs 1: the stored strategy gives another Plan")
    for plan in (point.plan, again):
        _compare(seed, plan, random_inputs(graph, seed + 77, batch=2), counts, "--corrections ")


def _compare(seed: int, plan: Plan, inputs: Sequence[Tensor], counts: Counts, how: str = "") -> None:
    found = compare_plan_exactly(plan, inputs)
    counts.plans += 1
    counts.values += found.compared
    if not found.same:
        places = ", ".join(f"{place}: {n}" for place, n in islice(found.differences.items(), 4))
        name = plan.hardware.name
        counts.wrong.append(f"{how}--seed {seed} --graphs 1: on {name}, values that differ: {places}")


def _random_bits(prepared: Prepared, rng: random.Random) -> Bits:
    return {key: rng.choice(group.choices) for key, group in prepared.space.groups.items()}


def _prepared(seed: int, rng: random.Random, counts: Counts, widths: Sequence[int]) -> Prepared:
    """The network of a seed on the first hardware that can run it."""
    graph = random_graph(seed, rng.choice([4, 7, 10]), widths)
    return _on_hardware(graph, [tuple(random_inputs(graph, 10 * seed + i, batch=2)) for i in range(2)], rng, counts)


def _on_hardware(
    graph: Graph, data: Sequence[Sequence[Tensor]], rng: random.Random, counts: Counts, clamps: bool = False
) -> Prepared:
    """A network on the first hardware that can run it.

    Args:
        clamps: whether hardware with clamps has those with a limit for each channel, too.
    """
    while True:
        hardware = _hardware(rng)
        if clamps and "clamp" in hardware.ops:
            hardware = replace(hardware, ops={**hardware.ops, "channel_clamp": hardware.ops["clamp"]})
        try:
            prepared = prepare(graph, hardware, data, QuantizationOptions(estimator=rng.choice(ESTIMATORS)))
        except UnsupportedOp:
            counts.refused += 1
            continue
        counts.graphs += 1
        counts.hardware[hardware.name] += 1
        return prepared


def _hardware(rng: random.Random) -> Hardware:
    if rng.random() < 0.5:
        return random_hardware(rng.randrange(1 << 30))
    return load_hardware(rng.choice(available_hardware()))


if __name__ == "__main__":
    sys.exit(main())
