"""What commands say at their end: one definition of one shot, and advice that can be followed."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from commands import Run, runner

from hago.analysis.answer import one_shot_options
from hago.calibration import ESTIMATORS
from hago.plan import Strategy
from hago.search.confirmation import Gain
from hago.study.log import read_log

ZOO = """
import torch

def net():
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Conv2d(1, 4, 3), torch.nn.ReLU(), torch.nn.Conv2d(4, 4, 3), torch.nn.Flatten(), torch.nn.Linear(16, 3)
    ).eval()

def batches(seed=1):
    generator = torch.Generator().manual_seed(seed)
    images = [torch.randn(128, 1, 6, 6, generator=generator) for _ in range(2)]
    return [(x, net()(x).argmax(1)) for x in images]

def images():
    return [x for x, _ in batches()]

def others():
    return batches(2)
"""
NET = "answers_zoo:net"
DATA = ["--data", "answers_zoo:batches"]
HELD_OUT = ["--held-out", "answers_zoo:others"]
#: Commands that show one shot beside a stored strategy.
ON_STRATEGY = ("evaluate", "simulate", "realize", "inspect")


@pytest.fixture
def hago(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Run]:
    """Runs a command in an empty folder, but for a module."""
    (tmp_path / "answers_zoo.py").write_text(ZOO, "utf-8")
    monkeypatch.chdir(tmp_path)
    yield runner(capsys)
    sys.modules.pop("answers_zoo", None)


def one_shot(document: Any) -> list[Any]:
    """The figures of one shot on each data set."""
    return [part["models"]["one shot"] for part in document["answer"]["data"]]


# ---------------------------------------------------------------- one shot
@pytest.mark.parametrize("searcher", ["auto", "greedy"])
@pytest.mark.parametrize("estimator", [None, *sorted(ESTIMATORS)])
def test_one_shot_is_the_same_in_all_commands(hago: Run, estimator: str | None, searcher: str) -> None:
    """One shot is what `hago quantize` gives with the same options; a search that refined thresholds has another
    estimator in its strategy, from which other commands made one shot."""
    options = ["--keep-float", "3"] if searcher == "greedy" else ["--fix-bits", "4:1=7"]
    options += [] if estimator is None else ["--estimator", estimator]
    on_vta = [NET, "--hardware", "vta", *DATA, *HELD_OUT, "--json", *options]
    expected = one_shot(hago("quantize", *on_vta, "--save", "q.json").json)
    searched = hago("search", *on_vta, "--budget", "2 trials", "--searcher", searcher, "--save", "s.json").json
    assert one_shot(searched) == expected and len(expected) == 2
    for command in ON_STRATEGY:
        for strategy in ("s.json", "q.json"):
            answer = hago(command, NET, strategy, *DATA, *HELD_OUT, "--json").json
            assert one_shot(answer) == expected, (command, strategy)


def test_refined_thresholds_come_of_another_estimator_than_one_shot(hago: Run) -> None:
    """So that the test before this one can fail."""
    hago("search", NET, "--hardware", "vta", *DATA, "--budget", "1 trials", "--save", "s.json")
    made_by = Strategy.load("s.json").made_by
    assert made_by["refined"] and made_by["estimator"] == "mse"
    assert one_shot_options(Strategy.load("s.json")).estimator is None


# ---------------------------------------------------------------- what was not surely better
def test_a_trial_that_is_not_surely_better_is_named(hago: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The log and the front showed a better score than that of the trial that was called the best."""
    monkeypatch.setattr(Gain, "is_significant", lambda self, margin=0.0, candidates=0: False)
    search = ["search", NET, "--hardware", "int16_accumulator", *DATA, "--budget", "8 trials", "--searcher", "gradient"]
    trials = hago(*search, "--save", "s.json", "--log", "l.jsonl", "--json").json
    scores = [trial.score.value for trial in read_log("l.jsonl").trials]
    best = max(range(len(scores)), key=scores.__getitem__)
    assert best > 0 and trials["best_trial"] == 0 and trials["unconfirmed_trial"] == best
    text = hago(*search, "--save", "s.json", "--log", "l.jsonl").out
    kept = Strategy.load("s.json").made_by["refined"]["kept_aside"]
    said = (
        f"  trial {best} has sqnr {scores[best]:.4g} dB, but is not surely better on {kept} samples kept aside; more "
    )
    assert said in text, text
    monkeypatch.setattr(Gain, "is_significant", lambda self, margin=0.0, candidates=0: True)
    sure = hago(*search, "--save", "s.json", "--log", "l2.jsonl", "--json").json
    assert sure["best_trial"] == best and sure["unconfirmed_trial"] is None


def test_estimated_thresholds_ask_for_more_samples(hago: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Gain, "is_significant", lambda self, margin=0.0, candidates=0: False)
    text = hago("search", NET, "--hardware", "vta", *DATA, "--budget", "1 trials", "--save", "s.json").out
    assert "not surely better on " in text and "; more calibration samples make this surer" in text
