"""gelu: `x` times the normal distribution function of `x`, exact or by tanh."""

import torch.nn.functional as F

from hago.ops._elementwise import elementwise_rule

RULE = elementwise_rule("gelu", F.gelu, ("approximate",), ({}, {"approximate": "tanh"}))
