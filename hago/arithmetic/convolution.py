"""A rewrite of convolutions that avoids a wrong gradient of oneDNN on some CPUs."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def without_stride(
    x: Tensor, weight: Tensor, stride: Sequence[int], padding: str | Sequence[int]
) -> tuple[Tensor, Sequence[int]]:
    """The input and the stride of an equal convolution whose gradient of the weight is right.

    For a kernel of 1 with a stride above 1, oneDNN's gradient of the weight for AVX2 is wrong, or crashes the process,
    if channels are few and last in memory (oneDNN issue 6035, present up to torch 2.13). Taking every `stride`-th
    entry of the input first gives an equal convolution of stride 1, whose gradient another kernel computes.

    Returns:
        (x, stride) unchanged if the gradient is not affected, or not needed.
    """
    is_padded = padding not in ("valid", "same") and any(padding)
    is_point = math.prod(weight.shape[2:]) == 1 and not is_padded and any(step > 1 for step in stride)
    if not (is_point and weight.requires_grad and torch.is_grad_enabled()):
        return x, stride
    for axis, step in enumerate(stride, start=x.ndim - len(stride)):
        x = x[(slice(None),) * axis + (slice(None, None, step),)]
    return x, [1] * len(stride)
