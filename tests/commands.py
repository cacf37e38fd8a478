"""Commands in tests: what one did, as a user sees it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from hago.cli import main


@dataclass(frozen=True)
class Said:
    """What one command did."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


Run = Callable[..., Said]


def runner(capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a command, words by words, in the current folder."""

    def run(*words: str) -> Said:
        capsys.readouterr()
        try:
            code = main(words)
        except SystemExit as end:  # --help and --version
            code = int(end.code or 0)
        captured = capsys.readouterr()
        return Said(code, captured.out, captured.err)

    return run
