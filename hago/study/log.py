"""The log of a search: JSON lines, a `Header` and then one `Trial` a line. The log is the state of the search.

`run_study` opens a `LogFile`, which checks that the log belongs to this search, and appends each trial as it ends.
Replay and inspection read a log with `read_log`. docs/log-format.md describes the format.

Invariants: a line is on disk before the next trial starts, or it is not in the file at all. A crash may leave the last
line torn, that is, written in part; readers drop such a line. Any other line that hago would not write is refused, with
its number.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import logging
import math
import os
import platform
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from hago.errors import (
    HASH_DIGITS,
    LONGEST_QUOTE,
    OTHER_DATA,
    OTHER_MODEL,
    LogError,
    StrategyMismatch,
    as_strings,
    shortened,
    shortened_to,
)
from hago.plan import HardwareId, Space
from hago.serialization.file_kind import LOG, told_from_other_kinds
from hago.serialization.json_text import (
    canonical,
    check_schema,
    check_version,
    is_file,
    json_values,
    parse_json,
    read_file,
    replace_file,
    sync_folder,
)
from hago.study.score import Score
from hago.study.searcher import Searcher
from hago.version import VERSION as HAGO_VERSION

TRIAL_VERSION: Final = 1
HEADER_VERSION: Final = 2
#: By searcher, the options that it did not have at first, and what it did then: logs without them are of that time.
IMPLIED_OPTIONS: Final[Mapping[str, Mapping[str, Any]]] = MappingProxyType(
    {"gradient": {"groups_a_move": 8}, "pareto": {"least_loss": 0.0}}
)

#: Fields of Score that are written under "score" unchanged.
_REQUIRED_FIELDS: Final = ("unproved", "total_bits", "plan_key", "infeasible", "forwards")
#: Fields of Score that are written only where they are not empty or 0.
_OPTIONAL_FIELDS: Final = ("costs", "shortfall", "tie", "dropped", "interval")
#: Fields of Header that identify the task; a log that differs in one of them, or in its space, is of another task.
_TASK_FIELDS: Final = ("model_hash", "hardware", "data_hash")
#: By field of Header, what a difference means for the user.
_CAUSES: Final = {
    "model_hash": f"this is {OTHER_MODEL}",
    "data_hash": f"these are {OTHER_DATA}",
}
#: Fields of Header that determine the search; a log that differs in one of them cannot be continued.
_SETTING_FIELDS: Final = ("seed", "searcher", "estimator", "objective", "keep_float", "fix_bits", "settings")
#: The first bytes of every header, by which a torn header is distinguished from a file that is no log.
_HEADER_START: Final = b'{"data_hash": '

#: Receives messages for the user.
Notice = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Trial:
    """One scored point of a search: one line of its log. Made by `run_study`, or read from a log.

    Args:
        index: from 0, in the order asked.
        bits: bits of every group.
        score: the result of its evaluation, or of that of the trial that it repeats.
        same_as: index of the earlier trial with the same Plan; None where this one was evaluated.
        why: the searcher's reason for the point.
        at: time at which it was logged, UTC, ISO 8601.
        seconds: duration of its evaluation; 0 for a repeat.
        elapsed: seconds that the search had taken by then, over all its sessions, preparation included.
    """

    index: int
    bits: Mapping[str, int]
    score: Score
    same_as: int | None = None
    why: str = ""
    at: str = ""
    seconds: float = 0.0
    elapsed: float = 0.0

    @property
    def results(self) -> Mapping[str, Any]:
        """The measurements in its score."""
        return self.score.results

    @property
    def thresholds_sha256(self) -> str:
        """Hash of the thresholds that were used."""
        return self.score.thresholds_sha256

    def to_json(self, model_hash: str) -> dict[str, Any]:
        """The JSON values of the trial's line.

        Raises:
            LogError: a result is no JSON value.
        """
        score = self.score
        where = f"trial {self.index}: $.score"
        return {
            "version": TRIAL_VERSION,
            "index": self.index,
            "strategy": {
                "model_hash": model_hash,
                "bits": {k: int(b) for k, b in self.bits.items()},
                "thresholds_sha256": score.thresholds_sha256,
            },
            "score": {
                "value": json_values(score.value, where),
                "overflows": json_values(score.overflows, where),
                "excess_bits": json_values(score.excess_bits, where),
                **{name: json_values(getattr(score, name), where) for name in _REQUIRED_FIELDS},
                **{name: json_values(value, where) for name in _OPTIONAL_FIELDS if (value := getattr(score, name))},
            },
            "results": json_values(score.results, f"trial {self.index}: $.results"),
            "same_as": self.same_as,
            "why": self.why,
            "time": {"at": self.at, "seconds": self.seconds, "elapsed": self.elapsed},
        }

    @staticmethod
    def from_json(record: Any) -> Trial:
        """The trial of JSON values that conform to the trial schema."""
        score, time = record["score"], record["time"]
        return Trial(
            index=int(record["index"]),
            bits={k: int(b) for k, b in record["strategy"]["bits"].items()},
            score=Score(
                value=float(score["value"]),
                results=record["results"],
                overflows={k: int(n) for k, n in score["overflows"].items()},
                excess_bits={k: int(n) for k, n in score["excess_bits"].items()},
                unproved=int(score["unproved"]),
                total_bits=int(score["total_bits"]),
                plan_key=score["plan_key"],
                infeasible=score["infeasible"],
                forwards=float(score["forwards"]),
                thresholds_sha256=record["strategy"]["thresholds_sha256"],
                costs={k: float(v) for k, v in score.get("costs", {}).items()},
                shortfall=float(score.get("shortfall", 0.0)),
                tie=float(score.get("tie", 0.0)),
                dropped=score.get("dropped", {}),
                interval=tuple(map(float, score.get("interval", ()))),
            ),
            same_as=None if record["same_as"] is None else int(record["same_as"]),
            why=record["why"],
            at=time["at"],
            seconds=float(time["seconds"]),
            elapsed=float(time["elapsed"]),
        )


def best_trial(trials: Iterable[Trial], tolerance: float = 0.0, allow_overflow: bool = False) -> Trial | None:
    """The best of `trials`: the highest rank, the first of equals.

    Args:
        tolerance: values that are at most so much below the highest count as equal to it, and fewer bits win.
        allow_overflow: whether a point that overflowed on the calibration data may be the best where every point did.

    Returns:
        The trial; None where none is eligible.
    """
    measured = [t for t in trials if not t.score.dropped]
    eligible = [t for t in measured if t.score.runs or (allow_overflow and not t.score.infeasible)]
    floor = max((t.score.value for t in eligible if t.score.accepted), default=math.inf) - tolerance
    return max(eligible, key=lambda t: t.score.standing(floor), default=None)


# ---------------------------------------------------------------- header
@dataclass(frozen=True, slots=True)
class Header:
    """Line 1 of a log: the task of the search, its settings, and the software that ran it; enough to run it again. Made
    by `make_header`, or read from a log.

    Args:
        model_hash: hash of the Graph.
        hardware: name and hash of the hardware description.
        data_hash: hash of the calibration data.
        seed: seed of all randomness.
        searcher: {"name", "options"}.
        estimator, objective: a name, or a name and options; any JSON value.
        keep_float: patterns of the nodes that are kept float.
        fix_bits: bits that the user fixed.
        space: {"groups", "choices", "hash"}.
        settings: everything else that the scores depend on.
        made_by: versions, machine and threads; a log that differs here is continued with a notice.
        confirmed: the gain of refined thresholds on the samples that were kept aside.
    """

    model_hash: str
    hardware: HardwareId
    data_hash: str
    seed: int
    searcher: Mapping[str, Any]
    estimator: Any
    objective: Any
    keep_float: Sequence[str]
    fix_bits: Mapping[str, Any]
    space: Mapping[str, Any]
    settings: Mapping[str, Any] = field(default_factory=dict)
    made_by: Mapping[str, Any] = field(default_factory=dict)
    confirmed: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self, at: str = "") -> dict[str, Any]:
        """The JSON values of the line.

        Args:
            at: the time to write into it.

        Raises:
            LogError: a value has no form in JSON.
        """
        parts = {name: getattr(self, name) for name in (*_TASK_FIELDS, "space", *_SETTING_FIELDS, "made_by")}
        parts["hardware"] = {"name": self.hardware.name, "hash": self.hardware.hash}
        if self.confirmed:
            parts["confirmed"] = self.confirmed
        record: dict[str, Any] = json_values(parts, "log header")
        return {**record, "version": HEADER_VERSION, "time": {"at": at}}

    @staticmethod
    def from_json(record: Any, where: str) -> Header:
        """The header of JSON values.

        Raises:
            LogError: the values violate the header's schema; names the JSON path.
        """
        check_schema(record, "log_header", where)
        parts = {k: v for k, v in record.items() if k not in ("version", "time")}
        searcher = record["searcher"]
        options = {**IMPLIED_OPTIONS.get(searcher["name"], {}), **searcher["options"]}
        hardware = HardwareId(**record["hardware"])
        return Header(**{**parts, "hardware": hardware, "searcher": {**searcher, "options": options}})

    def check_same(self, logged: Header, where: str) -> None:
        """Check that a log with this header belongs to this search.

        Raises:
            StrategyMismatch: the log is of another model, hardware, data or space.
            LogError: it was written with another seed, searcher or setting.
        """
        own, other = self.to_json(), logged.to_json()
        # the space follows from the model, the hardware and the settings, so the cause is named before it
        for part in (*_TASK_FIELDS, *_SETTING_FIELDS, "space"):
            for path, ours, old in _differences(part, own[part], other[part]):
                kind = LogError if part in _SETTING_FIELDS else StrategyMismatch
                cause = f"{_CAUSES[part]}: " if part in _CAUSES else ""
                raise kind(
                    f"{where} cannot be continued: {cause}its {path} is {old}, this search has {ours}; "
                    "search with the same model, data and settings, or give another log"
                )

    def notices(self, logged: Header, where: str) -> Iterator[str]:
        """Yield messages about differences that do not prevent continuing: versions, machine, threads."""
        own, other = self.to_json()["made_by"], logged.to_json()["made_by"]
        for path, ours, old in _differences("made_by", own, other):
            what, was, now = (shortened_to(text, LONGEST_QUOTE) for text in (path, old, ours))
            yield f"{where} was written with {what} {was}, this is {now}; scores may differ"


def make_header(
    space: Space,
    searcher: Searcher,
    *,
    seed: int,
    model_hash: str,
    hardware: HardwareId,
    data_hash: str,
    estimator: Any,
    objective: Any,
    keep_float: Sequence[str] = (),
    fix_bits: Mapping[str, Any] | None = None,
    settings: Mapping[str, Any] | None = None,
    threads: int | None = None,
    confirmed: Mapping[str, Any] | None = None,
) -> Header:
    """The header of a search in `space` by `searcher`; see Header for the other arguments.

    Args:
        threads: the number of threads that each worker computes with.
    """
    return Header(
        model_hash=model_hash,
        hardware=hardware,
        data_hash=data_hash,
        seed=seed,
        searcher={"name": searcher.name, "options": dict(searcher.options)},
        estimator=estimator,
        objective=objective,
        keep_float=as_strings(keep_float, "keep_float"),
        fix_bits=dict(fix_bits or {}),
        space={"groups": len(space.groups), "choices": space.size, "hash": space_hash(space)},
        settings=dict(settings or {}),
        made_by=versions(threads),
        confirmed=dict(confirmed or {}),
    )


def space_hash(space: Space) -> str:
    """The sha256 of every group's key, source, edges and choices, in order."""
    parts = [[g.key, g.source, [str(e) for e in g.edges], list(g.choices)] for g in space.groups.values()]
    return hashlib.sha256(canonical(parts).encode()).hexdigest()


