"""LRU: a memory with a bound, the one kind of cache hago keeps."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

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

    def made(self, key: K, make: Callable[[], V]) -> V:
        """The value, by `make()` and kept where there is none yet; values are not None."""
        found = self.get(key)
        if found is None:
            found = make()
            self.put(key, found)
        return found

    def __len__(self) -> int:
        return len(self._values)
