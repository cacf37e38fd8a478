"""adaptive_avg_pool2d: 2-dimensional average pooling down to a given size; size 1 is global pooling."""

from hago.ops._pool import adaptive_avg_pool_rule

RULE = adaptive_avg_pool_rule(2, aliases=("nn.global_avg_pool2d", "global_avg_pool2d"))
