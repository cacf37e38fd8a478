"""docs/minihago.py: short, runnable, and as exact as it says."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

FILE = Path(__file__).resolve().parent.parent / "docs" / "minihago.py"


@pytest.fixture(scope="module")
def mini() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("minihago", FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["minihago"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules["minihago"]


def model_of(mini: ModuleType) -> tuple[list[Any], dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    nodes = [
        mini.Node("conv1", "conv", ("x", "w1")),
        mini.Node("conv2", "conv", ("conv1", "w2")),
        mini.Node("add", "add", ("conv2", "conv1")),
        mini.Node("relu", "relu", ("add",)),
        mini.Node("scores", "linear", ("relu", "w3")),
    ]
    shapes = {"x": (4, 1, 5, 5), "w1": (3, 1, 3, 3), "w2": (3, 3, 3, 3), "w3": (2, 75)}
    return nodes, {n: torch.randn(s, generator=generator, dtype=torch.float64) for n, s in shapes.items()}


def test_it_fits_on_a_few_pages() -> None:
    assert len(FILE.read_text("utf-8").splitlines()) <= 200


def test_it_runs(mini: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    mini.main()
    *trials, widest, best = capsys.readouterr().out.splitlines()
    assert all(json.loads(line).keys() == {"bits", "sqnr", "overflows"} for line in trials)
    assert "simulated == integer: True" in best and ", 0 overflows" in best
    assert ", 0 overflows" not in widest


@settings(deadline=None, max_examples=25)
@given(st.data())
def test_simulated_equals_integer_at_every_point(mini: ModuleType, data: st.DataObject) -> None:
    nodes, values = model_of(mini)
    bits = {edge: data.draw(st.sampled_from(choices), edge) for edge, choices in mini.space(nodes).items()}
    plan = mini.resolve(nodes, bits, mini.thresholds(nodes, values), set(values))
    simulated, integer = mini.simulate(nodes, plan, values), mini.realize(nodes, plan, values)
    assert torch.equal(simulated[0], integer[0]) and simulated[1] == integer[1]


@given(st.integers(-(2**40), 2**40), st.integers(2, 16))
def test_wrap_is_what_a_register_does(mini: ModuleType, value: int, bits: int) -> None:
    expected = (value + 2 ** (bits - 1)) % 2**bits - 2 ** (bits - 1)
    for dtype in (torch.int64, torch.float64):
        assert int(mini.wrap(torch.tensor(value, dtype=dtype), bits)) == expected


def test_the_integer_model_runs_on_integers(mini: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    nodes, values = model_of(mini)
    seen = set()
    conv = mini.OPS["conv"]
    monkeypatch.setitem(mini.OPS, "conv", lambda x, w: (seen.update((x.dtype, w.dtype)), conv(x, w))[1])
    bits = {edge: choices[0] for edge, choices in mini.space(nodes).items()}
    plan = mini.resolve(nodes, bits, mini.thresholds(nodes, values), set(values))
    seen.clear()
    mini.realize(nodes, plan, values)
    assert seen == {torch.int64}


def test_the_best_is_no_worse_than_the_start(mini: ModuleType) -> None:
    trials = list(mini.search(*model_of(mini)))
    best = mini.best_of(trials)
    assert (-best[2], best[1]) >= (-trials[0][2], trials[0][1])
