"""layer_norm: the last axes brought to mean 0 and variance 1, then weight and bias; without an integer form."""

import torch.nn.functional as F
from torch import Tensor

from hago.ops._rule import Attrs, OpRule, Refusal, Sample
from hago.ops._shared import arguments


def _compute(attrs: Attrs, x: Tensor, w: Tensor | None = None, b: Tensor | None = None) -> Tensor:
    return F.layer_norm(x, attrs["normalized_shape"], w, b, attrs["eps"])


RULE = OpRule(
    name="layer_norm",
    aten=("aten.layer_norm.default",),
    parse=arguments(("input", "weight", "bias"), ("normalized_shape", "eps")),
    compute=_compute,
    samples=(
        Sample(lambda x, w, b: F.layer_norm(x, (4,), w, b), ((2, 3, 4), (4,), (4,)), consts=(1, 2)),
        Sample(lambda x, w: F.layer_norm(x, (3, 4), w, eps=1e-3), ((2, 3, 4), (3, 4)), consts=(1,)),
        Sample(lambda x: F.layer_norm(x, (4,)), ((2, 3, 4),)),
    ),
    refuses=(Refusal({"normalized_shape": [5], "eps": 1e-5}, ((1, 3, 4),), "normalized_shape"),),
    aliases=("nn.layer_norm",),
)
