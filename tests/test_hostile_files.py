"""Files that were made to hurt: a short error of hago's own, and nothing that the file names is run or opened."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from networks import Small, images, randomized

import hago
from hago.arithmetic.types import torch_dtype
from hago.data.batches import Batches
from hago.data.sources import load_data
from hago.errors import DataError, HagoError, LogError, ModelFileError
from hago.plan.plan import Plan
from hago.plan.strategy import Strategy
from hago.runtime.stored_model import KIND, from_file_bytes, to_file_bytes
from hago.serialization.json_text import replace_file
from hago.serialization.tensor_file import from_bytes, to_bytes
from hago.study.log import read_log

DATA = [images(4, 1, 6, 6)]
LONG = "x" * 100_000


@pytest.fixture(scope="module")
def plan() -> Plan:
    class Island(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = Small()

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            y = torch.cumsum(self.body(x), 1)
            return {"a": y * x.shape[0], "b": y}

    return hago.quantize(randomized(Island()), "x86_vnni", DATA).plan


def forged(plan: Plan, edit: Callable[[Any], None]) -> bytes:
    document, tensors = from_bytes(to_file_bytes(plan), KIND, "a model")
    document = json.loads(json.dumps(document))
    edit(document)
    return to_bytes(KIND, document, tensors)


def opaque(document: Any) -> Any:
    return next(n for n in document["graph"]["nodes"] if n["op"] == "opaque")


def nested_in(context: str, kind: str = "builtins.dict") -> Callable[[Any], None]:
    leaf = {"type": None, "context": None, "children_spec": []}
    spec = json.dumps([1, {"type": kind, "context": context, "children_spec": [leaf, leaf]}])

    def edit(document: Any) -> None:
        document["graph"]["out_spec"] = spec

    return edit


def called(target: str, *args: Any) -> Callable[[Any], None]:
    def edit(document: Any) -> None:
        opaque(document)["attrs"] |= {"target": target, "args": list(args), "kwargs": {}}

    return edit


ENUM = json.dumps([{"__enum__": True, "fqn": "module:x", "name": "a"}, "b"])
FACTORY = json.dumps({"default_factory_module": "module", "default_factory_name": "x", "dict_context": ["a", "b"]})
EDITS = {
    "an enum as a key": nested_in(ENUM),
    "the same, spelt otherwise": nested_in(ENUM.replace("__enum__", "\\u005f_enum__")),
    "a factory": nested_in(FACTORY, "collections.defaultdict"),
    "a type of a module": nested_in("null", "module.Kind"),
    "segment_reduce": called("aten.segment_reduce.default", {"$": 0}, "sum"),
    "a power": called("operator.pow", 10**9, 10**9),
    "a chain of numbers": called("operator.mul", (1 << 62), (1 << 62)),
    "a text repeated": called("operator.mul", "x", 1 << 40),
    "a format": called("operator.mod", "%1000000000d", 1),
    "a dtype by number": called("aten.to.dtype", {"$": 0}, 77),
    "a file": called("aten.from_file.default", "/etc/passwd"),
    "a size": called("aten.zeros.default", [1 << 40]),
    "a long name": called(f"aten.{LONG}.default"),
}


@pytest.mark.parametrize("what", EDITS)
def test_a_hostile_model_is_refused_in_a_short_message(plan: Plan, what: str) -> None:
    begun = time.monotonic()
    with pytest.raises(ModelFileError) as caught:
        from_file_bytes(forged(plan, EDITS[what]), "forged.hago")
    assert len(str(caught.value)) < 2001 and "forged.hago" in str(caught.value)
    assert time.monotonic() - begun < 60  # it hung


def test_a_zero_point_that_its_dtype_does_not_hold(plan: Plan) -> None:
    def edit(document: Any) -> None:
        for q in document["qparams"]:
            q["zero_point"]["values"] = [1 << 20]

    with pytest.raises(ModelFileError, match="zero point"):
        from_file_bytes(forged(plan, edit), "forged.hago")


_AUDIT = """
import sys
import hago, hago.runtime.stored_model, hago.plan.strategy, hago.search.pareto_front, hago.study.log, hago.data.sources
from pathlib import Path
import torch.utils.flop_counter
good, *paths = sys.argv[1:]
try:  # everything that is imported or read when a file is first read
    hago.load_integer_model(good)
except hago.HagoError:
    pass
seen = []
sys.addaudithook(lambda event, args: seen.append((event, str(args[0]))) if event in
                 ("import", "exec", "open", "os.system", "subprocess.Popen", "pickle.find_class", "compile") else None)
for path in paths:
    seen.clear()
    try:
        hago.load_integer_model(path)
    except hago.HagoError:
        pass
    print([e for e in seen if path not in e[1] and not (e[0] == "open" and e[1].startswith("/proc"))])
