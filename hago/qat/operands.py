"""Operands in training: live thresholds to qparams, by the rules of `hago.operands`, with gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from hago.hardware import OpDesc
from hago.operands import Operands
from hago.ops._integer import Site, Weight
from hago.qat.ranges import Range
from hago.schemes import TWO_SIDED, Grid, make_qparams
from hago.types import DType, QParams


@dataclass(slots=True)
class LiveOperands(Operands):
    """Operands whose thresholds may take gradients: the scale's is that of one proportional to its range.

    Args:
        ranges: of each in-edge; those that stand for the producer's own integers are the producer's.
        out: of the output, where it requantizes.
        shared: qparams made in this pass, so that edges of one range get one object.
        biases: their values now, by slot, float64 (channels,).
    """

    ranges: Sequence[Range | None] = ()
    out: Range | None = None
    shared: dict[tuple[int, int, str, bool], QParams] = field(default_factory=dict)
    biases: Mapping[int, Tensor] = field(default_factory=dict)

    def bias(self, slot: int) -> Tensor | None:
        return self.biases.get(slot)

    def quantized(self, slot: int, bits: int, dtype: DType) -> QParams:
        key = (id(self.ranges[slot]), bits, dtype.name, dtype.signed or self._signed(slot))
        found = self.shared.get(key)
        if found is None:
            found = self.shared[key] = Operands.quantized(self, slot, bits, dtype)
        else:
            self.thresholds[str(self.node.edges[slot])] = _ends(self.ranges[slot])
        return found

    def first(self, desc: OpDesc) -> QParams:
        """The qparams that the first operand arrives in, which do not depend on the others."""
        return self._operand(0, desc)

    def output(self, bits: int, desc: OpDesc) -> QParams:
        dtype = desc.out_dtype
        key = (id(self.out), bits, dtype.name, dtype.signed or (self.out is not None and self.out.signed))
        if key not in self.shared:
            self.shared[key] = Operands.output(self, bits, desc)
        return self.shared[key]

    def register(self, site: Site, desc: OpDesc) -> QParams:
        found, first = Operands.register(self, site, desc), site.operands[0]
        if first is None or found.scale is not first.scale or found.dtype != first.dtype:
            return found
        moved_only = (found.qmin, found.qmax) == (first.qmin, first.qmax) and found.zero_point is first.zero_point
        return first if moved_only else found

    def made(self, scheme: str, lo: Tensor, hi: Tensor, bits: int, dtype: DType) -> QParams:
        power = self.owner.hardware.requantize.power_of_two
        found = make_qparams(scheme, lo.detach(), hi.detach(), bits, dtype, power_of_two=power)
        if not (lo.requires_grad or hi.requires_grad):
            return found
        size = hi - lo if scheme in TWO_SIDED and not power else torch.maximum(lo.abs(), hi.abs())
        relative = size / torch.where(size > 0, size, torch.ones_like(size)).detach()
        return replace(found, scale=found.scale * torch.where(size > 0, relative, torch.ones_like(size)))


def _ends(found: Range | None) -> tuple[Tensor, Tensor]:
    assert found is not None
    return found.ends()


class RangeThresholds:
    """A ThresholdSource that reads ranges as they are when asked."""

    def __init__(self, ranges: Mapping[str, Range]) -> None:
        self._ranges = ranges

    def signed(self, key: str, source: str) -> bool:
        """Whether the range holds negative values."""
        return self._ranges[key].signed

    def __call__(self, key: str, source: str, grid: Grid, channel_axis: int | None) -> tuple[Tensor, Tensor]:
        """The range's ends, in memory of their own."""
        low, high = self._ranges[key].ends()
        return low.clone(), high.clone()


def extremes(value: Tensor, source: QParams | None, found: Range, weight: Weight | None) -> tuple[Tensor, Tensor]:
    """(low, high) of a value in real units, of shape (1,), or (channels,) where the range has channels."""
    x = value.detach()
    if found.low.numel() > 1:
        assert weight is not None
        rest = tuple(d for d in range(x.ndim) if d != weight.axis % x.ndim)
        return x.amin(rest), x.amax(rest)
    if source is None or source.scale.numel() == 1:
        low, high = (t.reshape(1).to(torch.float64) for t in torch.aminmax(x))
        step = 1.0 if source is None else source.scale.detach().reshape(1)
        return low * step, high * step
    scale = source.scale.detach()
    rest = tuple(d for d in range(x.ndim) if x.ndim - d > scale.ndim or scale.shape[d - x.ndim] == 1)
    return (x.amin(rest, True) * scale).amin().reshape(1), (x.amax(rest, True) * scale).amax().reshape(1)
