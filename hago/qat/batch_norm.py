"""Batch norms in training: folded into the layer before them, yet normalizing by the statistics of the batch.

There are two styles. TensorFlow's quantizes the weight that will be deployed (folded with the moving sigma) and
corrects the output to the statistics of the batch. OneFlow's folds with the batch's own statistics. In eval, and once
frozen, both equal the folded layer that `hago.graph.passes.fold_batch_norms` makes, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from hago.errors import HagoError
from hago.graph.graph import Graph, Node
from hago.graph.passes.fold_batch_norms import CHANNEL_AXIS, scale_channels

Norms = Literal["frozen", "tensorflow", "oneflow"]
#: Quantizes a weight to levels of its own: (weight, multipliers of its output channels) -> quantized weight.
Squash = Callable[[Tensor, Tensor], Tensor]
#: The layer on real values: (weight, bias or None) -> output.
FoldedLayer = Callable[[Tensor, Tensor | None], Tensor]


@dataclass(frozen=True, slots=True)
class FoldedSite:
    """A layer and the batch norm that was folded into it.

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


def sites(unfolded: Graph, folded: Graph) -> list[FoldedSite]:
    """The batch norms that were folded, except where several were folded into one layer."""
    by_layer: dict[str, list[FoldedSite]] = {}
    for norm in unfolded:
        if norm.op != "batch_norm" or norm.name in folded.by_name:
            continue
        before, after = unfolded[norm.inputs[0]], folded.by_name.get(norm.inputs[0])
        if before.op in CHANNEL_AXIS and after is not None:
            bias = before.inputs[2] if len(before.inputs) > 2 else None
            site = FoldedSite(before, norm, (before.inputs[1], bias), (after.inputs[1], after.inputs[2]))
            by_layer.setdefault(before.name, []).append(site)
    return [group[0] for group in by_layer.values() if len(group) == 1]


@dataclass(frozen=True, slots=True, eq=False)
class Folded:
    """The weight and bias of a layer for one batch, returned by `FoldedNorm.in_training`.

    Args:
        weight, bias: used in place of the folded constants.
        correction, shift: (channels,); the output without bias is multiplied by the one and the other is added,
            instead of the bias. None where the bias alone is added.
    """

    weight: Tensor
    bias: Tensor
    correction: Tensor | None = None
    shift: Tensor | None = None


