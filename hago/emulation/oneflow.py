"""OneFlow's quantizers and the layers that train with them.

Quantizer has OneFlow's MinMaxObserver, Quantization and FakeQuantization as methods; MovingAverageMinMaxObserver is a
module. QatConv1d to QatConv3d are the layers of OneFlow itself. QLayer and QConvBN are those of the demo in
Oneflow-Inc/models (QConv2d, QLinear, QConvBN): their forward pass is fake-quantized float, and `freeze` converts them
to integers. The `freeze` of the demo has defects that change its results, which `upstream=True` reproduces.

OneFlow 0.9.0 differs from most other systems in these points, which are kept: the affine range is not widened to
contain 0; the two observers round the affine zero point differently at ties; the gradient of fake quantization is
never masked; the lowest symmetric integer is -2**(bits-1).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from hago.arithmetic.rounding import round_half_away
from hago.arithmetic.straight_through import straight_through
from hago.emulation._checks import broadcast_along, check_axis, check_bits, check_float, other_axes
from hago.emulation._layers import BatchNorm, Layer, check_layer, check_norm, output_axis, per_channel, run_layer
from hago.errors import HagoError, check_choice

Formula = Literal["google", "cambricon"]
Scheme = Literal["symmetric", "affine"]


@dataclass(frozen=True, slots=True)
class Quantizer:
    """OneFlow's observer and quantizers of one tensor, which share a formula of scale, zero point and integers.

    Args:
        formula: `google`, or `cambricon`, whose "scale" is the exponent of a power of two and which
            is always symmetric and per layer.
        bits: 1 to 32 (OneFlow allows 2 to 8 in static graphs, and does not check in eager mode).
        scheme: `symmetric` (signed) or `affine` (unsigned).
        per_layer: one scale for the tensor; if False, one per index of axis 0.
        wraps: read an affine zero point as uint8, as OneFlow's kernel on the CPU does: modulo 256, so that -10 is 246
            and 300 is 44. This matters only for ranges that do not contain 0.

    Raises:
        HagoError: an option is out of range.

    References:
        Oneflow-Inc/oneflow, oneflow/user/kernels/{min_max_observer,fake_quantization,quantization}_kernel.
    """

    formula: Formula = "google"
    bits: int = 8
    scheme: Scheme = "symmetric"
    per_layer: bool = True
    wraps: bool = False

    def __post_init__(self) -> None:
        check_choice("formula", self.formula, get_args(Formula))
        check_choice("scheme", self.scheme, get_args(Scheme))
        check_bits(self.bits, 1, 32, "a OneFlow quantizer")
        if self.formula == "cambricon" and not self.per_layer:
            raise HagoError("formula 'cambricon' has no per-channel form; set per_layer=True")

    @property
    def symmetric(self) -> bool:
        """Whether the integers are signed and the zero point 0."""
        return self.formula == "cambricon" or self.scheme == "symmetric"

    def observe(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """MinMaxObserver: (scale, zero point) of the values of `x`.

        A NaN counts only as the first element of the tensor or of a channel; later ones are ignored. A tensor of
        zeros gives scale 0, and with `affine` a zero point of NaN.

        Args:
            x: float tensor, not empty.

        Returns:
            Two tensors of `x`'s dtype, of shape (1,), or (channels,) where not per layer.
        """
        low, high = _extrema(x.detach(), self.per_layer)
        return self.qparams(low, high)

    def qparams(self, low: Tensor, high: Tensor, rounding: str = "half_even") -> tuple[Tensor, Tensor]:
        """(scale, zero point) of a range.

            symmetric: scale = max(|low|, |high|) / (2**(bits-1) - 1), zero point 0
            affine:    scale = (high - low) / (2**bits - 1), zero point = -round(low / scale)
            cambricon: scale = floor(log2(max(|low|, |high|))) - (bits - 2), zero point 0

        Args:
            low, high: float, of one shape.
            rounding: of the affine zero point: `half_even` (MinMaxObserver) or `half_away`
                (MovingAverageMinMaxObserver).
        """
        check_choice("rounding", rounding, ("half_even", "half_away"))
        if self.symmetric:
            top = torch.maximum(low.abs(), high.abs())
            if self.formula == "cambricon":
                # in float64, because log2 in float32 is rounded up to an integer just below large powers of two
                scale = torch.log2(top.to(torch.float64)).to(top.dtype).floor() - (self.bits - 2)
            else:
                scale = top / _count(self.bits - 1, top)
            return scale, torch.zeros_like(scale)
        scale = (high - low) / _count(self.bits, low)
        nearest = torch.round if rounding == "half_even" else round_half_away
        return scale, -nearest(low / scale)

    def quantize(self, x: Tensor, scale: Tensor, zero_point: Tensor) -> Tensor:
        """Quantization: the integers of `x`, held in its float dtype; it has no gradient.

            symmetric: clamp(round(x / scale), -2**(bits-1), 2**(bits-1) - 1)
            affine:    clamp(round(x / scale + zero_point), 0, 2**bits - 1)

        Ties are rounded to even, after the zero point is added. If the scale is 0, x / 0 saturates and 0 / 0 is NaN.

        Args:
            x: float tensor.
            scale, zero_point: from `observe`: one entry, or one per index of axis 0.
        """
        return self._integers(x.detach(), scale.detach(), zero_point.detach())[0]

    def fake_quantize(self, x: Tensor, scale: Tensor, zero_point: Tensor) -> Tensor:
        """FakeQuantization: `(quantize(x) - zero_point) * scale`; `dx = dy` everywhere, also where clipped.

        Args:
            x: float tensor.
            scale, zero_point: from `observe`; they receive no gradient.
        """
        q, step, zero = self._integers(x.detach(), scale.detach(), zero_point.detach())
        return straight_through(x, (q - zero) * step)

    def zero_point_used(self, zero_point: Tensor) -> Tensor:
        """The zero point of the integers: 0 if symmetric, else the given one, wrapped if `wraps`."""
        if self.symmetric:
            return torch.zeros_like(zero_point)
        return _as_uint8(zero_point) if self.wraps else zero_point

    def _integers(self, x: Tensor, scale: Tensor, zero_point: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(q, real step, zero point), the last two shaped to broadcast against `x`."""
        check_float(x, "a OneFlow quantizer")
        if scale.numel() != 1:
            if self.formula == "cambricon":
                raise HagoError(f"formula 'cambricon' got {scale.numel()} scales; expected one")
            check_axis(x, 0, scale.numel(), "scale")
        step = _power_of_two(scale) if self.formula == "cambricon" else scale
        zero = self.zero_point_used(zero_point)
        step, zero = (
            t.to(x.dtype) if t.numel() == 1 else broadcast_along(t.to(x.dtype), 0, x.ndim) for t in (step, zero)
        )
        top = _count(self.bits - 1 if self.symmetric else self.bits, x)
        bottom = -top - 1 if self.symmetric else torch.zeros_like(top)
        ratio = x / step if self.symmetric else x / step + zero
        return torch.round(ratio).clamp(bottom, top), step, zero


