"""Convolutions and linear layers, run with a weight and bias that are not their own.

The training layers of TensorFlow and OneFlow call these functions to run a layer on its fake-quantized weight.
"""

from __future__ import annotations

from typing import Final

from torch import Tensor, nn
from torch.nn import functional

from hago.arithmetic.convolution import without_stride
from hago.emulation._checks import broadcast_along
from hago.errors import HagoError

#: Layers that can be run with a fake-quantized weight; their output channels are axis 0 of the weight.
Layer = nn.Conv1d | nn.Conv2d | nn.Conv3d | nn.Linear
LAYERS: Final = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear)
BatchNorm = nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d


def check_layer(layer: nn.Module) -> None:
    """Refuse a module that is not one of the LAYERS.

    Raises:
        HagoError: e.g. a transposed convolution, whose output channels are not axis 0 of its weight.
    """
    if not isinstance(layer, LAYERS):
        raise HagoError(f"got a {type(layer).__name__}; expected Conv1d, Conv2d, Conv3d or Linear")


def check_norm(bn: BatchNorm) -> None:
    """Refuse a batch norm that keeps no moving average of its statistics.

    Raises:
        HagoError: it has no running statistics, or no momentum.
    """
    if bn.running_mean is None or bn.momentum is None:
        raise HagoError("the batch norm keeps no running average; expected running statistics and a momentum")


def run_layer(layer: Layer, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Run the layer with `weight` and `bias` in place of its own."""
    if isinstance(layer, nn.Linear):
        return functional.linear(x, weight, bias)
    subsampled, stride = without_stride(x, weight, layer.stride, layer.padding)
    if subsampled is not x:
        convolve = (functional.conv1d, functional.conv2d, functional.conv3d)[weight.ndim - 3]
        return convolve(subsampled, weight, bias, stride, groups=layer.groups)
    y: Tensor = layer._conv_forward(x, weight, bias)
    return y


def per_channel(values: Tensor, layer: Layer) -> Tensor:
    """Reshape a vector over output channels so that it broadcasts against the layer's weight."""
    return broadcast_along(values, 0, layer.weight.ndim)


def output_axis(layer: Layer, y: Tensor) -> int:
    """The axis of the layer's output along which its channels run."""
    return y.ndim - 1 if isinstance(layer, nn.Linear) else y.ndim - layer.weight.ndim + 1
