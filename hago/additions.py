"""Additions: registers that saturate at every addition, in the order in which a chip adds.

Many signal processors add products in a register that clamps after each of them. What such a register holds depends
on the order of the additions, which the hardware file states, and on where the bias comes in:

    held = 0;  for each addend in order: held = saturate(held + addend)      (N15)

Addends are products of centered integers, or centered integers where an op has no weight. An addend of 0 changes
nothing, so padding counts wherever it stands. The first sum without clamping that leaves the register is the first
that is clamped, and no sum is larger than that of the magnitudes of all addends: so what that sum shows to hold is not
looked at, and only what leaves the register on the way is added up step by step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from hago.hardware import Accumulator
from hago.numerics import Lost, saturate_each
from hago.ops._integer import Addends, TermsAt
from hago.ops._rule import OpRule

#: Addends that are held at once.
ENTRIES: Final = 1 << 21


@dataclass(frozen=True, slots=True, eq=False)
class Additions:
    """The sums of one node that its register may clamp on the way.

    Args:
        addends: what the op adds up.
        attrs: of the op, in integer units.
        compute: the op on centered integers, without a register.
        register: saturates at every addition.
    """

    addends: Addends
    attrs: Mapping[str, Any]
    compute: Callable[..., Tensor]
    register: Accumulator

    def lost(self, operands: Sequence[Tensor]) -> Lost:
        """What clamping on the way makes of every accumulator.

        Args:
            operands: centered integers in any carrier.
        """
        dtype = self.register.dtype
        magnitudes = self.compute(self.attrs, *(c.to(torch.float64).abs() for c in operands))
        largest = float(magnitudes.max()) if magnitudes.numel() else 0.0
        carrier = torch.int32 if largest < 2**31 else torch.int64
        addends_at = self._in_order([c.to(carrier) for c in operands])
        amount, cut, peak = torch.zeros(magnitudes.shape, dtype=torch.int64), torch.zeros(magnitudes.shape).bool(), 0.0
        risky = torch.nonzero(magnitudes > min(dtype.max, -dtype.min))
        depth = addends_at(risky[:1].unbind(1)).shape[1] if len(risky) else 1
        step = max(1, ENTRIES // max(depth, 1))
        for start in range(0, len(risky), step):
            index = risky[start : start + step].unbind(1)
            addends = addends_at(index)
            sums = addends.cumsum(1, dtype=carrier)
            high, low = sums.amax(1), sums.amin(1)
            peak = max(peak, float(high.max()) / dtype.max, float(low.min()) / min(dtype.min, -1))
            leaves = (high > dtype.max) | (low < dtype.min)
            where = tuple(i[leaves] for i in index)
            amount[where] = (saturate_each(addends[leaves].T.contiguous(), dtype) - sums[leaves, -1]).to(torch.int64)
            cut[where] = True
        return Lost(amount, cut, peak)

    def _in_order(self, operands: Sequence[Tensor]) -> TermsAt:
        """What is added where, with the biases, in the order of the register."""
        assert self.addends.terms is not None and self.register.order is not None
        terms_at = self.addends.terms(self.attrs, operands, self.register.order)
        if len(operands) < 3:
            return terms_at
        biases, axis = operands[2].flatten(), self.addends.bias_axis

        def addends_at(index: tuple[Tensor, ...]) -> Tensor:
            bias = biases[index[axis].remainder(len(biases))][:, None]  # one entry may stand for all
            terms = terms_at(index)
            return torch.cat([bias, terms] if self.register.bias == "first" else [terms, bias], 1)

        return addends_at


def additions_of(rule: OpRule, attrs: Mapping[str, Any], register: Accumulator, bound: float) -> Additions | None:
    """The sums of a node that may be clamped on the way; None where no input can make one leave its register, where
    one addition is all there is, and where registers do something else.

    Args:
        rule: of the op, in the form that the hardware computes.
        attrs: in integer units.
        bound: the largest sum of the magnitudes of all addends that any input can cause.
    """
    addends = None if rule.integer is None else rule.integer.addends
    if register.overflow != "saturate_each" or addends is None or addends.terms is None:
        return None
    if register.dtype.signed and bound <= register.dtype.max:
        return None
    return Additions(addends, attrs, rule.compute_int, register)
