"""The public functions, end to end on a small network; and old files, which must always load."""

from __future__ import annotations

import itertools
import json
import re
import signal
import warnings
from dataclasses import fields
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch
from networks import Small, images, randomized
from torch import Tensor, nn
from toys import timeless

import hago
from hago.arithmetic.equality import count_differing
from hago.errors import HagoError
from hago.ops import OPS
from hago.plan.space import Bits, Space
from hago.plan.strategy import Strategy
from hago.runtime.reference import IntegerModel
from hago.search.goal import GoalOptions
from hago.search.preparation import QuantizationOptions
from hago.search.session import RunOptions, SearchOptions
from hago.searchers.registry import SEARCHERS
from hago.simulation.simulator import Simulator
from hago.study.log import best_trial, read_log
from hago.study.score import Score

CHIP = "x86_vnni"
GOLDEN = Path(__file__).parent / "golden"
DATA = [(images(16, 1, 6, 6, seed=i), torch.arange(16) % 3) for i in range(2)]
HELD_OUT = [(images(16, 1, 6, 6, seed=9), torch.arange(16) % 3)]
QUIET: dict[str, Any] = {"progress": False}


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return randomized(Small())


@pytest.fixture(scope="module")
def found(model: nn.Module, tmp_path_factory: pytest.TempPathFactory) -> tuple[Strategy, float, Path]:
    """A short search with a log and a saved strategy beside it."""
    folder = tmp_path_factory.mktemp("search")
    options = {"searcher": "random", "budget": 5, "log": folder / "log.jsonl", "save": folder / "best.json"}
    return *hago.search_quantize_strategy(model, CHIP, DATA, seed=3, **options, **QUIET), folder


# ---------------------------------------------------------------- quantize
@pytest.mark.parametrize("chip", hago.available_hardware())
def test_quantize_without_a_search(model: nn.Module, chip: str) -> None:
    quantizer = hago.quantize(model, chip, DATA)
    simulated, integer = quantizer.simulate(), quantizer.realize()
    assert isinstance(simulated, Simulator) and isinstance(integer, IntegerModel)
    x = images(5, 1, 6, 6, seed=7)
    assert count_differing(simulated(x), integer(x)) == 0
    assert set(quantizer.plan.verdicts.values()) <= {"proved", "possible"}
    assert quantizer.strategy.hardware.name == chip


def test_keep_float_and_fix_bits(model: nn.Module) -> None:
    quantizer = hago.quantize(model, CHIP, DATA, estimator="max_range", keep_float=["fc"], fix_bits={"stem.0": 6})
    assert "fc" not in quantizer.plan.nodes
    assert quantizer.strategy.bits["stem.0:0"] == quantizer.strategy.bits["stem.0:1"] == 6
    again = hago.create_quantizer(model, CHIP, quantizer.strategy)
    assert again.plan.key == quantizer.plan.key


def test_models_are_modules(model: nn.Module) -> None:
    quantizer = hago.quantize(model, CHIP, DATA)
    for made in (quantizer.simulate(), quantizer.realize()):
        assert isinstance(made, nn.Module)
        out = made(images(2, 1, 6, 6))
        assert out.shape == (2, 3) and not out.requires_grad
    state = quantizer.realize().state_dict()
    assert state and all(not t.is_floating_point() for t in state.values())


def test_the_old_name_of_realize(model: nn.Module) -> None:
    quantizer = hago.quantize(model, CHIP, DATA)
    x = images(2, 1, 6, 6)
    assert quantizer.quantize()(x).equal(quantizer.realize()(x))
    assert type(quantizer.quantize("reference")) is type(quantizer.realize("reference")) is IntegerModel


def test_models_take_arrays(model: nn.Module) -> None:
    quantizer = hago.quantize(model, CHIP, [tuple(t.numpy() for t in batch) for batch in DATA])
    x = images(2, 1, 6, 6)
    for made in (quantizer.simulate(), quantizer.realize(), quantizer.realize("reference")):
        for array in (x.numpy(), x.numpy()[::-1].copy()[::-1], x.numpy().astype(">f4"), x.numpy().astype("float64")):
            assert made(array).equal(made(x))


