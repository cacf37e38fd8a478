"""group_norm: groups of channels brought to mean 0 and variance 1, then weight and bias; float everywhere."""

import torch.nn.functional as F
from torch import Tensor

from hago.ops._rule import Attrs, OpRule, Refusal, Sample
from hago.ops._shared import arguments


def _compute(attrs: Attrs, x: Tensor, w: Tensor | None = None, b: Tensor | None = None) -> Tensor:
    return F.group_norm(x, attrs["num_groups"], w, b, attrs["eps"])


RULE = OpRule(
    name="group_norm",
    aten=("aten.group_norm.default",),
    parse=arguments(("input", "weight", "bias"), ("num_groups", "eps")),
    compute=_compute,
    samples=(
        Sample(lambda x, w, b: F.group_norm(x, 2, w, b), ((2, 4, 3, 3), (4,), (4,)), consts=(1, 2)),
        Sample(lambda x: F.group_norm(x, 4, eps=1e-3), ((2, 4, 3, 3),)),
    ),
    refuses=(Refusal({"num_groups": 2, "eps": 1e-5}, ((1, 3, 4, 4),), "num_groups"),),
    aliases=("nn.group_norm",),
)
