"""Accuracy on text: a sentence encoder by the similarity of words, and causal language models by perplexity.

    python scripts/train_language.py --kind gpt --out /tmp/gpt.pt
    python scripts/benchmark_text.py --assets DIR --language gpt=/tmp/gpt.pt llama=/tmp/llama.pt

What is measured is the simulator's, of samples that calibration did not see. Loss is that against the float model, with
the 95 % interval of a paired bootstrap over pairs of words, or over windows of text. Words of one list calibrate the
encoder for the other; windows of the files that a language model was trained on calibrate it.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _assets import Samples, outputs, sqnr
from _language import LanguageModel, batches, negative_log_likelihood, read_text, windows
from scipy import stats
from torch import Tensor, nn

import hago

RESAMPLES = 2000
LISTS = ("wordsim", "simlex")


@dataclass(frozen=True, slots=True)
class Subject:
    """A network with its data.

    Args:
        score: from the outputs of all test samples and the indices of the items that count, the figure; larger is
            better.
        items: the number of items that are drawn for an interval.
        relative: whether the loss is a share of the float model's figure.
        shown: what is printed of a figure.
    """

    name: str
    module: nn.Module
    calibration: list[Samples]
    test: list[Samples]
    score: Callable[[Tensor, np.ndarray[Any, Any]], float]
    items: int
    shown: Callable[[float], float]


def encoder(folder: Path, tested: str, calibration: int) -> Subject:
    """The sentence encoder, tested on one list of pairs of words, calibrated on words that only the other one has."""
    import sys

    sys.path.insert(0, str(folder.resolve()))
    import loaders  # type: ignore[import-not-found]

    module, _ = loaders.net("minilm")
    text = loaders.text()
    (other,) = (name for name in LISTS if name != tested)
    first, second = (text[f"{tested}_{side}"].long() for side in "ab")
    human = text[f"{tested}_human"].numpy()
    seen = {tuple(row) for row in torch.cat([first, second]).tolist()}
    rows = dict.fromkeys(map(tuple, torch.cat([text[f"{other}_{side}"] for side in "ab"]).tolist()))
    known = torch.tensor([row for row in rows if row not in seen])
    known = known[torch.randperm(len(known), generator=torch.Generator().manual_seed(0))[:calibration]]

    def score(out: Tensor, chosen: np.ndarray[Any, Any]) -> float:
        a, b = out.double().chunk(2)
        return float(stats.spearmanr((a * b).sum(1).numpy()[chosen], human[chosen]).statistic)

    calibrated, test = (
        [(part, (part != 0).long()) for part in ids.split(32)] for ids in (known, torch.cat([first, second]))
    )
    return Subject(f"minilm, {tested}", module, calibrated, test, score, len(human), lambda value: value)


def language_model(kind: str, weights: Path, calibration: int, tested: int) -> Subject:
    """A causal language model that `train_language.py` trained."""
    model = LanguageModel(kind == "llama")
    model.load_state_dict(torch.load(weights, weights_only=True))
    known, test = windows(read_text(tested=False), calibration, 77), windows(read_text(tested=True), tested, 78)

    def score(out: Tensor, chosen: np.ndarray[Any, Any]) -> float:
        return -float(negative_log_likelihood(out, test).numpy()[chosen].mean())

    data, tried = list(batches(known)), list(batches(test))
    return Subject(kind, model.eval(), data, tried, score, len(test), lambda value: math.exp(-value))


def loss(subject: Subject, reference: Tensor, out: Tensor) -> tuple[float, float, float]:
    """The float figure minus ours, and its 95 % interval by a paired bootstrap."""

    def lost(chosen: np.ndarray[Any, Any]) -> float:
        return subject.score(reference, chosen) - subject.score(out, chosen)

    generator = np.random.default_rng(0)
    drawn = [lost(generator.integers(0, subject.items, subject.items)) for _ in range(RESAMPLES)]
    low, high = np.quantile(drawn, [0.025, 0.975])
    return lost(np.arange(subject.items)), float(low), float(high)


def measure(subject: Subject, hardware: str, settings: Sequence[str], estimator: str | None) -> list[dict[str, Any]]:
    """Print and return a row for every set of corrections."""
    reference = outputs(subject.module, subject.test)
    every = np.arange(subject.items)
    rows = []
    print(f"{subject.name} on {hardware}: float {subject.shown(subject.score(reference, every)):.4f}", flush=True)
    for setting in settings:
        started = time.perf_counter()
        corrections = None if setting == "all" else setting.split("+")
        made = hago.quantize(
            subject.module, hardware, subject.calibration, corrections=corrections, estimator=estimator
        )
        seconds = time.perf_counter() - started
        out = outputs(made.simulate(), subject.test)
        figure, lost = subject.shown(subject.score(out, every)), loss(subject, reference, out)
        row = {"subject": subject.name, "hardware": hardware, "corrections": setting, "value": figure, "loss": lost}
        rows.append(row | {"sqnr": sqnr(reference, out), "corrected": str(made.strategy.corrections)})
        spread = "{:+.4f} [{:+.4f}, {:+.4f}]".format(*lost)
        print(f"  {setting:45} {figure:8.4f}  loss {spread}  {rows[-1]['sqnr']:6.2f} dB  {seconds:5.0f} s", flush=True)
    return rows


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--assets", type=Path, help="the folder of networks and data, for the encoder")
    parser.add_argument("--language", nargs="*", default=[], metavar="KIND=WEIGHTS", help="models of train_language.py")
    parser.add_argument("--hardware", nargs="+", default=["x86_vnni", "vta"])
    parser.add_argument("--corrections", nargs="+", default=["none", "all"], help="sets of corrections, joined by +")
    parser.add_argument("--estimator", help="of thresholds; the chip's by default")
    parser.add_argument("--calibration", type=int, default=256, help="samples of the encoder")
    parser.add_argument("--windows", type=int, default=64, help="windows that calibrate a language model")
    parser.add_argument("--test", type=int, default=256, help="windows that test it")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", type=Path, help="write all that was measured there")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    subjects = [encoder(args.assets, tested, args.calibration) for tested in LISTS] if args.assets else []
    for pair in args.language:
        kind, _, weights = pair.partition("=")
        subjects.append(language_model(kind, Path(weights), args.windows, args.test))
    rows = [r for s in subjects for chip in args.hardware for r in measure(s, chip, args.corrections, args.estimator)]
    if args.json:
        args.json.write_text(json.dumps(rows))


if __name__ == "__main__":
    main()