def versions(threads: int | None = None) -> dict[str, Any]:
    """The versions of the packages that compute the scores, the machine's architecture, and `threads`."""
    return {
        "hago": HAGO_VERSION,
        "python": platform.python_version(),
        "machine": platform.machine(),
        **{package: version(package) for package in ("torch", "numpy")},
        "threads": threads,
    }


def _differences(path: str, ours: Any, theirs: Any) -> Iterator[tuple[str, str, str]]:
    """Yield the JSON paths at which two values differ, with both values as JSON, hashes by their first digits."""
    if isinstance(ours, Mapping) and isinstance(theirs, Mapping):
        for key in sorted({*ours, *theirs}):
            yield from _differences(f"{path}.{key}", ours.get(key), theirs.get(key))
    elif canonical(ours) != canonical(theirs):
        if path.endswith("hash") and isinstance(ours, str) and isinstance(theirs, str):
            ours, theirs = ours[:HASH_DIGITS], theirs[:HASH_DIGITS]
        yield path, canonical(ours), canonical(theirs)


# ---------------------------------------------------------------- reading
def log_notice(text: str) -> None:
    """The default Notice: a warning of the logger "hago"."""
    logging.getLogger("hago").warning(text)


@dataclass(frozen=True, slots=True)
class Log:
    """The content of a log file.

    Args:
        header: None where the file is empty or its header is torn.
        trials: the trials in order.
        complete_bytes: number of bytes of the complete lines.
        torn_bytes: number of bytes after them, of a torn line.
    """

    header: Header | None
    trials: tuple[Trial, ...]
    complete_bytes: int
    torn_bytes: int


