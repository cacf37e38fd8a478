"""Guides: their costs against those of plans, spaces without waste, and guided searches end to end."""

from __future__ import annotations

import json
import random
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import pytest
import torch
from building import Builder, residual_block, seeded
from cost.test_cost import priced
from torch import Tensor

from hago import search_quantize_strategy
from hago.cost.cost import METRICS, Cost, Metric, plan_cost
from hago.errors import HagoWarning, InfeasibleBits
from hago.graph.graph import CONST
from hago.hardware.file import available_hardware, load_hardware
from hago.hardware.hardware import Hardware, OpDesc
from hago.plan.feasibility import choices_by_dtype
from hago.plan.plan import Plan
from hago.plan.resolve import Resolver
from hago.plan.space import Bits
from hago.search import redundancy
from hago.search.goal import GoalOptions, make_goal
from hago.search.guidance import make_surrogate
from hago.search.objective import OBJECTIVES, Curvature, Objective, squared_error_probe, squared_error_pull
from hago.search.preparation import Prepared, prepare
from hago.search.redundancy import prune_redundant_choices
from hago.search.replay import replay_log
from hago.search.session import SearchOptions, run_search
from hago.study.log import read_log
from hago.study.loop import StudyResult
from hago.study.score import Score

DATA = [(seeded(8, 3, 8, 8, seed=s), torch.arange(8) % 5) for s in range(2)]


@pytest.fixture(scope="module", params=available_hardware())
def prepared(request: pytest.FixtureRequest) -> Prepared:
    return prepare(residual_block(), priced(load_hardware(request.param)), DATA)


# ---------------------------------------------------------------- costs
@pytest.mark.parametrize("metric", ["weight_bytes", "effective_bits", "bops"])
def test_expected_bytes_and_operations_are_those_of_plans(prepared: Prepared, metric: str) -> None:
    space, rng = prepared.space, random.Random(0)
    surrogate = make_surrogate(prepared, make_goal(GoalOptions("sqnr")), space.widest(), metric=metric)
    for _ in range(2):
        bits = {k: rng.choice(g.choices) for k, g in space.groups.items()}
        assert surrogate.cost(bits) == pytest.approx(plan_cost(prepared.resolver(bits))[metric])


@pytest.mark.parametrize("metric", ["cycles", "energy", "bytes_moved"])
def test_other_expected_costs_are_right_one_step_from_the_start(prepared: Prepared, metric: str) -> None:
    space = prepared.space
    start = space.widest()
    surrogate = make_surrogate(prepared, make_goal(GoalOptions("sqnr", minimize=metric)), start, metric=metric)
    assert surrogate.minimize and surrogate.cost(start) == pytest.approx(plan_cost(prepared.resolver(start))[metric])
    for key, group in space.groups.items():
        bits = {**start, key: group.choices[-1]}
        # an edge between two scales that happen to be equal needs no requantization
        assert surrogate.cost(bits) == pytest.approx(plan_cost(prepared.resolver(bits))[metric], rel=1e-3)


def peak_bytes(cost: Cost) -> float:
    return max(n.read_bytes + n.write_bytes for n in cost.nodes)


#: Costs that hago does not have: a sum over nodes and edges, and a maximum over nodes.
MADE_UP = {
    "written_twice": Metric("written_twice", "B", lambda row, _: 2 * getattr(row, "write_bytes", 0)),
    "peak_bytes": Metric("peak_bytes", "B", total=peak_bytes),
}


@pytest.fixture
def made_up_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, metric in MADE_UP.items():
        monkeypatch.setitem(cast("dict[str, Metric]", METRICS), name, metric)


