"""Statistics of an inspection: the error of every node split into causes, the nodes to blame, and the tables of both.

`hago.analysis.inspect` runs the three models and fills these types; it returns a `GraphStatistic`, the last of them.

Notation: node `n` computes `f` on real values, `f_q` on centered integers with accumulator scale `s`. `F` is its value
in the float model, `x` are the simulated values of its producers, dequantized but not yet requantized by its in-edges.
The error is split along these successive values:

    v0 = F                                              the float model
    v1 = f(x, w)                                        inherited    = v1 - v0
    v2 = f(Q(x), w)                                     rounding     = v2 - v1
    v3 = f_q(Q(x), Q(w)) * s                            constants    = v3 - v2
    v4 = f_q(C(Q(x)), C(Q(w))) * s                      saturation   = v4 - v3
    v5 = register(v4)                                   overflow     = v5 - v4
    v6 = the output requantized without limits          rounding    += v6 - v5
    v7 = S, the simulated value                         saturation  += v7 - v6

The differences telescope: the five causes sum to `S - F`, element by element. `Q` quantizes as the in-edge's SimQ says
but without its limits, `C` applies the limits, `w` are constants (weights and biases), and `register` wraps or
saturates. A node that does not requantize its output ends at v5 = S; one without constants has v2 = v3; a table
computes `f` where others compute `f_q`.

A float node computes `f(x, w)`, so that all its error is inherited; if its weight alone is quantized, it adds
constants = S - f(x, w).

If the range of a requantized output covers only the values that a relu, clamp or pooling after it passes on, all values
are taken after those nodes, because clipping a value that they would clip anyway is no error.
"""

from __future__ import annotations

import csv
import io
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final, Literal, get_args

import torch
from torch import Tensor

from hago.arithmetic.numerics import Lost, Overflow, apply_simq, clip_range, dequantize, overflowed, quantize
from hago.arithmetic.types import QParams, SimQ
from hago.graph import Node, compute_real
from hago.plan import Plan, Topology, Verdict
from hago.plan.topology import range_chain
from hago.search.objective import MOST_DB
from hago.serialization.text_table import count, decimals, head, number, percent, table, tail, wrapped

Cause = Literal["inherited", "rounding", "constants", "saturation", "overflow"]
CAUSES: Final[tuple[Cause, ...]] = get_args(Cause)
SplitStep = tuple[Cause, Tensor]

#: A limit that no integer reaches, and that float64 and int64 represent exactly.
_NO_LIMIT: Final = 1 << 52
#: The key of a requantized output among the in-edges of a node, whose keys are slots.
OUT: Final = -1


@dataclass(frozen=True, slots=True)
class EdgeSample:
    """The error that one edge adds to its value in one batch.

    Args:
        saturated, values: number of clipped values, and of all values.
        signal: sum of squares of the real value before the edge.
        rounded, clipped: sums of squares of the changes by rounding, and then by clipping.
    """

    saturated: int
    values: int
    signal: float
    rounded: float
    clipped: float


@dataclass(frozen=True, slots=True)
class Split:
    """The error of a node in one batch, split by cause; made by a NodeSplitter.

    Args:
        reference: v0, real.
        steps: the successive values after v0, each with the cause that led to it; the last is S.
        edges: by slot, of edges that carry data; OUT is the requantized output.
        overflows: number of accumulators outside their register.
        accumulators: number of all accumulators.
    """

    reference: Tensor
    steps: tuple[SplitStep, ...]
    edges: Mapping[int, EdgeSample] = field(default_factory=dict)
    overflows: int = 0
    accumulators: int = 0


def unlimited(qparams: QParams) -> QParams:
    """The same scale and zero point, without limits."""
    return replace(qparams, qmin=-_NO_LIMIT, qmax=_NO_LIMIT)


def edge_sample(before: Tensor, free: Tensor, limited: Tensor) -> EdgeSample:
    """The error of an edge from real values: before it, and after it without and with its limits."""
    real, rounded, clipped = (t.to(torch.float64) for t in (before, free, limited))
    return EdgeSample(
        saturated=int((rounded != clipped).sum()),
        values=real.numel(),
        signal=float(real.square().sum()),
        rounded=float((rounded - real).square().sum()),
        clipped=float((clipped - rounded).square().sum()),
    )


