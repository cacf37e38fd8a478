"""Tail: what follows a sum in the same kernel, from the register to the values that readers ask for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hago.arithmetic.types import QParams
from hago.plan.plan import NodePlan
from hago.runtime.native import library as native
from hago.runtime.native.requantize import AS_IS, Moved, narrowed, period, spread, stored_type

#: Values that one kernel can store.
MOST_OUTPUTS = 3
_INT32 = torch.iinfo(torch.int32)


@dataclass(frozen=True, slots=True)
class Stored:
    """A value that a kernel stores: its name, how it is made, and in which qparams (None: real)."""

    name: str
    moved: Moved
    qparams: QParams | None

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self.qparams is None else self.qparams.dtype.torch


@dataclass(frozen=True, slots=True)
class Added:
    """The other operand of a sum: its value's name and qparams, how both operands are requantized first, what is
    done then (native.PLUS and so on), and what the register of the sum does."""

    name: str
    qparams: QParams
    own: Moved
    other: Moved
    sum: int
    register: native.Register


@dataclass(slots=True)
class Tail:
    """A chain in the making.

    Args:
        channels: how many values arrays hold; 1 where nothing varies.
        nodes: what the chain computes, in order.
        register: what it does to sums that leave it.
        limits: of a clamp after the sum, integers or one per channel; None where there is none.
    """

    channels: int
    nodes: list[str]
    register: native.Register = field(default_factory=native.Register)
    added: Added | None = None
    limits: tuple[Tensor, Tensor] | None = None
    stored: list[Stored] = field(default_factory=list)

    def clamp(self, low: object, high: object) -> None:
        """A clamp by centered integers (a number, one per channel, or None), after those there are already."""
        least, most = _limit(low, _INT32.min, self.channels), _limit(high, _INT32.max, self.channels)
        if self.limits is None:
            self.limits = (least, most)
        else:  # two clamps are one, whose limits are the images of the first one's
            first, last = (torch.minimum(torch.maximum(limit, least), most) for limit in self.limits)
            self.limits = (first, last)

    def clamp_stored(self, low: int | None, high: int | None) -> None:
        """A clamp of what is stored rather than of the sum."""
        self.stored = [Stored(s.name, narrowed(s.moved, low, high), s.qparams) for s in self.stored]

    def build(self) -> Built:
        """The structure that kernels read."""
        made = native.Tail(sums=self.register, outputs=len(self.stored))
        kept: list[Tensor] = []
        if self.limits is not None:
            made.clamps, made.clamp_low, made.clamp_high = 1, self.limits[0].data_ptr(), self.limits[1].data_ptr()
            kept += self.limits
        if self.added is not None:
            added = self.added
            made.adds, made.added = added.sum, added.register
            made.addend.own, made.addend.other = added.own.move, added.other.move
            made.addend.type, made.addend.zero = _place(added.qparams)
            kept += (*added.own.kept, *added.other.kept)
        for output, value in zip(made.output, self.stored, strict=False):
            output.move = value.moved.move
            output.type, output.zero = (native.TYPES["float32"], 0) if value.qparams is None else _place(value.qparams)
            kept += value.moved.kept
        return Built(made, tuple(kept), tuple(s.dtype for s in self.stored), period(self.channels))


@dataclass(frozen=True, slots=True)
class Built:
    """A tail without its addresses, the arrays it points into and their length, and the dtypes it stores."""

    template: native.Tail
    kept: tuple[Tensor, ...]
    dtypes: tuple[torch.dtype, ...]
    period: int

    def bound(self, outputs: Sequence[Tensor], stride: int, addend: Tensor | None = None) -> native.Tail:
        """A copy for one call, so that calls from several Python threads do not meet."""
        made = native.Tail.from_buffer_copy(self.template)
        for output, tensor in zip(made.output, outputs, strict=False):
            output.data, output.stride = tensor.data_ptr(), stride
        if addend is not None:
            made.addend.data, made.addend.stride = addend.data_ptr(), stride
        return made


def register_of(plan: NodePlan) -> native.Register | str:
    """What the register does to int32 sums, or why these cannot stand for it."""
    register = plan.desc.register
    if plan.pairs is not None:
        return "neighbouring products that may saturate"
    if plan.additions is not None:
        return "partial sums that may saturate"
    if plan.proved and (plan.bound < 2**31 or plan.within_hull):
        return native.Register()
    if not register.dtype.signed or bool(plan.register.zero_point.any()):
        return "an unsigned register"
    if register.overflow == "wrap" and register.dtype.bits <= 32:
        return native.Register(register.dtype.bits % 32)
    if register.overflow in ("saturate_end", "saturate_each") and plan.bound < 2**31 and register.dtype.bits <= 32:
        return native.Register(0, 1, register.dtype.min, register.dtype.max)
    if plan.proved:
        return "sums beyond int32"
    return f"a register of {register.dtype} that may overflow ({register.overflow})"


def sum_of(op: str, slot: int) -> int:
    """What an add or a sub is to its operand in a slot."""
    return native.PLUS if op == "add" else native.MINUS if slot == 0 else native.FROM


def raw(name: str, qparams: QParams) -> Stored | None:
    """A sum stored as it is; None where the kernels do not know its type."""
    return None if stored_type(qparams) is None else Stored(name, AS_IS, qparams)


def _limit(value: object, otherwise: int, channels: int) -> Tensor:
    given = otherwise if value is None else value
    made = torch.as_tensor(given, dtype=torch.int64).clamp(_INT32.min, _INT32.max)
    return spread(made.to(torch.int32), channels)


def _place(qparams: QParams) -> tuple[int, int]:
    code = stored_type(qparams)
    assert code is not None
    return code, int(qparams.zero_point)
