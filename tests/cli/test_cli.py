"""The command line as a user runs it: standard output, standard error and exit codes."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import Run, after_hago, runner
from digits import few_digits

from hago import api, cli
from hago.analysis import strategy_report
from hago.cli import main
from hago.cli.arguments import EXAMPLES, TOP, USAGE, build_parser
from hago.cli.commands import COMMANDS
from hago.cli.options import check_command
from hago.hardware.file import load_hardware, save_hardware
from hago.plan.strategy import Strategy
from hago.runtime.native import executor
from hago.runtime.native.self_test import NOTHING
from hago.runtime.reference import IntegerModel
from hago.searchers.registry import SEARCHERS
from hago.study.log import read_log

ZOO = """
import signal
import torch

print("the zoo is imported")
calls = 0

def net():
    print("a network is made")
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Conv2d(1, 4, 3), torch.nn.ReLU(), torch.nn.Conv2d(4, 4, 3), torch.nn.Flatten(), torch.nn.Linear(16, 3)
    )

def stopped():
    signal.raise_signal(signal.SIGINT)

def batches():
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(16, 1, 6, 6, generator=generator), torch.arange(16) % 3) for _ in range(2)]

def distance(reference, outputs, labels):
    return -float((reference[0] - outputs[0]).abs().max())

def interrupting(reference, outputs, labels):
    global calls
    calls += 1
    if calls == 7:
        signal.raise_signal(signal.SIGINT)
    return distance(reference, outputs, labels)

def searcher(space, start, seed):
    from hago.searchers.registry import make_searcher
    return make_searcher("random", space, start, seed)

def broken(space, start, seed):
    raise ZeroDivisionError("of the user")

def defective(reference, outputs, labels):
    raise ZeroDivisionError("a defect")