def chain_after(plan: Plan, name: str) -> tuple[Node, ...]:
    """The nodes (relu, clamp, pooling ...) on whose output the range of a requantized output was calibrated."""
    node_plan, graph = plan.nodes[name], plan.graph
    if node_plan.out_simq is None and node_plan.table is None:
        return ()
    topology = Topology({n.name: n.name in plan.nodes for n in graph}, {}, {})
    chain = (graph[n] for n in range_chain(graph, plan.hardware, topology, plan.ops, name))
    return tuple(itertools.takewhile(lambda n: len(n.inputs) == 1, chain))  # a concatenation has other operands too


class NodeSplitter:
    """Splits the error of one integer node by cause. Lockstep makes one per node and calls it once per batch.

    Attributes:
        consts: by slot, the centered integers of constants without limits, float32.
        chain: the nodes after which values are taken; see the docstring of the module.
    """

    def __init__(self, plan: Plan, node: Node) -> None:
        self.plan, self.node, self.node_plan = plan, node, plan.nodes[node.name]
        self.requantize = plan.hardware.requantize
        self.chain = chain_after(plan, node.name)
        self.consts = {slot: self._const(slot) for slot in self.node_plan.consts}
        self._const_edges = {slot: self._const_edge(slot, q) for slot, q in self.consts.items()}
        exact = self.node_plan.carrier == torch.float64 and self.node_plan.parts == 1
        self._carrier = torch.float64 if exact else torch.float32
        self._table, self._free_table = self._tables()

    @property
    def const_edges(self) -> Mapping[int, EdgeSample]:
        """The error of quantizing the constants, by slot; it is the same in every batch."""
        return self._const_edges

    def __call__(
        self,
        reference: Tensor,
        sources: Sequence[Tensor],
        carriers: Sequence[Tensor],
        accumulator: Tensor | None,
        final: Tensor,
        *,
        exact_sources: bool,
        lost: Lost | None = None,
    ) -> Split:
        """Split one batch.

        Args:
            reference: the value of the node in the float model.
            sources: the simulated values of its producers, real; constants in float.
            carriers: the same values as they are in the simulator: centered integers if quantized.
            accumulator: centered, before overflow; None for a table.
            final: the simulated value, real.
            exact_sources: whether the producers have no error.
            lost: the change by overflow inside the sums; None if it is impossible.
        """
        free, edges = self._unlimited_operands(sources, carriers)
        clipped = any(e.saturated for e in (*edges.values(), *self._const_edges.values()))
        inherited = reference if exact_sources else compute_real(self.node, sources, self.plan.ops)
        if accumulator is None:
            computed = self._table_steps(free, clipped)
        else:
            computed = self._accumulator_steps(free, clipped, accumulator, lost)
        steps: list[SplitStep] = [("inherited", inherited)]
        if self.consts:
            steps.append(("rounding", self._rounded_data(sources, free, inherited)))
        steps += [("constants" if self.consts else "rounding", computed[0][1]), *computed[1:]]
        if self.node_plan.out_simq is not None or self._table is not None:
            edges[OUT] = edge_sample(steps[-2][1], steps[-1][1], final)
            steps.append(("saturation", final))
        overflows = 0 if accumulator is None else self._overflows(accumulator, lost)
        accumulators = 0 if accumulator is None else accumulator.numel()
        passed = tuple((cause, self._through_chain(value)) for cause, value in steps)
        return Split(self._through_chain(reference), passed, edges, overflows, accumulators)

    # ------------------------------------------------------------ operands
    def _unlimited_operands(
        self, sources: Sequence[Tensor], carriers: Sequence[Tensor]
    ) -> tuple[list[Tensor], dict[int, EdgeSample]]:
        """The operands as integers without limits, and the errors of their edges."""
        free, edges = list(carriers), {}
        for slot, simq in enumerate(self.node_plan.simqs):
            target = self.node_plan.operands[slot]
            if slot in self.consts:
                free[slot] = self.consts[slot]
            elif simq is not None and target is not None:
                free[slot] = apply_simq(carriers[slot], SimQ(simq.source, unlimited(target)), self.requantize)
                edges[slot] = quantized_sample(sources[slot], free[slot], target)
        return free, edges

    def _const(self, slot: int) -> Tensor:
        target = self.node_plan.operands[slot]
        assert target is not None
        return free_integers(self.plan, self.node.inputs[slot], target)

    def _const_edge(self, slot: int, free: Tensor) -> EdgeSample:
        target = self.node_plan.operands[slot]
        assert target is not None
        return quantized_sample(self.plan.graph.consts[self.node.inputs[slot]], free, target)

    def _rounded_data(self, sources: Sequence[Tensor], free: Sequence[Tensor], inherited: Tensor) -> Tensor:
        """v2: the value with data rounded and constants in float."""
        real, changed = list(sources), False
        for slot, simq in enumerate(self.node_plan.simqs):
            target = self.node_plan.operands[slot]
            if simq is not None and target is not None and slot not in self.consts:
                real[slot], changed = dequantize(free[slot], target), True
        return compute_real(self.node, real, self.plan.ops) if changed else inherited

    # ------------------------------------------------------------ v3 to v6
    def _accumulator_steps(
        self, free: Sequence[Tensor], clipped: bool, accumulator: Tensor, lost: Lost | None
    ) -> list[SplitStep]:
        """v3 to v6 of a node with an accumulator."""
        plan = self.node_plan
        limited = dequantize(accumulator, plan.register)
        unclipped = limited
        if clipped:
            operands = [c if t is None else c.to(self._carrier) for c, t in zip(free, plan.operands, strict=True)]
            unclipped = dequantize(self.plan.ops[self.node.op].compute_int(plan.attrs, *operands), plan.register)
        after_overflow = plan.apply_register(accumulator, lost)
        overflown = limited if after_overflow is accumulator else dequantize(after_overflow, plan.register)
        steps: list[SplitStep] = [("constants", unclipped), ("saturation", limited), ("overflow", overflown)]
        if plan.out_simq is not None:
            requantized = apply_simq(after_overflow, SimQ(plan.out_simq.source, unlimited(plan.out)), self.requantize)
            steps.append(("rounding", dequantize(requantized, plan.out)))
        return steps

    def _table_steps(self, free: Sequence[Tensor], clipped: bool) -> list[SplitStep]:
        """v3 to v6 of a node that looks its values up in a table."""
        source = self.node_plan.operands[0]
        assert source is not None and self._table is not None and self._free_table is not None
        index = (limit(free[0], source) + (source.zero_point - source.qmin)).to(torch.int64)
        limited = self._table[index]
        unclipped = limited
        if clipped:
            unclipped = compute_real(self.node, [dequantize(free[0], source)], self.plan.ops)
        return [("rounding", unclipped), ("saturation", limited), ("rounding", self._free_table[index])]

    def _tables(self) -> tuple[Tensor | None, Tensor | None]:
        """The real value of every input integer, and the same rounded to the output's grid."""
        source = self.node_plan.operands[0]
        if self.node_plan.table is None or source is None:
            return None, None
        q = torch.arange(source.qmin, source.qmax + 1, dtype=torch.float64) - source.zero_point
        real: Tensor = compute_real(self.node, [dequantize(q, source)], self.plan.ops)
        rounded = apply_simq(real, SimQ(None, unlimited(self.node_plan.out)), self.requantize)
        return real, dequantize(rounded, self.node_plan.out)

    def _overflows(self, accumulator: Tensor, lost: Lost | None) -> int:
        if self.node_plan.proved:
            return 0
        if lost is not None:
            return int(lost.cut.sum())
        raw = accumulator + self.node_plan.register.zero_point
        return int(overflowed(raw, self.node_plan.desc.register.dtype))

    def _through_chain(self, value: Tensor) -> Tensor:
        """The value after the nodes of `chain`."""
        for node in self.chain:
            value = compute_real(node, [value], self.plan.ops)
        return value


