"""How strongly the outputs react to errors of every entry of a network's values, and how large these entries are.

Equalization and splits weigh what rounding costs by it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

import torch
from torch import Tensor

from hago.arithmetic.types import Edge
from hago.data import Batches, spread_indices
from hago.graph import Node, over_samples
from hago.plan import Plan
from hago.search.folds import other_samples, spread_samples
from hago.search.gradients import gradients
from hago.search.objective import SQUARED_ERROR
from hago.search.preparation import Prepared

#: Samples that are differentiated.
GRADIENT_SAMPLES: Final = 32
#: Grids of more levels are taken to be exact.
MOST_LEVELS: Final = 1 << 16


@dataclass(frozen=True, slots=True)
class SquaredGradients:
    """Sums over the samples of the squared gradients of the outputs, and the largest magnitudes, float32.

    Activations keep one entry for all samples, so they have the shape (1, ...) of a value of a single sample. Those of
    values with the samples along another axis than the first are of the first samples alone.

    Args:
        edges: by edge that a Plan rounds, the sum of squared gradients, in the shape of the constant or activation.
        largest: by node that such an edge of an activation comes from, the largest magnitude of every entry.
    """

    edges: dict[Edge, Tensor] = field(default_factory=dict)
    largest: dict[str, Tensor] = field(default_factory=dict)

    @staticmethod
    def measure(prepared: Prepared, plan: Plan, batches: Batches | None = None, seed: int = 0) -> SquaredGradients:
        """Run the float model forward and backward over some samples, see `gradient_samples`.

        Args:
            plan: says which edges are rounded.
            batches: the samples; those of the model by default.
            seed: of the random vectors on the outputs.
        """
        graph, found = prepared.graph, SquaredGradients()
        batches = prepared.batches if batches is None else batches
        rounded = {e for e in graph.edges if is_rounded(plan, e)}
        sources = {graph.source(e) for e in rounded} - graph.consts.keys()

        def add(edge: Edge, g: Tensor) -> None:
            if edge in rounded:
                squares = g.detach().square()
                squares = squares if graph.source(edge) in graph.consts else over_samples(squares, torch.sum)
                before = found.edges.get(edge)
                # where samples are along another axis, shapes differ with their number, and the first stays
                if before is None or before.shape == squares.shape:
                    found.edges[edge] = squares if before is None else before + squares

        def see(node: Node, value: Any) -> None:
            if node.name in sources:
                found.see(node, value)

        gradients(
            graph,
            [batches.at(gradient_samples(batches.samples)[0])],
            {},
            SQUARED_ERROR.probe,
            lambda edge: (),
            prepared.hardware.known_ops,
            seed,
            on_constant=add,
            on_activation=add,
            on_value=see,
        )
        return found

    def expected_loss(self, plan: Plan, edge: Edge) -> Tensor:
        """The loss that rounding an edge to the steps D of a Plan is expected to cause at the outputs, entry by entry:
        D**2 / 12 times the squared gradients; float64."""
        target, squares = plan.target(edge), self.edges[edge].to(torch.float64)
        assert target is not None
        return squares * (target.spread_over(squares.shape).scale ** 2 / 12)

    def with_at_least(self, largest: Mapping[str, Tensor]) -> SquaredGradients:
        """The same with largest magnitudes that are at least these, by node; others where a batch has another shape."""
        new = {**largest, **self.largest}
        for name in largest.keys() & self.largest.keys():
            if largest[name].shape == new[name].shape:
                new[name] = torch.maximum(largest[name], new[name])
        return replace(self, largest=new)

    def see(self, node: Node, value: Any) -> None:
        """Take the values of a node into its largest magnitudes."""
        if isinstance(value, Tensor) and value.is_floating_point():
            new, old = over_samples(value.detach().abs(), torch.amax), self.largest.get(node.name)
            if old is None or old.shape == new.shape:
                self.largest[node.name] = new if old is None else torch.maximum(old, new)


def gradient_samples(total: int) -> tuple[list[int], list[int]]:
    """The numbers of the samples that are differentiated, at most GRADIENT_SAMPLES, and of those that judge: the others
    if there are as many, else all."""
    if total < 2 * GRADIENT_SAMPLES:
        return spread_indices(total, GRADIENT_SAMPLES), list(range(total))
    differentiated = spread_samples(total, GRADIENT_SAMPLES)
    return differentiated, other_samples(total, differentiated)


def is_rounded(plan: Plan, edge: Edge) -> bool:
    """Whether a Plan rounds the values of an edge to a grid that is no finer than MOST_LEVELS."""
    target = plan.target(edge)
    return target is not None and target.qmax - target.qmin <= MOST_LEVELS
