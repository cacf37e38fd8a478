"""Programs: a pass over a network whose launches of kernels and whose memory are kept, so that it can be repeated.

Step by step, a pass allocates every value, and prepares the arguments of every kernel in Python. For inputs of the same
shapes both are the same each time. A `Recorder` makes a `Program` while it runs a pass: values that kernels write lie
in the program's own `Memory`, in which a value takes the place of one that is no longer needed, and a kernel that reads
and writes nothing but such values becomes a `Launch` that is repeated as it is. What torch computes (float nodes,
copies) is an `Operation`, which runs on the values of each pass. Small values that it makes are copied into the memory,
which takes less time than to launch the kernels that read them anew.

Invariant: a value in the program's memory is read only by steps that were recorded before its memory was given to
another value, and a pass repeats all steps in the order in which they were recorded.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from hago.graph.schedule import Name, Schedule, Step
from hago.runtime.native.calls import Launch, NativeCall

#: A value takes free memory of at most so many times its size.
MOST_SLACK: Final = 4
#: The most bytes of a value of torch's that is copied into a program's memory.
MOST_COPIED: Final = 1 << 18


class ShapesChanged(Exception):
    """A value of a repeated pass has another shape than in the pass that was recorded."""


def _storage(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


def _tensors(value: Any) -> Iterator[Tensor]:
    """The tensors in a value, which may be nested in tuples and lists."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for each in value:
            yield from _tensors(each)


