"""Sensitivity: the expected loss of every choice of bits, all from one pass over the data.

For an edge with gradients g and quantization errors d, the loss is E[sum g**2 d**2] / 2: errors of
elements (of weights: of output channels) and of edges are taken as independent, and small. What it
predicts is a guide for searchers; what counts is measured. The papers: `gradients`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from hago.arithmetic.types import Edge, QParams
from hago.caching import LRU
from hago.data.batches import Batch
from hago.errors import HagoError
from hago.plan.feasibility import ChoicePoints
from hago.plan.operands import Operands
from hago.plan.plan import Plan
from hago.plan.space import Bits, Group
from hago.search.gradients import (
    GRADIENT_CHUNK,
    Gradients,
    SeeConstant,
    Spectrum,
    channel_axis,
    gradients,
)
from hago.search.objective import SQUARED_ERROR, Curvature, Objective, decibels
from hago.search.prepare import Prepared
from hago.search.weight_scales import WeightGradients, by_channel, error_blocks, error_products
from hago.serialization.json_text import canonical, replace_file
from hago.serialization.text_table import number, table, tail

SENSITIVITY_VERSION: Final = 1
#: Bytes of errors of constants that are kept while the pass runs; others are worked out again.
ERROR_BYTES: Final = 1 << 28


def curvature_of(objective: Objective) -> Curvature:
    """The curvature of an objective; that of the squared error where nothing is known of it."""
    return SQUARED_ERROR if objective.curvature is None else objective.curvature


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """Expected losses, per sample.

    Args:
        objective: what they are losses of.
        measure: of what: "squared error" relative to the outputs' power, "divergence", or "cross entropy".
        samples: how many were differentiated.
        losses: by group, by bits.
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
        """The expected SQNR in dB, where that is what is measured."""
        return decibels(1.0, self.loss(bits)) if self.measure == SQUARED_ERROR.name else None

    def to_json(self) -> dict[str, Any]:
        """JSON values."""
        losses = {key: {str(b): x for b, x in by.items()} for key, by in self.losses.items()}
        parts = {"objective": self.objective, "measure": self.measure, "samples": self.samples}
        return {"version": SENSITIVITY_VERSION, **parts, "unreached": list(self.unreached), "losses": losses}

    def save(self, path: str | PathLike[str]) -> None:
        """Write it as JSON, whole or not at all.

        Raises:
            LogError: it could not be written.
        """
        replace_file(Path(path), canonical(self.to_json()) + "\n")

    def __str__(self) -> str:
        widths = sorted({b for by in self.losses.values() for b in by}, reverse=True)
        shown = [b for b in widths if b <= 8] or widths
        order = sorted(self.losses, key=lambda k: -self.losses[k][min(self.losses[k])])
        rows = [
            (tail(key, 44), *(number(self.losses[key].get(b)) for b in shown), "no gradient" * (key in self.unreached))
            for key in order
        ]
        titles = ("edge", *(f"{b} bits" for b in shown), "")
        head = f"expected {self.measure} of each choice, from {self.samples} samples; the most sensitive first"
        return "\n".join([head, "", *table(titles, rows, right=titles[1:-1])])


