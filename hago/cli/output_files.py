"""The files that a command writes where the user names none, and the check that they can be written.

The name of such a file has a hash of the command's arguments, so that the same command continues its own files, and a
command with other arguments never overwrites them.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from hago.errors import HagoError
from hago.hardware import Hardware, hardware_hash
from hago.serialization.json_text import canonical, json_values

#: Arguments that leave the results of a command as they are: where they are written, how long it runs, and where. A
#: search is continued with another value of each.
NOT_HASHED: Final = frozenset(
    {
        *("json", "log", "save", "front", "save_weights", "checkpoint", "no_resume", "reuse", "cache", "executor"),
        *("budget", "held_out", "finetune", "progress", "check"),
    }
)
#: Arguments that stand in the hash in another form: the content of the hardware, and the objective by either name.
_OTHERWISE_HASHED: Final = frozenset({"hardware", "objective", "maximize", "record"})
#: Arguments that name a file to write.
_OUTPUTS: Final = ("checkpoint", "csv", "front", "log", "output", "save", "save_weights")
#: The number of hexadecimal digits of the hash in a file's name.
_DIGITS: Final = 8


def default_stem(args: Namespace, hardware: Hardware, made_by: str, *content: Any) -> str:
    """The name MODEL-HARDWARE-MADE_BY-HASH, without an ending, for files that the user gave no name.

    Args:
        made_by: the searcher, or what else makes the files.
        content: JSON values that the arguments name by a path, and that belong to the hash.
    """
    skipped = NOT_HASHED | _OTHERWISE_HASHED
    # without options that are not given, so that new options change no names
    named = {k: _normal(v) for k, v in vars(args).items() if k not in skipped and v not in (None, False, [])}
    objective = getattr(args, "maximize", None) or getattr(args, "objective", None)
    parts = [
        model_name(args.model),
        hardware.name,
        made_by,
        digest(named, hardware_hash(hardware), objective, *content),
    ]
    return "-".join(re.sub(r"[^\w.+-]+", "_", part) for part in parts)


def digest(*values: Any) -> str:
    """A hash of JSON values, as it stands in the names of files."""
    return hashlib.sha256(canonical(json_values(values, "arguments")).encode()).hexdigest()[:_DIGITS]


def model_name(model: str) -> str:
    """The model's part of a file's name."""
    return model.rpartition(":")[2].replace(".", "-")


def _normal(value: Any) -> Any:
    """The value of an argument; a path without `.` and doubled separators."""
    return os.path.normpath(value) if isinstance(value, str) and os.path.exists(value) else value


@contextlib.contextmanager
def folders_of(*paths: Path) -> Iterator[None]:
    """Make the folders of output files. When the context closes, those that it made and that are empty, as after an
    error, are removed.

    Raises:
        HagoError: a folder cannot be made.
    """
    made: list[Path] = []
    try:
        for path in paths:
            try:
                for folder in reversed([folder for folder in path.parents if not folder.exists()]):
                    folder.mkdir(exist_ok=True)
                    made.append(folder)
            except OSError as error:
                raise HagoError(f"cannot make the folder of {path}: {error}") from None
        yield
    finally:
        for folder in reversed(made):
            with contextlib.suppress(OSError):
                folder.rmdir()


def check_folder_of(path: Path) -> Path:
    """Check that the folder of an output file exists or can be made, and return the file's path.

    Raises:
        HagoError: it cannot be made, or not be written to.
    """
    folder = path.parent
    try:
        while not folder.exists() and folder != folder.parent:
            folder = folder.parent
        is_folder = folder.is_dir()
    except (OSError, ValueError) as error:
        raise HagoError(f"cannot make the folder of {path}: {error}") from None
    if not (is_folder and os.access(folder, os.W_OK | os.X_OK)):
        why = "write-protected" if is_folder else "not a folder"
        raise HagoError(f"cannot write {path}: {folder} is {why}; give another path")
    return path


def check_given_paths(args: Namespace) -> None:
    """Check that the files that the user named can be written, before any work.

    Raises:
        HagoError: one cannot.
    """
    for option in _OUTPUTS:
        if path := getattr(args, option, None):
            check_folder_of(Path(path))