@pytest.mark.parametrize("metric", MADE_UP)
def test_a_metric_needs_nothing_but_its_entry(metric: str, made_up_metrics: None) -> None:
    """A search is guided by a new cost, minimizes it, limits it and logs it, and warns where the cost is no sum."""
    prepared = prepare(residual_block(), priced(load_hardware("vta")), DATA)
    start = prepared.space.widest()
    total = plan_cost(prepared.resolver(start))[metric]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        guide = make_surrogate(prepared, make_goal(GoalOptions("sqnr", minimize=metric)), start, metric=metric)
    assert [w.category for w in caught] == ([HagoWarning] if MADE_UP[metric].part is None else [])
    assert guide.cost(start) == total
    for key, group in prepared.space.groups.items():
        bits = {**start, key: group.choices[-1]}
        assert guide.cost(bits) == plan_cost(prepared.resolver(bits))[metric]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", HagoWarning)
        options = SearchOptions.of(
            "sensitivity", minimize=metric, keep=("sqnr >= 5 dB", f"{metric} <= {total:g} B"), progress=False
        )
        result = run_search(residual_block(), "vta", DATA, options).result
    assert result.score.costs[metric] <= total and not result.score.shortfall


def mean_error(reference: Sequence[Tensor], outputs: Sequence[Tensor], labels: Tensor | None) -> Tensor:
    errors = [(r - o).abs().flatten(1).double().mean(1) for r, o in zip(reference, outputs, strict=True)]
    return torch.stack(errors, 1).sum(1, keepdim=True)


