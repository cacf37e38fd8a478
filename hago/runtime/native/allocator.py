"""A setting of the C library's allocator that makes passes over large tensors faster.

glibc returns large buffers to the system as soon as they are freed, so every pass pays for fresh pages. With this
setting, the next pass reuses them. It applies to the whole process, whose memory then stays at its peak, so the owner
of the process decides: the command `hago` and worker processes set it for themselves, unless the user sets the
allocator, and functions of hago never do.
"""

from __future__ import annotations

import ctypes
import os
from typing import Final

#: Of mallopt(3): how many buffers may be mapped from the system, and how much may lie free at the top.
_M_MMAP_MAX: Final = -4
_M_TRIM_THRESHOLD: Final = -1
#: Variables by which users set glibc's allocator themselves.
VARIABLES: Final = ("MALLOC_MMAP_MAX_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES")


def keep_freed_memory(*, unless_set: bool = False) -> bool:
    """Let this process keep memory that it frees.

    Args:
        unless_set: change nothing where the process has one of VARIABLES.

    Returns:
        Whether it does. C libraries other than glibc have no such setting.
    """
    if unless_set and any(name in os.environ for name in VARIABLES):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):
        return False
    mallopt.argtypes, mallopt.restype = (ctypes.c_int, ctypes.c_int), ctypes.c_int
    return bool(mallopt(_M_MMAP_MAX, 0)) and bool(mallopt(_M_TRIM_THRESHOLD, 2**31 - 1))
