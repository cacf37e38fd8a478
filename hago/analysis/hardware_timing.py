"""Measurement of a CPU: time the signatures of a hardware file on this machine, and write the times as its figures.

Every signature is timed on one of the ops that list it, the first in the order of TIMED: integer signatures on the
kernels that run integer models, float ones on torch's. A size that fits into caches gives the throughput, and one that
does not gives the bandwidth of memory.

Invariant: a measured copy differs from the given hardware only in figures of cost, name, sources and notes. A figure
that cannot be measured here stays as it was, and a note says why. `measure_hardware`, at the end, makes the copy.
"""

from __future__ import annotations

import math
import platform
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from functools import partial
from typing import Any, Final, Literal

import torch
from torch import Tensor, nn

from hago.arithmetic.types import SimQ
from hago.cost import node_macs
from hago.errors import HagoError, HardwareError
from hago.graph import OUTPUT, Graph, channels_last, compute_real, from_torch
from hago.hardware import Hardware, OpDesc, check_hardware, hardware_from_document, hardware_to_document
from hago.importing import HardwareLike, as_hardware
from hago.ops import OPS
from hago.plan import Plan
from hago.runtime.native import Executor, conversion, cpu_lines, exact_kernels, processor_name
from hago.search import QuantizationOptions, prepare
from hago.serialization.summary import Summarized, Summary
from hago.serialization.text_table import counted, table
from hago.study import versions

JobKind = Literal["macs", "elements"]
TensorShape = tuple[int, ...]


# ---------------------------------------------------------------- the ops that are timed
@dataclass(frozen=True, slots=True)
class Case:
    """A function that makes a module of one op, and the shapes of its inputs, with the batch first."""

    make: Callable[[], nn.Module]
    shapes: tuple[TensorShape, ...]

    def __str__(self) -> str:
        return " and ".join("x".join(map(str, shape)) for shape in self.shapes)


@dataclass(frozen=True, slots=True)
class TimedOp:
    """One op that signatures can be timed on, at two sizes.

    Args:
        kind: the unit of its throughput.
        in_cache: the size at which computing takes the time.
        in_memory: the size at which moving values takes the time, several times that of caches.
    """

    kind: JobKind
    in_cache: Case
    in_memory: Case


class _Unary(nn.Module):
    """A function of one operand as a module."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class _Binary(_Unary):
    """A function of two operands as a module."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:  # type: ignore[override]
        return self.function(x, y)


class _Product(nn.Module):
    """A matrix product with a constant."""

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(rows, columns) / rows**0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


_SMALL: Final[TensorShape] = (1, 128, 32, 32)
_LARGE: Final[TensorShape] = (64, 64, 64, 64)


def _elements(make: Callable[[], nn.Module], operands: int = 1) -> TimedOp:
    return TimedOp("elements", Case(make, (_SMALL,) * operands), Case(make, (_LARGE,) * operands))


def _unary(function: Callable[..., Tensor]) -> TimedOp:
    return _elements(partial(_Unary, function))


def _binary(function: Callable[..., Tensor]) -> TimedOp:
    return _elements(partial(_Binary, function), 2)


def _macs(
    small: Callable[[], nn.Module], shape: TensorShape, large: Callable[[], nn.Module], wide: TensorShape
) -> TimedOp:
    return TimedOp("macs", Case(small, (shape,)), Case(large, (wide,)))


_CONV1, _CONV2, _CONV3 = (partial(conv, 128, 128, 3, padding=1) for conv in (nn.Conv1d, nn.Conv2d, nn.Conv3d))
_THIN1, _THIN2, _THIN3 = (partial(conv, 16, 16, 1) for conv in (nn.Conv1d, nn.Conv2d, nn.Conv3d))

