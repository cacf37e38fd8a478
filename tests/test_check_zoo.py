"""The campaign of scripts/check_zoo.py: each case in a process of its own, and what stands in the log is not run
again."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import check_zoo
import pytest
import torch
from _zoo import Collection
from torch import Tensor, nn

from hago import HagoError


def _works(say: check_zoo.Say) -> None:
    say({"found": 1})


def _refuses(say: check_zoo.Say) -> None:
    raise HagoError("no such chip")


def _fails(say: check_zoo.Say) -> None:
    say({"step": "searching"})
    raise IndexError("out of range")


def _dies(say: check_zoo.Say) -> None:
    say({"step": "realizing"})
    os.kill(os.getpid(), signal.SIGKILL)


def _hangs(say: check_zoo.Say) -> None:
    while True:
        pass


def _grows(say: check_zoo.Say) -> None:
    torch.ones(2**30)


@pytest.mark.parametrize(
    ("work", "expected"),
    [
        (_works, {"status": "ok", "found": 1}),
        (_refuses, {"status": "refused", "why": "HagoError: no such chip"}),
        (_fails, {"status": "crashed", "why": "IndexError: out of range", "step": "searching"}),
        (_dies, {"status": "crashed", "why": "SIGKILL", "step": "realizing"}),
        (_hangs, {"status": "slow"}),
        (_grows, {"status": "large"}),
    ],
)
def test_a_case_ends_as_it_ends(work: Any, expected: dict[str, Any]) -> None:
    row = check_zoo.in_child(work, 1 if work is _hangs else 60, 2.0)
    assert row == row | expected
    assert row["peak_mb"] > 0


def _made(name: str, side: int) -> nn.Module:
    if name == "odd":
        raise IndexError("this network cannot be made")
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 5))


def _images(name: str, count: int, side: int) -> Tensor:
    return torch.randn(count, 3, side, side)


def test_a_campaign_goes_on_where_it_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ("plain", "odd")
    monkeypatch.setattr(check_zoo, "COLLECTIONS", {"made_up": lambda: Collection(names, _made, names, _images)})
    log = tmp_path / "zoo.jsonl"
    words = ["--search", "--from", "made_up", "--searchers", "default", "--size", "8", "--log", str(log)]
    assert check_zoo.main(words) == 1  # one crashed
    first, second = (json.loads(line) for line in log.read_text().splitlines())
    assert (first["status"], second["status"]) == ("ok", "crashed")
    assert first["differ"] == 0 and first["compared"] > 0 and 0 < first["integer_share"] <= 1
    assert {"importing", "calibrating", "searching", "realizing"} <= first["spent"].keys()
    assert second["step"] == "making" and "cannot be made" in second["traceback"]
    with log.open("a") as file:
        file.write('{"collection": "made_')  # what a kill leaves
    capsys.readouterr()
    page = tmp_path / "zoo.md"
    page.write_text(f"before\n{check_zoo.BEGIN}\nold\n{check_zoo.END}\nafter\n")
    check_zoo.main([*words, "--hardware", "x86_vnni", "tflite", "--write", str(page)])
    assert "2 of 4 cases stand in" in capsys.readouterr().out
    rows = check_zoo.read_log(log)
    assert len(rows) == 4
    written = page.read_text()
    assert written.startswith(f"before\n{check_zoo.BEGIN}\n4 cases: ") and written.endswith(f"{check_zoo.END}\nafter\n")
    assert "2 ok" in written and "2 crashed" in written and "old" not in written
    compared = sum(row.get("compared", 0) for row in rows.values())
    assert f"0 of {compared:,} values differ" in written
    assert sum(line.startswith("| made_up |") for line in written.splitlines()) == 4


def test_a_case_that_was_skipped_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("plain",)
    monkeypatch.setattr(check_zoo, "COLLECTIONS", {"made_up": lambda: Collection(names, _made, names, _images)})
    log = tmp_path / "zoo.jsonl"
    words = ["--search", "--from", "made_up", "--searchers", "default", "--size", "8", "--log", str(log)]
    check_zoo.main([*words, "--largest", "10"])
    assert [row["status"] for row in check_zoo.read_log(log).values()] == ["skipped"]
    check_zoo.main(words)
    assert [row["status"] for row in check_zoo.read_log(log).values()] == ["ok"]
