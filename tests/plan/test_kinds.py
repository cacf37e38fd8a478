"""Nodes that are integer or float by choice: the Plans, costs and strategies of such points."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from building import Builder, residual_block, seeded
from cost.test_cost import priced

from hago.arithmetic.types import dtype
from hago.cost.cost import float_cost, plan_cost
from hago.hardware.file import load_hardware
from hago.hardware.hardware import Accumulator, Hardware, OpDesc
from hago.plan.space import FLOAT, INTEGER, kind_key
from hago.plan.strategy import Strategy
from hago.plan.topology import analyze
from hago.runtime.exactness import compare_plan_exactly
from hago.search.goal import GoalOptions, make_goal
from hago.search.guidance import make_surrogate
from hago.search.preparation import Prepared, QuantizationOptions, prepare
from hago.search.replay import replay_log
from hago.search.session import SearchOptions, run_search
from hago.search.stored_strategy import make_strategy, plan_of, stored_resolver
from hago.searchers.knapsack import Knapsack

DATA = [(seeded(8, 3, 8, 8, seed=s), torch.arange(8) % 5) for s in range(2)]
CHIPS = {name: priced(load_hardware(name)) for name in ("x86_vnni", "arm_dot")}


@pytest.fixture(scope="module", params=CHIPS)
def prepared(request: pytest.FixtureRequest) -> Prepared:
    return prepare(residual_block(), CHIPS[request.param], DATA, QuantizationOptions(search_topology=True))


def points(prepared: Prepared, count: int) -> list[dict[str, int]]:
    rng = random.Random(0)
    return [{k: rng.choice(g.choices) for k, g in prepared.space.groups.items()} for _ in range(count)]


# ---------------------------------------------------------------- plans of points
def test_only_nodes_with_groups_have_a_kind(prepared: Prepared) -> None:
    kinds = {g.source for g in prepared.space.groups.values() if g.is_kind}
    assert {"stem", "left", "right", "fc", "add", "flat"} >= kinds >= {"stem", "left", "right", "fc"}
    ends = (prepared.space.widest(), prepared.space.narrowest())
    assert all(bits[kind_key(n)] == INTEGER for bits in ends for n in kinds)


def test_a_point_has_the_plan_of_its_topology(prepared: Prepared) -> None:
    for bits in points(prepared, 12):
        floats = prepared.space.floats(bits)
        plan = prepared.resolver(bits)
        topology = analyze(prepared.graph, prepared.hardware, sorted(floats))
        assert {n for n, integer in topology.nodes.items() if integer} == set(plan.nodes)
        plain = prepare(residual_block(), prepared.hardware, DATA, QuantizationOptions(keep_float=sorted(floats)))
        own = {k: bits.get(k, g.choices[0]) for k, g in plain.space.groups.items()}
        assert plain.resolver(own).key == plan.key


def test_bits_of_a_float_node_have_no_effect(prepared: Prepared) -> None:
    space = prepared.space
    bits = {**space.widest(), kind_key("left"): FLOAT}
    inert = [k for k in ("left:0", "left:1", "left:out") if k in space.groups]
    keys = {prepared.resolver({**bits, k: b}).key for k in inert for b in space.groups[k].choices}
    assert len(keys) == 1


def test_simulation_equals_integers_in_every_topology(prepared: Prepared) -> None:
    for bits in points(prepared, 4):
        assert not compare_plan_exactly(prepared.resolver(bits), [DATA[0][0]]).differences


def test_strategies_with_kinds_are_saved_and_loaded(prepared: Prepared, tmp_path: Path) -> None:
    for number, bits in enumerate(points(prepared, 6)):
        plan = prepared.resolver(bits)
        made = make_strategy(prepared, plan, bits, {"keep_float": []})
        made.save(tmp_path / f"{number}.json")
        again = plan_of(prepared.graph, prepared.hardware, Strategy.load(tmp_path / f"{number}.json"))
        assert again.key == plan.key and not any(k.endswith(":kind") for k in made.bits)


def test_the_user_and_the_search_are_told_apart(prepared: Prepared) -> None:
    """Reasons say who keeps a node float."""
    kept = prepare(
        residual_block(), prepared.hardware, DATA, QuantizationOptions(keep_float="fc", search_topology=True)
    )
    bits = {**kept.space.widest(), kind_key("left"): FLOAT}
    made = make_strategy(kept, kept.resolver(bits), bits, {"keep_float": ["fc"]})
    assert made.made_by["keep_float"] == ["fc", "left"] and made.made_by["chosen_float"] == ["left"]
    for resolver in (kept.resolver.variant_at(bits)[0], stored_resolver(kept.graph, kept.hardware, made)):
        assert {n: resolver.topology.reasons[n] for n in ("fc", "left")} == {
            "fc": "kept float by the user",
            "left": "the search chose float",
        }


# ---------------------------------------------------------------- costs
@pytest.mark.parametrize("metric", ["bops", "weight_bytes", "cycles", "energy"])
def test_one_float_node_costs_what_is_expected(prepared: Prepared, metric: str) -> None:
    start = prepared.space.widest()
    surrogate = make_surrogate(prepared, make_goal(GoalOptions("sqnr")), start, metric=metric)
    for key in surrogate.gates:
        bits = {**start, key: FLOAT}
        assert surrogate.cost(bits) == pytest.approx(plan_cost(prepared.resolver(bits))[metric], rel=0.02)
        assert surrogate.loss(bits) < surrogate.loss(start)


def test_conversions_between_float_and_integer_cost(prepared: Prepared) -> None:
    start = prepared.space.widest()
    before = plan_cost(prepared.resolver(start))
    after = plan_cost(prepared.resolver({**start, kind_key("left"): FLOAT}))
    crossed = [sum(e.kind in ("quantize", "dequantize") for e in cost.edges) for cost in (before, after)]
    assert crossed[1] > crossed[0]
    floats = {k: FLOAT if g.is_kind else g.choices[0] for k, g in prepared.space.groups.items()}
    plan = prepared.resolver(floats)
    if not plan.nodes:
        assert plan_cost(plan).figures == float_cost(plan).figures


def test_the_program_chooses_kinds(prepared: Prepared) -> None:
    start = prepared.space.widest()
    surrogate = make_surrogate(prepared, make_goal(GoalOptions("sqnr")), start, metric="bops")
    program = Knapsack(prepared.space, surrogate)
    whole = program.solve(None)
    assert whole is not None and prepared.space.floats(whole.bits) == {g.rpartition(":")[0] for g in surrogate.gates}
    assert whole.loss == pytest.approx(0.0, abs=1e-6)
    assert program.range is not None
    least = program.solve(program.range[0] * (1 + 1e-9))
    macs = {"stem", "left", "right", "fc"}  # others have no operations to count
    assert least is not None and not macs & prepared.space.floats(least.bits)
    middle = program.solve((whole.cost + least.cost) / 2)
    assert middle is not None and 0 < len(macs & prepared.space.floats(middle.bits)) < len(macs)
    assert least.loss > middle.loss > whole.loss


# ---------------------------------------------------------------- searches
def test_a_search_keeps_nodes_float_where_it_is_cheaper(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    options = {"budget_cost": "bops <= 4M", "progress": False, "budget": 30}
    free = run_search(residual_block(), "x86_vnni", DATA, SearchOptions.of("sensitivity", log=log, **options))
    fixed = run_search(
        residual_block(), "x86_vnni", DATA, SearchOptions.of("sensitivity", search_topology=False, **options)
    )
    assert free.result.score.costs["bops"] <= 4e6 and fixed.result.score.costs["bops"] <= 4e6
    assert free.result.score.results["sqnr"] > fixed.result.score.results["sqnr"] + 3
    assert free.strategy.made_by["keep_float"] and not fixed.strategy.made_by["keep_float"]
    again = replay_log(residual_block(), "x86_vnni", log, DATA, None, best_only=False)
    assert again.same and again.trials > 3


@pytest.mark.parametrize(
    ("float_rate", "requantize_rate", "floats"),
    [(12, 1e9, {"one", "two"}), (4, 1e9, set()), (4, 0.05, {"one", "two"})],
)
def test_the_cheaper_kind_is_chosen(float_rate: float, requantize_rate: float, floats: set[str]) -> None:
    """If requantization is slow, a float network is the cheapest."""
    b = Builder()
    x = b.input(6, name="x")
    hidden = b.call("relu", b.linear(x, seeded(8, 6, seed=1), name="one"), name="relu")
    b.linear(hidden, seeded(4, 8, seed=2), name="two")
    acc = Accumulator(dtype("int32"))
    mac = OpDesc(["int8", "int8"], "int8", acc, "output", min_bits=8, cost={"macs_per_cycle": 8})
    ops = {"linear": [mac, OpDesc("float32", "float32", cost={"macs_per_cycle": float_rate})]}
    ops["relu"] = [OpDesc(t, t, cost={"elements_per_cycle": 8}) for t in ("int8", "float32")]
    chip = Hardware(ops, name="crossing", cost={"requantize_per_cycle": requantize_rate})
    for searcher in ("exhaustive", "greedy", "sensitivity"):
        options = SearchOptions.of(searcher, minimize="cycles", keep="sqnr >= -99", progress=False)
        found = run_search(b.graph(), chip, [seeded(64, 6, seed=3)], options)
        assert set(found.strategy.made_by["keep_float"]) == floats, searcher


def test_bytes_alone_turn_nothing_float() -> None:
    found = run_search(
        residual_block(),
        "x86_vnni",
        DATA,
        SearchOptions.of("default", budget_cost="weight_bytes <= 400", progress=False),
    )
    assert not any(k.endswith(":kind") for k in found.result.best.bits)
