"""Progress: a bar on a terminal, and nothing anywhere else."""

from __future__ import annotations

import io
import itertools
import sys

import pytest

from hago.search.budget import Budget
from hago.search.progress import Progress
from hago.search.searcher import Score
from hago.search.trial import Trial

from .toys import run, without_relu


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
    for words in ("9/9 trials", "best=-2", "repeats=4", "left=0s"):
        assert words in shown


@pytest.mark.parametrize(
    ("budget", "left"),
    [("100 trials", "left=1m30s"), ("1h", "left=59m50s"), ("20 forwards", "left=10s"), ("1h, 20 forwards", "left=10s")],
)
def test_time_left_is_that_of_the_first_limit(budget: str, left: str, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with Progress(Budget.parse(budget), 0, True) as bar:
        bar.show(Trial(9, {"a:0": 8}, Score(1.0)), None, 10.0, 10.0, False, {"front": "3"})
    assert left in terminal.getvalue() and "front=3" in terminal.getvalue()


def test_without_a_budget_no_time_is_left_to_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with Progress(Budget(), 0, True) as bar:
        bar.show(Trial(0, {"a:0": 8}, Score(1.0)), None, 10.0, 10.0, False)
    assert "left" not in terminal.getvalue()