def limit(c: Tensor, target: QParams) -> Tensor:
    """Centered integers clipped to the range of `target`."""
    low, high = (torch.as_tensor(v, dtype=c.dtype) for v in clip_range(target))
    return torch.minimum(torch.maximum(c, low), high)


def free_integers(plan: Plan, const: str, target: QParams) -> Tensor:
    """The centered integers of a constant without limits, float32."""
    real = plan.graph.consts[const].to(torch.float64)
    return quantize(real, unlimited(target), plan.hardware.requantize.rounding).to(torch.float32)


def quantized_sample(before: Tensor, free: Tensor, target: QParams) -> EdgeSample:
    """The error of an edge, from the real value before it and its integers without limits."""
    return edge_sample(before, dequantize(free, target), dequantize(limit(free, target), target))


# ---------------------------------------------------------------- statistics of one node
EdgeRole = Literal["data", "constant", "output"]


@dataclass(frozen=True, slots=True)
class ValueStatistic:
    """The finite values of one node in one of the three models; None if there were none."""

    minimum: float | None
    maximum: float | None
    mean: float | None
    deviation: float | None


@dataclass(frozen=True, slots=True)
class CauseStatistic:
    """The contribution of one cause to the error of a node.

    Args:
        power: mean square of the difference that the cause added.
        largest: its largest magnitude.
        share: sum(added * error) / sum(error^2), the projection of the added difference on the error. Shares of all
            causes sum to 1; a cause that cancels others has a negative one. None if there is no error.
        own_share: its share in the error that the node itself added; None for inherited error, and if the node added
            none.
    """

    power: float
    largest: float
    share: float | None
    own_share: float | None


