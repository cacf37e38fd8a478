"""The nodes of a point as a report shows them: what the Plan says of them, and what an inspection measured.

Histograms and ranges of channels belong to the network, not to a point: points that make the same corrections share
them, so they stand in tables and nodes name them by index.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor

from hago.analysis import GraphStatistic, NodeStatistic, cause_in_words
from hago.arithmetic.types import Edge, QParams
from hago.cost import METRICS, Cost, EdgeCost, Row
from hago.data import Batch
from hago.graph import CONST, INPUT, OUTPUT, Graph, Node, run_real
from hago.ops import Ops
from hago.plan import Bits, Plan, Space, Topology, bits_of
from hago.report.amounts import STORED
from hago.report.document import Channels, EdgeDetail, EdgeKind, Histogram, NodeDetail, rounded

#: Bins of a histogram.
BINS: Final = 48
#: The most entries of the ranges of a weight's channels; of more channels, neighbours share one.
MOST_CHANNELS: Final = 96
#: Causes of error that a node adds itself with a smaller share than this are left out.
_LEAST_SHARE: Final = 5e-4


@dataclass(slots=True)
class Tables:
    """The values that points share, each stored once; filled while points are described.

    Attributes:
        histograms, channels: by content, in the order in which they were first needed.
    """

    histograms: dict[Histogram, int] = field(default_factory=dict)
    channels: dict[Channels, int] = field(default_factory=dict)

    def histogram(self, value: Histogram) -> int:
        """The index of a histogram."""
        return self.histograms.setdefault(value, len(self.histograms))

    def channel(self, value: Channels) -> int:
        """The index of the ranges of a weight's channels."""
        return self.channels.setdefault(value, len(self.channels))


def widest_edges(space: Space, bits: Bits) -> set[str]:
    """The edges whose groups have the most bits that the hardware takes."""
    groups = {key: group for key, group in space.groups.items() if key in bits and bits[key] == max(group.choices)}
    return {str(edge) for group in groups.values() for edge in group.edges}


# ---------------------------------------------------------------- what the Plan says
def describe_nodes(
    plan: Plan,
    topology: Topology,
    cost: Cost,
    tables: Tables,
    statistic: GraphStatistic | None = None,
    peaks: Mapping[str, float] | None = None,
    histograms: Mapping[str, Histogram] | None = None,
    full: Collection[str] = (),
    tried: Collection[str] = (),
) -> tuple[NodeDetail, ...]:
    """Describe every node but constants.

    Args:
        topology: of the same strategy, which says why a node runs as it does.
        tables: receive what points share.
        statistic: of an inspection of the same Plan.
        peaks: the largest accumulators seen, over the maximum of their registers.
        histograms: of the float values, by node.
        full: of `widest_edges`.
        tried: the names of the corrections that were tried.
    """
    is_per_channel = plan.hardware.weight.granularity == "per_channel"
    rows = {} if statistic is None else {row.name: row for row in statistic.rows}
    blame = {} if statistic is None else statistic.blame
    costs = _costs_by_node(plan.graph, cost)
    details = []
    for node in plan.graph:
        if node.op == CONST:
            continue
        row = rows.get(node.name)
        plain = _planned(plan, node, topology, costs.get(node.name, {}), row)
        weights = channels_of(plan, node)
        histogram = (histograms or {}).get(node.name)
        more = {} if row is None else _measured(row, blame.get(node.name, 0.0))
        if row is not None and row.main_cause is not None:
            words, helps = cause_in_words(row, row.main_cause, tried, full=full, is_per_channel=is_per_channel)
            more |= {"words": words, "helps": helps}
        details.append(
            NodeDetail(
                **plain,
                **more,
                seen=rounded((peaks or {}).get(node.name)),
                histogram=None if histogram is None else tables.histogram(histogram),
                weights=None if weights is None else tables.channel(weights),
            )
        )
    return tuple(details)


