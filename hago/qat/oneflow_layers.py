"""OneFlow's layers for training: QatConv, and the demo's QLayer (QConv2d, QLinear) and QConvBN with freeze.

A layer's forward is fake-quantized float; `freeze` gives its integers. The demo's freeze has defects
that its results show; ours does not have them unless `upstream=True` asks for the same figures.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hago.errors import HagoError
from hago.qat._checks import but
from hago.qat.layers import Layer, check_layer, output_axis, per_channel, run_layer
from hago.qat.oneflow import MovingAverageMinMaxObserver, Quantizer

#: The demo quantizes biases with this, upstream: unsigned, so negative biases become 0.
_UPSTREAM_BIAS = Quantizer(bits=32, scheme="affine")


class _Qat(nn.Module):
    """The part of QatConv1d, 2d and 3d that does not depend on the dimension."""

    current_train_step: Tensor

    def __init__(self, *args: Any, quantizer: Quantizer | None = None, momentum: float = 0.95, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        chosen = quantizer or Quantizer()
        self.input_observer = MovingAverageMinMaxObserver(
            Quantizer(chosen.formula, chosen.bits, chosen.scheme, wraps=chosen.wraps), 1, momentum
        )
        self.quantizer = chosen
        self.register_buffer("current_train_step", torch.zeros(1, dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        seen = self.quantizer.fake_quantize(x, *self.input_observer(x, self.current_train_step))
        assert isinstance(self, nn.Conv1d | nn.Conv2d | nn.Conv3d)
        weight = self.quantizer.fake_quantize(self.weight, *self.quantizer.observe(self.weight))
        return run_layer(self, seen, weight, self.bias)


class QatConv1d(_Qat, nn.Conv1d):
    """`nn.Conv1d` on a fake-quantized input and weight; see QatConv2d."""


class QatConv2d(_Qat, nn.Conv2d):
    """`nn.Conv2d` on a fake-quantized input and weight; the bias stays float.

    The input's range is a moving average that updates while the buffer `current_train_step` is at
    most 1. Nothing here counts that buffer, as in OneFlow: set it past 1 to freeze the range.

    Args:
        *args, **kwargs: of `nn.Conv2d`.
        quantizer: of the weight; the input takes the same, per layer.
        momentum: of the input's range.

    References:
        Oneflow-Inc/oneflow, python/oneflow/nn/qat/conv.py.
    """


class QatConv3d(_Qat, nn.Conv3d):
    """`nn.Conv3d` on a fake-quantized input and weight; see QatConv2d."""


class Range(nn.Module):
    """The last (scale, zero point) that was observed; the demo's QParam. It does not average."""

    scale: Tensor
    zero_point: Tensor

    def __init__(self, quantizer: Quantizer, channels: int = 1) -> None:
        super().__init__()
        self.quantizer = quantizer
        size = 1 if quantizer.per_layer else channels
        self.register_buffer("scale", torch.zeros(size))
        self.register_buffer("zero_point", torch.zeros(size))

    def update(self, x: Tensor) -> None:
        """Observe `x`, whatever was there before."""
        scale, zero_point = self.quantizer.observe(x)
        self.scale.copy_(scale)
        self.zero_point.copy_(zero_point)

    def forward(self, x: Tensor) -> Tensor:
        """`x` observed and fake-quantized."""
        self.update(x)
        return self.quantizer.fake_quantize(x, self.scale, self.zero_point)

    @property
    def step(self) -> Tensor:
        """The real size of one quantum, also where "scale" is an exponent."""
        return torch.exp2(self.scale) if self.quantizer.formula == "cambricon" else self.scale


@dataclass(frozen=True, slots=True, eq=False)
class Frozen:
    """A layer in integers: `q_out = clip(round(multiplier * (layer(q_in - zero_in) + bias)) + zero_out)`.

    Args:
        multiplier: `s_weight * s_in / s_out`, of shape (1,), or (channels,).
        weight: integers with their zero point taken off, as floats.
        bias: integers at scale `s_in * s_weight`, as floats; None where the layer has none.
    """

    multiplier: Tensor
    weight: Tensor
    bias: Tensor | None


