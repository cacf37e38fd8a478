"""Fine-tuning: it improves the model, it resumes after a kill, and its strategy can be used like any other."""

from __future__ import annotations

import functools
import json
import math
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from networks import Small, randomized
from torch import Tensor

import hago
from hago.data import StatusLine
from hago.emulation.dorefa import DoReFa
from hago.errors import HagoError, StrategyMismatch
from hago.graph.execute import run_real
from hago.graph.graph import Graph
from hago.plan.strategy import Strategy
from hago.qat.finetuning import Finetuned
from hago.qat.scheme import TRAINING_SCHEMES, Ranges, last_range, scheme_settings
from hago.runtime.exactness import compare_plan_exactly
from hago.serialization.tensor_file import from_bytes

HARDWARE = "x86_vnni"


def data(samples: int = 96, seed: int = 1) -> list[Tensor]:
    images = torch.randn(samples, 1, 8, 8, generator=torch.Generator().manual_seed(seed))
    return list(images.split(32))


@functools.cache
def started() -> tuple[Graph, Strategy]:
    """A small network at 4 bits."""
    graph = hago.from_torch(randomized(Small()), (data()[0],))
    fixed = {f"{n}:{s}": 4 for n in ("stem.0", "body", "fc") for s in (0, 1)}
    return graph, hago.quantize(graph, HARDWARE, data(), fix_bits=fixed, corrections="none").strategy


def tuned(**options: Any) -> Finetuned:
    model, strategy = started()
    chosen = {"steps": 8, "batch_size": 16, "lr": 5e-3, "range_lr": 5e-3, **options}
    return hago.finetune(model, HARDWARE, strategy, data(), **chosen)


def same(a: Finetuned, b: Finetuned) -> bool:
    one, other = a.quantizer.strategy, b.quantizer.strategy
    return one.model_hash == other.model_hash and one.thresholds == other.thresholds and a.after == b.after


# ---------------------------------------------------------------- results
def test_it_recovers_accuracy_at_low_bits() -> None:
    result = tuned(steps=60, held_out=data(64, seed=2))
    assert result.kept and result.steps == 60
    assert result.after["sqnr"] > result.before["sqnr"] + 2.0
    plan = result.quantizer.plan
    assert compare_plan_exactly(plan, [data()[0]]).same


def test_the_score_after_is_that_of_the_trained_weights() -> None:
    """Where scales are powers of two they seldom change, so that Plans before and after have one key."""
    model, _ = started()
    strategy = hago.quantize(model, "vta", data(), fix_bits={"*": 4}, corrections="none").strategy
    result = hago.finetune(model, "vta", strategy, data(), steps=60, batch_size=16, lr=5e-3, range_lr=0.0)
    assert result.kept
    reference = torch.cat([run_real(model, [x])[0] for x in data()]).double()
    outputs = torch.cat([result.quantizer.simulate()(x) for x in data()]).double()
    ratio = reference.square().sum() / (outputs - reference).square().sum()
    assert result.after["sqnr"] == pytest.approx(10 * math.log10(float(ratio)), abs=1e-6)
    assert result.after["sqnr"] > result.before["sqnr"] + 0.5


@pytest.mark.parametrize("objective", ["mse", "kl", lambda o, r, labels: (o[0] - r[0]).abs().mean()])
def test_any_objective_without_labels(objective: Any) -> None:
    result = tuned(steps=30, lr=2e-3, range_lr=0.0, objective=objective)
    assert result.kept and result.after["sqnr"] > result.before["sqnr"]


def test_an_interrupted_run_completes_its_step_and_can_be_resumed(tmp_path: Path) -> None:
    calls: list[int] = []

    def distance(outputs: Any, reference: Any, labels: Any) -> Tensor:
        calls.append(1)
        if len(calls) == 4:
            signal.raise_signal(signal.SIGINT)
        return (outputs[0] - reference[0]).abs().mean()

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            tuned(objective=distance, checkpoint=tmp_path / "run.safetensors")
    finally:
        signal.signal(signal.SIGINT, before)
    assert len(calls) == 4 and (tmp_path / "run.safetensors").exists()
    resumed = tuned(objective=distance, checkpoint=tmp_path / "run.safetensors")
    assert resumed.steps == 8 and same(resumed, tuned(objective=distance))


