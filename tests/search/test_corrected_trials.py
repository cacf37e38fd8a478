"""Limits and fronts once layers are corrected: limits hold in what is returned, and points of a front are corrected."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from networks import ResNet, Small, Uneven, images, randomized
from torch import Tensor, nn
from toys import timeless

import hago
from hago.errors import InfeasibleBits, LogError
from hago.graph import Graph
from hago.search import EFFORTS, corrected_trials
from hago.search.corrected_trials import CorrectedTrial, CorrectedTrials
from hago.search.goal import GoalOptions, make_goal
from hago.search.pareto_front import load_front
from hago.search.replay import replay_log
from hago.search.session import SearchOptions, run_search
from hago.study import Score, Trial, read_log

MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "uneven": (lambda: Uneven().eval(), (16, 3, 8, 8)),
    "small": (lambda: randomized(Small()), (16, 1, 6, 6)),
    "residual": (lambda: randomized(ResNet((4, 8), 1)), (16, 3, 12, 12)),
}
CHIPS = ("x86_vnni", "vta", "tflite")


@cache
def network(name: str) -> tuple[Graph, list[Tensor]]:
    """A model, imported once for all tests, and its data."""
    make, shape = MODELS[name]
    data = [images(*shape, seed=n) for n in range(6)]
    return hago.from_torch(make(), data[0][:2]), data


def searched(name: str, chip: str, **options: Any) -> tuple[hago.Strategy, Any]:
    model, data = network(name)
    return hago.search_quantize_strategy(model, chip, data, progress=False, **options)


def measured(name: str, chip: str, strategy: hago.Strategy, data: Sequence[Tensor] | None = None) -> dict[str, Any]:
    model, own = network(name)
    return hago.evaluate_strategy(model, chip, strategy, own if data is None else data).results


# ---------------------------------------------------------------- limits
@pytest.mark.some_cases(5)
@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("searcher, least", [("auto", 20), ("auto", 30), ("greedy", 30)])
def test_a_limit_on_a_measure_holds_in_what_is_returned(
    name: str, chip: str, searcher: str, least: int, tmp_path: Path
) -> None:
    how: dict[str, Any] = {"minimize": "weight_bytes", "keep": f"sqnr >= {least}", "searcher": searcher}
    strategy, score = searched(name, chip, log=tmp_path / "log", **how)
    everything = measured(name, chip, strategy)
    assert everything["sqnr"] >= least
    assert everything["sqnr"] == strategy.made_by["results"]["sqnr"]
    first = score.result.trials[0]  # of a guided search, the cheapest expected point that keeps the limits
    assert searcher == "greedy" or first.results["sqnr"] >= least
    assert strategy.made_by["costs"]["weight_bytes"] <= first.score.costs["weight_bytes"]
    header = read_log(tmp_path / "log").header
    assert header is not None and header.settings["limits"] == [f"sqnr >= {least}"]


def test_trials_go_below_a_limit_by_what_corrections_gain() -> None:
    how: dict[str, Any] = {"minimize": "weight_bytes", "keep": "sqnr >= 30"}
    strategy, score = searched("uneven", "vta", **how)
    best = score.result.best
    assert best.results["sqnr"] < 30 <= float(score)
    assert strategy.made_by["goal"]["expected_gains"]["sqnr"] > 1
    _, plain = searched("uneven", "vta", corrections="none", **how)
    assert best.score.costs["weight_bytes"] < plain.result.best.score.costs["weight_bytes"]


def test_a_limit_that_only_corrections_reach_is_not_refused() -> None:
    name, chip = "uneven", "vta"
    (_, plain), (_, corrected) = (
        searched(name, chip, corrections=how, searcher="sensitivity") for how in ("none", ["rounding", "bias"])
    )
    assert corrected > plain + 1
    between = (plain + corrected) / 2
    how: dict[str, Any] = {"minimize": "weight_bytes", "keep": f"sqnr >= {between}", "searcher": "sensitivity"}
    strategy, _ = searched(name, chip, corrections=["rounding", "bias"], **how)
    assert strategy.made_by["results"]["sqnr"] >= between
    with pytest.raises(InfeasibleBits, match="none keeps every limit"):
        searched(name, chip, corrections="none", **how)


@pytest.mark.parametrize("searcher", ["auto", "greedy", "random:trials=12", "pareto:points=8,rounds=1"])
def test_what_is_on_disk_while_the_search_runs_keeps_the_limits(searcher: str, tmp_path: Path) -> None:
    saved = tmp_path / "best.json"
    seen: list[float] = []

    def look(search: hago.RunningSearch, trial: Trial) -> None:
        if saved.exists():
            seen.append(hago.Strategy.load(saved).made_by["results"]["sqnr"])

    how: dict[str, Any] = {"minimize": "weight_bytes", "keep": "sqnr >= 30", "searcher": searcher}
    searched("uneven", "vta", save=saved, callbacks=[look], front=tmp_path / "front.json", **how)
    assert seen and min(seen) >= 30
    front = load_front(tmp_path / "front.json")
    assert all(point.score >= 30 for point in front)
    assert hago.Strategy.load(saved) in [point.strategy for point in front]


def test_a_search_within_limits_goes_on_and_replays_as_it_began(tmp_path: Path) -> None:
    how: dict[str, Any] = {"minimize": "weight_bytes", "keep": "sqnr >= 30"}
    whole, _ = searched("uneven", "vta", log=tmp_path / "whole", **how)
    searched("uneven", "vta", log=tmp_path / "parts", budget=3, **how)
    parts, _ = searched("uneven", "vta", log=tmp_path / "parts", **how)
    assert timeless((tmp_path / "whole").read_bytes()) == timeless((tmp_path / "parts").read_bytes())
    assert whole.bits == parts.bits and whole.corrections == parts.corrections
    model, data = network("uneven")
    assert replay_log(model, "vta", tmp_path / "whole", data, best_only=False).same
    header = read_log(tmp_path / "whole").header
    assert header is not None and header.settings["expected_gains"]["sqnr"] > 0
    assert hago.replay(model, "vta", whole, data).same


WITHIN_LIMITS: dict[str, Any] = {"minimize": "weight_bytes", "keep": "sqnr >= 30", "budget": 1}


@pytest.fixture(scope="module")
def log_within_limits(tmp_path_factory: pytest.TempPathFactory) -> str:
    log = tmp_path_factory.mktemp("limits") / "log"
    searched("small", "vta", log=log, **WITHIN_LIMITS)
    return log.read_text("utf-8")


@pytest.mark.parametrize("gains", [{"sqnr": -1.0}, {"sqnr": "3"}, {"sqnr": True}, [3.0], None])
def test_edited_gains_are_refused(gains: Any, log_within_limits: str, tmp_path: Path) -> None:
    log = tmp_path / "log"
    first, *others = log_within_limits.splitlines()
    header = json.loads(first)
    header["settings"]["expected_gains"] = gains
    log.write_text("\n".join([json.dumps(header), *others]) + "\n", "utf-8")
    with pytest.raises(LogError, match="expected_gains"):
        searched("small", "vta", log=log, **WITHIN_LIMITS)


GOAL = replace(make_goal(GoalOptions(minimize="weight_bytes", keep="sqnr >= 20")), expected_gains={"sqnr": 5.0})


def made_up(values: Sequence[tuple[float, float]]) -> list[Trial]:
    """Trials of these weight bytes and this SQNR."""
    scores = [GOAL.applied(Score(q, {"sqnr": q, "samples": 8}), {"weight_bytes": c}) for c, q in values]
    return [Trial(index, {"a": 8}, score) for index, score in enumerate(scores)]


class Gaining(CorrectedTrials):
    """Corrections by which every trial gains as much, with which some are not sure to keep the limits."""

    def __init__(self, gain: float, unsure: Collection[int] = ()) -> None:
        self.gain, self.unsure, self.tried = gain, unsure, list[int]()
        scorer = SimpleNamespace(
            goal=GOAL, with_goal=lambda goal: scorer, prepared=SimpleNamespace(correction_names=())
        )
        scorer.evaluator = None
        super().__init__(scorer, EFFORTS["good"], lambda text: None)  # type: ignore[arg-type]

    def _by(self, correct: Any, trial: Trial) -> CorrectedTrial:
        self.tried.append(trial.index)
        value = trial.results["sqnr"] + self.gain
        score = GOAL.asked.applied(Score(value, {"sqnr": value}), trial.score.costs)
        return CorrectedTrial(trial, None, score, trial.index not in self.unsure)  # type: ignore[arg-type]


@pytest.mark.parametrize("gain", [0.0, 2.0, 5.0, 8.0])
def test_the_cheapest_trial_that_keeps_the_limits_is_found_in_few_corrections(gain: float) -> None:
    trials = made_up([(100.0 - i, 30.0 - i) for i in range(40)])
    corrections = Gaining(gain)
    best = next(t for t in trials if t.results["sqnr"] == 15.0)
    assert corrections.best(best, trials).trial.results["sqnr"] == 20.0 - gain
    assert len(corrections.tried) <= 7


def test_what_is_not_sure_is_taken_only_where_nothing_is() -> None:
    trials = made_up([(100.0 - i, 30.0 - i) for i in range(16)])
    best = trials[15]
    assert Gaining(5.0).best(best, trials).trial.index == 15
    assert Gaining(5.0, unsure=range(13, 16)).best(best, trials).trial.index == 12
    nothing_sure = Gaining(5.0, unsure=range(16)).best(best, trials)
    assert not nothing_sure.score.shortfall and not nothing_sure.is_sure


class Turning(Gaining):
    """Corrections of several turns, after which trials have gained something else than after one."""

    def __init__(self, once: float, turns: float) -> None:
        super().__init__(once)
        self.once, self.turns, self._effort = once, turns, EFFORTS["best"]

    def _by(self, correct: Any, trial: Trial) -> CorrectedTrial:
        self.gain = self.once if correct == self._correct else self.turns
        return super()._by(correct, trial)


def test_what_further_turns_give_is_taken_unless_they_lose_a_limit() -> None:
    trials = made_up([(100.0 - i, 30.0 - i) for i in range(16)])
    lost = Turning(5.0, -20.0).best(trials[15], trials)
    assert not lost.score.shortfall and lost.score.results["sqnr"] == trials[15].results["sqnr"] + 5.0
    gained = Turning(-20.0, 5.0).best(trials[15], trials)
    assert not gained.score.shortfall and gained.score.results["sqnr"] == gained.trial.results["sqnr"] + 5.0


@pytest.mark.parametrize("names", [["thresholds"], ["equalization"], None])
def test_a_limit_that_a_point_keeps_on_all_samples_is_not_refused(names: Sequence[str] | None) -> None:
    """Whatever it has on the last quarter of the samples."""
    model, data = network("small")
    lopsided = [*data[:4], *(3.0 * batch for batch in data[:2])]
    how: dict[str, Any] = {"minimize": "weight_bytes", "corrections": names, "budget": 12, "progress": False}
    first, _ = hago.search_quantize_strategy(model, "vta", lopsided, keep="sqnr >= 26", **how)
    again = first.made_by["results"]["sqnr"] - 1e-6
    second, _ = hago.search_quantize_strategy(model, "vta", lopsided, keep=f"sqnr >= {again}", **how)
    assert second.made_by["results"]["sqnr"] >= again


@pytest.mark.parametrize("keep", ["agreement >= 95 %", "sqnr >= 30"])
def test_further_turns_lose_no_limit(keep: str) -> None:
    strategy, _ = searched("small", "vta", minimize="weight_bytes", keep=keep, effort="best", budget=6)
    figure, least = ("agreement", 0.95) if "agreement" in keep else ("sqnr", 30)
    assert strategy.made_by["results"][figure] >= least
    assert measured("small", "vta", strategy)["sqnr"] == strategy.made_by["results"]["sqnr"]


def test_a_start_that_was_confirmed_stands_where_no_cost_matters() -> None:
    goal = replace(make_goal(GoalOptions(keep="agreement >= 50 %")), expected_gains={"agreement": 0.1})
    scores = [goal.applied(Score(q, {"sqnr": q, "agreement": 0.9}), {"weight_bytes": 1.0}) for q in (20.0, 25.0)]
    trials = [Trial(index, {"a": 8}, score) for index, score in enumerate(scores)]
    corrections = Gaining(0.0)
    corrections._searched, corrections._asked = goal, goal.asked
    assert corrections._candidates(trials[0], trials) == [trials[0]]


# ---------------------------------------------------------------- fronts
@pytest.fixture(scope="module", params=["x86_vnni", "vta"])
def front_search(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    model, data = network("residual")
    folder = tmp_path_factory.mktemp("front")
    options = SearchOptions.of("pareto", front=folder / "front.json", log=folder / "log", progress=False)
    return request.param, run_search(model, request.param, data, options), folder


def test_points_of_a_front_are_corrected(front_search: Any) -> None:
    chip, outcome, folder = front_search
    front = outcome.front
    assert load_front(folder / "front.json") == front
    by_trial = [outcome.result.trials[p.trial] for p in front]
    better = [p for p, trial in zip(front, by_trial, strict=True) if p.score > trial.results["sqnr"]]
    assert len(better) >= 2 and all(p.strategy.corrections.offsets for p in better)
    assert [p.score for p in front] == sorted({p.score for p in front})
    assert [p.costs["weight_bytes"] for p in front] == sorted({p.costs["weight_bytes"] for p in front})
    for point in front:
        results = measured("residual", chip, point.strategy)
        assert results["sqnr"] == point.score == point.strategy.made_by["results"]["sqnr"]


def test_no_trial_is_above_a_corrected_front(front_search: Any) -> None:
    _, outcome, _ = front_search
    for trial in outcome.result.trials:
        if trial.score.accepted:
            cost, value = trial.score.costs["weight_bytes"], trial.results["sqnr"]
            assert any(p.costs["weight_bytes"] <= cost and p.score >= value for p in outcome.front)


def test_a_front_of_few_points_is_corrected_in_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corrected_trials, "FRONT_POINTS", 2)
    model, data = network("residual")
    corrected: list[int] = []
    by = CorrectedTrials._by

    def noted(self: CorrectedTrials, correct: Any, trial: Trial) -> CorrectedTrial:
        corrected.append(trial.index)
        return by(self, correct, trial)

    monkeypatch.setattr(CorrectedTrials, "_by", noted)
    options = SearchOptions.of("pareto:points=6,rounds=1", progress=False)
    outcome = run_search(model, "vta", data, options)
    assert len(corrected) == 3 and corrected[0] == outcome.result.best.index
    plain = run_search(model, "vta", data, options.changed(corrections="none"))
    assert not any(p.strategy.corrections.offsets for p in plain.front)


@pytest.mark.parametrize("count", [0, 1, 2, 3, 16, 40])
def test_points_of_a_front_are_corrected_from_the_cheapest_on(count: int) -> None:
    trials = made_up([(100.0 - i, 30.0 - i) for i in range(count)])[::-1]
    made = [corrected.trial for corrected in Gaining(1.0).spread(trials)]
    places = [trials.index(trial) for trial in made]
    assert len(places) == min(count, corrected_trials.FRONT_POINTS)
    assert places[:1] + places[-1:] == [0, count - 1][: 2 * len(places)]
    steps = {b - a for a, b in itertools.pairwise(places)}
    assert not steps or (min(steps) > 0 and max(steps) <= min(steps) + 1)  # spread evenly


def test_the_file_of_a_front_has_every_point_as_soon_as_it_is_corrected(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path, spread = tmp_path / "front.json", CorrectedTrials.spread
    seen: list[int] = []

    def look(self: CorrectedTrials, trials: Sequence[Trial]) -> Any:
        for made in spread(self, trials):
            seen.append(sum(bool(point.strategy.corrections.offsets) for point in load_front(path)))
            yield made

    monkeypatch.setattr(CorrectedTrials, "spread", look)
    searched("residual", "x86_vnni", searcher="pareto:points=8,rounds=1", front=path)
    assert len(seen) > 4 and max(seen) > 2


def test_what_is_recorded_as_kept_is_in_the_strategy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A correction that brings outputs closer, for which the goal ranks the trial no higher, is not kept."""
    kept, _ = searched("uneven", "vta", budget_cost="size <= 80 %")
    correct = corrected_trials.correct_point
    monkeypatch.setattr(
        corrected_trials, "correct_point", lambda p, *how: replace(correct(p, *how), measured=p.measured)
    )
    dropped, _ = searched("uneven", "vta", budget_cost="size <= 80 %")
    of_layers = {"rounding", "bias"}
    for strategy, has_offsets in ((kept, True), (dropped, False)):
        named = [p for p in strategy.made_by["passes"] if p["kept"] and of_layers & set(p["names"])]
        assert bool(strategy.corrections.offsets) == bool(named) == has_offsets
