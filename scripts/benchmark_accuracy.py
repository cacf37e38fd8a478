"""Accuracy on real networks: float, integer in one shot, integer after a search, and peers.

Calibration sees no labels; everything reported is of test samples that calibration did not see. The
integer columns are the simulator's, compared with the integer model on a part of the samples. Every
network on every hardware runs in a process of its own, so peak memory is its own.

Peers get the same networks, calibration and test samples, and quantize to 8 bits with weights per channel. ONNX
Runtime's `quantize_static` runs here (--peers). NNCF's `quantize` with fast bias correction, and AIMET's cross-layer
equalization with AdaRound, run in environments of their own below a folder, where they are installed if they are not
there (--environments). "integer" is the part of the multiply-adds that run in integers.

    python scripts/benchmark_accuracy.py --assets DIR --hardware x86_vnni tflite --peers --environments DIR
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import torch
from _accuracy_report import table, verdicts
from _assets import NAMES, Asset, area_difference, load, outputs, sqnr
from _peer_processes import AIMET, NNCF, Peer, run_peer
from _peers import onnxruntime_missing, onnxruntime_outputs, plain_outputs
from torch import Tensor

from hago import Graph, create_quantizer, from_torch, quantize, search_quantize_strategy
from hago.cost import plan_cost
from hago.errors import HagoError
from hago.plan import Plan
from hago.runtime import IntegerModel
from hago.search import prepare
from hago.search.intervals import paired_interval, wilson_interval
from hago.simulation import AccumulatorWatch, Simulator

HARDWARE = ("x86_vnni", "vta", "int16_accumulator")
ESTIMATORS = ("power2_range", "max_range", "mse", "kl_estimate", "percentile", "avg_range")
DEFAULT = "one shot"
#: Samples on which the integer model is run beside the simulator.
CHECKED = 8
#: Hardware with the arithmetic of the peers: 8 bits, weights per channel, activations with zero points.
COMPARED = ("x86_vnni", "tflite")


@dataclass(frozen=True, slots=True)
class PeerModel:
    """What the process of a peer gave.

    Args:
        outputs: the file of its outputs for all test samples.
        seconds: of its quantization.
        settings: with which it was made.
    """

    outputs: str
    seconds: float
    integer_share: float
    settings: str


@dataclass(frozen=True, slots=True)
class Job:
    """One network on one hardware, and how to measure it."""

    assets: str
    model: str
    hardware: str
    calibration: int
    test: int | None
    budget: str
    estimators: tuple[str, ...]
    peers: bool
    threads: int
    peer_models: Mapping[str, PeerModel]
    notes: tuple[str, ...]


@dataclass(slots=True)
class Row:
    """What was measured of one integer model; (mean, low, high) are 95 % intervals.

    Args:
        value: of the network's metric.
        interval: of top-1; None for other metrics, as is the agreement.
        loss: float minus integer, paired; None but for top-1 and areas under curves.
        agreement: with the float model's top-1.
        sqnr: of the outputs, in dB.
        integer_share: the part of the multiply-adds that run in integers.
        rate: overflows per million accumulators of nodes that are not proved.
        differing: outputs in which simulator and integer model differ on CHECKED samples.
        settings: of a peer.
    """

    value: float
    interval: tuple[float, float] | None
    loss: tuple[float, float, float] | None
    agreement: float | None
    sqnr: float
    integer_share: float = 0.0
    seconds: float = 0.0
    trials: int = 0
    proved: int = 0
    possible: int = 0
    overflowing: int = 0
    rate: float = 0.0
    differing: int = 0
    settings: str = ""
    right: list[int] = field(default_factory=list)
    placements: list[list[float]] = field(default_factory=list)


class Measurement:
    """The rows of one job."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.asset: Asset = load(job.assets, job.model, job.calibration, job.test)
        self.graph: Graph = from_torch(self.asset.module, tuple(t[:2] for t in self.asset.calibration[0]))
        self.reference = outputs(self.asset.module, self.asset.test)
        self.rows: dict[str, Row] = {"float": self.row(self.reference)}
        self.notes: list[str] = list(job.notes)

    def row(self, out: Tensor, integer_share: float = 0.0, seconds: float = 0.0) -> Row:
        """A row from the outputs of all test samples."""
        row = self._scored(out)
        row.integer_share, row.seconds = integer_share, seconds
        return row

    def _scored(self, out: Tensor) -> Row:
        asset = self.asset
        value, decibels = asset.score(out), sqnr(self.reference, out)
        if asset.placements is not None:
            placed = asset.placements(out)
            loss = area_difference(asset.placements(self.reference), placed)
            return Row(value, None, loss, None, decibels, placements=[x.tolist() for x in placed])
        if asset.labels is None:
            return Row(value, None, None, None, decibels)
        right = self._right(out)
        interval = wilson_interval(value * len(right), len(right))
        agreement = float((out.argmax(1) == self.reference.argmax(1)).double().mean())
        loss = paired_interval(self._right(self.reference) - right)
        return Row(value, interval, loss, agreement, decibels, right=[int(r) for r in right])

    def _right(self, out: Tensor) -> Tensor:
        assert self.asset.labels is not None
        return out.argmax(1).eq(self.asset.labels).double()

    def integer(self, name: str, make: Callable[[], tuple[Plan, int]]) -> None:
        """Measure the plan that `make` gives, with the number of its trials; a refusal is noted."""
        started = time.perf_counter()
        try:
            plan, trials = make()
        except HagoError as error:
            self.notes.append(f"{name}: {error}")
            return
        seconds = time.perf_counter() - started
        watch = AccumulatorWatch(plan)
        out = outputs(Simulator(plan, watch=watch), self.asset.test)
        few = [t[:CHECKED] for t in self.asset.test[0]]
        nodes = plan_cost(plan).nodes
        share = sum(n.macs for n in nodes if n.integer) / sum(n.macs for n in nodes)
        row = self.row(out, share, seconds)
        row.trials = trials
        row.proved = sum(n.proved for n in plan.nodes.values())
        row.overflowing = len(watch.extremes.overflows)
        row.possible = len(plan.nodes) - row.proved - row.overflowing
        open_nodes = sum(count for n, count in watch.extremes.accumulators.items() if not plan.nodes[n].proved)
        row.rate = 1e6 * sum(watch.extremes.overflows.values()) / max(open_nodes, 1)
        row.differing = int((Simulator(plan)(*few) != IntegerModel(plan)(*few)).sum())
        self.rows[name] = row
        if self.asset.kinds:
            known = outputs(self.asset.module, self.asset.calibration)
            found = {"calibration": sqnr(known, outputs(Simulator(plan), self.asset.calibration))}
            found |= {k: sqnr(self.reference[of], out[of]) for k, of in self.asset.kinds.items()}
            self.notes.append(f"{name}, SQNR: " + ", ".join(f"{k} {value:.1f} dB" for k, value in found.items()))

    def one_shot(self, estimator: str | None) -> tuple[Plan, int]:
        """`hago.quantize`."""
        made = quantize(self.graph, self.job.hardware, self.asset.calibration, estimator=estimator)
        return made.plan, 1

    def searched(self) -> tuple[Plan, int]:
        """`hago.search_quantize_strategy` as it is by default, within the budget."""
        with tempfile.TemporaryDirectory() as folder:
            log = Path(folder) / "search.jsonl"
            strategy, _ = search_quantize_strategy(
                self.graph,
                self.job.hardware,
                self.asset.calibration,
                budget=self.job.budget,
                log=log,
                progress=False,
            )
            trials = len(log.read_text().splitlines()) - 1
        return create_quantizer(self.graph, self.job.hardware, strategy).plan, trials

    def widest(self) -> tuple[Plan, int]:
        """Every edge at its most bits."""
        prepared = prepare(self.graph, self.job.hardware, self.asset.calibration)
        return prepared.resolver(prepared.space.widest()), 1


