"""Memory: how many bytes this process may still take without swapping."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

#: Of the free memory, what a cache takes by default.
SHARE: Final = 0.25

_MEMINFO: Final = Path("/proc/meminfo")
#: (limit, use) of the process's control group, in its second and first version.
_GROUPS: Final = (
    (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")),
    (
        Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
        Path("/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ),
)


def free_bytes() -> int:
    """What the machine, and the control group where there is one, can give without swapping.

    Linux says what is available; elsewhere it is the free pages, and a gigabyte where even those are
    not told.
    """
    return max(0, min([_machine(), *(_group(limit, use) for limit, use in _GROUPS)]))


def _machine() -> int:
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
    try:
        return int(limit.read_text(encoding="ascii")) - int(use.read_text(encoding="ascii"))
    except (OSError, ValueError):  # no such group, or "max": no limit
        return 1 << 62
