"""Strategies and logs that are of something else, or were edited: refused, by what is wrong with them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from networks import Small, randomized
from test_robustness import CHIP, DATA, refused
from torch import nn

import hago
from hago.errors import HagoError, LogError, StrategyMismatch
from hago.plan.strategy import Strategy


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return randomized(Small())


@pytest.fixture(scope="module")
def strategy(model: nn.Module) -> Strategy:
    return hago.quantize(model, CHIP, DATA).strategy


# ---------------------------------------------------------------- strategies
def test_a_strategy_for_something_else(model: nn.Module, strategy: Strategy) -> None:
    other = randomized(Small(), seed=1)
    refused(
        lambda: hago.create_quantizer(other, CHIP, strategy),
        StrategyMismatch,
        f"{strategy.model_hash[:12]}, ",
        "--weights",
    )
    refused(
        lambda: hago.create_quantizer(model, "vta", strategy),
        StrategyMismatch,
        f"{strategy.hardware.hash[:12]}, ",
        "'vta'",
    )
    refused(lambda: hago.replay(model, CHIP, strategy, DATA[:1]), StrategyMismatch, "--batch-size", "same samples")
    for calls in (hago.evaluate_strategy, hago.inspect_graph_statistic):
        refused(lambda calls=calls: calls(other, CHIP, strategy, DATA), StrategyMismatch, strategy.model_hash[:12])


def test_a_strategy_that_is_not_there(model: nn.Module, tmp_path: Path) -> None:
    refused(lambda: hago.create_quantizer(model, CHIP, tmp_path / "no.json"), LogError, "cannot read", "no.json")
    refused(lambda: hago.create_quantizer(model, CHIP, 42), LogError, "int")  # type: ignore[arg-type]
    refused(lambda: hago.replay(model, CHIP, tmp_path / "no.jsonl", DATA), LogError, "no.jsonl")


Edit = Callable[[dict[str, Any]], None]


def put(*path: Any) -> Edit:
    """Put the last of the path where the rest of it points."""
    *keys, last, value = path

    def edit(document: dict[str, Any]) -> None:
        for key in keys:
            document = document[key]
        document[last] = value

    return edit


EDITS: Mapping[str, tuple[Edit, tuple[str, ...]]] = {
    "bits beyond the signature": (put("bits", "fc:1", 32), ("'fc:1'", "32 bits")),
    "bits that are no number": (put("bits", "fc:1", "eight"), ("fc:1", "eight")),
    "an edge that is not there": (put("bits", "fcc:1", 8), ("fcc:1", "Did you mean")),
    "one edge less": (lambda d: d["bits"].pop("fc:1") and None, ("no bits", "'fc:1'")),
    "a threshold less": (lambda d: d["thresholds"].pop("fc:0") and None, ("no threshold", "'fc:0'")),
    "a threshold upside down": (put("thresholds", "fc:0", [1.0, -1.0]), ("fc:0", "low <= high")),
    "channels that are not there": (put("thresholds", "body:1", [[-1.0] * 3, [1.0] * 3]), ("'body:1'", "3", "4")),
    "channels where there are none": (put("thresholds", "fc:0", [[-1.0] * 3, [1.0] * 3]), ("'fc:0'", "3")),
    "no channels": (put("thresholds", "fc:0", [[], []]), ("fc:0",)),
    "another topology": (put("topology", "node_conds", "fc", False), ("topology", "edited")),
    "another version": (put("version", 99), ("99", "newer")),
    "another hash": (put("model_hash", "0" * 64), ("0" * 12, "--weights")),
    "inputs of no dtype": (put("made_by", "inputs", "tensors", 0, "dtype", "float99"), ("inputs",)),
    "inputs of no shape": (put("made_by", "inputs", "tensors", 0, "shape", "abc"), ("inputs",)),
    "inputs nested in no way": (put("made_by", "inputs", "spec", "[1, 2"), ("inputs",)),
    "inputs of no kind": (put("made_by", "inputs", 7), ("inputs",)),
    "fixed bits of no kind": (put("made_by", "fix_bits", {"fc": "many"}), ("fix_bits",)),
    "fixed bits, not a mapping": (put("made_by", "fix_bits", 5), ("fix_bits",)),
    "nodes kept float of no kind": (put("made_by", "keep_float", 5), ("keep_float",)),
}


@pytest.mark.parametrize("case", EDITS)
def test_an_edited_strategy(model: nn.Module, strategy: Strategy, case: str, tmp_path: Path) -> None:
    path = tmp_path / "strategy.json"
    strategy.save(path)
    document = json.loads(path.read_text("utf-8"))
    edit, says = EDITS[case]
    edit(document)
    path.write_text(json.dumps(document), "utf-8")
    with pytest.raises(HagoError) as caught:
        hago.create_quantizer(model, CHIP, path).simulate()(DATA[0][0])
    assert all(word in str(caught.value) for word in says), caught.value


def test_parts_of_a_strategy_replaced_in_memory(strategy: Strategy) -> None:
    with pytest.raises(HagoError, match="finite"):
        replace(strategy, thresholds={**strategy.thresholds, "fc:0": (float("nan"), 1.0)})


# ---------------------------------------------------------------- logs
def test_an_edited_log(model: nn.Module, tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    hago.search_quantize_strategy(model, CHIP, DATA, searcher="random", budget=3, log=log, progress=False)
    whole = log.read_text("utf-8")
    lines = whole.splitlines(keepends=True)
    changed = json.loads(lines[2])
    key = next(iter(changed["strategy"]["bits"]))
    changed["strategy"]["bits"][key] += 1
    log.write_text("".join([*lines[:2], json.dumps(changed, sort_keys=True) + "\n", *lines[3:]]), "utf-8")
    again = {"searcher": "random", "budget": 4, "log": log, "progress": False}
    with pytest.raises(HagoError) as caught:
        hago.search_quantize_strategy(model, CHIP, DATA, **again)
    assert key in str(caught.value)
    log.write_text(whole, "utf-8")
    refused(lambda: hago.search_quantize_strategy(model, "vta", DATA, **again), StrategyMismatch, "hardware")
    refused(
        lambda: hago.search_quantize_strategy(model, CHIP, DATA[:1], **again),
        StrategyMismatch,
        "data_hash",
        "--samples",
    )
    assert log.read_text("utf-8") == whole
    hago.search_quantize_strategy(model, CHIP, DATA, **again)
    assert len(log.read_text("utf-8").splitlines()) == 5