def _planned(
    plan: Plan, node: Node, topology: Topology, costs: Mapping[str, float], row: NodeStatistic | None
) -> dict[str, Any]:
    """The fields of a NodeDetail that need no data."""
    node_plan = plan.nodes.get(node.name)
    edges = tuple(_edges(plan, node, row))
    operands = [e.bits for e in edges if e.kind in ("data", "weight", "constant")]
    accumulates = node_plan is not None and not node_plan.keeps_input_dtype and node_plan.table is None
    plain = node_plan if accumulates else None
    runs = "integer" if node_plan is not None else "input" if node.op == INPUT else "float"
    return {
        "name": node.name,
        "op": str(node.attrs["target"]) if node.op == "opaque" else node.op,
        "runs": runs,
        "reason": "" if runs == "input" else topology.reasons.get(node.name, ""),
        "bits": min(operands, default=None),
        "signature": "" if node_plan is None else str(node_plan.desc),
        "verdict": "float" if node_plan is None else node_plan.verdict,
        "register": None if plain is None else str(plain.desc.register.dtype),
        "on_overflow": None if plain is None else plain.desc.register.overflow,
        "share": None if plain is None else rounded(plain.register_share),
        "edges": edges,
        "costs": costs,
    }


def _edges(plan: Plan, node: Node, row: NodeStatistic | None) -> Iterator[EdgeDetail]:
    """The edges of a node that carry integers, its requantized output last."""
    measured = {} if row is None else {edge.edge: edge for edge in row.edges}
    form = plan.ops[node.op].integer if node.op in plan.ops else None
    node_plan = plan.nodes.get(node.name)
    carried: list[tuple[str, str, EdgeKind, QParams, bool]] = []
    for edge in node.edges:
        target = plan.target(edge)
        if target is None:
            continue
        source = plan.graph.source(edge)
        constant = plan.graph[source].op == CONST
        is_weight = form is not None and form.weight is not None and form.weight.slot == edge.slot
        is_bias = form is not None and form.slot(edge.slot) == "bias"
        kind: EdgeKind = "data" if not constant else "bias" if is_bias else "weight" if is_weight else "constant"
        carried.append((str(edge), source, kind, target, constant or plan.edges.get(edge) is not None))
    if node_plan is not None and (node_plan.out_simq is not None or node_plan.table is not None):
        carried.append((f"{node.name}:out", node.name, "output", node_plan.out, True))
    for key, source, kind, target, converted in carried:
        seen = measured.get(key)
        ends = ((bound - target.zero_point).to(torch.float64) for bound in (target.qmin, target.qmax))
        low, high = (end * target.scale for end in ends)
        has_figures = seen is not None and seen.requantized and seen.values > 0
        # what a relu behind an output sets to zero is not cut off
        by_relu = kind == "output" and bool((low >= 0.0).all())
        yield EdgeDetail(
            edge=key,
            source=source,
            kind=kind,
            bits=bits_of(target),
            dtype=str(target.dtype),
            scale=rounded(float(target.scale.max())),
            scales=target.scale.numel(),
            low=rounded(float(low.min())),
            high=rounded(float(high.max())),
            converted=converted,
            clipped=rounded(seen.saturated_fraction) if seen is not None and has_figures and not by_relu else None,
            effect=rounded(seen.rounding_effect + seen.saturation_effect) if seen is not None and has_figures else None,
        )


def _measured(row: NodeStatistic, blame: float) -> dict[str, Any]:
    """The fields of a NodeDetail that an inspection measured, without words."""
    shares = {name: s.own_share for name, s in row.causes.items() if s.own_share is not None}
    return {
        "overflows": row.overflows,
        "accumulators": row.accumulators,
        "sqnr": rounded(row.sqnr),
        "own_sqnr": rounded(row.own_sqnr),
        "blame": rounded(blame),
        "cause": row.main_cause,
        "causes": {name: rounded(s) or 0.0 for name, s in shares.items() if abs(s) >= _LEAST_SHARE},
        "compared": row.count,
        "differing": row.differences,
    }


def _costs_by_node(graph: Graph, cost: Cost) -> dict[str, dict[str, float]]:
    """The costs of every node together with its in-edges, as parts of the totals; those without a figure are left out.
    An output of the network counts for the node whose value it is."""
    found: dict[str, dict[str, float]] = {node.node: {} for node in cost.nodes}
    rows: list[tuple[str, Row]] = [(node.node, node) for node in cost.nodes]
    for edge in cost.edges:
        at = Edge.parse(edge.edge)
        rows.append((graph.source(at) if at.dst == OUTPUT else at.dst, edge))
    for name, metric in METRICS.items():
        if metric.part is None or metric.unit == "bits":  # a mean has no parts that are costs
            continue
        for node, row in rows:
            part = metric.part(row, cost)
            if part and node in found:
                found[node][name] = found[node].get(name, 0.0) + part
    for node, row in rows:
        if isinstance(row, EdgeCost) and row.stored_bytes and node in found:
            found[node][STORED] = found[node].get(STORED, 0.0) + row.stored_bytes
    return {node: {name: rounded(value) or 0.0 for name, value in own.items()} for node, own in found.items()}


