"""Convolutions whose gradients are right on every CPU."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def without_stride(
    x: Tensor, weight: Tensor, stride: Sequence[int], padding: str | Sequence[int]
) -> tuple[Tensor, Sequence[int]]:
    """What a convolution reads, and its stride, such that the weight's gradient is right.

    Where single places are read and some are left out (a kernel of 1, a stride of 2), oneDNN's gradient of the weight
    for AVX2 is wrong, or ends the process, if channels are few and last (oneDNN issue 6035, seen up to torch 2.13).
    Another kernel computes it where the places that are left out are not there. Nothing changes without gradients.
    """
    is_padded = padding not in ("valid", "same") and any(padding)
    is_point = math.prod(weight.shape[2:]) == 1 and not is_padded and any(step > 1 for step in stride)
    if not (is_point and weight.requires_grad and torch.is_grad_enabled()):
        return x, stride
    for axis, step in enumerate(stride, start=x.ndim - len(stride)):
        x = x[(slice(None),) * axis + (slice(None, None, step),)]
    return x, [1] * len(stride)
