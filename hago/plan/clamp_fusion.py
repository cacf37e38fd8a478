"""Fusion of clamps into the clipping of their readers, where every reader requantizes, and of their operand.

`round(clamp(c) * m)` is monotone in c, so it equals `round(c * m)` clamped to the requantized limits: the same
integers, with one pass over memory less. Every `Simulator` calls `fuse_clamps`, and computes the clamps nevertheless
where its caller watches values; `runtime.native.layouts.wire` and the model for training (`qat.model`) call it too.
Simulators also leave out the `redundant_clamps`, whose operand was clipped to a range within their limits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from hago.arithmetic.numerics import apply_simq, clip_range
from hago.arithmetic.types import Edge, QParams, SimQ
from hago.graph import OUTPUT
from hago.plan.plan import NodePlan, Plan


@dataclass(frozen=True, slots=True)
class Fused:
    """The result of `fuse_clamps`.

    Args:
        skipped: nodes that need not be computed.
        simqs: the SimQs with narrower clipping, on the edges from the skipped nodes to their readers.
    """

    skipped: frozenset[str]
    simqs: Mapping[Edge, SimQ]


def fuse_clamps(plan: Plan) -> Fused:
    """Fuse every relu, relu6 and clamp that the clipping of its readers can replace."""
    skipped: set[str] = set()
    simqs: dict[Edge, SimQ] = {}
    for name, node in plan.nodes.items():
        form = plan.ops[plan.graph[name].op].integer
        edges = plan.graph.out_edges[name]
        if form is None or form.limits is None or not _stands_for(node.operands[0], node):
            continue
        narrowed = {e: _narrowed(plan, e, node, form.limits(node.attrs)) for e in edges if e.dst != OUTPUT}
        if len(narrowed) == len(edges) and all(s is not None for s in narrowed.values()):
            skipped.add(name)
            simqs.update({e: s for e, s in narrowed.items() if s is not None})
    shared: dict[tuple[object, ...], QParams] = {}
    return Fused(frozenset(skipped), {e: _with_shared_target(s, shared) for e, s in simqs.items()})


def _stands_for(operand: QParams | None, node: NodePlan) -> bool:
    """Whether readers of a node can read its operand, which arrives as it is, as they read its output."""
    if operand is None or node.simqs[0] is not None or node.out_simq is not None:
        return False
    return operand.is_stored_as(node.out)


def redundant_clamps(plan: Plan) -> frozenset[str]:
    """The clamps whose limits hold every integer of their operand, so that they change none.

    On chips that requantize at the output, the scale of a convolution before a relu6 is that of the relu6, whose limits
    are then those of the integers.
    """
    return frozenset(n for n, node in plan.nodes.items() if _is_redundant(plan, n, node))


def _is_redundant(plan: Plan, name: str, node: NodePlan) -> bool:
    form, operand = plan.ops[plan.graph[name].op].integer, node.operands[0] if node.operands else None
    if form is None or form.limits is None or operand is None or operand.key != node.out.key:
        return False
    if node.simqs[0] is not None or node.out_simq is not None or not node.proved:
        return False
    if any(e.dst == OUTPUT for e in plan.graph.out_edges[name]):
        return False
    (least, most), (low, high) = clip_range(operand), form.limits(node.attrs)
    above = low is None or bool(torch.as_tensor(low <= least).all())
    return above and (high is None or bool(torch.as_tensor(high >= most).all()))


def _narrowed(plan: Plan, edge: Edge, node: NodePlan, limits: tuple[Any, Any]) -> SimQ | None:
    """The edge's SimQ, clipping to the limits as well; None where one range cannot express them."""
    simq = plan.edges[edge]
    if simq is None or simq.target is None or simq.target.zero_point.numel() != 1:
        return None
    target, zero = simq.target, int(simq.target.zero_point)
    low, high = (_requantized_limit(plan, simq, node.out, limit) for limit in limits)
    if low == "varies" or high == "varies":
        return None
    qmin = target.qmin if low is None else max(target.qmin, zero + int(low))
    qmax = target.qmax if high is None else min(target.qmax, zero + int(high))
    return replace(simq, target=replace(target, qmin=min(qmin, target.qmax), qmax=max(qmax, target.qmin)))


def _requantized_limit(plan: Plan, simq: SimQ, source: QParams, limit: Any) -> Any:
    """The requantized limit; None for no limit, "varies" where it differs between channels."""
    if limit is None:
        return None
    if isinstance(limit, int) and limit == 0 and all(map(_keeps_zero, simq.steps)):
        return 0
    c = torch.as_tensor(limit, dtype=torch.int64).expand(source.scale.shape).contiguous()
    images = apply_simq(c, simq, plan.hardware.requantize)
    return int(images.flatten()[0]) if bool((images == images.flatten()[0]).all()) else "varies"


def _keeps_zero(step: SimQ) -> bool:
    """Whether a requantization maps zero to zero, as it does on every scale unless it clips zero."""
    target = step.target
    return (
        target is not None and target.zero_point.numel() == 1 and target.qmin <= int(target.zero_point) <= target.qmax
    )


def _with_shared_target(simq: SimQ, shared: dict[tuple[object, ...], QParams]) -> SimQ:
    """The SimQ with one object for equal targets, by which the simulator recognizes readers that share a SimQ."""
    assert simq.target is not None
    return replace(simq, target=shared.setdefault(simq.target.key, simq.target))
