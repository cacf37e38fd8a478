"""The straight-through estimator: the value of one tensor with the gradient of another."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, mask: Tensor | None) -> Tensor:
        ctx.masked = mask is not None
        if mask is not None:
            ctx.save_for_backward(mask)
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        if not ctx.masked:
            return grad, None, None
        (mask,) = ctx.saved_tensors
        return torch.where(mask, grad, torch.zeros_like(grad)), None, None


def apply(function: type[torch.autograd.Function], *args: Any) -> Tensor:
    """Call a torch.autograd.Function, whose `apply` has no types."""
    result: Tensor = function.apply(*args)  # type: ignore[no-untyped-call]
    return result


def straight_through(x: Tensor, y: Tensor, mask: Tensor | None = None) -> Tensor:
    """`y`, with the gradient of `x` where `mask` holds and 0 elsewhere.

    Args:
        x: float tensor that takes the gradient.
        y: the value, of `x`'s shape and dtype; it takes no gradient.
        mask: bool of the same shape; everywhere True if not given.

    Returns:
        A tensor equal to `y`; `dx = dy * mask`.

    References:
        Bengio et al., arXiv:1308.3432.
    """
    return apply(_StraightThrough, x, y.detach(), mask)
