"""Compare the exported ONNX files of networks with the integer model, and measure their speed in ONNX Runtime.

Equality: each node of the file is given the integers of the integer model, with power-of-two and with float scales.
Speed: the file is compared with the file that ONNX Runtime's `quantize_static` makes, and with the float file that both
are made from, in interleaved pairs. A ratio is the median of the ratios of the rounds, with its 95 % confidence
interval. OpenVINO runs the same file if it is installed. Nothing is asserted.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch
from _assets import NAMES, Asset, Samples, load
from _documents import replace_between
from _peers import static_file
from scipy import stats

from hago.analysis.comparison import RealizationDifference, compare_plan
from hago.data import Batches
from hago.errors import HagoError
from hago.export.onnx import ENGINES, OnnxCheck, check_onnx, make_onnx, write_onnx
from hago.export.onnx.engines import Run, onnxruntime
from hago.export.onnx.writer import load_onnx
from hago.plan import Plan
from hago.search import QuantizationOptions, prepare

BEGIN: Final = "<!-- engines:begin -->"
#: The least duration of one turn of a timed part, in seconds.
_TURN: Final = 0.01
END: Final = "<!-- engines:end -->"
SCALES: Final = {"power of two": "power2_range", "float": "mse"}
TITLES: Final = (
    "network",
    "scales",
    "integers compared",
    "differ in ONNX Runtime",
    "differ in OpenVINO",
    "fast engine's outputs",
    "time / `quantize_static`",
    "time / float ONNX",
)


def main() -> None:
    """Measure, print, and write the results to the files that are given."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--assets", required=True, help="folder with loaders.py")
    parser.add_argument("--networks", nargs="+", default=list(NAMES), choices=NAMES)
    parser.add_argument("--hardware", default="onnxruntime_cpu")
    parser.add_argument("--form", default="qdq")
    parser.add_argument("--calibration", type=int, default=256)
    parser.add_argument("--samples", type=int, default=32, help="compared node by node")
    parser.add_argument("--batch", type=int, default=32, help="of the timed runs")
    parser.add_argument("--rounds", type=int, default=41, help="timed, of four turns; 0: no timing")
    parser.add_argument("--only-speed", action="store_true", help="compare no integers")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--cpu", action="store_true", help="processor time, not wall time: for a busy machine")
    parser.add_argument("--json", type=Path, help="write the results there")
    parser.add_argument("--readme", type=Path, help="write the table between its marks")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    results = [row for name in options.networks for row in network(name, options)]
    text = "\n".join(["| " + " | ".join(TITLES) + " |", "|---" * len(TITLES) + "|", *map(line, results)])
    print(text)
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=2), "utf-8")
    if options.readme is not None:
        replace_between(options.readme, BEGIN, END, text)


