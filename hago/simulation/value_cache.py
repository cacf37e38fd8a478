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

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from hago.caching import LRU, SHARE, free_bytes
from hago.graph.schedule import Name, Step, run_steps

#: (signature, number of the batch).
Key = tuple[bytes, int]

#: How many signatures are remembered as made before.
MET: Final = 1 << 18

_SMALL: Final = (torch.int8, torch.uint8, torch.int16, torch.int32)


@dataclass(frozen=True, slots=True)
class PackedValue:
    """A value at rest."""

    tensor: Tensor
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return self.tensor.numel() * self.tensor.element_size()

    def value(self) -> Tensor:
        """The value as it was."""
        return self.tensor.to(self.dtype)


def pack_value(value: Tensor, span: tuple[int, int] | None) -> PackedValue:
    """A value in the smallest type that holds every integer of `span`; real values as they are.

    A view of something larger becomes a copy, so that the larger thing is not kept alive.
    """
    if span is not None:
        for dtype in _SMALL:
            limits = torch.iinfo(dtype)
            if limits.min <= span[0] and span[1] <= limits.max:
                if dtype.itemsize < value.element_size():
                    return PackedValue(value.to(dtype), value.dtype)
                break
    whole = value.untyped_storage().nbytes() <= value.numel() * value.element_size()
    return PackedValue(value if whole else value.clone(), value.dtype)


@dataclass(frozen=True, slots=True)
class StepSignature:
    """A step by the signatures of the values that it makes and of those that it reads."""

    makes: tuple[bytes, ...]
    reads: tuple[bytes, ...]


@dataclass(slots=True)
class _Entry:
    packed: PackedValue
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

    def begin(self, calls: Sequence[StepSignature]) -> None:
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

    def touch(self, key: Key) -> PackedValue | None:
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
        packed = pack_value(value, span)
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


# ---------------------------------------------------------------- reuse
# Reuse: runs only those steps of a pass that no earlier pass has run on the same batch.
# A value's signature is a digest of its step and of the signatures of its inputs, so a change on one edge gives new
# signatures to what it can reach and to nothing else. Values come back bit for bit.

S = TypeVar("S")

#: Gives the values that a pass starts from.
Start = Callable[[], Mapping[Name, Any]]

#: How many observations of watched steps are remembered; without its observation a step runs again.
OBSERVATIONS: Final = 1 << 20
_BYTES: Final = 16


class Watches(Protocol[S]):
    """What watched steps report to."""

    @property
    def latest(self) -> S:
        """What the last watched step showed."""
        ...

    def add(self, name: Name, seen: S) -> None:
        """Take note of what a step would have shown."""
        ...


@dataclass(slots=True)
class StepsRun:
    """Steps of all passes so far: those that ran, and those there were; and what ran, in passes over all batches."""

    ran: int = 0
    steps: int = 0
    passes: float = 0.0

    @property
    def share(self) -> float:
        """Of all steps, how many did not run."""
        return 1.0 - self.ran / self.steps if self.steps else 0.0

    def add(self, ran: int, steps: int, batches: int) -> None:
        """Count one batch of so many."""
        self.ran += ran
        self.steps += steps
        self.passes += ran / max(1, steps * batches)


@dataclass(frozen=True, slots=True)
class _Needed:
    """What one batch asks for: steps to run, values that are there, and observations that are."""

    steps: tuple[Step, ...]
    given: Mapping[Name, PackedValue]
    seen: tuple[tuple[Name, Any], ...]


