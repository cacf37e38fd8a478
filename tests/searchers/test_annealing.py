"""Simulated annealing."""

from __future__ import annotations

import math

import pytest
from toys import make_space, run, separable

from hago.plan.space import Bits
from hago.searchers.annealing import _accepts, _TypicalChange
from hago.study.score import Score
from hago.study.searcher import random_generator


def test_annealing_accepts_losses_by_its_temperature() -> None:
    def taken(loss: float, temperature: float, **worse: int) -> float:
        mine, its = Score(1.0), Score(1.0 - loss, **worse)
        typical_change = _TypicalChange([1.0])
        return sum(_accepts(mine, its, temperature, typical_change, random_generator(0, i)) for i in range(2000)) / 2000

    assert taken(-0.5, 1e-9) == 1.0
    assert taken(1.0, 1.0) == pytest.approx(math.exp(-1), abs=0.04)
    assert taken(1.0, 0.5) == pytest.approx(math.exp(-2), abs=0.04)
    assert taken(1.0, 0.001) == 0.0
    assert taken(0.0, 1.0, total_bits=3) == pytest.approx(math.exp(-1), abs=0.04)
    assert taken(math.inf, 1.0) == 0.0


def test_annealing_does_not_leave_accepted_points() -> None:
    mine, its = Score(0.0), Score(100.0, overflows={"n": 1}, excess_bits={"n": 1})
    assert not any(_accepts(mine, its, 1e9, _TypicalChange(), random_generator(0, i)) for i in range(100))


@pytest.mark.parametrize("unit", [1024.0, 1 / 1024])
def test_annealing_does_not_depend_on_the_unit_of_the_value(unit: float) -> None:
    def in_other_units(bits: Bits) -> Score:
        score = separable(bits)
        return Score(score.value * unit, total_bits=score.total_bits)

    options = {"cooling": 0.97}
    a, b = (run("annealing", evaluate=e, options=options).trials for e in (separable, in_other_units))
    assert [t.bits for t in a] == [t.bits for t in b]


def test_annealing_by_default_makes_688_moves() -> None:
    space = make_space({f"g{i}:0": tuple(range(16, 3, -1)) for i in range(40)})
    result = run(
        "annealing",
        space=space,
        evaluate=lambda bits: Score(-float(sum(bits.values())), total_bits=sum(bits.values())),
        start=dict.fromkeys(space.groups, 10),
        options={},
    )
    assert result.trials[-1].why in {f"move {i}" for i in range(680, 689)}
    start, first, *_ = result.trials
    assert sum(first.bits[k] != start.bits[k] for k in space.groups) == 4
    assert max(abs(first.bits[k] - start.bits[k]) for k in space.groups) <= 2
