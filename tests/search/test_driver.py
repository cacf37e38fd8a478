"""The driver: budget, best, interruption, refusals."""

from __future__ import annotations

import io
import itertools
import math
import random
import sys
from pathlib import Path

import pytest

from hago.errors import HagoError, InfeasibleBits, LogError, StrategyMismatch
from hago.search.driver import search
from hago.search.header import make_header
from hago.search.log import LogFile, read_log
from hago.search.searcher import Score
from hago.search.searchers import make_searcher
from hago.search.trial import Trial, best_trial
from hago.search.walk import Ask, Walk
from hago.strategy import HardwareId

from .toys import TOY, Counting, chain, header_of, run, separable, timeless, without_relu


# ---------------------------------------------------------------- budget
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


def test_a_smaller_budget_keeps_what_the_log_has(tmp_path: Path) -> None:
    whole = run("exhaustive", tmp_path / "log", budget=9)
    counting = Counting(separable)
    again = run("exhaustive", tmp_path / "log", counting, budget=5)
    assert counting.calls == []
    assert again.trials == whole.trials


# ---------------------------------------------------------------- best
def scored(*scores: Score) -> list[Trial]:
    return [Trial(i, {"conv:0": s.total_bits}, s) for i, s in enumerate(scores)]


def test_fewer_bits_win_ties_and_the_first_wins_exact_ones() -> None:
    a, b, c = Score(0.7, total_bits=20), Score(0.7, total_bits=18), Score(0.7, total_bits=18)
    best = best_trial(scored(a, b, c))
    assert best is not None
    assert best.index == 1


def test_rank_prefers_no_overflow_then_value_then_proofs() -> None:
    overflows = Score(9.0, overflows={"n": 1}, excess_bits={"n": 1})
    worse = Score(10.0, overflows={"n": 5}, excess_bits={"n": 3})
    unproved, proved = Score(0.5, unproved=2), Score(0.5, unproved=1, total_bits=10**6)
    higher, none = Score(0.6, unproved=9), Score(99.0, infeasible="no signature")
    order = [none, worse, overflows, unproved, proved, higher]
    assert sorted(reversed(order), key=lambda s: s.rank) == order


def test_tolerance_lets_fewer_bits_win() -> None:
    scores = [Score(v, total_bits=b) for v, b in [(1.0, 30), (1.2, 40), (0.9, 10), (1.1, 20), (1.15, 20)]]
    for tolerance, index in [(0.0, 1), (0.05, 4), (0.11, 4), (0.31, 2), (9.0, 2)]:
        best = best_trial(scored(*scores), tolerance)
        assert best is not None
        assert best.index == index


def test_standing_orders_as_rank_without_tolerance() -> None:
    draw = random.Random(0)
    scores = [
        Score(
            draw.choice([0.0, 1e-20, 2e-20, 1.0, -math.inf]),
            overflows={"n": 1} if draw.random() < 0.3 else {},
            excess_bits={"n": draw.randrange(3)},
            unproved=draw.randrange(2),
            total_bits=draw.randrange(3),
        )
        for _ in range(60)
    ]
    top = max(s.value for s in scores)
    assert sorted(scores, key=lambda s: s.rank) == sorted(scores, key=lambda s: s.standing(top))


def test_on_best_is_called_after_each_improvement_and_once_after_a_resume(tmp_path: Path) -> None:
    told: list[Trial] = []
    result = run("exhaustive", tmp_path / "log", budget=20, on_best=told.append)
    values = [t.score.rank for t in told]
    assert values == sorted(set(values))
    assert told[-1] == result.best
    assert len(told) > 2
    again: list[Trial] = []
    run("exhaustive", tmp_path / "log", budget=20, on_best=again.append)
    assert again == [result.best]


def test_values_that_are_not_finite(tmp_path: Path) -> None:
    values = {8: math.nan, 7: math.inf, 6: -math.inf, 5: 1.0}

    def evaluate(bits):
        value = values[bits["conv:0"]]
        return Score(value, {"sqnr": value, "parts": (value, 1)})

    result = run("exhaustive", tmp_path / "log", evaluate)
    assert result.score.value == math.inf
    assert result.trials[0].score.value == -math.inf
    assert result.trials[0].results == {"sqnr": "nan", "parts": ["nan", 1]}
    assert read_log(tmp_path / "log").trials == result.trials


def test_a_result_that_json_does_not_have_is_refused() -> None:
    with pytest.raises(LogError, match=r"trial 0: \$.results\['x'\].*set"):
        run("default", evaluate=lambda bits: Score(1.0, {"x": {1}}))


