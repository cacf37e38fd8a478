"""scaled_dot_product_attention: `softmax(q @ k.T * scale + mask) @ v`, in float.

For chips that multiply matrices of integers, `graph.passes.open_attention` replaces it at import, where it can, by
products that run in integers and a softmax.
"""

import math
from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor

from hago.ops._rule import Attrs, Call, OpRule, Parsed, Refusal, Sample
from hago.ops._shared import arguments


def _parse(call: Call) -> Parsed | None:
    if call["dropout_p"] != 0:
        return None
    tensors = ("query", "key", "value", "attn_mask")
    return arguments(tensors, ("is_causal", "scale", "enable_gqa"))(call)


def _compute(attrs: Attrs, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    return F.scaled_dot_product_attention(
        q, k, v, mask, is_causal=attrs["is_causal"], scale=attrs["scale"], enable_gqa=attrs["enable_gqa"]
    )


def _macs(attrs: Attrs, shapes: Sequence[tuple[int, ...]], out: tuple[int, ...]) -> int:
    return (math.prod(shapes[0]) + math.prod(out)) * shapes[1][-2]


_QKV = ((2, 4, 3, 8), (2, 4, 5, 8), (2, 4, 5, 6))
RULE = OpRule(
    name="scaled_dot_product_attention",
    aten=("aten.scaled_dot_product_attention.default",),
    parse=_parse,
    compute=_compute,
    macs=_macs,
    samples=(
        Sample(F.scaled_dot_product_attention, _QKV),
        Sample(F.scaled_dot_product_attention, (*_QKV, (2, 1, 3, 5))),
        Sample(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3), _QKV),
        Sample(
            lambda q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True),
            ((2, 4, 3, 8), (2, 2, 5, 8), (2, 2, 5, 8)),
        ),
    ),
    refuses=(
        Refusal(
            {"is_causal": False, "scale": None, "enable_gqa": False},
            ((1, 2, 3, 8), (1, 2, 5, 7), (1, 2, 5, 6)),
            "shape",
        ),
    ),
    aliases=("attention",),
)
