"""avg_pool1d: 1-dimensional average pooling; on integers the sum of each window."""

from hago.ops._pool import avg_pool_rule

RULE = avg_pool_rule(1)
