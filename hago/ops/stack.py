"""stack: operands joined along a new axis, all on one scale."""

import torch
from torch import Tensor

from hago.ops._rule import Attrs, IntegerForm, OpRule, Refusal, Sample
from hago.ops._shared import joined
from hago.ops.forms.requantizing import dequantized

_COMMON_SCALE = IntegerForm(slots=("common",))


def _compute(attrs: Attrs, *xs: Tensor) -> Tensor:
    return torch.stack(xs, attrs["axis"])


RULE = OpRule(
    name="stack",
    aten=("aten.stack.default",),
    parse=joined,
    compute=_compute,
    integer=_COMMON_SCALE,
    forms={"common_scale": _COMMON_SCALE, "dequantize": dequantized(_compute)},
    moves_values=True,
    samples=(
        Sample(lambda a, b: torch.stack([a, b], 1), ((2, 3, 4), (2, 3, 4))),
        Sample(lambda a, b, c: torch.stack([a, b, c], -1), ((2, 3), (2, 3), (2, 3))),
    ),
    refuses=(Refusal({"axis": 4}, ((1, 3), (1, 3)), "axis"), Refusal({"axis": 1}, ((1, 3), (1, 4)), "shape")),
)
