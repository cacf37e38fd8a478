"""Goals: limits as users write them, the order they put points in, and what cannot be reached."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from building import Builder, residual_block, seeded
from hypothesis import given
from hypothesis import strategies as st
from products import some
from torch import nn

from hago import replay, search_quantize_strategy
from hago.calibration import CHANNEL_BINS
from hago.cost.cost import METRICS, plan_cost
from hago.errors import HagoError, HagoWarning, InfeasibleBits
from hago.hardware.file import load_hardware
from hago.hardware.hardware import OpDesc
from hago.search.evaluate import Evaluator
from hago.search.goal import Goal, GoalOptions, Limit, make_goal, parse_limits, resolved_text
from hago.search.objective import OBJECTIVES, Objective
from hago.search.preparation import prepare
from hago.search.session import SearchOptions, run_search
from hago.search.stored_strategy import plan_of
from hago.study.log import Trial, best_trial, read_log
from hago.study.score import Score

DATA = [(seeded(8, 3, 8, 8, seed=s), torch.arange(8) % 5) for s in range(2)]


# ---------------------------------------------------------------- what users write
@pytest.mark.parametrize(
    ("text", "figure", "least", "most"),
    [
        ("weight_bytes <= 4 MB", "weight_bytes", None, 4e6),
        ("weight_bytes<=4MiB", "weight_bytes", None, 4 * 2**20),
        ("activation_bytes < 512", "activation_bytes", None, 512),
        ("bytes_moved <= 1.5 KiB", "bytes_moved", None, 1536),
        ("latency <= 5 ms", "latency", None, 5e-3),
        ("latency <= 250us", "latency", None, 250e-6),
        ("energy <= 2 mJ", "energy", None, 2e-3),
        ("cycles <= 2M", "cycles", None, 2e6),
        ("cycles <= 3 k cycles", "cycles", None, 3e3),
        ("bops <= 1e9", "bops", None, 1e9),
        ("effective_bits <= 4.5 bits", "effective_bits", None, 4.5),
        ("agreement >= 99 %", "agreement", 0.99, None),
        ("agreement => 0.99", "agreement", 0.99, None),
        ("accuracy > 91.5%", "sim_acc", 0.915, None),
        ("sqnr >= 20 dB", "sqnr", 20.0, None),
        ("kl <= 0.1", "kl", -0.1, None),
        ("mse < 2e-3", "mse", -2e-3, None),
    ],
)
def test_limits_are_read(text: str, figure: str, least: float | None, most: float | None) -> None:
    (limit,) = parse_limits(text)
    assert (limit.figure, limit.text) == (figure, text)
    assert limit.least == (None if least is None else pytest.approx(least))
    assert limit.most == (None if most is None else pytest.approx(most))


def test_a_value_is_written_as_its_limit_is() -> None:
    """Results hold losses negated, so that more is better."""
    texts = {"mse <= 1e-3": -0.5, "kl < 0.1": -0.5, "sqnr >= 20 dB": 0.5, "accuracy >= 90 %": 0.5}
    assert {parse_limits(text)[0].amount(value) for text, value in texts.items()} == {"0.5"}


def test_several_limits() -> None:
    assert [x.figure for x in parse_limits(["sqnr >= 1, bops <= 2", "macs <= 3"])] == ["sqnr", "bops", "macs"]
    assert parse_limits(None) == ()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("weight_bytes", "expected FIGURE <= NUMBER UNIT"),
        ("", "expected FIGURE"),
        ("weight_byte <= 4", "unknown figure 'weight_byte'.*Did you mean 'weight_bytes'"),
        ("sqnr >= 20 %", "unknown unit '%'; expected dB"),
        ("agreement >= 20 dB", "unknown unit 'dB'; expected %"),
        ("mse <= 1 %", "unknown unit '%'; expected no unit"),
        ("weight_bytes <= 4 ms", "unknown unit 'ms'; expected B, kB"),
        ("latency <= 4 MB", "unknown unit 'MB'; expected s, ms"),
        ("latency <= 4", "unknown unit ''; expected s, ms"),
        ("weight_bytes >= 4", "wrong side; expected weight_bytes <= a number"),
        ("agreement <= 0.9", "wrong side; expected agreement >="),
        ("agreement >= 101 %", "agreement is at most 1"),
        ("kl >= 0.1", "wrong side"),
        ("macs <= 1.2.3", "'1.2.3' is no number"),
    ],
)
def test_limits_that_say_nothing(text: str, says: str) -> None:
    with pytest.raises(HagoError, match=says):
        parse_limits(text)


@given(st.text(max_size=40))
def test_any_text_is_a_limit_or_an_error(text: str) -> None:
    try:
        assert all(isinstance(x, Limit) for x in parse_limits(text))
    except HagoError as error:
        assert "limit" in str(error)


@given(
    st.sampled_from([*METRICS, *(name for name, o in OBJECTIVES.items() if o.unit != "share")]), st.floats(0.001, 1e9)
)
def test_a_limit_kept_has_no_shortfall(name: str, number: float) -> None:
    below = name in METRICS or OBJECTIVES[name].is_loss
    (limit,) = parse_limits(
        f"{name} {'<=' if below else '>='} {number!r} {METRICS[name].unit.strip('B') if name in METRICS else ''}"
    )
    at = limit.most if limit.most is not None else limit.least
    assert at is not None and limit.shortfall(at) == 0.0
    worse, better = (at * (1.1 if limit.most is not None else 0.9), at * (0.9 if limit.most is not None else 1.1))
    if at < 0:
        worse, better = better, worse
    assert limit.shortfall(better) == 0.0 and limit.shortfall(worse) == pytest.approx(0.1)
    assert limit.shortfall(math.nan) == math.inf


def test_a_goal_is_one_thing() -> None:
    with pytest.raises(HagoError, match="give one of them.*pareto"):
        make_goal(GoalOptions("sqnr", maximize="sqnr", minimize="cycles"))
    with pytest.raises(HagoError, match="minimize='cycle'.*Did you mean 'cycles'"):
        make_goal(GoalOptions("sqnr", minimize="cycle"))
    assert make_goal(GoalOptions("sqnr", maximize="agreement")).objective.name == "agreement"
    assert make_goal(GoalOptions("sqnr")).to_json() == {}


# ---------------------------------------------------------------- the order of points
def scored(value: float, agreement: float, size: float, goal: Goal, **changes: object) -> Score:
    return goal.applied(Score(value, {"agreement": agreement}, **changes), {"weight_bytes": size, "cycles": size})  # type: ignore[arg-type]


def test_limits_come_before_the_value_and_overflow_before_limits() -> None:
    goal = make_goal(GoalOptions("sqnr", budget_cost="weight_bytes <= 100"))
    kept, missed, far = (scored(v, 1.0, size, goal) for v, size in ((10, 100), (30, 110), (40, 200)))
    overflowed = scored(50, 1.0, 50, goal, overflows={"a": 1}, excess_bits={"a": 1})
    order = sorted([overflowed, far, kept, missed], key=lambda s: s.rank)
    assert order == [overflowed, far, missed, kept]
    assert (kept.shortfall, missed.shortfall, far.shortfall) == (0.0, pytest.approx(0.1), pytest.approx(1.0))
    assert kept.accepted and not missed.accepted and missed.runs
    trials = [Trial(i, {}, s) for i, s in enumerate([far, missed, kept])]
    for tolerance in (0.0, 25.0, 100.0):
        best = best_trial(trials, tolerance)
        assert best is not None and best.index == 2


def test_ties_go_to_the_cost_and_then_to_bits() -> None:
    goal = make_goal(GoalOptions("sqnr", budget_cost="weight_bytes <= 100"))
    small, large = scored(10, 1.0, 50, goal, total_bits=9), scored(10, 1.0, 60, goal, total_bits=3)
    assert small.rank > large.rank and small.standing(5.0) > large.standing(5.0)
    assert scored(10, 1.0, 50, goal, total_bits=8).rank > small.rank
    assert scored(10.001, 1.0, 60, goal).rank > small.rank


def test_minimize_ranks_by_cost_and_then_by_the_objective() -> None:
    goal = make_goal(GoalOptions("sqnr", minimize="cycles", keep="agreement >= 0.9"))
    assert goal.costs == ("cycles",) and [m.name for m in goal.measures] == ["agreement"]
    cheap, dear, better, missed = (
        scored(v, a, size, goal) for v, a, size in ((10, 0.9, 5), (40, 1.0, 6), (11, 0.9, 5), (50, 0.8, 1))
    )
    assert better.rank > cheap.rank > dear.rank > missed.rank
    assert cheap.value == -5


def test_scores_with_limits_stand_in_the_log() -> None:
    goal = make_goal(GoalOptions("sqnr", minimize="cycles", keep="agreement >= 0.9"))
    for score in (
        scored(10, 0.8, 5, goal, plan_key="p"),
        scored(10, 0.9, 5, goal, plan_key="p"),
        Score(1, plan_key="p"),
    ):
        record = Trial(0, {"a:0": 8}, score).to_json("m")
        assert Trial.from_json(record).score == score
        assert ("shortfall" in record["score"]) == (score.shortfall > 0)


# ---------------------------------------------------------------- whole searches
def test_a_budget_of_bytes_is_kept(tmp_path: Path) -> None:
    graph = residual_block()
    log = tmp_path / "log.jsonl"
    strategy, _ = search_quantize_strategy(
        graph,
        "x86_vnni",
        DATA,
        budget_cost="weight_bytes <= 280 B",
        budget=60,
        log=log,
        progress=False,
        corrections="none",
    )
    from hago import load_hardware

    cost = plan_cost(plan_of(graph, load_hardware("x86_vnni"), strategy))
    assert cost["weight_bytes"] <= 280
    assert strategy.made_by["goal"] == {"limits": ["weight_bytes <= 280 B"]}
    assert strategy.made_by["costs"]["weight_bytes"] == cost["weight_bytes"]
    kept = [t for t in read_log(log).trials if t.score.costs["weight_bytes"] <= 280]
    assert kept and max(t.score.value for t in kept) == strategy.made_by["results"]["sqnr"]
    header = read_log(log).header
    assert header is not None
    assert header.settings == {
        "limits": ["weight_bytes <= 280 B"],
        "refined": {"kept_aside": 16, "turns": 4, "blind": True, "chunk": 16},
        "channel_bins": CHANNEL_BINS,
        "effort": {"name": "good", "turns": 1},
        "merged_groups": True,
    }


def test_minimize_keeps_what_it_must() -> None:
    options = {"objective": "sqnr", "budget": 80, "progress": False}
    found = run_search(
        residual_block(), "x86_vnni", DATA, SearchOptions.of(minimize="weight_bytes", keep="sqnr >= 25", **options)
    )
    best, results = found.result.best.score, found.strategy.made_by["results"]
    assert results["sqnr"] >= 25 and best.value == -best.costs["weight_bytes"]
    assert found.score == results["sim_acc"]
    most = plan_cost(found.prepared.resolver(found.prepared.space.widest()))
    assert best.costs["weight_bytes"] < most["weight_bytes"]


@pytest.mark.parametrize(
    ("limits", "says"),
    [
        ({"budget_cost": "weight_bytes <= 100"}, "'weight_bytes <= 100' cannot be met.*is 196 B, the nearest"),
        ({"keep": "sqnr >= 90"}, r"'sqnr >= 90' cannot be met: at the most bits.*sqnr is \d+\.\d+"),
        ({"budget_cost": "latency <= 5 ms"}, "does not give what 'latency' needs.*use 'cycles'"),
        ({"minimize": "energy"}, "does not give what 'energy' needs.*picojoules_per_byte"),
    ],
)
def test_what_cannot_be_reached_is_said_before_any_trial(limits: dict[str, str], says: str, tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    with pytest.raises(HagoError, match=says):
        search_quantize_strategy(residual_block(), "x86_vnni", DATA, log=log, progress=False, **limits)
    assert not log.exists()


@pytest.mark.parametrize(
    ("searcher", "chip", "figure"),
    some(
        3,
        ["sensitivity", "random", "gradient"],
        ["int16_accumulator", "x86_vnni", "cambricon_mlu"],
        ["sqnr", "agreement"],
    ),
)
def test_what_a_search_reaches_is_not_refused(searcher: str, chip: str, figure: str) -> None:
    """The most bits are not always the best: here registers are too narrow for them, there it is chance."""
    options = SearchOptions.of(searcher, objective=figure, budget=12, search_topology=False, progress=False)
    reached = run_search(residual_block(), chip, DATA, options).result.score.results[figure]
    kept = options.changed(keep=f"{figure} >= {reached!r}")
    assert run_search(residual_block(), chip, DATA, kept).result.score.results[figure] >= reached


@pytest.mark.parametrize("figure", ["sqnr", "mse", "kl", "cosine"])
def test_what_a_search_reaches_with_few_outputs_is_not_refused(figure: str) -> None:
    """Errors of few values cancel more."""
    torch.manual_seed(0)
    net, data = nn.Sequential(nn.Linear(4, 2)).eval(), [torch.randn(3, 4)]
    options = SearchOptions.of("greedy", objective=figure, search_topology=False, progress=False)
    reached = run_search(net, "vta", data, options).result.score.results[figure]
    limit = f"{figure} <= {-reached!r}" if figure in ("mse", "kl") else f"{figure} >= {reached!r}"
    assert run_search(net, "vta", data, options.changed(keep=limit)).result.score.results[figure] >= reached


IMAGES = [x for x, _ in DATA]


def test_the_start_is_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    measure, keys = Evaluator.measure, []

    def counting(self: Evaluator, plan: Any, *rest: Any, **how: Any) -> Any:
        keys.append(plan.key)
        return measure(self, plan, *rest, **how)

    monkeypatch.setattr(Evaluator, "measure", counting)
    options = {"budget": 4, "progress": False, "estimator": "mse", "corrections": "none"}  # nothing is confirmed
    search_quantize_strategy(residual_block(), "x86_vnni", DATA, keep="sqnr >= 1", **options)
    assert len(keys) == len(set(keys)) >= 2


def slow_tables() -> tuple[Any, Any]:
    """A network and a chip on which sigmoids are cheaper in float, crossings and all."""
    b = Builder()
    b.call("sigmoid", b.conv2d(b.input(3, 8, 8), seeded(16, 3, 3, 3)))
    whole = load_hardware("x86_vnni")
    slow = OpDesc("uint8", "uint8", requantize_at="output", name="slow", cost={"elements_per_cycle": 0.05})
    cost = {"requantize_per_cycle": 0.5, "clock_hz": 1e9, "bytes_per_cycle": 4.0}
    return b.graph(), replace(whole, ops={**whole.ops, "sigmoid": (slow, whole.ops["sigmoid"][-1])}, cost=cost)


def test_what_only_float_nodes_reach_is_not_refused() -> None:
    graph, chip = slow_tables()
    with pytest.warns(HagoWarning, match="nothing limits the loss"):
        least, _ = search_quantize_strategy(
            graph, chip, IMAGES, minimize="cycles", searcher="sensitivity", progress=False
        )
    cycles = least.made_by["costs"]["cycles"]
    narrow = plan_cost(prepare(graph, chip, IMAGES).resolver(prepare(graph, chip, IMAGES).space.narrowest()))["cycles"]
    assert cycles < 0.9 * narrow
    limit = f"cycles <= {1.01 * cycles}"
    found, _ = search_quantize_strategy(graph, chip, IMAGES, budget_cost=limit, searcher="sensitivity", progress=False)
    assert found.made_by["costs"]["cycles"] <= 1.01 * cycles


@pytest.mark.parametrize("limit", ["cycles <= 10", "latency <= 1 ns"])
def test_what_no_signature_computes_in_is_said_before_any_trial(limit: str, tmp_path: Path) -> None:
    graph, chip = slow_tables()
    with pytest.raises(InfeasibleBits, match=f"'{limit}' cannot be met: the multiply.* alone take .*the nearest"):
        search_quantize_strategy(graph, chip, IMAGES, budget_cost=limit, log=tmp_path / "log", progress=False)
    assert not (tmp_path / "log").exists()


def test_limits_that_exclude_each_other_end_with_the_nearest_point(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    with pytest.raises(InfeasibleBits, match=r"nearest is trial \d+: .* is missed with"):
        search_quantize_strategy(
            residual_block(), "x86_vnni", DATA, budget_cost="weight_bytes <= 196", keep="sqnr >= 30",
            budget=30, log=log, searcher="greedy", progress=False, corrections="none",
        )  # fmt: skip
    assert len(read_log(log).trials) > 10


def test_searchers_take_options_in_their_names() -> None:
    found = run_search(residual_block(), "x86_vnni", DATA, SearchOptions.of("random:trials=3", progress=False))
    assert len(found.result.trials) == 3
    with pytest.raises(HagoError, match="expected OPTION=VALUE"):
        run_search(residual_block(), "x86_vnni", DATA, SearchOptions.of("random:trials", progress=False))


def test_a_limit_on_an_objective_of_ones_own() -> None:
    def least_error(reference: Any, outputs: Any, labels: Any) -> float:
        return -float((reference[0] - outputs[0]).abs().max())

    goal = make_goal(GoalOptions(least_error, keep="least_error >= -0.5"))
    assert goal.limits == (Limit("least_error", -0.5, None, "least_error >= -0.5"),)
    found = run_search(
        residual_block(),
        "x86_vnni",
        DATA,
        SearchOptions.of("greedy", objective=least_error, budget=3, keep="least_error >= -1e9", progress=False),
    )
    assert found.strategy.made_by["results"]["least_error"] <= 0.0
    with pytest.raises(InfeasibleBits, match="'least_error >= 1' is missed"):
        run_search(
            residual_block(),
            "x86_vnni",
            DATA,
            SearchOptions.of("greedy", objective=least_error, budget=3, keep="least_error >= 1", progress=False),
        )
    loss = Objective(
        "gap",
        lambda r, o, _: (r[0] - o[0]).abs().flatten(1).amax(1, keepdim=True),
        lambda t: -float(t[0]),
        is_loss=True,
    )
    assert make_goal(GoalOptions(loss, keep="gap <= 0.5")).limits == (Limit("gap", -0.5, None, "gap <= 0.5"),)
    with pytest.raises(HagoError, match="wrong side"):
        make_goal(GoalOptions(loss, keep="gap >= 0.5"))


# ---------------------------------------------------------------- relative limits
@pytest.mark.parametrize(
    ("text", "figure", "base", "least", "most"),
    [
        ("size <= 1 MB", "weight_bytes", math.nan, None, 1e6),
        ("size <= 60 %", "weight_bytes", 1000, None, 600),
        ("latency<=.5 x", "latency", 4e-3, None, 2e-3),
        ("energy <= 80%", "energy", 1e-6, None, 8e-7),
        ("effective_bits <= 0.5x", "effective_bits", 8, None, 4),
        ("accuracy >= float - 0.5 %", "sim_acc", 0.9, 0.895, None),
        ("accuracy >= float - 1 points", "sim_acc", 0.9, 0.89, None),
        ("accuracy >= float - 1 point", "sim_acc", 0.9, 0.89, None),
        ("accuracy>=float-0.01", "sim_acc", 0.9, 0.89, None),
        ("agreement >= float", "agreement", 1.0, 1.0, None),
    ],
)
def test_relative_limits_become_numbers(
    text: str, figure: str, base: float, least: float | None, most: float | None
) -> None:
    (limit,) = parse_limits(text)
    plain = limit.resolved(base)
    assert (plain.figure, plain.relative) == (figure, None)
    assert plain.least == (None if least is None else pytest.approx(least))
    assert plain.most == (None if most is None else pytest.approx(most))
    assert plain.given == (text if limit.relative else "")


@given(st.sampled_from([*METRICS, "agreement", "accuracy", "cosine"]), st.floats(1e-9, 1e12), st.floats(0.0, 0.9))
def test_the_text_of_a_resolved_limit_gives_the_same_number(name: str, base: float, part: float) -> None:
    of_cost = name in METRICS
    (limit,) = parse_limits(f"{name} <= {part!r}x" if of_cost else f"{name} >= float - {part!r}")
    plain = limit.resolved(base if of_cost else min(base, 1.0))
    (again,) = parse_limits(plain.text)
    assert (again.figure, again.least, again.most) == (plain.figure, plain.least, plain.most)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("sqnr >= float - 3 dB", "only measures that are shares.*accuracy; give sqnr as a number"),
        ("size <= float - 3 %", "only measures that are shares.*give weight_bytes as a number"),
        ("accuracy >= float + 1 %", "expected 'float - NUMBER %', e.g. 'accuracy >= float - 0.5 %'"),
        ("accuracy >= float - 1 dB", "unknown unit 'dB'; expected %"),
        ("size >= 60 %", "wrong side; expected weight_bytes <= a number"),
        ("siz <= 1 MB", r"Did you mean 'size'\?"),
        ("memory <= 1 MB", r"Did you mean 'weight_bytes' or 'activation_bytes'\?"),
        ("time <= 3 ms", r"Did you mean 'latency'\?"),
        ("acc >= 0.9", r"Did you mean 'accuracy'\?"),
        ("cosin >= 0.9", r"Did you mean 'cosine'\?"),
        ("cosin <= 0.9", r"accuracy\.$"),
    ],
)
def test_what_was_meant_is_suggested(text: str, says: str) -> None:
    with pytest.raises(HagoError, match=says):
        parse_limits(text)


def test_words_that_people_use_are_no_figures() -> None:
    from hago.search.goal import _MEANT, ALIASES

    figures = {*METRICS, *OBJECTIVES}
    assert not (_MEANT.keys() & (figures | ALIASES.keys())) and set(ALIASES.values()) <= set(METRICS)
    assert {figure for meant in _MEANT.values() for figure in meant} <= figures


def test_relative_limits_hold_and_are_logged_as_numbers(tmp_path: Path) -> None:
    log = tmp_path / "l.jsonl"
    model, limits = residual_block(), {"budget_cost": "size <= 80 %", "keep": "agreement >= float - 60 %"}
    how: dict[str, Any] = {"log": log, "progress": False, "budget": 8, **limits}
    strategy, _ = search_quantize_strategy(model, "x86_vnni", DATA, **how)
    prepared = prepare(model, "x86_vnni", DATA)
    widest = plan_cost(prepared.resolver(prepared.space.widest()))["weight_bytes"]
    settings = read_log(log).header.settings  # type: ignore[union-attr]
    assert settings["limits_given"] == ["agreement >= float - 60 %", "size <= 80 %"]
    assert settings["limits"] == ["agreement >= 0.4", f"weight_bytes <= {0.8 * widest!r}"]
    assert strategy.made_by["goal"] == {k: settings[k] for k in ("limits", "limits_given", "expected_gains")}
    assert strategy.made_by["costs"]["weight_bytes"] <= 0.8 * widest
    assert strategy.made_by["results"]["agreement"] >= 0.4
    assert replay(model, "x86_vnni", log, DATA).same
    before = log.read_text()
    search_quantize_strategy(model, "x86_vnni", DATA, **how)
    assert log.read_text() == before
    with pytest.raises(HagoError, match=r"budget_cost was size <= 80 %, is .*70 %"):
        search_quantize_strategy(model, "x86_vnni", DATA, **{**how, "budget_cost": "size <= 70 %"})


def test_a_relative_limit_that_is_missed_names_its_number() -> None:
    with pytest.raises(
        InfeasibleBits, match=r"'size <= 1 %' \([\d.]+ B, 1 % of [\d.]+ B at the widest bits\) cannot be met"
    ):
        search_quantize_strategy(residual_block(), "x86_vnni", DATA, budget_cost="size <= 1 %", progress=False)


@pytest.mark.parametrize(
    ("given", "base", "says"),
    [
        ("size <= 60 %", 11604.0, "6.799 KiB, 60 % of 11.33 KiB at the widest bits"),
        ("weight_bytes <= 0.5x", 2048.0, "1 KiB, 50 % of 2 KiB at the widest bits"),
        ("accuracy >= float - 50 %", 1.0, "accuracy >= 0.5"),
    ],
)
def test_what_a_relative_limit_came_to_has_units(given: str, base: float, says: str) -> None:
    plain = parse_limits(given)[0].resolved(base)
    assert resolved_text(plain.given, plain.text) == says


@pytest.mark.parametrize(
    ("limit", "suggests"),
    [("size <= 60", True), ("size <= 60 B", False), ("size <= 1 %", False), ("size <= 101", False)],
)
def test_a_small_limit_without_a_unit_may_have_been_a_percentage(limit: str, suggests: bool) -> None:
    with pytest.raises(InfeasibleBits, match="cannot be met") as caught:
        search_quantize_strategy(residual_block(), "x86_vnni", DATA, budget_cost=limit, progress=False)
    assert ("Did you mean 'size <= 60 %'?" in str(caught.value)) == suggests
    assert suggests or "Did you mean" not in str(caught.value)


def test_a_limit_on_accuracy_needs_labels() -> None:
    unlabelled = [images for images, _ in DATA]
    with pytest.raises(HagoError, match="needs labels"):
        search_quantize_strategy(
            residual_block(), "x86_vnni", unlabelled, keep="accuracy >= float - 1 %", progress=False
        )
    assert make_goal(GoalOptions(minimize="size")).minimize == "weight_bytes"
