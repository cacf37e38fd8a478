"""masked_softmax: the softmax along the last axis of what a mask lets through; float everywhere.

Internal: no torch call means it. It stands between the two products of an attention that has a mask. Masks hold
-inf, or numbers as low as the dtype has, for which no grid of integers is fit, so they are added in float.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hago.ops._rule import Attrs, OpRule, Refusal
from hago.ops._shared import unread


def _compute(attrs: Attrs, x: Tensor, mask: Tensor | None = None) -> Tensor:
    """`softmax(x * scale + mask)`; a row of which nothing is let through gives 0.

    Args:
        attrs: `scale`, and `is_causal`: row i lets columns 0 to i through.
        x: (..., rows, columns).
        mask: broadcasts to x: True where a value is let through, or what is added.

    References:
        torch.nn.functional.scaled_dot_product_attention and torch's `_scaled_dot_product_attention_math`.
    """
    x = x * attrs["scale"]
    if attrs["is_causal"]:
        x = x.masked_fill(~torch.ones(x.shape[-2:], dtype=torch.bool, device=x.device).tril(), -math.inf)
    if mask is not None:
        x = x.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else x + mask
    if _lets_something_through(x):
        return F.softmax(x, -1)
    return torch.ops.aten._safe_softmax.default(x, -1)  # type: ignore[no-any-return]


def _lets_something_through(x: Tensor) -> bool:
    """Whether every row is known to have an entry above -inf. The softmax alone, which takes a third of the time, then
    has the same bits. Not asked where no values are there, or a later call may have others."""
    untyped: Any = torch.jit
    recorded = torch.is_grad_enabled() or untyped.is_tracing() or torch.compiler.is_compiling()
    if recorded or type(x) is not Tensor or x.device.type != "cpu" or not x.numel():
        return False
    return not bool((x.amax(-1) == -math.inf).any())


RULE = OpRule(
    name="masked_softmax",
    aten=(),
    parse=unread,
    compute=_compute,
    refuses=(Refusal({"scale": 1.0, "is_causal": False}, ((1, 3, 4), (1, 3, 5)), "shape"),),
)
