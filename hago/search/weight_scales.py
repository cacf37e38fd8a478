"""Weight scales: which threshold each channel of each weight should have, so that the outputs err least.

At a Plan whose outputs differ from the float model's by e, the loss is L = e^T H e / 2. Another threshold for one
channel changes its weights by d and the outputs by about J d, J being the float model's, so the loss by

    <J^T H e, d> + d^T J^T H J d / 2.

The first term is exact to first order: `slopes`, from gradients of <H e, outputs>. The second is estimated: with
random v, E[v v^T] = H, it is E[<J^T v, d>^2] / 2, and each chunk of samples gives one v: `sketch`. Sketches of several
changes add up, so what channels do to each other is in it. Kept are those of each threshold's error against the float
weight: of two, the difference is that of the change, and one by itself says what the channel loses alone, at any Plan.

References:
    Rounding errors of weights do not cancel, so the nearest integers are not the best: M. Nagel et al., "Up or Down?
    Adaptive Rounding for Post-Training Quantization", ICML 2020. Here roundings change with the thresholds alone,
    which any engine takes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

import torch
from torch import Tensor

from hago.arithmetic.numerics import clip_range
from hago.arithmetic.rounding import ROUNDINGS
from hago.arithmetic.schemes import TWO_SIDED, Grid, make_qparams
from hago.arithmetic.types import Edge, QParams
from hago.plan.plan import Plan
from hago.plan.space import Bits, Group
from hago.search.prepare import Prepared

#: Thresholds that are tried, as parts of the estimated one, which is the first.
FACTORS: Final = (1.0, *(f / 50 for f in range(40, 56) if f != 50))
#: The same where scales are powers of two.
POWERS: Final = (1.0, 0.25, 0.5, 2.0)
#: Sketches that are kept apart, fewer of large networks; later chunks are added to earlier ones, their signs being
#: independent.
SKETCHES: Final = 32
LEAST_SKETCHES: Final = 8
#: Values whose errors are worked out at a time.
ERROR_BLOCK: Final = 1 << 15
#: Bytes of errors that are kept, since every round of refinement multiplies the same ones by other gradients.
KEPT_ERROR_BYTES: Final = 1 << 28
#: Bytes of gradients that are kept while a pass runs.
GRADIENT_BYTES: Final = 1 << 29
#: What the second term of a change is taken for, as a multiple of its estimate: the change that is chosen is one for
#: which the estimate is low by chance.
DOUBT: Final = 1.25
#: As how many sketches counts what a channel would lose were its values' errors independent, where it is alone.
APART: Final = 4
#: Changes that gain less than this part of the loss are left out.
LEAST_GAIN_OF_SCALES: Final = 2e-3

#: By the edge of a weight, which factor each channel has.
Chosen = Mapping[Edge, Tensor]
#: Ends by group and grid.
ThresholdPair = dict[tuple[str, Grid], tuple[Tensor, Tensor]]


@dataclass(slots=True)
class WeightGradients:
    """What a pass sees of weights. Products with errors are sums over chunks, so it is gradients that are summed.

    Args:
        count: sums that are kept apart.
        edges: of the weights; other constants are not kept.
        parts: of the samples; each has its share of the sums.
        sums: by edge, float32 (count, *shape).
    """

    count: int
    edges: Collection[Edge]
    parts: int = 1
    sums: dict[Edge, Tensor] = field(default_factory=dict)
    _chunks: dict[Edge, int] = field(default_factory=dict)
    _part: int = 0

    @staticmethod
    def of_probes(prepared: Prepared, chunks: int = SKETCHES, parts: int = 1) -> WeightGradients:
        """For random vectors on the outputs.

        Args:
            chunks: how many a part has, at most.
        """
        sizes = {g.edges[0]: prepared.graph.consts[g.source].numel() for g in of_constants(prepared)}
        room = GRADIENT_BYTES // (4 * max(1, sum(sizes.values())))
        count = min(SKETCHES, max(LEAST_SKETCHES, room), chunks * parts)
        return WeightGradients(max(1, count // parts) * parts, sizes.keys(), parts)

    @property
    def share(self) -> int:
        """Sums that one part has."""
        return self.count // self.parts

    def columns(self, parts: Iterable[int]) -> list[int]:
        """The sums of some parts."""
        return [part * self.share + i for part in parts for i in range(self.share)]

    def begin(self, part: int) -> None:
        """What comes next is of this part."""
        self._part = part
        self._chunks.clear()

    def see(self, edge: Edge, g: Tensor) -> None:
        """The gradients of one chunk."""
        if edge not in self.edges:
            return
        chunk = self._chunks.get(edge, 0)
        if edge not in self.sums:
            self.sums[edge] = torch.zeros(self.count, *g.shape)
        self.sums[edge][self._part * self.share + chunk % self.share] += g.detach()
        self._chunks[edge] = chunk + 1


#: By edge, the products of every error with every sum of gradients, float64 (C, J, K), and the sums of squares of the
#: products of single values, of the same shape.
Products = Mapping[Edge, tuple[Tensor, Tensor]]


@dataclass(slots=True)
class _Weight:
    """What is known of one weight.

    Args:
        exact: its float values, float64.
        grid, qparams: of the weight in the Plan that changes are counted from.
        ends: (lo, hi), float64 (C,).
        axis: of its channels, or None where it has one threshold.
        sketch: float64 (C, J, K), by channel, factor and sketch.
        apart: float64 (C, J), the sum of squares of a sketch if errors within a channel neither added up nor cancelled.
        slopes: float64 (C, J).
        barred: bool (C, J), factors that are not to be tried.
        floor: the least scale of each channel, of the shape of scales: where it was raised for a bias, no threshold
            makes it smaller; 0 elsewhere.
    """

    key: str
    exact: Tensor
    grid: Grid
    qparams: QParams
    ends: tuple[Tensor, Tensor]
    axis: int | None
    sketch: Tensor
    apart: Tensor
    slopes: Tensor
    barred: Tensor
    floor: Tensor

    def rows(self, x: Tensor) -> Tensor:
        """(C, n)."""
        return x.reshape(1, -1) if self.axis is None else x.movedim(self.axis, 0).reshape(x.shape[self.axis], -1)

    def scaled(self, factors: Tensor) -> tuple[Tensor, Tensor]:
        """The ends times a factor for every channel."""
        return self.ends[0] * factors, self.ends[1] * factors

    def with_factor(self, factor: float) -> QParams:
        """The qparams with every threshold times a factor."""
        shape, grid = self.qparams.scale.shape, self.grid
        lo, hi = (end.reshape(shape) for end in self.scaled(torch.full_like(self.ends[0], factor)))
        if grid.signed and grid.scheme not in TWO_SIDED:
            hi = torch.maximum(lo.abs(), hi)
            lo = -hi
        made = make_qparams(grid.scheme, lo, hi, grid.bits, self.qparams.dtype, power_of_two=grid.power_of_two)
        return replace(made, scale=torch.maximum(made.scale, self.floor))


class ErrorBlock(NamedTuple):
    """The errors that grids make in a part of a constant: float32 (rows, J, columns)."""

    rows: slice
    columns: slice
    errors: Tensor


@dataclass(slots=True)
class _KeptErrors:
    """The errors of weights on the grids of all factors, kept as far as there is room for them.

    Args:
        rounding: of the hardware.
        factors: of thresholds.
        room: bytes that may still be kept.
    """

    rounding: str
    factors: tuple[float, ...]
    room: int
    kept: dict[Edge, list[ErrorBlock]] = field(default_factory=dict)

    def __call__(self, edge: Edge, weight: _Weight) -> Iterable[ErrorBlock]:
        """The errors of one weight."""
        if edge in self.kept:
            return self.kept[edge]
        rows = weight.rows(weight.exact)
        blocks = error_blocks(rows, [weight.with_factor(factor) for factor in self.factors], self.rounding)
        size = 4 * rows.numel() * len(self.factors)
        if size > self.room:
            return blocks
        self.room -= size
        self.kept[edge] = list(blocks)
        return self.kept[edge]


@dataclass(slots=True)
class WeightScales:
    """The choices of thresholds of all weights of a Plan, and what is known of them.

    Args:
        factors: of thresholds, the first being 1.
        errors: what every factor makes of every weight; copies share it.
    """

    weights: dict[Edge, _Weight]
    factors: tuple[float, ...]
    errors: _KeptErrors

    @staticmethod
    def of(prepared: Prepared, plan: Plan, bits: Bits, kept_bytes: int = 0) -> WeightScales:
        """Those of a Plan of these bits; nothing is known of them yet.

        Args:
            kept_bytes: how much of the weights' errors is kept, for more than one use.
        """
        power = prepared.hardware.requantize.power_of_two
        factors = POWERS if power else FACTORS
        found = ((g, _weight(prepared, plan, g, bits, len(factors))) for g in of_constants(prepared))
        weights = {g.edges[0]: w for g, w in found if w is not None}
        return WeightScales(weights, factors, _KeptErrors(prepared.hardware.requantize.rounding, factors, kept_bytes))

    @property
    def as_estimated(self) -> dict[Edge, Tensor]:
        """The first factor for every channel."""
        return {edge: torch.zeros(len(w.ends[0]), dtype=torch.int64) for edge, w in self.weights.items()}

    def alone(self, plan: Plan) -> dict[Edge, Tensor]:
        """For every channel the factor with which it is expected to lose the least by itself; none below the first
        where an accumulator of the Plan is not proved to hold, since integers get larger.
        """
        small = torch.tensor(self.factors, dtype=torch.float64) < self.factors[0]
        found = {}
        for edge, weight in self.weights.items():
            share = APART / (APART + weight.sketch.shape[2])
            losses = weight.sketch.square().sum(2) * (1.0 - share) + weight.apart * share
            holds = edge.dst not in plan.nodes or plan.nodes[edge.dst].proved
            losses[weight.barred if holds else weight.barred | small] = torch.inf
            found[edge] = losses.argmin(1)
        return found

    def losses(self, chosen: Chosen) -> dict[Edge, float]:
        """What weights are expected to lose, their channels alone, summed over samples: E[<J^T v, d>^2]."""
        return {
            edge: float(weight.sketch[torch.arange(len(chosen[edge])), chosen[edge]].square().sum())
            for edge, weight in self.weights.items()
        }

    def keep(self, bits: Bits) -> None:
        """Those alone whose weights have the bits that they have in the Plan, or nothing is known of them."""
        self.weights = {edge: w for edge, w in self.weights.items() if w.grid.bits == bits[w.key]}

    def take_probes(self, seen: WeightGradients) -> None:
        """What random vectors on the outputs say."""
        self.take_products(self.products(seen), range(seen.count))

    def products(self, seen: WeightGradients) -> Products:
        """Of every weight's errors with what random vectors on the outputs say."""
        there = {edge: w for edge, w in self.weights.items() if edge in seen.sums}
        return {e: error_products(self.errors(e, w), by_channel(seen.sums[e], w.axis)) for e, w in there.items()}

    def take_products(self, products: Products, columns: Sequence[int]) -> None:
        """What some of the sums of gradients say."""
        for edge, weight in self.weights.items():
            if edge in products:
                product, squares = products[edge]
                weight.sketch, weight.apart = product[:, :, columns], squares[:, :, columns].sum(2)
            else:
                weight.sketch = weight.slopes.new_zeros(*weight.slopes.shape, len(columns))

    def take_slopes(self, seen: WeightGradients) -> None:
        """What the error that the outputs have says."""
        for edge, weight in self.weights.items():
            if edge in seen.sums:
                sums = by_channel(seen.sums[edge], weight.axis)
                weight.slopes = error_products(self.errors(edge, weight), sums, squares=False)[0][:, :, 0]

    def bar_errors(self, limit: float) -> None:
        """No factors with which the values of a channel err more than so many times as with the first, by the sum of
        squares. What the samples say of a weight holds for what they do to it; other inputs meet all of its errors.
        """
        for edge, weight in self.weights.items():
            rows = weight.rows(weight.exact)
            ones = torch.ones(1, 1, 1).expand(len(rows), 1, rows.shape[1])
            errors = error_products(self.errors(edge, weight), ones)[1][:, :, 0]
            weight.barred |= errors > limit * errors[:, :1]

    def copied(self) -> WeightScales:
        """The same of which nothing is known yet."""
        weights = {
            edge: replace(w, slopes=torch.zeros_like(w.slopes), barred=w.barred.clone())
            for edge, w in self.weights.items()
        }
        return replace(self, weights=weights)

    def bar(self, nodes: Collection[str], now: Chosen) -> None:
        """No smaller thresholds, and so no larger integers, for weights of nodes whose accumulators are full."""
        factors = torch.tensor(self.factors, dtype=torch.float64)
        for edge, weight in self.weights.items():
            if edge.dst in nodes:
                weight.barred |= factors < factors[now[edge]].unsqueeze(1)

    def improved(self, now: Chosen, loss: float, share: float) -> dict[Edge, Tensor]:
        """Other factors for some channels, one channel after the other, each time the one of the most gain with
        those before.

        Args:
            loss: of the outputs now.
            share: of the loss that is to be gained, at most: further away gradients say little.
        """
        edges = list(self.weights)
        sketches, slopes, places, barred = [], [], [], []
        for number, edge in enumerate(edges):
            weight, index = self.weights[edge], now[edge]
            row = torch.arange(len(index))
            sketches.append((weight.sketch - weight.sketch[row, index].unsqueeze(1)).flatten(0, 1))
            slopes.append((weight.slopes - weight.slopes[row, index].unsqueeze(1)).flatten())
            barred.append(weight.barred.flatten())
            channel = row.repeat_interleave(len(self.factors))
            places.append(torch.stack([torch.full_like(channel, number), channel], 1))
        if not edges:
            return dict(now)
        sketch, slope, place = torch.cat(sketches), torch.cat(slopes), torch.cat(places)
        alone = slope + sketch.square().sum(1) * (DOUBT / 2)
        alone[torch.cat(barred)] = torch.inf
        found = {edge: index.clone() for edge, index in now.items()}
        total, gained = torch.zeros(sketch.shape[1], dtype=torch.float64), 0.0
        while gained < share * loss:
            expected = alone + sketch @ total
            best = int(expected.argmin())
            if not float(expected[best]) < -LEAST_GAIN_OF_SCALES * loss:
                break
            gained -= float(expected[best])
            total = total + sketch[best]
            number, channel = place[best].tolist()
            found[edges[number]][channel] = best % len(self.factors)
            # every channel moves once
            first = best - best % len(self.factors)
            alone[first : first + len(self.factors)] = torch.inf
        return found

    def thresholds(self, chosen: Chosen) -> ThresholdPair:
        """By group and grid, the ends of the weights that have other factors than the first."""
        factors = torch.tensor(self.factors, dtype=torch.float64)
        return {
            (w.key, w.grid): w.scaled(factors[chosen[edge]])
            for edge, w in self.weights.items()
            if bool(chosen[edge].any())
        }