def sensitivity_of(
    prepared: Prepared,
    objective: Objective,
    seed: int = 0,
    chunk: int = GRADIENT_CHUNK,
    see: SeeConstant | None = None,
    settle: Callable[[Gradients], tuple[Prepared, Gradients]] | None = None,
    known: Collection[Edge] = (),
    batches: Iterable[Batch] | None = None,
    seen: Gradients | None = None,
    choices: int | None = None,
) -> Sensitivity:
    """The expected loss of every choice in the space.

    Args:
        seed: of the random signs.
        chunk: samples that are differentiated at once.
        see: hears of every constant's gradients.
        settle: what to go on with after the pass: the same with thresholds that it makes of what the pass saw, on
            whose grids losses of activations are; and what was seen, to which it may add losses of constants.
        known: constants whose losses it adds.
        batches: the data to differentiate; all by default.
        seen: what a pass saw already, with the losses of constants.
        choices: how many of each group, those of the most bits, are looked at; all by default. With a bit less each,
            the others are taken to lose four times as much.
    """
    curvature = curvature_of(objective)
    found = _Losses(prepared, choices)

    def errors(edge: Edge) -> Sequence[Tensor]:
        return () if edge in known else found.errors(edge)

    if seen is None:
        data, ranges = prepared.batches if batches is None else batches, prepared.calibration.ranges
        ops, probe = prepared.hardware.known_ops, curvature.probe
        seen = gradients(prepared.graph, data, ranges, probe, errors, ops, seed, chunk, see)
    if settle is not None:
        moved, seen = settle(seen)
        found.move(moved)
    unit = seen.signal if curvature.is_relative else float(seen.samples)
    groups = {key: group for key, group in prepared.space.groups.items() if not group.is_kind}
    losses = {key: found.of(group, seen, 2 * (unit or 1.0)) for key, group in groups.items()}
    return Sensitivity(objective.name, curvature.name, seen.samples, losses, tuple(found.unreached))


def gradients_by_part(
    prepared: Prepared,
    objective: Objective,
    seed: int,
    parts: Sequence[Batch],
    chunk: int,
    probes: WeightGradients,
    choices: int | None = None,
) -> list[Gradients]:
    """What one pass sees of each part of the samples. Losses of constants are those of sums of gradients, so that their
    errors are worked out once, not for every chunk.

    Args:
        probes: of as many parts; it keeps the gradients of weights.
        choices: see `sensitivity_of`.
    """
    graph, ops, found = prepared.graph, prepared.hardware.known_ops, list[Gradients]()
    losses = _Losses(prepared, choices)
    probe = curvature_of(objective).probe
    ranges, generator = prepared.calibration.ranges, torch.Generator().manual_seed(seed)

    def errors(edge: Edge) -> Sequence[Tensor]:
        return () if edge in probes.edges else losses.errors(edge)

    for index, part in enumerate(parts):
        probes.begin(index)
        found.append(gradients(graph, [part], ranges, probe, errors, ops, generator, chunk, probes.see))
    weights: list[dict[Edge, list[float]]] = [{} for _ in parts]
    for edge, sums in probes.sums.items():
        squares = losses.products(edge, sums).square().sum(0)
        for index, of in enumerate(weights):
            of[edge] = squares[:, probes.columns([index])].sum(1).tolist()
    return [replace(g, weights={**g.weights, **of}) for g, of in zip(found, weights, strict=True)]


