"""Rows that the table of a term lacks: no solution has these bits, and no move leads to them."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace

import pytest
from toys import make_space

from hago.errors import InfeasibleBits
from hago.plan.space import Bits, Space
from hago.searchers.knapsack import AccumulatorLimit, Knapsack
from hago.searchers.registry import make_searcher
from hago.searchers.surrogate import MeasuredPoint, Surrogate, Term, front_neighbours
from hago.study.loop import run_study
from hago.study.score import Score

from .test_knapsack import points, random_surrogate


def with_gaps(seed: int) -> tuple[Space, Surrogate]:
    """Terms that lack a third of their rows, but not those of the most bits."""
    space, surrogate = random_surrogate(seed)
    rng, widest = random.Random(seed + 50), space.widest()
    kept = [
        {row: x for row, x in t.table.items() if rng.random() < 0.67 or row == tuple(widest[k] for k in t.keys)}
        for t in surrogate.terms
    ]
    terms = [replace(t, table=table) for t, table in zip(surrogate.terms, kept, strict=True)]
    return space, replace(surrogate, terms=terms)


@pytest.mark.parametrize("seed", range(8))
def test_the_program_finds_the_best_point_without_missing_rows(seed: int) -> None:
    space, surrogate = with_gaps(seed)
    every = points(space)
    left = [p for p in every if math.isfinite(surrogate.cost(p))]
    assert 0 < len(left) < len(every)
    program, costs = Knapsack(space, surrogate), sorted(map(surrogate.cost, left))
    assert program.range is not None and program.range[0] == pytest.approx(costs[0])
    for limit in (costs[0], costs[len(costs) // 2], None):
        most = math.inf if limit is None else limit
        picked = program.solve(limit)
        assert picked is not None and picked.bits in left and picked.cost <= most * (1 + 1e-5)
        assert picked.loss == pytest.approx(min(surrogate.loss(p) for p in left if surrogate.cost(p) <= most), rel=1e-4)
    assert program.solve(costs[0] * 0.9) is None


def test_limits_that_only_missing_rows_keep_have_no_solution() -> None:
    space = make_space({"a:0": (8, 4), "b:0": (8, 4)})
    losses = {k: {8: 0.0, 4: 1.0} for k in space.groups}
    surrogate = Surrogate("size", losses, [Term(("a:0", "b:0"), {(8, 8): 16.0, (8, 4): 12.0})])
    none = Knapsack(space, surrogate, [AccumulatorLimit(("a:0",), 4)])
    assert none.range is None and none.solve(None) is None
    some = Knapsack(space, surrogate, [AccumulatorLimit(("a:0", "b:0"), 12)])
    assert some.range == (12.0, 12.0)


def test_neighbours_of_a_front_have_no_missing_rows() -> None:
    space = make_space({"a:0": (8, 6, 4), "b:0": (8, 4)})
    losses = {"a:0": {8: 1.0, 6: 2.0, 4: 3.0}, "b:0": {8: 1.0, 4: 2.0}}
    rows = {(a, b): float(a + b) for a in (8, 6, 4) for b in (8, 4)}
    surrogate = Surrogate("size", losses, [Term(("a:0", "b:0"), rows)], loss_of_score=lambda score: 1.0)
    line = [MeasuredPoint(8.0, -3.0, {"a:0": 4, "b:0": 4}), MeasuredPoint(16.0, 3.0, space.widest())]
    for gone in rows:
        left = replace(surrogate, terms=[Term(("a:0", "b:0"), {r: x for r, x in rows.items() if r != gone})])
        near = list(front_neighbours(space, left, line, {}))
        assert near and tuple(near[0]) == ("a:0", "b:0") and gone not in {tuple(p.values()) for p in near}


@pytest.mark.parametrize("limit", [None, 60.0])
@pytest.mark.parametrize("minimize", [False, True])
@pytest.mark.parametrize("name", ["sensitivity", "gradient", "pareto"])
def test_searches_ask_no_point_with_missing_rows(name: str, minimize: bool, limit: float | None) -> None:
    """A chain of groups of which none may have more bits than the one before."""
    keys = [f"n{i}:0" for i in range(10)]
    space = make_space(dict.fromkeys(keys, (8, 6, 4)))
    losses = {k: {b: 4.0**-b * (1 + i % 3) for b in (8, 6, 4)} for i, k in enumerate(keys)}
    rows = {(a, b): float(b) for a in (8, 6, 4) for b in (8, 6, 4) if b <= a}
    terms = [Term((k, later), rows) for k, later in itertools.pairwise(keys)]
    surrogate = Surrogate("size", losses, terms, limit=limit, minimize=minimize)

    def evaluate(bits: Bits) -> Score:
        if any(bits[k] < bits[later] for k, later in itertools.pairwise(keys)):
            raise InfeasibleBits("more bits than before")
        over = 0.0 if limit is None else max(0.0, surrogate.cost(bits) / limit - 1)
        return Score(-surrogate.loss(bits), costs={"size": surrogate.cost(bits)}, shortfall=over)

    result = run_study(space, make_searcher(name, space, surrogate=surrogate), evaluate)
    assert len(result.trials) > 1 and result.score.accepted
    assert not [t.score.infeasible for t in result.trials if t.score.infeasible]


def test_a_start_with_missing_rows_is_left() -> None:
    """By the solution of the program, and by moves if there is none."""
    space = make_space({"a:0": (8, 6, 4), "b:0": (8, 6, 4)})
    losses = {k: {8: 0.0, 6: 1.0, 4: 3.0} for k in space.groups}
    rows = {(a, b): float(a + b) for a in (8, 6, 4) for b in (8, 6, 4) if a + b < 13}
    surrogate = Surrogate("size", losses, [Term(("a:0", "b:0"), rows)], limit=12.0)

    def evaluate(bits: Bits) -> Score:
        if surrogate.cost(bits) == math.inf:
            raise InfeasibleBits("too many")
        return Score(-surrogate.loss(bits), costs={"size": surrogate.cost(bits)})

    for name in ("sensitivity", "pareto"):
        result = run_study(space, make_searcher(name, space, surrogate=surrogate), evaluate)
        assert result.score.accepted and -result.score.value == 2.0
