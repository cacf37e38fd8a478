"""DoReFa-Net: weights, activations and gradients of k bits (arXiv:1606.06160).

Two implementations are in use and differ: that of the authors (`tensorpack`, the default) and the PyTorch port
`zzzxxxttt`. The paper does not define the result for a tensor of zeros, for which both give NaN; the option `zeros`
selects it. All randomness comes from a generator or is passed in.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, get_args

import torch
from torch import Tensor

from hago.arithmetic.straight_through import apply, straight_through
from hago.emulation._checks import check_bits, check_float
from hago.errors import HagoError, check_choice

Variant = Literal["tensorpack", "zzzxxxttt"]
Zeros = Literal["raise", "zero", "nan"]

#: The most bits of weights and activations, by variant.
_MOST_BITS: Final[Mapping[Variant, int]] = {"tensorpack": 24, "zzzxxxttt": 8}


def quantize_k(r: Tensor, bits: int) -> Tensor:
    """`round((2**bits - 1) * r) / (2**bits - 1)`, ties to even; the gradient is passed unchanged (equation 5).

    Args:
        r: float tensor, in [0, 1].
        bits: 1 to 24, or 32 for no quantization.
    """
    check_float(r, "quantize_k")
    if bits == 32:
        return r
    check_bits(bits, 1, 24, "quantize_k")
    top = float((1 << bits) - 1)
    return straight_through(r, torch.round(r.detach() * top) / top)


def quantize_weight(w: Tensor, bits: int, variant: Variant = "tensorpack", zeros: Zeros = "raise") -> Tensor:
    """Quantize weights to k bits.

        1 bit:  sign(w) * mean(|w|), the mean over the whole tensor and without gradient; dw = dy
        k bits: 2 * quantize_k(tanh(w) / (2 * max|tanh(w)|) + 1/2, k) - 1

                           tensorpack              zzzxxxttt
        sign(0)            +1                      0
        range, k > 1       [-1, 1]                 [-max|tanh(w)|, max|tanh(w)|]
        gradient           through tanh and max    through tanh; the max is constant

    Args:
        w: float tensor, not empty.
        bits: 1 to 24 (`zzzxxxttt`: 1 to 8), or 32 for no quantization.
        variant: the implementation to follow.
        zeros: the result of k > 1 bits for a tensor of zeros: an error, zeros (with dw = 0), or NaN, as in both
            implementations. One bit gives zeros.

    Raises:
        HagoError: an option is not valid, or all weights are 0 and `zeros` is "raise".

    References:
        Zhou et al., arXiv:1606.06160, equations 7 to 9; tensorpack examples/DoReFa-Net/dorefa.py;
        zzzxxxttt/pytorch_DoReFaNet utils/quant_dorefa.py.
    """
    check_choice("variant", variant, get_args(Variant))
    check_choice("zeros", zeros, get_args(Zeros))
    check_float(w, "quantize_weight")
    if bits == 32:
        return w
    check_bits(bits, 1, _MOST_BITS[variant], "a DoReFa weight")
    if w.numel() == 0:
        raise HagoError(f"quantize_weight got an empty tensor of shape {tuple(w.shape)}; expected values")
    if bits == 1:
        return _one_bit(w, variant)
    squashed = torch.tanh(w)
    top = squashed.abs().amax()
    if zeros != "nan" and not bool(top != 0):
        if zeros == "raise":
            raise HagoError("all weights are 0, which DoReFa cannot scale; pass zeros='zero' to keep them 0")
        return w * 0.0
    if variant == "tensorpack":
        return 2 * quantize_k(squashed / top * 0.5 + 0.5, bits) - 1
    top = top.detach()
    return top * (2 * quantize_k(squashed / 2 / top + 0.5, bits) - 1)


def _one_bit(w: Tensor, variant: Variant) -> Tensor:
    """`sign(w) * mean(|w|)`."""
    values = w.detach()
    sign = torch.sign(values)
    if variant == "tensorpack":
        sign = torch.where(values == 0, torch.ones_like(sign), sign)
    return straight_through(w, sign * values.abs().mean())


def quantize_activation(x: Tensor, bits: int, variant: Variant = "tensorpack") -> Tensor:
    """Quantize activations to k bits: `quantize_k(clip(x, 0, 1), k)`; `dx = dy * [0 <= x <= 1]`.

                  tensorpack        zzzxxxttt
        1 bit     round: .1 -> 0    sign: .1 -> 1
        32 bits   relu(x)           x

    Args:
        x: float tensor.
        bits: 1 to 24 (`zzzxxxttt`: 1 to 8), or 32 for no quantization.

    References:
        Zhou et al., arXiv:1606.06160, equation 11, and the implementations named at quantize_weight.
    """
    check_choice("variant", variant, get_args(Variant))
    check_float(x, "quantize_activation")
    if bits == 32:
        return torch.relu(x) if variant == "tensorpack" else x
    check_bits(bits, 1, _MOST_BITS[variant], "a DoReFa activation")
    clipped = x.clamp(0.0, 1.0)
    if variant == "zzzxxxttt" and bits == 1:
        return straight_through(clipped, torch.sign(clipped.detach()))
    return quantize_k(clipped, bits)


class _GradientQuantizer(torch.autograd.Function):
    """The identity, whose gradient is `stochastic_gradient`."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, bits: int, noise: Tensor | None, generator: torch.Generator | None, zeros: Zeros
    ) -> Tensor:
        ctx.options = (bits, noise, generator, zeros)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        bits, noise, generator, zeros = ctx.options
        if noise is None:
            noise = torch.rand(grad.shape, generator=generator, dtype=grad.dtype, device=grad.device) - 0.5
        return stochastic_gradient(grad, bits, noise, zeros), None, None, None, None


