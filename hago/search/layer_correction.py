"""Corrections of layers: weights rounded so that a layer's output keeps close, and biases that keep its mean.

A layer's output is a sum over K products, so the errors of its rounded weights add up, and what one weight adds others
can take away. Rounding goes through the K weights of all outputs one by one, and changes those that are still to be
rounded so that they make up for the error, as seen on the integers that the layer reads in the simulation: with the
second moments H = X^T X of its windows, a rounding error e of weight j changes the others by -e * U[j, :] / U[j, j],
where U is the Cholesky factor of the inverse of H. A bias takes the difference of the means of a channel in the float
model and in the simulation.

Layers are corrected in the order in which they run, one simulation in all: each reads what the corrected ones before
it give. Integers change by whole offsets, which are stored; scales stay.

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

from hago.correction import LAYERS
from hago.graph import Graph, Node, run_real
from hago.graph.schedule import Step, make_schedule, run_schedule
from hago.ops import OpRule
from hago.plan import NodePlan, Plan
from hago.simulation import Simulator

#: The most samples that corrections are found on.
CORRECTION_SAMPLES: Final = 64
#: The most bytes of the largest value of these samples.
VALUE_BYTES: Final = 1 << 28
#: Windows that are seen of a layer: at least this many, and WINDOWS_PER_WEIGHT for every weight of a window.
LEAST_WINDOWS: Final = 512
WINDOWS_PER_WEIGHT: Final = 8
#: The most bytes of windows that are seen of a layer.
WINDOW_BYTES: Final = 1 << 28
#: The most weights of a window that make up for each other's errors: their moments are a matrix of this size.
MOST_TOGETHER: Final = 4096
#: Part of the mean of the diagonal that is added to the diagonal of second moments.
DAMPING: Final = 0.01
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
        self.simulator = Simulator(replace(plan, nodes=self.plans))
        self.before = plan.nodes
        self.layers = {node.name for node in plan.graph if self._is_layer(node)}
        self.means = self._float_means() if bias else {}

    def _is_layer(self, node: Node) -> bool:
        """Whether constants that no other node reads are the weight, and the bias, of an integer layer."""
        plan = self.plans.get(node.name)
        if node.op not in LAYERS or plan is None or 1 not in plan.consts or plan.operands[1] is None:
            return False
        return all(len(self.graph.out_edges[s]) == 1 for s in node.inputs[1:]) and set(plan.consts) == {
            *range(1, len(node.inputs))
        }

    def _float_means(self) -> dict[str, Tensor]:
        """The mean of every channel of the layers in the float model."""
        means: dict[str, Tensor] = {}

        def see(node: Node, value: Any) -> None:
            if node.name in self.layers:
                means[node.name] = _channel_means(node, value.mean(0, keepdim=True, dtype=torch.float64))

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
            for slot, integers in self.plans[node.name].consts.items():
                offset = integers.to(torch.int64) - self.before[node.name].consts[slot].to(torch.int64)
                if bool(offset.any()):
                    offsets[node.inputs[slot]] = offset
        return offsets

    def _correct(self, node: Node, x: Tensor) -> None:
        """Correct a layer that reads these integers."""
        plan, rule = self.plans[node.name], self.ops[node.op]
        consts: dict[int, Tensor] = plan.consts  # type: ignore[assignment]
        if self.rounding and LAYERS[node.op][0] == 0:
            consts[1] = _rounded(node, self.graph.consts[node.inputs[1]], plan, rule, x)
        if self.bias and 2 in consts:
            # a layer is linear, so its mean is that of the mean of what it reads
            targets = [q for q in plan.operands if q is not None]
            integers = [x.mean(0, keepdim=True, dtype=torch.float64), consts[1].to(torch.float64), consts[2]]
            real = [c * q.scale for c, q in zip(integers, targets, strict=True)]
            lacking = self.means[node.name] - _channel_means(node, rule.compute(node.attrs, *real))
            moved = consts[2] + torch.round(lacking / targets[2].scale.flatten()).to(torch.int64)
            consts[2] = moved.clamp(targets[2].qmin, targets[2].qmax)


def _channel_means(node: Node, value: Tensor) -> Tensor:
    return value.movedim(-1 if node.op == "linear" else 1, 0).flatten(1).mean(1)


# ---------------------------------------------------------------- rounding
def _rounded(node: Node, weight: Tensor, plan: NodePlan, rule: OpRule, x: Tensor) -> Tensor:
    """A layer's centered integer weights, rounded for the integers that it reads.

    Args:
        weight: its real weights (outputs, channels, *kernel).
    """
    target, nearest = plan.operands[1], plan.consts[1]
    assert target is not None
    groups, outputs = node.attrs.get("groups", 1), len(weight)
    in_windows = weight.movedim(1, -1).shape

    def matrix(values: Tensor) -> Tensor:
        """Values of weights as (groups, K, outputs of a group), along K as windows have them."""
        ordered = values.to(torch.float64).expand(weight.shape).movedim(1, -1)
        return ordered.reshape(groups, outputs // groups, -1).transpose(1, 2)

    windows = _windows(plan, rule, x, weight)
    parts = []
    columns = (
        matrix(v) for v in (weight / target.scale, target.qmin - target.zero_point, target.qmax - target.zero_point)
    )
    split = (torch.split(c, MOST_TOGETHER, 1) for c in columns)
    for part, values, low, high in zip(torch.split(windows, MOST_TOGETHER, 2), *split, strict=True):
        moments = (part.transpose(1, 2) @ part).to(torch.float64) / part.shape[1]
        parts.append(_with_feedback(values, moments, low, high))
    integers = torch.cat(parts, 1).transpose(1, 2).reshape(in_windows).movedim(-1, 1)
    return integers.contiguous().to(nearest.dtype)


def _windows(plan: NodePlan, rule: OpRule, x: Tensor, weight: Tensor) -> Tensor:
    """Some windows (groups, places, K) that a layer reads, from samples and places all over the data; float32."""
    assert rule.integer is not None and rule.integer.addends is not None and rule.integer.addends.terms is not None
    axis, groups = rule.integer.addends.bias_axis, plan.attrs.get("groups", 1)
    length = weight[0].numel()
    ones = torch.ones_like(weight, dtype=torch.float32)
    terms = rule.integer.addends.terms(plan.attrs, (x.to(torch.float32), ones), "channels_inner")
    shape = list(rule.compute(plan.attrs, x.to("meta", torch.float32), ones.to("meta")).shape)
    del shape[axis]
    places = math.prod(shape)
    wanted = max(LEAST_WINDOWS, WINDOWS_PER_WEIGHT * min(length, MOST_TOGETHER))
    count = max(1, min(wanted, places, WINDOW_BYTES // (4 * groups * length)))
    chosen = torch.randperm(places, generator=torch.Generator().manual_seed(0))[:count]
    index = [i.repeat(groups) for i in torch.unravel_index(chosen, shape)]
    first_outputs = torch.arange(groups) * (len(weight) // groups)  # any output of a group reads its windows
    index.insert(axis % (len(shape) + 1), first_outputs.repeat_interleave(count))
    return terms(tuple(index)).reshape(groups, count, length)


def _with_feedback(real: Tensor, moments: Tensor, least: Tensor, most: Tensor) -> Tensor:
    """Integers near real weights, float64 (groups, K, outputs); see the module's text.

    Args:
        real, least, most: the weights in units of their scales, and the ends of their integers.
        moments: (groups, K, K).
    """
    diagonal = moments.diagonal(dim1=1, dim2=2)
    moments = moments + torch.diag_embed((DAMPING * diagonal.mean(1, keepdim=True) + 1e-9).expand_as(diagonal))
    order = torch.sort(diagonal, dim=1, descending=True, stable=True).indices  # what is read most is rounded first

    def in_order(values: Tensor, axis: int) -> Tensor:
        index = order.unsqueeze(2 if axis == 1 else 1).expand(values.shape)
        return values.gather(axis, index)

    # the upper Cholesky factor of the inverse is the inverse of the upper V with V V^T = H
    lower = torch.linalg.cholesky(in_order(in_order(moments, 1), 2).flip(1, 2))
    identity = torch.eye(lower.shape[1], dtype=torch.float64)
    factor = torch.linalg.solve_triangular(lower.flip(1, 2), identity, upper=True)
    factor = factor / factor.diagonal(dim1=1, dim2=2).unsqueeze(2)
    left, low, high = in_order(real, 1), in_order(least, 1), in_order(most, 1)
    rounded, count = torch.empty_like(left), left.shape[1]
    for start in range(0, count, BLOCK):
        end = min(count, start + BLOCK)
        errors = torch.empty_like(left[:, start:end])
        for j in range(start, end):
            rounded[:, j] = left[:, j].round().clamp(low[:, j], high[:, j])
            error = torch.sub(left[:, j], rounded[:, j], out=errors[:, j - start])
            left[:, j + 1 : end].addcmul_(factor[:, j, j + 1 : end].unsqueeze(2), error.unsqueeze(1), value=-1)
        left[:, end:] -= factor[:, start:end, end:].transpose(1, 2) @ errors
    return torch.empty_like(rounded).scatter_(1, order.unsqueeze(2).expand(rounded.shape), rounded)
