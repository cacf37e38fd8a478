"""Nesting read from files: what torch would import for it is refused."""

from __future__ import annotations

import enum
import json
from collections import OrderedDict, defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

import hago
from hago.errors import GraphError, LogError
from hago.graph.nesting import read_tree
from hago.importing import import_for_strategy
from hago.plan.strategy import Conditions, HardwareId, Strategy


class Kind(enum.Enum):
    one = 1


def text_of(value: Any) -> str:
    return pytree.treespec_dumps(pytree.tree_structure(value))


@pytest.mark.parametrize("value", [1, (1, [2, {"a": 3}]), OrderedDict(b=1, a=(2,)), ((1,), {"x": 2}), None])
def test_plain_containers_pass(value: Any) -> None:
    assert read_tree(text_of(value)) == pytree.tree_structure(value)


FACTORY = {"default_factory_module": "antigravity", "default_factory_name": "x", "dict_context": []}
IMPORTING = json.dumps([1, {"type": "collections.defaultdict", "context": FACTORY, "children_spec": []}])
LEAF = {"type": None, "context": None, "children_spec": []}
ENUM = json.dumps([{"__enum__": True, "fqn": "antigravity:x", "name": "a"}])


@pytest.mark.parametrize(
    "text",
    [
        text_of(defaultdict(list, a=1)),
        text_of({Kind.one: 1}),
        IMPORTING,
        json.dumps([1, {"type": "builtins.tuple", "context": "null", "children_spec": [json.loads(IMPORTING)[1]]}]),
        json.dumps([1, {"type": "no.such.type", "context": None, "children_spec": []}]),
        json.dumps([1, {"type": "builtins.dict", "context": ENUM, "children_spec": [LEAF]}]),
        json.dumps(
            [1, {"type": "builtins.dict", "context": ENUM.replace("_enum", "\\u005fenum"), "children_spec": [LEAF]}]
        ),
        json.dumps([1, {"type": "builtins.tuple", "context": ENUM, "children_spec": []}]),
        json.dumps([1, {"type": "builtins.dict", "context": '["a", "a"]', "children_spec": [LEAF, LEAF]}]),
        "[1, 2]",
        "{}",
        "",
        "[1, {}]",
        "[7, {}]",
    ],
)
def test_what_imports_or_cannot_be_read_is_refused(text: str) -> None:
    with pytest.raises(GraphError, match="nest"):
        read_tree(text)


def test_a_type_that_is_not_known_says_so() -> None:
    spec = json.dumps([1, {"type": "collections.namedtuple", "context": "no.Such", "children_spec": []}])
    with pytest.raises(GraphError, match="import the module"):
        read_tree(spec)


def test_a_strategy_imports_nothing() -> None:
    inputs = {"tensors": [{"shape": [1, 2], "dtype": "float32"}], "spec": IMPORTING}
    made_by = {"inputs": inputs}
    strategy = Strategy("m", HardwareId("h", "x"), Conditions({}, {}), {}, {}, made_by)
    with pytest.raises(LogError, match="without importing"):
        import_for_strategy(torch.nn.Linear(2, 2).eval(), strategy)


def test_types_that_this_process_registered_pass() -> None:
    class Result(dict):  # type: ignore[type-arg]
        pass

    name = "tests.Result"
    pytree.register_pytree_node(
        Result,
        lambda r: (list(r.values()), list(r)),
        lambda v, k: Result(zip(k, v, strict=True)),
        serialized_type_name=name,
    )
    value = (Result(a=1, b=[2]), 3)
    spec = read_tree(text_of(value))
    assert spec == pytree.tree_structure(value)
    assert pytree.tree_unflatten([1, 2, 3], spec) == value


class Both(nn.Module):
    """Two inputs that are not alike."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(8, 4), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.a(x) - 2 * self.b(y)
        return out


def test_a_batch_that_is_a_dict_is_read_by_name(tmp_path: Path) -> None:
    """Whatever order it has: in calibration, and where a model is called with it."""
    batch = {"y": torch.randn(16, 8), "x": torch.randn(16, 8)}
    quantizer = hago.quantize(Both().eval(), "x86_vnni", [batch])
    integer = quantizer.realize()
    integer.save(tmp_path / "both.safetensors")
    for model in (quantizer.simulate(), integer, hago.load_integer_model(tmp_path / "both.safetensors")):
        expected = model(batch["x"], batch["y"])
        assert torch.equal(model(batch), expected) and torch.equal(model(**batch), expected)
        assert torch.equal(model(dict(reversed(batch.items()))), expected)
        with pytest.raises(hago.HagoError, match="no further argument 'z'"):
            model({**batch, "z": batch["x"]})
        with pytest.raises(hago.HagoError):
            model({"x": batch["x"]})
