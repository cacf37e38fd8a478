"""Causes: the error of one integer node split into what was inherited and what the node itself added.

Notation: node `n` computes `f` on real values, `f_q` on centered integers with accumulator scale `s`.
`F` is its value in the float model, `x` the simulated values of its producers, dequantized but not yet
moved by its in-edges. The successive values

    v0 = F                                              the float model
    v1 = f(x, w)                                        inherited    = v1 - v0
    v2 = f(Q(x), w)                                     rounding     = v2 - v1
    v3 = f_q(Q(x), Q(w)) * s                            constants    = v3 - v2
    v4 = f_q(C(Q(x)), C(Q(w))) * s                      saturation   = v4 - v3
    v5 = register(v4)                                   overflow     = v5 - v4
    v6 = the output requantized without limits          rounding    += v6 - v5
    v7 = S, the simulated value                         saturation  += v7 - v6

telescope: the five causes sum to `S - F`, element by element. `Q` quantizes as the in-edge's SimQ says
but without its limits, `C` applies the limits, `w` are constants (weights and biases), `register` wraps
or saturates. A node that does not requantize its output ends at v5 = S; one without constants has
v2 = v3; a table computes `f` where others compute `f_q`.

A float node computes on `x` alone, so all its error is inherited; one whose weight alone is quantized adds
constants = S - f(x, w).

Where a requantized output covers only what a relu, clamp or pooling behind it lets through, every value
here is taken past those: what they cut off anyway is no error.
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
from hago.graph.execute import compute_real
from hago.graph.graph import Node
from hago.plan.plan import Plan, Verdict
from hago.plan.topology import Topology, range_chain
from hago.search.objective import MOST_DB
from hago.serialization.text_table import count, decimals, head, number, percent, table, tail, wrapped

Cause = Literal["inherited", "rounding", "constants", "saturation", "overflow"]
CAUSES: Final[tuple[Cause, ...]] = get_args(Cause)
SplitStep = tuple[Cause, Tensor]

#: Limits that no integer here reaches; float64 and int64 hold them.
_FAR: Final = 1 << 52
#: The key of a requantized output among the edges of a node.
OUT: Final = -1


@dataclass(frozen=True, slots=True)
class EdgeSample:
    """What an edge did to its value in one batch.

    Args:
        saturated, values: how many were clipped, of how many.
        signal: sum of squares of the real value before the edge.
        rounded, clipped: sums of squares of what rounding changed, and then clipping.
    """

    saturated: int
    values: int
    signal: float
    rounded: float
    clipped: float


@dataclass(frozen=True, slots=True)
class Split:
    """The error of a node in one batch.

    Args:
        reference: v0, real.
        steps: each successive value after v0, with the cause that led to it; the last is S.
        edges: by slot, data only; OUT is the requantized output.
        overflows: accumulators outside their register.
        accumulators: how many there are.
    """

    reference: Tensor
    steps: tuple[SplitStep, ...]
    edges: Mapping[int, EdgeSample] = field(default_factory=dict)
    overflows: int = 0
    accumulators: int = 0


def unlimited(qparams: QParams) -> QParams:
    """The same grid without limits."""
    return replace(qparams, qmin=-_FAR, qmax=_FAR)


def edge_sample(before: Tensor, free: Tensor, limited: Tensor) -> EdgeSample:
    """What an edge did, from the real value before it, and after it without and with its limits."""
    first, second, third = (t.to(torch.float64) for t in (before, free, limited))
    return EdgeSample(
        saturated=int((second != third).sum()),
        values=first.numel(),
        signal=float(first.square().sum()),
        rounded=float((second - first).square().sum()),
        clipped=float((third - second).square().sum()),
    )


def chain_behind(plan: Plan, name: str) -> tuple[Node, ...]:
    """The nodes (relu, clamp, pooling ...) behind which a requantized output's range was taken."""
    node_plan, graph = plan.nodes[name], plan.graph
    if node_plan.out_simq is None and node_plan.table is None:
        return ()
    topology = Topology({n.name: n.name in plan.nodes for n in graph}, {}, {})
    chain = (graph[n] for n in range_chain(graph, plan.hardware, topology, plan.ops, name))
    return tuple(itertools.takewhile(lambda n: len(n.inputs) == 1, chain))  # a concatenation has other operands too


