"""Write what benchmark_accuracy measured (--json FILE): a table in the README, every figure in docs/results.md.

With --peers the results are those of a run beside other quantizers, and only the table that compares hago with them,
in docs/results.md, is written.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from _accuracy_report import PEERS, gain, spread
from _documents import replace_between

BEGIN: Final = "<!-- results:begin -->"
END: Final = "<!-- results:end -->"
PEERS_BEGIN: Final = "<!-- peers:begin -->"
PEERS_END: Final = "<!-- peers:end -->"
#: Rows of the table, and what they are called there.
SHOWN: Final = {
    "float": "float",
    "onnxruntime": "ONNX Runtime `quantize_static`",
    "nncf": "NNCF `quantize`, fast bias correction",
    "aimet": "AIMET, equalization and AdaRound",
    "plain": "plain fake quantization",
    "widest": "widest bits",
    "one shot": "hago, one shot",
    "mse": "hago, one shot, `mse`",
    "search": "hago, searched",
}
#: What other metrics than top-1 are called there.
METRICS: Final = {"Spearman": "Spearman's correlation"}
BASELINES: Final = ("onnxruntime", "plain", "widest")
OURS: Final = ("one shot", "search")
COLUMNS: Final = "| network, hardware | | metric | 95 % | loss in points | agreement | SQNR dB | trials | s | sums |"


def cells(name: str, row: Mapping[str, Any]) -> list[str]:
    """One row of the table."""
    interval = "" if row["interval"] is None else "{:.3f}-{:.3f}".format(*row["interval"])
    loss = ""
    if row["loss"] is not None and name != "float":
        mean, low, high = (100 * v for v in row["loss"])
        loss = f"{mean:+.2f} [{low:+.2f}, {high:+.2f}]"
    agreement = "" if row["agreement"] is None or name == "float" else f"{row['agreement']:.4f}"
    sqnr = "" if name == "float" else f"{row['sqnr']:.1f}"
    nodes = row["proved"] + row["possible"] + row["overflowing"]
    sums = ""
    if nodes:
        sums = f"{row['proved']} of {nodes} proved"
        sums += f", {row['rate']:.3g} per million overflow" if row["overflowing"] else ""
    ours = [str(row["trials"]), f"{row['seconds']:.0f}"] if nodes else ["", ""]
    return [SHOWN[name], f"{row['value']:.4f}", interval, loss, agreement, sqnr, *ours, sums]


def details(results: Sequence[Mapping[str, Any]], made: str) -> str:
    """Every figure, and where it comes from."""
    lines = [
        f"{made} Losses in points are paired, against float, with 95 % intervals; seconds are of calibration and "
        "search, on one core of a busy machine. In every row the simulator and the integer model agreed on every "
        "output that was compared.",
        "",
        COLUMNS,
        "|" + "---|" * (COLUMNS.count("|") - 1),
    ]
    for result in results:
        head = f"{result['model']}, {result['hardware']} ({result['metric']}, {result['samples']} samples)"
        rows = shown(result)
        for name in rows:
            lines.append(f"| {head} | {' | '.join(cells(name, rows[name]))} |")
            head = ""
    return "\n".join(lines)


def beside_peers(results: Sequence[Mapping[str, Any]], made: str) -> str:
    """The table that compares hago in one shot with other quantizers."""
    titles = ["network, hardware", "", "metric", "hago minus it, points", "agreement", "SQNR dB", "integer", "s"]
    lines = [made, "", f"| {' | '.join(titles)} |", "|" + "---|" * len(titles)]
    for result in results:
        head = f"{result['model']}, {result['hardware']} ({result['metric']}, {result['samples']} samples)"
        for name in (n for n in ("float", *PEERS, *OURS) if n in result["rows"]):
            row = result["rows"][name]
            found = gain(result["rows"], "one shot", name) if name not in OURS else None
            settings = f", {row['settings']}" if row["settings"] else ""
            line = [
                head,
                f"{SHOWN[name]}{settings}",
                f"{row['value']:.4f}",
                "" if found is None else spread(found),
                "" if name == "float" or row["agreement"] is None else f"{row['agreement']:.4f}",
                "" if name == "float" else f"{row['sqnr']:.1f}",
                "" if name == "float" else f"{row['integer_share']:.1%}",
                f"{row['seconds']:.0f}" if row["seconds"] else "",
            ]
            lines.append(f"| {' | '.join(line)} |")
            head = ""
    return "\n".join(lines)


def shown(result: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """The rows to show: an estimator that is the default already is not shown twice."""
    rows = result["rows"]
    same = "mse" in rows and rows["mse"]["sqnr"] == rows["one shot"]["sqnr"]
    return {n: rows[n] for n in SHOWN if n in rows and not (n == "mse" and same)}


def summary(results: Sequence[Mapping[str, Any]]) -> str:
    """A row for every network and hardware: the metric, and the SQNR of the outputs in dB."""
    columns = ["network", "hardware", "float", "baseline", *(SHOWN[n] for n in OURS)]
    lines = [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
    for result in results:
        rows = shown(result)
        compared = [next((n for n in BASELINES if n in rows), ""), *OURS]
        figures = [f"{rows[n]['value']:.3f}, {rows[n]['sqnr']:.1f} dB" if n in rows else "" for n in compared]
        line = [result["model"], result["hardware"], f"{rows['float']['value']:.3f}", *figures]
        lines.append(f"| {' | '.join(line)} |")
    named = {r["hardware"]: next((SHOWN[n] for n in BASELINES if n in r["rows"]), "") for r in results}
    said = "; ".join(f"on `{hardware}` it is {name}" for hardware, name in named.items() if name)
    metrics = {r["model"]: r["metric"] for r in results if r["metric"] != "top-1"}
    others = ", ".join(f"{METRICS.get(metric, metric)} for `{model}`" for model, metric in metrics.items())
    head = (
        "Each cell has the accuracy on samples that calibration did not see"
        f"{f' ({others})' if others else ''}, and SQNR, the ratio of the float outputs to their error in dB. "
        "Calibration had no labels. The search is the default one; `hago, one shot` is `hago.quantize`. The baseline "
        f"depends on the chip: {said}. Intervals, conditions and exceptions: [docs/results.md](docs/results.md)."
    )
    return "\n".join([head, "", *lines])


def main(arguments: Iterable[str] | None = None) -> None:
    """Read, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path, nargs="+")
    parser.add_argument("--command", required=True, help="that made the results")
    parser.add_argument("--note", default="", help="to say beside it")
    parser.add_argument("--peers", action="store_true", help="write the table that compares hago with others, alone")
    parser.add_argument("--readme", type=Path, default=Path("README.md"))
    parser.add_argument("--details", type=Path, default=Path("docs/results.md"))
    options = parser.parse_args(None if arguments is None else list(arguments))
    found = [r for path in options.results for r in json.loads(path.read_text())]
    made = (
        f"Made by `{options.command}`{options.note}. Calibration saw no labels, and every figure is of samples that "
        "it did not see. `hago, one shot` is `hago.quantize`."
    )
    if options.peers:
        replace_between(options.details, PEERS_BEGIN, PEERS_END, beside_peers(found, made))
        return
    replace_between(options.details, BEGIN, END, details(found, made))
    replace_between(options.readme, BEGIN, END, summary(found))


if __name__ == "__main__":
    main()
