"""`hago report` and `hago search --report` as a user runs them."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from commands import Run, runner

from hago.hardware import load_hardware, save_hardware

from .test_page import Reader

ZOO = """
import torch
from networks import Small

def net():
    torch.manual_seed(0)
    return Small()

def batches():
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(8, 1, 6, 6, generator=generator) for _ in range(2)]
"""
GIVEN = ["report_zoo:net", "--data", "report_zoo:batches"]


@pytest.fixture
def hago(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Run]:
    """Runs a command in an empty folder with a model."""
    (tmp_path / "report_zoo.py").write_text(ZOO, "utf-8")
    monkeypatch.chdir(tmp_path)
    yield runner(capsys)
    sys.modules.pop("report_zoo", None)


def page(path: str) -> Reader:
    return Reader(Path(path).read_text("utf-8"))


def test_the_json_that_is_printed_is_that_of_the_page(hago: Run) -> None:
    assert hago("quantize", *GIVEN, "--hardware", "vta", "--save", "net.json").code == 0
    run = hago("report", *GIVEN, "net.json", "--save", "net.html", "--title", "A <title>", "--json")
    assert run.code == 0, run.err
    read = page("net.html")
    assert json.loads(read.scripts["application/json"]) == run.json
    assert run.json["title"] == "A <title>" in "".join(read.text)
    lines = [command["line"] for command in run.json["points"][0]["commands"]]
    assert "realize report_zoo:net net.json --data report_zoo:batches" in lines[0]
    text = hago("report", *GIVEN, "net.json").out
    (made,) = Path("reports").iterdir()
    assert "Can anything overflow?" in text and str(made) in text and made.suffix == ".html"


@pytest.mark.parametrize(
    "options",
    [
        ["--searcher", "pareto:points=3,rounds=1", "--seed", "3", "--fix-bits", "*:1=6", "--objective", "cosine"],
        ["--minimize", "size", "--keep", "sqnr >= 12", "--keep", "agreement >= 20 %", "--effort", "fast"],
        ["--budget-cost", "size <= 80 %", "--corrections", "bias", "--corrections", "rounding"],
        ["--estimator", "mse", "--corrections", "none", "--keep-float", "*relu*"],
        ["--search-topology", "--corrections", "none"],
    ],
)
def test_the_page_of_a_log_says_which_command_continues_it(hago: Run, options: list[str]) -> None:
    budget = ["--budget", "3 trials"]
    search = ["search", *GIVEN, "--hardware", "vta", *options, *budget, "--log", "s.jsonl", "--save", "s.json"]
    begun = hago(*search)
    assert begun.code == 0, begun.err
    before = Path("s.jsonl").read_bytes()
    lines = [c["line"] for c in hago("report", *GIVEN, "s.jsonl", "--no-remedies", "--json").json["commands"]]
    (line,) = [line for line in lines if line.startswith("hago search ")]
    again = hago(*shlex.split(line)[1:], *budget, "--save", "again.json")
    assert again.code == 0, again.err
    assert Path("s.jsonl").read_bytes() == before
    assert json.loads(Path("again.json").read_text("utf-8")) == json.loads(Path("s.json").read_text("utf-8"))


def test_a_search_that_the_command_line_cannot_say_has_no_command(hago: Run) -> None:
    mine = "\n\ndef mine(reference, outputs, labels):\n    return -float(abs(reference[0] - outputs[0]).sum())\n"
    Path("report_zoo.py").write_text(ZOO + mine, "utf-8")
    search = ["search", *GIVEN, "--hardware", "vta", "--budget", "1 trials", "--log", "s.jsonl", "--save", "s.json"]
    assert hago(*search, "--objective", "report_zoo:mine").code == 0
    run = hago("report", *GIVEN, "s.jsonl", "--objective", "report_zoo:mine", "--no-remedies", "--json")
    assert run.code == 0, run.err
    assert not [c for c in run.json["commands"] if c["line"].startswith("hago search ")]


def test_the_commands_of_a_page_work(hago: Run) -> None:
    search = ["search", *GIVEN, "--hardware", "vta", "--searcher", "pareto:points=4", "--log", "s.jsonl"]
    assert hago(*search, "--report", "s.html").code == 0
    document = json.loads(page("s.html").scripts["application/json"])
    assert [point["kind"] for point in document["points"]].count("front") >= 1
    assert document["trials"] and document["search"] and not document["search"]["running"]
    replay = next(c["line"] for c in document["commands"] if " replay " in c["line"])
    assert hago(*replay.partition(" replay ")[1].split(), *replay.partition(" replay ")[2].split()).code == 0
    point = next(p for p in document["points"] if p["kind"] == "front")
    realize = next(c["line"] for c in point["commands"] if c["line"].startswith("hago realize "))
    assert f"--trial {point['trial']}" in realize
    run = hago(*realize.split()[1:])
    assert run.code == 0 and f"--trial {point['trial']}" in run.out
    wrong = hago(*realize.replace(f"--trial {point['trial']}", "--trial 999").split()[1:])
    assert wrong.code == 2 and "has trials" in wrong.err
    texts = [c["line"] for c in [*document["commands"], *(c for p in document["points"] for c in p["commands"])]]
    assert all(text.startswith("hago ") for text in texts)


def test_one_shot_of_a_search_is_made_once_for_its_answer_and_its_page(
    hago: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hago.report import gather

    search = ["search", *GIVEN, "--hardware", "vta", "--searcher", "pareto:points=4", "--log", "s.jsonl"]
    made = gather.one_shot_plan

    def refuse(*given: Any) -> None:
        raise AssertionError("one shot was made again")

    monkeypatch.setattr(gather, "one_shot_plan", refuse)
    assert hago(*search, "--report", "s.html").code == 0
    monkeypatch.setattr(gather, "one_shot_plan", made)
    assert hago("report", *GIVEN, "s.jsonl", "s.json", "s.front.json", "--save", "again.html").code == 0
    first, second = (json.loads(page(name).scripts["application/json"])["points"] for name in ("s.html", "again.html"))
    models = [model["name"] for model in first[0]["verdicts"][0]["models"]]
    assert first[0]["one_shot_costs"] and models[1] == "one shot"
    for ours, theirs in zip(first, second, strict=True):
        assert ours["one_shot_costs"] == theirs["one_shot_costs"] and ours["verdicts"] == theirs["verdicts"]


def test_a_page_is_written_while_a_search_runs_and_after_an_interrupt(
    hago: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hago.report import live

    seen = []
    write = live.save_page

    def look(report: live.Report, path: Path, template: Any) -> None:
        write(report, path, template)
        assert report.search is not None
        seen.append(report.search.running)
        if len(seen) == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(live, "save_page", look)
    search = ["search", *GIVEN, "--hardware", "vta", "--searcher", "random:trials=4", "--log", "s.jsonl"]
    run = hago(*search, "--report", "s.html")
    assert run.code == 130 and seen == [True, False]
    document = json.loads(page("s.html").scripts["application/json"])
    assert not document["search"]["running"] and len(document["trials"]["value"]) == 1
    assert hago(*search, "--report", "s.html").code == 0
    assert json.loads(page("s.html").scripts["application/json"])["points"]


def test_a_search_ends_with_its_answer_where_its_page_cannot_be_written(
    hago: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hago.cli import report
    from hago.errors import LogError
    from hago.report import live

    def refuse(*given: Any) -> None:
        raise LogError("cannot write s.html: the disk is full")

    monkeypatch.setattr(live, "save_page", refuse)
    monkeypatch.setattr(report, "save_page", refuse)
    search = ["search", *GIVEN, "--hardware", "vta", "--searcher", "random:trials=3", "--log", "s.jsonl"]
    run = hago(*search, "--report", "s.html")
    assert run.code == 0 and run.err.count("the disk is full") == 2 and "the search goes on" in run.err
    assert "strategy  s.json" in run.out and "s.html" not in run.out and not Path("s.html").exists()


def test_the_page_of_a_search_overwrites_no_file_of_another(hago: Run) -> None:
    Path("s.html").write_text("<p>mine</p>", "utf-8")
    search = ["search", *GIVEN, "--hardware", "vta", "--searcher", "random:trials=3", "--log", "s.jsonl"]
    run = hago(*search, "--report", "s.html")
    assert run.code == 2 and "--report s.html" in run.err and Path("s.html").read_text("utf-8") == "<p>mine</p>"


def test_hardware_that_is_not_known_is_asked_for(hago: Run) -> None:
    save_hardware(replace(load_hardware("vta"), name="my_vta"), Path("my_vta.json"))
    assert hago("quantize", *GIVEN, "--hardware", "my_vta.json", "--save", "net.json").code == 0
    run = hago("report", *GIVEN, "net.json")
    assert run.code == 2 and "does not ship with hago; give --hardware" in run.err
    assert hago("report", *GIVEN, "net.json", "--hardware", "my_vta.json", "--no-remedies").code == 0
    assert hago("sensitivity", *GIVEN, "--hardware", "vta", "--save", "losses.json").code == 0
    run = hago("report", *GIVEN, "losses.json")
    assert run.code == 2 and "do not say which hardware they are for; give --hardware" in run.err
    assert hago("report", *GIVEN, "losses.json", "--hardware", "vta").code == 0


def test_a_page_on_no_data_refuses_held_out_data(hago: Run) -> None:
    assert hago("quantize", *GIVEN, "--hardware", "vta", "--save", "net.json").code == 0
    run = hago("report", "report_zoo:net", "net.json", "--held-out", "report_zoo:batches")
    assert run.code == 2 and "give both" in run.err
    assert hago("report", "report_zoo:net", "net.json").code == 0
