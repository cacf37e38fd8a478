"""The form of sums whose narrow operands are brought to the common scale inside the op.

A narrow operand, of at most 16 bits, is stored on a scale of its own; a wide one arrives on the common scale, as in the
form `common_scale`. The op requantizes every narrow operand as the chip requantizes (N3, N4 or N6 of docs/numerics.md),
so that a kernel reads bytes and rounds nothing else of them:

    a + b:    m(c_a, s_a / s) + m(c_b, s_b / s)                                                            (N17)

with m the requantization of the chip, and the identity of wide operands.

The common scale s is that of a wide operand. Without one, it is the largest of `s_i / 2**(23 - n_i)`, with n_i the bits
of the dtype, so that every operand has less than 24 bits; and wide operands take no finer one (`plan.operands`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import torch
from torch import Tensor

from hago.arithmetic.numerics import ratio, requantize
from hago.arithmetic.types import INT32, ZERO, DType, QParams
from hago.ops._rule import Attrs, IntegerForm, Operand, Site

#: The bits of an operand on the common scale, its sign aside: float32 holds the sum of two such operands.
COMMON_BITS: Final = 23
#: The bits of such a sum with its sign.
COMMON_SUM_BITS: Final = COMMON_BITS + 2
#: The most bits of an operand that keeps its own scale.
_NARROW: Final = 16
_LARGEST: Final = (1 << COMMON_BITS) - 1


def is_narrow(dtype: DType) -> bool:
    """Whether an operand of the form that is stored in this dtype keeps its own scale."""
    return dtype.bits <= _NARROW


def finest_common_scale(qparams: QParams) -> Tensor:
    """The finest common scale on which a narrow operand has at most `COMMON_BITS`; of a wide operand, its own scale."""
    return qparams.scale / (1 << (COMMON_BITS - qparams.dtype.bits)) if is_narrow(qparams.dtype) else qparams.scale


def common_qparams(operands: Sequence[QParams]) -> QParams:
    """The qparams of the integers that are added."""
    scale = next((q.scale for q in operands if not is_narrow(q.dtype)), None)
    if scale is None:
        scale = torch.stack([finest_common_scale(q) for q in operands]).max()
    return QParams(scale, ZERO, -_LARGEST, _LARGEST, INT32)


def rescaled_sum(add: Callable[[Tensor, Tensor], Tensor]) -> IntegerForm:
    """The form of an op that adds or subtracts two operands.

    Args:
        add: the op on integers of one scale.
    """

    def attrs_at(attrs: Attrs, site: Site) -> Attrs:
        operands = tuple(q for q in site.operands if q is not None)
        return {**attrs, "operands": operands, "common": common_qparams(operands), "how": site.how}

    def compute(attrs: Attrs, a: Tensor, b: Tensor) -> Tensor:
        moved = [
            requantize(c, q, attrs["common"], attrs["how"]) if is_narrow(q.dtype) else c
            for c, q in zip((a, b), attrs["operands"], strict=True)
        ]
        return add(*moved)

    def bound(attrs: Attrs, operands: Sequence[Operand]) -> Tensor:
        largest = [o.magnitude.max() for o in operands]
        for slot, q in enumerate(attrs["operands"]):
            if is_narrow(q.dtype):  # the ratio and the product are rounded, and so is the result
                above = torch.floor(largest[slot] * ratio(q, attrs["common"]).max() * (1 + 2**-20)) + 1
                largest[slot] = above.clamp_max(_LARGEST)
        return torch.stack(largest).sum()

    return IntegerForm(slots=("common",), compute=compute, attrs_at=attrs_at, bound=bound, common=common_qparams)