@pytest.mark.parametrize("engine", ["auto", "reference"])
def test_an_integer_model_is_not_traced(model: nn.Module, engine: str, tmp_path: Path) -> None:
    integer, x = hago.quantize(model, CHIP, DATA).realize(engine), images(2, 1, 6, 6)
    for refused in (integer, nn.Sequential(integer, nn.ReLU())):
        for call in (lambda m: torch.jit.trace(m, x), torch.jit.script):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # of torch.jit itself
                with pytest.raises(HagoError, match="cannot be traced or scripted by torch.jit.*load_integer_model"):
                    call(refused)
    integer.save(tmp_path / "m.hago")
    assert hago.load_integer_model(tmp_path / "m.hago")(x).equal(integer(x))
    assert torch.compile(integer, backend="eager")(x).equal(integer(x))


# ---------------------------------------------------------------- search
def test_a_search_is_saved_logged_and_scored(found: tuple[Strategy, float, Path]) -> None:
    strategy, score, folder = found
    assert Strategy.load(folder / "best.json") == strategy
    log = read_log(folder / "log.jsonl")
    assert len(log.trials) == 5
    assert score == strategy.made_by["results"]["sim_acc"]
    best = max(log.trials, key=lambda t: (t.score.rank, -t.index))
    assert dict(best.bits) == dict(strategy.bits)
    assert strategy.made_by["searcher"]["name"] == "random" and strategy.made_by["seed"] == 3


def test_the_same_seed_gives_the_same_search(
    model: nn.Module, found: tuple[Strategy, float, Path], tmp_path: Path
) -> None:
    strategy, score, folder = found
    again = hago.search_quantize_strategy(
        model, CHIP, DATA, searcher="random", budget=5, seed=3, log=tmp_path / "log.jsonl", **QUIET
    )
    assert again == (strategy, score)

    def timeless(path: Path) -> list[Any]:
        return [{k: v for k, v in json.loads(line).items() if k != "time"} for line in path.read_text().splitlines()]

    assert timeless(tmp_path / "log.jsonl") == timeless(folder / "log.jsonl")
    other, _ = hago.search_quantize_strategy(model, CHIP, DATA, searcher="random", budget=5, seed=4, **QUIET)
    assert other.made_by["seed"] == 4


def test_a_stopped_search_continues(model: nn.Module, found: tuple[Strategy, float, Path], tmp_path: Path) -> None:
    _, _, folder = found
    log = tmp_path / "log.jsonl"
    options = {"searcher": "random", "seed": 3, "log": log, **QUIET}
    hago.search_quantize_strategy(model, CHIP, DATA, budget=2, **options)
    hago.search_quantize_strategy(model, CHIP, DATA, budget=5, **options)
    assert [t.score for t in read_log(log).trials] == [t.score for t in read_log(folder / "log.jsonl").trials]


@pytest.mark.parametrize("searcher", ["greedy", "annealing", "exhaustive", "default"])
def test_every_searcher(model: nn.Module, searcher: str) -> None:
    bare, fixed = [x for x, _ in DATA], {"stem*": 8, "add*": 16, "fc*": 8}
    strategy, score = hago.search_quantize_strategy(
        model, CHIP, bare, searcher=searcher, budget="4 trials", objective="cosine", fix_bits=fixed, **QUIET
    )
    assert score == strategy.made_by["results"]["cosine"] <= 1.0
    hago.create_quantizer(model, CHIP, strategy)


@pytest.mark.parametrize("executor", [None, "threads:2"])
def test_an_interrupted_search_writes_its_files_and_continues(
    model: nn.Module, tmp_path: Path, executor: str | None
) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    calls: list[int] = []

    def similar(reference: Any, outputs: Any, labels: Any) -> float:
        calls.append(1)
        if len(calls) == 9:
            signal.raise_signal(signal.SIGINT)
        return -float((reference[0] - outputs[0]).abs().mean())

    def searched(folder: Path, executor: str | None = None) -> float:
        folder.mkdir(exist_ok=True)
        files = {"log": folder / "log", "save": folder / "best.json", "front": folder / "front.json"}
        given = {"searcher": "random", "budget": 8, "objective": similar, "executor": executor}
        return hago.search_quantize_strategy(model, CHIP, DATA, **files, **given, **QUIET)[1]

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            searched(cut, executor)
    finally:
        signal.signal(signal.SIGINT, before)
    trials = read_log(cut / "log").trials
    assert 0 < len(trials) < 8
    best = best_trial(trials)
    assert best is not None and Strategy.load(cut / "best.json").bits == best.bits
    assert hago.load_front(cut / "front.json").points
    assert searched(cut) == searched(whole)
    assert timeless((cut / "log").read_bytes()) == timeless((whole / "log").read_bytes())
    assert (cut / "best.json").read_bytes() == (whole / "best.json").read_bytes()


