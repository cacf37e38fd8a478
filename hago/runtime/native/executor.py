"""Execution: the `Executor` runs the steps of a Plan, and `NativeIntegerModel` is the integer model on it.

If every operator treats the samples of a batch independently, the steps are divided into segments of micro-batches,
so that values stay in the processor's cache. The first layers of a network compute large values from few weights, so
they run on a few samples at a time. The last layers compute small values from many weights, so they run on all
samples at once and read their weights once.

A pass over inputs of shapes that were there before is recorded as a `program.Program`, which later ones repeat.
"""

from __future__ import annotations

import functools
import itertools
import threading
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping, MutableMapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

import torch
from torch import Tensor

from hago.arithmetic.types import Edge
from hago.errors import HagoError, did_you_mean
from hago.graph import Node, autocast_off
from hago.graph.schedule import Name, Schedule, Step, make_schedule, run_schedule
from hago.plan import Plan
from hago.runtime.native.lowering import lower
from hago.runtime.native.program import Program, Recorder, ShapesChanged
from hago.runtime.native.self_test import ExactKernels, exact_kernels
from hago.runtime.native.weights import KernelConstantCache
from hago.runtime.reference import IntegerModel
from hago.serialization.summary import Summarized, Summary, wrapped_lines
from hago.serialization.text_table import counted, keep_beginning, keep_end, table, wrap_words
from hago.simulation import Simulator

#: A segment ends where all later values are smaller by this factor.
SMALLER: Final = 4


