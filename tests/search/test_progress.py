"""Progress: a bar on a terminal, and nothing anywhere else."""

from __future__ import annotations

import io
import sys

import pytest

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
    for words in ("9/9", "best=-2", "saved=4", "left=3600s", "forwards left=95"):
        assert words in shown
