"""Searches with Optuna's samplers: warm starts, limits, storages that are shared or cannot be reached."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import optuna
import pytest
from products import some
from toys import TOY, header_of, make_space, run, separable

from hago.errors import HagoError
from hago.plan.space import Bits, Space
from hago.searchers.registry import make_searcher
from hago.searchers.surrogate import Surrogate, Term
from hago.study.loop import run_study
from hago.study.score import Score

SPACE = make_space({f"n{i}:0": (8, 7, 6, 5, 4) for i in range(6)})
GUIDE = Surrogate(
    "size",
    {k: {b: (1 + i) * 4.0**-b for b in g.choices} for i, (k, g) in enumerate(SPACE.groups.items())},
    [Term((k,), {(b,): float(b) for b in g.choices}) for k, g in SPACE.groups.items()],
    limit=36.0,
)


def limited(bits: Bits) -> Score:
    size = sum(bits.values())
    return Score(-GUIDE.loss(bits), costs={"size": float(size)}, shortfall=max(0.0, size / 36 - 1), total_bits=size)


@pytest.mark.parametrize("name", ["tpe", "nsga2", "gp"])
def test_starts_from_the_expected_front(name: str) -> None:
    options = {"trials": 6, "startup": 4, "warm": 4}
    result = run_study(SPACE, make_searcher(name, SPACE, surrogate=GUIDE, options=options), limited)
    sizes = [t.score.costs["size"] for t in result.trials]
    assert sizes[:5] == [48, 36, 32, 28, 24] and len(sizes) == 6
    assert result.best.index == 1


@pytest.mark.parametrize("name", ["tpe", "nsga2", "gp"])
def test_the_model_is_used_after_the_startup(name: str) -> None:
    options = {"trials": 14, "startup": 4, "warm": 0}
    result = run_study(SPACE, make_searcher(name, SPACE, surrogate=GUIDE, options=options), limited)
    assert len(result.trials) == 14
    first, later = (sum(t.score.shortfall for t in part) for part in (result.trials[1:7], result.trials[8:]))
    assert name == "nsga2" or later <= first


def test_points_that_cannot_run_are_told_as_failures(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'study.db'}"

    def evaluate(bits: Bits) -> Score:
        return Score(float("-inf"), infeasible="none") if bits["n0:0"] < 8 else limited(bits)

    run("tpe", space=SPACE, evaluate=evaluate, options={"trials": 8, "storage": url, "study": "s", "warm": 2})
    study = optuna.load_study(study_name="s", storage=url)
    states = {t.state.name for t in study.trials if t.state.is_finished()}
    assert states == {"COMPLETE", "FAIL"}


@pytest.mark.parametrize("kind", ["sqlite", "journal"])
def test_searches_share_a_study(kind: str, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'study.db'}" if kind == "sqlite" else f"journal:{tmp_path / 'study.log'}"
    for _ in range(2):
        result = run(
            "tpe",
            space=SPACE,
            evaluate=limited,
            options={"trials": 5, "startup": 2, "warm": 2, "storage": url, "study": "shared"},
        )
        assert result.stopped_because == "finished"
    storage = (
        url
        if kind == "sqlite"
        else optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(str(tmp_path / "study.log")))
    )
    study = optuna.load_study(study_name="shared", storage=storage)
    told = [t for t in study.trials if t.state.name == "COMPLETE"]
    assert len(told) >= 10 and study.best_value >= result.score.value - 1e-9


def logged(path: Path) -> list[tuple[dict[str, int], float]]:
    lines = [json.loads(line) for line in path.read_text().splitlines()[1:]]
    return [(line["strategy"]["bits"], line["score"]["value"]) for line in lines]


@pytest.mark.parametrize(("name", "first", "lost"), some(2, ["tpe", "nsga2", "gp"], [7, 8], [False, True]))
def test_a_search_on_a_storage_is_continued(name: str, first: int, lost: bool, tmp_path: Path) -> None:
    """If the search was stopped within a batch, the study lacks the log's last trial."""
    path, database = tmp_path / "log.jsonl", tmp_path / "study.db"
    options = {"trials": 14, "startup": 4, "warm": 3, "batch": 2, "storage": f"sqlite:///{database}", "study": "s"}

    def go(budget: int) -> None:
        searcher = make_searcher(name, SPACE, surrogate=GUIDE, options=options)
        run_study(SPACE, searcher, limited, log=path, header=header_of(searcher, SPACE), budget=budget)

    go(first)
    if lost:
        database.unlink()
    earlier = logged(path)
    go(12)
    trials = logged(path)
    assert trials[: len(earlier)] == earlier and len(trials) == 12
    assert len({json.dumps(bits, sort_keys=True) for bits, _ in trials}) == 12
    go(99)
    trials = logged(path)
    assert len(trials) == 14
    study = optuna.load_study(study_name="s", storage=options["storage"])
    ended = [t for t in study.trials if t.state.name == "COMPLETE"]
    known = {(tuple(bits[k] for k in SPACE.groups), value) for bits, value in trials}
    assert {(tuple(t.params[k] for k in SPACE.groups), t.values[0]) for t in ended} == known