class MovingAverageMinMaxObserver(nn.Module):
    """A moving average of the ranges of the training batches, per layer.

    In training, while `current_train_step <= stop_update_after_iters`,
    `m = v if m == 0 else m * momentum + v * (1 - momentum)` with momentum in float32; v is the
    batch's minimum and maximum (`affine`), or its largest magnitude for both buffers (symmetric). A buffer that is
    exactly 0, such as the minimum of a relu's output, is therefore set to v at every step. In eval the buffers are not
    updated; before any update they are 0, and so is the scale.

    Args:
        quantizer: computes scale and zero point of the averaged range; must be per layer.
        stop_update_after_iters: the last step at which the average is updated.
        momentum: weight of the past.

    References:
        Oneflow-Inc/oneflow, oneflow/user/kernels/moving_average_min_max_observer_kernel.
    """

    moving_max: Tensor
    moving_min: Tensor

    def __init__(
        self, quantizer: Quantizer | None = None, stop_update_after_iters: int = 1, momentum: float = 0.95
    ) -> None:
        super().__init__()
        self.quantizer = quantizer or Quantizer()
        if not self.quantizer.per_layer:
            raise HagoError("the moving average has no per-channel form; set per_layer=True")
        self.stop_update_after_iters, self.momentum = stop_update_after_iters, momentum
        self.register_buffer("moving_max", torch.zeros(1))
        self.register_buffer("moving_min", torch.zeros(1))

    def forward(self, x: Tensor, current_train_step: int | Tensor = 0) -> tuple[Tensor, Tensor]:
        """Observe `x` in training, and return (scale, zero point) of the average: shape (1,), in `x`'s dtype.

        Args:
            x: float tensor, not empty.
            current_train_step: compared with `stop_update_after_iters`; the caller counts it.
        """
        if self.training and int(current_train_step) <= self.stop_update_after_iters:
            low, high = (t.to(self.moving_max.dtype) for t in _extrema(x.detach(), per_layer=True))
            if self.quantizer.symmetric:
                low = high = torch.maximum(low.abs(), high.abs())
            self.moving_max.copy_(self.average(self.moving_max, high))
            self.moving_min.copy_(self.average(self.moving_min, low))
        return self.quantizer.qparams(self.moving_min.to(x.dtype), self.moving_max.to(x.dtype), rounding="half_away")

    def average(self, past: Tensor, value: Tensor) -> Tensor:
        """The average after a batch whose extremum is `value`."""
        momentum = torch.tensor(self.momentum, dtype=torch.float32, device=past.device)
        return torch.where(past == 0, value, past * momentum + value * (1 - momentum))


