"""The RFC's naive simulation: on every edge seven passes over real values, nothing shared, nothing kept."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hago.arithmetic.types import QParams
from hago.graph import Node, channels_last, compute_real, run_graph
from hago.plan import Plan


def naive_forward(plan: Plan, batches: Sequence[Sequence[Tensor]]) -> Callable[[], Any]:
    """A trial as the RFC simulates it: the float model with a SimQ on every edge, those of weights too."""
    graph = plan.graph
    consts: Mapping[str, Tensor] = {n: channels_last(c) for n, c in graph.consts.items()}
    laid = [[channels_last(x) for x in batch] for batch in batches]

    def step(node: Node, values: Sequence[Any]) -> Any:
        made = plan.nodes.get(node.name)
        if made is None:
            return compute_real(node, values)
        simulated = [
            v if target is None or not isinstance(v, Tensor) else seven_passes(v, target)
            for v, target in zip(values, made.operands, strict=True)
        ]
        return compute_real(node, simulated)

    def forward() -> Any:
        with torch.no_grad():
            return [run_graph(graph, batch, step, consts=consts) for batch in laid]

    return forward


def seven_passes(x: Tensor, target: QParams) -> Tensor:
    """Scale, round, clip from below and above, cast to the integer and back, scale."""
    scale = target.scale.to(torch.float32)
    low, high = (torch.tensor(float(q)) - target.zero_point.float() for q in (target.qmin, target.qmax))
    scaled = x / scale
    rounded = torch.round(scaled)
    above = torch.maximum(rounded, low)
    clipped = torch.minimum(above, high)
    integers = clipped.to(torch.int32)
    return integers.to(torch.float32) * scale
