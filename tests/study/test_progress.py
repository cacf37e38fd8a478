"""Progress: one line on a terminal, nothing elsewhere."""

from __future__ import annotations

import io
import itertools
import sys

import pytest
from toys import run, without_relu

from hago.study.budget import Budget
from hago.study.log import Trial
from hago.study.progress import Preliminaries, Progress
from hago.study.score import Score


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
    for words in ("9/9 trials", "best -2", "4 repeats", "0s left"):
        assert words in shown


@pytest.mark.parametrize(
    ("budget", "left"),
    [("100 trials", "1m30s left"), ("1h", "59m50s left"), ("20 forwards", "10s left"), ("1h, 20 forwards", "10s left")],
)
def test_the_time_left_is_that_of_the_first_limit(budget: str, left: str, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with Progress(Budget.parse(budget), 0, True) as bar:
        bar.show(Trial(9, {"a:0": 8}, Score(1.0)), None, 10.0, 10.0, False, ["front 3"])
    assert left in terminal.getvalue() and "front 3" in terminal.getvalue()


def test_the_rate_of_trials_excludes_the_preparation(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with Progress(Budget.parse("11 trials"), 0, True) as bar:
        bar.show(Trial(0, {"a:0": 8}, Score(1.0), seconds=2.0, elapsed=62.0), None, 62.0, 5.0, False)
    assert " 20s left" in terminal.getvalue()


def test_a_rate_of_almost_nothing_has_no_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a log whose numbers were edited gives: a duration beyond what floats hold."""
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with Progress(Budget.parse("100 forwards"), 0, True) as bar:
        bar.show(Trial(0, {"a:0": 8}, Score(1.0), seconds=1.0, elapsed=1e300), None, 1e300, 1e-300, False)
    assert "1 trials" in terminal.getvalue() and "left" not in terminal.getvalue()


def test_the_most_important_texts_fit_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    trial = Trial(122, {"a:0": 8}, Score(-34.71234567))
    also = ["123.4 MB", "1234/1234 forwards", "100 % cached", "front 12"]
    with Progress(Budget.parse("9999 trials, 1h"), 122, True) as bar:
        bar.show(trial, trial, 10.0, 10.0, False, also)
    line = terminal.getvalue().split("\r")[-1].split("cached")[0] + "cached"
    assert len(line) <= 80 and "123/9999 trials" in line and "best -34.7123" in line


def test_steps_of_the_preparation_are_shown_and_cleared(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with Preliminaries(True) as doing:
        doing("calibrating")
    assert "search: calibrating" in terminal.getvalue() and terminal.getvalue().split("\r")[-2].strip() == ""
    before = len(terminal.getvalue())
    with Preliminaries(False) as doing:
        doing("calibrating")
    assert len(terminal.getvalue()) == before


def test_without_a_budget_no_time_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with Progress(Budget(), 0, True) as bar:
        bar.show(Trial(0, {"a:0": 8}, Score(1.0)), None, 10.0, 10.0, False)
    assert "left" not in terminal.getvalue()
