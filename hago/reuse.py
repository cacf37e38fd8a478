"""Reuse: runs only those steps of a pass that no earlier pass has run on the same batch.

A value's signature is a digest of its step and of the signatures of its inputs, so a change on one
edge gives new signatures to what it can reach and to nothing else. Values come back bit for bit.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Generic, Protocol, TypeVar

import torch

from hago.lru import LRU
from hago.steps import Name, Step, run_steps
from hago.value_cache import Call, Key, Packed, ValueCache

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
class Spent:
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
    given: Mapping[Name, Packed]
    seen: tuple[tuple[Name, Any], ...]


class Reuse(Generic[S]):
    """Runs passes over the same batches again and again.

    Args:
        cache: of the values.
    """

    def __init__(self, cache: ValueCache) -> None:
        self.cache = cache
        self.spent = Spent()
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
        given: dict[Name, Packed] = {}
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

    def __init__(self, given: Mapping[Name, Packed], start: Start) -> None:
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


def _call(step: Step, signed: Mapping[Name, bytes]) -> Call:
    return Call(tuple(signed[n] for n in step.outputs), tuple(signed[n] for n in step.inputs if n in signed))


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