#: The ops that are timed, by name; the first that a signature lists stands for it.
TIMED: Final[Mapping[str, TimedOp]] = {
    "conv2d": _macs(_CONV2, (1, 128, 28, 28), _THIN2, (64, 16, 128, 128)),
    "linear": _macs(partial(nn.Linear, 1024, 1024), (64, 1024), partial(nn.Linear, 4096, 4096), (1, 4096)),
    "matmul": _macs(partial(_Product, 1024, 1024), (64, 1024), partial(_Product, 4096, 4096), (1, 4096)),
    "conv1d": _macs(_CONV1, (4, 128, 196), _THIN1, (64, 16, 128 * 128)),
    "conv3d": _macs(_CONV3, (1, 128, 4, 10, 10), _THIN3, (64, 16, 8, 32, 32)),
    "add": _binary(torch.add),
    "relu": _elements(nn.ReLU),
    "clamp": _elements(nn.ReLU6),
    "max_pool2d": _elements(partial(nn.MaxPool2d, 2)),
    "avg_pool2d": _elements(partial(nn.AvgPool2d, 2)),
    "adaptive_avg_pool2d": _elements(partial(nn.AdaptiveAvgPool2d, 1)),
    "sub": _binary(torch.sub),
    "mul": _binary(torch.mul),
    "concat": _elements(partial(_Binary, lambda x, y: torch.cat((x, y), 1)), 2),
    "sigmoid": _unary(torch.sigmoid),
    "tanh": _unary(torch.tanh),
    "silu": _elements(nn.SiLU),
    "gelu": _elements(nn.GELU),
    "hardswish": _elements(nn.Hardswish),
    "leaky_relu": _elements(partial(nn.LeakyReLU, 0.125)),
    "softmax": _elements(partial(nn.Softmax, 1)),
}


# ---------------------------------------------------------------- timing
#: Number of rounds over all calls.
ROUNDS: Final = 9
#: The least time of each call in a round, in seconds.
SLICE: Final = 0.004
#: The figure of the hardware file that each unit of throughput gives.
FIGURES: Final[Mapping[JobKind, str]] = {"macs": "macs_per_cycle", "elements": "elements_per_cycle"}
#: Size in bytes of the copy that is timed.
_COPIED: Final = 128 << 20
#: A convolution whose accumulators fit into caches.
_SUMS: Final = Case(partial(nn.Conv2d, 16, 128, 1), ((1, 16, 32, 32),))


@dataclass(frozen=True, slots=True)
class Job:
    """A call to time.

    Args:
        work: multiply-accumulates or elements of one call.
        moved: bytes that it reads and writes.
        description: the op, its size and its kernel, for the report.
    """

    run: Callable[[], object]
    work: int
    moved: int
    description: str


def fastest(jobs: Sequence[Job]) -> list[float]:
    """Time one call of each job, in seconds: the fastest of interleaved rounds, after a warm-up.

    Other load on the machine only adds time, so the fastest round is the one that it disturbed least.
    """
    repeats = []
    for job in jobs:
        job.run()
        start = time.perf_counter()
        job.run()
        repeats.append(max(1, int(SLICE / max(time.perf_counter() - start, 1e-7))))
    times: list[list[float]] = [[] for _ in jobs]
    for _ in range(ROUNDS):
        for job, repeat, seconds in zip(jobs, repeats, times, strict=True):
            start = time.perf_counter()
            for _ in range(repeat):
                job.run()
            seconds.append((time.perf_counter() - start) / repeat)
    return [min(seconds) for seconds in times]


# ---------------------------------------------------------------- the calls that stand for a signature
def signature_jobs(hardware: Hardware) -> Iterator[tuple[str, str, tuple[Job, Job] | str]]:
    """Yield for every signature and figure a call in caches and one in memory, or the reason why there is none.

    A pair that can neither be timed nor has the figure in the file is left out.
    """
    listed: dict[str, dict[str, OpDesc]] = {}
    for op, descs in hardware.ops.items():
        for desc in descs:
            listed.setdefault(desc.name, {})[op] = desc
    for name, by_op in listed.items():
        for kind, key in FIGURES.items():
            ops = [op for op in TIMED if op in by_op and TIMED[op].kind == kind]
            if ops or any(key in desc.cost for desc in by_op.values()):
                yield name, key, _first_job(hardware, by_op, ops)


