"""Corrections of layers: weights rounded so that a layer's output keeps close, and biases that keep its mean.

A layer's output is a sum over K products, so the errors of its rounded weights add up, and what one weight adds others
can take away. Rounding goes through the K weights of all outputs one by one, and changes those that are still to be
rounded so that they make up for the error, as seen on the integers that the layer reads in the simulation: with the
second moments H = X^T X = L L^T of its windows, where L is lower triangular, and from the last weight to the first,
what the weights i > j lack once they are rounded, e, changes weight j by the sum of e[i] * L[i, j] / L[j, j]. This is
GPTQ without an inverse of H. What layers before it have lost, weights can partly give back: before they are rounded,
they change by H^-1 X^T (X_float - X) w, the least squares for the output of the float model. A bias takes the
difference of the means of a channel in the float model and in the simulation.

Layers are corrected in the order in which they run, one simulation in all: each reads what the corrected ones before
it give. Integers change by whole offsets, which are stored; scales stay. The weight of a layer that computes in float
is rounded in the same way, by the second moments of the real values that the layer reads. Where groups of weights have
scales of their own, errors are passed on in units of the largest scale of the channel.

References:
    E. Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers", ICLR 2023;
    J. Chen et al., "The Geometry of LLM Quantization: GPTQ as Babai's Nearest Plane Algorithm", 2025, has the form with
    L;
    Y. Li et al., "GPTAQ: Efficient Finetuning-Free Quantization for Asymmetric Calibration", ICML 2025, round for the
    output of the float model;
    M. Nagel et al., "Data-Free Quantization Through Weight Equalization and Bias Correction", ICCV 2019 (section 4.2,
    the empirical correction).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hago.arithmetic.types import QParams
from hago.correction import LAYERS, channel_axis
from hago.graph import Graph, Node
from hago.graph.schedule import Step, make_schedule
from hago.ops import Attrs
from hago.plan import Plan
from hago.search.float_layers import MOST_TOGETHER, FloatLayer, FloatLayers, Parts, in_parts, largest_value_bytes
from hago.simulation import Simulator, carrier_to_real

#: The most samples that corrections are found on.
CORRECTION_SAMPLES: Final = 64
#: The most bytes of the largest value of these samples.
VALUE_BYTES: Final = 1 << 28
#: Part of the mean of the diagonal that is added to the diagonal of second moments.
DAMPING: Final = 0.01
#: The least that is added.
LEAST_DAMPING: Final = 1e-9
#: Where a window has more than this many times as many weights as there are windows, rounding by matrices of windows
#: takes less.
FEW_WINDOWS: Final = 8
#: Windows that differ by this many times more from the float model's than such a part of all do are taken as they are.
OUTLIER_FACTOR: Final = 4.0
OUTLIER_QUANTILE: Final = 0.9
#: Weights of larger integers keep the nearest ones: float32 has no two bits after their point, and they lose next to
#: nothing.
LARGEST_INTEGER: Final = 1 << 22
#: A divisor in place of 0.
TINY: Final = 1e-30
#: Weights for which the errors of all that are rounded before them are summed at once.
BLOCK: Final = 64
#: Second moments are computed in at most MOST_BLOCKS blocks of columns, each of at least LEAST_COLUMNS.
LEAST_COLUMNS: Final = 96
MOST_BLOCKS: Final = 8

#: Of one dtype of floats.
Array = npt.NDArray[Any]


def correct_layers(plan: Plan, real: FloatLayers, *, rounding: bool, bias: bool) -> dict[str, Tensor]:
    """Offsets of the integers of constants, by name: of weights for `rounding`, of biases for `bias`.

    Args:
        plan: the Plan to correct.
        real: its float model, on the samples to correct it on.
    """
    with torch.no_grad():
        return _Correcting(plan, real, rounding=rounding, bias=bias).run()


def most_samples(graph: Graph, multiple: int = 1) -> int:
    """The number of samples that a network is corrected on.

    Args:
        multiple: how many times CORRECTION_SAMPLES, if their values are not too large.
    """
    return max(1, min(multiple * CORRECTION_SAMPLES, VALUE_BYTES // largest_value_bytes(graph)))


class _Correcting:
    """One simulation in which layers are corrected on their way."""

    def __init__(self, plan: Plan, real: FloatLayers, *, rounding: bool, bias: bool) -> None:
        self.graph, self.ops, self.rounding, self.bias, self.real = plan.graph, plan.ops, rounding, bias, real
        assert real.graph is plan.graph, "layers of another model"
        self.plans = {name: replace(p, consts=dict(p.consts)) for name, p in plan.nodes.items()}
        self.weights = dict(plan.weights)
        self.simulator = Simulator(replace(plan, nodes=self.plans, weights=self.weights))
        self.before = plan
        self.grouped: dict[str, Tensor] = {}
        self.layers = {node.name for node in plan.graph if self._is_layer(node)}

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

    def _is_float(self, step: Step) -> bool:
        """Whether a step is a node in float."""
        return step.name in self.graph.by_name and step.name not in self.plans

    def run(self) -> dict[str, Tensor]:
        layers = self.real.of(self.layers, windows=self.rounding)

        def compute(step: Step, read: Sequence[Any]) -> Sequence[Any]:
            if step.name in self.layers:
                name, real = next(layers)
                assert name == step.name, f"{step.name} runs in the simulation when {name} does in the float model"
                self._correct(self.graph[name], read[0], real)
            return in_parts(step.run, read)

        simulator = self.simulator
        begun = [simulator.begin(part) for part in self.real.parts]
        values = {**begun[0], **{n: Parts(of[n] for of in begun) for n in self.graph.inputs}}
        schedule = make_schedule(simulator.steps(), ())
        of_layers = [i for i, entry in enumerate(schedule) if entry.step.name in self.layers]
        if of_layers:  # what comes after the last changes nothing
            schedule = schedule[: of_layers[-1] + 1]
            floats = next(i for i, entry in enumerate(schedule) if i == of_layers[0] or not self._is_float(entry.step))
            self.real.run(schedule, floats, values, compute)
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

    def _correct(self, node: Node, x: Any, real: FloatLayer) -> None:
        """Correct a layer.

        Args:
            x: what it reads in the simulation, in parts: integers on a carrier where their producer emits integers.
            real: the layer in the float model.
        """
        rule, weight = self.ops[node.op], self.graph.consts[node.inputs[1]]
        wanted = real.windows if self.rounding else None
        if node.name not in self.plans:
            if wanted is not None:
                edge = node.edges[1]
                stored, simq = self.weights[edge], self.before.edges[node.edges[0]]
                seen = self.real.windows(node, Parts(carrier_to_real(simq, part) for part in Parts.of(x)))
                rounded = _rounded(weight, stored.qparams, stored.integers, node.attrs, seen, wanted)
                self.weights[edge] = replace(stored, integers=rounded)
            return
        plan = self.plans[node.name]
        targets = [q for q in plan.operands if q is not None]
        consts: dict[int, Tensor] = plan.consts  # type: ignore[assignment]
        if wanted is not None:
            seen, scale = self.real.windows(node, x), float(targets[0].scale)
            if plan.groups is None:
                consts[1] = _rounded(weight, targets[1], consts[1], plan.attrs, seen, wanted, scale)
            else:
                groups = plan.groups
                rounded = _rounded(weight, groups.stored, groups.integers, plan.attrs, seen, wanted, scale)
                self.grouped[node.name], consts[1] = rounded, replace(groups, integers=rounded).joined()
        if self.bias and 2 in consts:
            # a layer is linear, so its mean is that of the mean of what it reads
            integers = [Parts.of(x).mean(), consts[1], consts[2]]
            of_mean = [(c * q.scale).to(torch.float32) for c, q in zip(integers, targets, strict=True)]
            lacking = _channel_means(node, real.mean) - _channel_means(node, rule.compute(node.attrs, *of_mean))
            moved = consts[2] + torch.round(lacking / targets[2].scale.flatten()).to(torch.int64)
            consts[2] = moved.clamp(targets[2].qmin, targets[2].qmax)


def _channel_means(node: Node, value: Tensor) -> Tensor:
    return value.movedim(channel_axis(node), 0).flatten(1).mean(1)


# ---------------------------------------------------------------- rounding
def _rounded(
    weight: Tensor, target: QParams, nearest: Tensor, attrs: Attrs, seen: Tensor, wanted: Tensor, scale: float = 1.0
) -> Tensor:
    """A layer's centered integer weights, rounded for the values that it reads.

    Args:
        weight: its real weights (outputs, channels, *kernel).
        target, nearest: how the weights are stored, and their nearest integers.
        seen: windows (groups, places, K) of what it reads in the simulation: integers of an integer layer and real
            values of a float one.
        wanted: the same windows of real values in the float model.
        scale: of what is seen.
    """
    if max(-target.qmin, target.qmax) > LARGEST_INTEGER:
        return nearest
    lost = torch.sub(wanted, seen, alpha=scale)
    _ignore_outliers(lost)
    of_entries = target.spread_over(weight.shape)
    unit = of_entries.scale if target.group is None else target.scale.amax(1).reshape(-1, *[1] * (weight.ndim - 1))
    real = weight.to(torch.float64) / unit
    least, most = (end - of_entries.zero_point for end in (target.qmin, target.qmax))
    groups, outputs = attrs.get("groups", 1), len(weight)

    def matrix(values: Tensor) -> Tensor:
        """Values of weights as (groups, K, outputs of a group), along K as windows have them; float32."""
        ordered = values.to(torch.float32).expand(weight.shape).movedim(1, -1)
        return ordered.reshape(groups, outputs // groups, -1).transpose(1, 2).contiguous()

    steps = torch.ones(()) if target.group is None else of_entries.scale / unit
    columns = (torch.split(matrix(v), MOST_TOGETHER, 1) for v in (real, least, most, steps))
    windows = (torch.split(w, MOST_TOGETHER, 2) for w in (seen, lost))
    parts = []
    for read, lacking, values, low, high, step in zip(*windows, *columns, strict=True):
        # matrices of n by n or of K by K, by what takes less: a least squares for a half, or also rounding for all
        of_half = _FewWindows if read.shape[1] < 2 * read.shape[2] else _Moments
        kind = _FewWindows if FEW_WINDOWS * read.shape[1] < read.shape[2] else _Moments
        units = values / scale
        halves = [of_half.of(*half, units) for half in zip(read.chunk(2, 1), lacking.chunk(2, 1), strict=True)]
        together = _joined(halves) if kind is of_half else kind.of(read, lacking, units)
        rounded = together.with_feedback(values, _given_back(halves), low, high, None if target.group is None else step)
        parts.append(rounded)
    integers = torch.cat(parts, 1).transpose(1, 2).reshape(weight.movedim(1, -1).shape).movedim(-1, 1)
    return integers.contiguous().to(nearest.dtype)


def _ignore_outliers(lost: Tensor) -> None:
    """Make 0 what windows (groups, places, K) lack that are far from the float model's, since values before were
    clipped: no weights of this layer bring it back, and a few such windows would decide the least squares of all."""
    norms = torch.linalg.vector_norm(lost, dim=2).numpy()
    rank = math.ceil(OUTLIER_QUANTILE * lost.shape[1]) - 1
    ordinary = np.partition(norms, rank, 1)[:, rank, None]  # NumPy selects several times as fast as torch
    outliers = np.flatnonzero(norms > math.sqrt(OUTLIER_FACTOR) * ordinary)
    lost.view(-1, lost.shape[2]).index_fill_(0, torch.from_numpy(outliers), 0.0)


def _given_back(halves: Sequence[_Moments | _FewWindows]) -> Tensor | float:
    """The part of what layers before have lost that weights give back: as far as a change by one half of the windows
    does so on the other half; none where there is one window."""
    if len(halves) < 2:
        return 0.0
    first, second = halves
    gain, curvature = second.gain(first.change())
    return (gain / curvature.clamp_min(TINY)).clamp(0.0, 1.0)


@dataclass(frozen=True, slots=True)
class _Moments:
    """The second moments of windows: float32, which is exact enough with what is added to their diagonal.

    Args:
        seen: X^T X (groups, K, K) over the number of windows.
        lost: X^T (X_float - X) w (groups, K, outputs), likewise: of what the layer's outputs have lost.
    """

    seen: Tensor
    lost: Tensor

    @staticmethod
    def of(seen: Tensor, lost: Tensor, weights: Tensor) -> _Moments:
        """Of what windows (groups, places, K) hold in the simulation, and what they lack to the float model's.

        Args:
            weights: (groups, K, outputs).
        """
        if 2 * weights.shape[2] < weights.shape[1]:  # the order of products that takes less
            return _Moments(_second_moments(seen), _products(seen, lost @ weights))
        return _Moments(_second_moments(seen), _products(seen, lost) @ weights)

    def change(self) -> Tensor:
        """The least squares H^-1 X^T (X_float - X) w."""
        return torch.cholesky_solve(self.lost, _damped_factor(self.seen.clone()))

    def gain(self, change: Tensor) -> tuple[Tensor, Tensor]:
        """How much of what is lost a change of weights gives back, and its square: their ratio is the best part."""
        return (change * self.lost).sum(), (change * (self.seen @ change)).sum()

    def with_feedback(
        self, real: Tensor, part: Tensor | float, least: Tensor, most: Tensor, step: Tensor | None
    ) -> Tensor:
        """Integers near real weights (groups, K, outputs) and a part of their change; see the module's text.

        Args:
            real, least, most: the weights in units that are equal along K, and the ends of their integers.
            step: the scale of every weight in these units; None where it is 1.
        """
        order = _least_read_first(self.seen.diagonal(dim1=1, dim2=2))
        factor = _damped_factor(_sorted(_sorted(self.seen, order).transpose(1, 2), order))
        diagonal = factor.diagonal(dim1=1, dim2=2)
        wanted, rounding = _sorted(real, order), _Rounding.of(order, least, most, step)
        # L^T times the change is L^-1 X^T (X_float - X) w
        given_back = torch.linalg.solve_triangular(factor, _sorted(self.lost, order), upper=False)
        values = given_back.mul_(part).div_(diagonal.unsqueeze(2)).add_(wanted)
        errors = torch.empty_like(wanted)
        each_wanted, each_error = wanted.numpy(), errors.numpy()
        for end in range(wanted.shape[1], 0, -BLOCK):
            start = max(0, end - BLOCK)
            shares = (factor[:, start:, start:end] / diagonal[:, None, start:end]).transpose(1, 2)
            each_share = shares[:, :, : end - start].contiguous().numpy()  # that of a weight in itself is 1
            errors[:, start:end] = values[:, start:end] + shares[:, :, end - start :] @ errors[:, end:]
            for j in reversed(range(start, end)):
                value = np.matmul(each_share[:, j - start, None, j - start :], each_error[:, j:end])[:, 0]
                np.subtract(each_wanted[:, j], rounding.round(j, value), out=each_error[:, j])
        return rounding.integers()


@dataclass(frozen=True, slots=True)
class _FewWindows:
    """Windows that are fewer than their weights: the same as `_Moments`, by n x n instead of K x K matrices, since
    (X^T X + d)^-1 X^T = X^T (X X^T + d)^-1.

    Args:
        seen: X (groups, n, K) over the root of n.
        lost: (X_float - X) w (groups, n, outputs), likewise.
    """

    seen: Tensor
    lost: Tensor

    @staticmethod
    def of(seen: Tensor, lost: Tensor, weights: Tensor) -> _FewWindows:
        scale = seen.shape[1] ** -0.5
        return _FewWindows(seen * scale, lost @ weights * scale)

    def _damping(self) -> Tensor:
        """(groups, 1, 1)."""
        return DAMPING * self.seen.square().sum(1).mean(1).reshape(-1, 1, 1) + LEAST_DAMPING

    def change(self) -> Tensor:
        identity = torch.eye(self.seen.shape[1], dtype=self.seen.dtype)
        damped = self.seen @ self.seen.transpose(1, 2) + self._damping() * identity
        return self.seen.transpose(1, 2) @ torch.cholesky_solve(self.lost, torch.linalg.cholesky(damped))

    def gain(self, change: Tensor) -> tuple[Tensor, Tensor]:
        given = self.seen @ change
        return (given * self.lost).sum(), given.square().sum()

    def with_feedback(
        self, real: Tensor, part: Tensor | float, least: Tensor, most: Tensor, step: Tensor | None
    ) -> Tensor:
        order = _least_read_first(self.seen.square().sum(1))
        columns = _sorted(self.seen.transpose(1, 2), order).to(torch.float64).numpy()  # (groups, K, n)
        groups, count, windows = columns.shape
        # S = d + the sum of x x^T over all weights that are rounded later, whose inverse changes by one x at a time
        inverse = (torch.eye(windows, dtype=torch.float64) / self._damping()).numpy()
        makes_up = np.empty_like(columns)  # S^-1 x: by which outputs later weights make up for an error of this one
        for j in range(count):
            x, moved = columns[:, j], makes_up[:, j]
            np.matmul(inverse, x[:, :, None], out=moved[:, :, None])
            inverse -= moved[:, :, None] * (moved / (1.0 + (x * moved).sum(1, keepdims=True)))[:, None]
        wanted = _sorted(real + part * self.change(), order).numpy()
        rounding = _Rounding.of(order, least, most, step)
        owed = np.zeros((groups, windows, wanted.shape[2]))  # outputs to make up for
        for j in reversed(range(count)):
            value = wanted[:, j] + np.matmul(columns[:, j, None], owed)[:, 0]
            owed += makes_up[:, j, :, None] * (value - rounding.round(j, value))[:, None]
        return rounding.integers()


@dataclass(frozen=True, slots=True)
class _Rounding:
    """Rounds the weights (groups, K, outputs) of a layer, one place of K after the other, in an order of its own.

    The steps are as many as places, and small, and NumPy begins one in a fifth of the time that torch does.

    Args:
        order: the places (groups, K) in this order.
        rounded: their integers in this order, in float32.
        low, high: the ends of the integers.
        step: the scale of every weight in the units of the values; None where it is 1.
    """

    order: Tensor
    rounded: Array
    low: Array
    high: Array
    step: Array | None

    @staticmethod
    def of(order: Tensor, least: Tensor, most: Tensor, step: Tensor | None) -> _Rounding:
        low, high = (_sorted(ends, order).numpy() for ends in (least, most))
        steps = None if step is None else _sorted(step, order).clamp_min(TINY).numpy()
        return _Rounding(order, np.empty_like(low), low, high, steps)

    def round(self, place: int, value: Array) -> Array:
        """What the rounded weights (groups, outputs) of one place stand for.

        Args:
            value: what they should stand for.
        """
        near, step = self.rounded[:, place], None if self.step is None else self.step[:, place]
        np.rint(value if step is None else value / step, out=near, casting="same_kind")
        np.minimum(np.maximum(near, self.low[:, place], out=near), self.high[:, place], out=near)
        return near if step is None else near * step

    def integers(self) -> Tensor:
        """The integers of all places, in the order of the weights."""
        return _unsorted(torch.from_numpy(self.rounded), self.order)


def _joined(parts: Sequence[_Moments | _FewWindows]) -> _Moments | _FewWindows:
    """The same of all windows of parts of about the same size."""
    seen, lost = [p.seen for p in parts], [p.lost for p in parts]
    if isinstance(parts[0], _Moments):
        return _Moments(*(functools.reduce(torch.add, sums) / len(parts) for sums in (seen, lost)))
    scale = len(parts) ** -0.5
    return _FewWindows(torch.cat(seen, 1) * scale, torch.cat(lost, 1) * scale)


def _products(a: Tensor, b: Tensor) -> Tensor:
    """The mean products of two values (groups, windows, any) over windows."""
    return (a.transpose(1, 2) @ b).div_(a.shape[1])


def _second_moments(values: Tensor) -> Tensor:
    """The mean products of values (groups, windows, K) with themselves, block by block, since they are symmetric."""
    count = values.shape[2]
    products = values.new_empty(len(values), count, count)
    size = max(LEAST_COLUMNS, -(-count // MOST_BLOCKS))
    for start in range(0, count, size):
        end = start + size
        products[:, start:end, start:] = _products(values[:, :, start:end], values[:, :, start:])
        products[:, end:, start:end] = products[:, start:end, end:].transpose(1, 2)
    return products


def _damped_factor(moments: Tensor) -> Tensor:
    """The lower Cholesky factor of second moments (groups, K, K), to whose diagonal something is added in place."""
    diagonal = moments.diagonal(dim1=1, dim2=2)
    diagonal += DAMPING * diagonal.mean(1, keepdim=True) + LEAST_DAMPING
    lower: Tensor = torch.linalg.cholesky(moments)
    return lower


def _least_read_first(moments: Tensor) -> Tensor:
    """An order of K weights of a group, from their second moments (groups, K). They are rounded from the last, which
    is read most, to the first."""
    return torch.sort(moments, dim=1, stable=True).indices


def _sorted(values: Tensor, order: Tensor) -> Tensor:
    """The rows of values (groups, K, any) in an order (groups, K) of each group."""
    count = values.shape[1]
    rows = order + count * torch.arange(len(order)).unsqueeze(1)
    return values.flatten(0, 1).index_select(0, rows.flatten()).view(values.shape)


def _unsorted(values: Tensor, order: Tensor) -> Tensor:
    """The values whose rows in an order are these."""
    return _sorted(values, order.argsort(1))
