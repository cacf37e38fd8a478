"""Stored models that were edited and given a valid checksum: they run, or are refused with the file and the place."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Mapping
from typing import Any, Final

import pytest
import torch
from networks import Small, images, randomized
from products import whole
from test_damaged_files import ODD, places
from torch import Tensor, nn

import hago
from hago.errors import HagoError, ModelFileError
from hago.hardware.file import load_hardware
from hago.plan import document_checks
from hago.plan.document import plan_from_document, plan_to_document
from hago.plan.plan import Plan
from hago.runtime.reference import IntegerModel
from hago.runtime.stored_model import KIND, from_file_bytes, to_file_bytes
from hago.serialization.tensor_file import from_bytes, to_bytes
from hago.simulation.simulator import Simulator

EDITS: Final = 120 if whole() else 40
DATA: Final = [images(4, 1, 6, 6)]


class Tabled(nn.Module):
    """A table, forms of one chip, a float island, and results by name."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.fc = Small(), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        y = torch.sigmoid(self.body(x))
        return {"classes": torch.softmax(self.fc(y), 1), "hidden": torch.cat([y, y + y], 1)}


@pytest.fixture(scope="module", params=["x86_vnni", "tflite", "x86_avx2"])
def plan(request: pytest.FixtureRequest) -> Plan:
    return hago.quantize(randomized(Tabled()), load_hardware(request.param), DATA).plan


def document_of(plan: Plan) -> tuple[dict[str, Any], Mapping[str, Tensor]]:
    document, tensors = plan_to_document(plan)
    return json.loads(json.dumps(document)), tensors


def forge(rng: random.Random, document: Any) -> str:
    """Change one value into another of its kind, into one from elsewhere, or into nonsense; where."""
    every = [p for p in places(document) if p and p[0] not in ("hardware_hash", "own_ops")]
    plans = [p for p in every if p[0] == "plans"]
    *inner, last = path = rng.choice(plans if rng.random() < 0.4 else every)
    at = document
    for key in inner:
        at = at[key]
    value, act = at[last], rng.randrange(5)
    alike = [p for p in every if p[-1] == last]
    if act == 0:
        at[last] = rng.choice(ODD)
    elif act == 1:
        del at[last]
    elif act == 2 and isinstance(value, (int, float)):
        at[last] = rng.choice([value + 1, -value, value * 2, 0, 1, 2**40])
    elif act == 3:
        at[last] = copy.deepcopy(_at(document, rng.choice(alike)))
    else:
        at[last] = copy.deepcopy(_at(document, rng.choice(every)))
    return str(path)


def _at(document: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        document = document[key]
    return document


def test_an_edited_document_is_refused_or_runs(plan: Plan) -> None:
    document, tensors = from_bytes(to_file_bytes(plan), KIND, "a model")
    outcomes = set()
    for seed in range(EDITS):
        forged = copy.deepcopy(document)
        where = forge(random.Random(seed), forged)
        try:
            json.dumps(forged, allow_nan=False)
        except ValueError:
            continue
        try:
            read, _ = from_file_bytes(to_bytes(KIND, forged, tensors), "forged.hago")
        except ModelFileError as error:
            assert "forged.hago" in str(error) and len(str(error)) > 30, where
            outcomes.add("refused")
            continue
        outcomes.add("ran")
        for model in (IntegerModel(read), Simulator(read)):
            model(*DATA)
    assert outcomes == {"refused", "ran"}


def put(*path: Any) -> Callable[[Any], None]:
    """Put the last of the path where the rest of it points, an op standing for its first node."""
    *keys, last, value = path

    def edit(document: Any) -> None:
        inner = document["graph"]["nodes"] if keys[0] == "node" else document[keys[0]]
        found = next(n for n in document["graph"]["nodes"] if n["op"] == keys[1])
        inner = found if keys[0] == "node" else inner[found["name"]]
        for key in keys[2:]:
            inner = inner[key]
        if value is GONE:
            del inner[last]
        else:
            inner[last] = value

    return edit


GONE: Final = object()
ONE: Final = {"hago": "tensor", "dtype": "int64", "shape": [1], "values": [1]}
FORGED: Final[Mapping[str, tuple[Callable[[Any], None], str]]] = {
    "a window": (put("node", "conv2d", "attrs", "padding", 0, 7), "has the shape"),
    "a shape": (put("node", "conv2d", "shape", 1, 64), "has the shape"),
    "a constant that is an input": (put("node", "const", "op", "input"), "input nodes"),
    "an input of no dtype": (put("node", "input", "attrs", "dtype", "float99"), "no dtype"),
    "a stride": (put("plans", "conv2d", "attrs", "stride", 0, 3), "attributes"),
    "groups": (put("plans", "conv2d", "attrs", "groups", 4), "attributes"),
    "an attribute less": (put("plans", "conv2d", "attrs", "padding", GONE), "attributes"),
    "no weight": (put("plans", "conv2d", "consts", "1", GONE), "constant"),
    "an operand less": (put("plans", "conv2d", "operands", "items", 0, None), "for every operand"),
    "an operand of no kind": (put("plans", "conv2d", "operands", "items", 0, 7), "operands do not fit"),
    "an output from elsewhere": (put("plans", "conv2d", "out", "number", 0), "comes from the accumulator"),
    "parts of no whole": (put("plans", "conv2d", "parts", 99), "accumulator that is bounded"),
    "a bound below zero": (put("plans", "conv2d", "bound", -1.0), "accumulator that is bounded"),
    "an accumulator of no kind": (put("plans", "conv2d", "register", 5), "register"),
    "a table": (put("plans", "conv2d", "table", ONE), "a table"),
    "a threshold": (put("plans", "conv2d", "thresholds", "nothing", [1, 2]), "thresholds"),
    "a signature": (put("plans", "conv2d", "desc", 99), "desc"),
}


@pytest.mark.parametrize("case", FORGED)
def test_what_kernels_trust_is_checked(case: str, plan: Plan) -> None:
    document, tensors = document_of(plan)
    assert plan_from_document(document, tensors, "model").nodes
    edit, says = FORGED[case]
    edit(document)
    with pytest.raises(ModelFileError, match=says):
        plan_from_document(document, tensors, "model")


def test_edges_must_match_the_operands_of_their_readers(plan: Plan) -> None:
    document, tensors = document_of(plan)
    edge = next(e for e, ends in document["edges"].items() if None not in ends)
    document["edges"][edge].reverse()
    with pytest.raises(ModelFileError, match=f"edge {edge} converts"):
        plan_from_document(document, tensors, "model")


def test_every_check_is_needed(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the checks of integer nodes, forged ones are let through: the law above can fail."""
    monkeypatch.setattr(document_checks, "_RULES", ())
    let_through = 0
    for case in ("a stride", "parts of no whole", "a bound below zero", "no weight"):
        document, tensors = document_of(plan)
        FORGED[case][0](document)
        try:
            let_through += bool(plan_from_document(document, tensors, "model").nodes)
        except HagoError:
            continue
    assert let_through == 4
