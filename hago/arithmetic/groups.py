"""Groups: neighbouring entries of a channel of a weight that share a scale.

A weight has its output channels along its first axis. The other axes are flattened, in the order of memory of a
contiguous tensor (of a convolution: input channel by input channel, with all places of the window for each), and cut
into groups of a number of entries; the last group may be shorter. What each group has of its own, such as a scale, is a
tensor of shape (channels, groups).

References:
    S. Dai et al., "VS-Quant: Per-Vector Scaled Quantization for Accurate Low-Precision Neural Network Inference",
    MLSys 2021, where a group is called a vector.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor


def groups_of(shape: Sequence[int], group: int) -> tuple[int, int]:
    """The shape (channels, groups) of what each group of a weight has of its own.

    Args:
        shape: of the weight.
        group: the number of entries of a group.
    """
    return shape[0], -(-math.prod(shape[1:]) // group)


def spread(values: Tensor, shape: Sequence[int], group: int) -> Tensor:
    """Give every entry of a weight the value of its group.

    Args:
        values: (channels, groups), or one value for all entries.
        shape: of the weight.

    Returns:
        A tensor of the shape of the weight; `values` itself if it is one value.
    """
    if values.numel() == 1:
        return values
    # faster than repeat_interleave, which gathers
    repeated = values.unsqueeze(2).expand(-1, -1, group).reshape(len(values), -1)
    return repeated[:, : math.prod(shape[1:])].reshape(tuple(shape))


def in_groups(rows: Tensor, group: int) -> Tensor:
    """The entries of every group, with zeros at the end of the last group of a channel if it is shorter.

    Args:
        rows: (channels, ..., entries).

    Returns:
        (channels, ..., groups, group).
    """
    padded = F.pad(rows, (0, -rows.shape[-1] % group))
    return padded.reshape(*rows.shape[:-1], -1, group)
