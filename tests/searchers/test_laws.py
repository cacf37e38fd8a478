"""Laws that every searcher obeys in the search loop."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
from products import whole
from toys import SMALL, TARGET, TOY, Counting, chain, header_of, run, separable, timeless, without_relu

from hago.searchers.registry import SEARCHERS, make_searcher
from hago.study.log import best_trial

ALL = pytest.mark.parametrize("name", sorted(SEARCHERS))
#: Searchers that take milliseconds to ask a point: a law that runs hundreds of searches takes fewer.
SLOW = ("sensitivity", "gradient", "pareto", "tpe", "nsga2", "gp")
#: Bytes from one cut inside a line to the next.
STEP = 97 if whole() else 389
START = {"conv:0": 5, "conv:1": 8, "relu:0": 8, "add:1": 16}


def test_every_searcher_has_options_here() -> None:
    assert set(SMALL) == set(SEARCHERS)


@ALL
@pytest.mark.parametrize("seed", [0, 1, 7])
def test_stays_in_the_space_and_ends(name: str, seed: int) -> None:
    searcher = make_searcher(name, TOY, seed=seed, options=SMALL[name])
    asked = 0
    while points := searcher.ask():
        for bits in points:
            TOY.check(bits)
            searcher.tell(bits, separable(bits))
            asked += 1
    assert 1 <= asked <= 48 or name == "annealing"
    assert not searcher.ask()


@ALL
def test_starts_at_the_start(name: str) -> None:
    assert run(name, start=START).trials[0].bits == START


@ALL
def test_same_seed_same_log(name: str, tmp_path: Path) -> None:
    for file in ("a", "b"):
        run(name, tmp_path / file, seed=3)
    assert timeless((tmp_path / "a").read_bytes()) == timeless((tmp_path / "b").read_bytes())


@pytest.mark.parametrize("name", ["random", "annealing"])
def test_another_seed_asks_other_points(name: str) -> None:
    a, b = (run(name, seed=seed).trials for seed in (0, 1))
    assert [t.bits for t in a] != [t.bits for t in b]


@ALL
@pytest.mark.parametrize("key", [None, without_relu])
def test_resume_at_every_cut_equals_uninterrupted(
    name: str, key, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Hundreds of short searches: what reaches the disk, and when, is tested with the log.
    monkeypatch.setattr(os, "fsync", lambda fd: None)
    whole = tmp_path / "whole"
    result = run(name, whole, plan_key=key, budget=14)
    content = whole.read_bytes()
    ends = [i + 1 for i, byte in enumerate(content) if byte == ord("\n")]
    inside = [*(end - 1 for end in ends), *range(1, len(content), STEP)]
    whole_lines = (0, *ends)
    if name in SLOW:
        ends, inside = ends[::3], inside[::25]
    cut = tmp_path / "cut"
    for at in [0, *ends, *inside]:
        cut.write_bytes(content[:at])
        notices: list[str] = []
        counting = Counting(separable)
        again = run(name, cut, counting, plan_key=key, budget=14, notice=notices.append)
        assert timeless(cut.read_bytes()) == timeless(content)
        assert (again.bits, again.score, again.stopped_because) == (
            result.bits,
            result.score,
            result.stopped_because,
        )
        assert len(notices) == (at not in whole_lines)
        kept = max(0, content[:at].count(b"\n") - 1)
        repeats = sum(t.same_as is not None for t in result.trials[kept:])
        assert len(counting.calls) == len(result.trials) - kept - repeats


@ALL
@pytest.mark.parametrize("seed", range(3))
def test_best_is_at_least_the_start(name: str, seed: int) -> None:
    space, evaluate = chain(3, 16)
    options = {"limit": 10**9} if name == "exhaustive" else SMALL[name]
    start = space.narrowest()
    result = run(name, space=space, evaluate=evaluate, seed=seed, start=start, options=options, budget=60)
    assert result.score.rank >= evaluate(start).rank
    assert result.best == best_trial(result.trials)


@pytest.mark.parametrize(
    ("name", "options"),
    [("greedy", {}), ("annealing", {}), ("exhaustive", {}), ("random", {"trials": 48}), ("rfc_greedy", {})],
)
@pytest.mark.parametrize("start", [None, START])
@pytest.mark.parametrize("seed", [0, 5])
def test_finds_the_optimum_of_a_separable_toy(name: str, options, start, seed: int) -> None:
    result = run(name, options=options, start=start, seed=seed)
    assert result.bits == {**TARGET, "relu:0": 4}
    assert result.stopped_because == "finished"


@ALL
def test_equal_plans_are_evaluated_once(name: str) -> None:
    counting = Counting(separable)
    result = run(name, evaluate=counting, plan_key=without_relu, start=START)
    keys = [without_relu(bits) for bits in counting.calls]
    assert len(keys) == len(set(keys))
    assert len(keys) == sum(t.same_as is None for t in result.trials)
    for trial in result.trials:
        if trial.same_as is not None:
            first = result.trials[trial.same_as]
            assert without_relu(first.bits) == without_relu(trial.bits)
            assert (first.score, first.same_as) == (trial.score, None)


@ALL
def test_no_point_is_asked_twice(name: str) -> None:
    points = [tuple(sorted(t.bits.items())) for t in run(name).trials]
    assert len(points) == len(set(points))


@ALL
def test_an_executor_changes_nothing_in_the_log(name: str, tmp_path: Path) -> None:
    run(name, tmp_path / "alone", plan_key=without_relu, budget=11)
    with ThreadPoolExecutor(2) as executor:
        counting = Counting(separable)
        submit = partial(executor.submit, counting)
        result = run(name, tmp_path / "many", counting, plan_key=without_relu, budget=11, submit=submit)
    assert timeless((tmp_path / "alone").read_bytes()) == timeless((tmp_path / "many").read_bytes())
    assert len(counting.calls) == sum(t.same_as is None for t in result.trials)


def test_an_executor_evaluates_nothing_that_the_log_has(tmp_path: Path) -> None:
    options = {"trials": 12, "batch": 4}
    whole = run("random", tmp_path / "log", options=options)
    content = (tmp_path / "log").read_bytes()
    for kept in range(12):
        (tmp_path / "log").write_bytes(b"".join(content.splitlines(keepends=True)[: kept + 1]))
        counting = Counting(separable)
        with ThreadPoolExecutor(2) as executor:
            submit = partial(executor.submit, counting)
            again = run("random", tmp_path / "log", counting, options=options, submit=submit)
        assert again.best.bits == whole.best.bits
        assert len(counting.calls) == 12 - kept


@ALL
def test_options_make_the_same_searcher_again(name: str) -> None:
    searcher = make_searcher(name, TOY, options=SMALL[name])
    again = make_searcher(searcher.name, TOY, options=searcher.options)
    assert again.options == searcher.options
    assert header_of(again) == header_of(searcher)


@ALL
def test_a_space_without_choices_is_one_trial(name: str) -> None:
    space, evaluate = chain(1, 32)
    only = type(space)({k: type(g)(k, g.source, g.edges, (8,)) for k, g in space.groups.items()})
    for chosen in (only, type(space)({})):
        result = run(name, space=chosen, evaluate=lambda bits: evaluate({**only.widest(), **bits}))
        assert [t.bits for t in result.trials] == [chosen.widest()]
