"""NodeBuilder: the plan of one integer node, from the bits of its operands and their producers.

In order: choose the signature, give every operand its qparams by the kind of its slot, derive the
accumulator, bound it, and requantize at the output where the signature says so.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Final, Protocol

import torch
from torch import Tensor

from hago.bounds import Bounds, largest_centered
from hago.crossing import passes, range_node
from hago.errors import InfeasibleBits
from hago.graph import CONST, Graph, Node
from hago.hardware import Hardware, OpDesc
from hago.numerics import apply_simq, dequantize
from hago.ops import Ops
from hago.plan import NodePlan
from hago.schemes import TWO_SIDED, Grid, make_qparams
from hago.topology import Topology, fitting_descs
from hago.types import ZERO, DType, QParams, SimQ

#: Fraction bits kept under the coarsest operand when operands that have no bits of their own are
#: brought to one scale inside a node; 8-bit operands then stay below 2**24.
COMMON_FRACTION_BITS: Final = 15


class ThresholdSource(Protocol):
    """Where thresholds come from: an estimator over statistics, or a stored strategy."""

    def signed(self, key: str, source: str) -> bool:
        """Whether values of node `source` were ever negative."""
        ...

    def __call__(self, key: str, source: str, grid: Grid, channel_axis: int | None) -> tuple[Tensor, Tensor]:
        """(lo, hi), float64 of shape (channels,) or (1,), for the group `key` fed by node `source`."""
        ...


class Owner(Protocol):
    """What a builder needs of the Resolver that it works for."""

    graph: Graph
    hardware: Hardware
    topology: Topology
    thresholds: ThresholdSource
    ops: Ops

    def intern(self, qparams: QParams) -> QParams: ...

    def const(self, name: str, target: QParams) -> Tensor: ...


class NodeBuilder:
    """Builds the plan of one node; lives for one call of `build`.

    Args:
        bits: of each in-edge; None where it has none to choose.
        out_bits: of the output, where it requantizes.
        sources: qparams of each producer; None where it is real.
        magnitudes: the largest |c| of each producer.
    """

    def __init__(
        self,
        owner: Owner,
        node: Node,
        bits: Sequence[int | None],
        out_bits: int | None,
        sources: Sequence[QParams | None],
        magnitudes: Sequence[float],
    ) -> None:
        form = owner.ops[node.op].integer
        assert form is not None
        self.owner, self.node, self.form = owner, node, form
        self.bits, self.out_bits = bits, out_bits
        self.sources, self.magnitudes = sources, magnitudes
        self.thresholds: dict[str, tuple[Tensor, Tensor]] = {}
        self.desc = self._select()

    def build(self) -> NodePlan:
        """The node's plan.

        Raises:
            InfeasibleBits: no signature holds the bits.
        """
        targets = self._targets()
        simqs = tuple(self._simq(slot, t) for slot, t in enumerate(targets))
        scales = [torch.ones((), dtype=torch.float64) if t is None else t.scale for t in targets]
        consts = {s: self.owner.const(self.node.inputs[s], t) for s, t in enumerate(targets) if t and self._const(s)}
        register = self._register(targets, scales)
        attrs = self.form.attrs(self.node.attrs, scales)
        bounds = Bounds(self.owner.graph, self.node, self.form, attrs, targets, consts, self._limits(targets))
        bound = bounds.centered()
        out, out_simq, table = self._output(register, targets)
        return NodePlan(
            desc=self.desc,
            attrs=attrs,
            operands=tuple(targets),
            simqs=simqs,
            consts=consts,
            register=register,
            out_simq=out_simq,
            out=out,
            bound=bound,
            raw_bound=bounds.raw(),
            within_hull=self.form.within_hull and register.dtype == self.desc.in_dtype(0),
            parts=bounds.parts(),
            table=table,
            thresholds=self.thresholds,
            saturated_biases=self._saturated(targets),
            digest=self._digest(simqs, out_simq, out),
        )

    # ------------------------------------------------------------ signature
    def _select(self) -> OpDesc:
        descs = fitting_descs(self.owner.graph, self.node, self.owner.hardware, self.owner.ops)
        for desc in descs:
            if all(self._holds(desc, slot) for slot in range(len(self.node.inputs))):
                return desc
        asked = {self.node.inputs[s]: b for s, b in enumerate(self.bits) if b is not None}
        raise InfeasibleBits(
            f"no signature of {self.owner.hardware.name} for node {self.node.name!r} ({self.node.op}) holds bits "
            f"{asked}; it has {'; '.join(map(str, descs))}"
        )

    def _holds(self, desc: OpDesc, slot: int) -> bool:
        kind, bits, source = self.form.slot(slot), self.bits[slot], self.sources[slot]
        if kind == "follow" and source is not None and self._passes(slot, source, desc):
            return True
        if bits is None:
            same = source is None or source.dtype == desc.in_dtype(slot)
            return kind in ("bias", "plain", "common") or (same and kind == "own")
        return bits <= desc.in_dtype(slot).bits

    # ------------------------------------------------------------ operands
    def _targets(self) -> list[QParams | None]:
        """The qparams that every operand must arrive in; None for operands that stay as they are."""
        found: list[QParams | None] = []
        for slot in range(len(self.node.inputs)):
            kind = self.form.slot(slot)
            if kind in ("bias", "plain"):
                found.append(None)
            else:
                found.append(self._operand(slot))
        if "common" in self.form.slots:
            found = self._rectify(found)
        for slot in range(len(self.node.inputs)):
            if self.form.slot(slot) == "bias":
                x, w = found[0], found[1]
                assert x is not None and w is not None
                scale = self.form.scale(self.node.attrs, [x.scale, w.scale]).flatten()
                found[slot] = self._whole(scale if scale.numel() > 1 else scale.reshape(()), self.desc.bias_dtype(slot))
        return found

    def _operand(self, slot: int) -> QParams:
        source, bits = self.sources[slot], self.bits[slot]
        if source is not None and self.form.slot(slot) == "follow" and self._passes(slot, source, self.desc):
            return source
        if bits is None:
            assert source is not None
            return source
        return self._quantized(slot, bits, self.desc.in_dtype(slot))

    def _passes(self, slot: int, source: QParams, desc: OpDesc) -> bool:
        ndim = len(self.owner.graph[self.node.inputs[slot]].shape or ())
        return passes(self.form, source, desc.in_dtype(slot), ndim)

    def _quantized(self, slot: int, bits: int, dtype: DType) -> QParams:
        """From a threshold of the operand's own."""
        name = self.node.inputs[slot]
        hardware = self.owner.hardware
        chosen = hardware.weight if self._const(slot) else hardware.activation
        # an operand as wide as an accumulator has no zero point in any engine
        scheme = chosen.scheme if dtype.bits <= 16 else "hago"
        weight, axis = self.form.weight, None
        ndim = len(self.owner.graph[name].shape or ())
        if self._const(slot) and chosen.granularity == "per_channel" and weight is not None and weight.slot == slot:
            axis = weight.axis % ndim
        lo, hi = self._threshold(
            str(self.node.edges[slot]), name, bits, scheme, dtype.signed or self._signed(slot), axis
        )
        if axis is not None:
            shape = [-1 if d == axis else 1 for d in range(ndim)]
            lo, hi = lo.reshape(shape), hi.reshape(shape)
        return self._made(scheme, lo, hi, bits, dtype)

    def _made(self, scheme: str, lo: Tensor, hi: Tensor, bits: int, dtype: DType) -> QParams:
        power = self.owner.hardware.requantize.power_of_two
        return self.owner.intern(make_qparams(scheme, lo, hi, bits, dtype, power_of_two=power))

    def _signed(self, slot: int) -> bool:
        """Whether an operand, or one that must share its scale, was ever negative."""
        slots = [slot]
        if self.form.slot(slot) == "common":
            slots = [s for s in range(len(self.node.inputs)) if self.form.slot(s) == "common"]
        return any(self._negative(s) for s in slots)

    def _negative(self, slot: int) -> bool:
        """Whether an operand was ever negative: as its producer stores it, where it has no bits of its own."""
        source = self.sources[slot]
        if self.bits[slot] is None and source is not None:
            return bool((source.qmin < source.zero_point).any())
        return self.owner.thresholds.signed(str(self.node.edges[slot]), self.node.inputs[slot])

    def _threshold(
        self, key: str, name: str, bits: int, scheme: str, signed: bool, axis: int | None
    ) -> tuple[Tensor, Tensor]:
        """(lo, hi) of shape () or (channels,); lo is below 0 exactly where `signed`."""
        grid = Grid(bits, scheme, signed, self.owner.hardware.requantize.power_of_two)
        lo, hi = self.owner.thresholds(key, name, grid, axis)
        self.thresholds[key] = (lo, hi)
        if axis is None:
            lo, hi = lo.reshape(()), hi.reshape(())
        if signed and scheme not in TWO_SIDED:
            hi = torch.maximum(lo.abs(), hi)
            lo = -hi
        return lo, hi

    def _rectify(self, targets: list[QParams | None]) -> list[QParams | None]:
        """One scale and zero point for all common operands, so wide that none gets a narrower range."""
        slots = [s for s in range(len(targets)) if self.form.slot(s) == "common"]
        asked = [t for s in slots if (t := targets[s]) is not None]
        if all(t is asked[0] for t in asked):
            return targets
        scale = torch.stack([t.scale.max() for t in asked]).max()
        if self.desc.requantize_at == "output":
            fine = self._whole(scale / (1 << COMMON_FRACTION_BITS), self.desc.register.dtype)
            return [fine if s in slots else t for s, t in enumerate(targets)]
        if len({int(t.zero_point) for t in asked}) > 1:
            made = self._union(slots, asked)
            return [made if s in slots else t for s, t in enumerate(targets)]
        return [
            self.owner.intern(replace(t, scale=scale)) if s in slots and t is not None else t
            for s, t in enumerate(targets)
        ]

    def _union(self, slots: Sequence[int], asked: Sequence[QParams]) -> QParams:
        """Affine operands: the union of their ranges, at the fewest bits asked."""
        pairs = [self.thresholds[str(self.node.edges[s])] for s in slots]
        lo = torch.stack([lo.min() for lo, _ in pairs]).min()
        hi = torch.stack([hi.max() for _, hi in pairs]).max()
        bits = min(b for s in slots if (b := self.bits[s]) is not None)
        return self._made(self.owner.hardware.activation.scheme, lo, hi, bits, asked[0].dtype)

    def _whole(self, scale: Tensor, dtype: DType) -> QParams:
        """The full range of a dtype, zero point 0."""
        return self.owner.intern(QParams(scale, ZERO, dtype.min, dtype.max, dtype))

    def _simq(self, slot: int, target: QParams | None) -> SimQ | None:
        source = self.sources[slot]
        return None if source is target else SimQ(source, target)

    def _const(self, slot: int) -> bool:
        return self.owner.graph[self.node.inputs[slot]].op == CONST

    # ------------------------------------------------------------ accumulator and output
    def _register(self, targets: Sequence[QParams | None], scales: Sequence[Tensor]) -> QParams:
        scale = self.form.scale(self.node.attrs, scales)
        dtype = self.desc.register.dtype
        first = targets[0]
        if self.form.within_hull and first is not None and first.dtype == dtype:
            # the op only moves values about, so they keep their zero point
            return self.owner.intern(replace(first, scale=scale))
        return self._whole(scale, dtype)

    def _output(
        self, register: QParams, targets: Sequence[QParams | None]
    ) -> tuple[QParams, SimQ | None, Tensor | None]:
        if self.desc.requantize_at == "edge" or (self.out_bits is None and not self.form.table):
            return register, None, None
        key = f"{self.node.name}:out"
        assert self.out_bits is not None
        name = range_node(self.owner.graph, self.owner.topology, self.owner.ops, self.node.name)
        dtype = self.desc.out_dtype
        scheme = self.owner.hardware.activation.scheme
        signed = dtype.signed or self.owner.thresholds.signed(key, name)
        lo, hi = self._threshold(key, name, self.out_bits, scheme, signed, None)
        out = self._made(scheme, lo, hi, self.out_bits, dtype)
        if self.form.table:
            assert targets[0] is not None
            return out, None, self._table(targets[0], out)
        return out, SimQ(register, out), None

    def _table(self, source: QParams, target: QParams) -> Tensor:
        """The centered output of every input integer q from qmin to qmax."""
        q = torch.arange(source.qmin, source.qmax + 1, dtype=torch.float64) - source.zero_point
        others = [self.owner.graph.consts[name] for name in self.node.inputs[1:]]
        real = self.owner.ops[self.node.op].compute(self.node.attrs, dequantize(q, source), *others)
        return apply_simq(real, SimQ(None, target), self.owner.hardware.requantize).to(torch.int64)

    def _limits(self, targets: Sequence[QParams | None]) -> list[float]:
        """The largest |c| that each operand can hold: what its clipping, or its producer, lets through."""
        limits = []
        for target, source, magnitude in zip(targets, self.sources, self.magnitudes, strict=True):
            clip = 0.0 if target is None else largest_centered(target)
            limits.append(min(clip, magnitude) if source is target else clip)
        return limits

    def _saturated(self, targets: Sequence[QParams | None]) -> int:
        """Bias entries beyond their slot."""
        count = 0
        for slot, target in enumerate(targets):
            if target is not None and self.form.slot(slot) == "bias" and self._const(slot):
                q = self.owner.graph.consts[self.node.inputs[slot]].to(torch.float64) / target.scale
                count += int(((q > target.qmax + 0.5) | (q < target.qmin - 0.5)).sum())
        return count

    def _digest(self, simqs: Sequence[SimQ | None], out_simq: SimQ | None, out: QParams) -> bytes:
        parts = [simq.key if simq else None for simq in simqs]
        said = (str(self.desc), self.desc.form, parts, out_simq.key if out_simq else None, out.key)
        return hashlib.sha256(repr(said).encode()).digest()
