"""Shifts of channels change what a network computes by rounding only, are found where they help, and replay."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from made_up.random_graphs import random_graph, random_inputs
from made_up.random_transformers import random_transformer
from networks import images
from torch import Tensor, nn

import hago
from hago.correction import Corrections, Shifts, absorption, channel_axis, shiftable
from hago.errors import HagoError, LogError
from hago.graph import Graph, Node, run_real
from hago.runtime.exactness import compare_plan_exactly
from hago.study import read_log

from .random_chains import random_chain
from .stored import check_stored

SEEDS = range(48)


@functools.cache
def made(seed: int) -> Graph:
    """A random network whose shiftable layers give values above 0."""
    if seed % 4 == 0:
        graph = random_graph(seed)
    elif seed % 4 == 1:
        graph = random_transformer(seed)
    else:
        graph = random_chain(seed)
    raised = {graph[name].inputs[2] for name in shiftable(graph)}
    return replace(graph, consts={n: c + 8.0 if n in raised else c for n, c in graph.consts.items()})


def drawn_shifts(graph: Graph, inputs: list[Tensor], seed: int) -> dict[str, Shifts]:
    """Random shifts; behind a relu, of channels that lie above 0 by no more than that."""
    ranges: dict[str, tuple[Tensor, Tensor]] = {}
    passages = shiftable(graph)

    def see(node: Node, value: Any) -> None:
        if node.name in passages:
            rows = value.movedim(channel_axis(node), 0).flatten(1).to(torch.float64)
            ranges[node.name] = rows.amin(1), rows.amax(1)

    run_real(graph, inputs, see)
    generator, shifts = torch.Generator().manual_seed(seed), {}
    for name, (low, high) in ranges.items():
        part = torch.rand(len(low), generator=generator, dtype=torch.float64)
        free = (low > 0.0) & (high < passages[name].limit)
        shifts[name] = Shifts.towards(torch.where(free, part * low, 0.0) if passages[name].one_sided else part * high)
    return {name: shift for name, shift in shifts.items() if any(shift.steps)}


def differing(seed: int) -> tuple[int, int]:
    """How many channels of a network are shifted, and how many output values differ with these shifts."""
    graph = made(seed)
    inputs = random_inputs(graph, seed)
    shifts = drawn_shifts(graph, inputs, seed)
    changed = Corrections(absorption=shifts).apply(graph)
    pairs = zip(run_real(graph, inputs), run_real(changed, inputs), strict=True)
    wrong = sum(int((~torch.isclose(a, b, rtol=1e-3, atol=1e-3, equal_nan=True)).sum()) for a, b in pairs)
    return sum(map(bool, (s for shift in shifts.values() for s in shift.steps))), wrong


def test_shifts_keep_what_any_network_computes() -> None:
    found = {seed: differing(seed) for seed in SEEDS}
    assert {seed: wrong for seed, (_, wrong) in found.items() if wrong} == {}
    assert sum(shifted > 0 for shifted, _ in found.values()) > len(SEEDS) // 3


@pytest.mark.parametrize("wrong", ["moves another", "pads", "sums up to another"])
def test_the_law_bites(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if wrong == "moves another":
        monkeypatch.setattr(absorption, "_LINEAR", absorption._LINEAR | {"sigmoid", "gelu", "softmax", "tanh"})
    elif wrong == "pads":
        monkeypatch.setattr(absorption, "_pads", lambda node: False)
    else:
        monkeypatch.setattr(absorption, "_absorbed_by", lambda graph, node, shift: torch.zeros(()))
    assert any(differing(seed)[1] for seed in SEEDS)


def test_stored_shifts_give_the_same_network() -> None:
    applied = 0
    for seed in SEEDS:
        graph = made(seed)
        corrections = Corrections(absorption=drawn_shifts(graph, random_inputs(graph, seed), seed))
        again = Corrections.from_json(corrections.to_json())
        assert again == corrections and bool(corrections) == bool(corrections.absorption)
        expected, got = corrections.apply(graph), again.apply(graph)
        assert got.nodes == expected.nodes and got.model_hash == graph.model_hash
        assert all(torch.equal(got.consts[name], t) for name, t in expected.consts.items())
        assert all(torch.equal(again.apply(got).consts[name], t) for name, t in got.consts.items())  # not twice
        applied += bool(corrections)
    assert applied > len(SEEDS) // 3


def test_shifts_that_do_not_fit_are_refused() -> None:
    graph = hago.graph.from_torch(Shifted().eval(), (images(1, 3, 8, 8),))
    assert set(shiftable(graph)) == {"inner", "expand"}
    count = len(graph.consts[graph["expand"].inputs[2]])
    wrong = {
        "no node": {"expansion": Shifts(0, (1,))},
        "no layer": {"relu": Shifts(0, (1,))},
        "other channels": {"expand": Shifts(0, (1,) * (count + 1))},
        "padded behind it": {"first": Shifts(0, (1,) * len(graph.consts[graph["first"].inputs[2]]))},
        "the output": {"project": Shifts(0, (1,) * len(graph.consts[graph["project"].inputs[2]]))},
    }
    for what, edited in wrong.items():
        with pytest.raises(LogError, match="edited"):
            Corrections(absorption=edited).apply(graph)
            pytest.fail(what)


class Shifted(nn.Module):
    """A layer whose channels lie far above 0, behind a relu."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.inner = nn.Conv2d(8, 8, 3, padding=1)
        self.expand = nn.Conv2d(8, 16, 1)
        self.project = nn.Conv2d(16, 6, 1)
        with torch.no_grad():
            self.expand.bias += 40.0

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.inner(torch.relu(self.first(x))))
        return self.project(torch.relu(self.expand(x)))


