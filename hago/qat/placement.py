"""Placement: where fake quantization stands in a model, as a policy says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from hago.types import Edge

Role = Literal["weight", "activation", "gradient"]

#: Ops that move values about, so that quantizing before or after them is the same.
MOVES: Final = frozenset({
    "reshape", "permute", "squeeze", "unsqueeze", "expand", "slice", "select", "index", "pixel_shuffle", "pad",
    "max_pool1d", "max_pool2d", "adaptive_max_pool2d", "upsample_nearest2d",
})  # fmt: skip


@dataclass(frozen=True, slots=True)
class Point:
    """One tensor that is fake-quantized.

    Args:
        name: of the fake quantization; unique.
        source: the node whose value is quantized.
        edges: those on which the quantized value travels.
        role: a `gradient` is quantized where it comes back to the value of `source`.
        norm: the batch norm that is folded into a weight before it is quantized.
    """

    name: str
    source: str
    edges: tuple[Edge, ...]
    role: Role
    norm: str | None = None


@dataclass(frozen=True, slots=True)
class Placement:
    """What a policy says of a graph.

    Args:
        policy: its name.
        points: in the order in which the policy found them.
        keep_float: nodes that a plan for the hardware has to leave float for the policy to hold;
            what `keep_float` of `hago.quantize`, `prepare` and the search takes.
    """

    policy: str
    points: tuple[Point, ...]
    keep_float: tuple[str, ...] = ()

    @property
    def edges(self) -> frozenset[Edge]:
        """Every edge that a quantized value travels on."""
        return frozenset(e for p in self.points if p.role != "gradient" for e in p.edges)

    def __str__(self) -> str:
        rows = [f"{p.name}: {p.source} -> {', '.join(map(str, p.edges))}" for p in self.points]
        return "\n".join([f"policy {self.policy}", *rows, f"float: {', '.join(self.keep_float) or 'none'}"])
