"""The integer program, compared with all points of small spaces, and the searchers that use it."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace

import pytest
from toys import TOY, make_space

from hago.errors import InfeasibleBits
from hago.plan.space import FLOAT, INTEGER, Bits, Space
from hago.searchers import merged_groups
from hago.searchers.knapsack import Knapsack
from hago.searchers.merged_groups import AccumulatorLimit, merge_groups
from hago.searchers.pareto import area_added
from hago.searchers.registry import make_searcher
from hago.searchers.surrogate import (
    CostConstraint,
    MeasuredPoint,
    Surrogate,
    Term,
    fit_factors,
    front_neighbours,
    plain_surrogate,
)
from hago.study.loop import run_study
from hago.study.score import Score


def points(space: Space) -> list[dict[str, int]]:
    keys = list(space.groups)
    return [dict(zip(keys, c, strict=True)) for c in itertools.product(*(g.choices for g in space.groups.values()))]


def random_terms(rng: random.Random, space: Space) -> list[Term]:
    terms = [Term((k,), {(b,): float(rng.randint(0, 9) * b) for b in g.choices}) for k, g in space.groups.items()]
    for i in range(3):
        keys = (f"n{i}:0", f"n{i}:1")
        rows = itertools.product(*(space.groups[k].choices for k in keys))
        terms.append(Term(keys, {r: float(rng.randint(1, 50) * r[0] * r[1]) for r in rows}))
    return terms


def random_surrogate(seed: int) -> tuple[Space, Surrogate]:
    """Losses over many orders of magnitude; cost terms over one group, two groups, and one group twice."""
    rng = random.Random(seed)
    space = make_space({f"n{i}:{s}": (8, 7, 5, 4)[: rng.randint(1, 4)] for i in range(3) for s in (0, 1)})
    losses = {k: {b: 10 ** rng.uniform(-9, 0) * 4.0**-b for b in g.choices} for k, g in space.groups.items()}
    return space, Surrogate("size", losses, random_terms(rng, space), constant=float(rng.randint(0, 100)))


@pytest.fixture(params=[512, 40, 1], ids=["merged", "some merged", "apart"])
def most_combinations(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups are merged where they have so few combinations."""
    monkeypatch.setattr(merged_groups, "_MOST_COMBINATIONS", request.param)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.usefixtures("most_combinations")
