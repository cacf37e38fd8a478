"""Reuse of values between passes: a trial runs only the steps whose results no earlier trial has left in a cache.

A search evaluates many Plans that differ on a few edges. The digest of a value is made of the digest of its step and of
the digests of the step's inputs, so a change on one edge gives new digests to the values that it can reach and to no
others. `Reuse`, which the evaluator makes once per search and calls for every trial, keeps values in a `ValueCache`
under their digest and the number of their batch, and runs only the steps that are missing. Values come back bit for
bit; integers are kept in the smallest dtype that holds them.

Admission: a value is kept the second time that it is made, if a step that is new reads it: there two passes diverge,
and a third that diverges there finds it. The values of the best point so far are kept, too. Most values of a trial are
never asked for again, and keeping one costs more than its arithmetic did, since it takes fresh memory: when every value
that was made twice was kept, seven eighths of the bytes of Pareto search on ResNet-20 were never read, and took 40 % of
its time.

Eviction: least recently used first, but never a value that the current turn has used or made. A sweep over more values
than fit would otherwise evict each one just before it is needed again.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from hago.caching import LRU
from hago.graph import autocast_off
from hago.graph.schedule import Name, Step, make_schedule, run_schedule
from hago.simulation.free_memory import SHARE, free_bytes
from hago.simulation.overflow import AccumulatorWatch, SeenAccumulators

#: The digest of a value, and the number of its batch.
Key = tuple[bytes, int]
#: Gives the values that the steps of a batch start from.
Start = Callable[[], Mapping[Name, Any]]

#: How many digests are remembered as made before.
MET: Final = 1 << 18
#: How many observations of watched steps are remembered; a step without its observation runs again.
OBSERVATIONS: Final = 1 << 20
#: Bytes of a digest, without the index of the output.
_BYTES: Final = 16

_SMALL: Final = (torch.int8, torch.uint8, torch.int16, torch.int32)


@dataclass(frozen=True, slots=True)
class PackedValue:
    """A value as the cache keeps it.

    Args:
        tensor: the value in its smallest dtype.
        dtype: the dtype that it is used in.
    """

    tensor: Tensor
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return self.tensor.numel() * self.tensor.element_size()

    def value(self) -> Tensor:
        """The value in its own dtype."""
        return self.tensor.to(self.dtype)


def pack_value(value: Tensor, span: tuple[int, int] | None) -> PackedValue:
    """A value in the smallest dtype that holds every integer of `span`; a real value (None) in its own.

    A view of a larger tensor is copied, so that the larger one can be freed.
    """
    if span is not None:
        for dtype in _SMALL:
            limits = torch.iinfo(dtype)
            if limits.min <= span[0] and span[1] <= limits.max:
                if dtype.itemsize < value.element_size():
                    return PackedValue(value.to(dtype), value.dtype)
                break
    owns_storage = value.untyped_storage().nbytes() <= value.numel() * value.element_size()
    return PackedValue(value if owns_storage else value.clone(), value.dtype)


@dataclass(frozen=True, slots=True)
class StepDigests:
    """The digests of the values that a step makes and of those that it reads."""

    makes: tuple[bytes, ...]
    reads: tuple[bytes, ...]


@dataclass(slots=True)
class _Entry:
    packed: PackedValue
    turn: int


class ValueCache:
    """Values by key, within a bound of memory. A turn is one evaluation of a Plan: `begin` with its steps, `touch`
    every value that it will use, then `put` the values that it makes.

    Args:
        capacity: in bytes; None for a quarter of the free memory, measured at every turn, so that the cache shrinks
            when other processes need memory.
        free: returns how many bytes are free.
    """

    def __init__(self, capacity: int | None = None, free: Callable[[], int] = free_bytes) -> None:
        self._fixed, self._free = capacity, free
        self._entries: OrderedDict[Key, _Entry] = OrderedDict()
        self._met: LRU[bytes, bool] = LRU(MET)
        self._preferred: frozenset[bytes] = frozenset()
        self._admitted: frozenset[bytes] = frozenset()
        self._turn = 0
        self.used = 0
        self.capacity = 0
        self._measure()

    def __len__(self) -> int:
        return len(self._entries)

    def begin(self, steps: Sequence[StepDigests]) -> None:
        """Start a turn of these steps."""
        self._turn += 1
        self._measure()
        while self.used > self.capacity and self._entries:
            self._drop()
        new = [step for step in steps if not all(map(self._met.get, step.makes))]
        read_by_new = {s for step in new for s in step.reads if self._met.get(s)}
        self._admitted = self._preferred | read_by_new
        for step in steps:
            for digest in step.makes:
                self._met.put(digest, True)

    def prefer(self, digests: frozenset[bytes]) -> None:
        """Keep these values, those of the best point, the next time that they are made."""
        self._preferred = digests

    def touch(self, key: Key) -> PackedValue | None:
        """The value of a key, which is then kept until the turn ends; None where there is none."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        entry.turn = self._turn
        self._entries.move_to_end(key)
        return entry.packed

    def put(self, key: Key, value: Any, span: tuple[int, int] | None = None) -> None:
        """Keep a value, if it is a tensor that is admitted in this turn and there is room.

        Args:
            span: the least and greatest integer that it holds; None for real values.
        """
        if key[0] not in self._admitted or key in self._entries or not isinstance(value, Tensor):
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


# ---------------------------------------------------------------- running what is missing
@dataclass(slots=True)
class StepsRun:
    """Counts of steps over all passes so far.

    Args:
        ran: steps that ran.
        steps: steps that would have run without reuse.
        passes: the steps that ran, as a number of passes over all batches.
    """

    ran: int = 0
    steps: int = 0
    passes: float = 0.0

    @property
    def share(self) -> float:
        """The part of all steps that did not run."""
        return 1.0 - self.ran / self.steps if self.steps else 0.0

    def add(self, ran: int, steps: int, batches: int) -> None:
        """Count the steps of one of `batches` batches."""
        self.ran += ran
        self.steps += steps
        self.passes += ran / max(1, steps * batches)


