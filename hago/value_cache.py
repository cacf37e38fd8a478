"""ValueCache: values of earlier passes, by what they were made of, within a bound of memory.

A key is a value's signature (a digest of the step that made it and of the signatures of what it was
made from) and the number of its batch. Integers are kept in the smallest type that holds them.

What comes in: a value that is made for the second time and read by what is made for the first, where
two passes part, so that a third which parts there again has it at hand; and all that the best point so
far has. Most of what a trial makes is never asked for again, and to keep it costs more than the
arithmetic did, fresh memory for every tensor: with all that is made twice kept, seven eighths of the
bytes of Pareto search on ResNet-20 were never read, and took 40 % of its time.

What goes first, where memory is short: the least recently used. What this turn has used or made is
never given up for another new value: a sweep over more values than fit would otherwise push each
out just before it is needed again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from hago.lru import LRU
from hago.memory import SHARE, free_bytes

#: (signature, number of the batch).
Key = tuple[bytes, int]

#: How many signatures are remembered as made before.
MET: Final = 1 << 18

_SMALL: Final = (torch.int8, torch.uint8, torch.int16, torch.int32)


@dataclass(frozen=True, slots=True)
class Packed:
    """A value at rest."""

    tensor: Tensor
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return self.tensor.numel() * self.tensor.element_size()

    def value(self) -> Tensor:
        """The value as it was."""
        return self.tensor.to(self.dtype)


def pack(value: Tensor, span: tuple[int, int] | None) -> Packed:
    """A value in the smallest type that holds every integer of `span`; real values as they are.

    A view of something larger becomes a copy, so that the larger thing is not kept alive.
    """
    if span is not None:
        for dtype in _SMALL:
            limits = torch.iinfo(dtype)
            if limits.min <= span[0] and span[1] <= limits.max:
                if dtype.itemsize < value.element_size():
                    return Packed(value.to(dtype), value.dtype)
                break
    whole = value.untyped_storage().nbytes() <= value.numel() * value.element_size()
    return Packed(value if whole else value.clone(), value.dtype)


@dataclass(frozen=True, slots=True)
class Call:
    """A step by the signatures of the values that it makes and of those that it reads."""

    makes: tuple[bytes, ...]
    reads: tuple[bytes, ...]


@dataclass(slots=True)
class _Entry:
    packed: Packed
    turn: int


class ValueCache:
    """Values by key. A turn is one evaluation: it first says what it computes, touches what it will use, then puts
    what it made.

    Args:
        capacity: in bytes; None for a quarter of the free memory, counted again every turn, so that
            the cache shrinks where others need memory and never makes the machine swap.
        free: how many bytes are free.
    """

    def __init__(self, capacity: int | None = None, free: Callable[[], int] = free_bytes) -> None:
        self._fixed, self._free = capacity, free
        self._entries: OrderedDict[Key, _Entry] = OrderedDict()
        self._met: LRU[bytes, bool] = LRU(MET)
        self._preferred: frozenset[bytes] = frozenset()
        self._welcome: frozenset[bytes] = frozenset()
        self._turn = 0
        self.used = 0
        self.capacity = 0
        self._measure()

    def __len__(self) -> int:
        return len(self._entries)

    def begin(self, calls: Sequence[Call]) -> None:
        """Start a turn, in which these steps make or use values."""
        self._turn += 1
        self._measure()
        while self.used > self.capacity and self._entries:
            self._drop()
        new = [c for c in calls if not all(map(self._met.get, c.makes))]
        edge = {s for call in new for s in call.reads if self._met.get(s)}
        self._welcome = self._preferred | edge
        for call in calls:
            for signature in call.makes:
                self._met.put(signature, True)

    def prefer(self, signatures: frozenset[bytes]) -> None:
        """These values, of the best point, are kept the next time that they are made."""
        self._preferred = signatures

    def touch(self, key: Key) -> Packed | None:
        """The value, which stays until the turn ends, or None."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        entry.turn = self._turn
        self._entries.move_to_end(key)
        return entry.packed

    def put(self, key: Key, value: Any, span: tuple[int, int] | None = None) -> None:
        """Keep a value, where it is a tensor, worth it, and there is room.

        Args:
            span: the least and greatest integer that it holds; None for real values.
        """
        if key[0] not in self._welcome or key in self._entries or not isinstance(value, Tensor):
            return
        packed = pack(value, span)
        while self.used + packed.bytes > self.capacity:
            if not self._entries or next(iter(self._entries.values())).turn == self._turn:
                return
            self._drop()
        self._entries[key] = _Entry(packed, self._turn)
        self.used += packed.bytes

    def _measure(self) -> None:
        self.capacity = int(SHARE * (self._free() + self.used)) if self._fixed is None else self._fixed

    def _drop(self) -> None:
        _, entry = self._entries.popitem(last=False)
        self.used -= entry.packed.bytes
