"""`hago export --format onnx` from the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hago.cli import main

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

ZOO = """
import torch

def net():
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Conv2d(1, 4, 3), torch.nn.ReLU(), torch.nn.Conv2d(4, 4, 3), torch.nn.Flatten(), torch.nn.Linear(16, 3)
    )

def batches():
    return [torch.randn(16, 1, 6, 6, generator=torch.Generator().manual_seed(1))]
"""
MODEL, DATA = "onnx_zoo:net", "onnx_zoo:batches"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "onnx_zoo.py").write_text(ZOO, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for chip in ("onnxruntime_cpu", "x86_vnni"):
        assert main(["quantize", MODEL, "--hardware", chip, "--data", DATA, "--save", f"{chip}.json"]) == 0
    return tmp_path


def test_export_and_check(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    shared = ["--format", "onnx", "--data", DATA, "--check", "--json", "--save", "net"]
    for chip, form in (("onnxruntime_cpu", "qdq"), ("onnxruntime_cpu", "qoperator"), ("x86_vnni", "qoperator")):
        assert main(["export", MODEL, f"{chip}.json", "--form", form, *shared]) == 0
        report = json.loads(capsys.readouterr().out)
        assert report["check"]["same"] and report["check"]["compared"] > 0
        assert {p["place"] for p in report["check"]["places"]} >= {"0", "2", "4"}
        assert (folder / report["path"]).stat().st_size > 1000
    assert main(["export", MODEL, "onnxruntime_cpu.json", *shared[:-3], "--save", "net.onnx"]) == 0
    assert "0 of " in capsys.readouterr().out


def test_check_needs_data(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", MODEL, "onnxruntime_cpu.json", "--format", "onnx", "--check"]) == 2
    assert "give --data" in capsys.readouterr().err
