"""TPU-MLIR: a Plan as the calibration table and the quantize table that its compiler reads.

A row holds what the integers of a tensor stand for: the threshold is the value of the largest integer (of the
largest magnitude, where an asymmetric range reaches further down), so that the compiler's `threshold / 127`
(signed, 8 bits) is the Plan's scale. One tensor has one row there; where
its readers quantize it with several ranges here, the widest stands in the table. Weights have no rows:
the compiler takes their largest magnitudes itself.

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
from hago.arithmetic.schemes import TWO_SIDED, Grid, Range, represented
from hago.arithmetic.types import Edge, QParams
from hago.emulation.tpu_mlir.tables import CalibrationTable, QuantizeTable, Row
from hago.errors import HagoError
from hago.graph.graph import CONST, INPUT, OUTPUT, Graph, Node
from hago.plan.plan import NodePlan, Plan
from hago.simulation.simulator import Simulator

#: Tensors of at most so many bits stand in the int4 section as well.
_FOUR: Final = 4


@dataclass(frozen=True, slots=True)
class Tables:
    """What a strategy is in TPU-MLIR's words.

    Args:
        calibration, quantize: the two tables. Operators that the second does not name run in INT8.
        without_range: integer nodes that no edge quantizes, and for which no observed range was given.
        widened: tensors whose readers have several ranges; the widest stands in the table.
        other_bits: operands of neither 4 nor 8 bits, which the engine cannot express, by group key.
    """

    calibration: CalibrationTable
    quantize: QuantizeTable
    without_range: tuple[str, ...]
    widened: tuple[str, ...]
    other_bits: Mapping[str, int]


def make_tables(plan: Plan, bits: Mapping[str, int], observed: Mapping[str, Range] | None = None) -> Tables:
    """The tables of a Plan.

    Args:
        bits: of the Plan's groups, as a strategy holds them.
        observed: (minimum, maximum) of nodes, for those that no edge quantizes: the last layer, say.

    Raises:
        HagoError: a float node whose weight is quantized, which the tables have no mode for.
    """
    if plan.weights:
        raise HagoError(
            f"node {next(iter(plan.weights)).dst!r} computes in float with its weight as integers; TPU-MLIR's "
            "quantize table has no mode that quantizes weights alone. Keep the weights float: "
            f"keep_float={list(map(str, plan.weights))}"
        )
    found = _Ranges(plan, bits)
    rows = {name: _widest(pairs) for name, pairs in found.wide.items()}
    _pass_on(plan, rows)
    integer = [n.name for n in plan.graph if n.name in plan.nodes]
    seen = {n: pair for n, pair in (observed or {}).items() if n in plan.nodes and n not in rows}
    rows |= seen
    one_sided = plan.hardware.activation.scheme not in TWO_SIDED
    four = {name: _widest(pairs) for name, pairs in found.four.items()}
    order = [n.name for n in plan.graph if n.name in rows]
    return Tables(
        CalibrationTable(
            {n: _row(rows[n], one_sided and n not in seen) for n in order},
            {n: _row(four[n], one_sided) for n in order if n in four},
            comments=(f"made by hago for {plan.hardware.name}", "op_name    threshold    min    max"),
        ),
        QuantizeTable(dict(_modes(plan, bits)), ("op_name   quantize_mode",)),
        tuple(n for n in integer if n not in rows),
        tuple(n for n in order if len({*found.wide.get(n, ())}) > 1),
        {k: b for k, b in bits.items() if b not in (_FOUR, 8)},
    )


def observed_ranges(plan: Plan, batches: Iterable[Sequence[Tensor]]) -> dict[str, Range]:
    """(minimum, maximum) of every integer node over data, as the Plan computes it.

    Args:
        batches: flat inputs.
    """
    found: dict[str, Range] = {}

    def see(node: Node, value: Any) -> None:
        made = plan.nodes.get(node.name)
        if made is not None and value.numel():
            low, high = (float(v) for v in torch.aminmax(dequantize(value, made.out)))
            before = found.get(node.name, (low, high))
            found[node.name] = (min(before[0], low), max(before[1], high))

    simulator = Simulator(plan)
    for inputs in batches:
        simulator.run(inputs, see)
    return found


def _row(pair: Range, one_sided: bool) -> Row:
    """The threshold of a symmetric tensor is its positive end: some chips go one quantum further below."""
    return Row(pair[1] if one_sided and pair[1] > 0 else max(-pair[0], pair[1], 0.0), *pair)


def _widest(pairs: list[Range]) -> Range:
    return min(lo for lo, _ in pairs), max(hi for _, hi in pairs)


# ---------------------------------------------------------------- ranges
class _Ranges:
    """Every range that a Plan quantizes a tensor with, by the tensor's node: those of all widths, and
    those of at most four bits."""

    def __init__(self, plan: Plan, bits: Mapping[str, int]) -> None:
        self.plan, self.bits = plan, bits
        self.wide: dict[str, list[Range]] = {}
        self.four: dict[str, list[Range]] = {}
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
        pair = represented(float(lo), float(hi), _grid(self.plan, bits, qparams))
        self.wide.setdefault(source, []).append(pair)
        if bits <= _FOUR:
            self.four.setdefault(source, []).append(pair)


def _grid(plan: Plan, bits: int, qparams: QParams) -> Grid:
    scheme = plan.hardware.activation.scheme if qparams.dtype.bits <= 16 else "hago"
    signed = bool((qparams.zero_point > qparams.qmin).any())
    return Grid(bits, scheme, signed, plan.hardware.requantize.power_of_two)


def _pass_on(plan: Plan, rows: dict[str, Range]) -> None:
    """Ranges of nodes without one of their own: of their producers where values only move, then of the
    one reader that only moves them."""
    for node in plan.graph:
        sources = _moved(plan, node)
        if node.name not in rows and sources and all(s in rows for s in sources):
            rows[node.name] = _widest([rows[s] for s in sources])
    for node in reversed(plan.graph.nodes):
        reader = _only_reader(plan.graph, node)
        if node.name in plan.nodes and node.name not in rows and reader in rows and _moved(plan, plan.graph[reader]):
            rows[node.name] = rows[reader]


def _moved(plan: Plan, node: Node) -> tuple[str, ...]:
    """The tensors that an integer node only moves about, as pooling, concatenation and relu do."""
    form = plan.ops[node.op].integer if node.name in plan.nodes else None
    if form is None or not form.within_hull:
        return ()
    return tuple(s for slot, s in enumerate(node.inputs) if form.slot(slot) in ("follow", "common", "own"))


def _only_reader(graph: Graph, node: Node) -> str:
    edges = graph.out_edges[node.name]
    return edges[0].dst if len(edges) == 1 and edges[0].dst != OUTPUT else ""


# ---------------------------------------------------------------- modes
def _modes(plan: Plan, bits: Mapping[str, int]) -> Iterator[tuple[str, str]]:
    """The mode of every operator that does not run in INT8."""
    for node in plan.graph:
        if node.op in (INPUT, CONST):
            continue
        if node.name not in plan.nodes:
            yield node.name, "F32"
            continue
        found = [(e, bits.get(str(e), bits.get(f"{plan.graph.source(e)}:out"))) for e in node.edges]
        known = [(plan.graph[plan.graph.source(e)].op == CONST, b) for e, b in found if b is not None]
        narrow = {const: all(b <= _FOUR for c, b in known if c == const) for const, _ in known}
        if narrow.get(True):
            yield node.name, "INT4" if narrow.get(False) else "W4INT8"
