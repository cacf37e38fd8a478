"""Explain why torch.export refused a model, and keep what torch prints about it off standard error.

A model whose control flow depends on values is told by the line of the user's code that reads the value.
"""

from __future__ import annotations

import io
import linecache
import logging
import os
import re
import sys
import sysconfig
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import Final

import torch

from hago.errors import shortened_to

#: What torch says where it must know a value that depends on the data.
_OF_DATA: Final = re.compile(r"data-dependent|dynamic control flow|Dynamic value|_local_scalar_dense", re.I)
#: Folders whose lines are none of the user's: torch and the import itself.
_OTHERS: Final = tuple(f"{folder}{os.sep}" for folder in (Path(torch.__file__).parent, Path(__file__).parent.parent))
_STANDARD_LIBRARY: Final = sysconfig.get_paths()["stdlib"] + os.sep
LONGEST_LINE: Final = 100


def first_line(error: Exception) -> str:
    """What a long message of torch says first."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:300] if lines else type(error).__name__


def why_not_exported(error: Exception) -> str:
    """What torch.export said, and what helps."""
    unknown = re.search(r"Found <class '([\w.]+)'> in output", str(error))
    if unknown is not None:
        return (
            f"it returns a {unknown[1].rpartition('.')[2]}. Let it return tensors alone (a model of transformers does "
            "with use_cache=False in its config or its arguments), or pass a module that calls it and returns the "
            "tensors, e.g. `return self.model(x).logits`"
        )
    line = _users_line(error)
    if line is not None and (_OF_DATA.search(str(error)) or "DataDependent" in type(error).__name__):
        return (
            f"{line} depends on the values of the data. Choose between values with torch.where(condition, a, b), which "
            "computes both; hago does not import the branches of torch.cond"
        )
    at = "" if line is None else f", at {line}"
    return (
        f"{first_line(error).rstrip('.')}{at}. See that torch.export.export(model, example_inputs) works, or pass an "
        "ExportedProgram"
    )


def _users_line(error: Exception) -> str | None:
    """The innermost line of the user's code that an exception came through: file, number and text."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if _is_users(f.filename)]
    if not frames:
        return None
    file, number = frames[-1].filename, frames[-1].lineno or 0
    return f"{Path(file).name}:{number} `{shortened_to(linecache.getline(file, number).strip(), LONGEST_LINE)}`"


def _is_users(file: str) -> bool:
    in_library = file.startswith(_STANDARD_LIBRARY) and "site-packages" not in file
    return not (in_library or file.startswith(("<", *_OTHERS)))


@contextmanager
def quiet_on_failure() -> Iterator[None]:
    """Hold back what torch logs and what is written to standard error, and drop it if the work inside fails."""
    held: list[tuple[logging.Handler, logging.LogRecord]] = []
    own_thread = threading.get_ident()
    filters: list[tuple[logging.Handler, logging.Filter]] = []
    for handler in _handlers_of_torch():

        class Hold(logging.Filter):
            def filter(self, record: logging.LogRecord, handler: logging.Handler = handler) -> bool:
                if record.thread != own_thread:
                    return True
                held.append((handler, record))
                return False

        filters.append((handler, Hold()))
        handler.addFilter(filters[-1][1])
    written = io.StringIO()
    try:
        with redirect_stderr(written):
            yield
    finally:
        for handler, added in filters:
            handler.removeFilter(added)
    for handler, record in held:
        handler.handle(record)
    if written.getvalue():
        sys.stderr.write(written.getvalue())


def _handlers_of_torch() -> list[logging.Handler]:
    loggers = [
        logging.getLogger(name) for name in list(logging.root.manager.loggerDict) if name.split(".")[0] == "torch"
    ]
    return list({id(h): h for logger in loggers for h in logger.handlers}.values())
