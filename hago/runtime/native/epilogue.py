"""Epilogues: the operations that a kernel applies to its sums before it stores them.

In order: the overflow of the accumulator, the sum with another operand, a clamp, and a requantization for each output.
`FusedEpilogues` decides which nodes after a sum become part of its kernel; an `Epilogue` collects them; `build` makes
the structure that the C++ kernels read.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import torch
from torch import Tensor

from hago.arithmetic.types import QParams, SimQ
from hago.graph import Node
from hago.plan import NodePlan
from hago.runtime.native import library as native
from hago.runtime.native.layouts import RequestedLayouts
from hago.runtime.native.requantize import (
    AS_IS,
    Requantization,
    channel_axis,
    largest_of,
    narrowed,
    period,
    repeat_to_row,
    storage_format,
    stored_type,
    to_real,
)
from hago.runtime.native.weights import KernelConstantCache

#: The most outputs that one kernel can store.
MOST_OUTPUTS: Final = 3
_INT32: Final = torch.iinfo(torch.int32)


@dataclass(frozen=True, slots=True)
class StoredOutput:
    """A value that a kernel stores.

    Args:
        requantization: from the sum to the value.
        qparams: of the value; None for a real value.
    """

    name: str
    requantization: Requantization
    qparams: QParams | None

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self.qparams is None else self.qparams.dtype.torch


@dataclass(frozen=True, slots=True)
class AddedOperand:
    """The operand of a sum that the kernel reads besides its own.

    Args:
        name, qparams: of the operand as it is stored.
        own, other: the requantizations of the kernel's own operand and of this one, before the sum.
        sign: `native.PLUS`, `native.MINUS` or `native.FROM`.
        overflow: of the accumulator that holds the sum.
    """

    name: str
    qparams: QParams
    own: Requantization
    other: Requantization
    sign: int
    overflow: native.OverflowRule


@dataclass(slots=True)
class Epilogue:
    """The epilogue of one call, while it is collected.

    Args:
        channels: the size of the channel axis of the per-channel arrays; 1 if all are per tensor.
        nodes: the nodes that the call computes, in order.
        overflow: of the accumulator that holds the kernel's own sums.
        limits: of a clamp after the sum, one integer per entry of a row; None for no clamp.
    """

    channels: int
    nodes: list[str]
    overflow: native.OverflowRule = field(default_factory=native.OverflowRule)
    added: AddedOperand | None = None
    limits: tuple[Tensor, Tensor] | None = None
    stored: list[StoredOutput] = field(default_factory=list)

    def clamp(self, low: object, high: object) -> None:
        """Clamp the sum to centered integers (a number, one per channel, or None), after any clamp added before."""
        least, most = _limit(low, _INT32.min, self.channels), _limit(high, _INT32.max, self.channels)
        if self.limits is None:
            self.limits = (least, most)
        else:  # two clamps are one, whose limits are the images of the first one's
            first, last = (torch.minimum(torch.maximum(limit, least), most) for limit in self.limits)
            self.limits = (first, last)

    def clamp_stored(self, low: int | None, high: int | None) -> None:
        """Clamp the stored outputs instead of the sum."""
        self.stored = [replace(s, requantization=narrowed(s.requantization, low, high)) for s in self.stored]

    def build(self) -> BuiltEpilogue:
        """The structure that kernels read, without the addresses of one call."""
        template = native.EpilogueParams(sums=self.overflow, outputs=len(self.stored))
        kept: list[object] = []
        if self.limits is not None:
            low, high = self.limits
            template.clamps, template.clamp_low, template.clamp_high = 1, low.data_ptr(), high.data_ptr()
            kept += self.limits
        if self.added is not None:
            added = self.added
            template.adds, template.added = added.sign, added.overflow
            template.addend.own, template.addend.other = added.own.params, added.other.params
            template.addend.type, template.addend.zero = storage_format(added.qparams)
            kept += (*added.own.kept, *added.other.kept)
        for output, value in zip(template.output, self.stored, strict=False):
            real = native.TYPES["float32"], 0
            output.move = value.requantization.params
            output.type, output.zero = real if value.qparams is None else storage_format(value.qparams)
            kept += value.requantization.kept
        return BuiltEpilogue(template, tuple(kept), tuple(s.dtype for s in self.stored), period(self.channels))


@dataclass(frozen=True, slots=True)
class BuiltEpilogue:
    """An epilogue as the kernels read it, shared by all calls of one node.

    Args:
        template: the structure without the addresses of outputs.
        kept: the arrays that the structure points to.
        dtypes: of the outputs.
        period: the length of the per-channel arrays: the channels, repeated up to `native.ROW` entries.
    """

    template: native.EpilogueParams
    kept: tuple[object, ...]
    dtypes: tuple[torch.dtype, ...]
    period: int

    def bind(self, outputs: Sequence[Tensor], stride: int, addend: Tensor | None = None) -> native.EpilogueParams:
        """A copy of the structure for one call, so that several threads can call the same kernel at once.

        The caller keeps the tensors alive: the structure holds their addresses only.

        Args:
            stride: the entries from one row of the outputs and the addend to the next; 0 if the kernel passes over
                them as one row.
        """
        bound = native.EpilogueParams.from_buffer_copy(self.template)
        for output, tensor in zip(bound.output, outputs, strict=False):
            output.data, output.stride = tensor.data_ptr(), stride
        if addend is not None:
            bound.addend.data, bound.addend.stride = addend.data_ptr(), stride
        return bound


def overflow_rule(plan: NodePlan) -> native.OverflowRule | str:
    """What happens to int32 sums of a node that leave its register, or the reason why int32 sums do not have the
    values that the Plan prescribes."""
    register = plan.desc.register
    if plan.pairs is not None:
        return "neighbouring products that may saturate"
    if plan.additions is not None:
        return "partial sums that may saturate"
    if plan.group_sums is not None:
        return "sums of groups that may overflow"
    if plan.proved and (plan.bound < 2**31 or plan.keeps_input_dtype):
        return native.OverflowRule()
    if not register.dtype.signed:
        return "an unsigned register"
    if register.overflow == "wrap" and register.dtype.bits <= 32:
        return native.OverflowRule(register.dtype.bits % 32)
    if register.overflow in ("saturate_end", "saturate_each") and plan.bound < 2**31 and register.dtype.bits <= 32:
        return native.OverflowRule(0, 1, register.dtype.min, register.dtype.max)
    if plan.proved:
        return "sums beyond int32"
    return f"a register of {register.dtype} that may overflow ({register.overflow})"


def read_qparams(plan: NodePlan, slot: int) -> QParams | None:
    """The qparams in which the kernel of a sum reads an operand: those of the producer if the kernel requantizes it,
    else those of the operand."""
    simq = conversion_of_read(plan, slot)
    return plan.operands[slot] if simq is None else simq.source


def conversion_of_read(plan: NodePlan, slot: int) -> SimQ | None:
    """The requantization of an operand that the kernel of a sum reads: to the common scale, from that of the producer,
    or from that of the operand where it is narrow; None if it arrives on the common scale."""
    simq, rescaling = plan.simqs[slot], plan.rescaling(slot)
    return rescaling if rescaling is not None else None if simq is None or simq.source is None else simq


def conversion_of_sums(plan: NodePlan, slot: int) -> SimQ | None:
    """The same of an operand that the kernel computes, which is rounded as if it were stored."""
    simq, rescaling = plan.simqs[slot], plan.rescaling(slot)
    if rescaling is None or simq is None or simq.source is None:
        return conversion_of_read(plan, slot)
    return replace(simq, target=rescaling.target, via=simq.target)


def addition_sign(op: str, slot: int) -> int:
    """How an add or a sub combines its operand in `slot` with the other one."""
    return native.PLUS if op == "add" else native.MINUS if slot == 0 else native.FROM


def _limit(value: object, otherwise: int, channels: int) -> Tensor:
    given = otherwise if value is None else value
    limit = torch.as_tensor(given, dtype=torch.int64).clamp(_INT32.min, _INT32.max)
    return repeat_to_row(limit.to(torch.int32), channels)


# ---------------------------------------------------------------- fusion
class FusedEpilogues:
    """The epilogues of one Plan's kernels.

    A residual add, a clamp or a max pooling is fused into the kernel of a sum if it is the only reader of that sum,
    and the value is stored in all conversions that readers request, as far as one kernel can. Steps after the kernel
    make the others. Made by `Lowering`; the kernels call it when they emit their calls.

    Args:
        available: the values that earlier steps make; grows during lowering.
        constant_cache: caches requantizations.
    """

    def __init__(
        self, layouts: RequestedLayouts, available: Collection[str], constant_cache: KernelConstantCache
    ) -> None:
        self.layouts, self.plan, self.available, self.constant_cache = layouts, layouts.plan, available, constant_cache
        self.how = self.plan.hardware.requantize

    def after(self, node: Node, channels: int) -> Epilogue | None:
        """The epilogue of a kernel that computes the sums of `node`.

        Args:
            channels: the size of the axis along which the node's scale may vary.

        Returns:
            The epilogue; None if the kernel cannot store even the node's own value.
        """
        overflow = overflow_rule(self.plan.nodes[node.name])
        assert not isinstance(overflow, str)
        epilogue = Epilogue(channels, [node.name], overflow)
        end = node
        if self.plan.nodes[node.name].out_simq is None:
            end = self._fuse_add(epilogue, node)
        return epilogue if self.finish(epilogue, end) else None

    def pooled(self, epilogue: Epilogue) -> tuple[Node, Epilogue, Epilogue] | None:
        """The max pooling of images that is the only reader of an epilogue's only output, the epilogue without a clamp
        that the pooling applies instead, and the epilogue of the pooling; None if there is no such pooling."""
        end = self.layouts.only_reader(epilogue.nodes[-1])
        if end is None or end.op != "max_pool2d" or self.layouts.kernels[end.name].fuses_as != "max_pool":
            return None
        if len(epilogue.stored) != 1:
            return None
        (output,) = epilogue.stored
        if output.name != self.layouts.names[end.edges[0]] or output.qparams is None:
            return None
        # the maximum of clamped values is the clamped maximum
        later = epilogue.limits if output.requantization is AS_IS else None
        after = Epilogue(epilogue.channels, [end.name], limits=later)
        if not self.finish(after, end):
            return None
        return end, epilogue if later is None else replace(epilogue, limits=None), after

    def finish(self, epilogue: Epilogue, end: Node) -> bool:
        """Add the requantization at the output of `end`, a clamp that follows it, and the stored outputs.

        Returns:
            Whether there is an output that the kernel can store.
        """
        node_plan = self.plan.nodes[end.name]
        if node_plan.out_simq is not None:
            requantization = self._requantization(node_plan.out_simq, epilogue.channels, largest_result(node_plan))
            if requantization is None or stored_type(node_plan.out) is None:
                return False
            epilogue.stored = [StoredOutput(end.name, requantization, node_plan.out)]
        end = self._fuse_clamp(epilogue, end)
        if epilogue.stored:  # requantized at the output: further steps make the requested conversions
            epilogue.stored = [replace(epilogue.stored[0], name=end.name)]
        else:
            self._store(epilogue, end)
        return bool(epilogue.stored)

    def added_operand(self, epilogue: Epilogue, node: Node, slot: int) -> AddedOperand | None:
        """The operand of an add besides the one in `slot`, which the kernel has; None if the kernel cannot requantize
        one of them."""
        plan = self.plan.nodes[node.name]
        overflow = overflow_rule(plan)
        if isinstance(overflow, str):
            return None
        # the kernel of a pass reads both operands
        of_own = conversion_of_read if epilogue.nodes[-1] == node.name else conversion_of_sums
        requantizations: list[Requantization] = []
        for s, conversion in ((slot, of_own), (1 - slot, conversion_of_read)):
            simq = conversion(plan, s)
            source = self.plan.nodes.get(self.layouts.wiring.root(node.inputs[s]))
            # 0.0 is never used: only integers are requantized
            largest = largest_value(source) if source is not None else 0.0
            if simq is not None and simq.source is not None and simq.source is plan.operands[s]:
                largest = largest_of(simq.source)
            requantization = self.constant_cache.requantization(simq, self.how, epilogue.channels, largest)
            if isinstance(requantization, str):
                return None
            requantizations.append(requantization)
        qparams = read_qparams(plan, 1 - slot)
        if qparams is None or stored_type(qparams) is None:
            return None
        name, (own, other) = self.layouts.names[node.edges[1 - slot]], requantizations
        return AddedOperand(name, qparams, own, other, addition_sign(node.op, slot), overflow)

    def _fuse_add(self, epilogue: Epilogue, node: Node) -> Node:
        """Fuse the add that is the only reader of `node`, if an earlier step makes its other operand.

        Returns:
            The add, or `node` if it was not fused.
        """
        end = self.layouts.only_reader(node.name)
        if end is None or self.layouts.kernels[end.name].fuses_as != "add" or end.shape != node.shape:
            return node
        slot = 0 if self.layouts.wiring.root(end.inputs[0]) == node.name else 1
        if self.layouts.names[end.edges[1 - slot]] not in self.available or not self._along_one_axis(node, end):
            return node
        added, out = self.added_operand(epilogue, end, slot), self.plan.nodes[end.name]
        if added is None:
            return node
        simq = out.out_simq
        if simq is not None and self._requantization(simq, epilogue.channels, largest_result(out)) is None:
            return node
        epilogue.added = added
        epilogue.nodes.append(end.name)
        return end

    def _along_one_axis(self, node: Node, end: Node) -> bool:
        """Whether the scales of the operands of an add vary along the channels of `node` or not at all. Equal numbers
        of channels do not suffice."""
        rank, out = len(node.shape or ()), self.plan.nodes[end.name]
        slot = 0 if self.layouts.wiring.root(end.inputs[0]) == node.name else 1
        simqs = conversion_of_sums(out, slot), conversion_of_read(out, 1 - slot)
        sources = [s.source for s in simqs if s is not None]
        axes = {channel_axis(q.scale, rank) for q in sources if q is not None}
        return axes <= {None, channel_axis(self.plan.nodes[node.name].register.scale, rank)}

    def _fuse_clamp(self, epilogue: Epilogue, node: Node) -> Node:
        """Fuse the clamp that is the only reader of `node`, if its limits are known.

        Returns:
            The clamp, or `node` if it was not fused.
        """
        end = self.layouts.only_reader(node.name)
        if end is None or self.layouts.kernels[end.name].fuses_as != "clamp":
            return node
        if self.plan.edges[end.edges[0]] is not None:
            return node
        form, node_plan = self.plan.ops[end.op].integer, self.plan.nodes[end.name]
        assert form is not None and form.limits is not None
        limits = form.limits(node_plan.attrs)
        numbers = all(v is None or isinstance(v, int) for v in limits)
        fits = all(v is None or isinstance(v, int) or v.numel() in (1, epilogue.channels) for v in limits)
        if node_plan.out_simq is not None or stored_type(node_plan.out) is None or not fits:
            return node
        if not epilogue.stored:
            epilogue.clamp(*limits)
        elif numbers and node_plan.out.is_stored_as(self.plan.nodes[node.name].out):
            # the stored value keeps its qparams
            epilogue.clamp_stored(*limits)
        else:
            return node
        epilogue.nodes.append(end.name)
        return end

    def _store(self, epilogue: Epilogue, end: Node) -> None:
        """Store as many of the conversions that readers request as the kernel can."""
        node_plan = self.plan.nodes[end.name]
        requested = self.layouts.conversions(end.name) or {end.name: None}
        made = [self._stored(n, s, node_plan, epilogue.channels) for n, s in requested.items() if s is not None]
        stored = [m for m in made if m is not None]
        if end.name not in requested and len(stored) == len(requested) <= MOST_OUTPUTS:
            epilogue.stored = stored
            return
        own = _unchanged(end.name, node_plan.out)  # read as it is, or converted by later steps
        epilogue.stored = [] if own is None else [own, *stored][:MOST_OUTPUTS]

    def _stored(self, name: str, simq: SimQ, node_plan: NodePlan, channels: int) -> StoredOutput | None:
        if simq.target is None:
            assert simq.source is not None
            real = to_real(simq.source, channels)
            return None if isinstance(real, str) else StoredOutput(name, real, None)
        requantization = self._requantization(simq, channels, largest_value(node_plan))
        return None if requantization is None else StoredOutput(name, requantization, simq.target)

    def _requantization(self, simq: SimQ, channels: int, largest: float) -> Requantization | None:
        assert simq.source is not None and simq.target is not None
        if stored_type(simq.target) is None:
            return None
        requantization = self.constant_cache.requantization(simq, self.how, channels, largest)
        return None if isinstance(requantization, str) else requantization


def _unchanged(name: str, qparams: QParams) -> StoredOutput | None:
    """A sum that is stored without a change of scale; None if the kernels do not have its type."""
    return None if stored_type(qparams) is None else StoredOutput(name, AS_IS, qparams)


def largest_value(node_plan: NodePlan) -> float:
    """The largest |c| of a node's own value."""
    if node_plan.out_simq is None and node_plan.table is None:
        return largest_result(node_plan)
    return largest_of(node_plan.out)


def largest_result(node_plan: NodePlan) -> float:
    """The largest |c| of a node's result before its output is requantized."""
    type_limit = largest_of(node_plan.out if node_plan.out_simq is None else node_plan.register)
    return min(type_limit, node_plan.bound) if node_plan.proved and not node_plan.keeps_input_dtype else type_limit
