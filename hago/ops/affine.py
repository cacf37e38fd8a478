"""affine: `x * w + b` with w and b per entry of axis 1; what a batch norm leaves that could not be folded.

Internal: no torch call means it. The attribute `rank` is that of x, which the output's scale needs. On
integers it is a 1x1 depthwise convolution.
"""

import math
from collections.abc import Sequence

from torch import Tensor

from hago.arithmetic.numerics import Order
from hago.ops._rule import Addends, Attrs, IntegerForm, Operand, OpRule, Refusal, TermsAt, Weight
from hago.ops._shared import mac_bound, unread

_WEIGHT = Weight(slot=1, axis=0)


def _along_axis_1(t: Tensor, rank: int) -> Tensor:
    return t.reshape(-1, *[1] * (rank - 2))


def _compute(attrs: Attrs, x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return x * _along_axis_1(w, x.ndim) + _along_axis_1(b, x.ndim)


def _scale(attrs: Attrs, scales: Sequence[Tensor]) -> Tensor:
    w = scales[1]
    return scales[0] * (_along_axis_1(w, attrs["rank"]) if w.numel() > 1 else w)


def _bound(attrs: Attrs, operands: Sequence[Operand]) -> Tensor:
    return _along_axis_1(mac_bound(operands, _WEIGHT, 1), len(operands[0].shape))


def _terms(attrs: Attrs, operands: Sequence[Tensor], order: Order) -> TermsAt:
    x, w = operands[:2]
    return lambda index: (x[index] * w[index[1]])[:, None]


def _macs(attrs: Attrs, shapes: Sequence[tuple[int, ...]], out: tuple[int, ...]) -> int:
    return math.prod(out)


RULE = OpRule(
    name="affine",
    aten=(),
    parse=unread,
    compute=_compute,
    integer=IntegerForm(
        slots=("own", "own", "bias"), scale=_scale, bound=_bound, weight=_WEIGHT, addends=Addends(_terms)
    ),
    macs=_macs,
    refuses=(Refusal({"rank": 4}, ((1, 3, 4, 4), (2,), (2,)), "shape"),),
)
