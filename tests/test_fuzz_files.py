"""A sample of `scripts/fuzz_files.py`, and that it finds what it looks for."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import fuzz_files
import pytest
from products import whole

from hago.errors import HagoError


def test_a_sample_of_mutated_files() -> None:
    count = 12 if whole() else 4
    command = [sys.executable, fuzz_files.__file__, "--count", str(count), "--seed", "7"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"model: {count} files" in done.stdout


@pytest.mark.parametrize(
    ("reader", "says"),
    [
        (lambda path: path.read_text().undefined, "AttributeError"),
        (lambda path: _refuse("x\n" * 30), "a message of 60 characters"),
        (lambda path: _refuse("fine"), "refused"),
        (lambda path: None, "loaded"),
    ],
)
def test_what_is_wrong_is_said(reader: object, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(fuzz_files.READERS, "log", reader)
    assert fuzz_files.outcome("log", b"{}", tmp_path).startswith(says)


def test_a_process_that_ends_is_found_and_the_next_case_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    fatal = repr(random.Random("0 log 1").random())

    def crash(path: Path) -> None:
        if path.read_text() == fatal:
            os.abort()

    monkeypatch.setitem(fuzz_files.READERS, "log", crash)
    monkeypatch.setattr(fuzz_files, "mutated", lambda kind, content, rng: repr(rng.random()).encode())
    found = fuzz_files.run("log", b"", 0, range(3), fuzz_files.tqdm(disable=True))
    assert found == {0: "loaded", 1: "ended the process, with -6", 2: "loaded"}


def _refuse(text: str) -> None:
    raise HagoError(text)
