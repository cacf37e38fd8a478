"""pixel_shuffle: blocks of `factor**2` channels laid out as pixels."""

import torch.nn.functional as F
from torch import Tensor

from hago.ops._rule import Attrs, Call, IntegerForm, OpRule, Parsed, Refusal, Sample


def _parse(call: Call) -> Parsed | None:
    return Parsed((call["self"],), {"factor": call["upscale_factor"]})


def _compute(attrs: Attrs, x: Tensor) -> Tensor:
    return F.pixel_shuffle(x, attrs["factor"])


RULE = OpRule(
    name="pixel_shuffle",
    aten=("aten.pixel_shuffle.default",),
    parse=_parse,
    compute=_compute,
    integer=IntegerForm(slots=("follow",)),
    moves_values=True,
    samples=(Sample(lambda x: F.pixel_shuffle(x, 2), ((2, 8, 3, 4),)),),
    refuses=(Refusal({"factor": 2}, ((1, 3, 4, 4),), "factor"),),
    aliases=("depth_to_space",),
)
