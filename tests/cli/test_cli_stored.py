"""Stored models on the command line: written by realize, run by run, exported by export."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from commands import Run, runner

import hago
from hago.cli import main
from hago.emulation.tpu_mlir.tables import parse_calibration_table
from hago.errors import GraphError
from hago.runtime.reference import IntegerModel

ZOO = """
import torch

def net():
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Conv2d(1, 8, 3), torch.nn.ReLU(), torch.nn.Conv2d(8, 8, 3), torch.nn.Flatten(), torch.nn.Linear(32, 3)
    )

def batches():
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(16, 1, 6, 6, generator=generator), torch.arange(16) % 3) for _ in range(2)]

def unlabelled():
    return [x for x, _ in batches()]
"""
#: TPU-MLIR quantizes the model as it is.
PLAIN = ("--corrections", "none")
MODEL, DATA, STRATEGY, FILE = (
    "stored_zoo:net",
    "stored_zoo:batches",
    "strategies/net-x86_vnni.json",
    "out/net.safetensors",
)
REALIZE = ("realize", MODEL, STRATEGY, "--data", DATA)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with a model, a strategy and what realize stored."""
    folder = tmp_path_factory.mktemp("stored")
    (folder / "stored_zoo.py").write_text(ZOO, "utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert main(["quantize", MODEL, "--hardware", "x86_vnni", "--data", DATA, "--save", STRATEGY, *PLAIN]) == 0
        assert main([*REALIZE, "--save", FILE]) == 0
        yield folder
    sys.modules.pop("stored_zoo", None)


@pytest.fixture
def run(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    monkeypatch.chdir(folder)
    return runner(capsys)


def test_realize_reports_the_stored_file(run: Run) -> None:
    result = run(*REALIZE, "--save", "again.safetensors", "--json").json
    assert Path("again.safetensors").read_bytes() == Path(FILE).read_bytes()
    assert result["file_bytes"] == Path(FILE).stat().st_size and result["float_bytes"] == 4 * (
        9 * 8 + 8 + 9 * 64 + 8 + 96 + 3
    )
    assert f"stored  {FILE}: " in run(*REALIZE, "--save", FILE).out


def test_a_model_that_is_not_exact_is_not_stored(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = IntegerModel.run
    monkeypatch.setattr(IntegerModel, "run", lambda *a, **k: [v + 1 for v in whole(*a, **k)])
    monkeypatch.setattr(
        "hago.runtime.native.executor.NativeIntegerModel.run", lambda *a, **k: [v + 1 for v in whole(*a, **k)]
    )
    assert run(*REALIZE, "--save", "wrong.safetensors").code == 1
    assert not Path("wrong.safetensors").exists()


@pytest.mark.parametrize("engine", ["auto", "reference"])
def test_run_gives_the_outputs_of_the_model(run: Run, engine: str) -> None:
    result = run("run", FILE, "--data", DATA, "--engine", engine, "--save", "y.npz", "--json")
    whole = run(*REALIZE, "--json").json
    assert result.code == 0 and result.json["same"] and result.json["samples"] == 32
    assert result.json["acc"] == whole["models"]["integer"]["sim_acc"]
    assert result.json["acc_interval"] == whole["models"]["integer"]["sim_acc_interval"]
    import stored_zoo  # type: ignore[import-not-found]

    model = hago.load_integer_model(FILE)
    with np.load("y.npz", allow_pickle=False) as found:
        (name,) = found.files
        first = model(stored_zoo.batches()[0][0]).numpy()
        assert name == model.plan.graph.outputs[0] and found[name].shape == (32, 3)
        assert (found[name][:16] == first).all()


def test_run_needs_no_labels_and_no_model(run: Run) -> None:
    text = run("run", FILE, "--data", "stored_zoo:unlabelled")
    assert text.code == 0 and "accuracy" not in text.out and "all 96 output values are equal" in text.out
    assert "times more than the weights in float" in text.out


def test_run_fails_if_a_value_differs(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = IntegerModel.run
    monkeypatch.setattr(IntegerModel, "run", lambda *a, **k: [v + 1 for v in whole(*a, **k)])
    result = run("run", FILE, "--data", DATA, "--engine", "reference")
    assert result.code == 1 and "96 of 96 output values differ (output 0 of batch 0: 48" in result.out


def test_export_starts_from_a_stored_model(run: Run) -> None:
    assert run("export", MODEL, STRATEGY, "--format", "tpu-mlir", "--data", DATA, "--save", "a").code == 0
    assert run("export", FILE, "--format", "tpu-mlir", "--data", DATA, "--save", "b").code == 0
    for kind in ("cali_table", "qtable"):
        assert Path(f"a_{kind}").read_text() == Path(f"b_{kind}").read_text()
    assert "4" in parse_calibration_table(Path("a_cali_table").read_text()).rows
    assert (
        "so they have no row; give --data to fill them"
        in run("export", FILE, "--format", "tpu-mlir", "--save", "c").out
    )
    assert "4" not in parse_calibration_table(Path("c_cali_table").read_text()).rows


def test_the_graph_of_a_stored_model(run: Run) -> None:
    """It has no float weights, of which the hash of the model and figures of errors are made."""
    for words in ((MODEL, STRATEGY, "--save", "a"), (FILE, "--save", "b")):
        assert run("export", *words, "--format", "model_explorer").code == 0
    a, b = (json.loads(Path(f"{name}.graph.json").read_text())["graphs"][0] for name in "ab")
    assert a["groupNodeAttributes"] == b["groupNodeAttributes"] and "model_hash" in a["groupNodeAttributes"][""]
    assert {node["id"] for node in a["nodes"]} == {node["id"] for node in b["nodes"]}
    with pytest.raises(GraphError, match="so its graph has no hash; its provenance names that of the model"):
        hago.load_integer_model(FILE).plan.graph.model_hash  # noqa: B018


@pytest.mark.parametrize(
    "words, why",
    [
        (["run", "gone", "--data", DATA], "cannot read stored model 'gone'"),
        (["run", STRATEGY, "--data", DATA], "is not a hago integer model"),
        (["run", "cut.safetensors", "--data", DATA], "its checksum differs"),
        (["run", FILE, "--data", DATA, "--save", "stored_zoo.py/y.npz"], "stored_zoo.py is not a folder"),
        (["run", FILE, "--data", DATA, "--engine", "warp"], "invalid choice"),
        (["export", MODEL, "--format", "tpu-mlir"], "is not a stored integer model"),
        (["export", FILE, "--format", "model_explorer", "--data", DATA], "does not hold; give MODEL and STRATEGY"),
        ([*REALIZE, "--save", "stored_zoo.py/m"], "stored_zoo.py is not a folder"),
    ],
)
def test_bad_input_is_one_clear_line(run: Run, words: list[str], why: str) -> None:
    Path("cut.safetensors").write_bytes(Path(FILE).read_bytes()[:-1])
    result = run(*words)
    assert result.code == 2 and result.out == "" and why in result.err.splitlines()[-1]
    assert "Traceback" not in result.err


def test_a_search_reads_tables_that_export_wrote(run: Run) -> None:
    assert run("export", FILE, "--format", "tpu-mlir", "--data", DATA, "--save", "t").code == 0
    options = [
        "--hardware",
        "x86_vnni",
        "--data",
        DATA,
        "--calibration-table",
        "t_cali_table",
        "--quantize-table",
        "t_qtable",
    ]
    seeded = run("quantize", MODEL, *options, "--save", "seeded.json")
    assert seeded.code == 0 and "no row" not in seeded.out
    old, new = (json.loads(Path(p).read_text()) for p in (STRATEGY, "seeded.json"))
    assert new["bits"] == old["bits"]
    for key, ends in new["thresholds"].items():
        largest = [np.abs(np.array(pair)).max() for pair in (ends, old["thresholds"][key])]
        assert np.isclose(*largest, rtol=1e-2), key
    Path("part").write_text("input 1.5 -1.5 1.5\n")
    result = run("quantize", MODEL, *options[:4], "--calibration-table", "part", "--save", "part.json")
    assert "no row in the calibration table, so estimated: 1, " in result.out
    Path("odd").write_text("inpot 1.5 -1.5 1.5\n")
    result = run("quantize", MODEL, *options[:4], "--calibration-table", "odd")
    assert result.code == 2 and "Did you mean 'input'" in result.err