def _extrema(x: Tensor, per_layer: bool) -> tuple[Tensor, Tensor]:
    """(min, max) as a sequential `<` finds them: NaN counts only where it comes first."""
    check_float(x, "an observer")
    if x.numel() == 0:
        raise HagoError(f"an observer got an empty tensor of shape {tuple(x.shape)}; expected values")
    if not per_layer and x.ndim == 0:
        raise HagoError("an observer per channel got a scalar; expected channels on axis 0")
    rows = x.reshape(1, -1) if per_layer else x.reshape(x.shape[0], -1)
    rows = torch.where(torch.isnan(rows), rows[:, :1], rows)
    return rows.amin(1), rows.amax(1)


def _count(bits: int, like: Tensor) -> Tensor:
    """`2**bits - 1`, the subtraction done in the dtype of `like`, as the kernels do."""
    return torch.tensor(2.0**bits, dtype=like.dtype, device=like.device) - 1


def _fits_int32(t: Tensor) -> Tensor:
    return t.isfinite() & (t.abs() < 2.0**31)


def _as_uint8(zero_point: Tensor) -> Tensor:
    """`uint8(round(zero_point))` as x86 computes it: half away from zero, modulo 256; 0 if outside int32."""
    nearest = round_half_away(zero_point)
    fits = _fits_int32(nearest)
    wrapped = torch.where(fits, nearest, torch.zeros_like(nearest)).to(torch.int64) & 255
    return wrapped.to(zero_point.dtype)


def _power_of_two(exponent: Tensor) -> Tensor:
    """`2**int(exponent)`, truncated toward zero; 0 if the exponent is outside int32, as that of a tensor of zeros."""
    integer = torch.where(_fits_int32(exponent), exponent.trunc(), torch.full_like(exponent, -(2.0**31)))
    return torch.pow(2.0, integer.to(torch.float64)).to(exponent.dtype)


# ---------------------------------------------------------------- layers
#: The quantizer of biases in the demo: unsigned, so negative biases become 0.
_UPSTREAM_BIAS = Quantizer(bits=32, scheme="affine")


