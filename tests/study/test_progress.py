"""Progress of trials: one line on a terminal, elsewhere a plain line now and then."""

from __future__ import annotations

import io
import itertools
import sys

import pytest
from toys import run, without_relu

from hago.study.budget import Budget
from hago.study.log import Trial
from hago.study.progress import Progress
from hago.study.score import Score


def test_quick_progress_is_silent_away_from_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
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
    ticks = itertools.count()
    run(
        "exhaustive",
        plan_key=without_relu,
        budget="9 trials, 1h, 100 forwards",
        progress=progress,
        clock=lambda: float(next(ticks)),
    )
    shown = terminal.getvalue()
    if not progress:
        assert shown == ""
        return
    for words in ("9 of 9 trials", "best -2", "4 repeats", "0s left"):
        assert words in shown


@pytest.mark.parametrize(
    ("budget", "left"),
    [("100 trials", "1m30s left"), ("1h", "59m50s left"), ("20 forwards", "10s left"), ("1h, 20 forwards", "10s left")],
)
def test_the_time_left_is_that_of_the_first_limit(budget: str, left: str, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with Progress(Budget.parse(budget), True) as bar:
        bar.show(Trial(9, {"a:0": 8}, Score(1.0)), None, 10.0, 10.0, False, ["front 3"])
    assert left in terminal.getvalue() and "front 3" in terminal.getvalue()


def test_the_rate_of_trials_excludes_the_preparation(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with Progress(Budget.parse("11 trials"), True) as bar:
        bar.show(Trial(0, {"a:0": 8}, Score(1.0), seconds=2.0, elapsed=62.0), None, 62.0, 5.0, False)
    assert " 20s left" in terminal.getvalue()


def test_a_rate_of_almost_nothing_has_no_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a log whose numbers were edited gives: a duration beyond what floats hold."""
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with Progress(Budget.parse("100 forwards"), True) as bar:
        bar.show(Trial(0, {"a:0": 8}, Score(1.0), seconds=1.0, elapsed=1e300), None, 1e300, 1e-300, False)
    assert "1 trials" in terminal.getvalue() and "left" not in terminal.getvalue()


def test_the_trial_that_is_scored_has_a_line_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    ticks = itertools.count()
    with Progress(Budget(), True, clock=lambda: float(next(ticks)), now=lambda: "12:03:07") as bar:
        bar.begin(0, "start")
        bar.show(Trial(0, {"a:0": 8}, Score(1.0)), None, 3.0, 1.0, False)
        bar.begin(1, "")
    shown = [part.strip() for part in terminal.getvalue().replace("\n", "\r").replace("\x1b[A", "\r").split("\r")]
    assert "now: trial 0 since 12:03:07: start" in shown and "now: trial 1 since 12:03:07" in shown
    assert "search: 1 trials, none runs yet, 3s so far" in shown
    assert shown[-1] == "", "both lines are cleared"


def test_only_a_terminal_is_told_of_the_trial_that_is_scored(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ticks = itertools.count(step=1000)
    with Progress(Budget(), True, clock=lambda: float(next(ticks))) as bar:
        bar.begin(0, "start")
        bar.show(Trial(0, {"a:0": 8}, Score(1.0)), None, 3.0, 1.0, False)
    assert capsys.readouterr().err == "hago: search: 1 trials, none runs yet, 3s so far\n"


def test_the_most_important_texts_fit_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("COLUMNS", "80")
    trial = Trial(122, {"a:0": 8}, Score(-34.71234567))
    also = ["123.4 MB", "1234 forwards", "100 % cached", "front 12"]
    with Progress(Budget.parse("9999 trials, 1h"), True) as bar:
        bar.show(trial, trial, 10.0, 10.0, False, also)
    line = max((part.strip() for part in terminal.getvalue().split("\r")), key=len)
    assert len(line) < 80
    assert line.startswith("search: 123 of 9999 trials, best -34.7123, 13m23s left, 123.4 MB, 1234 forwards")


def test_without_a_budget_no_time_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with Progress(Budget(), True) as bar:
        bar.show(Trial(0, {"a:0": 8}, Score(1.0)), None, 10.0, 10.0, False)
    assert "left" not in terminal.getvalue()


def test_a_total_that_is_exceeded_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """A log that is continued with a smaller budget holds more trials than that."""
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with Progress(Budget.parse("45 trials"), True) as bar:
        bar.show(Trial(163, {"a:0": 8}, Score(1.0)), None, 10.0, 10.0, True)
    assert "reading the log: 164 trials" in terminal.getvalue() and "45" not in terminal.getvalue()


def test_trials_away_from_a_terminal_leave_a_line_now_and_then(capsys: pytest.CaptureFixture[str]) -> None:
    seconds = itertools.count(0.0, 10.0)
    with Progress(Budget.parse("9 trials"), True, lambda trial: "sqnr 30 dB", clock=lambda: next(seconds)) as bar:
        for index in range(8):
            trial = Trial(index, {"a:0": 8}, Score(1.0))
            bar.show(trial, trial, 10.0 * index, 10.0, False)
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(",")[0] for line in lines] == [f"hago: search: {n} of 9 trials" for n in (3, 6)]
    assert all("best sqnr 30 dB" in line for line in lines)