@pytest.mark.parametrize(
    "length, limit", [({"steps": 2}, " of at most 2"), ({"steps": None, "budget": "0.3s"}, "")], ids=["steps", "budget"]
)
def test_progress_names_the_largest_number_of_steps_if_there_is_one(
    monkeypatch: pytest.MonkeyPatch, length: dict[str, Any], limit: str
) -> None:
    shown: list[str] = []
    monkeypatch.setattr(StatusLine, "show", lambda _, text, force=False: shown.append(text))
    tuned(**length)
    assert any(text.startswith(f"training: step 1{limit}, loss") for text in shown)


def test_labels_train_too() -> None:
    model, strategy = started()
    labelled = [(x, run_real(model, [x])[0].argmax(1)) for x in data()]
    result = hago.finetune(model, HARDWARE, strategy, labelled, steps=20, objective="labels")
    assert result.after["sim_acc"] >= result.before["sim_acc"]


def test_the_result_is_a_strategy_like_any_other(tmp_path: Path) -> None:
    """It can be saved, loaded, applied and replayed with the trained float model."""
    result = tuned()
    result.quantizer.strategy.save(tmp_path / "s.json")
    graph = result.quantizer.plan.graph
    again = hago.create_quantizer(graph, HARDWARE, tmp_path / "s.json")
    assert torch.equal(again.simulate()(data()[0]), result.quantizer.realize()(data()[0]))
    assert hago.replay(graph, HARDWARE, tmp_path / "s.json", data()).trials == 1
    with pytest.raises(StrategyMismatch):
        hago.create_quantizer(started()[0], HARDWARE, tmp_path / "s.json")


def test_training_that_does_not_help_is_dropped() -> None:
    model, strategy = started()
    result = hago.finetune(model, HARDWARE, strategy, data(), steps=3, lr=30.0)
    assert not result.kept and result.after == result.before
    assert result.quantizer.strategy.model_hash == strategy.model_hash
    assert result.quantizer.strategy.thresholds == strategy.thresholds


def test_the_same_seed_gives_the_same_result() -> None:
    assert same(tuned(), tuned()) and not same(tuned(), tuned(seed=1))


