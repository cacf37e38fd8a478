"""Caching: `LRU`, the cache that all packages use."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

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
