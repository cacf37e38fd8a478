"""Find the factors of an equalization: those with the least expected error of the outputs.

Rounding to a grid of step D adds errors of variance D**2 / 12, which reach the outputs by their gradients. A factor f
of a channel divides what is rounded, so it multiplies the errors of that channel; steps follow the largest channel of a
tensor, or of a weight's row. With gradients g of the outputs (`hago.search.gradients`), the expected loss is

    sum over edges of (D(f)**2 / 12) * sum over channels of E[g**2] * f**2,

for activations, and likewise for weights with f_in / f_out. Steps are those of the Plan, times the ratio of the ranges
with and without factors; ranges are norms of order RANGE_NORM over channels, which are smooth. The logarithm of the
loss is minimized over the logarithms of factors by L-BFGS.

A clamp has one limit for all channels. A channel that reaches it on the data keeps its factor; others get none that
would let it cut them. On chips that list `channel_clamp`, clamps get a limit for each channel instead.

References:
    M. Nagel et al., "Data-Free Quantization Through Weight Equalization and Bias Correction", ICCV 2019, equalize the
    ranges of weights; E. Meller et al., "Same, Same But Different", ICML 2019, also those of activations. Here the
    gradients weigh both.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

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
from hago.graph import Node
from hago.plan import Plan
from hago.search.preparation import Prepared
from hago.search.squared_gradients import SquaredGradients, is_rounded

#: The order of the norm that stands for the largest channel.
RANGE_NORM: Final = 8
#: Factors are at most 2 to this power, and at least its inverse.
MOST_OCTAVES: Final = 12.0
#: Of L-BFGS, with so many pairs of steps and changes of the slope.
ITERATIONS: Final = 24
HISTORY: Final = 10
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


def find_equalization(prepared: Prepared, plan: Plan, measured: Callable[[], SquaredGradients]) -> Corrections:
    """The equalization with the least expected error of the outputs; an empty one where no factor is free, or too
    little is expected of it.

    Args:
        plan: gives the steps of weights and edges.
        measured: measures the model with this plan; called if there are free factors.
    """
    graph, ops = prepared.graph, prepared.hardware.known_ops
    channels = track_channels(graph, ops)
    free = torch.unique(torch.cat([torch.tensor([FIXED]), *(s.gives for s in channels.scalable.values())]))
    free = free[free > FIXED]
    if not len(free):
        return Corrections()
    divisible = _divisible_clamps(prepared, channels)
    # a clamp must cut nothing off in any sample, and few samples gave gradients
    limited = replace(channels, clips={n: of for n, of in channels.clips.items() if n not in divisible})
    task = _Task(prepared, limited, plan, measured().with_at_least(prepared.calibration.clamped))
    least, most = task.bounds()
    octaves, gain = _minimize(task.errors(), channels.count, free, least, most)
    if gain < LEAST_EXPECTED_DB:
        return Corrections()
    steps = torch.round(octaves * STEPS_PER_OCTAVE)
    # rounded to where a clamp still cuts nothing off
    steps = torch.maximum(steps, torch.ceil(least.clamp(-MOST_OCTAVES, MOST_OCTAVES) * STEPS_PER_OCTAVE))
    steps = torch.minimum(steps, most * STEPS_PER_OCTAVE).to(torch.int64)
    clamps = tuple(name for name in divisible if bool(steps[channels.values[name]].any()))
    return Corrections(steps_by_node(channels, steps), clamps=clamps)


def _divisible_clamps(prepared: Prepared, channels: Channels) -> tuple[str, ...]:
    """The clamps that can have a limit for each channel, if the chip has such clamps."""
    if "channel_clamp" not in prepared.hardware.ops:
        return ()
    return tuple(name for name in channels.clips if channels.axis_of(name) is not None)


@dataclass(slots=True)
class _Task:
    """What one equalization is found from.

    Args:
        plan: gives the steps of weights and edges.
        measured: of the prepared model with this plan.
    """

    prepared: Prepared
    channels: Channels
    plan: Plan
    measured: SquaredGradients

    def _step(self, edge: Edge) -> Tensor | None:
        """The scale at which the plan rounds the values of an edge; None where it does not."""
        target = self.plan.target(edge)
        if target is None or not is_rounded(self.plan, edge):
            return None
        return target.spread_over(self.prepared.graph[self.prepared.graph.source(edge)].shape or ()).scale

    def errors(self) -> list[_Weight | _Activation]:
        """The errors of all weights and edges that factors change."""
        graph = self.prepared.graph
        found: list[_Weight | _Activation] = []
        for name, scalable in self.channels.scalable.items():
            node = graph[name]
            edge = node.edges[1] if len(node.edges) > 1 else None
            if node.op not in LAYERS or edge not in self.measured.edges:
                continue
            step = self._step(edge)
            assert step is not None
            found.append(_weight_errors(node, graph.consts[node.inputs[1]], self.measured.edges[edge], step, scalable))
        for edge, squares in self.measured.edges.items():
            source, step = graph.source(edge), self._step(edge)
            numbers, largest = self.channels.values.get(source), self.measured.largest.get(source)
            # not where the model fixes the batch, or no channel has a factor
            if numbers is None or largest is None or not numbers.shape == largest.shape == squares.shape:
                continue
            if step is None or step.numel() > 1 or not bool((numbers > FIXED).any()):
                continue
            own, index = torch.unique(numbers.flatten(), return_inverse=True)
            loss = torch.zeros(len(own), dtype=torch.float64).index_add_(0, index, squares.flatten().to(torch.float64))
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
            largest = self.measured.largest.get(source)
            if largest is None or largest.shape != self.channels.values[name].shape:
                continue
            numbers, ratio = self.channels.values[name].flatten(), largest.flatten() / limit
            ratio = ratio.to(torch.float64)
            top = torch.zeros(count, dtype=torch.float64).scatter_reduce_(0, numbers, ratio, "amax")
            here = torch.zeros(count, dtype=torch.bool).index_fill_(0, numbers, True)
            binds = here & (top >= 1.0)
            least = torch.where(here, torch.maximum(least, torch.log2(top.clamp_min(TINY))), least)
            least, most = least.masked_fill(binds, 0.0), most.masked_fill(binds, 0.0)
        least[: FIXED + 1], most[: FIXED + 1] = 0.0, 0.0
        return least, torch.maximum(most, least)


def _weight_errors(node: Node, weight: Tensor, squares: Tensor, step: Tensor, scalable: Scalable) -> _Weight:
    axes, groups = LAYERS[node.op], node.attrs.get("groups", 1)
    variance = (step.to(torch.float64) ** 2 / 12).expand(weight.shape) if step.numel() > 1 else float(step) ** 2 / 12

    def by_pair(values: Tensor) -> Tensor:
        pairs = values.movedim(axes, (0, 1))
        summed = pairs.flatten(2).sum(2) if pairs.ndim > 2 else pairs
        return summed.reshape(groups, -1, summed.shape[1])

    size = weight.abs().to(torch.float64)
    powers = by_pair((size / size.max().clamp_min(TINY)) ** RANGE_NORM)
    return _Weight(
        scalable.reads, scalable.gives, powers, by_pair(squares.to(torch.float64) * variance), step.numel() > 1
    )


def _minimize(
    errors: Sequence[_Weight | _Activation], count: int, free: Tensor, least: Tensor, most: Tensor
) -> tuple[Tensor, float]:
    """The logarithms of all factors, and how many dB less the expected error is with them."""
    low, high, best = least[free], most[free], torch.zeros(count, dtype=torch.float64)
    at = torch.zeros_like(low).clamp(low, high).requires_grad_()
    lowest = before = math.log(max(math.fsum(e.expected(best, torch.zeros_like(best)) for e in errors), TINY))

    def loss() -> float:
        nonlocal best, lowest
        octaves, slope = torch.zeros(2, count, dtype=torch.float64)
        octaves[free] = inside = at.detach().clamp(low, high)
        total = max(math.fsum(e.expected(octaves, slope) for e in errors), TINY)
        slope = slope[free] / total
        # beyond a bound, the loss is that at the bound
        at.grad = torch.where((at.detach() - inside) * slope < 0.0, 0.0, slope)
        if (value := math.log(total)) < lowest:
            best, lowest = octaves, value
        return value

    optimizer = torch.optim.LBFGS([at], max_iter=ITERATIONS, history_size=HISTORY, line_search_fn="strong_wolfe")
    optimizer.step(loss)  # type: ignore[no-untyped-call]
    return best, (before - lowest) * 10 / math.log(10)
