"""Count the values in which the simulator and the integer model differ, on real networks.

For every network and hardware: the widest point, the narrowest and random ones, each with float
scales (estimator mse) and with power-of-two scales (power2_range); every node, edge and output is
compared, and the outputs of the fast engine. `--processes` shares the networks and hardware among
processes of one thread each. Exits with 1 if anything differs.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import random
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

import torch
from _assets import NAMES, load

from hago import available_hardware
from hago.errors import HagoError, InfeasibleBits
from hago.plan import Plan
from hago.runtime import compare_plan_exactly
from hago.search import Prepared, QuantizationOptions, prepare

ESTIMATORS = ("mse", "power2_range")
CALIBRATION = 64


@dataclass(frozen=True)
class Case:
    """One network on one piece of hardware; as in the options."""

    assets: str
    model: str
    spec: str
    points: int
    images: int


def main() -> int:
    """Run the check; 1 if anything differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--assets", required=True, help="the folder of networks and data")
    parser.add_argument("--models", nargs="+", default=list(NAMES), choices=NAMES)
    parser.add_argument("--specs", nargs="+", default=list(available_hardware()))
    parser.add_argument("--points", type=int, default=10, help="random points beside the widest and the narrowest")
    parser.add_argument("--images", type=int, default=8, help="samples of a comparison")
    parser.add_argument("--processes", type=int, default=1)
    options = parser.parse_args()
    print(f"{'model':20} {'hardware':18} {'scales':13} points    values compared   differ  may overflow  seconds")
    named = itertools.product(options.models, options.specs)
    cases = [Case(options.assets, model, spec, options.points, options.images) for model, spec in named]
    wrong = 0
    for lines, differ in _results(cases, options.processes):
        print("\n".join(lines), flush=True)
        wrong += differ
    print(f"{wrong} values differ")
    return 1 if wrong else 0


def _results(cases: list[Case], processes: int) -> Iterator[tuple[list[str], int]]:
    """Of every case, in order."""
    if processes == 1:
        yield from map(check, cases)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, context, torch.set_num_threads, (1,)) as pool:
        yield from pool.map(check, cases)


def check(case: Case) -> tuple[list[str], int]:
    """A line for every kind of scales, and how many values differ."""
    torch.manual_seed(0)
    asset = load(case.assets, case.model, CALIBRATION, 4 * case.images)
    inputs = [part[: case.images] for part in asset.test[0]]
    lines, wrong = [], 0
    for estimator in ESTIMATORS:
        started, tally = time.perf_counter(), Tally()
        head = f"{case.model:20} {case.spec:18} {estimator:13}"
        try:
            prepared = prepare(asset.module, case.spec, asset.calibration, QuantizationOptions(estimator=estimator))
        except HagoError as error:
            lines.append(f"{head} refused: {error}")
            continue
        for plan in plans(prepared, case.points):
            tally.add(plan, inputs)
        wrong += tally.differ
        lines.append(f"{head} {tally} {time.perf_counter() - started:8.1f}")
    return lines, wrong


def plans(prepared: Prepared, points: int) -> Iterator[Plan]:
    """The widest and the narrowest point, and `points` random ones that the hardware has signatures for."""
    space, chosen = prepared.space, random.Random(0)
    yield prepared.resolver(space.widest())
    yield prepared.resolver(space.narrowest())
    made = 0
    for _ in range(100 * points):
        if made == points:
            return
        try:
            yield prepared.resolver({key: chosen.choice(group.choices) for key, group in space.groups.items()})
        except InfeasibleBits:
            continue
        made += 1


class Tally:
    """What the comparisons of one network and hardware found."""

    def __init__(self) -> None:
        self.points = self.compared = self.differ = self.overflowing = 0
        self.first = ""

    def add(self, plan: Plan, inputs: list[torch.Tensor]) -> None:
        """Compare one plan."""
        found = compare_plan_exactly(plan, inputs)
        self.points += 1
        self.compared += found.compared
        self.differ += sum(found.differences.values())
        self.overflowing += "possible" in plan.verdicts.values()
        if found.differences and not self.first:
            place, count = next(iter(found.differences.items()))
            self.first = f" first at {place}: {count}"

    def __str__(self) -> str:
        return f"{self.points:6} {self.compared:18} {self.differ:8} {self.overflowing:13}{self.first}"


if __name__ == "__main__":
    sys.exit(main())
