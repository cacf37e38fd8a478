"""What commands say at their end: one definition of one shot, and advice that can be followed."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from commands import Run, after_hago, runner
from products import some

from hago.analysis.answer import one_shot_options
from hago.calibration import ESTIMATORS
from hago.cli.arguments import build_parser
from hago.cli.options import check_command, search_as_quantized, strategy_command
from hago.hardware import load_hardware, save_hardware
from hago.plan import Strategy
from hago.search import load_front
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

class Own:
    name = "own"

    def __call__(self, statistics, grid):
        return statistics.minimum, statistics.maximum
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
@pytest.mark.some_cases(3)
@pytest.mark.parametrize(("estimator", "searcher"), some(2, [None, *sorted(ESTIMATORS)], ["auto", "greedy"]))
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
    how = ["--budget", "1 trials", "--corrections", "none", "--save", "s.json"]  # compared with no one shot
    text = hago("search", NET, "--hardware", "vta", *DATA, *how).out
    assert "not surely better on " in text and "; more calibration samples make this surer" in text


# ---------------------------------------------------------------- the commands that are named
@pytest.mark.some_cases(3)
@pytest.mark.parametrize("command", ["quantize", "inspect"])
@pytest.mark.parametrize(
    "options", [[], ["--keep-float", "3", "--fix-bits", "2:1=7", "--estimator", "max_range"], ["--samples", "64"]]
)
def test_one_shot_names_a_search_that_runs(hago: Run, command: str, options: list[str]) -> None:
    run = hago("quantize", NET, "--hardware", "vta", *DATA, *HELD_OUT, *options, "--save", "q.json", "--json")
    if command == "inspect":
        samples = options if "--samples" in options else []
        run = hago("inspect", NET, "q.json", *DATA, *HELD_OUT, *samples, "--json")
        assert "  # may lose less than one shot\nnext  " in hago("inspect", NET, "q.json", *DATA, *samples).out
    searched = hago(*after_hago(run.json["search"]), "--budget", "1 trials", "--json")
    assert searched.code == 0, searched.err
    made_by = Strategy.load(searched.json["strategy"]).made_by
    one = Strategy.load("q.json").made_by
    # the thresholds of the default estimator are refined
    kept = ["keep_float", "fix_bits", "data_hash", *(["estimator"] if "--estimator" in options else [])]
    assert {key: made_by[key] for key in kept} == {key: one[key] for key in kept}


def test_one_shot_names_an_inspection_that_runs(hago: Run) -> None:
    quantize = ["quantize", NET, "--hardware", "vta", *DATA, *HELD_OUT, "--samples", "64", "--save", "q.json"]
    line = next(line for line in hago(*quantize).out.splitlines() if line.startswith("inspect "))
    command, _, why = line.partition("  # ")
    assert after_hago(command) == after_hago(hago(*quantize, "--json").json["inspect"])
    assert why == "names the layers that lose most, and what helps"
    run = hago(*after_hago(command))
    assert run.code == 0 and "calibration data, 64 samples" in run.out and "held-out data" in run.out
    real = hago("quantize", NET, "--hardware", "onnxruntime_cpu", *DATA, "--keep-float", "*", "--save", "q.json")
    assert real.code == 0 and "inspect " not in real.out and "search " not in real.out


#: Every option of `hago quantize` but those of its outputs.
ALL_OPTIONS = [
    *(
        "--weights=w.pt",
        "--ops=zoo:OPS",
        "--hardware=mine.json",
        "--data=images",
        "--held-out=others",
        "--held-out-samples=9",
    ),
    *(
        "--samples=7",
        "--batch-size=4",
        "--size=6x8",
        "--mean=-0.5",
        "--std=0.25",
        "--gray",
        "--estimator=percentile:99",
    ),
    *("--keep-float=3", "--keep-float=5", "--fix-bits=2:1=7", "--fix-bits=4:1=6"),
    *("--calibration-table=table", "--quantize-table=modes", "--corrections=rounding", "--corrections=bias"),
    "--effort=best",
]


def test_named_commands_have_every_option_of_the_one_shot() -> None:
    args = build_parser().parse_args(["quantize", NET, *ALL_OPTIONS])
    given = {name: value for name, value in vars(args).items() if name not in ("command", "json", "save")}
    without = vars(build_parser().parse_args(["quantize", NET, "--hardware=vta", "--data=x"]))
    assert [name for name, value in given.items() if value == without[name]] == ["model"]
    named = {
        command: vars(build_parser().parse_args(after_hago(line)))
        for command, line in (
            ("search", search_as_quantized(args)),
            ("realize", check_command(args, Path("s.json"), args.weights)),
            ("inspect", strategy_command("inspect", args, Path("s.json"), args.weights)),
        )
    }
    for command, found in named.items():
        assert found["command"] == command
        assert [name for name, value in given.items() if name in found and found[name] != value] == []
    assert given.keys() <= named["search"].keys()


def test_the_search_that_is_named_does_more_than_one_shot(hago: Run) -> None:
    """A search of the effort `fast` is one shot."""
    out = hago("quantize", NET, "--hardware", "vta", *DATA, "--effort", "fast", "--save", "q.json").out
    inspected = hago("inspect", NET, "q.json", *DATA, "--no-remedies").out
    for text in (out, inspected):
        (search,) = (line for line in text.splitlines() if line.startswith("search "))
        assert "--effort" not in search


def test_a_fast_search_says_how_many_samples_it_looked_at(hago: Run) -> None:
    search = ["search", NET, "--hardware", "x86_vnni", *DATA, *HELD_OUT, "--searcher", "pareto:points=2,rounds=1"]
    fast = hago(*search, "--effort", "fast", "--log", "f.jsonl", "--save", "f.json").out
    assert "it looked at 64 of 256 samples" in fast and "the front, measured on 64 samples\n" in fast
    rows = fast.partition("the front, ")[2].partition("\n\n")[0].splitlines()[2:]
    assert [int(row.split()[0]) for row in rows] == [point.trial for point in load_front("f.front.json")]
    assert "calibration data, 256 samples\n" in fast and "held-out data, 256 samples\n" in fast
    assert hago("replay", NET, "f.jsonl", *DATA).code == 0 == hago("replay", NET, "f.json", *DATA).code
    assert "fast, on at most 64 samples" in hago("report", NET, "f.jsonl", *DATA, "--no-remedies", "--json").out
    good = hago(*search, "--log", "g.jsonl", "--save", "g.json").out
    assert "calibration data, 256 samples\n" in good and "it looked at" not in good


def test_an_inspection_names_a_search_with_the_tables_and_the_estimator_of_one_shot(hago: Run) -> None:
    Path("table").write_text("# op_name    threshold    min    max\n0 1 -1 1\n", "utf-8")
    made = ["quantize", NET, "--hardware", "vta", *DATA, "--save", "q.json"]
    hago(*made, "--calibration-table", "table")
    assert "--calibration-table CALIBRATION_TABLE" in hago("inspect", NET, "q.json", *DATA, "--no-remedies").out
    hago(*made, "--estimator", "answers_zoo:Own")
    assert "--estimator ESTIMATOR" in hago("inspect", NET, "q.json", *DATA, "--no-remedies").out
    hago(*made)
    plain = hago("inspect", NET, "q.json", *DATA, "--no-remedies").out
    assert "--estimator" not in plain and "TABLE" not in plain


def test_inspection_on_other_data_names_no_data_for_a_search(hago: Run) -> None:
    hago("quantize", NET, "--hardware", "vta", *DATA, "--save", "q.json")
    on_others = ["inspect", NET, "q.json", "--data", "answers_zoo:others"]
    out = hago(*on_others, "--samples", "40").out
    (search,) = (line for line in out.splitlines() if line.startswith("search "))
    assert "--data CALIBRATION_DATA" in search and "--samples" not in search
    hago("search", NET, "--hardware", "vta", *DATA, "--budget", "1 trials", "--save", "s.json")
    searched = hago("inspect", NET, "s.json", *DATA)
    assert "may lose less" not in searched.out and "hago quantize (" not in searched.out


def test_the_one_shot_with_all_remedies_is_named_and_runs(hago: Run) -> None:
    made = ["quantize", NET, "--hardware", "x86_vnni", *DATA, "--fix-bits", "*.weight=4", "--estimator", "max_range"]
    before = hago(*made, "--save", "q.json", "--json").json["results"]["sqnr"]
    run = hago("inspect", NET, "q.json", *DATA, *HELD_OUT)
    (line,) = (line for line in run.out.splitlines() if line.startswith("improve "))
    command, _, gain = line.partition("  # ")
    remedies = hago("inspect", NET, "q.json", *DATA, "--json").json["remedies"]
    assert gain == f"gains {remedies['together']['gain_db']:.1f} dB on 32 samples"
    assert command.endswith(f"{' '.join(HELD_OUT)} {remedies['together']['command']}")
    better = hago(*after_hago(command), "--json").json["results"]["sqnr"]
    assert better > before + 0.5 * remedies["together"]["gain_db"] > before + 1.0
    assert "improve " not in hago("inspect", NET, "q.json", *DATA, "--no-remedies").out


@pytest.mark.parametrize(("searched", "command"), [(False, "quantize"), (True, "search")])
def test_remedies_say_which_command_takes_them(hago: Run, searched: bool, command: str) -> None:
    made = ["search", "--budget", "1 trials"] if searched else ["quantize"]
    hago(*made, NET, "--hardware", "x86_vnni", *DATA, "--fix-bits", "0:1=4", "--save", "q.json")
    run = hago("inspect", NET, "q.json", *DATA)
    said = f"try with hago {command}, added to the options that were given (measured on 32 samples"
    assert said in " ".join(run.out.split()), run.out
    remedies = hago("inspect", NET, "q.json", *DATA, "--json").json["remedies"]
    assert remedies["for"] == command and remedies["found"]


# ---------------------------------------------------------------- limits
def test_a_cost_that_is_minimized_without_a_limit_is_a_warning(hago: Run) -> None:
    search = ["search", NET, "--hardware", "vta", *DATA, "--budget", "2 trials", "--minimize", "size"]
    assert "nothing limits the loss" in hago(*search, "--save", "s.json").err
    assert "nothing limits the loss" in hago(*search, "--budget-cost", "macs <= 1 M", "--save", "s.json").err
    for limit in ("agreement >= 50 %", "accuracy >= float - 50 %"):
        run = hago(*search, "--keep", limit, "--save", "s.json")
        assert run.code == 0 and "warning" not in run.err, run.err
    front = hago(*search, "--searcher", "pareto:points=2,rounds=1", "--save", "s.json")
    assert front.code == 0 and "warning" not in front.err, front.err


def test_every_limit_is_told_with_what_is_reached(hago: Run) -> None:
    search = ["search", NET, "--hardware", "vta", *DATA, *HELD_OUT, "--budget", "4 trials", "--save", "s.json"]
    limits = ["--keep", "sqnr >= 8, agreement >= 40 %, mse <= 10", "--budget-cost", "size <= 90 %"]
    run = hago(*search, *limits)
    assert run.code == 0, run.err
    made_by, said = Strategy.load("s.json").made_by, " ".join(run.out.split())
    ours, others = made_by["results"], made_by["held_out"]
    assert (
        f"limit 'sqnr >= 8': {ours['sqnr']:.2f} dB on the calibration data, {others['sqnr']:.2f} dB on the held-out"
        in said
    )
    assert f"limit 'agreement >= 40 %': {100 * ours['agreement']:.2f} % on the calibration data" in said
    assert f"limit 'mse <= 10': {-ours['mse']:.6g} on the calibration data" in said and ours["mse"] < 0
    assert "limit 'size <= 90 %'" in said and "'size <= 90 %' came to" in said
    missed = hago(*search, "--keep", f"sqnr >= {ours['sqnr'] - 0.01}", "--held-out-samples", "3").out
    between = others["sqnr"] < ours["sqnr"] - 0.01
    assert not between or "where it is missed" in " ".join(missed.split())


def test_a_limit_that_needs_labels_names_itself(hago: Run) -> None:
    search = ["search", NET, "--hardware", "vta", "--minimize", "size", "--budget", "2 trials"]
    run = hago(*search, "--data", "answers_zoo:images", "--keep", "accuracy >= float - 1 %")
    assert run.code == 2 and "objective" not in run.err, run.err
    assert "a limit on 'accuracy' (keep, or --keep) needs labels" in run.err and "(--data)" in run.err
    assert hago(*search, "--data", "answers_zoo:images", "--keep", "agreement >= 50 %").code == 0
    assert hago(*search, *DATA, "--keep", "accuracy >= float - 50 %").code == 0


@pytest.mark.parametrize("metric", ["latency", "cycles", "energy"])
def test_a_cost_without_figures_names_the_keys_of_the_hardware_file(hago: Run, metric: str) -> None:
    search = ["search", NET, *DATA, "--minimize", metric, "--keep", "agreement >= 50 %", "--budget", "1 trials"]
    run = hago(*search, "--hardware", "tflite")
    assert run.code == 2 and ("'hago hardware measure' finds" in run.err) == (metric != "energy"), run.err
    named = re.search(r"Add to its file (.*) to 'cost' and (.*) to signatures", run.err)
    assert named is not None, run.err
    chip = load_hardware("tflite")
    figures = dict.fromkeys(named[1].split(", "), 2.0)
    each = dict.fromkeys(named[2].split(", "), 2.0)
    ops = {op: tuple(replace(desc, cost={**desc.cost, **each}) for desc in descs) for op, descs in chip.ops.items()}
    save_hardware(replace(chip, name="mine", ops=ops, cost={**chip.cost, **figures}), "mine.json")
    again = hago(*search, "--hardware", "mine.json")
    assert again.code == 0, again.err


def test_limits_that_say_the_same_have_one_log(hago: Run) -> None:
    search = ["search", NET, "--hardware", "vta", *DATA, "--budget", "2 trials", "--json"]
    for spellings in (("size <= 60 %", "size<60%", " size <  60% "), ("size <= 4 kB", "size <= 4kB")):
        logs = {hago(*search, "--budget-cost", spelling).json["log"] for spelling in spellings}
        assert len(logs) == 1
    kept = {
        hago(*search, "--minimize", "size", "--keep", spelling).json["log"]
        for spelling in ("agreement >= float - 50 %", "agreement>float  -  50 %")
    }
    assert len(kept) == 1
    own = [*search, "--log", "l.jsonl"]
    assert hago(*own, "--budget-cost", "size < 60%").code == hago(*own, "--budget-cost", "size <= 60 %").code == 0
    other = hago(*own, "--budget-cost", "size <= 61 %")
    assert other.code == 2 and "--budget-cost was size < 60%, is size <= 61 %" in other.err


def test_a_budget_without_a_unit_is_of_trials(hago: Run) -> None:
    assert "a number alone, as in 10, is of trials" in " ".join(hago("search", "--help").out.split())
    search = ["search", NET, "--hardware", "vta", *DATA, "--searcher", "random:trials=4"]
    assert hago(*search, "--budget", "2", "--json").json["trials"] == 2


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--finetune", "budget=1 hour"], "budget '1 hour'; expected a time, such as '90s', '5m' or '1h30m'"),
        (["--finetune", "objective=mes"], "unknown training objective 'mes'"),
        (["--finetune", "scheme=lsq2"], "unknown training scheme 'lsq2'"),
        (["--finetune", "steps=0"], "steps is 0; expected a whole number above 0"),
        (["--budget", "1 hour"], "budget '1 hour'; expected '200 trials', '50 forwards' or a time"),
        (["--executor", "process"], "executor 'process'; expected 'processes:8'"),
    ],
)
def test_options_of_late_stages_are_refused_before_the_model_is_made(hago: Run, options: list[str], says: str) -> None:
    run = hago("search", "answers_zoo:none", "--hardware", "vta", *DATA, *options)
    assert run.code == 2 and says in run.err and not Path("logs").exists()


# ---------------------------------------------------------------- options that contradict each other
@pytest.mark.parametrize("command", ["quantize", "search", "explain", "sensitivity"])
def test_bits_of_nodes_that_stay_float_are_refused(hago: Run, command: str) -> None:
    words = [command, NET, "--hardware", "x86_vnni", *DATA, "--keep-float", "4"]
    for pattern in ("4", "4:1", "4.weight"):
        run = hago(*words, "--fix-bits", f"{pattern}=4")
        assert run.code == 2, run
    run = hago(*words, "--fix-bits", "4=4")
    assert "fix_bits '4' gives bits to 4, which keep_float keeps float; leave out one of them" in run.err
    assert hago(*words).code == hago(*words, "--fix-bits", "*.weight=6").code == 0
    assert hago(*words[:-2], "--fix-bits", "4=4").code == 0


@pytest.mark.parametrize("command", ["quantize", "search", "evaluate"])
def test_held_out_data_that_calibration_saw_is_a_warning(hago: Run, command: str) -> None:
    hago("quantize", NET, "--hardware", "vta", *DATA, "--save", "q.json")
    words = ["evaluate", NET, "q.json"] if command == "evaluate" else [command, NET, "--hardware", "vta"]
    words += ["--budget", "1 trials"] if command == "search" else []
    same = hago(*words, *DATA, "--held-out", "answers_zoo:images")
    assert same.code == 0 and "256 of 256 samples of the held-out data are in the calibration data" in same.err
    few = hago(*words, *DATA, "--held-out", "answers_zoo:images", "--samples", "7")
    assert few.code == 0 and "7 of 256 samples of the held-out data are in the calibration data" in few.err
    assert "warning" not in hago(*words, *DATA, *HELD_OUT).err


@pytest.mark.parametrize("tuned", [[], ["--finetune", "steps=1"]])
def test_a_search_reads_its_data_once(hago: Run, tuned: list[str]) -> None:
    """What is kept in memory is not read again, also not for training."""
    counting = ZOO.replace("def batches(seed=1):\n", "def batches(seed=1):\n    print('read', seed, file=sys.stderr)\n")
    counting = counting.replace("    return [(x,", "    yield from [(x,")
    Path("counting_zoo.py").write_text(f"import sys\n{counting}", "utf-8")
    words = [word.replace("answers_zoo", "counting_zoo") for word in (*DATA, *HELD_OUT)]
    run = hago("search", NET, "--hardware", "vta", *words, "--budget", "1 trials", "--save", "s.json", *tuned)
    sys.modules.pop("counting_zoo")
    assert run.code == 0, run.err
    assert (run.err.count("read 1"), run.err.count("read 2")) == (1, 1)


def test_samples_of_the_calibration_cut_no_held_out_data(hago: Run) -> None:
    quantize = ["quantize", NET, "--hardware", "vta", *DATA, "--samples", "9", "--save", "q.json"]
    assert "held-out data, 256 samples" in hago(*quantize, *HELD_OUT).out
    few = hago(*quantize, *HELD_OUT, "--held-out-samples", "30")
    assert "calibration data, 9 samples" in few.out and "held-out data, 30 samples" in few.out
    assert "--samples 9" in few.out and few.out.count("--held-out-samples 30") == 3
    alone = hago(*quantize, "--held-out-samples", "30")
    assert alone.code == 2 and "--held-out, which is not given; give both" in alone.err
    assert "more" in hago(*quantize, *HELD_OUT, "--held-out-samples", "0").err
