"""Repair: from a point that overflows to one that runs."""

from __future__ import annotations

from dataclasses import replace

import pytest
from toys import chain, make_space, run

from hago.arithmetic.types import Edge
from hago.plan.space import Bits, Group, Space
from hago.searchers.registry import make_searcher
from hago.searchers.repair import feeds_of
from hago.study.loop import run_study
from hago.study.score import Score


@pytest.mark.parametrize("name", ["greedy", "annealing"])
@pytest.mark.parametrize("register", [8, 12, 16])
def test_a_start_that_overflows_everywhere_runs_after_a_handful(name: str, register: int) -> None:
    space, evaluate = chain(20, register)
    result = run(name, space=space, evaluate=evaluate, budget=8)
    first = next(t.index for t in result.trials if t.score.runs)
    assert first == 1
    lowered = result.trials[first]
    assert all(abs(lowered.bits[f"conv{i}:0"] - lowered.bits[f"conv{i}:1"]) <= 1 for i in range(20))
    assert all(lowered.bits[f"conv{i}:0"] + lowered.bits[f"conv{i}:1"] + 3 == register - 1 for i in range(20))
    assert "repair: conv0, conv1" in lowered.why


def test_repair_and_descent_reach_the_optimum() -> None:
    space, evaluate = chain(1, 12)
    best = run("exhaustive", space=space, evaluate=evaluate, options={})
    found = run("greedy", space=space, evaluate=evaluate)
    assert found.score.rank == best.score.rank


def test_repair_continues_if_the_excess_was_underestimated() -> None:
    space, evaluate = chain(4, 10)

    def shy(bits: Bits) -> Score:
        score = evaluate(bits)
        return replace(score, excess_bits=dict.fromkeys(score.overflows, 1))

    trials = run("greedy", space=space, evaluate=shy, budget=40).trials
    first = next(t.index for t in trials if t.score.runs)
    assert first == 10
    totals = [sum(t.bits.values()) for t in trials[: first + 1]]
    assert totals == sorted(set(totals), reverse=True)


def test_a_group_that_feeds_two_nodes_is_lowered_once() -> None:
    edges = (Edge("left", 0), Edge("right", 0))
    space = Space({"x:out": Group("x:out", "x", edges, (8, 7, 6, 5, 4))})
    assert feeds_of(space) == {"left": ("x:out",), "right": ("x:out",)}

    def evaluate(bits: Bits) -> Score:
        excess = {"left": bits["x:out"] - 6, "right": bits["x:out"] - 5}
        excess = {n: e for n, e in excess.items() if e > 0}
        return Score(bits["x:out"], overflows=excess, excess_bits=excess, total_bits=bits["x:out"])

    trials = run("greedy", space=space, evaluate=evaluate).trials
    assert [t.bits["x:out"] for t in trials[:2]] == [8, 5]


def test_feeds_can_be_passed() -> None:
    """E.g. an add on a common scale overflows because of the operands of its producer."""
    space = make_space({"conv:0": (8, 7, 6, 5, 4), "other:0": (8, 7, 6, 5, 4)})

    def evaluate(bits: Bits) -> Score:
        excess = {"add": bits["conv:0"] - 5} if bits["conv:0"] > 5 else {}
        return Score(sum(bits.values()), overflows=excess, excess_bits=excess, total_bits=sum(bits.values()))

    given = make_searcher("greedy", space, feeds={"add": ["conv:0", "gone:0"]})
    assert run_study(space, given, evaluate).trials[1].bits == {"conv:0": 5, "other:0": 8}
    # without them, no group is known to feed the add, so every group is lowered by one choice at a time
    plain = run_study(space, make_searcher("greedy", space), evaluate)
    assert plain.trials[1].bits == {"conv:0": 7, "other:0": 7}
    assert plain.bits == {"conv:0": 5, "other:0": 8}


def test_repair_that_cannot_succeed_ends() -> None:
    space, _ = chain(2, 16)

    def evaluate(bits: Bits) -> Score:
        return Score(0.0, overflows={"conv0": 1}, excess_bits={"conv0": 3}, total_bits=sum(bits.values()))

    result = run("greedy", space=space, evaluate=evaluate, allow_overflow=True)
    assert result.stopped_because == "finished"
    assert result.bits == space.narrowest()
