"""Fake quantization on an edge: the arithmetic of the Plan forward, a straight-through gradient backward.

Forward, every edge computes `numerics.apply_simq`, so that training computes with the integers that will be shipped.
`qat.forward` and `simulation.differentiable` call `fake_quantize_edge` for every operand and output that they quantize.
Backward, rounding passes the gradient unchanged, and clipping passes it inside its range, or everywhere.
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

#: The number of quanta by which a value may exceed its range and still receive a gradient. In hago's schemes the
#: largest integer stands for the threshold less one quantum, and a value that equals the threshold, as the largest
#: weight of every channel does, must stay trainable. A little more than one quantum, since a value at the limit itself
#: gets no gradient.
_MARGIN: Final = 1.0 + 2.0**-10
#: Limits that no value exceeds.
_OPEN: Final = (-math.inf, math.inf)


@dataclass(frozen=True, slots=True)
class Slope:
    """The gradient of fake quantization; part of a TrainingScheme.

    Args:
        masked: set the gradient to 0 where the value exceeds the range by more than a quantum; if False, it passes
            everywhere.
        residual: include the rounding error of the values inside the range in the gradient of a learned scale, as in
            LSQ; if False, only clipped values contribute, as in TensorFlow.

    References:
        Bengio et al., arXiv:1308.3432; Esser et al., arXiv:1902.08153 (LSQ).
    """

    masked: bool = True
    residual: bool = True


@dataclass(frozen=True, slots=True, eq=False)
class _Recipe:
    """The arguments of one call that receive no gradient; `inside` are the limits between which `x` receives one."""

    simq: SimQ
    requantize: Requantize
    inside: tuple[Any, Any]
    residual: bool
    unrounded: Tensor | None = None


class _FakeQuantize(torch.autograd.Function):
    """`clip(round(x * factor))`.

    `low` and `high` are the ends of the clipping if they are learned, else None. They only receive gradients: it is the
    recipe's SimQ that clips.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, factor: Tensor, low: Tensor | None, high: Tensor | None, recipe: _Recipe
    ) -> Tensor:
        wide = x if x.dtype in (torch.float32, torch.float64) else x.float()
        y = apply_simq(wide, recipe.simq, recipe.requantize)
        if recipe.unrounded is not None:
            exact = _clamp(wide * _number_or_tensor(factor, wide), recipe.simq).to(y.dtype)
            y.addcmul_(recipe.unrounded, exact.sub_(y))  # faster than torch.where
        ctx.recipe = recipe
        rounded = ctx.needs_input_grad[1] and not recipe.residual
        ctx.save_for_backward(x, factor, y if rounded else None)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None, None]:
        x, factor, y = ctx.saved_tensors
        needs = ctx.needs_input_grad
        below, above = ctx.recipe.inside
        scale = _number_or_tensor(factor, x)
        if isinstance(scale, float) and scale > 0.0:
            compared, least, most = x, below / scale, above / scale  # saves a product
        else:
            compared, least, most = x * scale, below, above
        inner = _mask_outside(grad.to(compared.dtype), compared, least, most)
        d_factor = d_low = d_high = None
        if needs[1]:
            # with x, the gradient of the scale holds the rounding error; with the rounded x, it does not
            value = x if y is None else y.to(inner.dtype) / factor.to(inner.dtype)
            d_factor = (inner * value).to(factor.dtype).sum_to_size(factor.shape)
        if needs[2]:
            d_low = torch.where(compared < least, grad, 0.0).sum().to(torch.float64)
        if needs[3]:
            d_high = torch.where(compared > most, grad, 0.0).sum().to(torch.float64)
        d_x = (inner * scale).to(x.dtype) if needs[0] else None
        return d_x, d_factor, d_low, d_high, None


def _number_or_tensor(factor: Tensor, like: Tensor) -> Tensor | float:
    """A factor of one entry as a number, any other in the dtype of `like`."""
    return float(factor.item()) if factor.numel() == 1 else factor.to(like.dtype)


def _clamp(x: Tensor, simq: SimQ) -> Tensor:
    """Values in quanta of the target, clipped to its range."""
    assert simq.target is not None
    low, high = clip_range(simq.target)
    if isinstance(low, Tensor) or isinstance(high, Tensor):
        low, high = (torch.as_tensor(end).to(x.dtype) for end in (low, high))
        return torch.maximum(torch.minimum(x, high), low)
    return x.clamp_(low, high)


def _mask_outside(grad: Tensor, x: Tensor, low: Any, high: Any) -> Tensor:
    """`grad` where low < x < high, else 0; computed by one kernel if the limits are numbers."""
    if isinstance(low, float) and isinstance(high, float):
        if (low, high) == _OPEN:
            return grad
        masked: Tensor = torch.ops.aten.hardtanh_backward(grad, x, low, high)
        return masked
    return torch.where((x > low) & (x < high), grad, 0.0)


@dataclass(frozen=True, slots=True, eq=False)
class Ends:
    """The learned ends of a clipping range, in quanta, with their gradients; None for an end that is not learned."""

    low: Tensor | None = None
    high: Tensor | None = None


def fake_quantize_edge(
    x: Tensor,
    source: QParams | None,
    target: QParams,
    requantize: Requantize,
    slope: Slope,
    *,
    relu_fused: bool = False,
    ends: Ends | None = None,
    unrounded: Tensor | None = None,
) -> Tensor:
    """Quantize real values, or requantize centered integers, to centered integers of `target`, with gradients.

    Args:
        x: float tensor: real values if `source` is None, else centered integers of `source`.
        target: its scale may require a gradient, and so may that of `source`.
        relu_fused: whether the clipping stands for a relu, so that the gradient is 0 below 0.
        ends: of the clipping, if they are learned; ignored if `relu_fused`.
        unrounded: of x's shape and the result's dtype, 1 at entries that are clipped but not rounded, 0 at others.

    Returns:
        The values of `numerics.apply_simq`, float32 or float64.
    """
    factor = target.scale.reciprocal() if source is None else source.scale / target.scale
    low, high = clip_range(target)
    inside: tuple[Any, Any] = _OPEN
    if slope.masked:
        inside = (_end(low, -_MARGIN), _end(high, _MARGIN))
    if relu_fused:
        inside = (0.0, inside[1])
    recipe = _Recipe(SimQ(source, target), requantize, inside, slope.residual, unrounded)
    learned = Ends() if ends is None or relu_fused else ends
    return apply(_FakeQuantize, x, factor, learned.low, learned.high, recipe)


def _end(limit: Tensor | int, margin: float) -> Tensor | float:
    return limit + margin if isinstance(limit, Tensor) else float(limit) + margin


def trained_to_real(c: Tensor, source: QParams) -> Tensor:
    """Dequantize centered integers to float32 as `numerics.dequantize` does; a gradient reaches the scale too."""
    real: Tensor = c.to(torch.float32) * source.scale.to(torch.float32)
    return real


class _ScaleGradient(torch.autograd.Function):
    """The identity, whose gradient is multiplied by a factor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.factor, None


def scale_gradient(x: Tensor, factor: float) -> Tensor:
    """Return `x`, with its gradient multiplied by `factor`."""
    return apply(_ScaleGradient, x, factor)