DATA = [images(16, 3, 8, 8, seed=n) for n in range(4)]


@pytest.mark.parametrize("chip", ["x86_vnni", "tflite", "vta"])
def test_high_biases_are_absorbed_where_that_helps(chip: str, tmp_path: Path) -> None:
    model = Shifted().eval()
    plain, absorbed = (hago.quantize(model, chip, DATA, corrections=c) for c in ("none", "absorption"))
    gains = [p for p in absorbed.strategy.made_by["passes"] if p["names"] == ["absorption"]]
    assert [p["kept"] for p in gains] == [True] and gains[0]["after"] > gains[0]["before"] + 6.0
    assert set(absorbed.strategy.corrections.absorption) == {"expand"} and not plain.strategy.corrections
    check_stored(absorbed, model, chip, DATA, tmp_path)


def test_a_search_keeps_its_shifts_in_its_log(tmp_path: Path) -> None:
    model, log = Shifted().eval(), tmp_path / "log.jsonl"
    options: dict[str, Any] = {"log": log, "progress": False, "corrections": ["absorption", "bias"]}
    hago.search_quantize_strategy(model, "vta", DATA, budget=2, **options)
    header = read_log(log).header
    assert header is not None and set(header.settings["corrections"]["absorption"]) == {"expand"}
    strategy, score = hago.search_quantize_strategy(model, "vta", DATA, budget=5, **options)
    assert strategy.corrections.absorption
    assert hago.replay(model, "vta", log, DATA).same
    assert hago.evaluate_strategy(model, "vta", strategy, DATA).value == score


@pytest.mark.parametrize("chip", ["x86_vnni", "tflite", "vta"])
def test_shifted_networks_run_in_integers_as_simulated(chip: str) -> None:
    ran = 0
    for seed in range(24):
        graph = made(seed)
        inputs = random_inputs(graph, seed, batch=8)
        shifts = drawn_shifts(graph, inputs, seed)
        try:
            prepared = hago.search.prepare(graph, chip, [tuple(inputs)])
        except HagoError:
            continue  # a chip without one of its operators
        shifted = prepared.corrected(Corrections(absorption=shifts))
        found = compare_plan_exactly(shifted.resolver(shifted.space.widest()), random_inputs(graph, seed + 1))
        assert found.same, (seed, found)
        ran += bool(shifts)
    assert ran > 4
