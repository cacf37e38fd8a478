"""Timing: signatures of a hardware as calls of the kernels that run them here, and how long calls take."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

import torch
from torch import Tensor, nn

from hago.costing import node_macs
from hago.engine.conversions import conversion
from hago.engine.executor import Executor
from hago.engine.kernels import kernels
from hago.errors import HagoError
from hago.execute import channels_last, compute_real
from hago.frontend.torch_export import from_torch
from hago.graph import CONST, INPUT, OUTPUT, Graph
from hago.hardware import Hardware, OpDesc
from hago.measuring.timed_ops import TIMED, Case, Kind
from hago.ops import OPS
from hago.plan import Plan
from hago.prepare import prepare
from hago.types import SimQ

#: Rounds over all calls, and the seconds that a round gives to each at the least.
ROUNDS: Final = 9
SLICE: Final = 0.004
#: The figure that each kind of work is for.
FIGURES: Final[Mapping[Kind, str]] = {"macs": "macs_per_cycle", "elements": "elements_per_cycle"}
#: Bytes of a copy.
_COPIED: Final = 128 << 20
#: A convolution whose sums are of a size that caches hold.
_SUMS: Final = Case(partial(nn.Conv2d, 16, 128, 1), ((1, 16, 32, 32),))


@dataclass(frozen=True, slots=True)
class Job:
    """A call to time.

    Args:
        work: multiply-accumulates or elements of one call.
        moved: bytes that it reads and writes.
        said: what it is, in words.
    """

    run: Callable[[], object]
    work: int
    moved: int
    said: str


def fastest(jobs: Sequence[Job]) -> list[float]:
    """Seconds of one call of each, in the fastest of interleaved rounds, after warming.

    Whatever else the machine does only adds to them, so a busy machine is told from a slow one.
    """
    repeats = []
    for job in jobs:
        job.run()
        begun = time.perf_counter()
        job.run()
        repeats.append(max(1, int(SLICE / max(time.perf_counter() - begun, 1e-7))))
    found: list[list[float]] = [[] for _ in jobs]
    for _ in range(ROUNDS):
        for job, repeat, seconds in zip(jobs, repeats, found, strict=True):
            begun = time.perf_counter()
            for _ in range(repeat):
                job.run()
            seconds.append((time.perf_counter() - begun) / repeat)
    return [min(seconds) for seconds in found]


# ---------------------------------------------------------------- what stands for a signature
def signature_jobs(hardware: Hardware) -> Iterator[tuple[str, str, tuple[Job, Job] | str]]:
    """By signature and figure: a call that computes long on few bytes, and one that moves many; or why there is
    none. What neither can be timed nor has the figure is left out."""
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
    """Of the first op that runs on its signature's own dtypes here; or why the first one does not."""
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
        made = step.compute(read)
        values.update(zip(step.outputs, made, strict=True))
        if step.name == row.node:
            weights = plan.nodes[row.node].consts.values()
            moved = _size([*read, *made, *weights])
            return Job(partial(step.compute, read), _work(plan.graph, case), moved, f"{op} of {case}, {row.kernel}")
    raise HagoError("it has no step of its own")


def _float_job(hardware: Hardware, op: str, desc: OpDesc, case: Case) -> Job:
    if len({*desc.in_dtypes, desc.out_dtype}) > 1:
        raise HagoError("torch computes in one dtype")
    graph = from_torch(case.make().eval(), tuple(x[:2] for x in _inputs(case)), ops=hardware.known_ops)
    (node,) = [n for n in graph if n.op not in (INPUT, CONST)]
    values = dict(graph.consts) | dict(zip(graph.inputs, _inputs(case), strict=True))
    read = [channels_last(values[name]).to(desc.out_dtype.torch) for name in node.inputs]

    def run() -> Tensor:
        with torch.no_grad():
            found: Tensor = compute_real(node, read, hardware.known_ops)
        return found

    return Job(run, _work(graph, case), _size([*read, run()]), f"{op} of {case}, torch")


def integer_plan(hardware: Hardware, op: str, desc: OpDesc, case: Case) -> tuple[Plan, list[Tensor]]:
    """A Plan of one node that runs on a signature and gives its integers as they are, and inputs for it.

    Bits are the fewest, with which nothing overflows: what is stored, and so the time, is the same with all.

    Raises:
        HagoError: the op does not go with the signature alone.
    """
    one = replace(hardware, ops={op: (desc,)}, other_ops="float32")
    inputs = _inputs(case)
    prepared = prepare(case.make().eval(), one, [tuple(x[:2] for x in inputs)], estimator="max_range")
    plan = prepared.resolver(prepared.space.narrowest())
    if not plan.nodes:
        raise HagoError("it would be computed in float")
    outputs = [edge for edge in plan.graph.edges if edge.dst == OUTPUT]
    return replace(plan, edges={**plan.edges, **dict.fromkeys(outputs)}), inputs


def copy_job() -> Job:
    """A copy of more than caches hold."""
    source = torch.ones(_COPIED // 4)
    target = torch.zeros_like(source)
    return Job(partial(target.copy_, source), _COPIED // 4, 2 * _COPIED, f"copy of {_COPIED >> 20} MiB, torch")


def requantize_job(hardware: Hardware) -> Job | str:
    """A pass that takes sums, or other integers, of a cached size to the scale that they are read in."""
    why = "no signature is computed in integers here"
    listed = [(op, desc) for op in TIMED for desc in hardware.integer_descs(op)]
    for op, desc in listed:
        try:
            plan, _ = integer_plan(hardware, op, desc, _SUMS if op == "conv2d" else TIMED[op].in_cache)
        except HagoError as error:
            why = str(error)
            continue
        ((name, made),) = plan.nodes.items()
        simq = made.out_simq or SimQ(made.out, made.operands[0])
        kernel, run = conversion(plan, name, simq, kernels().calls)
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
    """As costs count it: multiply-accumulates, or the elements of the largest value."""
    (node,) = [n for n in graph if n.op not in (INPUT, CONST)]
    batch = case.shapes[0][0]
    values = [math.prod(graph[name].shape or ()) for name in (node.name, *graph.inputs)]
    return batch * (node_macs(graph, node, OPS) or max(values))


def _size(tensors: Iterable[Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def _inputs(case: Case) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator) for shape in case.shapes]
