"""Find which channels of a network to rotate, see `hago.correction.rotation`, before anything is split or equalized.

Everything that can be rotated is, once with each of a few seeds. Rounding to steps D adds errors of variance D**2 / 12,
which reach the outputs by their gradients g (`hago.search.gradients`), so the loss that is expected of an edge is

    sum over entries of D**2 / 12 * E[g**2],

with the steps and gradients of the rotated network. A group of values gets the seed with the least loss on the edges
that its rotation changes; none if these lose less as they are.

References:
    Z. Liu et al., "SpinQuant: LLM Quantization with Learned Rotations", arXiv:2405.16406, which shows that rotations
    differ, and trains them; here a few are drawn.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

from hago.arithmetic.types import Edge
from hago.correction import Corrections, Rotatable, find_rotatable
from hago.graph import Graph
from hago.plan import Plan
from hago.search.equalize import TINY
from hago.search.preparation import Prepared
from hago.search.squared_gradients import SquaredGradients

#: The seeds of rotations that are tried.
SEEDS: Final = (1, 2)
#: Rotations are worth measuring if they are expected to gain this many dB.
LEAST_EXPECTED_DB: Final = 0.2


def find_rotations(
    prepared: Prepared, measure: Callable[[Prepared], tuple[Plan, Callable[[], SquaredGradients]]]
) -> dict[str, int]:
    """The seeds of the rotations with the least expected error of the outputs, by what they rotate; empty where nothing
    can be rotated, or too little is expected of it.

    Args:
        prepared: the model without corrections.
        measure: gives the Plan of a model, and measures the model with it.
    """
    found = find_rotatable(prepared.graph, prepared.hardware.known_ops)
    if not found:
        return {}
    plain = _losses(*measure(prepared))
    edges = {name: _edges(prepared.graph, rotatable, plain) for name, rotatable in found.items()}
    least = {name: (_sum_over(plain, edges[name]), 0) for name in found}
    for seed in SEEDS:
        losses = _losses(*measure(prepared.corrected(Corrections(rotations=dict.fromkeys(found, seed)))))
        for name, of in edges.items():
            least[name] = min(least[name], (_sum_over(losses, of), seed))
    gained = math.fsum(_sum_over(plain, edges[name]) - loss for name, (loss, _) in least.items())
    total = max(math.fsum(plain.values()), TINY)
    if gained < total * (1.0 - 10.0 ** (-LEAST_EXPECTED_DB / 10.0)):
        return {}
    return {name: seed for name, (_, seed) in least.items() if seed}


def _losses(plan: Plan, measured: Callable[[], SquaredGradients]) -> dict[Edge, float]:
    """By edge that a Plan rounds, the expected loss."""
    found = measured()
    return {edge: float(found.expected_loss(plan, edge).sum()) for edge in found.edges}


def _edges(graph: Graph, rotatable: Rotatable, losses: dict[Edge, float]) -> list[Edge]:
    """The rounded edges that a rotation changes."""
    constants = {edge for edge, _ in rotatable.constants}
    return [edge for edge in losses if edge in constants or graph.source(edge) in rotatable.values]


def _sum_over(losses: dict[Edge, float], edges: list[Edge]) -> float:
    return math.fsum(losses.get(edge, 0.0) for edge in edges)
