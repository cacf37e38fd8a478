"""add: two operands, on one scale or as the chip at hand brings them together."""

import operator

from torch import Tensor

from hago.ops._rule import ONE_ADDITION, Attrs, IntegerForm, OpRule, Refusal, Sample
from hago.ops._shared import binary, sum_bound
from hago.ops.forms.qlinear import qlinear_sum
from hago.ops.forms.requantizing import dequantized
from hago.ops.forms.rescaled import rescaled_sum
from hago.ops.forms.tflite import tflite_sum
from hago.ops.forms.tpu_mlir import tpu_mlir_sum

_COMMON_SCALE = IntegerForm(slots=("common",), bound=sum_bound, addends=ONE_ADDITION)


def _compute(attrs: Attrs, a: Tensor, b: Tensor) -> Tensor:
    return a + b


RULE = OpRule(
    name="add",
    aten=("aten.add.Tensor", "aten.add.Scalar"),
    parse=binary,
    compute=_compute,
    integer=_COMMON_SCALE,
    forms={
        "common_scale": _COMMON_SCALE,
        "rescaled": rescaled_sum(operator.add),
        "tflite": tflite_sum((1, 1)),
        "tpu_mlir": tpu_mlir_sum((1, 1)),
        "dequantize": dequantized(_compute),
        "qlinear": qlinear_sum(),
    },
    any_layout=True,
    samples=(
        Sample(operator.add, ((2, 3, 4, 4), (2, 3, 4, 4))),
        Sample(operator.add, ((2, 3, 4, 4), (3, 1, 1)), consts=(1,)),
        Sample(lambda x: x + 1.5, ((2, 5),)),
    ),
    refuses=(Refusal({}, ((1, 3), (1, 4)), "shape"),),
)
