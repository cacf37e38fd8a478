"""What stands at a path that is no file, and what can be no path: an error of hago's own, at once."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest
from networks import Small, images, randomized

import hago
from hago.calibration.given_ranges import make_given_ranges
from hago.cli import main
from hago.data.sources import load_data
from hago.errors import HagoError
from hago.graph.model_source import read_weights
from hago.qat.run import Checkpoint
from hago.serialization.json_text import read_file
from hago.study.log import LogFile, read_log
from hago.study.rfc_log import read_rfc_log

READERS: Final[dict[str, tuple[str, Callable[[Path], Any]]]] = {
    "hardware": (".json", hago.load_hardware),
    "strategy": (".json", hago.Strategy.load),
    "front": (".json", hago.load_front),
    "log": (".jsonl", read_log),
    "log to write": (".jsonl", lambda path: LogFile(path).__exit__()),
    "log of the prototype": (".jsonl", read_rfc_log),
    "model": (".hago", hago.load_integer_model),
    "weights": (".pt", read_weights),
    "safetensors": (".safetensors", read_weights),
    "data": (".npz", lambda path: load_data(str(path))),
    "table": ("", lambda path: make_given_ranges(path, None, hago.load_hardware("x86_vnni"))),
    "checkpoint": ("", lambda path: Checkpoint.load(path, {}) or _absent()),
    "search": (".jsonl", lambda path: _search(path)),
}


def _absent() -> None:
    raise HagoError("there is no checkpoint")


def _search(path: Path) -> object:
    how = {"searcher": "default", "progress": False}
    return hago.search_quantize_strategy(randomized(Small()), "x86_vnni", [images(2, 1, 6, 6)], log=path, **how)


PLACES: Final[dict[str, Callable[[Path], object]]] = {
    "a pipe that nobody writes": os.mkfifo,
    "a folder": lambda path: path.mkdir(),
    "a link to itself": lambda path: path.symlink_to(path),
    "a device": lambda path: path.symlink_to("/dev/null"),
}


@pytest.mark.parametrize("what", PLACES)
@pytest.mark.parametrize("reader", READERS)
def test_what_is_no_file_is_refused(reader: str, what: str, tmp_path: Path) -> None:
    ending, read = READERS[reader]
    path = tmp_path / f"x{ending}"
    PLACES[what](path)
    with pytest.raises(HagoError) as caught:
        read(path)
    assert len(str(caught.value)) < 2001


@pytest.mark.parametrize("name", ["x" * 5000, "a\0b", "\udc80"])
@pytest.mark.parametrize("reader", READERS)
def test_what_is_no_path_is_refused(reader: str, name: str, tmp_path: Path) -> None:
    ending, read = READERS[reader]
    if name == "\udc80" and reader in ("log to write", "search"):
        pytest.skip("a name like others, on a system whose names are bytes")
    with pytest.raises(HagoError) as caught:
        read(tmp_path / f"{name}{ending}")
    assert len(str(caught.value)) < 2001


@pytest.mark.parametrize("words", [["hardware", "check"], ["run", "--data", "x.npz"], ["export", "--format", "onnx"]])
@pytest.mark.parametrize("name", ["x" * 5000 + ".json", "a\0b.json", "/dev/null"])
def test_the_command_line_says_it_in_one_line(words: list[str], name: str, capsys: pytest.CaptureFixture[str]) -> None:
    at = 2 if words[0] == "hardware" else 1
    assert main([*words[:at], name, *words[at:]]) == 2
    assert "Traceback" not in capsys.readouterr().err


def test_a_file_is_read_whole_or_its_first_bytes(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"0123")
    assert read_file(path) == b"0123" and read_file(path, 2) == b"01"
    (tmp_path / "link").symlink_to(path)
    assert read_file(tmp_path / "link") == b"0123"
    with pytest.raises(OSError, match="is a pipe or a device"):
        read_file("/dev/null")  # empty, where it is read