@dataclass(frozen=True, slots=True)
class EdgeStatistic:
    """One in-edge of an integer node, or its requantized output (`node:out`).

    Args:
        edge: its key.
        source: the node whose value is on the edge.
        kind: data, a constant, or the node's own output.
        bits: number of bits that the range of its integers needs.
        dtype: of the slot.
        scale: real units per quantum; the largest one if it is per channel.
        per_channel: whether there is a scale per channel.
        requantized: whether values are quantized on the edge; otherwise they pass as the producer emits them.
        saturated, values: number of clipped values, and of all values.
        rounding_sqnr: dB of the value before the edge over the error of rounding.
        saturation_sqnr: dB of the same value over the error of clipping.
        rounding_effect: mean square of the error that rounding on this edge adds to the node's value. It is exact
            if the edge is in the node's own units (a bias, operands of an add, the output), else estimated as the
            edge's noise-to-signal ratio times the power of the node's value.
        saturation_effect: the same for clipping.
        channels: of a weight, its output channels.
        narrow_channels: how many of them reach fewer than `hago.analysis.inspect.NARROW` quanta.
    """

    edge: str
    source: str
    kind: EdgeRole
    bits: int
    dtype: str
    scale: float
    per_channel: bool
    requantized: bool
    saturated: int = 0
    values: int = 0
    rounding_sqnr: float | None = None
    saturation_sqnr: float | None = None
    rounding_effect: float = 0.0
    saturation_effect: float = 0.0
    channels: int = 0
    narrow_channels: int = 0

    @property
    def saturated_fraction(self) -> float:
        """The fraction of the values that was clipped."""
        return self.saturated / self.values if self.values else 0.0

    def to_json(self) -> dict[str, Any]:
        """The fields as JSON values."""
        return asdict(self) | {"saturated_fraction": self.saturated_fraction}


