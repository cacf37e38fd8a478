"""The table of export formats, and formats of a user, passed as an object or by name on the command line."""

from __future__ import annotations

import configparser
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from networks import Small, images, randomized

import hago
from hago.cli import main
from hago.errors import HagoError
from hago.export.formats import FORMATS, ExportCheck, ExportFormat, ExportRequest, ExportResult, find_format

ROOT = Path(hago.__file__).parent.parent

#: The source of a module that the command line imports, with a model, its data and formats of a user.
MODULE = """
import torch
from hago.export.formats import ExportCheck, ExportFormat, ExportResult

def net():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Conv2d(1, 4, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(64, 3))

def batches():
    return [torch.randn(16, 1, 6, 6, generator=torch.Generator().manual_seed(1))]

def write(request):
    path = request.path.with_suffix(".txt")
    path.write_text("\\n".join(request.plan.nodes), "utf-8")
    return ExportResult(f"names  {path}", {"path": str(path)}, len(request.plan.nodes))

def check(request, written):
    return ExportCheck(written.content == 0, f"{written.content} names", written.content)

def fail(request):
    raise ValueError("no space left")

names = ExportFormat("names", "the names of integer nodes", write, check)
unchecked = ExportFormat("unchecked", "the same", write)
failing = ExportFormat("failing", "nothing", fail)
wrong = ExportFormat("wrong", "nothing", lambda request: None)
other = 3
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "format_zoo.py").write_text(MODULE, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    arguments = ["--hardware", "x86_vnni", "--data", "format_zoo:batches", "--save", "net.json"]
    assert main(["quantize", "format_zoo:net", *arguments]) == 0
    return tmp_path


def export(*words: str) -> int:
    return main(["export", "format_zoo:net", "net.json", *words])


def test_a_format_by_name_on_the_command_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert export("--format", "format_zoo:names", "--save", "out/net", "--json") == 0
    assert json.loads(capsys.readouterr().out)["path"] == str(Path("out/net.txt"))
    assert (folder / "out/net.txt").read_text().splitlines()[0] == "0"
    assert export("--format", "format_zoo:names", "--check", "--data", "format_zoo:batches") == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("names  exports") and lines[1].endswith(" names")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--format", "onx"], f"unknown export format 'onx'; expected one of {', '.join(FORMATS)}"),
        (["--format", "format_zoo:gone"], "format_zoo has no 'gone'"),
        (["--format", "format_zoo:other"], "export format is of type int"),
        (["--format", "format_zoo:failing"], "write of export format 'failing' raised ValueError: no space left"),
        (["--format", "format_zoo:wrong"], "returned an object of type NoneType; expected an ExportResult"),
        (["--format", "format_zoo:unchecked", "--check", "--data", "format_zoo:batches"], "has no check"),
        (["--format", "format_zoo:names", "--check"], "give --data"),
    ],
)
def test_bad_formats_are_refused(
    folder: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    assert export(*words) == 2
    assert message in capsys.readouterr().err


def test_a_format_as_an_object(tmp_path: Path) -> None:
    requests: list[ExportRequest] = []

    def write(request: ExportRequest) -> ExportResult:
        requests.append(request)
        return ExportResult("written", {}, [x.shape for (x,) in request.inputs()])

    def check(request: ExportRequest, written: ExportResult) -> ExportCheck:
        return ExportCheck(True, "equal")

    custom = ExportFormat("own", "shapes of inputs", write, check)
    x = images(4, 1, 8, 8)
    quantizer = hago.quantize(randomized(Small()), "x86_vnni", [x])
    assert quantizer.export(tmp_path / "net", custom, [x]).content == [x.shape]
    assert requests[0].path == tmp_path / "net" and requests[0].plan is quantizer.plan
    for bad, options, message in (
        ("onx", {}, "Did you mean 'onnx'"),
        (3, {}, "of type int"),
        (custom, {"form": "qdq"}, "has no option 'form'; it has none"),
        ("onnx", {"form": "qqd"}, "expected one of qdq, qoperator"),
    ):
        wrong: Any = bad
        with pytest.raises(HagoError, match=message):
            quantizer.export(tmp_path / "net", wrong, **options)


def test_a_format_writes_what_the_methods_of_a_quantizer_write(tmp_path: Path) -> None:
    pytest.importorskip("onnx")
    quantizer = hago.quantize(randomized(Small()), "onnxruntime_cpu", [images(4, 1, 8, 8)])
    quantizer.export(tmp_path / "a", "onnx", form="qoperator")
    quantizer.export_onnx(tmp_path / "b.onnx", "qoperator")
    assert (tmp_path / "a.onnx").read_bytes() == (tmp_path / "b.onnx").read_bytes()


@pytest.mark.parametrize("name", FORMATS)
def test_the_table(name: str) -> None:
    form = FORMATS[name]
    assert form.name == name and form.text and find_format(name) is form
    assert find_format(replace(form, name="another")).name == "another"
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    assert not form.extra or form.extra in config["options.extras_require"]
    assert all(len(set(o.choices)) == len(o.choices) > 1 for o in form.options)
