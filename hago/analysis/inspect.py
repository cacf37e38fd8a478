"""Inspection: run the float model, the simulator and the integer model in lockstep, and compare every node.

`inspect_plan` makes one pass over each batch. The simulator drives it: whenever it has computed a node, the float model
and the integer model compute the same node, the three values are compared, and values are dropped after their last
reader. At most, the values of the widest cut of the graph are in memory, four times (float, carrier, simulated and
stored). A Tally per node sums over the batches, and `summarize` makes of it the NodeStatistic of
`hago.analysis.graph_statistic`, where the printed table stands, too.

Sums are float64 and over finite values: a position where any of the compared values is infinite or NaN (as in masks of
attention) is left out.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import torch
from torch import Tensor

from hago.analysis.error_causes import (
    CAUSES,
    OUT,
    Cause,
    EdgeSample,
    NodeSplitter,
    Split,
    free_integers,
    limit,
    quantized_sample,
)
from hago.analysis.graph_statistic import (
    CauseStatistic,
    EdgeRole,
    EdgeStatistic,
    GraphStatistic,
    NodeStatistic,
    ValueStatistic,
)
from hago.arithmetic.equality import differences, equal
from hago.arithmetic.numerics import Lost, dequantize
from hago.arithmetic.types import Edge, QParams
from hago.data import Batch
from hago.errors import DataError
from hago.graph import CONST, INPUT, OUTPUT, Graph, Node, compute_real
from hago.plan import NodePlan, Plan, Verdict
from hago.runtime import IntegerModel, center
from hago.search.objective import decibels
from hago.serialization.text_table import counted
from hago.simulation import Simulator

#: Number of values that are converted to float64 at a time.
INSPECTED_AT_ONCE: Final = 1 << 17
#: A channel of a weight whose largest |q| is below this is called narrow: it has less than 4 bits.
NARROW: Final = 8


# ---------------------------------------------------------------- sums over batches
@dataclass(slots=True)
class Moments:
    """Count, range, mean and sum of squared deviations, merged chunk by chunk.

    References:
        T. Chan, G. Golub, R. LeVeque, "Updating formulae and a pairwise algorithm for computing
        sample variances", 1979.
    """

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0
    low: float = math.inf
    high: float = -math.inf

    def add(self, x: Tensor) -> None:
        """Add a flat float64 tensor of finite values."""
        if not x.numel():
            return
        mean, n = float(x.mean()), x.numel()
        squares = float((x - mean).square().sum())
        total, delta = self.count + n, mean - self.mean
        self.squares += squares + delta * delta * self.count * n / total
        self.mean += delta * n / total
        self.count = total
        low, high = torch.aminmax(x)
        self.low, self.high = min(self.low, float(low)), max(self.high, float(high))

    @property
    def deviation(self) -> float:
        """The standard deviation of the values that were added."""
        return math.sqrt(self.squares / self.count) if self.count else 0.0


def _zeros() -> list[float]:
    return [0.0] * len(CAUSES)


def _gram() -> Tensor:
    return torch.zeros(len(CAUSES), len(CAUSES), dtype=torch.float64)


@dataclass(slots=True)
class Tally:
    """The sums over all batches for one node. Lockstep fills it; `summarize` reads it at the end.

    Attributes:
        products: sums of the products of every pair of causes (CAUSES x CAUSES).
        largest: the largest magnitude of each cause.
        signal, simulated_signal, cross, noise: sums of F^2, S^2, F * S and (S - F)^2, F being float and
            S simulated values.
        max_error: the largest |S - F|.
        left_out: number of positions with an infinite or NaN value.
        differences: number of values that differ between the simulator and the integer model.
        max_difference: the largest difference, in quanta; in real units for a float node.
    """

    float_values: Moments = field(default_factory=Moments)
    simulated_values: Moments = field(default_factory=Moments)
    integer_values: Moments | None = None
    products: Tensor = field(default_factory=_gram)
    largest: list[float] = field(default_factory=_zeros)
    count: int = 0
    signal: float = 0.0
    simulated_signal: float = 0.0
    cross: float = 0.0
    noise: float = 0.0
    max_error: float = 0.0
    left_out: int = 0
    edges: dict[int, EdgeSample] = field(default_factory=dict)
    overflows: int = 0
    accumulators: int = 0
    differences: int = 0
    max_difference: float = 0.0

    def add_split(self, split: Split) -> None:
        """Add the causes of one batch."""
        for slot, sample in split.edges.items():
            self.edges[slot] = self.edges[slot] + sample if slot in self.edges else sample
        self.overflows += split.overflows
        self.accumulators += split.accumulators
        for chunk in _chunks([split.reference, *(value for _, value in split.steps)]):
            together = torch.stack(chunk)
            if not math.isfinite(float(together.sum())):  # a finite sum shows that all values are finite
                finite = torch.isfinite(together).all(0)
                self.left_out += int((~finite).sum())
                together = together[:, finite]
            self._add_errors(together, split)

    def _add_errors(self, values: Tensor, split: Split) -> None:
        """Add the errors of one chunk; `values` has a row for the reference and one for each step."""
        reference, simulated = values[0], values[-1]
        if not reference.numel():
            return
        added = torch.zeros(len(CAUSES), reference.numel(), dtype=torch.float64)
        for i, (cause, _) in enumerate(split.steps):
            added[CAUSES.index(cause)] += values[i + 1] - values[i]
        self.products += added @ added.T
        low, high = torch.aminmax(added, dim=1)
        peaks = torch.maximum(-low, high).tolist()
        self.largest = [max(a, b) for a, b in zip(self.largest, peaks, strict=True)]
        error = simulated - reference
        self.count += reference.numel()
        self.signal += float(reference.dot(reference))
        self.simulated_signal += float(simulated.dot(simulated))
        self.cross += float(reference.dot(simulated))
        self.noise += float(error.dot(error))
        self.max_error = max(self.max_error, float(error.abs().max()))

    def add_values(self, reference: Tensor, simulated: Tensor, realized: Tensor | None) -> None:
        """Add the values of one batch; `realized` is None if it equals `simulated`."""
        if realized is not None and self.integer_values is None:
            self.integer_values = copy.copy(self.simulated_values)  # until now they were equal
        self._add_moments(self.float_values, reference)
        self._add_moments(self.simulated_values, simulated)
        if self.integer_values is not None:
            self._add_moments(self.integer_values, simulated if realized is None else realized)

    @staticmethod
    def _add_moments(moments: Moments, x: Tensor) -> None:
        for (chunk,) in _chunks([x]):
            moments.add(chunk if math.isfinite(float(chunk.sum())) else chunk[torch.isfinite(chunk)])


def _chunks(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Flatten tensors of equal size and yield them in chunks of float64, one list per chunk."""
    flat = [t.reshape(-1) for t in tensors]
    for start in range(0, flat[0].numel(), INSPECTED_AT_ONCE):
        yield [t[start : start + INSPECTED_AT_ONCE].to(torch.float64) for t in flat]


