"""Fronts as values: what a search hands out, what its file holds, and files that are none."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from building import residual_block, seeded

import hago
from hago.errors import HagoError, LogError
from hago.search.intervals import jackknife_interval, quick_interval
from hago.search.objective import OBJECTIVES
from hago.search.pareto_front import ParetoFront, load_front
from hago.serialization.summary import MOST_DB
from hago.study.log import read_log

DATA = [(seeded(8, 3, 8, 8), torch.arange(8) % 5)]


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory) -> tuple[ParetoFront, Path, hago.Strategy]:
    """A front, where it lies, and the best strategy."""
    folder = tmp_path_factory.mktemp("front")
    paths = {"log": folder / "log", "front": folder / "front.json"}
    strategy, score = hago.search_quantize_strategy(
        residual_block(),
        "vta",
        DATA,
        estimator="max_range",
        searcher="pareto",
        budget=12,
        progress=False,
        corrections="none",
        **paths,
    )
    return score.front, folder, strategy


def test_the_file_holds_what_the_search_hands_out(searched: tuple[ParetoFront, Path, hago.Strategy]) -> None:
    front, folder, strategy = searched
    assert load_front(folder / "front.json") == front
    assert len(front) > 1
    assert [p.costs["weight_bytes"] for p in front] == sorted(p.costs["weight_bytes"] for p in front)
    assert [p.score for p in front] == sorted(p.score for p in front)
    assert front[-1].strategy == strategy
    assert str(front).splitlines()[0].split()[:3] == ["trial", "weight_bytes", "SQNR"]


def test_a_point_with_the_outputs_of_the_float_model_is_exact(
    searched: tuple[ParetoFront, Path, hago.Strategy],
) -> None:
    front = searched[0]
    exact = replace(front[-1], score=MOST_DB, interval=(MOST_DB, MOST_DB))
    assert str(replace(front, points=(front[0], exact))).splitlines()[-1].split()[-2:] == ["exact", "exact"]
    of_accuracy = replace(front, measure="sim_acc", points=(replace(exact, score=1.0),))
    assert "exact" not in str(of_accuracy)


def test_a_point_is_the_trial_of_the_log(searched: tuple[ParetoFront, Path, hago.Strategy]) -> None:
    front, folder, _ = searched
    trials = read_log(folder / "log").trials
    for point in front:
        trial = trials[point.trial]
        assert (point.score, point.costs) == (trial.results["sqnr"], trial.score.costs)
        assert point.strategy.made_by["results"] == trial.results
        assert point.interval == trial.score.interval and point.interval[0] < point.score < point.interval[1]


def test_a_point_can_be_run_and_replayed(searched: tuple[ParetoFront, Path, hago.Strategy], tmp_path: Path) -> None:
    point = load_front(searched[1] / "front.json")[0]
    assert hago.replay(residual_block(), "vta", point.strategy, DATA).same
    point.strategy.save(tmp_path / "one.json")
    assert hago.Strategy.load(tmp_path / "one.json") == point.strategy


def test_ranges_that_points_share_stand_once(searched: tuple[ParetoFront, Path, hago.Strategy]) -> None:
    front, folder, _ = searched
    ranges = json.loads((folder / "front.json").read_text())["ranges"]
    assert len({json.dumps(r) for r in ranges}) == len(ranges)
    assert len(ranges) < sum(len(p.strategy.thresholds) for p in front)


def test_a_score_is_a_number_like_any_other() -> None:
    strategy, score = hago.search_quantize_strategy(residual_block(), "vta", DATA, budget=1, progress=False)
    assert isinstance(score, float) and score == strategy.made_by["results"]["sim_acc"] and f"{score:.3f}"
    assert [p.trial for p in score.front] == [0]


# ---------------------------------------------------------------- files that are none
def change(folder: Path, to: Path, edit: Any) -> Path:
    value = json.loads((folder / "front.json").read_text())
    edit(value)
    to.write_text(json.dumps(value))
    return to


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (lambda v: v.update(version=9), "larger one is written by a newer hago"),
        (lambda v: v.update(version=1), "version 1, without strategies"),
        (lambda v: v.pop("ranges"), "the key 'ranges'"),
        (lambda v: v["points"][0].pop("trial"), "the key 'trial'"),
        (lambda v: v.update(cost="speed"), "has no figure 'speed' among its costs"),
        (lambda v: v["ranges"].clear(), "there are 0 ranges"),
        (lambda v: v["points"][0]["strategy"].pop("bits"), "the key 'bits'"),
        (lambda v: v["points"][0].update(interval=[1]), "points[0].interval"),
    ],
)
def test_what_is_wrong_is_named(
    searched: tuple[ParetoFront, Path, hago.Strategy], tmp_path: Path, edit: Any, says: str
) -> None:
    path = change(searched[1], tmp_path / "front.json", edit)
    with pytest.raises(LogError) as caught:
        load_front(path)
    assert says in str(caught.value) and str(path) in str(caught.value)


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(HagoError, match="cannot read front"):
        load_front(tmp_path / "nothing.json")
    (tmp_path / "front.json").write_bytes(b"\xff{")
    with pytest.raises(HagoError, match="cannot read front"):
        load_front(tmp_path / "front.json")


def test_an_empty_front_is_read(searched: tuple[ParetoFront, Path, hago.Strategy], tmp_path: Path) -> None:
    empty = replace(searched[0], points=())
    empty.save(tmp_path / "front.json")
    assert load_front(tmp_path / "front.json") == empty


# ---------------------------------------------------------------- intervals
def test_the_quick_interval_of_a_mean_is_the_jackknifes() -> None:
    x = torch.randn(50, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    exact = jackknife_interval(x, lambda t: float(t[0]))
    assert quick_interval(x, lambda t: float(t[0])) == pytest.approx(exact, rel=1e-6)


def test_the_quick_interval_of_a_ratio_is_nearly_the_jackknifes() -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.rand(400, 2, dtype=torch.float64, generator=generator) + torch.tensor([1.0, 0.1])
    finish = OBJECTIVES["sqnr"].finish
    low, high = jackknife_interval(x, finish)
    assert quick_interval(x, finish) == pytest.approx((low, high), abs=0.02 * (high - low))


def test_one_sample_says_nothing() -> None:
    assert quick_interval(torch.ones(1, 1), lambda t: float(t[0])) == (-float("inf"), float("inf"))
