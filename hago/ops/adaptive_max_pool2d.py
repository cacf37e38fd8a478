"""adaptive_max_pool2d: 2-dimensional max pooling down to a given size."""

import torch
import torch.nn.functional as F
from torch import Tensor

from hago.ops._rule import Attrs, Call, IntegerForm, OpRule, Parsed, Refusal, Sample
from hago.ops._shared import has_ref, plain


def _parse(call: Call) -> Parsed | None:
    output = call["output_size"]
    if len(call.shape_of("self")) != 4 or has_ref(output) or call.item != 0:
        return None
    return Parsed((call["self"],), {"output_size": plain(output)})


def _compute(attrs: Attrs, x: Tensor) -> Tensor:
    return F.adaptive_max_pool2d(x, attrs["output_size"])


def _compute_int(attrs: Attrs, c: Tensor) -> Tensor:
    carrier = c if c.is_floating_point() else c.to(torch.float64)  # torch has no int64 kernel
    return _compute(attrs, carrier).to(c.dtype)


RULE = OpRule(
    name="adaptive_max_pool2d",
    aten=("aten.adaptive_max_pool2d.default",),
    parse=_parse,
    compute=_compute,
    integer=IntegerForm(slots=("follow",), compute=_compute_int, accepts_per_channel="axis1"),
    moves_values=True,
    samples=(
        Sample(lambda x: F.adaptive_max_pool2d(x, 1), ((2, 3, 8, 6),)),
        Sample(lambda x: F.adaptive_max_pool2d(x, (3, 4)), ((2, 3, 8, 6),)),
    ),
    refuses=(Refusal({"output_size": [2, 2, 2]}, ((1, 3, 8, 6),), "output_size"),),
    aliases=("nn.adaptive_max_pool2d",),
)
