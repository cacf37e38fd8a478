"""The simulator: a Plan computed on float tensors, real values in and out, at nearly the speed of the float model.

The evaluator makes a `Simulator` per trial, unless all accumulators are proved safe and native kernels are faster;
`Quantizer.simulate` gives one to users. Its outputs equal those of the integer model bit for bit.

Values are centered integers in float32. Where a sum may exceed 2**24, an op that can be split into few exact float32
sums (`IntegerForm.split`) adds these in float64, and any other op runs in float64. Edges of one producer with the same
target share one requantization. Float nodes run on contiguous values, so that they are the same calls as the integer
model's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn

from hago.arithmetic.numerics import Conversion, Lost, clip_range, conversion, dequantize
from hago.arithmetic.types import Edge, QParams, SimQ
from hago.caching import LRU
from hago.graph import (
    CONST,
    INPUT,
    OUTPUT,
    Node,
    autocast_off,
    channels_last,
    compute_laid_out,
    flatten_inputs,
    laid_out,
    nest_outputs,
)
from hago.graph.schedule import Schedule, Step, make_schedule, run_schedule
from hago.plan import NodePlan, Plan, fuse_clamps, redundant_clamps
from hago.serialization.summary import Summarized, Summary
from hago.serialization.text_table import counted

#: The most bytes of float tensors that one `Carriers` keeps.
CARRIER_BYTES: Final = 1 << 30

#: Called with an integer node, its accumulators before overflow, and what these lose where partial sums overflow (None
#: where none can).
Watch = Callable[[Node, Tensor, Lost | None], None]
#: Called with a node and its value.
OnValue = Callable[[Node, Any], None]
#: Called with an edge of an integer node and the operand that arrives on it: centered integers, or real values.
OnSimulatedEdge = Callable[[Edge, Any], None]
#: The integers of a node at one target: (source node, identity of the target qparams).
Shared = tuple[str, int]


class Carriers:
    """Integer constants as float tensors, shared by the simulators of one search; bounded by CARRIER_BYTES."""

    def __init__(self) -> None:
        self._kept: LRU[tuple[int, torch.dtype], tuple[Tensor, Tensor]] = LRU(
            CARRIER_BYTES, lambda pair: pair[1].numel() * pair[1].element_size()
        )

    def __call__(self, integers: Tensor, dtype: torch.dtype) -> Tensor:
        # the tensor is kept with its float form, so that no other tensor can get its id
        return self._kept.get_or_make((id(integers), dtype), lambda: (integers, channels_last(integers.to(dtype))))[1]


class Simulator(Summarized, nn.Module):
    """A Plan as a module: real values in, real values out.

    Args:
        plan: the Plan to simulate.
        carriers: constants as floats, shared by the simulators of one search.
        watch: called with the accumulators of every integer node before overflow.
    """

    def __init__(self, plan: Plan, carriers: Carriers | None = None, watch: Watch | None = None) -> None:
        super().__init__()
        self.plan, self.watch = plan, watch
        self.carriers = carriers or Carriers()
        self.fused, self.redundant = fuse_clamps(plan), redundant_clamps(plan)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The simulated outputs, nested as those of the model."""
        graph = self.plan.graph
        return nest_outputs(graph, self.run(flatten_inputs(graph, args, kwargs)))

    def run(
        self, inputs: Sequence[Tensor], on_value: OnValue | None = None, on_edge: OnSimulatedEdge | None = None
    ) -> list[Any]:
        """The simulated outputs of flat inputs.

        Args:
            on_value: called with every node and its value on the carrier.
            on_edge: called with every edge of an integer node and the operand that arrives there. With neither, clamps
                are fused into their readers or operands, which leaves the outputs the same.
        """
        graph = self.plan.graph
        watched = on_value is not None or on_edge is not None
        scheduled = make_schedule(self.steps(fuse=False, on_edge=on_edge), self.ends) if watched else self._unwatched
        values = self.begin(inputs)

        def report(step: Step, outputs: Sequence[Any]) -> None:
            if on_value is not None and step.name in graph.by_name:
                on_value(graph[step.name], outputs[0])

        with torch.no_grad(), autocast_off():
            if on_value is not None:
                for name in graph.inputs:
                    on_value(graph[name], values[name])
            run_schedule(scheduled, values, Step.run, report if watched else None)
        return self.end(values)

    def summary(self) -> Summary:
        """The facts of its Plan."""
        facts = self.plan.summary().facts
        return Summary(
            f"Simulator of a network of {counted(len(self.plan.graph.computed), 'node')} for {self.plan.hardware.name}",
            facts,
        )

    @functools.cached_property
    def _unwatched(self) -> Schedule[Step]:
        return make_schedule(self.steps(), self.ends)

    @property
    def ends(self) -> tuple[str, ...]:
        """The names of the values that `end` reads."""
        return self.plan.graph.outputs

    def begin(self, inputs: Sequence[Tensor]) -> dict[str, Any]:
        """The values that the steps start from: flat inputs and constants."""
        graph = self.plan.graph
        return {**graph.consts, **{n: channels_last(x) for n, x in zip(graph.inputs, inputs, strict=True)}}

    def end(self, values: Mapping[str, Any]) -> list[Any]:
        """The real outputs, from the values at `ends`."""
        plan = self.plan
        with torch.no_grad():
            return [
                laid_out(carrier_to_real(plan.edges[Edge(OUTPUT, i)], values[n]))
                for i, n in enumerate(plan.graph.outputs)
            ]

    def steps(self, *, fuse: bool = True, on_edge: OnSimulatedEdge | None = None) -> tuple[Step, ...]:
        """The steps in order: one for every quantization or requantization, shared by edges with the same source and
        target, and one for every node.

        Args:
            fuse: leave out clamps that the clipping of their readers or of their operand replaces.
            on_edge: as in `run`.
        """
        return tuple(_Stepping(self, fuse=fuse, on_edge=on_edge))