@dataclass(frozen=True, slots=True)
class MicroBatchSegment:
    """Consecutive steps that run on one micro-batch after another. Made by `micro_batch_segments`; `Executor.run` runs
    the segments in order.

    Args:
        scheduled: its steps.
        takes: the values with a batch axis that earlier segments make or that are inputs.
        gives: the values that it makes for later segments or as outputs.
        drops: the values that no later segment reads.
        at_once: the most samples of a micro-batch.
    """

    scheduled: Schedule[Step]
    takes: tuple[Name, ...]
    gives: tuple[Name, ...]
    drops: tuple[Name, ...]
    at_once: int

    def parts(self, size: int) -> int:
        """The number of micro-batches of a batch."""
        return max(1, -(-size // self.at_once))

    def run(self, values: MutableMapping[Name, Any], size: int) -> None:
        """Run the segment on `size` samples.

        Args:
            values: by name, the values that it takes and those that all samples share. The values that it gives are
                added, and those that it drops are removed.
        """
        parts = self.parts(size)
        cut = {name: values[name].tensor_split(parts) for name in self.takes}
        shared = {name: value for name, value in values.items() if name not in cut}
        outputs = []
        for part in range(parts):
            batch = {**shared, **{name: pieces[part] for name, pieces in cut.items()}}
            run_schedule(self.scheduled, batch, Step.run)
            outputs.append([batch[name] for name in self.gives])
        joined = outputs[0] if parts == 1 else [torch.cat(each) for each in zip(*outputs, strict=True)]
        values.update(zip(self.gives, joined, strict=True))
        for name in self.drops:
            del values[name]


def micro_batch_segments(
    steps: Sequence[Step], sizes: Sequence[int], inputs: Collection[Name], ends: Collection[Name], room: int
) -> tuple[MicroBatchSegment, ...]:
    """Divide steps into segments of micro-batches.

    Args:
        sizes: by step, the bytes of the largest value that it makes of one sample.
        inputs: the values with a batch axis that exist before the first step.
        ends: the values that are outputs.
        room: the most bytes of a value of one micro-batch.
    """
    largest_from = [*itertools.accumulate(reversed(sizes), max)][::-1]  # by step, the largest size from there on
    segments: list[MicroBatchSegment] = []
    present, first = set(inputs), 0
    while first < len(steps):
        limit = largest_from[first] / SMALLER
        after = next((i for i in range(first, len(steps)) if largest_from[i] <= limit), len(steps))
        segment_steps = tuple(steps[first:after])
        written = {name for step in segment_steps for name in step.outputs}
        later = {name for step in steps[after:] for name in step.inputs} | set(ends)
        read = {name for step in segment_steps for name in step.inputs}
        takes, gives, drops = (tuple(sorted(names)) for names in (present & read, written & later, present - later))
        at_once = max(1, room // max(1, largest_from[first]))
        segments.append(MicroBatchSegment(make_schedule(segment_steps, gives), takes, gives, drops, at_once))
        present, first = (present | written) & later, after
    return tuple(segments)


# ---------------------------------------------------------------- report


@dataclass(frozen=True, slots=True)
class KernelRow:
    """The kernel that runs a node, and why it was selected."""

    node: str
    op: str
    kernel: str
    why: str


@dataclass(frozen=True, slots=True, repr=False)
class KernelTable(Summarized):
    """The kernel of every node, as a table that prints itself.

    Args:
        head: the kernels that are exact on this machine.
        rows: one per computed node, in order.
    """

    head: str
    rows: tuple[KernelRow, ...]

    @property
    def kernels(self) -> dict[str, int]:
        """The number of nodes that each kernel runs."""
        return dict(Counter(row.kernel for row in self.rows))

    def to_json(self) -> dict[str, Any]:
        """The table as JSON values."""
        return {"head": self.head, "kernels": self.kernels, "rows": [asdict(r) for r in self.rows]}

    def summary(self) -> Summary:
        """How many nodes each kernel runs."""
        kernels = ", ".join(f"{name} {number}" for name, number in self.kernels.items())
        return Summary(f"KernelTable of {counted(len(self.rows), 'node')}", {"kernels": kernels, "machine": self.head})

    def __str__(self) -> str:
        return "\n".join([*wrapped_lines(self.head), "", *self._lines()])

    def _lines(self) -> list[str]:
        rows = [(r.node, r.op, r.kernel, r.why) for r in self.rows]
        names = {"node": keep_end, "op": keep_beginning}
        return table(("node", "op", "kernel", "why"), rows, narrow=(names, {"why": wrap_words}, {"kernel": wrap_words}))


# ---------------------------------------------------------------- executor
#: The most bytes of a value of one micro-batch.
CACHED_BYTES: Final = 2 << 20
#: The most programs that an executor keeps, and the most shapes of inputs that it remembers.
MOST_PROGRAMS: Final = 2
MOST_SHAPES: Final = 8


class Programs:
    """The recorded programs of one executor that are not running, by the shapes of their inputs and the threads.

    Every thread that runs an executor takes a program out and puts it back, so no two threads run the same one.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[tuple[object, Program]] = []
        self._seen: deque[object] = deque(maxlen=MOST_SHAPES)

    def take(self, key: object) -> Program | None:
        """The latest program of a key, if there is one."""
        with self._lock:
            at = next((i for i in reversed(range(len(self._idle))) if self._idle[i][0] == key), None)
            return None if at is None else self._idle.pop(at)[1]

    def put(self, key: object, program: Program) -> None:
        """Keep a program that ran; the one that was not used for longest is forgotten."""
        with self._lock:
            self._idle.append((key, program))
            del self._idle[:-MOST_PROGRAMS]

    def has_seen(self, key: object) -> bool:
        """Whether this was called with a key before, lately."""
        with self._lock:
            seen = key in self._seen
            if not seen:
                self._seen.append(key)
            return seen


class Executor:
    """A Plan as calls of the fastest kernels that are exact on this machine.

    Inputs and outputs are real values; all values in between are stored integers. Made by `NativeIntegerModel` when it
    first runs, and by the evaluator of a search for every Plan that it evaluates in integers. Several threads can run
    it at once.

    The second pass over inputs of the same shapes is recorded, and later ones repeat it. The memory of a recorded pass
    is kept for the next one; that of at most `MOST_PROGRAMS` of them.

    Args:
        constant_cache: packed weights and requantizations, shared by the executors of one search.
        using: the kernels that may be selected; by default those that are exact on this machine.
        cached_bytes: the most bytes of a value of one micro-batch, if samples are independent.
    """

    def __init__(
        self,
        plan: Plan,
        constant_cache: KernelConstantCache | None = None,
        using: ExactKernels | None = None,
        cached_bytes: int = CACHED_BYTES,
    ) -> None:
        self.plan = plan
        self.using = exact_kernels() if using is None else using
        lowered = lower(plan, KernelConstantCache() if constant_cache is None else constant_cache, self.using)
        self._lowered, self.ends = lowered, lowered.ends
        self._reads = {name for step in lowered.steps for name in step.inputs} | set(self.ends)
        self._scheduled = make_schedule(lowered.steps, self.ends)
        self._programs = Programs()
        self.segments: tuple[MicroBatchSegment, ...] = ()
        if lowered.by_sample:
            self.segments = micro_batch_segments(
                lowered.steps, lowered.sizes, plan.graph.inputs, self.ends, cached_bytes
            )

    def run(self, inputs: Sequence[Tensor]) -> list[Any]:
        """The outputs for flat inputs, equal bit for bit to those of the reference engine."""
        if self.using.calls is None:
            return self._run_steps(inputs)
        key = (torch.get_num_threads(), *((x.shape, x.stride(), x.dtype) for x in inputs))
        program = self._programs.take(key)
        if program is None and not self._programs.has_seen(key):
            return self._run_steps(inputs)
        with torch.no_grad():
            if program is None:
                program, outputs = self._record(inputs)
            else:
                try:
                    outputs = program.run(inputs)
                except ShapesChanged:
                    return self._run_steps(inputs)
        self._programs.put(key, program)
        return _laid_out(outputs)

    def _run_steps(self, inputs: Sequence[Tensor]) -> list[Any]:
        """The outputs, step by step, with fresh memory for every value."""
        size, values = self._batch_in_parts(inputs), self.begin(inputs)
        with torch.no_grad():
            if size:
                for segment in self.segments:
                    segment.run(values, size)
            else:
                run_schedule(self._scheduled, values, Step.run)
        return self.end(values)

    def _record(self, inputs: Sequence[Tensor]) -> tuple[Program, list[Any]]:
        """A program for inputs of these shapes, and the outputs."""
        size = self._batch_in_parts(inputs)
        # leaving inference mode switches gradients on, with which torch takes other kernels
        with torch.inference_mode(False), torch.no_grad():
            recorder = Recorder(self.begin(inputs), self.plan.graph.inputs)
            for segment in self.segments if size else ():
                recorder.run_in_parts(segment.scheduled, segment.takes, segment.gives, size, segment.parts(size))
                recorder.drop(segment.drops)
            if not size:
                recorder.run(self._scheduled)
            return recorder.program(self.ends)

    def _batch_in_parts(self, inputs: Sequence[Tensor]) -> int:
        """The size of a batch that is divided; 0 if it is not."""
        size = len(inputs[0]) if inputs and inputs[0].ndim else 0
        in_parts = any(s.at_once < size for s in self.segments) and all(len(x) == size for x in inputs)
        return size if in_parts else 0

    def steps(self) -> tuple[Step, ...]:
        """The steps, one for every call of a kernel."""
        return self._lowered.steps

    def begin(self, inputs: Sequence[Tensor]) -> dict[str, Any]:
        """The values that exist before the first step: flat inputs, and the constants that steps read unconverted."""
        graph = self.plan.graph
        consts = {name: value for name, value in graph.consts.items() if name in self._reads}
        return {**consts, **dict(zip(graph.inputs, inputs, strict=True))}

    def end(self, values: Mapping[str, Any]) -> list[Any]:
        """The outputs, from the values named in `ends`."""
        return _laid_out([values[name] for name in self.ends])

    def explain(self) -> KernelTable:
        """The kernel of every node, and why it was selected."""
        graph = self.plan.graph
        rows: dict[str, KernelRow] = {}
        for use in self._lowered.uses:
            for name in use.nodes:
                why = use.why if name == use.nodes[0] else f"in the kernel of {use.nodes[0]}"
                rows[name] = KernelRow(name, graph[name].op, use.kernel, why)
        for name in self._lowered.skipped:
            rows[name] = KernelRow(name, graph[name].op, "none", "part of its readers' clipping")
        return KernelTable(str(self.using), tuple(rows[n.name] for n in graph.computed if n.name in rows))


def _laid_out(outputs: Sequence[Any]) -> list[Any]:
    return [v.contiguous() if isinstance(v, Tensor) else v for v in outputs]


# ---------------------------------------------------------------- model


class NativeIntegerModel(IntegerModel):
    """An integer model whose forward runs on the fastest kernels that are exact on this machine.

    Its outputs are equal bit for bit to those of the reference engine. Every process selects its own kernels, so a
    copy in another process, or a model that was saved and loaded, may run on others. A machine on which hago's kernels
    cannot be built runs the sums in float32 with proved bounds, as simulations do (`Simulator`), on float copies of the
    weights.
    """

    engine = "auto: the fastest kernels that are exact on this machine; explain() lists them"

    @functools.cached_property
    def executor(self) -> Executor:
        """The executor, made on first use."""
        return Executor(self.plan)

    @functools.cached_property
    def _fastest(self) -> Executor | Simulator:
        return self.executor if exact_kernels().outrun_floats else Simulator(self.plan)

    def run(
        self,
        inputs: Sequence[Tensor],
        on_value: Callable[[Node, Any], None] | None = None,
        on_edge: Callable[[Edge, Any], None] | None = None,
    ) -> list[Any]:
        """The outputs for flat inputs.

        Kernels fuse nodes, so not every intermediate value exists. The reference engine runs instead if `on_value`
        (called with every node's stored integers) or `on_edge` (called with the centered integers that arrive at
        integer nodes) is given, and under torch.export.
        """
        if on_value is not None or on_edge is not None or torch.compiler.is_exporting():
            return super().run(inputs, on_value, on_edge)
        with autocast_off():
            return self._fastest.run(inputs)

    def explain(self) -> KernelTable:
        """The kernel of every node, and why it was selected."""
        kernels = exact_kernels()
        if kernels.outrun_floats:
            return self.executor.explain()
        plan = self.plan
        names = {True: ("float32 sums", "exact, with proved bounds"), False: ("float", "a float node")}
        rows = (KernelRow(n.name, n.op, *names[n.name in plan.nodes]) for n in plan.graph.computed)
        return KernelTable(str(kernels), tuple(rows))


#: Engines by name: "auto" runs the fastest kernels that are exact on this machine, "reference" computes in int64.
ENGINES: Final[dict[str, type[IntegerModel]]] = {"auto": NativeIntegerModel, "reference": IntegerModel}


def named_engine(name: str) -> type[IntegerModel]:
    """The class of integer models that run on an engine.

    Raises:
        HagoError: no engine has that name.
    """
    if name not in ENGINES:
        raise HagoError(f"unknown engine {name!r}; expected {' or '.join(ENGINES)}." + did_you_mean(name, ENGINES))
    return ENGINES[name]