class NodeSplitter:
    """Splits the error of one integer node, batch by batch; lives for one inspection.

    Attributes:
        consts: centered integers of each constant slot without limits, float32.
        past: the nodes that values are taken past.
    """

    def __init__(self, plan: Plan, node: Node) -> None:
        self.plan, self.node, self.node_plan = plan, node, plan.nodes[node.name]
        self.how = plan.hardware.requantize
        self.past = chain_behind(plan, node.name)
        self.consts = {slot: self._const(slot) for slot in self.node_plan.consts}
        self._const_edges = {slot: self._const_edge(slot, q) for slot, q in self.consts.items()}
        exact = self.node_plan.carrier == torch.float64 and self.node_plan.parts == 1
        self._carrier = torch.float64 if exact else torch.float32
        self._table, self._free_table = self._tables()

    @property
    def const_edges(self) -> Mapping[int, EdgeSample]:
        """What quantization does to the constants, the same in every batch."""
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
            reference: the node's value in the float model.
            sources: the simulated values of its producers, real; constants as they are.
            carriers: the same as the simulator holds them: centered integers where integer.
            accumulator: centered, before overflow; None for a table.
            final: the simulated value, real.
            exact_sources: whether the producers have no error.
            lost: what the accumulators lost before their sums were complete; None where they cannot.
        """
        free, edges = self._move(sources, carriers)
        clipped = any(e.saturated for e in (*edges.values(), *self._const_edges.values()))
        inherited = reference if exact_sources else compute_real(self.node, sources, self.plan.ops)
        if accumulator is None:
            body = self._looked_up(free, clipped)
        else:
            body = self._accumulated(free, clipped, accumulator, lost)
        steps: list[SplitStep] = [("inherited", inherited)]
        if self.consts:
            steps.append(("rounding", self._rounded(sources, free, inherited)))
        steps += [("constants" if self.consts else "rounding", body[0][1]), *body[1:]]
        if self.node_plan.out_simq is not None or self._table is not None:
            edges[OUT] = edge_sample(steps[-2][1], steps[-1][1], final)
            steps.append(("saturation", final))
        overflows = 0 if accumulator is None else self._overflows(accumulator, lost)
        seen = 0 if accumulator is None else accumulator.numel()
        made = tuple((cause, self._through(value)) for cause, value in steps)
        return Split(self._through(reference), made, edges, overflows, seen)

    # ------------------------------------------------------------ operands
    def _move(
        self, sources: Sequence[Tensor], carriers: Sequence[Tensor]
    ) -> tuple[list[Tensor], dict[int, EdgeSample]]:
        """Every operand in integers without limits, and what its edge does."""
        free, edges = list(carriers), {}
        for slot, simq in enumerate(self.node_plan.simqs):
            target = self.node_plan.operands[slot]
            if slot in self.consts:
                free[slot] = self.consts[slot]
            elif simq is not None and target is not None:
                free[slot] = apply_simq(carriers[slot], SimQ(simq.source, unlimited(target)), self.how)
                edges[slot] = moved_sample(sources[slot], free[slot], target)
        return free, edges

    def _const(self, slot: int) -> Tensor:
        target = self.node_plan.operands[slot]
        assert target is not None
        return free_integers(self.plan, self.node.inputs[slot], target)

    def _const_edge(self, slot: int, free: Tensor) -> EdgeSample:
        target = self.node_plan.operands[slot]
        assert target is not None
        return moved_sample(self.plan.graph.consts[self.node.inputs[slot]], free, target)

    def _rounded(self, sources: Sequence[Tensor], free: Sequence[Tensor], inherited: Tensor) -> Tensor:
        """v2: data rounded, constants real."""
        real, changed = list(sources), False
        for slot, simq in enumerate(self.node_plan.simqs):
            target = self.node_plan.operands[slot]
            if simq is not None and target is not None and slot not in self.consts:
                real[slot], changed = dequantize(free[slot], target), True
        return compute_real(self.node, real, self.plan.ops) if changed else inherited

    # ------------------------------------------------------------ v3 to v6
    def _accumulated(
        self, free: Sequence[Tensor], clipped: bool, accumulator: Tensor, lost: Lost | None
    ) -> list[SplitStep]:
        plan = self.node_plan
        limited = dequantize(accumulator, plan.register)
        unclipped = limited
        if clipped:
            operands = [c if t is None else c.to(self._carrier) for c, t in zip(free, plan.operands, strict=True)]
            unclipped = dequantize(self.plan.ops[self.node.op].compute_int(plan.attrs, *operands), plan.register)
        held = plan.held(accumulator, lost)
        cut = limited if held is accumulator else dequantize(held, plan.register)
        steps: list[SplitStep] = [("constants", unclipped), ("saturation", limited), ("overflow", cut)]
        if plan.out_simq is not None:
            moved = apply_simq(held, SimQ(plan.out_simq.source, unlimited(plan.out)), self.how)
            steps.append(("rounding", dequantize(moved, plan.out)))
        return steps

    def _looked_up(self, free: Sequence[Tensor], clipped: bool) -> list[SplitStep]:
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
        moved = apply_simq(real, SimQ(None, unlimited(self.node_plan.out)), self.how)
        return real, dequantize(moved, self.node_plan.out)

    def _overflows(self, accumulator: Tensor, lost: Lost | None) -> int:
        if self.node_plan.proved:
            return 0
        if lost is not None:
            return int(lost.cut.sum())
        raw = accumulator + self.node_plan.register.zero_point
        return int(overflowed(raw, self.node_plan.desc.register.dtype))

    def _through(self, value: Tensor) -> Tensor:
        for node in self.past:
            value = compute_real(node, [value], self.plan.ops)
        return value


def limit(c: Tensor, target: QParams) -> Tensor:
    """Centered integers inside the range of `target`."""
    low, high = (torch.as_tensor(v, dtype=c.dtype) for v in clip_range(target))
    return torch.minimum(torch.maximum(c, low), high)


def free_integers(plan: Plan, const: str, target: QParams) -> Tensor:
    """The centered integers of a constant without limits, float32."""
    real = plan.graph.consts[const].to(torch.float64)
    return quantize(real, unlimited(target), plan.hardware.requantize.rounding).to(torch.float32)


def moved_sample(before: Tensor, free: Tensor, target: QParams) -> EdgeSample:
    """What an edge did, from the real value before it and its integers without limits."""
    return edge_sample(before, dequantize(free, target), dequantize(limit(free, target), target))


# ---------------------------------------------------------------- statistic
# What an inspection found of one node: frozen values, in real units and dB.

EdgeRole = Literal["data", "constant", "output"]


@dataclass(frozen=True, slots=True)
class ValueStatistic:
    """Finite values of one node in one of the three executions; None where there were none."""

    minimum: float | None
    maximum: float | None
    mean: float | None
    deviation: float | None


@dataclass(frozen=True, slots=True)
class CauseStatistic:
    """What one cause contributes to the error of a node.

    Args:
        power: mean square of what the cause added.
        largest: the largest magnitude of what it added.
        share: sum(added * error) / sum(error^2), the part of the error that lies along what the
            cause added. Shares of all causes sum to 1; a cause that undoes others has a negative
            one. None where there is no error.
        own_share: the same within what the node itself added; None for what was inherited, and
            where the node added nothing.
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
        source: the node whose value travels on it.
        kind: what travels: data, a constant, or the node's own output.
        bits: that the range of its integers needs.
        dtype: of the slot.
        scale: real units per quantum, the largest where it varies per channel.
        per_channel: whether it varies.
        requantized: whether values change on the edge, or pass as the producer emits them.
        saturated, values: how many were clipped, of how many.
        rounding_sqnr: dB of the value before the edge over what rounding changed.
        saturation_sqnr: dB of the same over what clipping changed.
        rounding_effect: the mean square that rounding on this edge puts into the node's value. Known
            where the edge is in the node's own units (a bias, operands of an add, the output), else
            estimated as the edge's noise-to-signal ratio times the power of the node's value.
        saturation_effect: the same of clipping.
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
        """The part of the values that was clipped."""
        return self.saturated / self.values if self.values else 0.0

    def to_json(self) -> dict[str, Any]:
        """The same as JSON values."""
        return asdict(self) | {"saturated_fraction": self.saturated_fraction}


