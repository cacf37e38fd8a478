"""The cost of a Plan on its hardware, node by node and edge by edge: bytes, operations, cycles, latency, energy.

`plan_cost` is called for every trial of a search, by `search.scoring`, and by reports. The figures
`macs_per_cycle` and `elements_per_cycle` of a signature, and `requantize_per_cycle`, are those of one core;
`bytes_per_cycle` is that of the whole chip. docs/cost.md lists what is counted and what is not.

Invariants: every total of `METRICS` is read from the rows. A figure that the hardware file does not give is named in
`missing` and its term is left out, so that a latency or energy with missing figures is a lower bound.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal

from hago.arithmetic.types import DTYPES, FLOAT32, DType, Edge, SimQ
from hago.errors import HagoError, did_you_mean
from hago.graph import CONST, INPUT, OUTPUT, Graph, Node
from hago.hardware import Hardware, OpDesc
from hago.ops import Ops, opaque
from hago.plan import Plan, bits_of, packed_bytes
from hago.serialization.summary import Summarized, Summary
from hago.serialization.text_table import (
    bytes_text,
    count,
    counted,
    head,
    keep_beginning,
    keep_end,
    number,
    scaled,
    table,
    tail,
    wrap_words,
    wrapped,
)

EdgeKind = Literal["as stored", "quantize", "requantize", "dequantize", "weight", "bias", "constant"]


@dataclass(frozen=True, slots=True)
class EdgeCost:
    """The cost of one edge.

    Args:
        kind: the conversion on the edge; constants are converted ahead of time.
        elements: number of values on the edge.
        bits: bits that each of them uses.
        dtype: dtype in which the reader takes them.
        weight_bytes: bytes of a constant, packed to its bits, and of the scales of its groups, if it has any; 0 where
            another edge reads the same integers.
        requantized: elements that are quantized, requantized or dequantized while the model runs.
        cycles, picojoules: cost of that; None where the hardware file gives no figure.
        group_bytes: bytes of the scales or multipliers, and the zero points, of the constant's groups.
    """

    edge: str
    kind: EdgeKind
    elements: int
    bits: int
    dtype: str
    weight_bytes: int = 0
    requantized: int = 0
    cycles: float | None = None
    picojoules: float | None = None
    group_bytes: int = 0

    @property
    def is_counted_weight(self) -> bool:
        """Whether the edge reads a weight that no edge before it counts."""
        return self.kind == "weight" and self.weight_bytes > 0

    @property
    def stored_bytes(self) -> int:
        """Bytes of the constant as the chip reads it, in the width of its dtype; 0 where `weight_bytes` is 0."""
        if not self.weight_bytes or self.dtype not in DTYPES:
            return self.weight_bytes
        return packed_bytes(self.elements, DTYPES[self.dtype].bits) + self.group_bytes


@dataclass(frozen=True, slots=True)
class NodeCost:
    """The cost of one node.

    Args:
        signature: its signature in the hardware file.
        macs: multiply-accumulates.
        bops: bit operations: each of these times the bits of both its operands.
        read_bytes: bytes of all operands, as stored in memory.
        write_bytes: bytes of its value.
        requantized: elements that it requantizes at its output.
        compute_cycles: cycles of the op and of requantizing its output.
        memory_cycles: cycles of reading and writing memory.
        cycles: the larger of the two (a roofline); None where the hardware file gives no figure.
        picojoules: energy; None where the hardware file gives no figure.
    """

    node: str
    op: str
    integer: bool
    signature: str
    macs: int
    bops: int
    read_bytes: int
    write_bytes: int
    requantized: int
    compute_cycles: float | None
    memory_cycles: float | None
    cycles: float | None
    picojoules: float | None


#: One row of a Cost.
Row = NodeCost | EdgeCost


@dataclass(frozen=True, repr=False)
class Cost(Summarized):
    """The cost of a Plan for one run over `batch` samples; prints as a table.

    Every total of `METRICS` is an attribute too: `cost.weight_bytes` is `cost["weight_bytes"]`. One that the hardware
    file gives no figures for is missing, and said to be.

    Args:
        nodes, edges: rows in the order of the graph.
        clock_hz: clock of the hardware; None where the hardware file gives none.
        missing: figures that a cost here needs and the hardware file does not give.
    """

    hardware: str
    batch: int
    nodes: tuple[NodeCost, ...]
    edges: tuple[EdgeCost, ...]
    clock_hz: float | None
    missing: tuple[str, ...]

    @property
    def rows(self) -> tuple[Row, ...]:
        """All rows: the nodes, then the edges."""
        return (*self.nodes, *self.edges)

    @functools.cached_property
    def weights(self) -> int:
        """The number of weights, each counted once; biases aside."""
        return sum(e.elements for e in self.edges if e.is_counted_weight)

    @functools.cached_property
    def stored_bytes(self) -> int:
        """Bytes of the constants as the chip reads them, each in the width of its dtype. `weight_bytes` counts them
        packed to their bits."""
        return sum(edge.stored_bytes for edge in self.edges)

    @functools.cached_property
    def padded_widths(self) -> tuple[int, ...]:
        """The widths of the dtypes of constants that have fewer bits than their dtype."""
        of_dtypes = ((e, DTYPES[e.dtype].bits) for e in self.edges if e.weight_bytes and e.dtype in DTYPES)
        return tuple(sorted({width for e, width in of_dtypes if e.bits < width}))

    @functools.cached_property
    def effective_bits(self) -> float:
        """Mean bits of a weight with the scales of its groups, biases of layers aside; 0 without weights."""
        bits = sum(e.elements * e.bits + 8 * e.group_bytes for e in self.edges if e.is_counted_weight)
        return bits / self.weights if self.weights else 0.0

    @functools.cached_property
    def figures(self) -> Mapping[str, float]:
        """The totals by metric, see METRICS; without those that the hardware file gives no figures for."""
        return {name: total for name, metric in METRICS.items() if (total := metric.total_of(self)) is not None}

    def __getitem__(self, metric: str) -> float:
        """The total of one metric.

        Raises:
            HagoError: an unknown metric, or one that the hardware file gives no figures for.
        """
        if metric in self.figures:
            return self.figures[metric]
        metric_named(metric)
        in_cycles = metric == "latency" and "cycles" in self.figures
        instead = ", so it is known in cycles only: use 'cycles'" if in_cycles else ""
        measured = "; 'hago hardware measure' finds those of this CPU" if metric != "energy" else ""
        raise HagoError(
            f"hardware {self.hardware!r} does not give what {metric!r} needs{instead}. Add to its file "
            f"{_keys_text(self.missing, metric)}, which docs/hardware.md explains{measured}"
        )

    def __getattr__(self, name: str) -> float:
        if name in METRICS:
            try:
                return self[name]
            except HagoError as error:
                raise AttributeError(str(error)) from None
        raise AttributeError(
            f"a cost has no {name!r}; its totals are {', '.join(METRICS)}.{did_you_mean(name, METRICS)}"
        )

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self.figures})

    def summary(self) -> Summary:
        """The totals, and the number of figures that are missing."""
        totals = {name: amount_text(name, total) for name, total in self.figures.items()}
        missing = f"{counted(len(self.missing), 'figure')}, see .missing" if self.missing else ""
        if missing and (bounded := _lower_bounds(self)):
            missing += f"; {bounded} are lower bounds"
        return Summary(
            f"Cost of {counted(len(self.nodes), 'node')} on {self.hardware}, batch {self.batch}",
            {**totals, "not given": missing},
        )

    def __str__(self) -> str:
        """Every node with what happens on its edges, and the totals."""
        right = ("MACs", "BOPs", "weights", "moved", "cycles", "edge cycles")
        titles = ("node", "op", "signature", *right[:2], "edge bits", *right[2:])
        rows = [_row(node, edges) for node, edges in rows_of(self)]
        # most hardware files give no figures for cycles
        kept = [
            i for i, title in enumerate(titles) if "cycles" not in title or any(row[i] not in ("", "-") for row in rows)
        ]
        lines = table(
            [titles[i] for i in kept],
            [[row[i] for i in kept] for row in rows],
            right,
            [{"node": keep_end, "op": keep_beginning, "signature": keep_beginning}, {"edge bits": wrap_words}],
        )
        totals = [*totals_lines({"": self.figures}), *missing_lines(self)]
        return "\n".join([f"cost on {self.hardware}, batch {self.batch}", "", *lines, "", *totals])

    def to_json(self) -> dict[str, Any]:
        """The same as JSON values."""
        return {
            "hardware": self.hardware,
            "batch": self.batch,
            "totals": dict(self.figures),
            "missing": list(self.missing),
            "nodes": [asdict(n) for n in self.nodes],
            "edges": [asdict(e) for e in self.edges],
        }


# ---------------------------------------------------------------- metrics
#: Units of metrics.
Unit = Literal["", "B", "bits", "cycles", "s", "J"]


def _keys_text(missing: Sequence[str], metric: str) -> str:
    """The keys of a hardware file that a metric needs, in words, from what a Cost names as missing."""
    needed_by = "energy" if metric == "energy" else "latency"
    chip: dict[str, None] = {}
    signatures: dict[str, None] = {}
    for text in missing:
        key, _, by = text.partition(" ")
        if needed_by in by and (key != "clock_hz" or metric == "latency"):
            (signatures if by.startswith("of signature") else chip)[key] = None
    parts = [
        f"{', '.join(keys)} {where}" for keys, where in ((chip, "to 'cost'"), (signatures, "to signatures")) if keys
    ]
    return " and ".join(parts)


#: The part of one row of a Cost in a total; None where the hardware file gives no figure for it.
Part = Callable[[Row, Cost], float | None]
#: How a metric depends on bits where they select equal signatures: not at all, by the bits of constants, or by those of
#: operands.
CountedBits = Literal["none", "constants", "operands"]


@dataclass(frozen=True, slots=True)
class Metric:
    """A cost that a search can minimize or limit. `METRICS` lists them; everything that a report or a search has to
    know of one is a field of it.

    Args:
        name: its name in limits, logs and reports.
        unit: of its totals.
        part: the part of every row, if the total is the sum over the rows. A guided search reads it to predict the cost
            of a choice of bits. None for other totals, such as a maximum over nodes: a guided search then measures
            every choice at its starting point, with a warning.
        total: the total; None for the sum of the parts.
        counted_bits: "none" if choices of bits that select equal signatures cost the same; "constants" if only edges
            have parts, which count the bits of constants; "operands" if only nodes have parts, which are functions of
            `NodeCost.bops`, or if the metric has no parts and its total depends on the bits of activations.
        depends_on_float: whether it prices computing in float, so that a search chooses by default which nodes run in
            float.
        float_figures: of a signature, one of which is needed to price a node in float; empty where none is.
        least: a lower bound of the total over all bits and all choices of float nodes, from the cost of one Plan and
            its hardware. None where no float node costs less than at the fewest bits.
    """

    name: str
    unit: Unit
    part: Part | None = None
    total: Callable[[Cost], float | None] | None = None
    counted_bits: CountedBits = "none"
    depends_on_float: bool = False
    float_figures: frozenset[str] = frozenset()
    least: Callable[[Cost, Hardware], float] | None = None

    def total_of(self, cost: Cost) -> float | None:
        """The total of a Cost; None where the hardware file gives no figure that it needs."""
        if self.total is not None:
            return self.total(cost)
        assert self.part is not None, f"metric {self.name!r} has neither parts nor a total"
        parts = [part for row in cost.rows if (part := self.part(row, cost)) is not None]
        if not parts:
            return None
        return sum(parts) if all(isinstance(part, int) for part in parts) else math.fsum(parts)


def _of_nodes(part: Callable[[NodeCost], float]) -> Part:
    return lambda row, cost: part(row) if isinstance(row, NodeCost) else 0


def _of_edges(part: Callable[[EdgeCost, Cost], float]) -> Part:
    return lambda row, cost: part(row, cost) if isinstance(row, EdgeCost) else 0


def _mean_bits(edge: EdgeCost, cost: Cost) -> float:
    return (edge.elements * edge.bits + 8 * edge.group_bytes) / cost.weights if edge.is_counted_weight else 0.0


def _seconds(row: Row, cost: Cost) -> float | None:
    return None if row.cycles is None or cost.clock_hz is None else row.cycles / cost.clock_hz


def _latency(cost: Cost) -> float | None:
    cycles = METRICS["cycles"].total_of(cost)
    return None if cycles is None or cost.clock_hz is None else cycles / cost.clock_hz


def _joules(row: Row, cost: Cost) -> float | None:
    return None if row.picojoules is None else row.picojoules * 1e-12


def _energy(cost: Cost) -> float | None:
    known = [row.picojoules for row in cost.rows if row.picojoules is not None]
    return math.fsum(known) * 1e-12 if known else None


def _least_of_macs(cost: Cost, hardware: Hardware, figure: str, power: int) -> float:
    """The sum over the nodes of their multiply-accumulates times a figure of the best signature of each, float ones
    included.

    Args:
        power: -1 for a figure that is a rate, 1 for a price.
    """
    total = 0.0
    for node in (n for n in cost.nodes if n.macs):
        each = [desc.cost.get(figure) for desc in hardware.ops.get(node.op, ())]
        known = [value for value in each if value is not None]
        if len(known) == len(each) and known:
            total += node.macs * min(value**power for value in known)
    return total


def _least_cycles(cost: Cost, hardware: Hardware) -> float:
    return _least_of_macs(cost, hardware, "macs_per_cycle", -1) / hardware.cost.get("cores", 1.0)


def _least_latency(cost: Cost, hardware: Hardware) -> float:
    return _least_cycles(cost, hardware) / hardware.cost["clock_hz"]


def _least_energy(cost: Cost, hardware: Hardware) -> float:
    return _least_of_macs(cost, hardware, "picojoules_per_mac", 1) * 1e-12


_RATES: Final = frozenset({"macs_per_cycle", "elements_per_cycle"})
#: The metrics that can be minimized or limited, by name. To add one, add its entry here and its row in docs/cost.md.
METRICS: Final[Mapping[str, Metric]] = {
    m.name: m
    for m in (
        Metric("weight_bytes", "B", _of_edges(lambda edge, _: edge.weight_bytes), counted_bits="constants"),
        Metric("activation_bytes", "B", _of_nodes(lambda node: node.write_bytes)),
        Metric("bytes_moved", "B", _of_nodes(lambda node: node.read_bytes + node.write_bytes)),
        Metric("macs", "", _of_nodes(lambda node: node.macs)),
        Metric("bops", "", _of_nodes(lambda node: node.bops), counted_bits="operands", depends_on_float=True),
        Metric(
            "effective_bits",
            "bits",
            _of_edges(_mean_bits),
            total=lambda cost: cost.effective_bits,
            counted_bits="constants",
        ),
        Metric("requantized", "", lambda row, _: row.requantized),
        Metric(
            "cycles",
            "cycles",
            lambda row, _: row.cycles,
            depends_on_float=True,
            float_figures=_RATES,
            least=_least_cycles,
        ),
        Metric(
            "latency",
            "s",
            _seconds,
            total=_latency,
            depends_on_float=True,
            float_figures=_RATES,
            least=_least_latency,
        ),
        Metric(
            "energy",
            "J",
            _joules,
            total=_energy,
            depends_on_float=True,
            float_figures=frozenset({"picojoules_per_mac"}),
            least=_least_energy,
        ),
    )
}


def metric_named(name: str) -> Metric:
    """The metric of a name.

    Raises:
        HagoError: there is none of that name.
    """
    if name not in METRICS:
        raise HagoError(f"unknown cost {name!r}; known: {', '.join(METRICS)}.{did_you_mean(name, METRICS)}")
    return METRICS[name]


def prices_float(name: str, hardware: Hardware) -> bool:
    """Whether a metric can be compared between nodes in integers and in float: the hardware's float signatures of ops
    that it runs in integers have the figures; without them, nodes in float would count as free."""
    figures = METRICS[name].float_figures
    ops = [op for op in hardware.ops if hardware.integer_descs(op)]
    return not figures or all(not figures.isdisjoint(d.cost) for op in ops for d in hardware.float_descs(op))


def rows_of(cost: Cost) -> Iterator[tuple[NodeCost, tuple[EdgeCost, ...]]]:
    """Each node with its in-edges."""
    in_edges: dict[str, list[EdgeCost]] = {}
    for edge in cost.edges:
        in_edges.setdefault(edge.edge.rpartition(":")[0], []).append(edge)
    for node in cost.nodes:
        yield node, tuple(in_edges.get(node.node, ()))


# ---------------------------------------------------------------- as text
_TIMES: Final = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns"))
_JOULES: Final = ((1.0, "J"), (1e-3, "mJ"), (1e-6, "uJ"), (1e-9, "nJ"))


def amount_text(metric: str, value: float) -> str:
    """A total with its unit, in three or four digits."""
    unit = METRICS[metric].unit
    if unit == "B":
        return bytes_text(value)
    if unit in ("s", "J"):
        return scaled(value, _TIMES if unit == "s" else _JOULES)
    if unit == "bits":
        return f"{value:.4g} bits"
    return f"{count(round(value))}{' cycles' if unit else ''}"


def _row(node: NodeCost, edges: Sequence[EdgeCost]) -> tuple[str, ...]:
    edge_cycles = [e.cycles for e in edges if e.cycles is not None]
    return (
        tail(node.node, 36),
        head(node.op, 24),
        head(node.signature, 24),
        count(node.macs) if node.macs else "",
        count(node.bops) if node.bops else "",
        " ".join(_edge(e) for e in edges),
        bytes_text(sum(e.weight_bytes for e in edges)) if any(e.weight_bytes for e in edges) else "",
        bytes_text(node.read_bytes + node.write_bytes),
        number(node.cycles, 4),
        number(sum(edge_cycles), 4) if edge_cycles else "",
    )


def _edge(edge: EdgeCost) -> str:
    """The bits of an edge, `f` for real values; with a `>` if the edge is converted while the model runs: `>8`."""
    bits = "f" if edge.dtype.startswith(("float", "bfloat")) else str(edge.bits)
    return f">{bits}" if edge.requantized else bits


def totals_lines(columns: Mapping[str, Mapping[str, float]]) -> list[str]:
    """A table of totals.

    Args:
        columns: the totals of each column, by its title.
    """
    known = [m for m in METRICS if any(m in figures for figures in columns.values())]
    rows = [(m, *(amount_text(m, f[m]) if m in f else "-" for f in columns.values())) for m in known]
    return table(("total", *columns), rows, right=tuple(columns))


def missing_lines(cost: Cost) -> list[str]:
    """The lines that name the figures that the hardware file does not give."""
    if not cost.missing:
        return []
    bounded = _lower_bounds(cost)
    bounds = f", which makes {bounded} lower bounds" if bounded else ""
    return ["", *wrapped(f"not in {cost.hardware}, and so not counted{bounds}: {'; '.join(cost.missing)}")]


def _lower_bounds(cost: Cost) -> str:
    """The totals that are too low where the hardware file lacks figures; empty where none of them is known."""
    known = [name for name in ("cycles", "latency", "energy") if name in cost.figures]
    return " and ".join([", ".join(known[:-1]), known[-1]] if known[1:] else known)


# ---------------------------------------------------------------- counting


def plan_cost(plan: Plan, batch: int = 1) -> Cost:
    """Count the cost of a Plan.

    A node reads every operand from memory as its producer stored it, and writes its value once.
    Requantization happens where a value is read, or at the output where the signature says so; it
    costs time and energy but no traffic of its own.

    Args:
        batch: samples in one run; weights are read once for all of them.

    Returns:
        Rows and totals; equal for equal Plans.

    References:
        S. Williams, A. Waterman, D. Patterson, "Roofline", CACM 52(4), 2009. Bit operations: as in
        M. van Baalen et al., "Bayesian Bits", NeurIPS 2020.

    Raises:
        HagoError: a batch below 1.
    """
    if isinstance(batch, bool) or not isinstance(batch, int) or batch < 1:
        raise HagoError(f"cost of a batch of {batch!r}; expected an integer, 1 or more")
    return _Account(plan, batch).cost()


class _Account:
    """Adds up the cost of one Plan; lives for one call of `plan_cost`."""

    def __init__(self, plan: Plan, batch: int) -> None:
        self.plan, self.batch = plan, batch
        self.graph: Graph = plan.graph
        self.hardware: Hardware = plan.hardware
        self.ops: Ops = plan.ops
        self.missing: dict[str, None] = {}  # an ordered set
        self.counted: set[tuple[object, ...]] = set()  # constants counted already
        self.cores = self.hardware.cost.get("cores", 1.0)

    def cost(self) -> Cost:
        edges = tuple(self._edge(e) for e in self.graph.edges)
        nodes = tuple(self._node(n) for n in self.graph.computed)
        if "clock_hz" not in self.hardware.cost:
            self.missing["clock_hz (latency in seconds)"] = None
        clock = self.hardware.cost.get("clock_hz")
        return Cost(self.hardware.name, self.batch, nodes, edges, clock, tuple(self.missing))

    # ------------------------------------------------------------ what stands in memory
    def _elements(self, name: str) -> int:
        """The number of elements of a node's value, times the batch unless it is a constant."""
        node = self.graph[name]
        count = math.prod(node.shape or (0,))
        return count if node.op == CONST else count * self.batch

    def _stored(self, name: str) -> DType:
        """The dtype in which a node's value is stored in memory; not for constants."""
        node = self.graph[name]
        if name in self.plan.nodes:
            return self.plan.nodes[name].out.dtype
        if node.op == INPUT:
            return DTYPES.get(str(node.dtype), FLOAT32)
        return self._float_desc(node).out_dtype

    def _float_desc(self, node: Node) -> OpDesc:
        for edge in node.edges:
            if edge in self.plan.weights:
                return self.plan.weights[edge].desc
        descs = self.hardware.float_descs(node.op)
        return descs[0] if descs else OpDesc("float32", "float32", name="float32")

    def _const_bits(self, edge: Edge) -> int:
        """The number of bits that each value of a constant takes in memory while the model runs."""
        target = self.plan.target(edge)
        if target is not None:
            return target.dtype.bits
        return self.graph.consts[self.graph.source(edge)].element_size() * 8

    # ------------------------------------------------------------ edges
    def _edge(self, edge: Edge) -> EdgeCost:
        source = self.graph.source(edge)
        elements = self._elements(source)
        if self.graph[source].op == CONST:
            return self._constant(edge, source, elements)
        simq: SimQ | None = self.plan.edges.get(edge)
        target = self.plan.target(edge)
        if target is not None:
            dtype = target.dtype
        elif simq is None:
            dtype = self._stored(source)
        else:
            dtype = FLOAT32
        bits = dtype.bits if target is None else bits_of(target)
        if simq is None:
            return EdgeCost(str(edge), "as stored", elements, bits, dtype.name)
        cycles = self._cycles(elements, self._chip("requantize_per_cycle", "latency"), self.cores)
        energy = self._picojoules(elements, self._chip("picojoules_per_requantize", "energy"))
        kind: EdgeKind = simq.kind  # type: ignore[assignment]
        return EdgeCost(str(edge), kind, elements, bits, dtype.name, 0, elements, cycles, energy)

    def _constant(self, edge: Edge, source: str, elements: int) -> EdgeCost:
        target = self.plan.target(edge)
        bits = self._const_bits(edge) if target is None else bits_of(target)
        rule = None if edge.dst == OUTPUT else self.ops.get(self.graph[edge.dst].op)
        slot = "own" if rule is None or rule.integer is None else rule.integer.slot(edge.slot)
        kind: EdgeKind = "bias" if slot == "bias" else "constant" if slot == "plain" else "weight"
        key = (source, None if target is None else target.key)
        new = key not in self.counted
        self.counted.add(key)
        name = str(self.graph.consts[source].dtype).removeprefix("torch.") if target is None else target.dtype.name
        of_groups = self.plan.group_bytes(edge)
        size = packed_bytes(elements, bits) + of_groups if new else 0
        return EdgeCost(str(edge), kind, elements, bits, name, size, group_bytes=of_groups)

    # ------------------------------------------------------------ nodes
    def _node(self, node: Node) -> NodeCost:
        plan = self.plan.nodes.get(node.name)
        desc = self._float_desc(node) if plan is None else plan.desc
        elements = self._elements(node.name)
        macs = node_macs(self.graph, node, self.ops) * self.batch
        read = sum(self._read(e) for e in node.edges)
        write = packed_bytes(elements, self._stored(node.name).bits)
        requantized = elements if plan is not None and plan.out_simq is not None else 0
        compute = self._compute(node, desc, macs, elements, requantized)
        memory = self._cycles(read + write, self._chip("bytes_per_cycle", "latency"))
        known = [c for c in (compute, memory) if c is not None]
        return NodeCost(
            node=node.name,
            op=str(node.attrs["target"]) if node.op == "opaque" else node.op,
            integer=plan is not None,
            signature=desc.name or str(desc),
            macs=macs,
            bops=macs * self._mac_bits(node, desc),
            read_bytes=read,
            write_bytes=write,
            requantized=requantized,
            compute_cycles=compute,
            memory_cycles=memory,
            cycles=max(known) if known else None,
            picojoules=self._energy(desc, macs, read + write, requantized),
        )

    def _read(self, edge: Edge) -> int:
        source = self.graph.source(edge)
        if self.graph[source].op != CONST:
            return packed_bytes(self._elements(source), self._stored(source).bits)
        return packed_bytes(self._elements(source), self._const_bits(edge)) + self.plan.group_bytes(edge)

    def _compute(self, node: Node, desc: OpDesc, macs: int, elements: int, requantized: int) -> float | None:
        if macs:
            own = self._cycles(macs, self._figure(desc, "macs_per_cycle", "latency"), self.cores)
        else:
            # pooling and sums read more than they write
            data = [self._elements(s) for s in node.inputs if self.graph[s].op != CONST]
            own = self._cycles(max([elements, *data]), self._figure(desc, "elements_per_cycle", "latency"), self.cores)
        if not requantized:
            return own
        again = self._cycles(requantized, self._chip("requantize_per_cycle", "latency"), self.cores)
        return again if own is None else own + (again or 0.0)

    def _energy(self, desc: OpDesc, macs: int, moved: int, requantized: int) -> float | None:
        terms = [self._picojoules(moved, self._chip("picojoules_per_byte", "energy"))]
        if macs:
            terms.append(self._picojoules(macs, self._figure(desc, "picojoules_per_mac", "energy")))
        if requantized:
            terms.append(self._picojoules(requantized, self._chip("picojoules_per_requantize", "energy")))
        known = [t for t in terms if t is not None]
        return math.fsum(known) if known else None

    def _mac_bits(self, node: Node, desc: OpDesc) -> int:
        """Bits of one operand times bits of the other."""
        # None for an operand that the node does not have
        first, second = [*(self.plan.target(e) for e in node.edges[:2]), None, None][:2]
        if node.name in self.plan.nodes:
            return 0 if first is None or second is None else bits_of(first) * bits_of(second)
        return math.prod(desc.out_dtype.bits if q is None else bits_of(q) for q in (first, second))

    # ------------------------------------------------------------ figures of the hardware file
    def _figure(self, desc: OpDesc, name: str, needed_by: str) -> float | None:
        if name not in desc.cost:
            self.missing[f"{name} of signature {desc.name or str(desc)!r} ({needed_by})"] = None
        return desc.cost.get(name)

    def _chip(self, name: str, needed_by: str) -> float | None:
        if name not in self.hardware.cost:
            self.missing[f"{name} ({needed_by})"] = None
        return self.hardware.cost.get(name)

    @staticmethod
    def _cycles(amount: int, rate: float | None, cores: float = 1.0) -> float | None:
        return None if rate is None else amount / (rate * cores)

    @staticmethod
    def _picojoules(amount: int, each: float | None) -> float | None:
        return None if each is None else amount * each


def node_macs(graph: Graph, node: Node, ops: Ops) -> int:
    """Multiply-accumulates of a node at batch 1; 0 where its op counts none."""
    shapes = [s for name in node.inputs if (s := graph[name].shape) is not None]
    rule = ops.get(node.op)
    if len(shapes) < len(node.inputs):
        return 0
    if node.op == opaque.NAME:
        return opaque.macs(node.attrs, shapes)
    return 0 if rule is None or node.shape is None else rule.macs(node.attrs, shapes, node.shape)


def float_cost(plan: Plan, batch: int = 1) -> Cost:
    """The cost of the Plan's graph computed in float, on the float signatures of the hardware."""
    edges: dict[Edge, SimQ | None] = dict.fromkeys(plan.edges)
    return plan_cost(Plan(plan.graph, plan.hardware, plan.ops, {}, edges), batch)