def test_the_program_finds_the_best_of_all_points(seed: int) -> None:
    space, surrogate = random_surrogate(seed)
    every = points(space)
    program = Knapsack(space, surrogate)
    costs = sorted(map(surrogate.cost, every))
    assert program.range is not None and program.range[0] == pytest.approx(costs[0])
    for limit in (costs[0], costs[len(costs) // 3], costs[len(costs) // 2], costs[-1]):
        picked = program.solve(limit)
        best = min(surrogate.loss(p) for p in every if surrogate.cost(p) <= limit)
        assert picked is not None and picked.cost <= limit * (1 + 1e-5)
        assert picked.loss == pytest.approx(best, rel=1e-4)
        assert (picked.loss, picked.cost) == (surrogate.loss(picked.bits), surrogate.cost(picked.bits))
    assert program.solve(costs[0] * 0.9) is None


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.usefixtures("most_combinations")
def test_what_float_nodes_do_not_lose(seed: int) -> None:
    """Nodes that may be float lose nothing then; float weights cost more, and operations of float operands most."""
    rng = random.Random(seed)
    space, plain = random_surrogate(seed)
    kinds = {f"k{i}:0": (INTEGER, FLOAT) if rng.random() < 0.8 else (INTEGER,) for i in range(3)}
    space = make_space({**{key: group.choices for key, group in space.groups.items()}, **kinds})
    terms = list[Term]()
    for i in range(3):
        kind, read, weight = f"k{i}:0", f"n{i}:0", f"n{i}:1"
        size, count = rng.randint(1, 50), rng.randint(1, 9)
        pairs = itertools.product(space.groups[weight].choices, kinds[kind])
        terms.append(Term((weight, kind), {(b, k): float(size * (40 if k == FLOAT else b)) for b, k in pairs}))
        rows = itertools.product(*(space.groups[key].choices for key in (kind, read, weight)))
        terms.append(
            Term((kind, read, weight), {(k, *b): float(count * (99 if k == FLOAT else sum(b))) for k, *b in rows})
        )
    gates = {f"k{i}:0": (f"n{i}:0", f"n{i}:1") for i in range(3)}
    surrogate = replace(plain, terms=terms, gates=gates)
    every, program = points(space), Knapsack(space, surrogate)
    costs = sorted(map(surrogate.cost, every))
    for limit in (costs[0], costs[len(costs) // 3], costs[len(costs) // 2], costs[-1]):
        picked = program.solve(limit)
        best = min(surrogate.loss(p) for p in every if surrogate.cost(p) <= limit)
        assert picked is not None and picked.cost <= limit * (1 + 1e-5)
        assert picked.loss == pytest.approx(best, rel=1e-4, abs=1e-9)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.usefixtures("most_combinations")
def test_limits_of_two_costs(seed: int) -> None:
    space, surrogate = random_surrogate(seed)
    rng, every = random.Random(seed + 100), points(space)
    other = CostConstraint("other", random_terms(rng, space), 7.0, math.inf)
    for _ in range(2):
        some, tighter = (rng.choice(every) for _ in range(2))
        first, second = surrogate.cost(some), other.cost(some)
        program = Knapsack(space, replace(surrogate, constraints=[replace(other, most=second)]))
        least = min(surrogate.cost(p) for p in every if other.cost(p) <= second)
        assert program.range is not None and program.range[0] == pytest.approx(least)
        for limit, most in ((first, second), (surrogate.cost(tighter), min(second, other.cost(tighter)))):
            picked = program.solve(limit, {"other": most})
            kept = [p for p in every if surrogate.cost(p) <= limit and other.cost(p) <= most]
            assert (picked is None) == (not kept)
            if picked is not None:
                assert picked.cost <= limit * (1 + 1e-5) and other.cost(picked.bits) <= most * (1 + 1e-5)
                assert picked.loss == pytest.approx(min(map(surrogate.loss, kept)), rel=1e-4)
        assert program.solve(first) == program.solve(first, {"other": second}) is not None
        assert program.solve(None, {"other": min(map(other.cost, every)) * 0.9}) is None


@pytest.mark.usefixtures("most_combinations")
def test_limits_that_no_point_is_expected_to_keep_are_ignored() -> None:
    space = make_space({"a:0": (8, 4)})
    surrogate = Surrogate("size", {"a:0": {8: 0.0, 4: 1.0}}, [Term(("a:0",), {(8,): 8.0, (4,): 4.0})])
    against = CostConstraint("other", [Term(("a:0",), {(8,): 4.0, (4,): 8.0})], 0.0, 4.0)

    def picked(most: float, own: float | None, limit: float) -> Bits | None:
        found = Knapsack(space, replace(surrogate, limit=own, constraints=[replace(against, most=most)])).solve(limit)
        return None if found is None else found.bits

    assert picked(3.0, None, 4.0) == {"a:0": 4} and picked(3.0, None, 3.0) is None
    # each limit can be kept, and not both
    assert picked(4.0, 4.0, 4.0) == {"a:0": 4}
    assert picked(4.0, None, 4.0) is None and picked(4.0, 8.0, 8.0) == {"a:0": 8}


@pytest.mark.usefixtures("most_combinations")
def test_groups_that_share_an_accumulator() -> None:
    space = make_space({"a:0": (8, 7, 6, 5), "a:1": (8, 7, 6, 5), "b:0": (8, 4)})
    losses = {"a:0": {8: 0, 7: 1, 6: 3, 5: 9}, "a:1": {8: 0, 7: 4, 6: 9, 5: 20}, "b:0": {8: 0, 4: 1}}
    program = Knapsack(space, Surrogate("", losses, ()), [AccumulatorLimit(("a:0", "a:1"), 13)])
    picked = program.solve(None)
    assert picked is not None and picked.bits == {"a:0": 6, "a:1": 7, "b:0": 8}


@pytest.mark.usefixtures("most_combinations")
def test_ties_go_to_the_lower_cost() -> None:
    space = make_space({"a:0": (8, 4)})
    surrogate = Surrogate("", {"a:0": {8: 1.0, 4: 1.0}}, [Term(("a:0",), {(8,): 2.0, (4,): 1.0})])
    picked = Knapsack(space, surrogate).solve(None)
    assert picked is not None and picked.bits == {"a:0": 4}


@pytest.mark.parametrize("seed", range(8))
def test_merged_groups_hold_every_point_that_no_other_beats(seed: int) -> None:
    """Sums over merged choices are those of the points that they stand for, and no front loses a point."""
    space, surrogate = random_surrogate(seed)
    other = CostConstraint("other", random_terms(random.Random(seed + 50), space), 3.0, math.inf)
    surrogate = replace(surrogate, constraints=[other])
    choices = {key: group.choices for key, group in space.groups.items()}
    merged = merge_groups(choices, surrogate, ())
    assert len(merged.choices) == 3 and set(merged.combinations) == set(merged.choices)
    left, (costs,) = {}, merged.surrogate.constraints
    for combination in itertools.product(*merged.choices.values()):
        point = dict(zip(merged.choices, combination, strict=True))
        bits = merged.bits(point)
        figures = (surrogate.loss(bits), surrogate.cost(bits), other.cost(bits))
        assert figures == pytest.approx(
            (merged.surrogate.loss(point), merged.surrogate.cost(point), costs.cost(point)), rel=1e-12
        )
        assert list(bits) == list(space.groups)
        left[tuple(bits.values())] = figures
    for bits in points(space):
        mine = surrogate.loss(bits), surrogate.cost(bits), other.cost(bits)
        assert any(all(a <= b * (1 + 1e-12) for a, b in zip(f, mine, strict=True)) for f in left.values())


def test_what_joins_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Terms of any cost, gates and accumulators do, next to each other in the space or not, up to a number."""
    space = make_space({f"{key}:0": (8, 4) for key in "abcdefg"})
    choices = {key: group.choices for key, group in space.groups.items()}

    def term(*keys: str) -> Term:
        return Term(keys, {bits: float(sum(bits)) for bits in itertools.product((8, 4), repeat=len(keys))})

    surrogate = Surrogate(
        "size",
        {key: {8: 0.0, 4: 1.0} for key in choices},
        [term("a:0", "c:0")],
        constraints=[CostConstraint("other", [term("b:0", "d:0")], 0.0, 12.0)],
        gates={"e:0": ("f:0",)},
    )
    merged = merge_groups(choices, surrogate, [AccumulatorLimit(("f:0", "g:0"), 12)])
    assert {key: set(points[0]) for key, points in merged.combinations.items()} == {
        "a:0": {"a:0", "c:0"},
        "b:0": {"b:0", "d:0"},
        "e:0": {"e:0", "f:0", "g:0"},
    }
    assert list(merged.bits({"e:0": 0, "b:0": 0, "a:0": 0})) == list(choices)
    picked = Knapsack(space, surrogate).solve(16.0)
    assert picked is not None and picked.bits["b:0"] + picked.bits["d:0"] == 12
    monkeypatch.setattr(merged_groups, "_MOST_COMBINATIONS", 4)
    few = merge_groups(choices, surrogate, [AccumulatorLimit(("f:0", "g:0"), 12)])
    assert set(few.combinations) == {"a:0", "b:0"} and few.choices["g:0"] == (8, 4)
    assert set(few.surrogate.gates) == {"e:0"} and len(few.accumulator_limits) == 1


def test_of_equal_combinations_the_first_choice_is_left() -> None:
    """A node that is float loses nothing and costs the same at any bits of its weight: it keeps the most."""
    space = make_space({"n:1": (8, 6, 4), "k:0": (INTEGER, FLOAT)})
    rows = {(b, k): 32.0 if k == FLOAT else float(b) for b in (8, 6, 4) for k in (INTEGER, FLOAT)}
    losses = {"n:1": {8: 0.5, 6: 2.0, 4: 2.0}}
    surrogate = Surrogate("", losses, [Term(("n:1", "k:0"), rows)], gates={"k:0": ("n:1",)})
    merged = merge_groups({key: group.choices for key, group in space.groups.items()}, surrogate, ())
    (left,) = merged.combinations.values()
    assert left == [
        {"n:1": 8, "k:0": INTEGER},
        {"n:1": 8, "k:0": FLOAT},
        {"n:1": 4, "k:0": INTEGER},  # 6 bits lose as much
    ]


def test_a_limit_that_a_solution_keeps_is_not_solved_again(monkeypatch: pytest.MonkeyPatch) -> None:
    space, surrogate = random_surrogate(5)
    costs = sorted(map(surrogate.cost, points(space)))
    limits = [*random.Random(0).sample(costs, 20), None, costs[-1] * 2, None]
    solved: list[int] = []
    solve = Knapsack._solve
    monkeypatch.setattr(Knapsack, "_solve", lambda self, *a: (solved.append(1), solve(self, *a))[1])
    program = Knapsack(space, surrogate)
    found = [program.solve(limit) for limit in limits]
    assert len(solved) < len(limits) - 3  # None and what is above the largest cost have one solution
    assert found == [Knapsack(space, surrogate).solve(limit) for limit in limits]
    count = len(solved)
    earlier = Knapsack(space, replace(surrogate, merges=False))
    assert earlier.solve(None) == earlier.solve(None) and len(solved) == count + 2


def test_merged_groups_without_a_combination_have_no_solution() -> None:
    alone = make_space({"a:0": (8, 7)})
    assert Knapsack(alone, Surrogate("", {}, ()), [AccumulatorLimit(("a:0",), 6)]).solve(None) is None
    space = make_space({"a:0": (8, 7), "a:1": (8, 7), "b:0": (8, 4)})
    surrogate = Surrogate("", {}, [Term(("a:0", "a:1"), {(6, 6): 1.0})])
    assert Knapsack(space, surrogate).solve(None) is None
    assert Knapsack(space, Surrogate("", {}, ()), [AccumulatorLimit(("a:0", "a:1"), 13)]).solve(None) is None


# ---------------------------------------------------------------- corrections
def measured(score: Score) -> float:
    return float(score.results["loss"])


def test_factors_correct_wrong_expectations() -> None:
    space = make_space({f"g{i}:0": (8, 4) for i in range(3)})
    surrogate = Surrogate("", {k: {8: 0.01, 4: 1.0} for k in space.groups}, (), loss_of_score=measured)
    truth = {k: {8: f, 4: f} for k, f in {"g0:0": 4.0, "g1:0": 1.0, "g2:0": 1.0}.items()}

    def score(bits: Bits) -> Score:
        return Score(0.0, {"loss": surrogate.corrected(truth).loss(bits)})

    one_low = [{**space.widest(), k: 4} for k in space.groups]
    found = fit_factors(surrogate, [(b, score(b)) for b in one_low])
    assert found["g0:0"][4] > 1.15 * found["g1:0"][4] and found["g1:0"][4] == pytest.approx(found["g2:0"][4])
    # what was measured at one choice tells of the other one of its group, but less
    assert found["g0:0"][4] > found["g0:0"][8] > found["g1:0"][8]
    assert (
        fit_factors(surrogate, []) == {}
        and fit_factors(plain_surrogate(space), [(one_low[0], score(one_low[0]))]) == {}
    )
    same = fit_factors(surrogate, [(b, Score(0.0, {"loss": 3 * surrogate.loss(b)})) for b in one_low])
    assert all(f == pytest.approx(3.0, rel=0.01) for by in same.values() for f in by.values())
    broken = [(one_low[0], Score(0.0, {"loss": math.nan})), (one_low[1], Score(0.0, {"loss": 0.0}))]
    assert fit_factors(surrogate, broken) == {}


# ---------------------------------------------------------------- guided searches
def toy(limit: float | None = None, minimize: bool = False) -> tuple[Space, Surrogate]:
    """Forty groups; the measured loss is the expected one times a factor that differs by group."""
    rng = random.Random(0)
    space = make_space({f"n{i}:0": (8, 7, 6, 5, 4) for i in range(40)})
    sizes = {k: 10 ** rng.uniform(-3, 0) for k in space.groups}
    losses = {k: {b: sizes[k] * 4.0 ** (8 - b) for b in g.choices} for k, g in space.groups.items()}
    terms = [Term((k,), {(b,): b * 10.0 for b in g.choices}) for k, g in space.groups.items()]
    return space, Surrogate("size", losses, terms, limit=limit, minimize=minimize, loss_of_score=measured)


def squares(space: Space, most: float) -> CostConstraint:
    """A cost that grows faster than the bits."""
    terms = [Term((k,), {(b,): float(b * b) for b in g.choices}) for k, g in space.groups.items()]
    return CostConstraint("other", terms, 0.0, most)


def evaluation(surrogate: Surrogate, keep: float = math.inf):
    rng = random.Random(1)
    drawn = {k: rng.choice([0.5, 1.0, 2.0]) for k in surrogate.losses}
    truth = surrogate.corrected({k: dict.fromkeys(by, drawn[k]) for k, by in surrogate.losses.items()})

    def evaluate(bits: Bits) -> Score:
        loss, size = truth.loss(bits), surrogate.cost(bits)
        over = max(0.0, size / surrogate.limit - 1) if surrogate.limit else max(0.0, loss / keep - 1)
        value = -size if surrogate.minimize else -loss
        return Score(value, {"loss": loss}, costs={"size": size}, shortfall=over, total_bits=sum(bits.values()))

    return truth, evaluate


@pytest.mark.parametrize(("name", "most", "off"), [("sensitivity", 60, 1.15), ("limited", 32, 1.2)])
def test_a_guided_search_comes_close_to_the_best_under_a_limit(name: str, most: int, off: float) -> None:
    space, surrogate = toy(limit=2400.0)
    truth, evaluate = evaluation(surrogate)
    best = Knapsack(space, truth).solve(2400.0)
    searcher = make_searcher(name, space, surrogate=surrogate)
    result = run_study(space, searcher, evaluate)
    assert best is not None and result.score.accepted and result.score.costs["size"] <= 2400
    assert result.score.results["loss"] <= off * best.loss
    assert len(result.trials) <= most


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("minimize", [False, True])
def test_limited_search_keeps_limits_that_some_point_keeps(seed: int, minimize: bool) -> None:
    """Small spaces whose points are all evaluated: costs and losses deviate from expectations, and limits are tight."""
    space, surrogate = random_surrogate(seed)
    rng, every = random.Random(seed), points(space)
    other = replace(squares(space, 0.0), most=0.0)
    real = {k: {b: rng.uniform(0.7, 1.4) for b in by} for k, by in surrogate.losses.items()}
    off = {k: rng.uniform(0.0, 0.05) for k in space.groups}
    truth = surrogate.corrected(real)

    def costs(bits: Bits) -> dict[str, float]:
        more = sum(off[k] * b for k, b in bits.items())
        return {"size": surrogate.cost(bits) * (1 + more / 100), "other": other.cost(bits) + more}

    # limits that a few points keep
    here = sorted(every, key=lambda p: costs(p)["size"])[len(every) // 20]
    most = {name: value * 1.001 for name, value in costs(here).items()}
    keep = truth.loss(here) * 1.001
    surrogate = replace(surrogate, loss_of_score=measured, minimize=minimize)
    if not minimize:
        surrogate = replace(surrogate, limit=most["size"], constraints=[replace(other, most=most["other"])])

    def evaluate(bits: Bits) -> Score:
        found, loss = costs(bits), truth.loss(bits)
        over = [found[n] / most[n] - 1 for n in most] if not minimize else [loss / keep - 1]
        value = -found["size"] if minimize else -loss
        shortfall = sum(max(0.0, x) for x in over)
        return Score(value, {"loss": loss}, costs=found, shortfall=shortfall, total_bits=sum(bits.values()))

    result = run_study(space, make_searcher("limited", space, surrogate=surrogate), evaluate)
    again = run_study(space, make_searcher("limited", space, surrogate=surrogate), evaluate)
    best = max((evaluate(p) for p in every), key=lambda s: s.rank)
    assert best.accepted and result.score.accepted
    assert [t.bits for t in again.trials] == [t.bits for t in result.trials]
    # separable: all but what is within noise of the best is found
    assert result.score.value >= best.value - 0.1 * abs(best.value)


def test_a_limit_is_kept_where_points_cost_more_than_expected() -> None:
    space, surrogate = toy(limit=2400.0)
    other = squares(space, 1300.0)
    surrogate = replace(surrogate, constraints=[other])

    def evaluate(bits: Bits) -> Score:
        costs = {"size": surrogate.cost(bits), "other": 1.03 * other.cost(bits)}
        over = max(0.0, costs["size"] / 2400 - 1) + max(0.0, costs["other"] / 1300 - 1)
        loss = surrogate.loss(bits)
        return Score(-loss, {"loss": loss}, costs=costs, shortfall=over, total_bits=sum(bits.values()))

    searcher = make_searcher("sensitivity", space, surrogate=surrogate, options={"rounds": 1, "moves": 0})
    result = run_study(space, searcher, evaluate)
    best = Knapsack(space, replace(surrogate, constraints=[replace(other, most=1300 / 1.03)])).solve(2400.0)
    assert best is not None and result.score.accepted and result.score.results["loss"] <= 1.3 * best.loss


def test_infeasible_points_have_their_expected_cost() -> None:
    space, surrogate = toy(limit=2005.0)
    other = squares(space, 1001.0)
    surrogate = replace(surrogate, constraints=[other])
    start, asked = dict.fromkeys(space.groups, 5), []

    def refuse(bits: Bits) -> Score:
        asked.append(bits)
        raise InfeasibleBits("no signature holds these bits")

    with pytest.raises(InfeasibleBits, match="of .* points tried, none fits"):
        run_study(space, make_searcher("sensitivity", space, start, surrogate=surrogate), refuse)
    # around the start one bit more misses the first limit, and one more with one less the second
    assert len(asked) > 10 and all(surrogate.cost(p) <= 2005 and other.cost(p) <= 1001 for p in asked)


@pytest.mark.parametrize(("name", "most"), [("sensitivity", 100), ("limited", 50)])
def test_a_guided_search_finds_the_least_cost_that_keeps_a_limit(name: str, most: int) -> None:
    space, surrogate = toy(minimize=True)
    keep = surrogate.loss(space.widest()) * 100
    truth, evaluate = evaluation(surrogate, keep)
    result = run_study(space, make_searcher(name, space, surrogate=surrogate), evaluate)
    fronts = (Knapsack(space, truth).solve(cost) for cost in range(1600, 3210, 10))
    least = next(p.cost for p in fronts if p is not None and p.loss <= keep)
    assert result.score.accepted and result.score.costs["size"] <= 1.02 * least
    assert len(result.trials) <= most


def test_pareto_search_covers_the_front_and_can_be_stopped() -> None:
    space, surrogate = toy()
    truth, evaluate = evaluation(surrogate)
    whole = run_study(space, make_searcher("pareto", space, surrogate=surrogate, options={"points": 20}), evaluate)
    stopped = run_study(
        space, make_searcher("pareto", space, surrogate=surrogate, options={"points": 20}), evaluate, budget=9
    )
    assert [t.bits for t in stopped.trials] == [t.bits for t in whole.trials[:9]]
    program = Knapsack(space, truth)
    for trials, off in ((stopped.trials, 4.0), (whole.trials, 2.0)):
        sizes = sorted(t.score.costs["size"] for t in trials)
        assert (sizes[0], sizes[-1]) == (1600, 3200)
        # wherever one looks, a point found is not much worse than the best of that size
        for limit in range(1700, 3200, 150):
            best = program.solve(limit)
            mine = min(t.score.results["loss"] for t in trials if t.score.costs["size"] <= limit)
            assert best is not None and mine <= off * best.loss


def test_a_point_without_any_loss_does_not_draw_the_front_to_it() -> None:
    """As where every layer is float: the logarithm of its loss is without end."""
    space, surrogate = toy()
    exact = replace(surrogate, losses={k: {**by, max(by): 0.0} for k, by in surrogate.losses.items()})
    _, evaluate = evaluation(exact)

    def sizes(**options: float) -> list[float]:
        searcher = make_searcher("pareto", space, surrogate=exact, options={"points": 10, "rounds": 1, **options})
        return [t.score.costs["size"] for t in run_study(space, searcher, evaluate).trials]

    spread, drawn = sizes(), sizes(least_loss=0.0)
    assert len(spread) == len(drawn)
    assert sum(size < 2400 for size in spread) > sum(size < 2400 for size in drawn)


@pytest.mark.parametrize("seed", range(4))
def test_pareto_search_fills_the_gaps_that_it_measures(seed: int) -> None:
    space, surrogate = toy()
    _, evaluate = evaluation(surrogate)
    # what is expected of a group is up to 16 times what is measured, or a 16th
    rng = random.Random(seed)
    off = {k: 16.0 ** rng.uniform(-1.0, 1.0) for k in surrogate.losses}
    wrong = replace(surrogate, losses={k: {b: x * off[k] for b, x in by.items()} for k, by in surrogate.losses.items()})

    def area(options: dict[str, float]) -> float:
        result = run_study(space, make_searcher("pareto", space, surrogate=wrong, options=options), evaluate)
        assert len(result.trials) == 24
        found = [(t.score.costs["size"], -math.log(t.score.results["loss"])) for t in result.trials]
        return sum(max(merit for cost, merit in found if cost <= size) for size in range(1600, 3210, 10))

    assert area({"points": 12, "rounds": 3, "gain": 0.0}) > area({"points": 24, "rounds": 1})


def test_pareto_search_ends_with_the_round_that_adds_little() -> None:
    space, surrogate = toy()
    _, evaluate = evaluation(surrogate)

    def trials(gain: float) -> list[Bits]:
        options = {"points": 12, "rounds": 9, "gain": gain}
        result = run_study(space, make_searcher("pareto", space, surrogate=surrogate, options=options), evaluate)
        return [t.bits for t in result.trials]

    whole, some, least = trials(0.0), trials(0.01), trials(0.999)
    # the widest point, round 1, and half as many in round 2, which never adds nearly all
    assert len(least) == 1 + 12 - 1 + 6 < len(some) < len(whole)
    assert some == whole[: len(some)] and least == whole[: len(least)]


def test_the_area_that_a_front_adds_to_another() -> None:
    def line(*points: tuple[float, float]) -> list[MeasuredPoint]:
        return [MeasuredPoint(cost, merit, {}) for cost, merit in points]

    one = line((1.0, 2.0), (math.e, 4.0), (math.e**3, 5.0))
    assert area_added(one, one) == 0.0
    # merits above 2 between e and e^3, times 2; the new point is 1 higher from e^2 on
    assert area_added(one, line((1.0, 2.0), (math.e, 4.0), (math.e**2, 4.5), (math.e**3, 5.0))) == pytest.approx(
        0.5 / 4.5
    )
    # the cheapest gets better: areas count from the same merit
    assert area_added(one, line((1.0, 3.0), (math.e, 4.0), (math.e**3, 5.0))) == pytest.approx(1.0 / 5.0)
    assert (
        area_added([], one) == 1.0
        and area_added([], []) == 0.0
        and area_added(line((1.0, 2.0)), line((1.0, 2.0))) == 0.0
    )


def test_neighbours_of_a_front_are_ranked_by_the_area_that_they_add() -> None:
    space = make_space({"a:0": (8, 6, 4), "b:0": (8, 4)})
    losses = {"a:0": {8: 1.0, 6: 2.0, 4: 3.0}, "b:0": {8: 1.0, 4: 2.0}}
    terms = [Term((k,), {(b,): float(b) for b in g.choices}) for k, g in space.groups.items()]
    surrogate = Surrogate("size", losses, terms, loss_of_score=measured)
    # the cheap point was measured to be worse than expected: what is next to the good one is worth more
    line = [
        MeasuredPoint(8.0, -math.log(20.0), {"a:0": 4, "b:0": 4}),
        MeasuredPoint(16.0, -math.log(2.0), space.widest()),
    ]
    near = list(front_neighbours(space, surrogate, line, {}))
    # both cost 12, and b at 4 bits is expected to lose 3, a at 4 bits 4; a at 6 bits costs 14
    assert near[0] == {"a:0": 8, "b:0": 4} and near[1] == {"a:0": 4, "b:0": 8}
    assert {"a:0": 6, "b:0": 8} in near and space.widest() not in near
    assert all(sum(p.values()) <= 13 for p in front_neighbours(space, surrogate, line, {("a:0", "b:0"): 13}))
    floats = replace(surrogate, gates={"b:0": ("a:0",)})
    gated = [replace(p, bits={**p.bits, "b:0": FLOAT}) for p in line]
    assert list(front_neighbours(space, replace(surrogate, terms=terms[:1]), gated, {}))
    assert not list(front_neighbours(space, replace(floats, terms=terms[:1]), gated, {}))


def test_overflow_lowers_the_limit_of_an_accumulator() -> None:
    space = make_space({"a:0": (8, 7, 6, 5, 4), "a:1": (8, 7, 6, 5, 4)})
    losses = {"a:0": {b: 4.0**-b for b in range(4, 9)}, "a:1": {b: 70 * 4.0**-b for b in range(4, 9)}}
    surrogate = Surrogate("", losses, (), loss_of_score=None)

    def evaluate(bits: Bits) -> Score:
        excess = sum(bits.values()) - 12
        over = {"a": excess} if excess > 0 else {}
        return Score(-surrogate.loss(bits), overflows=over, excess_bits=over, total_bits=sum(bits.values()))

    result = run_study(space, make_searcher("sensitivity", space, surrogate=surrogate), evaluate)
    assert result.bits == {"a:0": 4, "a:1": 8}


def test_invalid_options_are_refused() -> None:
    from hago.errors import HagoError

    for name, option in (("sensitivity", "moves"), ("sensitivity", "rounds"), ("pareto", "points")):
        with pytest.raises(HagoError, match="expected 1 or more"):
            make_searcher(name, TOY, options={option: -1})
    with pytest.raises(HagoError, match="expected a text"):
        make_searcher("pareto", TOY, options={"cost": 3})
    for gain in (-0.1, 1.0):
        with pytest.raises(HagoError, match="0 <= gain < 1"):
            make_searcher("pareto", TOY, options={"gain": gain})
    with pytest.raises(HagoError, match="least_loss -1.0; expected a loss, 0 or more"):
        make_searcher("pareto", TOY, options={"least_loss": -1.0})
