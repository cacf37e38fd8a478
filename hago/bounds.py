"""Bounds: the largest accumulator that any input can cause, over the actual quantized weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor

from hago.graph import Graph, Node
from hago.numerics import EXACT_FLOAT32, extremes
from hago.ops._integer import IntegerForm, Operand
from hago.types import QParams

#: Into how many partial sums a convolution is split at most; beyond, it runs in float64.
MOST_PARTS: Final = 16


@dataclass(frozen=True, slots=True)
class Bounds:
    """Bounds of one integer node.

    Args:
        attrs: in integer units.
        targets: the qparams that operands arrive in.
        consts: centered integers of constant operands, by slot.
        limits: the largest |c| of each operand.
    """

    graph: Graph
    node: Node
    form: IntegerForm
    attrs: Mapping[str, Any]
    targets: Sequence[QParams | None]
    consts: Mapping[int, Tensor]
    limits: Sequence[float]

    def centered(self) -> float:
        """The largest |accumulator| of centered integers; 0 for a table, which has none."""
        if self.form.table:
            return 0.0
        return self._bound([self._operand(s, self.consts.get(s)) for s in range(len(self.targets))])

    def raw(self) -> float:
        """The same with zero points multiplied in, as a chip does that corrects for them at the end."""
        if self.form.table or all(t is None or not bool(t.zero_point.any()) for t in self.targets):
            return self.centered()
        return self._bound([self._raw(s, t) for s, t in enumerate(self.targets)])

    def parts(self) -> int:
        """The fewest parts of K whose sums all stay exact in float32; 1 where the whole does or none do."""
        if self.centered() < EXACT_FLOAT32 or self.form.split is None:
            return 1
        shapes = [self.graph[s].shape or () for s in self.node.inputs]
        whole = [self.consts.get(s, torch.empty(shape, device="meta")) for s, shape in enumerate(shapes)]
        for parts in range(2, MOST_PARTS + 1):
            chunks = self.form.split(self.attrs, whole, parts)
            if len(chunks) > 1 and all(self._chunk(c) < EXACT_FLOAT32 for c in chunks):
                return parts
        return 1

    def _bound(self, operands: Sequence[Operand]) -> float:
        return float(self.form.bound(self.attrs, operands).max())

    def _operand(self, slot: int, values: Tensor | None) -> Operand:
        largest = self.limits[slot]
        if values is not None:
            largest = max(map(abs, extremes(values)))
        shape = self.graph[self.node.inputs[slot]].shape or ()
        return Operand(values, torch.tensor(largest, dtype=torch.float64), shape)

    def _raw(self, slot: int, target: QParams | None) -> Operand:
        if target is None:
            return self._operand(slot, None)
        if slot in self.consts:
            c, zero = self.consts[slot], target.zero_point
            # in int64, since the small type that holds c need not hold q
            return self._operand(slot, c.to(torch.int64) + zero if bool(zero.any()) else c)
        largest = torch.tensor(float(max(abs(target.qmin), abs(target.qmax))), dtype=torch.float64)
        return replace(self._operand(slot, None), magnitude=largest)

    def _chunk(self, chunk: Sequence[Tensor]) -> float:
        operands = [
            replace(self._operand(slot, None if t.is_meta else t), shape=tuple(t.shape)) for slot, t in enumerate(chunk)
        ]
        return self._bound(operands)


def largest_centered(qparams: QParams) -> float:
    """The largest |q - zero_point|."""
    low = float((qparams.qmin - qparams.zero_point).abs().max())
    return max(low, float((qparams.qmax - qparams.zero_point).abs().max()))
