"""The best trial: which one it is, when `on_best` is called, and which trials are never returned."""

from __future__ import annotations

import itertools
import math
import random
from pathlib import Path

import pytest
from toys import TOY, Counting, chain, run, separable, without_relu

from hago.errors import InfeasibleBits, LogError
from hago.study.log import Trial, best_trial, read_log
from hago.study.score import Score
from hago.study.searcher import point_key


def scored(*scores: Score) -> list[Trial]:
    return [Trial(i, {"conv:0": s.total_bits}, s) for i, s in enumerate(scores)]


def test_fewer_bits_win_ties_and_the_first_wins_exact_ones() -> None:
    a, b, c = Score(0.7, total_bits=20), Score(0.7, total_bits=18), Score(0.7, total_bits=18)
    best = best_trial(scored(a, b, c))
    assert best is not None
    assert best.index == 1


def test_rank_prefers_no_overflow_then_value_then_proofs() -> None:
    overflows = Score(9.0, overflows={"n": 1}, excess_bits={"n": 1})
    worse = Score(10.0, overflows={"n": 5}, excess_bits={"n": 3})
    unproved, proved = Score(0.5, unproved=2), Score(0.5, unproved=1, total_bits=10**6)
    higher, none = Score(0.6, unproved=9), Score(99.0, infeasible="no signature")
    order = [none, worse, overflows, unproved, proved, higher]
    for a, b in itertools.combinations(order, 2):
        assert a.rank < b.rank


def test_tolerance_lets_fewer_bits_win() -> None:
    scores = [Score(v, total_bits=b) for v, b in [(1.0, 30), (1.2, 40), (0.9, 10), (1.1, 20), (1.15, 20)]]
    for tolerance, index in [(0.0, 1), (0.05, 4), (0.11, 4), (0.31, 2), (9.0, 2)]:
        best = best_trial(scored(*scores), tolerance)
        assert best is not None
        assert best.index == index


def test_standing_orders_as_rank_without_tolerance() -> None:
    draw = random.Random(0)
    scores = [
        Score(
            draw.choice([0.0, 1e-20, 2e-20, 1.0, -math.inf]),
            overflows={"n": 1} if draw.random() < 0.3 else {},
            excess_bits={"n": draw.randrange(3)},
            unproved=draw.randrange(2),
            total_bits=draw.randrange(3),
        )
        for _ in range(60)
    ]
    top = max(s.value for s in scores)
    assert sorted(scores, key=lambda s: s.rank) == sorted(scores, key=lambda s: s.standing(top))


def test_on_best_is_called_after_each_improvement_and_once_after_a_resume(tmp_path: Path) -> None:
    told: list[Trial] = []
    result = run("exhaustive", tmp_path / "log", budget=20, on_best=told.append)
    values = [t.score.rank for t in told]
    assert values == sorted(set(values))
    assert told[-1] == result.best
    assert len(told) > 2
    whole = run("greedy", tmp_path / "ended")
    for budget in (None, 3):
        late: list[Trial] = []
        run("greedy", tmp_path / "ended", budget=budget, on_best=late.append)
        assert late == [whole.best]
    again: list[Trial] = []
    run("exhaustive", tmp_path / "log", budget=20, on_best=again.append)
    assert again == [result.best]


def test_a_plan_key_comes_from_the_driver_or_the_evaluation_or_the_bits() -> None:
    def evaluate(bits):
        return Score(1.0, plan_key="from evaluate")

    def key_of(**arguments) -> str:
        return run("default", **arguments).score.plan_key

    assert key_of(evaluate=evaluate, plan_key=lambda bits: "given") == "given"
    assert key_of(evaluate=evaluate) == "from evaluate"
    assert key_of(evaluate=separable) == point_key(TOY.widest())


def test_values_that_are_not_finite(tmp_path: Path) -> None:
    values = {8: math.nan, 7: math.inf, 6: -math.inf, 5: 1.0}

    def evaluate(bits):
        value = values[bits["conv:0"]]
        return Score(value, {"sqnr": value, "parts": (value, 1)})

    result = run("exhaustive", tmp_path / "log", evaluate)
    assert result.score.value == math.inf
    assert result.trials[0].score.value == -math.inf
    assert result.trials[0].results == {"sqnr": "nan", "parts": ["nan", 1]}
    assert read_log(tmp_path / "log").trials == result.trials


def test_a_result_that_json_does_not_have_is_refused() -> None:
    with pytest.raises(LogError, match=r"trial 0: \$.results\['x'\].*set"):
        run("default", evaluate=lambda bits: Score(1.0, {"x": {1}}))


def test_never_returns_a_point_that_overflowed() -> None:
    space, evaluate = chain(2, 8)
    with pytest.raises(InfeasibleBits, match=r"'conv0' 100 times \(2 bits too few\).*allow_overflow"):
        run("default", space=space, evaluate=evaluate, start=dict.fromkeys(space.groups, 3))
    told: list[Trial] = []
    result = run("default", space=space, evaluate=evaluate, allow_overflow=True, on_best=told.append)
    assert result.score.overflows
    assert told == [result.best]


def test_a_point_that_overflowed_is_never_announced() -> None:
    space, evaluate = chain(2, 12)
    told: list[Trial] = []
    run("greedy", space=space, evaluate=evaluate, on_best=told.append)
    assert told
    assert all(t.score.runs for t in told)


def test_a_point_that_fits_no_signature_is_a_trial(tmp_path: Path) -> None:
    def evaluate(bits):
        if bits["conv:0"] > 6:
            raise InfeasibleBits("no signature of conv2d takes int8 and int8")
        return separable(bits)

    for name in ("greedy", "annealing", "exhaustive"):
        result = run(name, tmp_path / name, evaluate)
        assert result.trials[0].score.infeasible == "no signature of conv2d takes int8 and int8"
        assert result.bits["conv:0"] == 6
        assert run(name, tmp_path / name, evaluate).trials == result.trials
    with pytest.raises(InfeasibleBits, match=r"of 1 point tried, none fits.*no signature of conv2d"):
        run("default", evaluate=evaluate, allow_overflow=True)


def test_a_plan_key_may_raise_infeasible_bits(tmp_path: Path) -> None:
    def plan_key(bits):
        if bits["conv:0"] > 6:
            raise InfeasibleBits("too wide")
        return without_relu(bits)

    counting = Counting(separable)
    for _ in range(2):
        result = run("exhaustive", tmp_path / "log", counting, plan_key=plan_key)
        assert len(counting.calls) == 12
    assert result.trials[0].score.infeasible == "too wide"
    assert all(bits["conv:0"] <= 6 for bits in counting.calls)