@dataclass(frozen=True, slots=True)
class NodeStatistic:
    """The statistic of one node over all batches, made by `hago.analysis.inspect.summarize`.

    Args:
        inputs: the nodes whose values it reads, without constants.
        integer: whether it runs in integers.
        count: number of values that the errors were measured on.
        float_values, simulated_values, integer_values: in real units.
        sqnr: dB of the float value over the simulated error; None if nothing was measured.
        inherited_sqnr: the same if the node itself were exact on its simulated inputs.
        own_sqnr: dB of the float value over the error that the node itself added.
        cosine: between float and simulated value; None if either is 0 everywhere.
        max_error: the largest |simulated - float|.
        error_power: mean square of simulated - float.
        causes: the contribution of each cause.
        differences: number of values that differ between the simulator and the integer model; integers are compared as
            integers, floats by their bits.
        max_difference: the largest difference, in quanta of an integer node, in real units of a float node.
        edges: in-edges of an integer node, and its output if it requantizes.
        verdict: on overflow: proved absent, possible, seen, or float.
        register, on_overflow: dtype of the accumulator, and how it behaves outside its range.
        bound: the largest accumulator that any input can cause, over the register's maximum.
        overflows, accumulators: number of accumulators that left their register, and of all accumulators.
        left_out: number of values that were infinite or NaN.
        raised: number of channels of the weight whose scale was raised so that their biases fit the accumulator.
        past: the node (relu, clamp, pooling) after which errors are taken, if the requantized output covers only the
            values that it passes on.
    """

    name: str
    op: str
    inputs: tuple[str, ...]
    integer: bool
    count: int
    float_values: ValueStatistic
    simulated_values: ValueStatistic
    integer_values: ValueStatistic
    sqnr: float | None
    inherited_sqnr: float | None
    own_sqnr: float | None
    cosine: float | None
    max_error: float | None
    error_power: float | None
    causes: Mapping[Cause, CauseStatistic]
    differences: int
    max_difference: float
    edges: tuple[EdgeStatistic, ...] = ()
    verdict: Verdict = "float"
    register: str | None = None
    on_overflow: Overflow | None = None
    bound: float | None = None
    overflows: int = 0
    accumulators: int = 0
    left_out: int = 0
    raised: int = 0
    past: str | None = None

    @property
    def inherited_share(self) -> float:
        """The part of the error that was inherited, clamped to [0, 1]; 0 if there is no error."""
        return min(1.0, max(0.0, self.causes["inherited"].share or 0.0))

    @property
    def main_cause(self) -> Cause | None:
        """The cause with the largest part in the error that the node itself added; None if it added none."""
        shares = [(s.own_share, cause) for cause, s in self.causes.items() if s.own_share is not None]
        return max(shares)[1] if shares else None

    @property
    def saturated_fraction(self) -> float:
        """The largest fraction of values clipped on any of its edges that carry data."""
        return max((e.saturated_fraction for e in self.edges if e.kind != "constant"), default=0.0)

    def to_json(self) -> dict[str, Any]:
        """The fields as JSON values."""
        document = asdict(self)
        document["inputs"] = list(self.inputs)
        document["causes"] = {cause: asdict(s) for cause, s in self.causes.items()}
        document["edges"] = [e.to_json() for e in self.edges]
        return document | {"main_cause": self.main_cause}


# ---------------------------------------------------------------- blame
#: A node whose SQNR is below this many dB is reported as wrong: its error is more than a tenth of its value.
WRONG_DB: Final = 20.0


def blame(rows: Sequence[NodeStatistic], ends: Sequence[str]) -> dict[str, float]:
    """The part of each node in the error of `ends`, in node order, without the nodes that have none.

    Blame is propagated backwards through the graph: a node keeps the part that corresponds to the error that it added
    itself, and distributes the inherited part to its producers in proportion to the power of their errors. The parts
    therefore sum to 1. They are an estimate, because a node is assumed to pass on all inherited errors alike.

    Args:
        rows: in topological order.
        ends: nodes whose errors have equal weight; those without error do not count.
    """
    by_name = {r.name: r for r in rows}
    ends = [e for e in ends if by_name[e].error_power]
    assigned = dict.fromkeys(by_name, 0.0)
    for end in ends:
        assigned[end] += 1.0 / len(ends)
    parts: dict[str, float] = {}
    for row in reversed(rows):
        share = assigned[row.name]
        noise = {s: by_name[s].error_power or 0.0 for s in row.inputs}
        noise = {s: power * by_name[s].count for s, power in noise.items() if power > 0.0}
        total = sum(noise.values())
        passed_back = share * row.inherited_share if total > 0.0 else 0.0
        for source, power in noise.items():
            assigned[source] += passed_back * power / total
        if share - passed_back > 0.0:
            parts[row.name] = share - passed_back
    return {r.name: parts[r.name] for r in rows if r.name in parts}


@dataclass(frozen=True, slots=True)
class ErrorDiagnosis:
    """The node where a model goes wrong, and why; made by `diagnose_error`.

    Args:
        node: the node with the largest part in the error of `symptom`.
        part: its part in that error.
        symptom: the first node in order whose SQNR is below WRONG_DB.
        symptom_sqnr: in dB.
        cause: the cause of the largest part of the error that `node` added.
        words: the cause in words, with its edge or register.
        remedy: a change that may help.
    """

    node: str
    part: float
    symptom: str
    symptom_sqnr: float
    cause: Cause
    words: str
    remedy: str

    def to_json(self) -> dict[str, Any]:
        """The fields as JSON values."""
        return {name: getattr(self, name) for name in self.__slots__}


