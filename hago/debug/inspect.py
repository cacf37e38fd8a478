"""Inspect: run the float model, the simulator and the integer model in lockstep and compare every node.

One pass over each batch. The whole simulator drives; as each of its values appears, the float model
and the integer model compute the same node, the three are compared, and a value is dropped after its
last reader. So memory is that of the widest cut of the graph, three times over.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from hago.debug.causes import NodeSplitter, Split
from hago.debug.graph_statistic import GraphStatistic
from hago.debug.summary import summarize
from hago.debug.tally import Tally
from hago.errors import DataError
from hago.execute import compute_real, last_readers
from hago.frontend.data import Batch
from hago.graph import CONST, INPUT, OUTPUT, Graph, Node
from hago.numerics import Lost, dequantize
from hago.plan import Plan
from hago.realization import IntegerModel, center
from hago.simulator import Simulator
from hago.types import Edge

__all__ = ["GraphStatistic", "inspect_plan"]


def inspect_plan(plan: Plan, batches: Iterable[Batch]) -> GraphStatistic:
    """Float against simulated against integer for every node, and the cause of every error.

    The causes are defined in `hago.debug.causes`, the rule that names the first node to go wrong in
    `GraphStatistic.first_wrong`.

    Args:
        plan: what to inspect.
        batches: flat inputs in the graph's order; each is read once.

    Raises:
        DataError: no batches, or a batch without the model's inputs.
    """
    lockstep = Lockstep(plan)
    count = samples = 0
    for batch in batches:
        if len(batch.inputs) != len(plan.graph.inputs):
            raise DataError(
                f"batch {count} holds {len(batch.inputs)} tensors; the model takes {len(plan.graph.inputs)}: "
                f"{', '.join(plan.graph.inputs)}"
            )
        lockstep.feed(batch.inputs)
        count, samples = count + 1, samples + batch.size
    if count == 0:
        raise DataError("there is nothing to inspect: the data set is empty; pass at least one batch")
    rows = tuple(
        summarize(plan, node, lockstep.tallies[node.name], lockstep.splitters.get(node.name))
        for node in plan.graph
        if node.op != CONST
    )
    return GraphStatistic(plan.hardware.name, count, samples, rows, plan.graph.outputs)


class Lockstep:
    """The three executions of one plan, node by node; lives for one inspection.

    Attributes:
        tallies: what was found, by node.
        splitters: of the integer nodes.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan, self.graph = plan, plan.graph
        computed = [n for n in plan.graph if n.op not in (INPUT, CONST)]
        self.tallies = {n.name: Tally() for n in plan.graph if n.op != CONST}
        self.splitters = {n.name: NodeSplitter(plan, n) for n in computed if n.name in plan.nodes}
        self._integer_models = {n.name: IntegerModel(alone(plan, n)) for n in computed}
        self._simulator = Simulator(plan, watch=self._watch)
        self._done = last_readers(plan.graph)
        self._accumulators: dict[str, Tensor] = {}
        self._lost: dict[str, Lost] = {}
        self._inputs: dict[str, Tensor] = {}
        self._float: dict[str, Any] = {}
        self._carriers: dict[str, Any] = {}
        self._simulated: dict[str, Any] = {}
        self._integer: dict[str, Any] = {}
        self._exact: dict[str, bool] = {}

    def feed(self, inputs: Sequence[Tensor]) -> None:
        """Run one batch."""
        consts = self.graph.consts
        for values in (self._float, self._carriers, self._simulated, self._integer):
            values.clear()
            values.update(consts)
        self._exact = dict.fromkeys(consts, True)
        self._inputs = dict(zip(self.graph.inputs, inputs, strict=True))
        self._simulator.run(inputs, self._see)

    def _watch(self, node: Node, accumulator: Tensor, lost: Lost | None = None) -> None:
        self._accumulators[node.name] = accumulator
        if lost is not None:
            self._lost[node.name] = lost

    def _see(self, node: Node, carrier: Any) -> None:
        """The simulator has computed a node: so do the others, and compare."""
        name = node.name
        if node.op == INPUT:
            self._float[name] = self._integer[name] = self._inputs[name]
        else:
            with torch.no_grad():
                self._float[name] = compute_real(node, [self._float[s] for s in node.inputs], self.plan.ops)
            self._integer[name] = self._compute_integer(node)
        self._carriers[name] = carrier
        qparams = self.plan.nodes[name].out if name in self.plan.nodes else None
        self._simulated[name] = carrier if qparams is None else dequantize(carrier, qparams)
        self._compare(node, self.tallies[name])
        for done in self._done.get(name, ()):
            for values in (self._float, self._carriers, self._simulated, self._integer):
                values.pop(done, None)

    def _compute_integer(self, node: Node) -> Any:
        inputs = [self._integer[s] for s in dict.fromkeys(node.inputs) if self.graph[s].op != CONST]
        return self._integer_models[node.name].run(inputs)[0]

    # ------------------------------------------------------------ comparison
    def _compare(self, node: Node, tally: Tally) -> None:
        name, realized = node.name, self._integer[node.name]
        plan = self.plan.nodes.get(name)
        carrier = self._carriers[name] if plan is None else self._carriers[name].to(torch.int64)
        if plan is not None:
            realized = center(realized, plan.out)
        different, largest = differences(carrier, realized)
        tally.differences += different
        tally.max_difference = max(tally.max_difference, largest)
        reference, simulated = self._float[name], self._simulated[name]
        if not isinstance(reference, Tensor):
            self._exact[name] = pytree_equal(reference, simulated)
            return
        other = None
        if different:
            other = realized if plan is None else dequantize(realized, plan.out)
        tally.add_values(reference, simulated, other)
        split = self._split(node, reference, simulated)
        tally.add_split(split)
        self._exact[name] = same(reference, simulated)

    def _split(self, node: Node, reference: Tensor, simulated: Tensor) -> Split:
        splitter = self.splitters.get(node.name)
        if splitter is None:
            return self._split_float(node, reference, simulated)
        with torch.no_grad():
            return splitter(
                reference,
                [self._simulated[s] for s in node.inputs],
                [self._carriers[s] for s in node.inputs],
                self._accumulators.pop(node.name, None),
                simulated,
                exact_sources=all(self._exact[s] for s in node.inputs),
                lost=self._lost.pop(node.name, None),
            )

    def _split_float(self, node: Node, reference: Tensor, simulated: Tensor) -> Split:
        """All error of a float node is inherited, but for what a weight that rests as integers adds."""
        if not any(e in self.plan.weights for e in node.edges):
            return Split(reference, (("inherited", simulated),))
        inherited = reference
        if not all(self._exact[s] for s in node.inputs):
            with torch.no_grad():
                inherited = compute_real(node, [self._simulated[s] for s in node.inputs], self.plan.ops)
        return Split(reference, (("inherited", inherited), ("constants", simulated)))