FILES = ["log", "save", "front", "finetune:log", "finetune:checkpoint", "finetune:save_weights"]


@pytest.mark.parametrize(("one", "other"), list(itertools.combinations(FILES, 2)))
@pytest.mark.parametrize("linked", ["same", "symbolic", "hard"])
def test_output_files_must_differ(model: nn.Module, tmp_path: Path, one: str, other: str, linked: str) -> None:
    path = tmp_path / "file"
    path.write_text("")
    second = path if linked == "same" else tmp_path / "link"
    if linked == "symbolic":
        second.symlink_to(path)
    elif linked == "hard":
        second.hardlink_to(path)
    given: dict[str, Any] = {"finetune": {}} if "finetune" in one + other else {}
    for name, where in ((one, path), (other, second)):
        outer, _, inner = name.partition(":")
        (given[outer] if inner else given)[inner or outer] = where
    with pytest.raises(hago.HagoError, match=r"name the same file, .*give each a path of its own"):
        hago.search_quantize_strategy(model, CHIP, DATA, **given, **QUIET)
    assert path.read_text() == ""


@pytest.mark.parametrize(
    ("finetune", "error"),
    [({"step": 1}, hago.HagoError), ({"steps": 1}, hago.HagoError)],
    ids=["unknown", "no save_weights"],
)
def test_options_of_the_training_are_checked_before_the_search(
    model: nn.Module, tmp_path: Path, finetune: dict[str, Any], error: type[Exception]
) -> None:
    log = tmp_path / "log.jsonl"
    with pytest.raises(error, match=r"step|save_weights"):
        hago.search_quantize_strategy(model, CHIP, DATA, log=log, finetune=finetune, **QUIET)
    assert not log.exists()


def test_modules_of_torchscript_are_refused(model: nn.Module) -> None:
    with torch.no_grad():
        traced = torch.jit.trace(model, DATA[0][0], check_trace=False)
    with pytest.raises(hago.HagoError, match="pass the nn.Module that it was traced or scripted from"):
        hago.quantize(traced, CHIP, DATA)
    hago.quantize(model, CHIP, DATA)


def test_an_objective_is_given_once(model: nn.Module) -> None:
    with pytest.raises(hago.HagoError, match="maximize='kl' and objective='mse', which mean the same; give one"):
        hago.search_quantize_strategy(model, CHIP, DATA, maximize="kl", objective="mse", **QUIET)
    hago.search_quantize_strategy(model, CHIP, DATA, maximize="mse", budget=1, **QUIET)


def test_signatures_do_not_print_the_registry() -> None:
    for function in (hago.from_torch, hago.load_integer_model):
        assert "= mappingproxy(hago.ops.OPS)" in str(signature(function)) and len(str(signature(function))) < 600
    assert set(OPS | {"mine": OPS["add"]}) == {*OPS, "mine"}  # type: ignore[operator]
    with pytest.raises(TypeError):
        OPS["mine"] = OPS["add"]  # type: ignore[index]


def test_every_option_of_a_search_is_a_keyword_of_the_api() -> None:
    groups = {"quantization": QuantizationOptions, "goal": GoalOptions, "run": RunOptions}
    options = {f.name for kind in (SearchOptions, *groups.values()) for f in fields(kind)} - set(groups)
    parameters = signature(hago.search_quantize_strategy).parameters.values()
    # of earlier logs alone
    assert {p.name for p in parameters if p.kind is p.KEYWORD_ONLY} == {*options, "finetune"} - {
        "channel_bins",
        "softmax_span",
    }


def test_a_searcher_and_an_objective_of_the_user(model: nn.Module) -> None:
    class Narrow:
        """Asks for the fewest bits, once."""

        name, options = "narrow", {"once": 1}

        def __init__(self, space: Space, start: Bits, seed: int) -> None:
            self.points, self.told = [space.narrowest()], []  # type: ignore[var-annotated]

        def ask(self) -> list[Bits]:
            asked, self.points = self.points, []
            return asked

        def tell(self, bits: Bits, score: Score) -> None:
            self.told.append(score.value)

    def farthest(reference: list[Tensor], outputs: list[Tensor], labels: Tensor | None) -> float:
        return -float((reference[0] - outputs[0]).abs().max())

    strategy, _ = hago.search_quantize_strategy(model, CHIP, DATA, searcher=Narrow, objective=farthest, **QUIET)
    assert set(strategy.bits.values()) == {4} and strategy.made_by["objective"] == "farthest"
    assert strategy.made_by["results"]["farthest"] < 0


