"""Batch norms in training: folded into the layer before them, yet fed by the statistics of the batch.

Two ways: TensorFlow's quantizes the weight that will be deployed (folded with the moving sigma) and
corrects the output to the batch's; OneFlow's folds with the batch's own statistics. In eval, and once
frozen, both are the folded layer that `frontend.fold` makes, to the bit.
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
#: The weight on levels of its own, which the multipliers of its output channels stretch.
Squash = Callable[[Tensor, Tensor], Tensor]
#: The layer on real values, with a weight and a bias (or none).
FoldedLayer = Callable[[Tensor, Tensor | None], Tensor]


@dataclass(frozen=True, slots=True)
class FoldedSite:
    """A batch norm that folding moved into a layer.

    Args:
        layer: the layer's node, with its attributes.
        norm: the batch norm's node; `norm.inputs[1:]` are gamma, beta, mean and variance.
        sources: constants of weight and bias before folding; None for no bias.
        folded: constants of weight and bias after it.
    """

    layer: Node
    norm: Node
    sources: tuple[str, str | None]
    folded: tuple[str, str]


def sites(unfolded: Graph, folded: Graph) -> list[FoldedSite]:
    """Every batch norm that was folded, of layers that one was folded into."""
    found: dict[str, list[FoldedSite]] = {}
    for norm in unfolded:
        if norm.op != "batch_norm" or norm.name in folded.by_name:
            continue
        before, after = unfolded[norm.inputs[0]], folded.by_name.get(norm.inputs[0])
        if before.op in CHANNEL_AXIS and after is not None:
            bias = before.inputs[2] if len(before.inputs) > 2 else None
            site = FoldedSite(before, norm, (before.inputs[1], bias), (after.inputs[1], after.inputs[2]))
            found.setdefault(before.name, []).append(site)
    return [one[0] for one in found.values() if len(one) == 1]


@dataclass(frozen=True, slots=True, eq=False)
class Folded:
    """What a layer runs with on one batch.

    Args:
        weight, bias: in the place of the folded constants.
        correction, shift: (channels,), what the output without bias is multiplied by and raised by
            instead of the bias; None where the bias says it all.
    """

    weight: Tensor
    bias: Tensor
    correction: Tensor | None = None
    shift: Tensor | None = None


class FoldedNorm(nn.Module):
    """A layer's weight and its batch norm.

    With sigma_m and sigma_b the roots of the moving and of the batch's variance plus eps, W' the weight
    scaled by gamma / sigma, and fq its quantization:

        tensorflow: y = layer(x, fq(W'_m)) * sigma_m / sigma_b + beta - gamma * mu_b / sigma_b
        oneflow:    y = layer(x, fq(W'_b)) + beta - gamma * mu_b / sigma_b, statistics without gradient
        frozen:     y = layer(x, fq(W'_m)) + beta - gamma * mu_m / sigma_m

    TensorFlow's sigma_b is of the population, OneFlow's unbiased; moving variances take the unbiased one.

    Args:
        site: where.
        graph: unfolded; its constants are where training starts.
        style: tensorflow or oneflow.
        momentum: torch's: the weight of the new batch in the moving statistics.
        fixed: constants that are not trained.

    Where `squash` is set, it quantizes the weight before the batch norm sees it, as DoReFa-Net does; what is
    folded is on those levels, times gamma / sigma.

    References:
        tensorflow/contrib/quantize/python/fold_batch_norms.py (r1.15); Oneflow-Inc/models,
        Quantization/quantization_ops/conv_bn.py. `tensorflow_fold` and `oneflow_layers` are the same for
        single layers.
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
        """The weight, bias, gamma or beta, trained or not."""
        found: Tensor = getattr(self, name)
        return found

    def _scaled(self, m: Tensor, *, squashed: bool = True) -> Tensor:
        """The weight with its output channels multiplied, in float64 and rounded once."""
        weight = self._weight(m) if squashed else self.part("weight")
        return scale_channels(weight.to(torch.float64), m, self.site.layer).to(torch.float32)

    def _weight(self, m: Tensor) -> Tensor:
        return self.part("weight") if self.squash is None else self.squash(self.part("weight"), m)

    def folded(self, *, squashed: bool = True) -> tuple[Tensor, Tensor]:
        """(weight, bias) by the moving statistics, as `fold_batch_norms` makes them.

        Args:
            squashed: whether the weight is on its levels, where it has some.
        """
        gamma, beta, mean, variance = (self.part(p).to(torch.float64) for p in ("gamma", "beta", "mean", "variance"))
        m = gamma / torch.sqrt(variance + self.eps)
        o = beta - mean * m
        bias = torch.zeros_like(m) if self.bias is None else self.part("bias").to(torch.float64)
        return self._scaled(m, squashed=squashed), (bias * m + o).to(torch.float32)

    def in_training(self, layer: FoldedLayer) -> Folded:
        """What the layer runs with on this batch; the moving statistics take it in.

        Args:
            layer: on the batch's inputs.

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
        """The layer and its batch norm in training, on real values."""
        bias = None if self.bias is None else self.part("bias")
        y = layer(self.part("weight"), bias)
        mu, variance = self._statistics(lambda weight, bias: y, self.part("weight"))
        shape = [1, -1, *[1] * (y.ndim - 2)]
        m = self.part("gamma") / torch.sqrt(variance + self.eps)
        return (y - mu.reshape(shape)) * m.reshape(shape) + self.part("beta").reshape(shape)

    def _statistics(self, layer: FoldedLayer, weight: Tensor) -> tuple[Tensor, Tensor]:
        """The batch's mean and variance of the unquantized layer, in float32; the moving ones take them in."""
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
