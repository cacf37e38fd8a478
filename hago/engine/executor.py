"""Executor: a Plan as calls of the fastest kernels that are exact on this machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from hago.engine.kernels import Kernels, kernels
from hago.engine.lowering import Lowering
from hago.engine.pack import Packs
from hago.engine.report import KernelRow, KernelTable
from hago.engine.stretches import stretches
from hago.engine.wiring import wire
from hago.graph import CONST, INPUT
from hago.plan import Plan
from hago.steps import Step, last_uses, run_steps

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
        self.stretches = stretches(self._steps, lowering.sizes, inputs, self.ends, cached_bytes) if inputs else ()

    def run(self, inputs: Sequence[Tensor]) -> list[Any]:
        """The outputs of flat inputs, those of the integer model bit for bit."""
        size = len(inputs[0]) if inputs and inputs[0].ndim else 0
        if not any(s.at_once < size for s in self.stretches) or any(len(x) != size for x in inputs):
            return self._run(inputs)
        values = self.begin(inputs)
        with torch.no_grad():
            for stretch in self.stretches:
                stretch.run(values, size)
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
