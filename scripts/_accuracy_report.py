"""Tables and verdicts from the rows that benchmark_accuracy measures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from _assets import area_difference

from hago.search.intervals import paired_interval

Result = Mapping[str, Any]

#: The rows of others that quantize to 8 bits.
PEERS = ("onnxruntime", "nncf", "aimet")
#: Points of top-1, dB and overflows per million that are asked for.
LOSS, SQNR, RATE = 0.005, 0.5, 1.0


def table(result: Result) -> str:
    """One network on one hardware."""
    head = (
        f"{result['model']} on {result['hardware']}: {result['metric']} of {result['samples']} test samples, "
        f"calibrated on {result['calibration']}, peak memory {result['megabytes']:.0f} MB"
    )
    columns = (
        f"  {'':13} {'value':>7} {'95 % interval':>15} {'loss against float':>25} {'agree':>7} {'SQNR':>7} "
        f"{'integer':>7} {'trials':>6} {'s':>7} {'proved':>6} {'open':>4} {'over':>4} {'/million':>9} {'differ':>6}"
    )
    lines = [_line(name, row) for name, row in result["rows"].items()]
    return "\n".join([head, columns, *lines, *(f"  {note}" for note in result["notes"])])


def _line(name: str, row: Mapping[str, Any]) -> str:
    interval = "" if row["interval"] is None else "{:.4f}-{:.4f}".format(*row["interval"])
    loss = "" if row["loss"] is None else spread(row["loss"])
    agreement = "" if row["agreement"] is None else f"{row['agreement']:.4f}"
    line = f"  {name:13} {row['value']:7.4f} {interval:>15} {loss:>25} {agreement:>7} {row['sqnr']:7.2f}"
    line += f" {row['integer_share']:7.1%}" if row["integer_share"] else " " * 8
    if not row["proved"] + row["possible"] + row["overflowing"]:
        return f"{line} {'':6} {row['seconds']:7.1f}" if row["seconds"] else line.rstrip()
    return (
        f"{line} {row['trials']:6} {row['seconds']:7.1f} {row['proved']:6} {row['possible']:4} {row['overflowing']:4} "
        f"{row['rate']:9.3f} {row['differing']:6}"
    )


def spread(interval: Sequence[float]) -> str:
    """Mean and 95 % interval in points."""
    mean, low, high = (100 * v for v in interval)
    return f"{mean:+.2f} [{low:+.2f}, {high:+.2f}]"


def gain(rows: Mapping[str, Any], ours: str, other: str) -> tuple[float, float, float] | None:
    """Top-1, or the area under a curve, of `ours` minus that of `other`, paired; None for other metrics."""
    if rows[ours]["placements"]:
        return area_difference(*([torch.tensor(p) for p in rows[n]["placements"]] for n in (ours, other)))
    if not rows[ours]["right"]:
        return None
    a, b = (torch.tensor(rows[n]["right"], dtype=torch.float64) for n in (ours, other))
    return paired_interval(a - b)


def comparison(result: Result, ours: str, other: str) -> str:
    """One line: `ours` against `other`."""
    rows = result["rows"]
    found = gain(rows, ours, other)
    top = f"{result['metric']} {rows[ours]['value'] - rows[other]['value']:+.4f}" if found is None else spread(found)
    return (
        f"  {result['model']:20} {ours} against {other}: {top:26} "
        f"SQNR {rows[ours]['sqnr'] - rows[other]['sqnr']:+.2f} dB"
    )


def verdicts(results: Sequence[Result]) -> list[str]:
    """What was asked for, and whether it holds."""
    lines: list[str] = []
    for title, hardware, found in (
        ("x86_vnni: at most 0.5 points and 0.5 dB below ONNX Runtime", "x86_vnni", _against_onnxruntime),
        ("x86_vnni: not below a peer beyond the paired interval", "x86_vnni", _against_peers),
        ("tflite: not below a peer beyond the paired interval", "tflite", _against_peers),
        ("vta: no worse than plain; the best estimator better on half the models", "vta", _against_plain),
        ("int16_accumulator: search better than the widest bits; at most 1 overflow per million", "int16_accumulator",
         _against_widest),
    ):  # fmt: skip
        chosen = [r for r in results if r["hardware"] == hardware]
        if chosen:
            lines += [title, *found(chosen)]
    return lines


def _best(result: Result, names: Sequence[str]) -> str:
    """The name with the highest metric, then SQNR; other metrics go by SQNR."""
    rows = result["rows"]
    return max(names, key=lambda n: (rows[n]["value"] if rows[n]["right"] else 0.0, rows[n]["sqnr"]))


def _against_onnxruntime(results: Sequence[Result]) -> list[str]:
    lines = []
    for result in results:
        rows = result["rows"]
        if "onnxruntime" not in rows:
            lines.append(f"  {result['model']:20} ONNX Runtime was not measured")
            continue
        for ours in (n for n in ("one shot", "search") if n in rows):
            found = gain(rows, ours, "onnxruntime")
            below = rows["onnxruntime"]["value"] - rows[ours]["value"] if found is not None else 0.0
            holds = below <= LOSS and rows["onnxruntime"]["sqnr"] - rows[ours]["sqnr"] <= SQNR
            lines.append(f"{comparison(result, ours, 'onnxruntime')}  {'holds' if holds else 'DOES NOT HOLD'}")
    return lines


def _against_peers(results: Sequence[Result]) -> list[str]:
    lines, below = [], 0
    for result in results:
        rows = result["rows"]
        for other in (n for n in PEERS if n in rows):
            for ours in (n for n in ("one shot", "search") if n in rows):
                found = gain(rows, ours, other)
                worse = found is not None and found[2] < 0
                below += worse
                lines.append(f"{comparison(result, ours, other)}{'  BELOW' if worse else ''}")
    return [*lines, f"  below beyond the paired interval: {below} of {len(lines)}"]


def _against_plain(results: Sequence[Result]) -> list[str]:
    lines, better, worse = [], 0, 0
    for result in results:
        rows = result["rows"]
        names = [n for n in rows if n not in ("float", "plain", "search")]
        best = _best(result, names)
        found = gain(rows, "one shot", "plain")
        not_worse = (found is None or found[2] >= 0) and rows["one shot"]["sqnr"] >= rows["plain"]["sqnr"] - SQNR
        worse += not not_worse
        gains = (rows[best]["value"] - rows["plain"]["value"], rows[best]["sqnr"] - rows["plain"]["sqnr"])
        better += gains[0] > 0 or (not rows[best]["right"] and gains[1] > 0)
        lines.append(f"{comparison(result, 'one shot', 'plain')}  {'holds' if not_worse else 'DOES NOT HOLD'}")
        lines.append(comparison(result, best, "plain"))
    lines.append(f"  better with the best estimator: {better} of {len(results)}; worse by default: {worse}")
    return lines


def _against_widest(results: Sequence[Result]) -> list[str]:
    lines, better = [], 0
    for result in results:
        rows = result["rows"]
        if "search" not in rows or "widest" not in rows:
            lines.append(f"  {result['model']:20} not measured")
            continue
        found = gain(rows, "search", "widest")
        better += found is not None and found[1] > 0
        rare = rows["search"]["rate"] <= RATE
        lines.append(
            f"{comparison(result, 'search', 'widest')}  {rows['search']['rate']:.3f} per million "
            f"{'holds' if rare else 'DOES NOT HOLD'}"
        )
    lines.append(f"  better than the widest bits beyond chance: {better} of {len(results)}")
    return lines
