"""Models by name and weights by file: what is accepted, and what every refusal says."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from hago.data.named_objects import import_object
from hago.errors import GraphError, HagoError
from hago.graph.graph import Graph
from hago.graph.model_source import load_model, read_weights

ZOO = """
import torch
class Net(torch.nn.Sequential):
    def __init__(self):
        super().__init__(torch.nn.Conv2d(1, 2, 3), torch.nn.BatchNorm2d(2))
def net():
    return Net()
made = Net()
def three():
    return 3
def broken():
    raise ValueError("first line\\nsecond line")
class inner:
    net = staticmethod(Net)
number = 5
"""


@pytest.fixture
def zoo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "source_zoo.py").write_text(ZOO, "utf-8")
    (tmp_path / "source_bad.py").write_text("import no_such_module_anywhere", "utf-8")
    (tmp_path / "source_syntax.py").write_text("def (", "utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in [n for n in sys.modules if n.startswith("source_")]:
        del sys.modules[name]


def state() -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2))
    return {k: v.clone() for k, v in model.state_dict().items()}


@pytest.mark.parametrize("name", ["net", "Net", "made", "inner.net"])
def test_a_function_a_class_or_a_module(zoo: Path, name: str) -> None:
    model = load_model(f"source_zoo:{name}")
    assert isinstance(model, nn.Module) and not model.training


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("source_zoo", "expected 'package.module:callable'"),
        (":net", "expected 'package.module:callable'"),
        ("source_zoo:", "expected 'package.module:callable'"),
        ("source_zoo:nett", "Did you mean 'net'?"),
        ("source_zoo:inner.nett", "Did you mean 'net'?"),
        ("source_nowhere:net", "there is no module 'source_nowhere'"),
        ("source_zoo.deeper:net", "source_zoo"),
        (
            "source_bad:net",
            "importing source_bad raised ModuleNotFoundError: No module named 'no_such_module_anywhere'",
        ),
        ("source_syntax:net", "importing source_syntax raised SyntaxError"),
        (".relative:net", "importing .relative raised"),
        ("source_zoo:three", "returned int; expected an nn.Module"),
        ("source_zoo:number", "is of type int; expected a callable"),
        ("source_zoo:broken", "raised ValueError: first line"),
    ],
)
def test_refusals(zoo: Path, spec: str, says: str) -> None:
    with pytest.raises(HagoError) as caught:
        load_model(spec)
    assert says in str(caught.value) and spec in str(caught.value) and "\n" not in str(caught.value)


def test_any_object_can_be_named(zoo: Path) -> None:
    assert import_object("source_zoo:number", "number") == 5


# ---------------------------------------------------------------- weights
def saved(folder: Path, kind: str, value: Any) -> Path:
    path = folder / f"weights{kind}"
    save_file(value, path) if kind == ".safetensors" else torch.save(value, path)
    return path


@pytest.mark.parametrize("kind", [".safetensors", ".pt", ".pth"])
def test_weights_are_put_in(zoo: Path, kind: str) -> None:
    expected = state()
    model = load_model("source_zoo:net", saved(zoo, kind, expected))
    assert isinstance(model, nn.Module)
    assert all(torch.equal(v, expected[k]) for k, v in model.state_dict().items())


def test_a_checkpoint_around_the_state_dict(zoo: Path) -> None:
    path = saved(zoo, ".pt", {"state_dict": state(), "epoch": 3})
    assert read_weights(path).keys() == state().keys()


def test_a_state_dict_from_before_the_batch_counter(zoo: Path) -> None:
    old = {k: v for k, v in state().items() if not k.endswith("num_batches_tracked")}
    load_model("source_zoo:net", saved(zoo, ".safetensors", old))


def without(name: str) -> dict[str, torch.Tensor]:
    return {k: v for k, v in state().items() if k != name}


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (without("0.weight"), "1 tensors of the model are missing: '0.weight'"),
        ({**state(), "head": torch.zeros(2)}, "1 tensors are not the model's: 'head'"),
        ({**state(), "0.bias": torch.zeros(7)}, "'0.bias' has shape (7,), the model's has (2,)"),
        ({f"module.{k}": v for k, v in state().items()}, "and 2 more"),
    ],
)
def test_weights_of_another_model(zoo: Path, content: dict[str, torch.Tensor], says: str) -> None:
    with pytest.raises(GraphError) as caught:
        load_model("source_zoo:net", saved(zoo, ".pt", content))
    assert says in str(caught.value)


class Dangerous:
    def __reduce__(self) -> tuple[Any, ...]:
        return (exec, ("raise SystemExit('code ran')",))


def test_no_code_runs_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "weights.pt"
    path.write_bytes(pickle.dumps({"w": Dangerous()}))
    with pytest.raises(GraphError):
        read_weights(path)
    torch.save({"w": Dangerous()}, path)
    with pytest.raises(GraphError, match="runs no code from a file"):
        read_weights(path)


@pytest.mark.parametrize("name", ["weights.pt", "weights.safetensors"])
@pytest.mark.parametrize("content", [b"", b"nothing of the kind", b"PK\x03\x04 and then no archive"])
def test_files_that_are_no_weights(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(GraphError, match=name.replace(".", r"\.")):
        read_weights(tmp_path / name)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(GraphError, match="there is no weights file"):
        read_weights(tmp_path / "none.pt")


def test_something_else_than_tensors(tmp_path: Path) -> None:
    torch.save({"epoch": 3}, tmp_path / "weights.pt")
    with pytest.raises(GraphError, match="holds no state dict"):
        read_weights(tmp_path / "weights.pt")


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "weights.safetensors").write_bytes(b"")
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(HagoError, match=r"pip install 'hago\[safetensors\]'"):
        read_weights(tmp_path / "weights.safetensors")


def test_a_graph_keeps_its_own_weights(zoo: Path) -> None:
    (zoo / "source_graph.py").write_text("from hago import Graph\ndef make():\n    return Graph((), (), ())\n", "utf-8")
    assert isinstance(load_model("source_graph:make"), Graph)
    with pytest.raises(GraphError, match="weights are its own"):
        load_model("source_graph:make", saved(zoo, ".pt", state()))
