"""Additions: registers that saturate at every addition, in the order in which the chip adds.

Many signal processors accumulate products in a register that clamps after each of them. The result depends on the
order of the additions, which the hardware file states together with the position of the bias:

    held = 0;  for each addend in order: held = saturate(held + addend)      (N15)

Addends are products of centered integers, or centered integers where the op has no weight. An addend of 0 leaves the
register unchanged, so zeros from padding may stand anywhere in the order. Only few outputs are computed step by step:
the sum of the magnitudes of all addends bounds every partial sum, and an output is clamped exactly where a partial
sum of its exact addends leaves the register.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor

from hago.hardware import Accumulator
from hago.numerics import EXACT_FLOAT32, Lost, saturate_each
from hago.ops._integer import Addends, TermsAt
from hago.ops._rule import OpRule

#: Addends that are held at once.
ENTRIES: Final = 1 << 21


@dataclass(frozen=True, slots=True, eq=False)
class Additions:
    """The sums of one node whose partial sums may leave the register.

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
        """What saturation at every addition changes in every accumulator.

        Memory: chunks of outputs that have at most ENTRIES addends together.

        Args:
            operands: centered integers in any carrier.
        """
        dtype = self.register.dtype
        limit = min(dtype.max, -dtype.min)
        # sums of magnitudes never shrink, so that float32 holds those below 2**24 exactly, and others stay above
        exact = torch.float32 if limit < EXACT_FLOAT32 else torch.float64
        magnitudes = self.compute(self.attrs, *(c.to(exact).abs() for c in operands))
        found = Lost(torch.zeros(magnitudes.shape, dtype=torch.int64), torch.zeros(magnitudes.shape).bool(), 0.0)
        candidates = torch.nonzero(magnitudes > limit)
        if not len(candidates):
            return found
        carrier = torch.int32 if float(magnitudes.max()) < 2**30 else torch.int64
        addends_at, peak = self._in_order([c.to(carrier) for c in operands]), 0.0
        depth = addends_at(candidates[:1].unbind(1)).shape[1]
        step = max(1, ENTRIES // max(depth, 1))
        for start in range(0, len(candidates), step):
            index = candidates[start : start + step].unbind(1)
            addends = addends_at(index)
            partial = addends.cumsum(1, dtype=carrier)
            high, low = partial.amax(1), partial.amin(1)
            peak = max(peak, float(high.max()) / dtype.max, float(low.min()) / min(dtype.min, -1))
            clamped = (high > dtype.max) | (low < dtype.min)
            held, place = saturate_each(addends[clamped].T.contiguous(), dtype), tuple(i[clamped] for i in index)
            found.amount[place] = (held - partial[clamped, -1]).to(torch.int64)
            found.cut[place] = True
        return replace(found, peak=peak)

    def _in_order(self, operands: Sequence[Tensor]) -> TermsAt:
        """The addends of outputs, biases included, in the order of additions."""
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
    """The sums of a node whose partial sums may leave the register.

    Args:
        rule: of the op, in the form that the hardware computes.
        attrs: in integer units.
        bound: the largest sum of the magnitudes of all addends that any input can cause.

    Returns:
        None where no input can make one leave it, where the op has a single addition, which is clamped as a whole, and
        where the register does something else.
    """
    addends = None if rule.integer is None else rule.integer.addends
    if register.overflow != "saturate_each" or addends is None or addends.terms is None:
        return None
    if register.dtype.signed and bound <= register.dtype.max:
        return None
    return Additions(addends, attrs, rule.compute_int, register)
