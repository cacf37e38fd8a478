"""The demo: handwritten digits, from training to an integer model that equals its simulation on every image.

The command `hago demo` calls `run_demo`. Its files (the weights of the model, the data, the logs and the strategies)
are kept, so that every other command can be tried on them.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hago.analysis.strategy_report import StrategyReport, figure_cells, report_strategy
from hago.api import explain, inspect_graph_statistic, search_quantize_strategy
from hago.data import Batches
from hago.errors import HagoError, as_strings
from hago.hardware import Hardware, load_hardware
from hago.runtime.native import exact_kernels
from hago.search import Evaluator, prepare
from hago.search.objective import named_objective
from hago.serialization.text_table import counted, table
from hago.study import read_log

#: The hardware of the demo: a chip with wide accumulators, and one whose accumulators overflow at 8 bits.
HARDWARE: Final = ("x86_vnni", "int16_accumulator")
#: The name of the network on the command line.
MODEL: Final = "hago.demo:DigitNet"
#: The numbers of images for training and for calibration; the others of the 1797 images are for testing.
TRAIN, CALIBRATION = 1000, 200
EPOCHS: Final = 20
BATCH_SIZE: Final = 100


# ---------------------------------------------------------------- the network
class Block(nn.Module):
    """A residual block: two convolutions and a shortcut."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        ins, outs = in_channels, out_channels
        self.conv1 = nn.Conv2d(ins, outs, 3, outs // ins, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outs)
        self.conv2 = nn.Conv2d(outs, outs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outs)
        self.shortcut = nn.Conv2d(ins, outs, 1, outs // ins, bias=False) if outs != ins else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.bn1(self.conv1(x)))
        return torch.relu(self.bn2(self.conv2(y)) + self.shortcut(x))


class DigitNet(nn.Module):
    """A small residual network for 8x8 images, (batch, 1, 8, 8) in [0, 1] to (batch, 10)."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 16, 3, 1, 1, bias=False)
        self.bn = nn.BatchNorm2d(16)
        self.block1 = Block(16, 16)
        self.block2 = Block(16, 32)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.classes = nn.Linear(32, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.block2(self.block1(torch.relu(self.bn(self.stem(images)))))
        scores: Tensor = self.classes(torch.flatten(self.pool(x), 1))
        return scores


# ---------------------------------------------------------------- data and training
@dataclass(frozen=True, slots=True)
class Digits:
    """scikit-learn's handwritten digits in three parts, each (images, labels), shuffled by a seed."""

    train: tuple[Tensor, Tensor]
    calibration: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]


def load_digits(seed: int = 0) -> Digits:
    """Read the digits that scikit-learn ships; nothing is downloaded.

    Raises:
        HagoError: scikit-learn is not installed.
    """
    try:
        digits = importlib.import_module("sklearn.datasets").load_digits()
    except ImportError:
        raise HagoError("the demo needs scikit-learn: pip install 'hago[demo]'") from None
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(seed))
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1)[order] / 16.0
    labels = torch.tensor(digits.target, dtype=torch.int64)[order]
    parts = [slice(0, TRAIN), slice(TRAIN, TRAIN + CALIBRATION), slice(TRAIN + CALIBRATION, None)]
    return Digits(*((images[p], labels[p]) for p in parts))