# ---------------------------------------------------------------- interruption
def test_interrupt_ends_with_the_best_so_far_and_can_be_continued(tmp_path: Path) -> None:
    calls = itertools.count()

    def evaluate(bits):
        if next(calls) == 6:
            raise KeyboardInterrupt
        return separable(bits)

    result = run("exhaustive", tmp_path / "log", evaluate)
    assert (len(result.trials), result.stopped_because) == (6, "interrupted")
    assert result.best == best_trial(result.trials)
    run("exhaustive", tmp_path / "log", evaluate)
    run("exhaustive", tmp_path / "once")
    assert timeless((tmp_path / "log").read_bytes()) == timeless((tmp_path / "once").read_bytes())


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


# ---------------------------------------------------------------- overflow
def test_never_returns_a_point_that_overflowed() -> None:
    space, evaluate = chain(2, 8)
    with pytest.raises(InfeasibleBits, match=r"'conv0' 100 times \(2 bits too few\).*allow_overflow"):
        run("default", space=space, evaluate=evaluate, start={k: 3 for k in space.groups})
    told: list[Trial] = []
    result = run("default", space=space, evaluate=evaluate, allow_overflow=True, on_best=told.append)
    assert result.score.overflows
    assert told == [result.best]


def test_a_point_that_overflowed_is_never_announced() -> None:
    space, evaluate = chain(2, 12)
    told: list[Trial] = []
    run("greedy", space=space, evaluate=evaluate, on_best=told.append)
    assert told
    assert all(t.score.runs for t in told)


def test_a_point_that_fits_no_signature_is_a_trial(tmp_path: Path) -> None:
    def evaluate(bits):
        if bits["conv:0"] > 6:
            raise InfeasibleBits("no signature of conv2d takes int8 and int8")
        return separable(bits)

    for name in ("greedy", "annealing", "exhaustive"):
        result = run(name, tmp_path / name, evaluate)
        assert result.trials[0].score.infeasible == "no signature of conv2d takes int8 and int8"
        assert result.bits["conv:0"] == 6
        assert run(name, tmp_path / name, evaluate).trials == result.trials
    with pytest.raises(InfeasibleBits, match="none of the 1 points tried fits.*no signature of conv2d"):
        run("default", evaluate=evaluate, allow_overflow=True)


def test_a_plan_key_may_find_that_a_point_fits_no_signature(tmp_path: Path) -> None:
    def plan_key(bits):
        if bits["conv:0"] > 6:
            raise InfeasibleBits("too wide")
        return without_relu(bits)

    counting = Counting(separable)
    for _ in range(2):
        result = run("exhaustive", tmp_path / "log", counting, plan_key=plan_key)
        assert len(counting.calls) == 12
    assert result.trials[0].score.infeasible == "too wide"
    assert all(bits["conv:0"] <= 6 for bits in counting.calls)


# ---------------------------------------------------------------- searchers that break the rules
def test_a_point_outside_the_space_is_refused() -> None:
    def steps():
        yield Ask(({**TOY.widest(), "conv:0": 3},))

    counting = Counting(separable)
    with pytest.raises(InfeasibleBits, match="3 bits for edge 'conv:0'"):
        search(TOY, Walk("odd", make_options(), steps()), counting)
    assert counting.calls == []


def make_options():
    from hago.search.default import DefaultOptions

    return DefaultOptions()


def test_a_searcher_with_hidden_state_cannot_continue_its_log(tmp_path: Path) -> None:
    hidden = random.Random(0)

    def steps():
        for _ in range(10):
            yield Ask(({k: hidden.choice(g.choices) for k, g in TOY.groups.items()},))

    def once(**arguments):
        searcher = Walk("hidden", make_options(), steps())
        return search(TOY, searcher, separable, log=tmp_path / "log", header=header_of(searcher), **arguments)

    once(budget=5)
    with pytest.raises(LogError, match=r"different searcher or seed: trial \d has \d+ bits at"):
        once()


def test_a_searcher_that_ends_before_its_log_is_refused(tmp_path: Path) -> None:
    def once(count):
        points = itertools.islice(itertools.product(*(g.choices for g in TOY.groups.values())), count)
        asks = (Ask((dict(zip(TOY.groups, p, strict=True)),)) for p in points)
        searcher = Walk("short", make_options(), (yield_from(asks)))
        return search(TOY, searcher, separable, log=tmp_path / "log", header=header_of(searcher))

    once(5)
    with pytest.raises(LogError, match="it holds 5 trials, this search asks 3"):
        once(3)
    once(7)


def yield_from(asks):
    for ask in asks:
        yield ask


def test_a_searcher_that_asks_nothing_is_refused() -> None:
    with pytest.raises(HagoError, match="'empty' asked no point"):
        search(TOY, Walk("empty", make_options(), yield_from([])), separable)


def test_telling_another_point_is_refused() -> None:
    searcher = make_searcher("greedy", TOY)
    searcher.ask()
    with pytest.raises(HagoError, match="did not ask"):
        searcher.tell(TOY.narrowest(), Score(0.0))


