"""tanh: the hyperbolic tangent."""

import torch

from hago.ops._elementwise import elementwise_rule

RULE = elementwise_rule("tanh", torch.tanh)
