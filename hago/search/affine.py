"""The affine correction: a factor and an offset for every output channel of a layer, so that the layer with the
integers of its weight gives what it gives with its float weight.

What a layer reads in the float model goes through it with both weights. By channel, y is the output with the float
weight, y_q that with the integers, and the least squares of a * y_q + b for y are

    a = cov(y, y_q) / var(y_q),    b = mean(y) - a * mean(y_q).

The factor goes into the scale of the weight's channel, which is a factor of the multiplier that requantizes its sums:
the thresholds of the channel are multiplied by it, and its integers stay. The offset goes into the bias, as that of the
correction of biases, which is then found on the simulation. So chips with one scale for a whole weight, or with powers
of two, have no affine correction.

References:
    R. Banner et al., "Post Training 4-bit Quantization of Convolutional Networks for Rapid-Deployment", NeurIPS 2019,
    section 3.2 (bias correction), correct the mean and the norm of each channel of a weight; here the outputs do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor

from hago.arithmetic.numerics import dequantize
from hago.arithmetic.types import Edge
from hago.correction import LAYERS, channel_axis
from hago.graph import Node, compute_real, run_graph
from hago.plan import EstimatedThresholds, Plan
from hago.search.block_reconstruction import stored_integers, trained_layers
from hago.search.equalize import TINY
from hago.search.float_layers import FloatLayers
from hago.search.layer_correction import correct_layers
from hago.search.measured_point import MeasuredPoint
from hago.search.preparation import Prepared
from hago.search.proposed_thresholds import with_scaled

#: Factors are at most this, and at least its inverse.
MOST_FACTOR: Final = 2.0


def affine_corrections(point: MeasuredPoint, inputs: Sequence[Tensor]) -> tuple[Prepared, ...]:
    """The Prepared of a point with the affine correction of its layers, and with the factors alone, whose biases stay;
    none where no layer can hold one.

    Args:
        inputs: of the graph, the samples to find it on.
    """
    prepared, plan, bits = point.prepared, point.plan, point.bits
    if prepared.hardware.requantize.power_of_two or not isinstance(prepared.resolver.thresholds, EstimatedThresholds):
        return ()
    factors = channel_factors(plan, inputs)
    if not factors:
        return ()
    changed = with_scaled(prepared.with_offsets({}), bits, {str(edge): of for edge, of in factors.items()})
    nearest, weights, biases = changed.resolver(bits), dict(prepared.offsets), dict[str, Tensor]()
    for edge in (edge for edges in trained_layers(plan).values() for edge in edges):
        name = plan.graph.source(edge)
        (before, integers), (after, near) = (stored_integers(of, edge) for of in (plan, nearest))
        if edge.slot == 1:
            weights[name] = integers.to(torch.int64) - near.to(torch.int64)
        elif (moved := weights.pop(name, None)) is not None:  # as far as before, in other units
            biases[name] = torch.round(moved * (before.scale / after.scale).flatten()).to(torch.int64)
    rounded = changed.with_offsets(weights)
    nearest_biases = rounded.resolver(bits)
    real = FloatLayers(nearest_biases.graph, nearest_biases.ops, inputs)
    offsets = correct_layers(nearest_biases, real, rounding=False, bias=True)
    return changed.with_offsets(weights | offsets), changed.with_offsets(weights | biases)


def channel_factors(plan: Plan, inputs: Sequence[Tensor]) -> dict[Edge, Tensor]:
    """By edge of a layer's weight with a scale for each output channel, the factors of these scales, float64."""
    factors: dict[Edge, Tensor] = {}
    layers = {name for name, edges in trained_layers(plan).items() if _has_channel_scales(plan, edges[0])}

    def compute(node: Node, operands: Sequence[Any]) -> Any:
        given = compute_real(node, operands, plan.ops)
        if node.name in layers:
            qparams, integers = stored_integers(plan, node.edges[1])
            weight = dequantize(integers.to(torch.float64), qparams).to(operands[1].dtype)
            quantized = compute_real(node, (operands[0], weight, *operands[2:]), plan.ops)
            scales = qparams.scale.numel()
            factors[node.edges[1]] = _least_squares(*(_channels(node, y, scales) for y in (given, quantized)))
        return given

    with torch.no_grad():
        run_graph(plan.graph, inputs, compute)
    return factors


def _channels(node: Node, value: Tensor, scales: int) -> Tensor:
    """A layer's output as (scales, n), without the means of channels: the groups of a transposed convolution share
    their scales."""
    rows = value.movedim(channel_axis(node), 0).flatten(1).to(torch.float64)
    rows = rows - rows.mean(1, keepdim=True)
    return rows.reshape(-1, scales, rows.shape[1]).movedim(1, 0).flatten(1)


def _least_squares(wanted: Tensor, given: Tensor) -> Tensor:
    """The factor of every row of `given` that is closest to `wanted`."""
    factors = (wanted * given).sum(1) / given.square().sum(1).clamp_min(TINY)
    factors = torch.where(given.any(1), factors, 1.0)
    return factors.clamp(1.0 / MOST_FACTOR, MOST_FACTOR)


def _has_channel_scales(plan: Plan, weight: Edge) -> bool:
    """Whether a layer's weight has a scale for each output channel, and no more."""
    target, axis = plan.target(weight), LAYERS[plan.graph[weight.dst].op][0]
    count = plan.graph.consts[plan.graph.source(weight)].shape[axis]
    return target is not None and target.group is None and target.scale.numel() == count > 1
