"""sum: over axes other than the batch; the scale passes through."""

import torch

from hago.ops._reduce import reduce_rule
from hago.ops._rule import first_scale

RULE = reduce_rule("sum", "aten.sum.dim_IntList", torch.sum, first_scale)
