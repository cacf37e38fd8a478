"""The search loop: budgets, interrupts, and searchers that violate the protocol."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from toys import TOY, Counting, header_of, run, separable, timeless, without_relu

from hago.errors import HagoError, InfeasibleBits, LogError
from hago.searchers.exhaustive import StartOnlyOptions
from hago.searchers.registry import make_searcher
from hago.study.log import Trial, best_trial, read_log
from hago.study.loop import run_study
from hago.study.score import Score
from hago.study.searcher import Ask, GeneratorSearcher


@pytest.mark.parametrize("log", [False, True])
def test_trials_budget(log: bool, tmp_path: Path) -> None:
    result = run("exhaustive", tmp_path / "log" if log else None, budget="7 trials")
    assert (len(result.trials), result.stopped_because) == (7, "trials")


def test_seconds_budget_counts_earlier_sessions(tmp_path: Path) -> None:
    ticks = itertools.count()

    def clock() -> float:
        return float(next(ticks))

    first = run("exhaustive", tmp_path / "log", budget="40s", clock=clock)
    assert first.stopped_because == "seconds"
    assert 1 < len(first.trials) < 40
    assert first.trials[-1].elapsed <= 40
    again = run("exhaustive", tmp_path / "log", budget="40s", clock=clock)
    assert len(again.trials) <= len(first.trials) + 1
    more = run("exhaustive", tmp_path / "log", budget="80s", clock=clock)
    assert len(more.trials) > len(again.trials)


def test_forwards_budget_leaves_out_repeats(tmp_path: Path) -> None:
    def half(bits):
        return Score(separable(bits).value, forwards=0.5)

    counting = Counting(half)
    result = run("exhaustive", None, counting, plan_key=without_relu, budget="5 forwards")
    assert (len(counting.calls), result.stopped_because) == (10, "forwards")
    assert len(result.trials) > 10


def test_at_least_one_trial_is_made() -> None:
    ticks = itertools.count(step=1000)
    result = run("greedy", budget="1s", clock=lambda: float(next(ticks)))
    assert (len(result.trials), result.stopped_because) == (1, "seconds")


def test_a_larger_budget_continues_a_finished_log(tmp_path: Path) -> None:
    run("exhaustive", tmp_path / "log", budget=5)
    counting = Counting(separable)
    run("exhaustive", tmp_path / "log", counting, budget=9)
    assert len(counting.calls) == 4
    run("exhaustive", tmp_path / "once", budget=9)
    assert timeless((tmp_path / "log").read_bytes()) == timeless((tmp_path / "once").read_bytes())


def test_a_smaller_budget_keeps_all_trials_of_the_log(tmp_path: Path) -> None:
    whole = run("exhaustive", tmp_path / "log", budget=9)
    counting = Counting(separable)
    again = run("exhaustive", tmp_path / "log", counting, budget=5)
    assert counting.calls == []
    assert again.trials == whole.trials


def test_an_interrupt_is_raised_once_log_and_best_are_kept_and_can_be_continued(tmp_path: Path) -> None:
    calls = itertools.count()

    def evaluate(bits):
        if next(calls) == 6:
            raise KeyboardInterrupt
        return separable(bits)

    kept: list[Trial] = []
    with pytest.raises(KeyboardInterrupt):
        run("exhaustive", tmp_path / "log", evaluate, on_best=kept.append)
    trials = read_log(tmp_path / "log").trials
    assert len(trials) == 6 and kept[-1] == best_trial(trials)
    run("exhaustive", tmp_path / "log", evaluate)
    run("exhaustive", tmp_path / "once")
    assert timeless((tmp_path / "log").read_bytes()) == timeless((tmp_path / "once").read_bytes())


def test_on_best_is_called_again_if_it_was_interrupted(tmp_path: Path) -> None:
    kept: list[Trial] = []

    def keep(trial: Trial) -> None:
        if not kept:
            kept.append(trial)
            raise KeyboardInterrupt
        kept.append(trial)

    with pytest.raises(KeyboardInterrupt):
        run("exhaustive", tmp_path / "log", on_best=keep)
    assert len(kept) == 2 and kept[0] == kept[1]


def test_an_interrupt_among_trials_of_the_log_leaves_the_best_of_all_of_them(tmp_path: Path) -> None:
    run("exhaustive", tmp_path / "log", budget=9)
    kept: list[Trial] = []

    def interrupt(trial: Trial, best: Trial | None, replayed: bool) -> tuple[str, ...]:
        if trial.index == 3:
            raise KeyboardInterrupt
        return ()

    with pytest.raises(KeyboardInterrupt):
        run("exhaustive", tmp_path / "log", budget=9, on_best=kept.append, on_trial=interrupt)
    assert kept == []


def test_interrupt_before_the_first_trial_passes_through() -> None:
    def evaluate(bits):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run("greedy", evaluate=evaluate)


def test_an_error_of_the_evaluation_passes_and_loses_nothing(tmp_path: Path) -> None:
    calls = itertools.count()

    def evaluate(bits):
        if next(calls) == 4:
            raise ZeroDivisionError
        return separable(bits)

    with pytest.raises(ZeroDivisionError):
        run("greedy", tmp_path / "log", evaluate)
    assert len(read_log(tmp_path / "log").trials) == 4


def test_a_point_outside_the_space_is_refused() -> None:
    def steps():
        yield Ask(({**TOY.widest(), "conv:0": 3},))

    counting = Counting(separable)
    with pytest.raises(InfeasibleBits, match="3 bits for edge 'conv:0'"):
        run_study(TOY, GeneratorSearcher("odd", StartOnlyOptions(), steps()), counting)
    assert counting.calls == []


def test_a_searcher_with_hidden_state_cannot_continue_its_log(tmp_path: Path) -> None:
    hidden = random.Random(0)

    def steps():
        for _ in range(10):
            yield Ask(({k: hidden.choice(g.choices) for k, g in TOY.groups.items()},))

    def once(**arguments):
        searcher = GeneratorSearcher("hidden", StartOnlyOptions(), steps())
        return run_study(TOY, searcher, separable, log=tmp_path / "log", header=header_of(searcher), **arguments)

    once(budget=5)
    with pytest.raises(LogError, match=r"different searcher or seed: trial \d has \d+ bits at"):
        once()


def test_a_searcher_that_ends_before_its_log_is_refused(tmp_path: Path) -> None:
    def once(count):
        points = itertools.islice(itertools.product(*(g.choices for g in TOY.groups.values())), count)
        asks = (Ask((dict(zip(TOY.groups, p, strict=True)),)) for p in points)
        searcher = GeneratorSearcher("short", StartOnlyOptions(), each(asks))
        return run_study(TOY, searcher, separable, log=tmp_path / "log", header=header_of(searcher))

    once(5)
    with pytest.raises(LogError, match="it holds 5 trials, this search asks 3"):
        once(3)
    once(7)


def each(asks):
    yield from asks


def test_a_searcher_that_asks_nothing_is_refused() -> None:
    with pytest.raises(HagoError, match="'empty' asked no point"):
        run_study(TOY, GeneratorSearcher("empty", StartOnlyOptions(), each([])), separable)


@pytest.mark.parametrize(
    ("asked", "got"),
    [(None, "a NoneType;"), (TOY.widest(), "a dict;"), (["conv:0"], "a str among its points;"), (3, "a int;")],
)
def test_a_searcher_that_asks_no_list_of_points_is_refused(asked: Any, got: str) -> None:
    searcher = mock.Mock(ask=lambda: asked, options={})
    searcher.name = "odd"
    with pytest.raises(HagoError, match=f"ask of searcher 'odd' returned {got} expected a list of points"):
        run_study(TOY, searcher, separable)


def test_telling_another_point_is_refused() -> None:
    searcher = make_searcher("greedy", TOY)
    searcher.ask()
    with pytest.raises(HagoError, match="did not ask"):
        searcher.tell(TOY.narrowest(), Score(0.0))


@pytest.mark.parametrize(
    ("budget", "before", "trials"), [("9 forwards", (0.0, 6.5), 3), ("9s", (6.5, 0.0), 2), ("9s", (9.0, 9.0), 1)]
)
def test_preparation_counts_towards_the_budget(budget: str, before: tuple[float, float], trials: int) -> None:
    ticks = itertools.count()
    result = run("exhaustive", budget=budget, before=before, clock=lambda: next(ticks) / 4)
    assert len(result.trials) == trials and result.trials[0].elapsed >= before[0]