def network(name: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows of one network."""
    asset = load(options.assets, name, options.calibration, options.samples)
    rows = []
    for scales, estimator in SCALES.items():
        prepared = prepare(asset.module, options.hardware, asset.calibration, QuantizationOptions(estimator=estimator))
        plan = prepared.resolver(prepared.space.widest())
        row: dict[str, Any] = {"network": name, "scales": scales, "hardware": options.hardware}
        try:
            row |= ({} if options.only_speed else equality(plan, asset, options)) | speed(plan, asset, options)
        except HagoError as error:
            row["refused"] = str(error)
        rows.append(row)
        print(line(row), flush=True)
    return rows


# ---------------------------------------------------------------- equality
def equality(plan: Plan, asset: Asset, options: argparse.Namespace) -> dict[str, Any]:
    """The differences of each engine, and those of the outputs of the native engine."""
    made = make_onnx(plan, options.form)
    batches = [tuple(t[: options.samples] for t in asset.test[0])]
    found: dict[str, Any] = {}
    for engine, run in ENGINES.items():
        try:
            check = check_onnx(made, plan, batches, run, engine)
        except HagoError as error:
            found[engine] = {"skipped": str(error)}
            continue
        found[engine] = {**summary(check), "places": differing(check)}
    (fast,) = compare_plan(plan, Batches(batches, plan.graph.inputs), ["fast"]).against
    found["fast"] = {"outputs": sum(p.compared for p in fast.outputs), "differing": wrong(fast)}
    return found


def summary(check: OnnxCheck) -> dict[str, Any]:
    """The counts of a check, and whether its differences are tolerable."""
    return {
        "compared": check.compared,
        "differing": check.differing,
        "largest": max((p.largest for p in check.places if p.integer), default=0.0),
        "tolerable": check.tolerable,
        "outputs_differing": sum(p.differing for p in check.outputs),
    }


def differing(check: OnnxCheck) -> list[dict[str, Any]]:
    """The nodes with integers that differ."""
    return [p.to_json() for p in check.places if p.integer and p.differing]


def wrong(found: RealizationDifference) -> int:
    """The number of output values that differ."""
    return sum(p.differing for p in found.outputs)


# ---------------------------------------------------------------- speed
def speed(plan: Plan, asset: Asset, options: argparse.Namespace) -> dict[str, Any]:
    """The time of the file relative to ONNX Runtime's own quantized file and to the float file."""
    if not options.rounds:
        return {}
    batch = repeated(asset.test[0], options.batch)
    names = plan.graph.inputs
    with tempfile.TemporaryDirectory() as folder:
        real = make_onnx(float_plan(plan))
        write_onnx(real, Path(folder) / "float.onnx")
        static = load_onnx().load(static_file(Path(folder) / "float.onnx", names, asset.calibration))
        models = {"ours": make_onnx(plan, options.form).model, "static": static, "float": real.model}
        runs = {name: bound(onnxruntime(model, options.threads), names, batch) for name, model in models.items()}
        clock = time.process_time if options.cpu else time.perf_counter
        found = {other: paired(runs["ours"], runs[other], options.rounds, clock) for other in ("static", "float")}
    return {"ratios": {f"ours/{k}": asdict(v) for k, v in found.items()}, **measured(options)}


def measured(options: argparse.Namespace) -> dict[str, int]:
    """The options on which times depend."""
    return {"batch": options.batch, "threads": options.threads, "rounds": options.rounds}


def float_plan(plan: Plan) -> Plan:
    """The same graph with nothing quantized, from which both files are made."""
    return replace(plan, nodes={}, edges=dict.fromkeys(plan.graph.edges))


def repeated(batch: Samples, size: int) -> Samples:
    """The samples of a batch, repeated or cut to exactly `size`."""
    return tuple(t.repeat(-(-size // len(t)), *[1] * (t.ndim - 1))[:size].contiguous() for t in batch)


def bound(run: Run, names: Sequence[str], batch: Samples) -> Callable[[], Any]:
    """A run of a file on fixed inputs."""
    feed = {name: t.numpy() for name, t in zip(names, batch, strict=True)}
    return lambda: run(feed)


@dataclass(frozen=True, slots=True)
class Ratio:
    """The time of one part relative to another.

    Args:
        median: of the ratios of the rounds.
        low, high: the 95 % confidence interval of the median, which assumes no distribution of the noise.
        seconds: the medians of one run of either part.
    """

    median: float
    low: float
    high: float
    seconds: tuple[float, float]

    def __str__(self) -> str:
        return f"{self.median:.3f} [{self.low:.3f}, {self.high:.3f}]"


def paired(ours: Callable[[], Any], theirs: Callable[[], Any], rounds: int, clock: Callable[[], float]) -> Ratio:
    """Time two parts in rounds of four turns: ours, theirs, theirs, ours.

    Each part then runs as often after itself as after the other, so that the state of the caches and a drift of the
    machine affect both alike.
    """
    repeats = max(1, math.ceil(_TURN / min(turn(part, 1, time.perf_counter) for part in (ours, theirs) * 2)))
    found = []
    for _ in range(rounds):
        first, second, third, fourth = (turn(part, repeats, clock) for part in (ours, theirs, theirs, ours))
        found.append((first + fourth, second + third))
    ratios = sorted(a / b for a, b in found)
    # order statistics between which the median lies: the binomial distribution of rounds below it
    end = int(stats.binom.ppf(0.025, rounds, 0.5))
    seconds = (statistics.median(part) / (2 * repeats) for part in zip(*found, strict=True))
    low, high = ratios[max(end - 1, 0)], ratios[min(rounds - end, rounds - 1)]
    return Ratio(statistics.median(ratios), low, high, (next(seconds), next(seconds)))


def turn(part: Callable[[], Any], repeats: int, clock: Callable[[], float]) -> float:
    """The seconds of `repeats` runs."""
    started = clock()
    for _ in range(repeats):
        part()
    return clock() - started


# ---------------------------------------------------------------- the table
def line(row: Mapping[str, Any]) -> str:
    """One row in Markdown."""
    if "refused" in row:
        why = " ".join(row["refused"].split())
        return f"| {row['network']} | {row['scales']} | refused: {why} |" + " |" * (len(TITLES) - 3)
    ratios = row.get("ratios", {})
    cells = [
        row["network"],
        row["scales"],
        *(equal_cells(row) if "fast" in row else [""] * 4),
        *(str(Ratio(**ratios[key])) if key in ratios else "" for key in ("ours/static", "ours/float")),
    ]
    return "| " + " | ".join(cells) + " |"


def equal_cells(row: Mapping[str, Any]) -> list[str]:
    """The cells on the integers and outputs that were compared."""
    compared, fast = row["onnxruntime"].get("compared", 0), row["fast"]
    equal = f"{fast['outputs'] - fast['differing']:,} of {fast['outputs']:,} equal"
    return [f"{compared:,}", engine_cell(row["onnxruntime"]), engine_cell(row["openvino"]), equal]


def engine_cell(found: Mapping[str, Any]) -> str:
    """The number of integers that differ in an engine, and the largest difference."""
    if "skipped" in found:
        return "not run"
    by = f", by at most {found['largest']:.0f}" if found["differing"] else ""
    return f"{found['differing']:,}{by}"


if __name__ == "__main__":
    main()