def diagnose_error(rows: Sequence[NodeStatistic]) -> ErrorDiagnosis | None:
    """Find the node where a model goes wrong, by the rule of `GraphStatistic.first_wrong`; None if there is none."""
    symptom = next((r for r in rows if r.sqnr is not None and r.sqnr < WRONG_DB and r.error_power), None)
    if symptom is None or symptom.sqnr is None:
        return None
    by_name = {r.name: r for r in rows}
    parts = {n: p for n, p in blame(rows, [symptom.name]).items() if by_name[n].main_cause is not None}
    if not parts:
        return None
    node = max(parts, key=lambda n: parts[n])
    row = by_name[node]
    cause = row.main_cause
    assert cause is not None
    words, remedy = cause_in_words(row, cause)
    return ErrorDiagnosis(node, parts[node], symptom.name, symptom.sqnr, cause, words, remedy)


# ---------------------------------------------------------------- words
def cause_in_words(row: NodeStatistic, cause: Cause) -> tuple[str, str]:
    """Describe a cause with its edge or register, and a remedy."""
    if cause == "overflow":
        verb = "wrap" if row.on_overflow == "wrap" else "are clamped"
        bound = "" if row.bound is None else f"; the largest possible is {row.bound:.3g} times its maximum"
        return (
            f"{count(row.overflows)} of {count(row.accumulators)} accumulators leave {row.register} and {verb}{bound}",
            "fewer bits on its operands, or a wider accumulator",
        )
    edge = _worst_edge(row, cause)
    if edge is None:
        return "its limits are rounded to whole quanta", "more bits on its operand"
    if cause == "saturation":
        return (
            f"{100.0 * edge.saturated_fraction:.2g} % of {_named(edge)} is clipped at {_grid(edge)}",
            f"a wider threshold for {edge.edge}, or one estimated on more data",
        )
    if cause == "constants" and edge.narrow_channels and not edge.per_channel:
        return (
            f"{_named(edge)} in {edge.bits} bits has one scale for {edge.channels} channels, which leaves "
            f"{edge.narrow_channels} of them with less than 4 bits",
            "a scale per channel if the hardware has it, channels equalized beforehand, or more bits",
        )
    return f"{_named(edge)} is rounded to {_grid(edge)}", f"more bits on {edge.edge}, or a tighter threshold"


def _worst_edge(row: NodeStatistic, cause: Cause) -> EdgeStatistic | None:
    """The edge through which a cause has the largest effect."""
    requantized = [e for e in row.edges if e.requantized]
    if cause == "saturation":
        return max((e for e in requantized if e.saturated), key=lambda e: e.saturation_effect, default=None)
    kinds = ("constant",) if cause == "constants" else ("data", "output")
    return max((e for e in requantized if e.kind in kinds), key=lambda e: e.rounding_effect, default=None)


def _named(edge: EdgeStatistic) -> str:
    if edge.kind == "output":
        return f"the output {edge.edge}"
    return f"{'the value' if edge.kind == 'data' else 'the constant'} {edge.source} on {edge.edge}"


def _grid(edge: EdgeStatistic) -> str:
    return f"{edge.bits} bits in steps of {'at most ' if edge.per_channel else ''}{edge.scale:.3g}"


# ---------------------------------------------------------------- tables and CSV
_HEAD: Final = (
    "bits    of each in-edge; =8 passes as the producer emits it, >8 is the node's requantized output",
    "SQNR    dB of the float value over the error of the simulated one; own: over what the node itself added",
    "max err the largest |simulated - float|",
    "of its error, in %: inherited from its inputs | rounding of data | of constants | saturation | overflow;",
    "        below 0 where one undoes others",
    "blame   in % of the outputs' error, estimated",
    "clip    % of values cut off at the threshold, on the worst edge that carries data",
    "sums    that cannot leave their register (proved), could (the bound in multiples of its maximum), or did",
    "differ  values where the simulator and the integer model disagree",
)
_TITLES: Final = (
    "node", "op", "bits", "SQNR", "own", "cosine", "max err",
    "inh", "rnd", "const", "sat", "ovf", "blame", "clip", "sums", "differ",
)  # fmt: skip
#: Number of nodes that the end of a report names.
_NAMED: Final = 5


