"""Files cut, flipped and edited at random: each is read as something sound, or refused by an error of hago."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import torch
from networks import Small, randomized
from test_robustness import CHIP, DATA
from torch import nn

import hago
from hago.data.sources import load_data
from hago.emulation.tpu_mlir.tables import parse_calibration_table, parse_quantize_table
from hago.errors import HagoError, StrategyMismatch
from hago.graph.model_source import read_weights
from hago.hardware.file import load_hardware
from hago.plan.strategy import Strategy
from hago.search.preparation import prepare
from hago.search.stored_strategy import stored_resolver
from hago.study.log import read_log

EDITS: Final = 250
#: What stands in the place of a JSON value.
ODD: Final = (
    *(None, True, 0, -1, 2**31, 2**70, 10**400, 1e308, 0.5, float("nan"), "", "int8", "\u0000", "\ud800"),
    *([], {}, [[]], [1, 2], {"a": 1}, [None], "x" * 3000),
)
TABLE: Final = b"""# mlir version: x cali version 1.0
# histogram number: 2048
###
# op_name    threshold    min    max
x 3.0000000 -3.0 3.0
body 2.5 -1.0 2.5
fc 1.0e-05 0 1
#weight_scale
body 2 1.0 2.0
#int4_th
x 1.0 -1.0 1.0
#asym_op
x
"""
MODES: Final = b"# genetated time\n# op_name   quantize_mode\nbody F16\nfc W4INT8\n"


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every value within a JSON value."""
    yield path
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in inner:
        yield from places(part, (*path, key))


def edited(rng: random.Random, text: bytes) -> bytes:
    """One line of JSON, or the whole, with one value changed, left out or renamed."""
    lines = text.split(b"\n") if text.count(b"\n{") else [text]
    index = rng.choice([i for i, line in enumerate(lines) if line.strip()])
    document = json.loads(lines[index])
    *inner, last = rng.choice([p for p in places(document) if p])
    at = document
    for key in inner:
        at = at[key]
    act = rng.randrange(4)
    if act < 2:
        at[last] = rng.choice(ODD)
    elif act == 2 or isinstance(at, list):
        del at[last]
    else:
        at[f"{last}x"] = at.pop(last)
    lines[index] = json.dumps(document).encode("ascii")
    return b"\n".join(lines)


def damaged(rng: random.Random, data: bytes, is_json: bool) -> bytes:
    """Cut, with flipped bits, without a part, with one more, with a part twice; or edited."""
    kind, place, changed = rng.randrange(8 if is_json else 5), rng.randrange(len(data)), bytearray(data)
    if kind == 0:
        return data[:place]
    if kind == 1:
        for _ in range(rng.randrange(1, 6)):
            changed[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    elif kind == 2:
        del changed[place : place + rng.randrange(1, 40)]
    elif kind == 3:
        changed[place:place] = rng.randbytes(rng.randrange(1, 10))
    elif kind == 4:
        changed[place:place] = data[rng.randrange(len(data)) :][: rng.randrange(1, 200)]
    else:
        return edited(rng, data)
    return bytes(changed)


def text_of(path: Path) -> str:
    return path.read_text("utf-8", errors="surrogateescape")


#: What is read, under a name that ends as its kind does.
READERS: Final[Mapping[str, Callable[[Path], Any]]] = {
    "chip.json": lambda p: str(load_hardware(p)),
    "strategy.json": Strategy.load,
    "log.jsonl": lambda p: read_log(p, lambda *said: None),
    "model.hago": hago.load_integer_model,
    "rows.txt": lambda p: parse_calibration_table(text_of(p)),
    "modes.txt": lambda p: parse_quantize_table(text_of(p)),
    "weights.pt": read_weights,
    "weights.safetensors": read_weights,
    "data.npz": lambda p: list(load_data(str(p))),
}


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return randomized(Small())


@pytest.fixture(scope="module")
def sound(model: nn.Module, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, bytes]:
    """A file of every kind."""
    safetensors = pytest.importorskip("safetensors.torch")
    folder = tmp_path_factory.mktemp("sound")
    quantizer = hago.quantize(model, CHIP, DATA)
    quantizer.strategy.save(folder / "strategy.json")
    quantizer.realize().save(folder / "model.hago")
    log = folder / "log.jsonl"
    hago.search_quantize_strategy(model, CHIP, DATA, searcher="random", budget=3, log=log, progress=False)
    hago.save_hardware(load_hardware("tflite"), folder / "chip.json")
    (folder / "rows.txt").write_bytes(TABLE)
    (folder / "modes.txt").write_bytes(MODES)
    torch.save(model.state_dict(), folder / "weights.pt")
    safetensors.save_file(model.state_dict(), folder / "weights.safetensors")
    np.savez_compressed(folder / "data.npz", x=np.ones((4, 1, 8, 8), dtype=np.float32))
    return {name: (folder / name).read_bytes() for name in READERS}


@pytest.mark.parametrize("name", READERS)
def test_read_or_refused(name: str, sound: Mapping[str, bytes], tmp_path: Path) -> None:
    path, read, outcomes = tmp_path / name, READERS[name], set()
    path.write_bytes(sound[name])
    read(path)
    for seed in range(EDITS):
        path.write_bytes(damaged(random.Random(seed), sound[name], ".json" in name))
        try:
            read(path)
            outcomes.add("read")
        except HagoError as error:
            assert str(error)
            outcomes.add("refused")
    assert "refused" in outcomes and (name != "model.hago" or outcomes == {"refused"})


def test_strategies_that_can_be_read_but_not_used(model: nn.Module, sound: Mapping[str, bytes], tmp_path: Path) -> None:
    prepared, path = prepare(model, CHIP, DATA), tmp_path / "strategy.json"
    for seed in range(EDITS):
        path.write_bytes(edited(random.Random(seed), sound["strategy.json"]))
        try:
            strategy = Strategy.load(path)
            stored_resolver(prepared.graph, prepared.hardware, strategy)(strategy.bits)
        except HagoError:
            continue


def test_conditions_of_a_node_that_is_not_there(model: nn.Module, sound: Mapping[str, bytes], tmp_path: Path) -> None:
    document = json.loads(sound["strategy.json"])
    document["topology"]["node_conds"]["nothing"] = False
    (tmp_path / "strategy.json").write_text(json.dumps(document), "utf-8")
    with pytest.raises(StrategyMismatch, match="topology"):
        hago.create_quantizer(model, CHIP, tmp_path / "strategy.json")
