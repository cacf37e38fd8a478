"""concat: operands joined along an axis, all on one scale."""

import torch
from torch import Tensor

from hago.ops._rule import Attrs, IntegerForm, OpRule, Refusal, Sample
from hago.ops._shared import joined
from hago.ops.forms.requantizing import dequantized

_COMMON_SCALE = IntegerForm(slots=("common",))


def _compute(attrs: Attrs, *xs: Tensor) -> Tensor:
    axis = attrs["axis"]
    if axis in (1, -3) and all(x.ndim == 4 and x.is_contiguous(memory_format=torch.channels_last) for x in xs):
        # As they lie in memory channels are the last axis, along which torch copies rows; as they are it copies
        # value by value, which takes seven times as long.
        return torch.cat([x.permute(0, 2, 3, 1) for x in xs], 3).permute(0, 3, 1, 2)
    return torch.cat(xs, axis)


RULE = OpRule(
    name="concat",
    aten=("aten.cat.default",),
    parse=joined,
    compute=_compute,
    integer=_COMMON_SCALE,
    forms={"common_scale": _COMMON_SCALE, "dequantize": dequantized(_compute)},
    any_layout=True,
    moves_values=True,
    samples=(
        Sample(lambda a, b: torch.cat([a, b], 1), ((2, 3, 4, 4), (2, 2, 4, 4))),
        Sample(lambda a, b, c: torch.cat([a, b, c], -1), ((2, 3), (2, 4), (2, 5))),
    ),
    refuses=(Refusal({"axis": 1}, ((1, 3, 4), (1, 3, 5)), "axis"),),
    aliases=("concatenate",),
)
