"""NodeBuilder: the plan of one integer node, from the bits of its operands and their producers.

In order: choose the signature, give every operand its qparams (`operands`), derive the accumulator,
bound it (`bounds`), and requantize at the output where the signature says so.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from hago.additions import additions_of
from hago.bounds import Bounds, largest_centered
from hago.errors import InfeasibleBits
from hago.graph import Node
from hago.hardware import OpDesc
from hago.numerics import apply_simq, dequantize
from hago.operands import Operands, Owner
from hago.ops._integer import Site
from hago.pairs import CUTS, Pairs, pairs_of
from hago.plan import NodePlan
from hago.topology import fitting_descs
from hago.types import QParams, SimQ


class NodeBuilder:
    """Builds the plan of one node; lives for one call of `build`.

    Args:
        bits: of each in-edge; None where it has none to choose.
        out_bits: of the output, where the node may requantize it.
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
        self.operands = Operands(owner, node, form, bits, sources)
        self.desc = self._select()

    def build(self) -> NodePlan:
        """The node's plan.

        Raises:
            InfeasibleBits: no signature holds the bits of operands and output.
        """
        targets = self.operands.targets(self.desc)
        simqs = tuple(self._simq(slot, t) for slot, t in enumerate(targets))
        made = self._requantized()
        site = Site(tuple(targets), made, self.owner.hardware.requantize)
        consts = {
            s: self.owner.const(self.node.inputs[s], t)
            for s, t in enumerate(targets)
            if t and self.operands.is_const(s)
        }
        register = self.operands.register(site, self.desc)
        attrs = self.form.integer_attrs(self.node.attrs, site)
        bounds = Bounds(self.owner.graph, self.node, self.form, attrs, targets, consts, self._limits(targets))
        bound = bounds.centered()
        out = register if made is None else made
        table = self._table(targets[0], out) if self.form.table else None
        out_simq = None if made is None or table is not None else SimQ(register, out)
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
            thresholds=self.operands.thresholds,
            saturated_biases=self._saturated(targets),
            digest=self._digest(simqs, out_simq, out),
            pairs=self._pairs(targets, consts),
            additions=additions_of(self.owner.ops[self.node.op], attrs, self.desc.register, bound),
            raised=self.operands.raised,
        )

    # ------------------------------------------------------------ signature
    def _select(self) -> OpDesc:
        descs = fitting_descs(self.owner.graph, self.node, self.owner.hardware, self.owner.ops)
        holding = [d for d in descs if self._holds(d)]
        # values move on in the dtype that they have, where a signature takes that
        holding = [d for d in holding if self.operands.reads_as_stored(d)] or holding
        if holding:
            # of signatures that differ in signs only, the first whose unsigned sides meet no negative value
            twins = [d for d in holding if d.widths == holding[0].widths]
            return next((d for d in twins if self.operands.signs_fit(d)), holding[0])
        operands = zip(self.node.inputs, self.bits, self.sources, strict=True)
        given = {name: q.dtype.name if b is None and q is not None else b for name, b, q in operands}
        asked = {name: what for name, what in given.items() if what is not None}
        out = "" if self.out_bits is None else f" and {self.out_bits} of its output"
        raise InfeasibleBits(
            f"no signature of {self.owner.hardware.name} for node {self.node.name!r} ({self.node.op}) holds bits "
            f"{asked}{out}; it has {'; '.join(map(str, descs))}",
            self.node.name,
        )

    def _holds(self, desc: OpDesc) -> bool:
        """Whether a signature can take every operand with its bits, and give the output with its."""
        chosen = desc.requantize_at == "output" and desc.fixed_out is None
        if chosen and self.out_bits is not None and self.out_bits > desc.out_dtype.bits:
            return False
        return all(self.operands.holds(desc, slot) for slot in range(len(self.node.inputs)))

    def _simq(self, slot: int, target: QParams | None) -> SimQ | None:
        source = self.sources[slot]
        return None if source is target else SimQ(source, target)

    # ------------------------------------------------------------ output
    def _requantized(self) -> QParams | None:
        """The output's own qparams; None where the node emits its accumulator."""
        fixed = self.operands.fixed(self.desc)
        if fixed is not None:
            return fixed
        if self.desc.requantize_at == "edge" or (self.out_bits is None and not self.form.table):
            return None
        assert self.out_bits is not None
        return self.operands.output(self.out_bits, self.desc)

    def _table(self, source: QParams | None, target: QParams) -> Tensor:
        """The centered output of every input integer q from qmin to qmax."""
        assert source is not None
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

    def _pairs(self, targets: Sequence[QParams | None], consts: Mapping[int, Tensor]) -> Pairs | None:
        product, overflow = self.form.product, self.desc.register.overflow
        if product is None or overflow not in CUTS:
            return None
        shapes = [self.owner.graph[s].shape or () for s in self.node.inputs]
        return pairs_of(product, self.node.attrs, targets, consts.get(1), shapes, overflow)

    def _saturated(self, targets: Sequence[QParams | None]) -> int:
        """Bias entries beyond their slot."""
        count = 0
        for slot, target in enumerate(targets):
            if target is not None and self.form.slot(slot) == "bias" and self.operands.is_const(slot):
                q = self.owner.graph.consts[self.node.inputs[slot]].to(torch.float64) / target.scale
                count += int(((q > target.qmax + 0.5) | (q < target.qmin - 0.5)).sum())
        return count

    def _digest(self, simqs: Sequence[SimQ | None], out_simq: SimQ | None, out: QParams) -> bytes:
        parts = [simq.key if simq else None for simq in simqs]
        said = (str(self.desc), self.desc.form, parts, out_simq.key if out_simq else None, out.key)
        return hashlib.sha256(repr(said).encode()).digest()
