"""Log: a search as JSON lines, a header and then one trial a line; the log is the search's state.

A line is on disk before the next trial starts, or it is not there at all. The last line may be torn
by a crash: it is recognised and dropped. Anything else that is not as written is refused with its
line number. The format: docs/log-format.md.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from hago.errors import LogError, shortened
from hago.json_text import (
    canonical,
    check_schema,
    check_version,
    is_file,
    parse_json,
    read_file,
    replace_file,
    sync_folder,
)
from hago.search.header import VERSION, Header
from hago.search.trial import Trial

Notice = Callable[[str], None]

#: How a header begins, which tells a torn one from a file that is none of ours.
_HEADER_START: Final = b'{"data_hash": '


def log_notice(text: str) -> None:
    """The default way to tell the user something: a warning of the logger "hago"."""
    logging.getLogger("hago").warning(text)


@dataclass(frozen=True, slots=True)
class Log:
    """What a log file says.

    Args:
        header: None where the file is empty or its header is torn.
        trials: in order.
        good: how many bytes from the start are whole lines.
        torn: how many bytes after them are not.
    """

    header: Header | None
    trials: tuple[Trial, ...]
    good: int
    torn: int


def read_log(path: str | Path, notice: Notice = log_notice) -> Log:
    """Read a log without changing it.

    Raises:
        LogError: unreadable, or a line that is not as hago wrote it, by number.
    """
    try:
        content = read_file(path)
    except (OSError, ValueError) as error:
        raise LogError(f"cannot read log {path}: {error}") from None
    found = parse_log(content, str(path))
    if found.torn:
        notice(f"{path}: the last line is torn ({found.torn} bytes); left out")
    return found


def read_header(path: str | Path) -> Header | None:
    """The header of a log; None where no file stands there, or none with a whole header.

    Raises:
        LogError: unreadable, or a header that is not as hago wrote it.
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
    """The log that `content` is.

    Raises:
        LogError: a line, other than a torn last one, that is not as hago wrote it.
    """
    *whole, rest = content.split(b"\n")
    torn = len(rest)
    if not rest and whole and not _is_json(whole[-1]):
        torn = len(whole.pop()) + 1
    if not whole:
        start = content[: len(_HEADER_START)]
        if not _HEADER_START.startswith(start):
            raise LogError(f"{where} is not a search log of hago: it starts with {start!r}")
        return Log(None, (), 0, torn)
    records = [_parse_line(line, f"{where}, line {n}") for n, line in enumerate(whole, start=1)]
    header = Header.from_json(records[0], f"{where}, line 1")
    trials: list[Trial] = []
    for number, record in enumerate(records[1:], start=2):
        trials.append(_parse_trial(record, header, trials, f"{where}, line {number}"))
    return Log(header, tuple(trials), len(content) - torn, torn)


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
    check_version(record, VERSION, where)
    return record


def _parse_trial(record: Any, header: Header, earlier: Sequence[Trial], where: str) -> Trial:
    check_schema(record, "trial", where)
    trial = Trial.from_json(record)
    if trial.index != len(earlier):
        raise LogError(f"{where}: at $.index: got {trial.index}, expected {len(earlier)}")
    model_hash = record["strategy"]["model_hash"]
    if model_hash != header.model_hash:
        raise LogError(
            f"{where}: at $.strategy.model_hash: got {model_hash!r}, expected the header's {header.model_hash!r}"
        )
    measured = trial.results.get(header.objective, 0.0) if isinstance(header.objective, str) else 0.0
    if not _is_figure(measured):
        raise LogError(f"{where}: at $.results.{header.objective}: got {shortened(measured)}, expected a number")
    if earlier and trial.bits.keys() != earlier[0].bits.keys():
        odd = min(trial.bits.keys() ^ earlier[0].bits.keys())
        raise LogError(f"{where}: at $.strategy.bits: {odd!r} is not in every trial")
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
    """What stands at a path; None where nothing does."""
    try:
        return path.stat()
    except FileNotFoundError:
        return None


