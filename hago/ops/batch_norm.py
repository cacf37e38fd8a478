"""batch_norm: inference form, from running statistics; inputs x, weight, bias, mean, var.

Float as it is: the pass `fold_batch_norms` moves it into the weights before it, or leaves an `affine`.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from hago.ops._rule import Attrs, Call, OpRule, Parsed, Refusal, Sample


def _parse(call: Call) -> Parsed | None:
    if call.item != 0:
        return None
    channels = call.shape_of("running_mean")
    weight = torch.ones(channels) if call["weight"] is None else call["weight"]
    bias = torch.zeros(channels) if call["bias"] is None else call["bias"]
    inputs = (call["input"], weight, bias, call["running_mean"], call["running_var"])
    return Parsed(inputs, {"eps": call["eps"]})


def _compute(attrs: Attrs, x: Tensor, w: Tensor, b: Tensor, mean: Tensor, var: Tensor) -> Tensor:
    return F.batch_norm(x, mean, var, w, b, training=False, eps=attrs["eps"])


RULE = OpRule(
    name="batch_norm",
    aten=("aten._native_batch_norm_legit_no_training.default", "aten.batch_norm.default"),
    parse=_parse,
    compute=_compute,
    samples=(
        Sample(
            lambda x, w, b, m, v: F.batch_norm(x, m, v, w, b, eps=1e-3),
            ((2, 3, 4, 4), (3,), (3,), (3,), (3,)),
            consts=(1, 2, 3, 4),
            low=0.1,
        ),
        Sample(F.batch_norm, ((2, 3), (3,), (3,)), consts=(1, 2), low=0.1),
    ),
    refuses=(Refusal({"eps": 1e-5}, ((1, 3, 4, 4), (2,), (2,), (2,), (2,)), "shape"),),
    aliases=("nn.batch_norm",),
)
