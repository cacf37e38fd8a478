"""Parts that commands share: the objects that options name, default paths, and commands that messages show."""

from __future__ import annotations

import contextlib
import re
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from hago.analysis import Change
from hago.calibration import ESTIMATORS
from hago.callbacks import OptunaStudy, TensorBoard, WeightsAndBiases
from hago.cli.choices import EFFORTS, NO_MEAN, UNIT_STD
from hago.cli.console import Outcome, command_line
from hago.data import BATCH_SIZE, ImageShape, load_data
from hago.data.named_objects import import_object
from hago.emulation.dorefa import DOREFAS
from hago.errors import HagoError
from hago.graph.model_source import load_model
from hago.hardware import Hardware, available_hardware, hardware_hash, load_hardware
from hago.ops import OPS, OpRule, Ops
from hago.plan import Strategy
from hago.search import load_front
from hago.searchers import AUTO, SEARCHERS
from hago.serialization.text_table import counted
from hago.study import Log

#: The form of `package.module:name`. Options of estimators, which follow a colon, too, begin with a digit.
_OBJECT: Final = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")


def strategy_command(
    name: str, args: Namespace, strategy: Path, weights: Path | str | None, more: Sequence[str] = ()
) -> str:
    """The command of this name that takes a strategy, on the data that this command was given.

    Args:
        weights: the file of the model's weights; None if the model has its own.
        more: further words.
    """
    words = [name, args.model, str(strategy), "--data", args.data, *more]
    words += held_out_words(args)
    words += ["--weights", str(weights)] if weights else []
    return command_line(*words, *data_words(args))


def check_command(args: Namespace, strategy: Path, weights: Path | str | None, *more: str) -> str:
    """The command that realizes a strategy; arguments as for `strategy_command`."""
    return strategy_command("realize", args, strategy, weights, more)


def quantization_command(
    name: str, args: Namespace, hardware: str, data: str, options: Change, tables: Mapping[str, str | None]
) -> str:
    """The command of this name, `quantize` or `search`, for the model that this command was given.

    Args:
        data: the calibration data.
        options: how it quantizes.
        tables: the files of TPU-MLIR by option; None where the user gave none.
    """
    if name == "search" and options.effort == EFFORTS[0]:
        options = replace(options, effort=None)  # a search of the least effort, without costs, is one shot
    if data != args.data:
        args = Namespace(**{**vars(args), "samples": None})  # how many were used of other data is not known
    words = [name, args.model, "--hardware", hardware, "--data", data]
    words += held_out_words(args)
    words += ["--weights", args.weights] if args.weights else []
    words += options.words
    words += [word for option, table in tables.items() if table for word in (f"--{option}", table)]
    return command_line(*words, *data_words(args, chip=False))


def search_as_quantized(args: Namespace) -> str:
    """The command that searches with the options that `hago quantize` was given."""
    corrections = tuple(args.corrections) if args.corrections else None
    options = Change(tuple(args.keep_float) or None, dict(args.fix_bits), args.estimator, corrections, args.effort)
    tables = {"calibration-table": args.calibration_table, "quantize-table": args.quantize_table}
    return quantization_command("search", args, args.hardware, args.data, options, tables)


def search_line(command: str) -> str:
    """The line that names a search, which may find a better strategy than one shot."""
    return f"search    {command}  # may lose less than one shot"


def improve_line(command: str, gain: float, samples: int) -> str:
    """The line that names the one shot with the remedies that an inspection found.

    Args:
        gain: dB.
        samples: number of samples that this was measured on.
    """
    return f"improve   {command}  # gains {gain:.1f} dB on {counted(samples, 'sample')}"


def inspect_line(command: str) -> str:
    """The line that names an inspection."""
    return f"inspect   {command}  # names the layers that lose most, and what helps"


def data_words(args: Namespace, chip: bool = True) -> list[str]:
    """The options of a command line that say how its data is read, for another command on the same data.

    Args:
        chip: also those of the hardware.
    """
    words = ["--hardware", args.hardware] if chip and args.hardware not in (None, *available_hardware()) else []
    words += ["--ops", args.ops] if args.ops else []
    words += ["--samples", str(args.samples)] if args.samples else []
    words += ["--batch-size", str(args.batch_size)] if args.batch_size != BATCH_SIZE else []
    words += ["--size", "x".join(map(str, args.size))] if args.size else []
    for name, default in (("mean", NO_MEAN), ("std", UNIT_STD)):
        value = getattr(args, name)
        # as one word, since a number may begin with a minus
        words += [f"--{name}={','.join(map(str, value))}"] if value != default else []
    words += ["--gray"] if args.gray else []
    return words


