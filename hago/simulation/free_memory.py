"""The memory that is free for caches: `free_bytes`, by which a `ValueCache` bounds its size before every trial."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

#: The fraction of the free memory that a cache takes by default.
SHARE: Final = 0.25

_MEMINFO: Final = Path("/proc/meminfo")
#: The files of the memory limit and the memory in use of the process's control group, for cgroup versions 2 and 1.
_GROUPS: Final = (
    (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")),
    (
        Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
        Path("/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ),
)


def free_bytes() -> int:
    """The bytes that this process can still allocate without swapping.

    On Linux, this is the memory that the kernel reports as available, or what the control group leaves if that is
    less. Elsewhere it is the size of the free pages, or one gibibyte if the system does not report them.
    """
    return max(0, min([_machine(), *(_group(limit, use) for limit, use in _GROUPS)]))


def _machine() -> int:
    """The free bytes of the machine."""
    try:
        for line in _MEMINFO.read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    except (OSError, ValueError, IndexError):
        pass
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return 1 << 30


def _group(limit: Path, use: Path) -> int:
    """The free bytes of a control group, from its files; without limit if there is no such group."""
    try:
        return int(limit.read_text(encoding="ascii")) - int(use.read_text(encoding="ascii"))
    except (OSError, ValueError):  # no such group, or "max": no limit
        return 1 << 62