class QLayer(nn.Module):
    """A layer with fake-quantized input, weight and output; the demo's QConv2d and QLinear.

    Args:
        layer: Conv1d, Conv2d, Conv3d or Linear; its parameters are trained.
        quantizer: of the weight; input and output take the same, per layer. (The demo's QLinear is
            always google, symmetric, per layer.)
        quantize_input, quantize_output: whether this layer observes them. Where not, the neighbour's
            Range is given to `freeze`.

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
        values = Quantizer(chosen.formula, chosen.bits, chosen.scheme, wraps=chosen.wraps)
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
        """What is quantized and run on the (fake-quantized) input `x`."""
        return self.layer.weight, self.layer.bias

    def _final(self, *, upstream: bool) -> tuple[Tensor, Tensor | None]:
        """What is frozen."""
        return self.layer.weight, self.layer.bias

    @torch.no_grad()
    def freeze(self, qi: Range | None = None, qo: Range | None = None, *, upstream: bool = False) -> Frozen:
        """The layer in integers.

        Args:
            qi, qo: the ranges of input and output, where this layer does not observe them.
            upstream: with the demo's defects: biases are unsigned (negative ones become 0); with
                `cambricon`, exponents are multiplied as if they were scales; QConvBN folds with the
                variance in the place of its root; the weight's range is the last one seen.

        Raises:
            HagoError: a range is missing, or given twice; or `upstream` and the demo's code raises:
                per channel, or a linear layer.
        """
        seen, out = _one_of("qi", self.qi, qi), _one_of("qo", self.qo, qo)
        weight, bias = self._final(upstream=upstream)
        if upstream:
            return self._freeze_upstream(weight, bias, seen, out)
        self.qw.update(weight)
        product = seen.step * self.qw.step
        whole = None if bias is None else torch.round(bias / product).clamp(-(2.0**31), 2.0**31 - 1)
        zero = self.quantizer.zero_point_used(self.qw.zero_point)
        return Frozen(product / out.step, self._integers(weight, zero), whole)

    def _freeze_upstream(self, weight: Tensor, bias: Tensor | None, seen: Range, out: Range) -> Frozen:
        if not self.quantizer.per_layer or isinstance(self.layer, nn.Linear) or bias is None:
            raise HagoError("freeze(upstream=True): the demo cannot freeze per channel, a linear layer, or no bias")
        product = seen.scale * self.qw.scale
        whole = _UPSTREAM_BIAS.quantize(bias, product, torch.zeros_like(product))
        return Frozen(product / out.scale, self._integers(weight, self.qw.zero_point), whole)

    def _integers(self, weight: Tensor, zero: Tensor) -> Tensor:
        q = self.quantizer.quantize(weight, self.qw.scale, self.qw.zero_point)
        return q - (zero if zero.numel() == 1 else per_channel(zero, self.layer))


class QConvBN(QLayer):
    """A convolution and its batch norm as one: the norm is folded into the weight, which is quantized.

    In training the fold uses the batch's mean and unbiased variance of the unquantized convolution,
    both without gradient, and updates the running statistics with the same; in eval it uses the
    running statistics.

    Args:
        layer, quantizer, quantize_input, quantize_output: of QLayer.
        bn: its statistics, gamma and beta (if affine) are used and updated.
        inverted_momentum: read `bn.momentum` as the weight of the past, as the demo does; else as
            torch does, the weight of the new batch.

    References:
        Oneflow-Inc/models, Quantization/quantization_ops/conv_bn.py.
    """

    def __init__(
        self,
        layer: Layer,
        bn: nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d,
        quantizer: Quantizer | None = None,
        *,
        quantize_input: bool = True,
        quantize_output: bool = True,
        inverted_momentum: bool = False,
    ) -> None:
        super().__init__(layer, quantizer, quantize_input=quantize_input, quantize_output=quantize_output)
        if bn.running_mean is None or bn.momentum is None:
            raise HagoError("the batch norm keeps no running average; expected running statistics and a momentum")
        self.bn, self.inverted_momentum = bn, inverted_momentum

    def _weight_and_bias(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        mean, variance = self._statistics()
        if self.training:
            with torch.no_grad():
                y = run_layer(self.layer, x, self.layer.weight, self.layer.bias)
                rest = but(output_axis(self.layer, y), y.ndim)
                if y.numel() == y.shape[output_axis(self.layer, y)]:
                    raise HagoError("a batch norm in training got one value per channel; expected more")
                batch = y.mean(rest), y.var(rest)
                for kept, new in zip((mean, variance), batch, strict=True):
                    kept.copy_(self._average(kept, new))
            mean, variance = batch
        return self._fold(mean, torch.sqrt(variance + self.bn.eps))

    def _final(self, *, upstream: bool) -> tuple[Tensor, Tensor | None]:
        mean, variance = self._statistics()
        return self._fold(mean, variance if upstream else torch.sqrt(variance + self.bn.eps))

    def _statistics(self) -> tuple[Tensor, Tensor]:
        mean, variance = self.bn.running_mean, self.bn.running_var
        assert mean is not None and variance is not None
        return mean, variance

    def _average(self, past: Tensor, new: Tensor) -> Tensor:
        momentum = self.bn.momentum
        assert momentum is not None
        keep = momentum if self.inverted_momentum else 1 - momentum
        return keep * past + (1 - keep) * new

    def _fold(self, mean: Tensor, sigma: Tensor) -> tuple[Tensor, Tensor]:
        """`W * gamma / sigma`, `(b - mean) * gamma / sigma + beta`."""
        gamma = 1 / sigma if not self.bn.affine else self.bn.weight / sigma
        bias = -gamma * mean if self.layer.bias is None else gamma * self.layer.bias - gamma * mean
        return self.layer.weight * per_channel(gamma, self.layer), bias + self.bn.bias if self.bn.affine else bias


def _one_of(name: str, own: Range | None, given: Range | None) -> Range:
    if (own is None) == (given is None):
        what = "is missing; pass the neighbour's Range" if own is None else "is given, but this layer observes its own"
        raise HagoError(f"freeze: {name} {what}")
    found = given if own is None else own
    assert found is not None
    return found