def held_out_words(args: Namespace) -> list[str]:
    """The options of a command line that name its held-out data."""
    words = ["--held-out", args.held_out] if args.held_out else []
    return [*words, *(["--held-out-samples", str(args.held_out_samples)] if args.held_out_samples else [])]


def with_next(outcome: Outcome, command: str) -> Outcome:
    """The outcome with the command to enter next."""
    return Outcome(f"{outcome.text}\n\nnext      {command}", {**outcome.json, "next": command}, outcome.code)


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


@contextlib.contextmanager
def watched(args: Namespace) -> Iterator[list[Callable[[Any, Any], None]]]:
    """The callbacks that `--tensorboard`, `--wandb` and `--optuna` name, which are closed at the end.

    Raises:
        HagoError: the package of one is not installed, or its folder or storage cannot be written.
    """
    url, artifacts = getattr(args, "optuna", None), getattr(args, "optuna_artifacts", None)
    if artifacts is not None and url is None:
        raise HagoError("--optuna-artifacts is the folder of the study of --optuna, which is not given; give both")
    with contextlib.ExitStack() as stack:
        callbacks: list[Callable[[Any, Any], None]] = []
        if args.tensorboard is not None:
            callbacks.append(stack.enter_context(TensorBoard(args.tensorboard)))
        if args.wandb is not None:
            callbacks.append(stack.enter_context(WeightsAndBiases(args.wandb)))
        if url is not None:
            callbacks.append(stack.enter_context(OptunaStudy(url, artifacts=artifacts)))
        yield callbacks


# ---------------------------------------------------------------- objects that options name
def load_batches(args: Namespace) -> Any:
    """The batches that `--data` and the other options of data name."""
    return _load(args, args.data, args.samples)


def load_held_out(args: Namespace) -> Any:
    """The batches that `--held-out` names, all of them unless `--held-out-samples` is given; None without either.

    Raises:
        HagoError: there is no such data, or only the number of its samples is given.
    """
    if args.held_out is None and args.held_out_samples is not None:
        raise HagoError("--held-out-samples is the number of samples of --held-out, which is not given; give both")
    return None if args.held_out is None else _load(args, args.held_out, args.held_out_samples)


def _load(args: Namespace, spec: str, samples: int | None) -> Any:
    images = ImageShape(args.size, args.mean, args.std, args.gray)
    return load_data(spec, batch_size=args.batch_size, samples=samples, images=images)


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


def hardware_of_each(args: Namespace, strategies: Sequence[tuple[str, Strategy]]) -> list[Hardware]:
    """The hardware of each strategy: one that `--hardware`, which may be given several times, names if the strategy was
    made for it, else the one that ships with hago.

    Args:
        strategies: each with its path.

    Raises:
        HagoError: no hardware is found for a strategy, or none of them was made for one that is given.
    """
    given = {name: load_chip(args, name) for name in args.hardware or ()}
    used, found = set(), []
    for path, strategy in strategies:
        wanted = strategy.hardware
        by_hash = [name for name, chip in given.items() if hardware_hash(chip) == wanted.hash]
        by_name = [name for name, chip in given.items() if chip.name == wanted.name]
        if by_hash or by_name:
            name = (by_hash or by_name)[0]
            used.add(name)
            found.append(given[name])
        elif wanted.name in available_hardware():
            found.append(load_chip(args, wanted.name))
        else:
            others = f" {', '.join(map(repr, given))} is for another;" if given else ""
            raise HagoError(
                f"{path} was made for hardware {wanted.name!r}, which does not ship with hago;{others} give --hardware"
            )
    if unused := [name for name in given if name not in used]:
        made_for = ", ".join(f"{path} for {strategy.hardware.name!r}" for path, strategy in strategies)
        raise HagoError(f"--hardware {unused[0]}: no strategy was made for it ({made_for}); leave it out")
    return found


def load_strategy(args: Namespace) -> tuple[Strategy, Hardware, Any]:
    """The strategy that a command is given, its hardware, and the model.

    Raises:
        HagoError: one of them cannot be loaded.
    """
    trial = getattr(args, "trial", None)
    strategy = Strategy.load(args.record) if trial is None else _of_front(args.record, trial)
    return strategy, hardware_of(args, strategy), load_model(args.model, args.weights)


def _of_front(path: str, trial: int) -> Strategy:
    """The strategy of a trial in the file of a front.

    Raises:
        HagoError: the file cannot be read, or the front has no such trial.
    """
    points = {point.trial: point.strategy for point in load_front(path)}
    if trial not in points:
        raise HagoError(f"--trial {trial}: the front {path} has trials {', '.join(map(str, sorted(points)))}")
    return points[trial]


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
