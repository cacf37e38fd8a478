"""Quiet: keeps compiled code off standard output.

HiGHS as scipy ships it writes a debugging line on some integer programs, whatever its log options say,
and standard output may be a result that another program reads.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def quiet_stdout() -> Iterator[None]:
    """While this lasts, what is written to the process's standard output is dropped; Python's own is
    flushed before. Where the process has no standard output, nothing happens."""
    try:
        kept = os.dup(1)
    except OSError:
        yield
        return
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
    _flush()
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 1)
        yield
    finally:
        _flush()
        os.dup2(kept, 1)
        os.close(nowhere)
        os.close(kept)


def _flush() -> None:
    """What C has buffered goes where it belongs."""
    with contextlib.suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).fflush(None)
