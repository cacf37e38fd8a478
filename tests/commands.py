"""Commands in tests, run as a user runs them."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from hago.cli import main


@dataclass(frozen=True)
class CommandResult:
    """The exit code and the output of one command."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


Run = Callable[..., CommandResult]


def runner(capsys: pytest.CaptureFixture[str]) -> Run:
    """A function that runs a command, given as words, in the current folder."""

    def run(*words: str) -> CommandResult:
        capsys.readouterr()
        try:
            code = main(words)
        except SystemExit as end:  # --help and --version
            code = int(end.code or 0)
        captured = capsys.readouterr()
        return CommandResult(code, captured.out, captured.err)

    return run


def after_hago(line: str) -> list[str]:
    """The words of a command that was shown, from the command's name on."""
    words = shlex.split(line)
    return words[words.index("hago") + 1 :]
