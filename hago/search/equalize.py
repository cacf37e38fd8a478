"""Find the factors of an equalization: those with the least expected error of the outputs.

Rounding to a grid of step D adds errors of variance D**2 / 12, which reach the outputs by their gradients. A factor f
of a channel divides what is rounded, so it multiplies the errors of that channel; steps follow the largest channel of a
tensor, or of a weight's row. With gradients g of the outputs (`hago.search.gradients`), the expected loss is

    sum over edges of (D(f)**2 / 12) * sum over channels of E[g**2] * f**2,

for activations, and likewise for weights with f_in / f_out. Steps are those of the Plan, times the ratio of the ranges
with and without factors; ranges are norms of order RANGE_NORM over channels, which are smooth. The logarithm of the
loss is minimized over the logarithms of factors by L-BFGS-B (SciPy).

A clamp has one limit for all channels. A channel that reaches it on the data keeps its factor; others get none that
would let it cut them.

References:
    M. Nagel et al., "Data-Free Quantization Through Weight Equalization and Bias Correction", ICCV 2019, equalize the
    ranges of weights; E. Meller et al., "Same, Same But Different", ICML 2019, also those of activations. Here the
    gradients weigh both.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from hago.arithmetic.types import Edge
from hago.correction import (
    FIXED,
    LAYERS,
    STEPS_PER_OCTAVE,
    Channels,
    Corrections,
    Scalable,
    steps_by_node,
    track_channels,
)
from hago.graph import Node, run_real
from hago.plan import Plan
from hago.search.gradients import gradients
from hago.search.objective import SQUARED_ERROR
from hago.search.preparation import Prepared
from hago.search.safe_bits import safe_bits

#: Samples whose gradients weigh the factors.
GRADIENT_SAMPLES: Final = 32
#: The order of the norm that stands for the largest channel.
RANGE_NORM: Final = 8
#: Factors are at most 2 to this power, and at least its inverse.
MOST_OCTAVES: Final = 12.0
ITERATIONS: Final = 24
#: A divisor in place of 0.
TINY: Final = 1e-300
#: An equalization is worth measuring if it is expected to gain this many dB.
LEAST_EXPECTED_DB: Final = 0.5


@dataclass(frozen=True, slots=True)
class _Weight:
    """The errors of a layer's weight.

    Args:
        reads, gives: the numbers of its channels.
        powers: (groups, out / groups, in / groups), by pair of channels the sum of |w| ** RANGE_NORM, with |w| <= 1.
        loss: of the same shape, the loss that errors of the present step cause.
        apart: whether each output channel has a scale of its own.
    """

    reads: Tensor
    gives: Tensor
    powers: Tensor
    loss: Tensor
    apart: bool

    def expected(self, octaves: Tensor, slope: Tensor) -> float:
        """The expected loss; its slope is added to `slope`."""
        out = octaves[self.gives].reshape(len(self.powers), -1, 1)
        into = octaves[self.reads].reshape(len(self.powers), -1, 1)
        grown, shrunk = torch.exp2(RANGE_NORM * into), torch.exp2(-2 * into)
        sizes, losses = self.powers @ grown, self.loss @ shrunk  # by output
        if self.apart:
            # an output's own factor multiplies its step and its errors alike
            ratio = (sizes / self.powers.sum(2, keepdim=True).clamp_min(TINY)).clamp_min(TINY) ** (2 / RANGE_NORM)
            per_output = ratio * losses
            value = float(per_output.sum())
            by_size = self.powers.transpose(1, 2) @ (per_output / sizes.clamp_min(TINY))
            slope_in = 2 * (grown * by_size - shrunk * (self.loss.transpose(1, 2) @ ratio))
        else:
            small, large = torch.exp2(-RANGE_NORM * out), torch.exp2(2 * out)
            size, loss = (small * sizes).sum().clamp_min(TINY), (large * losses).sum()
            ratio = (size / self.powers.sum().clamp_min(TINY)) ** (2 / RANGE_NORM)
            value = float(ratio * loss)
            slope_in = 2 * ratio * loss * grown * (self.powers.transpose(1, 2) @ small) / size
            slope_in -= 2 * ratio * shrunk * (self.loss.transpose(1, 2) @ large)
            slope_out = 2 * ratio * (large * losses - loss * small * sizes / size)
            slope.index_add_(0, self.gives, math.log(2) * slope_out.flatten())
        slope.index_add_(0, self.reads, math.log(2) * slope_in.flatten())
        return value


@dataclass(frozen=True, slots=True)
class _Activation:
    """The errors of the values on one edge.

    Args:
        channels: their numbers.
        powers: by channel, its largest magnitude, of at most 1, to the power RANGE_NORM.
        loss: by channel, the loss that errors of the present step cause.
    """

    channels: Tensor
    powers: Tensor
    loss: Tensor

    def expected(self, octaves: Tensor, slope: Tensor) -> float:
        """The expected loss; its slope is added to `slope`."""
        own = octaves[self.channels]
        sizes, losses = self.powers * torch.exp2(-RANGE_NORM * own), self.loss * torch.exp2(2 * own)
        size, loss = sizes.sum().clamp_min(TINY), losses.sum()
        ratio = (size / self.powers.sum().clamp_min(TINY)) ** (2 / RANGE_NORM)
        slope.index_add_(0, self.channels, 2 * math.log(2) * ratio * (losses - loss * sizes / size))
        return float(ratio * loss)


def find_equalization(prepared: Prepared, seed: int = 0) -> Corrections:
    """The equalization with the least expected error of the outputs at the most safe bits; an empty one where no factor
    is free, or too little is expected of it.

    The float model runs forward and backward over GRADIENT_SAMPLES, and once over all batches if it has clamps.
    """
    graph, ops = prepared.graph, prepared.hardware.known_ops
    channels = track_channels(graph, ops)
    free = torch.unique(torch.cat([torch.tensor([FIXED]), *(s.gives for s in channels.scalable.values())]))
    free = free[free > FIXED]
    if not len(free):
        return Corrections()
    plan = prepared.resolver(safe_bits(prepared))
    task = _Task(prepared, channels, plan)
    task.measure_ranges()
    task.measure_gradients(seed)
    least, most = task.bounds()
    octaves, gain = _minimize(task.errors(), channels.count, free, least, most)
    if gain < LEAST_EXPECTED_DB:
        return Corrections()
    steps = torch.round(octaves * STEPS_PER_OCTAVE)
    # rounded to where a clamp still cuts nothing off
    steps = torch.maximum(steps, torch.ceil(least.clamp(-MOST_OCTAVES, MOST_OCTAVES) * STEPS_PER_OCTAVE))
    return Corrections(steps_by_node(channels, torch.minimum(steps, most * STEPS_PER_OCTAVE).to(torch.int64)))


@dataclass(slots=True)
class _Task:
    """What is measured for one equalization.

    Args:
        plan: gives the steps of weights and edges.
        largest: by node, the largest magnitude of every entry of its value at batch 1.
        weights: by edge of a constant, the sum of its squared gradients.
        edges: by edge of an activation, for every channel the sum of its squared gradients.
    """

    prepared: Prepared
    channels: Channels
    plan: Plan
    largest: dict[str, Tensor] = field(default_factory=dict)
    weights: dict[Edge, Tensor] = field(default_factory=dict)
    edges: dict[Edge, Tensor] = field(default_factory=dict)

    def measure_ranges(self) -> None:
        """Run the float model for the largest magnitude of every channel: over all batches where clamps must cut
        nothing off, else over the samples of the gradients."""
        graph, ops = self.prepared.graph, self.prepared.hardware.known_ops

        def see(node: Node, value: Any) -> None:
            numbers = self.channels.values.get(node.name)
            if numbers is None or not isinstance(value, Tensor) or not _is_of_samples(numbers, value):
                return
            if value.is_floating_point() and bool((numbers > FIXED).any()):
                new = value.abs().amax(0, keepdim=True)
                old = self.largest.get(node.name)
                self.largest[node.name] = new if old is None else torch.maximum(old, new)

        for batch in self.prepared.batches if self.channels.clips else self.prepared.batches.first(GRADIENT_SAMPLES):
            run_real(graph, batch.inputs, see, ops)

    def measure_gradients(self, seed: int) -> None:
        """Run it forward and backward for the squared gradients of weights and edges."""
        p = self.prepared
        wanted = {e for e in p.graph.edges if self._step(e) is not None}

        def on_constant(edge: Edge, g: Tensor) -> None:
            if edge in wanted:
                self.weights[edge] = self.weights.get(edge, 0.0) + g.detach().to(torch.float64).square()

        def on_activation(edge: Edge, g: Tensor) -> None:
            numbers = self.channels.values.get(p.graph.source(edge))
            if edge in wanted and numbers is not None and _is_of_samples(numbers, g):
                squares = g.detach().to(torch.float64).square().sum(0, keepdim=True)
                self.edges[edge] = self.edges.get(edge, 0.0) + squares

        gradients(
            p.graph,
            p.batches.first(GRADIENT_SAMPLES),
            {},
            SQUARED_ERROR.probe,
            lambda edge: (),
            p.hardware.known_ops,
            seed,
            on_constant=on_constant,
            on_activation=on_activation,
        )

    def _step(self, edge: Edge) -> Tensor | None:
        """The scale at which the plan rounds the values of an edge; None where it does not."""
        target = self.plan.target(edge)
        if target is None or target.qmax - target.qmin > 1 << 16:
            return None
        return target.spread_over(self.prepared.graph[self.prepared.graph.source(edge)].shape or ()).scale

    def errors(self) -> list[_Weight | _Activation]:
        """The errors of all weights and edges that factors change."""
        graph = self.prepared.graph
        found: list[_Weight | _Activation] = []
        for name, scalable in self.channels.scalable.items():
            node = graph[name]
            edge = node.edges[1] if len(node.edges) > 1 else None
            if node.op not in LAYERS or edge not in self.weights:
                continue
            step = self._step(edge)
            assert step is not None
            found.append(_weight_errors(node, graph.consts[node.inputs[1]], self.weights[edge], step, scalable))
        for edge, squares in self.edges.items():
            numbers, largest = self.channels.values[graph.source(edge)], self.largest.get(graph.source(edge))
            step = self._step(edge)
            if largest is None or step is None or step.numel() > 1:
                continue
            own, index = torch.unique(numbers.flatten(), return_inverse=True)
            loss = torch.zeros(len(own), dtype=torch.float64).index_add_(0, index, squares.flatten())
            top = torch.zeros(len(own), dtype=torch.float64).scatter_reduce_(
                0, index, largest.flatten().to(torch.float64), "amax"
            )
            powers = (top / top.max().clamp_min(TINY)) ** RANGE_NORM
            found.append(_Activation(own, powers, loss * (float(step) ** 2 / 12)))
        return found

    def bounds(self) -> tuple[Tensor, Tensor]:
        """The least and the greatest logarithm of every factor, by the number of its channel."""
        count = self.channels.count
        least = torch.full((count,), -MOST_OCTAVES, dtype=torch.float64)
        most = torch.full((count,), MOST_OCTAVES, dtype=torch.float64)
        for name, limit in self.channels.clips.items():
            (source,) = self.prepared.graph[name].inputs
            if source not in self.largest:
                continue
            numbers, ratio = self.channels.values[name].flatten(), self.largest[source].flatten() / limit
            ratio = ratio.to(torch.float64)
            top = torch.zeros(count, dtype=torch.float64).scatter_reduce_(0, numbers, ratio, "amax")
            here = torch.zeros(count, dtype=torch.bool).index_fill_(0, numbers, True)
            binds = here & (top >= 1.0)
            least = torch.where(here, torch.maximum(least, torch.log2(top.clamp_min(TINY))), least)
            least, most = least.masked_fill(binds, 0.0), most.masked_fill(binds, 0.0)
        least[: FIXED + 1], most[: FIXED + 1] = 0.0, 0.0
        return least, torch.maximum(most, least)


def _is_of_samples(numbers: Tensor, value: Tensor) -> bool:
    """Whether a value has the numbers of one sample in every sample; not where the model fixes the batch."""
    return value.ndim > 0 and numbers.shape == (1, *value.shape[1:])


def _weight_errors(node: Node, weight: Tensor, squares: Tensor, step: Tensor, scalable: Scalable) -> _Weight:
    axes, groups = LAYERS[node.op], node.attrs.get("groups", 1)
    variance = (step.to(torch.float64) ** 2 / 12).expand(weight.shape) if step.numel() > 1 else float(step) ** 2 / 12

    def by_pair(values: Tensor) -> Tensor:
        pairs = values.movedim(axes, (0, 1))
        summed = pairs.flatten(2).sum(2) if pairs.ndim > 2 else pairs
        return summed.reshape(groups, -1, summed.shape[1])

    size = weight.abs().to(torch.float64)
    powers = by_pair((size / size.max().clamp_min(TINY)) ** RANGE_NORM)
    return _Weight(scalable.reads, scalable.gives, powers, by_pair(squares * variance), step.numel() > 1)


def _minimize(
    errors: Sequence[_Weight | _Activation], count: int, free: Tensor, least: Tensor, most: Tensor
) -> tuple[Tensor, float]:
    """The logarithms of all factors, and how many dB less the expected error is with them."""
    from scipy.optimize import minimize  # slow to import

    def loss(values: np.ndarray[Any, Any]) -> tuple[float, np.ndarray[Any, Any]]:
        octaves, slope = torch.zeros(2, count, dtype=torch.float64)
        octaves[free] = torch.from_numpy(np.asarray(values))
        total = max(math.fsum(e.expected(octaves, slope) for e in errors), TINY)
        return math.log(total), (slope[free] / total).numpy()

    start = torch.zeros(len(free), dtype=torch.float64).clamp(least[free], most[free]).numpy()
    before, _ = loss(np.zeros(len(free)))
    bounds = list(zip(least[free].tolist(), most[free].tolist(), strict=True))
    found = minimize(loss, start, jac=True, method="L-BFGS-B", bounds=bounds, options={"maxiter": ITERATIONS})
    octaves = torch.zeros(count, dtype=torch.float64)
    octaves[free] = torch.from_numpy(np.asarray(found.x))
    return octaves, (before - float(found.fun)) * 10 / math.log(10)
