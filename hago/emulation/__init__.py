"""The arithmetic and the quantizers of other systems, bit for bit, on tensors; one module or package a system.

The names here are the systems. Users compare engines with these functions, hardware files name some of them as
forms of an operator, and training offers some as schemes. hago's own arithmetic imports nothing from here.
"""

from hago.emulation import (
    dorefa,
    gemmlowp,
    oneflow,
    pytorch,
    tensorflow,
    tflite,
    tpu_mlir,
)

__all__ = [
    "dorefa",
    "gemmlowp",
    "oneflow",
    "pytorch",
    "tensorflow",
    "tflite",
    "tpu_mlir",
]