"""
_AUDITED = ("an enum as a key", "the same, spelt otherwise", "a factory", "a file")


@pytest.fixture(scope="module")
def audited(plan: Plan, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What a process printed of each of these files."""
    folder = tmp_path_factory.mktemp("audited")
    (folder / "module.py").write_text("print('this ran')\n")
    good, *bad = (folder / f"{number}.hago" for number in range(len(_AUDITED) + 1))
    good.write_bytes(to_file_bytes(plan))
    for path, what in zip(bad, _AUDITED, strict=True):
        path.write_bytes(forged(plan, EDITS[what]))
    done = subprocess.run(
        [sys.executable, "-c", _AUDIT, *map(str, (good, *bad))],
        capture_output=True, text=True, cwd=folder, env={**os.environ, "PYTHONPATH": str(folder)}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return dict(zip(_AUDITED, done.stdout.splitlines(), strict=True))


@pytest.mark.parametrize("what", _AUDITED)
def test_nothing_is_imported_or_opened_for_a_file(audited: dict[str, str], what: str) -> None:
    assert audited[what] == "[]"


# ---------------------------------------------------------------- JSON
@pytest.mark.parametrize("depth", [400, 900, 5000, 100_000])
@pytest.mark.parametrize("load", [Strategy.load, hago.load_front])
def test_deep_json_is_refused(load: Callable[[Path], Any], depth: int, tmp_path: Path) -> None:
    path = tmp_path / "deep.json"
    path.write_text('{"version": 1, "made_by": ' + "[" * depth + "]" * depth + "}")
    with pytest.raises(HagoError, match="deep"):
        load(path)


def test_a_whole_number_with_a_point_is_no_integer(tmp_path: Path) -> None:
    model, path = randomized(Small()), tmp_path / "front.json"
    hago.search_quantize_strategy(model, "x86_vnni", DATA, searcher="greedy", budget=2, front=path, progress=False)
    value = json.loads(path.read_text())
    key = next(iter(value["points"][0]["strategy"]["thresholds"]))
    value["points"][0]["strategy"]["thresholds"][key] = 0.0
    path.write_text(json.dumps(value))
    with pytest.raises(HagoError, match="integer"):
        hago.load_front(path)


def test_a_killed_save_leaves_nothing_for_ever(tmp_path: Path) -> None:
    path, left, held = tmp_path / "s.json", tmp_path / ".s.json.00000000.tmp", tmp_path / ".s.json.11111111.tmp"
    left.write_text("half")
    held.write_text("half")
    for file in (left, held):
        os.utime(file, (1.0, 1.0))
    with open(held, "rb") as file:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX)
        replace_file(path, "whole")
        assert sorted(p.name for p in tmp_path.iterdir()) == [held.name, "s.json"]
    replace_file(path, "whole")
    assert [p.name for p in tmp_path.iterdir()] == ["s.json"]


# ---------------------------------------------------------------- data
def archive(path: Path, shape: tuple[int, ...]) -> Path:
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "<f4", "fortran_order": False, "shape": shape})
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("x.npy", header.getvalue())
    return path


@pytest.mark.parametrize("shape", [(10**8, 0), (10**12,), (3, 10**9)])
def test_shapes_that_a_file_does_not_hold(shape: tuple[int, ...], tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"holds no values|bytes; the file holds 0"):
        load_data(str(archive(tmp_path / "x.npz", shape)))


@pytest.mark.parametrize("dtype", [">f4", ">f8", "longdouble", ">i4", "<f2"])
def test_dtypes_that_torch_does_not_have(dtype: str, tmp_path: Path) -> None:
    array = np.arange(12).reshape(4, 3).astype(dtype)
    (batch,) = Batches([array], ("x",))
    np.savez(tmp_path / "x.npz", x=array)
    (read,) = Batches(load_data(str(tmp_path / "x.npz")), ("x",))
    assert torch.equal(batch.inputs[0], read.inputs[0]) and batch.inputs[0].tolist() == array.astype(float).tolist()


@pytest.mark.parametrize("tensor", [torch.eye(3).to_sparse(), torch.empty(3, 3, device="meta")])
def test_tensors_without_values_in_a_row(tensor: torch.Tensor) -> None:
    with pytest.raises(DataError, match="expected a dense one"):
        Batches([tensor], ("x",))