class _Stepping:
    """Iterates over the steps of one simulator, making each when it is reached."""

    def __init__(self, owner: Simulator, *, fuse: bool, on_edge: OnSimulatedEdge | None) -> None:
        self.plan, self.carriers, self.watch = owner.plan, owner.carriers, owner.watch
        self.on_edge = on_edge
        self.skipped = owner.fused.skipped | owner.redundant if fuse else frozenset()
        self.simqs = {**owner.plan.edges, **(owner.fused.simqs if fuse else {})}
        self.requantized: dict[Shared, str] = {}

    def __iter__(self) -> Iterator[Step]:
        for node in self.plan.graph:
            if node.op in (INPUT, CONST) or node.name in self.skipped:
                continue
            node_plan = self.plan.nodes.get(node.name)
            if node_plan is None:
                yield self._float(node)
            else:
                yield from self._integer(node, node_plan)

    def _origin(self, source: str) -> str:
        """The node that computes the value of `source`: itself, or the first node before it that is not skipped."""
        while source in self.skipped:
            (source,) = self.plan.graph[source].inputs
        return source

    def _float(self, node: Node) -> Step:
        simqs = [self.simqs[e] for e in node.edges]
        # a float node's weight may be stored as integers, which it dequantizes
        ops, weights = self.plan.ops, self.plan.weights
        stored = {e.slot: e for e in node.edges if e in weights}

        def compute(values: Sequence[Any]) -> tuple[Any]:
            operands = [weights[stored[slot]].integers if slot in stored else v for slot, v in enumerate(values)]
            real = [carrier_to_real(s, v) for s, v in zip(simqs, operands, strict=True)]
            return (compute_laid_out(node, real, ops),)

        inputs = tuple(map(self._origin, node.inputs))
        digest = repr((node.name, *(weights[e].key for e in stored.values()))) if stored else node.name
        digest += self.plan.graph.correction_hash
        return Step(inputs, (node.name,), compute, digest.encode(), spans=(None,))

    def _integer(self, node: Node, node_plan: NodePlan) -> Iterator[Step]:
        """The steps of the node's edges that no earlier edge shares, then the node's own."""
        inputs: dict[int, str] = {}
        for slot, (edge, source) in enumerate(zip(node.edges, node.inputs, strict=True)):
            simq = self.simqs[edge]
            if slot in node_plan.consts:
                continue
            inputs[slot] = self._origin(source)
            # an operand that is not quantized is read as a real value; see `_operand`
            if simq is not None and node_plan.operands[slot] is not None:
                key = (source, id(simq.target))
                if key not in self.requantized:
                    self.requantized[key] = str(edge)
                    yield self._edge(str(edge), inputs[slot], simq)
                inputs[slot] = self.requantized[key]
        yield self._node(node, node_plan, inputs)

    def _edge(self, name: str, source: str, simq: SimQ) -> Step:
        assert simq.target is not None
        convert = self._conversion(simq)

        def compute(values: Sequence[Any]) -> tuple[Tensor]:
            return (convert(values[0]),)

        return Step((source,), (name,), compute, repr(simq.key).encode(), spans=(centered_span(simq.target),))

    def _node(self, node: Node, node_plan: NodePlan, inputs: Mapping[int, str]) -> Step:
        slots = range(len(node.inputs))
        convert = None if node_plan.out_simq is None else self._conversion(node_plan.out_simq)

        def compute(values: Sequence[Any]) -> tuple[Tensor]:
            arrived = dict(zip(inputs, values, strict=True))
            operands = [self._operand(node, node_plan, slot, arrived.get(slot)) for slot in slots]
            if self.on_edge is not None:
                for edge, operand in zip(node.edges, operands, strict=True):
                    self.on_edge(edge, operand)
            if node_plan.table is not None:
                return (node_plan.look_up(operands[0]),)
            c = self.plan.ops[node.op].compute_int_in_parts(node_plan.attrs, operands, node_plan.parts)
            lost = node_plan.lost(operands)
            if self.watch is not None:
                self.watch(node, c, lost)
            stored = node_plan.apply_register(c, lost)
            return (stored if convert is None else convert(stored),)

        watched = self.watch is not None and node_plan.table is None and not node_plan.proved
        digest = node.name.encode() + node_plan.digest
        spans = (centered_span(node_plan.out),)
        return Step(tuple(inputs.values()), (node.name,), compute, digest, spans=spans, watched=watched)

    def _conversion(self, simq: SimQ) -> Conversion:
        """The conversion of an edge, made when the first batch needs it."""
        made = functools.cache(lambda: conversion(simq, self.plan.hardware.requantize))
        return lambda value: made()(value)

    def _operand(self, node: Node, node_plan: NodePlan, slot: int, value: Any) -> Any:
        carrier = node_plan.operand_carrier
        if slot in node_plan.consts:
            return self.carriers(node_plan.consts[slot], carrier)
        if node_plan.operands[slot] is None:
            return laid_out(carrier_to_real(self.simqs[node.edges[slot]], value))
        return value.to(carrier)


def centered_span(qparams: QParams) -> tuple[int, int]:
    """The least and the greatest centered integer of a tensor, by which `value_cache` picks the dtype that it keeps."""
    low, high = clip_range(qparams)
    return int(torch.as_tensor(low).min()), int(torch.as_tensor(high).max())


def carrier_to_real(simq: SimQ | None, value: Any) -> Any:
    """A value as a float node reads it: dequantized if it holds integers."""
    return value if simq is None or simq.source is None else dequantize(value, simq.source)
