"""Corrections of layers: weights rounded so that a layer's output keeps close, and biases that keep its mean.

A layer's output is a sum over K products, so the errors of its rounded weights add up, and what one weight adds others
can take away. Rounding goes through the K weights of all outputs one by one, and changes those that are still to be
rounded so that they make up for the error, as seen on the integers that the layer reads in the simulation: with the
second moments H = X^T X of its windows, a rounding error e of weight j changes the others by -e * U[j, :] / U[j, j],
where U is the Cholesky factor of the inverse of H. A bias takes the difference of the means of a channel in the float
model and in the simulation.

Layers are corrected in the order in which they run, one simulation in all: each reads what the corrected ones before
it give. Integers change by whole offsets, which are stored; scales stay. The weight of a layer that computes in float
is rounded in the same way, by the second moments of the real values that the layer reads. Where groups of weights have
scales of their own, errors are passed on in units of the largest scale of the channel.

References:
    E. Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers", ICLR 2023;
    M. Nagel et al., "Data-Free Quantization Through Weight Equalization and Bias Correction", ICCV 2019 (section 4.2,
    the empirical correction).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor

from hago.arithmetic.types import QParams
from hago.correction import LAYERS
from hago.graph import Graph, Node, run_real
from hago.graph.schedule import Step, make_schedule, run_schedule
from hago.ops import Attrs, OpRule
from hago.plan import Plan
from hago.simulation import Simulator, carrier_to_real

#: The most samples that corrections are found on.
CORRECTION_SAMPLES: Final = 64
#: The most bytes of the largest value of these samples.
VALUE_BYTES: Final = 1 << 28
#: Samples whose windows give the second moments of a layer; more where a sample has few windows.
MOMENT_SAMPLES: Final = 16
#: Windows that are seen of a layer: at least this many, and WINDOWS_PER_WEIGHT for every weight of a window.
LEAST_WINDOWS: Final = 2048
WINDOWS_PER_WEIGHT: Final = 4
#: The most bytes of windows that are seen of a layer.
WINDOW_BYTES: Final = 1 << 28
#: The most weights of a window that make up for each other's errors: their moments are a matrix of this size.
MOST_TOGETHER: Final = 4096
#: Part of the mean of the diagonal that is added to the diagonal of second moments.
DAMPING: Final = 0.01
#: The least scale that weights are divided by.
TINY: Final = 1e-300
#: Weights that are rounded between two changes of all later ones.
BLOCK: Final = 64


def correct_layers(plan: Plan, inputs: Sequence[Tensor], *, rounding: bool, bias: bool) -> dict[str, Tensor]:
    """Offsets of the integers of constants, by name: of weights for `rounding`, of biases for `bias`.

    Args:
        plan: the Plan to correct.
        inputs: of the graph, the samples to correct it on.
    """
    with torch.no_grad():
        return _Correcting(plan, inputs, rounding=rounding, bias=bias).run()


def most_samples(graph: Graph) -> int:
    """The number of samples that a network is corrected on."""
    largest = max((math.prod(node.shape or ()) for node in graph.computed), default=1)
    return max(1, min(CORRECTION_SAMPLES, VALUE_BYTES // (4 * max(1, largest))))


class _Correcting:
    """One simulation in which layers are corrected on their way."""

    def __init__(self, plan: Plan, inputs: Sequence[Tensor], *, rounding: bool, bias: bool) -> None:
        self.graph, self.ops, self.rounding, self.bias, self.inputs = plan.graph, plan.ops, rounding, bias, inputs
        self.plans = {name: replace(p, consts=dict(p.consts)) for name, p in plan.nodes.items()}
        self.weights = dict(plan.weights)
        self.simulator = Simulator(replace(plan, nodes=self.plans, weights=self.weights))
        self.before = plan
        self.grouped: dict[str, Tensor] = {}
        self.layers = {node.name for node in plan.graph if self._is_layer(node)}
        self.means = self._float_means() if bias else {}

    def _is_layer(self, node: Node) -> bool:
        """Whether constants that no other node reads are the weight, and the bias, of an integer layer, or such a
        constant is the integer weight of a float layer."""
        plan = self.plans.get(node.name)
        if node.op not in LAYERS:
            return False
        if plan is None:
            is_stored = node.edges[1] in self.weights
            return is_stored and self.rounding and len(self.graph.out_edges[node.inputs[1]]) == 1
        if 1 not in plan.consts or plan.operands[1] is None:
            return False
        return all(len(self.graph.out_edges[s]) == 1 for s in node.inputs[1:]) and set(plan.consts) == {
            *range(1, len(node.inputs))
        }

    def _float_means(self) -> dict[str, Tensor]:
        """The mean of every channel of the layers in the float model."""
        means: dict[str, Tensor] = {}

        def see(node: Node, value: Any) -> None:
            if node.name in self.layers and node.name in self.plans:
                means[node.name] = _channel_means(node, value.to(torch.float64).mean(0, keepdim=True))

        run_real(self.graph, self.inputs, see, self.ops)
        return means

    def run(self) -> dict[str, Tensor]:
        def compute(step: Step, read: Sequence[Any]) -> Sequence[Any]:
            if step.name in self.layers:
                self._correct(self.graph[step.name], read[0])
            return step.run(read)

        simulator = self.simulator
        run_schedule(make_schedule(simulator.steps(), simulator.ends), simulator.begin(self.inputs), compute)
        offsets = {}
        for node in (n for n in self.graph if n.name in self.layers):
            for slot, (integers, nearest) in self._changed(node).items():
                offset = integers.to(torch.int64) - nearest.to(torch.int64)
                if bool(offset.any()):
                    offsets[node.inputs[slot]] = offset
        return offsets

    def _changed(self, node: Node) -> dict[int, tuple[Tensor, Tensor]]:
        """By slot, the integers of a layer's constants as they are stored, after and before."""
        if node.name not in self.plans:
            edge = node.edges[1]
            return {1: (self.weights[edge].integers, self.before.weights[edge].integers)}
        before = self.before.nodes[node.name]
        changed = {s: (c, before.consts[s]) for s, c in self.plans[node.name].consts.items()}
        if before.groups is not None:
            nearest = before.groups.integers
            changed[before.groups.slot] = self.grouped.get(node.name, nearest), nearest
        return changed

    def _correct(self, node: Node, x: Tensor) -> None:
        """Correct a layer that reads these values, integers on a carrier where their producer emits integers."""
        rule, weight = self.ops[node.op], self.graph.consts[node.inputs[1]]
        rounds = self.rounding and rule.integer is not None and rule.integer.product is not None
        if node.name not in self.plans:
            if rounds:
                edge = node.edges[1]
                stored, real = self.weights[edge], carrier_to_real(self.before.edges[node.edges[0]], x)
                rounded = _rounded(weight, stored.qparams, stored.integers, node.attrs, rule, real)
                self.weights[edge] = replace(stored, integers=rounded)
            return
        plan = self.plans[node.name]
        consts: dict[int, Tensor] = plan.consts  # type: ignore[assignment]
        if rounds and plan.groups is not None:
            groups = plan.groups
            of_groups = _rounded(weight, groups.stored, groups.integers, plan.attrs, rule, x)
            self.grouped[node.name] = of_groups
            consts[1] = replace(groups, integers=of_groups).joined()
        elif rounds:
            assert plan.operands[1] is not None
            consts[1] = _rounded(weight, plan.operands[1], consts[1], plan.attrs, rule, x)
        if self.bias and 2 in consts:
            # a layer is linear, so its mean is that of the mean of what it reads
            targets = [q for q in plan.operands if q is not None]
            integers = [x.to(torch.float64).mean(0, keepdim=True), consts[1].to(torch.float64), consts[2]]
            of_mean = [c * q.scale for c, q in zip(integers, targets, strict=True)]
            lacking = self.means[node.name] - _channel_means(node, rule.compute(node.attrs, *of_mean))
            moved = consts[2] + torch.round(lacking / targets[2].scale.flatten()).to(torch.int64)
            consts[2] = moved.clamp(targets[2].qmin, targets[2].qmax)