def read_log(path: str | Path, notice: Notice = log_notice) -> Log:
    """Read a log without changing it.

    Raises:
        LogError: the file cannot be read, or a line, given by its number, is not one that hago writes.
    """
    try:
        content = read_file(path)
    except (OSError, ValueError) as error:
        raise LogError(f"cannot read log {path}: {error}") from None
    log = parse_log(content, str(path))
    if log.torn_bytes:
        notice(f"{path}: the last line is torn ({log.torn_bytes} bytes); left out")
    return log


def is_log(path: str | Path) -> bool:
    """Whether a file is a search log, by its ending or by how it begins."""
    if Path(path).suffix == ".jsonl":
        return True
    try:
        return read_file(path, len(_HEADER_START)) == _HEADER_START
    except (OSError, ValueError):
        return False


def read_header(path: str | Path) -> Header | None:
    """The header of a log; None where there is no file, or its header is torn.

    Raises:
        LogError: the file cannot be read, or its header is not one that hago writes.
    """
    if not is_file(path):
        return None
    try:
        with open(path, "rb") as file:
            line = file.readline()
    except OSError as error:
        raise LogError(f"cannot read log {path}: {error}") from None
    return parse_log(line, str(path)).header


def parse_log(content: bytes, where: str) -> Log:
    """Parse the content of a log file.

    Raises:
        LogError: a line, other than a torn last one, is not one that hago writes.
    """
    *lines, last = content.split(b"\n")
    torn_bytes = len(last)
    if not last and lines and not _is_json(lines[-1]):
        torn_bytes = len(lines.pop()) + 1
    if not lines:
        beginning = content[: len(_HEADER_START)]
        if not _HEADER_START.startswith(beginning):
            raise LogError(f"{where} is not a search log of hago: it starts with {beginning!r}")
        return Log(None, (), 0, torn_bytes)
    with told_from_other_kinds(content, where, LOG):
        records = [_parse_line(line, f"{where}, line {n}") for n, line in enumerate(lines, start=1)]
        header = Header.from_json(records[0], f"{where}, line 1")
    trials: list[Trial] = []
    for number, record in enumerate(records[1:], start=2):
        trials.append(_parse_trial(record, header, trials, f"{where}, line {number}"))
    return Log(header, tuple(trials), len(content) - torn_bytes, torn_bytes)


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True


