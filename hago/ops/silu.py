"""silu: `x * sigmoid(x)`, also called swish."""

import torch.nn.functional as F

from hago.ops._elementwise import elementwise_rule

RULE = elementwise_rule("silu", F.silu)