@dataclass(frozen=True, slots=True)
class NodeStatistic:
    """One node over all batches.

    Args:
        inputs: the nodes whose values it reads, constants aside.
        integer: whether it runs in integers.
        count: values that went into the error figures.
        float_values, simulated_values, integer_values: in real units.
        sqnr: dB of the float value over the simulated error; None where there are no figures.
        inherited_sqnr: the same, had the node itself been exact on its simulated inputs.
        own_sqnr: dB of the float value over what the node itself added.
        cosine: between float and simulated value; None where either is 0 everywhere.
        max_error: the largest |simulated - float|.
        error_power: mean square of simulated - float.
        causes: what each cause contributes; see `hago.analysis.statistic`.
        differences: values that differ between the simulator and the integer model: integers are
            compared as integers, floats by their bits.
        max_difference: by how much: quanta of an integer node, real units of a float node.
        edges: in-edges of an integer node, and its output where it requantizes.
        verdict: on overflow: proved absent, possible, seen, or float.
        register, on_overflow: the accumulator's dtype, and what it does past its range.
        bound: the largest accumulator that any input can cause, over the register's maximum.
        overflows, accumulators: how many accumulators left their register, of how many.
        left_out: values that were infinite or NaN.
        raised: channels of the weight whose scale was raised so that their biases fit the accumulator.
        past: the node (relu, clamp, pooling) behind which errors are taken, where the requantized
            output covers only what that lets through.
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
        """The part of the error that was inherited, held within [0, 1]; 0 where there is no error."""
        return min(1.0, max(0.0, self.causes["inherited"].share or 0.0))

    @property
    def main_cause(self) -> Cause | None:
        """The cause with the largest part in what the node itself added; None where it added nothing."""
        own = [(s.own_share, cause) for cause, s in self.causes.items() if s.own_share is not None]
        return max(own)[1] if own else None

    @property
    def saturated_fraction(self) -> float:
        """The largest part of values clipped on any of its edges that carry data."""
        return max((e.saturated_fraction for e in self.edges if e.kind != "constant"), default=0.0)

    def to_json(self) -> dict[str, Any]:
        """The same as JSON values."""
        found = asdict(self)
        found["inputs"] = list(self.inputs)
        found["causes"] = {cause: asdict(s) for cause, s in self.causes.items()}
        found["edges"] = [e.to_json() for e in self.edges]
        return found | {"main_cause": self.main_cause}


# ---------------------------------------------------------------- blame
# Blame: which nodes the error of a value comes from, and where a model goes wrong.
# Every node's error is split into what it inherited and what it added (`hago.analysis.statistic`). Walking backwards,
# a node keeps the added part of the blame that reaches it and hands the rest to its producers, in proportion to the
# power of their errors. So the parts sum to 1. It is an estimate: it takes for granted that a node passes on all
# noise that it inherits alike.

#: A value whose SQNR is below this many dB has gone wrong: its error is above a tenth of it.
WRONG_DB: Final = 20.0


def blame(rows: Sequence[NodeStatistic], ends: Sequence[str]) -> dict[str, float]:
    """The part that each node has in the error of `ends`, in node order; nodes without any left out.

    Args:
        rows: in topological order.
        ends: nodes whose errors count alike; those without error do not count.
    """
    by_name = {r.name: r for r in rows}
    ends = [e for e in ends if by_name[e].error_power]
    reached = dict.fromkeys(by_name, 0.0)
    for end in ends:
        reached[end] += 1.0 / len(ends)
    kept: dict[str, float] = {}
    for row in reversed(rows):
        share = reached[row.name]
        noise = {s: by_name[s].error_power or 0.0 for s in row.inputs}
        noise = {s: power * by_name[s].count for s, power in noise.items() if power > 0.0}
        total = sum(noise.values())
        handed = share * row.inherited_share if total > 0.0 else 0.0
        for source, power in noise.items():
            reached[source] += handed * power / total
        if share - handed > 0.0:
            kept[row.name] = share - handed
    return {r.name: kept[r.name] for r in rows if r.name in kept}


@dataclass(frozen=True, slots=True)
class ErrorDiagnosis:
    """Where a model goes wrong.

    Args:
        node: the node that is to blame most for the error of `symptom`.
        part: its part in that error.
        symptom: the first node in order whose SQNR is below WRONG_DB.
        symptom_sqnr: dB.
        cause: the largest part of what `node` added.
        words: the cause in words, with the edge or register it sits on.
        remedy: what may help.
    """

    node: str
    part: float
    symptom: str
    symptom_sqnr: float
    cause: Cause
    words: str
    remedy: str

    def to_json(self) -> dict[str, Any]:
        """The same as JSON values."""
        return {name: getattr(self, name) for name in self.__slots__}


def diagnose_error(rows: Sequence[NodeStatistic]) -> ErrorDiagnosis | None:
    """Where it goes wrong: see `GraphStatistic.first_wrong`."""
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
    """A cause with the edge or register it sits on, and what may help."""
    if cause == "overflow":
        past = "wrap" if row.on_overflow == "wrap" else "are clamped"
        bound = "" if row.bound is None else f"; the largest possible is {row.bound:.3g} times its maximum"
        return (
            f"{count(row.overflows)} of {count(row.accumulators)} accumulators leave {row.register} and {past}{bound}",
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
    """The edge through which a cause has most effect."""
    moved = [e for e in row.edges if e.requantized]
    if cause == "saturation":
        return max((e for e in moved if e.saturated), key=lambda e: e.saturation_effect, default=None)
    kinds = ("constant",) if cause == "constants" else ("data", "output")
    return max((e for e in moved if e.kind in kinds), key=lambda e: e.rounding_effect, default=None)


def _named(edge: EdgeStatistic) -> str:
    if edge.kind == "output":
        return f"the output {edge.edge}"
    return f"{'the value' if edge.kind == 'data' else 'the constant'} {edge.source} on {edge.edge}"


def _grid(edge: EdgeStatistic) -> str:
    return f"{edge.bits} bits in steps of {'at most ' if edge.per_channel else ''}{edge.scale:.3g}"


# ---------------------------------------------------------------- report
# Reports: node statistics as text tables and CSV.

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
#: How many nodes the foot of a report names.
_NAMED: Final = 5


def error_table(
    rows: Sequence[NodeStatistic], blame: Mapping[str, float], wrong: ErrorDiagnosis | None, differences: int
) -> list[str]:
    """Lines: what the columns mean, a line per node, and what went wrong."""
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
    return [*lines, *_story(rows, blame, wrong), _agreement(differences)]


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


def _story(rows: Sequence[NodeStatistic], blame: Mapping[str, float], wrong: ErrorDiagnosis | None) -> Iterator[str]:
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


# ---------------------------------------------------------------- values
def value_table(rows: Sequence[NodeStatistic]) -> list[str]:
    """Lines of ranges, means and standard deviations; `same` where the integer model agrees."""
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


# ---------------------------------------------------------------- CSV
def csv_rows(rows: Sequence[NodeStatistic], blame: Mapping[str, float]) -> Iterator[list[Any]]:
    """A head row, then one per node; None where there is no number."""
    for index, row in enumerate(rows):
        cells = _csv_cells(row, blame.get(row.name, 0.0))
        if index == 0:
            yield list(cells)
        yield list(cells.values())


def _csv_cells(row: NodeStatistic, part: float) -> dict[str, Any]:
    found: dict[str, Any] = {"node": row.name, "op": row.op, "runs": "integer" if row.integer else "float"}
    found["bits"] = " ".join(f"{e.edge}={e.bits}" for e in row.edges)
    for kind, values in (
        ("float", row.float_values),
        ("simulated", row.simulated_values),
        ("integer", row.integer_values),
    ):
        for figure, value in zip(("min", "max", "mean", "std"), _figures(values), strict=True):
            found[f"{kind}_{figure}"] = value
    for name in ("sqnr", "inherited_sqnr", "own_sqnr", "cosine", "max_error", "error_power"):
        found[name] = getattr(row, name)
    for cause, statistic in row.causes.items():
        for figure in ("power", "largest", "share"):
            found[f"{cause}_{figure}"] = getattr(statistic, figure)
    found |= {"main_cause": row.main_cause, "blame": part}
    found["saturated"] = " ".join(f"{e.edge}={e.saturated_fraction:.6g}" for e in row.edges if e.saturated)
    for name in ("verdict", "register", "on_overflow", "bound", "overflows", "accumulators"):
        found[name] = getattr(row, name)
    for name in ("differences", "max_difference", "left_out", "past"):
        found[name] = getattr(row, name)
    return found


# ---------------------------------------------------------------- graph statistic
# GraphStatistic: what an inspection found of a whole model; a frozen value that prints as a table.


@dataclass(frozen=True, slots=True)
class GraphStatistic:
    """Float against simulated against integer, node by node in order; prints as a table.

    Args:
        hardware: its name.
        batches, samples: what was run.
        rows: one per node, inputs included and constants not.
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
        """Values that differ between the simulator and the integer model: 0, as promised."""
        return sum(r.differences for r in self.rows)

    @property
    def blame(self) -> dict[str, float]:
        """The part that each node has in the outputs' error; see `hago.analysis.statistic`."""
        return blame(self.rows, self.outputs)

    @property
    def first_wrong(self) -> ErrorDiagnosis | None:
        """Where the model goes wrong, or None where no node does.

        The rule: the symptom is the first node in order whose SQNR is below 20 dB, that is, whose
        error is above a tenth of its value. What went wrong is the node that has the largest part
        in the symptom's error, which may be the symptom itself or a node before it; its main cause
        is the largest part of what that node added.
        """
        return diagnose_error(self.rows)

    def to_json(self) -> dict[str, Any]:
        """The same as JSON values; None where there is no number."""
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
        """One line per node, with a head line; empty cells where there is no number."""
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows(csv_rows(self.rows, self.blame))
        return text.getvalue()

    def values(self) -> str:
        """A table of ranges, means and standard deviations: float, simulated, integer."""
        return "\n".join(value_table(self.rows))

    def __str__(self) -> str:
        head = (
            f"float | simulated | integer on {self.hardware}: {len(self.rows)} nodes, {self.samples} samples in "
            f"{self.batches} batches"
        )
        return "\n".join([head, *error_table(self.rows, self.blame, self.first_wrong, self.total_differences)])
