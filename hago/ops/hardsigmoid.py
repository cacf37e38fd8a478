"""hardsigmoid: `clamp(x + 3, 0, 6) / 6`."""

import torch.nn.functional as F

from hago.ops._elementwise import elementwise_rule

RULE = elementwise_rule("hardsigmoid", F.hardsigmoid)
