"""Accuracy on text: a sentence encoder by the similarity of words, and causal language models by perplexity.

    python scripts/train_language.py --kind gpt --out /tmp/gpt.pt
    python scripts/benchmark_text.py --assets DIR --language gpt=/tmp/gpt.pt llama=/tmp/llama.pt
    python scripts/benchmark_text.py --language gpt=/tmp/gpt.pt --hardware --weight-bits 4 --group 32

What is measured is the simulator's, of samples that calibration did not see. Loss is that against the float model, of
perplexity as a share of it, with the 95 % interval of a paired bootstrap over pairs of words, or over windows of text.
Words of one list calibrate the encoder for the other; windows of the files that a language model was trained on
calibrate it. Beside the chips, weights alone can be quantized, in groups that have a scale each: layers then compute in
float. "integer" is the part of the multiply-adds that run in integers.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _assets import Samples, outputs, sqnr
from _language import LanguageModel, batches, negative_log_likelihood, read_text, windows
from benchmark_groups import alone
from scipy import stats
from torch import Tensor, nn

import hago
from hago.cost import plan_cost
from hago.hardware import Hardware

Numbers = np.ndarray[Any, Any]

RESAMPLES = 2000
LISTS = ("wordsim", "simlex")


@dataclass(frozen=True, slots=True)
class Subject:
    """A network with its data.

    Args:
        measured: from the outputs of all test samples, what counts of each item: a pair of words, or a window.
        score: the figure, from what was measured and the indices of the items that count; larger is better.
        items: the number of items that are drawn for an interval.
        shown: what is printed of a figure.
        shown_loss: what is printed of a loss.
    """

    name: str
    module: nn.Module
    calibration: list[Samples]
    test: list[Samples]
    measured: Callable[[Tensor], Numbers]
    score: Callable[[Numbers, Numbers], float]
    items: int
    shown: Callable[[float], float]
    shown_loss: Callable[[float], str]


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

    def similarities(out: Tensor) -> Numbers:
        a, b = out.double().chunk(2)
        return (a * b).sum(1).numpy()

    def score(similarity: Numbers, chosen: Numbers) -> float:
        return float(stats.spearmanr(similarity[chosen], human[chosen]).statistic)

    calibrated, test = (
        [(part, (part != 0).long()) for part in ids.split(32)] for ids in (known, torch.cat([first, second]))
    )
    return Subject(
        f"minilm, {tested}", module, calibrated, test, similarities, score, len(human), float, "{:+.4f}".format
    )


def language_model(kind: str, weights: Path, calibration: int, tested: int) -> Subject:
    """A causal language model that `train_language.py` trained."""
    model = LanguageModel(kind == "llama")
    model.load_state_dict(torch.load(weights, weights_only=True))
    known, test = windows(read_text(tested=False), calibration, 77), windows(read_text(tested=True), tested, 78)

    def likelihoods(out: Tensor) -> Numbers:
        return -negative_log_likelihood(out, test).numpy()

    def score(likelihood: Numbers, chosen: Numbers) -> float:
        return float(likelihood[chosen].mean())

    data, tried = list(batches(known)), list(batches(test))
    return Subject(kind, model.eval(), data, tried, likelihoods, score, len(test), perplexity, relative_perplexity)


def perplexity(score: float) -> float:
    """The perplexity whose negative logarithm a score is."""
    return math.exp(-score)


def relative_perplexity(loss: float) -> str:
    """A loss of scores as the share by which the perplexity is larger."""
    return f"{math.expm1(loss):+.2%}"


def weights_alone(bits: int, group: int) -> Hardware:
    """Layers that compute in float, with weights of so many bits in groups."""
    return replace(alone(bits, "per_channel", group), name=f"weights of {bits} bits in groups of {group}")


def loss(subject: Subject, reference: Numbers, out: Numbers) -> tuple[float, float, float]:
    """The float figure minus ours, and its 95 % interval by a paired bootstrap."""

    def lost(chosen: Numbers) -> float:
        return subject.score(reference, chosen) - subject.score(out, chosen)

    generator = np.random.default_rng(0)
    drawn = [lost(generator.integers(0, subject.items, subject.items)) for _ in range(RESAMPLES)]
    low, high = np.quantile(drawn, [0.025, 0.975])
    return lost(np.arange(subject.items)), float(low), float(high)


def fixed_bits(subject: Subject, hardware: str | Hardware, weights: int, inputs: int) -> dict[str, int]:
    """The bits of the weights and of the inputs of all linear layers but the last one, by group of edges."""
    prepared = hago.search.prepare(subject.module, hardware, subject.calibration[:1])
    *layers, _ = (node.name for node in prepared.graph if node.op == "linear")
    bits = {f"{name}:{slot}": b for name in layers for slot, b in ((0, inputs), (1, weights))}
    groups = prepared.space.groups
    return {key: bits[str(e)] for key, group in groups.items() for e in group.edges if str(e) in bits}


def measure(
    subject: Subject,
    hardware: str | Hardware,
    settings: Sequence[str],
    estimator: str | None,
    layer_bits: Sequence[int] | None = None,
) -> list[dict[str, Any]]:
    """Print and return a row for every set of corrections.

    Args:
        layer_bits: of the weights and of the inputs of all linear layers but the last one; None for 8.
    """
    name = hardware if isinstance(hardware, str) else hardware.name
    fixed = None
    if layer_bits is not None:
        fixed = fixed_bits(subject, hardware, *layer_bits)
        name = f"{name}, layers of {layer_bits[0]} and {layer_bits[1]} bits"
    reference = outputs(subject.module, subject.test)
    real, every = subject.measured(reference), np.arange(subject.items)
    rows = []
    print(f"{subject.name} on {name}: float {subject.shown(subject.score(real, every)):.4f}", flush=True)
    for setting in settings:
        started = time.perf_counter()
        corrections = None if setting == "all" else setting.split("+")
        made = hago.quantize(
            subject.module,
            hardware,
            subject.calibration,
            corrections=corrections,
            estimator=estimator,
            fix_bits=fixed,
        )
        seconds = time.perf_counter() - started
        out = outputs(made.simulate(), subject.test)
        measured = subject.measured(out)
        figure, lost = subject.shown(subject.score(measured, every)), loss(subject, real, measured)
        nodes = plan_cost(made.plan).nodes
        share = sum(n.macs for n in nodes if n.integer) / sum(n.macs for n in nodes)
        row = {"subject": subject.name, "hardware": name, "corrections": setting, "value": figure, "loss": lost}
        row |= {"sqnr": sqnr(reference, out), "integer_share": share, "corrected": str(made.strategy.corrections)}
        rows.append(row)
        mean, low, high = map(subject.shown_loss, lost)
        print(
            f"  {setting:45} {figure:8.4f}  loss {mean} [{low}, {high}]  {row['sqnr']:6.2f} dB  integer {share:6.1%}"
            f"  {seconds:5.0f} s",
            flush=True,
        )
    return rows


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--assets", type=Path, help="the folder of networks and data, for the encoder")
    parser.add_argument("--language", nargs="*", default=[], metavar="KIND=WEIGHTS", help="models of train_language.py")
    parser.add_argument("--hardware", nargs="*", default=["x86_vnni", "vta"])
    parser.add_argument("--weight-bits", type=int, nargs="*", default=[], help="bits of weights alone, all else float")
    parser.add_argument(
        "--layer-bits", type=int, nargs=2, metavar=("WEIGHTS", "INPUTS"), help="of linear layers but the last"
    )
    parser.add_argument("--group", type=int, default=32, help="weights that share a scale there")
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
    chips: list[str | Hardware] = [*args.hardware, *(weights_alone(bits, args.group) for bits in args.weight_bits)]
    rows = [
        row
        for subject in subjects
        for chip in chips
        for row in measure(subject, chip, args.corrections, args.estimator, args.layer_bits)
    ]
    if args.json:
        args.json.write_text(json.dumps(rows))


if __name__ == "__main__":
    main()
