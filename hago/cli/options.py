"""The objects that shared options of commands stand for, and the form of a command's answer."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from hago.calibration.estimators import ESTIMATORS
from hago.data.named_objects import import_object
from hago.data.sources import ImageShape, load_data
from hago.emulation.dorefa import DOREFAS
from hago.errors import HagoError
from hago.hardware.file import available_hardware, load_hardware
from hago.hardware.hardware import Hardware
from hago.ops import OPS, Ops
from hago.ops._rule import OpRule
from hago.plan.strategy import Strategy
from hago.searchers.registry import AUTO, SEARCHERS
from hago.study.log import Log

OK: Final = 0
NO: Final = 1
INTERRUPTED: Final = 130

#: The form of `package.module:name`; options of estimators begin with a digit.
_OBJECT: Final = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a command ends with: text for people, JSON values for programs, and the exit code."""

    text: str
    json: Any
    code: int = OK


@dataclass(frozen=True, slots=True)
class Voices:
    """How a command speaks while it runs.

    Args:
        tell: a line of the result, where it is text.
        note: a line beside the result.
        words: the command line, to be shown where it continues something.
    """

    tell: Callable[[str], None]
    note: Callable[[str], None]
    words: tuple[str, ...] = ()


def command_line(*words: str) -> str:
    """A command as the user can enter it: `hago` where the shell knows it, else by way of this Python."""
    python = min(sys.executable, os.path.relpath(sys.executable), key=len)
    return shlex.join([*(["hago"] if shutil.which("hago") else [python, "-m", "hago"]), *words])


@contextlib.contextmanager
def resumable(so_far: Callable[[], str]) -> Iterator[None]:
    """Let an interrupt say what is on disk already.

    Args:
        so_far: says it, once the interrupt came.
    """
    try:
        yield
    except KeyboardInterrupt:
        raise KeyboardInterrupt(so_far()) from None


def training_so_far(checkpoint: Path) -> str:
    """What an interrupted training run leaves."""
    return f"while training; what was trained so far is in {checkpoint}" if checkpoint.exists() else ""


def stamp(path: Path) -> tuple[int, int] | None:
    """What tells whether a file was written anew; None where there is none."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns


# ---------------------------------------------------------------- what options mean
def load_batches(args: Namespace, spec: str | None = None) -> Any:
    images = ImageShape(args.size, args.mean, args.std, args.gray)
    return load_data(spec or args.data, batch_size=args.batch_size, samples=args.samples, images=images)


def load_chip(args: Namespace, name: str) -> Hardware:
    """The named hardware, with the ops that `--ops` adds to those of hago.

    Raises:
        HagoError: there is no such hardware, or `--ops` names something else than op rules.
    """
    return load_hardware(name, load_ops(args))


def load_ops(args: Namespace) -> Ops:
    """hago's ops, and those that `--ops` adds.

    Raises:
        HagoError: `--ops` names something else than op rules.
    """
    if args.ops is None:
        return OPS
    added = import_object(args.ops, "ops")
    rules = list(added.values()) if isinstance(added, Mapping) else [added]
    if not all(isinstance(rule, OpRule) for rule in rules):
        raise HagoError(f"ops {args.ops!r} is of type {type(added).__name__}; expected an OpRule, or a mapping of them")
    return {**OPS, **{rule.name: rule for rule in rules}}


def hardware_of(args: Namespace, record: Strategy | Log) -> Hardware:
    """The hardware that `--hardware` names, else the one that a strategy or a log was made for.

    Raises:
        HagoError: the log is empty, or that hardware does not ship with hago.
    """
    if args.hardware is not None:
        return load_chip(args, args.hardware)
    header = record if isinstance(record, Strategy) else record.header
    if header is None:
        raise HagoError(f"log {args.record} is empty; there is nothing to replay")
    name = header.hardware.name
    if name not in available_hardware():
        raise HagoError(f"{args.record} was made for hardware {name!r}, which does not ship with hago; give --hardware")
    return load_chip(args, name)


def fixed_bits(args: Namespace) -> dict[str, int]:
    return dict(args.fix_bits)


def named(spec: str, what: str) -> Any:
    """The name itself, or the object that `package.module:name` stands for."""
    return import_object(spec, what) if ":" in spec else spec


def named_searcher(spec: str) -> Any:
    """The searcher that `NAME`, `NAME:OPTION=VALUE,...` or `package.module:callable` stands for."""
    if spec.partition(":")[0] in (AUTO, *SEARCHERS) or not _OBJECT.fullmatch(spec):
        return spec
    return import_object(spec, "searcher")


def named_estimator(spec: str | None) -> Any:
    """The estimator that `NAME`, `NAME:OPTION,...` or `package.module:name` stands for: a class is called without
    arguments."""
    if spec is None or spec.partition(":")[0] in (*ESTIMATORS, *DOREFAS) or not _OBJECT.fullmatch(spec):
        return spec
    named_object = import_object(spec, "estimator")
    return named_object() if isinstance(named_object, type) else named_object


def default_path(args: Namespace, hardware: Hardware, folder: str, suffix: str) -> Path:
    model = args.model.rpartition(":")[2].replace(".", "-")
    return Path(folder) / f"{model}-{hardware.name}{suffix}"


def make_folder_of(path: Path) -> Path:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise HagoError(f"cannot make the folder of {path}: {error}") from None
    return path
