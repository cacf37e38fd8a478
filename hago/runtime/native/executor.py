"""Stretches: a pass whose samples do not meet, cut so that values stay in the processor's cache.

The first layers of a network make much of every sample from few weights, and the last ones little from many: so
the former run on a few samples at a time, and the latter on all of them, for which weights are read once.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Collection, Mapping, MutableMapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

import torch
from torch import Tensor

from hago.arithmetic.types import Edge
from hago.errors import HagoError, did_you_mean
from hago.graph.graph import CONST, INPUT, Node
from hago.graph.schedule import Name, Step, last_uses, run_steps
from hago.plan.plan import Plan
from hago.runtime.native.layouts import wire
from hago.runtime.native.lowering import Lowering
from hago.runtime.native.self_test import Kernels, kernels
from hago.runtime.native.weights import Packs
from hago.runtime.reference import IntegerModel

#: A stretch ends where all that comes after takes so many times less room.
SMALLER: Final = 4


@dataclass(frozen=True, slots=True)
class MicroBatchSegment:
    """Steps that follow one another.

    Args:
        takes: the values that vary with the sample and were there before.
        gives: those that it makes and that are read after it.
        drops: the values that nothing reads after it.
        done: what no step of it reads any more, by step.
        at_once: the most samples that are run together.
    """

    steps: tuple[Step, ...]
    takes: tuple[Name, ...]
    gives: tuple[Name, ...]
    drops: tuple[Name, ...]
    done: Mapping[Name, tuple[Name, ...]]
    at_once: int

    def run(self, values: MutableMapping[Name, Any], size: int) -> None:
        """Make what it gives, of `size` samples.

        Args:
            values: what it takes, and what is the same for all samples; what it gives afterwards.
        """
        parts = max(1, -(-size // self.at_once))
        cut = {name: values[name].tensor_split(parts) for name in self.takes}
        shared = {name: value for name, value in values.items() if name not in cut}
        found = []
        for part in range(parts):
            here = {**shared, **{name: pieces[part] for name, pieces in cut.items()}}
            run_steps(self.steps, here, self.gives, done=self.done)
            found.append([here[name] for name in self.gives])
        whole = found[0] if parts == 1 else [torch.cat(each) for each in zip(*found, strict=True)]
        values.update(zip(self.gives, whole, strict=True))
        for name in self.drops:
            del values[name]


def micro_batch_segments(
    steps: Sequence[Step], sizes: Sequence[int], inputs: Collection[Name], ends: Collection[Name], room: int
) -> tuple[MicroBatchSegment, ...]:
    """The stretches of a pass.

    Args:
        sizes: bytes of the largest value that each step makes of a sample.
        inputs: the values that it starts from and that vary with the sample.
        room: bytes that a value of the samples that are run together may take.
    """
    left = [*itertools.accumulate(reversed(sizes), max)][::-1]  # the largest from each step on
    found: list[MicroBatchSegment] = []
    there, first = set(inputs), 0
    while first < len(steps):
        after = next((i for i in range(first, len(steps)) if SMALLER * left[i] <= left[first]), len(steps))
        some = tuple(steps[first:after])
        made = {name for step in some for name in step.outputs}
        later = {name for step in steps[after:] for name in step.inputs} | set(ends)
        read = {name for step in some for name in step.inputs}
        takes, gives, drops = (tuple(sorted(names)) for names in (there & read, made & later, there - later))
        at_once = max(1, room // max(1, left[first]))
        found.append(MicroBatchSegment(some, takes, gives, drops, last_uses(some, gives), at_once))
        there, first = (there | made) & later, after
    return tuple(found)


# ---------------------------------------------------------------- report
# The report of which kernel runs which node, and why.


@dataclass(frozen=True, slots=True)
class KernelRow:
    """Which kernel runs a node, and why."""

    node: str
    op: str
    kernel: str
    why: str


@dataclass(frozen=True, slots=True)
class KernelTable:
    """Node by node, which kernel runs it: prints as a table.

    Args:
        head: what the machine can do.
        rows: one per node that is computed, in order.
    """

    head: str
    rows: tuple[KernelRow, ...]

    @property
    def kernels(self) -> dict[str, int]:
        """How many nodes each kernel runs."""
        found: dict[str, int] = {}
        for row in self.rows:
            found[row.kernel] = found.get(row.kernel, 0) + 1
        return found

    def to_json(self) -> dict[str, Any]:
        """The same as JSON values."""
        return {"head": self.head, "kernels": self.kernels, "rows": [asdict(r) for r in self.rows]}

    def __str__(self) -> str:
        cells = [("node", "op", "kernel", "why"), *((r.node, r.op, r.kernel, r.why) for r in self.rows)]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = ("  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in cells)
        return "\n".join([self.head, *lines])


# ---------------------------------------------------------------- executor
# Executor: a Plan as calls of the fastest kernels that are exact on this machine.

#: Bytes that a value of the samples that are run at once may take.
CACHED_BYTES: Final = 8 << 20


class Executor:
    """The steps of one Plan. Values inside are stored integers, real values in and out.

    Args:
        packs: packed weights, shared by the executors of one search.
        using: which kernels may be used; where not given, what this machine can do exactly.
        cached_bytes: what a value of the samples that are run at once may take, where samples do not meet.
    """

    def __init__(
        self,
        plan: Plan,
        packs: Packs | None = None,
        using: Kernels | None = None,
        cached_bytes: int = CACHED_BYTES,
    ) -> None:
        self.plan = plan
        self.using = kernels() if using is None else using
        lowering = Lowering(wire(plan), Packs() if packs is None else packs, self.using)
        self._steps = tuple(lowering.lower())
        self._ran, self._skipped = tuple(lowering.ran), lowering.wiring.skipped
        self.ends = tuple(lowering.outputs)
        self._reads = {name for step in self._steps for name in step.inputs} | set(self.ends)
        self._done = last_uses(self._steps, self.ends)
        inputs = plan.graph.inputs if lowering.by_sample else ()
        self.segments = (
            micro_batch_segments(self._steps, lowering.sizes, inputs, self.ends, cached_bytes) if inputs else ()
        )

    def run(self, inputs: Sequence[Tensor]) -> list[Any]:
        """The outputs of flat inputs, those of the integer model bit for bit."""
        size = len(inputs[0]) if inputs and inputs[0].ndim else 0
        if not any(s.at_once < size for s in self.segments) or any(len(x) != size for x in inputs):
            return self._run(inputs)
        values = self.begin(inputs)
        with torch.no_grad():
            for segment in self.segments:
                segment.run(values, size)
        return self.end(values)

    def _run(self, inputs: Sequence[Tensor]) -> list[Any]:
        values = self.begin(inputs)
        with torch.no_grad():
            run_steps(self._steps, values, self.ends, done=self._done)
        return self.end(values)

    def steps(self) -> tuple[Step, ...]:
        """The pass, call by call."""
        return self._steps

    def begin(self, inputs: Sequence[Tensor]) -> dict[str, Any]:
        """The values that the steps start from: flat inputs, and constants that are read as they are."""
        graph = self.plan.graph
        consts = {name: value for name, value in graph.consts.items() if name in self._reads}
        return {**consts, **dict(zip(graph.inputs, inputs, strict=True))}

    def end(self, values: Mapping[str, Any]) -> list[Any]:
        """The outputs, from the values at `ends`."""
        found = [values[name] for name in self.ends]
        return [v.contiguous() if isinstance(v, Tensor) else v for v in found]

    def explain(self) -> KernelTable:
        """Node by node, which kernel runs it and why."""
        graph = self.plan.graph
        found: dict[str, KernelRow] = {}
        for ran in self._ran:
            for name in ran.nodes:
                why = ran.why if name == ran.nodes[0] else f"in the kernel of {ran.nodes[0]}"
                found[name] = KernelRow(name, graph[name].op, ran.kernel, why)
        for name in self._skipped:
            found[name] = KernelRow(name, graph[name].op, "none", "part of its readers' clipping")
        order = [n.name for n in graph if n.op not in (INPUT, CONST)]
        return KernelTable(str(self.using), tuple(found[name] for name in order if name in found))


# ---------------------------------------------------------------- model
# FastModel: the integer model on the fast kernels.


class FastModel(IntegerModel):
    """An integer model whose forward runs on the fastest kernels that are exact on this machine.

    Its outputs are those of the reference engine bit for bit. The kernels are chosen where it runs: a copy in
    another process, or one that was saved and loaded, chooses its own.
    """

    @functools.cached_property
    def executor(self) -> Executor:
        """The steps, made when first needed."""
        return Executor(self.plan)

    def run(
        self,
        inputs: Sequence[Tensor],
        on_value: Callable[[Node, Any], None] | None = None,
        on_edge: Callable[[Edge, Any], None] | None = None,
    ) -> list[Any]:
        """The outputs of flat inputs. With `on_value` (every node's stored integers) or `on_edge` (the centered
        integers that arrive at integer nodes) the reference engine runs, where all of them exist; so it does under
        torch.export."""
        if on_value is not None or on_edge is not None or torch.compiler.is_exporting():
            return super().run(inputs, on_value, on_edge)
        return self.executor.run(inputs)

    def explain(self) -> KernelTable:
        """Node by node, which kernel runs it and why."""
        return self.executor.explain()


#: By name: the fastest kernels that are exact on this machine, and int64 throughout.
ENGINES: Final[dict[str, type[IntegerModel]]] = {"auto": FastModel, "reference": IntegerModel}


def named_engine(name: str) -> type[IntegerModel]:
    """The integer model that runs on an engine.

    Raises:
        HagoError: there is none of that name.
    """
    if name not in ENGINES:
        raise HagoError(f"unknown engine {name!r}; expected {' or '.join(ENGINES)}." + did_you_mean(name, ENGINES))
    return ENGINES[name]
