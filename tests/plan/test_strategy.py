"""Strategies: they are read back exactly, written atomically, and refused if they are inconsistent."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hago.errors import LogError, StrategyMismatch
from hago.plan.strategy import Conditions, HardwareId, Strategy
from hago.serialization.json_text import canonical, json_values, parse_json


def make_strategy(**changes: Any) -> Strategy:
    given = {
        "model_hash": "a1" * 32,
        "hardware": HardwareId("x86_vnni", "b2" * 32),
        "topology": Conditions(
            {"x": False, "conv": True, "fc": False}, {"conv:0": True, "conv:1": True, "fc:0": False}
        ),
        "bits": {"conv:0": 8, "conv:1": 6, "x:out": 8},
        "thresholds": {"conv:0": (-0.1, 0.30000000000000004), "conv:1": ((-1.0, -2.0), (1, 2.5))},
        "made_by": {"searcher": {"name": "greedy"}, "score": math.inf, "command": ["hago", "search"]},
    }
    return Strategy(**{**given, **changes})


# ---------------------------------------------------------------- round trips
FLOATS = st.floats(allow_nan=False, allow_infinity=False)
RANGES = st.tuples(FLOATS, FLOATS).map(lambda r: (min(r), max(r)))
CHANNELS = st.lists(RANGES, min_size=1, max_size=4).map(lambda rs: tuple(zip(*rs, strict=True)))
NAMES = st.text(min_size=1, max_size=6).filter(lambda t: ":" not in t)


@st.composite
def strategies(draw: st.DrawFn) -> Strategy:
    nodes = draw(st.dictionaries(NAMES, st.booleans(), min_size=1, max_size=4))
    edges = {f"{n}:{slot}": quantized for n, quantized in nodes.items() for slot in range(2)}
    keys = [e for e, quantized in edges.items() if quantized] + [f"{n}:out" for n in nodes]
    return Strategy(
        draw(st.text(min_size=1)),
        HardwareId(draw(st.text()), draw(st.text(min_size=1))),
        Conditions(nodes, edges),
        draw(st.dictionaries(st.sampled_from(keys), st.integers(1, 64))),
        draw(st.dictionaries(st.sampled_from(keys), RANGES | CHANNELS)),
        draw(st.dictionaries(st.text(), st.integers() | FLOATS | st.text() | st.none())),
    )


@given(strategies())
@settings(deadline=None)
def test_round_trip(strategy: Strategy) -> None:
    text = canonical(strategy.to_json())
    again = Strategy.from_json(parse_json(text, "text"))
    assert again == strategy
    assert canonical(again.to_json()) == text
    assert text.isascii()


def test_save_and_load(tmp_path: Path) -> None:
    strategy = make_strategy()
    strategy.save(tmp_path / "best.json")
    assert Strategy.load(tmp_path / "best.json") == strategy
    assert os.listdir(tmp_path) == ["best.json"]
    strategy.save(str(tmp_path / "again.json"))
    assert (tmp_path / "again.json").read_bytes() == (tmp_path / "best.json").read_bytes()


def test_text_is_canonical(tmp_path: Path) -> None:
    make_strategy().save(tmp_path / "best.json")
    text = (tmp_path / "best.json").read_text()
    assert text == json.dumps(json.loads(text), sort_keys=True) + "\n"
    assert "0.30000000000000004" in text
    assert json.loads(text)["made_by"]["score"] == "inf"
    assert json.loads(text)["thresholds"]["conv:1"] == [[-1.0, -2.0], [1.0, 2.5]]


def test_it_prints_itself() -> None:
    assert str(make_strategy()).splitlines() == [
        "strategy for x86_vnni and a network of 2 nodes (hash a1a1a1a1a1a1)",
        "  conv:0   8 bits",
        "  conv:1   6 bits",
        "  x:out    8 bits",
    ]


def test_parts_can_be_replaced() -> None:
    assert replace(make_strategy(), bits={"conv:0": 4}).bits == {"conv:0": 4}


# ---------------------------------------------------------------- contradictions
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"bits": {"conv:2": 8}}, r"\$.bits\['conv:2'\].*names neither.*Did you mean 'conv:"),
        ({"bits": {"gone:out": 8}}, r"\$.bits\['gone:out'\].*names neither"),
        ({"bits": {":out": 8}}, r"\$.bits\[':out'\].*names neither"),
        ({"bits": {"fc:0": 8}}, r"\$.bits\['fc:0'\].*edge_conds keeps float"),
        ({"bits": {"conv:0": 0}}, r"\$.bits\['conv:0'\]: got 0, expected 1 to 64"),
        ({"bits": {"conv:0": 65}}, r"\$.bits\['conv:0'\]: got 65"),
        ({"thresholds": {"conv:9": (0.0, 1.0)}}, r"\$.thresholds\['conv:9'\].*names neither"),
        ({"thresholds": {"conv:0": (1.0, 0.5)}}, r"\$.thresholds\['conv:0'\]: got \[1.0, 0.5\]"),
        ({"thresholds": {"conv:0": ((0.0, 1.0), (1.0, 0.5))}}, r"got \[1.0, 0.5\], expected low <= high"),
        ({"thresholds": {"conv:0": (math.nan, 1.0)}}, r"\$.thresholds\['conv:0'\]\[0\]: got nan, expected"),
        ({"thresholds": {"conv:0": (0.0, math.inf)}}, r"\$.thresholds\['conv:0'\]\[1\]: got inf"),
        ({"thresholds": {"conv:0": ((0.0,), (1.0, 2.0))}}, "ends of 1 and 2 channels"),
        ({"thresholds": {"conv:0": ((0.0,), 1.0)}}, "ends of 1 and 1 channels"),
        ({"topology": Conditions({"conv": True}, {"cnv:0": True})}, r"\['cnv:0'\].*Did you mean 'conv'"),
        ({"topology": Conditions({"conv": True}, {"conv": True})}, r"edge_conds\['conv'\].*is not an edge"),
        ({"made_by": {"a": [{1, 2}]}}, r"\$.made_by\['a'\]\[0\]: got set"),
        ({"made_by": {"a": {1: 2}}}, r"\$.made_by\['a'\]: got dict"),
    ],
)
def test_contradictions_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(LogError, match=words):
        make_strategy(**{"bits": {}, "thresholds": {}, **changes})


# ---------------------------------------------------------------- damaged files
def damaged(edit: Callable[[dict[str, Any]], object]) -> str:
    record = make_strategy().to_json()
    edit(record)
    return json.dumps(record)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "not the JSON that hago writes"),
        (canonical(make_strategy().to_json())[:-9], "not the JSON that hago writes"),
        ("[" * 90_000, "not the JSON that hago writes"),
        ("[]", r"at \$.version: got None, expected 1"),
        (damaged(lambda r: r.update(version=2)), r"at \$.version: got 2, expected 1; .*newer hago"),
        (damaged(lambda r: r.update(version=1.0)), r"at \$.version: got 1.0"),
        (damaged(lambda r: r.pop("bits")), "expected the key 'bits'"),
        (damaged(lambda r: r.update(bit={})), "expected no key 'bit'. Did you mean 'bits'"),
        (damaged(lambda r: r["bits"].update({"conv:0": "8"})), r"got '8', expected type 'integer'"),
        (damaged(lambda r: r["bits"].update({"conv:0": 1000})), r"got 1000, expected maximum 64"),
        (damaged(lambda r: r["bits"].update({"fc:0": 8})), r"at \$.bits\['fc:0'\]: got bits"),
        (damaged(lambda r: r["hardware"].pop("hash")), r"at \$.hardware: .*expected the key 'hash'"),
        (damaged(lambda r: r["thresholds"].update({"conv:0": [1.0]})), r"\['conv:0'\]: got \[1.0\]"),
        (damaged(lambda r: r["thresholds"].update({"conv:0": [[], []]})), r"at \$.thresholds\['conv:0'\]"),
        (damaged(lambda r: r["thresholds"].update({"conv:0": [0, math.inf]})), "Infinity is not a JSON"),
        ('{"version": 1, "bits": {"a": 1, "a": 2}}', "key 'a' occurs twice"),
    ],
)
def test_a_damaged_file_is_refused(text: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "best.json"
    path.write_text(text)
    with pytest.raises(LogError, match=words) as caught:
        Strategy.load(path)
    assert str(caught.value).startswith(str(path))


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe\0")
    for name in ("absent", "binary", "."):
        with pytest.raises(LogError, match="cannot read strategy"):
            Strategy.load(tmp_path / name)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**320), 10**320) | st.floats() | st.sampled_from(["", "conv:0", "8"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["conv:0", "hash"]), inner),
    max_leaves=4,
)


def paths(value: object, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(found for key, part in inner for found in paths(part, (*path, key)))]


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_a_strategy_with_other_values_loads_or_is_refused(data: st.DataObject) -> None:
    record = json.loads(canonical(make_strategy().to_json()))
    path = data.draw(st.sampled_from([p for p in paths(record) if p]))
    part = record
    for key in path[:-1]:
        part = part[key]
    part[path[-1]] = data.draw(JSON)
    with contextlib.suppress(LogError):
        loaded = Strategy.from_json(parse_json(json.dumps(record), "text"))
        assert Strategy.from_json(json.loads(canonical(loaded.to_json()))) == loaded


def test_a_strategy_with_other_bytes_loads_or_is_refused(tmp_path: Path) -> None:
    draw, path = random.Random(0), tmp_path / "best.json"
    make_strategy().save(path)
    content = path.read_bytes()
    refused = 0
    for _ in range(400):
        at = draw.randrange(len(content))
        other = bytes(draw.randrange(256) for _ in range(draw.randrange(3)))
        path.write_bytes(content[:at] + other + content[at + 1 :])
        try:
            Strategy.load(path)
        except LogError:
            refused += 1
    assert 100 < refused < 400


# ---------------------------------------------------------------- saving is all or nothing
@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_failed_save_leaves_the_old_file(call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "best.json"
    make_strategy().save(path)
    before = path.read_bytes()

    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, call, fail)
    with pytest.raises(LogError, match="No space left on device"):
        make_strategy(bits={}).save(path)
    monkeypatch.undo()
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["best.json"]


def test_a_file_is_synced_before_it_is_renamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    for name in ("fsync", "replace"):
        real = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *a, name=name, real=real: (events.append(name), real(*a))[1])
    make_strategy().save(tmp_path / "best.json")
    assert events[:2] == ["fsync", "replace"]


def test_a_folder_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(LogError, match="cannot write"):
        make_strategy().save(tmp_path / "absent" / "best.json")


# ---------------------------------------------------------------- what it was made for
def test_check_against() -> None:
    strategy = make_strategy()
    strategy.check_against("a1" * 32, "x86_vnni", "b2" * 32)
    with pytest.raises(
        StrategyMismatch, match=f" {'a1' * 6}, .* {'c3' * 6}, so it is another network or other weights"
    ):
        strategy.check_against("c3" * 32, "x86_vnni", "b2" * 32)
    with pytest.raises(StrategyMismatch, match=f"'x86_vnni' with hash {'b2' * 6}, this is 'vta' with d4"):
        strategy.check_against("a1" * 32, "vta", "d4")
    with pytest.raises(StrategyMismatch, match="this is 'x86_vnni' with d4, so it is an edited hardware file, or that"):
        strategy.check_against("a1" * 32, "x86_vnni", "d4")


# ---------------------------------------------------------------- JSON values
def test_numbers_of_numpy_become_pythons() -> None:
    numpy = pytest.importorskip("numpy")
    given = {"a": numpy.float32(0.5), "b": numpy.int64(3), "c": (numpy.float64("inf"), True)}
    values = json_values(given, "$")
    assert canonical(values) == '{"a": 0.5, "b": 3, "c": ["inf", true]}'


@pytest.mark.parametrize("value", [b"x", {1: 2}, object(), 10**300, 1j])
def test_what_json_does_not_have_is_refused(value: object) -> None:
    with pytest.raises(LogError, match=r"at \$\['a'\]\[0\]: got .*expected a JSON value"):
        json_values({"a": [value]}, "$")


@given(JSON)
def test_json_values_are_read_as_they_were_written(value: object) -> None:
    with contextlib.suppress(LogError):
        plain = json_values(value, "$")
        assert parse_json(canonical(plain), "text") == plain