def by_channel(gradients: Tensor, axis: int | None) -> Tensor:
    """(C, K, n) of K gradients (K, *shape), C running along an axis of them, or being 1."""
    if axis is None:
        return gradients.reshape(1, len(gradients), -1)
    channels = gradients.movedim(axis % (gradients.ndim - 1) + 1, 0)
    return channels.reshape(len(channels), len(gradients), -1)


def error_blocks(exact: Tensor, grids: Sequence[QParams], rounding: str) -> Iterator[ErrorBlock]:
    """The errors that grids make in a constant, in float32 and in blocks that stay in a core's cache: a large network
    has hundreds of millions.

    Args:
        exact: (C, n).
        grids: with one scale, or one for each of the C.
    """
    channels, length = exact.shape
    steps = [[_column(t) for t in (grid.scale.to(torch.float32), *clip_range(grid))] for grid in grids]
    rows = max(1, ERROR_BLOCK // max(1, length))
    for top in range(0, channels, rows):
        here = slice(top, top + rows)
        for left in range(0, length, ERROR_BLOCK):
            columns = slice(left, left + ERROR_BLOCK)
            x = exact[here, columns].to(torch.float32)
            errors = torch.empty(len(x), len(grids), x.shape[1])
            for index, ends in enumerate(steps):
                scale, low, high = (t[here] if len(t) > 1 else t for t in ends)
                q = ROUNDINGS[rounding](x / scale)
                torch.sub(torch.minimum(torch.maximum(q, low), high).mul_(scale), x, out=errors[:, index])
            yield ErrorBlock(here, columns, errors)


def error_products(blocks: Iterable[ErrorBlock], sums: Tensor, squares: bool = True) -> tuple[Tensor, Tensor]:
    """Products of the errors that grids make in a constant with sums of its gradients, float64 (C, J, K); and the sums
    of the squares of the products of single values, of the same shape, or nothing.

    Args:
        blocks: of the errors on J grids, all of the constant.
        sums: float32 (C, K, n).
    """
    found: list[Tensor] = []
    for rows, columns, errors in blocks:
        if not found:
            shape = len(sums), errors.shape[1], sums.shape[1]
            found = [torch.zeros(shape, dtype=torch.float64) for _ in range(2 if squares else 1)]
        g = sums[rows, :, columns].transpose(1, 2)
        found[0][rows] += torch.bmm(errors, g)
        if squares:
            found[1][rows] += torch.bmm(errors.square(), g.square())
    return found[0], found[1] if squares else found[0].new_zeros(0)


def _column(t: Tensor | int) -> Tensor:
    """(C, 1) or (1, 1), float32."""
    return torch.as_tensor(t, dtype=torch.float32).reshape(-1, 1)


def of_constants(prepared: Prepared) -> list[Group]:
    """The groups of one constant each."""
    return [g for g in prepared.space.groups.values() if len(g.edges) == 1 and g.source in prepared.graph.consts]


def own_ends(plan: Plan, group: Group) -> tuple[Tensor, Tensor] | None:
    """The thresholds of a constant, channel by channel; None where it has none of its own."""
    qparams, ends = plan.target(group.edges[0]), plan.thresholds.get(group.key)
    if qparams is None or ends is None or qparams.dtype.bits > 16 or ends[0].numel() != qparams.scale.numel():
        return None
    return ends


def _weight(prepared: Prepared, plan: Plan, group: Group, bits: Bits, count: int) -> _Weight | None:
    """A constant's weight, or None where it has no thresholds of its own."""
    qparams, ends = plan.target(group.edges[0]), own_ends(plan, group)
    if qparams is None or ends is None:
        return None
    scheme, power = prepared.hardware.weight.scheme, prepared.hardware.requantize.power_of_two
    signed = bool((qparams.qmin < qparams.zero_point).any())
    grid = Grid(bits[group.key], scheme, signed or qparams.dtype.signed, power)
    lo, hi = (end.reshape(-1).clone() for end in ends)
    axes = [i for i, size in enumerate(qparams.scale.shape) if size > 1]
    exact = prepared.graph.consts[group.source].to(torch.float64)
    sketch = torch.zeros(len(lo), count, SKETCHES, dtype=torch.float64)
    slopes = torch.zeros(len(lo), count, dtype=torch.float64)
    axis = axes[0] if axes else None
    barred = torch.zeros(len(lo), count, dtype=torch.bool)
    node, floor = plan.nodes.get(group.edges[0].dst), torch.zeros_like(qparams.scale)
    for channel in () if node is None else node.raised:
        floor.view(-1)[channel] = qparams.scale.reshape(-1)[channel]
    return _Weight(group.key, exact, grid, qparams, (lo, hi), axis, sketch, slopes.clone(), slopes, barred, floor)