def stochastic_gradient(dr: Tensor, bits: int, noise: Tensor, zeros: Zeros = "zero") -> Tensor:
    """Round a gradient stochastically to k bits, example by example (equation 12).

        2 * m * (quantize_k(clip(dr / (2 * m) + 1/2 + noise / (2**k - 1), 0, 1), k) - 1/2)

    with m the largest |dr| of the example (all axes but the first). Its mean over the noise is `dr`.

    Args:
        dr: float tensor; axis 0 is the batch.
        noise: of `dr`'s shape, uniform in [-1/2, 1/2].
        zeros: the result for an example whose gradient is all 0: 0, NaN (as in the implementation), or an error.
    """
    check_choice("zeros", zeros, get_args(Zeros))
    if noise.shape != dr.shape:
        raise HagoError(f"noise of shape {tuple(noise.shape)} for a gradient of shape {tuple(dr.shape)}")
    if bits == 32:
        return dr
    check_bits(bits, 1, 24, "a DoReFa gradient")
    top = dr.abs() if dr.ndim < 2 else dr.abs().amax(tuple(range(1, dr.ndim)), keepdim=True)
    if zeros == "raise" and bool((top == 0).any()):
        raise HagoError("the gradient of an example is all 0, which DoReFa cannot scale; pass zeros='zero'")
    unit = dr / top * 0.5 + 0.5 + noise.to(dr.dtype) / float((1 << bits) - 1)
    quantized = (quantize_k(unit.clamp(0.0, 1.0), bits) - 0.5) * top * 2
    return quantized if zeros == "nan" else torch.where(top == 0, torch.zeros_like(dr), quantized)


def quantize_gradient(
    x: Tensor,
    bits: int,
    *,
    noise: Tensor | None = None,
    generator: torch.Generator | None = None,
    zeros: Zeros = "zero",
) -> Tensor:
    """Return `x`, with its gradient replaced by `stochastic_gradient`.

    Args:
        x: float tensor; axis 0 is the batch.
        bits: 1 to 24, or 32 for no quantization.
        noise: in [-1/2, 1/2], of `x`'s shape.
        generator: given instead of `noise`, which is then drawn in the backward pass, on the gradient's device.
        zeros: as in `stochastic_gradient`.

    Raises:
        HagoError: neither or both of noise and generator are given.
    """
    check_float(x, "quantize_gradient")
    if bits == 32:
        return x
    check_bits(bits, 1, 24, "a DoReFa gradient")
    if (noise is None) == (generator is None):
        raise HagoError("quantize_gradient needs noise or a generator, one of the two")
    return apply(_GradientQuantizer, x, bits, noise, generator, zeros)


def ternarize(w: Tensor, positive: Tensor, negative: Tensor, threshold: float = 0.05) -> Tensor:
    """Quantize weights to three values, two of them learned (trained ternary quantization, as in tensorpack).

    With t = threshold * max|w| the result is `positive` above t, `-negative` below -t, and 0 between; exactly at t
    and -t it is 1 and -1. `dw = dy`, multiplied by positive or negative outside [-t, t]; d positive = sum(dy above t),
    d negative = -sum(dy below -t).

    Args:
        w: float tensor.
        positive, negative: learned, one entry each.

    References:
        Zhu et al., arXiv:1612.01064; tensorpack examples/DoReFa-Net/dorefa.py.
    """
    check_float(w, "ternarize")
    values = w.detach()
    t = values.abs().amax() * threshold
    inner = (values < t) & (values > -t)
    sign = straight_through(w, torch.sign(values) * torch.where(inner, 0.0, 1.0).to(w.dtype))
    one = torch.ones_like(values)
    return sign * torch.where(values > t, one * positive, torch.where(values < -t, one * negative, one))


@dataclass(frozen=True, slots=True)
class DoReFa:
    """Options of DoReFa-Net's quantizers, the field `dorefa` of a `hago.qat.scheme.TrainingScheme`.

    Args:
        variant, zeros: as in `quantize_weight`.
        relative: keep the magnitudes of the float model, so that a network that was trained in float keeps its
            accuracy. Weights are `u * quantize_weight(w / u)` with u four times the largest weight at the start,
            activations `t * quantize_activation(x / t)` with t the strategy's threshold: DoReFa's functions,
            applied to the network with its layers rescaled. Otherwise weights are in [-1, 1] and activations in
            [0, 1], as in the paper.
        gradient_bits: bits of the gradients of convolutions and linear layers; 32 for no quantization.
        seed: of the noise with which gradients are rounded.

    References:
        Zhou et al., arXiv:1606.06160.
    """

    variant: Variant = "tensorpack"
    zeros: Zeros = "raise"
    relative: bool = False
    gradient_bits: int = 32
    seed: int = 0

    def gradients(self, step: int) -> Callable[[Tensor], Tensor] | None:
        """A function that rounds the gradients of one training pass; None if they are not quantized."""
        if self.gradient_bits == 32:
            return None
        generator = torch.Generator().manual_seed((self.seed * 1_000_003 + step) % (1 << 62))
        return lambda x: quantize_gradient(x, self.gradient_bits, generator=generator)


#: Options by the name of the training scheme: those of the paper, and those for networks that were trained in float.
DOREFAS: Final[Mapping[str, DoReFa]] = {
    "dorefa": DoReFa(),
    "dorefa_relative": DoReFa(variant="zzzxxxttt", relative=True),
}