def _parse_line(line: bytes, where: str) -> Any:
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise LogError(f"{where}: not text: {error}") from None
    record = parse_json(text, where)
    check_version(record, HEADER_VERSION, where)
    return record


def _parse_trial(record: Any, header: Header, earlier: Sequence[Trial], where: str) -> Trial:
    """The trial of a line, checked against the header and the trials before it."""
    check_schema(record, "trial", where)
    trial = Trial.from_json(record)
    if trial.index != len(earlier):
        raise LogError(f"{where}: at $.index: got {trial.index}, expected {len(earlier)}")
    model_hash = record["strategy"]["model_hash"]
    if model_hash != header.model_hash:
        raise LogError(
            f"{where}: at $.strategy.model_hash: got {model_hash!r}, expected the header's {header.model_hash!r}"
        )
    figure = trial.results.get(header.objective, 0.0) if isinstance(header.objective, str) else 0.0
    if not _is_figure(figure):
        raise LogError(f"{where}: at $.results.{header.objective}: got {shortened(figure)}, expected a number")
    if earlier and trial.bits.keys() != earlier[0].bits.keys():
        group = min(trial.bits.keys() ^ earlier[0].bits.keys())
        raise LogError(f"{where}: at $.strategy.bits: {group!r} is not in every trial")
    if trial.same_as is not None:
        if trial.same_as >= trial.index:
            raise LogError(f"{where}: at $.same_as: got {trial.same_as}, expected an earlier trial")
        if trial.score != earlier[trial.same_as].score:
            raise LogError(f"{where}: at $.score: got another than trial {trial.same_as}, which it repeats")
    return trial


