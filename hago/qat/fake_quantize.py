"""Moves: what edges do to values in training, with the Plan's own arithmetic and a straight-through gradient.

The forward of every move is `numerics.apply_simq`, so training sees the integers that will be shipped.
Backward, rounding is the identity; clipping passes the gradient inside its range, or everywhere.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from hago.arithmetic.numerics import Requantize, apply_simq, clip_range
from hago.arithmetic.straight_through import apply
from hago.arithmetic.types import QParams, SimQ

#: How many quanta past its range a value still takes a gradient: hago's schemes represent a threshold
#: one quantum below it, and what lies on it (the largest weight of every channel) must not be stuck.
_MARGIN: Final = 1.0 + 2.0**-10
#: Limits that cut nothing off.
_OPEN: Final = (-math.inf, math.inf)


@dataclass(frozen=True, slots=True)
class Slope:
    """How gradients pass a move.

    Args:
        masked: 0 where the value lay beyond the range (by more than a quantum); else the gradient passes
            everywhere.
        residual: a learned scale also feels the rounding error of the values inside the range, as in
            LSQ; else only those that were clipped, as in TensorFlow.

    References:
        Bengio et al., arXiv:1308.3432; Esser et al., arXiv:1902.08153 (LSQ).
    """

    masked: bool = True
    residual: bool = True


@dataclass(frozen=True, slots=True, eq=False)
class _Recipe:
    """Everything of one move that takes no gradient."""

    simq: SimQ
    how: Requantize
    inside: tuple[Any, Any]
    residual: bool


class _Move(torch.autograd.Function):
    """`clip(round(x * factor))`; `low` and `high` are the ends of the clipping, where they are learned."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, factor: Tensor, low: Tensor | None, high: Tensor | None, recipe: _Recipe
    ) -> Tensor:
        wide = x if x.dtype in (torch.float32, torch.float64) else x.float()
        y = apply_simq(wide, recipe.simq, recipe.how)
        ctx.recipe = recipe
        rounded = ctx.needs_input_grad[1] and not recipe.residual
        ctx.save_for_backward(x, factor, y if rounded else None)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None, None]:
        x, factor, y = ctx.saved_tensors
        needs = ctx.needs_input_grad
        below, above = ctx.recipe.inside
        number = _number(factor, x)
        if isinstance(number, float) and number > 0.0:
            scaled, first, last = x, below / number, above / number
        else:
            scaled, first, last = x * number, below, above
        inner = _inside(grad.to(scaled.dtype), scaled, first, last)
        d_factor = d_low = d_high = None
        if needs[1]:
            seen = x if y is None else y.to(inner.dtype) / factor.to(inner.dtype)
            d_factor = (inner * seen).to(factor.dtype).sum_to_size(factor.shape)
        if needs[2]:
            d_low = torch.where(scaled < first, grad, 0.0).sum().to(torch.float64)
        if needs[3]:
            d_high = torch.where(scaled > last, grad, 0.0).sum().to(torch.float64)
        d_x = (inner * number).to(x.dtype) if needs[0] else None
        return d_x, d_factor, d_low, d_high, None


def _number(factor: Tensor, like: Tensor) -> Tensor | float:
    return float(factor.item()) if factor.numel() == 1 else factor.to(like.dtype)


def _inside(grad: Tensor, x: Tensor, low: Any, high: Any) -> Tensor:
    """`grad` where low < x < high, else 0, in one pass where the limits are numbers."""
    if isinstance(low, float) and isinstance(high, float):
        if (low, high) == _OPEN:
            return grad
        masked: Tensor = torch.ops.aten.hardtanh_backward(grad, x, low, high)
        return masked
    return torch.where((x > low) & (x < high), grad, 0.0)


@dataclass(frozen=True, slots=True, eq=False)
class Ends:
    """The learned ends of a clipping range, in quanta with their gradients; None where they do not move."""

    low: Tensor | None = None
    high: Tensor | None = None


def move_on_edge(
    x: Tensor,
    source: QParams | None,
    target: QParams,
    how: Requantize,
    slope: Slope,
    *,
    cut: bool = False,
    ends: Ends | None = None,
) -> Tensor:
    """Real values (`source` None), or centered integers, to centered integers of `target`.

    Args:
        x: float tensor.
        target: its scale may require a gradient, and so may that of `source`.
        cut: whether a relu is part of the clipping, so that its gradient is 0 below 0.
        ends: of the clipping, where they are learned.

    Returns:
        What `numerics.apply_simq` gives, float32 or float64.
    """
    factor = target.scale.reciprocal() if source is None else source.scale / target.scale
    low, high = clip_range(target)
    inside: tuple[Any, Any] = _OPEN
    if slope.masked:
        inside = (_end(low, -_MARGIN), _end(high, _MARGIN))
    if cut:
        inside = (0.0, inside[1])
    recipe = _Recipe(SimQ(source, target), how, inside, slope.residual)
    moving = Ends() if ends is None or cut else ends
    return apply(_Move, x, factor, moving.low, moving.high, recipe)


def _end(limit: Tensor | int, margin: float) -> Tensor | float:
    return limit + margin if isinstance(limit, Tensor) else float(limit) + margin


def trained_to_real(c: Tensor, source: QParams) -> Tensor:
    """Centered integers to float32, as `numerics.dequantize`; a gradient reaches the scale too."""
    real: Tensor = c.to(torch.float32) * source.scale.to(torch.float32)
    return real


class _Bend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.factor, None


def scale_gradient(x: Tensor, factor: float) -> Tensor:
    """`x`, its gradient multiplied by `factor`."""
    return apply(_Bend, x, factor)
