"""Train a small network on handwritten digits from scratch, quantized as OneFlow, TensorFlow and DoReFa-Net do.

Every cell (a system's setting and a seed) is one training of a few seconds. Its accuracy is kept in
the results file as soon as it is known, so a run that was killed goes on where it stopped. A row's
difference is to the float network of the same seed: same split, same first weights, same batches.
"""

from __future__ import annotations

import argparse
import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from _digits import cells, digits, train
from _documents import replace_between
from scipy import stats
from tqdm import tqdm

BEGIN, END = "<!-- begin digits -->", "<!-- end digits -->"
#: Accuracy by table, row and seed.
Results = dict[str, dict[str, dict[str, float]]]


def main() -> None:
    """Run what is missing, then print the tables."""
    options = parse()
    torch.set_num_threads(options.threads)
    results = read(options.results, options)
    wanted = [(t, row, seed) for t, rows in cells().items() for row in rows for seed in range(options.seeds)]
    missing = [(t, row, seed) for t, row, seed in wanted if str(seed) not in results.get(t, {}).get(row, {})]
    bar = tqdm(missing, unit="training", disable=None)
    for table, row, seed in bar:
        bar.set_description(f"{table}: {row}, seed {seed}")
        torch.manual_seed(seed)
        accuracy = train(cells()[table][row](seed), digits(seed), seed, options.epochs)
        results.setdefault(table, {}).setdefault(row, {})[str(seed)] = accuracy
        write(options.results, {"epochs": options.epochs, "accuracy": results})
    text = report(results, options)
    print(text)
    if options.write is not None:
        replace_between(options.write, BEGIN, END, text)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5, help="trainings of each row")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--results", type=Path, default=Path("digits.json"), help="the file that results are kept in")
    parser.add_argument("--write", type=Path, help="a document whose table between the digits marks is replaced")
    options = parser.parse_args()
    if min(options.seeds, options.epochs, options.threads) < 1:
        parser.error("--seeds, --epochs and --threads are positive")
    return options


def read(path: Path, options: argparse.Namespace) -> Results:
    """What is known, if it was made with as many epochs."""
    if not path.exists():
        return {}
    kept = json.loads(path.read_text())
    if kept["epochs"] != options.epochs:
        raise SystemExit(f"{path} is of {kept['epochs']} epochs, asked for {options.epochs}; name another --results")
    found: Results = kept["accuracy"]
    return found


def write(path: Path, document: Mapping[str, object]) -> None:
    """Whole or not at all."""
    draft = path.with_suffix(path.suffix + ".tmp")
    draft.write_text(json.dumps(document, indent=1))
    os.replace(draft, path)


# ---------------------------------------------------------------- statistics
def interval(values: Sequence[float]) -> tuple[float, float]:
    """Mean, and half the width of its 95 % interval by Student's t."""
    mean, count = sum(values) / len(values), len(values)
    if count < 2:
        return mean, math.inf
    deviation = math.sqrt(sum((v - mean) ** 2 for v in values) / (count - 1))
    return mean, float(stats.t.ppf(0.975, count - 1)) * deviation / math.sqrt(count)


def differences(results: Results, table: str, row: str, seeds: int) -> list[float]:
    """Accuracy less that of the float network, seed by seed."""
    base, own = results["float"].get(table, results["float"][""]), results[table][row]
    return [own[str(s)] - base[str(s)] for s in range(seeds)]


# ---------------------------------------------------------------- report
def report(results: Results, options: argparse.Namespace) -> str:
    """The tables, and what they show."""
    seeds = options.seeds
    command = f"python scripts/train_digits.py --seeds {seeds} --epochs {options.epochs}"
    lines = [
        f"`{command}`: accuracy on 797 digits in percent, mean and 95 % interval over {seeds} seeds. Differences are "
        "to the float network of the same seed: same split, first weights and batches. OneFlow's has no batch norms, "
        "as its demo's has none."
    ]
    for table, rows in results.items():
        if table == "float":
            continue
        head = "weights, activations, gradients (bits)" if table == "DoReFa-Net" else table
        base = results["float"].get(table, results["float"][""])
        mean, half = interval([base[str(s)] for s in range(seeds)])
        lines += ["", f"| {head} | accuracy | difference |", "|---|---|---|", f"| float | {mean:.2f} ± {half:.2f} | |"]
        for row in rows:
            mean, half = interval([results[table][row][str(s)] for s in range(seeds)])
            lost, width = interval(differences(results, table, row, seeds))
            lines.append(f"| {row} | {mean:.2f} ± {half:.2f} | {lost:+.2f} ± {width:.2f} |")
    return "\n".join([*lines, "", *(f"- {v}" for v in verdicts(results, seeds))])


def verdicts(results: Results, seeds: int) -> list[str]:
    """Whether the originals' findings come out."""

    def lost(table: str, row: str) -> tuple[float, float]:
        return interval(differences(results, table, row, seeds))

    wide = {row: lost("OneFlow", row) for row in results["OneFlow"] if row.startswith("8")}
    narrow = {row: lost("OneFlow", row) for row in results["OneFlow"] if row.startswith("4")}
    held = [row for row, (mean, half) in wide.items() if abs(mean) <= max(half, 1.0)]
    below = [row for row, (mean, half) in narrow.items() if mean + half < 0]
    mean, half = lost("TensorFlow", "8 bits")
    near = "yes" if mean - half > -1.2 else "no"
    return [
        f"OneFlow, 8 bits within noise of float (its interval, or 1 point): {len(held)} of {len(wide)}",
        f"OneFlow, 4 bits below float, beyond the interval: {len(below)} of {len(narrow)}",
        f"TensorFlow, 8 bits within 1.2 points of float: {near} ({mean:+.2f} ± {half:.2f})",
        *(ordering(results, seeds, bits) for bits in (1, 2)),
    ]


def ordering(results: Results, seeds: int, bits: int) -> str:
    """What `bits` bits cost beside 8 of the same kind: of weights, of activations, and of gradients, alone."""

    def row(place: int, k: int) -> dict[str, float]:
        return results["DoReFa-Net"][" ".join(str(k if i == place else 32) for i in range(3))]

    costs = [[row(place, 8)[str(s)] - row(place, bits)[str(s)] for s in range(seeds)] for place in range(3)]
    said = ", ".join(
        f"{name} {mean:+.2f} ± {half:.2f}"
        for name, (mean, half) in zip(("weights", "activations", "gradients"), map(interval, costs), strict=True)
    )
    gap, half = interval([g - max(w, a) for w, a, g in zip(*costs, strict=True)])
    return (
        f"DoReFa-Net, points that {bits} bits cost beside 8 of the same kind: {said}; "
        f"gradients more than the dearer other by {gap:+.2f} ± {half:.2f}"
    )


if __name__ == "__main__":
    main()