"""
MODEL, DATA = "cli_zoo:net", "cli_zoo:batches"
STRATEGY, LOG = "strategies/net-int16_accumulator.json", "logs/net-int16_accumulator.jsonl"
UNNAMED = ["search", MODEL, "--hardware", "int16_accumulator", "--data", DATA, "--searcher", "greedy"]
OTHER = "strategies/other.json"
SEARCH = [*UNNAMED, "--log", LOG, "--save", STRATEGY]


@pytest.fixture(scope="module")
def search_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with a model, and the files of a search and of a stored model."""
    folder = tmp_path_factory.mktemp("cli")
    (folder / "cli_zoo.py").write_text(ZOO, "utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert main([*SEARCH, "--budget", "6 trials"]) == 0
        quantize = ["quantize", MODEL, "--hardware", "vta", "--data", DATA, "--keep-float", "4*"]
        quantize += ["--corrections", "rounding", "--corrections", "bias"]
        assert main([*quantize, "--save", OTHER]) == 0
        assert main(["realize", MODEL, STRATEGY, "--data", DATA, "--save", "net.safetensors"]) == 0
        sys.modules.pop("cli_zoo")
        yield folder
    sys.modules.pop("cli_zoo", None)


@pytest.fixture
def hago(search_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Run]:
    """Runs a command in that folder; the model is imported anew by every test, and files in `new` are removed."""
    monkeypatch.chdir(search_folder)
    shutil.rmtree("new", ignore_errors=True)

    yield runner(capsys)
    sys.modules.pop("cli_zoo", None)


EVERY = {
    "search": [*SEARCH, "--budget", "6 trials"],
    "quantize": ["quantize", MODEL, "--hardware", "vta", "--data", DATA],
    "explain": ["explain", MODEL, "--hardware", "vta", "--input-shape", "1,6,6"],
    "explain cost": ["explain", MODEL, "--hardware", "vta", "--input-shape", "1,6,6", "--cost"],
    "evaluate": ["evaluate", MODEL, STRATEGY, "--data", DATA],
    "simulate": ["simulate", MODEL, STRATEGY, "--data", DATA],
    "realize": ["realize", MODEL, STRATEGY, "--data", DATA],
    "cost": ["cost", MODEL, STRATEGY, "--batch", "4"],
    "bench": ["bench", MODEL, STRATEGY, "--data", DATA, "--batches", "1,40", "--rounds", "2"],
    "sensitivity": ["sensitivity", MODEL, "--hardware", "vta", "--data", DATA],
    "compare": ["compare", MODEL, STRATEGY, "--data", DATA, "--realizations", "fast,simulated,float"],
    "compare two": ["compare", MODEL, STRATEGY, OTHER, "--data", DATA],
    "inspect": ["inspect", MODEL, STRATEGY, "--data", DATA],
    "replay": ["replay", MODEL, LOG, "--data", DATA],
    "report": ["report", MODEL, LOG, STRATEGY, "--data", DATA, "--no-remedies"],
    "finetune": ["finetune", MODEL, STRATEGY, "--data", DATA, "--steps", "2"],
    "run": ["run", "net.safetensors", "--data", DATA],
    "export": ["export", MODEL, OTHER, "--format", "tpu-mlir", "--data", DATA],
    "hardware list": ["hardware", "list"],
    "hardware show": ["hardware", "show", "vta"],
    "hardware check": ["hardware", "check", "vta"],
    "hardware new": ["hardware", "new", "my_dsp", "--from", "cmsis_nn", "-o", "new/my_dsp.json"],
    "demo": ["demo", "--budget", "1 trials", "--hardware", "sample", "--out", "demo_out"],
    "doctor": ["doctor"],
}


@pytest.fixture(autouse=True)
def quick_demo(monkeypatch: pytest.MonkeyPatch) -> None:
    from hago import demo

    few_digits(monkeypatch, 5)
    train = demo.train
    monkeypatch.setattr(demo, "train", lambda part, seed, epochs: train(part, seed, 1))


# ---------------------------------------------------------------- laws of every command
#: Options of a search that the command line calls otherwise, or has in another form; `progress` is for terminals.
OTHERWISE_CALLED = {
    **{"resume": "no_resume", "cache_bytes": "cache", "progress": "json"},
    **{"thresholds": "calibration_table", "modes": "quantize_table", "callbacks": "tensorboard"},
}


def test_every_option_of_a_search_is_an_option_of_the_command() -> None:
    names = {name for name, p in signature(api.search_quantize_strategy).parameters.items() if p.kind is p.KEYWORD_ONLY}
    args = build_parser().parse_args(SEARCH)
    assert {OTHERWISE_CALLED.get(name, name) for name in names} <= set(vars(args))


def test_every_command_has_an_example_here() -> None:
    assert {name.split()[0] for name in EVERY} == set(COMMANDS)


@pytest.mark.parametrize("name", EVERY)
def test_standard_output_holds_only_json(hago: Run, name: str) -> None:
    run = hago(*EVERY[name], "--json")
    assert run.code == 0, run.err
    assert run.json not in (None, {}, [])


@pytest.mark.parametrize("name", EVERY)
def test_text_output_is_readable(hago: Run, name: str) -> None:
    run = hago(*EVERY[name])
    assert run.code == 0, run.err
    assert run.out.strip() and "the zoo is imported" not in run.out and "a network is made" not in run.out
    assert not re.search(r"object at 0x|Traceback|\{'", run.out)


@pytest.mark.parametrize("name", [*EVERY, "hardware"])
def test_help_has_an_example(hago: Run, name: str) -> None:
    words = name.split()
    run = hago(*words, "--help")
    assert run.code == 0 and "--json" in run.out
    assert len(words) == 2 or "\n  hago " in run.out


def test_every_command_with_arguments_has_its_usage() -> None:
    assert set(COMMANDS) - set(USAGE) == {"hardware", "demo", "doctor"}


def examples() -> list[str]:
    text = "\n".join([TOP, *EXAMPLES.values()])
    return [re.sub(r"   .*", "", line.strip()) for line in text.splitlines() if line.startswith("  hago ")]


@pytest.mark.parametrize("line", examples())
def test_every_example_is_a_command(line: str) -> None:
    build_parser().parse_args(shlex.split(line)[1:])


def test_the_help_of_a_search_says_when_to_take_which_searcher(hago: Run) -> None:
    text = hago("search", "--help").out
    for name, entry in SEARCHERS.items():
        assert re.search(rf"^  {name} +{re.escape(entry.when)}$", text, re.MULTILINE)
        assert 20 < len(entry.when) < 86
    assert len({entry.when for entry in SEARCHERS.values()}) == len(SEARCHERS)


def test_there_are_examples() -> None:
    assert len(examples()) > 10


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["serach"],
        ["search", MODEL],
        [*SEARCH, "--fix-bits", "nothing"],
        [*SEARCH, "--fix-bits", "nothing*=8"],
        [*SEARCH, "--keep-float", "nothing*"],
        [*SEARCH, "--budget", "never", "--log", "other.jsonl"],
        [*SEARCH, "--searcher", "greedie"],
        [*SEARCH, "--searcher", "greedy:tolerance"],
        [*SEARCH, "--searcher", "greedy:patience=3"],
        [*SEARCH, "--searcher", "cli_zoo:nobody"],
        [*SEARCH, "--objective", "acuracy"],
        [*SEARCH, "--estimator", "msee"],
        [*SEARCH, "--no-resume"],
        [*SEARCH, "--seed", "1"],
        [*SEARCH, "--log", "cli_zoo.py/log.jsonl"],
        [*SEARCH, "--mean", "a,b"],
        [*SEARCH, "--size", "0"],
        [*SEARCH, "--weights", "none.pt"],
        ["search", "cli_zoo:nett", "--hardware", "vta", "--data", DATA],
        ["search", MODEL, "--hardware", "vtaa", "--data", DATA],
        ["search", MODEL, "--hardware", "vta", "--data", "none.npz"],
        ["explain", MODEL, "--hardware", "vta"],
        ["explain", MODEL, "--hardware", "vta", "--input-shape", "1,6,6:complex"],
        ["explain", MODEL, "--hardware", "vta", "--input-shape", "one"],
        ["explain", MODEL, "--hardware", "vta", "--input-shape", "3,6,6"],
        ["simulate", MODEL, "none.json", "--data", DATA],
        ["simulate", MODEL, LOG, "--data", DATA],
        ["simulate", MODEL, STRATEGY, "--data", DATA, "--hardware", "vta"],
        ["inspect", MODEL, STRATEGY, "--data", DATA, "--csv", "cli_zoo.py/t.csv"],
        ["replay", MODEL, LOG, "--data", DATA, "--samples", "3"],
        ["replay", MODEL, "empty.jsonl", "--data", DATA],
        ["hardware", "show", "vtaa"],
        ["hardware", "check", "none.json"],
        ["demo", "--out", "cli_zoo.py"],
    ],
    ids=" ".join,
)
def test_bad_input_is_one_clear_line(hago: Run, words: list[str]) -> None:
    Path("empty.jsonl").touch()
    run = hago(*words)
    assert run.code == 2 and run.out == ""
    errors = [line for line in run.err.splitlines() if line.startswith("hago: error: ")]
    assert len(errors) == 1 and run.err.rstrip().endswith(errors[0]) and len(errors[0]) > 25
    assert "Traceback" not in run.err


