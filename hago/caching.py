"""Memory: `LRU`, the one kind of cache that hago keeps, and how many bytes this process may still take."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Final, Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class LRU(Generic[K, V]):
    """The most recently used values whose sizes sum to at most `capacity`.

    Args:
        capacity: in the unit that `size` measures; entries where it is not given.
        size: of one value.
    """

    def __init__(self, capacity: int, size: Callable[[V], int] = lambda value: 1) -> None:
        self.capacity, self._size = capacity, size
        self.used = 0
        self._values: OrderedDict[K, V] = OrderedDict()

    def get(self, key: K) -> V | None:
        """The value, now the most recent, or None."""
        if key not in self._values:
            return None
        self._values.move_to_end(key)
        return self._values[key]

    def put(self, key: K, value: V) -> None:
        """Keep a value; the least recent ones go while the sum is over the bound."""
        if key in self._values:
            self.used -= self._size(self._values.pop(key))
        self._values[key] = value
        self.used += self._size(value)
        while self.used > self.capacity and len(self._values) > 1:
            _, dropped = self._values.popitem(last=False)
            self.used -= self._size(dropped)

    def get_or_make(self, key: K, make: Callable[[], V]) -> V:
        """The value of a key; made by `make()` and kept where there is none yet. Values are not None."""
        found = self.get(key)
        if found is None:
            found = make()
            self.put(key, found)
        return found

    def __len__(self) -> int:
        return len(self._values)


# ---------------------------------------------------------------- free memory

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
