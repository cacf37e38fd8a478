"""leaky_relu: `x` where positive, else `negative_slope * x`."""

import torch.nn.functional as F

from hago.ops._elementwise import elementwise_rule
from hago.ops.forms.tflite import tflite_leaky_relu
from hago.ops.forms.tpu_mlir import tpu_mlir_leaky_relu

RULE = elementwise_rule(
    "leaky_relu",
    F.leaky_relu,
    ("negative_slope",),
    ({}, {"negative_slope": 0.2}),
    forms={"tflite": tflite_leaky_relu(), "tpu_mlir": tpu_mlir_leaky_relu()},
)