def error_table(
    rows: Sequence[NodeStatistic], blame: Mapping[str, float], wrong: ErrorDiagnosis | None, differences: int
) -> list[str]:
    """The lines of a report: the meaning of the columns, a line per node, and a summary of what went wrong."""
    cells = [_cells(r, blame.get(r.name)) for r in rows]
    right = [t for t in _TITLES if t not in ("node", "op", "bits", "sums")]
    lines = ["", *_HEAD, "", *table(_TITLES, cells, right=right), ""]
    past = sorted({r.past for r in rows if r.past is not None})
    if past:
        behind = "its requantized output covers only what nodes behind it let through, so its error is taken past"
        lines += wrapped(f"* {behind} {', '.join(past)}")
    raised = [f"{r.name} ({count(r.raised)} channel{'' if r.raised == 1 else 's'})" for r in rows if r.raised]
    if raised:
        lines += wrapped(
            "weights with a coarser scale than their threshold gives, so that biases fit the accumulator: "
            + ", ".join(raised)
        )
    return [*lines, *_summary(rows, blame, wrong), _agreement(differences)]


def _cells(row: NodeStatistic, part: float | None) -> tuple[str, ...]:
    exact = row.max_error == 0.0
    return (
        tail(row.name, 30) + ("*" if row.past else ""),
        head(row.op, 10),
        _bits(row),
        "exact" if exact else decimals(row.sqnr),
        "" if exact or row.own_sqnr is None or row.own_sqnr >= MOST_DB else decimals(row.own_sqnr),
        decimals(row.cosine, 4),
        "0" if exact else number(row.max_error),
        *("" if exact else percent(row.causes[c].share) for c in CAUSES),
        percent(part),
        percent(row.saturated_fraction),
        _sums(row),
        str(row.differences),
    )


def _bits(row: NodeStatistic) -> str:
    if not row.integer:
        return "float"
    marks = {"output": ">"}
    return " ".join(f"{marks.get(e.kind, '') if e.requantized else '='}{e.bits}" for e in row.edges)


def _sums(row: NodeStatistic) -> str:
    if row.verdict == "overflows":
        return f"{count(row.overflows)} of {count(row.accumulators)}"
    if row.verdict == "possible":
        return f"possible {number(row.bound)}x"
    return "" if row.verdict == "float" else row.verdict


def _summary(rows: Sequence[NodeStatistic], blame: Mapping[str, float], wrong: ErrorDiagnosis | None) -> Iterator[str]:
    by_name = {r.name: r for r in rows}
    if wrong is None:
        yield f"no node falls below {WRONG_DB:.0f} dB"
    else:
        row = by_name[wrong.node]
        yield f"the first node below {WRONG_DB:.0f} dB is {wrong.symptom}, at {wrong.symptom_sqnr:.1f} dB"
        yield from wrapped(
            f"it goes wrong at {wrong.node} ({row.op}), which adds {percent(wrong.part)} % of that error and takes "
            f"its own value from {_level(row.inherited_sqnr)} to {_level(row.sqnr)}"
        )
        yield from wrapped(f"main cause: {wrong.cause}: {wrong.words}")
        yield from wrapped(f"what may help: {wrong.remedy}")
    most = sorted(blame, key=lambda n: -blame[n])[:_NAMED]
    if most:
        yield "most of the outputs' error comes from"
    for row in (by_name[n] for n in most):
        cause = row.main_cause
        words = "" if cause is None else f": {cause}: {cause_in_words(row, cause)[0]}"
        yield from wrapped(f"  {percent(blame[row.name]):>3} %  {row.name} ({row.op}){words}", " " * 9)


def _level(sqnr: float | None) -> str:
    return "exact" if sqnr is None or sqnr >= MOST_DB else f"{sqnr:.1f} dB"


def _agreement(differences: int) -> str:
    if differences:
        return f"the simulator and the integer model DISAGREE on {differences} values"
    return "the simulator and the integer model agree on every value"


def value_table(rows: Sequence[NodeStatistic]) -> list[str]:
    """A table of ranges, means and standard deviations; `same` if the integer model has the same."""
    figures = ("min", "max", "mean", "std")
    titles = ("node", *(f"{kind} {f}" for kind in ("float", "simulated") for f in figures), "integer")
    cells = [
        (
            tail(r.name, 30),
            *map(number, _figures(r.float_values)),
            *map(number, _figures(r.simulated_values)),
            "same" if r.integer_values == r.simulated_values else " ".join(map(number, _figures(r.integer_values))),
        )
        for r in rows
    ]
    return table(titles, cells, right=titles[1:-1])


def _figures(values: ValueStatistic) -> tuple[float | None, ...]:
    return values.minimum, values.maximum, values.mean, values.deviation


