"""A layer with its batch norm folded during training, as contrib.quantize's training graph computes it.

The quantized weight is the one that will be deployed: it is folded with the moving statistics. The output is
corrected to that of a batch norm in training, which normalizes with the statistics of the batch. From the step
`freeze_bn_delay` on, the moving statistics are used for both.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hago.emulation._checks import broadcast_along, other_axes
from hago.emulation._layers import BatchNorm, Layer, check_layer, check_norm, output_axis, per_channel, run_layer
from hago.emulation.tensorflow.fake_quantize import RangeObserver, Schedule
from hago.errors import HagoError


@dataclass(frozen=True, slots=True, eq=False)
class FoldedPass:
    """The values that one pass of a FoldedLayer computed, under the names that contrib.quantize gives its nodes.

    Args:
        mul_fold: the folded weight.
        weights_quant: the same, fake-quantized.
        conv_fold: the layer's output with it (Conv2D_Fold, MatMul_Fold, depthwise_Fold).
        post_conv_mul: `conv_fold`, corrected to the sigma of the batch; equal to it in eval.
        add_fold: `post_conv_mul` with the folded bias added; the input of the activation.
    """

    mul_fold: Tensor
    weights_quant: Tensor
    conv_fold: Tensor
    post_conv_mul: Tensor
    add_fold: Tensor


class FoldedLayer(nn.Module):
    """A layer, its batch norm and its activation, trained as TensorFlow's training graph does.

    With sigma_b = sqrt(batch variance + eps) (population variance), sigma_m = sqrt(moving variance
    + eps) as it is before this step's update, and fq the weight's fake quantization:

        training: y = layer(x, fq(W * gamma / sigma_m)) * sigma_m / sigma_b + beta - gamma * mu_b / sigma_b
        frozen, eval: y = layer(x, fq(W * gamma / sigma_m)) + beta - gamma * mu_m / sigma_m

    The statistics are those of the layer's output with its bias, if it has one. The moving variance is updated with
    the unbiased batch variance if `fused`, else with the population variance.

    Args:
        layer: Conv1d, Conv2d, Conv3d or Linear, depthwise included; its weight is trained.
        bn: with running statistics, which training updates; its momentum is torch's, 1 - decay.
        activation: applied before the activation's fake quantization; None for none.
        weight_quantizer: of the folded weight (upstream: LastValueQuantize with a narrow range); None to keep it
            in float.
        activation_quantizer: of the activation (upstream: MovingAvgQuantize), or None.
        schedule: of quantization and of freezing; the buffer `step` counts training passes.
        fused: update the moving variance as TensorFlow's fused batch norm does.
        eval_quant_delay: the number of training steps before which eval computes in float; None to always
            quantize.

    Raises:
        HagoError: the layer or the batch norm cannot be folded.

    References:
        tensorflow/contrib/quantize/python/fold_batch_norms.py (r1.15); Jacob et al., arXiv:1712.05877,
        section 3.2; Krishnamoorthi, arXiv:1806.08342, section 3.2.2.
    """

    step: Tensor

    def __init__(
        self,
        layer: Layer,
        bn: BatchNorm,
        activation: Callable[[Tensor], Tensor] | None = None,
        *,
        weight_quantizer: RangeObserver | None = None,
        activation_quantizer: RangeObserver | None = None,
        schedule: Schedule | None = None,
        fused: bool = True,
        eval_quant_delay: int | None = None,
    ) -> None:
        super().__init__()
        check_layer(layer)
        check_norm(bn)
        if bn.num_features != layer.weight.shape[0]:
            raise HagoError(f"a batch norm of {bn.num_features} channels after {layer.weight.shape[0]} outputs")
        self.layer, self.bn, self.activation = layer, bn, activation
        self.weight_quantizer, self.activation_quantizer = weight_quantizer, activation_quantizer
        self.schedule, self.fused, self.eval_quant_delay = schedule or Schedule(), fused, eval_quant_delay
        self.register_buffer("step", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        y = self.trace(x).add_fold
        if self.activation is not None:
            y = self.activation(y)
        if self.activation_quantizer is None:
            return y
        quantized: Tensor = self.activation_quantizer(y, quantize=self._quantizes())
        return quantized

    def trace(self, x: Tensor) -> FoldedPass:
        """Run the layer up to the activation; in training, count a step and update the statistics."""
        if self.training:
            self.step.add_(1)
        mean, variance = self.bn.running_mean, self.bn.running_var
        assert mean is not None and variance is not None
        sigma_m = torch.sqrt(variance + self.bn.eps)
        if not self.training or self.schedule.freezes(int(self.step)):
            return self._run_folded(x, mean, sigma_m, None)
        mu, var, count = self._batch_statistics(x)
        self._update_statistics(mean, variance, mu.detach(), var.detach(), count)
        return self._run_folded(x, mu, sigma_m, torch.sqrt(var + self.bn.eps))

    def _quantizes(self) -> bool:
        if self.training:
            return self.schedule.quantizes(int(self.step))
        return self.eval_quant_delay is None or int(self.step) >= self.eval_quant_delay

    def _batch_statistics(self, x: Tensor) -> tuple[Tensor, Tensor, int]:
        """Mean and population variance per channel of the unquantized layer's output, and the values per channel."""
        y = run_layer(self.layer, x, self.layer.weight, self.layer.bias)
        axis = output_axis(self.layer, y)
        count = y.numel() // y.shape[axis]
        if self.fused and count < 2:
            raise HagoError(f"a batch norm in training got {count} values per channel; expected at least 2")
        reduced = other_axes(axis, y.ndim)
        return y.mean(reduced), y.var(reduced, correction=0), count

    def _update_statistics(self, mean: Tensor, variance: Tensor, mu: Tensor, var: Tensor, count: int) -> None:
        assert self.bn.momentum is not None
        if self.fused:
            var = var * (count / (count - 1))
        with torch.no_grad():
            mean.sub_((mean - mu) * self.bn.momentum)
            variance.sub_((variance - var) * self.bn.momentum)
            if self.bn.num_batches_tracked is not None:
                self.bn.num_batches_tracked.add_(1)

    def _run_folded(self, x: Tensor, mu: Tensor, sigma_m: Tensor, sigma_b: Tensor | None) -> FoldedPass:
        """Run the folded layer on `x`, normalized by `mu` and by `sigma_b`, or by `sigma_m` where that is None."""
        layer = self.layer
        sigma = sigma_m if sigma_b is None else sigma_b
        gamma = torch.ones_like(sigma) if self.bn.weight is None else self.bn.weight
        weight = layer.weight
        if sigma_b is not None:  # TensorFlow's order of operations, so that the fake quantization rounds ties alike
            weight = weight * per_channel(sigma_b / sigma_m, layer)
        folded = weight * per_channel(gamma * (1 / sigma), layer)
        quantized = folded
        if self.weight_quantizer is not None:
            quantized = self.weight_quantizer(folded, quantize=self._quantizes())
        conv = run_layer(layer, x, quantized, None)
        axis = output_axis(layer, conv)
        corrected = conv if sigma_b is None else conv * broadcast_along(sigma_m / sigma_b, axis, conv.ndim)
        centre = mu if layer.bias is None else mu - layer.bias
        shift = -centre * gamma * (1 / sigma)
        if self.bn.bias is not None:
            shift = shift + self.bn.bias
        return FoldedPass(folded, quantized, conv, corrected, corrected + broadcast_along(shift, axis, conv.ndim))