def _is_figure(value: Any) -> bool:
    """Whether a JSON value is a number, as hago writes one."""
    return (isinstance(value, (int, float)) and not isinstance(value, bool)) or value in ("inf", "-inf", "nan")


def _stat(path: Path) -> os.stat_result | None:
    """The status of the file at a path; None where no file is there."""
    try:
        return path.stat()
    except FileNotFoundError:
        return None


# ---------------------------------------------------------------- writing
class LogFile:
    """A log that is open for appending, by one process at a time. `run_study` opens one as a context manager, calls
    `start`, then `append` for each new trial, and `check` at the end."""

    def __init__(self, path: str | Path) -> None:
        """Open the file, changing nothing in it, or create it. A file that was created and holds no line in the end is
        removed.

        Raises:
            LogError: it cannot be opened, or another search is writing it.
        """
        self.path = Path(path)
        self._complete_bytes = 0
        try:
            if self.path.exists() and not self.path.is_file():
                raise LogError(f"cannot open log {path}: it is no regular file; give a path of its own")
            self._is_new = not self.path.exists()
            # Windows alone has O_BINARY, and would translate line ends without it.
            self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | getattr(os, "O_BINARY", 0), 0o666)
        except (OSError, ValueError) as error:
            raise LogError(f"cannot open log {path}: {error}") from None
        try:
            self._lock()
            if self._is_new:
                sync_folder(self.path.parent)
        except BaseException:
            os.close(self._fd)
            raise

    def _lock(self) -> None:
        try:
            import fcntl
        except ImportError:
            return  # not a POSIX system: two searches on one log are not detected there
        try:
            # Not flock: worker processes would inherit the lock, and one that outlives a killed search would keep it.
            fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            # other errors are of file systems that cannot lock, where a search may run all the same
            if error.errno in (errno.EAGAIN, errno.EACCES):
                raise LogError(f"another search is writing {self.path}; give this one its own log") from None

    def __enter__(self) -> LogFile:
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_new and not self._complete_bytes:
            with contextlib.suppress(OSError):
                if os.path.samestat(os.fstat(self._fd), self.path.stat()) and not self.path.stat().st_size:
                    self.path.unlink()
        os.close(self._fd)

    def start(self, header: Header, at: str, resume: bool, notice: Notice) -> tuple[Trial, ...]:
        """Prepare the file for the next trial: check or write its header, and drop a torn line.

        Args:
            header: the header of this search.
            at: the time to write into a new header.
            resume: whether a file that is not empty may be continued.

        Returns:
            The trials in the file.

        Raises:
            LogError: the file is not empty and `resume` is false, it is not one that hago writes, or it was searched
                with another seed, searcher or setting.
            StrategyMismatch: it is of another model, hardware, data or space.
        """
        content = self._read()
        if content and not resume:
            raise LogError(f"log {self.path} exists; resume it, or give another path")
        log = parse_log(content, str(self.path))
        if log.header is not None:
            header.check_same(log.header, str(self.path))
            for text in header.notices(log.header, str(self.path)):
                notice(text)
        if log.torn_bytes:
            notice(f"{self.path}: the last line is torn ({log.torn_bytes} bytes); dropped")
        self._complete_bytes = log.complete_bytes
        self._truncate()
        if log.header is None:
            record = header.to_json(at)
            check_schema(record, "log_header", "log header")
            self._append(record)
        return log.trials

    def append(self, trial: Trial, model_hash: str) -> None:
        """Append the line of a trial; it is on disk, under the log's path, when this returns.

        Raises:
            LogError: the line could not be written whole, and the file ends with the line before it; or another process
                removed, replaced or changed the file.
        """
        self._check_length()
        self._append(trial.to_json(model_hash))
        self._check_place()

    def check(self) -> None:
        """Check that no other process changed the log while it was open. A removed log is written again.

        Raises:
            LogError: the file was removed, renamed or replaced, or its length is not that of the lines written.
        """
        self._check_length()
        self._check_place()

    def _check_length(self) -> None:
        try:
            size = os.fstat(self._fd).st_size
        except OSError as error:
            raise LogError(f"cannot read log {self.path}: {error}") from None
        if size != self._complete_bytes:
            raise LogError(
                f"log {self.path} was changed while it was written: it has {size} bytes, expected "
                f"{self._complete_bytes}; give another path for the log, and leave it alone until the search ends"
            )

    def _check_place(self) -> None:
        try:
            opened, at_path = os.fstat(self._fd), _stat(self.path)
        except OSError as error:
            raise LogError(f"cannot read log {self.path}: {error}") from None
        if at_path is None and opened.st_nlink == 0:
            replace_file(self.path, self._read())
            raise LogError(
                f"log {self.path} was removed while it was written; its lines were written again: resume with it, and "
                "leave it alone until the search ends"
            )
        if at_path is None:
            raise LogError(
                f"log {self.path} was renamed while it was written; give it its name back and resume with it, and "
                "leave it alone until the search ends"
            )
        if not os.path.samestat(opened, at_path):
            raise LogError(
                f"log {self.path} was replaced by another file while it was written; this search's trials are not in "
                "it: give another path for the log, and leave it alone until the search ends"
            )

    def _read(self) -> bytes:
        try:
            with open(self._fd, "rb", closefd=False) as file:
                file.seek(0)
                return file.read()
        except OSError as error:
            raise LogError(f"cannot read log {self.path}: {error}") from None

    def _append(self, record: Mapping[str, Any]) -> None:
        line = canonical(record).encode() + b"\n"
        try:
            with self._whole_or_nothing():
                os.lseek(self._fd, self._complete_bytes, os.SEEK_SET)
                written = 0
                while written < len(line):
                    written += os.write(self._fd, line[written:])
                os.fsync(self._fd)
        except OSError as error:
            raise LogError(
                f"cannot write log {self.path}: {error}; it holds every trial before this one, so make room and resume"
            ) from None
        self._complete_bytes += len(line)

    def _truncate(self) -> None:
        try:
            os.ftruncate(self._fd, self._complete_bytes)
        except OSError as error:
            raise LogError(f"cannot drop the torn line of log {self.path}: {error}") from None

    @contextlib.contextmanager
    def _whole_or_nothing(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            # where this fails, too, the next reader drops the torn line
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, self._complete_bytes)
            raise