def ram_bytes(graph: Graph, cost: Cost) -> float:
    """The bytes of the values that are alive at the same time, at most, for one run: those that a later node reads, and
    that of the node that runs. No node is taken to write over its input."""
    sizes = {node.node: float(node.write_bytes) for node in cost.nodes}
    for name in graph.inputs:
        reads = [edge for edge in cost.edges if graph.source(Edge.parse(edge.edge)) == name]
        # floats where a reader quantizes them, else as they are stored
        widths = (edge.elements * (4.0 if edge.kind == "quantize" else edge.bits / 8) for edge in reads)
        sizes[name] = max(widths, default=0.0)
    alive = {name: sizes.get(name, 0.0) for name in graph.inputs}
    most = sum(alive.values())
    for step in graph.schedule:
        alive[step.step.name] = sizes.get(step.step.name, 0.0)
        most = max(most, sum(alive.values()))
        for name in step.dropped:
            alive.pop(name, None)
    return most


# ---------------------------------------------------------------- values and channels of the float network
def channels_of(plan: Plan, node: Node) -> Channels | None:
    """The range of every output channel of a node's weight; None where it has none."""
    form = plan.ops[node.op].integer if node.op in plan.ops else None
    if form is None or form.weight is None or form.weight.slot >= len(node.inputs):
        return None
    name = node.inputs[form.weight.slot]
    if plan.graph[name].op != CONST:
        return None
    weight = plan.graph.consts[name]
    if not weight.is_floating_point() or not weight.ndim:
        return None
    rows = weight.movedim(form.weight.axis, 0).reshape(weight.shape[form.weight.axis], -1)
    low, high = rows.amin(1), rows.amax(1)
    together = math.ceil(len(low) / MOST_CHANNELS)
    starts = range(0, len(low), together)
    lows = [float(low[start : start + together].min()) for start in starts]
    highs = [float(high[start : start + together].max()) for start in starts]
    return Channels(
        weight=name,
        channels=len(low),
        together=together,
        low=tuple(rounded(x, 3) or 0.0 for x in lows),
        high=tuple(rounded(x, 3) or 0.0 for x in highs),
    )


def histograms_of(graph: Graph, batches: Sequence[Batch], ops: Ops) -> dict[str, Histogram]:
    """Histograms of the finite values of every node of the float model, in two passes over the batches."""
    ends: dict[str, tuple[float, float]] = {}
    counts: dict[str, Tensor] = {}

    def widen(node: Node, value: Any) -> None:
        if (finite := _finite(value)) is not None:
            low, high = (float(end) for end in finite.aminmax())
            before = ends.get(node.name, (low, high))
            ends[node.name] = min(low, before[0]), max(high, before[1])

    def count(node: Node, value: Any) -> None:
        if (finite := _finite(value)) is not None:
            low, high = ends[node.name]
            if low < high:
                own = torch.histc(finite, BINS, low, high).to(torch.float64)
                counts[node.name] = counts[node.name] + own if node.name in counts else own

    for observe in (widen, count):
        for batch in batches:
            run_real(graph, batch.inputs, observe, ops)
    ranges = {name: (rounded(low) or 0.0, rounded(high) or 0.0) for name, (low, high) in ends.items()}
    return {name: Histogram(*ranges[name], tuple(int(c) for c in own.tolist())) for name, own in counts.items()}


def _finite(value: Any) -> Tensor | None:
    """The finite entries of a float tensor, flat, in float32; None without any."""
    if not isinstance(value, Tensor) or not value.is_floating_point() or not value.numel():
        return None
    flat = value.reshape(-1).to(torch.float32)
    if not math.isfinite(float(flat.sum())):
        flat = flat[torch.isfinite(flat)]
    return flat if flat.numel() else None
