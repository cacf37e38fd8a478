"""Progress of jobs: steps and passes over data, on one line of a terminal or as plain lines now and then."""

from __future__ import annotations

import io
import pickle
import sys
from collections.abc import Callable

import pytest
import torch

from hago.data.batches import Batches
from hago.data.progress import PLAIN_SECONDS, JobProgress, StatusLine, duration


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    """A clock that is set by hand."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def open_terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """In the test itself: between a fixture and its test, pytest sets standard error again."""
    shown = Terminal()
    monkeypatch.setattr(sys, "stderr", shown)
    monkeypatch.setenv("COLUMNS", "80")
    return shown


def test_a_step_is_shown_on_a_terminal_and_cleared(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = open_terminal(monkeypatch)
    with JobProgress("quantize") as steps:
        steps("calibrating")
    assert "quantize: calibrating" in terminal.getvalue() and terminal.getvalue().split("\r")[-2].strip() == ""
    before = terminal.getvalue()
    steps.on_batch(1, 2)  # as batches do that outlive the job
    with JobProgress("quantize", shown=False) as steps:
        steps("calibrating")
    assert terminal.getvalue() == before


def test_a_line_is_no_wider_than_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = open_terminal(monkeypatch)
    with StatusLine(True) as line:
        line.show("x" * 200, force=True)
    assert max(len(part.strip()) for part in terminal.getvalue().split("\r")) == 79


def test_passes_over_data_say_how_far_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = open_terminal(monkeypatch)
    monkeypatch.setenv("COLUMNS", "120")
    clock = Clock()
    with JobProgress("quantize", clock=clock) as steps:
        steps("calibrating")
        batches = Batches(torch.zeros(256, 2).split(64), ["x"], on_batch=steps.on_batch)
        for _ in range(2):
            for _ in batches:
                clock.now += 10.0
    shown = [part.strip() for part in terminal.getvalue().split("\r")]
    assert "quantize: calibrating, pass 2: 128 of 256 samples, 20s left in this pass, 20s so far" in shown
    assert "quantize: calibrating, pass 3: 192 of 256 samples, 10s left in this pass, 1m10s so far" in shown


def test_without_a_terminal_there_is_a_plain_line_now_and_then(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    with JobProgress("inspect", clock=clock) as steps:
        for second in range(0, 100, 5):
            clock.now = float(second)
            steps(f"step {second}")
    lines = capsys.readouterr().err.splitlines()
    assert lines == [f"hago: inspect: step {second}" for second in (30, 60, 90)] and PLAIN_SECONDS == 30.0


def test_observed_batches_are_the_same_batches() -> None:
    calls: list[tuple[int, int | None]] = []
    plain = Batches(torch.arange(10.0).reshape(5, 2).split(2), ["x"])
    watched = plain.observed(lambda done, samples: calls.append((done, samples)))
    assert [b.size for b in watched] == [b.size for b in plain] and watched.sha256 == plain.sha256
    assert calls == [(2, 5), (4, 5), (5, 5)]
    assert [b.size for b in plain] == [2, 2, 1] and len(calls) == 3  # the first are not observed


@pytest.mark.parametrize("use", [lambda b: Batches(b, ["x"]), lambda b: b.observed(None)])
def test_batches_that_are_made_of_observed_ones_are_not_observed(use: Callable[[Batches], Batches]) -> None:
    calls: list[tuple[int, int | None]] = []
    watched = Batches(torch.zeros(4, 2).split(2), ["x"], on_batch=lambda *call: calls.append(call))
    assert calls == [(2, None), (4, None)]
    plain = use(watched)
    assert [b.size for b in plain] == [2, 2] and len(calls) == 2
    assert [b.size for b in watched] == [2, 2] and len(calls) == 4
    assert pickle.loads(pickle.dumps(plain)).sha256 == watched.sha256


def test_progress_that_is_not_due_is_not_worded(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, worded = Clock(), list[float]()

    def words(seconds: float) -> str:
        worded.append(seconds)
        return "now"

    monkeypatch.setattr("hago.data.progress.duration", words)
    with JobProgress("search", clock=clock) as steps:
        for clock.now in (0.0, PLAIN_SECONDS, PLAIN_SECONDS + 1.0):
            steps.on_batch(1, None)
    assert worded == [PLAIN_SECONDS]


def test_durations() -> None:
    assert [duration(s) for s in (0.4, 59.0, 90.0, 7500.0)] == ["0s", "59s", "1m30s", "2h05m"]