@pytest.mark.parametrize("fails", [len, np.linalg.inv], ids=["hago", "a library that hago calls"])
def test_defects_are_not_reported_as_bad_input(hago: Run, monkeypatch: pytest.MonkeyPatch, fails: Any) -> None:
    monkeypatch.setitem(COMMANDS, "hardware", fails)  # type: ignore[misc]
    run = hago("hardware", "list")
    assert run.code == cli.DEFECT and "Error: " in run.err and "please report" in run.err and run.out == ""


def test_code_of_the_user_that_fails_is_no_defect_of_hago(hago: Run, search_folder: Path) -> None:
    words = [*UNNAMED[:-1], "cli_zoo:broken", "--log", "broken.jsonl", "--save", "broken.json"]
    run = hago(*words)
    assert run.code == 2 and "ZeroDivisionError: of the user" in run.err and "please report" not in run.err
    assert re.search(r"hago: error: the code that you named failed at .*cli_zoo\.py, line \d+;", run.err)


# ---------------------------------------------------------------- search
def test_search_reports_its_results_and_files(hago: Run, search_folder: Path) -> None:
    run = hago(*SEARCH, "--budget", "6 trials", "--held-out", DATA)
    trials = read_log(search_folder / LOG).trials
    assert f"searched {len(trials)} trials" in run.out and LOG in run.out and STRATEGY in run.out
    assert "held-out data, 32 samples" in run.out and "continuing after 6 trials" in run.err
    # what came before the first trial, and forwards, are known of this session alone
    assert "before the first" not in run.out and "forwards" not in run.out
    assert "in all runs; the best" in run.out and "this run added no trial in" in run.out
    fresh = hago(*SEARCH, "--budget", "2 trials", "--log", "fresh.jsonl", "--save", "fresh.json")
    assert "s before the first) and" in fresh.out and "forwards; the best is trial" in fresh.out
    check = next(line for line in run.out.splitlines() if line.startswith("next "))
    assert hago(*after_hago(check)).code == 0


def test_a_run_is_written_for_tensorboard(hago: Run) -> None:
    pytest.importorskip("tensorboard")
    files = ["--log", "watched.jsonl", "--save", "watched.json"]
    for words in ([*SEARCH, *files, "--budget", "2 trials"], EVERY["finetune"]):
        folder = Path("watched", words[0])
        assert hago(*words, "--tensorboard", str(folder)).code == 0
        assert [path.name.split(".")[0] for path in folder.iterdir()] == ["events"]


def test_trials_are_kept_in_a_study_of_optuna(hago: Run) -> None:
    words = [*SEARCH, "--log", "kept.jsonl", "--save", "kept.json", "--budget", "2 trials"]
    assert hago(*words, "--optuna", "sqlite:///kept.db", "--optuna-artifacts", "kept").code == 0
    assert Path("kept.db").stat().st_size and len(list(Path("kept").iterdir())) >= 2
    refused = hago(*words, "--optuna-artifacts", "kept")
    assert refused.code == 2 and "give both" in refused.err


def test_a_continued_search_tells_this_run_from_all_runs(hago: Run) -> None:
    words = [*SEARCH, "--log", "two.jsonl", "--save", "two.json", "--json"]
    first, second = (hago(*words, "--budget", f"{n} trials").json for n in (2, 5))
    assert (first["trials"], first["this_run"]["trials"]) == (2, 2) and first["stopped_because"] == "trials"
    assert (second["trials"], second["this_run"]["trials"]) == (5, 3) and second["seconds"] > first["seconds"]
    said = hago(*words[:-1], "--budget", "6 trials").out
    assert "searched 6 trials" in said and "this run added 1 trial in" in said and "(6 trials) is spent" in said


#: The commands that end with an answer.
ANSWERING = ("search", "quantize", "realize", "inspect", "evaluate", "simulate")


@pytest.mark.parametrize("name", ANSWERING)
def test_a_job_ends_with_the_answer_and_the_next_command(hago: Run, name: str) -> None:
    text, values = (hago(*EVERY[name], "--held-out", DATA, *more) for more in ((), ("--json",)))
    assert text.code == 0, text.err
    calibration, held_out = values.json["answer"]["data"]
    assert (calibration["data"], held_out["data"]) == ("calibration data", "held-out data")
    for part in (calibration, held_out):
        assert {"float", "one shot"} <= set(part["models"]) and part["samples"] == 32
        assert all({"sim_acc", "agreement", "sqnr"} <= set(figures) for figures in part["models"].values())
        assert f"{part['data']}, 32 samples" in text.out
        last = "found" if "found" in part["models"] else "one shot"
        assert {(d["of"], d["minus"]) for d in part["differences"]} == {(last, m) for m in part["models"] if m != last}
    sizes = values.json["answer"]["weight_bytes"]
    assert set(sizes) == set(calibration["models"]) and sizes["one shot"] < sizes["float"]
    further = text.out.splitlines()[-1]
    assert further.startswith("next ") and hago(*after_hago(further)).code == 0
    assert shlex.split(further.removeprefix("next "))[-3:] == shlex.split(values.json["next"])[-3:]