# ---------------------------------------------------------------- from sums to statistics
def summarize(plan: Plan, node: Node, tally: Tally, splitter: NodeSplitter | None) -> NodeStatistic:
    """Make the statistic of one node from its sums.

    Args:
        splitter: of an integer node; None for a float node.
    """
    measured = tally.count > 0
    inherited, added = float(tally.products[0, 0]), float(tally.products[1:, 1:].sum())
    simulated = values(tally.simulated_values)
    node_plan = plan.nodes.get(node.name)
    return NodeStatistic(
        name=node.name,
        op=str(node.attrs["target"]) if node.op == "opaque" else node.op,
        inputs=tuple(dict.fromkeys(s for s in node.inputs if plan.graph[s].op != CONST)),
        integer=node_plan is not None,
        count=tally.count,
        float_values=values(tally.float_values),
        simulated_values=simulated,
        integer_values=simulated if tally.integer_values is None else values(tally.integer_values),
        sqnr=decibels(tally.signal, tally.noise) if measured else None,
        inherited_sqnr=decibels(tally.signal, inherited) if measured else None,
        own_sqnr=decibels(tally.signal, added) if measured else None,
        cosine=_cosine(tally),
        max_error=tally.max_error if measured else None,
        error_power=tally.noise / tally.count if measured else None,
        causes=_causes(tally),
        differences=tally.differences,
        max_difference=tally.max_difference,
        edges=_weights(plan, node, tally) if splitter is None else _edges(splitter, tally),
        verdict=_verdict(node_plan, tally),
        register=None if node_plan is None else str(node_plan.desc.register.dtype),
        on_overflow=None if node_plan is None else node_plan.desc.register.overflow,
        bound=None if node_plan is None else node_plan.register_share,
        overflows=tally.overflows,
        accumulators=tally.accumulators,
        left_out=tally.left_out,
        raised=0 if node_plan is None else len(node_plan.raised),
        past=splitter.chain[-1].name if splitter is not None and splitter.chain else None,
    )


