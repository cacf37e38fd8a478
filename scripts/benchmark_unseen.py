"""Compare the default search with one shot on samples that neither has seen: is the search ever worse?

A cell is a network on a chip with so many calibration samples, drawn by a seed. `hago.quantize` and the default
`hago.search_quantize_strategy` get the same samples; the SQNR of both integer models is measured on the same test
samples and compared by a paired test, recordings being taken as one sample each. Cells are written to a file of JSON
lines, and those that stand in it are not run again. The default search holds if the mean over all cells is not below
one shot, and no more cells are worse at p < 0.01 than chance gives.

    python scripts/benchmark_unseen.py --assets DIR --log unseen.jsonl --models lenet --calibration 8 32
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from _accuracy_report import spread
from _assets import NAMES, Asset, Samples, load, outputs
from scipy import stats
from torch import Tensor

from hago import HagoError, create_quantizer, quantize, search_quantize_strategy
from hago.search.intervals import paired_interval
from hago.search.objective import decibels

HARDWARE = ("x86_vnni", "tflite", "vta", "cmsis_nn")
CALIBRATION = (8, 32, 128)
#: Chance that an equal cell is called worse.
LEVEL = 0.01
#: Calibration samples are drawn from so many.
POOL = 1024
BATCH = 32


@dataclass(frozen=True, slots=True)
class Cell:
    """What is compared."""

    model: str
    hardware: str
    calibration: int
    seed: int


@dataclass(frozen=True, slots=True)
class Gain:
    """How much better one model is than another on the same samples.

    Args:
        decibels: of SQNR.
        errors: the same in standard errors; 0 where both models err by the same on every sample.
    """

    decibels: float
    errors: float

    @property
    def chance(self) -> float:
        """Of a gain as low as this, or lower, if both were equally good."""
        return float(stats.norm.cdf(self.errors))


def gain(before: Tensor, after: Tensor) -> Gain:
    """How much better `after` is, by the ratio of mean noises and its standard error to first order.

    Args:
        before, after: noise of every sample, float64 (samples,).
    """
    if torch.equal(before, after):
        return Gain(0.0, 0.0)
    old, new = float(before.mean()), float(after.mean())
    if old == 0.0 or new == 0.0:
        return Gain(math.inf, math.inf) if new == 0.0 else Gain(-math.inf, -math.inf)
    error = float((before / old - after / new).std()) / math.sqrt(len(before))
    ratio = math.log(old / new)
    return Gain(10.0 * math.log10(old / new), ratio / error if error > 0.0 else math.copysign(math.inf, ratio))


def verdict(rows: Sequence[Mapping[str, Any]]) -> tuple[str, bool]:
    """What all cells say, and whether the search holds: see the head of this file."""
    gains = [Gain(row["gain"], row["errors"]) for row in rows]
    if not gains:
        return "no cells", False
    mean = sum(g.decibels for g in gains) / len(gains)
    worse, better = (sum(g.chance < LEVEL for g in found) for found in (gains, [Gain(0.0, -g.errors) for g in gains]))
    most = int(stats.binom.ppf(0.95, len(gains), LEVEL))
    said = (
        f"{len(gains)} cells: {mean:+.2f} dB on average; worse at p < {LEVEL}: {worse} (chance gives {most} at most); "
        f"better: {better}; equal: {sum(g.errors == 0.0 for g in gains)}"
    )
    return said, mean >= 0.0 and worse <= most


def measure(cell: Cell, asset: Asset, reference: Tensor) -> dict[str, Any]:
    """One cell, as JSON values.

    Args:
        reference: the float network's outputs for the test samples.
    """
    batches = drawn(asset, cell)
    started = time.process_time()
    models = [quantize(asset.module, cell.hardware, batches)]
    between = time.process_time()
    strategy, _ = search_quantize_strategy(asset.module, cell.hardware, batches, progress=False)
    ended = time.process_time()
    models.append(create_quantizer(asset.module, cell.hardware, strategy))
    found = [outputs(model.realize(), asset.test) for model in models]
    noises = [(out.double() - reference.double()).flatten(1).square().sum(1) for out in found]
    signal = float(reference.double().square().sum())
    gained = gain(*(noise.view(-1, asset.recording).sum(1) for noise in noises))
    row = {
        **asdict(cell),
        "samples": asset.samples,
        "one_shot": decibels(signal, float(noises[0].sum())),
        "search": decibels(signal, float(noises[1].sum())),
        "gain": gained.decibels,
        "errors": gained.errors,
        "scores": [asset.score(out) for out in (reference, *found)],
        "seconds": [between - started, ended - between],
    }
    if asset.labels is not None:
        right = [(out.argmax(1) == asset.labels).double() for out in (reference, *found)]
        row["lost"] = paired_interval(right[0] - right[2])
    return row


def drawn(asset: Asset, cell: Cell) -> list[Samples]:
    """The calibration samples of a cell; recordings stay as they were loaded."""
    if asset.recording > 1:
        return asset.calibration
    pool = [torch.cat(tensors) for tensors in zip(*asset.calibration, strict=True)]
    generator = torch.Generator().manual_seed(cell.seed)
    index = torch.randperm(len(pool[0]), generator=generator)[: cell.calibration]
    return list(zip(*(tensor[index].split(BATCH) for tensor in pool), strict=True))


def measured(cells: Sequence[Cell], assets: str, test: int | None) -> Iterator[dict[str, Any]]:
    """All cells; those with more samples than a network has are left out."""
    loaded: dict[tuple[str, int], tuple[Asset, Tensor]] = {}
    for cell in cells:
        key = cell.model, cell.calibration if cell.model == "mlperf_ad" else POOL
        if key not in loaded:
            asset = load(assets, *key, test)
            loaded = {key: (asset, outputs(asset.module, asset.test))}
        asset, reference = loaded[key]
        if asset.recording == 1 and sum(len(batch[0]) for batch in asset.calibration) < cell.calibration:
            continue
        try:
            yield measure(cell, asset, reference)
        except HagoError as error:
            yield {**asdict(cell), "error": str(error)}


def line(row: Mapping[str, Any]) -> str:
    """One cell."""
    head = f"{row['model']:20} {row['hardware']:16} {row['calibration']:5} {row['seed']:3}"
    if "error" in row:
        return f"{head}  {row['error']}"
    lost = f"  lost {spread(row['lost'])}" if "lost" in row else ""
    return f"{head}  {row['one_shot']:6.2f} dB, searched {row['search']:6.2f} ({row['errors']:+.1f} s.e.){lost}"


def main() -> int:
    """Measure and print; 1 if the search does not hold, or was refused."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--assets", required=True, help="the folder of networks and data")
    parser.add_argument("--log", required=True, type=Path, help="JSON lines; what stands there is not run again")
    parser.add_argument("--models", nargs="+", default=list(NAMES), choices=NAMES)
    parser.add_argument("--hardware", nargs="+", default=list(HARDWARE))
    parser.add_argument("--calibration", nargs="+", type=int, default=list(CALIBRATION), help="samples")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0], help="of the choice of samples")
    parser.add_argument("--test", type=int, default=2000, help="samples, at most")
    options = parser.parse_args()
    rows = [json.loads(text) for text in options.log.read_text().splitlines()] if options.log.exists() else []
    done = {Cell(*(row[name] for name in Cell.__slots__)) for row in rows}
    wanted = [
        Cell(model, hardware, count, seed)
        for model in options.models
        for count in options.calibration
        for seed in options.seeds
        for hardware in options.hardware
    ]
    with options.log.open("a") as log:
        for row in measured([cell for cell in wanted if cell not in done], options.assets, options.test):
            print(json.dumps(row), file=log, flush=True)
            print(line(row), flush=True)
            rows.append(row)
    refused = [row for row in rows if "error" in row]
    said, holds = verdict([row for row in rows if "error" not in row])
    print(f"{said}; refused: {len(refused)}")
    return 0 if holds and not refused else 1


if __name__ == "__main__":
    raise SystemExit(main())
