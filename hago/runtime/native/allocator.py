"""A setting of the C library's allocator that makes passes over large tensors faster.

glibc returns large buffers to the system as soon as they are freed, so every pass pays for fresh pages. With this
setting, the next pass reuses them. It applies to the whole process, whose memory then stays at its peak, so the owner
of the process decides: the command `hago` sets it for itself, and functions of hago never do.
"""

from __future__ import annotations

import ctypes
from typing import Final

#: Of mallopt(3): how many buffers may be mapped from the system, and how much may lie free at the top.
_M_MMAP_MAX: Final = -4
_M_TRIM_THRESHOLD: Final = -1


def keep_freed_memory() -> bool:
    """Let this process keep memory that it frees.

    Returns:
        Whether the C library has the setting; glibc does.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):
        return False
    mallopt.argtypes, mallopt.restype = (ctypes.c_int, ctypes.c_int), ctypes.c_int
    return bool(mallopt(_M_MMAP_MAX, 0)) and bool(mallopt(_M_TRIM_THRESHOLD, 2**31 - 1))
