"""Random networks on random hardware at random bits: simulator, integer model and fast engine, bit for bit.

Networks have residual sums, concatenations, depthwise convolutions, shared weights, several outputs and
`add(x, x)`; hardware is what ships and chips made up at random. Exits with 1 if any value differs, with
the seed that shows it: `--seed THAT --graphs 1`.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent / "made_up"))

from random_graphs import random_graph, random_inputs
from random_hardware import random_hardware

from hago.errors import UnsupportedOp
from hago.hardware import Hardware, available_hardware, load_hardware
from hago.runtime import compare_plan_exactly
from hago.search import Prepared, QuantizationOptions, prepare

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
    options = parser.parse_args()
    torch.set_num_threads(1)
    counts, start = Counts(), time.perf_counter()
    for seed in range(options.seed, options.seed + options.graphs):
        check(seed, counts)
        if counts.graphs % 100 == 0:
            print(f"{counts.graphs:,} networks in {time.perf_counter() - start:.0f} s", flush=True)
    print(counts)
    for line in counts.wrong[:20]:
        print(line)
    return 1 if counts.wrong else 0


def check(seed: int, counts: Counts) -> None:
    """One network on one piece of hardware, at its widest bits and at random ones."""
    rng = random.Random(seed)
    prepared = _prepared(seed, rng, counts)
    graph, name = prepared.graph, prepared.hardware.name
    counts.graphs += 1
    counts.hardware[name] += 1
    widest = prepared.space.widest()
    chosen = {k: rng.choice(g.choices) for k, g in prepared.space.groups.items()}
    for bits, size in ((widest, rng.choice([1.0, 6.0])), (chosen, 1.0)):
        found = compare_plan_exactly(prepared.resolver(bits), random_inputs(graph, seed + 77, batch=2, size=size))
        counts.plans += 1
        counts.values += found.compared
        if not found.same:
            places = ", ".join(f"{place}: {n}" for place, n in islice(found.differences.items(), 4))
            counts.wrong.append(f"--seed {seed} --graphs 1: on {name}, values that differ: {places}")


def _prepared(seed: int, rng: random.Random, counts: Counts) -> Prepared:
    """The network of a seed on the first hardware that can run it."""
    graph = random_graph(seed, steps=rng.choice([4, 7, 10]))
    data = [tuple(random_inputs(graph, 10 * seed + i, batch=2)) for i in range(2)]
    while True:
        try:
            return prepare(graph, _hardware(rng), data, QuantizationOptions(estimator=rng.choice(ESTIMATORS)))
        except UnsupportedOp:
            counts.refused += 1


def _hardware(rng: random.Random) -> Hardware:
    if rng.random() < 0.5:
        return random_hardware(rng.randrange(1 << 30))
    return load_hardware(rng.choice(available_hardware()))


if __name__ == "__main__":
    sys.exit(main())