def test_an_objective_needs_nothing_but_its_entry(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A search is guided by a new loss and its curvature, keeps a limit on it and logs it, without a warning."""
    curvature = Curvature("made up", squared_error_probe, squared_error_pull)
    measure = Objective(
        "mae", mean_error, lambda t: -float(t[0]), loss=lambda c: c[:, -1], is_loss=True, curvature=curvature
    )
    monkeypatch.setitem(cast("dict[str, Objective]", OBJECTIVES), "mae", measure)
    prepared = prepare(residual_block(), "vta", DATA)
    guide = make_surrogate(prepared, make_goal(GoalOptions("mae")), prepared.space.widest())
    score = Score(value=-0.25, results={"mae": -0.25, "sqnr": 20.0}, total_bits=1, plan_key="")
    assert guide.loss_of_score is not None and guide.loss_of_score(score) == 0.25
    log = tmp_path / "search.jsonl"
    with warnings.catch_warnings():
        warnings.simplefilter("error", HagoWarning)
        options = SearchOptions.of(
            "sensitivity", maximize="mae", keep="mae <= 0.5", budget_cost="weight_bytes <= 330", log=log, progress=False
        )
        result = run_search(residual_block(), "vta", DATA, options).result
    assert not result.score.shortfall and result.score.value == result.score.results["mae"] >= -0.5
    assert all("mae" in trial.score.results for trial in read_log(log).trials if trial.score.runs)


def test_limits_reach_the_guide(prepared: Prepared) -> None:
    goal = make_goal(GoalOptions("sqnr", budget_cost=["weight_bytes <= 300", "weight_bytes <= 280"]))
    surrogate = make_surrogate(prepared, goal, prepared.space.widest(), metric="weight_bytes")
    assert (surrogate.limit, surrogate.minimize) == (280, False)


# ---------------------------------------------------------------- spaces without waste
def test_what_is_merged_costs_the_same_and_cannot_overflow(prepared: Prepared) -> None:
    space = prepared.space
    for costs in (["weight_bytes"], ["cycles"], ["energy", "effective_bits"]):
        tidy = prune_redundant_choices(prepared, costs)
        widest = prepared.resolver(space.widest())
        assert tidy.space.groups.keys() == space.groups.keys()
        for key, group in tidy.space.groups.items():
            before = space.groups[key].choices
            assert set(group.choices) <= set(before) and group.choices[0] == before[0]
            for bits in set(before) - set(group.choices):
                kept = min(b for b in group.choices if b > bits)
                low, high = (prepared.resolver({**space.widest(), key: b}) for b in (bits, kept))
                assert [plan_cost(low)[c] for c in costs] == pytest.approx(
                    [plan_cost(high)[c] for c in costs], rel=1e-3
                )
                assert all(widest.nodes[e.dst].proved for e in group.edges if e.dst in widest.nodes)


def test_what_tells_choices_apart_keeps_them(prepared: Prepared) -> None:
    assert prune_redundant_choices(prepared, []) is prepared
    assert prune_redundant_choices(prepared, ["bops"]).space == prepared.space
    weights = {k for k, g in prepared.space.groups.items() if prepared.graph[g.source].op == CONST}
    tidy = prune_redundant_choices(prepared, ["weight_bytes"]).space
    assert all(tidy.groups[k] == prepared.space.groups[k] for k in weights)


def test_int8_holds_eight_bits_where_nothing_overflows() -> None:
    prepared = prepare(residual_block(), "x86_vnni", DATA)
    tidy = prune_redundant_choices(prepared, ["cycles"])
    assert {g.choices for k, g in tidy.space.groups.items() if not k.startswith("add")} == {(8,)}
    narrow = prune_redundant_choices(prepare(residual_block(), "int16_accumulator", DATA), ["cycles"])
    assert narrow.space.groups["stem:0"].choices == (8, 7, 6, 5, 4)


def test_choices_are_cut_where_they_need_another_dtype() -> None:
    b = Builder()
    b.linear(b.input(6, name="x"), seeded(4, 6, seed=1), name="fc")
    narrow, wide = OpDesc(["int4", "int4"], "int32", min_bits=2), OpDesc(["int8", "int8"], "int32", min_bits=2)
    prepared = prepare(b.graph(), Hardware({"linear": [narrow, wide]}), [seeded(8, 6)])
    group = prepared.space.groups["fc:0"]
    assert choices_by_dtype(prepared.resolver, group) == [(8, 7, 6, 5), (4, 3, 2)]
    assert prune_redundant_choices(prepared, ["bytes_moved"]).space.groups["fc:0"].choices == (8, 4)


@pytest.mark.parametrize(
    ("costs", "choices"),
    [(["weight_bytes"], (23,)), (["cycles"], (23, 8)), (["weight_bytes", "cycles"], (23, 8))],
)
def test_values_keep_a_narrower_dtype_for_a_cost_that_counts_it(costs: list[str], choices: tuple[int, ...]) -> None:
    prepared = prune_redundant_choices(prepare(residual_block(), "x86_vnni", DATA), costs)
    assert [g.choices for k, g in prepared.space.groups.items() if k.startswith("add")] == [choices] * 2


def test_a_narrower_dtype_stays_where_others_have_their_choices_beside_it() -> None:
    b = Builder()
    b.linear(b.input(6, name="x"), seeded(4, 6, seed=1), name="fc")
    descs = OpDesc(["int16", "int4"], "int32", min_bits=2), OpDesc(["int8", "int8"], "int32", min_bits=2)
    prepared = prepare(b.graph(), Hardware({"linear": descs}), [seeded(8, 6)])
    assert prune_redundant_choices(prepared, ["weight_bytes"]).space.groups["fc:0"].choices == (16, 8)


@pytest.mark.parametrize("searcher", ["limited", "sensitivity"])
def test_a_log_with_a_choice_for_every_dtype_is_continued(
    searcher: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As logs were begun before."""
    log, options = tmp_path / "log.jsonl", {"budget_cost": "weight_bytes <= 60 %", "progress": False}
    with monkeypatch.context() as patch:
        patch.setattr(redundancy, "may_have_infeasible_points", lambda resolver: True)
        whole = run_search(residual_block(), "x86_vnni", DATA, SearchOptions.of(searcher, log=log, **options))
    lines = log.read_text().splitlines(keepends=True)
    log.write_text("".join(lines[:3]))
    header = read_log(log).header
    pruned = prune_redundant_choices(prepare(residual_block(), "x86_vnni", DATA), ["weight_bytes"])
    assert header is not None and header.space["choices"] > pruned.space.size
    again = run_search(residual_block(), "x86_vnni", DATA, SearchOptions.of(searcher, log=log, **options))
    assert [t.bits for t in again.result.trials] == [t.bits for t in whole.result.trials]
    assert replay_log(residual_block(), "x86_vnni", log, DATA, None, best_only=False).same


# ---------------------------------------------------------------- searches
def test_guided_searches_beat_the_descent() -> None:
    limit = {"budget_cost": "weight_bytes <= 260", "progress": False}
    best = {
        s: run_search(residual_block(), "x86_vnni", DATA, SearchOptions.of(s, **limit))
        for s in ("greedy", "sensitivity")
    }
    values = {name: found.result.score.results["sqnr"] for name, found in best.items()}
    assert values["sensitivity"] >= values["greedy"]
    assert all(found.result.score.costs["weight_bytes"] <= 260 for found in best.values())


def test_two_limits_where_no_signature_holds_some_bits(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    resolve, weights = Resolver.__call__, ("stem:1", "left:1", "right:1", "fc:1")

    def refusing(resolver: Resolver, bits: Bits) -> Plan:
        """Weights of fewer than 7 bits must all have as many."""
        chosen = {bits[k] for k in weights}
        if len(chosen) > 1 and min(chosen) < 7:
            raise InfeasibleBits("no signature holds these bits")
        return resolve(resolver, bits)

    monkeypatch.setattr(Resolver, "__call__", refusing)
    limits, log = ("weight_bytes <= 330", "bops <= 880 k"), tmp_path / "search.jsonl"
    strategy, _ = search_quantize_strategy(
        residual_block(), "x86_vnni", DATA, searcher="sensitivity", budget_cost=limits, log=log, progress=False
    )
    assert any(json.loads(line)["score"]["infeasible"] for line in log.read_text().splitlines()[1:])
    costs = strategy.made_by["costs"]
    assert costs["weight_bytes"] <= 330 and costs["bops"] <= 880e3


def front_of_bops() -> StudyResult:
    return run_search(
        residual_block(), "x86_vnni", DATA, SearchOptions.of("pareto:points=8,cost=bops", progress=False)
    ).result


@pytest.fixture(scope="module")
def front() -> StudyResult:
    return front_of_bops()


def test_a_front_over_a_cost(front: StudyResult) -> None:
    sizes = [t.score.costs["bops"] for t in front.trials]
    assert max(sizes) > 3 * min(sizes) and len(set(sizes)) >= 8


def test_the_front_on_disk_is_over_the_cost_of_the_search(tmp_path: Path) -> None:
    options = {"progress": False, "front": tmp_path / "front.json", "objective": "accuracy"}
    found = run_search(
        residual_block(), "x86_vnni", DATA, SearchOptions.of("pareto:points=6,rounds=1,cost=bops", **options)
    )
    front = json.loads((tmp_path / "front.json").read_text())
    assert front["cost"] == "bops" and front["points"]
    assert max(p["value"] for p in front["points"]) == max(t.results["sim_acc"] for t in found.result.trials)


def test_the_same_front_again(front: StudyResult) -> None:
    assert [t.bits for t in front_of_bops().trials] == [t.bits for t in front.trials]


def test_the_least_cycles_on_a_chip_with_two_widths() -> None:
    """Four bits run twice as fast; the search takes them where little is lost."""
    b = Builder()
    x = b.input(6, name="x")
    hidden = b.call("relu", b.linear(x, seeded(32, 6, seed=1), name="one"), name="relu")
    b.linear(hidden, seeded(4, 32, seed=2), name="two")
    narrow = OpDesc(["int4", "int4"], "int32", min_bits=2, cost={"macs_per_cycle": 16})
    wide = OpDesc(["int8", "int8"], "int32", min_bits=2, cost={"macs_per_cycle": 8})
    move = OpDesc("int32", "int32", cost={"elements_per_cycle": 8})
    chip = Hardware({"linear": [narrow, wide], "relu": [move]}, name="two_widths")
    options = {"minimize": "cycles", "keep": "sqnr >= 18", "progress": False}
    best = {}
    for name in ("sensitivity", "exhaustive"):
        best[name] = run_search(
            b.graph(), chip, [seeded(64, 6, seed=3)], SearchOptions.of(name, **options)
        ).result.score
        assert best[name].results["sqnr"] >= 18
    assert best["sensitivity"].costs["cycles"] == best["exhaustive"].costs["cycles"]
