"""The arithmetic and the quantizers of other systems, bit for bit, on tensors: one module or package per system.

Users call these functions to compare engines. `hago.ops.forms` offers some of them as forms of an operator, which a
hardware file names; `hago.qat` offers some as training schemes. hago's own arithmetic imports nothing from here.
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
