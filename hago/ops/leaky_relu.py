"""leaky_relu: `x` where positive, else `negative_slope * x`."""

import torch.nn.functional as F

from hago.ops._elementwise import elementwise_rule

RULE = elementwise_rule("leaky_relu", F.leaky_relu, ("negative_slope",), ({}, {"negative_slope": 0.2}))
