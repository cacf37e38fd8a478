"""The page of a search while it runs: made of the trials so far, and written again now and then."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Final

from hago.errors import HagoError, warn
from hago.hardware import Hardware
from hago.report.document import Report
from hago.report.gather import CommandsOf, ReportOptions, report_of_log
from hago.report.page import page_template, save_page
from hago.report.records import Records
from hago.search import RunningSearch
from hago.study import Header, Log, Trial, read_header

#: The most part of a search's time that its page may take, and the least seconds between two writes.
SHARE: Final = 0.02
SECONDS: Final = 2.0


class LiveReport:
    """Keeps the page of a search current: a callback for searches, and a context manager. `hago search --report` makes
    one.

    The page is of what the log holds, and of nothing else, so that it costs little: no network is drawn and nothing is
    measured. It is replaced atomically. A page that cannot be written is no reason to end a search: a warning says so
    once, and it is tried again when it is time.

    Args:
        path: of the page.
        log: the path of the log, whose header is read after the first trial.
        clock: seconds.

    Raises:
        HagoError: jinja2 is not installed.
    """

    def __init__(
        self,
        path: Path,
        log: Path,
        hardware: Hardware,
        options: ReportOptions,
        commands: CommandsOf,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._path, self._log, self._hardware, self._options = path, log, hardware, options
        self._commands, self._clock = commands, clock
        self._header: Header | None = None
        self._search: RunningSearch | None = None
        self._next = -math.inf
        self._has_warned = False
        self._template = page_template()  # which says before the search that a package is missing

    def __call__(self, search: RunningSearch, trial: Trial) -> None:
        """Write the page if it is time."""
        self._search = search
        if self._clock() >= self._next:
            self._write(search, running=True)

    def close(self) -> None:
        """Write the page once more, as that of a search that has ended."""
        if self._search is not None:
            self._write(self._search, running=False)

    def __enter__(self) -> LiveReport:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.close()

    def _write(self, search: RunningSearch, *, running: bool) -> None:
        begun = self._clock()
        try:
            if self._header is None:
                self._header = read_header(self._log)
            save_page(self._report(search, running=running), self._path, self._template)
        except HagoError as error:
            if not self._has_warned:
                self._has_warned = True
                warn(f"the page of the search is missing or out of date, and the search goes on: {error}")
        ended = self._clock()
        self._next = ended + max(SECONDS, (ended - begun) / SHARE)

    def _report(self, search: RunningSearch, *, running: bool) -> Report:
        log = None if self._header is None else Log(self._header, search.trials, 0, 0)
        records = Records(log=log, log_path=str(self._log))
        return report_of_log(records, self._hardware, self._options, self._commands, running=running)