def _first_job(hardware: Hardware, by_op: Mapping[str, OpDesc], ops: Sequence[str]) -> tuple[Job, Job] | str:
    """The jobs of the first op that runs here in its signature's dtypes, or the reason why the first does not."""
    why = "none of its ops is among those that are timed"
    for number, op in enumerate(ops):
        case, desc = TIMED[op], by_op[op]
        make = _integer_job if desc.is_integer else _float_job
        try:
            return make(hardware, op, desc, case.in_cache), make(hardware, op, desc, case.in_memory)
        except (HagoError, RuntimeError) as error:
            why = why if number else f"{op}: {str(error).splitlines()[0]}"
    return why


def _integer_job(hardware: Hardware, op: str, desc: OpDesc, case: Case) -> Job:
    plan, inputs = integer_plan(hardware, op, desc, case)
    executor = Executor(plan)
    (row,) = [r for r in executor.explain().rows if r.op == op]
    if row.kernel in ("reference", "float", "none"):
        raise HagoError(f"no kernel for it on this machine ({row.why})")
    values = executor.begin(inputs)
    for step in executor.steps():
        read = [values[name] for name in step.inputs]
        outputs = step.compute(read)
        values.update(zip(step.outputs, outputs, strict=True))
        if step.name == row.node:
            weights = plan.nodes[row.node].consts.values()
            moved = _size([*read, *outputs, *weights])
            return Job(partial(step.compute, read), _work(plan.graph, case), moved, f"{op} of {case}, {row.kernel}")
    raise HagoError("it has no step of its own")


def _float_job(hardware: Hardware, op: str, desc: OpDesc, case: Case) -> Job:
    if len({*desc.in_dtypes, desc.out_dtype}) > 1:
        raise HagoError("torch computes in one dtype")
    graph = from_torch(case.make().eval(), tuple(x[:2] for x in _inputs(case)), ops=hardware.known_ops)
    (node,) = graph.computed
    values = dict(graph.consts) | dict(zip(graph.inputs, _inputs(case), strict=True))
    read = [channels_last(values[name]).to(desc.out_dtype.torch) for name in node.inputs]

    def run() -> Tensor:
        with torch.no_grad():
            output: Tensor = compute_real(node, read, hardware.known_ops)
        return output

    return Job(run, _work(graph, case), _size([*read, run()]), f"{op} of {case}, torch")


def integer_plan(hardware: Hardware, op: str, desc: OpDesc, case: Case) -> tuple[Plan, list[Tensor]]:
    """Make a Plan of one node that runs with a signature and returns its integers, and inputs for it.

    Bits are the fewest possible, so that nothing overflows; storage and therefore time do not depend on them.

    Raises:
        HagoError: the op cannot be computed with that signature alone.
    """
    only_this = replace(hardware, ops={op: (desc,)}, other_ops="float32")
    inputs = _inputs(case)
    prepared = prepare(
        case.make().eval(), only_this, [tuple(x[:2] for x in inputs)], QuantizationOptions(estimator="max_range")
    )
    plan = prepared.resolver(prepared.space.narrowest())
    if not plan.nodes:
        raise HagoError("it would be computed in float")
    outputs = [edge for edge in plan.graph.edges if edge.dst == OUTPUT]
    return replace(plan, edges={**plan.edges, **dict.fromkeys(outputs)}), inputs


