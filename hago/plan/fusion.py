"""Fusion of clamps into the clipping of their readers, where every reader requantizes.

`round(clamp(c) * m)` is monotone in c, so it equals `round(c * m)` clamped to the images of the limits: the same
integers, with one pass over memory less. Only the simulator fuses, and not where the caller watches values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from hago.arithmetic.numerics import apply_simq
from hago.arithmetic.types import Edge, QParams, SimQ
from hago.graph.graph import OUTPUT
from hago.plan.plan import NodePlan, Plan


@dataclass(frozen=True, slots=True)
class Fused:
    """The result of `fuse_clamps`: nodes that need not be computed, and the SimQs of their readers' edges with narrower
    clipping."""

    skipped: frozenset[str]
    simqs: Mapping[Edge, SimQ]


def fuse_clamps(plan: Plan) -> Fused:
    """Fuse every relu, relu6 and clamp that the clipping of its readers can replace."""
    skipped: set[str] = set()
    simqs: dict[Edge, SimQ] = {}
    for name, node in plan.nodes.items():
        form = plan.ops[plan.graph[name].op].integer
        edges = plan.graph.out_edges[name]
        if form is None or form.limits is None or node.simqs[0] is not None or node.out_simq is not None:
            continue
        narrowed = {e: _narrowed(plan, e, node, form.limits(node.attrs)) for e in edges if e.dst != OUTPUT}
        if len(narrowed) == len(edges) and all(s is not None for s in narrowed.values()):
            skipped.add(name)
            simqs.update({e: s for e, s in narrowed.items() if s is not None})
    shared: dict[tuple[object, ...], QParams] = {}
    return Fused(frozenset(skipped), {e: _share(s, shared) for e, s in simqs.items()})


def _narrowed(plan: Plan, edge: Edge, node: NodePlan, limits: tuple[Any, Any]) -> SimQ | None:
    """The edge's SimQ with the limits in its clipping, or None where it cannot hold them."""
    simq = plan.edges[edge]
    if simq is None or simq.target is None or simq.target.zero_point.numel() != 1:
        return None
    target, zero = simq.target, int(simq.target.zero_point)
    low, high = (_image(plan, simq, node.out, limit) for limit in limits)
    if low == "varies" or high == "varies":
        return None
    qmin = target.qmin if low is None else max(target.qmin, zero + int(low))
    qmax = target.qmax if high is None else min(target.qmax, zero + int(high))
    return replace(simq, target=replace(target, qmin=min(qmin, target.qmax), qmax=max(qmax, target.qmin)))


def _image(plan: Plan, simq: SimQ, source: QParams, limit: Any) -> Any:
    """What a limit is requantized to; None for no limit, "varies" where channels differ."""
    if limit is None:
        return None
    if isinstance(limit, int) and limit == 0 and all(map(_holds_zero, simq.steps)):
        return 0
    c = torch.as_tensor(limit, dtype=torch.int64).expand(source.scale.shape).contiguous()
    images = apply_simq(c, simq, plan.hardware.requantize)
    return int(images.flatten()[0]) if bool((images == images.flatten()[0]).all()) else "varies"


def _holds_zero(step: SimQ) -> bool:
    """Whether zero stays zero, as it does on every scale unless it is clipped."""
    target = step.target
    return (
        target is not None and target.zero_point.numel() == 1 and target.qmin <= int(target.zero_point) <= target.qmax
    )


def _share(simq: SimQ, shared: dict[tuple[object, ...], QParams]) -> SimQ:
    """Equal targets as one object, which is how readers of one node share a SimQ."""
    assert simq.target is not None
    return replace(simq, target=shared.setdefault(simq.target.key, simq.target))
