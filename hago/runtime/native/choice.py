"""Choice: which kernel a node runs on, and why."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

from hago.graph.graph import Node
from hago.plan.plan import NodePlan, Plan
from hago.plan.topology import varies_along
from hago.runtime.native.weights import Geometry

#: What a kernel reads on an edge: the producer's own value, or what the edge requantizes it to.
Takes = Literal["own", "moved"]
Sums = Literal["conv", "matmul", "multiply", "sum_pool", "reduce"]
Passes = Literal["add", "spread_add", "landed_sum", "clamp", "max_pool", "table", "pair_table", "pad", "move"]
Kind = Sums | Passes | Literal["double", "reference", "float"]


@dataclass(frozen=True, slots=True)
class Choice:
    """How a node runs.

    Args:
        takes: on every edge; the last repeats.
        geometry: of a convolution.
    """

    kind: Kind
    why: str
    takes: Takes = "moved"
    geometry: Geometry | None = None


#: Gives the choice of a node, or why the kernel cannot stand for it; nothing where it has nothing to say.
Chooser = Callable[[Plan, Node, NodePlan], Choice | str]


def is_flat(node: Node) -> bool:
    """Whether a sum of products has its channels last, so that rows are its pixels."""
    return node.op in ("linear", "matmul") or len(node.shape or ()) == 2


def axis_of(scale: torch.Tensor, ndim: int) -> int | str | None:
    """The one axis along which a scale varies; None where it does not."""
    axes = varies_along(scale, ndim)
    if len(axes) > 1:
        return "scales that vary along two axes"
    return axes[0] if axes else None