@pytest.mark.parametrize("first", [0, 2, 3])
def test_points_that_were_asked_and_not_scored_are_asked_again(first: int, tmp_path: Path) -> None:
    """The start, whose evaluation fails, or a point of the expected front, where the budget ends within a batch."""
    path, options = tmp_path / "log.jsonl", {"trials": 10, "startup": 2, "warm": 4, "batch": 2, "study": "s"}
    options["storage"] = f"sqlite:///{tmp_path / 'study.db'}"

    def go(budget: int, evaluate: Any = limited, log: Path = path) -> None:
        searcher = make_searcher("tpe", SPACE, surrogate=GUIDE, options=options)
        run_study(SPACE, searcher, evaluate, log=log, header=header_of(searcher, SPACE), budget=budget)

    def failing(bits: Any) -> Any:
        raise ZeroDivisionError

    if first:
        go(first)
    else:
        with pytest.raises(ZeroDivisionError):
            go(10, failing)
    go(10)
    found = [json.dumps(bits, sort_keys=True) for bits, _ in logged(path)]
    options["storage"] = ""
    go(10, log=tmp_path / "alone.jsonl")
    alone = [json.dumps(bits, sort_keys=True) for bits, _ in logged(tmp_path / "alone.jsonl")]
    assert set(alone[:5]) <= set(found)


@pytest.mark.parametrize(
    "url", ["sqlite:////nowhere/at/all/study.db", "nonsense://x", "postgresql+psycopg://u@127.0.0.1:1/x"]
)
def test_a_storage_that_cannot_be_reached(url: str) -> None:
    if url.startswith("postgresql"):
        pytest.importorskip("psycopg")
    with pytest.raises(HagoError, match="storage"):
        run("tpe", options={"trials": 3, "storage": url})


def test_settings_of_optuna_are_restored(caplog: pytest.LogCaptureFixture) -> None:
    level = logging.getLogger("optuna").level
    run("gp", options={"trials": 3, "warm": 1})
    assert logging.getLogger("optuna").level == level and not caplog.records


def test_invalid_options_are_refused() -> None:
    with pytest.raises(HagoError, match="expected 1 or more trials"):
        make_searcher("tpe", TOY, options={"trials": 0})
    with pytest.raises(HagoError, match="has no option 'trails'.*Did you mean 'trials'"):
        make_searcher("tpe", TOY, options={"trails": 1})


def test_a_space_of_one_point(tmp_path: Path) -> None:
    only = Space({k: type(g)(k, g.source, g.edges, g.choices[:1]) for k, g in TOY.groups.items()})
    assert len(run("gp", space=only, evaluate=separable, options={"trials": 9}).trials) == 1
