"""sum: over axes other than the batch; the scale passes through."""

from collections.abc import Sequence

import torch
from torch import Tensor

from hago.ops._reduce import reduce_rule
from hago.ops._rule import Attrs


def _scale(attrs: Attrs, scales: Sequence[Tensor]) -> Tensor:
    return scales[0]


RULE = reduce_rule("sum", "aten.sum.dim_IntList", torch.sum, _scale)