def copy_job() -> Job:
    """The job of copying more bytes than fit into caches."""
    source = torch.ones(_COPIED // 4)
    target = torch.zeros_like(source)
    return Job(partial(target.copy_, source), _COPIED // 4, 2 * _COPIED, f"copy of {_COPIED >> 20} MiB, torch")


def requantize_job(hardware: Hardware) -> Job | str:
    """The job of requantizing accumulators, or other integers, that fit into caches; or why there is none."""
    why = "no signature is computed in integers here"
    listed = [(op, desc) for op in TIMED for desc in hardware.integer_descs(op)]
    for op, desc in listed:
        try:
            plan, _ = integer_plan(hardware, op, desc, _SUMS if op == "conv2d" else TIMED[op].in_cache)
        except HagoError as error:
            why = str(error)
            continue
        ((name, node_plan),) = plan.nodes.items()
        simq = node_plan.out_simq or SimQ(node_plan.out, node_plan.operands[0])
        kernel, run = conversion(plan, name, simq, exact_kernels().calls)
        if kernel == "reference":
            why = "no kernel for it on this machine"
            continue
        source, target = simq.source, simq.target
        assert source is not None and target is not None
        value = channels_last(torch.zeros(plan.graph[name].shape or (), dtype=source.dtype.torch))
        moved = value.numel() * (source.dtype.torch.itemsize + target.dtype.torch.itemsize)
        return Job(partial(run, [value]), value.numel(), moved, f"{source.dtype} to {target.dtype}, {kernel}")
    return why


def _work(graph: Graph, case: Case) -> int:
    """The work of one call as costs count it: multiply-accumulates, or the elements of the largest value."""
    (node,) = graph.computed
    batch = case.shapes[0][0]
    values = [math.prod(graph[name].shape or ()) for name in (node.name, *graph.inputs)]
    return batch * (node_macs(graph, node, OPS) or max(values))


def _size(tensors: Iterable[Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def _inputs(case: Case) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator) for shape in case.shapes]


# ---------------------------------------------------------------- the measured copy
#: The clock if neither the system nor the file gives one: a cycle is then a nanosecond.
NOMINAL_HZ: Final = 1e9
#: The family of the processor by `platform.machine()`.
_FAMILIES: Final = {"x86_64": "x86", "amd64": "x86", "i686": "x86", "aarch64": "arm", "arm64": "arm"}
_CHIP: Final = "chip"
_MEASURED: Final = "_measured"


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure of cost, before and after it was measured.

    Args:
        of: a signature, or "chip".
        key: name of the figure in the file.
        before, now: its value in the given file and in the copy; None if it has none.
        said: the call that was timed, or the reason why none was.
    """

    of: str
    key: str
    before: float | None
    now: float | None
    said: str


@dataclass(frozen=True, slots=True, repr=False)
class Measurement(Summarized):
    """A measured copy of a hardware and its figures, returned by `measure_hardware`; prints as a table."""

    hardware: Hardware
    figures: tuple[Figure, ...]

    def to_json(self) -> dict[str, Any]:
        """The figures as JSON values, with the name of the copy and its source."""
        name, source = self.hardware.name, self.hardware.sources[-1]
        return {"name": name, "source": source, "figures": [asdict(f) for f in self.figures]}

    def summary(self) -> Summary:
        """The name of the copy, its source, and how many figures were measured."""
        measured = sum(f.now != f.before for f in self.figures)
        return Summary(
            f"Measurement of {self.hardware.name}: {measured} of {counted(len(self.figures), 'figure')} measured",
            {
                "source": self.hardware.sources[-1],
                "costs": ", ".join(f"{name} {value:.4g}" for name, value in self.hardware.cost.items()),
                "next": "hago.save_hardware(measurement.hardware, path)",
            },
        )

    def __str__(self) -> str:
        rows = [(f.of, f.key, _short(f.before), _short(f.now), f.said) for f in self.figures]
        titles = ("of", "figure", "before", "now", "timed")
        return "\n".join([f"{self.hardware.name}: {self.hardware.sources[-1]}", *table(titles, rows)])


def measure_hardware(hardware: HardwareLike) -> Measurement:
    """Time the signatures of a CPU's hardware file on this machine, with as many threads as torch is set to.

    Returns:
        A copy called `<name>_measured`, in which `macs_per_cycle` and `elements_per_cycle` of signatures,
        `requantize_per_cycle`, `bytes_per_cycle`, `clock_hz` and `cores` (the threads) are those of this machine.

    Raises:
        HardwareError: the hardware is not a CPU, or one of another family than this machine's.
    """
    given = as_hardware(hardware)
    check_processor(given)
    document = hardware_to_document(given)
    small: dict[tuple[str, str], Job] = {}
    large = [copy_job()]
    reasons: dict[tuple[str, str], str] = {}
    for name, key, jobs in signature_jobs(hardware_from_document(document, given.origin, given.known_ops)):
        if isinstance(jobs, str):
            reasons[name, key] = jobs
        else:
            small[name, key] = jobs[0]
            large.append(jobs[1])
    requantize = requantize_job(given)
    if isinstance(requantize, str):
        reasons[_CHIP, "requantize_per_cycle"] = requantize
    else:
        small[_CHIP, "requantize_per_cycle"] = requantize
    seconds = fastest([*small.values(), *large])
    rates = {k: (job.work / s, job.description) for (k, job), s in zip(small.items(), seconds, strict=False)}
    bandwidths = [(job.moved / s, job.description) for job, s in zip(large, seconds[len(small) :], strict=True)]
    figures = tuple(_figures(document, rates, bandwidths, reasons))
    return Measurement(_copy(document, given, figures), figures)


def check_processor(hardware: Hardware) -> None:
    """Refuse a hardware that cannot be timed on this machine.

    Raises:
        HardwareError: it is not a CPU, or one of another family.
    """
    family = _FAMILIES.get(platform.machine().lower(), platform.machine())
    if not hardware.processor:
        raise HardwareError(
            f"hardware {hardware.name!r} is not said to be a CPU that hago runs on, so it cannot be timed here; the "
            'file of one says "processor": "x86", "arm", or "cpu" for any'
        )
    if hardware.processor not in ("cpu", family):
        raise HardwareError(
            f"hardware {hardware.name!r} is of an {hardware.processor} CPU, and this machine's is {family}; measure it "
            "on such a machine"
        )


def _figures(
    document: Mapping[str, Any],
    rates: Mapping[tuple[str, str], tuple[float, str]],
    bandwidths: list[tuple[float, str]],
    reasons: Mapping[tuple[str, str], str],
) -> list[Figure]:
    """Convert rates per second to figures per cycle, and per core where the file has them per core."""
    chip = document.get("cost", {})
    clock, clock_source = _clock_hz(chip)
    threads = torch.get_num_threads()
    figures = [
        Figure(_CHIP, "clock_hz", chip.get("clock_hz"), clock, clock_source),
        Figure(_CHIP, "cores", chip.get("cores"), threads, "threads that were used"),
    ]

    def before(of: str, key: str) -> float | None:
        figure: float | None = (chip if of == _CHIP else document["signatures"][of]).get(key)
        return figure

    rate, description = max(bandwidths)
    text = f"{rate / 1e9:.4g} GB/s: {description}"
    figures.append(Figure(_CHIP, "bytes_per_cycle", before(_CHIP, "bytes_per_cycle"), rate / clock, text))
    for (of, key), (rate, description) in rates.items():
        text = f"{rate / 1e9:.4g} G/s: {description}"
        figures.append(Figure(of, key, before(of, key), rate / clock / threads, text))
    for (of, key), why in reasons.items():
        figures.append(Figure(of, key, before(of, key), before(of, key), f"not measured: {why}"))
    return figures


def _copy(document: Mapping[str, Any], given: Hardware, figures: tuple[Figure, ...]) -> Hardware:
    chip = dict(document.get("cost", {}))
    signatures = {name: dict(body) for name, body in document["signatures"].items()}
    for figure in figures:
        if figure.now is not None:
            (chip if figure.of == _CHIP else signatures[figure.of])[figure.key] = figure.now
    software = versions(torch.get_num_threads())
    del software["machine"], software["threads"]
    source = (
        f"measured by hago hardware measure on {processor_name()}, {datetime.now(timezone.utc):%Y-%m-%d}, "
        f"{counted(torch.get_num_threads(), 'thread')}, {', '.join(f'{k} {v}' for k, v in software.items())}"
    )
    notes = [f"{f.of}, {f.key}: {f.said}." for f in figures]
    copy = hardware_from_document(
        {
            **document,
            "name": given.name.removesuffix(_MEASURED) + _MEASURED,
            "sources": [*given.sources, source],
            "notes": [*given.notes, *notes],
            "signatures": signatures,
            "cost": chip,
        },
        "",
        given.known_ops,
    )
    check_hardware(copy)
    return copy


def _clock_hz(chip: Mapping[str, float]) -> tuple[float, str]:
    """The clock of this machine in Hz, and the source of the number."""
    for line in cpu_lines():
        key, _, value = line.partition(":")
        if key.strip() == "cpu MHz":
            return float(value) * 1e6, "as the system says"
    if "clock_hz" in chip:
        return chip["clock_hz"], "as it was: the system does not say"
    return NOMINAL_HZ, "a cycle is taken as a nanosecond: the system does not say"


def _short(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"
