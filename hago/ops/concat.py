"""concat: operands joined along an axis, all on one scale."""

import torch
from torch import Tensor

from hago.ops._landing import dequantized
from hago.ops._rule import Attrs, IntegerForm, OpRule, Refusal, Sample
from hago.ops._rules import joined

_COMMON_SCALE = IntegerForm(slots=("common",))


def _compute(attrs: Attrs, *xs: Tensor) -> Tensor:
    return torch.cat(xs, attrs["axis"])


RULE = OpRule(
    name="concat",
    aten=("aten.cat.default",),
    parse=joined,
    compute=_compute,
    integer=_COMMON_SCALE,
    forms={"common_scale": _COMMON_SCALE, "dequantize": dequantized(_compute)},
    samples=(
        Sample(lambda a, b: torch.cat([a, b], 1), ((2, 3, 4, 4), (2, 2, 4, 4))),
        Sample(lambda a, b, c: torch.cat([a, b, c], -1), ((2, 3), (2, 4), (2, 5))),
    ),
    refuses=(Refusal({"axis": 1}, ((1, 3, 4), (1, 3, 5)), "axis"),),
    aliases=("concatenate",),
)