def batches(part: tuple[Tensor, Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Split a part of the digits into batches."""
    return list(zip(torch.split(part[0], BATCH_SIZE), torch.split(part[1], BATCH_SIZE), strict=True))


def train(part: tuple[Tensor, Tensor], seed: int = 0, epochs: int = EPOCHS) -> DigitNet:
    """Train a network, and return it in eval mode. The caller's random state does not change."""
    images, labels = part
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = DigitNet()
        steps = epochs * (len(images) // 50)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-4)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=steps)
        for _ in range(epochs):
            order = torch.randperm(len(images))
            for rows in torch.split(order[: len(images) // 50 * 50], 50):
                optimizer.zero_grad()
                torch.autograd.backward(F.cross_entropy(model(images[rows]), labels[rows], label_smoothing=0.05))
                optimizer.step()
                schedule.step()
    return model.eval()


# ---------------------------------------------------------------- the demonstration
@dataclass(frozen=True, slots=True)
class HardwareResult:
    """The result of the demo on one hardware.

    Args:
        report: the report of the best strategy on the test images.
        widest: measures of the most bits everywhere, simulated on the test images: the result of quantizing without
            regard to accumulators.
        widest_overflows: the number of accumulators that overflowed with those bits.
        trials, seconds: the number of trials and the duration of the search.
        log, strategy: the files that the search wrote.
    """

    report: StrategyReport
    widest: Mapping[str, Any]
    widest_overflows: int
    trials: int
    seconds: float
    log: Path
    strategy: Path

    def to_json(self) -> dict[str, Any]:
        """The result as JSON values."""
        return {
            **self.report.to_json(),
            "widest": {**self.widest, "overflows": self.widest_overflows},
            "trials": self.trials,
            "seconds": self.seconds,
            "log": str(self.log),
            "strategy": str(self.strategy),
        }


@dataclass(frozen=True, slots=True)
class Demo:
    """The results of the demo, one per hardware; returned by `run_demo` and printed as a table."""

    results: tuple[HardwareResult, ...] = ()

    @property
    def same(self) -> bool:
        """Whether the integer model equals the simulator on every image and every hardware."""
        return all(r.report.same for r in self.results)

    def to_json(self) -> dict[str, Any]:
        """The result as JSON values."""
        return {"same": self.same, "results": [r.to_json() for r in self.results]}

    def __str__(self) -> str:
        rows = [row for result in self.results for row in _rows(result)]
        titles = (
            "hardware",
            "model",
            "accuracy",
            "95 % interval",
            "agreement",
            "SQNR dB",
            "trials",
            "seconds",
            "overflow",
        )
        return "\n".join(table(titles, rows, right=("accuracy", "agreement", "SQNR dB", "trials", "seconds")))


def _rows(result: HardwareResult) -> list[tuple[str, ...]]:
    report = result.report
    proved = sum(v == "proved" for v in report.verdicts.values())
    overflows = sum(report.overflows.values())
    of_search = (
        f"{overflows} seen" if overflows else f"none; proved at {proved} of {counted(len(report.verdicts), 'node')}"
    )
    of_widest = f"{result.widest_overflows} seen" if result.widest_overflows else "none"
    cells = {m: (report.hardware, m, *figure_cells(f)) for m, f in report.figures.items()}
    return [
        (*cells["float"], "", "", ""),
        (report.hardware, "widest bits", *figure_cells(result.widest), "", "", of_widest),
        (*cells["simulated"], str(result.trials), f"{result.seconds:.1f}", of_search),
        (*cells["integer"], "", "", ""),
    ]


def run_demo(
    out: Path,
    say: Callable[[str], None],
    *,
    hardware: str | Sequence[str] = HARDWARE,
    budget: str | None = None,
    seed: int = 0,
    epochs: int = EPOCHS,
) -> Demo:
    """Run the demo: train, explain, search, realize and check.

    Args:
        out: a folder, in which `demo/`, `logs/demo-*` and `strategies/demo-*` are replaced.
        say: called with every line of the progress report.
        hardware: names or paths of hardware files.
        budget: the budget of each search.
        seed: the seed of the split of the data, of training and of each search.
        epochs: the number of epochs of training.

    Raises:
        HagoError: scikit-learn is not installed, or the folder cannot be written.
    """
    _make_folders(out)
    digits, started = load_digits(seed), time.monotonic()
    model = train(digits.train, seed, epochs)
    count = sum(p.numel() for p in model.parameters())
    say(
        f"trained a residual network of {count} parameters on {len(digits.train[0])} handwritten digits in "
        f"{time.monotonic() - started:.1f} s; {len(digits.calibration[0])} other digits are for calibration and "
        f"{len(digits.test[0])} for testing"
    )
    _save(out, model, digits)
    started = time.monotonic()
    exact_kernels()
    say(f"loaded kernels in {time.monotonic() - started:.1f} s; a first run builds them")
    return Demo(
        tuple(_run_on(name, model, digits, out, say, budget, seed) for name in as_strings(hardware, "hardware"))
    )


def _make_folders(out: Path) -> None:
    try:
        for folder in ("demo", "logs", "strategies"):
            (out / folder).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise HagoError(f"the demo cannot write to {out}: {error}") from None


def _save(out: Path, model: DigitNet, digits: Digits) -> None:
    try:
        torch.save(model.state_dict(), out / "demo" / "weights.pt")
        for name in ("calibration", "test"):
            images, labels = getattr(digits, name)
            np.savez(out / "demo" / f"{name}.npz", images=images.numpy(), labels=labels.numpy())
    except OSError as error:
        raise HagoError(f"the demo cannot write to {out}: {error}") from None


def _run_on(
    name: str, model: DigitNet, digits: Digits, out: Path, say: Callable[[str], None], budget: str | None, seed: int
) -> HardwareResult:
    """Explain, search, measure and inspect on one piece of hardware."""
    chip = load_hardware(name)
    log, saved = out / "logs" / f"demo-{chip.name}.jsonl", out / "strategies" / f"demo-{chip.name}.json"
    log.unlink(missing_ok=True)
    calibration, test = batches(digits.calibration), batches(digits.test)
    say("\n" + str(explain(model, chip, (digits.test[0][:2],))).splitlines()[0])
    started = time.monotonic()
    strategy, _ = search_quantize_strategy(model, chip, calibration, budget=budget, seed=seed, log=log, save=saved)
    seconds, trials = time.monotonic() - started, len(read_log(log).trials)
    say(f"searched {counted(trials, 'trial')} in {seconds:.1f} s; every one is a line of {log}, the best is {saved}")
    report = report_strategy(model, chip, strategy, test)
    say(f"{report.weights}\n{report.exactness_text()[0]}\n")
    say(str(inspect_graph_statistic(model, chip, strategy, test)))
    widest, overflows = _widest(model, chip, digits)
    return HardwareResult(report, widest, overflows, trials, seconds, log, saved)


def _widest(model: DigitNet, chip: Hardware, digits: Digits) -> tuple[Mapping[str, Any], int]:
    """Measures of the most bits everywhere on the test images, and the number of overflows."""
    prepared = prepare(model, chip, batches(digits.calibration))
    evaluator = Evaluator(
        prepared.graph, Batches(batches(digits.test), prepared.graph.inputs), named_objective("sqnr"), chip.known_ops
    )
    measured = evaluator.measure(prepared.resolver(prepared.space.widest()))
    return evaluator.summary(measured.contributions), sum(measured.extremes.overflows.values())
