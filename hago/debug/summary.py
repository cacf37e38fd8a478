"""Summary: from what was summed up about a node to its NodeStatistic."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from torch import Tensor

from hago.debug.causes import CAUSES, OUT, Cause, EdgeSample, NodeSplitter, free_integers, limit, moved_sample
from hago.debug.statistic import CauseStatistic, EdgeKind, EdgeStatistic, NodeStatistic, ValueStatistic
from hago.debug.tally import EdgeTally, Moments, Tally
from hago.graph import CONST, Node
from hago.objective import decibels
from hago.plan import NodePlan, Plan, Verdict
from hago.types import Edge, QParams

#: A weight channel whose largest |q| is below this is called narrow: it has less than 4 bits.
NARROW: Final = 8


def summarize(plan: Plan, node: Node, tally: Tally, splitter: NodeSplitter | None) -> NodeStatistic:
    """The statistic of one node.

    Args:
        splitter: of an integer node.
    """
    measured = tally.count > 0
    inherited, own = float(tally.products[0, 0]), float(tally.products[1:, 1:].sum())
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
        own_sqnr=decibels(tally.signal, own) if measured else None,
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
        bound=None if node_plan is None else _bound(node_plan),
        overflows=tally.overflows,
        accumulators=tally.accumulators,
        left_out=tally.left_out,
        raised=0 if node_plan is None else len(node_plan.raised),
        past=splitter.past[-1].name if splitter is not None and splitter.past else None,
    )


def values(moments: Moments) -> ValueStatistic:
    """Moments as a ValueStatistic."""
    if not moments.count:
        return ValueStatistic(None, None, None, None)
    return ValueStatistic(moments.low, moments.high, moments.mean, moments.deviation)


def _cosine(tally: Tally) -> float | None:
    norm = math.sqrt(tally.signal) * math.sqrt(tally.simulated_signal)
    return min(1.0, max(-1.0, tally.cross / norm)) if norm > 0.0 else None


def _causes(tally: Tally) -> Mapping[Cause, CauseStatistic]:
    total, own = float(tally.products.sum()), float(tally.products[1:, 1:].sum())
    found: dict[Cause, CauseStatistic] = {}
    for i, cause in enumerate(CAUSES):
        along_own = float(tally.products[i, 1:].sum())
        found[cause] = CauseStatistic(
            power=float(tally.products[i, i]) / tally.count if tally.count else 0.0,
            largest=tally.largest[i],
            share=float(tally.products[i].sum()) / total if total > 0.0 else None,
            own_share=along_own / own if own > 0.0 and cause != "inherited" else None,
        )
    return found


def _verdict(node_plan: NodePlan | None, tally: Tally) -> Verdict:
    if node_plan is None:
        return "float"
    if tally.overflows:
        return "overflows"
    return "proved" if node_plan.proved else "possible"


def _bound(node_plan: NodePlan) -> float:
    register = node_plan.desc.register
    seen = max(node_plan.bound, node_plan.raw_bound) if register.overflow == "saturate_end" else node_plan.bound
    over = seen / register.dtype.max
    return over if node_plan.pairs is None else max(over, node_plan.pairs.over)


# ---------------------------------------------------------------- edges
def _edges(splitter: NodeSplitter, tally: Tally) -> tuple[EdgeStatistic, ...]:
    node, node_plan = splitter.node, splitter.node_plan
    form = splitter.plan.ops[node.op].integer
    assert form is not None
    power = tally.signal / tally.count if tally.count else 0.0
    found = []
    for slot, qparams in enumerate(node_plan.operands):
        if qparams is None:
            continue
        edge, source = str(Edge(node.name, slot)), node.inputs[slot]
        in_units = form.slot(slot) in ("bias", "common")
        made: EdgeStatistic
        if slot in splitter.consts:
            made = _edge(edge, source, "constant", qparams)
            made = _moved(made, splitter.const_edges[slot], None if in_units else power)
            channels, narrow = _channels(splitter.plan, Edge(node.name, slot), splitter.consts[slot])
            made = replace(made, channels=channels, narrow_channels=narrow)
        else:
            made = _edge(edge, source, "data", qparams)
            if slot in tally.edges:
                made = _moved(made, tally.edges[slot], None if in_units else power)
        found.append(made)
    if OUT in tally.edges:
        made = _edge(f"{node.name}:out", node.name, "output", node_plan.out)
        found.append(_moved(made, tally.edges[OUT], None))
    return tuple(found)


def _edge(edge: str, source: str, kind: EdgeKind, qparams: QParams) -> EdgeStatistic:
    """An edge on which nothing changes."""
    bits, scale = (qparams.qmax - qparams.qmin).bit_length(), float(qparams.scale.max())
    return EdgeStatistic(edge, source, kind, bits, str(qparams.dtype), scale, qparams.per_channel, requantized=False)


def _moved(edge: EdgeStatistic, sample: EdgeTally | EdgeSample, power: float | None) -> EdgeStatistic:
    """An edge with what was seen on it.

    Args:
        power: of the node's value; None where the edge is in the units of that value.
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
    """Of a float node, the weights that rest as integers."""
    power = tally.signal / tally.count if tally.count else 0.0
    found = []
    for edge in node.edges:
        if (weight := plan.weights.get(edge)) is not None:
            source = plan.graph.source(edge)
            free = free_integers(plan, source, weight.qparams)
            made = _edge(str(edge), source, "constant", weight.qparams)
            made = _moved(made, moved_sample(plan.graph.consts[source], free, weight.qparams), power)
            channels, narrow = _channels(plan, edge, free)
            found.append(replace(made, channels=channels, narrow_channels=narrow))
    return tuple(found)


def _channels(plan: Plan, edge: Edge, free: Tensor) -> tuple[int, int]:
    """Output channels of a weight, and how many are narrow; (0, 0) for other constants.

    Args:
        free: its centered integers without limits.
    """
    form, target = plan.ops[plan.graph[edge.dst].op].integer, plan.target(edge)
    if form is None or form.weight is None or form.weight.slot != edge.slot or target is None:
        return 0, 0
    peaks = _per_channel(limit(free, target), form.weight.axis)
    real = _per_channel(plan.graph.consts[plan.graph.source(edge)], form.weight.axis)
    return peaks.numel(), int(((peaks < NARROW) & (real > 0)).sum())


def _per_channel(weight: Tensor, axis: int) -> Tensor:
    """The largest magnitude of each channel."""
    magnitude = weight.abs().movedim(axis, 0)
    return magnitude.reshape(magnitude.shape[0], -1).amax(1)
