"""conv3d: 3-dimensional convolution; groups, dilation, strides, numeric, same and valid padding."""

from hago.ops._conv import conv_rule

RULE = conv_rule(3)
