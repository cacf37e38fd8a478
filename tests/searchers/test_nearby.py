"""Estimates for neighbours of a point: they equal the surrogate's own figures bit for bit."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace

import pytest

from hago.plan.space import FLOAT, INTEGER
from hago.searchers.surrogate import NeighbourEstimates, Surrogate, Term, exact_sum

CHOICES = {"a:0": (8, 6, 4), "a:1": (8, 4), "b:0": (8, 7, 6, 5), "a:kind": (INTEGER, FLOAT), "b:kind": (INTEGER, FLOAT)}
GATES = {"a:kind": ("a:0", "a:1"), "b:kind": ("b:0",)}


def surrogate_of(rng: random.Random) -> Surrogate:
    losses = {k: {b: rng.uniform(0, 10 ** rng.randint(-9, 3)) for b in CHOICES[k]} for k in ("a:0", "a:1", "b:0")}
    keys = [(k,) for k in CHOICES] + [("a:0", "a:1", "a:kind"), ("b:0", "b:kind"), ("a:1", "b:0")]
    rows = [(names, itertools.product(*(CHOICES[k] for k in names))) for names in keys]
    terms = [Term(names, {row: rng.uniform(-1, 10 ** rng.randint(-6, 9)) for row in table}) for names, table in rows]
    return Surrogate("size", losses, terms, constant=rng.uniform(0, 1e6), gates=GATES)


@pytest.mark.parametrize("seed", range(40))
def test_changes_equal_differences_of_the_surrogate(seed: int) -> None:
    rng = random.Random(seed)
    surrogate = surrogate_of(rng)
    here, there = ({k: rng.choice(listed) for k, listed in CHOICES.items()} for _ in range(2))
    some = {k: there[k] for k in rng.sample(sorted(CHOICES), rng.randint(0, 3))}
    found, whole = NeighbourEstimates(surrogate, here).change(some), {**here, **some}
    parts, moved = surrogate.parts(here), surrogate.parts(whole)
    assert found.bits == {k: b for k, b in some.items() if b != here[k]}
    assert found.cost == surrogate.cost(whole) - surrogate.cost(here)
    assert found.loss == math.fsum(moved[k] - parts[k] for k in parts)
    assert found.churn == math.fsum(abs(moved[k] - parts[k]) for k in parts)


@pytest.mark.parametrize("seed", range(20))
def test_exact_sum_is_exact(seed: int) -> None:
    rng = random.Random(seed)
    values = [rng.uniform(-1, 1) * 10.0 ** rng.randint(-20, 20) for _ in range(50)]
    for more in ([], [1.0], [-v for v in values[:7]]):
        assert math.fsum([*exact_sum(values), *more]) == math.fsum([*values, *more])
    assert len(exact_sum(values)) < 10


@pytest.mark.parametrize("seed", range(40))
def test_missing_rows_cost_infinity(seed: int) -> None:
    """A change that leads to missing rows costs infinity; one that leads away from them costs minus infinity."""
    rng = random.Random(seed)
    whole = surrogate_of(rng)
    tables = [{row: x for row, x in t.table.items() if rng.random() < 0.8} for t in whole.terms]
    surrogate = replace(whole, terms=[replace(t, table=x) for t, x in zip(whole.terms, tables, strict=True)])
    here = {k: rng.choice(listed) for k, listed in CHOICES.items()}
    near = NeighbourEstimates(surrogate, here)
    for key, bits in ((k, b) for k, listed in CHOICES.items() for b in listed if b != here[k]):
        there, terms = {**here, key: bits}, [t for t in surrogate.terms if key in t.keys]
        found = near.change({key: bits}).cost
        if any(t(there) == math.inf for t in terms):
            assert found == math.inf
        elif any(t(here) == math.inf for t in terms):
            assert found == -math.inf
        else:
            assert found == pytest.approx(whole.cost(there) - whole.cost(here), rel=1e-9, abs=1e-6)