class LogFile:
    """A log that is open for appending; a context manager. One process at a time may hold it."""

    def __init__(self, path: str | Path) -> None:
        """Open or create the file, changing nothing in it.

        Raises:
            LogError: it cannot be opened, or another search is writing it.
        """
        self.path = Path(path)
        try:
            if self.path.exists() and not self.path.is_file():
                raise LogError(f"cannot open log {path}: it is no regular file; give a path of its own")
            is_new = not self.path.exists()
            # Windows alone has O_BINARY, and would translate line ends without it.
            self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | getattr(os, "O_BINARY", 0), 0o666)
        except (OSError, ValueError) as error:
            raise LogError(f"cannot open log {path}: {error}") from None
        try:
            self._lock()
            if is_new:
                sync_folder(self.path.parent)
            self._good = 0
        except BaseException:
            os.close(self._fd)
            raise

    def _lock(self) -> None:
        try:
            import fcntl
        except ImportError:
            return  # not a POSIX system: two searches on one log are then not noticed
        try:
            # Not flock: worker processes would inherit it, and one that outlives a killed search
            # would keep the next one out.
            fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            # Other errors come from file systems that cannot lock; a search may still run there.
            if error.errno in (errno.EAGAIN, errno.EACCES):
                raise LogError(f"another search is writing {self.path}; give this one its own log") from None

    def __enter__(self) -> LogFile:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)

    def start(self, header: Header, at: str, resume: bool, notice: Notice) -> tuple[Trial, ...]:
        """Make the file ready for the next trial: check or write its header, drop a torn line.

        Args:
            header: of this search.
            at: the time to write into a new header.
            resume: whether a file that holds something may be continued.

        Returns:
            The trials that it holds.

        Raises:
            LogError: the file holds something and `resume` is false, it is not as hago wrote it, or
                it was searched otherwise.
            StrategyMismatch: it is of another model, hardware, data or space.
        """
        content = self._read()
        if content and not resume:
            raise LogError(f"log {self.path} exists; resume it, or give another path")
        found = parse_log(content, str(self.path))
        if found.header is not None:
            header.check_same(found.header, str(self.path))
            for text in header.notices(found.header, str(self.path)):
                notice(text)
        if found.torn:
            notice(f"{self.path}: the last line is torn ({found.torn} bytes); dropped")
        self._good = found.good
        self._truncate()
        if found.header is None:
            record = header.to_json(at)
            check_schema(record, "log_header", "log header")
            self._append(record)
        return found.trials

    def append(self, trial: Trial, model_hash: str) -> None:
        """Add one line; it is on disk, under the log's name, when this returns.

        Raises:
            LogError: it could not be written whole, and the file ends with the line before it; or somebody else
                removed, replaced or changed the file.
        """
        self._check_length()
        self._append(trial.to_json(model_hash))
        self._check_place()

    def check(self) -> None:
        """Refuse to go on with a log that others changed while it was open. One that was removed is written again.

        Raises:
            LogError: the file was removed, renamed, replaced, or is not as long as what was written.
        """
        self._check_length()
        self._check_place()

    def _check_length(self) -> None:
        try:
            size = os.fstat(self._fd).st_size
        except OSError as error:
            raise LogError(f"cannot read log {self.path}: {error}") from None
        if size != self._good:
            raise LogError(
                f"log {self.path} was changed while it was written: it has {size} bytes, expected {self._good}; give "
                "another path for the log, and leave it alone until the search ends"
            )

    def _check_place(self) -> None:
        try:
            mine, there = os.fstat(self._fd), _stat(self.path)
        except OSError as error:
            raise LogError(f"cannot read log {self.path}: {error}") from None
        if there is None and mine.st_nlink == 0:
            replace_file(self.path, self._read())
            raise LogError(
                f"log {self.path} was removed while it was written; all that it held stands there again: search on "
                "with it, and leave it alone until the search ends"
            )
        if there is None:
            raise LogError(
                f"log {self.path} was renamed while it was written; give it its name back to search on with it, and "
                "leave it alone until the search ends"
            )
        if not os.path.samestat(mine, there):
            raise LogError(
                f"log {self.path} was replaced by another file while it was written; what was searched is not in that "
                "one: give another path for the log, and leave it alone until the search ends"
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
                os.lseek(self._fd, self._good, os.SEEK_SET)
                written = 0
                while written < len(line):
                    written += os.write(self._fd, line[written:])
                os.fsync(self._fd)
        except OSError as error:
            raise LogError(
                f"cannot write log {self.path}: {error}; it holds every trial before this one, so make room and resume"
            ) from None
        self._good += len(line)

    def _truncate(self) -> None:
        try:
            os.ftruncate(self._fd, self._good)
        except OSError as error:
            raise LogError(f"cannot drop the torn line of log {self.path}: {error}") from None

    @contextlib.contextmanager
    def _whole_or_nothing(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            # Where this fails too, the next reader finds a torn line and drops it.
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, self._good)
            raise