def _channel_means(node: Node, value: Tensor) -> Tensor:
    return value.movedim(-1 if node.op == "linear" else 1, 0).flatten(1).mean(1)


# ---------------------------------------------------------------- rounding
def _rounded(weight: Tensor, target: QParams, nearest: Tensor, attrs: Attrs, rule: OpRule, x: Tensor) -> Tensor:
    """A layer's centered integer weights, rounded for the values that it reads.

    Args:
        target, nearest: how the weights are stored, and their nearest integers.
        x: integers of an integer layer, real values of a float one.
    """
    of_entries = target.spread_over(weight.shape)
    unit = of_entries.scale if target.group is None else target.scale.amax(1).reshape(-1, *[1] * (weight.ndim - 1))
    real = weight.to(torch.float64) / unit
    least, most = ((end - of_entries.zero_point).to(torch.float64) for end in (target.qmin, target.qmax))
    # the place of every entry of the product's matrix; 0 stands for what fills a window up
    numbers = torch.arange(1, weight.numel() + 1, dtype=torch.float64).reshape(weight.shape)
    first, places = _matrices(rule, attrs, x[:1], numbers)
    places = places.to(torch.int64)

    def matrix(values: Tensor) -> Tensor:
        entries = values.expand(weight.shape).flatten()
        return torch.cat([entries.new_zeros(1), entries])[places]

    windows = _windows(rule, attrs, x, nearest, first.shape)
    parts = []
    steps = torch.ones(()) if target.group is None else of_entries.scale / unit
    columns = (torch.split(matrix(v), MOST_TOGETHER, 1) for v in (real, least, most, steps.to(torch.float64)))
    for part, values, low, high, step in zip(torch.split(windows, MOST_TOGETHER, 2), *columns, strict=True):
        moments = (part.transpose(1, 2) @ part).to(torch.float64) / part.shape[1]
        parts.append(_with_feedback(values, moments, low, high, None if target.group is None else step))
    integers = torch.zeros(weight.numel() + 1, dtype=torch.float64)
    integers[places.flatten()] = torch.cat(parts, 1).flatten()
    return integers[1:].reshape(weight.shape).to(nearest.dtype)


