"""What `main` and the commands share: exit codes, the result of a command, and what it prints while it runs."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

OK: Final = 0
NO: Final = 1
INTERRUPTED: Final = 130


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a command: text for people, JSON values for programs, and the exit code. `main` prints it."""

    text: str
    json: Any
    code: int = OK


@dataclass(frozen=True, slots=True)
class Console:
    """Functions with which a command prints while it runs. Made by `main`, once per command.

    Args:
        tell: prints a line of the result; with --json, it prints nothing.
        note: prints a line to standard error.
        words: the command line, for messages that show how to continue.
        written: the files that the command has written, for an interrupt.
        continued: the logs and checkpoints that the command continues, or begins and adds to, for an interrupt.
    """

    tell: Callable[[str], None]
    note: Callable[[str], None]
    words: tuple[str, ...] = ()
    written: list[str] = field(default_factory=list)
    continued: list[Path] = field(default_factory=list)

    def written_text(self) -> str:
        """What an interrupted command has written, in words that follow "interrupted"."""
        if self.written:
            return f" after it wrote {', '.join(self.written)}"
        begun = [str(path) for path in self.continued if path.exists() and path.stat().st_size]
        return f"; the work so far is in {', '.join(begun)}" if begun else "; nothing was written"


def command_line(*words: str) -> str:
    """A command as the user can enter it: `hago` if the shell finds that, else `python -m hago`."""
    python = min(sys.executable, os.path.relpath(sys.executable), key=len)
    return shlex.join([*(["hago"] if shutil.which("hago") else [python, "-m", "hago"]), *words])
