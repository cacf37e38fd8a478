"""Files of commands whose user names none: the same command continues its own, and no other touches them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from commands import Run, runner

from hago.cli.arguments import build_parser
from hago.cli.output_files import KINDS, NOT_HASHED, WEIGHTS, check_output, default_stem
from hago.errors import HagoError
from hago.hardware.file import load_hardware
from hago.study.log import read_log

ZOO = """
import torch

def net():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Conv2d(1, 4, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(64, 3))

def batches():
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(16, 1, 6, 6, generator=generator), torch.arange(16) % 3)]

def batches_of_others():
    return [(2 * images, labels) for images, labels in batches()]

def broken():
    raise AssertionError("the model was made")
"""
GIVEN = ["--hardware", "vta", "--data", "files_zoo:batches"]
SEARCH = ["search", "files_zoo:net", *GIVEN, "--searcher", "random:trials=3"]
QUANTIZE = ["quantize", "files_zoo:net", *GIVEN]
#: Other values of options on which the results depend.
OTHER = {
    "seed": ["--seed", "1"],
    "searcher": ["--searcher", "greedy"],
    "options of the searcher": ["--searcher", "random:trials=4"],
    "objective": ["--objective", "cosine"],
    "minimize": ["--minimize", "weight_bytes"],
    "budget_cost": ["--budget-cost", "weight_bytes <= 1 MB"],
    "keep": ["--keep", "sqnr >= 1 dB"],
    "estimator": ["--estimator", "mse"],
    "keep_float": ["--keep-float", "*relu*"],
    "fix_bits": ["--fix-bits", "*=8"],
    "race": ["--race"],
    "search_topology": ["--search-topology"],
    "hardware": ["--hardware", "x86_vnni"],
}


@pytest.fixture
def hago(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Run]:
    """Runs a command in an empty folder, but for a module."""
    (tmp_path / "files_zoo.py").write_text(ZOO, "utf-8")
    monkeypatch.chdir(tmp_path)
    yield runner(capsys)
    sys.modules.pop("files_zoo", None)


def stem(*words: str) -> str:
    return default_stem(build_parser().parse_args(words), load_hardware("vta"), "made")


def files() -> dict[str, bytes]:
    return {str(p): p.read_bytes() for p in Path().rglob("*") if p.suffix in (".json", ".jsonl")}


def test_the_arguments_left_out_are_arguments() -> None:
    """So that one that is renamed is not hashed unnoticed; `progress` may come."""
    commands = (SEARCH, ["finetune", "m:n", "s.json", "--data", "d"], ["export", "m:n", "s", "--format", "onnx"])
    known = {name for words in commands for name in vars(build_parser().parse_args(words))}
    assert known | {"progress"} >= NOT_HASHED


def test_another_command_has_files_of_its_own(hago: Run) -> None:
    assert hago(*QUANTIZE).code == 0
    before = files()
    assert [Path(p).parent.name for p in before] == ["strategies"] and "-one_shot-" in next(iter(before))
    for words in (SEARCH, [*SEARCH, "--seed", "1"], [*QUANTIZE, "--estimator", "max_range"]):
        run = hago(*words)
        assert run.code == 0, run.err
        now = files()
        assert before.items() < now.items()
        before = now


def test_the_same_command_continues(hago: Run) -> None:
    first = hago(*SEARCH, "--budget", "1 trials", "--json").json
    second = hago(*SEARCH, "--held-out", "files_zoo:batches", "--json").json
    assert (first["log"], first["strategy"]) == (second["log"], second["strategy"])
    assert first["log"].startswith("logs/net-vta-random-") and second["trials"] == 3
    assert len(files()) == 3  # log, strategy and front


@pytest.mark.parametrize("name", OTHER)
def test_names_depend_on_what_results_depend_on(name: str) -> None:
    if name != "hardware":
        assert stem(*SEARCH, *OTHER[name]) != stem(*SEARCH)
    assert stem(*SEARCH, "--budget", "9m", "--executor", "threads:2", "--cache", "1MB") == stem(*SEARCH)
    assert stem(*SEARCH, "--maximize", "cosine") == stem(*SEARCH, "--objective", "cosine")


def test_a_strategy_that_was_trained_takes_no_other_name(hago: Run) -> None:
    plain = hago(*SEARCH, "--json").json
    before = files()
    tuned = hago(*SEARCH, "--finetune", "steps=1", "--json").json
    assert tuned["log"] == plain["log"] and tuned["strategy"] != plain["strategy"]
    assert files()[plain["strategy"]] == before[plain["strategy"]]


@pytest.mark.parametrize("name", OTHER)
def test_a_log_that_does_not_fit_names_the_option_before_any_work(hago: Run, name: str) -> None:
    log = ["--log", "l.jsonl", "--save", "s.json"]
    assert hago(*SEARCH, *log).code == 0
    before = files()
    words = ["search", "files_zoo:broken", *SEARCH[2:], *log]
    run = hago(*words, *OTHER[name])
    option = f"--{name.split()[-1].replace('_', '-')}"
    assert run.code == 2 and f"log l.jsonl cannot be continued: {option} was " in run.err, run.err
    assert ", is " in run.err and run.err.rstrip().endswith("use that option again, or give another --log")
    assert files() == before
    assert hago(*SEARCH, *log).code == 0
    if name in ("seed", "minimize"):
        assert hago(*SEARCH, "--log", "other.jsonl", "--save", "other.json", *OTHER[name]).code == 0


def test_a_log_of_other_data_says_so(hago: Run) -> None:
    assert hago(*SEARCH, "--log", "l.jsonl").code == 0
    run = hago(*SEARCH, "--log", "l.jsonl", "--data", "files_zoo:batches_of_others")
    assert (
        run.code == 2
        and "l.jsonl cannot be continued: these are other samples, another order, or another batch size" in run.err
    )


def test_a_log_is_not_continued_if_the_user_says_so(hago: Run) -> None:
    again = [*SEARCH, "--log", "l.jsonl"]
    assert hago(*again, "--no-resume").code == 0
    run = hago("search", "files_zoo:broken", *again[2:], "--no-resume")
    assert run.code == 2 and "--no-resume: log l.jsonl exists; leave --no-resume out to continue it, or" in run.err
    assert hago(*again).code == hago(*again, "--no-resume", "--log", "other.jsonl").code == 0


@pytest.mark.parametrize(
    "words",
    [
        [*SEARCH, "--fix-bits", "nothing*=8"],
        [*SEARCH, "--keep", "agreement >= 99.99 %", "--fix-bits", "*=2"],
        [*SEARCH, "--data", "files_zoo:nothing"],
        ["search", "files_zoo:nothing", *SEARCH[2:]],
        [*SEARCH, "--searcher", "none"],
        [*QUANTIZE, "--keep-float", "nothing*"],
        [*SEARCH, "--log", "a/b/c.jsonl", "--save", "a/s.json", "--keep-float", "nothing*"],
        ["finetune", "files_zoo:net", "none.json", "--data", "files_zoo:batches"],
    ],
    ids=" ".join,
)
def test_a_failure_leaves_nothing(hago: Run, words: list[str]) -> None:
    assert hago(*words).code == 2
    assert {p.name for p in Path().iterdir()} <= {"files_zoo.py", "__pycache__"}


def test_a_folder_that_cannot_be_made_is_refused_before_any_work(hago: Run) -> None:
    for option in ("--log", "--save", "--front"):
        run = hago("search", "files_zoo:broken", *SEARCH[2:], option, "files_zoo.py/x")
        assert run.code == 2 and "files_zoo.py is not a folder; give another path" in run.err
    assert read_log(hago(*SEARCH, "--log", "a/b/l.jsonl", "--json").json["log"]).trials


# ---------------------------------------------------------------- logs of the user's own
def test_a_log_of_the_user_s_own_has_its_own_strategy(hago: Run) -> None:
    """The same command with another log and a smaller budget overwrote the strategy and the front."""
    assert hago(*SEARCH).code == 0
    for log in ("own/short.jsonl", "other/short.jsonl", "own/short.txt"):
        before = files()
        run = hago(*SEARCH, "--log", log, "--budget", "1 trials", "--json")
        assert run.code == 0, run.err
        assert before.items() < files().items()
        assert Path(run.json["strategy"]).parent == Path(run.json["front"]).parent == Path(log).parent
    assert {"own/short.json", "own/short.front.json", "own/short.txt.json"} < files().keys()
    again = hago(*SEARCH, "--log", "own/short.jsonl", "--json").json
    assert again["strategy"] == "own/short.json" and again["trials"] == 3


def test_a_new_log_overwrites_no_strategy_of_another(hago: Run) -> None:
    assert hago(*SEARCH, "--save", "own/short.json").code == 0
    before = files()
    run = hago("search", "files_zoo:broken", *SEARCH[2:], "--log", "own/short.jsonl")
    assert run.code == 2 and "own/short.json exists already" in run.err and "--save another file" in run.err
    assert files() == before
    assert hago(*SEARCH, "--log", "own/short.jsonl", "--save", "own/short.json").code == 0


# ---------------------------------------------------------------- files that exist
ON_STRATEGY = ["files_zoo:broken", "s.json", "--hardware", "vta", "--data", "files_zoo:batches"]
#: Every option that names a file with a kind, on a command that fails once the model is made.
WRITERS = {
    "search --save": ["search", "files_zoo:broken", *SEARCH[2:]],
    "search --front": ["search", "files_zoo:broken", *SEARCH[2:]],
    "quantize --save": ["quantize", "files_zoo:broken", *GIVEN],
    "sensitivity --save": ["sensitivity", "files_zoo:broken", *GIVEN],
    "finetune --save": ["finetune", *ON_STRATEGY],
    "realize --save": ["realize", *ON_STRATEGY],
    "search --report": ["search", "files_zoo:broken", *SEARCH[2:]],
    "report --save": ["report", *ON_STRATEGY],
    "inspect --csv": ["inspect", *ON_STRATEGY],
    "run --save": ["run", "stored.safetensors", "--data", "files_zoo:batches"],
    "hardware --output": ["hardware", "measure", "x86_vnni"],
}


def test_every_kind_of_file_has_a_writer() -> None:
    assert {f"{command} --{option}" for command, option in KINDS} == WRITERS.keys()


@pytest.mark.parametrize("name", WRITERS)
def test_a_file_that_hago_did_not_write_is_not_overwritten(hago: Run, name: str) -> None:
    option, kind = name.split()[1], KINDS[name.split()[0], name.split("--")[1]]
    for mine in (f"mine{kind.suffix}", "notes.txt", "files_zoo.py" if kind.suffix == ".py" else "notes"):
        text = b'{"version": 1, "mine": "print(1)"}'
        Path(mine).write_bytes(text)
        run = hago(*WRITERS[name], option, mine)
        assert run.code == 2, run
        assert run.err == (
            f"hago: error: {option} {mine} exists and is not {kind.name} of hago, so it is not overwritten; "
            "give another path\n"
        )
        assert Path(mine).read_bytes() == text


@pytest.mark.parametrize("name", WRITERS)
def test_a_folder_and_a_file_of_another_format_are_refused(hago: Run, name: str) -> None:
    option, kind = name.split()[1], KINDS[name.split()[0], name.split("--")[1]]
    Path("folder").mkdir()
    for given in ("folder", "folder/", "new/"):
        run = hago(*WRITERS[name], option, given)
        example = Path(given) / f"net{kind.suffix}"
        expected = f"hago: error: {option} {given} is a folder; give the path of a file in it, e.g. {example}\n"
        assert (run.code, run.err) == (2, expected)
    other = "x.npz" if kind.suffix != ".npz" else "x.json"
    run = hago(*WRITERS[name], option, other)
    assert (
        run.code == 2 and f"{option} {other}: {kind.name} is a {kind.suffix} file; give e.g. x{kind.suffix}" in run.err
    )


def test_files_that_hago_wrote_are_overwritten(hago: Run) -> None:
    save = ["--save", "s.json"]
    stored = ["realize", "files_zoo:net", "s.json", "--data", "files_zoo:batches", "--save", "m.safetensors"]
    inspected = ["inspect", "files_zoo:net", "s.json", "--data", "files_zoo:batches", "--csv", "t.csv"]
    sensitivity = ["sensitivity", "files_zoo:net", *GIVEN, "--save", "sensitivity.json"]
    run = ["run", "m.safetensors", "--data", "files_zoo:batches", "--save", "o.npz"]
    Path("s.json").touch()  # an empty file is none that could be lost
    trained = ["finetune", "files_zoo:net", "s.json", "--data", "files_zoo:batches", "--steps", "1", "--save", "f.json"]
    for words in ([*SEARCH, *save], [*QUANTIZE, *save], stored, inspected, sensitivity, run, trained):
        for _ in range(2):
            result = hago(*words)
            assert result.code == 0, result.err
    refused = hago(*QUANTIZE, "--save", "m.safetensors")
    assert (
        refused.code == 2 and "'hago realize MODEL STRATEGY --data DATA --save FILE' stores the integer" in refused.err
    )
    front = hago(*QUANTIZE, "--save", "s.front.json")
    assert front.code == 2 and "s.front.json exists and is not a strategy of hago" in front.err


# ---------------------------------------------------------------- models that were trained again
def test_a_model_with_other_weights_has_files_of_its_own(hago: Run) -> None:
    """The default command was continued after a training, and ended in an error about other weights."""
    first = [hago(*words, "--json").json["strategy"] for words in (SEARCH, QUANTIZE)]
    before = files()
    zoo = Path("files_zoo.py").read_text("utf-8")
    Path("files_zoo.py").write_text(zoo.replace("manual_seed(0)", "manual_seed(77)"), "utf-8")
    sys.modules.pop("files_zoo")
    for words, old in zip((SEARCH, QUANTIZE), first, strict=True):
        run = hago(*words)
        assert run.code == 0 and "is of other weights or another network" in run.err, run.err
        assert Path(old).stem in run.out
        assert before.items() < files().items()
        now = files()
        assert hago(*words).code == 0
        assert now.keys() == files().keys()  # the same files are continued
    Path("files_zoo.py").write_text(zoo, "utf-8")
    sys.modules.pop("files_zoo")
    assert "continuing after 3 trials" in hago(*SEARCH).err and files().keys() == now.keys()


@pytest.mark.parametrize("name", ["tuned.pt", "tuned.pth", "tuned.json"])
def test_trained_weights_have_the_ending_by_which_they_are_read(name: str, tmp_path: Path) -> None:
    with pytest.raises(HagoError, match=r"a file of trained weights is a \.safetensors file; give e\.g\. .*tuned\.saf"):
        check_output(tmp_path / name, WEIGHTS)
    assert check_output(tmp_path / "tuned.safetensors", WEIGHTS).name == "tuned.safetensors"
