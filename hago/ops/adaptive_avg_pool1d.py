"""adaptive_avg_pool1d: 1-dimensional average pooling down to a given size."""

from hago.ops._pool import adaptive_avg_pool_rule

RULE = adaptive_avg_pool_rule(1)
