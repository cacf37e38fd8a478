"""instance_norm: each channel of each image brought to mean 0 and variance 1; float everywhere."""

import torch.nn.functional as F
from torch import Tensor

from hago.ops._rule import Attrs, Call, OpRule, Parsed, Sample
from hago.ops._shared import arguments


def _parse(call: Call) -> Parsed | None:
    if not call["use_input_stats"]:
        return None  # running statistics: a batch norm by another name
    return arguments(("input", "weight", "bias"), ("eps",))(call)


def _compute(attrs: Attrs, x: Tensor, w: Tensor | None = None, b: Tensor | None = None) -> Tensor:
    return F.instance_norm(x, weight=w, bias=b, eps=attrs["eps"])


RULE = OpRule(
    name="instance_norm",
    aten=("aten.instance_norm.default",),
    parse=_parse,
    compute=_compute,
    samples=(
        Sample(lambda x: F.instance_norm(x), ((2, 4, 3, 3),)),
        Sample(
            lambda x, w, b: F.instance_norm(x, weight=w, bias=b, eps=1e-3),
            ((2, 4, 5), (4,), (4,)),
            consts=(1, 2),
        ),
    ),
    aliases=("nn.instance_norm",),
)
