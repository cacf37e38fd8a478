"""sigmoid: `1 / (1 + exp(-x))`; on integers a lookup table."""

import torch

from hago.ops._elementwise import elementwise_rule

RULE = elementwise_rule("sigmoid", torch.sigmoid)
