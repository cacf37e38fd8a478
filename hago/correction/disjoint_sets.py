"""Sets of numbers that were found to be equal, each named by the least (a union-find with path halving)."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class DisjointSets:
    """Numbers from 0 on, each in a set of its own until sets are joined."""

    _above: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self._above)

    def add(self, count: int = 1) -> int:
        """Add numbers; the first of them."""
        first = len(self._above)
        self._above += range(first, first + count)
        return first

    def least(self, number: int) -> int:
        """The least number of the set of a number."""
        while (above := self._above[number]) != number:
            self._above[number] = number = self._above[above]
        return number

    def join(self, first: int, second: int) -> int:
        """Make the sets of two numbers one; its least number."""
        low, high = sorted((self.least(first), self.least(second)))
        self._above[high] = low
        return low
