"""Weight scales: for every channel of every weight, the threshold that minimizes the error of the outputs.

The thresholds of a channel that are tried are the estimated threshold times a few factors. At a Plan whose outputs
differ from the float model's by e, the loss is L = e^T H e / 2. Another threshold for one channel changes its weights
by d and the outputs by about J d, where J is the Jacobian of the float model. So the loss changes by

    <J^T H e, d> + d^T J^T H J d / 2.

The first term, the *slope*, is exact to first order; it comes from gradients of <H e, outputs>. The second term is
estimated: for random v with E[v v^T] = H it is E[<J^T v, d>^2] / 2, and each chunk of samples gives one v. The products
<J^T v, d>, one per v, are the *sketch* of the change (in the sense of randomized linear algebra). The sketch of several
changes is the sum of their sketches, so that interactions between channels are included. A sketch is stored for the
error of each threshold against the float weight: the sketch of a change is the difference of two of these, and a single
one gives the loss of the channel alone, at any Plan.

`hago.search.point_refinement` makes one WeightScales for its point, and a copy for each refinement. In this order, it
adds the gradients of random vectors (`set_sketches`), asks for the best factor of each channel alone
(`best_factors_alone`), adds the gradients of the present error (`set_slopes`), asks for better factors of several
channels together (`improve_factors`), and has `thresholds` convert factors to thresholds.
`hago.search.choice_refinement` makes one for each point of `ChoicePoints`, and does without slopes.
`hago.search.sensitivity` uses the functions on errors of constants alone.

References:
    Rounding errors of weights do not cancel, so the nearest integers are not the best: M. Nagel et al., "Up or Down?
    Adaptive Rounding for Post-Training Quantization", ICML 2020. Here roundings change only through the thresholds,
    which every engine supports.
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
from hago.plan import Bits, Group, Plan
from hago.search.preparation import Prepared

#: Factors of the estimated threshold that are tried; the first, 1, stands for the estimated threshold itself.
FACTORS: Final = (1.0, *(f / 50 for f in range(40, 56) if f != 50))
#: The factors where scales are powers of two.
POWERS: Final = (1.0, 0.25, 0.5, 2.0)
#: The largest and the smallest length of a sketch, i.e. number of random vectors v; large networks have fewer. If there
#: are more chunks of samples, several share a v: their gradients are added up, which is sound since their signs are
#: independent.
SKETCHES: Final = 32
LEAST_SKETCHES: Final = 8
#: Number of values whose errors are computed at a time.
ERROR_BLOCK: Final = 1 << 15
#: Bytes of errors that are cached, since every round of refinement multiplies the same ones by other gradients.
KEPT_ERROR_BYTES: Final = 1 << 28
#: Bytes of gradients that are kept while a pass runs.
GRADIENT_BYTES: Final = 1 << 29
#: The second term of a change is multiplied by this: of many changes, the one with the lowest estimate is made, and its
#: estimate is likely too low.
DOUBT: Final = 1.25
#: The estimate of a channel's loss that takes the errors of its values for independent (`_Weight.apart`) counts as much
#: as this many entries of its sketch.
APART: Final = 4
#: Changes whose expected gain is less than this part of the loss are not made.
LEAST_GAIN_OF_SCALES: Final = 2e-3

#: By edge of a weight, the index of the factor of each channel.
FactorIndices = Mapping[Edge, Tensor]
#: By key of the group and grid, the thresholds (lo, hi).
WeightThresholds = dict[tuple[str, Grid], tuple[Tensor, Tensor]]


# ---------------------------------------------------------------- gradients of weights
@dataclass(slots=True)
class WeightGradients:
    """The gradients of weights in a pass over samples, summed over chunks. The pass calls `add`, which is passed to
    `gradients`, with the gradients of each chunk.

    Only sums are kept, since products of errors with gradients are linear in the gradients.

    Args:
        count: number of separate sums, to which the chunks are added in turn.
        edges: of the weights; the gradients of other constants are ignored.
        parts: number of parts of the samples, e.g. of a confirmation on samples kept aside; each has an equal share of
            the sums.
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
        """Empty sums for a pass with random vectors on the outputs.

        Args:
            chunks: the largest number of chunks of a part.
        """
        sizes = {g.edges[0]: prepared.graph.consts[g.source].numel() for g in of_constants(prepared)}
        room = GRADIENT_BYTES // (4 * max(1, sum(sizes.values())))
        count = min(SKETCHES, max(LEAST_SKETCHES, room), chunks * parts)
        return WeightGradients(max(1, count // parts) * parts, sizes.keys(), parts)

    @property
    def share(self) -> int:
        """The number of sums of one part."""
        return self.count // self.parts

    def columns(self, parts: Iterable[int]) -> list[int]:
        """The indices of the sums that belong to some parts."""
        return [part * self.share + i for part in parts for i in range(self.share)]

    def begin_part(self, part: int) -> None:
        """Start a part: the next gradients belong to it."""
        self._part = part
        self._chunks.clear()

    def add(self, edge: Edge, g: Tensor) -> None:
        """Add the gradients of one chunk."""
        if edge not in self.edges:
            return
        chunk = self._chunks.get(edge, 0)
        if edge not in self.sums:
            self.sums[edge] = torch.zeros(self.count, *g.shape)
        self.sums[edge][self._part * self.share + chunk % self.share] += g.detach()
        self._chunks[edge] = chunk + 1


#: By edge, the products of every error with every sum of gradients, float64 (channels C, factors J, sums K), and the
#: squares of the products of single values, summed over the sums of each part: float64 (C, J, parts).
Products = Mapping[Edge, tuple[Tensor, Tensor]]


# ---------------------------------------------------------------- the factors of all channels
@dataclass(slots=True)
class _Weight:
    """One weight, with C channels, J factors and K sketches.

    Args:
        key: of its group.
        exact: its float values, float64.
        grid, qparams: of the weight in the Plan that changes start from.
        ends: (lo, hi) of the estimated thresholds, float64 (C,).
        axis: of its channels; None where it has one threshold.
        sketch: float64 (C, J, K).
        apart: float64 (C, J), the sum of squares of a sketch if errors within a channel neither added up nor cancelled.
        slopes: float64 (C, J).
        barred: bool (C, J), whether a factor must not be chosen.
        floor: the smallest scale of each channel, of the shape of scales: where a scale was raised for a bias, that
            scale, since no threshold makes it smaller; else 0.
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
        """Reshape a tensor of the weight's shape to one row per channel, (C, n)."""
        return x.reshape(1, -1) if self.axis is None else x.movedim(self.axis, 0).reshape(x.shape[self.axis], -1)

    def scaled(self, factors: Tensor) -> tuple[Tensor, Tensor]:
        """The thresholds, multiplied by a factor for every channel."""
        return self.ends[0] * factors, self.ends[1] * factors

    def with_factor(self, factor: float) -> QParams:
        """The qparams with all thresholds multiplied by one factor."""
        shape, grid = self.qparams.scale.shape, self.grid
        lo, hi = (end.reshape(shape) for end in self.scaled(torch.full_like(self.ends[0], factor)))
        if grid.signed and grid.scheme not in TWO_SIDED:
            hi = torch.maximum(lo.abs(), hi)
            lo = -hi
        qparams = make_qparams(grid.scheme, lo, hi, grid.bits, self.qparams.dtype, power_of_two=grid.power_of_two)
        return replace(qparams, scale=torch.maximum(qparams.scale, self.floor))


class ErrorBlock(NamedTuple):
    """The errors of quantizing a part of a constant to J grids: float32 (rows, J, columns)."""

    rows: slice
    columns: slice
    errors: Tensor


@dataclass(slots=True)
class _ErrorCache:
    """The errors of weights at all factors, cached as long as there is room.

    Args:
        rounding: of the hardware.
        factors: of thresholds.
        room: bytes that may still be cached.
    """

    rounding: str
    factors: tuple[float, ...]
    room: int
    kept: dict[Edge, list[ErrorBlock]] = field(default_factory=dict)

    def __call__(self, edge: Edge, weight: _Weight) -> Iterable[ErrorBlock]:
        """The errors of one weight, block by block."""
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
    """The factors of the thresholds of all weights of a Plan, and their estimated effect on the loss.

    Args:
        weights: by edge.
        factors: of thresholds; the first is 1.
        errors: of every weight at every factor; copies share it.
    """

    weights: dict[Edge, _Weight]
    factors: tuple[float, ...]
    errors: _ErrorCache

    @staticmethod
    def of(prepared: Prepared, plan: Plan, bits: Bits, kept_bytes: int = 0) -> WeightScales:
        """The factors at a Plan, before any gradients are added.

        Args:
            bits: of the plan.
            kept_bytes: the size of the cache of errors; 0 if these are used once.
        """
        is_power_of_two = prepared.hardware.requantize.power_of_two
        factors = POWERS if is_power_of_two else FACTORS
        pairs = ((g, _weight(prepared, plan, g, bits, len(factors))) for g in of_constants(prepared))
        weights = {g.edges[0]: w for g, w in pairs if w is not None}
        return WeightScales(weights, factors, _ErrorCache(prepared.hardware.requantize.rounding, factors, kept_bytes))

    @staticmethod
    def of_none(prepared: Prepared) -> WeightScales:
        """No factors: of no weight."""
        return WeightScales({}, FACTORS, _ErrorCache(prepared.hardware.requantize.rounding, FACTORS, 0))

    @property
    def estimated_factors(self) -> dict[Edge, Tensor]:
        """The index of the estimated threshold for every channel."""
        return {edge: torch.zeros(len(w.ends[0]), dtype=torch.int64) for edge, w in self.weights.items()}

    def best_factors_alone(self, plan: Plan) -> dict[Edge, Tensor]:
        """Choose for every channel the factor with the least expected loss of that channel alone.

        Where an accumulator of the Plan is not proved to be free of overflow, no factor below 1 is chosen, since that
        makes integers larger.
        """
        small = torch.tensor(self.factors, dtype=torch.float64) < self.factors[0]
        chosen = {}
        for edge, weight in self.weights.items():
            share = APART / (APART + weight.sketch.shape[2])
            losses = weight.sketch.square().sum(2) * (1.0 - share) + weight.apart * share
            safe = edge.dst not in plan.nodes or plan.nodes[edge.dst].proved
            losses[weight.barred if safe else weight.barred | small] = torch.inf
            chosen[edge] = losses.argmin(1)
        return chosen

    def losses(self, chosen: FactorIndices) -> dict[Edge, float]:
        """Twice the expected loss of every weight, as `Gradients.weights` has it: the sum over its channels, each
        alone, and all samples of E[<J^T v, d>^2]."""
        return {
            edge: float(weight.sketch[torch.arange(len(chosen[edge])), chosen[edge]].square().sum())
            for edge, weight in self.weights.items()
        }

    def keep_unchanged_bits(self, bits: Bits) -> None:
        """Drop the weights that have other bits at the point `bits` than at the Plan."""
        self.weights = {edge: w for edge, w in self.weights.items() if w.grid.bits == bits[w.key]}

    def set_sketches_from_gradients(self, gradients: WeightGradients) -> None:
        """Set the sketches from the gradients of random vectors on the outputs."""
        self.set_sketches(self.products(gradients), gradients, range(gradients.parts))

    def products(self, gradients: WeightGradients) -> Products:
        """The products of the errors of every weight with the gradients of random vectors on the outputs."""
        reached = {edge: w for edge, w in self.weights.items() if edge in gradients.sums}
        return {
            e: error_products(self.errors(e, w), by_channel(gradients.sums[e], w.axis), gradients.parts)
            for e, w in reached.items()
        }

    def set_sketches(self, products: Products, gradients: WeightGradients, parts: Sequence[int]) -> None:
        """Set the sketches to the products with the sums of some parts of the gradients."""
        columns = gradients.columns(parts)
        for edge, weight in self.weights.items():
            if edge in products:
                product, squares = products[edge]
                # no copy where all columns are chosen
                weight.sketch = product if len(columns) == product.shape[2] else product[:, :, columns]
                weight.apart = squares[:, :, list(parts)].sum(2)
            else:
                weight.sketch = weight.slopes.new_zeros(*weight.slopes.shape, len(columns))

    def set_slopes(self, gradients: WeightGradients) -> None:
        """Set the slopes from the gradients of the present error of the outputs."""
        for edge, weight in self.weights.items():
            if edge in gradients.sums:
                sums = by_channel(gradients.sums[edge], weight.axis)
                weight.slopes = error_products(self.errors(edge, weight), sums)[0][:, :, 0]

    def bar_large_errors(self, limit: float) -> None:
        """Bar factors whose sum of squared errors in a channel exceeds `limit` times that of the estimated threshold.

        Gradients only show the effect of a weight's errors on the calibration samples; on other inputs, every error may
        have an effect.
        """
        for edge, weight in self.weights.items():
            rows = weight.rows(weight.exact)
            ones = torch.ones(1, 1, 1).expand(len(rows), 1, rows.shape[1])
            errors = error_products(self.errors(edge, weight), ones, 1)[1][:, :, 0]
            weight.barred |= errors > limit * errors[:, :1]

    def copy(self) -> WeightScales:
        """A copy with gradients and barred factors of its own, which shares the cache of errors."""
        weights = {edge: replace(w, barred=w.barred.clone()) for edge, w in self.weights.items()}
        return replace(self, weights=weights)

    def bar_smaller_thresholds(self, nodes: Collection[str], now: FactorIndices) -> None:
        """At nodes whose accumulators overflowed, bar thresholds below the present ones, since these make integers
        larger."""
        factors = torch.tensor(self.factors, dtype=torch.float64)
        for edge, weight in self.weights.items():
            if edge.dst in nodes:
                weight.barred |= factors < factors[now[edge]].unsqueeze(1)

    def improve_factors(self, now: FactorIndices, loss: float, share: float) -> dict[Edge, Tensor]:
        """Change the factors of some channels greedily: each step changes the channel that gains most given the changes
        before it.

        Args:
            now: the present factors.
            loss: the present loss of the outputs.
            share: the largest part of the loss to gain, since the expansion in gradients is only valid for small
                changes.
        """
        if not self.weights:
            return dict(now)
        sketch, alone, channels = self._changes(now)
        chosen = {edge: index.clone() for edge, index in now.items()}
        total, gained = torch.zeros(sketch.shape[1], dtype=torch.float64), 0.0
        while gained < share * loss:
            expected = alone + sketch @ total
            best = int(expected.argmin())
            if not float(expected[best]) < -LEAST_GAIN_OF_SCALES * loss:
                break
            gained -= float(expected[best])
            total = total + sketch[best]
            row, factor = divmod(best, len(self.factors))
            edge, channel = channels[row]
            chosen[edge][channel] = factor
            # every channel changes once
            alone[best - factor : best - factor + len(self.factors)] = torch.inf
        return chosen

    def _changes(self, now: FactorIndices) -> tuple[Tensor, Tensor, list[tuple[Edge, int]]]:
        """Every change of one channel from the present factors.

        Returns:
            The sketches of all changes, the expected change of the loss by each alone, infinite for a barred factor,
            and the channels. The changes of one channel, one per factor, are neighbours.
        """
        sketches, slopes, barred, channels = [], [], [], []
        for edge, weight in self.weights.items():
            row, index = torch.arange(len(now[edge])), now[edge]
            sketches.append((weight.sketch - weight.sketch[row, index].unsqueeze(1)).flatten(0, 1))
            slopes.append((weight.slopes - weight.slopes[row, index].unsqueeze(1)).flatten())
            barred.append(weight.barred.flatten())
            channels += [(edge, channel) for channel in range(len(index))]
        sketch = torch.cat(sketches)
        alone = torch.cat(slopes) + sketch.square().sum(1) * (DOUBT / 2)
        alone[torch.cat(barred)] = torch.inf
        return sketch, alone, channels

    def thresholds(self, chosen: FactorIndices) -> WeightThresholds:
        """The thresholds of the weights that have a channel with another factor than 1."""
        factors = torch.tensor(self.factors, dtype=torch.float64)
        return {
            (w.key, w.grid): w.scaled(factors[chosen[edge]])
            for edge, w in self.weights.items()
            if bool(chosen[edge].any())
        }


# ---------------------------------------------------------------- errors of constants
def by_channel(gradients: Tensor, axis: int | None) -> Tensor:
    """Reshape K gradients (K, *shape) to (C, K, n), for C channels along an axis of the shape; one channel if None."""
    if axis is None:
        return gradients.reshape(1, len(gradients), -1)
    channels = gradients.movedim(axis % (gradients.ndim - 1) + 1, 0)
    return channels.reshape(len(channels), len(gradients), -1)


def error_blocks(exact: Tensor, grids: Sequence[QParams], rounding: str) -> Iterator[ErrorBlock]:
    """Yield the errors of quantizing a constant to each of some grids, in float32.

    Large networks have hundreds of millions of weights, so the blocks are of a size that stays in a core's cache.

    Args:
        exact: (C, n).
        grids: each with one scale, with one per channel, or with one per group of a channel.
    """
    channels, length = exact.shape
    steps = [_steps(grid, exact.shape) for grid in grids]
    rows = max(1, ERROR_BLOCK // max(1, length))
    for top in range(0, channels, rows):
        block_rows = slice(top, top + rows)
        for left in range(0, length, ERROR_BLOCK):
            columns = slice(left, left + ERROR_BLOCK)
            x = exact[block_rows, columns].to(torch.float32)
            errors = torch.empty(len(x), len(grids), x.shape[1])
            for index, ends in enumerate(steps):
                of_rows = (t[block_rows] if len(t) > 1 else t for t in ends)
                scale, low, high = (t[:, columns] if t.shape[1] > 1 else t for t in of_rows)
                q = ROUNDINGS[rounding](x / scale)
                torch.sub(torch.minimum(torch.maximum(q, low), high).mul_(scale), x, out=errors[:, index])
            yield ErrorBlock(block_rows, columns, errors)


def error_products(blocks: Iterable[ErrorBlock], sums: Tensor, parts: int = 0) -> tuple[Tensor, Tensor]:
    """Products of the errors of a constant with sums of its gradients.

    Args:
        blocks: all errors of the constant on J grids.
        sums: of gradients, float32 (C, K, n).
        parts: number of parts of the sums, all of the same size, whose squares are added up; 0 for no squares.

    Returns:
        The products, float64 (C, J, K), and the squares of the products of single values, summed over the values and
        the sums of each part: float64 (C, J, parts).
    """
    products: list[Tensor] = []
    for rows, columns, errors in blocks:
        if not products:
            shape = len(sums), errors.shape[1]
            products = [torch.zeros(*shape, n, dtype=torch.float64) for n in (sums.shape[1], parts)]
        g = sums[rows, :, columns]
        products[0][rows] += torch.bmm(errors, g.transpose(1, 2))
        if parts:
            squares = g.square().view(len(g), parts, g.shape[1] // parts, g.shape[2]).sum(2)
            products[1][rows] += torch.bmm(errors.square(), squares.transpose(1, 2))
    return products[0], products[1]


def _steps(grid: QParams, shape: Sequence[int]) -> list[Tensor]:
    """The scale of a grid and the ends of its integers for rows (C, n), float32.

    Returns:
        Tensors of shape (1, 1), (C, 1), or (C, n) where groups have scales.
    """
    of_rows = grid.spread_over(shape)
    ends = (torch.as_tensor(t, dtype=torch.float32) for t in (of_rows.scale.to(torch.float32), *clip_range(of_rows)))
    return [t if grid.group is not None and t.numel() > 1 else t.reshape(-1, 1) for t in ends]


def of_constants(prepared: Prepared) -> list[Group]:
    """The groups that consist of the single edge of a constant."""
    return [g for g in prepared.space.groups.values() if len(g.edges) == 1 and g.source in prepared.graph.consts]


def own_ends(plan: Plan, group: Group) -> tuple[Tensor, Tensor] | None:
    """The thresholds of a constant, one per scale; None where it has none of its own, or one for each of its groups."""
    qparams, ends = plan.target(group.edges[0]), plan.thresholds.get(group.key)
    if qparams is None or ends is None or qparams.dtype.bits > 16 or ends[0].numel() != qparams.scale.numel():
        return None
    if qparams.group is not None:  # a sketch per group would take more memory than the network
        return None
    return ends


def _weight(prepared: Prepared, plan: Plan, group: Group, bits: Bits, count: int) -> _Weight | None:
    """The factors of one constant; None where it has no thresholds of its own.

    Args:
        count: number of factors.
    """
    qparams, ends = plan.target(group.edges[0]), own_ends(plan, group)
    if qparams is None or ends is None:
        return None
    scheme, power_of_two = prepared.hardware.weight.scheme, prepared.hardware.requantize.power_of_two
    signed = bool((qparams.qmin < qparams.zero_point).any())
    grid = Grid(bits[group.key], scheme, signed or qparams.dtype.signed, power_of_two)
    lo, hi = (end.reshape(-1).clone() for end in ends)
    axes = [i for i, size in enumerate(qparams.scale.shape) if size > 1]
    exact = prepared.graph.consts[group.source].to(torch.float64)
    axis = axes[0] if axes else None
    node, floor = plan.nodes.get(group.edges[0].dst), torch.zeros_like(qparams.scale)
    for channel in () if node is None else node.raised:
        floor.view(-1)[channel] = qparams.scale.reshape(-1)[channel]
    return _Weight(
        group.key,
        exact,
        grid,
        qparams,
        (lo, hi),
        axis,
        sketch=torch.zeros(len(lo), count, 0, dtype=torch.float64),
        apart=torch.zeros(len(lo), count, dtype=torch.float64),
        slopes=torch.zeros(len(lo), count, dtype=torch.float64),
        barred=torch.zeros(len(lo), count, dtype=torch.bool),
        floor=floor,
    )