@dataclass(frozen=True, slots=True)
class _Pass:
    """A pass of steps over all batches.

    Args:
        ends: names of the values that are wanted.
        digests: of all values that the steps make.
        batches: number of batches.
    """

    steps: Sequence[Step]
    ends: Sequence[Name]
    digests: Mapping[Name, bytes]
    batches: int


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """What is left to compute of one batch. `Reuse.plan` makes one per batch, and `Reuse.run` runs it.

    Args:
        whole: the pass that it is a part of.
        number: of the batch.
        steps: the steps to run.
        cached: values from the cache.
        observations: remembered observations of watched steps that do not run.
    """

    whole: _Pass
    number: int
    steps: tuple[Step, ...]
    cached: Mapping[Name, PackedValue]
    observations: tuple[tuple[Name, SeenAccumulators], ...]


class Reuse:
    """Runs passes over the same batches, reusing values of earlier passes. The evaluator makes one per search; for each
    trial it calls `plan`, and then `run` for one batch after another.

    Args:
        cache: keeps the values.
    """

    def __init__(self, cache: ValueCache) -> None:
        self.cache = cache
        self.spent = StepsRun()
        self._observations: LRU[Key, SeenAccumulators] = LRU(OBSERVATIONS)
        self._latest: frozenset[bytes] = frozenset()

    def prefer_latest(self) -> None:
        """Keep the values of the latest pass, which is that of the best point so far."""
        self.cache.prefer(self._latest)

    def plan(self, steps: Sequence[Step], ends: Sequence[Name], batches: int) -> list[BatchPlan]:
        """What is left to compute of each batch for the values at `ends`.

        Args:
            batches: number of batches.
        """
        digests = value_digests(steps)
        self._latest = frozenset(digests.values())
        self.cache.begin([_step_digests(step, digests) for step in steps])
        whole = _Pass(steps, ends, digests, batches)
        # every batch touches the values that it will use before any batch makes new ones, which might evict them
        return [self._plan_batch(whole, number) for number in range(batches)]

    def _plan_batch(self, whole: _Pass, number: int) -> BatchPlan:
        """Go back from the ends, and stop at values that are cached."""
        digests, needed = whole.digests, set(whole.ends)
        to_run: list[Step] = []
        cached: dict[Name, PackedValue] = {}
        observations: list[tuple[Name, SeenAccumulators]] = []
        for step in reversed(whole.steps):
            observation = self._observations.get((digests[step.name], number)) if step.watched else None
            outputs = {n: self.cache.touch((digests[n], number)) for n in step.outputs if n in needed}
            if (step.watched and observation is None) or any(packed is None for packed in outputs.values()):
                to_run.append(step)
                needed.update(step.inputs)
                continue
            cached.update({name: packed for name, packed in outputs.items() if packed is not None})
            if observation is not None:
                observations.append((step.name, observation))
        return BatchPlan(whole, number, tuple(reversed(to_run)), cached, tuple(reversed(observations)))

    def run(self, plan: BatchPlan, start: Start, watch: AccumulatorWatch) -> dict[Name, Any]:
        """The values at the ends of the pass, of one batch.

        Args:
            start: gives the values that the steps start from; called if needed.
            watch: gets the observation of every watched step, whether or not the step runs.
        """
        whole = plan.whole

        def keep(step: Step, outputs: Sequence[Any]) -> None:
            if step.watched:
                self._observations.put((whole.digests[step.name], plan.number), watch.latest)
            for name, value, span in zip(step.outputs, outputs, step.spans, strict=True):
                self.cache.put((whole.digests[name], plan.number), value, span)

        for name, observation in plan.observations:
            watch.extremes.add(name, observation)
        self.spent.add(len(plan.steps), len(whole.steps), whole.batches)
        values = _Values(plan.cached, start)  # the start values are made when a step first reads one
        with torch.no_grad(), autocast_off():
            run_schedule(make_schedule(plan.steps, whole.ends), values, Step.run, keep)
        return {name: values[name] for name in whole.ends}


class _Values(dict[Name, Any]):
    """The values of a pass. A cached value is unpacked, and the start values are made, when they are first read."""

    def __init__(self, cached: Mapping[Name, PackedValue], start: Start) -> None:
        super().__init__()
        self._cached, self._start = cached, start
        self._start_values: Mapping[Name, Any] | None = None

    def __missing__(self, name: Name) -> Any:
        if name in self._cached:
            self[name] = self._cached[name].value()
        else:
            self._start_values = self._start() if self._start_values is None else self._start_values
            self[name] = self._start_values[name]
        return self[name]


def _step_digests(step: Step, digests: Mapping[Name, bytes]) -> StepDigests:
    return StepDigests(tuple(digests[n] for n in step.outputs), tuple(digests[n] for n in step.inputs if n in digests))


def value_digests(steps: Sequence[Step]) -> dict[Name, bytes]:
    """The digest of every value that the steps make, which covers all steps that it depends on."""
    digests: dict[Name, bytes] = {}
    for step in steps:
        hashed = hashlib.blake2b(step.digest, digest_size=_BYTES)
        for name in step.inputs:
            # a value that no step makes is the same in every pass over a batch, so that its name stands for it
            part = digests.get(name) or b"=" + name.encode()
            hashed.update(len(part).to_bytes(4, "little") + part)
        for index, name in enumerate(step.outputs):
            digests[name] = hashed.digest() + index.to_bytes(2, "little")
    return digests
