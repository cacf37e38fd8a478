"""Factors on channels leave what a network computes as it is, whatever operators it has."""

from __future__ import annotations

import pytest
import torch
from made_up.random_graphs import random_graph, random_inputs
from torch import Tensor

from hago.correction import FIXED, STEPS_PER_OCTAVE, Channels, Corrections, channels, steps_by_node, track_channels
from hago.correction.equalization import divide_channels, factors_of
from hago.errors import LogError
from hago.graph import Graph, run_real

SEEDS = range(80)


def octaves(tracked: Channels, seed: int) -> Tensor:
    """A whole exponent for every channel: 0 for those of clamps, which have one limit for all channels."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(-3, 4, (tracked.count,), generator=generator)
    drawn[: FIXED + 1] = 0
    for name in tracked.clips:
        drawn[tracked.values[name].flatten()] = 0
    return drawn


def differing(graph: Graph, seed: int) -> tuple[int, int]:
    """How many channels have a factor, and how many output values differ with it."""
    tracked = track_channels(graph)
    drawn = octaves(tracked, seed)
    changed = divide_channels(graph, tracked, torch.exp2(drawn.to(torch.float64)))
    inputs = random_inputs(graph, seed)
    pairs = zip(run_real(graph, inputs), run_real(changed, inputs), strict=True)
    wrong = sum(int((~torch.isclose(a, b, rtol=1e-5, atol=1e-5, equal_nan=True)).sum()) for a, b in pairs)
    return int((drawn != 0).sum()), wrong


def test_factors_keep_what_any_network_computes() -> None:
    found = {seed: differing(random_graph(seed), seed) for seed in SEEDS}
    assert {seed: wrong for seed, (_, wrong) in found.items() if wrong} == {}
    assert sum(free > 0 for free, _ in found.values()) > len(SEEDS) // 3


@pytest.mark.parametrize("op", ["sigmoid", "tanh"])
def test_the_law_bites(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = [random_graph(seed) for seed in range(300)]
    with_op = [graph for graph in graphs if any(node.op == op for node in graph)]
    assert with_op
    monkeypatch.setattr(channels, "COMMUTING", channels.COMMUTING | {op})
    assert any(differing(graph, seed)[1] for seed, graph in enumerate(with_op))


def test_stored_exponents_give_the_same_network() -> None:
    applied = 0
    for seed in SEEDS:
        graph = random_graph(seed)
        tracked = track_channels(graph)
        steps = octaves(tracked, seed) * STEPS_PER_OCTAVE + octaves(tracked, seed + 1)
        corrections = Corrections(steps_by_node(tracked, steps))
        expected = divide_channels(graph, tracked, factors_of(steps))
        got = Corrections.from_json(corrections.to_json()).apply(graph)
        assert all(torch.equal(got.consts[name], t) for name, t in expected.consts.items())
        # what was corrected is the same model, and is not corrected twice
        assert got.model_hash == graph.model_hash
        assert all(torch.equal(t, corrections.apply(got).consts[n]) for n, t in got.consts.items())
        applied += bool(corrections)
    assert applied > len(SEEDS) // 3


def test_factors_that_would_change_the_network_are_refused() -> None:
    for seed in SEEDS:
        graph = random_graph(seed)
        tracked = track_channels(graph)
        stored = steps_by_node(tracked, octaves(tracked, seed))
        if stored:
            break
    name, exponents = next(iter(stored.items()))
    edited = {
        "no such node": {**stored, "elsewhere": exponents},
        "another length": {**stored, name: (*exponents, 1)},
        "an output": {**stored, graph.outputs[0]: (3,) * 5},
    }
    fixed = [n for n, s in tracked.scalable.items() if bool((s.gives == FIXED).all())]
    if fixed:
        edited["a channel that is fixed"] = {**stored, fixed[0]: (5,) * len(tracked.scalable[fixed[0]].gives)}
    for what, wrong in edited.items():
        with pytest.raises(LogError, match="edited"):
            Corrections(wrong).apply(graph)
            pytest.fail(what)