# ---------------------------------------------------------------- what a log belongs to
@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"model_hash": "other"}, StrategyMismatch, ['model_hash is "mmmmmmmm"', '"other"']),
        ({"hardware": HardwareId("toy", "x")}, StrategyMismatch, ['hardware.hash is "hhhhhhhh"', '"x"']),
        ({"data_hash": "other"}, StrategyMismatch, ['data_hash is "dddddddd"', '"other"']),
        ({"seed": 4}, LogError, ["seed is 0", "has 4"]),
        ({"estimator": "kl"}, LogError, ['estimator is "avg_range"', '"kl"']),
        ({"objective": {"name": "kl"}}, LogError, ['objective.name is "sqnr"', '"kl"']),
        ({"keep_float": []}, LogError, ['keep_float is ["fc"]', "[]"]),
        ({"fix_bits": {}}, LogError, ["fix_bits.conv:0 is 8", "has null"]),
        ({"settings": {"tolerance": 1}}, LogError, ["settings.tolerance is null", "has 1"]),
    ],
)
def test_a_log_of_another_search_is_refused(changes, error, words, tmp_path: Path) -> None:
    run("greedy", tmp_path / "log", options={"max_passes": 3})
    before = (tmp_path / "log").read_bytes()
    searcher = make_searcher("greedy", TOY, options={"max_passes": 3})
    with pytest.raises(error) as caught:
        search(TOY, searcher, separable, log=tmp_path / "log", header=header_of(searcher, **changes))
    for word in [*words, str(tmp_path / "log")]:
        assert word in str(caught.value)
    assert (tmp_path / "log").read_bytes() == before


def test_a_log_of_another_searcher_option_or_space_is_refused(tmp_path: Path) -> None:
    run("greedy", tmp_path / "log")
    with pytest.raises(LogError, match=r'searcher.name is "greedy", this search has "random"'):
        run("random", tmp_path / "log")
    with pytest.raises(LogError, match=r"searcher.options.max_passes is 8, this search has 2"):
        run("greedy", tmp_path / "log", options={"max_passes": 2})
    space, evaluate = chain(2, 16)
    with pytest.raises(StrategyMismatch, match=r"space.choices is 11, this search has 28"):
        run("greedy", tmp_path / "log", evaluate, space=space)


def test_other_versions_are_worth_a_notice(tmp_path: Path) -> None:
    run("greedy", tmp_path / "log", budget=3)
    searcher = make_searcher("greedy", TOY)
    notices: list[str] = []
    header = header_of(searcher, threads=2)
    search(TOY, searcher, separable, log=tmp_path / "log", header=header, notice=notices.append)
    assert len(notices) == 1
    assert "made_by.threads 1, this is 2" in notices[0]


def test_an_existing_log_is_never_overwritten(tmp_path: Path) -> None:
    run("greedy", tmp_path / "log")
    before = (tmp_path / "log").read_bytes()
    with pytest.raises(LogError, match="exists; resume it, or give another path"):
        run("greedy", tmp_path / "log", resume=False)
    assert (tmp_path / "log").read_bytes() == before
    assert run("greedy", tmp_path / "new", resume=False).trials


def test_a_log_needs_a_header(tmp_path: Path) -> None:
    with pytest.raises(LogError, match="needs a header"):
        search(TOY, make_searcher("greedy", TOY), separable, log=tmp_path / "log")


def test_two_searches_cannot_write_one_log(tmp_path: Path) -> None:
    with LogFile(tmp_path / "log"), pytest.raises(LogError, match="another search is writing"):
        run("greedy", tmp_path / "log")
    assert run("greedy", tmp_path / "log").trials


def test_settings_stand_in_the_header() -> None:
    searcher = make_searcher("greedy", TOY)
    header = make_header(
        TOY,
        searcher,
        seed=1,
        model_hash="m",
        hardware=HardwareId("n", "h"),
        data_hash="d",
        estimator=None,
        objective=None,
        settings={"batches": 4},
    )
    record = header.to_json("now")
    assert record["settings"] == {"batches": 4}
    assert record["searcher"] == {"name": "greedy", "options": {"tolerance": 0.0, "max_passes": 8}}
    assert record["made_by"]["numpy"]


# ---------------------------------------------------------------- progress
def test_progress_is_silent_away_from_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    run("greedy", progress=True)
    run("greedy", progress=False)
    assert capsys.readouterr() == ("", "")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("progress", [True, False])
def test_progress_on_a_terminal(progress: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    run(
        "exhaustive",
        plan_key=without_relu,
        budget="9 trials, 1h, 100 forwards",
        progress=progress,
        clock=lambda: 0.0,
    )
    shown = terminal.getvalue()
    if not progress:
        assert shown == ""
        return
    for words in ("9/9", "best=-3.5", "saved=4", "left=3600s", "forwards left=95"):
        assert words in shown.rsplit("\r", 2)[-1] or words in shown