def csv_rows(rows: Sequence[NodeStatistic], blame: Mapping[str, float]) -> Iterator[list[Any]]:
    """A header row, then one row per node; None for a missing number."""
    for index, row in enumerate(rows):
        cells = _csv_cells(row, blame.get(row.name, 0.0))
        if index == 0:
            yield list(cells)
        yield list(cells.values())


def _csv_cells(row: NodeStatistic, part: float) -> dict[str, Any]:
    cells: dict[str, Any] = {"node": row.name, "op": row.op, "runs": "integer" if row.integer else "float"}
    cells["bits"] = " ".join(f"{e.edge}={e.bits}" for e in row.edges)
    for kind, values in (
        ("float", row.float_values),
        ("simulated", row.simulated_values),
        ("integer", row.integer_values),
    ):
        for figure, value in zip(("min", "max", "mean", "std"), _figures(values), strict=True):
            cells[f"{kind}_{figure}"] = value
    for name in ("sqnr", "inherited_sqnr", "own_sqnr", "cosine", "max_error", "error_power"):
        cells[name] = getattr(row, name)
    for cause, statistic in row.causes.items():
        for figure in ("power", "largest", "share"):
            cells[f"{cause}_{figure}"] = getattr(statistic, figure)
    cells |= {"main_cause": row.main_cause, "blame": part}
    cells["saturated"] = " ".join(f"{e.edge}={e.saturated_fraction:.6g}" for e in row.edges if e.saturated)
    for name in ("verdict", "register", "on_overflow", "bound", "overflows", "accumulators"):
        cells[name] = getattr(row, name)
    for name in ("differences", "max_difference", "left_out", "past"):
        cells[name] = getattr(row, name)
    return cells


# ---------------------------------------------------------------- the statistic of a model
@dataclass(frozen=True, slots=True)
class GraphStatistic:
    """The result of an inspection: float, simulated and integer model, node by node; prints as a table.

    Made by `inspect_plan`; `hago.inspect_graph_statistic` returns it.

    Args:
        hardware: name of the hardware.
        batches, samples: number of batches and samples that were run.
        rows: one per node in order, with inputs and without constants.
        outputs: names of the nodes that the model returns.
    """

    hardware: str
    batches: int
    samples: int
    rows: tuple[NodeStatistic, ...]
    outputs: tuple[str, ...]

    def __getitem__(self, name: str) -> NodeStatistic:
        return next(r for r in self.rows if r.name == name)

    @property
    def total_differences(self) -> int:
        """Number of values that differ between the simulator and the integer model; 0 unless hago has a bug."""
        return sum(r.differences for r in self.rows)

    @property
    def blame(self) -> dict[str, float]:
        """The part of each node in the error of the outputs; an estimate, see `hago.analysis.error_causes.blame`."""
        return blame(self.rows, self.outputs)

    @property
    def first_wrong(self) -> ErrorDiagnosis | None:
        """The node where the model goes wrong; None if there is none.

        The symptom is the first node in order whose SQNR is below 20 dB, that is, whose error is above a tenth of its
        value. The node that goes wrong is the one with the largest part in the symptom's error, which may be the
        symptom itself or a node before it. Its main cause is that of the largest part of the error that it added.
        """
        return diagnose_error(self.rows)

    def to_json(self) -> dict[str, Any]:
        """The statistic as JSON values; None for a missing number."""
        wrong = self.first_wrong
        return {
            "hardware": self.hardware,
            "batches": self.batches,
            "samples": self.samples,
            "outputs": list(self.outputs),
            "total_differences": self.total_differences,
            "first_wrong": None if wrong is None else wrong.to_json(),
            "blame": self.blame,
            "nodes": [r.to_json() for r in self.rows],
        }

    def to_csv(self) -> str:
        """The statistic as CSV: a header line, then one line per node; missing numbers are empty cells."""
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows(csv_rows(self.rows, self.blame))
        return text.getvalue()

    def values(self) -> str:
        """The ranges, means and standard deviations of float, simulated and integer values, as a table."""
        return "\n".join(value_table(self.rows))

    def __str__(self) -> str:
        head = (
            f"float | simulated | integer on {self.hardware}: {len(self.rows)} nodes, {self.samples} samples in "
            f"{self.batches} batches"
        )
        return "\n".join([head, *error_table(self.rows, self.blame, self.first_wrong, self.total_differences)])
