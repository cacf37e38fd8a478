"""Parts that commands share: the objects that options name, the result of a command, and its messages."""

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

from hago.calibration import ESTIMATORS
from hago.data import ImageShape, load_data
from hago.data.named_objects import import_object
from hago.emulation.dorefa import DOREFAS
from hago.errors import HagoError
from hago.graph.model_source import load_model
from hago.hardware import Hardware, available_hardware, load_hardware
from hago.ops import OPS, OpRule, Ops
from hago.plan import Strategy
from hago.searchers import AUTO, SEARCHERS
from hago.study import Log

OK: Final = 0
NO: Final = 1
INTERRUPTED: Final = 130

#: The mean and the standard deviation by which images are left as they are.
NO_MEAN: Final = (0.0,)
UNIT_STD: Final = (1.0,)

#: The form of `package.module:name`. Options of estimators, which follow a colon, too, begin with a digit.
_OBJECT: Final = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")


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
    """

    tell: Callable[[str], None]
    note: Callable[[str], None]
    words: tuple[str, ...] = ()


def command_line(*words: str) -> str:
    """A command as the user can enter it: `hago` if the shell finds that, else `python -m hago`."""
    python = min(sys.executable, os.path.relpath(sys.executable), key=len)
    return shlex.join([*(["hago"] if shutil.which("hago") else [python, "-m", "hago"]), *words])


def check_command(args: Namespace, strategy: Path, weights: Path | str | None) -> str:
    """The command that checks a strategy which a command has made, on its held-out data if it has any.

    Args:
        weights: the file of the model's weights; None if the model has its own.
    """
    words = ["realize", args.model, str(strategy), "--data", getattr(args, "held_out", None) or args.data]
    words += ["--weights", str(weights)] if weights else []
    words += ["--hardware", args.hardware] if args.hardware not in (None, *available_hardware()) else []
    words += ["--ops", args.ops] if args.ops else []
    words += ["--samples", str(args.samples)] if args.samples else []
    words += ["--size", "x".join(map(str, args.size))] if args.size else []
    for name, default in (("mean", NO_MEAN), ("std", UNIT_STD)):
        value = getattr(args, name)
        # as one word, since a number may begin with a minus
        words += [f"--{name}={','.join(map(str, value))}"] if value != default else []
    words += ["--gray"] if args.gray else []
    return command_line(*words)


@contextlib.contextmanager
def resumable(so_far: Callable[[], str]) -> Iterator[None]:
    """Add the state of the work to a KeyboardInterrupt.

    Args:
        so_far: called after the interrupt; returns the state in words.
    """
    try:
        yield
    except KeyboardInterrupt:
        raise KeyboardInterrupt(so_far()) from None


def training_so_far(checkpoint: Path) -> str:
    """The state of an interrupted training run, in words; empty if it has no checkpoint yet."""
    return f"while training; the state so far is in {checkpoint}" if checkpoint.exists() else ""


def stamp(path: Path) -> tuple[int, int] | None:
    """A value that changes when a file is written again; None if there is no file."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns


# ---------------------------------------------------------------- objects that options name
def load_batches(args: Namespace, spec: str | None = None) -> Any:
    """The batches that `--data`, or `spec` instead, and the other options of data name."""
    images = ImageShape(args.size, args.mean, args.std, args.gray)
    return load_data(spec or args.data, batch_size=args.batch_size, samples=args.samples, images=images)


def load_held_out(args: Namespace) -> Any:
    """The batches that `--held-out` names; None if it is not given."""
    return None if args.held_out is None else load_batches(args, args.held_out)


def load_chip(args: Namespace, name: str) -> Hardware:
    """The named hardware, with the ops that `--ops` adds to those of hago.

    Raises:
        HagoError: there is no such hardware, or `--ops` names an object that is not an op rule.
    """
    return load_hardware(name, load_ops(args))


def load_ops(args: Namespace) -> Ops:
    """hago's ops, and those that `--ops` adds.

    Raises:
        HagoError: `--ops` names an object that is not an op rule.
    """
    if args.ops is None:
        return OPS
    added = import_object(args.ops, "ops")
    rules = list(added.values()) if isinstance(added, Mapping) else [added]
    if not all(isinstance(rule, OpRule) for rule in rules):
        raise HagoError(f"ops {args.ops!r} is of type {type(added).__name__}; expected an OpRule, or a mapping of them")
    return {**OPS, **{rule.name: rule for rule in rules}}


def hardware_of(args: Namespace, record: Strategy | Log) -> Hardware:
    """The hardware that `--hardware` names, or else that for which a strategy or a log was made.

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


def load_strategy(args: Namespace) -> tuple[Strategy, Hardware, Any]:
    """The strategy that a command is given, its hardware, and the model.

    Raises:
        HagoError: one of them cannot be loaded.
    """
    strategy = Strategy.load(args.record)
    return strategy, hardware_of(args, strategy), load_model(args.model, args.weights)


def named(spec: str, what: str) -> Any:
    """The object that `package.module:name` names; any other name is returned unchanged."""
    return import_object(spec, what) if ":" in spec else spec


def searcher_argument(spec: str) -> Any:
    """The object that `package.module:callable` names; `NAME` and `NAME:OPTION=VALUE,...` are returned unchanged."""
    if spec.partition(":")[0] in (AUTO, *SEARCHERS) or not _OBJECT.fullmatch(spec):
        return spec
    return import_object(spec, "searcher")


def estimator_argument(spec: str | None) -> Any:
    """The estimator that `package.module:name` names, called without arguments if it is a class; `NAME` and
    `NAME:OPTION,...` are returned unchanged."""
    if spec is None or spec.partition(":")[0] in (*ESTIMATORS, *DOREFAS) or not _OBJECT.fullmatch(spec):
        return spec
    named_object = import_object(spec, "estimator")
    return named_object() if isinstance(named_object, type) else named_object


def make_folder_of(path: Path) -> Path:
    """Make the folder of an output file, and return the file's path."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise HagoError(f"cannot make the folder of {path}: {error}") from None
    return path
