"""The records that a report is made of: a log, strategies, a front and a table of sensitivities, told apart by what
they hold."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any

from hago.errors import LogError
from hago.plan import HardwareId, Strategy
from hago.search import SENSITIVITY_VERSION, ParetoFront, load_front
from hago.serialization.json_text import check_version, parse_json, read_file
from hago.serialization.summary import number_values
from hago.study import Header, Log, read_log

#: What a record is: its path, or a strategy or a front itself.
RecordLike = str | PathLike[str] | Strategy | ParetoFront


@dataclass(frozen=True, slots=True)
class Records:
    """What was read; made by `read_records`.

    Args:
        log, front: with the path; None if there is none, the path alone where the front was passed as a value.
        strategies: each with its path, or with the name that it is given.
        sensitivities: by group and bits, the expected loss.
    """

    log: Log | None = None
    log_path: str = ""
    front: ParetoFront | None = None
    front_path: str = ""
    strategies: tuple[tuple[str, Strategy], ...] = ()
    sensitivities: Mapping[str, Mapping[str, float]] | None = None

    @property
    def header(self) -> Header | None:
        """The header of the log; None without a log, or where it is empty."""
        return None if self.log is None else self.log.header

    @property
    def model_hashes(self) -> dict[str, str]:
        """The hash of the model that each record is for, by the record in words."""
        found = {} if self.header is None else {f"log {self.log_path}": self.header.model_hash}
        return found | {name: strategy.model_hash for name, strategy in self._strategies()}

    @property
    def hardware(self) -> dict[str, HardwareId]:
        """The hardware that each record is for, by the record in words."""
        found = {} if self.header is None else {f"log {self.log_path}": self.header.hardware}
        return found | {name: strategy.hardware for name, strategy in self._strategies()}

    @property
    def hardware_name(self) -> str | None:
        """The name of the hardware that the records are for; None where they do not say."""
        return next((each.name for each in self.hardware.values()), None)

    def _strategies(self) -> Iterator[tuple[str, Strategy]]:
        """A strategy of each record that has some, by the record in words."""
        for path, strategy in self.strategies:
            yield f"strategy {path}", strategy
        for point in () if self.front is None else self.front.points[:1]:
            yield f"front {self.front_path}".strip(), point.strategy


def read_records(records: Sequence[RecordLike]) -> Records:
    """Read the records of a report.

    Args:
        records: a log (.jsonl), a front, strategies and a table of `hago sensitivity --save`, in any order; at most one
            of each but of strategies.

    Raises:
        LogError: a record cannot be read, there is none, or there are two logs, fronts or tables.
    """
    found = Records()
    for record in records:
        found = _with(found, record)
    if found == Records():
        raise LogError("there is nothing to report on; give a log (.jsonl), a strategy (.json) or a front")
    return found


def _with(found: Records, record: RecordLike) -> Records:
    """The records with one more."""
    if isinstance(record, Strategy):
        return replace(found, strategies=(*found.strategies, (f"strategy {len(found.strategies) + 1}", record)))
    if isinstance(record, ParetoFront):
        _refuse_second(found.front, "front")
        return replace(found, front=record)
    path = str(record)
    if Path(path).suffix == ".jsonl":
        _refuse_second(found.log, "log")
        return replace(found, log=read_log(path), log_path=path)
    try:
        text = read_file(path).decode("utf-8")
    except (OSError, ValueError) as error:
        raise LogError(f"cannot read {path}: {error}") from None
    value = parse_json(text, path)
    keys = value.keys() if isinstance(value, Mapping) else ()
    if {"measure", "cost", "points"} <= set(keys):
        _refuse_second(found.front, "front")
        return replace(found, front=load_front(path), front_path=path)
    if {"objective", "losses"} <= set(keys):
        _refuse_second(found.sensitivities, "table of sensitivities")
        return replace(found, sensitivities=_losses(value, path))
    return replace(found, strategies=(*found.strategies, (path, Strategy.from_json(value, path))))


def _refuse_second(before: Any, kind: str) -> None:
    if before is not None:
        raise LogError(f"a report is of one {kind} at most, and two were given")


def _losses(value: Any, where: str) -> dict[str, dict[str, float]]:
    """The losses of a table of sensitivities, by group and bits."""
    check_version(value, SENSITIVITY_VERSION, where)
    losses = value["losses"]
    if not isinstance(losses, Mapping) or not all(isinstance(by, Mapping) for by in losses.values()):
        raise LogError(f"{where}: at $.losses: expected losses by group and bits; it was edited")
    return {key: number_values(by) for key, by in losses.items()}