def _matrices(rule: OpRule, attrs: Attrs, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Windows (groups, places, K) of samples, and weights (groups, K, outputs of a group)."""
    assert rule.integer is not None and rule.integer.product is not None
    rows, columns = rule.integer.product.to_matrices(attrs, x, weight, 0, 0)
    if columns.ndim == 2:
        return rows.unsqueeze(0), columns.unsqueeze(0)
    return rows.transpose(0, 1).flatten(1, 2), columns


def _windows(rule: OpRule, attrs: Attrs, x: Tensor, weight: Tensor, of_sample: Sequence[int]) -> Tensor:
    """Some windows (groups, places, K) that a layer reads, from samples and places all over the data.

    Args:
        of_sample: the shape of the windows of one sample.
    """
    groups, places, length = of_sample
    wanted = max(LEAST_WINDOWS, WINDOWS_PER_WEIGHT * min(length, MOST_TOGETHER))
    wanted = max(1, min(wanted, WINDOW_BYTES // (4 * groups * length)))
    count = min(len(x), max(MOMENT_SAMPLES, math.ceil(wanted / places)))
    chosen = x[torch.arange(count) * len(x) // count]
    at_once = max(1, WINDOW_BYTES // (4 * groups * places * length))
    step = max(1, places * count // wanted)
    while step > 1 and math.gcd(step, places) > 1:  # so that samples are read at different places
        step -= 1
    parts, start = [], 0
    for samples in torch.split(chosen, at_once):
        rows, _ = _matrices(rule, attrs, samples, weight.to(x.dtype))
        parts.append(rows[:, -start % step :: step].to(torch.float32))
        start += rows.shape[1]
    return torch.cat(parts, 1)


def _with_feedback(real: Tensor, moments: Tensor, least: Tensor, most: Tensor, step: Tensor | None) -> Tensor:
    """Integers near real weights, float64 (groups, K, outputs); see the module's text.

    Args:
        real, least, most: the weights in units that are equal along K, and the ends of their integers.
        moments: (groups, K, K).
        step: the scale of every weight in these units; None where it is 1.
    """
    diagonal = moments.diagonal(dim1=1, dim2=2)
    moments = moments + torch.diag_embed((DAMPING * diagonal.mean(1, keepdim=True) + 1e-9).expand_as(diagonal))
    order = torch.sort(diagonal, dim=1, descending=True, stable=True).indices  # what is read most is rounded first

    def in_order(values: Tensor, axis: int) -> Tensor:
        index = order.unsqueeze(2 if axis == 1 else 1).expand(values.shape)
        return values.gather(axis, index)

    inverse = torch.cholesky_inverse(torch.linalg.cholesky(in_order(in_order(moments, 1), 2)))
    factor = torch.linalg.cholesky(inverse, upper=True)
    left, low, high = in_order(real, 1), in_order(least, 1), in_order(most, 1)
    steps = None if step is None else in_order(step, 1).clamp_min(TINY)  # 0 where a window is filled up
    rounded, count = torch.empty_like(left), left.shape[1]
    for start in range(0, count, BLOCK):
        end = min(count, start + BLOCK)
        errors = torch.empty_like(left[:, start:end])
        for j in range(start, end):
            value = left[:, j] if steps is None else left[:, j] / steps[:, j]
            rounded[:, j] = value.round().clamp(low[:, j], high[:, j])
            near = rounded[:, j] if steps is None else rounded[:, j] * steps[:, j]
            error = errors[:, j - start] = (left[:, j] - near) / factor[:, j, j].unsqueeze(1)
            left[:, j + 1 : end] -= factor[:, j, j + 1 : end].unsqueeze(2) * error.unsqueeze(1)
        left[:, end:] -= factor[:, start:end, end:].transpose(1, 2) @ errors
    return torch.empty_like(rounded).scatter_(1, order.unsqueeze(2).expand(rounded.shape), rounded)