def alone(plan: Plan, node: Node) -> Plan:
    """The plan of one node whose producers are inputs, so that it can be run by itself."""
    graph = plan.graph
    sources = [graph[s] for s in dict.fromkeys(node.inputs)]
    inputs = tuple(s.name for s in sources if s.op != CONST)
    nodes = tuple(s if s.op == CONST else Node(s.name, INPUT, (), {}, s.shape) for s in sources)
    consts = {s.name: graph.consts[s.name] for s in sources if s.op == CONST}
    edges = {e: plan.edges[e] for e in node.edges} | {Edge(OUTPUT, 0): None}
    planned = {node.name: plan.nodes[node.name]} if node.name in plan.nodes else {}
    weights = {e: plan.weights[e] for e in node.edges if e in plan.weights}
    return Plan(Graph((*nodes, node), inputs, (node.name,), consts), plan.hardware, plan.ops, planned, edges, weights)


def same(a: Tensor, b: Tensor) -> bool:
    """Whether two values are equal, NaN to NaN."""
    return a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all())


def differences(a: Any, b: Any) -> tuple[int, float]:
    """How many leaves' entries of two values differ, and by how much at most.

    Floats differ where their bits do: 0 from -0, but no NaN from itself.
    """
    found, largest = 0, 0.0
    for x, y in zip(pytree.tree_leaves(a), pytree.tree_leaves(b), strict=True):
        if not isinstance(x, Tensor):
            found += int(x != y)
            continue
        apart = _bits(x) != _bits(y)
        wrong = int(apart.sum())
        if wrong:
            found += wrong
            largest = max(largest, float((x[apart].double() - y[apart].double()).abs().nan_to_num().max()))
    return found, largest


def pytree_equal(a: Any, b: Any) -> bool:
    """Whether two nested values are equal."""
    return differences(a, b)[0] == 0


def _bits(x: Tensor) -> Tensor:
    views = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return x.contiguous().view(views[x.element_size()]) if x.is_floating_point() else x