class _QatConv(nn.Module):
    """The part of QatConv1d, QatConv2d and QatConv3d that does not depend on the number of axes."""

    current_train_step: Tensor

    def __init__(self, *args: Any, quantizer: Quantizer | None = None, momentum: float = 0.95, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        chosen = quantizer or Quantizer()
        self.input_observer = MovingAverageMinMaxObserver(replace(chosen, per_layer=True), 1, momentum)
        self.quantizer = chosen
        self.register_buffer("current_train_step", torch.zeros(1, dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        quantized = self.quantizer.fake_quantize(x, *self.input_observer(x, self.current_train_step))
        assert isinstance(self, nn.Conv1d | nn.Conv2d | nn.Conv3d)
        weight = self.quantizer.fake_quantize(self.weight, *self.quantizer.observe(self.weight))
        return run_layer(self, quantized, weight, self.bias)


class QatConv1d(_QatConv, nn.Conv1d):
    """`nn.Conv1d` on a fake-quantized input and weight; see QatConv2d."""


class QatConv2d(_QatConv, nn.Conv2d):
    """`nn.Conv2d` on a fake-quantized input and weight; the bias stays float.

    The range of the input is a moving average that is updated while the buffer `current_train_step` is at most 1. As
    in OneFlow, the layer itself never changes that buffer; set it to 2 or more to freeze the range.

    Args:
        *args, **kwargs: those of `nn.Conv2d`.
        quantizer: of the weight; the input is quantized by the same options per layer.
        momentum: of the input's range.

    References:
        Oneflow-Inc/oneflow, python/oneflow/nn/qat/conv.py.
    """


class QatConv3d(_QatConv, nn.Conv3d):
    """`nn.Conv3d` on a fake-quantized input and weight; see QatConv2d."""


class Range(nn.Module):
    """The scale and zero point of the last observed tensor, without averaging; the demo's QParam."""

    scale: Tensor
    zero_point: Tensor

    def __init__(self, quantizer: Quantizer, channels: int = 1) -> None:
        super().__init__()
        self.quantizer = quantizer
        size = 1 if quantizer.per_layer else channels
        self.register_buffer("scale", torch.zeros(size))
        self.register_buffer("zero_point", torch.zeros(size))

    def update(self, x: Tensor) -> None:
        """Replace scale and zero point by those of `x`."""
        scale, zero_point = self.quantizer.observe(x)
        self.scale.copy_(scale)
        self.zero_point.copy_(zero_point)

    def forward(self, x: Tensor) -> Tensor:
        """Observe `x` and fake-quantize it."""
        self.update(x)
        return self.quantizer.fake_quantize(x, self.scale, self.zero_point)

    @property
    def step(self) -> Tensor:
        """The real scale; for `cambricon`, 2 to the power of the exponent that `scale` holds."""
        return torch.exp2(self.scale) if self.quantizer.formula == "cambricon" else self.scale


@dataclass(frozen=True, slots=True, eq=False)
class Frozen:
    """A layer in integers, made by `QLayer.freeze`.

        q_out = clip(round(multiplier * (layer(q_in - zero_in) + bias)) + zero_out)

    Args:
        multiplier: `s_weight * s_in / s_out`, of shape (1,), or (channels,).
        weight: integers with their zero point subtracted, as floats.
        bias: integers at scale `s_in * s_weight`, as floats; None if the layer has none.
    """

    multiplier: Tensor
    weight: Tensor
    bias: Tensor | None


class QLayer(nn.Module):
    """A layer with fake-quantized input, weight and output; the demo's QConv2d and QLinear.

    Args:
        layer: Conv1d, Conv2d, Conv3d or Linear; its parameters are trained.
        quantizer: of the weight; input and output are quantized by the same options per layer. (The demo's QLinear is
            always google, symmetric and per layer.)
        quantize_input, quantize_output: whether this layer observes its input and its output. If not, pass the Range
            of the neighbouring layer to `freeze`.

    References:
        Oneflow-Inc/models, Quantization/quantization_ops/{conv,linear,q_module}.py.
    """

    def __init__(
        self,
        layer: Layer,
        quantizer: Quantizer | None = None,
        *,
        quantize_input: bool = True,
        quantize_output: bool = True,
    ) -> None:
        super().__init__()
        check_layer(layer)
        chosen = quantizer or Quantizer()
        values = replace(chosen, per_layer=True)
        self.layer, self.quantizer = layer, chosen
        self.qi = Range(values) if quantize_input else None
        self.qw = Range(chosen, layer.weight.shape[0])
        self.qo = Range(values) if quantize_output else None

    def forward(self, x: Tensor) -> Tensor:
        if self.qi is not None:
            x = self.qi(x)
        weight, bias = self._weight_and_bias(x)
        y = run_layer(self.layer, x, self.qw(weight), bias)
        return y if self.qo is None else self.qo(y)

    def _weight_and_bias(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """The weight and bias that are quantized and run on the (fake-quantized) input `x`."""
        return self.layer.weight, self.layer.bias

    def _weight_and_bias_to_freeze(self, *, upstream: bool) -> tuple[Tensor, Tensor | None]:
        """The weight and bias that `freeze` converts to integers."""
        return self.layer.weight, self.layer.bias

    @torch.no_grad()
    def freeze(self, qi: Range | None = None, qo: Range | None = None, *, upstream: bool = False) -> Frozen:
        """Convert the layer to integers.

        Args:
            qi, qo: the ranges of input and output, if this layer does not observe them.
            upstream: reproduce the demo's defects: biases are unsigned (negative ones become 0); with
                `cambricon`, exponents are multiplied as if they were scales; QConvBN folds with the
                variance in place of its square root; the range of the weight is that of the last forward pass.

        Raises:
            HagoError: a range is missing or given twice; or, with `upstream`, the demo itself would raise an error:
                per channel, for a linear layer, or without a bias.
        """
        input_range, output_range = _one_of("qi", self.qi, qi), _one_of("qo", self.qo, qo)
        weight, bias = self._weight_and_bias_to_freeze(upstream=upstream)
        if upstream:
            return self._freeze_upstream(weight, bias, input_range, output_range)
        self.qw.update(weight)
        product = input_range.step * self.qw.step
        bias_integers = None if bias is None else torch.round(bias / product).clamp(-(2.0**31), 2.0**31 - 1)
        zero = self.quantizer.zero_point_used(self.qw.zero_point)
        return Frozen(product / output_range.step, self._integers(weight, zero), bias_integers)

    def _freeze_upstream(self, weight: Tensor, bias: Tensor | None, input_range: Range, output_range: Range) -> Frozen:
        if not self.quantizer.per_layer or isinstance(self.layer, nn.Linear) or bias is None:
            raise HagoError("freeze(upstream=True): the demo cannot freeze per channel, a linear layer, or no bias")
        product = input_range.scale * self.qw.scale
        bias_integers = _UPSTREAM_BIAS.quantize(bias, product, torch.zeros_like(product))
        return Frozen(product / output_range.scale, self._integers(weight, self.qw.zero_point), bias_integers)

    def _integers(self, weight: Tensor, zero: Tensor) -> Tensor:
        """The integers of the weight with the zero point `zero` subtracted."""
        q = self.quantizer.quantize(weight, self.qw.scale, self.qw.zero_point)
        return q - (zero if zero.numel() == 1 else per_channel(zero, self.layer))


class QConvBN(QLayer):
    """A convolution and its batch norm as one layer: the norm is folded into the weight, which is quantized.

    In training the norm is folded with the mean and unbiased variance of the batch, computed by the unquantized
    convolution and without gradient, and the running statistics are updated with them; in eval it is folded with the
    running statistics.

    Args:
        layer, quantizer, quantize_input, quantize_output: as in QLayer.
        bn: its statistics, gamma and beta (if affine) are used and updated.
        inverted_momentum: take `bn.momentum` for the weight of the past, as the demo does; by default it is that of
            the new batch, as in torch.

    References:
        Oneflow-Inc/models, Quantization/quantization_ops/conv_bn.py.
    """

    def __init__(
        self,
        layer: Layer,
        bn: BatchNorm,
        quantizer: Quantizer | None = None,
        *,
        quantize_input: bool = True,
        quantize_output: bool = True,
        inverted_momentum: bool = False,
    ) -> None:
        super().__init__(layer, quantizer, quantize_input=quantize_input, quantize_output=quantize_output)
        check_norm(bn)
        self.bn, self.inverted_momentum = bn, inverted_momentum

    def _weight_and_bias(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        mean, variance = self._statistics()
        if self.training:
            with torch.no_grad():
                y = run_layer(self.layer, x, self.layer.weight, self.layer.bias)
                axis = output_axis(self.layer, y)
                reduced = other_axes(axis, y.ndim)
                if y.numel() == y.shape[axis]:
                    raise HagoError("a batch norm in training got one value per channel; expected more")
                batch = y.mean(reduced), y.var(reduced)
                for running, new in zip((mean, variance), batch, strict=True):
                    running.copy_(self._average(running, new))
            mean, variance = batch
        return self._fold(mean, torch.sqrt(variance + self.bn.eps))

    def _weight_and_bias_to_freeze(self, *, upstream: bool) -> tuple[Tensor, Tensor | None]:
        mean, variance = self._statistics()
        return self._fold(mean, variance if upstream else torch.sqrt(variance + self.bn.eps))

    def _statistics(self) -> tuple[Tensor, Tensor]:
        mean, variance = self.bn.running_mean, self.bn.running_var
        assert mean is not None and variance is not None
        return mean, variance

    def _average(self, past: Tensor, new: Tensor) -> Tensor:
        momentum = self.bn.momentum
        assert momentum is not None
        weight_of_past = momentum if self.inverted_momentum else 1 - momentum
        return weight_of_past * past + (1 - weight_of_past) * new

    def _fold(self, mean: Tensor, sigma: Tensor) -> tuple[Tensor, Tensor]:
        """The folded weight `W * gamma / sigma` and bias `(b - mean) * gamma / sigma + beta`."""
        gamma = 1 / sigma if not self.bn.affine else self.bn.weight / sigma
        bias = -gamma * mean if self.layer.bias is None else gamma * self.layer.bias - gamma * mean
        return self.layer.weight * per_channel(gamma, self.layer), bias + self.bn.bias if self.bn.affine else bias


def _one_of(name: str, observed: Range | None, given: Range | None) -> Range:
    """The range that the layer observes or the one that the caller gives, whichever is not None."""
    if (observed is None) == (given is None):
        missing = observed is None
        problem = "is missing; pass the neighbour's Range" if missing else "is given, but this layer observes its own"
        raise HagoError(f"freeze: {name} {problem}")
    chosen = given if observed is None else observed
    assert chosen is not None
    return chosen
