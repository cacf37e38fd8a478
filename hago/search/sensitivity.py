"""Sensitivity: the expected loss of every choice of bits, all from one pass over the data.

For an edge with gradients g and quantization errors d, the expected loss is E[sum g**2 d**2] / 2. Errors of different
elements (in weights: of different output channels) and of different edges are assumed to be independent and small.
`search.guidance` makes a Surrogate of the losses, by which searchers choose points; `hago.measure_sensitivity` returns
them as a table. For the papers see `hago.search.gradients`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from hago.arithmetic.types import Edge, QParams
from hago.caching import LRU
from hago.data import Batch
from hago.errors import HagoError
from hago.graph import takes_any_batch
from hago.plan import Bits, Group, Operands, Plan
from hago.plan.feasibility import ChoicePoints
from hago.search.gradients import (
    GRADIENT_CHUNK,
    Gradients,
    OnGradients,
    Spectrum,
    channel_axis,
    gradients,
)
from hago.search.objective import SQUARED_ERROR, Curvature, Objective, decibels
from hago.search.preparation import Prepared
from hago.search.weight_scales import WeightGradients, by_channel, error_blocks, error_products
from hago.serialization.json_text import canonical, replace_file
from hago.serialization.summary import Summarized, Summary, names_text
from hago.serialization.text_table import counted, keep_end, number, table, tail

SENSITIVITY_VERSION: Final = 1
#: Bytes of errors of constants that are cached while the pass runs.
ERROR_BYTES: Final = 1 << 28


def curvature_of(objective: Objective) -> Curvature:
    """The curvature of an objective; that of the squared error if the objective has none."""
    return SQUARED_ERROR if objective.curvature is None else objective.curvature


@dataclass(frozen=True, slots=True, repr=False)
class Sensitivity(Summarized):
    """The expected losses of all choices, per sample; made by `sensitivity_from` and printed as a table.

    Args:
        objective: name of the objective.
        measure: of the loss: "squared error" relative to the power of the outputs, "divergence", or "cross entropy".
        samples: number of samples that were differentiated.
        losses: by key of the group and number of bits.
        unreached: groups that no gradient reaches; their losses are relative squared errors.
    """

    objective: str
    measure: str
    samples: int
    losses: Mapping[str, Mapping[int, float]]
    unreached: tuple[str, ...] = ()

    def loss(self, bits: Bits) -> float:
        """The expected loss of a point: the sum over its groups."""
        return math.fsum(self.losses[key][b] for key, b in bits.items() if key in self.losses)

    def predicted(self, bits: Bits) -> float | None:
        """The expected SQNR of a point in dB; None where the loss is not the squared error."""
        return decibels(1.0, self.loss(bits)) if self.measure == SQUARED_ERROR.name else None

    def to_json(self) -> dict[str, Any]:
        """The sensitivity as JSON values."""
        losses = {key: {str(b): x for b, x in by.items()} for key, by in self.losses.items()}
        parts = {"objective": self.objective, "measure": self.measure, "samples": self.samples}
        return {"version": SENSITIVITY_VERSION, **parts, "unreached": list(self.unreached), "losses": losses}

    def save(self, path: str | PathLike[str]) -> None:
        """Write the sensitivity as a JSON file, which is replaced atomically.

        Raises:
            LogError: it could not be written.
        """
        replace_file(Path(path), canonical(self.to_json()) + "\n")

    def summary(self) -> Summary:
        """The groups of edges that lose the most, and those that no gradient reaches."""
        return Summary(
            f"Sensitivity of {counted(len(self.losses), 'group')} of edges: {self.measure}, "
            f"from {counted(self.samples, 'sample')}",
            {
                "objective": self.objective,
                "most sensitive": names_text(self._by_loss()),
                "no gradient": names_text(self.unreached),
            },
        )

    def _by_loss(self) -> list[str]:
        """The keys of the groups, the most sensitive first."""
        return sorted(self.losses, key=lambda k: -self.losses[k][min(self.losses[k])])

    def __str__(self) -> str:
        widths = sorted({b for by in self.losses.values() for b in by}, reverse=True)
        shown = [b for b in widths if b <= 8] or widths
        rows = [
            (tail(key, 44), *(number(self.losses[key].get(b)) for b in shown), "no gradient" * (key in self.unreached))
            for key in self._by_loss()
        ]
        titles = ("edge", *(f"{b} bits" for b in shown), "")
        head = (
            f"expected {self.measure} of each choice, from {counted(self.samples, 'sample')}; the most sensitive first"
        )
        return "\n".join([head, "", *table(titles, rows, right=titles[1:-1], narrow=[{"edge": keep_end}])])


def sensitivity_of(prepared: Prepared, objective: Objective, seed: int = 0) -> Sensitivity:
    """The expected loss of every choice in the space, from one pass over the data.

    Args:
        seed: of the random signs.
    """
    chunk = GRADIENT_CHUNK
    if not takes_any_batch(prepared.graph, prepared.hardware.known_ops):
        chunk = max(batch.size for batch in prepared.batches)
    return sensitivity_from(gradients_of_choices(prepared, objective, seed, chunk), prepared, objective)


def gradients_of_choices(
    prepared: Prepared,
    objective: Objective,
    seed: int,
    chunk: int = GRADIENT_CHUNK,
    batches: Iterable[Batch] | None = None,
    *,
    known: Collection[Edge] = (),
    on_constant: OnGradients | None = None,
    choices: int | None = None,
) -> Gradients:
    """The gradients on all edges, and the losses of constants at every choice, from one pass.

    Args:
        seed: of the random signs.
        chunk: number of samples that are differentiated at once.
        batches: the data to differentiate; by default the calibration data.
        known: constants whose losses are left out, since the caller computes them.
        on_constant: called with the gradients of every constant, once per chunk.
        choices: number of choices of each constant whose losses are computed, from the most bits down; all by default.
    """
    losses = _Losses(prepared, choices)

    def errors(edge: Edge) -> Sequence[Tensor]:
        return () if edge in known else losses.errors(edge)

    data, ranges = prepared.batches if batches is None else batches, _ranges_of_choices(prepared)
    ops, probe = prepared.hardware.known_ops, curvature_of(objective).probe
    return gradients(
        prepared.graph, data, ranges, probe, errors, ops=ops, seed=seed, chunk=chunk, on_constant=on_constant
    )


def sensitivity_from(
    gradients: Gradients, prepared: Prepared, objective: Objective, choices: int | None = None
) -> Sensitivity:
    """The expected loss of every choice in the space, from gradients that were measured before.

    Args:
        prepared: with the thresholds that losses of activations are computed for. Those of constants are in the
            gradients.
        choices: number of choices of each group that are computed, from the most bits down; all by default. Every
            further choice is taken to lose four times as much per bit less.
    """
    curvature, computed = curvature_of(objective), _Losses(prepared, choices)
    unit = gradients.signal if curvature.is_relative else float(gradients.samples)
    groups = {key: group for key, group in prepared.space.groups.items() if not group.is_kind}
    losses = {key: computed.of(group, gradients, 2 * (unit or 1.0)) for key, group in groups.items()}
    return Sensitivity(objective.name, curvature.name, gradients.samples, losses, tuple(computed.unreached))


def gradients_by_part(
    prepared: Prepared,
    objective: Objective,
    seed: int,
    parts: Sequence[Batch],
    chunk: int,
    probes: WeightGradients,
    choices: int | None = None,
) -> list[Gradients]:
    """The gradients of each part of the samples, from one pass.

    Losses of constants come from sums of gradients, so that their errors are computed once instead of per chunk.

    Args:
        probes: of as many parts; it keeps the gradients of weights.
        choices: see `sensitivity_from`.
    """
    graph, ops, by_part = prepared.graph, prepared.hardware.known_ops, list[Gradients]()
    losses = _Losses(prepared, choices)
    probe = curvature_of(objective).probe
    ranges, generator = _ranges_of_choices(prepared), torch.Generator().manual_seed(seed)

    def errors(edge: Edge) -> Sequence[Tensor]:
        return () if edge in probes.edges else losses.errors(edge)

    for index, part in enumerate(parts):
        probes.begin_part(index)
        by_part.append(
            gradients(
                graph, [part], ranges, probe, errors, ops=ops, seed=generator, chunk=chunk, on_constant=probes.add
            )
        )
    weights: list[dict[Edge, list[float]]] = [{} for _ in parts]
    for edge, sums in probes.sums.items():
        squares = losses.products(edge, sums).square().sum(0)
        for index, of in enumerate(weights):
            of[edge] = squares[:, probes.columns([index])].sum(1).tolist()
    return [replace(g, weights={**g.weights, **of}) for g, of in zip(by_part, weights, strict=True)]


def _ranges_of_choices(prepared: Prepared) -> dict[str, tuple[float, float]]:
    """The ranges of the nodes whose values have a choice of bits: the edges of no others need a spectrum."""
    graph, sources = prepared.graph, set[str]()
    for key, group in prepared.space.groups.items():
        node, _, slot = key.rpartition(":")
        sources |= {node} if slot == "out" else {graph.source(edge) for edge in group.edges}
    return {name: ends for name, ends in prepared.calibration.counted_ranges.items() if name in sources}


class _Losses:
    """Computes losses from gradients, group by group. The Plans of choices, and errors of constants, are cached.

    Args:
        most_choices: number of choices of each group that are computed; None for all.
    """

    def __init__(self, prepared: Prepared, most_choices: int | None = None) -> None:
        self.unreached: list[str] = []
        self.most_choices, self.prepared = most_choices, prepared
        self.choice_points = ChoicePoints(prepared.resolver)
        self._errors: LRU[Edge, list[Tensor]] = LRU(ERROR_BYTES, lambda ts: sum(t.numel() * 4 for t in ts))

    def errors(self, edge: Edge) -> Sequence[Tensor]:
        """The errors of the constant on an edge at each choice of bits; empty if there is no choice."""
        group = self.prepared.space.groups.get(str(edge))
        if group is None or self.most_choices == 0:
            return ()
        errors = self._errors.get(edge)
        if errors is None:
            exact = self.prepared.graph.consts[group.source].to(torch.float64)
            errors = [(self._quantized(group, grid) - exact).to(torch.float32) for grid in self._grids(edge, group)]
            self._errors.put(edge, errors)
        return errors

    def products(self, edge: Edge, sums: Tensor) -> Tensor:
        """The errors of every choice in the constant on an edge times sums of its gradients: (channels, choices, K)."""
        prepared, group = self.prepared, self.prepared.space.groups[str(edge)]
        exact = prepared.graph.consts[group.source]
        axis = channel_axis(prepared.graph, edge, prepared.resolver.ops) if exact.ndim else None
        rows = exact.reshape(1, 1) if axis is None else exact.movedim(axis, 0).reshape(exact.shape[axis], -1)
        rounding = prepared.hardware.requantize.rounding
        blocks = error_blocks(rows, self._grids(edge, group), rounding)
        return error_products(blocks, by_channel(sums, axis))[0]

    def _grids(self, edge: Edge, group: Group) -> list[QParams]:
        """The qparams of the constant on an edge at each choice. One Plan is enough for an op's weight, whose qparams
        depend on no other operand."""
        node, resolver = self.prepared.graph[edge.dst], self.prepared.resolver
        form = resolver.ops[node.op].integer
        plan = self.choice_points.plan(0, group.key).nodes.get(node.name)
        widest_qparams = None if plan is None or plan.groups is not None else plan.operands[edge.slot]
        if form is None or form.weight is None or form.weight.slot != edge.slot or widest_qparams is None:
            indices = range(len(group.choices[: self.most_choices]))
            return [self._qparams(self.choice_points.plan(index, group.key), group) for index in indices]
        bits_of_operands: list[int | None] = [None] * len(node.inputs)
        bits_of_operands[edge.slot] = group.choices[0]
        operands = Operands(resolver, node, form, bits_of_operands, [None] * len(node.inputs))
        return [
            operands.quantized(edge.slot, bits, widest_qparams.dtype) for bits in group.choices[: self.most_choices]
        ]

    def _quantized(self, group: Group, grid: QParams) -> Tensor:
        integers = self.prepared.resolver.const(group.source, grid).to(torch.float64)
        return integers * grid.spread_over(integers.shape).scale

    def of(self, group: Group, measured: Gradients, unit: float) -> dict[int, float]:
        """The losses of a group by bits, made monotonic: fewer bits never lose less.

        Args:
            unit: the losses are divided by it.
        """
        largest, losses = 0.0, {}
        by_bits = {
            bits: self._loss(group, index, measured) / unit
            for index, bits in enumerate(group.choices[: self.most_choices])
        }
        fewest = list(by_bits)[-1]
        by_bits |= {bits: by_bits[fewest] * 4.0 ** (fewest - bits) for bits in group.choices[len(by_bits) :]}
        if not any(by_bits.values()):
            self.unreached.append(group.key)
            by_bits = {bits: 4.0**-bits for bits in group.choices}
        for bits in group.choices:
            largest = max(largest, by_bits[bits])
            losses[bits] = largest
        return losses

    def _qparams(self, plan: Plan, group: Group) -> QParams:
        node, _, slot = group.key.rpartition(":")
        if slot == "out":
            return plan.nodes[node].out
        target = plan.target(Edge(node, int(slot)))
        if target is None:
            raise HagoError(f"group {group.key!r} has no grid; this is a defect of hago")
        return target

    def _loss(self, group: Group, index: int, measured: Gradients) -> float:
        grid = self._qparams(self.choice_points.plan(index, group.key), group)
        node, _, slot = group.key.rpartition(":")
        edges = self.prepared.graph.out_edges[node] if slot == "out" else (Edge(node, int(slot)),)
        total = sum(spectrum_loss(measured.spectra[e], grid) for e in edges if e in measured.spectra)
        return total + sum(measured.weights[e][index] for e in edges if measured.weights.get(e))


def spectrum_loss(spectrum: Spectrum, qparams: QParams) -> float:
    """`sum g**2 d**2` over a spectrum, for the errors d of one grid.

    A grid finer than the bins makes an error of scale**2 / 12 within its range; a coarser one is
    applied to the middle of each bin, plus the spread within the bin.
    """
    scale, zero = float(qparams.scale.max()), float(qparams.zero_point.flatten()[0])
    low, high = (qparams.qmin - zero) * scale, (qparams.qmax - zero) * scale
    x, width = spectrum.centers, spectrum.width
    if scale <= width:
        rounding_error = torch.full_like(x, scale**2 / 12)
    else:
        rounding_error = (torch.round(x / scale) * scale - x).square() + width**2 / 12
    clipping_error: Tensor = (x - x.clamp(low, high)).square()
    return float((spectrum.mass * torch.where(clipping_error > scale**2 / 4, clipping_error, rounding_error)).sum())
