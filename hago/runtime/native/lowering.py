"""Lowering: turns a Plan into the Steps that an `Executor` runs.

Every node gets the kernel that `kernels.select_kernel` selects for it, together with the nodes that the kernel can
compute in its epilogue. If a reader requests a value in a form that its kernel does not store, a further step converts
the whole value: it quantizes, requantizes or dequantizes it. The root of a value is the node that computes it, past
the nodes that the wiring skips.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hago.arithmetic.types import Edge, SimQ
from hago.graph import CONST, INPUT, OUTPUT, Node
from hago.graph.schedule import Step
from hago.plan import Plan
from hago.runtime.native.calls import QuantizeCall, RowsCall
from hago.runtime.native.epilogue import Epilogue, FusedEpilogues, StoredOutput, largest_value
from hago.runtime.native.kernels import REFERENCE, Call, Run, SelectedKernel, select_kernel
from hago.runtime.native.layouts import RequestedLayouts, Wiring, wire
from hago.runtime.native.requantize import (
    channel_axis,
    period,
    quantization_of,
    requantization_of,
    stored_type,
    to_real,
)
from hago.runtime.native.self_test import ExactKernels
from hago.runtime.native.weights import KernelConstantCache
from hago.runtime.reference import move_stored, real_value


def conversion(plan: Plan, root: str, simq: SimQ, calls: Any) -> tuple[str, Run]:
    """The kernel that applies a conversion to the value of a node, and the function that calls it. `Lowering` and
    `analysis.hardware_timing` call it.

    Args:
        root: the node whose value is converted.
        calls: the library of native kernels; None to use the reference arithmetic.
    """
    native_call: Run | None = None
    if calls is not None:
        native_call = _quantize(plan, root, simq, calls) if simq.source is None else _rows(plan, root, simq, calls)
    if native_call is not None:
        return f"native {simq.kind}", native_call
    how = plan.hardware.requantize
    if simq.target is None:
        return "reference", lambda values: (real_value(simq, values[0]),)
    return "reference", lambda values: (move_stored(values[0], simq, how),)


def _quantize(plan: Plan, root: str, simq: SimQ, calls: Any) -> Run | None:
    """Quantization of float32 values. Float nodes can make values of other dtypes; the reference quantizes those."""
    target, node, how = simq.target, plan.graph[root], plan.hardware.requantize
    assert target is not None
    dtype, quantization = node.dtype if node.op == INPUT else "float32", quantization_of(target, how)
    if dtype != "float32" or quantization is None:
        return None

    def in_torch(values: Sequence[Any]) -> Sequence[Any]:
        return (move_stored(values[0], simq, how),)

    return QuantizeCall(calls, in_torch, quantization)


def _rows(plan: Plan, root: str, simq: SimQ, calls: Any) -> RowsCall | None:
    """Requantization or dequantization of stored integers; None where no native kernel can do it."""
    source, shape = simq.source, plan.graph[root].shape
    assert source is not None
    code, node_plan = stored_type(source), plan.nodes.get(root)
    axis = channel_axis(source.scale, len(shape or ()))
    if code is None or node_plan is None or not shape or isinstance(axis, str):
        return None
    channels = 1 if axis is None else shape[axis]
    if simq.target is None:
        requantization = to_real(source, channels)
    elif stored_type(simq.target) is None:
        return None
    else:
        requantization = requantization_of(simq, plan.hardware.requantize, channels, largest_value(node_plan))
    if isinstance(requantization, str):
        return None
    epilogue = Epilogue(channels, [], stored=[StoredOutput(root, requantization, simq.target)]).build()
    return RowsCall(calls, epilogue, (code, int(source.zero_point)), axis, period(channels))


# ---------------------------------------------------------------- lowering
@dataclass(frozen=True, slots=True)
class KernelUse:
    """The nodes that one call of a kernel computes, in order, and why the kernel was selected."""

    nodes: tuple[str, ...]
    kernel: str
    why: str


@dataclass(frozen=True, slots=True)
class LoweredPlan:
    """The Steps of a Plan, made by `lower`, and what an `Executor` must know of them.

    Args:
        steps: in order.
        sizes: by step, the bytes of the largest value that it makes of one sample.
        uses: the calls of kernels, in order.
        skipped: the nodes that no kernel computes, because their value is that of their operand.
        ends: the names of the values that are the graph's outputs.
        by_sample: whether every sample of a batch is computed independently of the others.
    """

    steps: tuple[Step, ...]
    sizes: tuple[int, ...]
    uses: tuple[KernelUse, ...]
    skipped: frozenset[str]
    ends: tuple[str, ...]
    by_sample: bool


def lower(plan: Plan, constant_cache: KernelConstantCache, kernels: ExactKernels) -> LoweredPlan:
    """Lower a Plan to Steps. Called once by every `Executor`.

    Args:
        constant_cache: packed weights and requantizations, shared by the executors of one search.
        kernels: the kernels that may be selected.
    """
    return Lowering(wire(plan), constant_cache, kernels).lower()


class Lowering:
    """The state of one call of `lower`. Kernels read it when they emit their calls (`kernels.LoweringState`).

    Args:
        wiring: the Plan as `layouts.wire` rewrote it, and its skipped nodes, whose value is that of their operand.
    """

    def __init__(self, wiring: Wiring, constant_cache: KernelConstantCache, kernels: ExactKernels) -> None:
        self.wiring, self.plan, self.graph = wiring, wiring.plan, wiring.plan.graph
        self.constant_cache, self.kernels = constant_cache, kernels
        #: The kernel of every node that is computed.
        self.selected: dict[str, SelectedKernel] = {
            n.name: select_kernel(self.plan, n, kernels) for n in self.graph.computed if n.name not in wiring.skipped
        }
        self.layouts = RequestedLayouts(wiring, {name: s.kernel for name, s in self.selected.items()})
        #: The names of the values that the steps so far, and the caller, store.
        self.available: set[str] = set(self.graph.consts)
        self.epilogues = FusedEpilogues(self.layouts, self.available, constant_cache)
        self.steps: list[Step] = []
        self.sizes: list[int] = []
        self.uses: list[KernelUse] = []

    def lower(self) -> LoweredPlan:
        """Add the steps of all nodes, in order."""
        computed: set[str] = set()
        for node in self.graph:
            if node.op in (INPUT, CONST):
                self.available.add(node.name)
                self._convert(node.name)
            elif node.name in self.selected and node.name not in computed:
                computed.update(self._compute(node))
        ends = tuple(self.layouts.names[Edge(OUTPUT, i)] for i in range(len(self.graph.outputs)))
        steps, sizes, uses = tuple(self.steps), tuple(self.sizes), tuple(self.uses)
        return LoweredPlan(steps, sizes, uses, self.wiring.skipped, ends, self._by_sample())

    def _compute(self, node: Node) -> tuple[str, ...]:
        """Add the step of a node's kernel, or of the reference arithmetic if the kernel has no call for it.

        Returns:
            The nodes that the step computes.
        """
        selected = self.selected[node.name]
        call, why = selected.kernel.emit(self, node), selected.why
        if isinstance(call, str):
            why, call = call, REFERENCE.emit(self, node)
        assert isinstance(call, Call)
        last = call.nodes[-1]
        digests = [(n, self._digest(n)) for n in call.nodes]
        edges = [self._edge_key(e) for n in call.nodes for e in self.graph[n].edges]
        conversions = [self._conversion_key(last, name) for name in call.outputs]
        digest = repr((call.kernel, digests, edges, conversions))
        self._add(last, call.inputs, call.outputs, call.run, digest)
        self.uses.append(KernelUse(call.nodes, call.kernel, why))
        self._convert(last)
        return call.nodes

    def _digest(self, name: str) -> object:
        """What a node computes, its constants included: corrections change those of float nodes, too."""
        plan = self.plan.nodes.get(name)
        if plan is not None:
            return plan.digest
        weights = (self.plan.weights.get(e) for e in self.graph[name].edges)
        return (self.graph.correction_hash, *(w.key for w in weights if w is not None))

    def _convert(self, root: str) -> None:
        """Add steps for the requested conversions of a value that its kernel does not store."""
        for name, simq in self.layouts.conversions(root).items():
            if name not in self.available:
                assert simq is not None
                kernel, run = conversion(self.plan, root, simq, self.kernels.calls)
                self._add(root, (root,), (name,), run, repr((kernel, simq.key)))

    def _add(self, root: str, inputs: tuple[str, ...], outputs: tuple[str, ...], run: Run, digest: str) -> None:
        """Add a step that makes the value of a root, or conversions of it."""
        self.steps.append(Step(inputs, outputs, run, digest.encode(), spans=(None,) * len(outputs)))
        self.sizes.append(max(self._bytes(root, name) for name in outputs))
        self.available.update(outputs)

    def _edge_key(self, edge: Edge) -> object:
        simq = self.plan.edges[edge]
        return None if simq is None else simq.key

    def _conversion_key(self, root: str, name: str) -> object:
        """The key that distinguishes the conversions of a value."""
        simq, node_plan = self.layouts.conversions(root).get(name), self.plan.nodes.get(root)
        return simq.key if simq is not None else None if node_plan is None else node_plan.out.key

    def _bytes(self, root: str, name: str) -> int:
        """The bytes of a value at batch 1."""
        simq, node_plan = self.layouts.conversions(root).get(name), self.plan.nodes.get(root)
        qparams = simq.target if simq is not None else None if node_plan is None else node_plan.out
        each = 4 if qparams is None else qparams.dtype.torch.itemsize
        return each * math.prod(self.graph[root].shape or ())

    def _by_sample(self) -> bool:
        """Whether every sample of a batch is computed independently of the others."""
        ends = [self.graph[name].shape for name in (*self.graph.inputs, *self.graph.outputs)]
        batch_first = all(shape is not None and shape[:1] == (1,) for shape in ends)
        return bool(self.selected) and batch_first and all(map(self._keeps_samples, self.selected))

    def _keeps_samples(self, name: str) -> bool:
        """Whether the first axis of a node's value is the batch and its kernel computes every sample by itself."""
        node = self.graph[name]
        batch_first = node.shape is not None and node.shape[:1] == (1,)
        return batch_first and self.selected[name].kernel.by_sample(self.plan, node)