class FoldedNorm(nn.Module):
    """The weight of a layer and its batch norm, trained together. `prepare_qat` makes it; a QatModel owns it.

    With sigma_m and sigma_b the roots of the moving and of the batch's variance plus eps, W' the weight
    scaled by gamma / sigma, and fq its quantization:

        tensorflow: y = layer(x, fq(W'_m)) * sigma_m / sigma_b + beta - gamma * mu_b / sigma_b
        oneflow:    y = layer(x, fq(W'_b)) + beta - gamma * mu_b / sigma_b, statistics without gradient
        frozen:     y = layer(x, fq(W'_m)) + beta - gamma * mu_m / sigma_m

    TensorFlow's sigma_b is that of the population, OneFlow's is unbiased; moving variances take the unbiased one.

    Args:
        site: the layer and the batch norm.
        graph: before folding; training starts from its constants.
        style: "tensorflow" or "oneflow".
        momentum: as in torch: the weight of the new batch in the moving statistics.
        fixed: names of constants that are not trained.

    Attributes:
        squash: quantizes the weight before the batch norm is folded in, as DoReFa-Net does; the folded weight is then
            on those levels, times gamma / sigma. `squash_norms` sets it; None by default.

    References:
        tensorflow/contrib/quantize/python/fold_batch_norms.py (r1.15); Oneflow-Inc/models,
        Quantization/quantization_ops/conv_bn.py. `hago.emulation` has both for single
        layers.
    """

    mean: Tensor
    variance: Tensor

    def __init__(self, site: FoldedSite, graph: Graph, style: str, momentum: float, fixed: frozenset[str]) -> None:
        super().__init__()
        self.site, self.style, self.momentum = site, style, momentum
        self.squash: Squash | None = None
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

    def part(self, name: str) -> Tensor:
        """The tensor of that name: weight, bias, gamma, beta, mean or variance, trained or not."""
        tensor: Tensor = getattr(self, name)
        return tensor

    def _scaled(self, m: Tensor, *, squashed: bool = True) -> Tensor:
        """The weight with its output channels multiplied, in float64 and rounded once."""
        weight = self._weight(m) if squashed else self.part("weight")
        return scale_channels(weight.to(torch.float64), m, self.site.layer).to(torch.float32)

    def _weight(self, m: Tensor) -> Tensor:
        return self.part("weight") if self.squash is None else self.squash(self.part("weight"), m)

    def folded(self, *, squashed: bool = True) -> tuple[Tensor, Tensor]:
        """(weight, bias) folded with the moving statistics, as `fold_batch_norms` makes them.

        Args:
            squashed: whether to apply `squash` to the weight.
        """
        gamma, beta, mean, variance = (self.part(p).to(torch.float64) for p in ("gamma", "beta", "mean", "variance"))
        m = gamma / torch.sqrt(variance + self.eps)
        o = beta - mean * m
        bias = torch.zeros_like(m) if self.bias is None else self.part("bias").to(torch.float64)
        return self._scaled(m, squashed=squashed), (bias * m + o).to(torch.float32)

    def in_training(self, layer: FoldedLayer) -> Folded:
        """The weight and bias of the layer for this batch; the moving statistics are updated.

        Args:
            layer: the layer applied to the inputs of the batch.

        Raises:
            HagoError: the batch has one value per channel.
        """
        sigma_m = torch.sqrt(self.variance + self.eps)
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.style == "tensorflow"):
            weight = self._weight(self.part("gamma").detach() / sigma_m)
            mu, variance = self._statistics(layer, weight)
        gamma, beta = self.part("gamma"), self.part("beta")
        centre = mu if self.bias is None else mu - self.part("bias")
        if self.style == "tensorflow":
            sigma_b = torch.sqrt(variance + self.eps)
            weight = self._scaled((gamma / sigma_m).to(torch.float64))
            shift = beta - centre * gamma / sigma_b
            return Folded(weight, torch.zeros_like(shift), sigma_m / sigma_b, shift)
        m = gamma / torch.sqrt(variance + self.eps)
        return Folded(self._scaled(m.to(torch.float64)), beta - centre * m)

    def normalized(self, layer: FoldedLayer) -> Tensor:
        """The output of the layer and its batch norm in training, in float; the moving statistics are updated."""
        bias = None if self.bias is None else self.part("bias")
        y = layer(self.part("weight"), bias)
        mu, variance = self._statistics(lambda weight, bias: y, self.part("weight"))
        shape = [1, -1, *[1] * (y.ndim - 2)]
        m = self.part("gamma") / torch.sqrt(variance + self.eps)
        return (y - mu.reshape(shape)) * m.reshape(shape) + self.part("beta").reshape(shape)

    def _statistics(self, layer: FoldedLayer, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance of the unquantized layer on this batch, in float32; the moving ones are updated."""
        y = layer(weight, None if self.bias is None else self.part("bias")).float()
        count = y.numel() // y.shape[1]
        if count < 2:
            raise HagoError(
                f"batch norm {self.site.norm.name!r} got one value per channel in training; use larger batches, or "
                "norms='frozen'"
            )
        rest = [d for d in range(y.ndim) if d != 1]
        mu, variance = y.mean(rest), y.var(rest, correction=0)
        unbiased = variance.detach() * (count / (count - 1))
        with torch.no_grad():
            self.mean.lerp_(mu.detach(), self.momentum)
            self.variance.lerp_(unbiased, self.momentum)
        return mu, variance if self.style == "tensorflow" else unbiased