# ---------------------------------------------------------------- log and checkpoints
def test_the_log_has_before_and_after(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    result = [tuned(log=log), tuned(log=log, seed=1)]
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert [line["what"] for line in lines] == ["before", "after", "before", "after"]
    assert lines[0]["results"]["sqnr"] == result[0].before["sqnr"]
    assert lines[3]["results"]["sqnr"] == result[1].after["sqnr"] and lines[3]["seed"] == 1
    assert lines[3]["trained_model_hash"] == result[1].quantizer.strategy.model_hash


class Stop(Exception):
    pass


def test_a_resumed_run_ends_as_one_that_was_not_stopped(tmp_path: Path) -> None:
    calls = []

    def stops(outputs: Any, reference: Any, labels: Any) -> Tensor:
        calls.append(1)
        if len(calls) == 6:
            raise Stop
        return (outputs[0] - reference[0]).square().mean()

    def goes_on(outputs: Any, reference: Any, labels: Any) -> Tensor:
        return (outputs[0] - reference[0]).square().mean()

    stops.__name__ = goes_on.__name__
    path, log = tmp_path / "c.safetensors", tmp_path / "log.jsonl"
    with pytest.raises(Stop):
        tuned(checkpoint=path, every=3, objective=stops, log=log)
    result = tuned(checkpoint=path, every=3, objective=goes_on, log=log)
    assert same(result, tuned(objective=goes_on)) and result.steps == 8
    assert [json.loads(line)["what"] for line in log.read_text().splitlines()] == ["before", "after"]
    assert same(tuned(checkpoint=path, every=3, objective=goes_on), result)  # a finished run is not trained further
    with pytest.raises(StrategyMismatch, match="is of a run with seed 0, this one has 1"):
        tuned(checkpoint=path, objective=goes_on, seed=1)
    assert same(tuned(checkpoint=path, objective=goes_on, seed=1, resume=False), tuned(objective=goes_on, seed=1))


def test_a_checkpoint_of_a_scheme_with_other_options_is_refused(tmp_path: Path) -> None:
    path, log = tmp_path / "c.safetensors", tmp_path / "log.jsonl"
    few = replace(TRAINING_SCHEMES["dorefa_relative"], dorefa=DoReFa("zzzxxxttt", relative=True, gradient_bits=6))
    first = tuned(checkpoint=path, scheme=few, log=log)
    assert same(tuned(checkpoint=path, scheme=few), first)
    with pytest.raises(StrategyMismatch, match=r"a run with scheme \{'name': .*, this one has 'dorefa_relative';"):
        tuned(checkpoint=path, scheme="dorefa_relative")
    recorded = json.loads(log.read_text().splitlines()[0])["scheme"]
    assert recorded["name"] == "dorefa_relative" and recorded.keys() == {"name", "dorefa"}
    assert recorded["dorefa"]["gradient_bits"] == 6


def test_what_settings_record_of_a_scheme() -> None:
    """The name alone for those that have one, as in older checkpoints."""
    assert {name: scheme_settings(scheme) for name, scheme in TRAINING_SCHEMES.items()} == {
        n: n for n in TRAINING_SCHEMES
    }
    other = replace(TRAINING_SCHEMES["pytorch"], activation=Ranges(average=last_range))
    averages = {"learned": False, "average": "last_range"}
    assert scheme_settings(other) == {"name": "pytorch", "activation": averages}


@pytest.mark.parametrize(
    "wrong, error, steps", [(Stop, Stop, 5), (math.nan, HagoError, 3)], ids=["an exception", "a loss that is NaN"]
)
def test_an_exception_keeps_what_was_trained_and_a_loss_that_is_no_number_does_not(
    wrong: Any, error: type[Exception], steps: int, tmp_path: Path
) -> None:
    calls = []

    def breaks(outputs: Any, reference: Any, labels: Any) -> Tensor:
        calls.append(1)
        if len(calls) == 6 and wrong is Stop:
            raise Stop
        return (outputs[0] - reference[0]).square().mean() * (wrong if len(calls) == 6 else 1.0)

    with pytest.raises(error):
        tuned(checkpoint=tmp_path / "c", every=3, objective=breaks)
    assert from_bytes((tmp_path / "c").read_bytes(), "hago checkpoint", "c")[0]["step"] == steps


#: Kills a run until one ends by itself; one process for all, so that torch is imported once.
SCRIPT = """
import os, random, signal, sys, time
import torch
torch.set_num_threads(1)
from qat.test_finetuning import started, tuned
started()
draw, kills, patience = random.Random(0), 0, 0.04
while True:
    child = os.fork()
    if child == 0:
        found = tuned(steps=30, checkpoint=sys.argv[1], every=2)
        print(found.quantizer.strategy.model_hash, kills, flush=True)
        os._exit(0)
    time.sleep(draw.uniform(0, patience))
    os.kill(child, signal.SIGKILL)
    if os.waitpid(child, 0)[1] == 0:
        break
    kills, patience = kills + 1, patience * 1.4
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_killed_run_ends_as_one_that_was_not_killed(tmp_path: Path) -> None:
    tests = Path(__file__).parents[1]
    path = os.pathsep.join([str(tests), str(tests.parent), os.environ.get("PYTHONPATH", "")])
    process = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path / "c.safetensors")],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert process.returncode == 0, process.stderr
    result, kills = process.stdout.split()[-2:]
    assert int(kills) >= 2
    assert result == tuned(steps=30).quantizer.strategy.model_hash
    assert [p.name for p in tmp_path.iterdir() if not p.name.startswith(".")] == ["c.safetensors"]


# ---------------------------------------------------------------- bad input
@pytest.mark.parametrize(
    "options, message",
    [
        ({"steps": 0}, "steps is 0; expected a whole number above 0"),
        ({"lr": float("nan")}, "lr is nan; expected a number from 0"),
        ({"budget": "200 trials"}, "expected a time, such as '90s'"),
        ({"budget": "1 hour"}, "budget '1 hour'; expected a time, such as '90s', '5m' or '1h30m', and steps= for"),
        ({"budget": "5m, 3 trials"}, "expected a time"),
        ({"objective": "mes"}, "Did you mean 'mse'"),
        ({"objective": "labels"}, "needs labels"),
        ({"scheme": "lsq2"}, "Did you mean 'lsq'"),
        ({"checkpoint": "/nonexistent/c.safetensors"}, "cannot write"),
        ({"log": "/nonexistent/log.jsonl"}, "cannot write log"),
    ],
)
def test_bad_options_are_refused_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(HagoError, match=message):
        tuned(**options)


def test_a_file_that_is_no_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "c.safetensors"
    path.write_bytes(b"not at all")
    with pytest.raises(HagoError, match="is not a hago checkpoint"):
        tuned(checkpoint=path)
    tuned(checkpoint=tmp_path / "whole", steps=2)
    path.write_bytes((tmp_path / "whole").read_bytes()[:-1])
    with pytest.raises(HagoError, match="was truncated"):
        tuned(checkpoint=path, steps=2)
