"""What benchmarks of accuracy say about hago beside other quantizers."""

from __future__ import annotations

from typing import Any

import write_results
from _accuracy_report import verdicts


def row(right: list[int], **more: Any) -> dict[str, Any]:
    """What is measured of a model that is right on some of the samples."""
    value = sum(right) / len(right)
    rest = {"interval": None, "loss": None, "agreement": 1.0, "sqnr": 30.0, "placements": [], "settings": ""}
    counts = dict.fromkeys(("seconds", "trials", "proved", "possible", "overflowing", "rate", "differing"), 0)
    return {"value": value, "right": right, "integer_share": 1.0, **rest, **counts, **more}


def result(hardware: str, ours: list[int], theirs: list[int]) -> dict[str, Any]:
    """A network that was measured beside NNCF."""
    rows = {"float": row(ours), "one shot": row(ours), "nncf": row(theirs, integer_share=0.5, settings="so")}
    return {"model": "net", "hardware": hardware, "metric": "top-1", "samples": len(ours), "rows": rows}


def test_a_verdict_says_where_hago_is_below_beyond_the_paired_interval() -> None:
    many, few = [1] * 100, [1] * 80 + [0] * 20
    noise = [0] * 2 + [1] * 98
    (title, line, counted) = verdicts([result("tflite", few, many)])
    assert "tflite" in title
    assert line.endswith("BELOW")
    assert counted.endswith("1 of 1")
    for ours, theirs in ((many, few), (noise, noise[::-1]), (noise, many)):
        (_, line, counted) = verdicts([result("tflite", ours, theirs)])
        assert "BELOW" not in line
        assert counted.endswith("0 of 1")


def test_the_table_beside_peers_has_paired_differences_and_integer_shares() -> None:
    lines = write_results.beside_peers([result("x86_vnni", [1] * 90 + [0] * 10, [1] * 50 + [0] * 50)], "Made so.")
    (said,) = (line for line in lines.splitlines() if "NNCF" in line)
    cells = [cell.strip() for cell in said.strip("|").split("|")]
    assert cells[1].endswith(", so")
    assert cells[2] == "0.5000"
    assert cells[3].startswith("+40.00 [+30.")
    assert cells[6] == "50.0%"
