"""Compare the searchers under limits on costs, given as much time as the default search takes.

A goal is `COST*PART` (the best SQNR with at most that part of the cost of the most bits) or `min:COST@DB` (the least
cost with at least so many dB of SQNR on the calibration data). The default search runs until it ends. The others may
take as many forwards as it took, or `--times` as many. A budget counts one forward for each trial, and the forwards
before the first. Figures are measured with the simulator on samples that calibration did not see. Every search runs in
a process of its own. Searches whose results are in the file `--out` are not run again.

    python scripts/benchmark_limits.py --assets DIR --out limits.jsonl
    python scripts/benchmark_limits.py --assets DIR --models lenet --hardware tflite --goals "weight_bytes*0.7"
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
from _assets import load, outputs, sqnr
from torch import Tensor

from hago.cost import plan_cost
from hago.errors import HagoError
from hago.importing import as_hardware, import_with_data
from hago.search import SearchOptions, plan_of, prepare, run_search
from hago.search.gradients import GRADIENT_FORWARDS
from hago.search.safe_bits import widest_safe_bits
from hago.searchers import AUTO
from hago.simulation import Simulator

MODELS = ("lenet", "mlperf_kws", "mlperf_resnet8", "cifar_resnet20", "mobilenetv2_cifar96", "squeezenet1_1")
HARDWARE = ("x86_vnni", "vta", "tflite", "cmsis_nn", "int16_accumulator")
GOALS = ("weight_bytes*0.9", "weight_bytes*0.75", "weight_bytes*0.6", "bops*0.5", "min:weight_bytes@20")
SEARCHERS = (AUTO, "gradient", "sensitivity", "pareto", "pareto:points=16", "greedy", "annealing")
KEY = ("model", "hardware", "goal", "searcher")
#: The smallest budget in forwards: a pass for gradients, and a trial.
LEAST = GRADIENT_FORWARDS + 1

Case = dict[str, Any]


def measure(case: Mapping[str, Any]) -> Case:
    """Run one search; returns its line of the file."""
    torch.set_num_threads(1)
    asset = load(case["assets"], case["model"], case["calibration"], case["test"])
    hardware, data = as_hardware(case["hardware"]), asset.calibration
    try:
        how, limit = goal_of(case, asset.module, data)
    except HagoError as error:
        return {"refused": str(error)}
    single = float_pass(asset.module, data)
    begun = time.process_time()
    try:
        options = SearchOptions.of(searcher=case["searcher"], budget=case["budget"], progress=False, **how)
        found = run_search(asset.module, hardware, data, options)
    except HagoError as error:
        return {"refused": str(error), "limit": limit}
    seconds = time.process_time() - begun
    graph, _ = import_with_data(asset.module, data)
    wanted, there = (
        outputs(asset.module, asset.test),
        outputs(Simulator(plan_of(graph, hardware, found.strategy)), asset.test),
    )
    score, trials = found.result.score, found.result.trials
    return {
        "limit": limit,
        "ran": found.strategy.made_by["searcher"]["name"],
        "known": score.results.get("sqnr"),
        "sqnr": sqnr(wanted, there),
        "agreement": float((wanted.argmax(1) == there.argmax(1)).double().mean()),
        "cost": score.costs[case["goal"].removeprefix("min:").partition("*")[0].partition("@")[0]],
        "trials": len(trials),
        "forwards": found.forwards,
        "seconds": seconds,
        "passes": seconds / single,
    }


def goal_of(case: Mapping[str, Any], module: Any, data: Any) -> tuple[dict[str, Any], float]:
    """The arguments of a search that its goal gives, and the limit."""
    goal = case["goal"]
    if goal.startswith("min:"):
        cost, _, least = goal.removeprefix("min:").partition("@")
        return {"minimize": cost, "keep": f"sqnr >= {least} dB"}, float(least)
    cost, _, part = goal.partition("*")
    prepared = prepare(module, case["hardware"], data)
    start = widest_safe_bits(prepared.resolver, prepared.calibration.peaks)
    limit = math.floor(float(part) * plan_cost(prepared.resolver(start)).figures[cost])
    return {"budget_cost": f"{cost} <= {limit}"}, limit


def float_pass(module: Any, data: Iterable[Sequence[Tensor]]) -> float:
    """The processor seconds of a pass of the float model over the data, the least of three passes."""
    times = []
    for _ in range(3):
        begun = time.process_time()
        outputs(module, list(data))
        times.append(time.process_time() - begun)
    return min(times)


def results(cases: Iterable[Case], known: Mapping[tuple[str, ...], Case], out: Path | None) -> list[Case]:
    """The lines of all cases; those that are not in `known` are run, each in a new process."""
    context, lines, forwards = multiprocessing.get_context("spawn"), [], dict[tuple[str, ...], float]()
    with ProcessPoolExecutor(1, mp_context=context, max_tasks_per_child=1) as pool:
        for case in cases:
            key = tuple(case[k] for k in KEY)
            line = known.get(key)
            if line is None:
                if case["searcher"] != AUTO:
                    given = max(LEAST, math.ceil(case["times"] * forwards.get(key[:3], 0.0)))
                    case["budget"] = f"{given:g} forwards"
                line = {**{k: case[k] for k in KEY}, "budget": case["budget"], **pool.submit(measure, case).result()}
                if out is not None:
                    with out.open("a") as file:
                        file.write(json.dumps(line) + "\n")
            if case["searcher"] == AUTO:
                forwards[key[:3]] = max(line.get("forwards", 0.0), GRADIENT_FORWARDS + line.get("trials", 0))
            lines.append(line)
    return lines


def table(lines: Sequence[Case]) -> str:
    """Markdown: a row for every goal."""
    names = list(dict.fromkeys(x["searcher"] for x in lines))
    rows = ["| network, chip, goal | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    goals: dict[tuple[str, ...], dict[str, Case]] = {}
    for line in lines:
        goals.setdefault(tuple(line[k] for k in KEY[:3]), {})[line["searcher"]] = line
    for (model, hardware, goal), found in goals.items():
        cells = [_cell(found.get(name), goal) for name in names]
        rows.append(f"| {model}, `{hardware}`, {goal} | " + " | ".join(cells) + " |")
    return "\n".join(rows)


def _cell(line: Case | None, goal: str) -> str:
    if line is None:
        return ""
    if "refused" in line:
        return "none"
    cost = f"{line['cost']:,.0f}, " if goal.startswith("min:") else ""
    return f"{cost}{line['sqnr']:.1f} dB, {line['agreement']:.1%}, {line['passes']:.0f}"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--assets", required=True, help="the folder of networks and data")
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    parser.add_argument("--hardware", nargs="+", default=list(HARDWARE))
    parser.add_argument("--goals", nargs="+", default=list(GOALS))
    parser.add_argument("--searchers", nargs="*", default=list(SEARCHERS[1:]), help="beside the default")
    parser.add_argument("--calibration", type=int, default=128, help="samples")
    parser.add_argument("--test", type=int, default=512, help="samples that calibration does not see")
    parser.add_argument("--times", type=float, default=1.0, help="what the others may take, in forwards of the default")
    parser.add_argument("--out", type=Path, help="a file of JSON lines, continued if it is there")
    options = parser.parse_args()
    lines = [] if options.out is None or not options.out.exists() else options.out.read_text().splitlines()
    known = {tuple(x[k] for k in KEY): x for x in map(json.loads, lines)}
    sizes = {k: getattr(options, k) for k in ("assets", "calibration", "test", "times")}
    cases = [
        {"model": model, "hardware": hardware, "goal": goal, "searcher": searcher, "budget": None, **sizes}
        for model in options.models
        for hardware in options.hardware
        for goal in options.goals
        for searcher in (AUTO, *options.searchers)
    ]
    print("SQNR and agreement with float on unseen samples; processor time from the import on, in float passes\n")
    print(table(results(cases, known, options.out)))


if __name__ == "__main__":
    main()