def test_networks_with_calls_of_their_own_are_stored_and_read() -> None:
    class Calls(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm, self.gru = (
                torch.nn.LSTM(6, 5, batch_first=True),
                torch.nn.GRU(5, 4, batch_first=True, bidirectional=True),
            )
            self.fc = torch.nn.Linear(8, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y, _ = self.gru(self.lstm(x.flatten(1, 2))[0])
            y = self.fc(torch.einsum("bij,bik->bij", y, y.softmax(1)))
            return y.sort(1)[0].cumsum(1) + torch.arange(3).roll(1) * (y.topk(2, 1)[0].mean() > 0)

    model = hago.quantize(randomized(Calls()), "x86_vnni", DATA)
    read, _ = from_file_bytes(to_file_bytes(model.plan), "a test")
    assert torch.equal(hago.runtime.reference.IntegerModel(read)(DATA[0]), model.realize()(DATA[0]))


# ---------------------------------------------------------------- what mutated files found
def test_a_picture_that_would_start_a_program_is_none(tmp_path: Path) -> None:
    """Pillow renders PostScript with Ghostscript, whatever the file is called."""
    (tmp_path / "a.png").write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nx\n%%EOF\n")
    with pytest.raises(DataError, match="cannot identify image file"):
        list(load_data(str(tmp_path)))


@pytest.mark.parametrize("name", ["onnx", "_inductor", "set_vital", "Tensor", "__builtins__"])
def test_a_dtype_is_no_attribute_of_torch(name: str, plan: Plan) -> None:
    """torch imports modules, and warns, for some of its attributes."""

    def edit(document: Any) -> None:
        next(n for n in document["graph"]["nodes"] if n["op"] == "input")["attrs"]["dtype"] = name

    with pytest.raises(ModelFileError, match="no dtype"):
        from_file_bytes(forged(plan, edit), "forged.hago")
    with pytest.raises(HagoError, match="torch has no dtype"):
        torch_dtype(name)


def test_what_torch_says_of_its_backends_is_left_out(plan: Plan) -> None:
    quantized = called("aten._to_copy.default", {"$": 0})

    def edit(document: Any) -> None:
        quantized(document)
        opaque(document)["attrs"]["kwargs"] = {"dtype": {"torch": "quint8", "kind": "dtype"}}

    with pytest.raises(ModelFileError, match="quint8|Could not run") as caught:
        from_file_bytes(forged(plan, edit), "forged.hago")
    assert "\n" not in str(caught.value)


HEADERS: dict[str, Callable[[Any], None]] = {
    "bits that are a text": lambda h: h.update(fix_bits={"fc:0": "../../x"}),
    "bits of another kind": lambda h: h.update(fix_bits={"fc:0": {}}),
    "ranges that are texts": lambda h: h["settings"].update(
        thresholds={"ranges": {"fc": ["a", "b"]}, "narrow": {}, "slack": 0}
    ),
    "a slack that is a text": lambda h: h["settings"].update(thresholds={"ranges": {}, "narrow": {}, "slack": "x"}),
    "a race of its own": lambda h: h["settings"].update(race={"alpha": "x"}, refined=True),
}


@pytest.mark.parametrize("what", HEADERS)
def test_a_header_of_other_types_is_refused(what: str, tmp_path: Path) -> None:
    model, path = randomized(Small()), tmp_path / "log.jsonl"
    hago.search_quantize_strategy(model, "x86_vnni", DATA, searcher="default", log=path, progress=False)
    header, *trials = path.read_text().splitlines()
    value = json.loads(header)
    HEADERS[what](value)
    path.write_text("\n".join([json.dumps(value), *trials, ""]))
    with pytest.raises(HagoError, match="it was edited|expected \\(low, high\\)"):
        hago.replay(model, "x86_vnni", path, DATA)


@pytest.mark.parametrize("value", ["\0", [], {}, True, None])
def test_a_figure_that_is_no_number_is_refused(value: Any, tmp_path: Path) -> None:
    model, path = randomized(Small()), tmp_path / "log.jsonl"
    hago.search_quantize_strategy(model, "x86_vnni", DATA, searcher="default", log=path, progress=False)
    header, trial = path.read_text().splitlines()
    edited = json.loads(trial)
    edited["results"]["sqnr"] = value
    path.write_text(f"{header}\n{json.dumps(edited)}\n")
    with pytest.raises(LogError, match=r"at \$.results.sqnr"):
        read_log(path)


def test_a_hardware_file_of_many_mistakes_is_refused_at_once(tmp_path: Path) -> None:
    hago.save_hardware(hago.load_hardware("x86_vnni"), tmp_path / "chip.json")
    value = json.loads((tmp_path / "chip.json").read_text())
    value["ops"]["conv2d"] = [0] * 200_000
    (tmp_path / "chip.json").write_text(json.dumps(value))
    with pytest.raises(HagoError, match="has 1000 mistakes"):
        hago.load_hardware(tmp_path / "chip.json")
