"""Batch norms in training: folded into the layer before them, but normalizing by the statistics of the batch.

There are two styles. TensorFlow's style quantizes the weight that will be deployed (folded with the moving sigma) and
corrects the output to the statistics of the batch. OneFlow's style folds with the statistics of the batch. In eval,
and once frozen, both equal the folded layer that `hago.graph.passes.fold_batch_norms` makes, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from hago.errors import HagoError
from hago.graph import Graph, Node
from hago.graph.passes.fold_batch_norms import FOLDABLE, scale_channels

NormStyle = Literal["frozen", "tensorflow", "oneflow"]
#: Quantizes the weight of a layer before a batch norm is folded in: (weight, multiplier per channel) -> weight.
WeightQuantizer = Callable[[Tensor, Tensor], Tensor]
#: A layer applied to the inputs of one batch, on real values: (weight, bias or None) -> output.
LayerFunction = Callable[[Tensor, Tensor | None], Tensor]


@dataclass(frozen=True, slots=True)
class FoldedSite:
    """A layer and the batch norm that was folded into it; made by `folded_sites`.

    Args:
        layer: the node of the layer, before folding.
        norm: the node of the batch norm; `norm.inputs[1:]` are gamma, beta, mean and variance.
        sources: names of the constants of weight and bias before folding; None for no bias.
        folded: names of the constants of weight and bias after folding.
    """

    layer: Node
    norm: Node
    sources: tuple[str, str | None]
    folded: tuple[str, str]


def folded_sites(unfolded: Graph, folded: Graph) -> list[FoldedSite]:
    """The layers into which exactly one batch norm was folded.

    Args:
        unfolded, folded: the graph before and after `fold_batch_norms`.
    """
    by_layer: dict[str, list[FoldedSite]] = {}
    for norm in unfolded:
        if norm.op != "batch_norm" or norm.name in folded.by_name:
            continue
        before, after = unfolded[norm.inputs[0]], folded.by_name.get(norm.inputs[0])
        if before.op in FOLDABLE and after is not None:
            bias = before.inputs[2] if len(before.inputs) > 2 else None
            site = FoldedSite(before, norm, (before.inputs[1], bias), (after.inputs[1], after.inputs[2]))
            by_layer.setdefault(before.name, []).append(site)
    return [group[0] for group in by_layer.values() if len(group) == 1]


@dataclass(frozen=True, slots=True, eq=False)
class FoldedConstants:
    """The weight and bias of a layer for one batch, returned by `FoldedNorm.in_training`.

    Args:
        weight, bias: used in place of the folded constants.
        correction, shift: (channels,); the output without bias is multiplied by `correction`, and `shift` is added in
            place of the bias. None if only the bias is added.
        multiplier: (channels,), by which the weight before folding was multiplied; None with `correction`.
    """

    weight: Tensor
    bias: Tensor
    correction: Tensor | None = None
    shift: Tensor | None = None
    multiplier: Tensor | None = None


class FoldedNorm(nn.Module):
    """The weight of a layer and its batch norm, trained together. `prepare_qat` makes it; a QatModel owns it.

    With sigma_m and sigma_b the square roots of the moving variance plus eps and of the batch's variance plus eps,
    W'_m and W'_b the weight scaled by gamma / sigma_m and gamma / sigma_b, and fq its quantization:

        tensorflow: y = layer(x, fq(W'_m)) * sigma_m / sigma_b + beta - gamma * mu_b / sigma_b
        oneflow:    y = layer(x, fq(W'_b)) + beta - gamma * mu_b / sigma_b, statistics without gradient
        frozen:     y = layer(x, fq(W'_m)) + beta - gamma * mu_m / sigma_m

    In TensorFlow's style sigma_b is of the population variance, in OneFlow's of the unbiased one; moving variances are
    updated with the unbiased one.

    Args:
        site: the layer and the batch norm.
        graph: before folding; training starts from its constants.
        style: "tensorflow" or "oneflow".
        momentum: the weight of the new batch in the moving statistics, as in torch.
        fixed: names of constants that are not trained.

    Attributes:
        quantizer: quantizes the weight before the batch norm is folded in, as DoReFa-Net does, so that the folded
            weight is on these levels times gamma / sigma. `hago.qat.dorefa.set_norm_quantizers` sets it.

    References:
        tensorflow/contrib/quantize/python/fold_batch_norms.py (r1.15); Oneflow-Inc/models,
        Quantization/quantization_ops/conv_bn.py. `hago.emulation` has both as single layers.
    """

    weight: Tensor
    bias: Tensor | None
    gamma: Tensor
    beta: Tensor
    mean: Tensor
    variance: Tensor

    def __init__(self, site: FoldedSite, graph: Graph, style: str, momentum: float, fixed: frozenset[str]) -> None:
        super().__init__()
        self.site, self.style, self.momentum = site, style, momentum
        self.quantizer: WeightQuantizer | None = None
        self.eps = float(site.norm.attrs["eps"])
        gamma, beta, mean, variance = site.norm.inputs[1:]
        names = {"weight": site.sources[0], "bias": site.sources[1], "gamma": gamma, "beta": beta}
        for part, name in names.items():
            if name is None:
                self.register_parameter(part, None)
            elif name in fixed:
                self.register_buffer(part, graph.consts[name].detach().clone())
            else:
                self.register_parameter(part, nn.Parameter(graph.consts[name].detach().clone()))
        self.register_buffer("mean", graph.consts[mean].detach().clone())
        self.register_buffer("variance", graph.consts[variance].detach().clone())

    def _scaled(self, m: Tensor, *, quantized_weight: bool = True) -> Tensor:
        """The weight with its output channels multiplied by `m`, in float64 and rounded once."""
        weight = self._weight(m) if quantized_weight else self.weight
        return scale_channels(weight.to(torch.float64), m, self.site.layer).to(torch.float32)

    def _weight(self, m: Tensor) -> Tensor:
        """The weight, quantized by `quantizer` if there is one, for a batch norm that will multiply it by `m`."""
        return self.weight if self.quantizer is None else self.quantizer(self.weight, m)

    def folded(self, *, quantized_weight: bool = True) -> tuple[Tensor, Tensor]:
        """(weight, bias) folded with the moving statistics, as `fold_batch_norms` makes them.

        Args:
            quantized_weight: whether to apply `quantizer` to the weight.
        """
        parts = self.gamma, self.beta, self.mean, self.variance
        gamma, beta, mean, variance = (t.to(torch.float64) for t in parts)
        m = gamma / torch.sqrt(variance + self.eps)
        o = beta - mean * m
        bias = torch.zeros_like(m) if self.bias is None else self.bias.to(torch.float64)
        return self._scaled(m, quantized_weight=quantized_weight), (bias * m + o).to(torch.float32)

    def in_training(self, layer: LayerFunction) -> FoldedConstants:
        """Compute the weight and bias of the layer for this batch, and update the moving statistics.

        Args:
            layer: the layer applied to the inputs of the batch.

        Raises:
            HagoError: the batch has one value per channel.
        """
        sigma_m = torch.sqrt(self.variance + self.eps)
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.style == "tensorflow"):
            weight = self._weight(self.gamma.detach() / sigma_m)
            mu, variance = self._statistics(layer(weight, self.bias))
        gamma, beta = self.gamma, self.beta
        centre = mu if self.bias is None else mu - self.bias
        if self.style == "tensorflow":
            sigma_b = torch.sqrt(variance + self.eps)
            m = gamma / sigma_m
            weight = self._scaled(m.to(torch.float64))
            shift = beta - centre * gamma / sigma_b
            return FoldedConstants(weight, torch.zeros_like(shift), sigma_m / sigma_b, shift, m)
        m = gamma / torch.sqrt(variance + self.eps)
        return FoldedConstants(self._scaled(m.to(torch.float64)), beta - centre * m)

    def normalized(self, layer: LayerFunction) -> Tensor:
        """Compute the layer and its batch norm in float as in training, and update the moving statistics."""
        y = layer(self.weight, self.bias)
        mu, variance = self._statistics(y)
        shape = [1, -1, *[1] * (y.ndim - 2)]
        m = self.gamma / torch.sqrt(variance + self.eps)
        return (y - mu.reshape(shape)) * m.reshape(shape) + self.beta.reshape(shape)

    def _statistics(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """Compute mean and variance of the layer's output `y` in float32, and update the moving ones."""
        y = y.float()
        count = y.numel() // y.shape[1]
        if count < 2:
            raise HagoError(
                f"batch norm {self.site.norm.name!r} got one value per channel in training; use larger batches, or "
                "norms='frozen'"
            )
        reduced = [d for d in range(y.ndim) if d != 1]
        mu, variance = y.mean(reduced), y.var(reduced, correction=0)
        unbiased = variance.detach() * (count / (count - 1))
        with torch.no_grad():
            self.mean.lerp_(mu.detach(), self.momentum)
            self.variance.lerp_(unbiased, self.momentum)
        return mu, variance if self.style == "tensorflow" else unbiased
