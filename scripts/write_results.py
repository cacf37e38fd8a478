"""Write what benchmark_accuracy measured (--json FILE) into the results section of the README."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

BEGIN: Final = "<!-- results:begin -->"
END: Final = "<!-- results:end -->"
#: Rows of the table, and what they are called there.
SHOWN: Final = {
    "float": "float",
    "onnxruntime": "ONNX Runtime `quantize_static`",
    "plain": "plain fake quantization",
    "widest": "widest bits",
    "one shot": "hago, one shot",
    "mse": "hago, one shot, `mse`",
    "search": "hago, searched",
}
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


def section(results: Sequence[Mapping[str, Any]], command: str, note: str = "") -> str:
    """The table and where it comes from."""
    lines = [
        f"Made by `{command}`{note}. Calibration saw no labels, and every figure is of samples that it did not see. "
        "`hago, one shot` is `hago.quantize`. Losses in points are paired, against float, with 95 % intervals; "
        "seconds are of calibration and search, on one core of a busy machine. In every row the simulator and the "
        "integer model agreed on every output that was compared.",
        "",
        COLUMNS,
        "|" + "---|" * (COLUMNS.count("|") - 1),
    ]
    for result in results:
        head = f"{result['model']}, {result['hardware']} ({result['metric']}, {result['samples']} samples)"
        rows = result["rows"]
        same = "mse" in rows and rows["mse"]["sqnr"] == rows["one shot"]["sqnr"]
        for name in (n for n in SHOWN if n in rows and not (n == "mse" and same)):
            lines.append(f"| {head} | {' | '.join(cells(name, rows[name]))} |")
            head = ""
    return "\n".join(lines)


def replaced(text: str, made: str) -> str:
    """`text` with `made` between the marks."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{made}\n{END}{after}"


def main(arguments: Iterable[str] | None = None) -> None:
    """Read, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path, nargs="+")
    parser.add_argument("--command", required=True, help="that made the results")
    parser.add_argument("--note", default="", help="to say beside it")
    parser.add_argument("--readme", type=Path, default=Path("README.md"))
    options = parser.parse_args(None if arguments is None else list(arguments))
    found = [r for path in options.results for r in json.loads(path.read_text())]
    options.readme.write_text(replaced(options.readme.read_text(), section(found, options.command, options.note)))


if __name__ == "__main__":
    main()