def measure(job: Job) -> dict[str, object]:
    """All rows of a job, as JSON values."""
    torch.set_num_threads(job.threads)
    found = Measurement(job)
    if job.hardware == "int16_accumulator":
        found.integer("widest", found.widest)
    found.integer(DEFAULT, partial(found.one_shot, None))
    for name in job.estimators:
        found.integer(name, partial(found.one_shot, name))
    if job.budget != "0":
        found.integer("search", found.searched)
    megabytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    asset = found.asset
    if job.hardware == "vta":
        found.rows["plain"] = found.row(plain_outputs(found.graph, asset.calibration, asset.test))
    if job.hardware in COMPARED and job.peers:
        found.rows["onnxruntime"] = found.row(*onnxruntime_outputs(asset))
    for name, peer in job.peer_models.items():
        out = torch.from_numpy(np.load(peer.outputs))
        found.rows[name] = found.row(out, peer.integer_share, peer.seconds)
        found.rows[name].settings = peer.settings
    return {
        "model": job.model,
        "hardware": job.hardware,
        "metric": asset.metric,
        "samples": asset.samples,
        "calibration": sum(len(b[0]) for b in asset.calibration),
        "megabytes": megabytes,
        "notes": found.notes,
        "rows": {name: asdict(row) for name, row in found.rows.items()},
    }


