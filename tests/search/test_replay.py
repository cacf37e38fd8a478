"""Replay: logs and strategies of every kind of search give their figures again, to the last bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from building import residual_block, seeded
from networks import Small, randomized

import hago
from hago.errors import LogError
from hago.graph.model_source import read_weights
from hago.study.log import read_log

DATA = [(seeded(40, 3, 8, 8, seed=s), torch.arange(40) % 5) for s in range(3)]
SEARCHES: dict[str, dict[str, Any]] = {
    "default": {"budget": 4},
    "another objective": {"objective": "cosine", "searcher": "random:trials=4"},
    "a limit on a measure": {"keep": "kl <= 5", "budget": 4},
    "a limit on a measure, without refinement": {"keep": "kl <= 5", "searcher": "random:trials=4"},
    "a cost": {"minimize": "weight_bytes", "keep": "cosine >= 0.5", "budget": 4},
    "a race": {"race": 0.01, "searcher": "random:trials=30,batch=5", "estimator": "max_range"},
    "a race from point to point": {"race": hago.search.RaceOptions(first=8), "searcher": "annealing", "budget": 30},
    "a race after refinement": {"race": True},
}


@pytest.mark.parametrize("name", SEARCHES)
def test_logs_and_strategies_give_their_figures_again(name: str, tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    model, chip = residual_block(), "x86_vnni"
    strategy, _ = hago.search_quantize_strategy(model, chip, DATA, log=log, progress=False, **SEARCHES[name])
    replayed = hago.replay(model, chip, log, DATA)
    assert replayed.same, str(replayed)
    assert replayed.trials == sum(t.same_as is None for t in read_log(log).trials)
    replayed = hago.replay(model, chip, strategy, DATA)
    assert replayed.same, str(replayed)


def test_a_race_drops_trials_that_are_replayed(tmp_path: Path) -> None:
    log, chip = tmp_path / "log.jsonl", "x86_vnni"
    hago.search_quantize_strategy(residual_block(), chip, DATA, log=log, progress=False, **SEARCHES["a race"])
    lines = log.read_text("utf-8").splitlines()
    index, trial = next(
        (i, t) for i, line in enumerate(lines) if (t := json.loads(line)).get("score", {}).get("dropped")
    )
    figure = trial["results"]["sqnr"]
    trial["results"]["sqnr"] = figure + 1.0
    log.write_text("\n".join([*lines[:index], json.dumps(trial, sort_keys=True), *lines[index + 1 :], ""]), "utf-8")
    (difference,) = hago.replay(residual_block(), chip, log, DATA).differences
    assert (difference.trial, difference.figure, difference.replayed) == (trial["index"], "sqnr", figure)


def test_a_trained_strategy_is_replayed_with_the_figures_of_training(tmp_path: Path) -> None:
    data, weights = [seeded(20, 1, 6, 6, seed=s) for s in range(4)], tmp_path / "w.safetensors"
    strategy, _ = hago.search_quantize_strategy(
        randomized(Small()),
        "vta",
        data,
        race=True,
        keep="cosine >= 0.1",
        fix_bits={"*": 4},
        corrections="none",
        budget=3,
        progress=False,
        finetune={"steps": 100, "batch_size": 40, "save_weights": weights},
    )
    assert "finetuned" in strategy.made_by and {"race", "goal"} <= set(strategy.made_by)
    trained = randomized(Small())
    trained.load_state_dict(read_weights(weights))
    replayed = hago.replay(trained, "vta", strategy, data)
    # training compared the outputs with those of the float model before training, which is not given here
    assert {d.figure for d in replayed.differences} <= {"sqnr", "agreement"}


@pytest.mark.parametrize("edited", [{"race": {"alpha": 0.01, "speed": 1}}, {"goal": 3}, {"seed": "one"}, {"costs": 5}])
def test_a_strategy_whose_search_cannot_be_read_is_refused(edited: dict[str, Any]) -> None:
    strategy = hago.quantize(residual_block(), "vta", DATA).strategy
    document = strategy.to_json()
    document["made_by"] |= edited
    with pytest.raises(LogError, match="the strategy: its made_by cannot be read"):
        hago.replay(residual_block(), "vta", type(strategy).from_json(document), DATA)


def test_the_costs_of_a_strategy_are_compared() -> None:
    strategy, _ = hago.search_quantize_strategy(residual_block(), "vta", DATA, budget=1, progress=False)
    document = strategy.to_json()
    document["made_by"]["costs"]["weight_bytes"] += 1
    (difference,) = hago.replay(residual_block(), "vta", type(strategy).from_json(document), DATA).differences
    assert difference.figure == "costs.weight_bytes"


#: Of a trial, where a figure stands that trials are ranked by, and what the edited log says.
EDITS: dict[str, tuple[tuple[str, ...], Any]] = {
    "value": (("score", "value"), 99.0),
    "cost": (("score", "costs", "weight_bytes"), 1),
    "overflows": (("score", "overflows"), {"q": 5}),
    "proofs": (("score", "unproved"), 17),
    "bits in all": (("score", "total_bits"), 3),
    "interval": (("score", "interval"), [1.0, 2.0]),
    "infeasible": (("score", "infeasible"), "x"),
    "shortfall": (("score", "shortfall"), 0.5),
    "measure": (("results", "sqnr"), 99.0),
}


@pytest.fixture(scope="module")
def log_lines(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    log = tmp_path_factory.mktemp("log") / "log.jsonl"
    how: dict[str, Any] = {"searcher": "random:trials=3", "corrections": "none", "progress": False}
    hago.search_quantize_strategy(residual_block(), "x86_vnni", DATA[:1], log=log, **how)
    return log.read_text("utf-8").splitlines()


@pytest.mark.parametrize("name", EDITS)
def test_every_figure_that_trials_are_ranked_by_is_compared(name: str, log_lines: list[str], tmp_path: Path) -> None:
    path, value = EDITS[name]
    index = next(i for i, line in enumerate(log_lines) if json.loads(line).get("index") == 1)
    trial = at = json.loads(log_lines[index])
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    log = tmp_path / "log.jsonl"
    log.write_text("\n".join([*log_lines[:index], json.dumps(trial, sort_keys=True), *log_lines[index + 1 :], ""]))
    replayed = hago.replay(residual_block(), "x86_vnni", log, DATA[:1])
    assert [d.trial for d in replayed.differences] == [1] and path[1] in replayed.differences[0].figure


def test_a_log_without_trials_is_refused(log_lines: list[str], tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    log.write_text(log_lines[0] + "\n")
    with pytest.raises(LogError, match="has no trials; there is nothing to replay"):
        hago.replay(residual_block(), "x86_vnni", log, DATA[:1])