def values(moments: Moments) -> ValueStatistic:
    """Convert Moments to a ValueStatistic."""
    if not moments.count:
        return ValueStatistic(None, None, None, None)
    return ValueStatistic(moments.low, moments.high, moments.mean, moments.deviation)


def _cosine(tally: Tally) -> float | None:
    norm = math.sqrt(tally.signal) * math.sqrt(tally.simulated_signal)
    return min(1.0, max(-1.0, tally.cross / norm)) if norm > 0.0 else None


def _causes(tally: Tally) -> Mapping[Cause, CauseStatistic]:
    total, added = float(tally.products.sum()), float(tally.products[1:, 1:].sum())
    causes: dict[Cause, CauseStatistic] = {}
    for i, cause in enumerate(CAUSES):
        projection = float(tally.products[i, 1:].sum())
        causes[cause] = CauseStatistic(
            power=float(tally.products[i, i]) / tally.count if tally.count else 0.0,
            largest=tally.largest[i],
            share=float(tally.products[i].sum()) / total if total > 0.0 else None,
            own_share=projection / added if added > 0.0 and cause != "inherited" else None,
        )
    return causes


def _verdict(node_plan: NodePlan | None, tally: Tally) -> Verdict:
    if node_plan is None:
        return "float"
    if tally.overflows:
        return "overflows"
    return node_plan.verdict


def _edges(splitter: NodeSplitter, tally: Tally) -> tuple[EdgeStatistic, ...]:
    node, node_plan = splitter.node, splitter.node_plan
    form = splitter.plan.ops[node.op].integer
    assert form is not None
    power = tally.signal / tally.count if tally.count else 0.0
    statistics = []
    for slot, qparams in enumerate(node_plan.operands):
        if qparams is None:
            continue
        edge, source = str(Edge(node.name, slot)), node.inputs[slot]
        in_node_units = form.slot(slot) in ("bias", "common")
        statistic: EdgeStatistic
        if slot in splitter.consts:
            stored = splitter.plan.target(Edge(node.name, slot))
            statistic = _unchanged(edge, source, "constant", qparams if stored is None else stored)
            statistic = _with_error(statistic, splitter.const_edges[slot], None if in_node_units else power)
            channels, narrow = _channels(splitter.plan, Edge(node.name, slot), splitter.consts[slot])
            statistic = replace(statistic, channels=channels, narrow_channels=narrow)
        else:
            statistic = _unchanged(edge, source, "data", qparams)
            if slot in tally.edges:
                statistic = _with_error(statistic, tally.edges[slot], None if in_node_units else power)
        statistics.append(statistic)
    if OUT in tally.edges:
        statistic = _unchanged(f"{node.name}:out", node.name, "output", node_plan.out)
        statistics.append(_with_error(statistic, tally.edges[OUT], None))
    return tuple(statistics)


