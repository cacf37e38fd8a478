"""max_pool2d: 2-dimensional max pooling; padding stands for minus infinity."""

from hago.ops._pool import max_pool_rule

RULE = max_pool_rule(2)
