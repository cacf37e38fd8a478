"""Caching: `LRU`, the cache that all packages use; and `free_bytes`, which bounds the cache of simulated values."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Final, Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class LRU(Generic[K, V]):
    """A cache that evicts the least recently used values when the sum of their sizes exceeds `capacity`.

    The latest value is always kept, even if it alone is larger than `capacity`.

    Args:
        capacity: the largest sum of sizes.
        size: gives the size of one value; by default every value counts as 1.
    """

    def __init__(self, capacity: int, size: Callable[[V], int] = lambda value: 1) -> None:
        self.capacity, self._size = capacity, size
        self.used = 0
        self._values: OrderedDict[K, V] = OrderedDict()

    def get(self, key: K) -> V | None:
        """The value of a key, which becomes the most recently used one; None if it is not in the cache."""
        if key not in self._values:
            return None
        self._values.move_to_end(key)
        return self._values[key]

    def put(self, key: K, value: V) -> None:
        """Store a value, and evict the least recently used ones while the sum of sizes exceeds the capacity."""
        if key in self._values:
            self.used -= self._size(self._values.pop(key))
        self._values[key] = value
        self.used += self._size(value)
        while self.used > self.capacity and len(self._values) > 1:
            _, dropped = self._values.popitem(last=False)
            self.used -= self._size(dropped)

    def get_or_make(self, key: K, make: Callable[[], V]) -> V:
        """The value of a key. If it is not in the cache, `make()` makes it and it is stored. Values are not None."""
        value = self.get(key)
        if value is None:
            value = make()
            self.put(key, value)
        return value

    def __len__(self) -> int:
        return len(self._values)


# ---------------------------------------------------------------- free memory

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
