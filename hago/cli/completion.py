"""The script that completes the words of `hago` in a shell, made from the parser by the optional package shtab.

The shell runs the script alone, and no Python, when a word is completed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from hago.cli.choices import AUTO, CORRECTIONS, DOREFAS, EFFORTS, ESTIMATORS, EXPORT_FORMATS, LOSSES, SEARCHERS
from hago.errors import HagoError
from hago.shipped_hardware import shipped_hardware

#: The shells that there are scripts for.
SHELLS: Final = ("bash", "zsh", "tcsh")
#: The placeholders of values that are files, and of those that are folders.
_FILES: Final = ("FILE", "LOG", "RECORD", "STRATEGY", "DATA", "LOG|STRATEGY", "NAME|FILE")
_FOLDERS: Final = ("DIR", "FOLDER")


def completion_script(parser: argparse.ArgumentParser, shell: str) -> str:
    """The script of a shell.

    Args:
        parser: of the command line; what it completes is added to its actions, so it can parse nothing after this.
        shell: one of SHELLS.

    Raises:
        HagoError: shtab is not installed.
    """
    try:
        import shtab
    except ImportError:
        raise HagoError("--print-completion needs the package shtab: pip install 'hago[completion]'") from None
    words = _words()
    for action in _actions(parser):
        if isinstance(action, argparse._SubParsersAction):
            continue
        placeholder = action.metavar if isinstance(action.metavar, str) else ""
        if action.choices is None and action.option_strings and action.dest in words:
            action.choices = words[action.dest]
        elif placeholder in _FILES or action.dest in ("record", "other"):
            action.complete = shtab.FILE  # type: ignore[attr-defined]
        elif placeholder in _FOLDERS:
            action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]
    return str(shtab.complete(parser, shell=shell))


def _words() -> Mapping[str, Sequence[str]]:
    """The names that values of options may have, by the option; most of them may be others, too."""
    return {
        "hardware": list(shipped_hardware()),
        "searcher": [AUTO, *SEARCHERS],
        "estimator": [*ESTIMATORS, *DOREFAS],
        "effort": list(EFFORTS),
        "corrections": [*CORRECTIONS, "none"],
        "format": list(EXPORT_FORMATS),
        "loss": list(LOSSES),
    }


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """The arguments of a parser and of its commands."""
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for command in dict.fromkeys(action.choices.values()):
                yield from _actions(command)


class PrintCompletion(argparse.Action):
    """The option `--print-completion SHELL`, which prints the script and ends."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        """Print the script of a shell."""
        parser._print_message(f"{completion_script(parser, str(values))}\n", sys.stdout)
        parser.exit(0)
