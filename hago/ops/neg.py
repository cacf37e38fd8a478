"""neg: `-x`; the scale passes through."""

import torch
from torch import Tensor

from hago.ops._rule import ONE_ADDITION, Attrs, IntegerForm, OpRule, Sample
from hago.ops._shared import arguments, magnitude_bound
from hago.ops.forms.requantizing import dequantized


def _compute(attrs: Attrs, x: Tensor) -> Tensor:
    return torch.neg(x)


RULE = OpRule(
    name="neg",
    aten=("aten.neg.default",),
    parse=arguments(("self",)),
    compute=_compute,
    integer=IntegerForm(slots=("follow",), bound=magnitude_bound, accepts_per_channel="all", addends=ONE_ADDITION),
    forms={"dequantize": dequantized(_compute)},
    any_layout=True,
    samples=(Sample(torch.neg, ((2, 3, 4, 4),)), Sample(torch.neg, ((2, 5),))),
    aliases=("negative",),
)
