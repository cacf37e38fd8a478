"""relu: `max(x, 0)`; the scale passes through."""

import torch
from torch import Tensor

from hago.ops._rule import Attrs, IntegerForm, OpRule, Sample
from hago.ops._shared import arguments


def _compute(attrs: Attrs, x: Tensor) -> Tensor:
    return torch.relu(x)


RULE = OpRule(
    name="relu",
    aten=("aten.relu.default",),
    parse=arguments(("self",)),
    compute=_compute,
    integer=IntegerForm(slots=("follow",), accepts_per_channel="all", limits=lambda attrs: (0, None)),
    any_layout=True,
    clips_or_averages=True,
    samples=(Sample(torch.relu, ((2, 3, 4, 4),)), Sample(torch.relu, ((2, 5),))),
    aliases=("nn.relu",),
)