class Reuse(Generic[S]):
    """Runs passes over the same batches again and again.

    Args:
        cache: of the values.
    """

    def __init__(self, cache: ValueCache) -> None:
        self.cache = cache
        self.spent = StepsRun()
        self._seen: LRU[Key, S] = LRU(OBSERVATIONS)
        self._latest: frozenset[bytes] = frozenset()

    def prefer_latest(self) -> None:
        """Hold on to the values of the latest pass rather than to others."""
        self.cache.prefer(self._latest)

    def run(
        self,
        steps: Sequence[Step],
        ends: Sequence[Name],
        batches: Sequence[int],
        starts: Iterable[Start],
        watch: Watches[S],
    ) -> Iterator[dict[Name, Any]]:
        """The values at `ends`, batch by batch.

        Args:
            batches: the number of each batch.
            starts: of each, what gives the values that its pass starts from; called where needed.
            watch: hears of every watched step, whether or not it runs.
        """
        signed = signatures(steps)
        self._latest = frozenset(signed.values())
        self.cache.begin([_call(step, signed) for step in steps])
        # All batches say what they will use before any makes new values, which could push it out.
        needed = [self._needed(steps, ends, signed, number) for number in batches]
        for number, need, start in zip(batches, needed, starts, strict=True):
            for name, seen in need.seen:
                watch.add(name, seen)
            self.spent.add(len(need.steps), len(steps), len(batches))
            yield self._one(need, ends, signed, number, start, watch)

    def _needed(
        self, steps: Sequence[Step], ends: Sequence[Name], signed: Mapping[Name, bytes], number: int
    ) -> _Needed:
        wanted = set(ends)
        run: list[Step] = []
        given: dict[Name, PackedValue] = {}
        seen: list[tuple[Name, S]] = []
        for step in reversed(steps):
            observed = self._seen.get((signed[step.name], number)) if step.watched else None
            asked = [name for name in step.outputs if name in wanted]
            found = {name: self.cache.touch((signed[name], number)) for name in asked}
            if (step.watched and observed is None) or any(packed is None for packed in found.values()):
                run.append(step)
                wanted.update(step.inputs)
                continue
            given.update({name: packed for name, packed in found.items() if packed is not None})
            if observed is not None:
                seen.append((step.name, observed))
        return _Needed(tuple(reversed(run)), given, tuple(reversed(seen)))

    def _one(
        self,
        need: _Needed,
        ends: Sequence[Name],
        signed: Mapping[Name, bytes],
        number: int,
        start: Start,
        watch: Watches[S],
    ) -> dict[Name, Any]:
        def keep(step: Step, made: Sequence[Any]) -> None:
            if step.watched:
                self._seen.put((signed[step.name], number), watch.latest)
            for name, value, span in zip(step.outputs, made, step.spans, strict=True):
                self.cache.put((signed[name], number), value, span)

        values = _Values(need.given, start)
        with torch.no_grad():
            run_steps(need.steps, values, ends, on_step=keep)
        return {name: values[name] for name in ends}


class _Values(dict[Name, Any]):
    """The values of a pass; those at rest, and those that it starts from, come when they are read."""

    def __init__(self, given: Mapping[Name, PackedValue], start: Start) -> None:
        super().__init__()
        self._given, self._start = given, start
        self._begun: Mapping[Name, Any] | None = None

    def __missing__(self, name: Name) -> Any:
        if name in self._given:
            self[name] = self._given[name].value()
        else:
            self._begun = self._start() if self._begun is None else self._begun
            self[name] = self._begun[name]
        return self[name]


def _call(step: Step, signed: Mapping[Name, bytes]) -> StepSignature:
    return StepSignature(tuple(signed[n] for n in step.outputs), tuple(signed[n] for n in step.inputs if n in signed))


def signatures(steps: Sequence[Step]) -> dict[Name, bytes]:
    """Of every value that a step makes, what it was made of, all the way back."""
    found: dict[Name, bytes] = {}
    for step in steps:
        digest = hashlib.blake2b(step.digest, digest_size=_BYTES)
        for name in step.inputs:
            # A value that no step makes is the same in every pass over a batch: its name will do.
            part = found.get(name) or b"=" + name.encode()
            digest.update(len(part).to_bytes(4, "little") + part)
        whole = digest.digest()
        for place, name in enumerate(step.outputs):
            found[name] = whole + place.to_bytes(2, "little")
    return found
