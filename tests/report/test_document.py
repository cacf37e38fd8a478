"""What a report holds: it agrees with the log, the strategies and the measurements that it is made of."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

import hago
from hago.api import evaluate_strategy, inspect_graph_statistic, make_report
from hago.errors import HagoError, LogError, StrategyMismatch
from hago.report import Report, page_of, read_records
from hago.report.document import PairedFigure
from hago.report.gather import spread
from hago.report.layout import NODE_HEIGHT, NODE_WIDTH, draw_network
from hago.report.nodes import histograms_of, ram_bytes
from hago.report.short import Told, answers, named_trials
from hago.report.trials import columns_of, measure_figure, story_of
from hago.search import Evaluator
from hago.serialization.summary import measure_text
from hago.study import TrialFront, best_trial, read_log

from .searched import CHIP, data, network


def test_the_document_is_json_with_finite_numbers(full_report: Report) -> None:
    document = full_report.to_json()
    assert json.loads(json.dumps(document, allow_nan=False)) == document


# ---------------------------------------------------------------- the log
def test_trials_are_those_of_the_log(full_report: Report, search_folder: Path) -> None:
    trials, log = full_report.trials, read_log(search_folder / "net.jsonl")
    assert trials is not None and len(trials.value) == len(log.trials) > 5
    front = TrialFront("sqnr", trials.front_cost)
    for i, trial in enumerate(log.trials):
        front.add(trial)
        assert trials.value[i] == pytest.approx(trial.results["sqnr"], rel=1e-5)
        assert {g: int(b, 36) for g, b in zip(trials.groups, trials.bits[i], strict=True)} == trial.bits
        logged = {name: column[i] for name, column in trials.costs.items() if name != "stored_bytes"}
        assert logged == pytest.approx(dict(trial.score.costs))
        assert trials.why[trials.reason[i]] == trial.why
    assert trials.front == tuple(trial.index for trial in front.trials)
    assert trials.best == max(range(len(log.trials)), key=lambda i: (log.trials[i].score.rank, -i))


def test_figures_are_not_rounded_before_they_are_shown(search_folder: Path) -> None:
    log = read_log(search_folder / "net.jsonl")
    assert log.header is not None
    for name, value in (("accuracy", 0.989949996), ("sqnr", 31.41499996), ("sqnr", 131.41499996)):
        figure = measure_figure(name).name
        trials = [replace(t, score=replace(t.score, results={figure: value})) for t in log.trials[:1]]
        (shown,) = columns_of(replace(log.header, objective=name), trials).value
        assert shown is not None and measure_text(figure, shown) == measure_text(figure, value)


def test_the_best_trial_is_that_of_the_search_with_its_tolerance(search_folder: Path) -> None:
    log = read_log(search_folder / "net.jsonl")
    assert log.header is not None
    header = replace(log.header, searcher={"name": "greedy", "options": {"tolerance": 3.0}})
    wanted = best_trial(log.trials, 3.0)
    assert wanted is not None and columns_of(header, log.trials).best == wanted.index
    assert wanted.index != columns_of(log.header, log.trials).best
    limited = [replace(t, score=replace(t.score, shortfall=1.0)) for t in log.trials]
    assert columns_of(header, limited).best is None


@pytest.mark.parametrize(
    "options",
    [
        {"searcher": "pareto:points=3,cost=cycles"},
        {"searcher": "greedy", "minimize": "cycles", "keep": ["sqnr >= 5"]},
        {"searcher": "greedy", "keep": "agreement >= 1 %", "budget_cost": ["size <= 4 MB", "bops <= 1G"]},
        {"searcher": "greedy", "budget_cost": "bops <= 99.9 %"},
        {"searcher": "random:trials=3"},
        {"searcher": "random:trials=3", "objective": "kl"},
    ],
)
def test_the_front_and_the_measure_are_those_of_the_search(tmp_path: Path, options: dict[str, Any]) -> None:
    files = {name: tmp_path / f"net.{name}" for name in ("jsonl", "json", "front.json")}
    hago.search_quantize_strategy(
        network(),
        CHIP,
        data(),
        **options,
        corrections=(),
        budget="4 trials",
        log=files["jsonl"],
        save=files["json"],
        front=files["front.json"],
        progress=False,
    )
    front = hago.load_front(files["front.json"])
    logged, stored = read_log(files["jsonl"]).trials, hago.Strategy.load(files["json"])
    report = make_report(network(), CHIP, [files["jsonl"]], data(), points=1, remedies=False, progress=False)
    assert report.trials is not None and report.front_cost == report.trials.front_cost == front.cost
    assert list(report.trials.front) == [point.trial for point in front]
    assert report.measure.name == front.measure
    for name in ("jsonl", "json", "front.json"):
        report = make_report(network(), CHIP, files[name], data(), points=1, remedies=False, progress=False)
        models = {model.name: model.figures for model in report.points[0].verdicts[0].models}
        trial = report.points[0].trial
        assert (trial is None) == (name == "json")
        results = stored.made_by["results"] if trial is None else logged[trial].score.results
        shown = results[front.measure]
        assert models["simulated"][front.measure] == models["integer"][front.measure] == pytest.approx(shown)


def test_a_cost_that_no_trial_has_is_a_column_without_figures(search_folder: Path) -> None:
    log = read_log(search_folder / "net.jsonl")
    assert log.header is not None
    trials = [replace(trial, score=replace(trial.score, costs={})) for trial in log.trials]
    assert columns_of(log.header, trials).costs == {"weight_bytes": (None,) * len(trials)}


def test_gains_lead_from_the_first_trial_to_the_best(full_report: Report) -> None:
    trials, search = full_report.trials, full_report.search
    assert trials is not None and search is not None and trials.best is not None
    rises = [gain for gain in trials.gain if gain is not None]
    first = next(i for i, gain in enumerate(trials.gain) if gain is not None)
    start, best = trials.value[first], trials.value[trials.best]
    assert start is not None and best is not None
    assert start + sum(rises) == pytest.approx(best, rel=1e-4)
    assert sum(move.gain for move in search.moves) == pytest.approx(sum(rises), rel=1e-4)
    assert sum(move.trials for move in search.moves) == len(trials.value)
    assert sum(move.front for move in search.moves) == len(trials.front)


def test_time_adds_up(full_report: Report) -> None:
    assert full_report.search is not None
    time = dict(full_report.search.time)
    whole = time.pop("in all")
    assert sum(time.values()) == pytest.approx(whole, abs=0.01)


def test_fewer_bits_are_the_best_trials_within_their_limits(full_report: Report) -> None:
    trials, search = full_report.trials, full_report.search
    assert trials is not None and search is not None and len(search.fewer) > 2
    assert search.fewer_of == "weights"
    bits = [value or 0.0 for value in trials.costs["effective_bits"]]
    for each in search.fewer:
        allowed = [i for i, mean in enumerate(bits) if mean <= each.bits and not trials.rejected[i]]
        assert bits[each.trial] <= each.bits and each.value == max(trials.value[i] or -math.inf for i in allowed)
    assert all(more.bits == less.bits + 1 for more, less in pairwise(search.fewer))


def test_bits_are_averaged_over_varied_edges_where_float_weights_hide_them(search_folder: Path) -> None:
    log = read_log(search_folder / "net.jsonl")
    assert log.header is not None
    wide = [replace(t, score=replace(t.score, costs={**t.score.costs, "effective_bits": 20.0})) for t in log.trials]
    columns = columns_of(log.header, wide)
    story = story_of(log.header, wide, columns, (), running=False)
    varied = [group for group in columns.groups if len({trial.bits[group] for trial in wide}) > 1]
    assert story.fewer_of == "edges" and story.fewer
    for each in story.fewer:
        assert each.mean == pytest.approx(sum(wide[each.trial].bits[g] for g in varied) / len(varied), rel=1e-5)


def test_long_logs_keep_the_bits_of_the_front(search_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hago.report.trials.MOST_BITS", 10)
    log = read_log(search_folder / "net.jsonl")
    assert log.header is not None
    trials = columns_of(log.header, log.trials)
    assert {i for i, bits in enumerate(trials.bits) if bits} == set(trials.front)


# ---------------------------------------------------------------- points
def test_a_point_has_the_figures_of_its_strategy(full_report: Report, search_folder: Path) -> None:
    point = full_report.points[0]
    score = evaluate_strategy(network(), CHIP, search_folder / "net.json", data())
    verdict = next(v for v in point.verdicts if v.data == "calibration data")
    figures = {model.name: model.figures for model in verdict.models}
    assert figures["simulated"] == figures["integer"]
    assert figures["simulated"]["sqnr"] == pytest.approx(score.results["sqnr"], rel=1e-5)
    assert figures["simulated"]["sim_acc"] == pytest.approx(score.results["sim_acc"])
    assert point.thresholds_sha256 == score.thresholds_sha256 and point.plan_key == score.plan_key
    assert verdict.compared > 0 and verdict.differing == 0
    assert point.inside[0] > 1000 and point.inside[1] == 0


def test_nodes_have_what_an_inspection_says(full_report: Report, search_folder: Path) -> None:
    statistic = inspect_graph_statistic(network(), CHIP, search_folder / "net.json", data(), remedies=False)
    nodes = {node.name: node for node in full_report.points[0].nodes}
    for row in statistic.rows:
        node = nodes[row.name]
        assert node.blame == pytest.approx(statistic.blame.get(row.name, 0.0), rel=1e-4, abs=1e-9)
        assert node.cause == row.main_cause and node.compared == row.count
        assert {e.edge: e.bits for e in node.edges} == {e.edge: e.bits for e in row.edges}
        assert node.verdict == row.verdict
    assert sum(node.blame or 0.0 for node in nodes.values()) == pytest.approx(1.0, rel=1e-3)


def test_costs_of_nodes_add_up_to_those_of_the_point(full_report: Report) -> None:
    for point in full_report.points:
        for name, whole in point.costs.items():
            if name != "effective_bits":  # a mean
                assert sum(node.costs.get(name, 0.0) for node in point.nodes) == pytest.approx(whole, rel=1e-4), name


def test_bytes_as_stored_are_those_of_the_plans(full_report: Report, search_folder: Path) -> None:
    trials, search = full_report.trials, full_report.search
    assert trials is not None and search is not None
    stored = trials.costs["stored_bytes"]
    assert all(value is not None for value in stored)
    front = hago.load_front(search_folder / "net.front.json")
    for point in front:
        assert stored[point.trial] == hago.estimate_cost(network(), CHIP, point.strategy).stored_bytes
    for each in search.fewer:
        assert each.costs["stored_bytes"] == stored[each.trial]
    # vta keeps integers of few bits in bytes, so that what is packed less is stored the same
    assert len(set(stored)) < len(set(trials.costs["weight_bytes"]))
    assert "Nothing that vta stores is saved" in _answer(full_report, "6 bits")


def test_few_bits_are_one_shot_beside_every_point(full_report: Report) -> None:
    few, last = full_report.points[-1], len(full_report.points) - 1
    assert few.kind == "few bits" and {node.bits for node in few.nodes if node.op in ("conv2d", "linear")} == {6}
    first = full_report.points[0]
    pair = next(p for p in reversed(full_report.pairs) if (p.first, p.second) == (0, last))
    (sqnr,) = [figure for figure in pair.figures if figure.measure == "sqnr"]
    values = [each.verdicts[-1].model("simulated").figures["sqnr"] for each in (few, first)]
    assert sqnr.difference == pytest.approx(values[0] - values[1]) and pair.data == "held-out data"
    for point in full_report.points:
        answer = next(each.answer for each in point.short if "6 bits" in each.question)
        assert f"SQNR is {values[0]:.2f} dB instead of {values[1]:.2f} dB" in answer
        assert (f"against the point '{first.title}'" in answer) == (point is not first)
        assert ("That is this point: one shot" in answer) == (point is few)


def test_trials_that_answers_name_are_shown_in_full_and_measured(full_report: Report) -> None:
    search = full_report.search
    assert search is not None
    named = named_trials(search)
    assert len(named) == 2 and f"over all weights is {named[0]}: its SQNR" in _answer(full_report, "6 bits")
    assert set(named) <= {point.trial for point in full_report.points if point.kind == "front"}
    for each in search.fewer:
        if each.point is None:
            continue
        verdict = full_report.points[each.point].verdicts[-1]
        assert each.data == verdict.data == "held-out data"
        assert each.figures == verdict.model("simulated").figures
        assert each.to_float == next(d for d in verdict.differences if d.first == "float")
    assert all(each.data and each.to_float is not None for each in search.fewer if each.trial in named)


def _answer(report: Report, words: str) -> str:
    return next(each.answer for each in report.points[0].short if words in each.question)


@pytest.mark.parametrize(
    ("better", "says", "alarm"),
    [
        ("one shot", "one shot is surely better", True),
        ("simulated", "Surely in accuracy", False),
        ("", "chance", False),
    ],
)
def test_one_shot_comes_first_where_it_is_surely_better(
    full_report: Report, better: str, says: str, alarm: bool
) -> None:
    point = full_report.points[0]
    verdict = point.verdicts[-1]
    paired = PairedFigure("sim_acc", "one shot", "simulated", -0.25, -0.5, -0.01, better)
    judged = replace(point, verdicts=(replace(verdict, differences=(paired,)),))
    told = Told(full_report.search, full_report.measure, "weight_bytes", CHIP, 10)
    made = answers(judged, told)
    against = next(each for each in made if "one shot" in each.question)
    assert says in against.answer and "one of 10 trials" in against.answer and against.alarm == alarm
    assert (made[0] is against) == alarm and "weights take" in against.answer
    shown = replace(full_report, points=(replace(judged, short=made),), pairs=())
    page = page_of(shown.to_json())
    assert ('class="callout"' in page) == alarm


@pytest.mark.parametrize("missing", [None, math.nan])
def test_answers_say_what_was_not_measured(full_report: Report, missing: float | None) -> None:
    point, search = full_report.points[0], full_report.search
    assert search is not None and point.remedies is not None
    whole: dict[str, Any] = {"samples": 16, **dict.fromkeys(("sim_acc", "sqnr", "agreement"), missing)}
    of_all: dict[str, Any] = {"low": missing, "high": missing, "difference": missing, "better": ""}
    verdict = point.verdicts[-1]
    models = tuple(replace(model, figures=whole) for model in verdict.models)
    differences = tuple(replace(each, **of_all) for each in verdict.differences)
    fewer = tuple(
        replace(f, value=missing, figures=whole, to_float=f.to_float and replace(f.to_float, **of_all))
        for f in search.fewer
    )
    remedy = {"command": "--keep-float x", "gain_db": missing}
    remedies = {"samples": 16, "sqnr": missing, "found": [remedy], "together": None, "tried": 3, "kept_float": {}}
    blank = replace(point, verdicts=(replace(verdict, models=models, differences=differences),), remedies=remedies)
    told = Told(replace(search, fewer=fewer), full_report.measure, "weight_bytes", CHIP, 10)
    made = {each.question: each.answer for each in answers(blank, told)}
    assert not re.search(r"\b(nan|None|inf)\b", " ".join(made.values())), made
    for words in ("lose?", "one shot?", "6 bits?"):
        (answer,) = (text for question, text in made.items() if question.endswith(words))
        assert "not measured" in answer and "chance" not in answer
    unlabelled = {"samples": 16, "sqnr": missing, "agreement": 0.98994, "agreement_interval": [missing, 1.0]}
    models = tuple(replace(model, figures=unlabelled) for model in verdict.models)
    text = answers(replace(blank, verdicts=(replace(verdict, models=models, differences=()),)), told)[0].answer
    assert "SQNR of the outputs is not measured" in text and "98.99 %" in text and "interval" not in text


def test_a_size_has_one_text_in_answers_and_tiles(full_report: Report) -> None:
    point = full_report.points[0]
    costs = {**point.costs, "weight_bytes": 19897.0, "stored_bytes": 19897.0}
    floats = {**point.float_costs, "weight_bytes": 78131.0, "stored_bytes": 78131.0}
    sized = replace(point, costs=costs, stored_bytes=19897.0, float_costs=floats, one_shot_costs=costs)
    told = Told(full_report.search, full_report.measure, "weight_bytes", CHIP, 0)
    sized = replace(sized, short=answers(sized, told))
    texts = set(re.findall(r"19[.\d]* KiB", page_of(replace(full_report, points=(sized,), pairs=()).to_json())))
    assert texts == {"19.4 KiB"}


def test_float_nodes_are_counted_and_explain_mean_bits(full_report: Report) -> None:
    point = full_report.points[0]
    told = Told(None, full_report.measure, "weight_bytes", CHIP, 0)
    nodes = [n for n in point.nodes if n.runs == "integer"]
    kept = max(nodes, key=lambda node: node.costs.get("weight_bytes", 0.0))
    changed = tuple(replace(n, runs="float", reason="kept float") if n is kept else n for n in point.nodes)
    costs = {**point.costs, "effective_bits": 20.0}
    answer = next(
        a.answer for a in answers(replace(point, nodes=changed, costs=costs), told) if "integers?" in a.question
    )
    assert answer.startswith("No: 2 of") and "20.0 bits on average" in answer and kept.name in answer


def test_what_the_worst_layer_gains_in_float_is_said(full_report: Report) -> None:
    point = full_report.points[0]
    told = Told(None, full_report.measure, "weight_bytes", CHIP, 0)
    worst, *others = sorted(point.nodes, key=lambda n: -(n.blame or 0.0))
    found = {"command": f"--keep-float {others[0].name}", "gain_db": 2.0}
    remedies = {"samples": 16, "sqnr": 30.0, "found": [found], "together": None, "tried": 3}
    cases = (
        (-0.5, "Trying contradicts the estimate", "float loses 0.5 dB"),
        (0.04, "Trying contradicts the estimate", "float changes nothing"),
        (1.5, worst.name, "Keeping it float gains 1.5 dB"),
    )
    for gain, begins, says in cases:
        remedies["kept_float"] = {worst.name: gain}
        made = answers(replace(point, remedies=remedies), told)
        answer = next(each.answer for each in made if "loses most" in each.question)
        assert answer.startswith(begins) and says in answer and "16 samples of the calibration data, whose" in answer


def test_the_lines_of_python_run(search_folder: Path) -> None:
    paths = [search_folder / name for name in ("net.jsonl", "net.json", "net.front.json")]
    report = make_report(network(), CHIP, paths, data(), points=3, remedies=False, progress=False)
    lines = [each.line for each in (*report.commands, *(each for p in report.points for each in p.commands))]
    assert len(lines) >= 3 and all(line.startswith("import hago\n") for line in lines)
    for line in lines:
        exec(line, {"model": network(), "data": data()})


def test_advice_that_the_hardware_refuses_is_left_out(full_report: Report) -> None:
    # vta has one scale for all channels, and at most 8 bits where it multiplies
    nodes = [node for point in full_report.points for node in point.nodes]
    assert any(node.helps for node in nodes) and not any("per channel" in node.helps for node in nodes)
    full = [(node, edge) for node in nodes for edge in node.edges if edge.bits == 8]
    assert any(f"on {edge.edge}" in node.words and node.helps == "a tighter threshold" for node, edge in full)
    assert not [edge for node, edge in full if f"more bits on {edge.edge}" in node.helps]


def test_one_shot_is_measured_once_on_each_data_set(search_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[str] = []

    class Counting(Evaluator):
        def measure(self, plan: Any, *args: Any, **more: Any) -> Any:
            measured.append(plan.key)
            return super().measure(plan, *args, **more)

    monkeypatch.setattr("hago.report.gather.Evaluator", Counting)
    front = search_folder / "net.front.json"
    report = make_report(network(), CHIP, front, data(), points=3, remedies=False, progress=False)
    assert [point.kind for point in report.points] == ["front", "front", "few bits"]
    assert all(point.one_shot_costs for point in report.points[:2])
    assert {point.plan_key for point in report.points} <= set(measured) and len(measured) <= 3 + 1


def test_points_share_resolvers_and_drawings(search_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from hago.report import gather

    drawn: list[Any] = []
    resolved: list[Any] = []

    def draw(graph: Any) -> Any:
        drawn.append(graph)
        return draw_network(graph)

    def resolve(graph: Any, hardware: Any, strategy: Any) -> Any:
        resolved.append(strategy)
        return make(graph, hardware, strategy)

    make = gather.stored_resolver
    monkeypatch.setattr(gather, "draw_network", draw)
    monkeypatch.setattr(gather, "stored_resolver", resolve)
    records = [search_folder / name for name in ("net.jsonl", "net.front.json")]
    report = make_report(network(), CHIP, records, points=3, progress=False)
    assert len(report.points) == 3 and len(drawn) == len(report.drawings) == 1
    assert len(resolved) == len({id(strategy) for strategy in resolved}) == 3


def test_a_report_says_why_one_shot_is_missing(search_folder: Path) -> None:
    report = make_report(network(), CHIP, search_folder / "net.json", data(7), remedies=False, progress=False)
    assert not report.points[0].one_shot_costs
    assert sum("one shot is not shown, since it needs the calibration data" in note for note in report.notes) == 1


def test_no_model_is_compared_with_float_on_agreement(full_report: Report) -> None:
    for verdict in full_report.points[0].verdicts:
        assert not [d for d in verdict.differences if d.first == "float" and d.measure != "sim_acc"]
        low, high = verdict.model("simulated").figures["agreement_interval"]
        assert low <= verdict.model("simulated").figures["agreement"] <= high


def test_points_of_a_log_alone_are_those_of_its_front(search_folder: Path) -> None:
    log = read_log(search_folder / "net.jsonl")
    report = make_report(network(), CHIP, search_folder / "net.jsonl", data(), points=2, remedies=False, progress=False)
    assert [point.kind for point in report.points] == ["trial", "few bits"]
    for point in report.points[:1]:
        assert point.trial is not None
        trial = log.trials[point.trial]
        assert point.thresholds_sha256 == trial.thresholds_sha256 and point.plan_key == trial.score.plan_key
        assert dict(point.bits) == trial.bits


def test_points_share_histograms_and_channels(full_report: Report) -> None:
    assert len(full_report.points) == 4 and len(full_report.drawings) == 1
    used = {n.histogram for p in full_report.points[1:] for n in p.nodes} - {None}
    assert used and max(i for i in used if i is not None) < len(full_report.histograms)
    named = [n.name for n in full_report.drawings[0].nodes]
    assert all([n.name for n in point.nodes] == named for point in full_report.points)


def test_pairs_are_of_all_points_on_all_data(full_report: Report) -> None:
    expected = [
        (i, j, name) for i in range(4) for j in range(i + 1, 4) for name in ("calibration data", "held-out data")
    ]
    assert [(pair.first, pair.second, pair.data) for pair in full_report.pairs] == expected
    for pair in full_report.pairs:
        values = [_sqnr(full_report, i, pair.data) for i in (pair.first, pair.second)]
        difference = next(f.difference for f in pair.figures if f.measure == "sqnr")
        assert difference == pytest.approx(values[1] - values[0], abs=1e-3)


def _sqnr(report: Report, point: int, name: str) -> float:
    verdict = next(v for v in report.points[point].verdicts if v.data == name)
    return float(next(m.figures["sqnr"] for m in verdict.models if m.name == "simulated"))


def test_without_data_there_is_what_the_plan_says(search_folder: Path) -> None:
    report = make_report(network(), CHIP, search_folder / "net.json", progress=False)
    (point,) = report.points
    assert not point.verdicts and not report.histograms and report.channels
    assert all(node.sqnr is None and node.blame is None for node in point.nodes)
    assert any(node.share is not None for node in point.nodes) and "no data was given" in " ".join(report.notes)
    assert any("overflow" in each.question for each in point.short)


def test_a_log_without_data_or_network_shows_its_trials(search_folder: Path) -> None:
    report = make_report(torch.nn.Identity(), CHIP, search_folder / "net.jsonl", progress=False)
    assert not report.points and report.trials is not None and "the network is not shown" in " ".join(report.notes)


def test_other_data_than_the_search_had_gives_no_points_of_the_log(search_folder: Path) -> None:
    report = make_report(network(), CHIP, search_folder / "net.jsonl", data(7), progress=False)
    assert not report.points and "not that of the search" in " ".join(report.notes)
    records = [search_folder / "net.jsonl", search_folder / "net.front.json"]
    helped = make_report(network(), CHIP, records, data(7), points=2, remedies=False, progress=False)
    assert len(helped.points) == 2 and "not that of the search" not in " ".join(helped.notes)


def test_more_points_are_shown_where_they_are_asked_for(full_report: Report, search_folder: Path) -> None:
    assert "4 points are shown in full (at most 4, see --points)" in " ".join(full_report.notes)
    front = hago.load_front(search_folder / "net.front.json")
    report = make_report(network(), CHIP, front, points=4, progress=False)
    assert len(report.points) == min(4, len(front)) > 3


def test_sensitivities_are_those_of_the_table(search_folder: Path, tmp_path: Path) -> None:
    table = hago.measure_sensitivity(network(), CHIP, data())
    table.save(tmp_path / "sensitivity.json")
    records = [tmp_path / "sensitivity.json", search_folder / "net.json"]
    report = make_report(network(), CHIP, records, progress=False)
    assert "a log has no sensitivities" not in " ".join(report.notes)
    assert report.sensitivities == {k: {str(b): x for b, x in by.items()} for k, by in table.losses.items()}


# ---------------------------------------------------------------- refused records
def test_records_that_do_not_go_together_are_refused(search_folder: Path, tmp_path: Path) -> None:
    log, strategy = search_folder / "net.jsonl", hago.Strategy.load(search_folder / "net.json")
    with pytest.raises(LogError, match="one log at most"):
        read_records([log, log])
    with pytest.raises(LogError, match="nothing to report on"):
        read_records([])
    with pytest.raises(StrategyMismatch, match="different models"):
        make_report(network(), CHIP, [log, replace(strategy, model_hash="0" * 64)], progress=False)
    with pytest.raises(StrategyMismatch, match="load the model and weights"):
        other = torch.nn.Conv2d(1, 2, 3).eval()
        make_report(other, CHIP, [strategy], [torch.randn(2, 1, 6, 6)], progress=False)
    assert make_report(network(), CHIP, [log, strategy], data(), remedies=False, points=1, progress=False).points
    with pytest.raises(StrategyMismatch, match="was made for hardware"):
        make_report(network(), "x86_vnni", [strategy], progress=False)
    (tmp_path / "edited.json").write_text('{"version": 1, "objective": "sqnr", "losses": [1]}', "utf-8")
    with pytest.raises(LogError, match="losses by group"):
        read_records([tmp_path / "edited.json"])
    with pytest.raises(HagoError):
        read_records([tmp_path / "missing.json"])


# ---------------------------------------------------------------- drawing and values
@pytest.mark.parametrize("count", [0, 1, 2, 5, 40])
@pytest.mark.parametrize("most", [0, 1, 2, 3, 7])
def test_points_are_spread_over_the_front(count: int, most: int) -> None:
    chosen = spread(count, most, first=count - 1)
    assert len(chosen) == len(set(chosen)) == min(count, most) and set(chosen) <= set(range(count))
    if count and most:
        assert chosen[0] == count - 1 and (most == 1 or 0 in chosen)


def test_nodes_of_a_drawing_do_not_overlap_and_edges_join_them() -> None:
    graph = network()
    drawing = draw_network(graph)
    boxes = {n.name: (n.x, n.y) for n in drawing.nodes}
    names = list(boxes)
    for i, first in enumerate(names):
        for second in names[:i]:
            (x, y), (u, v) = boxes[first], boxes[second]
            assert abs(x - u) >= NODE_WIDTH or abs(y - v) >= NODE_HEIGHT
    expected = {(source, n.name) for n in graph for source in n.inputs if source in boxes}
    assert {(edge.source, edge.target) for edge in drawing.edges} == expected
    for edge in drawing.edges:
        (x, y), (u, v) = edge.path[0], edge.path[-1]
        assert abs(x - boxes[edge.source][0]) < NODE_WIDTH / 2 and y == boxes[edge.source][1] + NODE_HEIGHT / 2
        assert abs(u - boxes[edge.target][0]) < NODE_WIDTH / 2 and v == boxes[edge.target][1] - NODE_HEIGHT / 2
    assert all(0 < x < drawing.width and 0 < y < drawing.height for x, y in boxes.values())


def test_histograms_count_every_value() -> None:
    graph = network()
    batches = hago_batches()
    found = histograms_of(graph, batches, graph_ops())
    for node in graph.computed:
        assert sum(found[node.name].counts) == 16 * math.prod(node.shape or ())
        assert found[node.name].low < found[node.name].high


def hago_batches() -> list[Any]:
    from hago.data import Batches

    return list(Batches(data(), network().inputs))


def graph_ops() -> Any:
    from hago.ops import OPS

    return OPS


def test_ram_is_between_the_widest_node_and_the_sum_of_all(search_folder: Path) -> None:
    cost = hago.estimate_cost(network(), CHIP, search_folder / "net.json")
    sizes = [node.write_bytes for node in cost.nodes]
    most = ram_bytes(network(), cost)
    assert max(sizes) < most < sum(sizes) + 4 * 36 + 1
    chain = hago.from_torch(
        torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(4))).eval(), (torch.randn(2, 4),)
    )
    strategy = hago.quantize(chain, CHIP, [torch.randn(8, 4)]).strategy
    cost = hago.estimate_cost(chain, CHIP, strategy)
    sizes = [16.0, *(float(node.write_bytes) for node in cost.nodes)]
    assert ram_bytes(chain, cost) == max(a + b for a, b in pairwise(sizes))
    assert list(accumulate(sizes))[-1] > ram_bytes(chain, cost)
