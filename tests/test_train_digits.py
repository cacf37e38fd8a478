"""The script that trains digits: what was trained stays trained, and the table says what the results say."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch


@pytest.fixture
def script() -> ModuleType:
    pytest.importorskip("sklearn")
    import train_digits

    return train_digits


def run(script: ModuleType, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["train_digits.py", *arguments])
    threads = torch.get_num_threads()
    try:
        script.main()
    finally:
        torch.set_num_threads(threads)


def test_a_killed_run_goes_on_where_it_stopped(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[int] = []

    def train(model: object, data: object, seed: int, epochs: int) -> float:
        calls.append(seed)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return 90.0 + seed

    monkeypatch.setattr(script, "train", train)
    monkeypatch.setattr(script, "digits", lambda seed: None)
    rows = {table: dict.fromkeys(rows, lambda seed: None) for table, rows in script.cells().items()}
    monkeypatch.setattr(script, "cells", lambda: rows)
    document = tmp_path / "table.md"
    document.write_text(f"above\n{script.BEGIN}\nold\n{script.END}\nbelow\n")
    options = ("--seeds", "2", "--results", str(tmp_path / "kept.json"), "--write", str(document))
    with pytest.raises(KeyboardInterrupt):
        run(script, monkeypatch, *options)
    total = 2 * sum(len(rows) for rows in script.cells().values())
    run(script, monkeypatch, *options)
    assert len(calls) == total + 1  # the one that was killed, again
    run(script, monkeypatch, *options)
    assert len(calls) == total + 1
    text = document.read_text()
    assert text.startswith("above\n") and text.endswith("below\n") and "old" not in text
    assert "| 8 bits cambricon | 90.50 ± 6.35 | +0.00 ± 0.00 |" in text and text.strip("\n") != ""
    assert "| 8 bits cambricon |" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="of 10 epochs, asked for 3"):
        run(script, monkeypatch, *options, "--epochs", "3")


def test_intervals_are_students(script: ModuleType) -> None:
    mean, half = script.interval([1.0, 2.0, 3.0])
    assert mean == 2.0 and half == pytest.approx(4.302653 / 3**0.5, rel=1e-6)


def test_every_network_takes_digits_and_a_gradient(script: ModuleType) -> None:
    cells = script.cells()
    for table in ("float", "OneFlow", "TensorFlow", "DoReFa-Net"):
        rows = cells[table]
        for row in list(rows)[::6]:
            model = rows[row](0).train()
            y = model(torch.rand(4, 1, 8, 8, generator=torch.Generator().manual_seed(0)))
            y.square().sum().backward()
            assert y.shape == (4, 10) and all(p.grad is not None for p in model.parameters() if p.ndim > 1), (
                table,
                row,
            )
