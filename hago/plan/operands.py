"""The qparams of every operand of an integer node.

The kind of a slot (`ops._rule.Slot`) says where the scale of its operand comes from:

    own      from the threshold of the slot's edge
    common   from the thresholds of all common slots of the node, which are brought to one scale (`_rectify`); narrow
             operands of the form `rescaled` keep their own
    follow   from the producer, whose integers are read as they are where the signature takes their dtype
    bias     the product of the scales of slots 0 and 1
    plain    none: the operand is not quantized

A `NodeBuilder` (`plan.resolve`) makes one `Operands` for each node plan that it builds, and `stored_weight` one for the
weight of a float node; `search.sensitivity` makes one for the grids of a weight. `qat.forward.LiveOperands` derives
from it for training, where thresholds take gradients.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Protocol

import torch
from torch import Tensor

from hago.arithmetic.groups import groups_of
from hago.arithmetic.numerics import largest_requantized
from hago.arithmetic.schemes import SMALLEST_SCALE, TWO_SIDED, Grid, make_qparams
from hago.arithmetic.types import INT8, INT16, INT32, ZERO, DType, QParams
from hago.graph import CONST, Graph, Node
from hago.hardware import Groups, Hardware, OpDesc
from hago.ops import IntegerForm, Ops, Site, finest_common_scale, is_narrow
from hago.plan.accumulators import largest_centered
from hago.plan.topology import Topology, passes_through, range_node

#: The most fraction bits under the coarsest operand that are kept when operands are brought to one scale inside a
#: node; 8-bit operands then stay below 2**24.
COMMON_FRACTION_BITS: Final = 15


class ThresholdSource(Protocol):
    """A source of thresholds, e.g. an estimator over statistics or a stored strategy; see `plan.threshold_sources`.

    Operands call it while a Plan is resolved, once for each operand that gets qparams of its own.
    """

    def signed(self, key: str, source: str) -> bool:
        """Whether values of node `source` were ever negative."""
        ...

    def __call__(self, key: str, source: str, grid: Grid, channel_axis: int | None) -> tuple[Tensor, Tensor]:
        """The threshold of the group `key`, which reads the value of node `source`.

        Args:
            grid: the bits, scheme, signedness and groups that the threshold is for.
            channel_axis: the axis of a constant along which each channel has a threshold of its own; None for one. 0 if
                the grid has groups.

        Returns:
            (lo, hi), the ends of the range in real units, float64 of shape (`grid.thresholds_of(...)`,): one for each
            group of each channel, for each channel, or one.
        """
        ...


class OperandContext(Protocol):
    """The owner of Operands: a Resolver, or a `qat.forward.LivePass` in training."""

    graph: Graph
    hardware: Hardware
    topology: Topology
    thresholds: ThresholdSource
    ops: Ops

    def intern(self, qparams: QParams) -> QParams:
        """The one object for equal qparams, so that equal qparams can be told by identity."""
        ...


@dataclass(slots=True)
class Operands:
    """The operands of one node; lives while its plan is built.

    The builder selects the signature with `takes_bits`, `reads_as_stored` and `signs_fit`, and then calls `targets` and
    `output` with it.

    Args:
        owner: has the graph, the hardware and the thresholds.
        form: the integer form of the node's op.
        bits: bits of each in-edge; None where the edge has no choice of bits.
        sources: qparams of each producer; None where its value is real.
        thresholds: the thresholds asked for so far, by group key.
        raised: channels of the weight whose scale was raised so that the bias fits; see `_with_room_for_bias`.
        multipliers: of the groups of the weight, int64 (channels, groups); None where groups have none.
    """

    owner: OperandContext
    node: Node
    form: IntegerForm
    bits: Sequence[int | None]
    sources: Sequence[QParams | None]
    thresholds: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    raised: tuple[int, ...] = ()
    multipliers: Tensor | None = None

    def is_const(self, slot: int) -> bool:
        """Whether an operand is a constant."""
        return self.owner.graph[self.node.inputs[slot]].op == CONST

    def passes(self, slot: int, desc: OpDesc) -> bool:
        """Whether a `follow` operand needs no requantization."""
        source = self.sources[slot]
        if source is None or self.form.slot(slot) != "follow":
            return False
        ndim = len(self.owner.graph[self.node.inputs[slot]].shape or ())
        return passes_through(self.form, source, desc.in_dtype(slot), ndim)

    def takes_bits(self, slot: int, desc: OpDesc, *, own: bool) -> bool:
        """Whether a signature takes an operand with its bits.

        Args:
            own: whether the bits were chosen for this operand, not for the output of its producer.
        """
        kind, bits, source = self.form.slot(slot), self.bits[slot], self.sources[slot]
        if self.passes(slot, desc):
            return True
        if bits is None:  # the operand arrives with the bits of its producer
            dtype = desc.in_dtype(slot)
            if kind == "common" and desc.requantize_at == "edge" and source is not None:
                return source.dtype.bits == dtype.bits
            return kind in ("bias", "plain", "common") or source is None or _stores(dtype, source)
        taken = desc.bits_of(desc.in_dtype(slot))
        # fewer where its producer has no more, or its bits are chosen for the producer
        fewer = not own or (source is not None and source.dtype.bits == bits)
        return bits in taken or (fewer and bits < taken[0])

    def reads_as_stored(self, desc: OpDesc) -> bool:
        """Whether a signature reads operands without bits of their own in the dtypes that their producers store."""
        stored = ((s, q) for s, q in enumerate(self.sources) if q is not None and self.bits[s] is None)
        return all(q.dtype == desc.in_dtype(s) for s, q in stored if self.form.slot(s) in ("own", "follow"))

    def signs_fit(self, desc: OpDesc) -> bool:
        """Whether operands and an output that a signature stores unsigned are never negative, and `follow` operands
        keep their dtype."""
        if not all(self._sign_fits_slot(slot, desc) for slot in range(len(self.sources))):
            return False
        if desc.out_dtype.signed or desc.requantize_at == "edge" or desc.fixed_out is not None:
            return True
        return not self.owner.thresholds.signed(f"{self.node.name}:out", self._range_node())

    def _keeps_scale(self, slot: int, dtype: DType) -> bool:
        """Whether a common operand of this dtype has a scale of its own, since the op rescales it."""
        return self.form.common is not None and self.form.slot(slot) == "common" and is_narrow(dtype)

    def _sign_fits_slot(self, slot: int, desc: OpDesc) -> bool:
        source = self.sources[slot]
        if source is not None and self.form.slot(slot) == "follow":
            return self.passes(slot, desc)
        if desc.in_dtype(slot).signed:
            return True
        if self.bits[slot] is not None:  # the edge requantizes what its producer gives
            return not self._is_signed(slot, desc.in_dtype(slot))
        return source is None or not bool((source.qmin < source.zero_point).any())

    def targets(self, desc: OpDesc) -> list[QParams | None]:
        """The qparams in which the node reads each operand; None for `plain` operands, which are not quantized."""
        slots = range(len(self.node.inputs))
        targets = [None if self.form.slot(s) in ("bias", "plain") else self._operand(s, desc) for s in slots]
        if "common" in self.form.slots:
            targets = self._rectify(targets, desc)
        for slot in slots:
            if self.form.slot(slot) == "bias":
                x, w = targets[0], targets[1]
                assert x is not None and w is not None
                targets[1] = w = self._with_room_for_bias(slot, x, w, desc)
                scale = self.form.scale(self.node.attrs, [x.scale, w.scale]).flatten()
                bias_scale = scale if scale.numel() > 1 else scale.reshape(())
                targets[slot] = self.full_range(bias_scale, desc.bias_dtype(slot))
        return targets

    def _with_room_for_bias(self, slot: int, x: QParams, w: QParams, desc: OpDesc) -> QParams:
        """The weight's qparams with the scale raised of every channel whose bias would take more than half of its
        accumulator, to where it takes half.

        A bias is an integer in units of `s_x * s_w`. Where training left a channel with weights near 0 and an ordinary
        bias, that integer fits no register, whatever the bits are; with a coarser scale the channel's weights, which
        hardly matter, lose precision, and the bias keeps 30 bits of 32.

        References:
            TensorFlow Lite's converter, `AdjustWeightsForBiasScale` (quantization_utils.cc), which also leaves the bias
            half of the range.
        """
        bias = self.bias(slot)
        if bias is None or not self.is_const(1) or not bias.numel():
            return w
        most = largest_requantized(desc.register.dtype, self.owner.hardware.requantize)
        room = min(desc.bias_dtype(slot).max, desc.register.dtype.max, most) / 2
        scale = self.form.scale(self.node.attrs, [x.scale.detach(), w.scale.detach()]).flatten()
        excess = (bias.abs() / scale / room).reshape(-1, w.scale.numel()).amax(0)
        if not bool((excess > 1.0).any()):
            return w
        if self.owner.hardware.requantize.power_of_two:
            raised = w.scale * torch.exp2(torch.ceil(torch.log2(excess.clamp_min(1.0)))).reshape(w.scale.shape)
        else:
            exact = w.scale * excess.reshape(w.scale.shape)
            near = exact.detach().to(torch.float32)
            above = torch.where(near >= exact.detach(), near, torch.nextafter(near, torch.full_like(near, torch.inf)))
            raised = above.to(torch.float64) + (exact - exact.detach())
        self.raised = tuple(int(c) for c in (excess > 1.0).nonzero().flatten())
        coarser = (excess > 1.0).reshape(w.scale.shape)
        return self.owner.intern(replace(w, scale=torch.where(coarser, raised, w.scale)))

    def bias(self, slot: int) -> Tensor | None:
        """The real values of a constant bias, float64 (channels,); None where it is computed."""
        if not self.is_const(slot):
            return None
        return self.owner.graph.consts[self.node.inputs[slot]].to(torch.float64).flatten()

    def register(self, site: Site, desc: OpDesc) -> QParams:
        """The qparams of the accumulator."""
        dtype, first = desc.register.dtype, site.operands[0]
        if self.form.requantizes_output:
            return self.full_range(site.target.scale, dtype)
        if self.form.common is not None:
            return self.full_range(self.form.common([q for q in site.operands if q is not None]).scale, dtype)
        scale = self.form.scale(self.node.attrs, site.scales)
        if self.form.outputs_fit_input_dtype and first is not None and first.dtype == dtype:
            # the op only moves values about, so they keep their zero point
            return self.owner.intern(replace(first, scale=scale))
        return self.full_range(scale, dtype)

    def fixed_output(self, desc: OpDesc) -> QParams | None:
        """The qparams of an output that the hardware fixes; None where the signature fixes none."""
        if desc.fixed_out is None:
            return None
        scale = torch.tensor(desc.fixed_out.scale, dtype=torch.float64)
        zero, dtype = torch.tensor(desc.fixed_out.zero_point), desc.out_dtype
        return self.owner.intern(QParams(scale, zero, dtype.min, dtype.max, dtype))

    def output(self, bits: int, desc: OpDesc) -> QParams:
        """The qparams that the node requantizes its output to, for a signature that requantizes at the output.

        Args:
            bits: of the output.
        """
        key, owner = f"{self.node.name}:out", self.owner
        name = self._range_node()
        scheme = owner.hardware.activation.scheme
        signed = desc.out_dtype.signed or owner.thresholds.signed(key, name)
        lo, hi = self.threshold(key, name, bits, scheme, signed, None)
        return self.qparams_of_range(scheme, lo, hi, bits, desc.out_dtype)

    def _range_node(self) -> str:
        owner = self.owner
        return range_node(owner.graph, owner.hardware, owner.topology, owner.ops, self.node.name)

    def _operand(self, slot: int, desc: OpDesc) -> QParams:
        source, bits, dtype = self.sources[slot], self.bits[slot], desc.in_dtype(slot)
        if bits is None or self.passes(slot, desc):
            assert source is not None
            if source.dtype == dtype:
                return source
            if self.form.slot(slot) != "common":  # another dtype takes the same integers
                return self.owner.intern(replace(source, dtype=dtype))
            # ranges that the user gives can ask for another sign
            if desc.requantize_at == "edge":
                return self.qparams_of_range(
                    self.owner.hardware.activation.scheme, *quantizable_ends(source), dtype.bits, dtype
                )
            return source
        if desc.groups is not None and self.form.weight is not None and self.form.weight.slot == slot:
            return self._joined(slot, bits, dtype, desc.groups)
        return self.quantized(slot, bits, dtype)

    def _joined(self, slot: int, bits: int, dtype: DType, groups: Groups) -> QParams:
        """The qparams of a weight whose integers are multiplied by those of their groups.

        The largest scale of a channel, or of the tensor, is that of the largest multiplier; the others have the nearest
        multiplier, half to even, and 1 at least.
        """
        of_groups, hardware = self.quantized(slot, bits, dtype, groups.size), self.owner.hardware
        top = groups.largest_multiplier(power_of_two=hardware.requantize.power_of_two)
        per_channel = hardware.weight.granularity == "per_channel"
        largest = of_groups.scale.amax(1) if per_channel else of_groups.scale.max()
        scale = (largest / top).clamp_min(SMALLEST_SCALE).to(torch.float32).to(torch.float64)
        self.multipliers = torch.round(of_groups.scale / scale.reshape(-1, 1)).clamp(1, top).to(torch.int64)
        shape = self.owner.graph[self.node.inputs[slot]].shape or ()
        scale = scale.reshape(-1, *[1] * (len(shape) - 1)) if per_channel else scale
        ends = of_groups.qmin * top, of_groups.qmax * top
        held = next(d for d in (INT8, INT16, INT32) if d.min <= ends[0] and ends[1] <= d.max)
        return self.owner.intern(QParams(scale, torch.zeros_like(scale, dtype=torch.int64), *ends, held))

    def quantized(self, slot: int, bits: int, dtype: DType, group: int | None = None) -> QParams:
        """The qparams of an operand that has a threshold of its own.

        Args:
            group: of a weight whose groups have scales of their own, the number of entries of a group.
        """
        name = self.node.inputs[slot]
        hardware = self.owner.hardware
        chosen = hardware.weight if self.is_const(slot) else hardware.activation
        # an operand as wide as an accumulator has no zero point in any engine
        scheme = chosen.scheme if dtype.bits <= 16 else "hago"
        weight, axis = self.form.weight, None
        shape = self.owner.graph[name].shape or ()
        ndim = len(shape)
        if group is not None:
            axis = 0
        elif self.is_const(slot) and chosen.granularity == "per_channel" and weight is not None and weight.slot == slot:
            axis = weight.axis % ndim
        lo, hi = self.threshold(
            str(self.node.edges[slot]), name, bits, scheme, dtype.signed or self._is_signed(slot, dtype), axis, group
        )
        if axis is not None:
            like = [-1 if d == axis else 1 for d in range(ndim)] if group is None else groups_of(shape, group)
            lo, hi = lo.reshape(like), hi.reshape(like)
        return self.qparams_of_range(scheme, lo, hi, bits, dtype, group)

    def qparams_of_range(
        self, scheme: str, lo: Tensor, hi: Tensor, bits: int, dtype: DType, group: int | None = None
    ) -> QParams:
        """The qparams of a range, as this hardware makes them."""
        power = self.owner.hardware.requantize.power_of_two
        return self.owner.intern(make_qparams(scheme, lo, hi, bits, dtype, power_of_two=power, group=group))

    def _is_signed(self, slot: int, dtype: DType) -> bool:
        """Whether an operand that is read in a dtype, or another that must share its scale, was ever negative."""
        slots = [slot]
        if self.form.slot(slot) == "common" and not self._keeps_scale(slot, dtype):
            slots = [s for s in range(len(self.node.inputs)) if self.form.slot(s) == "common"]
        return any(self._negative(s) for s in slots)

    def _negative(self, slot: int) -> bool:
        """Whether an operand was ever negative; where it has no bits of its own, whether its producer stores it as
        such."""
        source = self.sources[slot]
        if self.bits[slot] is None and source is not None:
            return bool((source.qmin < source.zero_point).any())
        return self.owner.thresholds.signed(str(self.node.edges[slot]), self.node.inputs[slot])

    def threshold(
        self, key: str, name: str, bits: int, scheme: str, signed: bool, axis: int | None, group: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """The thresholds of an edge: (lo, hi) of shape (), (channels,), or a vector with those of all groups of a
        weight. They are symmetric where the scheme is and `signed` is true."""
        grid = Grid(bits, scheme, signed, self.owner.hardware.requantize.power_of_two, group)
        lo, hi = self.owner.thresholds(key, name, grid, axis)
        self.thresholds[key] = (lo, hi)
        if axis is None:
            lo, hi = lo.reshape(()), hi.reshape(())
        if signed and scheme not in TWO_SIDED:
            hi = torch.maximum(lo.abs(), hi)
            lo = -hi
        return lo, hi

    def _rectify(self, targets: list[QParams | None], desc: OpDesc) -> list[QParams | None]:
        """Give all common operands one scale and zero point, with which none has a narrower range than it asked for.

        Args:
            targets: the qparams that each operand would have alone.

        Returns:
            The qparams of all operands, those of other slots unchanged.
        """
        slots = [s for s in range(len(targets)) if self.form.slot(s) == "common"]
        requested = [t for s in slots if (t := targets[s]) is not None]
        inside = desc.requantize_at == "output" and self.form.common is None
        if all(t is requested[0] for t in requested) and not (inside and self._exceeds(requested, desc.register.dtype)):
            return targets
        if self.form.common is not None:
            return self._rectify_wide(targets)
        scale = torch.stack([t.scale.max() for t in requested]).max()
        if inside:
            target = self._inside(requested, scale, desc.register.dtype)
            return [target if s in slots else t for s, t in enumerate(targets)]
        stored = [t for s, t in zip(slots, requested, strict=True) if self.bits[s] is None]
        coarsest = next((t for t in stored if bool((t.scale == scale).all())), None)
        if coarsest is not None:  # its producer covers what all operands hold
            return [coarsest if s in slots else t for s, t in enumerate(targets)]
        if len({int(t.zero_point) for t in requested}) > 1:
            union = self._union(slots, requested)
            return [union if s in slots else t for s, t in enumerate(targets)]
        return [
            self.owner.intern(replace(t, scale=scale)) if s in slots and t is not None else t
            for s, t in enumerate(targets)
        ]

    def _exceeds(self, requested: Sequence[QParams], register: DType) -> bool:
        """Whether common operands of one scale may exceed an accumulator."""
        return self._added(len(requested)) * max(map(largest_centered, requested)) > register.max

    def _added(self, operands: int) -> int:
        """How many of the common operands a value of the accumulator is the sum of."""
        return 1 if self.form.outputs_fit_input_dtype else operands

    def _inside(self, requested: Sequence[QParams], scale: Tensor, register: DType) -> QParams:
        """The qparams to which common operands are brought inside a node that requantizes its output.

        They have COMMON_FRACTION_BITS under the coarsest operand, or as many fewer as let the accumulator hold the sum
        of all operands, or the largest of them where the op only moves values. Where a narrow accumulator does not hold
        the sum of operands as they are, that is a negative number: operands lose their last bits, as on a chip that
        shifts them before it adds.

        Args:
            requested: the qparams that each operand would have alone.
            scale: the coarsest of their scales.
            register: of the accumulator.
        """
        largest = max(largest_centered(t) * float(t.scale.detach().max() / scale.detach()) for t in requested)
        most = register.max // self._added(len(requested))  # of each operand
        bits = min(COMMON_FRACTION_BITS, math.floor(math.log2(most / largest)))
        held = min(math.ceil(math.ldexp(largest, bits)), most)
        return self.owner.intern(QParams(scale * 2.0**-bits, ZERO, max(-held, register.min), held, register))

    def _rectify_wide(self, targets: Sequence[QParams | None]) -> list[QParams | None]:
        """Give all wide operands one scale, with which none has a narrower range than it asked for, and on which the
        narrow ones, which keep their own, do not exceed the bits of the sum."""
        scale = torch.stack([finest_common_scale(t).max() for t in targets if t is not None]).max()
        return [t if t is None or is_narrow(t.dtype) else self.owner.intern(replace(t, scale=scale)) for t in targets]

    def _union(self, slots: Sequence[int], requested: Sequence[QParams]) -> QParams:
        """The qparams that cover the ranges of all common operands, at the fewest bits of any. For affine operands,
        whose zero points differ.

        Args:
            slots: of the common operands.
            requested: the qparams that each of them would have alone.
        """
        stored = {s: quantizable_ends(t) for s, t in zip(slots, requested, strict=True) if self.bits[s] is None}
        pairs = [stored[s] if s in stored else self.thresholds[str(self.node.edges[s])] for s in slots]
        low = torch.stack([low.min() for low, _ in pairs]).min()
        high = torch.stack([high.max() for _, high in pairs]).max()
        bits = min(b for s in slots if (b := self.bits[s]) is not None)
        return self.qparams_of_range(self.owner.hardware.activation.scheme, low, high, bits, requested[0].dtype)

    def full_range(self, scale: Tensor, dtype: DType) -> QParams:
        """The qparams with the full range of a dtype and zero point 0."""
        return self.owner.intern(QParams(scale, ZERO, dtype.min, dtype.max, dtype))


def _stores(dtype: DType, qparams: QParams) -> bool:
    """Whether a dtype holds every integer of a tensor with these qparams."""
    return dtype.min <= qparams.qmin and qparams.qmax <= dtype.max


def quantizable_ends(qparams: QParams) -> tuple[Tensor, Tensor]:
    """The least and the greatest real value that a tensor with these qparams, of one scale, can hold."""
    scale, zero = qparams.scale.reshape(()), qparams.zero_point.reshape(())
    return (qparams.qmin - zero) * scale, (qparams.qmax - zero) * scale