class _Losses:
    """Losses from gradients, group by group; keeps a Plan for every rung of the choices that was asked for.

    Args:
        most: choices of each group that are looked at; None for all.
    """

    def __init__(self, prepared: Prepared, most: int | None = None) -> None:
        self.unreached: list[str] = []
        self.most = most
        self.move(prepared)
        self._errors: LRU[Edge, list[Tensor]] = LRU(ERROR_BYTES, lambda ts: sum(t.numel() * 4 for t in ts))

    def move(self, prepared: Prepared) -> None:
        """Go on with other thresholds."""
        self.prepared = prepared
        self.levels = ChoicePoints(prepared.resolver)

    def errors(self, edge: Edge) -> Sequence[Tensor]:
        """What each choice of bits does to the constant on an edge; nothing where there is no choice."""
        group = self.prepared.space.groups.get(str(edge))
        if group is None:
            return ()
        found = self._errors.get(edge)
        if found is None:
            exact = self.prepared.graph.consts[group.source].to(torch.float64)
            found = [(self._held(group, grid) - exact).to(torch.float32) for grid in self._grids(edge, group)]
            self._errors.put(edge, found)
        return found

    def products(self, edge: Edge, sums: Tensor) -> Tensor:
        """The errors of every choice in the constant on an edge times sums of its gradients: (channels, choices, K)."""
        prepared, group = self.prepared, self.prepared.space.groups[str(edge)]
        exact = prepared.graph.consts[group.source]
        axis = channel_axis(prepared.graph, edge, prepared.resolver.ops) if exact.ndim else None
        rows = exact.reshape(1, 1) if axis is None else exact.movedim(axis, 0).reshape(exact.shape[axis], -1)
        rounding = prepared.hardware.requantize.rounding
        blocks = error_blocks(rows, self._grids(edge, group), rounding)
        return error_products(blocks, by_channel(sums, axis), squares=False)[0]

    def _grids(self, edge: Edge, group: Group) -> list[QParams]:
        """What the constant on an edge is quantized to, choice by choice: a weight's grids do not need the Plans."""
        node, resolver = self.prepared.graph[edge.dst], self.prepared.resolver
        form = resolver.ops[node.op].integer
        plan = self.levels.plan(0, group.key).nodes.get(node.name)
        base = None if plan is None else plan.operands[edge.slot]
        if form is None or form.weight is None or form.weight.slot != edge.slot or base is None:
            rungs = range(len(group.choices[: self.most]))
            return [self._qparams(self.levels.plan(rung, group.key), group) for rung in rungs]
        alone: list[int | None] = [None] * len(node.inputs)
        alone[edge.slot] = group.choices[0]
        operands = Operands(resolver, node, form, alone, [None] * len(node.inputs))
        return [operands.quantized(edge.slot, bits, base.dtype) for bits in group.choices[: self.most]]

    def _held(self, group: Group, grid: QParams) -> Tensor:
        return self.prepared.resolver.const(group.source, grid).to(torch.float64) * grid.scale

    def of(self, group: Group, seen: Gradients, unit: float) -> dict[int, float]:
        """By bits; never less for fewer bits."""
        worst, found = 0.0, {}
        raw = {bits: self._loss(group, rung, seen) / unit for rung, bits in enumerate(group.choices[: self.most])}
        last = list(raw)[-1]
        raw |= {bits: raw[last] * 4.0 ** (last - bits) for bits in group.choices[len(raw) :]}
        if not any(raw.values()):
            self.unreached.append(group.key)
            raw = {bits: 4.0**-bits for bits in group.choices}
        for bits in group.choices:
            worst = max(worst, raw[bits])
            found[bits] = worst
        return found

    def _qparams(self, plan: Plan, group: Group) -> QParams:
        node, _, slot = group.key.rpartition(":")
        if slot == "out":
            return plan.nodes[node].out
        target = plan.target(Edge(node, int(slot)))
        if target is None:
            raise HagoError(f"group {group.key!r} has no grid; this is a defect of hago")
        return target

    def _loss(self, group: Group, rung: int, seen: Gradients) -> float:
        grid = self._qparams(self.levels.plan(rung, group.key), group)
        node, _, slot = group.key.rpartition(":")
        edges = self.prepared.graph.out_edges[node] if slot == "out" else (Edge(node, int(slot)),)
        total = sum(spectrum_loss(seen.spectra[e], grid) for e in edges if e in seen.spectra)
        return total + sum(seen.weights[e][rung] for e in edges if seen.weights.get(e))


def spectrum_loss(spectrum: Spectrum, qparams: QParams) -> float:
    """`sum g**2 d**2` over a spectrum, for the errors d of one grid.

    A grid finer than the bins makes an error of scale**2 / 12 within its range; a coarser one is
    applied to the middle of each bin, plus the spread within the bin.
    """
    scale, zero = float(qparams.scale.max()), float(qparams.zero_point.flatten()[0])
    low, high = (qparams.qmin - zero) * scale, (qparams.qmax - zero) * scale
    x, width = spectrum.centers, spectrum.width
    if scale <= width:
        inside = torch.full_like(x, scale**2 / 12)
    else:
        inside = (torch.round(x / scale) * scale - x).square() + width**2 / 12
    past: Tensor = (x - x.clamp(low, high)).square()
    return float((spectrum.mass * torch.where(past > scale**2 / 4, past, inside)).sum())