def test_held_out_data_are_reported(model: nn.Module, tmp_path: Path) -> None:
    path = tmp_path / "best.json"
    strategy, _ = hago.search_quantize_strategy(
        model, CHIP, DATA, searcher="default", held_out=HELD_OUT, save=path, **QUIET
    )
    judged = hago.evaluate_strategy(model, CHIP, strategy, HELD_OUT)
    held_out = dict(strategy.made_by["held_out"])
    low, high = held_out.pop("sqnr_interval")
    assert held_out == dict(judged.results) and low < held_out["sqnr"] < high
    assert Strategy.load(path) == strategy


def test_a_search_on_data_without_classes(model: nn.Module) -> None:
    """Labels are not needed; what is maximised then is the likeness to the float model."""
    _, score = hago.search_quantize_strategy(model, CHIP, [x for x, _ in DATA], searcher="default", **QUIET)
    assert score > 20  # decibels


# ---------------------------------------------------------------- replay and reports
def test_replay_finds_no_difference(model: nn.Module, found: tuple[Strategy, float, Path]) -> None:
    strategy, _, folder = found
    for record, trials in ((strategy, 1), (folder / "best.json", 1), (folder / "log.jsonl", 5)):
        replayed = hago.replay(model, CHIP, record, DATA)
        assert replayed.same and replayed.trials == trials, str(replayed)
    assert hago.replay(model, CHIP, folder / "log.jsonl", DATA, best_only=True).trials == 1


def test_replay_finds_a_difference(model: nn.Module, found: tuple[Strategy, float, Path], tmp_path: Path) -> None:
    strategy, _, _ = found
    document = strategy.to_json()
    document["made_by"]["results"]["sqnr"] += 1e-9
    changed = hago.replay(model, CHIP, Strategy.from_json(document), DATA)
    assert [d.figure for d in changed.differences] == ["sqnr"]


def test_explain_and_inspect(model: nn.Module, found: tuple[Strategy, float, Path]) -> None:
    explained = str(hago.explain(model, CHIP, (images(2, 1, 6, 6),)))
    assert "stem.0" in explained and "fc" in explained
    table = hago.inspect_graph_statistic(model, CHIP, found[0], DATA)
    assert "stem.0" in str(table) and json.dumps(table.to_json())


@pytest.mark.parametrize("samples", [1, 4])
def test_a_tensor_or_an_array_is_the_only_example_input(
    model: nn.Module, found: tuple[Strategy, float, Path], samples: int
) -> None:
    x, strategy = images(samples, 1, 6, 6), found[0]
    explained = str(hago.explain(model, "vta", (x,)))
    for alone in (x, x.numpy()):
        assert str(hago.explain(model, "vta", alone)) == explained
        assert hago.from_torch(model, alone).model_hash == hago.from_torch(model, (x,)).model_hash
        assert hago.create_quantizer(model, CHIP, strategy, alone).plan.graph.model_hash == strategy.model_hash
        assert hago.estimate_cost(model, CHIP, strategy, alone) == hago.estimate_cost(model, CHIP, strategy)


def test_all_forms_of_a_model_give_the_same_strategy(model: nn.Module, found: tuple[Strategy, float, Path]) -> None:
    strategy, _, folder = found
    program = torch.export.export(model, (DATA[0][0],), dynamic_shapes=({0: torch.export.Dim("n")},))
    graph = hago.from_torch(model, (DATA[0][0],))
    x = images(3, 1, 6, 6, seed=5)
    outputs = [
        hago.create_quantizer(m, CHIP, s).realize()(x)
        for m in (model, program, graph)
        for s in (strategy, folder / "best.json")
    ]
    assert all(out.equal(outputs[0]) for out in outputs)