def _unchanged(edge: str, source: str, kind: EdgeRole, qparams: QParams) -> EdgeStatistic:
    """The statistic of an edge that passes values as they are."""
    bits, scale = (qparams.qmax - qparams.qmin).bit_length(), float(qparams.scale.max())
    return EdgeStatistic(edge, source, kind, bits, str(qparams.dtype), scale, qparams.per_channel, requantized=False)


def _with_error(edge: EdgeStatistic, sample: EdgeSample, power: float | None) -> EdgeStatistic:
    """The statistic of an edge that quantizes values.

    Args:
        power: mean square of the node's value; None if the edge is in the units of that value.
    """
    gain = (1.0 / sample.values if sample.values else 0.0) if power is None else 0.0
    if power is not None and sample.signal > 0.0:
        gain = power / sample.signal
    return replace(
        edge,
        requantized=True,
        saturated=sample.saturated,
        values=sample.values,
        rounding_sqnr=decibels(sample.signal, sample.rounded),
        saturation_sqnr=decibels(sample.signal, sample.clipped),
        rounding_effect=sample.rounded * gain,
        saturation_effect=sample.clipped * gain,
    )


def _weights(plan: Plan, node: Node, tally: Tally) -> tuple[EdgeStatistic, ...]:
    """The statistics of the weights of a float node that are stored as integers."""
    power = tally.signal / tally.count if tally.count else 0.0
    statistics = []
    for edge in node.edges:
        if (weight := plan.weights.get(edge)) is not None:
            source = plan.graph.source(edge)
            free = free_integers(plan, source, weight.qparams)
            statistic = _unchanged(str(edge), source, "constant", weight.qparams)
            statistic = _with_error(statistic, quantized_sample(plan.graph.consts[source], free, weight.qparams), power)
            channels, narrow = _channels(plan, edge, free)
            statistics.append(replace(statistic, channels=channels, narrow_channels=narrow))
    return tuple(statistics)


def _channels(plan: Plan, edge: Edge, free: Tensor) -> tuple[int, int]:
    """The number of output channels of a weight, and of those that are narrow; (0, 0) for other constants.

    Args:
        free: its centered integers without limits.
    """
    form, node_plan = plan.ops[plan.graph[edge.dst].op].integer, plan.nodes.get(edge.dst)
    target = plan.target(edge) if node_plan is None else node_plan.operands[edge.slot]
    if form is None or form.weight is None or form.weight.slot != edge.slot or target is None:
        return 0, 0
    peaks = _per_channel(limit(free, target), form.weight.axis)
    real = _per_channel(plan.graph.consts[plan.graph.source(edge)], form.weight.axis)
    return peaks.numel(), int(((peaks < NARROW) & (real > 0)).sum())


def _per_channel(weight: Tensor, axis: int) -> Tensor:
    """The largest magnitude of each channel."""
    magnitude = weight.abs().movedim(axis, 0)
    return magnitude.reshape(magnitude.shape[0], -1).amax(1)