def test_what_a_stored_strategy_is_compared_with_is_what_its_search_was(hago: Run) -> None:
    """One shot is made again from the calibration data, and not from other data."""
    small = [
        "--minimize",
        "weight_bytes",
        "--keep",
        "agreement >= 50 %",
        "--save",
        "small.json",
        "--log",
        "small.jsonl",
    ]
    searched = hago(*SEARCH[:-2], *small, "--budget", "16 trials", "--json").json["answer"]
    evaluated = hago("evaluate", MODEL, "small.json", "--data", DATA, "--json").json["answer"]
    assert evaluated == searched and set(searched["weight_bytes"]) == {"float", "one shot", "found"}
    assert searched["weight_bytes"]["found"] < searched["weight_bytes"]["one shot"]
    other = hago("evaluate", MODEL, "small.json", "--data", DATA, "--samples", "20", "--json").json["answer"]
    assert set(other["weight_bytes"]) == {"float", "found"} and "give that as --data" in other["note"]
    assert other["data"][0]["data"] == "data"


def test_a_tuned_strategy_names_the_command_that_checks_it(hago: Run) -> None:
    """With the hardware file and the data that the command was given."""
    chip = replace(load_hardware("vta"), name="my_chip")
    save_hardware(chip, Path("my_chip.json"))
    given = ["--hardware", "my_chip.json", "--data", DATA, "--samples", "12"]
    assert hago("quantize", MODEL, *given, "--save", "my.json").code == 0
    run = hago("finetune", MODEL, "my.json", *given, "--steps", "2", "--save", "tuned.json")
    check = next(line for line in run.out.splitlines() if line.startswith("next "))
    assert {"my_chip.json", "12"} <= set(after_hago(check)) and hago(*after_hago(check)).code == 0


def test_the_command_that_checks_a_strategy_reads_images_alike() -> None:
    words = ["quantize", MODEL, "--hardware", "vta", "--data", "images", "--mean=-0.5,0.4,0.3", "--gray"]
    check = after_hago(check_command(build_parser().parse_args(words), Path("s.json"), None))
    args = build_parser().parse_args(check)
    assert (args.mean, args.std, args.size, args.gray) == ((-0.5, 0.4, 0.3), (1.0,), None, True)


def test_search_as_json(hago: Run, search_folder: Path) -> None:
    result = hago(*SEARCH, "--budget", "6 trials", "--json").json
    strategy, best = Strategy.load(search_folder / STRATEGY), read_log(search_folder / LOG).trials[result["best_trial"]]
    assert result["bits"] == dict(strategy.bits) == dict(best.bits)
    assert result["results"] == strategy.made_by["results"], "those after the corrections that follow the trials"
    assert result["results"]["sqnr"] >= best.results["sqnr"]
    assert (result["trials"], result["held_out"]) == (6, None)


def test_objectives_and_searchers_of_the_user(hago: Run, search_folder: Path) -> None:
    words = ["--log", "own/l.jsonl", "--save", "own/s.json", "--budget", "3 trials"]
    run = hago(*SEARCH, *words, "--objective", "cli_zoo:distance", "--searcher", "cli_zoo:searcher", "--json")
    assert run.code == 0, run.err
    assert run.json["results"]["distance"] <= 0 and len(read_log(search_folder / "own/l.jsonl").trials) == 3


def test_options_of_a_searcher(hago: Run, search_folder: Path) -> None:
    run = hago(*SEARCH, "--log", "opt.jsonl", "--budget", "2 trials", "--searcher", "greedy:tolerance=0.5,max_passes=2")
    header = read_log(search_folder / "opt.jsonl").header
    assert run.code == 0 and header is not None
    assert header.searcher == {"name": "greedy", "options": {"tolerance": 0.5, "max_passes": 2}}


def timeless(path: Path) -> list[dict[str, Any]]:
    return [{k: v for k, v in json.loads(line).items() if k != "time"} for line in path.read_text().splitlines()]


