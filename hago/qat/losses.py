"""Losses of fine-tuning, per batch: functions of the outputs and those of the float model, or the labels."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional as F

from hago.errors import DataError, HagoError, did_you_mean
from hago.search.objective import check_classes, class_count

#: (outputs, the float model's outputs, labels or None) -> a scalar to minimize.
Loss = Callable[[Sequence[Tensor], Sequence[Tensor], Tensor | None], Tensor]


def relative_error(outputs: Sequence[Tensor], reference: Sequence[Tensor], labels: Tensor | None) -> Tensor:
    """Squared error over squared reference, averaged over outputs: the inverse of the SQNR. It ignores labels."""
    parts = [
        (o.to(torch.float32) - r).square().sum() / r.square().sum().clamp_min(1e-12)
        for o, r in zip(outputs, reference, strict=True)
        if r.is_floating_point()
    ]
    if not parts:
        raise DataError("no output of the model is a floating-point tensor, so there is nothing to train on")
    return torch.stack(parts).mean()


def divergence_loss(outputs: Sequence[Tensor], reference: Sequence[Tensor], labels: Tensor | None) -> Tensor:
    """KL divergence from the float model's distribution over classes (axis 1 of the first output). It ignores labels.

    References:
        Hinton, Vinyals and Dean, arXiv:1503.02531, at temperature 1.
    """
    if reference[0].ndim < 2 or reference[0].shape[1] < 2:
        raise DataError(
            f"objective 'kl' needs classes on axis 1; the first output has shape {tuple(reference[0].shape)}: use 'mse'"
        )
    p, q = F.log_softmax(reference[0], 1), F.log_softmax(outputs[0].to(torch.float32), 1)
    return (p.exp() * (p - q)).sum(1).mean()


def cross_entropy_loss(outputs: Sequence[Tensor], reference: Sequence[Tensor], labels: Tensor | None) -> Tensor:
    """Cross entropy of the first output with the labels, over the classes on its axis 1.

    Args:
        labels: indices of classes, or probabilities of the output's own shape.

    Raises:
        DataError: there are no labels, or they do not fit the output.
    """
    if labels is None:
        raise DataError("objective 'labels' needs labels; pass (inputs, labels) batches, or use 'mse' or 'kl'")
    first = outputs[0]
    if not labels.is_floating_point() or labels.shape != first.shape or class_count(first) < 2:
        check_classes(labels, first)
        labels = labels.long()
    loss: Tensor = F.cross_entropy(first.to(torch.float32), labels)
    return loss


LOSSES: Final[Mapping[str, Loss]] = {"mse": relative_error, "kl": divergence_loss, "labels": cross_entropy_loss}


def named_loss(spec: str | Loss) -> tuple[str, Loss]:
    """Return (name, function) of a loss by its name in LOSSES, or of a function that the user passes.

    Raises:
        HagoError: the name is unknown.
    """
    if callable(spec):
        return getattr(spec, "__name__", "custom"), spec
    if not isinstance(spec, str) or spec not in LOSSES:
        raise HagoError(
            f"unknown training objective {spec!r}; known: {', '.join(LOSSES)}." + did_you_mean(str(spec), LOSSES)
        )
    return spec, LOSSES[spec]