def test_arguments_by_name_and_nested_results() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 3), nn.Linear(5, 3)

        def forward(self, left: Tensor, right: Tensor) -> dict[str, Tensor]:
            return {"sum": self.a(left) + self.b(right), "left": self.a(left).relu()}

    model = randomized(Two())
    left, right = images(8, 4), images(8, 5, seed=1)
    quantizer = hago.quantize(model, CHIP, [{"left": left, "right": right}])
    for made in (quantizer.simulate(), quantizer.realize()):
        out = made(right=right, left=left)
        assert set(out) == {"sum", "left"} and out["sum"].equal(made(left, right)["sum"])
    again = hago.create_quantizer(model, CHIP, quantizer.strategy)
    assert again.simulate()(left, right)["left"].equal(quantizer.simulate()(left, right)["left"])


# ---------------------------------------------------------------- what cannot be done is said
def test_a_narrow_accumulator_needs_fewer_bits(model: nn.Module) -> None:
    wide = hago.quantize(model, "int16_accumulator", DATA).strategy
    products = [b for k, b in wide.bits.items() if k.startswith(("stem.0", "body"))]
    score = hago.evaluate_strategy(model, "int16_accumulator", wide, DATA)
    assert not score.overflows
    assert products and max(products) <= 8


# ---------------------------------------------------------------- old files
def chip_of_the_first_version() -> hago.Hardware:
    """Hardware that is described here, so that the files beside stay valid whatever ships."""
    mac = hago.OpDesc(["uint8", "int8", "int32"], "int32")
    wide = hago.OpDesc("int32", "int32", max_bits=23)
    both = [hago.OpDesc("uint8", "uint8"), wide]
    return hago.Hardware(
        {"conv2d": [mac], "linear": [mac], "relu": both, "add": [wide], "mean": [wide], "clamp": both},
        name="golden",
    )


def write_golden(model: nn.Module) -> None:
    """Only for a new version of the form; the files of earlier ones stay."""
    hago.search_quantize_strategy(
        model, chip_of_the_first_version(), DATA, searcher="random", estimator="max_range", budget=4, seed=0,
        log=GOLDEN / "log_1.jsonl", save=GOLDEN / "strategy_1.json", **QUIET,
    )  # fmt: skip
    strategy = Strategy.load(GOLDEN / "strategy_1.json")
    out = hago.create_quantizer(model, chip_of_the_first_version(), strategy).realize()(images(4, 1, 6, 6, seed=5))
    (GOLDEN / "outputs_1.json").write_text(json.dumps([[float(v).hex() for v in row] for row in out]) + "\n")


def test_a_strategy_of_version_1_gives_the_same_integers_for_ever(model: nn.Module) -> None:
    strategy = Strategy.load(GOLDEN / "strategy_1.json")
    assert strategy.version == 1
    quantizer = hago.create_quantizer(model, chip_of_the_first_version(), strategy)
    expected = [[float.fromhex(v) for v in row] for row in json.loads((GOLDEN / "outputs_1.json").read_text())]
    for made in (quantizer.simulate(), quantizer.realize()):
        assert made(images(4, 1, 6, 6, seed=5)).tolist() == expected


def test_a_log_of_version_1_is_read_for_ever(model: nn.Module) -> None:
    log = read_log(GOLDEN / "log_1.jsonl")
    strategy = Strategy.load(GOLDEN / "strategy_1.json")
    assert len(log.trials) == 4 and log.torn_bytes == 0
    assert log.header is not None and log.header.model_hash == strategy.model_hash
    best = max(log.trials, key=lambda t: (t.score.rank, -t.index))
    assert dict(best.bits) == dict(strategy.bits)
    # other machines may round the float model's values otherwise, so figures may differ; what it is of may not
    assert hago.replay(model, chip_of_the_first_version(), GOLDEN / "log_1.jsonl", DATA).trials == 4


@pytest.fixture(autouse=True, scope="module")
def golden_files(request: pytest.FixtureRequest, model: nn.Module) -> None:
    if request.config.getoption("--update-golden") and not (GOLDEN / "log_1.jsonl").exists():
        write_golden(model)


def test_the_documentation_says_which_searchers_are_guided() -> None:
    text = str(hago.search_quantize_strategy.__doc__)
    (listed,) = re.findall(r"- ([\w, ]+): are not guided;", text)
    assert not any(SEARCHERS[name].guided for name in listed.split(", "))
    assert {name for name, entry in SEARCHERS.items() if not entry.guided} - set(listed.split(", ")) == {
        "default",
        "rfc_greedy",
    }
