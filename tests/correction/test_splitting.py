"""Splits change what a network computes by rounding only, are found where they help, and replay to the last bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from made_up.random_graphs import random_inputs
from made_up.random_transformers import random_transformer
from networks import Outliers, images

import hago
from hago.correction import Corrections, Splits, chains_of, norms_to_separate, splitting, track_channels
from hago.correction.equalization import divide_channels
from hago.errors import HagoError, LogError
from hago.graph import Graph, run_real
from hago.runtime.exactness import compare_plan_exactly
from hago.study import read_log

from .stored import check_stored
from .test_channels import octaves

SEEDS = range(80)
CHIPS = ("x86_vnni", "tflite", "vta")


def all_splits(graph: Graph) -> Splits:
    """Every norm computed once more, and of every chain the last channel and the first in parts of their own."""
    parts: dict[str, tuple[tuple[int, ...], ...]] = {}
    taken: set[str] = set()
    for chain in chains_of(graph):
        if not taken & {chain.first, chain.last}:
            taken |= {chain.first, chain.last}
            count = graph.consts[graph[chain.last].inputs[1]].shape[1]
            parts[chain.last] = ((count - 1,), (0, 2))
    return Splits(norms_to_separate(graph), parts)


def differing(graph: Graph, seed: int) -> tuple[Splits, int]:
    """The splits of a network, and how many output values differ with them and with factors on all channels."""
    splits = all_splits(graph)
    changed = splits.apply(graph)
    tracked = track_channels(changed)
    changed = divide_channels(changed, tracked, torch.exp2(octaves(tracked, seed).to(torch.float64)))
    inputs = random_inputs(graph, seed)
    pairs = zip(run_real(graph, inputs), run_real(changed, inputs), strict=True)
    return splits, sum(int((~torch.isclose(a, b, rtol=1e-3, atol=1e-3)).sum()) for a, b in pairs)


def test_splits_and_factors_keep_what_any_network_computes() -> None:
    found = {seed: differing(random_transformer(seed), seed) for seed in SEEDS}
    assert {seed: wrong for seed, (_, wrong) in found.items() if wrong} == {}
    assert sum(bool(s.norms) for s, _ in found.values()) > len(SEEDS) // 4
    assert sum(bool(s.channels) for s, _ in found.values()) > len(SEEDS) // 4


def test_the_law_of_channels_bites(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(splitting, "_ENTRYWISE", splitting._ENTRYWISE | {"softmax"})
    assert any(differing(random_transformer(seed), seed)[1] for seed in SEEDS)


def test_the_law_of_norms_bites(monkeypatch: pytest.MonkeyPatch) -> None:
    """Were the one norm divided for layers and sums alike, sums would be others."""
    monkeypatch.setattr(track_channels.__globals__["_Tracking"], "_sum", lambda self, node: self.fresh(node.shape[-1]))
    assert any(differing(random_transformer(seed), seed)[1] for seed in SEEDS)


def test_stored_splits_give_the_same_network() -> None:
    for seed in SEEDS:
        graph = random_transformer(seed)
        corrections = Corrections(splits=all_splits(graph))
        again = Corrections.from_json(corrections.to_json())
        assert again == corrections
        expected, got = corrections.splits.apply(graph), again.apply(graph)
        assert got.nodes == expected.nodes and got.model_hash == graph.model_hash
        assert all(torch.equal(got.consts[name], t) for name, t in expected.consts.items())
        assert again.apply(got).nodes == got.nodes  # not split twice


def test_splits_that_do_not_fit_are_refused() -> None:
    graph = next(g for g in map(random_transformer, SEEDS) if all_splits(g).norms and all_splits(g).channels)
    splits = all_splits(graph)
    name, parts = next(iter(splits.channels.items()))
    wrong = {
        "no norm": Splits((*splits.norms, name)),
        "no layer": Splits((), {splits.norms[0]: parts}),
        "a channel twice": Splits((), {name: (*parts, parts[0])}),
        "no such channel": Splits((), {name: ((10_000,),)}),
        "an empty part": Splits((), {name: ((),)}),
    }
    for what, edited in wrong.items():
        with pytest.raises(LogError, match="edited"):
            edited.apply(graph)
            pytest.fail(what)


@pytest.mark.parametrize("chip", CHIPS)
def test_split_networks_run_in_integers_as_simulated(chip: str) -> None:
    ran = 0
    for seed in range(16):
        graph, inputs = random_transformer(seed), random_inputs(random_transformer(seed), seed, batch=8)
        splits = all_splits(graph)
        if not splits:
            continue
        try:
            prepared = hago.search.prepare(graph, chip, [tuple(inputs)])
        except HagoError:
            continue  # a chip without one of its operators
        split = prepared.corrected(Corrections(splits=splits))
        found = compare_plan_exactly(split.resolver(split.space.widest()), random_inputs(graph, seed + 1))
        assert found.same, (seed, found)
        ran += 1
    assert ran > 4


DATA = [images(16, 6, 12, seed=n) for n in range(4)]


def sqnr(quantizer: Any) -> float:
    return float(quantizer.strategy.made_by["results"]["sqnr"])


@pytest.mark.parametrize("chip", ["x86_vnni", "vta"])
def test_splits_help_and_are_stored(chip: str, tmp_path: Path) -> None:
    model = Outliers().eval()
    made = {c: hago.quantize(model, chip, DATA, corrections=c) for c in ("none", "equalization", "splitting")}
    both = hago.quantize(model, chip, DATA, corrections=["equalization", "splitting"])
    assert both.strategy.corrections.splits == Splits(("norm",), {"down": ((5,),)})
    assert all(sqnr(alone) >= sqnr(made["none"]) for alone in made.values())
    assert sqnr(both) > max(map(sqnr, made.values())) + 3.0
    check_stored(both, model, chip, DATA, tmp_path)


def test_a_search_keeps_its_splits_in_its_log(tmp_path: Path) -> None:
    model, log = Outliers().eval(), tmp_path / "log.jsonl"
    options: dict[str, Any] = {"log": log, "progress": False}
    hago.search_quantize_strategy(model, "vta", DATA, budget=2, **options)
    header = read_log(log).header
    assert header is not None and header.settings["corrections"]["splits"]["channels"] == {"down": [[5]]}
    strategy, score = hago.search_quantize_strategy(model, "vta", DATA, budget=5, **options)
    assert strategy.corrections.splits
    assert hago.replay(model, "vta", log, DATA).same
    assert hago.evaluate_strategy(model, "vta", strategy, DATA).value == score
