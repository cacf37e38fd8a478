"""Factors on channels leave what a network computes as it is, whatever operators it has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from made_up.random_graphs import random_graph, random_inputs
from torch import Tensor

from hago.correction import (
    FIXED,
    STEPS_PER_OCTAVE,
    Channels,
    Corrections,
    channels,
    equalization,
    steps_by_node,
    track_channels,
)
from hago.correction.equalization import divide_channels, factors_of
from hago.errors import LogError
from hago.graph import Graph, run_real

from .random_chains import random_chain

SEEDS = range(80)


def octaves(tracked: Channels, seed: int, clamps: Sequence[str] = ()) -> Tensor:
    """A whole exponent for every channel: 0 for those of clamps, which have one limit for all channels, but those that
    have one for each."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(-3, 4, (tracked.count,), generator=generator)
    drawn[: FIXED + 1] = 0
    for name in tracked.clips.keys() - set(clamps):
        drawn[tracked.values[name].flatten()] = 0
    return drawn


def divisible(tracked: Channels) -> tuple[str, ...]:
    """The clamps that can have a limit for each channel."""
    return tuple(name for name in tracked.clips if tracked.axis_of(name) is not None)


def clamped(graph: Graph) -> Graph:
    """The network with a limit in place of every relu."""
    limits = {"min": 0.0, "max": 0.7}
    return replace(graph, nodes=tuple(replace(n, op="clamp", attrs=limits) if n.op == "relu" else n for n in graph))


def differing(graph: Graph, seed: int, *, limits: bool = False) -> tuple[int, int]:
    """How many channels have a factor, and how many output values differ with it.

    Args:
        limits: whether clamps get a limit for each channel; of them, what they clamp is counted.
    """
    tracked = track_channels(graph)
    clamps = divisible(tracked) if limits else ()
    drawn = octaves(tracked, seed, clamps)
    changed = divide_channels(graph, tracked, torch.exp2(drawn.to(torch.float64)), clamps)
    inputs = random_inputs(graph, seed)
    pairs = zip(run_real(graph, inputs), run_real(changed, inputs), strict=True)
    wrong = sum(int((~torch.isclose(a, b, rtol=1e-5, atol=1e-5, equal_nan=True)).sum()) for a, b in pairs)
    counted = [tracked.values[name] for name in clamps] if limits else [torch.arange(tracked.count)]
    return sum(int((drawn[numbers] != 0).sum()) for numbers in counted), wrong


def test_clamps_with_a_limit_for_each_channel_keep_what_any_network_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = {seed: clamped(random_chain(seed)) for seed in range(32)}
    found = {seed: differing(graph, seed, limits=True) for seed, graph in graphs.items()}
    assert {seed: wrong for seed, (_, wrong) in found.items() if wrong} == {}
    assert sum(divided > 0 for divided, _ in found.values()) > 8
    monkeypatch.setattr(equalization, "_with_limits", lambda clamp, channels, factors: clamp)
    assert any(differing(graph, seed, limits=True)[1] for seed, graph in graphs.items())  # the law bites


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