@pytest.fixture
def listens() -> Iterator[None]:
    """SIGINT interrupts, also where a shell started the tests in the background and had it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("listens")
def test_an_interrupted_search_prints_how_to_continue(hago: Run, search_folder: Path) -> None:
    whole = [*SEARCH, "--objective", "cli_zoo:distance", "--log", "whole.jsonl", "--save", "w.json"]
    assert hago(*whole, "--budget", "12 trials").code == 0
    cut = [
        *SEARCH,
        "--objective",
        "cli_zoo:interrupting",
        "--log",
        "cut.jsonl",
        "--save",
        "c.json",
        "--budget",
        "12 trials",
    ]
    run = hago(*cut)
    before = len(read_log(search_folder / "cut.jsonl").trials)
    assert 0 < before < 12
    assert run.code == 130 and run.out == ""
    assert f"interrupted after {before} trials, which are in cut.jsonl; the best so far is c.json" in run.err
    assert Strategy.load(search_folder / "c.json").bits
    assert hago(*after_hago(run.err.splitlines()[-1])).code == 0
    (search_folder / "cut.jsonl").write_text(
        (search_folder / "cut.jsonl").read_text().replace("interrupting", "distance")
    )
    assert timeless(search_folder / "cut.jsonl") == timeless(search_folder / "whole.jsonl")


def test_interrupted_before_the_first_trial(hago: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("hago.cli.search.run_search", interrupt)
    run = hago(*SEARCH)
    assert run.code == 130 and run.out == "" and after_hago(run.err.splitlines()[-1]) == SEARCH
    assert "becomes a line of" not in run.err


@pytest.mark.usefixtures("listens")
@pytest.mark.parametrize("times", [2, 3])
def test_further_interrupts_of_a_search_do_not_say_that_nothing_was_written(
    hago: Run, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    """While the search runs, while the state of its log is read, and while the files are looked at."""

    def interrupt(*_: Any, **__: Any) -> None:
        monkeypatch.setattr("hago.cli.search.read_log", interrupt)
        if times == 3:
            monkeypatch.setattr("hago.cli.console.Path.stat", interrupt)
        raise KeyboardInterrupt

    monkeypatch.setattr("hago.cli.search.run_search", interrupt)
    run = hago(*SEARCH)
    said = f"hago: interrupted; the work so far is in {LOG}; continue with:" if times == 2 else "hago: interrupted; "
    assert run.code == 130 and said in run.err and "nothing was written" not in run.err


def test_an_interrupted_training_does_not_say_that_nothing_was_written(
    hago: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: Any, **__: Any) -> None:
        Path("begun.jsonl").write_text("a line", "utf-8")
        raise KeyboardInterrupt

    monkeypatch.setattr("hago.cli.finetune.load_batches", interrupt)
    run = hago("finetune", MODEL, STRATEGY, "--data", DATA, "--log", "begun.jsonl")
    assert run.code == 130 and "interrupted; the work so far is in begun.jsonl; continue with:" in run.err


@pytest.mark.parametrize("refused", [("--budget", "soon"), ("--budget-cost", "size <= 1 B")])
def test_a_search_that_is_refused_does_not_announce_its_log(hago: Run, refused: tuple[str, str]) -> None:
    run = hago(*UNNAMED, *refused)
    assert run.code == 2 and "becomes a line of" not in run.err
    assert ("a network is made" in run.err) == (refused[0] != "--budget")


@pytest.mark.usefixtures("listens")
@pytest.mark.parametrize("name", [name for name, words in EVERY.items() if MODEL in words])
def test_an_interrupted_command_says_so_in_a_line(hago: Run, name: str) -> None:
    """While the model is made, before anything is written."""
    run = hago(*("cli_zoo:stopped" if word == MODEL else word for word in EVERY[name]))
    assert run.code == 130 and run.out == "" and "Traceback" not in run.err
    said = run.err[run.err.index("\nhago: interrupted") :].strip().splitlines()
    resumable = name in ("search", "finetune")
    assert len(said) == (2 if resumable else 1)
    assert ("nothing was written" in said[0]) or resumable
    if resumable:
        assert said[0].endswith("; continue with:") and after_hago(said[1])[0] == name


@pytest.mark.usefixtures("listens")
def test_an_interrupt_after_a_file_was_written_names_it(hago: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: Any, **__: Any) -> None:
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr("hago.cli.search.answer_for_one_shot", interrupt)
    run = hago(*EVERY["quantize"], "--save", "kept.json")
    assert run.code == 130 and run.err.endswith("\nhago: interrupted after it wrote kept.json\n")
    assert Strategy.load("kept.json").bits
    monkeypatch.setattr("hago.cli.search.answer_for_search", interrupt)
    run = hago(*SEARCH, "--budget", "6 trials")
    assert run.code == 130 and f"interrupted after 6 trials, which are in {LOG}" in run.err
    monkeypatch.setattr("hago.cli.commands.run_demo", interrupt)
    assert "hago: interrupted in the demo; what it made so far is in demo_out" in hago(*EVERY["demo"]).err


# ---------------------------------------------------------------- the other commands
def test_a_new_chip_is_edited_and_checked(hago: Run) -> None:
    run = hago("hardware", "new", "my_dsp", "--from", "vta", "-o", "new/my_dsp.json")
    assert run.code == 0 and hago(*after_hago(run.out.splitlines()[-1].removeprefix("edit it, then"))).code == 0
    again = hago("hardware", "new", "my_dsp", "-o", "new/my_dsp.json")
    assert again.code == 2 and "new/my_dsp.json exists; give another file with --output" in again.err
    assert hago("hardware", "new", "my_dsp", "-o", "new/other.json").code == 0
    path = Path("new/my_dsp.json")
    document = json.loads(path.read_text("utf-8"))
    del document["ops"]["relu"]
    path.write_text(json.dumps(document), "utf-8")
    checked = hago("hardware", "check", str(path), "--json").json
    assert checked["ok"] and any("relu" in ops for ops in checked["unlisted"].values())
    assert "float islands" in hago("hardware", "check", str(path)).out


def test_options_of_a_comparison_fit_the_number_of_strategies(hago: Run) -> None:
    one, two = ["compare", MODEL, STRATEGY, "--data", DATA], ["compare", MODEL, STRATEGY, OTHER, "--data", DATA]
    run = hago(*one, "--objective", "kl")
    assert run.code == 2 and "--objective compares two strategies; give a second STRATEGY" in run.err
    assert "kl" in hago(*two, "--objective", "kl", "--json").json["measures"]
    for option in (["--base", "fast"], ["--realizations", "fast"]):
        run = hago(*two, *option)
        assert run.code == 2 and "give one STRATEGY with them" in run.err
        assert hago(*one, *option, "--realizations", "fast").code == 0


def test_two_strategies_side_by_side(hago: Run) -> None:
    run = hago("compare", MODEL, STRATEGY, OTHER, "--data", DATA)
    assert run.out.startswith(f"A  {STRATEGY}\nB  {OTHER}\non int16_accumulator and vta, 32 samples")
    assert "surely better" in run.out and "weight_bytes" in run.out


def test_quantize_saves_what_can_be_realized(hago: Run) -> None:
    result = hago("quantize", MODEL, "--hardware", "x86_vnni", "--data", DATA, "--save", "q.json", "--json").json
    assert result["strategy"] == "q.json" and result["results"]["sqnr"] > 0
    assert hago("realize", MODEL, "q.json", "--data", DATA).code == 0


def test_explain_from_data_is_explain_from_shapes(hago: Run) -> None:
    shared = ["explain", MODEL, "--hardware", "vta", "--fix-bits", "0:*=6", "--keep-float", "4", "--json"]
    by_data, by_shape = hago(*shared, "--data", DATA), hago(*shared, "--input-shape", "1,6,6")
    assert by_data.json == by_shape.json
    rows = {r["node"]: r for r in by_data.json["nodes"]}
    assert not rows["4"]["integer"] and rows["0"]["edges"][0]["choices"] == [6]


def test_realize_explains_its_kernels(hago: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    result = hago("realize", MODEL, STRATEGY, "--data", DATA, "--explain", "--json").json["kernels"]
    assert result["head"] and sum(result["kernels"].values()) == len(result["rows"]) > 0
    shown = hago("realize", MODEL, STRATEGY, "--data", DATA, "--explain").out
    monkeypatch.setattr(executor, "exact_kernels", lambda: NOTHING)
    without = hago("realize", MODEL, STRATEGY, "--data", DATA, "--explain", "--json").json["kernels"]
    assert "float32 sums" in without["kernels"]  # what models run on then
    assert all(row["node"] in shown and row["why"] in shown for row in result["rows"])


def test_simulate_and_realize_agree(hago: Run) -> None:
    simulated = hago("simulate", MODEL, STRATEGY, "--data", DATA, "--json").json
    realized = hago("realize", MODEL, STRATEGY, "--data", DATA, "--json").json
    assert simulated["models"] == {k: v for k, v in realized["models"].items() if k != "integer"}
    assert realized["models"]["integer"] == realized["models"]["simulated"] and realized["same"]


def test_realize_fails_if_a_value_differs(hago: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrong(IntegerModel):
        def run(self, *args: Any, **kwargs: Any) -> list[Any]:
            return [out + 1 for out in super().run(*args, **kwargs)]

    monkeypatch.setattr(strategy_report, "IntegerModel", Wrong)
    run = hago("realize", MODEL, STRATEGY, "--data", DATA)
    assert run.code == 1 and "simulated != integer" in run.out


def test_inspect_writes_the_table(hago: Run, search_folder: Path) -> None:
    run = hago("inspect", MODEL, STRATEGY, "--data", DATA, "--csv", "tables/layers.csv", "--values")
    lines = (search_folder / "tables/layers.csv").read_text("utf-8").splitlines()
    assert run.code == 0 and "float | simulated | integer" in run.out and "wrote tables/layers.csv" in run.err
    assert len(lines) == 1 + len(hago("inspect", MODEL, STRATEGY, "--data", DATA, "--json").json["nodes"])


def test_replay_of_log_and_strategy(hago: Run) -> None:
    assert hago("replay", MODEL, LOG, "--data", DATA, "--json").json == {"trials": 6, "same": True, "differences": []}
    assert hago("replay", MODEL, LOG, "--data", DATA, "--best-only", "--json").json["trials"] == 1
    assert hago("replay", MODEL, STRATEGY, "--data", DATA).code == 0


def test_replay_fails_if_a_figure_differs(hago: Run, search_folder: Path) -> None:
    record = json.loads((search_folder / STRATEGY).read_text("utf-8"))
    record["made_by"]["results"]["sqnr"] = np.nextafter(record["made_by"]["results"]["sqnr"], 0.0)
    (search_folder / "edited.json").write_text(json.dumps(record), "utf-8")
    run = hago("replay", MODEL, "edited.json", "--data", DATA)
    assert run.code == 1 and "sqnr was" in run.out


def test_hardware_of_the_user_must_be_given_again(hago: Run, search_folder: Path) -> None:
    chip = json.loads(Path(__file__).parents[2].joinpath("hardware_specs/vta.json").read_text("utf-8"))
    (search_folder / "mine.json").write_text(json.dumps({**chip, "name": "mine"}), "utf-8")
    made = ["search", MODEL, "--hardware", "mine.json", "--data", DATA, "--budget", "2 trials"]
    run = hago(*made, "--save", "strategies/net-mine.json")
    assert run.code == 0, run.err
    assert "--hardware mine.json" in run.out
    without = hago("simulate", MODEL, "strategies/net-mine.json", "--data", DATA)
    assert without.code == 2 and "give --hardware" in without.err
    assert hago("simulate", MODEL, "strategies/net-mine.json", "--data", DATA, "--hardware", "mine.json").code == 0


def test_strategies_of_ones_own_chip_and_of_a_shipped_one_are_compared(hago: Run, search_folder: Path) -> None:
    chip = json.loads(Path(__file__).parents[2].joinpath("hardware_specs/vta.json").read_text("utf-8"))
    for name in ("own", "other"):
        (search_folder / f"{name}.json").write_text(json.dumps({**chip, "name": name}), "utf-8")
        made = ["quantize", MODEL, "--hardware", f"{name}.json", "--data", DATA, "--save", f"net-{name}.json"]
        assert hago(*made).code == 0
    for both in ([STRATEGY, "net-own.json"], ["net-own.json", STRATEGY], ["net-own.json", "net-own.json"]):
        compared = ["compare", MODEL, *both, "--data", DATA]
        without = hago(*compared)
        assert without.code == 2 and "net-own.json was made for hardware 'own', which does not ship" in without.err
        assert hago(*compared, "--hardware", "own.json").code == 0
        wrong = hago(*compared, "--hardware", "other.json")
        assert wrong.code == 2 and "net-own.json was made for hardware 'own'" in wrong.err
    two = ["compare", MODEL, "net-own.json", "net-other.json", "--data", DATA, "--hardware", "own.json"]
    assert "net-other.json was made for hardware 'other'" in hago(*two).err
    run = hago(*two, "--hardware", "other.json")
    assert run.code == 0 and "on own and other, 32 samples" in run.out
    unused = hago("compare", MODEL, STRATEGY, OTHER, "--data", DATA, "--hardware", "own.json")
    assert unused.code == 2 and "--hardware own.json: no strategy was made for it" in unused.err


def test_hardware_check_fails_and_lists_mistakes(hago: Run, search_folder: Path) -> None:
    (search_folder / "wrong.json").write_text('{"version": 1, "name": "x", "rounding": "half_eve"}', "utf-8")
    run = hago("hardware", "check", "wrong.json")
    assert run.code == 1 and "$.rounding" in run.out and run.err == ""
    result = hago("hardware", "--json", "check", "wrong.json").json
    assert result["ok"] is False and any("half_eve" in m for m in result["mistakes"])
    (search_folder / "cut.json").write_text('{"version": 1,', "utf-8")
    assert hago("hardware", "check", "cut.json", "--json").json["mistakes"][0].count("line 1") == 1


def test_ops_of_the_user(hago: Run, search_folder: Path) -> None:
    (search_folder / "cli_ops.py").write_text(
        "import torch\nfrom hago.ops._rule import IntegerForm, OpRule\n"
        "from hago.ops._shared import arguments, magnitude_bound\n"
        'RULE = OpRule(name="abs", aten=("aten.abs.default",), parse=arguments(("self",)),\n'
        "    compute=lambda attrs, x: torch.abs(x),\n"
        '    integer=IntegerForm(slots=("follow",), bound=magnitude_bound, accepts_per_channel="all"))\n'
        "class Net(torch.nn.Sequential):\n"
        "    def __init__(self): torch.manual_seed(0); super().__init__(torch.nn.Conv2d(1, 2, 3))\n"
        "    def forward(self, x): return super().forward(x).abs().flatten(1)\n",
        "utf-8",
    )
    chip = json.loads((Path(__file__).parents[2] / "hardware_specs/vta.json").read_text("utf-8"))
    (search_folder / "with_abs.json").write_text(json.dumps(chip | {"ops": {**chip["ops"], "abs": ["i32"]}}), "utf-8")
    ours = ["--ops", "cli_ops:RULE"]
    assert hago("hardware", "check", "with_abs.json").code == 1
    assert hago("hardware", "check", "with_abs.json", *ours).code == 0
    shared = ["--data", DATA, "--hardware", "with_abs.json", *ours]
    run = hago("search", "cli_ops:Net", *shared, "--budget", "2 trials", "--save", "abs.json", "--log", "abs.jsonl")
    assert run.code == 0 and "--ops cli_ops:RULE" in run.out, run.err
    for command in ("realize", "inspect"):
        assert hago(command, "cli_ops:Net", "abs.json", *shared).code == 0
    assert hago("bench", "cli_ops:Net", "abs.json", *shared, "--batches", "1", "--rounds", "1").code == 0
    assert hago("replay", "cli_ops:Net", "abs.jsonl", *shared).code == 0
    wrong = hago("hardware", "show", "vta", "--ops", "cli_ops:torch")
    assert wrong.code == 2 and "expected an OpRule" in wrong.err


def test_objectives_of_the_user(hago: Run, search_folder: Path) -> None:
    """An objective, a searcher and an estimator by `package.module:name`; what a log names is not imported."""
    (search_folder / "cli_parts.py").write_text(
        "from dataclasses import dataclass\n"
        "from hago.calibration.estimators import MaxRange\n"
        "@dataclass(frozen=True)\n"
        "class Halved(MaxRange):\n"
        "    name = 'halved'\n"
        "    def __call__(self, statistics, grid):\n"
        "        lo, hi = super().__call__(statistics, grid)\n"
        "        return lo / 2, hi / 2\n"
        "def least_error(reference, outputs, labels):\n"
        "    return -float((reference[0] - outputs[0]).abs().max())\n"
        "def start_only(space, start, seed):\n"
        "    from hago.searchers.exhaustive import StartOnlyOptions, start_only_search\n"
        "    return start_only_search(space, start, seed, StartOnlyOptions(), {})\n",
        "utf-8",
    )
    shared = ["--hardware", "x86_vnni", "--data", DATA]
    own = ["--objective", "cli_parts:least_error", "--estimator", "cli_parts:Halved"]
    run = hago(
        "search", MODEL, *shared, *own, "--searcher", "cli_parts:start_only", "--keep", "least_error >= -100",
        "--save", "of_the_user.json", "--log", "of_the_user.jsonl",
    )  # fmt: skip
    assert run.code == 0, run.err
    made_by = json.loads((search_folder / "of_the_user.json").read_text("utf-8"))["made_by"]
    assert (made_by["objective"], made_by["estimator"]) == ("least_error", "halved")
    for given in ([], own[:2], own[2:]):
        run = hago("replay", MODEL, "of_the_user.jsonl", *shared, *given)
        missing = "--estimator" if given == own[:2] else "--objective"
        assert run.code == 2 and f"{missing} package.module:name" in run.err
    assert hago("replay", MODEL, "of_the_user.jsonl", *shared, *own).code == 0
    other = hago("replay", MODEL, "of_the_user.jsonl", *shared, *own[:2], "--estimator", "mse")
    assert other.code == 2 and "is of estimator 'halved'; the one that was given is 'mse'" in other.err
    run = hago("replay", MODEL, "of_the_user.json", *shared)
    assert run.code == 2 and "--objective package.module:name" in run.err
    assert hago("replay", MODEL, "of_the_user.json", *shared, *own[:2]).code == 0
    wrong = hago("quantize", MODEL, *shared, "--estimator", "percentil:99.9")
    assert wrong.code == 2 and "Did you mean 'percentile'" in wrong.err
    wrong = hago("search", MODEL, *shared, "--searcher", "gredy:tolerance=0.1")
    assert wrong.code == 2 and "Did you mean 'greedy'" in wrong.err


def test_data_files_and_samples(hago: Run, search_folder: Path) -> None:
    generator = np.random.default_rng(0)
    np.savez(search_folder / "d.npz", x=generator.normal(size=(30, 1, 6, 6)), y=np.arange(30) % 3)
    result = hago("simulate", MODEL, STRATEGY, "--data", "d.npz", "--samples", "7", "--batch-size", "4", "--json").json
    assert result["samples"] == 7 and result["models"]["float"]["sim_acc"] <= 1


def test_the_current_folder_is_importable_only_during_a_command(hago: Run) -> None:
    before = list(sys.path)
    hago("explain", MODEL, "--hardware", "vta", "--input-shape", "1,6,6")
    assert sys.path == before


def test_a_closed_pipe_is_no_error(hago: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    class Closed:
        def write(self, text: str) -> int:
            raise BrokenPipeError

        def flush(self) -> None:
            raise BrokenPipeError

        def fileno(self) -> int:
            raise ValueError("no file")

    monkeypatch.setattr(sys, "stdout", Closed())
    assert main(["hardware", "list"]) == 1


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_a_full_disk_on_standard_output_is_one_line() -> None:
    with open("/dev/full", "w") as full:
        ran = subprocess.run(
            [sys.executable, "-m", "hago", "hardware", "list"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert ran.returncode == 2 and ran.stderr.startswith("hago: error: cannot write to standard output: No space left")
    assert ran.stderr.count("\n") == 1


def test_a_search_of_a_float_model(hago: Run, search_folder: Path) -> None:
    words = [
        "--hardware",
        "x86_vnni",
        "--keep-float",
        "*",
        "--log",
        "floats.jsonl",
        "--save",
        "floats.json",
        "--searcher",
        "tpe",
    ]
    run = hago(*SEARCH, *words)
    assert run.code == 0 and re.search(r"\n  one shot .* exact ", run.out)
    assert "what was found is what one shot gives" in run.out and "no edge has bits: all of it is float" in run.out


def test_version(hago: Run) -> None:
    run = hago("--version")
    assert run.code == 0 and run.out.startswith("hago ")


def test_a_race_on_threads_leaves_its_front(hago: Run, search_folder: Path) -> None:
    words = [*SEARCH, "--searcher", "random:trials=6,batch=3", "--executor", "threads:2", "--race", "0.05"]
    run = hago(*words, "--log", "raced.jsonl", "--save", "raced.json", "--cache", "10MB")
    assert run.code == 0 and "front     raced.front.json" in run.out
    points = json.loads((search_folder / "raced.front.json").read_text())["points"]
    assert points and points == sorted(points, key=lambda p: p["cost"])
    assert len(read_log(search_folder / "raced.jsonl").trials) == 6
    for wrong in (["--executor", "processes"], ["--race", "2"], ["--cache", "much"]):
        assert hago(*SEARCH, *wrong).code == 2
