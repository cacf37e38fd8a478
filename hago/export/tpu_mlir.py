"""Export of a Plan to TPU-MLIR: the calibration table and the quantize table that its compiler reads.

A row of the calibration table holds the range of a tensor. Its threshold is the real value of the largest integer (of
the largest magnitude, if an asymmetric range reaches further down), so that the compiler's scale, `threshold / 127` for
signed 8 bits, is that of the Plan. A tensor has one row; if its readers quantize it with several ranges in the Plan,
the row holds the widest. Weights have no rows, since the compiler computes their largest magnitudes itself.

References:
    TPU-MLIR, docs "calibration table" and lib/Dialect/Top/Transforms/ImportCalibration.cpp.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from hago.arithmetic.numerics import dequantize
from hago.arithmetic.schemes import TWO_SIDED, Grid, Range, quantizable_range
from hago.arithmetic.types import Edge, QParams
from hago.emulation.tpu_mlir import CalibrationTable, QuantizeTable, Row
from hago.errors import HagoError
from hago.graph import CONST, INPUT, OUTPUT, Graph, Node
from hago.plan import NodePlan, Plan
from hago.simulation import Simulator

#: Tensors of at most this many bits are also listed in the int4 section.
_INT4_BITS: Final = 4


@dataclass(frozen=True, slots=True)
class Tables:
    """The tables of a Plan for TPU-MLIR, made by `make_tables`.

    Args:
        calibration, quantize: the two tables. Operators that the quantize table does not name run in INT8.
        without_range: integer nodes without a row: no edge quantizes them, and no observed range was given.
        widened: tensors that are read with several ranges, of which the table has the widest.
        other_bits: by group key, bits of operands that are neither 4 nor 8, which TPU-MLIR cannot express.
    """

    calibration: CalibrationTable
    quantize: QuantizeTable
    without_range: tuple[str, ...]
    widened: tuple[str, ...]
    other_bits: Mapping[str, int]


def make_tables(plan: Plan, bits: Mapping[str, int], observed: Mapping[str, Range] | None = None) -> Tables:
    """Make the tables of a Plan.

    Args:
        bits: of the Plan's groups, as in a strategy.
        observed: (minimum, maximum) by node, used for nodes that no edge quantizes, e.g. the last layer.

    Raises:
        HagoError: the Plan quantizes the weight of a float node, or one in groups with multipliers, for which the
            tables have no mode.
    """
    if plan.weights:
        raise HagoError(
            f"node {next(iter(plan.weights)).dst!r} computes in float with its weight as integers; TPU-MLIR's "
            "quantize table has no mode that quantizes weights alone. Keep the weights float: "
            f"keep_float={list(map(str, plan.weights))}"
        )
    grouped = [name for name, node in plan.nodes.items() if node.groups is not None]
    if grouped:
        raise HagoError(
            f"the weight of node {grouped[0]!r} has a multiplier for every group, which TPU-MLIR's tables have no mode "
            f"for. Keep such nodes float: keep_float={grouped}"
        )
    ranges = _Ranges(plan, bits)
    rows = {name: _widest(pairs) for name, pairs in ranges.all.items()}
    _propagate_ranges(plan, rows)
    integer = [n.name for n in plan.graph if n.name in plan.nodes]
    from_data = {n: pair for n, pair in (observed or {}).items() if n in plan.nodes and n not in rows}
    rows |= from_data
    symmetric = plan.hardware.activation.scheme not in TWO_SIDED
    int4 = {name: _widest(pairs) for name, pairs in ranges.int4.items()}
    order = [n.name for n in plan.graph if n.name in rows]
    return Tables(
        CalibrationTable(
            {n: _row(rows[n], symmetric and n not in from_data) for n in order},
            {n: _row(int4[n], symmetric) for n in order if n in int4},
            comments=(f"made by hago for {plan.hardware.name}", "op_name    threshold    min    max"),
        ),
        QuantizeTable(dict(_modes(plan, bits)), ("op_name   quantize_mode",)),
        tuple(n for n in integer if n not in rows),
        tuple(n for n in order if len({*ranges.all.get(n, ())}) > 1),
        {k: b for k, b in bits.items() if b not in (_INT4_BITS, 8)},
    )


def observed_ranges(plan: Plan, batches: Iterable[Sequence[Tensor]]) -> dict[str, Range]:
    """The minimum and maximum of every integer node over data, computed by simulation of the Plan.

    Args:
        batches: flat inputs.
    """
    ranges: dict[str, Range] = {}

    def observe(node: Node, value: Any) -> None:
        node_plan = plan.nodes.get(node.name)
        if node_plan is not None and value.numel():
            low, high = (float(v) for v in torch.aminmax(dequantize(value, node_plan.out)))
            previous = ranges.get(node.name, (low, high))
            ranges[node.name] = (min(previous[0], low), max(previous[1], high))

    simulator = Simulator(plan)
    for inputs in batches:
        simulator.run(inputs, observe)
    return ranges


def _row(pair: Range, symmetric: bool) -> Row:
    """The row of a range.

    Its threshold is the larger magnitude; of a symmetric scheme it is the upper end, since the lower end may be one
    quantum further from 0, for the extra negative integer.
    """
    return Row(pair[1] if symmetric and pair[1] > 0 else max(-pair[0], pair[1], 0.0), *pair)


def _widest(pairs: list[Range]) -> Range:
    return min(lo for lo, _ in pairs), max(hi for _, hi in pairs)


# ---------------------------------------------------------------- ranges
class _Ranges:
    """The ranges with which a Plan quantizes each tensor, by the node that produces it.

    Attributes:
        all: all ranges.
        int4: those of at most 4 bits.
    """

    def __init__(self, plan: Plan, bits: Mapping[str, int]) -> None:
        self.plan, self.bits = plan, bits
        self.all: dict[str, list[Range]] = {}
        self.int4: dict[str, list[Range]] = {}
        for name, node in plan.nodes.items():
            for key, (lo, hi) in node.thresholds.items():
                self._add(name, node, key, lo, hi)

    def _add(self, name: str, node: NodePlan, key: str, lo: Tensor, hi: Tensor) -> None:
        if key == f"{name}:out":
            source, qparams = name, node.out
        else:
            edge = Edge.parse(key)
            target = node.operands[edge.slot]
            assert target is not None
            source, qparams = self.plan.graph.source(edge), target
        if self.plan.graph[source].op == CONST:
            return
        bits = self.bits.get(key, self.bits.get(f"{source}:out", qparams.dtype.bits))
        pair = quantizable_range(float(lo), float(hi), _grid_of(self.plan, bits, qparams))
        self.all.setdefault(source, []).append(pair)
        if bits <= _INT4_BITS:
            self.int4.setdefault(source, []).append(pair)


def _grid_of(plan: Plan, bits: int, qparams: QParams) -> Grid:
    scheme = plan.hardware.activation.scheme if qparams.dtype.bits <= 16 else "hago"
    signed = bool((qparams.zero_point > qparams.qmin).any())
    return Grid(bits, scheme, signed, plan.hardware.requantize.power_of_two)


def _propagate_ranges(plan: Plan, rows: dict[str, Range]) -> None:
    """Add rows for nodes that have none, from nodes beside them whose values lie in the same range.

    A node whose output stays within the range of its inputs takes the range of its producers; then a node whose only
    reader is such a node takes the range of that reader.
    """
    for node in plan.graph:
        sources = _sources_of_same_range(plan, node)
        if node.name not in rows and sources and all(s in rows for s in sources):
            rows[node.name] = _widest([rows[s] for s in sources])
    for node in reversed(plan.graph.nodes):
        reader = _only_reader(plan.graph, node)
        if (
            node.name in plan.nodes
            and node.name not in rows
            and reader in rows
            and _sources_of_same_range(plan, plan.graph[reader])
        ):
            rows[node.name] = rows[reader]


def _sources_of_same_range(plan: Plan, node: Node) -> tuple[str, ...]:
    """The inputs of an integer node whose output stays within their range, e.g. pooling, concatenation and relu."""
    form = plan.ops[node.op].integer if node.name in plan.nodes else None
    if form is None or not form.outputs_fit_input_dtype:
        return ()
    return tuple(s for slot, s in enumerate(node.inputs) if form.slot(slot) in ("follow", "common", "own"))


def _only_reader(graph: Graph, node: Node) -> str:
    """The node that alone reads a node; empty if there are several, or the model returns it."""
    edges = graph.out_edges[node.name]
    return edges[0].dst if len(edges) == 1 and edges[0].dst != OUTPUT else ""


# ---------------------------------------------------------------- modes
def _modes(plan: Plan, bits: Mapping[str, int]) -> Iterator[tuple[str, str]]:
    """The operators that do not run in INT8, each with its mode."""
    for node in plan.graph:
        if node.op in (INPUT, CONST):
            continue
        if node.name not in plan.nodes:
            yield node.name, "F32"
            continue
        edge_bits = [(e, bits.get(str(e), bits.get(f"{plan.graph.source(e)}:out"))) for e in node.edges]
        operands = [(plan.graph[plan.graph.source(e)].op == CONST, b) for e, b in edge_bits if b is not None]
        narrow = {const: all(b <= _INT4_BITS for c, b in operands if c == const) for const, _ in operands}
        if narrow.get(True):
            yield node.name, "INT4" if narrow.get(False) else "W4INT8"
