"""The files that a command writes: their names where the user gives none, and the check that they can be written.

A default name has a hash of the command's arguments, so that the same command continues its own files, and a command
with other arguments never overwrites them. A file that exists is replaced only if hago wrote it, as a file of the same
kind.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from hago.errors import HagoError
from hago.hardware import Hardware, hardware_hash
from hago.runtime import is_stored
from hago.search import normalized_limits
from hago.serialization import file_kind, tensor_file
from hago.serialization.json_text import canonical, json_values, parse_json, read_file

#: Arguments that leave the results of a command as they are: where they are written, how long it runs, and where. A
#: search is continued with another value of each.
NOT_HASHED: Final = frozenset(
    {
        *("json", "log", "save", "front", "save_weights", "checkpoint", "no_resume", "reuse", "cache", "executor"),
        *("budget", "held_out", "held_out_samples", "finetune", "progress", "check", "report"),
        *("tensorboard", "wandb", "optuna", "optuna_artifacts"),
    }
)
#: Arguments that stand in the hash in another form: the content of the hardware, and the objective by either name.
_OTHERWISE_HASHED: Final = frozenset({"hardware", "objective", "maximize", "record"})
#: Arguments that name a file to write.
_OUTPUTS: Final = ("checkpoint", "csv", "front", "log", "output", "report", "save", "save_weights")
#: The number of hexadecimal digits of the hash in a file's name.
HASH_IN_NAMES: Final = 8


def default_stem(args: Namespace, hardware: Hardware, made_by: str, *content: Any) -> str:
    """The name MODEL-HARDWARE-MADE_BY-HASH, without an ending, for files that the user gave no name.

    Args:
        made_by: the searcher, or what else makes the files.
        content: JSON values that the arguments name by a path, and that belong to the hash.
    """
    skipped = NOT_HASHED | _OTHERWISE_HASHED
    # without options that are not given, so that new options change no names
    named = {k: _normal(v) for k, v in vars(args).items() if k not in skipped and v not in (None, False, [])}
    named |= {k: normalized_limits(named[k]) for k in ("keep", "budget_cost") if k in named}
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
    return hashlib.sha256(canonical(json_values(values, "arguments")).encode()).hexdigest()[:HASH_IN_NAMES]


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


# ---------------------------------------------------------------- what a file that exists holds
@dataclass(frozen=True, slots=True)
class OutputKind:
    """A kind of file that commands write.

    Args:
        name: the kind in words, with its article.
        suffix: the usual ending of its files.
        is_one: whether a file that exists is one that hago wrote; it may raise an OSError or a ValueError, too.
        instead: what to do where a file of another format was asked for.
    """

    name: str
    suffix: str
    is_one: Callable[[Path], bool]
    instead: str = ""


def _json_with(*keys: str) -> Callable[[Path], bool]:
    """A test whether a file is a JSON object with these keys, whatever the version of its format."""

    def is_one(path: Path) -> bool:
        try:
            value = parse_json(read_file(path).decode("utf-8"), str(path))
        except HagoError:
            return False
        return isinstance(value, Mapping) and set(keys) <= value.keys()

    return is_one


def _of_kind(kind: file_kind.FileKind) -> Callable[[Path], bool]:
    return lambda path: file_kind.kind_of(read_file(path)) is kind


def _begins_with(*starts: bytes) -> Callable[[Path], bool]:
    return lambda path: read_file(path, max(map(len, starts))).startswith(starts)


STRATEGY: Final = OutputKind(
    "a strategy",
    ".json",
    _of_kind(file_kind.STRATEGY),
    "'hago realize MODEL STRATEGY --data DATA --save FILE' stores the integer model",
)
FRONT: Final = OutputKind("a Pareto front", ".json", _of_kind(file_kind.FRONT))
_SENSITIVITY: Final = OutputKind("a table of sensitivities", ".json", _json_with("version", "objective", "losses"))
_HARDWARE: Final = OutputKind("a hardware file", ".json", _of_kind(file_kind.HARDWARE))
_STORED: Final = OutputKind("a stored integer model", ".safetensors", is_stored)
WEIGHTS: Final = OutputKind(
    "a file of trained weights", ".safetensors", lambda path: tensor_file.begins(read_file(path, 256), "weights")
)
_ARRAYS: Final = OutputKind("an .npz file", ".npz", _begins_with(b"PK\x03\x04", b"PK\x05\x06"))
#: The first characters of a report, by which it is told from other pages.
_PAGE: Final = b'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta name="generator" content="hago'
REPORT: Final = OutputKind("a report", ".html", _begins_with(_PAGE))
_TABLE: Final = OutputKind("a table of nodes", ".csv", _begins_with(b"node,"))
#: By command and argument, the kind of its file. Logs and checkpoints are read before they are continued.
KINDS: Final[Mapping[tuple[str, str], OutputKind]] = {
    **{(command, "save"): STRATEGY for command in ("search", "quantize", "finetune")},
    ("search", "front"): FRONT,
    ("sensitivity", "save"): _SENSITIVITY,
    ("hardware", "output"): _HARDWARE,
    ("realize", "save"): _STORED,
    ("run", "save"): _ARRAYS,
    ("inspect", "csv"): _TABLE,
    ("report", "save"): REPORT,
    ("search", "report"): REPORT,
}
#: Endings of files of other formats, which are refused for a kind of another ending.
_SUFFIXES: Final = (".csv", ".html", ".json", ".jsonl", ".npy", ".npz", ".onnx", ".pt", ".pth", ".py", ".safetensors")


def check_output(given: Path | str, kind: OutputKind | None = None, name: str = "") -> Path:
    """Check that a file can be written, and that none but one of the same kind is overwritten; return the path.

    Args:
        kind: the kind of the file; None for one that is read before it is replaced.
        name: the option that names the file, for the message.

    Raises:
        HagoError: the folder cannot be made or be written to, the path is that of a folder, its ending is of another
            format, or a file exists that hago did not write.
    """
    path = check_folder_of(Path(given))
    suffix = "" if kind is None else kind.suffix
    is_folder = path.is_dir() or str(given).endswith(("/", os.sep))
    given = f"{name} {given}".strip()
    if is_folder:
        raise HagoError(f"{given} is a folder; give the path of a file in it, e.g. {path / f'net{suffix}'}")
    if kind is None:
        return path
    if path.suffix != suffix and path.suffix in _SUFFIXES:
        more = f"; {kind.instead}" if kind.instead else ""
        raise HagoError(f"{given}: {kind.name} is a {suffix} file; give e.g. {path.with_suffix(suffix)}{more}")
    try:
        # where a file is empty nothing is lost, and a device is none
        keeps = path.is_file() and path.stat().st_size > 0 and not kind.is_one(path)
    except (OSError, ValueError):
        keeps = True
    if keeps:
        raise HagoError(f"{given} exists and is not {kind.name} of hago, so it is not overwritten; give another path")
    return path


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
            check_output(path, KINDS.get((args.command, option)), f"--{option.replace('_', '-')}")