# ---------------------------------------------------------------- memory
class Memory:
    """The memory of a program's values. A block is free again when no value in it is needed any more."""

    def __init__(self) -> None:
        self._blocks: dict[int, Tensor] = {}
        self._free: list[int] = []  # the latest freed last
        self._users: Counter[int] = Counter()

    def allocate(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A tensor whose entries lie in the order of its axes. Nothing uses its block until it is `retain`ed."""
        size = math.prod(shape) * dtype.itemsize
        fitting = [p for p in self._free if size <= self._blocks[p].numel() <= MOST_SLACK * size]
        if fitting:
            pointer = min(reversed(fitting), key=lambda p: self._blocks[p].numel())
            self._free.remove(pointer)
        else:
            block = torch.empty(max(1, size), dtype=torch.uint8)
            pointer = _storage(block)
            self._blocks[pointer] = block
        return self._blocks[pointer][:size].view(dtype).view(tuple(shape))

    def holds(self, x: Tensor) -> bool:
        """Whether a tensor lies in this memory."""
        return _storage(x) in self._blocks

    def retain(self, value: Any) -> None:
        """Count a value that uses the blocks of its tensors."""
        self._users.update({_storage(x) for x in _tensors(value)} & self._blocks.keys())

    def release(self, value: Any) -> None:
        """Take back a `retain`."""
        for pointer in {_storage(x) for x in _tensors(value)} & self._blocks.keys():
            self._users[pointer] -= 1
            if not self._users[pointer]:
                self._free.append(pointer)


# ---------------------------------------------------------------- program
Registers = list[Any]


@dataclass(frozen=True, slots=True)
class Operation:
    """What a program computes anew in every pass.

    Args:
        compute: from the values of the registers `inputs` to those of `outputs`; outputs without a register are in the
            program's memory.
        drops: the registers whose last use it is.
    """

    compute: Callable[[Sequence[Any]], Sequence[Any]]
    inputs: tuple[int, ...]
    outputs: tuple[int | None, ...]
    drops: tuple[int, ...] = ()

    def run(self, registers: Registers) -> None:
        """Read and write registers."""
        outputs = self.compute([registers[i] for i in self.inputs])
        for register, value in zip(self.outputs, outputs, strict=True):
            if register is not None:
                registers[register] = value
        for register in self.drops:
            registers[register] = None


@dataclass(frozen=True, slots=True)
class _Relaunch:
    """A kernel that reads values of other memory, launched anew in every pass. It writes `written`."""

    call: NativeCall
    written: tuple[Tensor, ...]

    def __call__(self, values: Sequence[Any]) -> Sequence[Any]:
        remaining = iter(self.written)

        def allocate(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
            there = next(remaining)
            if there.shape != tuple(shape) or there.dtype != dtype:
                raise ShapesChanged
            return there

        launch = self.call.launch(values, allocate)
        if launch is None:
            raise ShapesChanged
        launch()
        return ()


@dataclass(frozen=True, slots=True)
class _Copied:
    """A step of torch's whose outputs are copied into the program's memory, where there is a place for them."""

    compute: Callable[[Sequence[Any]], Sequence[Any]]
    places: tuple[Tensor | None, ...]

    def __call__(self, values: Sequence[Any]) -> Sequence[Any]:
        outputs = self.compute(values)
        for place, value in zip(self.places, outputs, strict=True):
            if place is not None:
                if place.shape != value.shape or place.dtype != value.dtype:
                    raise ShapesChanged
                place.copy_(value)
        return outputs


@dataclass(frozen=True, slots=True)
class Program:
    """A recorded pass. Made by a `Recorder`. One thread runs it at a time, since passes share its memory.

    Args:
        registers: the values that are the same in every pass; None for the others.
        inputs, ends: the registers of the inputs and of the outputs.
        memory: of the values.
    """

    items: tuple[Launch | Operation, ...]
    registers: tuple[Any, ...]
    inputs: tuple[int, ...]
    ends: tuple[int, ...]
    memory: Memory

    def run(self, inputs: Sequence[Tensor]) -> list[Any]:
        """The outputs for inputs of the recorded shapes, in memory of their own.

        Raises:
            ShapesChanged: the shape of a value depends on more than the shapes of the inputs.
        """
        registers = list(self.registers)
        for register, value in zip(self.inputs, inputs, strict=True):
            registers[register] = value
        for item in self.items:
            if isinstance(item, Launch):
                item()
            else:
                item.run(registers)
        return [self._own(registers[i]) for i in self.ends]

    def _own(self, value: Any) -> Any:
        return value.clone() if isinstance(value, Tensor) and self.memory.holds(value) else value


# ---------------------------------------------------------------- recording
class _Places:
    """Allocates the outputs of a step, which may be parts of larger tensors."""

    def __init__(self, memory: Memory, wholes: Sequence[_Whole | None]) -> None:
        self.memory, self.wholes = memory, list(wholes)
        self.written: list[Tensor] = []

    def __call__(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        whole = self.wholes[len(self.written)]
        made = None if whole is None else whole.part(shape, dtype)
        self.written.append(self.memory.allocate(shape, dtype) if made is None else made)
        return self.written[-1]


class _Whole:
    """A value that the parts of a batch write one after the other, samples [first, last) of `size` at a time."""

    def __init__(self, memory: Memory, size: int) -> None:
        self.memory, self.size = memory, size
        self.first = self.last = 0
        self.tensor: Tensor | None = None

    def part(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor | None:
        """The place of the samples; None if the first axis does not have one entry for each."""
        if not shape or shape[0] != self.last - self.first:
            return None
        if self.tensor is None:
            self.tensor = self.memory.allocate((self.size, *shape[1:]), dtype)
            self.memory.retain(self.tensor)
        return self.tensor[self.first : self.last]

    def as_parts(self, parts: Sequence[Any]) -> Tensor | None:
        """The whole value, if all parts were written into it, with their order of axes."""
        whole = self.tensor
        if whole is None or not all(isinstance(p, Tensor) and _storage(p) == _storage(whole) for p in parts):
            return None
        return whole.as_strided((self.size, *parts[0].shape[1:]), parts[0].stride())


class Recorder:
    """The state of one call of `record`: what was recorded so far, and the values of the pass that runs meanwhile.

    Args:
        values: the values that exist before the first step, by name.
        inputs: the names of those that differ from pass to pass.
    """

    def __init__(self, values: Mapping[Name, Any], inputs: Sequence[Name]) -> None:
        self.memory = Memory()
        self.items: list[Launch | Operation] = []
        self.values: Registers = []
        self.kept: set[int] = set()  # the registers whose values are the same in every pass
        self._constants = {_storage(v) for n, v in values.items() if n not in inputs and isinstance(v, Tensor)}
        self.names = {name: self._register(value, name not in inputs) for name, value in values.items()}
        self._inputs = tuple(self.names[name] for name in inputs)

    def program(self, ends: Sequence[Name]) -> tuple[Program, list[Any]]:
        """The program, and the outputs of the recorded pass."""
        registers = tuple(v if i in self.kept else None for i, v in enumerate(self.values))
        ends_at = tuple(self.names[name] for name in ends)
        program = Program(tuple(self.items), registers, self._inputs, ends_at, self.memory)
        return program, [program._own(self.values[i]) for i in ends_at]

    def run(self, schedule: Schedule[Step]) -> None:
        """Run and record steps."""
        self._run(schedule, self.names, {})

    def run_in_parts(
        self, schedule: Schedule[Step], takes: Sequence[Name], gives: Sequence[Name], size: int, parts: int
    ) -> None:
        """Run and record steps on one part of a batch after the other; see `executor.MicroBatchSegment`."""
        if parts == 1:
            outer = dict(self.names)
            self._run(schedule, local := dict(outer), {}, frozenset(outer))
            self.names |= {name: local[name] for name in gives}
            return
        pieces = {name: self._split(self.names[name], parts) for name in takes}
        wholes = {name: _Whole(self.memory, size) for name in gives}
        made: dict[Name, list[int]] = {name: [] for name in gives}
        bounds = [len(x) for x in torch.empty(size, 0).tensor_split(parts)]
        first = 0
        for part, count in enumerate(bounds):
            for whole in wholes.values():
                whole.first, whole.last = first, first + count
            shared = frozenset(self.names.keys() - pieces.keys())
            local = self.names | {name: registers[part] for name, registers in pieces.items()}
            self._run(schedule, local, wholes, shared)
            for name in gives:
                made[name].append(local[name])
            first += count
        for name in gives:
            self.names[name] = self._join(made[name], wholes[name])

    def drop(self, names: Sequence[Name]) -> None:
        """Forget values that no later step reads."""
        for name in names:
            self._drop(self.names.pop(name))

    def _run(
        self,
        schedule: Schedule[Step],
        names: dict[Name, int],
        wholes: Mapping[Name, _Whole],
        shared: frozenset[Name] = frozenset(),
    ) -> None:
        """Run and record steps.

        Args:
            names: the registers of values; those of the steps' outputs are added.
            wholes: the values of which the steps make a part.
            shared: the values that others read after the steps.
        """
        for entry in schedule:
            read = tuple(names[name] for name in entry.inputs)
            made = self._step(entry.step, read, [wholes.get(name) for name in entry.outputs])
            names.update(zip(entry.outputs, made, strict=True))
            for name in entry.dropped:
                register = names.pop(name, None)
                if register is not None and name not in shared:
                    self._drop(register)

    def _step(self, step: Step, read: tuple[int, ...], wholes: Sequence[_Whole | None]) -> list[int]:
        """Run and record a step.

        Returns:
            The registers of its outputs.
        """
        values, call = [self.values[i] for i in read], step.compute
        places = _Places(self.memory, wholes)
        launch = call.launch(values, places) if isinstance(call, NativeCall) else None
        if launch is not None and isinstance(call, NativeCall):
            launch()
            made = [self._register(x, True) for x in launch.outputs]
            if all(map(self._is_kept, launch.reads)):
                self.items.append(launch)
            else:
                self.items.append(Operation(_Relaunch(call, tuple(places.written)), read, ()))
            return made
        outputs = step.run(values)
        same = [isinstance(x, Tensor) and self._is_kept(x) for x in outputs]  # views of the program's memory
        copies = [None if kept else self._copied(x) for x, kept in zip(outputs, same, strict=True)]
        kept = [known or copy is not None for known, copy in zip(same, copies, strict=True)]
        pairs = zip(outputs, copies, strict=True)
        made = [self._register(x if copy is None else copy, k) for (x, copy), k in zip(pairs, kept, strict=True)]
        if not all(same):
            written = tuple(None if k else i for i, k in zip(made, kept, strict=True))
            copied = any(copy is not None for copy in copies)
            compute = _Copied(step.run, tuple(copies)) if copied else step.run
            self.items.append(Operation(compute, read, written))
        return made

    def _copied(self, x: Any) -> Tensor | None:
        """A copy of a value of torch's in the program's memory; None if it is large, or no dense tensor."""
        if not isinstance(x, Tensor) or x.layout != torch.strided or x.device.type != "cpu" or x.is_complex():
            return None
        if not x.numel() or not x.is_contiguous() or x.nbytes > MOST_COPIED:
            return None
        return self.memory.allocate(x.shape, x.dtype).copy_(x)

    def _split(self, register: int, parts: int) -> list[int]:
        pieces = self.values[register].tensor_split(parts)
        kept = register in self.kept
        made = [self._register(piece, kept) for piece in pieces]
        if not kept:
            self.items.append(Operation(lambda values: values[0].tensor_split(parts), (register,), tuple(made)))
        return made

    def _join(self, parts: Sequence[int], whole: _Whole) -> int:
        values = [self.values[i] for i in parts]
        if (joined := whole.as_parts(values)) is not None:
            register = self._register(joined, True)
        else:
            register = self._register(torch.cat(values), False)
            self.items.append(Operation(lambda pieces: (torch.cat(list(pieces)),), tuple(parts), (register,)))
        if whole.tensor is not None:
            self.memory.release(whole.tensor)
        for part in parts:
            self._drop(part)
        return register

    def _register(self, value: Any, kept: bool) -> int:
        self.values.append(value)
        self.memory.retain(value)
        if kept:
            self.kept.add(len(self.values) - 1)
        return len(self.values) - 1

    def _is_kept(self, x: Tensor) -> bool:
        """Whether a tensor has the same address in every pass."""
        return self.memory.holds(x) or _storage(x) in self._constants

    def _drop(self, register: int) -> None:
        self.memory.release(self.values[register])
        if register not in self.kept:
            self.values[register] = None
            last = self.items[-1] if self.items else None
            if isinstance(last, Operation):
                self.items[-1] = Operation(last.compute, last.inputs, last.outputs, (*last.drops, register))