# ---------------------------------------------------------------- inspection
def inspect_plan(plan: Plan, batches: Iterable[Batch]) -> GraphStatistic:
    """Compare float, simulated and integer values of every node, and find the causes of its error.

    The causes are defined in `hago.analysis.error_causes`; the rule that names the first node to go wrong, in
    `GraphStatistic.first_wrong`.

    Args:
        plan: the Plan to inspect.
        batches: flat inputs in the order of the graph's inputs; each is read once.

    Raises:
        DataError: no batches, or a batch without the model's inputs.
    """
    lockstep = Lockstep(plan)
    count = samples = 0
    for batch in batches:
        if len(batch.inputs) != len(plan.graph.inputs):
            raise DataError(
                f"batch {count} holds {counted(len(batch.inputs), 'tensor')}; the model takes "
                f"{len(plan.graph.inputs)}: {', '.join(plan.graph.inputs)}"
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
    """The float model, the simulator and the integer model of one Plan, run node by node.

    `inspect_plan` makes it and calls `feed` once per batch.

    Attributes:
        tallies: the sums over batches, by node.
        splitters: by integer node.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan, self.graph = plan, plan.graph
        self.tallies = {n.name: Tally() for n in plan.graph if n.op != CONST}
        self.splitters = {n.name: NodeSplitter(plan, n) for n in plan.graph.computed if n.name in plan.nodes}
        self._integer_models = {n.name: IntegerModel(single_node_plan(plan, n)) for n in plan.graph.computed}
        self._simulator = Simulator(plan, watch=self._on_accumulator)
        self._dropped = {s.step.name: s.dropped for s in plan.graph.schedule}
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
        self._simulator.run(inputs, self._on_value)

    def _on_accumulator(self, node: Node, accumulator: Tensor, lost: Lost | None) -> None:
        self._accumulators[node.name] = accumulator
        if lost is not None:
            self._lost[node.name] = lost

    def _on_value(self, node: Node, carrier: Any) -> None:
        """Compute a node that the simulator has computed in float and in integers too, and compare the three values."""
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
        for source in self._dropped.get(name, ()):
            for values in (self._float, self._carriers, self._simulated, self._integer):
                values.pop(source, None)

    def _compute_integer(self, node: Node) -> Any:
        inputs = [self._integer[s] for s in dict.fromkeys(node.inputs) if self.graph[s].op != CONST]
        return self._integer_models[node.name].run(inputs)[0]

    # ------------------------------------------------------------ comparison
    def _compare(self, node: Node, tally: Tally) -> None:
        """Add the differences, the values and the split error of a node to its tally."""
        name, realized = node.name, self._integer[node.name]
        plan = self.plan.nodes.get(name)
        if plan is not None:
            realized = center(realized, plan.out)
        different, largest = differences(self._carriers[name], realized)
        tally.differences += different
        tally.max_difference = max(tally.max_difference, largest)
        reference, simulated = self._float[name], self._simulated[name]
        if not isinstance(reference, Tensor):
            self._exact[name] = equal(reference, simulated)
            return
        integer_value = None
        if different:
            integer_value = realized if plan is None else dequantize(realized, plan.out)
        tally.add_values(reference, simulated, integer_value)
        split = self._split(node, reference, simulated)
        tally.add_split(split)
        self._exact[name] = equal(reference, simulated)

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
        """The error of a float node: all inherited, unless a weight that is stored as integers adds to it."""
        if not any(e in self.plan.weights for e in node.edges):
            return Split(reference, (("inherited", simulated),))
        inherited = reference
        if not all(self._exact[s] for s in node.inputs):
            with torch.no_grad():
                inherited = compute_real(node, [self._simulated[s] for s in node.inputs], self.plan.ops)
        return Split(reference, (("inherited", inherited), ("constants", simulated)))


def single_node_plan(plan: Plan, node: Node) -> Plan:
    """The Plan of one node whose producers are graph inputs, so that it can be run by itself."""
    graph = plan.graph
    sources = [graph[s] for s in dict.fromkeys(node.inputs)]
    inputs = tuple(s.name for s in sources if s.op != CONST)
    nodes = tuple(s if s.op == CONST else Node(s.name, INPUT, (), {}, s.shape, s.dtype) for s in sources)
    consts = {s.name: graph.consts[s.name] for s in sources if s.op == CONST}
    edges = {e: plan.edges[e] for e in node.edges} | {Edge(OUTPUT, 0): None}
    node_plans = {node.name: plan.nodes[node.name]} if node.name in plan.nodes else {}
    weights = {e: plan.weights[e] for e in node.edges if e in plan.weights}
    return Plan(
        Graph((*nodes, node), inputs, (node.name,), consts), plan.hardware, plan.ops, node_plans, edges, weights
    )
