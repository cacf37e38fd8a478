"""conv_transpose2d: 2-dimensional transposed convolution; strides, output padding, groups, dilation."""

from hago.ops._conv_transpose import conv_transpose_rule

RULE = conv_transpose_rule(2)