def results(jobs: list[Job]) -> Iterator[dict[str, object]]:
    """The results of all jobs, each from a new process, one at a time."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context, max_tasks_per_child=1) as pool:
        yield from pool.map(measure, jobs)


def run_peers(name: str, options: argparse.Namespace, folder: Path) -> tuple[dict[str, PeerModel], list[str]]:
    """What peers in environments of their own make of a network, by name, and why others were not measured."""
    asset = load(options.assets, name, options.calibration, options.test)
    found: dict[str, PeerModel] = {}
    notes = []
    for peer in (
        Peer("nncf", "nncf", NNCF, "_peer_nncf.py", ("post_training",)),
        Peer("aimet", "aimet", AIMET, "_peer_aimet.py", ("adaround", str(options.adaround_iterations))),
    ):
        place = folder / name / peer.name
        place.mkdir(parents=True)
        said = "it is given networks with one input" if len(asset.test[0]) > 1 else ""
        said = said or run_peer(peer, options.environments, place, asset, options.assets, options.threads)
        if said:
            notes.append(f"{peer.name} was not measured: {said}")
            continue
        (point,) = json.loads((place / "points.json").read_text())["points"]
        file = str(place / point["outputs"])
        found[peer.name] = PeerModel(file, point["seconds"], point["integer_share"], point["label"])
    return found, notes


def jobs(model: str, options: argparse.Namespace, peers: bool, folder: Path) -> list[Job]:
    """The jobs of a network, once its peers have run."""
    compared = options.environments is not None and set(options.hardware) & set(COMPARED)
    models, notes = run_peers(model, options, folder) if compared else ({}, [])
    return [
        Job(
            options.assets,
            model,
            hardware,
            options.calibration,
            options.test,
            options.budget,
            tuple(options.estimators),
            peers,
            options.threads,
            models if hardware in COMPARED else {},
            tuple(notes) if hardware in COMPARED else (),
        )
        for hardware in options.hardware
    ]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--assets", required=True, help="the folder of networks and data")
    parser.add_argument("--models", nargs="+", default=list(NAMES), choices=NAMES)
    parser.add_argument("--hardware", nargs="+", default=list(HARDWARE))
    parser.add_argument("--calibration", type=int, default=512, help="samples, without labels")
    parser.add_argument("--test", type=int, help="samples; all by default")
    parser.add_argument("--budget", default="200 trials", help="of a search; 0 for none")
    parser.add_argument("--estimators", nargs="*", default=list(ESTIMATORS), help="tried on every hardware")
    parser.add_argument("--peers", action="store_true", help="measure ONNX Runtime")
    parser.add_argument("--environments", type=Path, help="measure NNCF and AIMET, installed in folders below this one")
    parser.add_argument("--adaround-iterations", type=int, default=10_000, help="for each layer, of AIMET")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", type=Path, help="write all that was measured there")
    options = parser.parse_args()
    missing = onnxruntime_missing() if options.peers else ""
    if missing:
        print(f"ONNX Runtime is not measured; {missing}")
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for model in options.models:
            for result in results(jobs(model, options, options.peers and not missing, Path(folder))):
                found.append(result)
                print(table(result), flush=True)
                if options.json:
                    options.json.write_text(json.dumps(found))
    print("\n".join(verdicts(found)))


if __name__ == "__main__":
    main()
